"""What every kind of agent shares: three protocols, the ways to stop, and the record of how one ended."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from tideforge.data.files import write_whole
from tideforge.engine.forward import Forward
from tideforge.engine.outcome import Trial
from tideforge.errors import TideforgeError
from tideforge.tasks.endpoint import AgentSpec


class Stop(TideforgeError):
    """The end of an agent's loop, not a failure of the search. `reason` goes into its report."""

    reason = "stopped"


class DeadlineReached(Stop):
    reason = "deadline"


class BudgetSpent(Stop):
    """Money or tokens."""

    reason = "budget"


class Done(Stop):
    """The agent itself says that nothing is left to try."""

    reason = "done"


class ModelRefused(Stop):
    reason = "refused"


class ModelUnreachable(Stop):
    """Network errors, rate limits or a server's failures that outlasted the retries."""

    reason = "model_unreachable"


class ModelRejected(Stop):
    """The provider says that the request itself is wrong: key, model name, arguments."""

    reason = "model_rejected"


class EngineGone(Stop):
    reason = "engine_gone"


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """`arguments` is None when the model's text was no JSON object; `raw` is that text."""

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    raw: str = ""


@dataclasses.dataclass(frozen=True)
class Message:
    """`role` is user, assistant or tool. A tool message answers the call `call_id`. `truncated`: cut at its limit."""

    role: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    truncated: bool = False


@dataclasses.dataclass(frozen=True)
class Cost:
    input_tokens: int = 0
    output_tokens: int = 0
    dollars: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.dollars + other.dollars,
        )

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class Model(Protocol):
    def query(self, messages: list[Message], timeout_s: float) -> tuple[Message, Cost]:
        """The next assistant message. Raises a Stop when the provider refuses or cannot be reached within timeout_s."""
        ...


class Environment(Protocol):
    def run(self, call: ToolCall) -> str:
        """The tool's answer as text; the model's own mistakes are answers too. Raises Stop to end the loop."""
        ...


class Agent(Protocol):
    @property
    def cost(self) -> Cost: ...

    def run(self) -> Stop:
        """Works until a Stop and returns it."""
        ...


class Engine(Protocol):
    """What an agent may ask of the engine: engine.client.EngineClient, or a double."""

    def submit(self, forward: Forward, tier: str = "slow", submitter: str = "") -> str: ...
    def trial(self, trial_id: str) -> Trial: ...
    def trials(self) -> list[Trial]: ...
    def incumbent(self) -> Forward: ...
    def source(self) -> dict[str, str]: ...
    def wait(self, trial_id: str, timeout_s: float) -> Trial: ...


@dataclasses.dataclass(frozen=True)
class Allowance:
    """What one agent may use. `deadline` is in seconds since the epoch; zero dollars or tokens means none at all."""

    deadline: float
    dollars: float = 0.0
    tokens: int = 0
    now: Callable[[], float] = time.time

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.deadline - self.now())

    def check_time(self) -> None:
        if self.now() >= self.deadline:
            raise DeadlineReached("the agent's time is over")

    def check_cost(self, spent: Cost) -> None:
        if spent.dollars > self.dollars:
            raise BudgetSpent(f"${spent.dollars:.4f} of ${self.dollars:.4f} spent")
        if spent.tokens >= self.tokens:
            raise BudgetSpent(f"{spent.tokens} of {self.tokens} tokens spent")


class AgentTask(BaseModel):
    """The file that `python -m tideforge.tasks.search.main --spec FILE` reads. Paths are absolute."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    agent: AgentSpec
    workspace: Path
    socket: Path
    board: Path
    deadline: float = Field(description="seconds since the epoch")
    dollars: float = Field(default=0.0, ge=0)
    tokens: int = Field(default=0, ge=0)
    tier: Literal["slow", "fast"] = "slow"  # of the trials that it asks for
    figure: str = "output tokens/s"  # that their ratio is of, in words
    weights_bytes: int = Field(default=0, ge=0)  # what a copy of all weights takes; 0: not known

    @property
    def allowance(self) -> Allowance:
        return Allowance(deadline=self.deadline, dollars=self.dollars, tokens=self.tokens)


class AgentReport(BaseModel):
    """How an agent ended. `reason` is a Stop's reason, or `killed` (it outlived its deadline), `misconfigured`, `crashed`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: str
    reason: str
    message: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    dollars: float = 0.0

    def write(self, path: Path) -> None:
        write_whole(path, (self.model_dump_json(indent=1) + "\n").encode())
