"""Has what the endpoint runs on changed? Known at once, by comparison: a new driver or library moves results like drift."""

from __future__ import annotations

from collections.abc import Mapping


def changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """One line a part (driver, library, engine) whose version is another, that went or that came, in the order of names."""
    return [
        f"{name}: {old.get(name, 'none')} to {new.get(name, 'none')}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
