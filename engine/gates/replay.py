"""A block as it is timed, seen by the authority: same shapes, users, admission and limits; it looks and acts between steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tideforge.data.workload import RequestShape
from tideforge.engine import measure
from tideforge.engine.executor import Executor, Sampled
from tideforge.engine.gates.probe import Probe
from tideforge.engine.memory import Arena
from tideforge.engine.scheduler import Request, Step
from tideforge.engine.weights import to_float32


@dataclasses.dataclass(frozen=True)
class Place:
    """One row of a step that wants logits: whose it is, which logits row, and where its K and V lie."""

    request: str
    logits_row: int
    blocks: tuple[int, ...]
    start: int  # tokens whose K and V were there before the step
    inputs: tuple[int, ...]  # the step's own tokens

    @property
    def context(self) -> int:
        """Tokens whose K and V are there after the step (after its first run, where it is run several times)."""
        return self.start + len(self.inputs)


def places(step: Step) -> list[Place]:
    row_of = {int(step.query_start_loc[b + 1]) - 1: b for b in range(len(step.seq_lens))}
    found = []
    for n, (request, last) in enumerate(zip(step.request_ids, step.logits_indices, strict=True)):
        b = row_of[int(last)]
        inputs = tuple(map(int, step.input_ids[step.query_start_loc[b] : step.query_start_loc[b + 1]]))
        blocks = tuple(map(int, step.block_tables[b]))
        found.append(Place(request, n, blocks, int(step.seq_lens[b]) - len(inputs), inputs))
    return found


def slots_of(arena: Arena, blocks: Sequence[int], count: int) -> np.ndarray:
    """Where the first `count` tokens of a sequence lie."""
    at, size = np.arange(count), arena.layout.block_size
    return np.asarray(blocks, np.int64)[at // size] * size + at % size


def read_slots(arena: Arena, layers: range, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values in the bits that the pages hold, [L, len(slots), heads, dim]: a copy."""
    keys, values = (np.stack([arena.slots(layer, side, slots) for layer in layers]) for side in (False, True))
    return keys, values


def write_slots(arena: Arena, layers: range, slots: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    """As read_slots, the other way."""
    for at, layer in enumerate(layers):
        arena.store(layer, False, slots, keys[at])
        arena.store(layer, True, slots, values[at])


def float32(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Pages as the authority sees them (16-bit floats as uint16) in fp32."""
    if dtype == "bfloat16":
        return to_float32("BF16", bits)
    return bits.view(np.float16).astype(np.float32) if dtype == "float16" else bits


class Watch:
    """Passes steps on as they are. `before` is called with each step, `after` also with the tokens of each of its runs."""

    def __init__(
        self,
        inner: Executor,
        before: Callable[[Step], None] = lambda step: None,
        after: Callable[[Step, list[Sequence[int]]], None] = lambda step, runs: None,
    ) -> None:
        self.inner, self.before, self.after = inner, before, after

    def execute(self, step: Step) -> Iterator[Sampled]:
        self.before(step)
        runs: list[Sequence[int]] = []
        for sampled in self.inner.execute(step):
            runs.append(sampled.tokens)
            if sampled.last:
                self.after(step, runs)
            yield sampled

    def halt(self) -> None:
        self.inner.halt()


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What came of a replay: each request's prompt, and the tokens that it emitted."""

    prompts: dict[str, tuple[int, ...]]
    chains: dict[str, list[int]]


LEAST = 4  # tokens of an answer: a prefill's, and three decodes
Drawn = tuple[list[RequestShape], list[tuple[int, ...]]]


def draw(probe: Probe) -> Drawn:
    """Shapes and prompts of fresh requests, one a user, as a timed pair has them; of an answer too short for decodes some more."""
    shapes, prompts = measure.draw_replay(probe.shapes, probe.users, probe.text, probe.secret())
    return [dataclasses.replace(shape, output_tokens=max(LEAST, shape.output_tokens)) for shape in shapes], prompts


def last_decode(probe: Probe) -> int:
    """How many steps of decodes come before the last one that all requests have, whichever are drawn."""
    shortest = max(LEAST, min(shape.output_tokens for shape in probe.shapes))
    return (shortest - 2) // probe.limits.decode_steps


def replay(
    probe: Probe, watch: Executor, enough: Callable[[], bool] = lambda: False, drawn: Drawn | None = None
) -> Replayed:
    """The requests, all at once, as a timed pair has them; the rest is dropped once there is `enough`."""
    shapes, prompts = drawn or draw(probe)
    core = probe.timed_core(watch)
    chains: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for name, prompt, shape in zip(chains, prompts, shapes, strict=True):
        core.add(Request(name, prompt, shape.output_tokens, forward=probe.forward))
    while core.has_work() and (core.under_way or not enough()):
        for event in core.step():
            chains[event.request_id].append(event.token)
    for name in core.scheduler.requests():
        core.abort(name)
    return Replayed(dict(zip(chains, prompts, strict=True)), chains)


class Moment:
    """A step of decodes that nobody can know: the first ones are the likeliest."""

    def __init__(self, rng: np.random.Generator, most: int, mean: float = 3.0) -> None:
        """`most`: steps of decodes that go before it at the utmost."""
        self.rng, self.most, self.mean = rng, most, mean
        self.left = self._drawn()

    def _drawn(self) -> int:
        return min(int(self.rng.exponential(self.mean)), self.most)

    def has_come(self, step: Step) -> bool:
        """To be asked once a step; the next moment is drawn when one has come."""
        if step.num_prefills:
            return False
        self.left -= 1
        if self.left >= 0:
            return False
        self.left = self._drawn()
        return True


class Until:
    """Ends a replay after a number of decode steps that nobody can know."""

    def __init__(self, rng: np.random.Generator, mean: float = 3.0) -> None:
        self.steps, self.left = 0, 2 + int(rng.exponential(mean))

    def after(self, step: Step, runs: list[Sequence[int]]) -> None:
        self.steps += 1
        self.left -= step.num_prefills == 0

    def is_now(self) -> bool:
        return self.left <= 0


def some(
    rng: np.random.Generator, found: Replayed, count: int = 3
) -> tuple[dict[str, list[int]], dict[str, tuple[int, ...]]]:
    """Chains and prompts of a few that were answered."""
    names = sorted(name for name, chain in found.chains.items() if chain)
    chosen = rng.choice(names, min(count, len(names)), replace=False).tolist()
    return {name: found.chains[name] for name in chosen}, found.prompts
