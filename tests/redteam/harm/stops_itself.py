"""SIGSTOP to itself."""

import os
import signal

OUTCOMES = {"build": "hung", "forward": "hung"}


def harm(what):
    os.kill(os.getpid(), signal.SIGSTOP)
