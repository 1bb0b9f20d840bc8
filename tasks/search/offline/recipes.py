"""From a set of rewrites to source: which rules fire on a forward, and the forward that a recipe makes of it."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

from tideforge.engine.forward import ENTRY, Forward


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of rewrite. `apply` gives new source, or None where nothing matches.

    Rules are applied in the order in which they are listed. Of the rules of one `group` a recipe holds at most one.
    """

    name: str
    hypothesis: str
    apply: Callable[[str], str | None]
    group: str = ""
    packs: bool = False  # keeps weights in another layout: copies of all of them at most


@functools.lru_cache(maxsize=1024)
def applied(rule: Rule, source: str) -> str | None:
    """What the rule makes of the source; None when it does not fire. SyntaxError for a rule that breaks it."""
    text = rule.apply(source)
    if text is None or text == source:
        return None
    ast.parse(text)
    return text


def fitting(rules: Sequence[Rule], forward: Forward) -> list[Rule]:
    """The rules that fire on the forward by themselves."""
    source = forward.files[ENTRY]
    return [rule for rule in rules if applied(rule, source) is not None]


def cook(
    rules: Sequence[Rule], forward: Forward, recipe: Iterable[str], weights_bytes: int = 0
) -> tuple[Forward, frozenset[str]]:
    """The forward with the recipe's rewrites, and those that fired: one rewrite may leave nothing for another.

    It declares as many times `weights_bytes`, on top of what `forward` does, as rewrites of it pack.
    """
    wanted, fired, source = set(recipe), set(), forward.files[ENTRY]
    for rule in rules:
        if rule.name in wanted and (text := applied(rule, source)) is not None:
            source = text
            fired.add(rule.name)
    packs = sum(rule.packs for rule in rules if rule.name in fired)
    return forward.with_file(ENTRY, source).with_packing(forward.packing + packs * weights_bytes), frozenset(fired)
