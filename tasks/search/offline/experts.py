"""A loop that looks for each value's places in a tensor gets all places from one sort."""

from __future__ import annotations

import ast

from tideforge.tasks.search.offline.linears import pure, with_import
from tideforge.tasks.search.offline.recipes import Rule
from tideforge.tasks.search.offline.source import Source, call_name, names, same, stored, with_helper

HELPER = '''
def _tf_places(table):
    """value -> its places in `table`, a tuple of one index tensor a dimension, in the order of torch.where."""
    flat = table.flatten()
    ordered, order = flat.sort(stable=True)
    values, counts = torch.unique_consecutive(ordered, return_counts=True)
    sizes, places = counts.tolist(), []
    for size in reversed(table.shape):
        places.insert(0, (order % size).split(sizes))
        order = order // size
    return dict(zip(values.tolist(), zip(*places)))
'''


def sort_once(text: str) -> str | None:
    """`for v in t.unique().tolist(): ... torch.where(t == v) ...` -> one sort in front of the loop."""
    source = Source(text)
    for number, loop in enumerate(node for node in ast.walk(source.tree) if isinstance(node, ast.For)):
        table = _table(loop)
        if table is None or not isinstance(loop.target, ast.Name) or not source.own_line(loop):
            continue
        if names(table) & set().union(*(stored(statement) for statement in loop.body)):
            continue
        finds = [node for statement in loop.body for node in ast.walk(statement) if _finds(node, table, loop.target.id)]
        if finds:
            source.insert_before(loop, f"_tf_found{number} = _tf_places({source.of(table)})")
            source.replace(loop.iter, f"list(_tf_found{number})")
            for node in finds:
                source.replace(node, f"_tf_found{number}[{loop.target.id}]")
    return with_import(with_helper(source.text(), HELPER.strip("\n"))) if source.edited else None


def _table(loop: ast.For) -> ast.expr | None:
    """t of `t.unique().tolist()` or `torch.unique(t).tolist()`."""
    call = loop.iter
    if call_name(call) != "tolist" or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    unique = call.func.value
    if call_name(unique) != "unique" or not isinstance(unique, ast.Call) or not isinstance(unique.func, ast.Attribute):
        return None
    table = unique.args[0] if unique.args else unique.func.value
    return table if pure(table) else None


def _finds(node: ast.AST, table: ast.expr, value: str) -> bool:
    """torch.where(t == v) or (t == v).nonzero(as_tuple=True)."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "where" and len(node.args) == 1 and not node.keywords:
        test = node.args[0]
    elif node.func.attr == "nonzero" and [k.arg for k in node.keywords] == ["as_tuple"]:
        test = node.args[0] if node.args else node.func.value
    else:
        return False
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    sides = (test.left, test.comparators[0])
    return any(same(a, table) and isinstance(b, ast.Name) and b.id == value for a, b in (sides, sides[::-1]))


RULES = (
    Rule("sort-once", "one sort finds every expert's tokens; the loop compared the whole table with each", sort_once),
)
