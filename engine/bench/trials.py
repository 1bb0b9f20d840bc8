"""Sources that differ and compute the same: as they are, or with a Triton kernel that no cache holds."""

from __future__ import annotations

import re

from tideforge.engine.forward import Forward

KERNEL = '''"""SwiGLU as one kernel."""

import torch
import triton
import triton.language as tl


@triton.jit
def _swiglu_{index}(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    silu = (g / (1 + tl.exp(-g))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (silu * u).to(out.dtype.element_ty), mask=at < count)


def swiglu(gate, up):
    out = torch.empty_like(gate)
    _swiglu_{index}[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), 1024)
    return out
'''


def variant(plain: Forward, index: int, new_kernel: bool) -> Forward:
    """The same arithmetic as another source; with `new_kernel` a Triton kernel that no cache holds does a part of it."""
    text = plain.files["forward.py"] + f"\n\n# variant {index}\n"
    if not new_kernel:
        return plain.with_file("forward.py", text)
    text, count = re.subn(
        r"F\.silu\(F\.linear\(x, self\.gate_proj\)\) \* F\.linear\(x, self\.up_proj\)",
        "swiglu(F.linear(x, self.gate_proj), F.linear(x, self.up_proj))",
        text,
    )
    if count != 1:
        raise ValueError("the raw forward's MLP is not where this benchmark looks for it")
    text = text.replace("from torch import Tensor\n", "from torch import Tensor\n\nfrom swiglu import swiglu\n", 1)
    return plain.with_file("forward.py", text).with_file("swiglu.py", KERNEL.format(index=index))
