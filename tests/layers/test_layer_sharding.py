"""Where the parameters of a `MoELayer` lie: at birth, initialised under `jit`, restored; meshes
with Explicit axes.

Legend: T tokens, D hidden, E experts.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jmoe import ExpertParallel, MoEConfig, MoELayer, RouterConfig
from jmoe.models.block import Block
from jmoe.models.decoder import stack_layers
from tests.arrays import assert_trees_close
from tests.model_configs import MODEL
from tests.moe_layers import D, E, F, T, config_of, inputs, make, run

WIDE = MoEConfig(
    hidden_size=64,
    num_experts=8,
    intermediate_size=256,
    bias=True,
    router=RouterConfig(kind="sigmoid"),
)


def mesh_of(shape: tuple[int, ...] = (2, 4), kind: AxisType = AxisType.Auto) -> Mesh:
    names = ("node", "gpu")[-len(shape) :]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def wide(mesh: Mesh | None = None, axes: tuple[str, ...] = ("node", "gpu")) -> MoELayer:
    return MoELayer(WIDE, None if mesh is None else ExpertParallel(mesh, axes), rngs=nnx.Rngs(0))


def specs_of(layer: nnx.Module) -> dict[str, Any]:
    specs: dict[str, Any] = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
    return specs


def bytes_of(tree: Any) -> list[int]:
    """Bytes on each device, in the order of `jax.devices()`."""
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return list(held.values())


def one_eighth(state: Any) -> list[int]:
    """Bytes on each device if it has an eighth of the experts, and the router whole."""
    experts, router = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(state[name])) for name in ("experts", "router")
    )
    return [experts // 8 + router] * 8


# ---- metadata


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("axes", "split"),
    [(("node", "gpu"), ("node", "gpu")), (("gpu",), "gpu"), ((), None)],
    ids=["two", "one", "none"],
)
def test_every_parameter_says_where_it_lies(
    axes: tuple[str, ...], split: Any, kind: AxisType
) -> None:
    layer = wide(mesh_of(kind=kind), axes)
    matrices, biases = PartitionSpec(split, None, None), PartitionSpec(split, None)
    assert specs_of(layer) == {
        "experts": {"w_up": matrices, "w_down": matrices, "b_up": biases, "b_down": biases},
        "router": {
            "kernel": PartitionSpec(None, None),
            "e_score_correction_bias": PartitionSpec(None),
        },
    }
    for leaf, spec in zip(
        jax.tree.leaves(nnx.state(layer)), jax.tree.leaves(specs_of(layer)), strict=True
    ):
        assert leaf.sharding == NamedSharding(mesh_of(kind=kind), spec)  # as it is born


class Own(nnx.Module):
    """A user's experts, of which one parameter says itself where it lies."""

    def __init__(self, mesh: Mesh) -> None:
        self.scale = nnx.Param(jnp.ones((E, D)))
        self.said = nnx.Param(jnp.ones((E, D)), out_sharding=("gpu", "node"), mesh=mesh)

    def __call__(
        self, rows_ND: jax.Array, group_sizes_L: jax.Array, expected_rows: int
    ) -> jax.Array:
        return rows_ND * self.scale[...][0] * self.said[...][0]


def test_users_experts_are_split_like_ours() -> None:
    mesh = mesh_of()
    parallel = ExpertParallel(mesh, ("node", "gpu"))
    layer = MoELayer(config_of(), parallel, experts=Own(mesh), rngs=nnx.Rngs(0))
    specs = specs_of(layer)["experts"]
    assert specs == {
        "scale": PartitionSpec(("node", "gpu"), None),
        "said": PartitionSpec("gpu", "node"),
    }
    assert layer(jnp.ones((T, D)))[0].shape == (T, D)


def test_an_optimizer_of_flax_splits_its_state_alike() -> None:
    layer = wide(mesh_of())
    moments = nnx.state(nnx.Optimizer(layer, optax.adam(1e-3), wrt=nnx.Param))["opt_state"][0]["mu"]
    assert bytes_of(moments) == one_eighth(nnx.state(layer, nnx.Param))


def test_stacked_layers_say_that_experts_are_the_second_dimension() -> None:
    parallel = ExpertParallel(mesh_of(), ("node", "gpu"))
    blocks = stack_layers(lambda rngs: Block(MODEL, "moe", parallel, rngs=rngs), 2, nnx.Rngs(0))
    specs = specs_of(blocks)["moe"]
    assert specs["experts"]["w_up"] == PartitionSpec(None, ("node", "gpu"), None, None)
    assert specs["router"]["kernel"] == PartitionSpec(None, None, None)


# ---- initialised and restored


