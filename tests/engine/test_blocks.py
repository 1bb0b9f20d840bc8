"""The block pool: references, prefix reuse and eviction."""

from __future__ import annotations

import pytest

from tideforge.engine.blocks import BlockPool, chain_key, root_key


def publish_chain(pool: BlockPool, forward: str, tokens: list[int]) -> list[int]:
    blocks, key = pool.allocate(len(tokens) // pool.block_size), root_key(forward)
    for index, block in enumerate(blocks):
        key = chain_key(key, tokens[index * pool.block_size : (index + 1) * pool.block_size])
        pool.publish(block, key, forward)
    return blocks


def test_the_dummy_block_is_never_given_out() -> None:
    pool = BlockPool(5, 4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="0 are free"):
        pool.allocate(1)


def test_release_of_a_free_block_is_an_error() -> None:
    pool = BlockPool(5, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.release(blocks)


def test_match_finds_only_full_blocks_of_the_same_forward() -> None:
    pool = BlockPool(9, 4)
    blocks = publish_chain(pool, "f", list(range(8)))
    assert pool.match("f", list(range(8)))[0] == blocks
    assert pool.match("f", list(range(7)))[0] == blocks[:1]
    assert pool.match("f", [9, *range(1, 8)])[0] == []
    assert pool.match("g", list(range(8)))[0] == []


def test_the_same_tokens_after_another_prefix_are_another_block() -> None:
    pool = BlockPool(9, 4)
    publish_chain(pool, "f", [0, 0, 0, 0, 7, 7, 7, 7])
    assert pool.match("f", [7, 7, 7, 7])[0] == []


def test_unreferenced_prefixes_stay_until_needed_and_go_from_the_end_of_the_oldest_chain() -> None:
    pool = BlockPool(6, 4)
    old = publish_chain(pool, "f", list(range(8)))
    young = publish_chain(pool, "f", list(range(100, 108)))
    pool.release(old[::-1])
    pool.release(young[::-1])
    assert pool.num_free == 5
    pool.allocate(2)  # one empty block, then the tail of the old chain
    assert pool.match("f", list(range(8)))[0] == old[:1]
    assert pool.match("f", list(range(100, 108)))[0] == young


def test_sharing_revives_a_cached_block_and_counts_it_as_taken() -> None:
    pool = BlockPool(4, 4)
    blocks = publish_chain(pool, "f", list(range(4)))
    pool.release(blocks)
    assert pool.num_free_after(blocks) == 2
    pool.share(blocks)
    assert (pool.num_free, pool.references(blocks[0])) == (2, 1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.references(blocks[0]) == 1


def test_forget_drops_one_forwards_prefixes_and_returns_their_blocks() -> None:
    pool = BlockPool(9, 4)
    mine = publish_chain(pool, "f", list(range(8)))
    others = publish_chain(pool, "g", list(range(8)))
    pool.release(mine[:1])  # one is cached, the other still held
    pool.forget("f")
    assert pool.match("f", list(range(8)))[0] == []
    assert pool.match("g", list(range(8)))[0] == others
    pool.release(mine[1:])
    assert pool.num_free == 6


def test_the_first_block_under_a_key_stays_the_shared_one() -> None:
    pool = BlockPool(9, 4)
    first = publish_chain(pool, "f", list(range(4)))
    publish_chain(pool, "f", list(range(4)))
    assert pool.match("f", list(range(4)))[0] == first


def test_without_a_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(9, 4, prefix_cache=False)
    publish_chain(pool, "f", list(range(8)))
    assert pool.match("f", list(range(8)))[0] == []
