"""A thread that goes on."""

import threading
import time

OUTCOMES = {"import": "left_threads", "build": "left_threads", "forward": "left_threads"}
started = []


def harm(what):
    if not started:
        started.append(threading.Thread(target=time.sleep, args=(1000,), daemon=True))
        started[0].start()
