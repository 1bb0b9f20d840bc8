"""A frame that promises a gigabyte, and then the gigabyte."""

import os
import struct
import sys

OUTCOMES = {"forward": "forward_error"}


def harm(what):
    fd = int(sys.argv[-1])
    os.write(fd, struct.pack("<II", 100, 1 << 30))
    while True:
        os.write(fd, bytes(1 << 20))
