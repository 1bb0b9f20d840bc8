"""KV blocks: who holds which, which are shared, which hold a prefix that a later request can use again.

Pure bookkeeping, no memory: the keeper owns the pages. Block 0 is the dummy page and is never given out.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


def root_key(forward: str) -> bytes:
    """Where the hash chain of a forward begins: K/V written by one forward is never read by another."""
    return hashlib.sha256(forward.encode()).digest()


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of one full block: SHA-256 over the parent's key and the block's token ids (int64, native order)."""
    return hashlib.sha256(parent + np.asarray(tokens, np.int64).tobytes()).digest()


class BlockPool:
    """Reference counts, a free list and a prefix cache over `num_blocks` blocks of `block_size` tokens.

    An unreferenced block that holds a published prefix stays usable until its place is needed; of those the least
    recently released goes first, and blocks without a prefix go before all of them.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError("a pool needs the dummy block, at least one more, and at least one token a block")
        self.num_blocks, self.block_size, self.prefix_cache = num_blocks, block_size, prefix_cache
        self._references = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced, least recently released first
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, tuple[bytes, str]] = {}

    @property
    def capacity(self) -> int:
        """Blocks that can be given out at all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be given out now, those with an unreferenced prefix included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_prefixes(self) -> int:
        return len(self._by_key)

    def references(self, block: int) -> int:
        return self._references[block]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, contents undefined. The caller has looked at num_free."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} are free")
        blocks = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._unpublish(block)
        return block

    def match(self, forward: str, tokens: Sequence[int]) -> tuple[list[int], bytes]:
        """The longest published chain of full blocks that begins `tokens`, and the key at its end. Takes nothing."""
        blocks, key = [], root_key(forward)
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            following = chain_key(key, tokens[start : start + self.block_size])
            block = self._by_key.get(following)
            if block is None:
                break
            blocks.append(block)
            key = following
        return blocks, key

    def num_free_after(self, shared: Sequence[int]) -> int:
        """What num_free would be once `shared` (a match) is held."""
        return self.num_free - sum(1 for block in shared if self._references[block] == 0)

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a reference to blocks that a match named."""
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] += 1

    def publish(self, block: int, key: bytes, forward: str) -> None:
        """Makes a held, full, computed block findable. The first block under a key stays; later ones remain private."""
        if self.prefix_cache and key not in self._by_key and block not in self._key_of:
            self._by_key[key] = block
            self._key_of[block] = (key, forward)

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one reference from each. Given last block first, so that a chain is evicted from its end."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released but nobody holds it")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._empty.append(block)

    def forget(self, forward: str) -> None:
        """Drops every prefix that `forward` wrote: its worker is gone or not to be trusted."""
        for block in [b for b, (_, writer) in self._key_of.items() if writer == forward]:
            self._unpublish(block)
            if block in self._cached:
                del self._cached[block]
                self._empty.append(block)

    def _unpublish(self, block: int) -> None:
        key, _ = self._key_of.pop(block)
        del self._by_key[key]
