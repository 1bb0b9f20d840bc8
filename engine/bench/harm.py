"""The harmful list, three times over, a good candidate after each: what is told of each kind, and what it costs the next."""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from tideforge.engine.bench import harmful, trials
from tideforge.engine.bench.job import HARM, TINY, Job, Load
from tideforge.engine.bench.report import Figure, Reading, Record, quantile
from tideforge.engine.bench.running import Plan, Running, running
from tideforge.engine.forward import Forward
from tideforge.errors import TideforgeError, UserError

LOAD = Load("llama-3.2-1b", users=1, prompt=32, output=17, passes=1)
ROUNDS = 3
SMALL = 8  # harmful candidates on the CPU: the whole list is in the tests there
PAIR_S = 21.0  # so much time, and that of a hang, must be left for a harmful candidate and the good one behind it
MEMORY_BYTES, SMALL_BYTES = 2 << 30, 1 << 30  # that a worker may hold on the host, beside a GPU and without
EMBEDDING = "(320, 64)"  # the shape by which one of the kinds finds the weights; that of the tiny models


def measure(job: Job, record: Record) -> None:
    folders = [HARM / "harm", *([HARM / "harm_gpu"] if job.on_gpu else [])]
    if not folders[0].is_dir():
        raise UserError(
            str(folders[0]), "is not there", "run this part in a checkout: the harmful list is not installed"
        )
    kinds = harmful.kinds(*folders)
    order = sequence(kinds, ROUNDS)
    order = order[: job.count(len(order), SMALL)]
    memory = MEMORY_BYTES if job.on_gpu else SMALL_BYTES
    plan = Plan(job.load(LOAD, TINY), trial_s=harmful.hang_s(memory), worker_memory_bytes=memory)
    if len(record.of("pair")) >= len(order):
        return
    record.add("hang", seconds=plan.trial_s)
    with running(job, record, plan) as service:
        record.add_trial(service.ended(service.submit(trials.variant(service.plain, -service.run, False)), "first"))
        try:
            while len(record.of("pair")) < len(order) and job.left_s > PAIR_S + plan.trial_s:
                _pair(job, service, record, kinds, order)
        finally:
            events = ("service_start", "service_died", "weight_load", "incumbent_died")
            record.add("counts", **{event: service.events(event) for event in events})


def sequence(kinds: harmful.Kinds, rounds: int) -> list[tuple[str, str]]:
    """(phase, name) of each kind once a round, shuffled; a kind's phases take turns."""
    order: list[tuple[str, str]] = []
    for turn in range(rounds):
        parts = [(sorted(kind.OUTCOMES)[turn % len(kind.OUTCOMES)], name) for name, kind in kinds.items()]
        random.Random(turn).shuffle(parts)
        order += parts
    return order


def _pair(job: Job, service: Running, record: Record, kinds: harmful.Kinds, order: Sequence[tuple[str, str]]) -> None:
    """A harmful candidate with a good one waiting behind it."""
    index = len(record.of("pair"))
    phase, name = order[index]
    bad = fitted(harmful.candidate(service.plain, [(phase, name)], kinds), job, record, index)
    names = service.submit(bad), service.submit(trials.variant(service.plain, 1000 + index, False))
    outcomes = harmful.expected(kinds[name], phase, job.on_gpu)
    try:
        for one, label in zip(names, ("bad", "good"), strict=True):
            record.add_trial(service.ended(one, label))
    except TideforgeError as error:
        record.add("pair", phase=phase, harm=name, expected=outcomes, lost=str(error))
        raise
    record.add("pair", phase=phase, harm=name, expected=outcomes, lost="")


def fitted(forward: Forward, job: Job, record: Record, index: int) -> Forward:
    """A source of its own, also on the second time round, whose harm finds this model's weights."""
    config = json.loads((job.model(job.load(LOAD, TINY).shape) / "config.json").read_text())
    shape = str((config["vocab_size"], config["hidden_size"]))
    files = {name: text.replace(EMBEDDING, shape) for name, text in forward.files.items()}
    return Forward({**files, "forward.py": files["forward.py"] + f"\n# {record.runs} {index}\n"})


def figures(record: Record) -> list[Figure]:
    pairs, bad, good = record.of("pair"), record.trials("bad"), record.trials("good")
    counts, couples = record.of("counts"), list(paired(record))
    recovered = [(before, after) for _, before, after in couples if before and after and after.passed]
    waits = [max(0.0, after.timed_by - before.ended_at) for before, after in recovered]
    ends = [max(0.0, after.ended_at - before.ended_at) for before, after in recovered]
    lost = sum(bool(pair["lost"]) for pair in pairs) + sum(not reading.passed for reading in good)
    restarts = sum(line["service_start"] - 1 + line["service_died"] for line in counts)
    told = collections.Counter(str(reading.trial.outcome) for reading in bad)
    wrong = [
        f"{pair['harm']} in {pair['phase']}: {reading.trial.outcome}, not {' or '.join(pair['expected'])} "
        f"({reading.trial.message[:100]})"
        for pair, reading, _ in couples
        if reading and str(reading.trial.outcome) not in pair["expected"]
    ]
    return [
        Figure("harmful candidates", len(bad), "", "three times 49 kinds"),
        Figure.at_most("service restarts", restarts if counts else None, "", "0", 0),
        Figure.at_most(
            "weight loads", sum(x["weight_load"] - 1 for x in counts) if counts else None, "after the first", "0", 0
        ),
        Figure.at_most("lost trials, good ones that failed among them", lost if pairs else None, "", "0", 0),
        Figure(
            "the incumbent's worker died", sum(x["incumbent_died"] for x in counts) if counts else None, "times", "0"
        ),
        Figure.at_most("outcome to next good trial's first timed step, median", quantile(waits, 0.5), "s", "1.0", 5),
        Figure("the same, most", max(waits, default=None), "s", "3"),
        Figure("outcome to next good trial's end, median", quantile(ends, 0.5), "s", "1.3"),
        Figure(
            "an import or a build is called hung after",
            max((x["seconds"] for x in record.of("hang")), default=None),
            "s",
            "4",
        ),
        Figure("harmful trial, median", quantile(list(map(_seconds, bad)), 0.5), "s", "1.0"),
        Figure("harmful trial, longest", max(map(_seconds, bad), default=None), "s", "8"),
        Figure("outcomes", ", ".join(f"{count} {name}" for name, count in told.most_common()) or None, "", ""),
        Figure.at_most("other outcomes than expected", len(wrong) if bad else None, "", "3: a left thread a round", 0),
        *(Figure("", text, "", "") for text in wrong),
    ]


def paired(record: Record) -> Iterator[tuple[dict[str, Any], Reading | None, Reading | None]]:
    """Each pair's line with the bad and the good reading before it; None for one that was lost."""
    seen: dict[str, Reading] = {}
    for line in record.lines:
        if line["kind"] == "trial":
            seen[line["label"]] = Reading.of_line(line)
        elif line["kind"] == "pair":
            yield line, seen.pop("bad", None), seen.pop("good", None)


def _seconds(reading: Reading) -> float:
    return reading.ended_at - reading.turn_at
