"""10 GB into files of 8 MB."""

import os
from pathlib import Path

OUTCOMES = {"build": "too_much_output", "forward": "too_much_output"}


def harm(what):
    for index in range(1250):
        Path(f"{os.getpid()}-{index}").write_bytes(b"x" * 8_000_000)
