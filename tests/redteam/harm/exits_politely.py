"""SystemExit, which is no Exception."""

import sys

OUTCOMES = {"import": "exited", "build": "exited", "forward": "exited"}


def harm(what):
    sys.exit("enough")
