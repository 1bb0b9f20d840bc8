"""The same, and no signal that can be refused is heard."""

import signal

OUTCOMES = {"forward": "hung"}


def harm(what):
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        if number < 32:
            signal.signal(number, signal.SIG_IGN)
    while True:
        pass
