"""What a service is started with, and what its trials make of an endpoint's settings. Plain records: no torch."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from tideforge.data.files import read_json
from tideforge.data.workload import Workload
from tideforge.engine.archive import write_atomic
from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Settings, bucket
from tideforge.engine.core import EngineCore
from tideforge.engine.keepers import LANE
from tideforge.engine.load import fitting
from tideforge.engine.objective import CONVERSATIONS_A_USER, Objective

TRIAL_STEPS = 32  # decodes that are timed as one, at most
BLOCK_S = 0.05  # seconds that they fill at least, where so many do
LEAST_DECODE_S = 1e-6
PLAIN = Objective()
MOST_CAPTURED = 2048  # tokens of a prefill; beyond it the device is busy longer than the host needs to launch


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
    """What the service is started with."""

    settings: Settings
    night: Path  # folder of this night: trials, events, tuned knobs
    incumbent: Path  # folder of the forward that serves
    workload: Path
    objective: Objective = PLAIN
    passes: int = 2  # over the search part a trial takes at most
    trial_s: float = 60.0
    allow_imports: tuple[str, ...] = ()
    tune: bool = True
    noise_trials: int = 0  # of the incumbent against itself, before any candidate's; they widen every interval
    bandwidth_bytes_per_s: float | None = None  # spec sheet; None: no floor is applied
    cache_bytes: int = 0
    devices: tuple[str, ...] = ()  # one lane each, e.g. ("cuda:0", "cuda:1"); empty: the settings' own device
    lane: str = ""  # added to the names of files that each device has for itself
    exit_at: float | None = None  # seconds since the epoch; an idle service ends then, whatever became of its flow

    @property
    def lanes(self) -> tuple[ServiceConfig, ...]:
        """What each device is started with: the first has the state folder itself, the others one each below it."""
        devices = self.devices or (self.settings.device,)
        return tuple(
            dataclasses.replace(
                self,
                devices=(),
                lane=f"-{index}" if index else "",
                settings=dataclasses.replace(
                    self.settings,
                    device=device,
                    state=self.settings.state / f"{LANE}-{index}" if index else self.settings.state,
                ),
            )
            for index, device in enumerate(devices)
        )

    def write(self, path: Path) -> None:
        paths = {name: str(getattr(self, name)) for name in ("night", "incumbent", "workload")}
        raw = {
            **vars(self), **paths, "settings": self.settings.to_dict(), "objective": dataclasses.asdict(self.objective),
        }  # fmt: skip
        write_atomic(path, json.dumps(raw, indent=1))

    @classmethod
    def read(cls, path: Path) -> ServiceConfig:
        return read_json(path, cls.of, "start the engine or the search again: it writes the file anew")

    @classmethod
    def of(cls, raw: dict[str, Any]) -> ServiceConfig:
        return cls(
            **{
                **raw,
                "settings": Settings.from_dict(raw["settings"]),
                "objective": Objective(**raw.get("objective", {})),
                "night": Path(raw["night"]),
                "incumbent": Path(raw["incumbent"]),
                "workload": Path(raw["workload"]),
                "allow_imports": tuple(raw["allow_imports"]),
                "devices": tuple(raw["devices"]),
            }
        )


def new_core(settings: Settings) -> EngineCore:
    """A scheduler and block pool of its own; prefixes are not shared, so that a replay computes all of its prompt."""
    return EngineCore(settings.limits, BlockPool(settings.num_blocks, settings.block_size, prefix_cache=False))


def for_trials(settings: Settings, workload: Workload, objective: Objective = PLAIN) -> Settings:
    """Fewer graphs than a server needs: all requests at once, fewer as they finish, contexts up to the workload's longest."""
    if not settings.capture_rows:
        return settings
    shapes = (*workload.search, *workload.held_out)
    context = bucket(longest_context(workload, settings.limits.max_model_len))
    users = requests_at_once(settings, workload, objective)
    rows = {users, *(1 << power for power in range(users.bit_length()))}
    prompts = [shape.prompt_tokens for shape in shapes]
    most = min(MOST_CAPTURED, bucket(users * max(prompts)), bucket(settings.limits.max_num_batched_tokens))
    tokens = [1 << power for power in range(12) if bucket(min(prompts)) <= 1 << power <= most]
    return dataclasses.replace(
        settings, capture_rows=tuple(sorted(rows)), capture_tokens=tuple(tokens), capture_contexts=(context,),
        limits=dataclasses.replace(settings.limits, decode_steps=min(settings.limits.decode_steps, TRIAL_STEPS)),
    )  # fmt: skip


def in_runs(settings: Settings, decode_s: float) -> Settings:
    """With no more decodes timed as one than fill a block: more of them would make a trial of a large model long for nothing."""
    enough = max(1, math.ceil(BLOCK_S / max(decode_s, LEAST_DECODE_S)))
    limits = dataclasses.replace(settings.limits, decode_steps=min(settings.limits.decode_steps, enough))
    return dataclasses.replace(settings, limits=limits)


def for_bench(settings: Settings, workload: Workload, objective: Objective = PLAIN) -> Settings:
    """As for trials, with no more pages than they need twice: of the arenas of a bench there are many.

    Twice, so that a sequence does not always get the pages that the one before it left.
    """
    each = -(-longest_context(workload, settings.limits.max_model_len) // settings.block_size) + 1
    needed = 2 * requests_at_once(settings, workload, objective) * each + 1  # block 0 is the dummy page
    return dataclasses.replace(for_trials(settings, workload, objective), num_blocks=min(settings.num_blocks, needed))


def requests_at_once(settings: Settings, workload: Workload, objective: Objective) -> int:
    """Most that a replay has under way: open arrivals wait for nobody."""
    if objective.arrivals == "closed":
        return workload.users
    return min(CONVERSATIONS_A_USER * workload.users, settings.limits.max_num_seqs)


def longest_context(workload: Workload, max_model_len: int) -> int:
    """Tokens of the workload's longest conversation, its last answer included; turns that do not fit are left out."""
    return max(fitting(shape, max_model_len).context_tokens for shape in (*workload.search, *workload.held_out))
