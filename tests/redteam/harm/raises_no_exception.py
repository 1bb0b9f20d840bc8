"""What `except Exception` does not catch."""

OUTCOMES = {"import": "import_error", "build": "build_error", "forward": "forward_error", "after": "forward_error"}


def harm(what):
    raise BaseException("on purpose")
