"""SIGKILL to whatever started it."""

import os
import signal
import time

OUTCOMES = {"build": "crashed", "forward": "crashed"}


def harm(what):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)
