"""Checksums of records.

Legend:
  R  bytes of a record
  P  pages of a record
  W  64-bit words of a page
"""

import numpy as np
from numpy.typing import NDArray

from jmoe.memory.buffers import PAGE_BYTES

WORDS = PAGE_BYTES // 8
# Odd weights detect any change of a single word, different weights an exchange of words.
WEIGHTS_W = np.random.default_rng(0).integers(0, 1 << 64, WORDS, np.uint64) | np.uint64(1)


def page_sums(record_R: NDArray[np.uint8], zeroed_word: int | None = None) -> NDArray[np.uint64]:
    """Return uint64 [P]: a weighted sum modulo 2^64 of each page's words.

    Eight times as fast as CRC-32 in hardware. record_R: whole pages. zeroed_word: index of a 64-bit
    word that counts as 0.
    """
    words_PW = record_R.view(np.uint64).reshape(-1, WORDS)
    sums_P: NDArray[np.uint64] = np.einsum("pw,w->p", words_PW, WEIGHTS_W)
    if zeroed_word is not None:
        page, word = np.divmod([zeroed_word], WORDS)
        sums_P[page] -= words_PW[page, word] * WEIGHTS_W[word]
    return sums_P


def checksum(record_R: NDArray[np.uint8], zeroed_word: int | None = None) -> int:
    """Return a 64-bit checksum of whole pages.

    It detects a change of any single word and an exchange of pages. zeroed_word: index of a 64-bit
    word that counts as 0.
    """
    return _combine_page_sums(_splitmix64(page_sums(record_R, zeroed_word)))


def matches_checksum(
    value: int, record_R: NDArray[np.uint8], zeroed_word: int | None = None
) -> bool:
    """Return True if `value` is the record's checksum.

    The checksum of versions up to 0.1.0, which did not mix page sums, is accepted too.
    """
    return value == checksum(record_R, zeroed_word) or value == _combine_page_sums(
        page_sums(record_R, zeroed_word)
    )


def _combine_page_sums(sums_P: NDArray[np.uint64]) -> int:
    weights_P = np.arange(1, 2 * sums_P.size, 2, dtype=np.uint64)
    return int(np.dot(sums_P, weights_P))


def _splitmix64(x_P: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a bijective hash of each 64-bit number (SplitMix64), in which every input bit affects
    every output bit.

    Page sums are hashed because a sum modulo 2^64 hardly depends on high bits: the same stuck bus
    line in every page would cancel out.
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x_P = (x_P ^ (x_P >> np.uint64(shift))) * np.uint64(factor)
    return x_P ^ (x_P >> np.uint64(31))
