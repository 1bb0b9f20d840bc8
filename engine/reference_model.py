"""The plain forward of a checkpoint: whole sequences, no cache, no pages, fp32. The slow, obvious oracle.

Weights are upcast where they are used; as stored they are kept on the device while there is room, else read or drawn anew. Its
arithmetic can be exchanged (`arithmetic.Reordered`) to measure what reduction order and rounding do to the logits; compare.py
says what follows from that. It shares the figures of config.json with the raw forwards and no arithmetic: angles, routing and
attention are spelled out here anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tideforge.engine import procfs
from tideforge.engine.arithmetic import Arithmetic
from tideforge.engine.config import ModelConfig
from tideforge.engine.perturb import Perturbed
from tideforge.engine.reference_rope import rope, yarn_temperature
from tideforge.engine.stored import Stored, open_folder

UPCAST = 1 << 28  # numbers of experts' weights that are in fp32 at once
LATENT_EPS = 1e-6  # of the norms inside latent attention: config.json does not name it
SWIGLU = ("gate_proj", "up_proj", "down_proj")


class Result(NamedTuple):
    """logits [rows, V] of the asked rows; keys and values [L, T, heads, dim] as a cache holds them (contract.KVGroup)."""

    logits: Tensor
    keys: Tensor
    values: Tensor


def room_on(device: torch.device) -> int:
    """Bytes of weights that the reference may keep: half of what is free, and at most three tenths of a GPU, where the
    keeper's copy may come later."""
    if device.type == "cpu":
        return procfs.available_bytes() // 2
    free, total = torch.cuda.mem_get_info(device)
    return min(free // 2, total * 3 // 10)


class ReferenceModel:
    """Every architecture that ModelConfig knows. Raises UserError for another one or for missing weights."""

    def __init__(self, folder: Path, device: str = "cpu", room: int | None = None) -> None:
        """`room`: bytes of weights to keep on the device."""
        self.config, self.device = ModelConfig.load(folder), torch.device(device)
        self.folder = folder
        self.source: Stored = open_folder(folder)
        self._room = room_on(self.device) if room is None else room
        self._kept: dict[str, Tensor] = {}

    def perturbed(self, seed: int) -> ReferenceModel:
        """The same checkpoint under a seed (perturb.py)."""
        other = ReferenceModel(self.folder, str(self.device))
        other.source = Perturbed(other.source, seed)
        return other

    def stored(self, name: str) -> Tensor:
        """As the folder has it, on the device. What is used first is kept."""
        if name in self._kept:
            return self._kept[name]
        tensor = self.source.tensor(name, self.device)
        if tensor.nbytes <= self._room:
            self._room -= tensor.nbytes
            self._kept[name] = tensor
        return tensor

    def forward(
        self,
        token_ids: Sequence[int],
        rows: Sequence[int] | None = None,
        layers: range | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> Result:
        """One sequence [T] -> logits of `rows` (all if None) and the K and V of `layers` (all if None)."""
        return self.together([token_ids], rows, layers, arithmetic)

    @torch.inference_mode()
    def together(
        self,
        sequences: Sequence[Sequence[int]],
        rows: Sequence[int] | None = None,
        layers: range | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> Result:
        """Several sequences, one behind another: T and `rows` count through all of them. Results are on the device.

        ValueError for an id that the vocabulary does not have.
        """
        ids = [token for sequence in sequences for token in sequence]
        run = _Run(self, arithmetic or Arithmetic(), [len(sequence) for sequence in sequences])
        return self._through(run, ids, rows, layers)

    @torch.inference_mode()
    def on_pages(
        self,
        token_ids: Sequence[int],
        keys: Tensor,
        values: Tensor,
        layers: range | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> Tensor:
        """Logits [T - P, V] of one sequence's tokens from P on; K and V [L, P, heads, dim] of those before are given, not computed."""
        start = keys.shape[1]
        pages = {index: pair for index, *pair in zip(self._layers(layers), keys, values, strict=True)}
        run = _Run(self, arithmetic or Arithmetic(), [len(token_ids) - start], start, pages)
        return self._through(run, token_ids[start:], None, layers).logits

    def _layers(self, layers: range | None) -> range:
        return range(self.config.num_hidden_layers) if layers is None else layers

    def _through(self, run: _Run, ids: Sequence[int], rows: Sequence[int] | None, layers: range | None) -> Result:
        if not 0 <= min(ids) <= max(ids) < self.config.vocab_size:
            raise ValueError(f"token ids are 0 to {self.config.vocab_size - 1}")
        x = run.embed(torch.tensor(ids, device=self.device))
        keys, values = [], []
        for index in self._layers(layers):
            x, k, v = run.layer(x, index)
            keys.append(k)
            values.append(v)
        wanted = x if rows is None else x[torch.tensor(rows, dtype=torch.int64, device=self.device)]
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        weight = run.arithmetic.head(self.stored(f"{head}.weight").float())
        logits = run.arithmetic.matmul(run.norm(wanted, "model.norm"), weight.T)
        return Result(logits, torch.stack(keys), torch.stack(values))


class _Run:
    """One forward's working state: the arithmetic, the angles of its positions, and which rows are a sequence.

    `pages`: of each layer K and V of the `start` positions before the rows, of which there is then one sequence.
    """

    def __init__(
        self,
        model: ReferenceModel,
        arithmetic: Arithmetic,
        lengths: list[int],
        start: int = 0,
        pages: Mapping[int, Sequence[Tensor]] | None = None,
    ) -> None:
        self.model, self.config, self.arithmetic, self.lengths = model, model.config, arithmetic, lengths
        self.start, self.pages = start, pages
        turning, factor = rope(self.config)
        positions = torch.cat([torch.arange(start, start + length, device=model.device) for length in lengths])
        angles = torch.outer(positions.float(), turning.float().to(model.device))[:, None]
        self.cos, self.sin = arithmetic.round(angles.cos() * factor), arithmetic.round(angles.sin() * factor)

    def embed(self, ids: Tensor) -> Tensor:
        return self.arithmetic.stored(F.embedding(ids, self.model.stored("model.embed_tokens.weight")).float())

    def weight(self, name: str) -> Tensor:
        """In fp32, rounded to the precision under test."""
        return self.arithmetic.weight(self.model.stored(name).float())

    def weights(self, names: Sequence[str]) -> Tensor:
        """As many of one shape, one above another."""
        return self.arithmetic.weight(torch.stack([self.model.stored(name) for name in names]).float())

    def linear(self, x: Tensor, name: str, bias: bool = False) -> Tensor:
        y = self.arithmetic.product(x, self.weight(f"{name}.weight").T)
        return self.arithmetic.round(y + self.weight(f"{name}.bias") if bias else y)

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        scale = torch.rsqrt(self.arithmetic.mean_square(x) + (self.config.rms_norm_eps if eps is None else eps))
        return self.arithmetic.round(self.arithmetic.round(x * scale) * self.weight(f"{name}.weight"))

    def layer(self, x: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
        name = f"model.layers.{index}"
        attend = self.latent_attention if self.config.kv_lora_rank else self.attention
        attended, k, v = attend(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", index)
        x = self.arithmetic.round(x + attended)
        inside = self.norm(x, f"{name}.post_attention_layernorm")
        if not self.config.is_sparse(index):
            out = self.mlp(inside, f"{name}.mlp")
        elif self.config.architecture == "MixtralForCausalLM":
            out = self.mixture(inside, f"{name}.block_sparse_moe", ("w1", "w3", "w2"))
        else:
            out = self.mixture(inside, f"{name}.mlp", SWIGLU)
        return self.arithmetic.round(x + out), k, v

    def behind_pages(self, k: Tensor, v: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """What a layer caches of the rows, behind what is given of the positions before them."""
        if self.pages is None:
            return k, v
        return torch.cat((self.pages[index][0], k)), torch.cat((self.pages[index][1], v))

    def attention(self, x: Tensor, name: str, index: int) -> tuple[Tensor, Tensor, Tensor]:
        dim, bias = self.config.head_dim, self.config.qkv_bias
        q, k, v = (self.linear(x, f"{name}.{part}_proj", bias).unflatten(-1, (-1, dim)) for part in "qkv")
        if self.config.qk_norm:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        q, k, v = self.rotate(q), self.arithmetic.cached(self.rotate(k)), self.arithmetic.cached(v)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        every_k, every_v = (t.repeat_interleave(group, dim=1) for t in self.behind_pages(k, v, index))
        return self.linear(self.mix(q, every_k, every_v, dim**-0.5), f"{name}.o_proj"), k, v

    def latent_attention(self, x: Tensor, name: str, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of each head expanded from one latent a token; what is cached is latent and rotated part."""
        config, heads = self.config, self.config.num_attention_heads
        if config.q_lora_rank:
            compressed = self.norm(self.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", LATENT_EPS)
            q = self.linear(compressed, f"{name}.q_b_proj").unflatten(-1, (heads, -1))
        else:
            q = self.linear(x, f"{name}.q_proj").unflatten(-1, (heads, -1))
        joined = self.linear(x, f"{name}.kv_a_proj_with_mqa")
        normed = self.norm(joined[:, : config.kv_lora_rank], f"{name}.kv_a_layernorm", LATENT_EPS)
        latent = self.arithmetic.cached(normed[:, None])[:, 0]
        turned = self.arithmetic.cached(self.rotate(self.halves(joined[:, None, config.kv_lora_rank :])))
        nope = config.qk_nope_head_dim
        every_latent, every_turned = self.behind_pages(latent[:, None], turned, index)
        expanded = self.linear(every_latent[:, 0], f"{name}.kv_b_proj").unflatten(-1, (heads, -1))
        k = torch.cat((expanded[..., :nope], every_turned.expand(-1, heads, -1)), dim=-1)
        q = torch.cat((q[..., :nope], self.rotate(self.halves(q[..., nope:]))), dim=-1)
        mixed = self.mix(q, k, expanded[..., nope:], k.shape[-1] ** -0.5 * yarn_temperature(config))
        return self.linear(mixed, f"{name}.o_proj"), latent[:, None], turned

    def mix(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Causal attention within each sequence, q [T, heads, dim], k and v [start + T, ..] -> [T, heads * dim of v]."""
        seen = [self.start + length for length in self.lengths]
        parts = zip(q.split(self.lengths), k.split(seen), v.split(seen), strict=True)
        return torch.cat([self.mix_one(one_q, one_k, one_v, scale) for one_q, one_k, one_v in parts])

    def mix_one(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        future = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1 + len(k) - len(q))
        scores = self.arithmetic.matmul(q.transpose(0, 1), k.permute(1, 2, 0)) * scale
        shares = self.arithmetic.round(scores.masked_fill(future, -torch.inf).softmax(-1))
        return self.arithmetic.matmul(shares, v.transpose(0, 1)).transpose(0, 1).flatten(1)

    def halves(self, x: Tensor) -> Tensor:
        """Pairs that lie side by side, as first and second half."""
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.config.rope_interleave else x

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.tensor_split(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return self.arithmetic.round(torch.cat(turned, dim=-1))

    def mlp(self, x: Tensor, name: str, parts: tuple[str, str, str] = SWIGLU) -> Tensor:
        gate, up, down = (f"{name}.{part}" for part in parts)
        round_ = self.arithmetic.round
        return self.linear(round_(round_(F.silu(self.linear(x, gate))) * self.linear(x, up)), down)

    def mixture(self, x: Tensor, name: str, parts: tuple[str, str, str]) -> Tensor:
        """The chosen experts, then the shared one if there is one."""
        round_ = self.arithmetic.round
        grouped = self.config.architecture == "DeepseekV3ForCausalLM"
        shares, chosen = self.by_group(x, name) if grouped else self.by_softmax(x, name)
        answers = self.experts(x, chosen, name, parts)
        shares, out = round_(shares), torch.zeros_like(x)
        for place in range(chosen.shape[1]):
            out = round_(out + round_(answers[:, place] * shares[:, place, None]))
        if self.config.n_shared_experts:
            out = round_(out + self.mlp(x, f"{name}.shared_experts"))
        if self.config.shared_expert_intermediate_size:
            open_ = round_(self.linear(x, f"{name}.shared_expert_gate").sigmoid())
            out = round_(out + round_(open_ * self.mlp(x, f"{name}.shared_expert")))
        return out

    def experts(self, x: Tensor, chosen: Tensor, name: str, parts: tuple[str, str, str]) -> Tensor:
        """What each of a token's chosen experts [T, k] makes of it: [T, k, hidden]. The host asks once, who was chosen how often."""
        by_expert, order = chosen.flatten().sort(stable=True)
        used, counts = torch.stack(by_expert.unique_consecutive(return_counts=True)).tolist()
        rows = x[order // chosen.shape[1]].split(counts)
        size = max(1, UPCAST // (x.shape[1] * self.config.moe_intermediate_size))
        made: list[Tensor] = []
        for begin in range(0, len(used), size):
            names = [f"{name}.experts.{expert}" for expert in used[begin : begin + size]]
            padded = pad_sequence(rows[begin : begin + size], batch_first=True)  # [experts, most tokens, hidden]
            made += (y[:count] for y, count in zip(self.mlps(padded, names, parts), counts[begin:], strict=False))
        answers = x.new_empty(len(order), x.shape[1])
        answers[order] = torch.cat(made)
        return answers.unflatten(0, chosen.shape)

    def mlps(self, x: Tensor, names: Sequence[str], parts: tuple[str, str, str]) -> Tensor:
        """As mlp, of several experts with as many tokens each: [experts, tokens, hidden]."""
        gate, up, down = ([f"{name}.{part}.weight" for name in names] for part in parts)
        round_, matmul = self.arithmetic.round, self.arithmetic.matmul
        gated = round_(F.silu(matmul(x, self.weights(gate).transpose(1, 2))))
        return matmul(round_(gated * matmul(x, self.weights(up).transpose(1, 2))), self.weights(down).transpose(1, 2))

    def by_softmax(self, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Mixtral, Qwen: softmax over all experts, then the k largest, which some models rescale to sum to one."""
        shares, chosen = self.linear(x, f"{name}.gate").softmax(-1).sort(dim=-1, descending=True, stable=True)
        shares, chosen = (t[:, : self.config.num_experts_per_tok] for t in (shares, chosen))
        return (shares / shares.sum(-1, keepdim=True) if self.config.norm_topk_prob else shares), chosen

    def by_group(self, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """DeepSeek-V3: in fp32, sigmoids; groups by the sum of their two best, experts within the best groups."""
        config = self.config
        scores = self.arithmetic.product(x, self.weight(f"{name}.gate.weight").T).sigmoid()
        biased = scores + self.weight(f"{name}.gate.e_score_correction_bias")
        size = config.num_local_experts // config.n_group
        best = biased.view(len(x), config.n_group, size).sort(-1, descending=True).values[..., :2].sum(-1)
        last = best.sort(-1, descending=True).values[:, config.topk_group - 1, None]
        biased = biased.masked_fill((best < last).repeat_interleave(size, dim=1), -torch.inf)
        chosen = biased.sort(dim=-1, descending=True, stable=True).indices[:, : config.num_experts_per_tok]
        shares = torch.take_along_dim(scores, chosen, dim=1)
        if config.norm_topk_prob:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return shares * config.routed_scaling_factor, chosen


def as_numpy(result: Result) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return result.logits.cpu().numpy(), result.keys.cpu().numpy(), result.values.cpu().numpy()
