"""The ragged exchange of training: nothing is padded or dropped, and no step runs twice.

A receive buffer has `RAGGED_BUFFER` times the rows of an even load, not the R times of the worst
case. If a device gets more, the experts run in rounds: each round fills the buffers once, and its
outputs return to the rows that sent their inputs. The number of rounds is known only when the step
runs, so the rounds after the first are a loop that ends at once when the load is even; its backward
pass computes its rounds anew.

Legend: T local tokens, D hidden, K choices per token, N = T K assignments, E experts, L experts of
this device, R devices, M rows of the receive buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.collectives.exchange import ArrivedRows, DispatchedTokens, TokenChoices
from jmoe.collectives.ragged import RaggedExchange, SortedChoices, block_offsets
from jmoe.planning.exchange import ragged_buffer_rows
from jmoe.types import PyTree
from kernels_pallas.saved import mark_saved
from kernels_pallas.token_permute import combine

LATER_ROUNDS = "later_rounds"  # scope of the loops over rounds that an even load does not need
# (differentiable parameters, other arrays, arrived rows) -> the experts' outputs [M, D]
RunExperts = Callable[[PyTree, PyTree, ArrivedRows], jax.Array]


class RoundsHandle(NamedTuple):
    """The inputs of all rounds. counts_RE: int32, rows that each device sends to each expert."""

    x_TD: jax.Array
    weights_TK: jax.Array
    choices: SortedChoices
    counts_RE: jax.Array


class _RoundArrays(NamedTuple):
    """The arrays of a round that have no gradient. others: arrays of the experts without one."""

    choices: SortedChoices
    counts_RE: jax.Array
    others: PyTree


@dataclass(frozen=True)
class _ExchangeRound:
    """One round of an exchange: send rows to their experts, run these, and return the outputs."""

    ragged: RaggedExchange
    run_experts: RunExperts

    def __call__(
        self,
        params: PyTree,
        x_TD: jax.Array,
        arrays: _RoundArrays,
        number: jax.Array | int,
        back_ND: jax.Array,
        buffer_MD: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Return (`back_ND` with this round's outputs, the receive buffer with this round's rows).

        number: of the round, from 0.
        """
        rows, (choices, counts_RE, others) = buffer_MD.shape[0], arrays
        with jax.named_scope("dispatch"):
            send_ND = choices.gather_rows(x_TD)
            device = lax.axis_index(self.ragged.axes)
            offsets = block_offsets(counts_RE, device, number * rows, rows)
        rows_MD = self.ragged.send_rows(send_ND, buffer_MD, offsets)
        sizes_L = offsets.taken_RL.sum(axis=0, dtype=jnp.int32)
        arrived = ArrivedRows(mark_saved(rows_MD, "expert_rows"), None, sizes_L, send_ND.shape[0])
        out_MD = self.run_experts(params, others, arrived)
        return self.ragged.return_rows(out_MD, back_ND, offsets), rows_MD


def _num_rounds(counts_RE: jax.Array, rows: int) -> jax.Array:
    """Return the rounds that the fullest device needs; equal on all devices of an exchange."""
    num_devices = counts_RE.shape[0]
    totals_R = counts_RE.sum(axis=0, dtype=jnp.int32).reshape(num_devices, -1).sum(axis=1)
    return -(-totals_R.max() // rows)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_later_rounds(
    run: _ExchangeRound,
    params: PyTree,
    x_TD: jax.Array,
    arrays: _RoundArrays,
    back_ND: jax.Array,
    buffer_MD: jax.Array,
) -> tuple[jax.Array, jax.Array, PyTree, jax.Array]:
    """Run all rounds but the first; return (`back_ND` with their outputs, the receive buffer,
    `params`, `x_TD`).

    The first round must take all four from here: its gradients of `params` and `x_TD` are then
    those to which the backward loop adds, and its collectives run after those of the forward loop
    and before those of the backward loop.
    """
    last = _num_rounds(arrays.counts_RE, buffer_MD.shape[0])

    def run_next(carry: PyTree) -> PyTree:
        back_ND, buffer_MD, number = carry
        return *run(params, x_TD, arrays, number, back_ND, buffer_MD), number + 1

    first = back_ND, buffer_MD, jnp.ones((), jnp.int32)
    with jax.named_scope(LATER_ROUNDS):
        back_ND, buffer_MD, _ = lax.while_loop(lambda carry: carry[2] < last, run_next, first)
    return back_ND, buffer_MD, params, x_TD


