"""Honestly different candidates: the raw forward rewritten so that its layers do more, less or other work and stay right.

A rewrite is a few replacements of text. Those that a forward has no place for are left out, so both raw forwards share the
list. Most cost or save a few kernels a layer; none leaves out arithmetic that an answer needs.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable

from tideforge.engine.forward import ENTRY, Forward

ATTENTION, EXPERTS = "paged_attention.py", "experts.py"


@dataclasses.dataclass(frozen=True)
class Edit:
    """`new` wherever `file` says `old`; an `old` of the form `def name` stands for that whole function at module level."""

    old: str
    new: str
    file: str = ENTRY

    def applied(self, text: str) -> str | None:
        """None when the text has no such place."""
        old = _function(text, self.old.removeprefix("def ")) if self.old.startswith("def ") else self.old
        return text.replace(old, self.new) if old and old in text else None


Rewrite = tuple[Edit, ...]


def _function(text: str, name: str) -> str:
    """The source of a function at module level, without the line's end behind it; empty when there is none."""
    found = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name)
    return next((ast.get_source_segment(text, node) or "" for node in found), "")


def honest(plain: Forward) -> list[tuple[str, Forward]]:
    """Every variant that `plain` has a place for, by name; no two are equal and none is `plain` itself."""
    made: dict[str, tuple[str, Forward]] = {plain.id: ("", plain)}
    for name, edits in (*REWRITES.items(), *_together()):
        forward = rewritten(plain, edits)
        if forward is not None:
            made.setdefault(forward.id, (name, forward))
    return list(made.values())[1:]


def rewritten(plain: Forward, edits: Iterable[Edit]) -> Forward | None:
    """None when one of the edits has no place in it."""
    for edit in edits:
        text = edit.applied(plain.files.get(edit.file, ""))
        if text is None:
            return None
        plain = plain.with_file(edit.file, text)
    return plain


def _together() -> list[tuple[str, Rewrite]]:
    return [("+".join(names), tuple(edit for name in names for edit in REWRITES[name])) for names in TOGETHER]


_NORM = "def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:\n"
_ROTATE = 'def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:\n    """x [T, heads, D]; cos, sin [T, 1, D]."""\n'
_QKV = "q = F.linear(x, self.q_proj)\n        k = F.linear(x, self.k_proj)\n        v = F.linear(x, self.v_proj)\n"
_BUILT = "        if self.config.qkv_bias:\n            prefix ="
_TURNED = "q, k = rotate(q, cos, sin), rotate(k, cos, sin)\n"
_OUT = "return F.linear(self.attention(q, self.keys, self.values, spans).flatten(1), self.o_proj)"
_GATED = "F.silu(F.linear(x, self.gate_proj)) * F.linear(x, self.up_proj)"
_LOOP = "        for layer in self.layers:\n"
_HEAD = "batch.logits.copy_(F.linear(x, self.head))"
_TABLES = "        self.cos, self.sin = rotary_tables("
_DOWN = "self.down_proj = weight("
_MLP = f"return F.linear({_GATED}, self.down_proj)"
_DECODE = "TILE, SPLIT, splits, precision,\n"
_SHARES = "shares = F.softmax(F.linear(x, self.router).float(), dim=-1)\n"
_TOP = "shares, chosen = shares.topk(self.config.num_experts_per_tok, dim=-1)\n"
_SUM = "return out.unflatten(0, (tokens, k)).sum(1)"
_STARTS = "starts = torch.searchsorted(sorted_experts, self.numbers)"


