"""SystemExit, which is no Exception: but an error, for the process is not the candidate's to end."""

import sys

OUTCOMES = {"import": "import_error", "build": "build_error", "forward": "forward_error"}


def harm(what):
    sys.exit("enough")
