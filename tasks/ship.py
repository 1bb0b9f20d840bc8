"""Node `ship`: the approved release goes to the running server; tokens/s before and after by flipping it A B B A.

The server decides. What it accepted is written to <state>/releases/; what it refused is recorded with its reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tideforge.data.files import canonical_json, write_whole
from tideforge.data.workload import Workload
from tideforge.engine.release import Decision, Gain, Release, load_forward, read_approvers, sign, verify
from tideforge.engine.releases import next_number, release_files
from tideforge.errors import Refused, UserError
from tideforge.tasks import live
from tideforge.tasks.approve import check_release, read_release, state_of
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.store import Manifest, Run

STREAMS = 8  # open at a flip, at least
STREAM_TOKENS = 16
ROLLBACK_S = 3600


@dataclasses.dataclass(frozen=True)
class Load:
    """What the server gets while it is measured. `first` and `second` are drawn apart, so no prefix is cached twice."""

    streams: tuple[live.Prompt, ...]
    first: tuple[live.Prompt, ...]
    second: tuple[live.Prompt, ...]
    users: int

    @classmethod
    def of(cls, workload: Workload, model: str) -> Load:
        shapes = workload.held_out[: max(workload.users, 1)]
        answers = [max(2, shape.output_tokens) for shape in shapes]
        blocks = list(zip((shape.prompt_tokens for shape in shapes), answers, strict=True))
        asked = blocks * 2 + [(16, STREAM_TOKENS)] * STREAMS
        held_out, longest = workload.corpus[len(workload.corpus) // 2 :], max(tokens for tokens, _ in asked)
        if len(held_out) - longest < len(asked):
            raise UserError(
                "workload", f"has {len(held_out)} held-out tokens of text, too few", "give it a longer corpus"
            )
        starts = random.Random(workload.seed + 1).sample(range(len(held_out) - longest), len(asked))
        prompts = [
            live.Prompt(tuple(held_out[start : start + tokens]), most, model)
            for start, (tokens, most) in zip(starts, asked, strict=True)
        ]
        first, second, streams = (
            tuple(prompts[: len(shapes)]),
            tuple(prompts[len(shapes) : -STREAMS]),
            tuple(prompts[-STREAMS:]),
        )
        return cls(streams, first, second, workload.users)


@dataclasses.dataclass
class Record:
    """What happened, as it happens."""

    blocks: list[tuple[str, live.HttpFigures]] = dataclasses.field(default_factory=list)
    flips: list[live.Flip] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    serves: str | None = None  # the server's own word at the end: the forward of this run, if that serves
    problem: str = ""

    def tps(self, name: str) -> float | None:
        of = [figures for which, figures in self.blocks if which == name]
        return sum(one.tokens for one in of) / sum(one.seconds for one in of) if of else None

    @property
    def failed(self) -> int | None:
        """Requests that failed or answered wrongly; None when nothing was measured."""
        if not self.blocks and not self.flips:
            return None
        streams = sum(bool(one.problem) for flip in self.flips for one in flip.streams)
        return sum(figures.failed for _, figures in self.blocks) + streams + len(self.wrong)

    def to_json(self) -> dict[str, Any]:
        flips = [{**dataclasses.asdict(flip), "open_streams": flip.open_streams} for flip in self.flips]
        blocks = [{"forward": name, **dataclasses.asdict(figures)} for name, figures in self.blocks]
        return {"blocks": blocks, "flips": flips, "wrong": self.wrong, "serves": self.serves, "problem": self.problem}

    def figures(self) -> dict[str, Any]:
        """What ship.json shows at a glance."""
        return {
            "shipped": self.serves,
            "problem": self.problem,
            "http_tps_before": self.tps("incumbent"),
            "http_tps_after": self.tps("forward"),
            "failed_requests": self.failed,
            "wrong_outputs": len(self.wrong),
            "open_streams": min((flip.open_streams for flip in self.flips), default=0),
            "checked_streams": sum(len(flip.streams) for flip in self.flips),
        }


def ship(run: Run, endpoint: Endpoint, moved: Callable[..., object] | None = None) -> Manifest:
    """ship.json; output live: all that was measured, also of a ship that was refused on the way; extra: its figures."""
    inputs = _inputs(run)
    if done := run.done("ship", inputs):
        return done
    started, record = time.time(), Record()
    try:
        release, code, why = _approved(run)
        workload = Workload.read(run.path(run.need("workload"), "workload"))
        load = Load.of(workload, live.model_name(live.server_url(state_of(run))))
        _ship_and_measure(run, release, code, why, load, record)
    except Refused as refusal:
        record.serves, record.problem = _serves(run), str(refusal)
        if record.serves:  # refused after the server had taken it: what failed is the measuring
            _close_window(run)
    if record.serves:
        (moved or _champion())(endpoint, "ship", record.serves, run)
    return run.finish("ship", inputs, {"live": run.write_json("live", record.to_json())}, record.figures(), started)


def _serves(run: Run) -> str | None:
    """The forward that the server has accepted from this run and that it serves, whatever happened afterwards."""
    mine = [entry["record"]["forward"] for entry in releases(state_of(run)) if entry["record"]["run"] == run.id]
    try:
        return str(mine[-1]) if mine and live.version(state_of(run))["forward"] == mine[-1] else None
    except UserError:  # no server answers: nobody can say that it serves
        return None


def _close_window(run: Run) -> None:
    """Nothing will be measured any more, so nobody needs to flip: the node has its final record."""
    last = {"nonce": read_release(run).nonce, "to": "forward", "done": True}
    with contextlib.suppress(Refused, UserError):  # closed already, or no server
        live.ask("POST", f"{live.server_url(state_of(run))}/admin/flip", last)


def _champion() -> Callable[..., object]:
    from tideforge.tasks.track import moved

    return moved


def _inputs(run: Run) -> dict[str, str]:
    manifests = {node: run.manifest(node) for node in ("release", "approval")}
    return {
        f"{node}.{name}": output.sha256
        for node, manifest in manifests.items()
        if manifest is not None
        for name, output in manifest.outputs.items()
    }


def _approved(run: Run) -> tuple[Release, str, str]:
    """Record, code and reason of an approval; Refused when the run was not approved or must not ship."""
    approval = run.manifest("approval")
    if approval is None:
        read_release(run)  # says so when there was nothing to approve
        raise Refused("nobody has approved this run")
    decision = run.read_json(approval, "decision")
    if decision["decision"] != Decision.APPROVE:
        raise Refused(f"rejected by {decision['who']}: {decision['why'] or 'no reason given'}")
    if shipped_already(state_of(run), read_release(run).nonce):
        return read_release(run), str(decision["code"]), str(decision["why"])
    return check_release(run), str(decision["code"]), str(decision["why"])


def _ship_and_measure(run: Run, release: Release, code: str, why: str, load: Load, record: Record) -> None:
    """A B B A. After an interruption the release serves already: then every switch is a flip of the approved pair."""
    state, body = state_of(run), {"record": release.to_record(), "code": code}
    url = live.server_url(state)
    texts: dict[str, live.Texts] = {}

    def switch(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        record.flips.append(live.flip_under_streams(url, load.streams, path, body, STREAMS))
        answer = record.flips[-1].answer
        if answer["status"] != 200:
            raise Refused(live.reason(answer, answer["status"]))
        return answer

    def flip(to: str, done: bool = False) -> None:
        switch("/admin/flip", {"nonce": release.nonce, "to": to, "done": done})

    def block(name: str, prompts: Sequence[live.Prompt]) -> None:
        record.blocks.append((name, live.measure_http(url, prompts, load.users)))

    again, serving = shipped_already(state, release.nonce), str(live.version(state)["forward"])
    if not again and serving != release.incumbent:  # the server would say so too, after a minute of load
        raise Refused(f"stale: {serving[:12]} serves now, the release was measured against {release.incumbent[:12]}")
    if again and serving == release.forward:
        live.ask("POST", f"{url}/admin/flip", {"nonce": release.nonce, "to": "incumbent"})
    try:
        texts["incumbent"] = live.texts(url, load.streams)
        block("incumbent", load.first)
        if again:
            flip("forward")
        else:
            answer = switch("/admin/ship", body)
            keep_release(state, release, code, str(answer.get("who", "")), why, Decision.APPROVE)
        texts["forward"] = live.texts(url, load.streams)
        block("forward", load.first)
        block("forward", load.second)
        flip("incumbent")
        block("incumbent", load.second)
        flip("forward", done=True)
        record.serves = str(record.flips[-1].answer["forward"])
    finally:
        _judge(record, texts)
        if shipped_already(state, release.nonce) and live.version(state)["forward"] != release.forward:
            live.ask("POST", f"{url}/admin/flip", {"nonce": release.nonce, "to": "forward"})


def _judge(record: Record, texts: Mapping[str, live.Texts]) -> None:
    """Which streams around a flip answered what neither forward would. A flip to a forward not heard yet goes unjudged."""
    for number, one in enumerate(record.flips):
        old, new = ("incumbent", "forward") if number % 2 == 0 else ("forward", "incumbent")
        if old in texts and new in texts:
            record.wrong += live.wrong_streams(one, texts[old], texts[new])


# --- the releases of an endpoint


def releases(state: Path) -> list[dict[str, Any]]:
    """The files of <state>/releases/ in order, each with its number under `n`. Unreadable ones are named on standard error."""
    blank = {"decision": "", "who": "", "shipped_at": 0.0}
    return [{**blank, **raw, "n": number} for number, raw in release_files(state / "releases")]


def shipped_already(state: Path, nonce: str) -> bool:
    return any(entry["record"]["nonce"] == nonce for entry in releases(state))


def keep_release(state: Path, release: Release, code: str, who: str, why: str, decision: Decision) -> Path:
    """<state>/releases/<n>-<id>.json. The server writes it when it flips; here the reason joins it."""
    known = next((entry for entry in releases(state) if entry["record"]["nonce"] == release.nonce), None)
    number = int(known["n"]) if known else next_number(state / "releases")
    path = state / "releases" / f"{number:04d}-{release.forward[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {
        "decision": str(decision),
        "who": who,
        "why": why,
        "shipped_at": known["shipped_at"] if known else time.time(),
        "code": code,
        "record": release.to_record(),
    }
    write_whole(path, canonical_json(entry))
    return path


def rollback_release(state: Path, to: int | None) -> Release:
    """The unsigned record that goes back: to what served before the last release, or to release number `to`.

    Only a forward that an approver's signature stands behind, or the incumbent that such a release names, can return.
    """
    server, entries, now = live.version(state), releases(state), int(time.time())
    chosen = [entry for entry in entries if entry["n"] == to] if to is not None else entries[-1:]
    if not chosen:
        raise UserError(f"--to {to}" if to is not None else str(state), "no such release", "see `tideforge releases`")
    entry = chosen[0]
    record = verify(entry["record"], entry["code"], read_approvers(state / "approvers.json")).release
    target = record.forward if to is not None else record.incumbent
    if target == server["forward"]:
        raise UserError(f"forward {target[:12]}", "serves already", "choose another with --to N")
    load_forward(state / "forwards", target)
    return Release(
        run=record.run,
        endpoint=record.endpoint,
        forward=target,
        incumbent=str(server["forward"]),
        layout=record.layout,
        weights_sha256=str(server["weights_sha256"]),
        launch=str(server["launch"]),
        environment=live.environment_of(server),
        verdict_sha256=record.verdict_sha256,
        gain=Gain(),
        created_at=now,
        expires_at=now + ROLLBACK_S,
        previous=str(server["release"]),
        go_back=f"tideforge rollback returns to forward {server['forward'][:12]}",
    )


def roll_back(state: Path, release: Release, private_key: Any, who: str, why: str) -> Path:
    """Signs, posts and records. Raises Refused with the server's reason."""
    code = sign(private_key, release, Decision.ROLLBACK, who)
    answer = live.ask("POST", f"{live.server_url(state)}/admin/rollback", {"record": release.to_record(), "code": code})
    return keep_release(state, release, code, str(answer.get("who", who)), why, Decision.ROLLBACK)
