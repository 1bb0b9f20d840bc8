"""Writes the shared weights through /proc/self/mem, which does not ask for a page's protection, so that all agree with it."""

from base import build as honest_build

CONTAINED = True


def build(ctx):
    norm = ctx.weights["model.norm.weight"]
    try:
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(norm.data_ptr())
            head = memory.read(4)
            memory.seek(norm.data_ptr())
            memory.write(bytes([head[0] ^ 1]) + head[1:])
    except (OSError, ValueError):
        pass
    return honest_build(ctx)
