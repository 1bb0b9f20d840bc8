"""The inner half of a worker's sandbox (sandbox.py is the outer one): what a worker does to itself before it meets a candidate.

It runs inside bubblewrap, as a process that still holds capabilities over that sandbox. Standard library only, because the
warden uses it. `python -m tideforge.engine.confine FOLDER [--cuda] --read FILE...` tries all of it once and ends with
0, or with a line that says what was refused.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import sys
from collections.abc import Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)
# Linux, <linux/sched.h>, <linux/mount.h>, <linux/prctl.h>, <linux/capability.h>
_NEWNS, _NEWUTS, _NEWIPC, _NEWPID, _NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_CAPBSET_DROP, _NO_NEW_PRIVS, _CAP_AMBIENT, _CLEAR_ALL = 24, 38, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
# What the owner of a machine may write below /proc without any capability.
KERNELS = ("acpi", "bus", "driver", "fs", "irq", "scsi", "sys", "sysrq-trigger", "tty")
SMALL = "size=4k,nr_inodes=16,mode=755"
TEMPORARY = "size=64m,nr_inodes=4096,mode=1777"
NEEDED = ("torch", "numpy", "tideforge.engine.worker")


def require_pid_namespace() -> bool:
    """Children that the calling process starts from now on live in a process namespace of their own. Raises OSError."""
    _check(_LIBC.unshare(_NEWPID), "a process namespace of its own")
    return True


def confine(own: str, hidden: Sequence[str] = ()) -> None:
    """From now on the calling process sees only itself and its children, writes only in `own` (and in a /tmp and a
    /dev/shm of its own), reaches no network and no other worker, sees nothing in the `hidden` folders, and has no capability.

    It is single-threaded and, but for the first one, alone in its process namespace. OSError names what was refused.
    """
    _check(_LIBC.unshare(_NEWNS | _NEWUTS | _NEWIPC | _NEWNET), "namespaces of its own")
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    for name in KERNELS:
        if os.path.exists(path := f"/proc/{name}"):
            _mount(path, path, None, _BIND | _REC)
            _mount(None, path, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | _NOEXEC)
    _keep_only(own)
    for folder in hidden:
        _mount("tmpfs", folder, "tmpfs", _RDONLY | _NOSUID | _NODEV, SMALL)
    for folder in ("/tmp", "/dev/shm"):
        _make_private(folder)
    os.chdir(own)  # the old working folder still belongs to the mounts beneath
    drop_capabilities()


def _keep_only(own: str) -> None:
    """Covers the folder that `own` lies in, so that of what is in it only `own` is there."""
    above, held = os.path.dirname(own), os.open(own, os.O_PATH | os.O_DIRECTORY)
    _mount("tmpfs", above, "tmpfs", _NOSUID | _NODEV, SMALL)
    os.mkdir(own)
    _mount(f"/proc/self/fd/{held}", own, None, _BIND)
    _mount(None, above, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.close(held)


def _make_private(folder: str) -> None:
    """Gives the calling process a folder of its own to write in, with what was bound into the old one as it was."""
    held = {name: os.open(f"{folder}/{name}", os.O_PATH) for name in os.listdir(folder)}
    _mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, TEMPORARY)
    for name, fd in held.items():
        path, source = f"{folder}/{name}", f"/proc/self/fd/{fd}"
        if os.path.isdir(source):
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o400))
        _mount(source, path, None, _BIND | _REC)  # read-only where it was
        os.close(fd)


def drop_capabilities() -> None:
    """For good, also for whatever the calling process may execute."""
    for number in range(64):
        if _LIBC.prctl(_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break  # there are no more
    _check(_LIBC.prctl(_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0), "to clear the ambient capabilities")
    _check(_LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_LIBC.capset(header, (ctypes.c_uint32 * 6)()), "to drop all capabilities")


def forbid_user_namespaces() -> None:
    """In the user namespace of the caller: a process without capabilities could make one and have all of them in there."""
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind, options)]
    _check(_LIBC.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"to mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def require_cuda() -> None:
    """Raises OSError when CUDA's driver does not start in the calling process."""
    if code := ctypes.CDLL("libcuda.so.1").cuInit(0):
        raise OSError(code, f"CUDA's driver does not start in there (cuInit gives {code})")


def attempt(folder: str, needed: Sequence[str], cuda: bool) -> None:
    """All that a worker will do, in a child that ends. Raises OSError with what was refused."""
    for path in needed:
        with open(path, "rb"):
            pass
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise OSError(f"{', '.join(missing)} is not among the folders that workers may read")
    forbid_user_namespaces()
    require_pid_namespace()
    own = os.path.join(folder, "attempt")
    os.makedirs(own, exist_ok=True)
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            confine(own)
            if cuda:
                require_cuda()
        except OSError as error:
            os.write(write, str(error.strerror or error).encode()[:200])
            os._exit(1)
        os._exit(0)
    os.close(write)
    failed = os.waitpid(pid, 0)[1] != 0
    told = os.read(read, 200).decode()
    os.rmdir(own)
    if failed:
        raise OSError(told or "it died")


def main() -> None:
    parser = argparse.ArgumentParser(description="try whether a worker can be confined here")
    parser.add_argument("folder")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--read", nargs="*", default=[])
    args = parser.parse_args()
    try:
        attempt(args.folder, args.read, args.cuda)
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
