"""An exception that ends a thread and that nobody waits for."""

import threading

OUTCOMES = {"import": "import_error", "build": "build_error", "forward": "forward_error"}


def fail():
    raise BaseException("on purpose")


def harm(what):
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
