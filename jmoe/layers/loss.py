"""The output head, and next-token cross-entropy that holds the logits of one chunk of tokens at a
time.

Both trainers use `OutputHead`; `distillation_losses` adds the divergence from a teacher.

Legend: T local tokens, R devices, M = R T tokens of all devices, C tokens of a chunk, D hidden, H
the teacher's hidden, V vocabulary or this device's shard of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jmoe.collectives.all_to_all import make_all_to_all
from jmoe.collectives.fusion import gather_parameter_local
from jmoe.collectives.rows import (
    all_gather_rows_local,
    own_rows_local,
    reduce_scatter_rows_local,
)
from jmoe.planning.embedding import EmbeddingPlan
from jmoe.types import PyTree
from kernels_pallas.matmul import dot, transposed
from kernels_pallas.token_loss import (
    LossGradients,
    gradient_of_softmax,
    loss_gradients,
    softmax_and_nll,
    softmax_terms,
)

CHUNK_LOGITS = 2**22  # logits of a chunk on a CPU: 16 MiB in float32, near its cache
# on a GPU: 2 GiB in float32. With smaller chunks, reading and writing the sum of dw dominates.
DEVICE_CHUNK_LOGITS = 2**29

Result = TypeVar("Result")


class HeadWeight(NamedTuple):
    """The output head: logits = x w + bias, with the columns of this device.

    bias_V: float32; None for a head without a bias.
    """

    w_DV: jax.Array
    bias_V: jax.Array | None = None

    def logits(self, x_TD: jax.Array) -> jax.Array:
        """Return float32 [T, V]."""
        logits_TV = dot(x_TD, self.w_DV)
        return logits_TV if self.bias_V is None else logits_TV + self.bias_V


def tokens_per_chunk(num_tokens: int, vocab_size: int, chunk_logits: int) -> int:
    """Return the tokens of a chunk: the largest divisor of num_tokens for which a chunk has at most
    chunk_logits logits.
    """
    limit = max(1, chunk_logits // vocab_size)
    return next(c for c in range(min(limit, num_tokens), 0, -1) if num_tokens % c == 0)


def logits_bytes(num_tokens: int, vocab_size: int, compute_bytes: int, *, on_cpu: bool) -> int:
    """Return the bytes of one chunk's float32 logits plus their gradient, whose elements take
    `compute_bytes` each.
    """
    chunk_logits = CHUNK_LOGITS if on_cpu else DEVICE_CHUNK_LOGITS
    return (4 + compute_bytes) * vocab_size * tokens_per_chunk(num_tokens, vocab_size, chunk_logits)


def _with_platform_chunk_size(function: Callable[..., Result], *arrays: PyTree) -> Result:
    """Return function(chunk_logits, *arrays), with the chunk size of the platform that the program
    is compiled for.
    """
    sizes = {"cpu": CHUNK_LOGITS, "default": DEVICE_CHUNK_LOGITS}
    result: Result = lax.platform_dependent(
        *arrays, **{name: partial(function, size) for name, size in sizes.items()}
    )
    return result


def _split_into_chunks(size: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(a.reshape(-1, size, *a.shape[1:]) for a in arrays)


def _softmax_and_nll(
    logits_CV: jax.Array, labels_C: jax.Array, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return (softmax [C, V], negative log-likelihood [C]) of a chunk.

    axes: mesh axes of the devices that split the vocabulary; () for none. A label of another
    device's shard is outside [0, V).
    """
    if not axes:
        return softmax_and_nll(logits_CV, labels_C)
    exp_CV, top_C1, total_C1, label_logit_C = softmax_terms(logits_CV, labels_C)
    own = jnp.stack([top_C1[:, 0], total_C1[:, 0], label_logit_C])
    tops, totals, label_logits = all_gather_rows_local(own[None], axes).swapaxes(0, 1)
    top_C = tops.max(axis=0)
    total_C = (totals * jnp.exp(tops - top_C)).sum(axis=0)
    nll_C = top_C + jnp.log(total_C) - label_logits.sum(axis=0)
    return exp_CV * (jnp.exp(top_C1[:, 0] - top_C) / total_C)[:, None], nll_C


