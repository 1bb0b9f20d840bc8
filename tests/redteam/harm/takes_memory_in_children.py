"""Memory of four children, each within the limit."""

import os
import time

OUTCOMES = {"build": "out_of_memory"}
ON_GPU = {"build": ("out_of_memory", "hung")}  # where a worker may hold more than all four take


def harm(what):
    for _ in range(4):
        if os.fork() == 0:
            held = bytearray(b"x") * (600 << 20)
            time.sleep(1000)
            os._exit(len(held) and 0)
    time.sleep(1000)
