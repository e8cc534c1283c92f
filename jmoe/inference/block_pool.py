"""Blocks of the KV cache: which are in use, and which tokens' keys and values they have.

A block holds the keys and values of `CACHE_BLOCK` consecutive positions in every layer. A sequence
lists its blocks in a table. Sequences with a common prefix share its full blocks by reference, and
a block stays after its last sequence has ended until its memory is needed: the least recently used
goes first. A full block is found by a digest of all tokens up to its end, and a part of a block by
the digest of the tokens before the block.

`Scheduler` calls it. Imports the standard library and jmoe's own modules without JAX.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from jmoe.config.engine import CACHE_BLOCK

NO_TOKENS = b""  # the digest of the prefix before a sequence's first block


def digest_of_block(prefix_digest: bytes, tokens: list[int]) -> bytes:
    """Return the digest of a prefix and one block of tokens after it.

    prefix_digest: of the tokens before the block; digests are cryptographic, so equal ones mean
        equal tokens.
    """
    return hashlib.blake2b(prefix_digest + array("q", tokens).tobytes(), digest_size=16).digest()


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix of two lists.

    Bisects with slice comparisons, which run in C: prompts may be very long.
    """
    if not a or not b or a[0] != b[0]:
        return 0
    # invariant: the first `equal` elements agree; the first `end` differ, or do not exist
    equal, end = 1, min(len(a), len(b)) + 1
    while end - equal > 1:
        middle = (equal + end) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            end = middle
    return equal


class CachedPrefix(NamedTuple):
    """The longest prefix of some tokens whose keys and values a pool has.

    full: ids of blocks that hold it from its start. tail: id of a block whose first `num_tail`
    tokens go on from there; None if no block goes on.
    """

    full: list[int]
    tail: int | None
    num_tail: int
    num_tokens: int


NOTHING_CACHED = CachedPrefix([], None, 0, 0)


@dataclass(eq=False)
class _Block:
    """One block.

    holders: number of running sequences that have it in their table.
    prefix: digest of the tokens before it; None unless `find_cached_prefix` may return the block.
    digest: digest of all tokens up to its end; None until it is full.
    tokens: those whose keys and values it has.
    last_use: the `use_number` of the `BlockPool.release` in which its last holder left.
    """

    id: int
    holders: int = 0
    prefix: bytes | None = None
    digest: bytes | None = None
    tokens: list[int] = field(default_factory=list)
    last_use: int = 0