def _loss_gradients(
    logits_CV: jax.Array,
    labels_C: jax.Array,
    weights_C: jax.Array,
    dtype: DTypeLike,
    axes: tuple[str, ...],
) -> LossGradients:
    """Return the gradient of a chunk's logits, in `dtype`, and the tokens' negative
    log-likelihoods. axes: as for `_softmax_and_nll`.
    """
    if not axes:
        return loss_gradients(logits_CV, labels_C, weights_C, dtype)
    p_CV, nll_C = _softmax_and_nll(logits_CV, labels_C, axes)
    return LossGradients(gradient_of_softmax(p_CV, labels_C, weights_C, dtype), nll_C)


def _chunked_cross_entropy(
    x_TD: jax.Array,
    head: HeadWeight,
    labels_T: jax.Array,
    weights_T: jax.Array,
    axes: tuple[str, ...] = (),
) -> jax.Array:
    """Return the float32 scalar of `cross_entropy`, with the logits computed chunk by chunk.

    axes: mesh axes of the devices that split the vocabulary; () for none.
    """

    def loss_in_chunks(chunk_logits: int, head: HeadWeight, *arrays: jax.Array) -> jax.Array:
        def add_chunk_loss(
            total: jax.Array, chunk: tuple[jax.Array, ...]
        ) -> tuple[jax.Array, None]:
            x_CD, labels_C, weights_C = chunk
            _, nll_C = _softmax_and_nll(head.logits(x_CD), labels_C, axes)
            return total + (nll_C * weights_C).sum(), None

        size = tokens_per_chunk(labels_T.size, head.w_DV.shape[1], chunk_logits)
        return lax.scan(
            add_chunk_loss, jnp.zeros((), jnp.float32), _split_into_chunks(size, *arrays)
        )[0]

    return _with_platform_chunk_size(loss_in_chunks, head, x_TD, labels_T, weights_T)


def _chunked_nll(
    x_TD: jax.Array, head: HeadWeight, labels_T: jax.Array, axes: tuple[str, ...] = ()
) -> jax.Array:
    """Return the negative log-likelihood of each label, float32 [T], with the logits computed chunk
    by chunk. No gradient. axes: mesh axes of the devices that split the vocabulary; () for none.
    """

    def nll_in_chunks(chunk_logits: int, head: HeadWeight, *arrays: jax.Array) -> jax.Array:
        size = tokens_per_chunk(labels_T.size, head.w_DV.shape[1], chunk_logits)
        chunks = _split_into_chunks(size, *arrays)
        nll = lax.map(
            lambda chunk: _softmax_and_nll(head.logits(chunk[0]), chunk[1], axes)[1], chunks
        )
        return nll.reshape(-1)

    arrays = lax.stop_gradient((head, x_TD)) + (labels_T,)
    return _with_platform_chunk_size(nll_in_chunks, *arrays)


def _loss_and_gradients(
    x_TD: jax.Array,
    head: HeadWeight,
    labels_T: jax.Array,
    weights_T: jax.Array,
    axes: tuple[str, ...] = (),
) -> tuple[jax.Array, tuple[jax.Array, HeadWeight]]:
    """Return (the scalar of `_chunked_cross_entropy`, its gradients (dx, those of the head)). With
    axes, dx counts only this device's shard of the vocabulary.
    """

    def loss_and_gradients_in_chunks(
        chunk_logits: int, head: HeadWeight, *arrays: jax.Array
    ) -> PyTree:
        def add_chunk_gradients(
            carry: tuple[jax.Array, HeadWeight], chunk: tuple[jax.Array, ...]
        ) -> PyTree:
            total, (dw_DV, dbias_V) = carry
            x_CD, labels_C, weights_C = chunk
            dlogits_CV, nll_C = _loss_gradients(
                head.logits(x_CD), labels_C, weights_C, x_CD.dtype, axes
            )
            dx_CD = dot(dlogits_CV, head.w_DV, b_transposed=True).astype(x_CD.dtype)
            dw_DV = dw_DV + dot(transposed(x_CD), dlogits_CV)
            if dbias_V is not None:
                dbias_V = dbias_V + dlogits_CV.sum(axis=0, dtype=jnp.float32)
            return (total + (nll_C * weights_C).sum(), HeadWeight(dw_DV, dbias_V)), dx_CD

        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), head)
        init = (jnp.zeros((), jnp.float32), zeros)
        size = tokens_per_chunk(labels_T.size, head.w_DV.shape[1], chunk_logits)
        (total, dhead), dx = lax.scan(add_chunk_gradients, init, _split_into_chunks(size, *arrays))
        dhead = jax.tree.map(lambda d, a: d.astype(a.dtype), dhead, head)
        return total, (dx.reshape(x_TD.shape), dhead)

    return _with_platform_chunk_size(loss_and_gradients_in_chunks, head, x_TD, labels_T, weights_T)


