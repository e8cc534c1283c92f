"""What a checksum notices."""

import numpy as np
import pytest

from jmoe.memory.buffers import allocate_slots
from jmoe.memory.checksum import checksum, matches_checksum, page_sums


def test_checksum_of_every_bit() -> None:
    record_R = allocate_slots(1, 8192)[0]
    record_R[:] = np.random.default_rng(0).integers(0, 256, 8192, np.uint8)
    whole = checksum(record_R)
    for byte in range(0, 8192, 61):
        for bit in range(8):
            record_R[byte] ^= 1 << bit
            assert checksum(record_R) != whole
            record_R[byte] ^= 1 << bit
    assert checksum(record_R) == whole


@pytest.mark.parametrize("word", [0, 5, 511, 512, 1023])
def test_a_blank_word_counts_as_zero(word: int) -> None:
    record_R = allocate_slots(1, 8192)[0]
    record_R[:] = np.random.default_rng(3).integers(0, 256, 8192, np.uint8)
    blank = checksum(record_R, word)
    assert blank != checksum(record_R)
    record_R.view(np.uint64)[word] = 0
    assert blank == checksum(record_R) == checksum(record_R, word)


@pytest.mark.parametrize("pages", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("stuck", [False, True])
def test_checksum_of_a_bad_line(pages: int, stuck: bool) -> None:
    """One bit of a word of every page that is flipped, or always 1 in all words: high bits do
    not cancel out.
    """
    record_R = allocate_slots(1, pages * 4096)[0]
    record_R[:] = np.random.default_rng(1).integers(0, 256, record_R.size, np.uint8)
    whole, before_R = checksum(record_R), record_R.copy()
    words_PW = record_R.view(np.uint64).reshape(pages, -1)
    for bit in range(64):
        mask = np.uint64(1 << bit)
        if stuck:
            words_PW |= mask
        else:
            words_PW[:, bit] ^= mask
        assert checksum(record_R) != whole, bit
        record_R[:] = before_R


def test_seals_of_earlier_versions_are_known() -> None:
    """Records sealed before page sums were mixed are accepted, and damage to them is noticed."""
    record_R = allocate_slots(1, 8192)[0]
    record_R[:] = np.random.default_rng(2).integers(0, 256, 8192, np.uint8)
    first, second = (int(page_sum) for page_sum in page_sums(record_R))
    unmixed = (first + 3 * second) % 2**64
    assert unmixed != checksum(record_R)
    assert matches_checksum(unmixed, record_R) and matches_checksum(checksum(record_R), record_R)
    record_R[5000] ^= 1
    assert not matches_checksum(unmixed, record_R)