class BlockPool:
    """The blocks of one memory: those of a device, or of all devices that divide the heads."""

    def __init__(self, first_id: int, num_blocks: int, block_tokens: int = CACHE_BLOCK) -> None:
        """Make a pool of unused blocks with consecutive ids.

        block_tokens: positions of a block.
        """
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._first_id = first_id
        self._blocks = [_Block(first_id + i) for i in range(num_blocks)]
        # blocks without holders: without content, and with content, the least recently used first
        self._unused = deque(self._blocks)
        self._cached: OrderedDict[int, _Block] = OrderedDict()
        self._full: dict[bytes, _Block] = {}
        self._by_prefix: dict[bytes, dict[int, _Block]] = {}
        self._num_shared = 0  # holders beyond the first of every block

    @property
    def num_free(self) -> int:
        """Return the number of blocks without holders, cached ones included."""
        return len(self._unused) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Return the number of blocks without holders whose content can be found."""
        return len(self._cached)

    @property
    def num_tokens_saved_by_sharing(self) -> int:
        """Return the number of tokens that sequences need not store, as others hold the same
        blocks: a block with h holders counts h - 1 times.
        """
        return self._num_shared * self.block_tokens

    @property
    def last_use_of_next_block(self) -> int:
        """Return the last use of the block that `allocate` gives next; 0 if it has no content."""
        return 0 if self._unused else next(iter(self._cached.values())).last_use

    def is_cached(self, block_id: int) -> bool:
        """Return whether the block has content and no holder."""
        return block_id in self._cached

    def find_cached_prefix(
        self, tokens: list[int], digests: list[bytes], root: bytes = NO_TOKENS
    ) -> CachedPrefix:
        """Return the longest prefix of `tokens` whose keys and values blocks of the pool have.

        digests: digests of the first full blocks of `tokens`; the search appends those it needs.
        root: the digest before the first token; sequences with another root share no blocks.
        """
        size, full = self.block_tokens, []
        for i in range(len(tokens) // size):
            extend_digests(digests, tokens, i + 1, size, root)
            block = self._full.get(digests[i])
            if block is None:
                break
            full.append(block.id)
        start = len(full) * size
        rest = tokens[start : start + size]
        prefix = digests[len(full) - 1] if full else root
        tail, num_tail = None, 0
        for block in self._by_prefix.get(prefix, {}).values():
            length = common_prefix_length(block.tokens, rest)
            if length > num_tail:
                tail, num_tail = block.id, length
        return CachedPrefix(full, tail, num_tail, start + num_tail)

    def add_holder(self, block_ids: Iterable[int]) -> None:
        """Count one more holder of each block."""
        for block_id in block_ids:
            block = self._block(block_id)
            self._num_shared += block.holders > 0
            block.holders += 1
            self._cached.pop(block_id, None)

    def allocate(self, count: int) -> list[int]:
        """Take `count` of the free blocks, give each of them one holder, and return their ids.

        Blocks without content go first, then the least recently used, whose content is forgotten.
        At least `count` blocks must be free.
        """
        taken = []
        for _ in range(count):
            block = self._unused.popleft() if self._unused else self._cached.popitem(last=False)[1]
            self._remove_from_index(block)
            block.tokens = []
            block.holders = 1
            taken.append(block.id)
        return taken

    def mark_most_recently_used(self, block_id: int) -> None:
        """Make a cached block the last that `allocate` gives."""
        self._cached.move_to_end(block_id)

    def release(self, block_ids: Iterable[int], use_number: int) -> None:
        """Count one holder less of each block of a sequence's table.

        A sequence's last blocks are taken before its first, which more sequences can use.
        use_number: increases from call to call; orders the blocks by their last use.
        """
        for block_id in reversed(list(block_ids)):
            block = self._block(block_id)
            block.holders -= 1
            if block.holders:
                self._num_shared -= 1
            elif block.prefix is None:
                self._unused.append(block)
            else:
                self._cached[block_id], block.last_use = block, use_number

    def num_tokens(self, block_id: int) -> int:
        """Return the number of tokens whose keys and values the block has."""
        return len(self._block(block_id).tokens)

    def record_tokens(self, block_id: int, prefix_digest: bytes, tokens: list[int]) -> None:
        """Record that the block now has the keys and values of `tokens` too, after those recorded.

        prefix_digest: of the tokens before the block. A block whose tokens another full block has
            too is no longer found.
        """
        block = self._block(block_id)
        if not block.tokens and tokens:
            block.prefix = prefix_digest
            self._by_prefix.setdefault(prefix_digest, {})[block_id] = block
        block.tokens += tokens
        if len(block.tokens) == self.block_tokens and block.prefix is not None and tokens:
            digest = digest_of_block(prefix_digest, block.tokens)
            if self._full.setdefault(digest, block) is block:
                block.digest = digest
            else:
                self._remove_from_index(block)

    def remove_unshared_from_index(self, block_ids: Iterable[int]) -> None:
        """Keep `find_cached_prefix` from returning those of the blocks with a single holder."""
        for block in map(self._block, block_ids):
            if block.holders == 1:
                self._remove_from_index(block)

    def forget_cached(self) -> None:
        """Forget the content of all blocks without holders."""
        for block in self._cached.values():
            self._remove_from_index(block)
        self._unused.extend(self._cached.values())
        self._cached.clear()

    def _block(self, block_id: int) -> _Block:
        """Return the block with this id."""
        return self._blocks[block_id - self._first_id]

    def _remove_from_index(self, block: _Block) -> None:
        """Keep `find_cached_prefix` from returning the block again."""
        if block.prefix is not None:
            others = self._by_prefix[block.prefix]
            del others[block.id]
            if not others:
                del self._by_prefix[block.prefix]
        if block.digest is not None:
            del self._full[block.digest]
        block.prefix = block.digest = None


def extend_digests(
    digests: list[bytes],
    tokens: list[int],
    num_blocks: int,
    block_tokens: int,
    root: bytes = NO_TOKENS,
) -> None:
    """Append the digests of the first `num_blocks` full blocks of `tokens` that are missing."""
    for i in range(len(digests), num_blocks):
        prefix = digests[-1] if digests else root
        digests.append(digest_of_block(prefix, tokens[i * block_tokens : (i + 1) * block_tokens]))
