"""JSON so deep that a parser gives up."""

import os
import struct
import sys

OUTCOMES = {"forward": "forward_error"}


def harm(what):
    text = b"[" * 100_000
    os.write(int(sys.argv[-1]), struct.pack("<II", len(text), 0) + text)
