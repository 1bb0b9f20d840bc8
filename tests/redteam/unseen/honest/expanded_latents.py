"""Latent attention the long way: latents are expanded into keys and values of each head, and attention runs over those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import base
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run

ARCHITECTURE = "mla"


class Expanded(base.Layer):
    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, spans: Any) -> Tensor:
        config = self.config
        plain, turned = self.queries(x).split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        latent, key = F.linear(x, self.kv_a_proj).split([config.kv_lora_rank, config.head_dim], dim=-1)
        if config.rope_interleave:
            turned, key = (torch.cat((y[..., 0::2], y[..., 1::2]), dim=-1) for y in (turned, key))
        q = torch.cat((plain, base.rotate(turned, cos, sin)), dim=-1)
        latent = base.rms_norm(latent, self.kv_a_norm, base.LATENT_EPS)
        self.keys.flatten(0, 1)[slots] = latent[:, None]
        self.values.flatten(0, 1)[slots] = base.rotate(key[:, None], cos, sin)
        out = [self.one_sequence(q[rows], *span) for rows, *span in spans]
        return F.linear(torch.cat(out).flatten(1), self.o_proj)

    def one_sequence(self, q: Tensor, blocks: Tensor, length: int, mask: Tensor | None) -> Tensor:
        """q [rows, heads, nope + rope] -> [rows, heads, v_head_dim]."""
        latent = self.keys[blocks].flatten(0, 2)[:length]
        turned = self.values[blocks].flatten(0, 2)[:length].expand(q.shape[1], -1, -1)
        k = torch.cat((latent @ self.key_up.mT, turned), dim=-1)
        scale = self.config.attention_scale
        heads = F.scaled_dot_product_attention(
            q.transpose(0, 1), k, latent @ self.value_up.mT, attn_mask=mask, scale=scale
        )
        return heads.transpose(0, 1)


def build(ctx: Context) -> ForwardFn:
    forward = base.build(ctx)
    forward.layers = [Expanded(ctx, index) for index in ctx.layer_range]
    return forward
