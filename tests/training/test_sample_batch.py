"""Training on rows of samples: padding changes nothing, several samples in a row are as each alone,
and the loss counts the tokens to learn.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import DataConfig, MeshConfig, TiersConfig, TrainConfig
from jmoe.configs import PRESETS
from jmoe.data.sample_rows import SampleRows, empty_rows, rows_of_windows, stack_rows
from jmoe.training.finetune import load_pretrained_state, with_pretrained_model
from jmoe.training.fused.step import FusedTrainer
from jmoe.training.session import place_batch
from jmoe.training.state import TrainState
from jmoe.training.trainer import Trainer, make_trainer
from jmoe.types import PyTree
from tests.arrays import full_state
from tests.model_configs import CHECKPOINTS, MODEL, OPTIMIZER, mesh_of

S = 12
CONFIG = TrainConfig(
    model=MODEL,
    optimizer=OPTIMIZER,
    batch_size=2,
    sequence_length=S,
    num_steps=10,
    compute_dtype="float32",
)
RNG = np.random.default_rng(0)


def document(length: int, first_trained: int, vocab_size: int = 64) -> tuple[np.ndarray, int]:
    """Tokens, and the number of the first to learn."""
    return RNG.integers(0, vocab_size, length).astype(np.int32), first_trained


def row(*documents: tuple[np.ndarray, int], length: int = S, pad: int = 0) -> SampleRows:
    """One row of these documents, and padding."""
    rows, begin = empty_rows((), length, pad), 0
    for number, (tokens, first_trained) in enumerate(documents, 1):
        end = begin + len(tokens)
        rows.tokens[begin:end] = tokens
        rows.weights[begin + first_trained - 1 : end - 1] = 1
        rows.documents[begin : end - 1] = number
        begin = end
    return rows


def batch(rows: Sequence[SampleRows], steps: int = 1) -> PyTree:
    """A step's batch of these rows in `steps` accumulation steps."""
    stacked = stack_rows(rows)
    return jax.tree.map(lambda a: jnp.asarray(a.reshape(steps, -1, a.shape[-1])), stacked)


def pretrained(name: str, **changes: Any) -> TrainConfig:
    _, tiny = PRESETS["tiny"]
    changes = {"batch_size": 2, "sequence_length": S, "compute_dtype": "float32"} | changes
    return with_pretrained_model(
        dataclasses.replace(tiny, init_from=str(CHECKPOINTS / name), **changes)
    )


def without_router_losses(config: TrainConfig) -> TrainConfig:
    router = dataclasses.replace(config.model.router, aux_loss_coef=0.0, z_loss_coef=0.0)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, router=router))


@functools.cache
def gradient_program(config: TrainConfig) -> Callable[[PyTree], tuple[PyTree, dict[str, Any]]]:
    """A function of a batch that returns the gradients and metrics of one step on one device."""
    trainer = make_trainer(config, mesh_of(1, 1, 1))
    assert isinstance(trainer, FusedTrainer)
    state = load_pretrained_state(trainer, config) if config.init_from else trainer.init()
    run = trainer.shard_over_mesh(
        lambda state, rows: trainer.gradients_local(state, rows, full_capacity=False),
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
    )
    program = jax.jit(run)
    return lambda rows: jax.device_get(program(state, rows))


def assert_close(a: PyTree, b: PyTree, tolerance: float = 1e-5) -> None:
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=name)


