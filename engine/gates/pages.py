"""Gates of what a forward reads: whatever the authority does to its pages, it must answer as those very pages say."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tideforge.engine.compare import SAFETY
from tideforge.engine.gates.caught import Caught, Unverifiable
from tideforge.engine.gates.probe import Probe
from tideforge.engine.gates.replay import (
    Moment,
    Place,
    Watch,
    draw,
    float32,
    last_decode,
    places,
    read_slots,
    replay,
    slots_of,
    write_slots,
)
from tideforge.engine.scheduler import Step

Bits = tuple[np.ndarray, np.ndarray]  # keys and values of one sequence, as pages hold them: [L, T, heads, dim]
MATTERS = 2.0  # bounds that a change must move the reference's answer by
TRIES = 8  # of a change, each stronger than the one before
REPLAYS = 6  # until every kind was seen
AT_ONCE = 2  # kinds of change before one step, on as many sequences or more


def overwritten(rng: np.random.Generator, pages: Bits, other: Bits, strength: int) -> None:
    """Slots anywhere hold what another sequence has in such slots of its own."""
    count = min(pages[0].shape[1], 2**strength)
    _replace(rng, pages, other, rng.choice(pages[0].shape[1], count, replace=False))


def far(rng: np.random.Generator, pages: Bits, other: Bits, strength: int) -> None:
    """As overwritten, but only of the oldest tokens: a quarter of them, then more."""
    _replace(rng, pages, other, np.arange(max(1, min(1.0, 2**strength / 4) * pages[0].shape[1])).astype(np.int64))


def negated(rng: np.random.Generator, pages: Bits, other: Bits, strength: int) -> None:
    """A head of a layer, keys or values, turned to its negative in half of the slots; then of more heads and layers."""
    for _ in range(2**strength):
        bits = pages[rng.integers(2)]
        layers, length, heads, _ = bits.shape
        layer, head = rng.integers(layers), rng.integers(heads)
        at = rng.choice(length, 1 + length // 2, replace=False)
        bits[layer, at, head] = negative(bits[layer, at, head])


def swapped(rng: np.random.Generator, pages: Bits, other: Bits, strength: int) -> None:
    """All that both sequences have is the other's."""
    both = min(pages[0].shape[1], other[0].shape[1])
    for mine, theirs in zip(pages, other, strict=True):
        mine[:, :both], theirs[:, :both] = theirs[:, :both].copy(), mine[:, :both].copy()


Kind = Callable[[np.random.Generator, Bits, Bits, int], None]
KINDS: tuple[Kind, ...] = (overwritten, far, negated, swapped)


def negative(bits: np.ndarray) -> np.ndarray:
    """Exact in every float type."""
    return -bits if bits.dtype == np.float32 else bits ^ np.uint16(0x8000)


def _replace(rng: np.random.Generator, pages: Bits, other: Bits, at: np.ndarray) -> None:
    source = rng.integers(0, other[0].shape[1], len(at))
    for mine, theirs in zip(pages, other, strict=True):
        mine[:, at] = theirs[:, source]


@dataclasses.dataclass(frozen=True)
class Expected:
    """One row of the next step: its pages as they now are, and by how much that moved what the reference says."""

    place: Place
    kind: str  # "" for a row whose pages were left alone
    before: Bits
    pages: Bits
    plain: np.ndarray  # [V]: the reference on the pages as they were
    now: np.ndarray  # [V]: on them as they are
    noise: np.ndarray  # [ORDERS, V]: other orders of the same sums, less `plain`
    bound: float  # |difference| of a logit that another order can make

    @property
    def moved(self) -> float:
        return float(np.abs(self.now - self.plain).max())

    @property
    def tells(self) -> bool:
        """The change moved some logit by more than twice the bound; or by more than twice the noise of any logit, and all of
        them further than twice SAFETY times what noise goes along its direction."""
        along = float(np.abs(self.noise @ (self.now - self.plain)).max())
        seen = float(np.abs(self.noise).max())
        beyond_noise = self.moved > MATTERS * seen and MATTERS * SAFETY * along < self._square
        return self.moved > MATTERS * self.bound or beyond_noise

    @property
    def _square(self) -> float:
        return float(np.square(self.now - self.plain).sum())

    def share(self, got: np.ndarray) -> float:
        """How far `got` went with the change: 0 answers on the pages as they were, 1 on them as they are."""
        return float((got - self.plain) @ (self.now - self.plain)) / self._square


