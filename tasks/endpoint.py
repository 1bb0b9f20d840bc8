"""The endpoint file: what is kept fast, on what, for which objective, within which budget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tideforge.errors import UserError

TRACKING = ("http", "https", "sqlite", "postgresql", "mysql", "mssql")  # schemes of MLflow's stores


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Hardware(Strict):
    name: str = Field(description="a name in data/hardware.json, e.g. cpu, h200-sxm")
    gpus: int = Field(default=1, ge=1, description="accelerators, all nodes together")
    nodes: int = Field(default=1, ge=1)


class Traffic(Strict):
    logs: list[str] = Field(default_factory=list, description="files, folders or globs, also behind s3://")
    formats: list[str] = Field(
        default_factory=list, description="mapping files, or names of known formats, tried before looking"
    )
    keep_text: bool = Field(default=False, description="keep prompts and answers in the server's own log")


Tokens = Annotated[int, Field(ge=2)]


class WorkloadSpec(Strict):
    """How the profile is scaled down to what a trial can replay."""

    users: int = Field(default=16, ge=1)
    prompt_tokens: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = (16, 32)
    output_tokens: Tokens | tuple[Tokens, Tokens] = Field(
        default=48, description="of a held-out request: all alike, or [least, most]"
    )
    search_output_tokens: Tokens | tuple[Tokens, Tokens] = Field(
        default=8, description="of a request in a search trial"
    )
    seed: int = 0


class Budget(Strict):
    """Seconds of wall time a stage may take; pairs of A/B blocks a measurement takes."""

    search_s: float = Field(default=240, gt=0)
    trial_s: float = Field(
        default=60, gt=0, description="staging ends here (or at 30 s), and no timed pass begins later"
    )
    verify_s: float = Field(default=900, gt=0, description="most that gates and held-out pairs may take together")
    search_pairs: int = Field(default=2, ge=2)
    held_out_pairs: int = Field(default=8, ge=2, description="planned; fewer than 8 are for trying things out")
    least_held_out_pairs: int = Field(
        default=8, ge=2, description="fewest, of those planned, that a verdict may rest on when verify_s is over"
    )
    dollars: float = Field(default=5.0, ge=0, description="most that llm agents may spend a night")
    tokens: int = Field(default=2_000_000, ge=0)


class SearchSpec(Strict):
    tier: Literal["slow", "fast"] = Field(
        default="slow", description="what agents' candidates are measured on; from fast the best go on to slow"
    )
    devices: list[Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")]] = Field(
        default_factory=list, description="each measures candidates with an engine of its own; the server's if empty"
    )


class AgentSpec(Strict):
    kind: Literal["offline", "llm", "command"] = "offline"
    name: str = "offline"
    seed: int = 0
    provider: Literal["openai", "anthropic"] = "openai"
    model: str = ""
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    dollars_per_million_input: float = Field(default=0.0, ge=0)
    dollars_per_million_output: float = Field(default=0.0, ge=0)
    command: list[str] = Field(default_factory=list)


class Objective(Strict):
    maximize: Literal["output_tps", "tps_per_user_p90", "ttft", "cost"] = Field(
        default="output_tps", description="ttft is made less; cost is output_tps on the hardware that the endpoint has"
    )
    arrivals: Literal["closed", "open"] = Field(
        default="closed",
        description="workload.users who ask one after the other, or requests and turns when the traffic had them",
    )
    pace: float = Field(default=1.0, gt=0, lt=math.inf, description="so many times as fast as the traffic was")
    think_s: Annotated[float, Field(ge=0, lt=math.inf)] | Literal["traffic"] = Field(
        default=0.0, description="closed: seconds that a user pauses before it says more, or `traffic`: as in the logs"
    )
    ttft_p90_ms: float | None = Field(default=None, gt=0, lt=math.inf)
    tpot_p90_ms: float | None = Field(default=None, gt=0, lt=math.inf)

    @model_validator(mode="after")
    def _nothing_that_does_not_count(self) -> Objective:
        if self.arrivals == "open" and self.think_s != 0:
            raise ValueError("think_s is of closed arrivals; open ones have the traffic's pauses")
        if self.arrivals == "closed" and self.think_s != "traffic" and self.pace != 1:
            raise ValueError(
                "pace is of open arrivals and of `think_s: traffic`; nothing else is timed as in the traffic"
            )
        return self


class Drift(Strict):
    threshold: float = Field(default=0.2, gt=0, description="relative shift that is worth a recompile")
    min_requests: int = Field(default=200, ge=1)
    window_hours: float = Field(default=1.0, gt=0)
    cooldown_hours: float = Field(default=12.0, ge=0)
    expected_gain: float = Field(default=0.1, ge=0, description="relative gain of a night, until one has been measured")
    horizon_hours: float = Field(default=168.0, gt=0, description="hours of serving that a night's gain is counted for")


def needed_sandbox(agents: Iterable[AgentSpec]) -> Literal["require", "prefer", "off"]:
    """What holds where the endpoint file says nothing: whoever runs a model's or a stranger's source needs a sandbox."""
    return "prefer" if all(agent.kind == "offline" for agent in agents) else "require"


class Endpoint(Strict):
    """One YAML file. Relative paths are relative to the folder the command runs in."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    model: Path = Field(description="folder with config.json, *.safetensors and tokenizer.json")
    forward: Path | None = Field(default=None, description="folder of the first incumbent; by architecture if absent")
    launch: str = Field(description="server launch command, e.g. 'vllm serve ...' or 'tideforge serve ...'")
    hardware: Hardware
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    objective: Objective = Objective()
    traffic: Traffic = Traffic()
    workload: WorkloadSpec = WorkloadSpec()
    budget: Budget = Budget()
    search: SearchSpec = SearchSpec()
    agents: list[AgentSpec] = Field(default_factory=lambda: [AgentSpec(name="offline-1", seed=1)], min_length=1)
    sandbox: Literal["require", "prefer", "off"] = Field(
        default_factory=lambda said: needed_sandbox(said.get("agents", ())),
        description="of candidates' workers and agents' tools: require where an agent is of kind llm or command, else prefer",
    )
    allow_imports: list[str] = Field(default_factory=list)
    approval_hours: float = Field(default=72, gt=0)
    drift: Drift = Drift()
    tracking_uri: str | None = Field(default=None, description="MLflow; sqlite in the state folder if absent")
    state: Path = Field(default=Path(".tideforge"), description="sockets, archive, logs, releases of this endpoint")

    @field_validator("agents")
    @classmethod
    def _one_of_each_name(cls, agents: list[AgentSpec]) -> list[AgentSpec]:
        names = [agent.name for agent in agents]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{len(names)} agents, but several are named {', '.join(twice)}")
        return agents

    @field_validator("tracking_uri")
    @classmethod
    def _known_store(cls, uri: str | None) -> str | None:
        scheme, colon, _ = (uri or "").partition("://")
        if uri is not None and (not colon or scheme.partition("+")[0].lower() not in TRACKING):
            said = f"{scheme}://" if colon else "no scheme"  # never the whole: it may hold a password
            raise ValueError(f"has {said}; MLflow is reached by {', '.join(TRACKING)}")
        return uri

    @classmethod
    def load(cls, path: Path) -> Endpoint:
        """Raises UserError naming the file and the first field at fault."""
        try:
            raw: Any = yaml.safe_load(path.read_text())
        except FileNotFoundError:
            raise UserError(
                str(path), "does not exist", "give --endpoint an endpoint file (deployments/endpoints/)"
            ) from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(str(path), f"cannot be read ({str(error).splitlines()[0]})", "write it as YAML") from None
        if not isinstance(raw, dict):
            raise UserError(str(path), "is not a mapping", "see deployments/endpoints/ for an example")
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "endpoint"
            if first["type"] == "extra_forbidden":
                known = ", ".join(_fields(first["loc"][:-1]))
                raise UserError(f"{path}: {field}", "is no known field", f"known there: {known}") from None
            problem = first["msg"].removeprefix("Value error, ")
            raise UserError(f"{path}: {field}", problem, f"mend the field {field}") from None


def _fields(parts: Iterable[int | str]) -> list[str]:
    """The fields that the file may have at this place."""
    model: type[BaseModel] = Endpoint
    for part in parts:
        if isinstance(part, str):  # a number is a place in a list
            annotation: Any = model.model_fields[part].annotation
            model = next(kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields"))
    return list(model.model_fields)
