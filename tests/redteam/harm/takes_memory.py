"""All the memory that can be had."""

OUTCOMES = {"import": "out_of_memory", "build": "out_of_memory", "forward": "out_of_memory"}


def harm(what):
    held = []
    while True:
        held.append(bytearray(b"x") * (16 << 20))
