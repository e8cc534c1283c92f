"""The output head, and next-token cross-entropy that never holds the logits of more than one chunk
of tokens.

Legend: T local tokens, R devices, M = R T tokens of all devices, C tokens of a chunk, D hidden, V
vocabulary or this device's part of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.collectives.all_to_all import make_all_to_all
from jmoe.collectives.fusion import gather_local
from jmoe.collectives.rows import all_gather_rows_local, sum_scatter_rows_local
from jmoe.planning.embedding import EmbeddingPlan
from kernels_pallas.matmul import dot, transposed

CHUNK_LOGITS = 2**22  # logits of a chunk on a CPU: 16 MiB in float32, near its cache
# on a GPU: 2 GiB in float32; fewer tokens a chunk, and reading the sum of dw takes longer
DEVICE_CHUNK_LOGITS = 2**29

Result = TypeVar("Result")


def chunk_tokens(num_tokens: int, vocab_size: int, chunk_logits: int) -> int:
    """Return the tokens of a chunk: the largest divisor of num_tokens whose logits stay within
    chunk_logits.
    """
    limit = max(1, chunk_logits // vocab_size)
    return next(c for c in range(min(limit, num_tokens), 0, -1) if num_tokens % c == 0)


def logits_bytes(num_tokens: int, vocab_size: int, compute_bytes: int, *, on_cpu: bool) -> int:
    """Return the bytes of a chunk's float32 logits and of their gradient, of `compute_bytes`
    each.
    """
    chunk_logits = CHUNK_LOGITS if on_cpu else DEVICE_CHUNK_LOGITS
    return (4 + compute_bytes) * vocab_size * chunk_tokens(num_tokens, vocab_size, chunk_logits)


def _in_chunks(function: Callable[..., Result], *arrays: jax.Array) -> Result:
    """Return function(chunk_logits, *arrays), with chunks for the platform that the program is
    compiled for.
    """
    sizes = {"cpu": CHUNK_LOGITS, "default": DEVICE_CHUNK_LOGITS}
    result: Result = lax.platform_dependent(
        *arrays, **{name: partial(function, size) for name, size in sizes.items()}
    )
    return result


def _chunks(size: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(a.reshape(-1, size, *a.shape[1:]) for a in arrays)


def _logits(
    x_CD: jax.Array, w_DV: jax.Array, labels_C: jax.Array, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(softmax, negative log-likelihood, is_label) of a chunk; axes: of the devices that share
    the vocabulary.
    """
    logits_CV = dot(x_CD, w_DV)
    top_C1 = lax.stop_gradient(logits_CV.max(axis=-1, keepdims=True))
    exp_CV = jnp.exp(logits_CV - top_C1)
    total_C1 = exp_CV.sum(axis=-1, keepdims=True)
    label_CV = labels_C[:, None] == jnp.arange(w_DV.shape[1], dtype=labels_C.dtype)
    # of another device's part: 0; a negative index would count from the end
    own_C = jnp.where(labels_C < 0, w_DV.shape[1], labels_C)
    label_logit_C = jnp.take_along_axis(
        logits_CV, own_C[:, None], axis=-1, mode="fill", fill_value=0
    )[:, 0]
    if not axes:
        nll_C = (top_C1 + jnp.log(total_C1))[:, 0] - label_logit_C
        return exp_CV / total_C1, nll_C, label_CV
    own = jnp.stack([top_C1[:, 0], total_C1[:, 0], label_logit_C])
    tops, totals, label_logits = all_gather_rows_local(own[None], axes).swapaxes(0, 1)
    top_C = tops.max(axis=0)
    total_C = (totals * jnp.exp(tops - top_C)).sum(axis=0)
    nll_C = top_C + jnp.log(total_C) - label_logits.sum(axis=0)
    return exp_CV * (jnp.exp(top_C1[:, 0] - top_C) / total_C)[:, None], nll_C, label_CV


