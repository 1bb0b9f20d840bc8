"""An exception whose text is one more exception."""

OUTCOMES = {"build": "build_error", "forward": "forward_error"}


class Mute(Exception):
    def __str__(self):
        raise self


def harm(what):
    raise Mute
