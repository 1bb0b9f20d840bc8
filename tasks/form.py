"""What a person reads before deciding: gain, verdict gate by gate, what changes, what is unusual. Markdown."""

from __future__ import annotations

import datetime
import difflib
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tideforge.engine.forward import Forward
from tideforge.engine.release import Release
from tideforge.engine.sandbox import BWRAP
from tideforge.tasks import evidence
from tideforge.tasks.endpoint import Endpoint, needed_sandbox
from tideforge.tasks.facts import Night, forward_folder
from tideforge.tasks.objective import WORDS
from tideforge.tasks.store import Run


def write_form(night: Night, endpoint: Endpoint, release: Release, diff_path: Path) -> str:
    """The description on the approval form."""
    verdict = night.verdict or {}
    expires = datetime.datetime.fromtimestamp(release.expires_at, datetime.UTC)
    sections = [
        f"## {endpoint.name}: a faster forward waits for approval",
        _gain(release, verdict),
        f"**Forward** `{release.forward}`  \n**replaces** `{release.incumbent}`" + _baseline(night, release),
        f"**Diff** `{diff_path}`" + _tracked(night),
        "### Verdict\n" + "\n".join(_gates(verdict)),
        "### What changes\n" + "\n".join(_changes(night, endpoint, release)),
        "### Look at\n" + "\n".join(_flags(endpoint, verdict)),
        f"**Expires** {expires:%Y-%m-%d %H:%M} UTC. Run `tideforge code {release.run}` where your key lies and paste "
        f"what it prints into *code*, or run `tideforge approve {release.run}` there. {release.go_back}.",
    ]
    return "\n\n".join(sections) + "\n"


def _gain(release: Release, verdict: Mapping[str, Any]) -> str:
    gain, pairs = release.gain, verdict["pairs"]
    before, after = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    figure = WORDS[verdict.get("objective", "output_tps")]
    return (
        f"**Gain: {gain.ratio} times** the incumbent's {figure} [{gain.ci_low}, {gain.ci_high}], "
        f"{gain.pairs} pairs on held-out requests (medians {before:.1f} → {after:.1f} tokens/s)"
    )


def _baseline(night: Night, release: Release) -> str:
    """The gain is the source's alone: the incumbent was measured with the best knobs that a plain search found."""
    if night.incumbent == release.incumbent:
        return ""
    return f"  \n**measured against** `{night.incumbent}`, which is what serves, with knobs tuned"


def _tracked(night: Night) -> str:
    tracked = night.extra("track")
    uri, experiment, parent = (str(tracked.get(name, "")) for name in ("tracking_uri", "experiment", "parent"))
    if not uri.startswith("http") or not parent:
        return ""
    return f", [in MLflow]({uri.rstrip('/')}/#/experiments/{experiment}/runs/{parent})"


def _gates(verdict: Mapping[str, Any]) -> Iterable[str]:
    for gate in verdict.get("gates", []):
        mark = "🟡" if gate.get("unverified") else "✅" if gate.get("passed") is True else "❌"
        told = gate.get("evidence") or gate.get("unverified") or _figures(gate.get("figures") or {})
        spent = f"({gate['seconds']:.1f} s) " if "seconds" in gate else ""
        yield f"- {mark} **{gate.get('name')}** {spent}{told}".rstrip()
    if verdict.get("cut"):
        yield f"- 🟡 {verdict['cut']}"
    yield f"- verdict `{'passed' if verdict.get('passed') is True else 'failed'}`"


def _figures(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in list(figures.items())[:4])


def _changes(night: Night, endpoint: Endpoint, release: Release) -> Iterable[str]:
    if release.layout == "unchanged":
        yield "- layout unchanged; live flip, announced downtime 0 s: open requests end on the forward that began them"
    else:
        yield f"- 🔴 **layout becomes {release.layout}**: drain and restart; announce the downtime before you approve"
    yield f"- launch command `{release.launch}`"
    yield f"- weights `{release.weights_sha256[:16]}`, precision {endpoint.precision}"
    yield "- environment " + ", ".join(f"{name} {value}" for name, value in release.environment)


def _flags(endpoint: Endpoint, verdict: Mapping[str, Any]) -> Iterable[str]:
    for flag in evidence.flags(verdict):
        yield f"- 🔴 {flag}"
    if endpoint.allow_imports:
        yield f"- 🔴 **allow_imports: {', '.join(endpoint.allow_imports)}**: this source may import more than torch"
    said = str((verdict.get("environment") or {}).get("sandbox", "none: nothing is recorded"))
    if said == BWRAP:
        yield "- candidates ran in a sandbox (bubblewrap): no network, no files but what a worker needs"
    else:
        yield f"- 🔴 **candidates ran as plain processes** ({said})"
    if (needed := needed_sandbox(endpoint.agents)) == "require" and endpoint.sandbox != needed:
        yield f"- 🔴 **sandbox: {endpoint.sandbox}** is written in the endpoint file, whose agents run a model's or a stranger's source"
    elif endpoint.sandbox == "off":
        yield "- 🔴 **sandbox: off** is written in the endpoint file"


def diff(run: Run, release: Release) -> str:
    """Unified diff from the incumbent's files to the finalist's, knobs included."""
    old, new = (_files(run, forward) for forward in (release.incumbent, release.forward))
    lines: list[str] = []
    for name in sorted({*old, *new}):
        before, after = (files.get(name, "").splitlines(keepends=True) for files in (old, new))
        lines += difflib.unified_diff(before, after, f"incumbent/{name}", f"candidate/{name}")
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def _files(run: Run, forward: str) -> Mapping[str, str]:
    folder = forward_folder(run, forward)
    return Forward.load(folder).files if folder else {}