def test_a_bank_that_one_device_does_not_hold_is_initialised_over_eight() -> None:
    """No device ever has more than its experts: not as a result, not on the way."""
    mesh = mesh_of()
    shapes = nnx.state(nnx.eval_shape(lambda: wide(mesh)))
    initialise = jax.jit(
        lambda: nnx.state(wide(mesh)), out_shardings=nnx.get_named_sharding(shapes, mesh)
    )
    state = initialise()
    assert bytes_of(state) == one_eighth(state)
    memory = initialise.lower().compile().memory_analysis()
    bank_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state["experts"]))
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < bank_bytes / 2
    assert_trees_close(nnx.to_pure_dict(state), nnx.to_pure_dict(nnx.state(wide())))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_init_in_a_users_jit_needs_no_shardings(kind: AxisType) -> None:
    with jax.set_mesh(mesh_of(kind=kind)) as mesh:
        del mesh
        state = jax.jit(lambda: nnx.state(wide(mesh_of(kind=kind))))()
    assert bytes_of(state) == one_eighth(state)


@pytest.mark.parametrize("source", [1, 8])
@pytest.mark.parametrize("target", [1, 8])
def test_restored_by_orbax_through_eval_shape(source: int, target: int, tmp_path: Path) -> None:
    def layer_of(devices: int) -> MoELayer:
        return wide(mesh_of() if devices == 8 else None)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", nnx.state(layer_of(source)))
        checkpointer.wait_until_finished()
        graph, shapes = nnx.split(nnx.eval_shape(lambda: layer_of(target)))
        mesh = mesh_of() if target == 8 else mesh_of((1,))
        places = nnx.get_named_sharding(shapes, mesh)
        place = lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)  # noqa: E731
        state = checkpointer.restore(tmp_path / "layer", jax.tree.map(place, shapes, places))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert bytes_of(state) == (one_eighth(state) if target == 8 else [whole] + [0] * 7)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, WIDE.hidden_size)), jnp.float32)
    assert_trees_close(nnx.merge(graph, state)(x), wide()(x))


# ---- meshes with Explicit axes, JAX's default


@pytest.mark.parametrize("context", [False, True], ids=["", "set_mesh"])
def test_explicit_axes_are_worked_under(context: bool) -> None:
    """Values and gradients are one device's; y and dx are typed as x is, gradients of parameters
    as these are.
    """
    mesh = mesh_of(kind=AxisType.Explicit)
    layer = make("softmax", mesh, expert_axes=("node", "gpu"), data_axes=())
    expected = run(make("softmax"), *inputs())
    graph, state = nnx.split(layer)

    def loss(state: nnx.State, x: jax.Array) -> Any:
        y, metrics = nnx.merge(graph, state)(2 * x)
        return (y.reshape(T, D) * g).sum() + metrics.balance_loss + metrics.z_loss, (y, metrics)

    x, g = inputs()
    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        spec = PartitionSpec("node", "gpu", None)
        typed = jax.device_put(x.reshape(8, 16, D) / 2, NamedSharding(mesh, spec))
        g = jax.device_put(g, NamedSharding(mesh, PartitionSpec()))
        (_, (y, metrics)), (dstate, dx) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
            state, typed
        )
        eager, _ = layer(2 * typed)
        plain, _ = layer(x[:13])  # not typed, and no multiple of the devices
    assert y.sharding.spec == eager.sharding.spec == dx.sharding.spec == spec
    assert dstate["experts"]["w_up"].sharding.spec == PartitionSpec(("node", "gpu"), None, None)
    ours = y.reshape(T, D), metrics, dx.reshape(T, D) / 2, nnx.to_pure_dict(dstate)
    assert_trees_close(ours, (expected.y, expected.metrics, expected.dx, expected.dparams))
    assert_trees_close((eager.reshape(T, D), plain), (expected.y, expected.y[:13]))


@pytest.mark.slow
def test_some_explicit_axes_and_some_auto() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "gpu"), axis_types=(AxisType.Explicit, AxisType.Auto))
    layer = make("softmax", mesh, expert_axes=("gpu",), data_axes=("data",))
    x = jax.device_put(inputs()[0], NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        y, _ = jax.jit(lambda x: layer(x))(x)
    assert_trees_close(y, make("softmax")(inputs()[0])[0])


def test_a_layer_on_one_device_takes_explicitly_sharded_tokens() -> None:
    """Every device has all experts; tokens come in parts, in dimensions that a reshape would
    mix.
    """
    mesh = mesh_of(kind=AxisType.Explicit)
    x, spec = inputs()[0].reshape(2, 64, D), PartitionSpec("node", "gpu", None)
    layer = make("softmax")
    with jax.set_mesh(mesh):
        y, metrics = jax.jit(lambda x: layer(x))(jax.device_put(x, NamedSharding(mesh, spec)))
    assert y.sharding.spec == spec
    assert_trees_close((y, metrics), layer(x))


def test_a_mesh_as_jax_makes_it() -> None:
    parallel = ExpertParallel(jax.make_mesh((2,), ("gpu",)), ("gpu",))
    layer = MoELayer(config_of(), parallel, rngs=nnx.Rngs(0))
    assert layer(jnp.ones((3, D)))[0].shape == (3, D)
    assert bytes_of(layer.experts.w_up[...])[:3] == [E * D * 2 * F * 4 // 2] * 2 + [0]
