"""vLLM beside this engine, in the same part: `vllm_baseline.py` in an environment that has it, once with empty caches."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tideforge.engine.bench.job import Job, Load
from tideforge.engine.bench.report import Record

CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
START_S = 150.0  # what a cold start may take; less time left and it is not begun
LEAST_S = 60.0  # likewise a warm one
Z95 = 1.96
OTHERWISE = "decode"  # the part whose starts are shown where a part has none of its own


@dataclasses.dataclass(frozen=True)
class Started:
    """One start of vLLM: from the start of the process to the first token, and its blocks."""

    cold: bool
    mode: str
    first_token_s: float
    cases: Mapping[int, Mapping[str, Any]]  # by number of users, as vllm_baseline.py prints them
    part: str  # that started it

    def within(self, record: Record) -> str:
        """ "" if that is the record's own part, else what to add to a figure's name."""
        return "" if self.part == record.part else f" (as part {self.part} saw it)"

    def seconds_to(self, half_width: float, users: int) -> float:
        """Measuring time until its tokens/s are known to a relative half-width (95 %), by the spread of its blocks.

        In vLLM's favour: the incumbent's own figure costs nothing here, and two blocks are enough where they agree,
        and measuring takes no time where there are no readings of so many users.
        """
        if users not in self.cases:
            return 0.0
        blocks = self.cases[users]["block_s"]
        spread = statistics.stdev(blocks) / statistics.fmean(blocks)
        return max(2.0, (Z95 * spread / half_width) ** 2) * statistics.fmean(blocks)


def start(
    job: Job, record: Record, loads: list[Load], mode: str = "default", cold: bool = True, repeats: int = 5
) -> bool:
    """Adds a line of kind "vllm"; whether one was added. `loads` are of one shape. Nothing to do without --vllm or time."""
    if job.vllm is None or job.left_s < (START_S if cold else LEAST_S):
        return False
    folder = job.state / f"vllm-caches-{record.part}"
    if cold:
        shutil.rmtree(folder, ignore_errors=True)
    script, loads = Path(__file__).with_name("vllm_baseline.py"), sorted(loads, key=lambda load: load.users)
    command = [
        str(job.vllm), "-P", str(script), "--model", str(job.model(loads[0].shape)), "--mode", mode, "--json",
        "--users", *(str(load.users) for load in loads), "--prompt", *(str(load.prompt) for load in loads),
        "--output", str(loads[0].output), "--repeats", str(repeats),
    ]  # fmt: skip
    caches = {name: str(folder / name.lower()) for name in CACHES}
    try:
        done = subprocess.run(
            command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=max(1.0, job.left_s)
        )
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
        problem = "" if told else "\n".join(done.stderr.splitlines()[-5:])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        told, problem = {}, f"{type(error).__name__}: {error}"[:500]
    record.add("vllm", cold=cold, mode=mode, told=told, problem=problem)
    if problem:
        print(f"vLLM, {mode}: {problem}")
    return not problem


def started(record: Record, cold: bool, mode: str = "default", own: bool = False) -> Started | None:
    """The last start of that kind that gave figures, in this part or else, unless `own`, in the part decode."""
    for one in (record,) if own else (record, Record(record.path.parent, OTHERWISE)):
        for line in reversed(one.of("vllm")):
            if line["told"] and line["cold"] == cold and line["mode"] == mode:
                told = line["told"]
                cases = {case["users"]: case for name, case in told.items() if name.startswith("users_")}
                return Started(cold, mode, told["first_token_s"], cases, one.part)
    return None


def both(job: Job, record: Record, loads: list[Load], repeats: int = 5) -> None:
    """A cold start and, with the caches that it left, a warm one; those that are there already are not repeated."""
    if started(record, cold=True, own=True) is None and not start(job, record, loads, cold=True, repeats=repeats):
        return
    if started(record, cold=False, own=True) is None:
        start(job, record, loads, cold=False, repeats=repeats)
