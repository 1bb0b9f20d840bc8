"""Takes a forward's names, docstrings and comments away, so that whatever catches it must have seen what it does."""

from __future__ import annotations

import ast
import builtins
import random
from collections.abc import Iterable

KEPT = frozenset({"build", "self", "cls"}) | frozenset(dir(builtins))


def renamed(text: str, seed: int) -> str:
    """The same program under other names; one seed, one result.

    Names that the file binds are renamed, in every scope alike; so are attributes that its own classes without bases set or
    define, where only `self` has them. What others know by name stays: `build`, keywords, attributes of anything else.
    """
    tree = _without_text(ast.parse(text))
    names, attributes = _bound(tree) - _keywords(tree) - KEPT, _own_attributes(tree)
    _Renamer(_fresh(names, seed), _fresh(attributes, seed + 1)).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def constants(text: str) -> dict[str, object]:
    """The literal constants at module level, read without running anything."""
    found = {}
    for node in ast.parse(text).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        ):
            found[node.targets[0].id] = node.value.value
    return found


def _fresh(names: Iterable[str], seed: int) -> dict[str, str]:
    ordered = sorted(names)
    numbers = random.Random(seed).sample(range(10_000), len(ordered))
    letter = "xyzuvw"[seed % 6]
    return {name: f"{letter}{number}" for name, number in zip(ordered, numbers, strict=True) if not _dunder(name)}


def _dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _without_text(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _bound(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.ExceptHandler(name=str(name)):
                found.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                found |= {alias.asname or alias.name for alias in aliases if "." not in (alias.asname or alias.name)}
    return found - {"annotations"} - _assigned_in_classes(tree) - _methods(tree)


def _methods(tree: ast.AST) -> set[str]:
    return {part.name for part in _class_bodies(tree) if isinstance(part, ast.FunctionDef)}


def _class_bodies(tree: ast.AST) -> list[ast.stmt]:
    return [part for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for part in node.body]


def _assigned_in_classes(tree: ast.AST) -> set[str]:
    """Attributes of a class, wherever they are asked for."""
    bodies = _class_bodies(tree)
    return {
        name.id
        for part in bodies if isinstance(part, ast.Assign | ast.AnnAssign)
        for target in (part.targets if isinstance(part, ast.Assign) else [part.target])
        for name in ast.walk(target) if isinstance(name, ast.Name)
    }  # fmt: skip


def _keywords(tree: ast.AST) -> set[str]:
    return {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}


def _own_attributes(tree: ast.AST) -> set[str]:
    own, others = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.bases:
            others |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
            others |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        elif isinstance(node, ast.ClassDef):
            own |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            own |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute) and _is_self(part.value)}
    others |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and not _is_self(n.value)}
    return own - others - _assigned_in_classes(tree)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


class _Renamer(ast.NodeTransformer):
    def __init__(self, names: dict[str, str], attributes: dict[str, str]) -> None:
        self.names, self.attributes = names, attributes

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self.names.get(node.arg, node.arg)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if _is_self(node.value):
            node.attr = self.attributes.get(node.attr, node.attr)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = self.names.get(node.name, node.name)
        for part in node.body:
            if isinstance(part, ast.FunctionDef):
                part.name = self.attributes.get(part.name, part.name)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self.names.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        if node.name:
            node.name = self.names.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> ast.AST:
        node.names = [self.names.get(name, name) for name in node.names]
        return node

    visit_Nonlocal = visit_Global  # type: ignore[assignment]

    def visit_alias(self, node: ast.alias) -> ast.AST:
        known = node.asname or node.name
        if known in self.names:
            node.asname = self.names[known]
        return node
