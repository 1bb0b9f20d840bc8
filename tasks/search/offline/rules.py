"""All rules in their order: those that rebuild a block before those that touch single calls."""

from __future__ import annotations

from tideforge.tasks.search.offline import attention, experts, linears, pointwise
from tideforge.tasks.search.offline.recipes import Rule

RULES: tuple[Rule, ...] = (*attention.RULES, *experts.RULES, *pointwise.RULES, *linears.RULES)
