"""Raw forward of DeepSeek-V3 and Kimi-K2: attention over compressed keys and values, experts chosen group by group.

A token's cache is one latent that all heads share, kept as its key, and one rotated part, kept as its value. Queries are
taken into the latents' space and results out of it, so that no step expands the cache into keys and values of each head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Batch, Context, ForwardFn, ModelConfig

    Span = tuple[slice, Tensor, int, Tensor | None]

LATENT_EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps says


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


def attention(q: Tensor, keys: Tensor, values: Tensor, spans: list[Span], scale: float) -> Tensor:
    """q [T, heads, R + D] over paged latents [num_blocks, block_size, 1, R] and rotated parts [.., 1, D] -> [T, heads, R].

    A token's key is both side by side, its value the latent alone. The plain version: it asks the host for lengths. On a GPU
    latent_attention.py does the same without it.
    """
    out = torch.empty_like(q[..., : keys.shape[-1]])
    for rows, blocks, length, mask in spans:
        latent = keys[blocks].flatten(0, 1)[:length].transpose(0, 1)
        k = torch.cat((latent, values[blocks].flatten(0, 1)[:length].transpose(0, 1)), dim=-1)
        heads = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1), k, latent, attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[rows] = heads.transpose(0, 1)
    return out


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


class Layer:
    def __init__(self, ctx: Context, index: int) -> None:
        def weight(name: str) -> Tensor:
            return ctx.weights[f"model.layers.{index}.{name}.weight"]

        def mlp(name: str) -> tuple[Tensor, ...]:
            return tuple(weight(f"mlp.{name}{part}") for part in ("gate_proj", "up_proj", "down_proj"))

        config = self.config = ctx.config
        self.keys, self.values = ctx.kv_groups[0].keys[index], ctx.kv_groups[0].values[index]
        self.input_norm, self.post_norm = weight("input_layernorm"), weight("post_attention_layernorm")
        if config.q_lora_rank:
            self.q_a_proj, self.q_a_norm = weight("self_attn.q_a_proj"), weight("self_attn.q_a_layernorm")
        self.q_proj = weight("self_attn.q_b_proj" if config.q_lora_rank else "self_attn.q_proj")
        self.kv_a_proj, self.kv_a_norm = weight("self_attn.kv_a_proj_with_mqa"), weight("self_attn.kv_a_layernorm")
        both = weight("self_attn.kv_b_proj").unflatten(0, (config.num_attention_heads, -1))
        self.key_up, self.value_up = both.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        self.o_proj = weight("self_attn.o_proj")
        self.sparse = config.is_sparse(index)
        if self.sparse:
            self.router, self.bias = (
                weight("mlp.gate"),
                ctx.weights[f"model.layers.{index}.mlp.gate.e_score_correction_bias"],
            )
            self.experts = [mlp(f"experts.{expert}.") for expert in range(config.num_local_experts)]
        self.always = mlp("shared_experts." if self.sparse else "")  # in a dense layer all there is
        self.attention: Any = attention
        self.mix: Any = self.one_by_one
        if ctx.device.type == "cuda":
            self.use_kernels()

    def use_kernels(self) -> None:
        from latent_attention import latent_attention  # type: ignore[import-not-found]  # the forward's own files

        self.attention = latent_attention
        if self.sparse:
            from experts import Experts  # type: ignore[import-not-found]

            self.mix = Experts(self.experts)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, spans: list[Span] | Batch) -> Tensor:
        eps = self.config.rms_norm_eps
        x = x + self.attend(rms_norm(x, self.input_norm, eps), cos, sin, slots, spans)
        y = rms_norm(x, self.post_norm, eps)
        out = x + swiglu(y, *self.always)
        return out + self.mix(y, *self.choose(y)) if self.sparse else out

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, spans: list[Span] | Batch) -> Tensor:
        config = self.config
        q, (latent, key) = (
            self.queries(x),
            F.linear(x, self.kv_a_proj).split([config.kv_lora_rank, config.head_dim], dim=-1),
        )
        plain, turned = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        if config.rope_interleave:
            turned, key = (torch.cat((y[..., 0::2], y[..., 1::2]), dim=-1) for y in (turned, key))
        turned, key = rotate(turned, cos, sin), rotate(key[:, None], cos, sin)
        latent = rms_norm(latent, self.kv_a_norm, LATENT_EPS)
        self.keys.flatten(0, 1).index_copy_(0, slots, latent[:, None])
        self.values.flatten(0, 1).index_copy_(0, slots, key)
        q = torch.cat((torch.einsum("thd,hdr->thr", plain, self.key_up), turned), dim=-1)
        out = self.attention(q, self.keys, self.values, spans, config.attention_scale)
        return F.linear(torch.einsum("thr,hdr->thd", out, self.value_up).flatten(1), self.o_proj)

    def queries(self, x: Tensor) -> Tensor:
        if self.config.q_lora_rank:
            x = rms_norm(F.linear(x, self.q_a_proj), self.q_a_norm, LATENT_EPS)
        return F.linear(x, self.q_proj).unflatten(-1, (self.config.num_attention_heads, -1))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares and experts of each token, [T, num_experts_per_tok]. The bias moves the choice, not the shares."""
        config = self.config
        scores = F.linear(x.float(), self.router.float()).sigmoid()
        ranks = (scores + self.bias.float()).unflatten(-1, (config.n_group, -1))
        groups = ranks.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
        closed = torch.ones_like(ranks[..., 0], dtype=torch.bool).scatter(1, groups, False)
        ranks = ranks.masked_fill(closed[..., None], -torch.inf).flatten(1)
        chosen = ranks.topk(config.num_experts_per_tok, dim=-1).indices
        shares = scores.gather(1, chosen)
        if config.norm_topk_prob:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return (shares * config.routed_scaling_factor).to(x.dtype), chosen

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


class DeepSeek:
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
    return DeepSeek(ctx)
