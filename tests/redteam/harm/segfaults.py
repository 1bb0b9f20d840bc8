"""A load from address 0."""

import ctypes

OUTCOMES = {"import": "crashed", "build": "crashed", "forward": "crashed"}


def harm(what):
    ctypes.string_at(0)
