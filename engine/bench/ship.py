"""A live ship under load: 64 streams stay open while an approved forward takes over. Nothing fails, every token is right.

Each of 68 slots asks for its prompt again and again, so that 64 streams are open whenever the flip comes. An answer is
right when it equals the one of the same prompt before anything shipped (the arithmetic is the same), or else when every token
lies within the reference's bound: batches of other sizes may round otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tideforge.engine import check
from tideforge.engine.bench import served, trials
from tideforge.engine.bench.job import MODELS, Job, Load
from tideforge.engine.bench.report import Figure, Record
from tideforge.engine.bench.served import Served, Stream
from tideforge.engine.config import ModelConfig
from tideforge.engine.forward import Forward
from tideforge.engine.measure import Answer
from tideforge.engine.reference import Reference
from tideforge.errors import UserError

SPARE = 4  # a slot between two answers is not open: more slots than the streams that must be open
LOAD = Load("llama-3.2-1b", users=64 + SPARE, prompt=64, output=512, passes=1)
SMALL = Load("llama-tiny", users=4 + SPARE, prompt=8, output=32, passes=1, num_blocks=128)
BEGUN = 2  # tokens that each stream has before the ship is asked for
PASSPHRASE, APPROVER = "passphrase of a benchmark", "bench"


def measure(job: Job, record: Record) -> None:
    if missing := served.missing_packages():
        raise UserError(", ".join(missing), "cannot be imported", "install the extra `serve` for the part `ship`")
    if record.of("shipped"):
        return
    load = job.load(LOAD, SMALL)
    plain = Forward.load(MODELS / load.forward)
    other = trials.variant(plain, record.runs, False)
    with served.serving(job, record, load, lambda state: _trust(state, other)) as server:
        server.block(load, 1)  # warm
        quiet = server.block(load, 0).streams
        loaded, answer = asyncio.run(_ship_under_load(server, load, other))
    _judge(job, record, load, quiet, loaded)
    record.add("shipped", **answer)


def _trust(state: Path, forward: Forward) -> None:
    from tideforge.engine.release import add_approver, create_key, public_bytes

    key = create_key(state / "key.pem", PASSPHRASE)
    add_approver(state / "approvers.json", APPROVER, public_bytes(key))
    forward.save(state / "forwards")


async def _ship_under_load(server: Served, load: Load, forward: Forward) -> tuple[list[Stream], dict[str, Any]]:
    """Every stream of all slots until the ship is over and each slot has answered once more; the server's answer."""
    over, begun, streams = asyncio.Event(), asyncio.Semaphore(0), list[Stream]()

    def begins(count: int) -> None:
        if count == BEGUN:
            begun.release()

    async def slot(prompt: tuple[int, ...]) -> None:
        streams.append(await server.stream(prompt, load.output, begins))
        more = True
        while more:
            more = not over.is_set()  # one whole answer after the ship
            streams.append(await server.stream(prompt, load.output))

    slots = [asyncio.create_task(slot(prompt)) for prompt in server.prompts(load, 0)]
    try:
        for _ in slots:
            await asyncio.wait_for(begun.acquire(), served.READ_S)
        posted = time.time()
        told = await asyncio.to_thread(ship, server, forward)
    finally:
        over.set()
        await asyncio.gather(*slots)
    return streams, {"posted_at": posted, "answered_at": time.time(), "answer": told}


def ship(server: Served, forward: Forward) -> dict[str, Any]:
    """Signs a release as an approver does and posts it. Raises TideforgeError with what the server refused."""
    from tideforge.engine.release import Decision, Gain, Release, load_key, sign

    version, now = server.ask("/version"), int(time.time())
    release = Release(
        run="bench", endpoint=version["endpoint"], forward=forward.id, incumbent=version["forward"], layout="tp1",
        weights_sha256=version["weights_sha256"], launch=version["launch"],
        environment=tuple(sorted(version["environment"].items())), verdict_sha256="0" * 64, gain=Gain(),
        created_at=now, expires_at=now + 600, previous=version["release"], go_back="",
    )  # fmt: skip
    code = sign(load_key(server.state / "key.pem", PASSPHRASE), release, Decision.APPROVE, APPROVER)
    return server.ask("/admin/ship", {"record": release.to_record(), "signature": code})


