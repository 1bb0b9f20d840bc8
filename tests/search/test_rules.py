"""Rewrites keep what a forward computes, on each kind of raw forward, and fire whatever things are called."""

from __future__ import annotations

import ast
import builtins
import symtable
from typing import Any

import pytest
import torch

from tideforge.engine.forward import ENTRY, Forward
from tideforge.engine.screen import screen
from tideforge.tasks.search.offline.recipes import Rule, applied, cook, fitting
from tideforge.tasks.search.offline.rules import RULES

# Rules that find nothing in a raw forward: no experts, norms that are fused already, keys put together from two caches.
IDLE = {
    "llama": {"sort-once", "norm-fused", "norm-by-length"},
    "moe": set(),
    "mla": {"attend-decodes-together", "attend-all-together"},
}


class Rename(ast.NodeTransformer):
    """New names for everything that a forward names itself; what it imports and the contract's names stay."""

    def __init__(self, text: str) -> None:
        tree = ast.parse(text)
        self.fixed = {"build", "torch", "F", *dir(builtins)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.fixed |= {alias.asname or alias.name for alias in node.names}
        self.own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        self.own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.own |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
        self.own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
        self.own = {name for name in self.own - self.fixed if not name.startswith("__")}

    def new(self, name: str) -> str:
        return f"{name}_z" if name in self.own else name

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.copy_location(ast.Name(self.new(node.id), node.ctx), node)

    def visit_arg(self, node: ast.arg) -> Any:
        self.generic_visit(node)
        node.arg = self.new(node.arg)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id.startswith("self"):
            node.attr = self.new(node.attr)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        self.generic_visit(node)
        node.name = self.new(node.name)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        self.generic_visit(node)
        node.name = self.new(node.name)
        return node


def renamed(forward: Forward) -> Forward:
    text = forward.files[ENTRY]
    return forward.with_file(ENTRY, ast.unparse(Rename(text).visit(ast.parse(text))))


def together(rules: list[Rule], last: bool) -> set[str]:
    """One of each exclusive group: the last, or the first."""
    order = rules if last else rules[::-1]
    return set({rule.group or rule.name: rule.name for rule in order}.values())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_alone_keeps_the_logits(rule: Rule, kind: Any) -> None:
    text = applied(rule, kind.incumbent.files[ENTRY])
    if text is None:
        assert rule.name in IDLE[kind.name]
        return
    assert rule.name not in IDLE[kind.name]
    changed = kind.incumbent.with_file(ENTRY, text)
    screen(changed)
    torch.testing.assert_close(kind.play.logits(changed), kind.play.logits(kind.incumbent), atol=1e-4, rtol=0)


@pytest.mark.parametrize("last", [False, True])
def test_all_rules_together_keep_the_logits(last: bool, kind: Any) -> None:
    recipe = together(fitting(RULES, kind.incumbent), last)
    changed, fired = cook(RULES, kind.incumbent, recipe)
    screen(changed)
    assert fired == recipe
    torch.testing.assert_close(kind.play.logits(changed), kind.play.logits(kind.incumbent), atol=1e-4, rtol=0)


def test_what_packs_weights_declares_a_copy_of_all_of_them_each_time(kind: Any) -> None:
    packing = {rule.name for rule in RULES if rule.packs}
    assert packing == {"share-inputs", "prepack-wide", "prepack-all"}
    for recipe in (set(), {"share-inputs"}, {"share-inputs", "prepack-all"}, {rule.name for rule in RULES} - packing):
        changed, fired = cook(RULES, kind.incumbent.with_packing(5), recipe, 700)
        assert changed.packing == 5 + 700 * len(fired & packing)
    assert cook(RULES, kind.incumbent, packing)[0].packing == 0, "of weights that nobody knows the size of"


def test_rules_fire_on_a_renamed_incumbent(kind: Any) -> None:
    other = renamed(kind.incumbent)
    assert {r.name for r in fitting(RULES, other)} == {r.name for r in fitting(RULES, kind.incumbent)}
    changed, _ = cook(RULES, other, together(fitting(RULES, other), True))
    torch.testing.assert_close(kind.play.logits(changed), kind.play.logits(kind.incumbent), atol=1e-4, rtol=0)


def test_renaming_leaves_no_name_of_the_incumbent(kind: Any) -> None:
    text = kind.incumbent.files[ENTRY]
    own = {
        s.get_name()
        for s in symtable.symtable(text, "f", "exec").get_symbols()
        if s.is_assigned() and not s.is_imported()
    }
    after = renamed(kind.incumbent).files[ENTRY]
    left = {node.id for node in ast.walk(ast.parse(after)) if isinstance(node, ast.Name)} & own
    assert own and left <= {"build"}


def test_rules_do_not_name_what_the_incumbent_names(kind: Any) -> None:
    """Functions and classes of the incumbent appear nowhere in the rules as words of their own."""
    from pathlib import Path

    from tideforge.tasks.search import offline

    tree = ast.parse(kind.incumbent.files[ENTRY])
    own = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)} - {"build"}
    words: set[str] = set()
    for path in Path(str(offline.__file__)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                words.add(node.value)
    assert not own & words


SMALL = """
import torch
from torch.nn import functional as nn

def scale(h, g, tiny):
    return h * torch.rsqrt(torch.mean(h * h, -1, keepdim=True) + tiny) * g

def turn(h, c, s):
    n = h.shape[-1] // 2
    return torch.cat((-h[..., n:], h[..., :n]), dim=-1) * s + c * h

def gate(h, a, b):
    return (nn.linear(h, a) * torch.sigmoid(nn.linear(h, a))) * nn.linear(h, b)

def build(context):
    return gate
"""


def run(text: str, name: str, *arguments: Any) -> torch.Tensor:
    scope: dict[str, Any] = {}
    exec(text, scope)
    result: torch.Tensor = scope[name](*arguments)
    return result


@pytest.mark.parametrize(
    ("rule", "function", "shapes"),
    [
        ("norm-fused", "scale", [(3, 8), (8,), ()]),
        ("norm-by-length", "scale", [(3, 8), (8,), ()]),
        ("rotate-in-place", "turn", [(3, 2, 8), (3, 1, 8), (3, 1, 8)]),
        ("gate-in-place", "gate", [(3, 8), (6, 8), (6, 8)]),
        ("share-inputs", "gate", [(3, 8), (6, 8), (6, 8)]),
        ("prepack-all", "gate", [(3, 8), (6, 8), (6, 8)]),
    ],
)
def test_other_spellings(rule: str, function: str, shapes: list[tuple[int, ...]]) -> None:
    text = applied(next(r for r in RULES if r.name == rule), SMALL)
    assert text is not None
    generator = torch.Generator().manual_seed(1)
    arguments = [torch.rand(shape, generator=generator) if shape else torch.tensor(1e-5).item() for shape in shapes]
    torch.testing.assert_close(run(text, function, *arguments), run(SMALL, function, *arguments), atol=1e-5, rtol=1e-5)


GUARDED = """
import torch.nn.functional as F

def step(x, a, b):
    y = F.linear(x, a)
    x = x + y
    return y + F.linear(x, b)

def changed(x, a, b):
    y = F.linear(x, a)
    x.add_(1)
    return y + F.linear(x, b)

def maybe(x, a, b):
    return F.linear(x, a) if x is not None else F.linear(x, b)

def build(ctx):
    return step
"""


def test_inputs_that_change_in_between_are_not_shared() -> None:
    assert applied(next(r for r in RULES if r.name == "share-inputs"), GUARDED) is None