def _run_later_rounds_fwd(
    run: _ExchangeRound, params: PyTree, x_TD: jax.Array, *rest: PyTree
) -> PyTree:
    arrays, _, buffer_MD = rest
    # a residual without elements: only its shape is read
    empty_M0 = jnp.zeros((buffer_MD.shape[0], 0), buffer_MD.dtype)
    return _run_later_rounds(run, params, x_TD, *rest), (params, x_TD, arrays, empty_M0)


def _run_later_rounds_bwd(run: _ExchangeRound, residuals: PyTree, gradients: PyTree) -> PyTree:
    params, x_TD, arrays, empty_M0 = residuals
    dback_ND, _, dparams, dx_TD = gradients
    buffer_MD = jnp.zeros((empty_M0.shape[0], x_TD.shape[1]), x_TD.dtype)
    last = _num_rounds(arrays.counts_RE, buffer_MD.shape[0])

    def add_next(carry: PyTree) -> PyTree:
        *sums, number = carry
        empty_ND = jnp.zeros_like(dback_ND)

        def outputs(x_TD: jax.Array, params: PyTree) -> jax.Array:
            return run(params, x_TD, arrays, number, empty_ND, buffer_MD)[0]

        gradients = jax.vjp(outputs, x_TD, params)[1](dback_ND)
        return *jax.tree.map(jnp.add, tuple(sums), gradients), number + 1

    first = dx_TD, dparams, jnp.ones((), jnp.int32)
    with jax.named_scope(LATER_ROUNDS):
        dx_TD, dparams, _ = lax.while_loop(lambda carry: carry[2] < last, add_next, first)
    return dparams, dx_TD, None, dback_ND, buffer_MD


_run_later_rounds.defvjp(_run_later_rounds_fwd, _run_later_rounds_bwd)


@dataclass(frozen=True)
class RoundsExchange:
    """The exchange that sends rows by ragged all-to-all and runs the experts in as many rounds as
    the fullest receive buffer needs.
    """

    ragged: RaggedExchange

    def dispatch(
        self,
        x_TD: jax.Array,
        chosen: TokenChoices,
        full_capacity: bool = False,
        num_chunks: int = 1,
    ) -> DispatchedTokens:
        """Sort the choices and gather all devices' counts; `run_experts` sends the rows.

        full_capacity changes nothing, since no row is dropped. Raises ValueError for several
        chunks.
        """
        if num_chunks != 1:
            raise ValueError(f"num_chunks = {num_chunks}: must be 1 for a ragged exchange")
        with jax.named_scope("dispatch"):
            choices = SortedChoices.from_token_choices(chosen)
            counts_RE = self.ragged.gather_counts(chosen.counts_E)
        handle = RoundsHandle(x_TD, chosen.topk_weights_TK, choices, counts_RE)
        return DispatchedTokens((), jnp.zeros((), jnp.int32), handle)

    def run_experts(
        self, handle: RoundsHandle, run_experts: RunExperts, params: PyTree, others: PyTree
    ) -> jax.Array:
        """Return float32 y_TD, the weighted sum of each token's expert outputs.

        params, others: the experts' arrays with and without a gradient.
        """
        x_TD, weights_TK, choices, counts_RE = handle
        run, arrays = (
            _ExchangeRound(self.ragged, run_experts),
            _RoundArrays(choices, counts_RE, others),
        )
        num_assignments, num_devices = choices.token_N.size, self.ragged.num_devices
        rows = ragged_buffer_rows(num_assignments, num_devices)
        back_ND, buffer_MD = (
            jnp.zeros((size, x_TD.shape[1]), x_TD.dtype) for size in (num_assignments, rows)
        )
        if rows < num_devices * num_assignments:
            back_ND, buffer_MD, params, x_TD = _run_later_rounds(
                run, params, x_TD, arrays, back_ND, buffer_MD
            )
        back_ND, _ = run(params, x_TD, arrays, 0, back_ND, buffer_MD)
        with jax.named_scope("combine"):
            back_ND = mark_saved(back_ND, "expert_rows")
            return combine(back_ND, weights_TK, choices.token_N, choices.row_TK)