def _judge(job: Job, record: Record, load: Load, quiet: Sequence[Stream], loaded: Sequence[Stream]) -> None:
    """A line for each stream. Those that differ from the quiet run are held against the reference, each chain once."""
    expected = {stream.prompt: stream.tokens for stream in quiet}
    gaps: dict[tuple[int, ...], float] = {}
    with contextlib.ExitStack() as stack:
        reference, bound = None, 0.0
        layers = range(ModelConfig.load(job.model(load.shape)).num_hidden_layers)
        for phase, streams in (("quiet", quiet), ("loaded", loaded)):
            for stream in streams:
                same = stream.tokens == expected[stream.prompt]
                if stream.tokens and not same and stream.tokens not in gaps:
                    if reference is None:
                        reference = stack.enter_context(
                            contextlib.closing(Reference.start(job.model(load.shape), device=job.device))
                        )
                        bound = reference.bounds(job.dtype, quiet[0].prompt + quiet[0].tokens).logit_gap
                    gaps[stream.tokens] = check.worst(reference, [Answer(stream.prompt, stream.tokens, ())], layers).gap
                gap = 0.0 if same else gaps.get(stream.tokens, 0.0)
                record.add(
                    "stream", phase=phase, tokens=len(stream.tokens), sent_at=stream.sent_at,
                    first_at=stream.times[0] if stream.times else None,
                    last_at=stream.times[-1] if stream.times else None, longest_gap_s=stream.longest_gap_s,
                    problem=stream.problem, same=same, shortfall=gap, bound=bound,
                )  # fmt: skip


def figures(record: Record) -> list[Figure]:
    shipped = record.last("shipped")
    if shipped is None:
        return [Figure("ship", None, "", "")]
    streams = [line for line in record.of("stream") if line["phase"] == "loaded"]
    quiet = [line for line in record.of("stream") if line["phase"] == "quiet"]
    flipped = shipped["answer"]["flipped_at"]
    whole = [line for line in streams if not line["problem"]]
    spans = [
        line for line in whole if line.get("sent_at", line["first_at"]) < flipped < line["last_at"]
    ]  # open since sent
    wrong = sum(line["shortfall"] > line["bound"] for line in whole)
    gaps = [1e3 * line["longest_gap_s"] for line in whole]
    return [
        Figure.at_least("streams open at the flip", len(spans), "", "66", len(quiet) - SPARE),
        Figure("that the old forward finished", shipped["answer"]["finishing"], "", "66"),
        Figure("streams in all", len(streams), "", "500"),
        Figure.at_most("failed", len(streams) - len(whole), "", "0", 0),
        Figure.at_most("wrong", wrong, "", "0", 0),
        Figure("equal to the unshipped answer", sum(line["same"] for line in whole), f"of {len(whole)}", "90 %"),
        Figure("largest shortfall / bound", max(
            (line["shortfall"] / line["bound"] for line in whole if line["bound"]), default=0.0), "", "0.5"),
        Figure("ship, from request to answer", shipped["answered_at"] - shipped["posted_at"], "s", "8"),
        Figure("longest gap between tokens, ship and all", max(gaps, default=None), "ms", "300"),
        Figure("longest gap of streams across the flip", max(
            (1e3 * line["longest_gap_s"] for line in spans), default=None), "ms", "300"),
        Figure("longest gap without a ship", max((1e3 * q["longest_gap_s"] for q in quiet), default=None), "ms", "20"),
        Figure("median of the streams' longest gaps", statistics.median(gaps) if gaps else None, "ms", "100"),
    ]  # fmt: skip
