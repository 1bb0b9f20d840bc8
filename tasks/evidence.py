"""A night's figures from its raw records: readings, trial files, signatures. No summary that a node left is believed.

A record that is gone, or does not have the hash that its node wrote down, raises UserError: it must not become a figure.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tideforge.data.files import read_json, sha256_file
from tideforge.engine import measure
from tideforge.engine.outcome import SLOW, Trial
from tideforge.engine.release import Approved, Decision, Release, read_approvers, verify
from tideforge.engine.releases import release_files
from tideforge.engine.setting import id_of
from tideforge.errors import MissingExtra, Refused, UserError
from tideforge.tasks.store import Manifest, Run

T = TypeVar("T")

RESTORE = "restore it from a copy of the run folder"
BEFORE = {
    "verify": "search",
    "release": "verify",
    "approval": "release",
}  # a node and the one that it cannot do without


def check_chain(run: Run, manifests: Mapping[str, Manifest]) -> None:
    """A node that ran proves that the one before it did: its manifest cannot be missing."""
    for node, earlier in BEFORE.items():
        if node in manifests and earlier not in manifests:
            raise UserError(str(run.folder / f"{earlier}.json"), f"is missing, but {node}.json is there", RESTORE)


def output(run: Run, manifest: Manifest | None, name: str) -> Any:
    """A node's output as JSON, its hash checked; None when the node did not run or did not make it."""
    if manifest is None or name not in manifest.outputs:
        return None
    return run.read_json(manifest, name)


def read_trials(run: Run, search: Manifest | None) -> tuple[Trial, ...]:
    """From trials/*/result.json, or submission.json where there is no result yet. A closed search has hashed all of them.

    Of one setting: the closed search's, else that of the engine's last start. Trials of others were not asked the same.
    """
    root = run.folder / "trials"
    found = {folder.name: _trial(folder) for folder in sorted(root.iterdir())} if root.is_dir() else {}
    listed = {raw["id"]: Trial.of(raw) for raw in output(run, search, "trials") or []}
    setting = next((trial.setting for trial in listed.values()), None)
    setting = id_of(run.folder) if setting is None else setting
    found = {name: trial for name, trial in found.items() if trial.setting == setting}
    if search is not None:
        _same_trials(root, found, listed)
    return tuple(found.values())


def _trial(folder: Path) -> Trial:
    path = next((p for p in (folder / "result.json", folder / "submission.json") if p.exists()), folder / "result.json")
    try:
        return Trial.read(path, RESTORE)
    except OSError:
        raise UserError(str(path), "is missing", RESTORE) from None


def _same_trials(root: Path, found: Mapping[str, Trial], listed: Mapping[str, Trial]) -> None:
    for name in sorted({*found, *listed}):
        if name not in listed or name not in found or found[name] != listed[name]:
            path = root / name / "result.json"
            raise UserError(str(path), "is missing, was changed or was added after the search", RESTORE)


def forwards(run: Run, search: Manifest | None) -> tuple[str | None, str | None]:
    """(served, incumbent) as the engine wrote them down when it had tuned the knobs."""
    if search is None:
        return None, None
    path = run.folder / "tuned.json"
    names = _json(path, lambda raw: (str(raw["served"]), str(raw["incumbent"])))
    if search.extra.get("tuned_sha256", sha256_file(path)) != sha256_file(path):
        raise UserError(str(path), "was changed after the search", RESTORE)
    return names


def noise_of(run: Run, search: Manifest) -> tuple[float, ...]:
    """Log ratios of the incumbent against itself. UserError when the search took other ones along to verification."""
    path = run.folder / "noise.json"
    found = _json(path, lambda raw: tuple(map(float, raw["log_ratios"])))
    if list(found) != list(search.extra.get("noise", found)):
        raise UserError(str(path), "differs from the noise that search.json names", RESTORE)
    return found


def searched_for(run: Run) -> str | None:
    """The figure that the engine's trials raised, as it was started; None before that."""
    path = run.folder / "service.json"
    if not path.exists():
        return None
    return _json(path, lambda raw: str(raw.get("objective", {}).get("maximize", "output_tps")))


def _json(path: Path, make: Callable[[Any], T]) -> T:
    try:
        return read_json(path, make, RESTORE)
    except OSError:
        raise UserError(str(path), "is missing or cannot be read", RESTORE) from None


def held_out(pairs: Sequence[Sequence[float]], noise: Sequence[float]) -> measure.Interval:
    """Ratio and interval of pairs of (incumbent, candidate), of which more is better, as verification computes them: both in
    workers of its own."""
    return measure.between_fresh_workers(measure.interval([b / a for a, b in pairs]), noise)


def missing_gates(verdict: Mapping[str, Any]) -> list[str]:
    from tideforge.tasks.verify.plan import required

    return sorted(required() - {str(gate["name"]) for gate in verdict["gates"]})


def flags(verdict: Mapping[str, Any] | None) -> list[str]:
    """What verification left for a person to look at. None before flags were kept."""
    return [str(flag) for flag in (verdict or {}).get("flags", ())]


