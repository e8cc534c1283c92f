"""The engine's sampler: compiled programs of `jmoe.inference.sampling`, with the parameters and the
penalties' state of the sequences.

Legend:
B rows of the batch
V vocabulary
C tokens of a chunk
W words of a mask of allowed tokens
P rows of a step with drafts, of C tokens each
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product, starmap
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.inference.sampler_arrays import (
    ID_BUCKETS,
    BatchParams,
    Logprobs,
    batch_params,
    initial_sampler_state,
    start_sequence,
)
from jmoe.inference.sampling import greedy, is_settled_by_candidates, prompt_logprobs, sample
from jmoe.inference.sampling_params import MAX_LOGPROBS
from jmoe.inference.scheduler import Chunk
from jmoe.inference.sequence import Sequence, TokenLogprob

_sample = jax.jit(sample, static_argnames="with_logprobs", donate_argnames="state")
_greedy = jax.jit(greedy)
_start_sequence = jax.jit(start_sequence, donate_argnames="state")
_prompt_logprobs = jax.jit(prompt_logprobs, static_argnames="num_logprobs")


class Draw(NamedTuple):
    """The token sampled for a sequence, `NOT_FINITE` if its logits are not finite, and its
    log-probability.

    logprob: None if the request asks for none.
    """

    token: int
    logprob: TokenLogprob | None


class TokensInStep(NamedTuple):
    """The tokens that a program computed beside the logits of its rows.

    are_drawn: whether they follow the rows' sampling parameters; otherwise they are the most likely
        ones.
    """

    tokens_P: jax.Array
    are_drawn: bool


class PendingDraws(NamedTuple):
    """Tokens that the device is still sampling: one for each chunk, then padding.

    num_top_logprobs: for each chunk, the number of most likely tokens to report log-probabilities
        of; None for no log-probabilities.
    """

    tokens_B: jax.Array
    logprobs: Logprobs | None
    num_top_logprobs: list[int | None]

    def wait_and_read(self) -> list[Draw]:
        """Wait for the device, and return the draw of each chunk."""
        tokens = np.asarray(self.tokens_B).tolist()[: len(self.num_top_logprobs)]
        return [
            Draw(*pair)
            for pair in zip(
                tokens, _token_logprobs(tokens, self.logprobs, self.num_top_logprobs), strict=True
            )
        ]


class SamplingVariant(NamedTuple):
    """A program of `sample`.

    wide: takes many token ids, and masks of allowed tokens.
    """

    wide: bool
    with_logprobs: bool


SAMPLING_VARIANTS = tuple(starmap(SamplingVariant, product((False, True), repeat=2)))


class Sampler:
    """Samples tokens for chunks of sequences; owns the penalties' state on the device.

    before_sampling: called with the variant of `sample` that is used next.
    """

    def __init__(self, max_batch: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._max_batch = max_batch
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._state = initial_sampler_state(max_batch, vocab_size)
        # parameters of the last step's sequences, reused while these stay the same
        self._params: tuple[list[Sequence], BatchParams] | None = None
        self.before_sampling: Callable[[SamplingVariant], object] = lambda _: None

    def record_prompt_for_penalties(self, chunk: Chunk) -> None:
        """Write a sequence's prompt and output into the state of its row, for the penalties.

        Does nothing unless `chunk` is the sequence's first since it got the row and its sampling
        parameters have penalties. A preempted sequence already has output.
        """
        sequence, s = chunk.sequence, chunk.sequence.sampling
        is_first = chunk.start == sequence.first_position
        if is_first and (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) != (
            1,
            0,
            0,
        ):
            in_prompt_V = np.zeros(self._vocab_size, np.bool_)
            in_prompt_V[sequence.prompt_token_ids] = True
            counts_V = np.bincount(
                np.array(sequence.output_token_ids, np.int64), minlength=self._vocab_size
            )
            self._state = _start_sequence(
                self._state, np.int32(chunk.row), in_prompt_V, counts_V.astype(np.int32)
            )

    def params_in_step(self, sequences: list[Sequence]) -> BatchParams | None:
        """Return the parameters with which the program of the logits can sample for these
        sequences by `sample_settled`; None if it cannot, or if all take the most likely token.
        """
        sampling = [sequence.sampling for sequence in sequences]
        if (
            any(sequence.constraint is not None for sequence in sequences)
            or all(of_sequence.is_plain_greedy for of_sequence in sampling)
            or not all(map(is_settled_by_candidates, sampling))
        ):
            return None
        return self._batch_params(sequences, constrained=False)

    def padding_params(self) -> BatchParams:
        """Return parameters as `params_in_step` returns them, all padding, to compile programs."""
        return batch_params([], size=self._max_batch, vocab_size=self._vocab_size)

    def start_sampling(
        self,
        logits_BV: jax.Array,
        chunks: list[Chunk],
        step_tokens: TokensInStep | None = None,
    ) -> PendingDraws:
        """Start sampling a token after each chunk, and return the pending draws; does not wait.

        logits_BV: a row for each chunk, then padding.
        step_tokens: those that the program of the logits has sampled already, if it does.
        """
        sequences = [chunk.sequence for chunk in chunks]
        constrained = any(sequence.constraint is not None for sequence in sequences)
        if step_tokens is not None and step_tokens.are_drawn:
            return PendingDraws(step_tokens.tokens_P, None, [None] * len(chunks))
        if not constrained and all(sequence.sampling.is_plain_greedy for sequence in sequences):
            tokens_B = _greedy(logits_BV) if step_tokens is None else step_tokens.tokens_P
            return PendingDraws(tokens_B, None, [None] * len(chunks))
        size = self._max_batch
        logits_BV = self._pad_rows(logits_BV)
        params = self._batch_params(sequences, constrained)
        padding = size - len(chunks)
        rows_B = np.array([chunk.row for chunk in chunks] + [size] * padding, np.int32)
        positions_B = np.array([chunk.end for chunk in chunks] + [0] * padding, np.int32)
        # Requests with many token ids also use the program for constraints: fewer to compile.
        wide = params.bias_ids_BN.shape[1] == ID_BUCKETS[-1]
        allowed_BW = self._allowed_token_masks(sequences) if wide else None
        wanted = [sequence.sampling.logprobs for sequence in sequences]
        with_logprobs = any(count is not None for count in wanted)
        self.before_sampling(SamplingVariant(wide, with_logprobs))
        tokens_B, logprobs, self._state = _sample(
            logits_BV,
            params,
            self._state,
            rows_B,
            positions_B,
            allowed_BW,
            with_logprobs=with_logprobs,
        )
        return PendingDraws(tokens_B, logprobs, wanted)

    def prompt_logprobs(self, chunk: Chunk, logits_CV: jax.Array) -> list[TokenLogprob]:
        """Return the log-probabilities of the prompt tokens that follow each token of a chunk."""
        following = chunk.sequence.prompt_token_ids[chunk.start + 1 : chunk.end + 1]
        next_C = np.array(following + [0] * (logits_CV.shape[0] - len(following)), np.int32)
        logprobs = _prompt_logprobs(logits_CV, next_C, num_logprobs=MAX_LOGPROBS)
        wanted = [chunk.sequence.sampling.prompt_logprobs] * len(following)
        return [lp for lp in _token_logprobs(following, logprobs, wanted) if lp is not None]

    def warm_up(self, logits_BV: jax.Array) -> None:
        """Compile the programs of sampling that depend on the number of rows of the logits:
        `greedy`, and the padding to `max_batch` rows; and the counts of a prompt's tokens.
        """
        _greedy(logits_BV).block_until_ready()
        self._pad_rows(logits_BV)
        self._state = _start_sequence(
            self._state,
            np.int32(0),
            np.zeros(self._vocab_size, np.bool_),
            np.zeros(self._vocab_size, np.int32),
        )

    def warm_up_sampling(self, logits_BV: jax.Array, variant: SamplingVariant) -> None:
        """Compile a variant of `sample`, by sampling from zeros with a state of its own.

        logits_BV: logits as the model returns them, any number of rows. Any thread may call this.
        """
        size, vocab_size = self._max_batch, self._vocab_size
        params = batch_params([], size=size, vocab_size=vocab_size, with_max_ids=variant.wide)
        words_BW = np.full((size, -(-vocab_size // 32)), -1, np.int32)
        _sample(
            self._pad_rows(logits_BV),
            params,
            initial_sampler_state(size, vocab_size),
            np.full(size, size, np.int32),
            np.zeros(size, np.int32),
            words_BW if variant.wide else None,
            with_logprobs=variant.with_logprobs,
        )

    def warm_up_prompt_logprobs(self, logits_CV: jax.Array) -> None:
        """Compile the log-probabilities of prompts for logits of this shape."""
        _prompt_logprobs(
            logits_CV, np.zeros(logits_CV.shape[0], np.int32), num_logprobs=MAX_LOGPROBS
        )

    def _pad_rows(self, logits_BV: jax.Array) -> jax.Array:
        """Return the logits with `max_batch` rows, so that one program serves any batch."""
        missing = self._max_batch - logits_BV.shape[0]
        return jnp.pad(logits_BV, ((0, missing), (0, 0))) if missing else logits_BV

    def start_greedy(self, logits_PCV: jax.Array) -> jax.Array:
        """Start to find the most likely token after each token, int32 [P, C]; does not wait.

        logits_PCV: of C tokens in each of P rows.
        """
        return _greedy(logits_PCV.reshape(-1, logits_PCV.shape[2])).reshape(logits_PCV.shape[:2])

    def greedy_tokens_on_host(self, logits_BV: jax.Array) -> np.ndarray:
        """Return int32 [B], the most likely token of each row, on the host."""
        return np.asarray(_greedy(logits_BV))

    def _batch_params(self, sequences: list[Sequence], constrained: bool) -> BatchParams:
        """Return `batch_params` of the sequences; the last call's if they are the same."""
        if self._params is None or self._params[0] != sequences:
            params = batch_params(
                sequences,
                size=self._max_batch,
                vocab_size=self._vocab_size,
                eos_token_ids=self._eos_token_ids,
                with_max_ids=constrained,
            )
            self._params = (sequences, params)
        return self._params[1]

    def _allowed_token_masks(self, sequences: list[Sequence]) -> np.ndarray:
        """Return the masks `allowed_BW` for `sample`; padding, unconstrained rows and
        rows whose constraint failed allow all tokens.
        """
        words_BW = np.full((self._max_batch, -(-self._vocab_size // 32)), -1, np.int32)
        for row, sequence in enumerate(sequences):
            if sequence.constraint is not None and sequence.failed is None:
                with sequence.catch_errors("constraint"):
                    sequence.constraint.fill_next_token_bitmask(words_BW[row])
        words_BW[[row for row, sequence in enumerate(sequences) if sequence.failed]] = -1
        return words_BW


def _token_logprobs(
    tokens: list[int], logprobs: Logprobs | None, num_top_logprobs: list[int | None]
) -> list[TokenLogprob | None]:
    """Return each token's log-probability with its `num_top_logprobs` of most likely tokens.

    None for tokens whose request asks for none.
    """
    if logprobs is None:
        return [None] * len(tokens)
    chosen, ids, top = (
        np.asarray(a).tolist() for a in (logprobs.chosen_B, logprobs.top_ids_BK, logprobs.top_BK)
    )
    return [
        None
        if n is None
        else TokenLogprob(token, chosen[i], tuple(zip(ids[i][:n], top[i][:n], strict=True)))
        for i, (token, n) in enumerate(zip(tokens, num_top_logprobs, strict=True))
    ]
