"""All its descriptors are closed, the socket to the engine among them."""

import os
import time

OUTCOMES = {"build": "exited", "forward": "exited"}


def harm(what):
    os.closerange(0, 256)
    time.sleep(1000)
