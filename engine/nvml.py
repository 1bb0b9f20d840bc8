"""How much of a GPU's memory a process holds, as the driver counts it: NVML by ctypes, without a CUDA context or torch.

Names and layout are those of nvml.h (NVIDIA Management Library, nvmlProcessInfo_v2_t).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

MOST_PROCESSES = 256
UNKNOWN = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )  # fmt: skip


@functools.cache
def _library() -> Any:
    """libnvidia-ml, ready to be asked; None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def device_bytes(pid: int) -> int | None:
    """What the process holds on all GPUs; None where NVML shows no such process, as in containers that have their own ids."""
    library, count, found = _library(), ctypes.c_uint(), []
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return None
    for index in range(count.value):
        device, size, processes = ctypes.c_void_p(), ctypes.c_uint(MOST_PROCESSES), (_Process * MOST_PROCESSES)()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
            continue
        if library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(size), processes) == 0:
            found += [one.used for one in processes[: size.value] if one.pid == pid and one.used != UNKNOWN]
    return sum(found) if found else None
