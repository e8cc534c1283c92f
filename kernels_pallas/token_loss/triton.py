"""Cross-entropy and the gradient of its logits in one Triton kernel.

A program reads the logits of one token twice: for their maximum and sum, and for the gradient. XLA
reads them three times, in three launches.

Legend: C tokens of a chunk, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from kernels_pallas.token_loss.reference import LossGradients
from kernels_pallas.triton import BlockSizes, Ref, index_range, launch_with_results, load, store

BLOCKS = BlockSizes(rows=1, columns=4096, num_warps=8, num_stages=1)


def loss_gradients(
    logits_CV: jax.Array,
    labels_C: jax.Array,
    weights_C: jax.Array,
    dtype: DTypeLike,
    *,
    interpret: bool = False,
) -> LossGradients:
    """Return `token_loss.api`'s result. Raises NotImplementedError unless logits are float32."""
    if logits_CV.dtype != jnp.float32:
        raise NotImplementedError(f"logits {logits_CV.dtype}: not float32")
    outs = [
        jax.ShapeDtypeStruct(logits_CV.shape, dtype),
        jax.ShapeDtypeStruct(labels_C.shape, jnp.float32),
    ]
    operands = logits_CV, labels_C.astype(jnp.int32), weights_C.astype(jnp.float32)
    results = launch_with_results(
        loss_gradients_kernel,
        outs,
        labels_C.shape,
        operands,
        blocks=BLOCKS,
        interpret=interpret,
    )
    return LossGradients(*results)


def loss_gradients_kernel(logits: Ref, labels: Ref, weights: Ref, dlogits: Ref, nll: Ref) -> None:
    """Write one token's gradient and negative log-likelihood."""
    num_logits = logits.shape[1]
    row = index_range(pl.program_id(0), BLOCKS.rows)
    always = row >= 0
    label, weight = load(labels.at[row], always), load(weights.at[row], always)
    num_blocks = pl.cdiv(num_logits, BLOCKS.columns)

    def block_of_logits(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (columns, which of them exist, their logits; -inf for others)."""
        columns = index_range(i * BLOCKS.columns, BLOCKS.columns)[None]
        mask = columns < num_logits
        return (
            columns,
            mask,
            jnp.where(mask, load(logits.at[row[:, None], columns], mask), -jnp.inf),
        )

    def add_block(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        top, total = sums
        _, _, values = block_of_logits(i)
        higher = jnp.maximum(top, jnp.max(values, axis=1))
        added = jnp.sum(jnp.exp(values - higher[:, None]), axis=1)
        return higher, total * jnp.exp(top - higher) + added

    lowest = jnp.full(BLOCKS.rows, -jnp.inf, jnp.float32)
    top, total = lax.fori_loop(0, num_blocks, add_block, (lowest, jnp.zeros_like(lowest)))
    is_inside = (label >= 0) & (label < num_logits)
    label_logit = load(logits.at[row, label], is_inside)
    store(nll.at[row], top + jnp.log(total) - label_logit, always)

    def write_block(i: jax.Array, carry: None) -> None:
        columns, mask, values = block_of_logits(i)
        p = jnp.exp(values - top[:, None]) / total[:, None]
        is_label = (columns == label[:, None]).astype(jnp.float32)
        store(dlogits.at[row[:, None], columns], (p - is_label) * weight[:, None], mask)

    lax.fori_loop(0, num_blocks, write_block, None)
