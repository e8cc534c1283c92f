"""Which moments each parameter has, on one device and on a mesh."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jmoe.config import OptimizerConfig
from jmoe.mesh import ALL
from jmoe.models.pretrained import abstract_decoder
from jmoe.models.weights import flatten_by_path
from jmoe.optim.moments import (
    code_block_size,
    describe_moments,
    initial_moments,
    moment_bytes,
    moment_form,
    moment_specs,
    muon_flops,
)
from tests.model_configs import MODEL, mesh_of

MUON = OptimizerConfig(kind="muon")
CODED = OptimizerConfig(moments="8bit")
SIZES = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32}
BIASED = dataclasses.replace(MODEL, attention_bias=True, mlp_bias=True, **SIZES)
MATRICES = {"w_qkv", "w_out", "w_up", "w_down"}


def shapes() -> dict[tuple[str, ...], jax.ShapeDtypeStruct]:
    return {
        path: leaf
        for path, leaf in flatten_by_path(abstract_decoder(BIASED)[2]).items()
        if "e_score_correction_bias" not in path
    }


@pytest.mark.parametrize(("config", "form"), [(MUON, "muon"), (CODED, "8bit")])
def test_matrices_of_layers_have_another_form(config: OptimizerConfig, form: str) -> None:
    forms = {
        path: moment_form(config, tuple(map(jax.tree_util.DictKey, path)), leaf.shape)
        for path, leaf in shapes().items()
    }
    assert {path[-1] for path, own in forms.items() if own == form} == MATRICES
    others = {path[-1] for path, own in forms.items() if own == "adamw"}
    assert others >= {"embedding", "kernel", "scale", "b_up", "b_qkv"}


@pytest.mark.parametrize("config", [OptimizerConfig(), MUON, CODED])
def test_bytes_are_those_of_the_arrays(config: OptimizerConfig) -> None:
    """The planner's number beside the arrays of a state."""
    tree = abstract_decoder(BIASED)[2]
    state = jax.eval_shape(lambda: initial_moments(config, jax.tree.map(jnp.zeros_like, tree)))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) == sum(
        moment_bytes(config, tree)
    )
    said = describe_moments(config, tree)
    assert len(said) == (config != OptimizerConfig())
    if said:
        total = sum(leaf.size for leaf in jax.tree.leaves(tree))
        numbers = [int(word.replace(",", "")) for word in said[0].split() if word[0].isdigit()]
        assert sum(n for n in numbers if n != 8) == total  # "8 bits" is no number of parameters


def test_flops_of_one_matrix() -> None:
    tree = {"dense_layers": {"w_out": jax.ShapeDtypeStruct((1, 2, 3), jnp.float32)}}
    of_products = 2 * 2 * 2 * 3 + 2 * 2 * 2 * 2 + 2 * 2 * 2 * 3
    assert muon_flops(MUON, tree) == 5 * of_products
    assert muon_flops(CODED, tree) == 0


def test_a_block_lies_on_one_device() -> None:
    assert [code_block_size(size) for size in (512, 96, 100, 7)] == [256, 32, 4, 1]
    tree = {"dense_layers": {"w_out": jax.ShapeDtypeStruct((1, 3, 512), jnp.float32)}}
    specs = {"dense_layers": {"w_out": PartitionSpec(None, None, ALL)}}
    two = moment_specs(CODED, tree, specs, mesh_of(1, 1, 2))
    assert two.m == two.v == two.scales["m"] == two.scales["v"] == specs
    with pytest.raises(ValueError, match=r"optimizer\.moments = '8bit': must be float32") as error:
        moment_specs(CODED, tree, specs, mesh_of(1, 2, 2))
    assert "dense_layers.w_out" in str(error.value)