def expect(probe: Probe, place: Place, kind: str, before: Bits, now: Bits) -> Expected:
    """Asks the reference; the bound is another order's noise on these very pages, or the probe's where that is larger."""
    reference, layers = probe.reference, probe.layers
    question = _question(probe, place, before)
    plain = reference.on_pages(*question, layers=layers)[-1]
    noise = reference.orders_on_pages(probe.arena.layout.dtype, *question, layers=layers)[:, -1] - plain
    answer = plain if now is before else reference.on_pages(*_question(probe, place, now), layers=layers)[-1]
    return Expected(place, kind, before, now, plain, answer, noise, bound(probe, noise))


def bound(probe: Probe, noise: np.ndarray) -> float:
    """Most that another order of the same sums can differ on given pages, a logit."""
    return max(probe.bounds.logit, SAFETY * float(np.abs(noise).max()))


def _question(probe: Probe, place: Place, pages: Bits) -> tuple[list[int], int, np.ndarray, np.ndarray]:
    """Of the tokens before its pages' end only their number counts."""
    keys, values = (float32(bits, probe.arena.layout.dtype) for bits in pages)
    return [0] * place.start + [*place.inputs], place.start, keys, values


class Judge:
    """Holds answers against what is expected, row by row and, where a bound is wider than what a change moves, all rows together."""

    def __init__(self) -> None:
        self.worst = 0.0  # largest difference, as a share of its bound
        self.followed: list[
            tuple[float, str]
        ] = []  # of rows whose change tells: how far they went with it, and evidence

    def see(self, row: Expected, got: np.ndarray, what: str) -> None:
        """Logits [V] must be those of the pages as they are, each within the bound."""
        off, was = (np.nan_to_num(np.abs(got - other), nan=np.inf) for other in (row.now, row.plain))
        token = int(off.argmax())
        evidence = (
            f"request {row.place.request}, {what} before it had {row.place.context} tokens: logit {token} is {got[token]:.5g}, on "
            f"those very pages {row.now[token]:.5g}, off by {off.max():.4g}, bound {row.bound:.4g}; it is {was.max():.4g} from what "
            f"the pages said before, from where they moved {row.moved:.4g}"
        )
        if not off.max() <= row.bound:
            raise Caught(evidence)
        self.worst = max(self.worst, float(off.max()) / row.bound)
        if row.kind and row.tells:
            self.followed.append((row.share(got), evidence))

    def require_followed(self) -> None:
        """Most of the rows must be nearer to the changed pages than to the former ones. One may not: a token at the edge between two
        experts goes to the other one by noise alone."""
        if self.followed and np.median([share for share, _ in self.followed]) <= 0.5:
            raise Caught(f"most of {len(self.followed)} answers went with the former pages; {min(self.followed)[1]}")


