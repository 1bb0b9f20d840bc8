"""Device memory that outlives its users: CUDA virtual memory, handed from process to process as file descriptors.

torch has no call for this, so libcuda's driver interface is called directly (CUDA Driver API, section Virtual Memory
Management). Memory mapped read-only faults on a store. A process may raise its own rights again, so that stops accidents,
not malice: weights are hashed after a trial.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_PINNED, _DEVICE, _POSIX_FD, _READ, _READ_WRITE = 1, 1, 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location), ("metadata", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 4),
    )  # fmt: skip


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def _call(name: str, *arguments: Any) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code != 0:
        raise RuntimeError(f"{name} failed with CUDA error {code}")


def _properties(device: torch.device) -> _Properties:
    return _Properties(_PINNED, _POSIX_FD, _Location(_DEVICE, device.index or 0))


def _padded(size: int, device: torch.device) -> int:
    step = ctypes.c_size_t()
    _call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(_properties(device)), 0)
    return -(-size // step.value) * step.value


def become_current(device: torch.device) -> None:
    """The calling thread's CUDA calls are the device's from now on; "cuda" is the first one."""
    torch.cuda.set_device(device.index or 0)
    torch.zeros(1, device=device)  # makes its primary context


def allocate(size: int, device: torch.device) -> tuple[int, Tensor]:
    """New memory of `size` bytes: a descriptor to hand over, and the bytes as a tensor, uint8 [size]. RuntimeError if none."""
    become_current(device)
    handle, fd = ctypes.c_ulonglong(), ctypes.c_int()
    padded = _padded(size, device)
    _call(
        "cuMemCreate",
        ctypes.byref(handle),
        ctypes.c_size_t(padded),
        ctypes.byref(_properties(device)),
        ctypes.c_ulonglong(0),
    )
    _call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _POSIX_FD, ctypes.c_ulonglong(0))
    return fd.value, _map(handle, size, device, writable=True)


def attach(fd: int, size: int, device: torch.device, writable: bool) -> Tensor:
    """The memory behind a descriptor, mapped into this process: uint8 [size]."""
    become_current(device)
    handle = ctypes.c_ulonglong()
    _call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), _POSIX_FD)
    return _map(handle, size, device, writable)


def _map(handle: ctypes.c_ulonglong, size: int, device: torch.device, writable: bool) -> Tensor:
    """Mapped for the life of the process; the handle goes back to the driver, the mapping holds the memory."""
    pointer, padded = ctypes.c_ulonglong(), ctypes.c_size_t(_padded(size, device))
    zero = ctypes.c_ulonglong(0)
    _call("cuMemAddressReserve", ctypes.byref(pointer), padded, ctypes.c_size_t(0), zero, zero)
    _call("cuMemMap", pointer, padded, ctypes.c_size_t(0), handle, zero)
    access = _Access(_Location(_DEVICE, device.index or 0), _READ_WRITE if writable else _READ)
    _call("cuMemSetAccess", pointer, padded, ctypes.byref(access), ctypes.c_size_t(1))
    _call("cuMemRelease", handle)
    return torch.as_tensor(_Bytes(pointer.value, size), device=device)


class _Bytes:
    """A range of device memory under the CUDA array interface: torch then wraps it, uncopied."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": (size,), "typestr": "|u1", "version": 3}


def prepare(device: torch.device) -> None:
    """One long-lived stream for all work of this process, on which cuBLAS has been used: both are needed to capture.

    Code that names no device, a candidate's or Triton's, means this one from now on.
    """
    become_current(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    square = torch.ones(16, 16, device=device)
    torch.mm(square, square)
    torch.cuda.synchronize(device)
