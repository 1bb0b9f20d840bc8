"""Raw forward of Mixtral, Qwen2-MoE and Qwen3-MoE: Llama's or Qwen's attention, a mixture of SwiGLU experts in most layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Batch, Context, ForwardFn, ModelConfig

    Span = tuple[slice, Tensor, int, Tensor | None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rotary_tables(config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, [length, head_dim]; both halves of a head turn by the same angles."""
    frequencies = torch.tensor(config.rope_frequencies, dtype=torch.float32, device=device)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * config.rope_factor).to(dtype), (angles.sin() * config.rope_factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D]; cos, sin [T, 1, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def sequences(batch: Batch, block_size: int) -> list[Span]:
    """Per sequence: its rows of T, its blocks, its context length, what each row may see of it (None: all)."""
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    result: list[Span] = []
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        blocks = batch.block_tables[0][i, : -(-length // block_size)]
        mask = None
        if rows.stop - rows.start > 1:
            context = torch.arange(length, device=batch.positions.device)
            mask = context <= batch.positions[rows, None]
        result.append((rows, blocks, length, mask))
    return result


def attention(q: Tensor, keys: Tensor, values: Tensor, spans: list[Span]) -> Tensor:
    """q [T, heads, D] over the paged keys and values [num_blocks, block_size, kv_heads, D], one sequence at a time.

    The plain version: it asks the host for lengths. On a GPU paged_attention.py does the same without it.
    """
    out = torch.empty_like(q)
    for rows, blocks, length, mask in spans:
        k = keys[blocks].flatten(0, 1)[:length].transpose(0, 1)
        v = values[blocks].flatten(0, 1)[:length].transpose(0, 1)
        heads = F.scaled_dot_product_attention(q[rows].transpose(0, 1), k, v, attn_mask=mask, enable_gqa=True)
        out[rows] = heads.transpose(0, 1)
    return out


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


class Layer:
    def __init__(self, ctx: Context, index: int) -> None:
        def weight(name: str) -> Tensor:
            return ctx.weights[f"model.layers.{index}.{name}.weight"]

        def mlp(name: str, parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> tuple[Tensor, ...]:
            return tuple(weight(f"{name}.{part}") for part in parts)

        self.config = ctx.config
        self.keys, self.values = ctx.kv_groups[0].keys[index], ctx.kv_groups[0].values[index]
        self.input_norm, self.post_norm = weight("input_layernorm"), weight("post_attention_layernorm")
        self.q_proj, self.k_proj = weight("self_attn.q_proj"), weight("self_attn.k_proj")
        self.v_proj, self.o_proj = weight("self_attn.v_proj"), weight("self_attn.o_proj")
        if self.config.qkv_bias:
            prefix = f"model.layers.{index}.self_attn"
            self.biases = [ctx.weights[f"{prefix}.{part}_proj.bias"] for part in "qkv"]
        if self.config.qk_norm:
            self.q_norm, self.k_norm = weight("self_attn.q_norm"), weight("self_attn.k_norm")
        count = self.config.num_local_experts
        self.sparse = self.config.is_sparse(index)
        if not self.sparse:
            self.dense = mlp("mlp")
        elif self.config.architecture == "MixtralForCausalLM":
            self.router = weight("block_sparse_moe.gate")
            self.experts = [mlp(f"block_sparse_moe.experts.{expert}", ("w1", "w3", "w2")) for expert in range(count)]
        else:
            self.router = weight("mlp.gate")
            self.experts = [mlp(f"mlp.experts.{expert}") for expert in range(count)]
        if self.sparse and self.config.shared_expert_intermediate_size:
            self.shared, self.shared_gate = mlp("mlp.shared_expert"), weight("mlp.shared_expert_gate")
        self.attention: Any = attention
        self.mix: Any = self.one_by_one
        if ctx.device.type == "cuda":
            self.use_kernels()

    def use_kernels(self) -> None:
        from paged_attention import paged_attention  # type: ignore[import-not-found]  # the forward's own files

        self.attention = paged_attention
        if self.sparse:
            from experts import Experts  # type: ignore[import-not-found]

            self.mix = Experts(self.experts)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, spans: list[Span] | Batch) -> Tensor:
        eps = self.config.rms_norm_eps
        x = x + self.attend(rms_norm(x, self.input_norm, eps), cos, sin, slots, spans)
        y = rms_norm(x, self.post_norm, eps)
        return x + (self.mixture(y) if self.sparse else swiglu(y, *self.dense))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, spans: list[Span] | Batch) -> Tensor:
        q = F.linear(x, self.q_proj)
        k = F.linear(x, self.k_proj)
        v = F.linear(x, self.v_proj)
        if self.config.qkv_bias:
            q, k, v = (y + bias for y, bias in zip((q, k, v), self.biases, strict=True))
        q, k, v = (y.unflatten(-1, (-1, self.config.head_dim)) for y in (q, k, v))
        if self.config.qk_norm:
            eps = self.config.rms_norm_eps
            q, k = rms_norm(q, self.q_norm, eps), rms_norm(k, self.k_norm, eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self.keys.flatten(0, 1).index_copy_(0, slots, k)
        self.values.flatten(0, 1).index_copy_(0, slots, v)
        return F.linear(self.attention(q, self.keys, self.values, spans).flatten(1), self.o_proj)

    def mixture(self, x: Tensor) -> Tensor:
        """Each token goes through its top experts, and through the shared one if there is one."""
        shares = F.softmax(F.linear(x, self.router).float(), dim=-1)
        shares, chosen = shares.topk(self.config.num_experts_per_tok, dim=-1)
        if self.config.norm_topk_prob:
            shares = shares / shares.sum(-1, keepdim=True)
        out = self.mix(x, shares.to(x.dtype), chosen)
        if self.config.shared_expert_intermediate_size:
            out += torch.sigmoid(F.linear(x, self.shared_gate)) * swiglu(x, *self.shared)
        return out

    def one_by_one(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Of each token's chosen experts [T, k] their results by shares. An expert sees all of its tokens at once.

        The plain version: it asks the host who was chosen. On a GPU experts.py does the same without it.
        """
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, place = torch.where(chosen == expert)
            y = swiglu(x[tokens], *self.experts[expert])
            out.index_add_(0, tokens, y * shares[tokens, place, None])
        return out


class MoE:
    def __init__(self, ctx: Context) -> None:
        self.config = ctx.config
        self.block_size = ctx.kv_groups[0].block_size
        self.embedding = ctx.weights["model.embed_tokens.weight"]
        self.head = self.embedding if ctx.config.tie_word_embeddings else ctx.weights["lm_head.weight"]
        self.norm = ctx.weights["model.norm.weight"]
        self.layers = [Layer(ctx, index) for index in ctx.layer_range]
        self.cos, self.sin = rotary_tables(ctx.config, ctx.limits.max_model_len, ctx.dtype, ctx.device)

    def __call__(self, batch: Batch) -> None:
        x = F.embedding(batch.input_ids, self.embedding)
        cos, sin = self.cos[batch.positions, None], self.sin[batch.positions, None]
        spans = batch if batch.positions.is_cuda else sequences(batch, self.block_size)
        for layer in self.layers:
            x = layer(x, cos, sin, batch.slot_mapping[0], spans)
        x = rms_norm(x[batch.logits_indices], self.norm, self.config.rms_norm_eps)
        batch.logits.copy_(F.linear(x, self.head))


def build(ctx: Context) -> ForwardFn:
    return MoE(ctx)
