"""Bytes of its own on the socket to the engine."""

import os
import sys

OUTCOMES = {"build": "forward_error", "forward": "forward_error"}


def harm(what):
    os.write(int(sys.argv[-1]), b"\xff" * 64)
