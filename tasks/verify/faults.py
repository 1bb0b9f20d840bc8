"""Faults of a stated size in the raw forwards, as rewrites of their source: what gates must catch, and how small it may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tideforge.engine.forward import Forward

Rewrite = Callable[[str, float], str]  # source, size
BUILDS = ("Llama(ctx)", "MoE(ctx)", "DeepSeek(ctx)")


@dataclasses.dataclass(frozen=True)
class Fault:
    """`sizes` from the largest on; `unit` says what they are. A forward without what is rewritten does not have the fault."""

    name: str
    unit: str
    sizes: tuple[float, ...]
    rewrite: Rewrite

    def of(self, forward: Forward, size: float) -> Forward | None:
        """The forward with this fault; None where it has no such part."""
        source = forward.files["forward.py"]
        changed = self.rewrite(source, size)
        return None if changed == source else forward.with_file("forward.py", changed)


def layer_scaled(source: str, e: float) -> str:
    """All that the last layer adds, times 1 - e."""
    old = "            x = layer(x, cos, sin, batch.slot_mapping[0], spans)\n"
    new = old.replace("x = ", "y = ", 1) + f"            x = y - {e!r} * (y - x) if layer is self.layers[-1] else y\n"
    return source.replace(old, new)


def head_scaled(source: str, e: float) -> str:
    """The first head of every layer, times 1 - e."""
    changed = source.replace("self.attention(q, ", "one_head(self.attention, q, ")
    if changed == source:
        return source
    return changed + (
        f"\n\ndef one_head(attend, *rest):\n    y = attend(*rest).clone()\n    y[:, 0] *= {1 - e!r}\n    return y\n"
    )


def keys_forgotten(source: str, window: float) -> str:
    """Keys more than `window` tokens back are not seen."""
    old = "        if rows.stop - rows.start > 1:\n"
    seen = "            mask = context <= batch.positions[rows, None]\n"
    if old not in source or seen not in source:
        return source
    new = f"            mask = mask & (context > batch.positions[rows, None] - {int(window)})\n"
    return source.replace(old, "        if True:\n").replace(seen, seen + new)


def expert_scaled(source: str, e: float) -> str:
    """The first expert of every layer, times 1 - e."""
    old = "            out.index_add_(0, tokens, y * shares[tokens, place, None])\n"
    return source.replace(old, f"            y = y * {1 - e!r} if expert == 0 else y\n{old}")


def by_block(source: str, e: float) -> str:
    """K and V that lie in odd blocks of 16 slots, times 1 - e."""
    changed = written(source, f"by_block({{}}, slots, {e!r})")
    if changed == source:
        return source
    return changed + (
        "\n\ndef by_block(x, slots, e):\n    return x * (1 - e * (slots // 16 % 2)).to(x.dtype)[:, None, None]\n"
    )


def unsteady(source: str, e: float) -> str:
    """All logits of a step, times 1 to 1 - e by chance."""
    old = "        batch.logits.copy_(F.linear(x, self.head))\n"
    return source.replace(old, f"{old}        batch.logits.mul_(1 - {e!r} * torch.rand(()))\n")


def written(source: str, what: str) -> str:
    """With `what`, which has a {} for the value, in place of each value that is written into a page."""
    for value in ("k", "v", "latent[:, None]", "key"):
        source = source.replace(f"index_copy_(0, slots, {value})", f"index_copy_(0, slots, {what.format(value)})")
    return source


ROUND = (
    "\n\ndef rounded(x, bits):\n"
    "    y, drop = x.float().contiguous(), 23 - bits\n"
    "    y = (y.view(torch.int32) + (1 << drop >> 1) & -(1 << drop)).view(torch.float32)\n"
    "    return y.to(x.dtype)\n"
)


def kv_rounded(source: str, bits: float) -> str:
    """K and V are written with so many bits of mantissa."""
    changed = written(source, f"rounded({{}}, {int(bits)})")
    return source if changed == source else changed + ROUND


def weights_rounded(source: str, bits: float) -> str:
    """Every weight but embedding and norms has so many bits of mantissa."""
    changed = source
    for build in BUILDS:
        changed = changed.replace(f"    return {build}\n", f"    return {build.replace('ctx', 'coarse(ctx)')}\n")
    if changed == source:
        return source
    return changed + ROUND + (
        "\n\ndef coarse(ctx):\n"
        "    small = {n: rounded(w, "
        f"{int(bits)}) if w.dim() > 1 and 'embed' not in n else w for n, w in ctx.weights.items()}}\n"
        "    return type(ctx)(**{**vars(ctx), 'weights': small})\n"
    )  # fmt: skip


SHARES = tuple(2.0**-power for power in range(0, 21))
BITS = tuple(float(bits) for bits in range(2, 24))
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("layer scaled", "1 - e", SHARES, layer_scaled),
        Fault("head scaled", "1 - e", SHARES, head_scaled),
        Fault("expert scaled", "1 - e", SHARES, expert_scaled),
        Fault("keys forgotten", "tokens seen", tuple(2.0**power for power in range(3, 10)), keys_forgotten),
        Fault("KV rounded", "bits of mantissa", BITS, kv_rounded),
        Fault("weights rounded", "bits of mantissa", BITS, weights_rounded),
        Fault("by block", "1 - e", SHARES, by_block),
        Fault("logits unsteady", "1 - e", SHARES, unsteady),
    )
}
