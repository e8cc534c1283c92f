"""Attention of sequences that lie on several devices is that of whole sequences, with its
gradients.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jmoe.layers import context_attention as context
from jmoe.layers.attention import blocked_attention, ranges_kernel
from jmoe.layers.context import ContextGroup, split_sequences
from jmoe.layers.context_attention import context_attention
from jmoe.mesh import ALL
from kernels_pallas.implementations import trace_for_device
from tests.model_configs import mesh_of

B, H, G, D, E = 2, 4, 2, 8, 4


def by_device(x: np.ndarray, size: int) -> np.ndarray:
    """Sequences [groups, B, K, ...] as the devices' parts [devices B, S, ...]."""
    chunks = np.split(x, 2 * size, axis=2)
    ranks = [np.concatenate([chunks[r], chunks[-1 - r]], axis=2) for r in range(size)]
    return np.stack(ranks, axis=1).reshape(-1, x.shape[2] // size, *x.shape[3:])


@pytest.mark.parametrize(
    ("size", "window", "sinks", "documents"),
    [
        (4, None, True, True),
        (4, 3, True, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, None, False, False),
                (8, None, False, True),
                (2, 16, False, True),  # a whole chunk
                (8, 20, True, True),  # more than a chunk
                (4, 1, False, False),
            )
        ),
    ],
)
def test_equals_attention_of_whole_sequences(
    size: int, window: int | None, sinks: bool, documents: bool
) -> None:
    assert_same_attention(size, window, sinks, documents)


@pytest.mark.parametrize("case", [(4, None, True, True), (8, 20, False, False)], ids=str)
def test_a_gpus_kernel_computes_the_same(
    case: tuple[int, int | None, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Pallas' interpreter: documents, and a window of more than a chunk."""

    def in_triton(operands: Any, *, documents: bool, **options: Any) -> Any:
        return context._triton_kernel(operands, **options)

    monkeypatch.setattr(context, "check_supported", lambda *_: None)
    monkeypatch.setattr(context, "ranges_kernel", partial(ranges_kernel, interpret=True))
    monkeypatch.setattr(context, "_chunk_kernel", in_triton)
    assert_same_attention(*case)


def assert_same_attention(size: int, window: int | None, sinks: bool, documents: bool) -> None:
    """On 8 devices: outputs, and gradients of queries, keys, values and sinks."""
    length, groups, rng = 64, 8 // size, np.random.default_rng(size)
    shapes = [(groups, B, length, *heads) for heads in ((H, D), (G, D), (G, E), (H, E))]
    q, k, v, weights = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    sinks_H = rng.normal(size=H).astype(np.float32) if sinks else None
    begins = rng.random((groups, B, length)) < 0.1
    numbers = np.cumsum(begins, axis=-1, dtype=np.int32) if documents else None
    options: dict[str, Any] = {"scale": 0.3, "window": window}
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v, weights)]
    whole_BS = None if numbers is None else jnp.asarray(numbers.reshape(-1, length))

    def whole(q: Any, k: Any, v: Any, sinks_H: Any) -> Any:
        o = blocked_attention(q, k, v, sinks_H=sinks_H, documents_BS=whole_BS, **options)
        return (o * flat[3]).sum(), o

    places = (0, 1, 2, 3) if sinks else (0, 1, 2)
    (_, o), gradients = jax.jit(jax.value_and_grad(whole, places, has_aux=True))(*flat[:3], sinks_H)

    group = ContextGroup(size, 8)

    def local(q: Any, k: Any, v: Any, weights: Any, sinks_H: Any, numbers: Any) -> Any:
        split = split_sequences(group, q.shape[1], numbers)

        def loss(q: Any, k: Any, v: Any, sinks_H: Any) -> Any:
            o = context_attention(q, k, v, split, sinks_H=sinks_H, **options)
            return (o * weights).sum(), o

        (_, o), gradients = jax.value_and_grad(loss, places, has_aux=True)(q, k, v, sinks_H)
        return o, gradients[:3], None if sinks_H is None else jax.lax.psum(gradients[3], ALL)

    split_spec, one = PartitionSpec(ALL), PartitionSpec()
    run = jax.shard_map(
        local,
        mesh=mesh_of(2, 2, 2),
        in_specs=(split_spec,) * 4 + (one, split_spec),
        out_specs=(split_spec, split_spec, one),
        check_vma=False,
    )
    repeated = None if numbers is None else np.repeat(numbers, size, axis=0).reshape(-1, length)
    ours = jax.jit(run)(*(by_device(x, size) for x in (q, k, v, weights)), sinks_H, repeated)
    close = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    for ours_x, x in zip((ours[0], *ours[1]), (o, *gradients[:3]), strict=True):
        close(ours_x, by_device(np.asarray(x).reshape(groups, B, *x.shape[1:]), size))
    if sinks:
        close(ours[2], gradients[3])


@pytest.mark.parametrize(
    ("documents", "window", "kernel"),
    [(False, None, "_cudnn_kernel"), (True, None, "_triton_kernel"), (False, 5, "_triton_kernel")],
)
def test_the_kernel_of_a_gpu(
    documents: bool, window: int | None, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's, or with documents or a window the one in Triton; XLA where neither supports it."""
    x: Any = (jnp.ones((1, 8, 2, 8), jnp.bfloat16),) * 3
    options: dict[str, Any] = {"scale": 1.0, "window": window, "documents": documents}
    in_xla = context._chunk_kernel(x, **options)
    device: Any = SimpleNamespace(platform="gpu", compute_capability="9.0")
    chosen: Any = "the kernel"
    with trace_for_device(device):
        wide: Any = (jnp.ones((1, 8, 2, 512), jnp.bfloat16),) * 3
        assert context._chunk_kernel(wide, **options).forward.func is in_xla.forward.func  # type: ignore[attr-defined]
        monkeypatch.setattr(context, kernel, lambda *_, **__: chosen)
        assert context._chunk_kernel(x, **options) is chosen