class Meddler:
    """Changes pages before decode steps that nobody can know, and holds the answers against the reference on those pages."""

    def __init__(self, probe: Probe) -> None:
        self.probe, self.rng = probe, np.random.default_rng(probe.secret())
        self.moment = Moment(self.rng, most=last_decode(probe))
        self.first = self.moment.left  # decodes before the first change
        self.expected: list[Expected] = []
        self.changed = False  # whether this replay has seen a change
        self.seen: Counter[str] = Counter()
        self.judge, self.least_moved = Judge(), np.inf

    @property
    def missing(self) -> list[Kind]:
        return [kind for kind in KINDS if not self.seen[kind.__name__]]

    def begin_again(self) -> None:
        """A replay of the same prompts: by the first change here, the last one had answered its first rows unchanged."""
        self.expected, self.changed = [], False
        self.first = self.moment.left = int(self.rng.integers(0, self.first + 1))

    def before(self, step: Step) -> None:
        self.expected = []
        if not self.moment.has_come(step):
            return
        rows = [place for place in places(step) if place.start > 1]
        self.rng.shuffle(rows)  # type: ignore[arg-type]
        kinds = sorted(KINDS, key=lambda kind: (self.seen[kind.__name__], self.rng.random()))
        for kind in kinds[:AT_ONCE]:
            if len(rows) > 1:
                self._change(kind, rows)
        if rows:
            place = rows.pop()
            pages = self._read(place)
            self.expected.append(self._expect(place, "", pages, pages))

    def _change(self, kind: Kind, rows: list[Place]) -> None:
        """Takes the rows that it changes out of `rows`; those that it only copies from stay."""
        place, other = rows.pop(), rows[-1]
        before, theirs_before = self._read(place), self._read(other)
        plain = self._expect(place, "", before, before)
        for strength in range(TRIES):
            pages, theirs = _copy(before), _copy(theirs_before)
            kind(self.rng, pages, theirs, strength)
            found = dataclasses.replace(
                plain, kind=kind.__name__, before=before, pages=pages, now=self._answer(place, pages)
            )
            if found.tells:
                break
        else:
            return  # these rows, with these contents, do not tell; their pages are as they were
        self._write(place, pages)
        self.expected.append(found)
        if not all(map(np.array_equal, theirs, theirs_before)):
            self._write(rows.pop(), theirs)
            self.expected.append(self._expect(other, kind.__name__, theirs_before, theirs))

    def _expect(self, place: Place, kind: str, before: Bits, now: Bits) -> Expected:
        return expect(self.probe, place, kind, before, now)

    def after(self, step: Step, runs: list[Sequence[int]]) -> None:
        logits = self.probe.arena.logits(len(step.request_ids)) if self.expected else np.zeros(0)
        for row in self.expected:
            emitted = tuple(int(run[row.place.logits_row]) for run in runs[:-1])
            if emitted:  # the logits that lie there follow them
                place = dataclasses.replace(row.place, inputs=row.place.inputs + emitted)
                row = self._expect(place, row.kind, row.before, row.pages)
            what = f"its pages {row.kind}" if row.kind else "others' pages changed, not its own"
            self.judge.see(row, logits[row.place.logits_row], what)
            self.seen[row.kind] += not row.kind or row.tells
            if row.kind:
                self.changed = True
                self.least_moved = min(self.least_moved, row.moved / row.bound)

    def _answer(self, place: Place, pages: Bits) -> np.ndarray:
        question = _question(self.probe, place, pages)
        return self.probe.reference.on_pages(*question, layers=self.probe.layers)[-1]

    def _slots(self, place: Place) -> np.ndarray:
        return slots_of(self.probe.arena, place.blocks, place.start)

    def _read(self, place: Place) -> Bits:
        return read_slots(self.probe.arena, self.probe.layers, self._slots(place))

    def _write(self, place: Place, pages: Bits) -> None:
        write_slots(self.probe.arena, self.probe.layers, self._slots(place), *pages)


def _copy(pages: Bits) -> Bits:
    return pages[0].copy(), pages[1].copy()


def own_pages(probe: Probe) -> dict[str, Any]:
    """In replays as they are timed the authority changes pages between two steps: the next answers are those of the changed pages.

    Prompts are replayed twice, so that who remembers what it answered to them answers wrongly. Each kind of change must have been
    seen and have moved the reference beyond doubt, or the gate has not passed.
    """
    meddler = Meddler(probe)
    for again in range(REPLAYS):
        if again % 2 == 0:
            drawn = draw(probe)
        meddler.begin_again()
        watch = Watch(probe.worker, meddler.before, meddler.after)
        replay(probe, watch, lambda: meddler.changed, drawn)
        if again % 2 == 1 and not meddler.missing:
            meddler.judge.require_followed()
            return {
                "changes": {kind.__name__: meddler.seen[kind.__name__] for kind in KINDS}, "left_alone": meddler.seen[""],
                "worst_share_of_bound": meddler.judge.worst, "least_moved_in_bounds": float(meddler.least_moved),
            }  # fmt: skip
    names = ", ".join(kind.__name__ for kind in meddler.missing)
    raise Unverifiable(f"in {REPLAYS} replays no change of these kinds moved the reference beyond doubt: {names}")
