"""Pruning: scores against plain numpy, a useless expert, folders that everything reads, and bad
input.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import jmoe
from jmoe.config import RouterConfig
from jmoe.config.engine import EngineConfig
from jmoe.deploy import prune as stage
from jmoe.deploy.calibration_text import read_calibration_text
from jmoe.deploy.expert_scores import ExpertScores, best_experts, measure_experts
from jmoe.deploy.layerwise import mean_loss
from jmoe.deploy.prune import PruneOptions, prune
from jmoe.deploy.similar import align_hidden_units, assign_dropped_experts
from jmoe.inference.engine import Engine
from jmoe.models.huggingface import hf_config
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from tests.damage import poison
from tests.deploy.gpt_moe_models import gpt_moe_config, in_numpy, random_model, stored_arrays
from tests.model_configs import CHECKPOINTS

LENGTH, VOCABULARY = 16, 64
TEXT = "".join(
    chr(97 + n % 23) + " " * (n % 7 == 0)
    for n in np.random.default_rng(5).integers(0, 400, 3000).tolist()
)


def write_tokenizer(folder: Path) -> None:
    """A character a token."""
    vocabulary = {
        c: i for i, c in enumerate(["<|endoftext|>", *(chr(97 + i) for i in range(26)), "Ġ"])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two choices of four experts; expert 2 of layer 1 makes nothing."""
    model = random_model(gpt_moe_config(router=RouterConfig(kind="gshard"), num_experts_per_tok=2))
    experts = model.decoder.moe_layers.moe.experts
    for parameter in (experts.w_down, experts.b_down):
        parameter[...] = parameter[...].at[1, 2].set(0.0)
    path = tmp_path_factory.mktemp("gpt_moe") / "model"
    jmoe.save_pretrained(model, path, eos_token_id=0)
    write_tokenizer(path)
    return path


def options(text: str, **changes: Any) -> PruneOptions:
    return PruneOptions(
        **({"experts": 3, "text": text, "sequence_length": LENGTH, "max_tokens": 900} | changes)
    )


def test_scores_are_those_of_plain_numpy(folder: Path, text: str) -> None:
    windows = read_calibration_text(
        folder, text, VOCABULARY, length=LENGTH, max_tokens=300
    ).calibration_BS
    with LazyCheckpoint(folder, "float32") as checkpoint:
        scores = measure_experts(checkpoint, windows)
        loss, config = mean_loss(checkpoint, windows), checkpoint.config
    weights, losses = stored_arrays(folder), []
    use, strength = np.zeros((3, 4)), np.zeros((3, 4))
    for row in windows:
        logits, routed = in_numpy(config, weights, row[:-1])
        top = logits.max(axis=-1)
        losses.append(
            top
            + np.log(np.exp(logits - top[:, None]).sum(axis=-1))
            - logits[np.arange(LENGTH), row[1:]]
        )
        for layer, (gates_TE, outputs_TED) in enumerate(routed):
            use[layer] += (gates_TE > 0).sum(axis=0)
            strength[layer] += (gates_TE * np.linalg.norm(outputs_TED, axis=-1)).sum(axis=0)
    # near-ties
    assert use.sum() == 2 * 3 * windows[:, 1:].size and np.abs(use - scores.use).sum() <= 4
    np.testing.assert_allclose(scores.reap, strength / np.maximum(use, 1), rtol=2e-2, atol=1e-6)
    np.testing.assert_allclose(scores.reap[1, 2], 0.0, atol=1e-6)
    assert loss == pytest.approx(np.concatenate(losses).mean(), abs=1e-4)


