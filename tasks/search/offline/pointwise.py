"""Rewrites of what is spelled out element by element: normalisation, rotary positions, gates, gathers."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tideforge.tasks.search.offline.attention import inlined
from tideforge.tasks.search.offline.linears import with_import
from tideforge.tasks.search.offline.recipes import Rule
from tideforge.tasks.search.offline.source import PREFIX, Function, Source, call_name, functions, same, with_helper

FUSED_NORM = """
def _tf_rms_norm(x, weight, eps):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
"""

# 1 / rms from the row's length, which takes one read of x and no square of it in memory.
VECTOR_NORM = """
def _tf_rms_norm(x, weight, eps):
    y = x.float()
    length = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    scale = length.mul_(length).div_(x.shape[-1]).add_(eps).rsqrt_()
    y = (y * scale).to(x.dtype)
    return y if weight is None else y.mul_(weight)
"""

ROTATE = '''
def _tf_rotate(x, cos, sin):
    """x * cos + (-second half, first half) * sin, without building the turned copy."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out
'''

TAKE = '''
def _tf_take(source, index):
    """source[index]; whole rows by a list of numbers go through index_select."""
    if isinstance(source, torch.Tensor) and isinstance(index, torch.Tensor) and index.dim() == 1:
        if index.dtype in (torch.int64, torch.int32):
            return source.index_select(0, index)
    return source[index]
