"""Which spans of a text are left out, and what an encoder and a decoder see of it."""

from functools import partial
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from jmoe.config import DenoisingConfig
from jmoe.config.denoising import TextParts
from jmoe.layers.span_corruption import CorruptedRows, corrupt_sequence, corrupt_spans

VOCAB_SIZE, LENGTH = 1000, 400
T5 = DenoisingConfig()
compiled = jax.jit(corrupt_spans, static_argnums=(2, 3))


@pytest.fixture(scope="module")
def tokens_BS() -> NDArray[np.int32]:
    drawn = np.random.default_rng(0).integers(
        0, VOCAB_SIZE - T5.num_sentinels(LENGTH), (64, LENGTH)
    )
    return drawn.astype(np.int32)


def corrupt(
    tokens_BS: NDArray[np.int32], config: DenoisingConfig = T5, seed: int = 1
) -> tuple[NDArray[np.int32], ...]:
    rows = compiled(jnp.asarray(tokens_BS), jax.random.key(seed), config, VOCAB_SIZE)
    assert isinstance(rows, CorruptedRows)
    return tuple(map(np.asarray, rows))


def restore(encoder: list[int], decoder: list[int], last: int) -> tuple[list[int], list[list[int]]]:
    """The text, and its spans, from what both sides see; `last` is what the decoder writes last."""
    spans: list[list[int]] = []
    first = VOCAB_SIZE - 1
    for token in decoder:
        if token == first - len(spans):
            spans.append([])
        else:
            spans[-1].append(token)
    assert last == first - len(spans)
    sentinels = [first - number for number in range(len(spans))]
    assert [token for token in encoder if token > first - len(spans)] == sentinels
    text = [spans[first - t] if t > first - len(spans) else [t] for t in encoder]
    return list(chain.from_iterable(text)), spans


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (T5, LENGTH),
        (DenoisingConfig(share=0.5, span_length=1.0), 31),
        (DenoisingConfig(share=0.9, span_length=4.0), 20),
        (DenoisingConfig(share=0.001), 5),
        (T5, 2),
    ],
)
def test_both_sides_together_are_the_text(
    tokens_BS: NDArray[np.int32], config: DenoisingConfig, length: int
) -> None:
    text_BS = tokens_BS[:, :length]
    rows = corrupt(text_BS, config)
    encoder_BM, decoder_BT, targets_BT = rows
    parts, num_spans = config.parts(length), config.num_spans(length)
    assert TextParts(encoder_BM.shape[1], decoder_BT.shape[1]) == parts
    assert parts.encoder + parts.decoder == length + 2 * num_spans
    assert (decoder_BT[:, 1:] == targets_BT[:, :-1]).all()
    for text, *sides, targets in zip(
        text_BS.tolist(), *(row.tolist() for row in rows), strict=True
    ):
        restored, spans = restore(*sides, targets[-1])
        assert restored == text
        assert len(spans) == num_spans and all(spans)
        assert sum(map(len, spans)) == config.num_tokens(length)


def test_shares_and_lengths_are_those_of_t5(tokens_BS: NDArray[np.int32]) -> None:
    assert (T5.num_tokens(LENGTH), T5.num_spans(LENGTH)) == (60, 20)
    assert (T5.num_tokens(512), T5.num_spans(512)) == (77, 26)
    encoder_BM, decoder_BT, targets_BT = corrupt(tokens_BS)
    rows = zip(encoder_BM.tolist(), decoder_BT.tolist(), targets_BT.tolist(), strict=True)
    lengths = [len(span) for *sides, end in rows for span in restore(*sides, end[-1])[1]]
    assert np.mean(lengths) == 3
    # 59 places between 60 tokens, 19 of them between spans: P(length 1) = 19 / 59
    assert np.mean(np.equal(lengths, 1)) == pytest.approx(19 / 59, abs=0.04)
    assert np.mean(np.equal(lengths, 2)) == pytest.approx(40 / 59 * 19 / 58, abs=0.04)
    is_sentinel = encoder_BM >= VOCAB_SIZE - T5.num_spans(LENGTH)
    assert not is_sentinel[:, 0].any() and is_sentinel[:, -1].all()
    places = np.nonzero(is_sentinel[:, :-1])[1]
    assert np.abs(np.histogram(places, 8)[0] / places.size - 1 / 8).max() < 0.03


def test_all_divisions_are_equally_likely() -> None:
    """Of 6 tokens, 2 in one span: it ends the row. Of 2 spans of one token each: 3 places."""
    text_BS = np.arange(3000, dtype=np.int32).reshape(500, 6) % 900
    encoder_BM, *_ = corrupt(text_BS, DenoisingConfig(share=1 / 3, span_length=1.0))
    first_span = (encoder_BM == VOCAB_SIZE - 1).argmax(axis=1)
    counts = np.bincount(first_span, minlength=6)
    assert counts.sum() == counts[1:4].sum()
    assert np.abs(counts[1:4] / 500 - 1 / 3).max() < 0.07


def test_left_out_tokens_do_not_reach_the_encoder() -> None:
    """Two texts that differ in left-out tokens alone, at the same spans, have the same inputs.

    `corrupt_spans` draws the spans from the text's own tokens: here one draw for all texts.
    """
    sides = jax.jit(partial(corrupt_sequence, config=DenoisingConfig(0.3), vocab_size=VOCAB_SIZE))
    key, text_S = jax.random.key(3), jnp.arange(LENGTH)
    encoder_M, decoder_T, _ = sides(text_S, key)
    kept = [token for token in encoder_M.tolist() if token < LENGTH]
    left_out = np.setdiff1d(text_S, kept)
    assert left_out.size == 120
    changed_M, changed_T, _ = sides(text_S.at[left_out].add(LENGTH), key)
    assert (encoder_M == changed_M).all()
    assert ((decoder_T != changed_T) == (decoder_T < LENGTH)).all()
    other_M, other_T, _ = sides(text_S.at[kept[5]].add(LENGTH), key)
    assert (other_M != encoder_M).sum() == 1 and (other_T == decoder_T).all()


def test_a_sequence_is_corrupted_alike_wherever_it_is(tokens_BS: NDArray[np.int32]) -> None:
    """And otherwise with another key, and than other sequences."""
    whole, moved = corrupt(tokens_BS), corrupt(tokens_BS[10:20][::-1])
    for one, other in zip(whole, moved, strict=True):
        np.testing.assert_array_equal(one[10:20][::-1], other)
    later = corrupt(tokens_BS, seed=2)
    is_sentinel = [rows[0] >= VOCAB_SIZE - T5.num_spans(LENGTH) for rows in (whole, later)]
    assert not (is_sentinel[0] == is_sentinel[1]).all(axis=1).any()
    assert not (is_sentinel[0][:-1] == is_sentinel[0][1:]).all(axis=1).any()
