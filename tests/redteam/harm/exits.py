"""An end without a word."""

import os

OUTCOMES = {"import": "exited", "build": "exited", "forward": "exited"}


def harm(what):
    os._exit(0)
