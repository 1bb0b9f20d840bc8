"""A signal that has no name."""

import os

OUTCOMES = {"forward": "crashed"}


def harm(what):
    os.kill(os.getpid(), 40)