@jax.custom_vjp
def cross_entropy(
    x_TD: jax.Array, head: HeadWeight, labels_T: jax.Array, weights_T: jax.Array
) -> jax.Array:
    """Return the float32 scalar sum_t weights[t] * -log softmax(x[t] w + bias)[labels[t]], with the
    head's w and bias.

    x and w have one dtype; weights has no gradient. The gradients of x and the head are computed
    together with the loss, chunk by chunk, so that each chunk's logits are computed once.
    """
    return _chunked_cross_entropy(x_TD, head, labels_T, weights_T)


def _cross_entropy_bwd(residuals: PyTree, g: jax.Array) -> PyTree:
    dx_TD, dhead = jax.tree.map(lambda d: d * g.astype(d.dtype), residuals)
    return dx_TD, dhead, None, None


cross_entropy.defvjp(_loss_and_gradients, _cross_entropy_bwd)


@dataclass(frozen=True)
class VocabularyShard:
    """This device's shard of a vocabulary that is split over the devices of `axes`, the last of
    which lies within a node.

    striped: device r of R has the ids r, r + R, r + 2 R, ...; otherwise the r-th of R equal blocks.
    """

    axes: tuple[str, ...]
    striped: bool

    def local_index(self, ids: jax.Array, size: int) -> jax.Array:
        """Return the indices of ids within this device's `size` entries; an id of another device
        gives an index outside [0, size).
        """
        rank = lax.axis_index(self.axes).astype(ids.dtype)
        if not self.striped:
            return ids - rank * size
        devices = lax.axis_size(self.axes)
        return jnp.where(ids % devices == rank, ids // devices, -1)

    def own_entries(self, all_V: jax.Array) -> jax.Array:
        """Return this device's entries of an array over the whole vocabulary."""
        parts_RV = all_V.reshape(lax.axis_size(self.axes), -1)
        if self.striped:
            parts_RV = all_V.reshape(-1, lax.axis_size(self.axes)).T
        return lax.dynamic_index_in_dim(parts_RV, lax.axis_index(self.axes), 0, keepdims=False)

    def all_gather(self, shard_V: jax.Array) -> jax.Array:
        """Return the entries of the whole vocabulary, by ascending id, on every device. shard_V:
        this device's entries.
        """
        parts_RV = lax.all_gather(shard_V, self.axes)
        return (parts_RV.T if self.striped else parts_RV).reshape(-1)


def _gather_tokens_of_all_devices(
    x_TD: jax.Array,
    head: HeadWeight,
    labels_T: jax.Array,
    weights_T: jax.Array,
    shard: VocabularyShard,
) -> tuple[jax.Array, HeadWeight, jax.Array, jax.Array]:
    """Return (hidden states, head, labels as indices into this device's columns, weights), of all
    devices' tokens.
    """
    x_MD, labels_M, weights_M = (
        all_gather_rows_local(a, shard.axes) for a in (x_TD, labels_T, weights_T)
    )
    return x_MD, head, shard.local_index(labels_M, head.w_DV.shape[1]), weights_M


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def parallel_cross_entropy(
    x_TD: jax.Array,
    head: HeadWeight,
    labels_T: jax.Array,
    weights_T: jax.Array,
    shard: VocabularyShard,
) -> jax.Array:
    """Return 1 / R of the global cross-entropy, where each device has a shard of the head's
    columns: the sum over devices is the `cross_entropy` of the tokens of all devices.

    The vocabulary is parallel as in Megatron-LM (arXiv 1909.08053 section 3), except that tokens
    are split as well. Every device computes the logits of all tokens for its columns: hidden states
    and three numbers of each token's softmax are all-gathered, and dx is reduce-scattered, rounded
    to x's dtype for transport and summed in float32. dw needs no reduction. The gradients are those
    of the global sum, whose cotangent must be equal on all devices.
    """
    total = _chunked_cross_entropy(
        *_gather_tokens_of_all_devices(x_TD, head, labels_T, weights_T, shard), shard.axes
    )
    return total / lax.axis_size(shard.axes)


def _parallel_fwd(
    x_TD: jax.Array,
    head: HeadWeight,
    labels_T: jax.Array,
    weights_T: jax.Array,
    shard: VocabularyShard,
) -> PyTree:
    operands = _gather_tokens_of_all_devices(x_TD, head, labels_T, weights_T, shard)
    total, (dx_MD, dhead) = _loss_and_gradients(*operands, shard.axes)
    dx_TD = reduce_scatter_rows_local(dx_MD, shard.axes).astype(x_TD.dtype)
    return total / lax.axis_size(shard.axes), (dx_TD, dhead)


def _parallel_bwd(shard: VocabularyShard, residuals: PyTree, g: jax.Array) -> PyTree:
    return _cross_entropy_bwd(residuals, g)


parallel_cross_entropy.defvjp(_parallel_fwd, _parallel_bwd)


def distillation_losses(
    x_TD: jax.Array,
    head: HeadWeight,
    labels_T: jax.Array,
    weights_T: jax.Array,
    teacher: tuple[jax.Array, HeadWeight],
    temperature: float,
) -> tuple[jax.Array, jax.Array]:
    """Return float32 scalars (cross-entropy, divergence), each a sum over tokens t times
    weights[t].

    The divergence is KL(softmax(teacher's logits / temperature) | softmax(student's logits /
    temperature)).
    teacher: (hidden states [T, H], head), which get no gradient. Logits are computed chunk
    by chunk, and again in the backward pass.
    """
    hidden_TH, teacher_head = lax.stop_gradient(teacher)

    @jax.checkpoint
    def chunk_losses(
        head: HeadWeight, teacher_head: HeadWeight, chunk: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        x_CD, labels_C, weights_C, hidden_CH = chunk
        logits_CV, wanted_CV = head.logits(x_CD), teacher_head.logits(hidden_CH)
        label_CV = labels_C[:, None] == jnp.arange(head.w_DV.shape[1], dtype=labels_C.dtype)
        nll_C = jax.nn.logsumexp(logits_CV, axis=-1) - jnp.where(label_CV, logits_CV, 0).sum(
            axis=-1
        )
        student_CV = jax.nn.log_softmax(logits_CV / temperature, axis=-1)
        teacher_CV = jax.nn.log_softmax(wanted_CV / temperature, axis=-1)
        divergence_C = (jnp.exp(teacher_CV) * (teacher_CV - student_CV)).sum(axis=-1)
        return (nll_C * weights_C).sum(), (divergence_C * weights_C).sum()

    def sum_over_chunks(
        chunk_logits: int, head: HeadWeight, teacher_head: HeadWeight, *arrays: jax.Array
    ) -> PyTree:
        def add_chunk_losses(
            totals: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]
        ) -> PyTree:
            nll, divergence = chunk_losses(head, teacher_head, chunk)
            return (totals[0] + nll, totals[1] + divergence), None

        size = tokens_per_chunk(labels_T.size, head.w_DV.shape[1], chunk_logits)
        zero = jnp.zeros((), jnp.float32)
        return lax.scan(add_chunk_losses, (zero, zero), _split_into_chunks(size, *arrays))[0]

    return _with_platform_chunk_size(
        sum_over_chunks, head, teacher_head, x_TD, labels_T, weights_T, hidden_TH
    )


@dataclass(frozen=True)
class OutputHead:
    """The output head and its loss, split over devices by `plan`, from the parameters `embedding`
    [V, D] and, if not tied, `head` [D, V], and `head_bias` [V] if it has a bias.

    axes: the mesh axes of all devices; the last lies within a node.
    """

    plan: EmbeddingPlan
    axes: tuple[str, ...]
    tied: bool

    @property
    def _vocabulary_shard(self) -> VocabularyShard:
        return VocabularyShard(self.axes, self.plan.kind == "rows" and self.tied)

    def weight(
        self,
        table: jax.Array,
        head: jax.Array | None,
        dtype: DTypeLike,
        bias: jax.Array | None = None,
    ) -> HeadWeight:
        """Return the head with its matrix [D, V] in `dtype`; with a parallel head, this device's V
        columns of it.

        table: this device's shard of `embedding`, which is the head if `head` is None (tied).
        bias: of the whole vocabulary, or None.
        """
        w_DV = self._matrix(table, head, dtype)
        if bias is None:
            return HeadWeight(w_DV)
        bias_V = bias.astype(jnp.float32)
        if self.plan.parallel_head:
            bias_V = self._vocabulary_shard.own_entries(bias_V)
        return HeadWeight(w_DV, bias_V)

    def _matrix(self, table: jax.Array, head: jax.Array | None, dtype: DTypeLike) -> jax.Array:
        if head is not None:
            return head.astype(dtype)
        if self.plan.kind == "replicated":
            return table.T.astype(dtype)
        if not self.plan.parallel_head:
            unsharded = gather_parameter_local(table, 1, dtype, self.axes)
            return unsharded.reshape(-1, unsharded.shape[-1]).T
        if self.plan.kind == "rows":
            return table.reshape(table.shape[0], -1).T.astype(dtype)
        blocks_RVD = table.astype(dtype).reshape(self.plan.num_devices, -1, table.shape[1])
        blocks_RVD = make_all_to_all(self.axes)(blocks_RVD)
        return blocks_RVD.swapaxes(0, 1).reshape(blocks_RVD.shape[1], -1).T

    def cross_entropy(
        self, x_TD: jax.Array, head: HeadWeight, labels_T: jax.Array, weights_T: jax.Array
    ) -> jax.Array:
        """Return the cross-entropy summed over this device's tokens; with a parallel head, 1 / R of
        the sum over all devices' tokens.

        head: from `weight`.
        """
        if self.plan.parallel_head:
            return parallel_cross_entropy(x_TD, head, labels_T, weights_T, self._vocabulary_shard)
        return cross_entropy(x_TD, head, labels_T, weights_T)

    def token_nll(self, x_TD: jax.Array, head: HeadWeight, labels_T: jax.Array) -> jax.Array:
        """Return the negative log-likelihood of each of this device's labels, float32 [T]. No
        gradient. head: from `weight`.
        """
        if not self.plan.parallel_head:
            return _chunked_nll(x_TD, head, labels_T)
        shard = self._vocabulary_shard
        none_T = jnp.zeros(labels_T.shape, jnp.float32)
        x_MD, head, labels_M, _ = _gather_tokens_of_all_devices(x_TD, head, labels_T, none_T, shard)
        nll_M = _chunked_nll(x_MD, head, labels_M, shard.axes)
        return own_rows_local(nll_M, shard.axes)

    def logits(self, x_D: jax.Array, head: HeadWeight) -> jax.Array:
        """Return float32 [V], the logits of the whole vocabulary. x_D: a hidden state that is equal
        on all devices.
        """
        head = jax.tree.map(lambda a: a.astype(jnp.float32), head)
        logits_V = head.logits(x_D[None].astype(jnp.float32))[0]
        return self._vocabulary_shard.all_gather(logits_V) if self.plan.parallel_head else logits_V
