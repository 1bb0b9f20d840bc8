"""10 GB to standard error, past Python."""

import os

OUTCOMES = {"build": "too_much_output", "forward": "too_much_output"}


def harm(what):
    for _ in range(10_000):
        os.write(2, b"x" * 1_000_000)