def ladder_share(trials: Sequence[Trial]) -> float | None:
    """Share of the device's seconds that went to gates, over all trials of the slow tier; None without any."""
    slow = [trial for trial in trials if trial.done and trial.tier == SLOW]
    device_s = sum(trial.device_s for trial in slow)
    return sum(trial.gates_s for trial in slow) / device_s if device_s else None


def beside_transformers(baseline: Mapping[str, Any] | None) -> dict[str, float | None]:
    """From the seconds of each step; all None where the comparison did not run.

    Archives of before these were kept have the ratio of each round and the tokens/s of each lane instead.
    """
    raw = baseline or {}
    ratios, lanes = _from_steps(raw["seconds"]) if "seconds" in raw else (raw.get("ratios"), raw.get("lanes_tps"))
    return {
        "incumbent_vs_transformers": statistics.median(ratios) if ratios else None,
        "incumbent_vs_transformers_low": min(ratios) if ratios else None,
        "incumbent_vs_transformers_high": max(ratios) if ratios else None,
        "linear_floor_ms": 1e3 / lanes["linear layers alone"] if lanes else None,
        "incumbent_decode_ms": 1e3 / lanes["raw"] if lanes else None,
    }


def _from_steps(seconds: dict[str, list[list[float]]]) -> tuple[Sequence[float], dict[str, float]]:
    """(ratio by round, tokens/s by lane), summed up as the comparison itself does it."""
    from tideforge.engine.baseline import Timing, summarise

    found = summarise(Timing(seconds, {lane: [] for lane in seconds}), floor_bytes=0)
    return found.ratios, found.lanes_tps


@dataclasses.dataclass(frozen=True)
class Approval:
    """The decision on file. `signed` is None when no trusted approver's signature stands behind it."""

    said: Mapping[str, Any]
    signed: Approved | None

    @property
    def release(self) -> Release | None:
        """What was approved; None for a rejection and without a signature."""
        approves = self.signed is not None and self.signed.decision is Decision.APPROVE
        return self.signed.release if self.signed is not None and approves else None


def approval(run: Run, manifests: Mapping[str, Manifest]) -> Approval | None:
    """Who decided, by the key and not by the form. A signed approval names the verdict that it was made for."""
    said = output(run, manifests.get("approval"), "decision")
    if said is None:
        return None
    record = output(run, manifests.get("release"), "record")
    try:
        signed = verify(record, said.get("code"), read_approvers(_state(run) / "approvers.json"))
    except (Refused, MissingExtra):
        return Approval(said, None)
    if said.get("decision") != str(signed.decision):
        return Approval(said, None)
    verdict = manifests["verify"].outputs.get("verdict")
    if verdict is None or signed.release.verdict_sha256 != verdict.sha256:
        raise UserError(str(run.folder / "verify.json"), "does not name the verdict that was signed", RESTORE)
    return Approval(said, signed)


def shipped(run: Run, decided: Approval | None, live: Mapping[str, Any] | None) -> str | None:
    """Id of the forward that went live: approved by signature, served by the server's own answer, kept among the releases."""
    release = decided.release if decided else None
    if live is None or release is None or _serves(live) != release.forward:
        return None
    folder = _state(run) / "releases"
    for _, raw in release_files(folder):
        if raw["record"] == release.to_record() and _holds(raw, run):
            return release.forward
    raise UserError(str(folder), f"holds no signed release of run {run.id}, which the server took", "restore that file")


def _serves(live: Mapping[str, Any]) -> str | None:
    """What the server said last that it serves."""
    if "serves" in live:
        return live["serves"] or None
    taken = [flip["answer"]["forward"] for flip in live["flips"] if flip["answer"].get("status") == 200]
    return str(taken[-1]) if taken else None


def _holds(raw: Mapping[str, Any], run: Run) -> bool:
    try:
        return (
            verify(raw["record"], raw.get("code"), read_approvers(_state(run) / "approvers.json")).decision
            is Decision.APPROVE
        )
    except Refused:
        return False


def http(live: Mapping[str, Any] | None) -> dict[str, float | int | None]:
    """Tokens/s before and after, and failed requests, from the blocks and streams of the live server."""
    blocks, flips = (live or {}).get("blocks", []), (live or {}).get("flips", [])
    streams = [stream for flip in flips for stream in flip["streams"]]
    failed = sum(block["failed"] for block in blocks) + sum(bool(stream["problem"]) for stream in streams)
    return {
        "http_tps_before": _tps(blocks, "incumbent"),
        "http_tps_after": _tps(blocks, "forward"),
        "failed_requests": failed + len((live or {}).get("wrong", [])) if blocks or streams else None,
    }


def _tps(blocks: Sequence[Mapping[str, Any]], name: str) -> float | None:
    of = [block for block in blocks if block["forward"] == name]
    return sum(block["tokens"] for block in of) / sum(block["seconds"] for block in of) if of else None


def _state(run: Run) -> Path:
    return run.folder.parent.parent
