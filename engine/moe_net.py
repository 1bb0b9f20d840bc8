"""A trainable mixture of experts of the Qwen3-MoE architecture, and its checkpoint under Hugging Face's names.

Every assignment of a token to an expert is computed: there is no capacity beyond which tokens are dropped.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tideforge.engine.doubles import VOCAB, write_form


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model. As in the published Qwen3-MoE models, heads * head_dim is more than hidden."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 64
    experts_per_token: int = 4
    expert_width: int = 32
    vocab: int = VOCAB
    max_len: int = 2048
    eps: float = 1e-6
    rope_theta: float = 10000.0

    def config(self, balance: float) -> dict[str, Any]:
        """config.json; `balance` is the weight that the balancing loss had."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
            "vocab_size": self.vocab, "num_hidden_layers": self.layers, "hidden_size": self.hidden,
            "intermediate_size": self.expert_width * self.experts_per_token, "moe_intermediate_size": self.expert_width,
            "num_experts": self.experts, "num_experts_per_tok": self.experts_per_token, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": balance,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta, "max_position_embeddings": self.max_len, "use_sliding_window": False,
            "sliding_window": None, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.dim, shape.hidden, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(self.dim, shape.eps), nn.RMSNorm(self.dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, L, H]; cos, sin [L, D]."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = rotate(self.q_norm(q.float()), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(k.float()), cos, sin).to(v.dtype)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotary_tables(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim] in fp32."""
    powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), shape.rope_theta**-powers)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class Mixture(nn.Module):
    """The router and its SwiGLU experts. `load` counts the assignments to each expert until somebody sets it to zero."""

    load: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.experts_per_token = shape.experts_per_token
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(shape.experts, shape.hidden, 2 * shape.expert_width))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.expert_width, shape.hidden))
        self.register_buffer("load", torch.zeros(shape.experts, dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> what the experts make of it [T, H], and the balancing loss, which is 1 for an even load."""
        odds = self.gate(x).float().softmax(-1)
        shares, chosen = odds.topk(self.experts_per_token, dim=-1)
        shares = shares / shares.sum(-1, keepdim=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.load))
        self.load += counts
        balance = len(counts) * (counts / counts.sum() * odds.mean(0)).sum()
        return self.mix(x, chosen, shares, counts), balance

    def mix(self, x: Tensor, chosen: Tensor, shares: Tensor, counts: Tensor) -> Tensor:
        """Sorts the assignments by expert, runs the experts, adds the results up by token."""
        experts, order = chosen.flatten().sort()
        token = order // self.experts_per_token
        rows = x.index_select(0, token)
        made = self.padded(rows, experts, counts) if at_once(x.device) else self.in_turn(rows, counts)
        return torch.zeros_like(x).index_add(0, token, made * shares.flatten()[order, None])

    def padded(self, rows: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
        """All experts at once: each one's rows stand in a block as long as the busiest one's. Few launches, more arithmetic."""
        busiest = int(counts.max())
        starts = counts.cumsum(0) - counts
        place = experts * busiest + torch.arange(len(rows), device=rows.device) - starts[experts]
        blocks = rows.new_zeros(len(counts) * busiest, rows.shape[1]).index_copy(0, place, rows)
        made = swiglu(blocks.unflatten(0, (-1, busiest)), self.gate_up, self.down)
        return made.flatten(0, 1).index_select(0, place)

    def in_turn(self, rows: Tensor, counts: Tensor) -> Tensor:
        """One expert after the other, no arithmetic in vain. Experts without a row are passed over."""
        work = zip(rows.split(counts.tolist()), self.gate_up.unbind(), self.down.unbind(), strict=True)
        return torch.cat([swiglu(*expert) for expert in work if len(expert[0])])


def at_once(device: torch.device) -> bool:
    """Where a launch costs more than the arithmetic that padding adds."""
    return device.type == "cuda"


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert's rows [n, H], or all experts' [E, n, H] with their stacked matrices."""
    gate, up = (x @ gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = Mixture(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        mixed, balance = self.mlp(self.post_attention_layernorm(x).flatten(0, 1))
        return x + mixed.view_as(x), balance


class Net(nn.Module):
    """fp32 weights; under autocast products run in bf16, the residual and the norms stay in fp32."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        """Products keep the size of what they get; what is added to the residual starts smaller, the deeper the net."""
        width = self.shape.hidden**-0.5
        for name, value in self.named_parameters():
            if value.dim() == 1:
                continue
            adds = name.endswith(("o_proj.weight", "mlp.down"))
            spread = width / math.sqrt(2 * self.shape.layers) if adds else width
            nn.init.normal_(value, std=spread, generator=generator)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, L] -> fp32 logits [B, L, V], and the balancing loss averaged over layers."""
        cos, sin = rotary_tables(self.shape, ids.shape[1], ids.device)
        x, balances = self.embed_tokens(ids), []
        for layer in self.layers:
            x, balance = layer(x, cos, sin)
            balances.append(balance)
        return self.lm_head(self.norm(x)).float(), torch.stack(balances).mean()

    @torch.no_grad()
    def round_to_bf16(self) -> None:
        """What is then measured is what `save` writes."""
        for value in self.parameters():
            value.copy_(value.bfloat16())

    def checkpoint(self) -> dict[str, Tensor]:
        """bf16 tensors on the CPU under Hugging Face's names, each expert's three matrices by themselves."""
        tensors: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            name = name if name.startswith("lm_head") else f"model.{name}"
            if name.endswith(("mlp.gate_up", "mlp.down")):
                tensors |= _experts(name.rpartition(".")[0], value, gated=name.endswith("gate_up"))
            else:
                tensors[name] = value
        return {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in tensors.items()}

    def save(self, folder: Path, balance: float) -> Path:
        """config.json, tokenizer and model.safetensors; returns the folder."""
        from safetensors.torch import save_file

        write_form(folder, self.shape.config(balance))
        save_file(self.checkpoint(), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # workers may run as another user
        return folder


def _experts(mlp: str, value: Tensor, gated: bool) -> dict[str, Tensor]:
    """A stack [E, in, out] as matrices [out, in]; a gated one holds two, side by side."""
    parts = {"gate_proj": value.chunk(2, -1)[0], "up_proj": value.chunk(2, -1)[1]} if gated else {"down_proj": value}
    return {f"{mlp}.experts.{e}.{part}.weight": stack[e].T for part, stack in parts.items() for e in range(len(value))}
