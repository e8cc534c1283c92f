"""Blocks of the cache: what is found, what is shared, and what goes first."""

from jmoe.inference.block_pool import NO_TOKENS, BlockPool, CachedPrefix, digest_of_block

SIZE = 4
TOKENS = list(range(10))


def pool_with(tokens: list[int], num_blocks: int = 6) -> tuple[BlockPool, list[int]]:
    """Return a pool, and the blocks in which a sequence has computed these tokens."""
    pool = BlockPool(100, num_blocks, SIZE)
    return pool, compute(pool, tokens)


def compute(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Take blocks for tokens and note that their keys and values are there."""
    blocks, prefix = pool.allocate(-(-len(tokens) // SIZE)), NO_TOKENS
    for i, block in enumerate(blocks):
        part = tokens[i * SIZE : (i + 1) * SIZE]
        pool.record_tokens(block, prefix, part)
        prefix = digest_of_block(prefix, part)
    return blocks


def find(pool: BlockPool, tokens: list[int]) -> CachedPrefix:
    return pool.find_cached_prefix(tokens, [])


def test_the_longest_prefix_is_found() -> None:
    pool, blocks = pool_with(TOKENS)
    assert blocks == [100, 101, 102]
    assert find(pool, TOKENS) == CachedPrefix(blocks[:2], 102, 2, 10)
    assert find(pool, [*TOKENS, 50, 51, 52]) == CachedPrefix(blocks[:2], 102, 2, 10)
    assert find(pool, TOKENS[:8]) == CachedPrefix(blocks[:2], None, 0, 8)
    assert find(pool, TOKENS[:7]) == CachedPrefix(blocks[:1], 101, 3, 7)
    # they part in the middle of a full block, and at the start of one
    assert find(pool, [0, 1, 2, 3, 4, 5, 50, 51]) == CachedPrefix(blocks[:1], 101, 2, 6)
    assert find(pool, [0, 1, 2, 3, 50]) == CachedPrefix(blocks[:1], None, 0, 4)
    assert find(pool, [1, 2, 3, 4]) == CachedPrefix([], None, 0, 0)
    # the same tokens after another prefix
    assert find(pool, [4, 5, 6, 7]) == CachedPrefix([], None, 0, 0)


def test_of_several_tails_the_longest_is_found() -> None:
    pool, _ = pool_with([1, 2, 50], 4)
    longest = compute(pool, [1, 2, 3, 51])
    compute(pool, [1, 60])
    assert find(pool, [1, 2, 3, 4, 5]) == CachedPrefix([], longest[0], 3, 3)


def test_a_block_that_fills_up_is_found_whole() -> None:
    pool, (block,) = pool_with([1, 2])
    pool.record_tokens(block, NO_TOKENS, [3])
    assert find(pool, [1, 2, 3, 4, 5]) == CachedPrefix([], block, 3, 3)
    pool.record_tokens(block, NO_TOKENS, [4])
    assert find(pool, [1, 2, 3, 4, 5]) == CachedPrefix([block], None, 0, 4)


def test_who_holds_a_block_keeps_it() -> None:
    pool, blocks = pool_with(TOKENS, 3)
    pool.add_holder(blocks[:2])  # a second sequence
    assert (pool.num_free, pool.num_cached, pool.num_tokens_saved_by_sharing) == (0, 0, 8)
    pool.release(blocks, 1)
    assert (pool.num_free, pool.num_cached, pool.num_tokens_saved_by_sharing) == (1, 1, 0)
    pool.release(blocks[:2], 2)
    assert (pool.num_free, pool.num_cached) == (3, 3)
    pool.add_holder(blocks[:1])  # a third, which finds it
    assert (pool.num_free, pool.is_cached(blocks[0])) == (2, False)


def test_unused_blocks_go_first_then_the_least_recently_used() -> None:
    pool, first = pool_with(TOKENS[:8], 6)
    second = compute(pool, [50, 51, 52, 53, 54])
    pool.release(second, 1)
    pool.release(first, 2)
    assert pool.last_use_of_next_block == 0
    assert pool.allocate(2) == [104, 105]
    assert pool.last_use_of_next_block == 1
    # of a sequence the last blocks, which fewer can use
    assert pool.allocate(3) == [second[1], second[0], first[1]]
    assert find(pool, TOKENS) == CachedPrefix(first[:1], None, 0, 4)
    assert pool.allocate(1) == first[:1]
    assert find(pool, TOKENS).num_tokens == 0


def test_a_use_makes_a_block_recent() -> None:
    pool, first = pool_with([1, 2, 3, 4], 2)
    second = compute(pool, [5, 6, 7])
    pool.release(first, 1)
    pool.release(second, 2)
    pool.add_holder(first)
    pool.release(first, 3)
    assert pool.allocate(1) == second
    pool.release(second, 4)  # without content: before all others
    assert pool.allocate(2) == [*second, *first]


def test_a_block_to_be_copied_goes_last() -> None:
    pool, first = pool_with([1, 2], 2)
    second = compute(pool, [5, 6])
    pool.release(first, 1)
    pool.release(second, 2)
    pool.mark_most_recently_used(first[0])
    assert pool.allocate(2) == [*second, *first]


def test_equal_blocks_are_kept_once() -> None:
    """Two sequences computed the same tokens at the same time; what came after is found."""
    pool, first = pool_with([1, 2, 3, 4], 6)
    second = compute(pool, [1, 2, 3, 4, 5])
    assert find(pool, [1, 2, 3, 4, 5, 6]) == CachedPrefix(first, second[1], 1, 5)
    pool.release(second, 1)
    assert (pool.num_free, pool.num_cached) == (5, 1)


def test_hidden_blocks_are_not_found() -> None:
    """Those that another sequence holds too are."""
    pool, blocks = pool_with(TOKENS)
    pool.add_holder(blocks[:1])
    pool.remove_unshared_from_index(blocks)
    pool.release(blocks[:1], 1)
    assert find(pool, TOKENS) == CachedPrefix(blocks[:1], None, 0, 4)
    pool.release(blocks, 1)
    assert (pool.num_cached, pool.num_free) == (1, 6)


def test_everything_without_a_holder_is_forgotten() -> None:
    pool, blocks = pool_with(TOKENS)
    other = compute(pool, [50, 51])
    pool.release(blocks, 1)
    pool.forget_cached()
    assert (pool.num_cached, pool.num_free) == (0, 5)
    assert find(pool, TOKENS).num_tokens == 0 and find(pool, [50, 51]).tail == other[0]


def test_digests_are_kept() -> None:
    pool, blocks = pool_with(TOKENS)
    digests: list[bytes] = []
    assert pool.find_cached_prefix(TOKENS, digests).full == blocks[:2] and len(digests) == 2
    assert pool.find_cached_prefix(TOKENS, list(digests)).full == blocks[:2]