def test_a_useless_expert_is_dropped(folder: Path, text: str, tmp_path: Path) -> None:
    """Nothing else of the model changes; the router has no row for it, and what is measured is
    what the folder says.
    """
    said: list[str] = []
    done = prune(folder, tmp_path / "out", options(text), said.append)
    whole, small = stored_arrays(folder), stored_arrays(tmp_path / "out")
    gate = "model.layers.1.mlp.gate.weight"
    np.testing.assert_array_equal(small[gate], whole[gate][[0, 1, 3]])
    moved = "model.layers.1.mlp.experts.{}.up_proj.weight"
    np.testing.assert_array_equal(small[moved.format(2)], whole[moved.format(3)])
    assert all(np.array_equal(small[name], whole[name]) for name in whole if "mlp" not in name)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["num_experts"], fields["eos_token_id"], fields["model_type"]) == (
        3,
        0,
        "gpt_moe",
    )
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        folder / "tokenizer.json"
    ).read_bytes()

    model = jmoe.load_pretrained(tmp_path / "out")
    measured = read_calibration_text(folder, text, VOCABULARY, length=LENGTH, max_tokens=900)
    logits = np.asarray(model(measured.held_out_BS[:, :-1]), np.float64)
    labels = measured.held_out_BS[:, 1:]
    nll = (
        np.log(np.exp(logits).sum(axis=-1))
        - np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    )
    # a character a token
    assert done.bits_per_byte_after == pytest.approx(nll.sum() / np.log(2) / labels.size, rel=1e-4)
    assert done.bytes_after < done.bytes_before and any(
        "held-out loss of 3 experts" in line for line in said
    )
    with Engine(
        tmp_path / "out", EngineConfig(max_batch=1, max_seq_len=24, policy="ring", ring_slots=1)
    ) as engine:
        assert len(engine.generate(["abc"], max_new_tokens=4, ignore_eos=True)[0].token_ids) == 4


