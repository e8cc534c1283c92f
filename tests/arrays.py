"""Arrays that tests draw, and comparisons of arrays and of pytrees of them."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jmoe.memory.saved_records import Indexed
from jmoe.offload.expert_state import ExpertState
from jmoe.training.state import TrainState, with_experts
from jmoe.training.streamed.step import StreamedTrainer
from jmoe.training.tasks.streamed import StreamedVisionTrainer
from jmoe.training.trainer import Trainer
from kernels_pallas.token_permute import RowMap


def assert_trees_close(ours: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Check that every leaf has the other's shape and is within `tolerance` of its largest
    value.
    """
    structure: Any = jax.tree.structure(ours)
    assert structure == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(expected), strict=True
    ):
        where = jax.tree_util.keystr(path)
        a64 = np.asarray(a, np.float64)
        b64 = np.asarray(b, np.float64)
        assert a64.shape == b64.shape, where
        np.testing.assert_allclose(
            a64, b64, rtol=0, atol=tolerance * np.abs(b64).max(), err_msg=where
        )


def assert_near(ours: Any, expected: Any, share: float) -> None:
    """Check that the error of every leaf is below a share of its norm: for operands that were
    rounded.
    """
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        a64, b64 = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a64 - b64) < share * np.linalg.norm(b64)


def differing(a: Any, b: Any) -> list[str]:
    """Return the paths of the arrays that are not equal bit for bit."""
    pairs = zip(jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b), strict=True)
    return [jax.tree_util.keystr(path) for (path, x), (_, y) in pairs if x.tobytes() != y.tobytes()]


def assert_close(ours: Any, expected: Any, tolerance: float, message: str = "") -> None:
    """Check that the shapes are the same and the largest error is within `tolerance` of the
    largest value.
    """
    ours, expected = np.asarray(ours, np.float32), np.asarray(expected, np.float32)
    assert ours.shape == expected.shape, message
    limit = tolerance * max(1e-3, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=limit, err_msg=message)


def random_row_map(
    num_tokens: int, k: int, num_inside: int, num_rows: int, num_dropped: int = 0
) -> RowMap:
    """Assign the choices, but the `num_dropped` last, to any of the first `num_inside` rows; the
    others stay empty.
    """
    rng = np.random.default_rng(num_tokens + num_inside)
    num_choices = num_tokens * k
    kept = rng.permutation(num_choices)[: min(num_choices - num_dropped, num_inside)]
    row_of = rng.permutation(num_inside)[: kept.size]
    src_M = np.full(num_rows, num_tokens, np.int32)
    slot_N = np.full(num_choices, num_rows, np.int32)
    src_M[row_of], slot_N[kept] = kept // k, row_of
    return RowMap(
        jnp.asarray(src_M), jnp.asarray(slot_N.reshape(num_tokens, k)), kept.size == num_choices
    )


def stacked(
    experts: ExpertState, records: Iterable[Indexed], prefix: str
) -> dict[str, NDArray[np.float32]]:
    """Return float32 [N, P, ...] by parameter from the records of a process's experts; zeros for
    experts that it does not own.
    """
    rows = (experts.index.num_layers, experts.local.experts.size)
    arrays = {name: np.zeros((*rows, *shape), np.float32) for name, shape in experts.shapes.items()}
    for index, record in records:
        layer, expert = experts.index.layer_and_expert_of(index)
        for name, w in arrays.items():
            w[layer, np.searchsorted(experts.local.experts, expert)] = record[f"{prefix}{name}"]
    return arrays


def full_state(trainer: Trainer, state: TrainState) -> TrainState:
    """Return a state in the saved form on the host, with all experts up to date, wherever they
    lie.
    """
    if isinstance(trainer, StreamedTrainer | StreamedVisionTrainer):
        experts, saved = trainer.experts, state
        if isinstance(trainer, StreamedTrainer):
            saved = trainer.model.to_saved(state)
        assert experts is not None
        experts.apply_pending_updates()
        with experts.permanent_errors():
            arrays = (
                stacked(experts, experts.iterate_weights(), ""),
                *(stacked(experts, experts.iterate_moments(), f"{part}.") for part in "mv"),
            )
        layers = [layer.stack_name for layer in trainer.config.model.expert_layers]
        for stack in sorted(set(layers)):
            own = [[w[np.array(layers) == stack] for w in part.values()] for part in arrays]
            stacks = [
                dict(zip(part, values, strict=True))
                for part, values in zip(arrays, own, strict=True)
            ]
            trees = zip((saved.params, saved.m, saved.v), stacks, strict=True)
            params, m, v = (with_experts(tree, of_stack, stack) for tree, of_stack in trees)
            saved = dataclasses.replace(saved, params=params, m=m, v=v)
    else:
        saved = trainer.prepare_state_for_save(state)
    return on_host(saved)


def on_host(tree: Any) -> Any:
    """Return copies of arrays: a step writes over those that it is given."""
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)
