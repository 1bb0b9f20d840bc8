"""Recursion without an end."""

OUTCOMES = {"import": "import_error", "build": "build_error", "forward": "forward_error"}


def harm(what):
    harm(what)
