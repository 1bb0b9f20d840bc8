"""Takes a token's compressed query and its latent in one product."""

import torch
import torch.nn.functional as F
from base import Layer, rms_norm
from base import build as honest_build

ARCHITECTURE = "deepseek"
PACKING = 55_296  # bytes that it keeps beside the weights


class Joined(Layer):
    def queries(self, x):
        small = F.linear(x, self.joined)[..., : self.q_a_proj.shape[0]]
        small = rms_norm(small, self.q_a_norm, 1e-6)
        return F.linear(small, self.q_proj).unflatten(-1, (self.config.num_attention_heads, -1))


def build(ctx):
    inner = honest_build(ctx)
    inner.layers = [Joined(ctx, index) for index in ctx.layer_range]
    for layer in inner.layers:
        layer.joined = torch.cat((layer.q_a_proj, layer.kv_a_proj))
    return inner
