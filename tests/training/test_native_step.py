"""Training steps with native operations: rounded as those without, and refused where they cannot
be had.
"""

import contextlib
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import ModelConfig, TiersConfig, TrainConfig
from jmoe.mesh import ACCUMULATED_BATCH, BATCH
from jmoe.training.fused.step import FusedTrainer
from jmoe.training.native import steps_are_native
from jmoe.training.trainer import make_trainer
from kernels_pallas import native
from tests import model_configs
from tests.compiled import called

# Every token takes all experts: where rounding decides which one it takes, losses tell nothing
# about rounding.
MODEL = dataclasses.replace(
    model_configs.MODEL,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    moe_intermediate_size=32,
    num_experts_per_tok=8,
    initializer_range=0.1,
)
GPT = dataclasses.replace(
    MODEL,
    hidden_act="gelu",
    norm="layernorm",
    position="learned",
    attention_bias=True,
    mlp_bias=True,
)
CONFIG = TrainConfig(
    model=MODEL,
    optimizer=model_configs.OPTIMIZER,
    batch_size=2,
    sequence_length=80,
    num_steps=5,
    native="on",
)
XLA: dict[str, Any] = {"native": "off"}
FLOAT32: dict[str, Any] = {"native": "off", "compute_dtype": "float32"}
OPERATIONS = (
    "jmoe_causal_attention",
    "jmoe_causal_attention_gradient",
    "jmoe_grouped_mlp",
    "jmoe_grouped_mlp_gradient",
)


@pytest.fixture
def built() -> None:
    try:
        if not native.multiplies_many_rows():
            pytest.skip("no native operations here: the processor has no AVX512-BF16")
    except native.NotBuiltError as error:
        pytest.skip(f"no native operations here: {error}")


def tokens_of(config: TrainConfig, seed: int = 0) -> jax.Array:
    shape = 1, config.batch_size, config.sequence_length + 1
    return jnp.asarray(
        np.random.default_rng(seed).integers(0, config.model.vocab_size, shape), jnp.int32
    )


def gradients(config: TrainConfig) -> Any:
    """The gradients of the first step, on one device."""
    trainer = FusedTrainer(config, model_configs.mesh_of(1, 1, 1))
    specs = trainer.model.state_specs, ACCUMULATED_BATCH
    body = trainer.shard_over_mesh(
        lambda state, tokens: trainer.gradients_local(state, tokens, full_capacity=False)[0],
        in_specs=specs,
        out_specs=BATCH,
    )
    return jax.jit(body)(trainer.init(), tokens_of(config))


def error(got: Any, want: Any) -> float:
    """By the norm of the whole array."""
    difference = np.asarray(got, np.float64) - np.asarray(want, np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(np.asarray(want, np.float64)))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("model", "remat"),
    [pytest.param(MODEL, "none", marks=pytest.mark.slow), (GPT, "layer")],
    ids=["SwiGLU", "GELU, biases, rematerialised"],
)
def test_gradients_are_as_near_to_float32_as_without(model: ModelConfig, remat: Any) -> None:
    """Of every parameter."""
    config = dataclasses.replace(CONFIG, model=model, remat=remat)
    exact = gradients(dataclasses.replace(config, **FLOAT32))
    ours, plain = gradients(config), gradients(dataclasses.replace(config, **XLA))
    for (path, want), mine, other in zip(
        jax.tree.leaves_with_path(exact), jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True
    ):
        assert 0 < error(other, want) < 0.05, jax.tree_util.keystr(path)
        assert error(mine, want) < 1.2 * error(other, want), jax.tree_util.keystr(path)


def first_step(config: TrainConfig, *shape: int) -> tuple[dict[str, Any], str]:
    """The metrics of the first step, and its compiled program."""
    trainer: Any = FusedTrainer(config, model_configs.mesh_of(*shape))
    state, tokens = trainer.init(), tokens_of(config)
    step = trainer.step.lower(state, tokens).compile()
    return step(state, tokens)[1], step.as_text()


@pytest.mark.slow
@pytest.mark.usefixtures("built")
def test_eight_devices_take_the_step_of_one() -> None:
    config = dataclasses.replace(CONFIG, batch_size=8, sequence_length=24)
    one, program = first_step(config, 1, 1, 1)
    eight, spread = first_step(model_configs.spread_over(config, 2, 2, 2), 2, 2, 2)
    _, without = first_step(dataclasses.replace(config, **XLA), 1, 1, 1)
    assert all(name in program and name in spread for name in OPERATIONS) and "jmoe_" not in without
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(eight[name], one[name], rtol=5e-3, err_msg=name)