'''

CASTS = frozenset({"to", "float", "type_as", "type"})


def bare(node: ast.expr) -> ast.expr:
    """Without casts around it: `x` for x.float() and x.to(y.dtype)."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and call_name(node) in CASTS:
        node = node.func.value
    return node


def factors(node: ast.expr) -> Iterator[ast.expr]:
    node = bare(node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from factors(node.left)
        yield from factors(node.right)
    else:
        yield node


def result_of(function: Function) -> ast.expr | None:
    """What a function of plain assignments and one final return gives, in terms of its parameters."""
    env: dict[str, ast.expr] = {}
    for statement in function.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            env[statement.targets[0].id] = inlined(statement.value, env)
        elif isinstance(statement, ast.Return) and statement.value is not None:
            return inlined(statement.value, env) if statement is function.body[-1] else None
        else:
            return None
    return None


def rms_roles(node: ast.expr) -> tuple[ast.expr, ast.expr | None, ast.expr] | None:
    """(x, weight, eps) of x * rsqrt(mean(x ** 2) + eps) * weight in any order and with any casts."""
    parts = list(factors(node))
    roots = [part for part in parts if call_name(part) == "rsqrt"]
    if len(roots) != 1 or not isinstance(roots[0], ast.Call):
        return None
    call = roots[0]
    inside = call.args[0] if call.args else call.func.value if isinstance(call.func, ast.Attribute) else None
    if not isinstance(inside, ast.BinOp) or not isinstance(inside.op, ast.Add):
        return None
    for mean, eps in ((inside.left, inside.right), (inside.right, inside.left)):
        x = _mean_square(mean)
        if x is None:
            continue
        others = [part for part in parts if part is not call]
        rest = [part for part in others if not same(part, x)]
        if len(others) - len(rest) == 1 and len(rest) <= 1:
            return x, rest[0] if rest else None, eps
    return None


def _mean_square(node: ast.expr) -> ast.expr | None:
    """x of x.pow(2).mean(-1, keepdim=True), (x * x).mean(...) or torch.mean(x ** 2, -1, keepdim=True)."""
    node = bare(node)
    if call_name(node) != "mean" or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    free = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
    square = bare(node.args[0] if free else node.func.value)
    if isinstance(square, ast.BinOp):
        left, right = bare(square.left), bare(square.right)
        twice = isinstance(square.op, ast.Mult) and same(left, right)
        return left if twice or (isinstance(square.op, ast.Pow) and _is(right, 2)) else None
    if not isinstance(square, ast.Call) or not isinstance(square.func, ast.Attribute):
        return None
    name, free = call_name(square), isinstance(square.func.value, ast.Name) and square.func.value.id == "torch"
    base = square.args[0] if free else square.func.value
    power = square.args[-1] if name == "pow" and square.args else None
    return bare(base) if name == "square" or (power is not None and _is(power, 2)) else None


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


def fuse_norm(text: str, helper: str) -> str | None:
    source = Source(text)
    for function in functions(source.tree):
        result = None if function.name.startswith(PREFIX) else result_of(function)
        roles = rms_roles(result) if result is not None else None
        last = function.body[-1]
        if roles is None or not isinstance(last, ast.Return) or last.value is None:
            continue
        x, weight, eps = (ast.unparse(role) if role else "None" for role in roles)
        plain = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        for statement in plain[:-1]:
            source.replace(statement, "pass" if statement is plain[0] else "")
        source.replace(last.value, f"_tf_rms_norm({x}, {weight}, {eps})")
    return with_import(with_helper(tidy(source.text()), helper.strip("\n"))) if source.edited else None


def tidy(text: str) -> str:
    """Without the blank lines and the `pass` that a replaced body leaves behind."""
    rows = text.split("\n")
    kept = [i for i, row in enumerate(rows) if not (row and not row.strip())]
    rows = [rows[i] for i in kept]
    drop = {i for i, row in enumerate(rows[:-1]) if row.strip() == "pass" and _follows(row, rows[i + 1])}
    return "\n".join(row for i, row in enumerate(rows) if i not in drop)


def _follows(row: str, following: str) -> bool:
    return bool(following.strip()) and len(row) - len(row.lstrip()) == len(following) - len(following.lstrip())


def rotate_in_place(text: str) -> str | None:
    source = Source(text)
    for function in functions(source.tree):
        if function.name.startswith(PREFIX):
            continue
        halves = _halves(function)
        for node in ast.walk(function):
            roles = _rotation(node, halves)
            if roles:
                source.replace(node, f"_tf_rotate({', '.join(map(source.of, roles))})")
    return with_import(with_helper(source.text(), ROTATE.strip("\n"))) if source.edited else None


def _halves(function: Function) -> dict[tuple[str, str], str]:
    """(first, second) -> whole for every `first, second = whole.chunk(2, dim=-1)`."""
    found = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or call_name(node.value) not in ("chunk", "tensor_split"):
            continue
        target, call = node.targets[0], node.value
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute | ast.Name)
        base = call.func.value if isinstance(call.func, ast.Attribute) else None
        pair = isinstance(target, ast.Tuple) and len(target.elts) == 2 and call.args and _is(call.args[0], 2)
        if (
            pair
            and isinstance(target, ast.Tuple)
            and all(isinstance(e, ast.Name) for e in target.elts)
            and base is not None
        ):
            first, second = (ast.unparse(e) for e in target.elts)
            found[first, second] = ast.unparse(base)
    return found


def _rotation(node: ast.AST, halves: dict[tuple[str, str], str]) -> tuple[ast.expr, ast.expr, ast.expr] | None:
    """(x, cos, sin) of x * cos + cat((-second, first), -1) * sin."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return None
    sides = (node.left, node.right)
    if not all(isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mult) for side in sides):
        return None
    for plain, turned in (sides, sides[::-1]):
        assert isinstance(plain, ast.BinOp) and isinstance(turned, ast.BinOp)
        for joined, sin in ((turned.left, turned.right), (turned.right, turned.left)):
            whole = _turned(joined, halves)
            for x, cos in ((plain.left, plain.right), (plain.right, plain.left)):
                if whole and ast.unparse(x) == whole:
                    return x, cos, sin
    return None


def _turned(node: ast.expr, halves: dict[tuple[str, str], str]) -> str | None:
    if call_name(node) not in ("cat", "concat") or not isinstance(node, ast.Call) or not node.args:
        return None
    parts = node.args[0].elts if isinstance(node.args[0], ast.Tuple | ast.List) else []
    if len(parts) != 2:
        return None
    minus, first = parts
    if not isinstance(minus, ast.UnaryOp) or not isinstance(minus.op, ast.USub):
        return None
    second = minus.operand
    by_name = halves.get((ast.unparse(first), ast.unparse(second)))
    return by_name or _cut_in_halves(first, second)


def _cut_in_halves(first: ast.expr, second: ast.expr) -> str | None:
    """x of x[..., :n] and x[..., n:] for the same n."""
    if (
        not isinstance(first, ast.Subscript)
        or not isinstance(second, ast.Subscript)
        or not same(first.value, second.value)
    ):
        return None
    ends = [cut.slice.elts[-1] if isinstance(cut.slice, ast.Tuple) else cut.slice for cut in (first, second)]
    head, tail = ends
    if not isinstance(head, ast.Slice) or not isinstance(tail, ast.Slice) or head.lower or tail.upper:
        return None
    return ast.unparse(first.value) if head.upper and tail.lower and same(head.upper, tail.lower) else None


def gate_in_place(text: str) -> str | None:
    """silu(a) * b: the product is written over silu's own fresh result. x * sigmoid(x) becomes silu(x) first."""
    source = Source(text)
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
            continue
        for silu, other in ((node.left, node.right), (node.right, node.left)):
            spelled = _spelled_silu(silu)
            if call_name(silu) != "silu" and spelled is None:
                continue
            fresh = f"torch.nn.functional.silu({source.of(spelled)})" if spelled is not None else source.of(silu)
            source.replace(node, f"{fresh}.mul_({source.of(other)})")
            break
    return with_import(source.text()) if source.edited else None


def _spelled_silu(node: ast.expr) -> ast.expr | None:
    """x of x * torch.sigmoid(x) or x * x.sigmoid()."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    for x, call in ((node.left, node.right), (node.right, node.left)):
        if call_name(call) == "sigmoid" and isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            inside = call.args[0] if call.args else call.func.value
            if same(inside, x):
                return x
    return None


def take_rows(text: str) -> str | None:
    """a[i] with a plain name or attribute as index, outside annotations; what it is shows at run time."""
    source = Source(text)
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and _plain(node)
            and _in_body(source, node)
        ):
            source.replace(node, f"_tf_take({source.of(node.value)}, {source.of(node.slice)})")
    return with_import(with_helper(source.text(), TAKE.strip("\n"))) if source.edited else None


def _plain(node: ast.Subscript) -> bool:
    return isinstance(node.slice, ast.Name | ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute)


def _in_body(source: Source, node: ast.AST) -> bool:
    """Runs at each call of a function of the forward's own: no annotation, no helper."""
    while not isinstance(node, ast.stmt):
        if isinstance(node, ast.arguments):
            return False
        child, node = node, source.parents[node]
    if isinstance(node, Function) or (isinstance(node, ast.AnnAssign) and child is node.annotation):
        return False
    function = source.function(node)
    return (
        function is not None and not function.name.startswith((PREFIX, "__init__")) and not _in_helper(source, function)
    )


def _in_helper(source: Source, function: Function) -> bool:
    parent = source.parents[function]
    return isinstance(parent, ast.ClassDef) and parent.name.startswith("_Tf")


RULES = (
    Rule(
        "norm-fused",
        "a spelled-out RMS norm is one kernel: one pass instead of five",
        lambda text: fuse_norm(text, FUSED_NORM),
        group="norm",
    ),
    Rule(
        "norm-by-length",
        "an RMS norm from the row's length needs no square of the row in memory",
        lambda text: fuse_norm(text, VECTOR_NORM),
        group="norm",
    ),
    Rule("rotate-in-place", "rotary positions without the turned copy: less memory moved", rotate_in_place),
    Rule("gate-in-place", "the gate's product over silu's own result: one allocation less", gate_in_place),
    Rule("take-rows", "index_select copies whole rows; general indexing does not know that they are whole", take_rows),
)
