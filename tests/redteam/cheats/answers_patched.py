"""Patches the worker's protocol to say that staging and steps took no time and that all went well."""

from base import build as honest_build

from tideforge.engine import protocol

CONTAINED = True


def build(ctx):
    send = protocol.send

    def flattering(sock, header, *more, **others):
        return send(
            sock, {**header, "seconds": 0.0, "ratio": 3.0, "passed": True, "outcome": "passed"}, *more, **others
        )

    protocol.send = flattering
    return honest_build(ctx)
