"""The sampler against distributions worked out in float64, and against itself in batches of
every size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy.special import log_softmax
from scipy.stats import chisquare

from jmoe.inference import sampling as sampling_module
from jmoe.inference.sampler_arrays import (
    ID_BUCKETS,
    BatchParams,
    Logprobs,
    SamplerState,
    batch_params,
    initial_sampler_state,
    start_sequence,
)
from jmoe.inference.sampling import greedy, prompt_logprobs, sample, sample_settled
from jmoe.inference.sampling_params import MAX_IDS, SamplingParams
from jmoe.inference.sequence import Sequence
from jmoe.inference.token_filters import candidate_filter_mask, top_k, vocabulary_filter_mask

pytestmark = pytest.mark.usefixtures("full_compilation")  # thousands of draws from few programs

Step = Callable[..., tuple[jax.Array, Logprobs | None, SamplerState]]


def jitted() -> Step:
    """`sample` traced anew, so that a test may change the module's constants and count programs."""
    return jax.jit(partial(sample), static_argnames="with_logprobs", donate_argnames="state")


run = jitted()
start = jax.jit(start_sequence, donate_argnames="state")


def params_of(
    rows: list[SamplingParams],
    vocab_size: int,
    prompt_lengths: list[int] | None = None,
    **changes: Any,
) -> BatchParams:
    sequences = [
        Sequence([0] * length, row) for length, row in zip(prompt_lengths or [1] * len(rows), rows)
    ]
    for sequence in sequences:
        sequence.noise_seed = sequence.sampling.seed or 0
    return batch_params(sequences, vocab_size=vocab_size, **{"size": len(rows), **changes})


def draws(
    logits_V: np.ndarray | list[float],
    sampling: SamplingParams,
    step: Step | None = None,
    **changes: Any,
) -> np.ndarray:
    """Tokens drawn at positions 1, 2, ... of one request whose prompt has one token; 256, or
    2,048 for V >= 40.
    """
    vocab_size = len(logits_V)
    count = 2048 if vocab_size >= 40 else 256  # few shapes, few compilations
    logits_BV = jnp.broadcast_to(jnp.asarray(logits_V, jnp.float32), (count, vocab_size))
    tokens, _, _ = (step or run)(
        logits_BV,
        params_of([sampling] * count, vocab_size, **changes),
        initial_sampler_state(1, vocab_size),
        jnp.full(count, 1, jnp.int32),  # padding rows as far as the state goes
        jnp.arange(1, count + 1, dtype=jnp.int32),
        with_logprobs=False,
    )
    return np.asarray(tokens)


def distribution(logits_V: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """float64 [V]: temperature, then top-k, top-p and min-p, each on what is left, made to sum
    to 1 again.
    """
    logits = np.asarray(logits_V, np.float64) / sampling.temperature
    order = np.lexsort((np.arange(len(logits)), -logits))
    p = np.exp(logits[order] - logits.max())
    if sampling.top_k > 0:
        p[sampling.top_k :] = 0
    p /= p.sum()
    if sampling.top_p < 1:
        p[1:][np.cumsum(p)[:-1] >= sampling.top_p] = 0
    p[p < sampling.min_p * p[0]] = 0
    result = np.zeros_like(p)
    result[order] = p / p.sum()
    return result


def assert_drawn_from(tokens: np.ndarray, p: np.ndarray) -> None:
    """No token outside the distribution's support, and a chi-square test of the counts within
    it.
    """
    counts = np.bincount(tokens, minlength=len(p))
    assert not counts[p == 0].any(), "a token that was filtered out"
    order = np.argsort(-p)
    order = order[p[order] > 0]
    # Bins of at least 8 expected draws.
    expected, bins = p[order] * len(tokens), [0]
    for at in range(len(order)):
        if expected[bins[-1] : at + 1].sum() >= 8 and expected[at + 1 :].sum() >= 8:
            bins.append(at + 1)
    if len(bins) > 1:
        observed = np.add.reduceat(counts[order], bins)
        assert chisquare(observed, np.add.reduceat(expected, bins)).pvalue > 1e-3


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.7},
    {"top_p": 0.01},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 1.5},
    {"top_p": 0.95, "min_p": 0.02},
    {"top_k": 300, "top_p": 0.3, "temperature": 2.5},
]


