"""A dense layer in place of experts: what it computes, in students of three families, and what
cannot be one.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.config import ModelConfig
from jmoe.deploy.cut import cut_config, write_cut_model
from jmoe.deploy.dense_layer import DenseFrom, dense_width_and_num_joined, make_dense_mlp
from jmoe.deploy.distil import StudentOptions, make_student
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.safetensors_io import DTYPES, read_headers
from kernels_pallas.grouped_mlp import MLPWeights
from kernels_pallas.grouped_mlp.xla import expert_mlp
from tests.deploy.gpt_moe_models import gpt_moe_config, in_numpy, stored_arrays, write_model
from tests.deploy.test_prune import TEXT, write_tokenizer
from tests.model_configs import CHECKPOINTS

TOKENS = np.random.default_rng(3).integers(0, 64, 12)


def applied(arrays: Any, x: np.ndarray, activation: str) -> np.ndarray:
    named = {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}
    weights = MLPWeights(named["w_up"], named["w_down"], named.get("b_up"), named.get("b_down"))
    return np.asarray(expert_mlp(jnp.asarray(x, jnp.float32), weights, activation))


def stored_bytes(folder: Path) -> dict[str, bytes]:
    sizes = {
        t: int(np.prod(t.shape)) * np.dtype(DTYPES[t.dtype]).itemsize
        for t in read_headers(folder).values()
    }
    return {t.name: t.file.read_bytes()[t.offset : t.offset + size] for t, size in sizes.items()}


@pytest.mark.parametrize(("family", "count"), [("qwen3_moe", 3), ("deepseek_v3", 1)])
def test_the_sum_of_experts(family: str, count: int) -> None:
    """As many of the most used as the family's dense layers have room for, by their parts of the
    tokens.
    """
    with LazyCheckpoint(CHECKPOINTS / family, "float32") as source:
        config = source.config
        assert dense_width_and_num_joined(config, True) == (config.intermediate_size, count)
        use_NE = np.random.default_rng(0).integers(
            1, 9, (config.num_moe_layers, config.num_experts)
        )
        made = make_dense_mlp(source, 1, use_NE, count, "most_used")
        x = np.random.default_rng(1).normal(size=(5, config.hidden_size))
        best = np.argsort(-use_NE[1], kind="stable")[:count]
        factor = config.router.routed_scaling_factor
        expected = factor * sum(
            use_NE[1, e]
            / use_NE[1, best].sum()
            * applied(source.read_expert(1, int(e)), x, config.hidden_act)
            for e in best
        )
        shared = {
            p[-1]: a[1]
            for p, a in source.load_dense_arrays().items()
            if p[1:2] == ("shared_expert",)
        }
        if shared:
            expected = expected + applied(shared, x, config.hidden_act)
    np.testing.assert_allclose(applied(made, x, config.hidden_act), expected, atol=1e-5)


@pytest.mark.parametrize(("family", "dense"), [("qwen3_moe", 2), ("deepseek_v3", 1)])
def test_families_with_dense_layers(family: str, dense: int, tmp_path: Path) -> None:
    """The folder is one of its family, whose other layers are as they were."""
    with LazyCheckpoint(CHECKPOINTS / family) as source:
        whole, layers = source.config, range(source.config.num_hidden_layers)
        config = cut_config(whole, layers, (dense,))
        use_NE = np.ones((whole.num_moe_layers, whole.num_experts), np.int64)
        layer = [i for i, kind in enumerate(whole.layer_kinds) if kind == "moe"].index(dense)
        arrays = make_dense_mlp(
            source, layer, use_NE, dense_width_and_num_joined(whole, True)[1], "average"
        )
        kept_Nn = np.tile(np.arange(whole.num_experts), (config.num_moe_layers, 1))
        write_cut_model(source, tmp_path / "out", config, layers, kept_Nn, dense={dense: arrays})
    kinds = list(whole.layer_kinds)
    kinds[dense] = "dense"
    model = jmoe.load_pretrained(tmp_path / "out")
    assert list(model.config.layer_kinds) == kinds
    assert np.isfinite(np.asarray(model(TOKENS[None].astype(np.int32)))).all()
    before, after = stored_bytes(CHECKPOINTS / family), stored_bytes(tmp_path / "out")
    assert all(
        data == before[name] for name, data in after.items() if f"layers.{dense}.mlp" not in name
    )
    assert f"model.layers.{dense}.mlp.down_proj.weight" in after


@pytest.mark.parametrize("made_from", ["most_used", "average"])
def test_a_student_with_dense_layers(made_from: DenseFrom, tmp_path: Path) -> None:
    """Of a model without any: in numpy the first layer is the expert that its tokens use most,
    or all of them.
    """
    write_model(tmp_path / "teacher")
    write_tokenizer(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text(TEXT)
    text = str(tmp_path / "text.txt")
    asked = StudentOptions(
        2, text, dense=(0,), dense_from=made_from, max_tokens=600, sequence_length=16
    )
    make_student(tmp_path / "teacher", tmp_path / "student", asked, lambda _: None)
    before, after = stored_arrays(tmp_path / "teacher"), stored_arrays(tmp_path / "student")
    config = gpt_moe_config(num_experts=2, mlp_only_layers=(0,))
    model = jmoe.load_pretrained(tmp_path / "student")
    assert model.config.layer_kinds == ("dense", "moe", "moe")
    logits, _ = in_numpy(config, after, TOKENS)
    found = np.asarray(model(TOKENS[None].astype(np.int32)))[0]
    np.testing.assert_allclose(found, logits, atol=1e-4)
    down = [
        name for name in after if name.startswith("model.layers.0.mlp.") and name.endswith("weight")
    ]
    experts = [
        all(
            np.array_equal(after[name], before[name.replace("mlp.", f"mlp.experts.{e}.")])
            for name in down
        )
        for e in range(4)
    ]
    assert len(down) == 2 and sum(experts) == (made_from == "most_used")


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        ((3,), r"dense = \(3,\): must be numbers of the student's 3 layers, of those with experts"),
        ((1,), r"dense = \(1,\): must be numbers of the student's 3 layers, of those with experts"),
        ((0, 2), r"mlp_only_layers = \(0, 1, 2\): must leave a layer with experts"),
    ],
)
def test_layers_that_cannot_be(dense: tuple[int, ...], message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "teacher", mlp_only_layers=(1,))
    write_tokenizer(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text(TEXT)
    asked = StudentOptions(
        2, str(tmp_path / "text.txt"), dense=dense, max_tokens=600, sequence_length=16
    )
    with pytest.raises(ValueError, match=message):
        make_student(tmp_path / "teacher", tmp_path / "student", asked, lambda _: None)
    assert not (tmp_path / "student").exists()


def test_sizes_that_do_not_fit() -> None:
    config: ModelConfig = gpt_moe_config(intermediate_size=96)
    assert dense_width_and_num_joined(config, False) == (64, 1)
    message = (
        "intermediate_size = 96: must be 0 of the shared expert and a multiple of"
        " moe_intermediate_size = 64"
    )
    with pytest.raises(ValueError, match=message):
        dense_width_and_num_joined(config, True)
    with LazyCheckpoint(CHECKPOINTS / "qwen2_moe") as source:
        gated = dataclasses.replace(source.config)
    with pytest.raises(
        ValueError,
        match="shared_expert_gate = True: has no value where all tokens are treated alike",
    ):
        dense_width_and_num_joined(gated, True)
