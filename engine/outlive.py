"""What is done again when the incumbent's worker dies beside a candidate, which is not to blame for that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tideforge.engine.events import log_event
from tideforge.engine.executor import RemoteExecutor
from tideforge.errors import CandidateError, IncumbentLost

INCUMBENT_RETRIES = 3  # of one attempt

T = TypeVar("T")


def outlive(
    events: Path, candidate: RemoteExecutor, incumbent: Callable[[], RemoteExecutor], attempt: Callable[[], T]
) -> T:
    """Again from the start each time the incumbent's worker died meanwhile. Raises IncumbentLost when that does not end."""
    for _ in range(INCUMBENT_RETRIES + 1):
        try:
            return attempt()
        except CandidateError as error:
            if incumbent().alive or not candidate.alive:
                raise
            log_event(events, "incumbent_died", worker=incumbent().pid, message=error.message)
    raise IncumbentLost(f"the incumbent's worker died {INCUMBENT_RETRIES + 1} times: nothing is known of the candidate")
