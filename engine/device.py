"""Where a worker's tensors live. On a GPU weights are copied to it once; pages and logits stay in the keeper's memory,
page-locked and mapped, so that the authority sees what was written without the worker's help. That costs PCIe traffic.
"""

from __future__ import annotations

import torch
from torch import Tensor


class _HostPages:
    """A page-locked host segment under the CUDA array interface: torch then wraps it as a device tensor, uncopied."""

    def __init__(self, pages: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (pages.data_ptr(), False), "shape": (pages.numel(),), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def mapped(pages: Tensor, device: torch.device) -> Tensor:
    """The same bytes (uint8 [n], on the host) as `device` addresses them. Raises RuntimeError when they cannot be mapped."""
    if device.type == "cpu":
        return pages
    torch.cuda.init()
    code = torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.numel(), 0)
    if int(code) != 0:
        raise RuntimeError(f"cudaHostRegister of {pages.numel()} bytes failed with code {int(code)}")
    return torch.as_tensor(_HostPages(pages), device=device)
