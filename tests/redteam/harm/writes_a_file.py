"""10 GB into one file."""

import tempfile

OUTCOMES = {"build": "too_much_output", "forward": "too_much_output"}


def harm(what):
    with tempfile.TemporaryFile(buffering=0) as file:
        for _ in range(10_000):
            file.write(b"x" * 1_000_000)
