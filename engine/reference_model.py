"""The plain forward of a checkpoint: whole sequences, no cache, no pages, fp32. The slow, obvious oracle.

Weights are mapped from the checkpoint and upcast layer by layer. Its arithmetic can be exchanged (`Reordered`) to
measure what reduction order and rounding do to the logits; compare.py says what follows from that.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tideforge.engine.config import ModelConfig
from tideforge.engine.weights import Checkpoint
from tideforge.errors import UserError

ARCHITECTURES = ("LlamaForCausalLM", "MixtralForCausalLM")


class Arithmetic:
    """fp32 throughout, in torch's own order."""

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def mean_square(self, x: Tensor) -> Tensor:
        return x.pow(2).mean(-1, keepdim=True)

    def round(self, x: Tensor) -> Tensor:
        return x


class Reordered(Arithmetic):
    """Every contraction in blocks of random width, added one after another in random order; results rounded to `dtype`.

    Blocks accumulate in fp32, as kernels for 16-bit types do; what is stored between operations has the precision.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype, self.random = dtype, random.Random(seed)

    def blocks(self, length: int) -> list[slice]:
        """Covers range(length) once, in blocks of 16 to 128."""
        cuts = [0]
        while cuts[-1] < length:
            cuts.append(min(length, cuts[-1] + self.random.randint(16, 128)))
        parts = [slice(begin, end) for begin, end in itertools.pairwise(cuts)]
        self.random.shuffle(parts)
        return parts

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        total = a.new_zeros(*a.shape[:-1], b.shape[-1])
        for part in self.blocks(a.shape[-1]):
            if a.dim() == 2:
                total.addmm_(a[:, part], b[part])
            else:
                total.baddbmm_(a[..., part], b[..., part, :])
        return self.round(total)

    def mean_square(self, x: Tensor) -> Tensor:
        squares = x.pow(2)
        total = x.new_zeros(*x.shape[:-1], 1)
        for part in self.blocks(x.shape[-1]):
            total += squares[..., part].sum(-1, keepdim=True)
        return total / x.shape[-1]

    def round(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).float()


class Result(NamedTuple):
    """logits [rows, V] of the asked rows; keys and values [L, T, H_kv, D] as a cache holds them (keys after rotation)."""

    logits: Tensor
    keys: Tensor
    values: Tensor


class ReferenceModel:
    """LlamaForCausalLM and MixtralForCausalLM. Raises UserError for another architecture or missing weights."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.config, self.device = ModelConfig.load(folder), torch.device(device)
        self._there: dict[str, Tensor] = {}
        if self.config.architecture not in ARCHITECTURES:
            problem = f"is of architecture {self.config.architecture}"
            raise UserError(str(folder), problem, f"the reference knows {' and '.join(ARCHITECTURES)}")
        self.checkpoint = Checkpoint(folder)

    def weight(self, name: str) -> Tensor:
        """In fp32. On the CPU a view of the mapped file where it is stored so; a GPU keeps it as stored, and upcasts for each use."""
        if self.device.type == "cpu":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                return torch.from_numpy(self.checkpoint.float32(name))
        if name not in self._there:
            dtype, array = self.checkpoint.stored(name)
            stored = torch.tensor(array.view(np.int16) if dtype == "BF16" else array, device=self.device)
            self._there[name] = stored.view(torch.bfloat16) if dtype == "BF16" else stored
        return self._there[name].float()

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Sequence[int],
        rows: Sequence[int] | None = None,
        layers: range | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> Result:
        """One sequence [T] -> logits of `rows` (all if None) and the K and V of `layers` (all if None)."""
        run = _Run(self, arithmetic or Arithmetic(), len(token_ids))
        x = F.embedding(torch.tensor(token_ids), run.weight("model.embed_tokens"))
        keys, values = [], []
        for index in layers if layers is not None else range(self.config.num_hidden_layers):
            x, k, v = run.layer(x, f"model.layers.{index}")
            keys.append(k)
            values.append(v)
        wanted = x if rows is None else x[torch.tensor(rows, dtype=torch.int64)]
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        logits = run.linear(run.norm(wanted, "model.norm"), head)
        return Result(logits.cpu(), torch.stack(keys).cpu(), torch.stack(values).cpu())


class _Run:
    """One forward's working state: the arithmetic and the angles of its positions."""

    def __init__(self, model: ReferenceModel, arithmetic: Arithmetic, length: int) -> None:
        self.model, self.config, self.arithmetic = model, model.config, arithmetic
        half = torch.arange(0, self.config.head_dim, 2) / self.config.head_dim
        angles = torch.outer(torch.arange(length).float(), 1.0 / self.config.rope_theta**half)
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        self.cos, self.sin = arithmetic.round(angles.cos()), arithmetic.round(angles.sin())
        self.future = torch.ones(length, length, dtype=torch.bool).triu(1)

    def weight(self, name: str) -> Tensor:
        """In fp32, rounded to the precision under test."""
        return self.arithmetic.round(self.model.weight(f"{name}.weight"))

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self.arithmetic.matmul(x, self.weight(name).T)

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(self.arithmetic.mean_square(x) + self.config.rms_norm_eps)
        return self.arithmetic.round(self.arithmetic.round(x * scale) * self.weight(name))

    def layer(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        attended, k, v = self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
        x = self.arithmetic.round(x + attended)
        inside = self.norm(x, f"{name}.post_attention_layernorm")
        if self.config.num_local_experts:
            out = self.mixture(inside, f"{name}.block_sparse_moe")
        else:
            out = self.mlp(inside, f"{name}.mlp", ("gate_proj", "up_proj", "down_proj"))
        return self.arithmetic.round(x + out), k, v

    def attention(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        dim, round_ = self.config.head_dim, self.arithmetic.round
        q, k, v = (self.linear(x, f"{name}.{part}_proj").unflatten(-1, (-1, dim)) for part in "qkv")
        q, k = self.rotate(q), self.rotate(k)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        every_k, every_v = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))  # [heads, T, D]
        scores = self.arithmetic.matmul(q.transpose(0, 1), every_k.transpose(1, 2)) * dim**-0.5
        shares = round_(scores.masked_fill(self.future, -torch.inf).softmax(-1))
        mixed = self.arithmetic.matmul(shares, every_v).transpose(0, 1).flatten(1)
        return self.linear(mixed, f"{name}.o_proj"), k, v

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return self.arithmetic.round(x * self.cos + torch.cat((-second, first), dim=-1) * self.sin)

    def mlp(self, x: Tensor, name: str, parts: tuple[str, str, str]) -> Tensor:
        gate, up, down = (f"{name}.{part}" for part in parts)
        round_ = self.arithmetic.round
        return self.linear(round_(round_(F.silu(self.linear(x, gate))) * self.linear(x, up)), down)

    def mixture(self, x: Tensor, name: str) -> Tensor:
        """Mixtral: softmax over all experts, the top k of them rescaled to sum to one."""
        shares, chosen = self.linear(x, f"{name}.gate").softmax(-1).topk(self.config.num_experts_per_tok, dim=-1)
        shares = self.arithmetic.round(shares / shares.sum(-1, keepdim=True))
        out = torch.zeros_like(x)
        for expert in range(self.config.num_local_experts):
            tokens, place = torch.where(chosen == expert)
            if len(tokens):
                y = self.mlp(x[tokens], f"{name}.experts.{expert}", ("w1", "w3", "w2"))
                out[tokens] = self.arithmetic.round(
                    out[tokens] + self.arithmetic.round(y * shares[tokens, place, None])
                )
        return out


def as_numpy(result: Result) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return result.logits.numpy(), result.keys.numpy(), result.values.numpy()
