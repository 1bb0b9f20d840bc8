"""An exception."""

OUTCOMES = {"import": "import_error", "build": "build_error", "forward": "forward_error"}


def harm(what):
    raise ValueError("on purpose")