@pytest.mark.parametrize(
    "name", [pytest.param("deepseek_v3", marks=pytest.mark.slow), "gpt_oss_mxfp4"]
)
def test_every_family(name: str, text: str, tmp_path: Path) -> None:
    """Groups lose equally many; shared experts, biases, correction biases and dense layers stay."""
    shutil.copytree(CHECKPOINTS / name, tmp_path / "model")
    fields = json.loads((CHECKPOINTS / name / "config.json").read_text()) | {
        "num_experts_per_tok": 2
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    write_tokenizer(tmp_path / "model")
    before = jmoe.load_pretrained(tmp_path / "model", dtype="float32").config
    kept = before.num_experts // 2
    prune(
        tmp_path / "model",
        tmp_path / "out",
        options(text, experts=kept, score="usage", max_tokens=200),
        lambda _: None,
    )
    after = jmoe.load_pretrained(tmp_path / "out", dtype="float32")
    assert after.config.num_experts == kept and after.config.layer_kinds == before.layer_kinds
    assert hf_config(after.config)["model_type"] == fields["model_type"]
    assert np.isfinite(np.asarray(after(np.arange(12, dtype=np.int32)[None]))).all()


def test_merged_experts(folder: Path, text: str, tmp_path: Path) -> None:
    """A copy with another order of hidden units merges into its like, which it does not change."""
    model = jmoe.load_pretrained(folder)
    moe = model.decoder.moe_layers.moe
    order = np.random.default_rng(0).permutation(64)
    for name, axis in (("w_up", -1), ("b_up", -1), ("w_down", 0)):
        parameter = getattr(moe.experts, name)
        parameter[...] = (
            parameter[...]
            .at[:, 3]
            .set(jnp.take(parameter[...][:, 0], order, axis=axis % (parameter[...].ndim - 2) + 1))
        )
    moe.experts.b_down[...] = moe.experts.b_down[...].at[:, 3].set(moe.experts.b_down[...][:, 0])
    kernel = moe.router.kernel
    kernel[...] = kernel[...].at[:, :, 3].set(0.9 * kernel[...][:, :, 0])
    jmoe.save_pretrained(model, tmp_path / "twins")
    write_tokenizer(tmp_path / "twins")
    for merged in (False, True):
        prune(
            tmp_path / "twins",
            tmp_path / str(merged),
            options(text, experts=2, merge_similar=merged),
            lambda _: None,
        )
    plain, mixed = stored_arrays(tmp_path / "False"), stored_arrays(tmp_path / "True")
    assert plain.keys() == mixed.keys()
    changed = {name for name in plain if not np.array_equal(plain[name], mixed[name])}
    assert changed and all("mlp.experts" in name for name in changed)
    with LazyCheckpoint(tmp_path / "twins", "float32") as checkpoint:
        first, twin = checkpoint.read_expert(0, 0), checkpoint.read_expert(0, 3)
        assert not np.array_equal(first["w_up"], twin["w_up"])
        again = align_hidden_units(first, twin)
        assert all(np.array_equal(first[name], again[name]) for name in first)
    assert assign_dropped_experts(np.asarray(kernel[...])[0], np.array([0, 1]))[0].count(3) == 1


def test_groups_that_would_be_too_small(text: str, tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINTS / "deepseek_v3", tmp_path / "model")
    message = (
        "experts = 4: leaves 2 experts in a token's groups: must leave num_experts_per_tok = 3"
    )
    with pytest.raises(ValueError, match=message):
        prune(tmp_path / "model", tmp_path / "out", options(text, experts=4), lambda _: None)
    with pytest.raises(
        ValueError, match="experts = 6: must be a multiple of the router's n_group = 4"
    ):
        prune(tmp_path / "model", tmp_path / "out", options(text, experts=6), lambda _: None)


def test_which_experts_are_best() -> None:
    scores = np.array([[1.0, 4.0, 4.0, 0.0, 9.0, 8.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]])
    assert best_experts(scores, 3).tolist() == [[1, 4, 5], [0, 1, 2]]
    assert best_experts(scores, 4, n_group=2).tolist() == [[1, 2, 4, 5], [0, 1, 3, 4]]
    tally = ExpertScores(np.array([[4, 0]]), np.array([[2.0, 0.0]]))
    assert tally.scores_of("reap").tolist() == [[0.5, 0.0]]
    assert tally.scores_of("usage").tolist() == [[4.0, 0.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 5}, "experts = 5: must not exceed the model's num_experts = 4"),
        ({"experts": 1}, "experts = 1: must be at least num_experts_per_tok = 2"),
        ({"max_tokens": 20}, "max_tokens = 20: must be at least 34, two windows of 16 tokens"),
        ({"max_tokens": -5}, "max_tokens = -5: must be at least 34"),
        ({"sequence_length": 1}, "sequence_length = 1: must be at least 2"),
        ({"text": "nowhere.txt"}, "text = 'nowhere.txt': no such file or folder"),
    ],
)
def test_bad_input(
    changes: dict[str, Any], message: str, folder: Path, text: str, tmp_path: Path
) -> None:
    changed = options(**({"text": text} | changes))
    with pytest.raises(ValueError, match=re.escape(message)):
        prune(folder, tmp_path / "out", changed, lambda _: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        ("model.layers.1.mlp.experts.2.up_proj.weight", "expert 2 of layer 1"),
        ("model.layers.1.mlp.gate.weight", "layer 1"),
        ("model.embed_tokens.weight", "layer 0"),
    ],
)
def test_a_model_with_a_weight_that_is_no_number(
    tensor: str, part: str, folder: Path, text: str, tmp_path: Path
) -> None:
    """Scores that are no numbers would drop any experts."""
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    poison(damaged, 1, tensor)
    with pytest.raises(ValueError, match=f"damaged: {part}: its values for this text are not fin"):
        prune(damaged, tmp_path / "out", options(text), lambda _: None)
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    arguments = [str(folder), "--experts", "3", "--sequence-length", "16", "--text", str(empty)]
    with pytest.raises(
        ValueError, match=r"out = .*: must be an empty folder or none: nothing is written over"
    ):
        stage.main([*arguments, "--out", str(tmp_path / "out")])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes"]
    with pytest.raises(ValueError, match="empty"):
        stage.main([*arguments, "--out", str(tmp_path / "new")])
    empty.write_bytes(b"ab\xff" * 100)
    with pytest.raises(
        ValueError,
        match=r"^text: 1 problem.*\n.*empty.txt: not UTF-8 at byte 2: invalid start byte$",
    ):
        stage.main([*arguments, "--out", str(tmp_path / "new")])
    empty.write_text("hello there")
    with pytest.raises(
        ValueError,
        match=r"text = .*: has \d+ tokens: must be at least 34, two windows of 16 tokens",
    ):
        stage.main([*arguments, "--out", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()
