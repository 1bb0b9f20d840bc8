"""The nursery: a process that has imported all that a worker needs and forks wardens, whose workers so start at once.

It runs no candidate code, starts no thread, and asks nothing of CUDA, whose state does not survive a fork. Its environment
holds no more than a worker's may.

`python -m tideforge.engine.nursery --fd FD [--confined]`; the latter in a sandbox. A request is {"type": "bear"} with the fields
of `warden.Charge`, and as descriptors the warden's control socket and the worker's socket; the answer {"type": "born"} has
pidfds of the warden and of the nursery itself, whose process ids mean nothing outside a sandbox. It ends with its own socket.
Its wardens and their workers do not depend on it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import selectors
import socket

from tideforge.engine import protocol, warden, worker
from tideforge.engine.confine import forbid_user_namespaces
from tideforge.engine.forked import run_as_program
from tideforge.errors import PeerGone

# triton imports the latter when it compiles its first kernel.
COMPILER = ("triton", "triton.compiler.code_generator", "triton.language.extra.cuda", "triton.language.extra.libdevice")


def serve(sock: socket.socket) -> None:
    """Raises PeerGone at the end of the socket. In the forked processes this never returns."""
    selector = selectors.DefaultSelector()
    selector.register(sock, selectors.EVENT_READ)
    itself = os.pidfd_open(os.getpid())
    while True:
        for key, _ in selector.select():
            if key.fileobj is sock:
                pid = bear(protocol.recv(sock))
                pidfd = os.pidfd_open(pid)
                selector.register(pidfd, selectors.EVENT_READ, pid)
                protocol.send(sock, {"type": "born"}, fds=[pidfd, itself])
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
                os.waitpid(key.data, 0)


def bear(request: protocol.Message) -> int:
    """A new warden's process id."""
    control, theirs = request.fds
    charge = warden.Charge.of(request.header)
    pid = os.fork()
    if pid == 0:
        run_as_program(lambda: warden.watch(control, theirs, charge, worker.live))
    os.close(control)
    os.close(theirs)
    return pid


def main() -> None:
    parser = argparse.ArgumentParser(description="fork wardens and their workers")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the authority")
    parser.add_argument("--confined", action="store_true", help="it runs in a sandbox")
    args = parser.parse_args()
    if args.confined:
        forbid_user_namespaces()
    for name in COMPILER:
        with contextlib.suppress(ImportError):  # a forward that needs it says so itself
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that collections in the children leave the shared pages alone
    with socket.socket(fileno=args.fd) as sock, contextlib.suppress(PeerGone):
        serve(sock)


if __name__ == "__main__":
    main()
