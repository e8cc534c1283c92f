"""A block of few tokens by kernels in Pallas' interpreter, against the same block in XLA."""

import warnings
from types import SimpleNamespace
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import ModelConfig
from jmoe.inference import cached_layers, layer_programs
from jmoe.inference.cached_layers import (
    UNSHARDED,
    CachedAttention,
    CachePlaces,
    Hidden,
    attend_and_route_local,
)
from jmoe.inference.few_tokens import attend_and_route
from jmoe.inference.kv_cache import BLOCK, KVCache
from jmoe.inference.runner_protocol import TokenBatch
from jmoe.layers.slot_experts import ExpertInputs, ExpertProducts
from jmoe.models.block import Block
from jmoe.models.functional import split_arrays
from jmoe.run.ahead_of_time import lower_for_device
from kernels_pallas.expert_choices import WeightedOutputs
from tests.arrays import assert_close

ROWS, HIDDEN, EXPERTS, HEADS, SIZE = 3, 64, 12, 2, 16
TABLES = np.array([[3, 1], [2, 0], [0, 0]], np.int32)
POSITIONS = np.array([[5], [130], [2 * BLOCK]], np.int32)  # the last row is padding
MODEL: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": SIZE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "initializer_range": 0.3,
}


def block_of(kind: Any = "moe", **changes: Any) -> Block:
    """Return a block with parameters that are neither 0 nor 1."""
    block = Block(ModelConfig(**{**MODEL, **changes}), kind, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(3)
    draw = lambda w: w + jnp.asarray(rng.normal(0, 0.1, w.shape), w.dtype)  # noqa: E731
    nnx.update(block, jax.tree.map(draw, nnx.state(block, nnx.Param)))
    return block


def operands() -> tuple[KVCache, Hidden, CachePlaces]:
    rng = np.random.default_rng(4)
    shapes = [(4, HEADS, BLOCK, SIZE)] * 2 + [(ROWS, 1, HIDDEN), (ROWS, HIDDEN)]
    k, v, x, y = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return KVCache(k, v), Hidden(x, y), CachePlaces(jnp.asarray(TABLES), jnp.asarray(POSITIONS))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("moe", {}),
        ("moe", {"attention_bias": True, "qkv_bias": True}),
        ("moe", {"shared_expert_intermediate_size": 32, "shared_expert_gate": True}),
        ("dense", {"attention_bias": True}),
    ],
)
def test_block_equals_xlas(kind: Any, changes: dict[str, Any]) -> None:
    block, (cache, hidden, places) = block_of(kind, **changes), operands()
    by_xla = cached_layers._attend_and_route_in_xla(block, cache, hidden, places, UNSHARDED)
    cached = CachedAttention(cache, places)

    def attend(attention: Any, h_PCD: jax.Array) -> jax.Array:
        return cached(attention, h_PCD, with_output_bias=False)

    where = places.positions_PC.reshape(-1), TABLES.shape[1] * BLOCK
    x_PCD, y = attend_and_route(block, hidden, attend, *where, interpret=True)
    assert_close(x_PCD, by_xla[0], 1e-5)
    assert isinstance(y, ExpertInputs) == isinstance(by_xla[2], ExpertInputs) == (kind == "moe")
    if isinstance(y, ExpertInputs) and isinstance(by_xla[2], ExpertInputs):
        assert np.array_equal(y.idx_TK, by_xla[2].idx_TK)
        assert (np.asarray(y.idx_TK)[-1] == EXPERTS).all()  # padding
    for ours, xlas in zip(jax.tree.leaves(y), jax.tree.leaves(by_xla[2]), strict=True):
        assert_close(ours, xlas, 1e-5)


def test_blocks_that_are_left_to_xla() -> None:
    cache, hidden, places = operands()
    del cache
    where = places.positions_PC.reshape(-1), 2 * BLOCK
    with pytest.raises(NotImplementedError, match="LayerNorm"):
        attend_and_route(block_of(norm="layernorm"), hidden, lambda *_: hidden.y_TD, *where)
    block = block_of()
    assert block.moe is not None
    block.moe.router = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(NotImplementedError, match="a router of type SimpleNamespace"):
        attend_and_route(block, hidden, lambda *_: hidden.y_TD, *where)


@pytest.mark.parametrize(("rows", "kernels"), [(ROWS, 5), (65, 1)])
def test_a_gpus_program_of_few_tokens(rows: int, kernels: int) -> None:
    """Two sums with norms, the choice, attention with rotation and write, and its combination; more
    than 64 tokens leave the first three to XLA.
    """
    device: Any = SimpleNamespace(platform="gpu", compute_capability="8.9")
    structure, arrays = split_arrays(block_of(attention_bias=True, qkv_bias=True))
    of: Any = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    cache = KVCache(*[of(jnp.uint16, 600, HEADS, BLOCK, SIZE)] * 2)
    hidden = Hidden(of(jnp.bfloat16, rows, 1, HIDDEN), of(jnp.float32, rows, HIDDEN))
    places = CachePlaces(of(jnp.int32, rows, 8), of(jnp.int32, rows, 1))

    def step(arrays: Any, cache: KVCache, hidden: Hidden, places: CachePlaces) -> Any:
        return attend_and_route_local(structure, arrays, cache, hidden, places)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Pallas' Triton backend
        _, lowered = lower_for_device(device, jax.jit(step), arrays, cache, hidden, places)
    text = lowered.as_text()
    count = text.count("@__gpu$xla.gpu.triton")
    assert count == kernels or (rows > 64 and count == kernels + 1)
    assert ("chlo.top_k" in text) == (rows > 64)


def test_a_gpus_layer_passes_on_what_the_next_one_adds_up() -> None:
    """Two sums with norms, attention and its combination, and two products, of which the first
    chooses; no kernel chooses or adds up alone.
    """
    device: Any = SimpleNamespace(platform="gpu", compute_capability="8.9")
    structure, arrays = split_arrays(block_of())
    of: Any = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    static = layer_programs.LayerGroupOptions(
        *((structure,), None, ExpertProducts("swiglu"), jnp.bfloat16, structure),
        *(False, False, 0),
    )
    outputs = WeightedOutputs(
        of(jnp.bfloat16, ROWS, 3, HIDDEN),
        *(of(dtype, ROWS, 3) for dtype in (jnp.float32, jnp.int32)),
        None,
        EXPERTS,
    )
    slots = {
        "w_up": of(jnp.uint16, EXPERTS, HIDDEN, 64),
        "w_down": of(jnp.uint16, EXPERTS, 32, HIDDEN),
    }
    operands = (
        (layer_programs.LayerOperands(arrays, None, None),),
        (KVCache(*[of(jnp.uint16, 600, HEADS, BLOCK, SIZE)] * 2),),
        (),
        Hidden(of(jnp.bfloat16, ROWS, 1, HIDDEN), outputs),
        TokenBatch(of(jnp.int32, ROWS), of(jnp.int32, ROWS, 8), of(jnp.int32, ROWS, 1)),
        (slots, (of(jnp.int32, EXPERTS),)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Pallas' Triton backend
        results, lowered = lower_for_device(device, layer_programs.apply_layers, static, *operands)
    assert isinstance(results[0].y_TD, WeightedOutputs) and results[0].y_TD.y_TD is None
    assert results[3].shape == (1, ROWS, 3)
    text = lowered.as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 6 and "top_k" not in text
