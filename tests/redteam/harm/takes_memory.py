"""All the memory that can be had. A fourth of it is touched, so that also a slow machine has given it before a step's deadline."""

OUTCOMES = {"import": "out_of_memory", "build": "out_of_memory", "forward": "out_of_memory"}


def harm(what):
    held = []
    while True:
        held.append(bytearray(b"x") * (16 << 20))
        held.append(bytes(48 << 20))
