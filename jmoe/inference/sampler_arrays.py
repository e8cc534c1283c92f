"""The arrays of a batch that `jmoe.inference.sampling` takes and returns: parameters, the state
of the penalties, log-probabilities.

Legend:
B rows of the batch
V vocabulary
M rows of the cache
N sparse token ids of a row
K most likely tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from jmoe.config import check
from jmoe.inference.sampling_params import MAX_IDS, SamplingParams
from jmoe.inference.sequence import Sequence

# Programs are compiled for these N. The second holds the maximum of a request, plus 24 end-of-text
# tokens.
ID_BUCKETS = (16, MAX_IDS + 24)
# Parameters are clipped to these limits: float32 would overflow or underflow beyond them, and the
# tokens would be the same.
MIN_TOP_P = 2.0**-31
MAX_TEMPERATURE = 1e30
REPETITION_PENALTIES = (1e-20, 1e20)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchParams:
    """`SamplingParams` of B rows as arrays; see `batch_params`."""

    temperature_B: jax.Array  # float32; 0: greedy
    top_k_B: jax.Array  # int32 in 1 ... V; V: all
    top_p_B: jax.Array  # float32
    min_p_B: jax.Array  # float32
    repetition_penalty_B: jax.Array  # float32
    presence_penalty_B: jax.Array  # float32
    frequency_penalty_B: jax.Array  # float32
    seed_B2: jax.Array  # uint32, high and low half
    bias_ids_BN: jax.Array  # int32; V: none
    bias_BN: jax.Array  # float32
    stop_ids_BN: jax.Array  # int32, banned below min_position; V: none
    min_position_B: jax.Array  # int32, prompt length + min_new_tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """The tokens that each row of the cache has seen, for the penalties. Donated to jitted
    functions.
    """

    in_prompt_MV: jax.Array  # bool
    output_counts_MV: jax.Array  # int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Float32 log-probabilities under the model's own distribution, before any sampling
    parameter.
    """

    chosen_B: jax.Array
    top_ids_BK: jax.Array  # int32, the most likely tokens, most likely first
    top_BK: jax.Array


def batch_params(
    sequences: list[Sequence],
    *,
    size: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
    with_max_ids: bool = False,
) -> BatchParams:
    """Return the parameters of `size` rows: one row per sequence, then padding, which is greedy.

    with_max_ids: make N the largest of `ID_BUCKETS`; otherwise N is the smallest that holds every
        row's ids.

    Raises ValueError if there are more than 24 end-of-text tokens beside a full list of ids.
    """
    params = [sequence.sampling for sequence in sequences]
    padding = size - len(params)
    least, most = REPETITION_PENALTIES

    def padded_array(values: list[float], fill: float, dtype: type = np.float32) -> np.ndarray:
        return np.array([*values, *[fill] * padding], dtype)

    seed_B2 = np.zeros((size, 2), np.uint32)
    for row, sequence in enumerate(sequences):
        seed_B2[row] = divmod(sequence.noise_seed % 2**64, 2**32)
    arrays = _token_id_arrays(
        params, size, vocab_size, eos_token_ids, with_max_ids=with_max_ids
    ) | {
        "temperature_B": padded_array(
            [0.0 if r.is_greedy else min(r.temperature, MAX_TEMPERATURE) for r in params], 0
        ),
        "top_k_B": padded_array(
            [min(r.top_k, vocab_size) if r.top_k > 0 else vocab_size for r in params], 1, np.int32
        ),
        "top_p_B": padded_array([max(r.top_p, MIN_TOP_P) for r in params], 1),
        "min_p_B": padded_array([r.min_p for r in params], 0),
        "repetition_penalty_B": padded_array(
            [min(max(r.repetition_penalty, least), most) for r in params], 1
        ),
        "presence_penalty_B": padded_array([r.presence_penalty for r in params], 0),
        "frequency_penalty_B": padded_array([r.frequency_penalty for r in params], 0),
        "seed_B2": seed_B2,
        "min_position_B": padded_array(
            [len(s.prompt_token_ids) + s.sampling.min_new_tokens for s in sequences], 0, np.int32
        ),
    }
    return BatchParams(**jax.device_put(arrays))


def _token_id_arrays(
    params: list[SamplingParams],
    size: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    *,
    with_max_ids: bool,
) -> dict[str, np.ndarray]:
    """Return the [B, N] arrays of `BatchParams` by name: biased tokens, their biases, stop tokens.

    Arguments and errors are those of `batch_params`.
    """
    bias_ids = [list(sampling.logit_bias) for sampling in params]
    stop_ids = [
        sorted({*eos_token_ids, *r.stop_token_ids}) if r.min_new_tokens else [] for r in params
    ]
    num_ids = max((len(ids) for ids in bias_ids + stop_ids), default=0)
    check(
        num_ids <= ID_BUCKETS[-1],
        "eos_token_ids",
        eos_token_ids,
        f"must be at most {ID_BUCKETS[-1] - MAX_IDS} tokens",
    )
    width = ID_BUCKETS[-1] if with_max_ids else next(n for n in ID_BUCKETS if n >= num_ids)
    bias_ids_BN, stop_ids_BN = np.full((2, size, width), vocab_size, np.int32)
    bias_BN = np.zeros((size, width), np.float32)
    for row, sampling in enumerate(params):
        bias_ids_BN[row, : len(bias_ids[row])] = bias_ids[row]
        bias_BN[row, : len(bias_ids[row])] = list(sampling.logit_bias.values())
        stop_ids_BN[row, : len(stop_ids[row])] = stop_ids[row]
    return {"bias_ids_BN": bias_ids_BN, "bias_BN": bias_BN, "stop_ids_BN": stop_ids_BN}


def initial_sampler_state(max_batch: int, vocab_size: int) -> SamplerState:
    """Return the initial state of `max_batch` rows, on the default device; it takes
    5 * max_batch * vocab_size bytes.
    """
    shape = (max_batch, vocab_size)
    # host arrays, which need no program
    zeros = np.zeros(shape, np.bool_), np.zeros(shape, np.int32)
    in_prompt_MV, output_counts_MV = jax.device_put(zeros, jax.devices()[0])
    return SamplerState(in_prompt_MV=in_prompt_MV, output_counts_MV=output_counts_MV)


def start_sequence(
    state: SamplerState,
    row: int | jax.Array,
    in_prompt_V: jax.Array | np.ndarray,
    output_counts_V: jax.Array | np.ndarray | int = 0,
) -> SamplerState:
    """Return the state after a sequence took a row; only needed for sequences with penalties.

    in_prompt_V: bool, the tokens that occur in its prompt.
    output_counts_V: int32, how often each token occurs in the output that it has already.
    """
    return SamplerState(
        in_prompt_MV=state.in_prompt_MV.at[row].set(in_prompt_V),
        output_counts_MV=state.output_counts_MV.at[row].set(output_counts_V),
    )
