"""Puts a question together from what users and nodes have: an endpoint's fields or command line words."""

from __future__ import annotations

from tideforge.costmodel import hardware, launch, shapes
from tideforge.costmodel.memory import Precision
from tideforge.costmodel.options import DTYPES, require_same_dtype
from tideforge.costmodel.predict import Traffic
from tideforge.costmodel.rank import Question


def question(
    launch_text: str,
    model: str | None,
    hardware_name: str,
    gpus: int,
    nodes: int,
    traffic: Traffic,
    maximize: str = "output_tps",
    ttft_limit_ms: float | None = None,
    tpot_limit_ms: float | None = None,
    dtype: str | None = None,
) -> Question:
    """`model`: config.json, its folder or a known name; None: what the launch command names. `dtype` is the endpoint's
    precision, which counts for this project's server where its command gives none. Raises UserError naming the thing."""
    command = launch.parse(launch_text)
    if dtype is not None:
        require_same_dtype(command, dtype)
    own = command.engine == "tideforge" and dtype is not None and command.get("--dtype") is None
    precision = Precision(DTYPES[dtype], DTYPES[dtype], DTYPES[dtype]) if own and dtype else None
    return Question(
        command=command,
        shape=shapes.get(model or command.model),
        hardware=hardware.get(hardware_name),
        gpus=gpus,
        nodes=nodes,
        traffic=traffic,
        maximize=maximize,
        ttft_limit_ms=ttft_limit_ms,
        tpot_limit_ms=tpot_limit_ms,
        precision=precision,
    )
