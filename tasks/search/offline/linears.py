"""Rewrites of linear layers: one product for layers that share their input, weights packed once for oneDNN."""

from __future__ import annotations

import ast
import itertools

from tideforge.tasks.search.offline.recipes import Rule
from tideforge.tasks.search.offline.source import Source, call_name, dotted, same, stored, with_helper

# Weights are recognised by their storage, so that a product with an activation is never remembered.
KNOWN = """
_tf_storages = set()  # addresses of weights: what may be joined or packed once and remembered
_tf_rows = [16]  # rows of a typical product


def _tf_know(ctx):
    _tf_storages.update(weight.untyped_storage().data_ptr() for weight in ctx.weights.values())
    _tf_rows[0] = ctx.limits.max_num_seqs


def _tf_key(weight):
    return weight.data_ptr(), weight.shape, weight.stride()
"""

JOINED = '''
_tf_joined = {}


def _tf_linears(x, *weights):
    """Linear layers that share their input as one product; their weights are joined at the first call."""
    if any(weight.untyped_storage().data_ptr() not in _tf_storages for weight in weights):
        return [torch.nn.functional.linear(x, weight) for weight in weights]
    key = tuple(map(_tf_key, weights))
    if key not in _tf_joined:
        joined = torch.cat(weights)
        _tf_storages.add(joined.untyped_storage().data_ptr())
        _tf_joined[key] = joined, [weight.shape[0] for weight in weights]
    joined, sizes = _tf_joined[key]
    return torch.nn.functional.linear(x, joined).split(sizes, dim=-1)
'''

PACKED = '''
_tf_blocked = {}


def _tf_prepacked(x, weight, bias=None):
    """A linear layer whose weight lies in oneDNN's blocked order; it is packed at the first call."""
    wanted = %s
    if not wanted or weight.device.type != "cpu" or weight.untyped_storage().data_ptr() not in _tf_storages:
        return torch._C._nn.linear(x, weight, bias)
    key = _tf_key(weight)
    if key not in _tf_blocked:
        _tf_blocked[key] = torch.ops.mkldnn._reorder_linear_weight(weight, _tf_rows[0])
    return torch.ops.mkldnn._linear_pointwise(x, _tf_blocked[key], bias, "none", [], "")
'''


