"""Is the night's incumbent an honest plain forward? Its one-user decode beside transformers and the floor, in this night."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tideforge.engine.config import Settings

TIMEOUT_S = 300.0


def beside_transformers(settings: Settings, forward: Path) -> dict[str, Any]:
    """What `python -m tideforge.engine.baseline --json` prints, run on the measuring worker's core.

    Where it cannot run (transformers is not installed, say) the answer is {"problem": one line}.
    """
    command = [
        sys.executable, "-m", "tideforge.engine.baseline", "--model", str(settings.model), "--forward", str(forward),
        "--dtype", settings.dtype, "--threads", str(settings.threads), "--steps", "12", "--rounds", "3", "--json",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(settings.threads)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        if settings.worker_cpus:
            os.sched_setaffinity(process.pid, settings.worker_cpus)
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return {"problem": f"not done within {TIMEOUT_S:g} s"}
    if process.returncode != 0:
        return {"problem": (err.strip().splitlines() or ["ended without a word"])[-1]}
    return dict(json.loads(out))
