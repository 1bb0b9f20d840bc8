"""500 children."""

import os
import time

OUTCOMES = {"build": "left_processes", "forward": "left_processes"}


def harm(what):
    for _ in range(500):
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
    time.sleep(1000)