REWRITES: dict[str, Rewrite] = {
    # Norms.
    "norm-fused": (Edit("def rms_norm", f"{_NORM}    return F.rms_norm(x, weight.shape, weight, eps)"),),
    "norm-by-hand": (
        Edit(
            "def rms_norm",
            f"{_NORM}    y = x.float()\n    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)\n"
            "    return weight * y.to(x.dtype)",
        ),
    ),
    "norm-in-fp32": (
        Edit("def rms_norm", f"{_NORM}    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)"),
    ),
    "norm-by-length": (
        Edit(
            "def rms_norm",
            f"{_NORM}    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)\n"
            "    return weight * (x * torch.rsqrt(length * length / x.shape[-1] + eps)).to(x.dtype)",
        ),
    ),
    # Rotary positions.
    "rope-by-halves": (
        Edit(
            "def rotate",
            f"{_ROTATE}    (first, second), half = x.chunk(2, dim=-1), x.shape[-1] // 2\n"
            "    cos, sin = cos[..., :half], sin[..., :half]\n"
            "    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)",
        ),
    ),
    "rope-in-fp32": (
        Edit(
            "def rotate",
            f"{_ROTATE}    first, second = x.float().chunk(2, dim=-1)\n"
            "    return (x * cos.float() + torch.cat((-second, first), dim=-1) * sin.float()).to(x.dtype)",
        ),
    ),
    "rope-by-roll": (
        Edit(
            "def rotate",
            f"{_ROTATE}    half = x.shape[-1] // 2\n    signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)\n"
            "    return torch.addcmul(x * cos, x.roll(half, dims=-1), signed)",
        ),
    ),
    "rope-joined": (
        Edit(
            _TURNED, "q, k = rotate(torch.cat((q, k), dim=1), cos, sin).split([q.shape[1], k.shape[1]], dim=1)\n"
        ),
    ),
    "rope-each-layer": (
        Edit(_LOOP, f"{_LOOP}            cos, sin = self.cos[batch.positions, None], self.sin[batch.positions, None]\n"),
    ),
    "angles-each-layer": (
        Edit(
            _TABLES,
            "        turns = ctx.config.rope_frequencies\n"
            f"        self.turns = torch.tensor(turns, dtype=torch.float32, device=ctx.device)\n{_TABLES}",
        ),
        Edit(
            _LOOP,
            f"{_LOOP}            angles = torch.outer(batch.positions.float(), self.turns).repeat(1, 2)[:, None]\n"
            "            cos, sin = ((y * self.config.rope_factor).to(x.dtype) for y in (angles.cos(), angles.sin()))\n",
        ),
    ),
    # Products around attention.
    "qkv-joined": (
        Edit(_BUILT, f"        self.qkv_proj = torch.cat((self.q_proj, self.k_proj, self.v_proj))\n{_BUILT}"),
        Edit(
            _QKV,
            "sizes = [part.shape[0] for part in (self.q_proj, self.k_proj, self.v_proj)]\n"
            "        q, k, v = F.linear(x, self.qkv_proj).split(sizes, dim=-1)\n",
        ),
    ),
    "kv-joined": (
        Edit(_BUILT, f"        self.kv_proj = torch.cat((self.k_proj, self.v_proj))\n{_BUILT}"),
        Edit(_QKV, "q = F.linear(x, self.q_proj)\n        k, v = F.linear(x, self.kv_proj).chunk(2, dim=-1)\n"),
    ),
    "q-in-halves": (
        Edit(_QKV, _QKV.replace("F.linear(x, self.q_proj)", "torch.cat([F.linear(x, w) for w in self.q_proj.chunk(2)], dim=-1)")),
    ),
    "o-in-halves": (
        Edit(
            _OUT,
            "y = self.attention(q, self.keys, self.values, spans).flatten(1)\n"
            "        halves = zip(y.chunk(2, dim=-1), self.o_proj.chunk(2, dim=-1), strict=True)\n"
            "        return sum(F.linear(*half) for half in halves)",
        ),
    ),
    "qkv-copied": (Edit(_TURNED, f"{_TURNED}        q, k, v = q.clone(), k.clone(), v.clone()\n"),),
    "x-copied": (Edit(_QKV, f"x = x.clone()\n        {_QKV}"),),
    "pages-by-index": (
        Edit("self.keys.flatten(0, 1).index_copy_(0, slots, k)", "self.keys.flatten(0, 1)[slots] = k"),
        Edit("self.values.flatten(0, 1).index_copy_(0, slots, v)", "self.values.flatten(0, 1)[slots] = v"),
    ),
    # The residual and the head.
    "residual-in-place": (Edit("x = x + self.attend(", "x += self.attend("),),
    "residual-in-fp32": (
        Edit("x = x + self.attend(rms_norm(x, self.input_norm, eps), cos, sin, slots, spans)",
             "y = self.attend(rms_norm(x, self.input_norm, eps), cos, sin, slots, spans)\n"
             "        x = (x.float() + y.float()).to(x.dtype)"),
    ),
    "residual-copied": (Edit(_LOOP, f"{_LOOP}            x = x.clone()\n"),),
    "head-in-halves": (Edit(_HEAD, "batch.logits.copy_(torch.cat([F.linear(x, rows) for rows in self.head.chunk(2)], dim=-1))"),),
    # A dense layer's MLP.
    "gate-up-joined": (
        Edit(f"        {_DOWN}", f"        self.gate_up = torch.cat((self.gate_proj, self.up_proj))\n        {_DOWN}"),
        Edit(_MLP, "gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)\n        return F.linear(F.silu(gate) * up, self.down_proj)"),
    ),
    "silu-by-hand": (
        Edit(_MLP, "gate = F.linear(x, self.gate_proj)\n"
             "        return F.linear(gate * torch.sigmoid(gate) * F.linear(x, self.up_proj), self.down_proj)"),
    ),
    "silu-in-fp32": (
        Edit(_GATED, "(F.silu(F.linear(x, self.gate_proj).float()) * F.linear(x, self.up_proj).float()).to(x.dtype)"),
    ),
    "mlp-in-halves": (
        Edit(
            _MLP,
            "parts = zip(self.gate_proj.chunk(2), self.up_proj.chunk(2), self.down_proj.chunk(2, dim=-1), strict=True)\n"
            "        return sum(F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d) for g, u, d in parts)",
        ),
    ),
    # A sparse layer's router and what goes around its experts.
    "router-in-fp32": (Edit(_SHARES, "shares = F.softmax(F.linear(x.float(), self.router.float()), dim=-1)\n"),),
    "softmax-by-hand": (
        Edit(_SHARES, "shares = F.linear(x, self.router).float()\n        shares = (shares - shares.amax(-1, keepdim=True)).exp()\n"
             "        shares = shares / shares.sum(-1, keepdim=True)\n"),
    ),
    "top-by-sort": (
        Edit(_TOP, "shares, chosen = shares.sort(dim=-1, descending=True, stable=True)\n"
             "        shares, chosen = (part[:, : self.config.num_experts_per_tok] for part in (shares, chosen))\n"),
    ),
    "top-before-softmax": (
        Edit(_SHARES, "shares = F.linear(x, self.router).float()\n        whole = shares.logsumexp(-1, keepdim=True)\n"),
        Edit(_TOP, f"{_TOP}        shares = (shares - whole).exp()\n"),
    ),
    "experts-summed-in-fp32": (Edit(_SUM, "return out.unflatten(0, (tokens, k)).float().sum(1).to(x.dtype)", EXPERTS),),
    "experts-summed-in-turn": (Edit(_SUM, "first, *others = out.unflatten(0, (tokens, k)).unbind(1)\n"
             "        for other in others:\n            first = first + other\n        return first", EXPERTS),),
    "experts-counted": (
        Edit(_STARTS, "counts = torch.zeros_like(self.numbers).index_add_(0, sorted_experts + 1, torch.ones_like(sorted_experts))\n"
             "        starts = counts.cumsum(0)", EXPERTS),
    ),
    # How the kernels are cut.
    "attention-tile-32": (Edit("TILE = 64", "TILE = 32", ATTENTION),),
    "attention-tile-128": (Edit("TILE = 64", "TILE = 128", ATTENTION),),
    "attention-split-128": (Edit("SPLIT = 256", "SPLIT = 128", ATTENTION),),
    "attention-split-1024": (Edit("SPLIT = 256", "SPLIT = 1024", ATTENTION),),
    "attention-warps-8": (Edit(_DECODE, _DECODE.replace("precision,", "precision, num_warps=8,"), ATTENTION),),
    "attention-warps-2": (Edit(_DECODE, _DECODE.replace("precision,", "precision, num_warps=2,"), ATTENTION),),
    "experts-columns-64": (Edit("FEW, MANY = (32, 32, 3), (32, 128, 4)", "FEW, MANY = (32, 32, 3), (64, 64, 4)", EXPERTS),),
    "experts-step-64": (Edit("FEW, MANY = (32, 32, 3), (32, 128, 4)", "FEW, MANY = (32, 32, 3), (32, 64, 4)", EXPERTS),),
    "experts-stages-2": (Edit("FEW, MANY = (32, 32, 3), (32, 128, 4)", "FEW, MANY = (32, 32, 3), (32, 128, 2)", EXPERTS),),
    "experts-warps-8": (Edit("num_stages=stages\n", "num_stages=stages, num_warps=8\n", EXPERTS),),
}  # fmt: skip
TOGETHER = (
    ("qkv-joined", "rope-joined"),
    ("qkv-joined", "gate-up-joined"),
    ("qkv-joined", "rope-by-halves"),
    ("rope-joined", "rope-by-halves"),
    ("norm-in-fp32", "rope-in-fp32"),
    ("residual-in-fp32", "silu-in-fp32"),
    ("rope-each-layer", "qkv-copied"),
    ("angles-each-layer", "residual-in-fp32"),
    ("top-before-softmax", "rope-joined"),
    ("router-in-fp32", "qkv-copied"),
)