def collectives(config: TrainConfig) -> list[str]:
    """Those of a step on eight devices, in the order in which it is traced."""
    trainer: Any = FusedTrainer(
        model_configs.spread_over(config, 1, 2, 4), model_configs.mesh_of(1, 2, 4)
    )
    found: list[str] = []

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("all_gather", "all_to_all", "reduce_scatter"):
                found.append(eqn.primitive.name)
            for inner in called(eqn):
                walk(inner)

    walk(trainer.step.trace(trainer.state_shape, tokens_of(config)).jaxpr)
    return found


@pytest.mark.usefixtures("built")
def test_collectives_hide_behind_native_operations_as_behind_products() -> None:
    config = dataclasses.replace(CONFIG, batch_size=8, sequence_length=32)
    ours, plain = collectives(config), collectives(dataclasses.replace(config, **XLA))
    assert ours == plain and {"all_gather", "all_to_all", "reduce_scatter"} == {*ours}


def called_in(program: str, target: str) -> dict[str, str]:
    """The calls of a native operation in a compiled program: their operands by their name."""
    return dict(
        re.findall(
            rf'%(\S+) = [^\n]*? custom-call\(([^)]*)\)[^\n]*custom_call_target="{target}"', program
        )
    )


def holds(program: str) -> set[str]:
    """What is held, in whole or in part, as it is or in another form."""
    # of operations with one operand
    sources = dict(re.findall(r"%(\S+) = [^\n]*? [a-z-]+\(%([\w.-]+)\)", program))
    held = {*re.findall(r"%([\w.-]+)", " ".join(called_in(program, "jmoe_hold").values()))}
    while more := {sources[name] for name in held if name in sources} - held:
        held |= more
    return held


@pytest.mark.usefixtures("built")
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["chunks", "pipelined"])
def test_operations_in_the_background_change_no_number(schedule: Any) -> None:
    """As in a run of several processes; and what they read and write is held until other
    collectives are done.
    """
    config = dataclasses.replace(CONFIG, batch_size=8, sequence_length=24)
    config = model_configs.spread_over(config, 1, 2, 2)
    config = dataclasses.replace(config, comm=dataclasses.replace(config.comm, schedule=schedule))
    plain, program = first_step(config, 1, 2, 2)
    with native.allow_native_training(False, background=True):
        ahead, held = first_step(config, 1, 2, 2)
    assert "background = true" in held and "background = true" not in program
    gradients = {*called_in(held, "jmoe_grouped_mlp_gradient")}
    assert "jmoe_hold" not in program and gradients & holds(held)
    # a piece of an exchange may have no work beside it
    assert schedule == "pipelined" or gradients <= holds(held)
    for name in ("loss", "grad_norm"):
        np.testing.assert_array_equal(ahead[name], plain[name], err_msg=name)


@pytest.mark.usefixtures("built")
def test_streamed_experts_take_the_step_of_resident_ones() -> None:
    tiers = TiersConfig(experts="host", optimizer="host")
    with contextlib.closing(
        make_trainer(dataclasses.replace(CONFIG, tiers=tiers), model_configs.mesh_of(1, 1, 1))
    ) as t:
        _, streamed = t.step(t.init(), tokens_of(CONFIG))
    resident, program = first_step(CONFIG, 1, 1, 1)
    assert all(name in program for name in OPERATIONS)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(streamed[name], resident[name], rtol=1e-4, err_msg=name)


def test_what_cannot_be_had_is_an_error_only_if_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = model_configs.mesh_of(1, 1, 1)

    def missing() -> bool:
        raise native.NotBuiltError("there is no g++")

    # whether or not this machine has a compiler
    monkeypatch.setattr(native, "is_built", lambda: True)
    for there, why in (
        (missing, r"there is no g\+\+"),
        (lambda: False, "the processor has no AVX512-BF16"),
    ):
        monkeypatch.setattr(native, "multiplies_many_rows", there)
        with pytest.raises(ValueError, match=f"native = 'on': cannot be had here: {why}"):
            steps_are_native(CONFIG, mesh)
        assert not steps_are_native(dataclasses.replace(CONFIG, native="auto"), mesh)
    with pytest.raises(
        ValueError, match="native = 'on': must be auto or off with compute_dtype = 'float32'"
    ):
        dataclasses.replace(CONFIG, compute_dtype="float32")
    with pytest.raises(ValueError, match="native = 'maybe'"):
        dataclasses.replace(CONFIG, native="maybe")


def test_a_build_is_said_with_its_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "is_built", lambda: False)
    monkeypatch.setattr(native, "multiplies_many_rows", lambda: True)
    with caplog.at_level("INFO"):
        assert steps_are_native(CONFIG, model_configs.mesh_of(1, 1, 1))
    building = "building the native operations, once on this machine"
    begun, done = caplog.messages
    assert begun == f"{building} ..." and re.fullmatch(rf"{building}: \d+\.\d s", done)
