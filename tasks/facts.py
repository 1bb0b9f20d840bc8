"""What a run folder says of its night: read by `track` and `report`, never written. Plain records."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tideforge.engine.outcome import Figures, Trial
from tideforge.tasks import evidence
from tideforge.tasks.store import Manifest, Run

NODES = ("run", "ingest", "profile", "workload", "rank", "search", "verify", "track", "release", "approval", "ship")


@dataclasses.dataclass(frozen=True)
class Night:
    """The facts of one night, with what the manifests name and nothing else."""

    run: Run
    manifests: Mapping[str, Manifest]
    trials: tuple[Trial, ...]

    @classmethod
    def read(cls, run: Run) -> Night:
        manifests = {node: manifest for node in NODES if (manifest := run.manifest(node)) is not None}
        trials: tuple[Trial, ...] = ()
        if "search" in manifests:
            trials = tuple(Trial.of(raw) for raw in run.read_json(manifests["search"], "trials"))
        return cls(run, manifests, trials)

    def hashes(self) -> dict[str, str]:
        """Hashes of every output up to the verdict: what `track` depends on."""
        nodes = NODES[: NODES.index("track")]
        return {
            f"{node}.{name}": output.sha256
            for node in nodes
            if node in self.manifests
            for name, output in self.manifests[node].outputs.items()
        }

    def extra(self, node: str) -> dict[str, Any]:
        return dict(self.manifests[node].extra) if node in self.manifests else {}

    @property
    def started(self) -> dict[str, Any]:
        return self.extra("run")

    @property
    def finalist(self) -> str | None:
        return self.extra("search").get("finalist")

    @property
    def incumbent(self) -> str:
        """What candidates were compared with: the served source under the knobs that a plain search found best."""
        return str(self.extra("search").get("incumbent", ""))

    @property
    def served(self) -> str:
        """What served when the night began: the incumbent's source with its own knobs, before they were tuned."""
        return str(self.extra("search").get("served", self.incumbent))

    @property
    def outcomes(self) -> dict[str, int]:
        counts = collections.Counter(str(trial.outcome) for trial in self.trials if trial.done)
        return dict(sorted(counts.items()))

    @property
    def verdict(self) -> dict[str, Any] | None:
        return self._output("verify", "verdict")

    @property
    def score(self) -> Figures | None:
        """Held-out figures of the finalist, ratio and interval from the verdict's pairs; None when it was not timed."""
        raw = self.verdict
        if not raw or len(raw["pairs"]) < 2:
            return None
        incumbent, candidate = zip(*raw["pairs"], strict=True)
        found = evidence.held_out(
            raw.get("scores") or raw["pairs"], evidence.noise_of(self.run, self.manifests["search"])
        )
        return Figures(
            ratio=found.ratio,
            ci_low=found.low,
            ci_high=found.high,
            pairs=found.pairs,
            candidate_tps=statistics.median(candidate),
            incumbent_tps=statistics.median(incumbent),
            ttft_ms=float(raw["ttft_ms"]),
            tps_per_user_p50=float(raw["tps_per_user_p50"]),
            tps_per_user_p90=float(raw["tps_per_user_p90"]),
        )

    def _output(self, node: str, name: str) -> dict[str, Any] | None:
        manifest = self.manifests.get(node)
        if manifest is None or name not in manifest.outputs:
            return None
        return dict(self.run.read_json(manifest, name))

    def artifacts(self) -> Iterator[Path]:
        """Files of the night that a person may want beside the figures; requests themselves stay where they are."""
        for node, manifest in self.manifests.items():
            if node not in ("ingest", "release", "approval"):
                yield from (self.run.path(manifest, name) for name in manifest.outputs)


def forward_folder(run: Run, forward: str) -> Path | None:
    """Where the files of a forward lie: the run's own archive first, then the endpoint's."""
    roots = (run.folder / "forwards", run.folder / "engine" / "forwards", run.folder.parent.parent / "forwards")
    return next((root / forward for root in roots if forward and (root / forward).is_dir()), None)


def failed_gates(verdict: Mapping[str, Any] | None) -> list[str]:
    return [str(gate["name"]) for gate in (verdict or {}).get("gates", []) if gate.get("passed") is not True]


def why_failed(verdict: Mapping[str, Any]) -> str:
    """Of a verdict that is no pass: what failed, or why there is none."""
    if failed := failed_gates(verdict):
        return f"verification failed ({', '.join(failed)})"
    if verdict.get("unverified"):
        return f"not verified: {verdict['unverified']}"
    return "verification failed (the gain is not beyond doubt)"
