"""Flags of a launch command that are most likely misspelt: an engine would refuse them, and here they would count for nothing."""

from __future__ import annotations

import difflib

from tideforge.costmodel.launch import BOOLEAN, LAYOUT_FLAGS, MODEL_FLAGS, LaunchCommand, key_of
from tideforge.costmodel.options import READ_FLAGS


def not_understood(command: LaunchCommand) -> dict[str, str]:
    """Flags that are read as nothing but look like one that this module reads, each with that one.

    Other engines have hundreds of flags, so an unknown one is usually right, and kept: only near misses are here.
    """
    groups = LAYOUT_FLAGS[command.engine]
    own = {key_of(name): name for group in groups.values() for name in group}
    others = MODEL_FLAGS[command.engine] + READ_FLAGS + tuple(BOOLEAN)
    known = own | {key_of(name): name for name in others}
    found = {}
    for name in (flag.name for flag in command.flags if key_of(flag.name) not in known):
        if near := _elsewhere(key_of(name), groups) or _near(key_of(name), known):
            found[name] = near
    return found


def _elsewhere(key: str, groups: dict[str, tuple[str, ...]]) -> str:
    """This engine's word for what another engine calls `key`."""
    roles = [role for other in LAYOUT_FLAGS.values() for role, names in other.items() if key in map(key_of, names)]
    return next((groups[role][0] for role in roles if role in groups), "")


def _near(key: str, known: dict[str, str]) -> str:
    """A known flag that `key` misspells, or cuts short behind a whole word (`--tensor-parallel`)."""
    if not key.startswith("--"):
        return ""
    close = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.9)
    close += [name for name in sorted(known) if key.count("-") > 2 and name.startswith(f"{key}-")]
    return known[close[0]] if close else ""
