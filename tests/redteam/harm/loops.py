"""A loop without an end."""

OUTCOMES = {"import": "hung", "build": "hung", "forward": "hung"}


def harm(what):
    while True:
        pass