LEARNED = dataclasses.replace(MODEL, position="learned", max_position_embeddings=32)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(pretrained("mixtral"), id="window", marks=pytest.mark.slow),
        pytest.param(pretrained("gpt_oss_mxfp4"), id="sinks", marks=pytest.mark.slow),
        pytest.param(pretrained("deepseek_v3"), id="latents", marks=pytest.mark.slow),
        pytest.param(
            dataclasses.replace(CONFIG, model=LEARNED),
            id="learned positions",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_documents_in_a_row_are_as_each_alone(config: TrainConfig) -> None:
    """The gradient of a packed batch is the mean of the documents' own, weighted by their tokens to
    learn; each of these is of a text of that length without samples.
    """
    config = without_router_losses(config)
    documents = [document(n, 1) for n in (4, 9, 9)]
    packed, metrics = gradient_program(config)(batch([row(*documents[:2]), row(documents[2])]))
    total = sum(len(tokens) - 1 for tokens, _ in documents)
    expected: PyTree = None
    loss = 0.0
    for tokens, _ in documents:
        size = {"sequence_length": len(tokens) - 1, "batch_size": 1}
        alone_program = gradient_program(dataclasses.replace(config, **size))
        alone, own = alone_program(jnp.asarray(tokens)[None, None])
        share = (len(tokens) - 1) / total
        loss += share * float(own["loss"])
        scaled = jax.tree.map(lambda g, share=share: share * g, alone)
        expected = scaled if expected is None else jax.tree.map(jnp.add, expected, scaled)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert (metrics["tokens"], metrics["trained_tokens"]) == (total, total)
    assert_close(packed, expected)


@pytest.mark.slow  # documents of samples, above, are quick
def test_documents_of_text_are_as_each_alone() -> None:
    """Of windows that begin within a document, or with one: gradient, loss and held-out loss are
    the means over the documents alone, by their tokens; every token is a target.
    """
    eot, lengths = 63, ((4, 8), (8, 4))
    assert all(sum(window) == S for window in lengths)
    draw = np.random.default_rng(4).integers
    texts = [[draw(0, eot, n + 1).astype(np.int32) for n in window] for window in lengths]
    tokens = np.empty((2, S + 1), np.int32)
    for own, window, begins_with in zip(texts, tokens, (False, True), strict=True):
        for number, text in enumerate(own):
            text[0] = eot if number or begins_with else text[0]
            text[-1] = eot  # what the next document begins with
        window[:] = np.concatenate([*(text[:-1] for text in own), own[-1][-1:]])
    config = without_router_losses(
        dataclasses.replace(CONFIG, data=DataConfig(mask_documents=True))
    )
    rows = rows_of_windows(tokens, np.ones((2, S), np.float32), eot)
    packed, metrics = gradient_program(config)(batch([SampleRows(*row) for row in zip(*rows)]))
    expected, nll = jax.tree.map(np.zeros_like, packed), 0.0
    for text in itertools.chain(*texts):
        size = {"sequence_length": len(text) - 1, "batch_size": 1, "data": DataConfig()}
        alone = gradient_program(dataclasses.replace(config, **size))
        grads, own_metrics = alone(jnp.asarray(text)[None, None])
        share = (len(text) - 1) / (2 * S)
        expected = jax.tree.map(lambda a, g, n=share: a + n * g, expected, grads)
        nll += (len(text) - 1) * float(own_metrics["loss"])
    assert_close(packed, expected)
    assert metrics["loss"] == pytest.approx(nll / (2 * S), abs=1e-5)
    assert (metrics["tokens"], metrics["trained_tokens"]) == (2 * S, 2 * S)
    trainer = make_trainer(config, mesh_of(1, 1, 1))
    (held_out,) = trainer.evaluate_batches(trainer.init(), [jax.tree.map(jnp.asarray, rows)])
    assert float(held_out) == pytest.approx(nll, rel=1e-5)
    assert_close(gradients_on_two_devices(config, rows), expected)


def gradients_on_two_devices(config: TrainConfig, rows: SampleRows) -> PyTree:
    """The gradients of rows that lie on two devices, by AdamW's first moments after one step."""
    unclipped = dataclasses.replace(config.optimizer, clip_norm=0.0)
    mesh = mesh_of(1, 1, 2)
    config = dataclasses.replace(config, mesh=MeshConfig(1, 1, 2, 2), optimizer=unclipped)
    trainer = make_trainer(config, mesh)
    batch = place_batch(config, mesh, rows)
    state, metrics = trainer.step(trainer.init(), batch, full_capacity=True)
    assert metrics["ok"]
    moments = trainer.prepare_state_for_save(state).m
    return jax.tree.map(lambda m: np.asarray(m) / (1 - unclipped.beta1), moments)


def one_step(config: TrainConfig, rows: PyTree, shape: tuple[int, int, int] = (1, 1, 1)) -> Any:
    """(the state after one step, its metrics, the held-out loss of the same rows)."""
    with contextlib.closing(make_trainer(config, mesh_of(*shape))) as trainer:
        state, metrics = trainer.step(trainer.init(), rows)
        if metrics["overflow"]:
            state, metrics = trainer.step(trainer.init(), rows, full_capacity=True)
        assert metrics["ok"]
        metrics = jax.device_get(metrics)
        held_out = held_out_loss(trainer, state, rows)
        return full_state(trainer, state), metrics, held_out


def held_out_loss(trainer: Trainer, state: TrainState, rows: SampleRows) -> float:
    first = jax.tree.map(lambda a: a[0], rows)
    return float(trainer.evaluate_batches(state, [first])[0])


def compare(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    (state, metrics, held_out), (other_state, other_metrics, other_held_out) = a, b
    assert_close(state.params, other_state.params, tolerance)
    np.testing.assert_array_equal(
        jax.tree.leaves(state.router_bias), jax.tree.leaves(other_state.router_bias)
    )
    for name in ("loss", "balance_loss", "z_loss", "counts", "entropy", "dropped", "tokens"):
        np.testing.assert_allclose(
            metrics[name], other_metrics[name], rtol=tolerance, atol=1e-6, err_msg=name
        )
    assert metrics["trained_tokens"] == other_metrics["trained_tokens"]
    assert held_out == pytest.approx(other_held_out, abs=1e-4)


PROMPTED = [document(6, 3), document(9, 3), document(9, 7)]


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_padding_changes_nothing(packed: bool) -> None:
    """Every loss, the router's bias, what is counted and the update are those of the same samples
    without padding, whatever token pads; prompts go to experts.
    """
    config = dataclasses.replace(CONFIG, data=DataConfig(path=("x",), pack_samples=packed))
    tight = one_step(
        dataclasses.replace(config, sequence_length=8),
        batch([row(one, length=8) for one in PROMPTED[1:]]),
    )
    wide = one_step(
        dataclasses.replace(config, batch_size=4),
        batch([*(row(one, pad=7) for one in PROMPTED[1:]), row(pad=9), row(pad=5)]),
    )
    compare(tight, wide)
    assert (tight[1]["tokens"], tight[1]["trained_tokens"]) == (16, 8)
    # the load counts what experts compute
    assert wide[1]["counts"].sum(axis=1).tolist() == [16] * 3


def test_prompts_are_in_no_router_loss() -> None:
    """Both router losses are those of the tokens to learn alone."""
    config = dataclasses.replace(CONFIG, sequence_length=8)
    tokens, _ = PROMPTED[2]
    program = gradient_program(config)
    whole_row = row((tokens, 1), length=8)
    answer_row = row((tokens, 7), length=8)
    prompt_row = answer_row._replace(weights=1 - answer_row.weights)
    whole, answer, prompt = (
        program(batch([one, row(length=8)]))[1] for one in (whole_row, answer_row, prompt_row)
    )
    sizes = [metrics["trained_tokens"] for metrics in (whole, answer, prompt)]
    assert sizes == [8, 2, 6]
    for name in ("z_loss", "entropy", "loss"):  # means over the tokens to learn
        expected = (2 * answer[name] + 6 * prompt[name]) / 8
        np.testing.assert_allclose(whole[name], expected, rtol=1e-5, err_msg=name)
        assert np.abs(answer[name] - prompt[name]).max() > 1e-5
    assert abs(answer["balance_loss"] - prompt["balance_loss"]) > 1e-4
    for metrics in (answer, prompt):
        np.testing.assert_array_equal(metrics["counts"], whole["counts"])


PACKED = [
    row(*PROMPTED[:1], document(7, 2)),
    row(PROMPTED[2]),
    row(document(13, 4)),
    row(document(4, 2)),
]
ACCUMULATING = dataclasses.replace(CONFIG, batch_size=4, gradient_accumulation_steps=2)


@pytest.fixture(scope="module")
def on_one_device() -> Any:
    return one_step(ACCUMULATING, batch(PACKED, 2))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 1, 1), (2, 2, 1)])
def test_on_devices(shape: tuple[int, int, int], on_one_device: Any) -> None:
    compare(one_step(ACCUMULATING, batch(PACKED, 2), shape), on_one_device)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 2)])
def test_with_experts_on_the_host(shape: tuple[int, int, int], on_one_device: Any) -> None:
    streamed = dataclasses.replace(
        ACCUMULATING, tiers=TiersConfig(experts="host", optimizer="host")
    )
    compare(one_step(streamed, batch(PACKED, 2), shape), on_one_device)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["experts", "layer"])
def test_recomputed(remat: Any, on_one_device: Any) -> None:
    config = dataclasses.replace(ACCUMULATING, remat=remat)
    compare(one_step(config, batch(PACKED, 2)), on_one_device)
    streamed = dataclasses.replace(config, tiers=TiersConfig(experts="host", optimizer="host"))
    compare(one_step(streamed, batch(PACKED, 2)), on_one_device)
