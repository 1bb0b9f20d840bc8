"""The loop that attends sequence by sequence becomes one padded call a kind of sequence."""

from __future__ import annotations

import ast
import copy
import dataclasses

from tideforge.tasks.search.offline.linears import with_import
from tideforge.tasks.search.offline.recipes import Rule
from tideforge.tasks.search.offline.source import Source, call_name, names, same, stored, with_helper

# Padding repeats a token of the same sequence: pages of others and unwritten slots may hold anything, NaN too.
HELPER = '''
_tf_plans = {}


class _TfPlan:
    """Sequences of one step that are attended at once: their rows, their tokens' slots, who may see what."""

    def __init__(self, spans, block_size, device):
        counts = [rows.stop - rows.start for rows, _, _ in spans]
        lengths = [length for _, _, length in spans]
        self.size, self.most, self.context = len(spans), max(counts), max(lengths)
        queries = [[rows.start + min(i, n - 1) for i in range(self.most)] for (rows, _, _), n in zip(spans, counts)]
        self.queries = torch.tensor(queries, device=device).flatten()
        kept = [i * self.most + j for i, n in enumerate(counts) for j in range(n)]
        self.kept = torch.tensor(kept, device=device)
        self.rows = self.queries.index_select(0, self.kept)
        length = torch.tensor(lengths, device=device)[:, None]
        position = torch.arange(self.context, device=device)[None]
        position = torch.where(position < length, position, 0)
        width = max(blocks.shape[0] for _, blocks, _ in spans)
        pad = torch.nn.functional.pad
        table = torch.stack([pad(blocks.long(), (0, width - blocks.shape[0])) for _, blocks, _ in spans])
        slots = table.gather(1, position // block_size) * block_size + position % block_size
        self.slots = slots.flatten()
        count = torch.tensor(counts, device=device)[:, None]
        last = length - count + torch.minimum(torch.arange(self.most, device=device)[None], count - 1)
        self.seen = torch.arange(self.context, device=device) <= last[..., None]
        self.masks = {}

    def mask(self, repeat, dtype):
        """[size, 1, repeat * most, context]: 0 where a query may look, -inf elsewhere."""
        if (repeat, dtype) not in self.masks:
            seen = self.seen[:, None, None].expand(-1, 1, repeat, -1, -1).flatten(2, 3)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self.masks[repeat, dtype] = mask.masked_fill_(~seen, float("-inf"))
        return self.masks[repeat, dtype]

    def attend(self, out, q, keys, values, scale):
        heads, dim = q.shape[1:]
        shared = keys.shape[2]
        repeat = heads // shared
        k, v = (
            side.flatten(0, 1).index_select(0, self.slots).unflatten(0, (self.size, self.context)).transpose(1, 2)
            for side in (keys, values)
        )
        rows = q.index_select(0, self.queries).view(self.size, self.most, shared, repeat, dim)
        rows = rows.permute(0, 2, 3, 1, 4).reshape(self.size, shared, repeat * self.most, dim)
        mask = self.mask(repeat, q.dtype)
        result = torch.nn.functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
        result = result.view(self.size, shared, repeat, self.most, dim).permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)
        out.index_copy_(0, self.rows, result.index_select(0, self.kept).to(out.dtype))


def _tf_attend_together(items, spans, out, q, keys, values, scale, limit):
    """Attends all sequences of at most `limit` rows at once and gives back the items of the others."""
    remembered = _tf_plans.get("step")
    same = remembered and len(remembered[0]) == len(items) and all(a is b for a, b in zip(remembered[0], items))
    if not same or not all(type(item) is tuple for item in items):
        rows = [span[0].stop - span[0].start for span in spans]
        parts = [[i for i, n in enumerate(rows) if n == 1], [i for i, n in enumerate(rows) if 1 < n <= limit]]
        plans = [_TfPlan([spans[i] for i in part], keys.shape[1], q.device) for part in parts if part]
        _tf_plans["step"] = remembered = items, plans, [i for i, n in enumerate(rows) if n > limit]
    for plan in remembered[1]:
        plan.attend(out, q, keys, values, scale)
    return [items[i] for i in remembered[2]]
'''


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Roles found in a loop over sequences. Expressions are in terms of the loop's targets and of names outside it."""

    loop: ast.For
    out: ast.expr
    rows: ast.expr
    queries: ast.expr
    keys: ast.expr
    values: ast.expr
    blocks: ast.expr
    length: ast.expr
    scale: ast.expr | None


class _Inline(ast.NodeTransformer):
    def __init__(self, env: dict[str, ast.expr]) -> None:
        self.env = env

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.env[node.id]) if isinstance(node.ctx, ast.Load) and node.id in self.env else node