@pytest.mark.parametrize("changes", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [40, 1500])
def test_draws_follow_the_filtered_distribution(changes: dict[str, Any], vocab_size: int) -> None:
    logits = np.random.default_rng(vocab_size).normal(0, 2.5, vocab_size)
    sampling = SamplingParams(**{"temperature": 1.0, "seed": 7, **changes})
    assert_drawn_from(draws(logits, sampling), distribution(logits, sampling))


@pytest.mark.parametrize(
    "changes",
    [{"top_p": 0.9}, {"top_k": 600}, {"top_k": 1499}, {"top_k": 900, "top_p": 0.9, "min_p": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("ties", [False, True])
def test_filters_that_keep_more_than_the_candidates(changes: dict[str, Any], ties: bool) -> None:
    logits = np.random.default_rng(0).normal(0, 0.7, 1500)
    if ties:  # 13 values, some of a few hundred tokens
        logits = np.round(logits * 3) / 3
    sampling = SamplingParams(temperature=1.0, seed=7, **changes)
    p = distribution(logits, sampling)
    assert (p > 0).sum() > sampling_module.NUM_CANDIDATES
    assert_drawn_from(draws(logits, sampling), p)


@pytest.mark.parametrize("step", [0.0, 0.1, 0.8])
def test_the_sets_kept_are_exact(step: float) -> None:
    """Every token of them, from the candidates and from the vocabulary, with many equal logits
    and with none.
    """
    rng = np.random.default_rng(2)
    kept_vocabulary = jax.jit(vocabulary_filter_mask)
    kept_candidates = jax.jit(candidate_filter_mask)
    for _ in range(10):
        rows = [
            SamplingParams(temperature=1.0, top_k=k, top_p=p)
            for k, p in zip(
                rng.choice([0, 1, 200, 257, 700, 1499], 8),
                rng.choice([1.0, *rng.uniform(0, 1, 6)], 8),
            )
        ]
        logits = rng.normal(0, 1.5, (8, 1500))
        logits = (np.round(logits / step) * step if step else logits).astype(np.float32)
        z_BV = logits - logits.max(axis=1, keepdims=True)
        expected = np.stack([distribution(z, row) > 0 for z, row in zip(z_BV, rows)])
        params = params_of(rows, 1500)
        np.testing.assert_array_equal(kept_vocabulary(z_BV, params), expected)
        order = np.argsort(-z_BV, axis=1, kind="stable")
        total_B1 = np.exp(z_BV.astype(np.float64)).sum(axis=1, keepdims=True).astype(np.float32)
        kept = kept_candidates(np.take_along_axis(z_BV, order, axis=1), total_B1, params)
        np.testing.assert_array_equal(kept, np.take_along_axis(expected, order, axis=1))


def test_the_way_to_a_token_does_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the candidates alone, or by a search of the vocabulary: the noise belongs to the
    token.
    """
    logits = np.random.default_rng(1).normal(0, 2.0, 1500)
    monkeypatch.setattr(sampling_module, "NUM_CANDIDATES", 4)
    no_candidates = jitted()
    for changes in ({"top_p": 0.8}, {"top_k": 30}, {"top_k": 50, "top_p": 0.9}):
        sampling = SamplingParams(temperature=1.0, seed=3, **changes)
        expected = draws(logits, sampling)
        np.testing.assert_array_equal(draws(logits, sampling, no_candidates), expected)


# Probabilities 0.4, 0.3, 0.2, 0.1 at tokens 2, 0, 3, 1.
HAND_MADE = [*np.log([0.3, 0.1, 0.4, 0.2]), -np.inf, -np.inf]


@pytest.mark.parametrize(
    ("changes", "support"),
    [
        ({"top_k": 1}, {2}),
        ({"top_k": 2}, {2, 0}),
        ({"top_k": 3}, {2, 0, 3}),
        ({"top_k": 4}, {2, 0, 3, 1}),
        ({"top_k": 100}, {2, 0, 3, 1}),
        ({"top_k": -1}, {2, 0, 3, 1}),
        ({"top_p": 0.39}, {2}),
        ({"top_p": 0.41}, {2, 0}),
        ({"top_p": 0.69}, {2, 0}),
        ({"top_p": 0.71}, {2, 0, 3}),
        ({"top_p": 0.91}, {2, 0, 3, 1}),
        ({"min_p": 0.76}, {2}),
        ({"min_p": 0.74}, {2, 0}),
        ({"min_p": 0.49}, {2, 0, 3}),
        ({"min_p": 0.24}, {2, 0, 3, 1}),
        ({"min_p": 1.0}, {2}),
        # of the two left, token 2 has 4/7 = 0.571
        ({"top_k": 2, "top_p": 0.57}, {2}),
        ({"top_k": 2, "top_p": 0.58}, {2, 0}),
        ({"top_k": 3, "min_p": 0.6}, {2, 0}),
        ({"top_k": 3, "min_p": 1.0}, {2}),
        # at temperature 0.5: 16, 9, 4, 1 of 30
        ({"temperature": 0.5, "top_p": 0.53}, {2}),
        ({"temperature": 0.5, "top_p": 0.54}, {2, 0}),
        ({"temperature": 0.5, "min_p": 0.57}, {2}),
        ({"temperature": 0.5, "min_p": 0.24}, {2, 0, 3}),
    ],
    ids=str,
)
def test_filter_keeps_exactly(changes: dict[str, Any], support: set[int]) -> None:
    assert (
        set(draws(HAND_MADE, SamplingParams(**{"temperature": 1.0, **changes})).tolist()) == support
    )


def test_equal_logits_rank_by_id() -> None:
    logits = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    sampling = {"temperature": 1.0, "seed": 2}
    assert set(draws(logits, SamplingParams(top_k=1, **sampling)).tolist()) == {1}
    assert set(draws(logits, SamplingParams(top_k=2, **sampling)).tolist()) == {1, 3}
    assert set(draws(logits, SamplingParams(top_k=4, **sampling)).tolist()) == {0, 1, 3, 4}
    assert set(draws(np.zeros(6), SamplingParams(top_p=0.5, **sampling)).tolist()) == {0, 1, 2}
    assert set(draws(np.zeros(1500), SamplingParams(top_p=0.5, **sampling)).tolist()) <= set(
        range(750)
    )
    assert set(draws(logits, SamplingParams()).tolist()) == {1}


def test_greedy_takes_the_lowest_of_equals() -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 4, (32, 300)).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(greedy)(logits), logits.argmax(axis=1))
    assert jax.jit(greedy)(np.full((1, 5), -np.inf, np.float32))[0] == 0


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 0.01, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = [-1e4, 3.0, 3.1, -np.inf, 2.9, 2.8]
    for changes in ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        tokens = draws(logits, SamplingParams(temperature=temperature, **changes))
        assert set(tokens.tolist()) <= ({2} if temperature < 0.1 else {0, 1, 2, 4, 5})


def test_a_row_that_is_not_finite_gives_no_token() -> None:
    for changes in (
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "top_k": 3},
    ):
        for size in (6, 1500):
            for value in (np.nan, np.inf):
                logits = np.zeros(size)
                logits[3] = value
                assert (
                    draws(logits, SamplingParams(**changes)) == sampling_module.NOT_FINITE
                ).all()


MIXED = [
    SamplingParams(temperature=1.0, seed=1, logprobs=3),
    SamplingParams(),
    SamplingParams(temperature=0.8, top_k=40, seed=2),
    SamplingParams(
        temperature=1.3, top_p=0.9, seed=-3, repetition_penalty=1.3, presence_penalty=0.5
    ),
    SamplingParams(temperature=1.0, top_p=0.999, top_k=700, seed=2**62),
    SamplingParams(temperature=0.9, min_p=0.05, seed=5, logit_bias={3: 2.5, 9: -100.0}),
    SamplingParams(
        frequency_penalty=0.7, repetition_penalty=0.8, min_new_tokens=4, stop_token_ids=(1, 2)
    ),
    SamplingParams(temperature=0.7, top_k=300, top_p=0.95, min_p=0.01, seed=8),
]


def one_step(
    logits_BV: np.ndarray, which: list[int], seen: np.ndarray, size: int, step: Step | None = None
) -> tuple[np.ndarray, Logprobs, np.ndarray]:
    """Rows `which` of MIXED in a batch of `size`; row i uses slot i, whatever its place."""
    vocab_size = logits_BV.shape[1]
    rows = [MIXED[i] for i in which]
    batch = params_of(
        rows, vocab_size, prompt_lengths=[10 + i for i in which], size=size, eos_token_ids=(0,)
    )
    state = SamplerState(in_prompt_MV=jnp.asarray(seen > 2), output_counts_MV=jnp.asarray(seen))
    padding = size - len(which)
    logits = np.concatenate([logits_BV[list(which)], np.zeros((padding, vocab_size), np.float32)])
    slots = jnp.asarray([*which, *[len(seen)] * padding], jnp.int32)
    positions = jnp.asarray([*[12 + i for i in which], *[0] * padding], jnp.int32)
    tokens, logprobs, state = (step or run)(
        jnp.asarray(logits), batch, state, slots, positions, with_logprobs=True
    )
    assert logprobs is not None
    counts = np.asarray(state.output_counts_MV) - seen
    assert counts.sum() == len(which), "padding rows count nothing"
    assert all(counts[i, token] == 1 for i, token in zip(which, tokens))
    return np.asarray(tokens), jax.device_get(logprobs), counts


@pytest.mark.parametrize(
    ("vocab_size", "spread"),
    [(999, 2.0), *(pytest.param(20_000, spread, marks=pytest.mark.slow) for spread in (0.5, 3.0))],
)
@pytest.mark.parametrize(
    "form", [pytest.param("row by row", marks=pytest.mark.slow), "whole batch"]
)
def test_a_row_does_not_depend_on_its_batch(
    form: str, vocab_size: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: alone, in batches of other sizes, in any place, with padding. The whole batch
    is a GPU's form.
    """
    step = run
    if form == "whole batch":
        monkeypatch.setattr(
            jax.lax, "platform_dependent", lambda *args, default, cpu: default(*args)
        )
        step = jitted()
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(0, spread, (8, vocab_size)).astype(np.float32)
    seen = rng.integers(0, 4, (8, vocab_size)).astype(np.int32)
    alone = {i: one_step(logits, [i], seen, 1, step) for i in range(8)}
    batches = [(rng.permutation(8), 8) for _ in range(4)] + [(rng.permutation(8)[:5], 8), ([3], 8)]
    if vocab_size == 999:
        batches += [(rng.permutation(8)[:size], size) for size in (2, 4)]
    for which, size in batches:
        tokens, logprobs, _ = one_step(logits, [int(i) for i in which], seen, size, step)
        for row, i in enumerate(which):
            expected_token, expected, _ = alone[int(i)]
            assert tokens[row] == expected_token[0], f"request {i} in row {row} of {size}"
            np.testing.assert_array_equal(logprobs.chosen_B[row], expected.chosen_B[0])
            np.testing.assert_array_equal(logprobs.top_ids_BK[row], expected.top_ids_BK[0])
            np.testing.assert_array_equal(logprobs.top_BK[row], expected.top_BK[0])


def test_lowers_for_a_gpu() -> None:
    arguments = (
        jnp.zeros((4, 999)),
        params_of(MIXED[:4], 999),
        initial_sampler_state(4, 999),
        *[jnp.zeros(4, jnp.int32)] * 2,
    )
    lowered = run.trace(*arguments, with_logprobs=True).lower(lowering_platforms=("cuda",))  # type: ignore[attr-defined]
    # The rows of the batch together: the greedy maximum is over [4, 999].
    assert "tensor<4x999xf32>" in lowered.as_text()
    assert "tensor<1x999xf32>" not in lowered.as_text()


def test_threefry() -> None:
    rng = np.random.default_rng(0)
    for words in rng.integers(0, 2**32, (20, 4), dtype=np.uint32):
        key, counter = jnp.asarray(words[:2]), jnp.asarray(words[2:])
        assert (
            sampling_module._threefry(key[:1], key[1:], counter[:1], counter[1:])[0]
            == threefry_2x32(key, counter)[0]
        )


def test_seed_and_position_alone_decide() -> None:
    logits = np.zeros(1500)
    first = draws(logits, SamplingParams(temperature=1.0, seed=1))
    np.testing.assert_array_equal(first, draws(logits, SamplingParams(temperature=1.0, seed=1)))
    assert len(set(first.tolist())) > 1000, "positions differ"
    for seed in (2, 1 + 2**32, -1, -(2**63), 2**63 - 1):
        other = draws(logits, SamplingParams(temperature=1.0, seed=seed))
        assert (other != first).mean() > 0.99


@pytest.mark.parametrize("vocab_size", [40, 1500])
@pytest.mark.parametrize("top_p", [1e-30, 1e-38, 1e-45, 5e-324])
def test_a_tiny_top_p_keeps_the_most_likely_token(top_p: float, vocab_size: int) -> None:
    """Also one that float32 cannot hold."""
    logits = np.random.default_rng(5).normal(0, 1, vocab_size)
    for most in (0, 30):
        sampling = SamplingParams(temperature=2.0, seed=1, top_p=top_p, top_k=most)
        assert set(draws(logits, sampling).tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize(
    ("penalty", "expected"),
    # tokens 3, 4, 5 and 6 are repeated: a small penalty favours the largest of them, a large one
    # leaves the others
    [(0.5, 3), (1e-20, 3), (1e-40, 3), (5e-324, 3), (2.0, 7), (1e20, 7), (1e40, 7), (1e308, 7)],
)
@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_a_repetition_penalty_of_any_size(
    penalty: float, expected: int, temperature: float
) -> None:
    logits = np.full((1, 40), -1.0, np.float32)
    logits[0, 3:8] = 2.0, 1.9, -3.0, -2.0, 1.8
    state = start(
        initial_sampler_state(1, 40), 0, jnp.asarray(np.isin(np.arange(40), [3, 4, 5, 6]))
    )
    sampling = SamplingParams(repetition_penalty=penalty, temperature=temperature, seed=1)
    tokens, _, _ = run(
        jnp.asarray(logits),
        params_of([sampling], 40),
        state,
        jnp.zeros(1, jnp.int32),
        jnp.ones(1, jnp.int32),
        with_logprobs=False,
    )
    assert tokens.tolist() == [expected]


def test_a_temperature_of_any_size() -> None:
    """A huge one makes all tokens equally likely."""
    tokens = draws(
        np.random.default_rng(6).normal(0, 3, 40), SamplingParams(temperature=1e300, seed=1)
    )
    assert_drawn_from(tokens, np.full(40, 1 / 40))


def test_logprobs_are_the_models_own() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (8, 999)).astype(np.float32)
    tokens, logprobs, _ = one_step(
        logits, range(8), rng.integers(0, 4, (8, 999)).astype(np.int32), 8
    )
    expected = log_softmax(logits.astype(np.float64), axis=1)
    np.testing.assert_allclose(logprobs.chosen_B, expected[np.arange(8), tokens], rtol=0, atol=2e-6)
    order = np.argsort(-expected, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(logprobs.top_ids_BK, order)
    np.testing.assert_allclose(
        logprobs.top_BK, np.take_along_axis(expected, order, axis=1), rtol=0, atol=2e-6
    )


def test_prompt_logprobs() -> None:
    rng = np.random.default_rng(4)
    logits, tokens = rng.normal(0, 3, (16, 777)).astype(np.float32), rng.integers(0, 777, 16)
    expected = log_softmax(logits.astype(np.float64), axis=1)
    compute = jax.jit(prompt_logprobs, static_argnames="num_logprobs")
    logprobs = compute(logits, jnp.asarray(tokens, jnp.int32), num_logprobs=5)
    np.testing.assert_allclose(
        logprobs.chosen_B, expected[np.arange(16), tokens], rtol=0, atol=2e-6
    )
    np.testing.assert_array_equal(
        logprobs.top_ids_BK, np.argsort(-expected, axis=1, kind="stable")[:, :5]
    )
    bfloat16 = compute(
        jnp.asarray(logits, jnp.bfloat16), jnp.asarray(tokens, jnp.int32), num_logprobs=0
    )
    assert bfloat16.chosen_B.dtype == jnp.float32
    assert bfloat16.top_BK.shape == (16, 0)


def adjusted(
    logits_V: np.ndarray, sampling: SamplingParams, prompt: list[int], output: list[int]
) -> np.ndarray:
    """float64 logits after bias and penalties, token by token."""
    x = np.asarray(logits_V, np.float64).copy()
    for token, bias in sampling.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] *= (
            sampling.repetition_penalty if x[token] <= 0 else 1 / sampling.repetition_penalty
        )
    for token in set(output):
        x[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    return x


def test_penalties_over_a_whole_output() -> None:
    """Greedy outputs of three requests in slots of their own, step by step, then a new request
    in one of the slots.
    """
    vocab_size, rng = 60, np.random.default_rng(5)
    rows = [
        SamplingParams(repetition_penalty=1.4),
        SamplingParams(presence_penalty=0.9, frequency_penalty=0.35, logit_bias={4: 1.5, 5: -2.0}),
        SamplingParams(repetition_penalty=0.9, frequency_penalty=2.0, logit_bias={7: 3.0}),
    ]
    state = initial_sampler_state(5, vocab_size)
    slots = [3, 0, 4]
    state_slots = jnp.asarray([*slots, 5], jnp.int32)
    prompts = [rng.integers(0, vocab_size, 12).tolist() for _ in rows]
    outputs: list[list[int]] = [[], [], []]
    for slot, prompt in zip(slots, prompts):
        state = start(state, slot, np.isin(np.arange(vocab_size), prompt))
    batch = params_of(rows, vocab_size, size=4)
    for step in range(60):
        if step == 40:
            prompts[1], outputs[1] = [1, 2, 3], []
            state = start(state, slots[1], np.isin(np.arange(vocab_size), prompts[1]))
        logits = rng.normal(0, 0.5, (4, vocab_size)).astype(np.float32)
        expected = [adjusted(logits[i], row, prompts[i], outputs[i]) for i, row in enumerate(rows)]
        before = state
        tokens, _, state = run(
            jnp.asarray(logits),
            batch,
            state,
            state_slots,
            jnp.full(4, 20 + step, jnp.int32),
            with_logprobs=False,
        )
        assert before.output_counts_MV.is_deleted(), "updated in place"
        for i, x in enumerate(expected):
            assert tokens[i] == x.argmax()
            outputs[i].append(int(tokens[i]))
    counts = np.asarray(state.output_counts_MV)
    for slot, output in zip(slots, outputs):
        np.testing.assert_array_equal(counts[slot], np.bincount(output, minlength=vocab_size))
    assert not counts[[1, 2]].any()


def test_bias_of_100_decides() -> None:
    logits = np.random.default_rng(6).normal(0, 3, 40)
    for changes in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}):
        only = SamplingParams(logit_bias={17: 100.0}, **changes)
        assert set(draws(logits, only).tolist()) == {17}
        never = SamplingParams(logit_bias={int(logits.argmax()): -100.0}, **changes)
        assert int(logits.argmax()) not in draws(logits, never).tolist()


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}], ids=str
)
def test_no_end_before_min_new_tokens(changes: dict[str, Any]) -> None:
    logits = [9.0, 0.0, 1.0, 8.0, 0.5, -1.0]  # 0: end-of-text, 3: a stop token
    for seed in range(8):
        sampling = SamplingParams(min_new_tokens=4, stop_token_ids=(3,), seed=seed, **changes)
        tokens = draws(logits, sampling, eos_token_ids=(0,)).tolist()
        assert not {0, 3} & set(tokens[:4])
        assert {0, 3} & set(tokens[4:6])
    if not changes:
        assert tokens[:6] == [2, 2, 2, 2, 0, 0]


