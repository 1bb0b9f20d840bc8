"""Reading and editing Python source in place: syntax from `ast`, edits as spans, so that comments survive."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
PREFIX = "_tf_"  # of every name that a rewrite brings along


class Source:
    """One file. Edits are collected against the original text and applied together by `text()`."""

    def __init__(self, text: str) -> None:
        self.raw = text.encode()
        self.tree = ast.parse(text)
        starts = [0]
        for line in self.raw.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self._edits: list[tuple[int, int, bytes]] = []

    @functools.cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Byte offsets of a node. ast counts columns in UTF-8 bytes."""
        at = node  # every expression and statement has positions
        begin = self._starts[at.lineno - 1] + at.col_offset  # type: ignore[attr-defined]
        return begin, self._starts[at.end_lineno - 1] + at.end_col_offset  # type: ignore[attr-defined]

    def of(self, node: ast.AST) -> str:
        begin, end = self.span(node)
        return self.raw[begin:end].decode()

    def replace(self, node: ast.AST, text: str) -> None:
        begin, end = self.span(node)
        self._edits.append((begin, end, text.encode()))

    def insert_before(self, statement: ast.stmt, text: str) -> None:
        """Puts whole lines in front of a statement, at its indentation."""
        begin = self._starts[statement.lineno - 1] + statement.col_offset
        line = self._starts[statement.lineno - 1]
        if self.raw[line:begin].strip():  # `a; b` or `if x: y` on one line
            raise ValueError("the statement shares its line")
        indent = self.raw[line:begin].decode()
        block = "".join(f"{indent}{row}\n" if row else "\n" for row in text.rstrip("\n").split("\n"))
        self._edits.append((line, line, block.encode()))

    def own_line(self, statement: ast.stmt) -> bool:
        line = self._starts[statement.lineno - 1]
        return not self.raw[line : line + statement.col_offset].strip()

    @property
    def edited(self) -> bool:
        return bool(self._edits)

    def text(self) -> str:
        """The edited text. Raises ValueError when edits overlap."""
        out, at = [], 0
        for begin, end, new in sorted(self._edits, key=lambda edit: edit[:2]):
            if begin < at:
                raise ValueError("edits overlap")
            out += [self.raw[at:begin], new]
            at = end
        return b"".join([*out, self.raw[at:]]).decode()

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that holds a node."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def function(self, node: ast.AST) -> Function | None:
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, Function):
                return node
        return None


def functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def same(a: ast.AST, b: ast.AST) -> bool:
    return ast.dump(a) == ast.dump(b)


def names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def dotted(node: ast.AST) -> str:
    """`torch.nn.functional.linear` for the attribute chain; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def call_name(node: ast.AST) -> str:
    """Last part of what is called: `linear` for F.linear(x, w), `contiguous` for x.contiguous(); empty for no call."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def stored(node: ast.AST) -> set[str]:
    """Names that a statement (with all it holds) binds."""
    return {c.id for c in ast.walk(node) if isinstance(c, ast.Name) and isinstance(c.ctx, ast.Store | ast.Del)}


def with_helper(text: str, helper: str) -> str:
    """Adds module-level code behind the imports, once. `helper`'s first line identifies it."""
    if helper.split("\n", 1)[0] in text:
        return text
    body = ast.parse(text).body
    after = 0
    for index, node in enumerate(body):
        docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            after = node.end_lineno or 0
    lines = text.splitlines(keepends=True)
    return "".join(lines[:after]) + "\n\n" + helper.strip("\n") + "\n\n\n" + "".join(lines[after:]).lstrip("\n")
