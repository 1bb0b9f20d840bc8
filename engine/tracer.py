"""Tells a store into the weights from other crashes: the kernel hands the address of a fault to whoever traces the process.

ptrace(2) with PTRACE_SEIZE costs the traced process nothing but at a signal or a new thread. Where it is not allowed (an
old container's filter, yama's ptrace_scope 2 or 3) such a store is a plain crash.
"""

from __future__ import annotations

import ctypes
import os
import signal

from tideforge.engine import procfs

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.restype = ctypes.c_long
_LIBC.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
# Linux, ptrace(2)
_CONT, _GETSIGINFO, _SEIZE, _LISTEN = 7, 0x4202, 0x4206, 0x4208
_TRACECLONE, _EXITKILL = 0x8, 0x100000
_EVENT_STOP = 128
_JOB_STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_NO_ACCESS = 2  # SEGV_ACCERR of <asm-generic/siginfo.h>: the page is there, the access is not allowed


class Tracer:
    """Follows all threads of `pid`. `faults` counts accesses that the mapping named `segment` refused."""

    def __init__(self, pid: int, segment: str) -> None:
        self.segment, self.faults = segment, 0
        self.on = self._ask(_SEIZE, pid, data=_TRACECLONE | _EXITKILL)

    @staticmethod
    def _ask(request: int, pid: int, address: int = 0, data: int = 0) -> bool:
        return int(_LIBC.ptrace(request, pid, address, data)) == 0

    def resume(self, pid: int, status: int) -> None:
        """Lets a thread that waitpid(2) reported as stopped go on, with its signal if it had one."""
        number, event = os.WSTOPSIG(status), status >> 16
        if event == _EVENT_STOP and number in _JOB_STOPS:
            self._ask(_LISTEN, pid)  # it stays stopped, as whoever sent the signal wants
            return
        if event == 0 and number == signal.SIGSEGV and self._refused(pid):
            self.faults += 1
        self._ask(_CONT, pid, data=0 if event else number)

    def _refused(self, pid: int) -> bool:
        info = (ctypes.c_int * 32)()
        if not self._ask(_GETSIGINFO, pid, data=ctypes.addressof(info)):
            return False
        address = int.from_bytes(bytes(info)[16:24], "little")
        return info[2] == _NO_ACCESS and self.segment in procfs.mapping_of(pid, address)
