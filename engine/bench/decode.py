"""Decoding through the engine against bare replays of the same graph, over HTTP, and in vLLM, in one part.

The engine's rate is what arrives in the authority's process over the Unix socket, scheduling and streaming included. The
bare rate is the same forward's graph replayed in a loop with nothing around it, at the same contexts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from pathlib import Path

from tideforge.data.workload import RequestShape
from tideforge.engine import measure as measuring
from tideforge.engine.bench import beside, served
from tideforge.engine.bench.bare import bare_rate, prompts
from tideforge.engine.bench.job import MODELS, TINY, Job, Load
from tideforge.engine.bench.report import Figure, Record
from tideforge.engine.config import Settings
from tideforge.engine.forward import Forward
from tideforge.engine.lab import Lab, end_keeper
from tideforge.engine.service_config import new_core

LOADS = (Load("llama-3.2-1b", 1, 32, 128, 1), Load("llama-3.2-1b", 64, 512, 128, 1))
SMALL = (dataclasses.replace(TINY, users=1, output=16), dataclasses.replace(TINY, users=4, prompt=16, output=16))
REPEATS = 5
STARTS = (("default", True), ("default", False), ("full-decode", False))  # vLLM's modes; whether with empty caches
PREDICTED = {1: ("580", "0.98", "520", "1.0"), 64: ("16,000", "0.94", "9,000", "0.85")}  # RPC, share, HTTP, beside vLLM
GOALS = {1: 1.0, 64: 0.9}  # of vLLM's better mode
SHARE = 0.95
MUST = (1,)  # users, for whom decoding must reach that share


@dataclasses.dataclass(frozen=True)
class Rates:
    """Output tokens/s, medians over repeats."""

    users: int
    prompt: int
    output: int
    engine_tps: float  # over the whole block, prefill included
    engine_decode_tps: float  # from each user's first token on
    bare_tps: float  # graph replays alone

    @property
    def share(self) -> float:
        return self.engine_decode_tps / self.bare_tps


def measure(job: Job, record: Record) -> None:
    loads = LOADS if job.on_gpu else SMALL
    done = {line["users"] for line in record.of("rates")}
    if any(load.users not in done for load in loads):
        state = job.state / f"decode-{record.runs}"
        try:
            with contextlib.closing(Lab(settings(job, loads[-1], state))) as lab:
                for load in loads:
                    found = rates(
                        lab, Forward.load(MODELS / load.forward), load.users, load.prompt, load.output, REPEATS
                    )
                    record.add("rates", **dataclasses.asdict(found))
        finally:
            end_keeper(state)
    if not record.of("http"):
        over_http(job, record, loads)
    for mode, cold in STARTS if job.on_gpu else ():
        if beside.started(record, cold, mode) is None:
            beside.start(job, record, list(loads), mode, cold, repeats=REPEATS)


def settings(job: Job, load: Load, state: Path) -> Settings:
    """Long runs of decodes, on the CPU too: their pages are there from the first one on, as bare replays need them."""
    chosen = job.settings(load, state)
    return dataclasses.replace(chosen, limits=dataclasses.replace(chosen.limits, decode_steps=64))


def over_http(job: Job, record: Record, loads: tuple[Load, ...]) -> None:
    """The same requests to the HTTP server in a process of its own, read as streams here."""
    if missing := served.missing_packages():
        print(f"over HTTP: not measured, {', '.join(missing)} cannot be imported")
        return
    with served.serving(job, record, loads[-1]) as server:
        for load in loads:
            blocks = [server.block(load, seed) for seed in range(REPEATS + 1)][1:]
            tps = [load.users * load.output / block.seconds for block in blocks]
            decode = [load.users * (load.output - 1) / block.decode_s for block in blocks]
            failed = sum(bool(stream.problem) for block in blocks for stream in block.streams)
            record.add("http", users=load.users, tps=tps, decode_tps=decode, failed=failed)


def figures(record: Record) -> list[Figure]:
    found: list[Figure] = []
    lines = {line["users"]: line for line in record.of("rates")}
    for users, line in lines.items():
        one = Rates(**{name: value for name, value in line.items() if name != "kind"})
        rpc, share, http, ratio = PREDICTED.get(users, ("", "", "", ""))
        name = f"{users} user{'s' if users > 1 else ''}, {one.prompt} + {one.output}"
        found += [
            Figure(f"{name}: engine, whole blocks", one.engine_tps, "tokens/s", rpc),
            Figure(f"{name}: engine, decoding", one.engine_decode_tps, "tokens/s", ""),
            Figure(f"{name}: bare replays", one.bare_tps, "tokens/s", ""),
            Figure.at_least(f"{name}: decoding / bare replays", one.share, "", share, SHARE)
            if users in MUST
            else Figure(f"{name}: decoding / bare replays", one.share, "", share),
        ]
        for over in (line for line in record.of("http") if line["users"] == users):
            tps = statistics.median(over["tps"])
            found.append(Figure(f"{name}: over HTTP, whole blocks", tps, "tokens/s", http))
            found.append(Figure(f"{name}: over HTTP, decoding", statistics.median(over["decode_tps"]), "tokens/s", ""))
            found.append(Figure(f"{name}: over HTTP, failed", over["failed"], "requests", "0"))
        found += _beside_vllm(record, name, users, one, ratio)
    return found


def _beside_vllm(record: Record, name: str, users: int, one: Rates, predicted: str) -> list[Figure]:
    starts = [
        start for mode, cold in STARTS[1:] if (start := beside.started(record, cold, mode)) and users in start.cases
    ]
    rates_of = {start.mode: float(start.cases[users]["output_tps"]) for start in starts}
    best = max(rates_of.values(), default=None)
    found = [Figure(f"{name}: vLLM, {mode}", rate, "tokens/s", "") for mode, rate in rates_of.items()]
    found += [
        Figure(f"{name}: vLLM, {start.mode}, decoding", start.cases[users]["decode_tps"], "tokens/s", "")
        for start in starts
    ]
    ratio, name = one.engine_tps / best if best else None, f"{name}: engine / vLLM's better mode"
    if users not in GOALS:
        return [*found, Figure(name, ratio, "times", predicted)]
    return [*found, Figure.at_least(name, ratio, "times", predicted, GOALS[users])]


def rates(lab: Lab, forward: Forward, users: int, prompt: int, output: int, repeats: int = 5) -> Rates:
    """Raises CandidateError when the forward fails."""
    worker = lab.spawn(forward, lab.arena("bench"))
    try:
        side = measuring.Side.of(forward.id, new_core(lab.settings), worker)
        shapes = [RequestShape(prompt, output)] * users
        blocks = []
        for index in range(repeats + 1):
            blocks.append(measuring.run_block(side.core, forward.id, shapes, prompts(lab, shapes, index), users))
            if index == 0:  # kernels are compiled now
                lab.capture(worker)
    finally:
        lab.release(worker)
    decode = [_after_first(block) / (_last(block) - _first(block)) for block in blocks[1:]]
    return Rates(
        users, prompt, output,
        statistics.median(block.output_tps for block in blocks[1:]), statistics.median(decode),
        bare_rate(lab, forward, users, prompt, output, repeats),
    )  # fmt: skip


def _after_first(block: measuring.Block) -> int:
    """Tokens that came once every user had one: before, some were still in their prefill."""
    return sum(time_s > _first(block) for answer in block.answers for time_s in answer.times_s)


def _first(block: measuring.Block) -> float:
    return max(answer.times_s[0] for answer in block.answers)


def _last(block: measuring.Block) -> float:
    return max(answer.times_s[-1] for answer in block.answers)