def is_linear(node: ast.AST, arguments: tuple[int, ...]) -> bool:
    """`F.linear(x, w)` under any name that the module was imported as."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and call_name(node) == "linear"
        and bool(dotted(node.func))
        and len(node.args) in arguments
        and not node.keywords
    )


def pure(node: ast.AST) -> bool:
    """Reading it twice, or earlier, gives the same: names, attributes, subscripts, constants."""
    allowed = ast.Name | ast.Attribute | ast.Subscript | ast.Constant | ast.expr_context | ast.Tuple
    return all(isinstance(child, allowed) for child in ast.walk(node))


def share_inputs(text: str) -> str | None:
    """x @ w1, x @ w2, ... in one block become one product in front of the first of them."""
    source = Source(text)
    counter = itertools.count()
    for group in _groups(source):
        first = source.statement(group[0])
        fresh = [f"_tf_y{next(counter)}" for _ in group]
        weights = ", ".join(source.of(call.args[1]) for call in group)
        source.insert_before(first, f"{', '.join(fresh)} = _tf_linears({source.of(group[0].args[0])}, {weights})")
        for call, name in zip(group, fresh, strict=True):
            source.replace(call, name)
    return with_weights(source.text(), JOINED) if source.edited else None


def _groups(source: Source) -> list[list[ast.Call]]:
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and is_linear(node, (2,))]
    calls = [
        call for call in calls if source.function(call) and all(map(pure, call.args)) and not _conditional(source, call)
    ]
    calls.sort(key=source.span)
    groups: list[list[ast.Call]] = []
    for call in calls:
        for group in groups:
            if same(group[0].args[0], call.args[0]) and _reachable(source, group[0], call):
                group.append(call)
                break
        else:
            groups.append([call])
    return [group for group in groups if len(group) > 1 and source.own_line(source.statement(group[0]))]


def _conditional(source: Source, call: ast.AST) -> bool:
    """Not always evaluated where it stands: in a lambda, a comprehension, `a if b else c`, the head of a loop."""
    node = call
    while not isinstance(node, ast.stmt):
        node = source.parents[node]
        if isinstance(
            node, ast.Lambda | ast.IfExp | ast.BoolOp | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
        ):
            return True
    return not isinstance(node, ast.Assign | ast.Return | ast.Expr | ast.AugAssign | ast.AnnAssign)


def _reachable(source: Source, first: ast.Call, later: ast.Call) -> bool:
    """Both in one block, and nothing between them binds or changes in place what the later one reads."""
    begin, end = source.statement(first), source.statement(later)
    if source.parents[begin] is not source.parents[end]:
        return False
    parent = source.parents[begin]
    blocks = [value for _, value in ast.iter_fields(parent) if isinstance(value, list) and begin in value]
    if not blocks or end not in blocks[0]:
        return False
    between = blocks[0][blocks[0].index(begin) : blocks[0].index(end)]
    read = {node.id for argument in later.args for node in ast.walk(argument) if isinstance(node, ast.Name)}
    return not any(read & (stored(statement) | _changed(statement)) for statement in between)


def _changed(statement: ast.stmt) -> set[str]:
    """Names whose value an in-place method (`x.add_(y)`) or a subscript's assignment changes."""
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
            target: ast.AST = node.func.value
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            target = node.value
        else:
            continue
        if isinstance(target, ast.Name):
            found.add(target.id)
    return found


def with_weights(text: str, helper: str) -> str | None:
    """Adds a helper and has `build(ctx)` register the weights. None when there is no plain `build(ctx)`."""
    source = Source(with_helper(with_helper(text, KNOWN.strip("\n")), helper.strip("\n")))
    builds = [node for node in source.tree.body if isinstance(node, ast.FunctionDef) and node.name == "build"]
    if len(builds) != 1 or not builds[0].args.args or not source.own_line(builds[0].body[0]):
        return None
    call = f"_tf_know({builds[0].args.args[0].arg})"
    if call not in source.of(builds[0]):
        source.insert_before(builds[0].body[0], call)
    return with_import(source.text())


def with_import(text: str) -> str:
    """The helpers say `torch`; a file that imports only parts of it gets the name."""
    return text if "\nimport torch\n" in f"\n{text}" else with_helper(text, "import torch")


def prepack(text: str, wanted: str) -> str | None:
    source = Source(text)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and is_linear(node, (2, 3)) and not _inside_other(source, node):
            source.replace(node.func, "_tf_prepacked")
    return with_weights(source.text(), PACKED % wanted) if source.edited else None


def _inside_other(source: Source, node: ast.Call) -> bool:
    """The helpers' own fall-backs stay as they are."""
    function = source.function(node)
    in_fallback = (
        isinstance(source.parents[node], ast.ListComp) and function is not None and function.name == "_tf_linears"
    )
    return in_fallback or dotted(node.func).startswith("torch._C")


RULES = (
    Rule(
        "share-inputs",
        "linear layers that read the same rows are one wider product: fewer calls, better blocking",
        share_inputs,
        packs=True,
    ),
    Rule(
        "prepack-wide",
        "weights with more outputs than inputs, packed once into oneDNN's order, stream better at a few rows",
        lambda text: prepack(text, "weight.shape[0] > weight.shape[1]"),
        group="prepack",
        packs=True,
    ),
    Rule(
        "prepack-all",
        "every weight packed once into oneDNN's order saves the reordering inside each product",
        lambda text: prepack(text, "True"),
        group="prepack",
        packs=True,
    ),
)
