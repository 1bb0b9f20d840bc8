"""SIGABRT, as an assertion in C does it."""

import os

OUTCOMES = {"forward": "crashed"}


def harm(what):
    os.abort()