def _loss(
    x_TD: jax.Array,
    w_DV: jax.Array,
    labels_T: jax.Array,
    weights_T: jax.Array,
    axes: tuple[str, ...] = (),
) -> jax.Array:
    def loss(chunk_logits: int, w_DV: jax.Array, *arrays: jax.Array) -> jax.Array:
        def step(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            x_CD, labels_C, weights_C = chunk
            _, nll_C, _ = _logits(x_CD, w_DV, labels_C, axes)
            return total + (nll_C * weights_C).sum(), None

        size = chunk_tokens(labels_T.size, w_DV.shape[1], chunk_logits)
        return lax.scan(step, jnp.zeros((), jnp.float32), _chunks(size, *arrays))[0]

    return _in_chunks(loss, w_DV, x_TD, labels_T, weights_T)


def _loss_and_gradients(
    x_TD: jax.Array,
    w_DV: jax.Array,
    labels_T: jax.Array,
    weights_T: jax.Array,
    axes: tuple[str, ...] = (),
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """(loss, (dx, dw)); with axes, dx is this device's part of the vocabulary's."""

    def loss_and_gradients(chunk_logits: int, w_DV: jax.Array, *arrays: jax.Array) -> Any:
        def step(carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]) -> Any:
            total, dw_DV = carry
            x_CD, labels_C, weights_C = chunk
            p_CV, nll_C, label_CV = _logits(x_CD, w_DV, labels_C, axes)
            dlogits_CV = ((p_CV - label_CV.astype(jnp.float32)) * weights_C[:, None]).astype(
                x_CD.dtype
            )
            dx_CD = dot(dlogits_CV, w_DV, b_transposed=True).astype(x_CD.dtype)
            dw_DV = dw_DV + dot(transposed(x_CD), dlogits_CV)
            return (total + (nll_C * weights_C).sum(), dw_DV), dx_CD

        init = (jnp.zeros((), jnp.float32), jnp.zeros(w_DV.shape, jnp.float32))
        size = chunk_tokens(labels_T.size, w_DV.shape[1], chunk_logits)
        (total, dw_DV), dx = lax.scan(step, init, _chunks(size, *arrays))
        return total, (dx.reshape(x_TD.shape), dw_DV.astype(w_DV.dtype))

    return _in_chunks(loss_and_gradients, w_DV, x_TD, labels_T, weights_T)  # type: ignore[no-any-return]


@jax.custom_vjp
def cross_entropy(
    x_TD: jax.Array, w_DV: jax.Array, labels_T: jax.Array, weights_T: jax.Array
) -> jax.Array:
    """sum_t weights[t] * -log softmax(x[t] w)[labels[t]], float32. x and w in one dtype; not
    differentiable in weights.

    The gradients of x and w are computed together with the loss, chunk by chunk, so that each
    chunk's logits are computed once.
    """
    return _loss(x_TD, w_DV, labels_T, weights_T)


def _bwd(residuals: Any, g: jax.Array) -> Any:
    dx_TD, dw_DV = residuals
    return (dx_TD * g.astype(dx_TD.dtype)), (dw_DV * g.astype(dw_DV.dtype)), None, None


cross_entropy.defvjp(_loss_and_gradients, _bwd)


@dataclass(frozen=True)
class VocabularyShard:
    """This device's part of a vocabulary split over the devices of `axes`, the last of which is
    inside a node.

    striped: device r of R has the ids r, r + R, r + 2 R, ...; else the r-th of R blocks.
    """

    axes: tuple[str, ...]
    striped: bool

    def index(self, ids: jax.Array, size: int) -> jax.Array:
        """Return where ids lie in this device's `size` entries; outside [0, size) for those of
        other devices.
        """
        rank = lax.axis_index(self.axes).astype(ids.dtype)
        if not self.striped:
            return ids - rank * size
        devices = lax.axis_size(self.axes)
        return jnp.where(ids % devices == rank, ids // devices, -1)

    def all_gather(self, part_V: jax.Array) -> jax.Array:
        """The entries of the whole vocabulary, in order, on every device."""
        parts_RV = lax.all_gather(part_V, self.axes)
        return (parts_RV.T if self.striped else parts_RV).reshape(-1)


def _of_all_devices(
    x_TD: jax.Array,
    w_DV: jax.Array,
    labels_T: jax.Array,
    weights_T: jax.Array,
    shard: VocabularyShard,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    x_MD, labels_M, weights_M = (
        all_gather_rows_local(a, shard.axes) for a in (x_TD, labels_T, weights_T)
    )
    return x_MD, w_DV, shard.index(labels_M, w_DV.shape[1]), weights_M


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def parallel_cross_entropy(
    x_TD: jax.Array,
    w_DV: jax.Array,
    labels_T: jax.Array,
    weights_T: jax.Array,
    shard: VocabularyShard,
) -> jax.Array:
    """`cross_entropy` where each device has a part of w's columns; summed over devices it is that
    of all their tokens.

    Every device computes the logits of all tokens for its part: hidden states go to all devices,
    three numbers of each token's softmax too, and the parts of dx back, rounded to x's dtype on
    their way and added in float32. dw needs no reduction. A device returns 1 / R of the sum; the
    gradients are those of the sum, whose cotangent must be the same on all devices.
    (Vocabulary-parallel as in Megatron-LM, arXiv 1909.08053 section 3, but of split tokens.)
    """
    total = _loss(*_of_all_devices(x_TD, w_DV, labels_T, weights_T, shard), shard.axes)
    return total / lax.axis_size(shard.axes)


def _parallel_fwd(
    x_TD: jax.Array,
    w_DV: jax.Array,
    labels_T: jax.Array,
    weights_T: jax.Array,
    shard: VocabularyShard,
) -> Any:
    operands = _of_all_devices(x_TD, w_DV, labels_T, weights_T, shard)
    total, (dx_MD, dw_DV) = _loss_and_gradients(*operands, shard.axes)
    dx_TD = sum_scatter_rows_local(dx_MD, shard.axes).astype(x_TD.dtype)
    return total / lax.axis_size(shard.axes), (dx_TD, dw_DV)


def _parallel_bwd(shard: VocabularyShard, residuals: Any, g: jax.Array) -> Any:
    return _bwd(residuals, g)


parallel_cross_entropy.defvjp(_parallel_fwd, _parallel_bwd)


def distillation_losses(
    x_TD: jax.Array,
    w_DV: jax.Array,
    labels_T: jax.Array,
    weights_T: jax.Array,
    teacher: tuple[jax.Array, jax.Array],
    temperature: float,
) -> tuple[jax.Array, jax.Array]:
    """Return float32 (cross-entropy, divergence): sums over tokens t, each times weights[t], chunk
    by chunk.

    The divergence is KL(softmax(teacher's logits / temperature) | softmax(x w / temperature)).
    teacher: (its hidden states [T, H], its head [H, V]), of which no gradient is taken. Each
    chunk's logits are computed again for the backward pass.
    """
    hidden_TH, head_HV = lax.stop_gradient(teacher)

    @jax.checkpoint
    def losses(
        w_DV: jax.Array, head_HV: jax.Array, chunk: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        x_CD, labels_C, weights_C, hidden_CH = chunk
        logits_CV, wanted_CV = dot(x_CD, w_DV), dot(hidden_CH, head_HV)
        label_CV = labels_C[:, None] == jnp.arange(w_DV.shape[1], dtype=labels_C.dtype)
        nll_C = jax.nn.logsumexp(logits_CV, axis=-1) - jnp.where(label_CV, logits_CV, 0).sum(
            axis=-1
        )
        student_CV = jax.nn.log_softmax(logits_CV / temperature, axis=-1)
        teacher_CV = jax.nn.log_softmax(wanted_CV / temperature, axis=-1)
        divergence_C = (jnp.exp(teacher_CV) * (teacher_CV - student_CV)).sum(axis=-1)
        return (nll_C * weights_C).sum(), (divergence_C * weights_C).sum()

    def totals(chunk_logits: int, w_DV: jax.Array, head_HV: jax.Array, *arrays: jax.Array) -> Any:
        def step(totals: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]) -> Any:
            nll, divergence = losses(w_DV, head_HV, chunk)
            return (totals[0] + nll, totals[1] + divergence), None

        size = chunk_tokens(labels_T.size, w_DV.shape[1], chunk_logits)
        zero = jnp.zeros((), jnp.float32)
        return lax.scan(step, (zero, zero), _chunks(size, *arrays))[0]

    return _in_chunks(totals, w_DV, head_HV, x_TD, labels_T, weights_T, hidden_TH)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class OutputHead:
    """The planned head and loss of the parameters `embedding` [V, D] and, if not tied, `head` [D,
    V].

    axes: of all devices; the last is inside a node.
    """

    plan: EmbeddingPlan
    axes: tuple[str, ...]
    tied: bool

    @property
    def _shard(self) -> VocabularyShard:
        return VocabularyShard(self.axes, self.plan.kind == "rows" and self.tied)

    def weight(self, table: jax.Array, head: jax.Array | None, dtype: Any) -> jax.Array:
        """Return [D, V] in `dtype`, or this device's part of V columns, from the head, or the
        table if it is None.
        """
        if head is not None:
            return head.astype(dtype)
        if self.plan.kind == "replicated":
            return table.T.astype(dtype)
        if not self.plan.parallel_head:
            unsharded = gather_local(table, 1, dtype, self.axes)
            return unsharded.reshape(-1, unsharded.shape[-1]).T
        if self.plan.kind == "rows":
            return table.reshape(table.shape[0], -1).T.astype(dtype)
        blocks_RVD = table.astype(dtype).reshape(self.plan.num_devices, -1, table.shape[1])
        blocks_RVD = make_all_to_all(self.axes)(blocks_RVD)
        return blocks_RVD.swapaxes(0, 1).reshape(blocks_RVD.shape[1], -1).T

    def cross_entropy(
        self, x_TD: jax.Array, w_DV: jax.Array, labels_T: jax.Array, weights_T: jax.Array
    ) -> jax.Array:
        """Return the sum over this device's tokens, or its part of all devices' sum; w_DV as
        `weight` made it.
        """
        if self.plan.parallel_head:
            return parallel_cross_entropy(x_TD, w_DV, labels_T, weights_T, self._shard)
        return cross_entropy(x_TD, w_DV, labels_T, weights_T)

    def logits(self, x_D: jax.Array, w_DV: jax.Array) -> jax.Array:
        """Return float32 [V] of a hidden state that is the same on all devices."""
        logits_V = dot(x_D[None].astype(jnp.float32), w_DV.astype(jnp.float32))[0]
        return self._shard.all_gather(logits_V) if self.plan.parallel_head else logits_V
