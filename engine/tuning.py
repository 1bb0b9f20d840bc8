"""What a bench finds out of its incumbent before any candidate comes, once a night: its best knobs, and the noise floor."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tideforge.data.files import read_json, set_aside
from tideforge.engine import measure
from tideforge.engine.archive import write_atomic
from tideforge.engine.events import log_event
from tideforge.engine.service_config import new_core
from tideforge.engine.setting import Setting
from tideforge.errors import UserError

if TYPE_CHECKING:
    from tideforge.engine.evaluate import Bench

ROUNDS = 2
TUNED = "tuned.json"


def tuned_knobs(bench: Bench) -> dict[str, Any]:
    """The incumbent's best knobs by a plain search, frozen for every candidate. The first bench of a night's setting searches."""
    if (known := _known_knobs(bench).get(Setting.of(bench.config).id)) is not None:
        return known
    return best_knobs(bench) if bench.config.tune else bench.incumbent.knobs


def _known_knobs(bench: Bench) -> dict[str, dict[str, Any]]:
    """Those found before, by setting. A file that is damaged or names knobs that are none is set aside."""
    path = bench.config.night / TUNED

    def by_setting(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
        known = {str(setting): dict(knobs) for setting, knobs in raw.get("by_setting", {}).items()}
        for knobs in (raw["knobs"], *known.values()):
            bench.lab.settings.with_knobs(knobs)
        return known

    try:
        return read_json(path, by_setting, "remove it") if path.exists() else {}
    except UserError as error:
        log_event(bench.config.night, "damaged", path=str(set_aside(path)), problem=str(error))
        return {}


@contextlib.contextmanager
def one_bench_tunes(night: Path) -> Iterator[None]:
    """Benches of several devices start at once; all of them must come to the same knobs."""
    with (night / "tuned.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_tuned(bench: Bench, served: str) -> None:
    """`served`: the id under which the incumbent serves; with its tuned knobs it may have another.

    Knobs of other settings are kept: a candidate holds its incumbent's, and would be another forward with others.
    """
    knobs = {**_known_knobs(bench), Setting.of(bench.config).id: bench.incumbent.knobs}
    facts = {
        "knobs": bench.incumbent.knobs, "incumbent": bench.incumbent.id, "served": served,
        "bounds": dataclasses.asdict(bench.bounds), "by_setting": knobs,
    }  # fmt: skip
    write_atomic(bench.config.night / TUNED, json.dumps(facts))


def best_knobs(bench: Bench) -> dict[str, Any]:
    """max_num_batched_tokens by interleaved replays on the incumbent's own worker: two rounds, best median."""
    own, limits = bench.incumbent.knobs, bench.lab.settings.limits
    smaller = limits.max_num_batched_tokens // 4
    options = [own, {**own, "max_num_batched_tokens": smaller}] if smaller >= limits.max_num_seqs else [own]
    seconds: list[list[float]] = [[] for _ in options]
    with bench.lab.clock():
        for _ in range(ROUNDS):
            shapes, prompts = bench.replay()
            for knobs, spent in zip(options, seconds, strict=True):
                core = new_core(bench.lab.settings.with_knobs(knobs))
                side = measure.Side.of(bench.incumbent.id, core, bench.incumbent_worker)
                block = measure.run_block(side.core, side.forward, shapes, prompts, bench.workload.users)
                spent.append(block.seconds)
    best = min(range(len(options)), key=lambda index: statistics.median(seconds[index]))
    log_event(bench.config.night, "tuned", options=options, seconds=seconds, best=options[best])
    return options[best]


def noise(bench: Bench) -> tuple[float, ...]:
    """Log ratios of the incumbent against itself, each time in another fresh worker; of each worker of the incumbent its own."""
    logs = [math.log(bench.against_itself()) for _ in range(bench.config.noise_trials)]
    write_atomic(bench.config.night / f"noise{bench.config.lane}.json", json.dumps({"log_ratios": logs}))
    return tuple(logs)
