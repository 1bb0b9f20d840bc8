"""What a trial is measured against, besides its candidate and tier: objective, weights, workload, incumbent, limits, device kind.

Trials of one setting can be compared, others cannot. `<night>/setting.json` holds the one that the engine was started with last.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tideforge.data.files import canonical_json, read_json, sha256_bytes, sha256_file
from tideforge.engine.archive import write_atomic
from tideforge.engine.forward import Forward
from tideforge.engine.service_config import ServiceConfig
from tideforge.engine.weights import fingerprint

FILE = "setting.json"
ID_DIGITS = 12
# Where things lie and how trials are scheduled changes no figure; whatever a config gains later does until it is named here.
PLACES = frozenset({"settings", "night", "incumbent", "workload", "lane", "devices", "exit_at"})
SCHEDULE = frozenset({"state", "model", "device", "spares", "dry_runs", "lookahead"})


@dataclasses.dataclass(frozen=True)
class Setting:
    """`facts`: plain JSON, by name. Equal facts are the same setting, whenever and wherever it was started."""

    facts: Mapping[str, Any]

    @classmethod
    def of(cls, config: ServiceConfig) -> Setting:
        """Raises OSError when the workload's file or the incumbent's are gone."""
        settings = config.settings
        facts = {
            **{name: value for name, value in vars(config).items() if name not in PLACES},
            **{name: value for name, value in settings.to_dict().items() if name not in SCHEDULE},
            "objective": dataclasses.asdict(config.objective),
            "weights": fingerprint(settings.model),
            "workload": sha256_file(config.workload),
            "incumbent": Forward.load(config.incumbent).id,
            "device": sorted({name.partition(":")[0] for name in config.devices or (settings.device,)}),
        }
        return cls(json.loads(canonical_json(facts)))

    @property
    def id(self) -> str:
        return sha256_bytes(canonical_json(self.facts))[:ID_DIGITS]

    @property
    def objective(self) -> str:
        return str(self.facts["objective"]["maximize"])

    def differs(self, other: Setting) -> list[str]:
        """Names of the facts that are not the same in both."""
        names = sorted({*self.facts, *other.facts})
        return [name for name in names if self.facts.get(name) != other.facts.get(name)]

    def write(self, night: Path) -> None:
        write_atomic(night / FILE, json.dumps(self.facts, indent=1, sort_keys=True))

    @classmethod
    def read(cls, night: Path) -> Setting | None:
        """None where no engine has written one: archives of before have none. UserError when the file is damaged."""
        if not (night / FILE).exists():
            return None
        return read_json(night / FILE, cls._of_json, "stop and start the engine: it writes the file anew")

    @classmethod
    def _of_json(cls, raw: dict[str, Any]) -> Setting:
        raw["objective"]["maximize"]  # a KeyError or TypeError where it is no setting
        return cls(raw)


def id_of(night: Path) -> str:
    """Of the setting that a night's engine was started with last; empty where none was written down."""
    setting = Setting.read(night)
    return setting.id if setting else ""
