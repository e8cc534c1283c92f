"""Run a text through a model layer by layer and expert by expert, so that one expert is in memory
at a time.

Pruning and distillation measure experts and losses with it.

Legend: B windows of the text, S tokens of a window, T = B S, D hidden, V vocabulary, E experts, K
choices per token, R tokens of one expert.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jmoe.layers.router import weigh_inputs
from jmoe.models.block import Block, add_residual, causal_attention_fn
from jmoe.models.functional import ModuleStructure, split_arrays
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from kernels_pallas.grouped_mlp import MLPWeights
from kernels_pallas.grouped_mlp.xla import expert_mlp

BATCH_TOKENS = 4096  # tokens per call of attention and router
TILE_ROWS = 512  # rows per call of an expert
Floats = NDArray[np.float32]


class ExpertOutputs(NamedTuple):
    """The outputs of one expert for the tokens that chose it.

    layer: number among the layers with experts. tokens_R: indices of the tokens among T. weights_R:
    router weights. outputs_RD: before multiplication by the weights.
    """

    layer: int
    expert: int
    tokens_R: NDArray[np.int64]
    weights_R: Floats
    outputs_RD: Floats


@partial(jax.jit, static_argnums=0)
def _embed(
    structure: ModuleStructure, arrays: Sequence[jax.Array], tokens_BS: jax.Array
) -> jax.Array:
    x_BSD: jax.Array = structure.merge(arrays).embed(
        tokens_BS, jnp.arange(tokens_BS.shape[1]), jnp.float32
    )
    return x_BSD


@partial(jax.jit, static_argnames=("structure", "window"))
def _attend_and_route(
    structure: ModuleStructure, arrays: Sequence[jax.Array], x_BSD: jax.Array, window: int | None
) -> tuple[jax.Array, ...]:
    """Return (x after attention and the dense feed-forward); for a layer with experts (x after
    attention and the shared expert, the experts' input, choices, weights).
    """
    block: Block = structure.merge(arrays)
    if block.kind == "dense":
        return (block.apply_dense(x_BSD, causal_attention_fn(window), jnp.float32),)
    x_BSD = block.attend(x_BSD, causal_attention_fn(window), jnp.float32)
    h_TD, routing = block.route(x_BSD, jnp.float32)
    shared_TD = block.shared_output(h_TD)
    assert block.moe is not None
    h_TD, routing = weigh_inputs(h_TD, routing, block.moe.config.router)
    return (
        add_residual(x_BSD, shared_TD),
        h_TD,
        routing.topk_idx_TK,
        routing.topk_weights_TK,
    )


@partial(jax.jit, static_argnums=0)
def _run_expert(activation: str, x_RD: jax.Array, weights: MLPWeights) -> jax.Array:
    return expert_mlp(x_RD, weights, activation).astype(jnp.float32)


@partial(jax.jit, static_argnums=0)
def _token_losses(
    structure: ModuleStructure, arrays: Sequence[jax.Array], x_TD: jax.Array, labels_T: jax.Array
) -> jax.Array:
    logits_TV = structure.merge(arrays).logits(x_TD)
    label_T1 = jnp.take_along_axis(logits_TV, labels_T[:, None], axis=1)
    return jax.nn.logsumexp(logits_TV, axis=1) - label_T1[:, 0]


def _compute_expert_outputs(
    checkpoint: LazyCheckpoint, layer: int, expert: int, h_RD: Floats
) -> Floats:
    arrays = {name: jnp.asarray(a) for name, a in checkpoint.read_expert(layer, expert).items()}
    weights = MLPWeights(arrays["w_up"], arrays["w_down"], arrays.get("b_up"), arrays.get("b_down"))
    padded = np.pad(h_RD, ((0, -len(h_RD) % TILE_ROWS), (0, 0)))
    tiles = padded.reshape(-1, TILE_ROWS, h_RD.shape[1])
    out = [
        np.asarray(_run_expert(checkpoint.config.hidden_act, jnp.asarray(tile), weights))
        for tile in tiles
    ]
    return np.concatenate(out)[: len(h_RD)]


def _batch_slices(num_windows: int, length: int) -> list[slice]:
    size = max(1, BATCH_TOKENS // length)
    return [slice(i, i + size) for i in range(0, num_windows, size)]


def _check_finite(checkpoint: LazyCheckpoint, part: str, *values: np.ndarray) -> None:
    """Raise ValueError naming a part of the model whose values are not finite: measures of such a
    model mean nothing.
    """
    if not all(np.isfinite(array).all() for array in values):
        raise ValueError(
            f"{checkpoint.folder}: {part}: its values for this text are not finite: its weights are"
            " damaged, or too large for float32"
        )


def hidden_states(
    checkpoint: LazyCheckpoint,
    tokens_BS: NDArray[np.int32],
    observe: Callable[[ExpertOutputs], None] | None = None,
) -> Floats:
    """Return float32 [B, S, D] before the last norm. `checkpoint` must be open in float32.

    The device holds all weights except experts, of which it gets one at a time; hidden states of
    the whole text are in host memory. observe: called for each expert of each layer that any token
    chose. Raises ValueError naming the layer or the expert whose values are not finite.
    """
    config = checkpoint.config
    embed_and_head, layers = checkpoint.load_dense_modules()
    batches = _batch_slices(*tokens_BS.shape)
    embed = split_arrays(embed_and_head)
    x = np.concatenate([np.asarray(_embed(*embed, jnp.asarray(tokens_BS[b]))) for b in batches])
    for number, (layer, module) in enumerate(zip(config.layers, layers, strict=True)):
        block = split_arrays(module)
        parts = [
            jax.device_get(_attend_and_route(*block, jnp.asarray(x[b]), layer.window))
            for b in batches
        ]
        x, *routed = (np.concatenate(part) for part in zip(*parts, strict=True))
        _check_finite(checkpoint, f"layer {number}", x, *routed)
        if not routed:
            continue
        h_TD, idx_TK, weights_TK = routed
        y_TD = x.reshape(h_TD.shape)
        for expert in range(config.num_experts):
            tokens_R, choice_R = np.nonzero(idx_TK == expert)
            if not tokens_R.size:
                continue
            use = ExpertOutputs(
                layer.record,
                expert,
                tokens_R,
                weights_TK[tokens_R, choice_R],
                _compute_expert_outputs(checkpoint, layer.record, expert, h_TD[tokens_R]),
            )
            _check_finite(checkpoint, f"expert {expert} of layer {number}", use.outputs_RD)
            y_TD[tokens_R] += use.weights_R[:, None] * use.outputs_RD
            if observe is not None:
                observe(use)
    return x


def mean_loss(checkpoint: LazyCheckpoint, windows_BS: NDArray[np.int32]) -> float:
    """Return the mean negative log-likelihood in nats of all but the first token of each window,
    [B, S + 1].
    """
    x_BSD = hidden_states(checkpoint, windows_BS[:, :-1])
    labels_BS, head = windows_BS[:, 1:], split_arrays(checkpoint.load_dense_modules()[0])
    size = x_BSD.shape[-1]
    losses = [
        np.asarray(
            _token_losses(
                *head,
                jnp.asarray(x_BSD[b].reshape(-1, size)),
                jnp.asarray(labels_BS[b].reshape(-1)),
            )
        )
        for b in _batch_slices(*labels_BS.shape)
    ]
    return math.fsum(np.concatenate(losses)) / labels_BS.size