@pytest.mark.parametrize("shape", [(3, 5), (2, 640), (1, 5000), (4, 9999), (2, 20_000)])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_top_k_is_exact(shape: tuple[int, int], k: int) -> None:
    rng = np.random.default_rng(shape[1])
    k = min(k, shape[1])
    ids = lambda x: jax.jit(partial(top_k, k=k))(x)  # noqa: E731
    for values in (
        rng.normal(size=shape),
        rng.integers(0, 3, shape),
        np.zeros(shape),
        np.full(shape, -np.inf),
    ):
        x = values.astype(np.float32)
        top, at = ids(x)
        expected = np.argsort(-x, axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(at, expected)
        np.testing.assert_array_equal(top, np.take_along_axis(x, expected, axis=1))


def test_two_programs_for_a_batch_size() -> None:
    sizes = set()
    for rows in ([SamplingParams()] * 8, MIXED, MIXED[::-1]):
        for with_logprobs in (False, True):
            run(
                jnp.zeros((8, 999)),
                params_of(rows, 999),
                initial_sampler_state(8, 999),
                jnp.arange(8, dtype=jnp.int32),
                jnp.ones(8, jnp.int32),
                with_logprobs=with_logprobs,
            )
        sizes.add(run._cache_size())  # type: ignore[attr-defined]
    assert len(sizes) == 1, "whatever the requests ask for"


def test_width_of_sparse_ids() -> None:
    few = SamplingParams(logit_bias={1: 1.0})
    many = SamplingParams(logit_bias=dict.fromkeys(range(MAX_IDS), 1.0))
    ends = SamplingParams(min_new_tokens=1, stop_token_ids=tuple(range(MAX_IDS)))
    assert params_of([few], 2000).bias_ids_BN.shape == (1, ID_BUCKETS[0])
    assert params_of([few, many], 2000).bias_ids_BN.shape == (2, ID_BUCKETS[1])
    batch = params_of([ends], 2000, eos_token_ids=(1500, 1501))
    assert sorted(set(np.asarray(batch.stop_ids_BN)[0].tolist())) == [
        *range(MAX_IDS),
        1500,
        1501,
        2000,
    ]
    assert batch_params([], size=4, vocab_size=10).temperature_B.tolist() == [0.0] * 4


def test_only_allowed_tokens_are_drawn() -> None:
    """A mask of bits, greedy and not, of every row by itself; a full one changes nothing;
    logprobs ignore it.
    """
    rng = np.random.default_rng(0)
    logits_BV = rng.normal(size=(4, 70)).astype(np.float32)
    rows = [
        SamplingParams(logprobs=1),
        *(SamplingParams(temperature=1.0, top_k=k, seed=1, logprobs=1) for k in (0, 3, 0)),
    ]
    allowed = [{3, 40}, {69}, {0, 31, 32, 64}, set(range(70))]
    bits_BV = np.array([[token in row for token in range(96)] for row in allowed])
    allowed_BW = np.packbits(bits_BV, axis=1, bitorder="little").view(np.int32)
    common = (logits_BV, params_of(rows, 70))
    at = (np.arange(4, dtype=np.int32), np.full(4, 1, np.int32))
    free, free_logprobs, _ = run(*common, initial_sampler_state(4, 70), *at, with_logprobs=True)
    full, _, _ = run(
        *common,
        initial_sampler_state(4, 70),
        *at,
        np.full((4, 3), -1, np.int32),
        with_logprobs=True,
    )
    tokens, logprobs, _ = run(
        *common, initial_sampler_state(4, 70), *at, allowed_BW, with_logprobs=True
    )
    assert full.tolist() == free.tolist()
    assert all(int(token) in row for token, row in zip(tokens, allowed, strict=True))
    assert (
        tokens[0] == max(allowed[0], key=lambda token: logits_BV[0, token]) and tokens[3] == free[3]
    )
    assert logprobs is not None and free_logprobs is not None
    np.testing.assert_array_equal(logprobs.top_BK, free_logprobs.top_BK)


def test_settled_rows_draw_the_same_without_branches() -> None:
    """Of many rows, with logits of equal tokens and with rows that are not finite."""
    vocab_size, rng = 700, np.random.default_rng(4)
    rows = [
        SamplingParams(temperature=t, seed=i, top_k=k, top_p=p, min_p=m)
        for i, (t, k, p, m) in enumerate(
            [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.1), (3.0, 256, 0.99, 0.0)] * 16
            + [(1.5, 1, 0.5, 0.0), (0.9, 40, 0.9, 0.05), (50.0, 200, 1.0, 0.0)] * 16
        )
    ]
    assert all(map(sampling_module.is_settled_by_candidates, rows))
    logits_BV = rng.normal(0, 2, (len(rows), vocab_size)).astype(np.float32)
    logits_BV[::5] = np.round(logits_BV[::5])
    logits_BV[7, 3], logits_BV[12, :5] = np.nan, -np.inf
    params = params_of(rows, vocab_size)
    positions_B = jnp.arange(len(rows), dtype=jnp.int32)
    nowhere_B = jnp.ones(len(rows), jnp.int32)
    state = initial_sampler_state(1, vocab_size)
    expected, _, _ = run(logits_BV, params, state, nowhere_B, positions_B, with_logprobs=False)
    found = jax.jit(sample_settled)(logits_BV, params, positions_B)
    np.testing.assert_array_equal(found, expected)
    assert found[7] == sampling_module.NOT_FINITE
