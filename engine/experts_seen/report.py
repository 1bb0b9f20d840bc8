"""Tables for people and one object for machines of what was counted, timed and priced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tideforge.engine.experts_seen import cost
from tideforge.engine.experts_seen.drawn import CORPUS, MIXED, RANDOM
from tideforge.engine.experts_seen.seen import IN_A_ROW, SAID, SAID_RANDOM, Seen
from tideforge.engine.measure import Interval


def compared(seen: Seen) -> list[tuple[str, str]]:
    """(kind, over which other): all kinds over the corpus, random ids over each text, answers over answers, neighbours over neighbours."""
    apart = [kind for kind in seen.counts if not kind.endswith(IN_A_ROW)]
    texts = apart[: apart.index(MIXED)]
    pairs = [(kind, CORPUS) for kind in apart if kind not in (CORPUS, SAID_RANDOM)]
    pairs += [(RANDOM, text) for text in texts if text != CORPUS]
    pairs += [(SAID_RANDOM, SAID)] if SAID in apart else []
    return pairs + [(RANDOM + IN_A_ROW, text + IN_A_ROW) for text in texts]


def misled(seen: Seen, small: cost.Model, large: cost.Model) -> dict[str, list[cost.Misled]]:
    """This model with what was counted, the large one with the same shares of an even router's experts, and with what is reported."""

    def share(kind: str, n: int) -> float:
        return seen.mean(kind, n).ratio / seen.even(n)

    found = {
        "this model": [
            cost.Misled.of(small, n, seen.mean(CORPUS, n).ratio, seen.mean(RANDOM, n).ratio) for n in seen.tokens
        ],
        f"{cost.LARGE}, same shares (assumed)": [
            cost.carried_over(large, n, share(CORPUS, n), share(RANDOM, n)) for n in seen.tokens
        ],
    }
    for excess in cost.REPORTED:
        name = f"{cost.LARGE}, +{100 * (excess - 1):.0f} % (reported elsewhere, assumed here)"
        found[name] = [cost.as_reported(large, n, excess) for n in seen.tokens]
    return found


def text(seen: Seen, prices: Mapping[str, Sequence[cost.Misled]], times: Mapping[int, Interval]) -> Iterator[str]:
    apart = [kind for kind in seen.counts if not kind.endswith(IN_A_ROW)]
    yield f"experts a layer of {seen.experts}, {seen.per_token} a token, tokens of a step from as many sequences; mean over layers:"
    yield from table(["tokens", "even router", *apart], seen.tokens, lambda n: [
        f"{seen.even(n):.2f}", *(f"{seen.mean(kind, n).ratio:.2f}" for kind in apart)
    ])  # fmt: skip
    yield "\nmore (+) or fewer (-) experts, %, with the 95 % interval over seeds, which knows these texts only:"
    pairs = compared(seen)
    names = [f"{kind} / {over}" for kind, over in pairs if not kind.endswith(IN_A_ROW)]
    chosen = pairs[: len(names)]
    yield from turned(names, seen.tokens, lambda n: [percent(seen.excess(*pair, n)) for pair in chosen])
    yield "\nthe same where the tokens are neighbours in one sequence:"
    yield from turned(
        [f"{kind} / {over}".replace(IN_A_ROW, "") for kind, over in pairs[len(names) :]], seen.tokens,
        lambda n: [percent(seen.excess(*pair, n)) for pair in pairs[len(names) :]],
    )  # fmt: skip
    layers = range(seen.counts[CORPUS].shape[-1])
    yield f"\n{RANDOM} / {CORPUS} by layer:"
    yield from turned([f"layer {layer}" for layer in layers], seen.tokens, lambda n: [
        percent(seen.excess(RANDOM, CORPUS, n, layer)) for layer in layers
    ])  # fmt: skip
    for name, rows in prices.items():
        yield f"\n{name}: a trial with random tokens beside one with real ones"
        yield from table(
            ["tokens", "experts, real", "random", "bytes moved, %", "step, %", "a gain, real", "random"],
            [row.tokens for row in rows],
            lambda n, rows=rows: _priced(next(row for row in rows if row.tokens == n)),  # type: ignore[misc]
        )
    if times:
        yield f"\nthe raw forward's mixtures on this CPU, its seconds for {RANDOM} over {CORPUS}, A B B A:"
        yield from turned(["seconds, %"], seen.tokens, lambda n: [percent(times[n])])


def _priced(row: cost.Misled) -> list[str]:
    ratios = (f"{100 * (ratio - 1):+.1f}" for ratio in (row.weight_bytes, row.step))
    return [f"{row.real:.1f}", f"{row.other:.1f}", *ratios, f"{row.gain_real:.3f}", f"{row.gain_other:.3f}"]


def percent(found: Interval) -> str:
    low, high = (f"{100 * (end - 1):+.1f}" for end in (found.low, found.high))
    return f"{100 * (found.ratio - 1):+.1f} [{low}, {high}]"


def table(head: Sequence[str], keys: Sequence[int], row: Callable[[int], list[str]]) -> Iterator[str]:
    return _lines([list(head), *([str(key), *row(key)] for key in keys)])


def turned(names: Sequence[str], keys: Sequence[int], column: Callable[[int], list[str]]) -> Iterator[str]:
    """A line a name, a column a key."""
    columns = [column(key) for key in keys]
    head = ["tokens", *map(str, keys)]
    return _lines([head, *([name, *(cells[i] for cells in columns)] for i, name in enumerate(names))])


def _lines(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )


def to_dict(seen: Seen, prices: Mapping[str, Sequence[cost.Misled]], times: Mapping[int, Interval]) -> dict[str, Any]:
    pairs = compared(seen)
    return {
        "experts": seen.experts, "per_token": seen.per_token,
        "even": {n: seen.even(n) for n in seen.tokens},
        "seen": {kind: {n: {**dataclasses.asdict(seen.mean(kind, n)), "layers": seen.layers(kind, n)} for n in seen.tokens}
                 for kind in seen.counts},
        "excess": [{"of": kind, "over": over, **{str(n): dataclasses.asdict(seen.excess(kind, over, n)) for n in seen.tokens}}
                   for kind, over in pairs],
        "misled": {name: [dataclasses.asdict(row) for row in rows] for name, rows in prices.items()},
        "seconds": {n: dataclasses.asdict(found) for n, found in times.items()},
    }  # fmt: skip


def rounded(value: Any) -> Any:
    """Every number to six figures."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
