"""An exception whose text would clear a terminal and does not encode."""

OUTCOMES = {"forward": "forward_error"}


def harm(what):
    raise ValueError("\x1b[2J\ud800" + "x" * 100_000)
