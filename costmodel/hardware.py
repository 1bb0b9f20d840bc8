"""Accelerators from data/hardware.json: memory, read bandwidth, arithmetic, links. A new one is an entry in that file."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from tideforge.errors import UserError

FALLBACKS = {
    "fp4": ("fp4", "fp8", "bf16"),
    "fp8": ("fp8", "bf16"),
    "int8": ("int8", "fp8", "bf16"),
    "int4": ("bf16",),
    "bf16": ("bf16",),
    "fp32": ("fp32",),
}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One accelerator in its machine. Links are bytes/s per accelerator and direction; FLOP/s are dense.

    `link_domain` accelerators reach each other over `link_bytes_per_s`, all others over `node_link_bytes_per_s`.
    `guessed` names the fields that no data sheet states.
    """

    name: str
    full_name: str
    memory_bytes: int
    read_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    link_bytes_per_s: float
    node_link_bytes_per_s: float
    gpus_per_node: int
    link_domain: int
    source: str
    guessed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        figures = (self.memory_bytes, self.read_bytes_per_s, self.link_bytes_per_s, self.node_link_bytes_per_s)
        if min(*figures, *self.flops_per_s.values(), self.gpus_per_node, self.link_domain) <= 0:
            raise ValueError(f"{self.name}: every figure of an accelerator is above zero")
        if "bf16" not in self.flops_per_s or "fp32" not in self.flops_per_s:
            raise ValueError(f"{self.name}: flops_per_s needs bf16 and fp32")

    def flops(self, precision: str) -> float:
        """Dense FLOP/s at a weight precision; without such units the weights are widened to the next one that exists."""
        return next(self.flops_per_s[name] for name in FALLBACKS[precision] if name in self.flops_per_s)

    def tag(self, *fields: str) -> str:
        """`guessed` when any of the fields is, else `spec-sheet`."""
        return "guessed" if any(known.startswith(fields) for known in self.guessed) else "spec-sheet"


def _from_record(name: str, raw: Mapping[str, Any]) -> Hardware:
    return Hardware(
        name=name,
        full_name=raw.get("full_name", name),
        memory_bytes=int(raw["memory_bytes"]),
        read_bytes_per_s=float(raw["read_bytes_per_s"]),
        flops_per_s={key: float(value) for key, value in raw["flops_per_s"].items()},
        link_bytes_per_s=float(raw["link_bytes_per_s"]),
        node_link_bytes_per_s=float(raw["node_link_bytes_per_s"]),
        gpus_per_node=int(raw["gpus_per_node"]),
        link_domain=int(raw["link_domain"]),
        source=raw["source"],
        guessed=tuple(raw.get("guessed", ())),
        notes=tuple(raw.get("notes", ())),
    )


def read_file(path: Path) -> dict[str, Hardware]:
    """Accelerators of one file by name and by alias. Raises UserError naming the file and the entry at fault."""
    try:
        entries: Mapping[str, Any] = json.loads(path.read_text())["accelerators"]
    except FileNotFoundError:
        raise UserError(
            str(path), "does not exist", "name an accelerator of data/hardware.json or a file like it"
        ) from None
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise UserError(str(path), f"is not a hardware file ({error})", "write it like data/hardware.json") from None
    found: dict[str, Hardware] = {}
    for name, raw in entries.items():
        try:
            entry = _from_record(name, raw)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{path}: {name}", f"bad or missing field {error}", "write it like data/hardware.json"
            ) from None
        for key in (name, entry.full_name, *raw.get("aliases", ())):
            found[_key(key)] = entry
    return found


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-")


@functools.cache
def catalogue() -> dict[str, Hardware]:
    """All accelerators that come with the package."""
    with resources.as_file(resources.files("tideforge.data") / "hardware.json") as path:
        return read_file(path)


def names() -> list[str]:
    return sorted({entry.name for entry in catalogue().values()})


def get(name: str) -> Hardware:
    """By name, full name or alias, or the only entry of a .json file. An unknown name is a UserError with near ones."""
    if name.endswith(".json"):
        found = {entry.name: entry for entry in read_file(Path(name)).values()}
        if len(found) != 1:
            raise UserError(name, f"holds {len(found)} accelerators", "leave the one that is meant")
        return next(iter(found.values()))
    known = catalogue()
    if _key(name) in known:
        return known[_key(name)]
    near = sorted({known[match].name for match in difflib.get_close_matches(_key(name), known, n=4, cutoff=0.5)})
    remedy = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(names())}"
    raise UserError(f"hardware {name!r}", "is unknown", remedy)
