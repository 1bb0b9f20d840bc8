"""Pages that the authority wrote itself, of any length: what a worker finds as a prefix and has computed nothing of."""

from __future__ import annotations

from typing import Any

import numpy as np

from tideforge.engine.blocks import BlockPool, chain_key, root_key
from tideforge.engine.gates.caught import Unverifiable
from tideforge.engine.gates.pages import Bits, Judge, expect
from tideforge.engine.gates.probe import Probe, Recorder, drain
from tideforge.engine.gates.replay import Place, slots_of, write_slots
from tideforge.engine.keeper import convert

STOCK = 64  # tokens of text whose K and V are dealt out to all positions
SINKS = 4  # of its first tokens only the first is used, for first positions: they can carry activations a hundred times the usual
LARGEST = 1 << 28  # bytes of one sequence's K and V in fp32: they are sent to the reference, in which they are expanded
OUTPUTS = 2
DRAWS = 20  # of prompts that begin differently
MOST_NEW = 6  # tokens of a prompt behind its prefix


def given_pages(probe: Probe) -> dict[str, Any]:
    """Prefixes as long as pages and limits allow, with K and V at random places: answers are those of these very pages.

    The shorter ones come again under other pages. That the older half of the pages counts is seen by what the reference says with
    it exchanged; lengths at which that moves it beyond doubt in no answer are named as what the gate is blind to.
    """
    rng, stock = np.random.default_rng(probe.secret()), _stock(probe)
    lengths = dict(zip("abc", _lengths(probe, rng), strict=True))
    prompts = _prompts(probe, rng, lengths)
    judge, moved, told = Judge(), 0.0, set[int]()
    for names in ("abc", "bc"):
        pages = {name: _dealt(rng, stock, lengths[name]) for name in names}
        recorder, chains = _answered(probe, prompts, pages)
        for name in names:
            at = int(rng.integers(OUTPUTS))
            place = Place(name, 0, (), lengths[name], (*prompts[name][lengths[name] :], *chains[name][:at]))
            found = expect(probe, place, "exchanged in their older half", _halved(pages[name]), pages[name])
            what = f"on pages of {lengths[name]} tokens that it was given"
            judge.see(found, recorder.rows[name][at].logits, what)
            moved = max(moved, found.moved / found.bound)
            told |= {lengths[name]} if found.tells else set()
    judge.require_followed()
    return {
        "contexts": list(lengths.values()), "worst_share_of_bound": judge.worst, "older_half_moves_in_bounds": moved,
        "blind": unseen(sorted({*lengths.values()} - told)),
    }  # fmt: skip


def unseen(lengths: list[int]) -> str:
    if not lengths:
        return ""
    return f"the older half of pages of {', '.join(map(str, lengths))} tokens: with it exchanged the reference's answers stay within doubt"


def _answered(
    probe: Probe, prompts: dict[str, tuple[int, ...]], pages: dict[str, Bits]
) -> tuple[Recorder, dict[str, list[int]]]:
    """A few tokens of each request that has pages."""
    recorder = Recorder(probe.worker, probe.arena)
    core, size = probe.core(recorder, prefix_cache=True), probe.arena.layout.block_size
    given = {name: _publish(probe, core.pool, prompts[name][: bits[0].shape[1]], bits) for name, bits in pages.items()}
    chains = drain(core, [probe.request(name, prompts[name], OUTPUTS) for name in pages], len(pages))
    for name, blocks in given.items():
        assert list(recorder.rows[name][0].blocks[: pages[name][0].shape[1] // size]) == blocks, "the prefix was found"
    return recorder, chains


def _prompts(probe: Probe, rng: np.random.Generator, lengths: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """A few tokens more than pages; of different first blocks, or one would be taken for another's prefix."""
    size = probe.arena.layout.block_size
    for _ in range(DRAWS):
        found = {
            name: probe.spans([length + int(rng.integers(1, min(size, MOST_NEW + 1)))])[0]
            for name, length in lengths.items()
        }
        if len({prompt[:size] for prompt in found.values()}) == len(found):
            return found
    raise Unverifiable("the text holds too few different beginnings of prompts")


def _lengths(probe: Probe, rng: np.random.Generator) -> list[int]:
    """The longest there can be, one of up to a quarter of it, one block: whole blocks each."""
    layout = probe.arena.layout
    each = 4 * len(probe.layers) * layout.num_kv_heads * (layout.key_dim + layout.value_dim)
    room = (layout.num_blocks - 8) * layout.block_size  # tails, answers, the dummy page and one block more
    longest = min(probe.limits.max_model_len, room, LARGEST // each, len(probe.text)) - layout.block_size - OUTPUTS
    blocks = max(1, longest // layout.block_size)
    rest = max(1, min(blocks // 4, room // layout.block_size - blocks - 1))
    return [layout.block_size * count for count in (blocks, int(rng.integers(1, rest + 1)), 1)]


def _stock(probe: Probe) -> Bits:
    keys, values = probe.reference.kv(probe.spans([STOCK])[0], probe.layers)
    dtype = probe.arena.layout.dtype
    return convert(keys, "F32", dtype), convert(values, "F32", dtype)


def _dealt(rng: np.random.Generator, stock: Bits, length: int) -> Bits:
    source = rng.integers(SINKS, STOCK, length)
    source[0] = 0
    return stock[0][:, source], stock[1][:, source]


def _halved(pages: Bits) -> Bits:
    """The same, the newer half in place of the older one, but for the first position."""
    length = pages[0].shape[1]
    source = np.arange(length)
    source[1 : length // 2] += length - length // 2
    return pages[0][:, source], pages[1][:, source]


def _publish(probe: Probe, pool: BlockPool, prefix: tuple[int, ...], pages: Bits) -> list[int]:
    """Puts the pages where the pool finds them for whoever begins with `prefix`; the blocks."""
    size, key = pool.block_size, root_key(probe.forward)
    blocks = pool.allocate(len(prefix) // size)
    bits = [half.view(np.uint16) if half.dtype == np.float16 else half for half in pages]
    write_slots(probe.arena, probe.layers, slots_of(probe.arena, blocks, len(prefix)), *bits)
    for at, block in enumerate(blocks):
        key = chain_key(key, prefix[at * size : (at + 1) * size])
        pool.publish(block, key, probe.forward)
    pool.release(blocks[::-1])
    return blocks
