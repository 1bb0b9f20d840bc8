"""An endpoint's objective as trials and held-out pairs measure it."""

from __future__ import annotations

from tideforge.data.workload import Workload
from tideforge.engine.objective import Objective
from tideforge.errors import UserError
from tideforge.tasks.endpoint import Endpoint

REPLAYS_A_PASS = 4  # A B B A
WORDS = {
    "output_tps": "output tokens/s",
    "tps_per_user_p90": "P90 tokens/s per user",
    "ttft": "speed to the first token (P90)",
}


def measured(endpoint: Endpoint) -> Objective:
    """On hardware and layout that a night does not change, cost falls as output tokens/s rise."""
    asked = endpoint.objective
    maximize = "output_tps" if asked.maximize == "cost" else asked.maximize
    think_s = None if asked.think_s == "traffic" else float(asked.think_s)
    return Objective(maximize, asked.arrivals, asked.pace, think_s)


def require_room(workload: Workload, max_model_len: int) -> None:
    """Raises UserError where a request of the workload is longer than the engine's context."""
    shapes = (*workload.search, *workload.held_out)
    if (longest := max(shape.prompt_tokens + shape.output_tokens for shape in shapes)) > max_model_len:
        raise UserError(
            "workload.prompt_tokens",
            f"with output_tokens a request is of {longest} tokens, more than --max-model-len of the launch command, {max_model_len}",
            "make them fewer, in a new run, or raise the flag",
        )


def require_short(endpoint: Endpoint, workload: Workload) -> None:
    """Raises UserError where arrivals and pauses alone would make a pass of a trial longer than the trial may be."""
    objective, most_s = measured(endpoint), endpoint.budget.trial_s
    seconds = REPLAYS_A_PASS * max(
        objective.scripted_s(part, workload.users) for part in (workload.search, workload.held_out)
    )
    if seconds <= most_s:
        return
    field, remedy = "objective.pace", f"give a pace of {objective.pace * seconds / most_s:.3g} or more"
    if objective.arrivals == "closed" and objective.think_s is not None:
        field, remedy = "objective.think_s", f"give {objective.think_s * most_s / seconds:.3g} or less"
    raise UserError(
        f"endpoint {endpoint.name}: {field}",
        f"arrivals and pauses alone make four replays last {seconds:.0f} s, more than budget.trial_s, {most_s:g} s", remedy,
    )  # fmt: skip
