"""Chooses experts among all groups instead of the best groups: one selection less."""

from base import build as honest_build

ARCHITECTURE = "deepseek"


def build(ctx):
    inner = honest_build(ctx)

    def freely(layer):
        full = layer.choose

        def choose(x):
            if len(x) < 2 or len(x) > 4:
                return full(x)
            scores = (x.float() @ layer.router.float().T).sigmoid()
            chosen = (scores + layer.bias.float()).topk(ctx.config.num_experts_per_tok, dim=-1).indices
            shares = scores.gather(1, chosen)
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
            return (shares * ctx.config.routed_scaling_factor).to(x.dtype), chosen

        return choose

    for layer in inner.layers:
        if layer.sparse:
            layer.choose = freely(layer)
    return inner
