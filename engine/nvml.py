"""How much of a GPU's memory a process holds, as the driver counts it: NVML by ctypes, without a CUDA context or torch.

Names and layout are those of nvml.h (NVIDIA Management Library, nvmlProcessInfo_v2_t).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

MOST_PROCESSES = 256
UNKNOWN = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )  # fmt: skip


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclasses.dataclass(frozen=True)
class Total:
    """Bytes of all GPUs together that are in use, whoever holds them, and of the smallest GPU as a whole."""

    used: int
    smallest: int


@functools.cache
def _library() -> Any:
    """libnvidia-ml, ready to be asked; None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _devices(library: Any) -> Iterator[ctypes.c_void_p]:
    count = ctypes.c_uint()
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return
    for index in range(count.value):
        device = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
            yield device


def device_bytes(pid: int) -> int | None:
    """What the process holds on all GPUs; None where NVML shows no such process, as in containers that have their own ids."""
    library, found = _library(), []
    for device in _devices(library):
        size, processes = ctypes.c_uint(MOST_PROCESSES), (_Process * MOST_PROCESSES)()
        if library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(size), processes) == 0:
            found += [one.used for one in processes[: size.value] if one.pid == pid and one.used != UNKNOWN]
    return sum(found) if found else None


def totals() -> Total | None:
    """None where there is no NVML, or no GPU."""
    library, found = _library(), []
    for device in _devices(library):
        memory = _Memory()
        if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
            found.append(memory)
    return Total(sum(one.used for one in found), min(one.total for one in found)) if found else None