def inlined(node: ast.expr, env: dict[str, ast.expr]) -> ast.expr:
    result: ast.expr = _Inline(env).visit(copy.deepcopy(node))
    return result


def find(source: Source) -> list[Ragged]:
    loops = [node for node in ast.walk(source.tree) if isinstance(node, ast.For) and not node.orelse]
    return [found for loop in loops if source.own_line(loop) and (found := match(loop)) is not None]


def match(loop: ast.For) -> Ragged | None:
    """A body of plain assignments that attends one sequence's rows over its own pages and stores them there."""
    env: dict[str, ast.expr] = {}
    store: tuple[ast.Subscript, ast.expr] | None = None
    for statement in loop.body:
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or store:
            return None
        target, value = statement.targets[0], inlined(statement.value, env)
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, ast.Subscript):
            store = ast.Subscript(target.value, inlined(target.slice, env), ast.Load()), value
        else:
            return None
    return _roles(loop, *store) if store else None


def _roles(loop: ast.For, target: ast.Subscript, value: ast.expr) -> Ragged | None:
    calls = [node for node in ast.walk(value) if call_name(node) == "scaled_dot_product_attention"]
    if len(calls) != 1 or not isinstance(calls[0], ast.Call):
        return None
    options = {keyword.arg: keyword.value for keyword in calls[0].keywords}
    arguments = [*calls[0].args[:3], *(options[name] for name in ("query", "key", "value") if name in options)]
    if len(arguments) != 3:
        return None
    bound = stored(loop.target)
    query = [n for n in _subscripts(arguments[0]) if same(n.slice, target.slice)]
    key, val = (_pages(side, bound) for side in arguments[1:])
    if len(query) != 1 or key is None or val is None or not same(key[1], val[1]) or not same(key[2], val[2]):
        return None
    outside = [target.value, query[0].value, key[0], val[0], *([options["scale"]] if "scale" in options else [])]
    if any(names(node) & bound for node in outside) or not names(target.slice) & bound:
        return None
    return Ragged(
        loop, target.value, target.slice, query[0].value, key[0], val[0], key[1], key[2], options.get("scale")
    )


def _subscripts(node: ast.AST) -> list[ast.Subscript]:
    return [child for child in ast.walk(node) if isinstance(child, ast.Subscript)]


def _pages(node: ast.expr, bound: set[str]) -> tuple[ast.expr, ast.expr, ast.expr] | None:
    """(cache, blocks, length) of `cache[blocks]...[:length]...`; None when the side is put together from several caches."""
    found = []
    for cut in _subscripts(node):
        if not isinstance(cut.slice, ast.Slice) or cut.slice.lower or cut.slice.step or cut.slice.upper is None:
            continue
        gathers = [n for n in _subscripts(cut.value) if not isinstance(n.slice, ast.Slice | ast.Constant | ast.Tuple)]
        gathers = [n for n in gathers if names(n.slice) & bound and not names(n.value) & bound]
        if len(gathers) == 1:
            found.append((gathers[0].value, gathers[0].slice, cut.slice.upper))
    return found[0] if len(found) == 1 else None


def together(text: str, limit: str) -> str | None:
    source = Source(text)
    for number, found in enumerate(find(source)):
        items, target = f"_tf_items{number}", source.of(found.loop.target)
        rows = _as_slice(found.rows)
        spans = f"[({rows}, {ast.unparse(found.blocks)}, {ast.unparse(found.length)}) for {target} in {items}]"
        roles = ", ".join(ast.unparse(node) for node in (found.out, found.queries, found.keys, found.values))
        scale = ast.unparse(found.scale) if found.scale else "None"
        source.insert_before(found.loop, f"{items} = list({source.of(found.loop.iter)})")
        source.replace(found.loop.iter, f"_tf_attend_together({items}, {spans}, {roles}, {scale}, {limit})")
    return with_import(with_helper(source.text(), HELPER.strip("\n"))) if source.edited else None


def _as_slice(node: ast.expr) -> str:
    if not isinstance(node, ast.Slice):
        return ast.unparse(node)
    low, high = (ast.unparse(end) if end else "None" for end in (node.lower, node.upper))
    return f"slice({low}, {high})"


RULES = (
    Rule(
        "attend-decodes-together",
        "sequences with one row each are one padded attention call instead of one call, two gathers and a store each",
        lambda text: together(text, "1"),
        group="ragged",
    ),
    Rule(
        "attend-all-together",
        "sequences with one row are one padded attention call and the chunks of prompts another",
        lambda text: together(text, "1 << 30"),
        group="ragged",
    ),
)
