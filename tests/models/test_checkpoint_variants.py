"""Weights as other programs leave them: fused experts, heads beside tied embeddings, other
names, no model at all.
"""

import json
import logging
import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import jmoe
from jmoe.deploy.compress import compress_model
from jmoe.deploy.cut import cut_config, write_cut_model
from jmoe.deploy.model_folder import hugging_face_folder
from jmoe.mesh import make_mesh
from jmoe.models.families import FAMILIES
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from kernels_pallas.compressed import FP8
from tests.checkpoint_variants import Tensors, fused, read_tensors, with_head, write_variant
from tests.compressed_checkpoint import write_compressed_checkpoint
from tests.model_configs import CHECKPOINTS
from tests.models.test_pretrained import arrays_of, stored
from tests.tiny_engines import tiny_engine

TOKENS = np.arange(12, dtype=np.int32)[None]


# ---- fused experts


@pytest.mark.parametrize("family", [n for n, f in FAMILIES.items() if f.fused_tensors])
def test_fused_experts(family: str, tmp_path: Path) -> None:
    """transformers 5 writes a layer's experts as two tensors: read whole, split and one by one;
    saved as published.
    """
    folder = write_variant(CHECKPOINTS / family, tmp_path / "fused", partial(fused, family=family))
    assert not any(".experts.0." in name for name in read_tensors(folder))
    expected, model = (jmoe.load_pretrained(one) for one in (CHECKPOINTS / family, folder))
    for path, array in arrays_of(model).items():
        np.testing.assert_array_equal(array, arrays_of(expected)[path], path)
    jmoe.save_pretrained(model, tmp_path / "saved")
    assert stored(tmp_path / "saved") == stored(CHECKPOINTS / family)
    with LazyCheckpoint(CHECKPOINTS / family) as published, LazyCheckpoint(folder) as lazy:
        for layer, expert in (
            (0, 1),
            (published.config.num_moe_layers - 1, published.config.num_experts - 1),
        ):
            for name, array in published.read_expert(layer, expert).items():
                np.testing.assert_array_equal(lazy.read_expert(layer, expert)[name], array, name)
        assert lazy.routing_fingerprint == published.routing_fingerprint


def test_fused_experts_over_devices_and_cut(tmp_path: Path) -> None:
    folder = write_variant(
        CHECKPOINTS / "mixtral", tmp_path / "fused", partial(fused, family="mixtral")
    )
    mesh = make_mesh((1, 1, 4), jax.devices()[:4])
    expected = arrays_of(jmoe.load_pretrained(CHECKPOINTS / "mixtral"))
    for path, array in arrays_of(jmoe.load_pretrained(folder, mesh=mesh)).items():
        np.testing.assert_array_equal(array, expected[path], path)
    for source, out in ((CHECKPOINTS / "mixtral", "a"), (folder, "b")):
        with LazyCheckpoint(source) as whole:
            config = cut_config(whole.config, (1,), num_experts=3)
            write_cut_model(whole, tmp_path / out, config, (1,), np.array([[0, 2, 3]]))
    assert stored(tmp_path / "a") == stored(tmp_path / "b")
    with pytest.raises(
        ValueError, match=r"experts are fused.*: write it anew first, with jmoe.save_pretrained"
    ):
        compress_model(folder, tmp_path / "out", "int8")


@pytest.mark.parametrize(
    ("kind", "family"),
    [("fp8", "qwen3_moe"), ("fp8 of powers", "deepseek_v3"), ("fp8 of bfloat16", "mixtral")],
)
def test_fused_fp8_experts(kind: str, family: str, tmp_path: Path) -> None:
    """The scales of all experts are one tensor too: whole, split, one by one, and kept as FP8."""
    one, wide = tmp_path / "one", tmp_path / "wide"
    write_compressed_checkpoint(kind, family, one, wide, sizes=(160, 128))

    def change(tensors: Tensors) -> Tensors:
        made = fused(tensors, family)
        layer = next(name for name in made if name.endswith("experts.down_proj"))
        # of quantized activations, which jmoe does not quantize
        return made | {f"{layer}_activation_scale": np.ones(4, np.float32)}

    folder = write_variant(one, tmp_path / "fused", change)
    assert not any(".experts.0." in name for name in read_tensors(folder))
    expected = arrays_of(jmoe.load_pretrained(wide))
    mesh = make_mesh((1, 1, 4), jax.devices()[:4])
    for split in (None, mesh):
        model = jmoe.load_pretrained(folder, dtype="float32", mesh=split)
        for path, array in arrays_of(model).items():
            np.testing.assert_array_equal(array, expected[path], path)
    with LazyCheckpoint(one) as published, LazyCheckpoint(folder) as lazy:
        assert lazy.stored_format is FP8
        layer, last = published.config.num_moe_layers - 1, published.config.num_experts - 1
        for expert in (0, last):
            found, wanted = (
                {name: np.empty(*entry) for name, entry in checkpoint.expert_fields.items()}
                for checkpoint in (lazy, published)
            )
            lazy.fill_expert(layer, expert, found)
            published.fill_expert(layer, expert, wanted)
            for name, array in wanted.items():
                np.testing.assert_array_equal(found[name], array, name)


def test_wrong_scales_of_fused_experts_are_named(tmp_path: Path) -> None:
    one = tmp_path / "one"
    write_compressed_checkpoint("fp8", "qwen3_moe", one, tmp_path / "wide", sizes=(160, 128))
    name = "model.layers.2.mlp.experts.down_proj_scale_inv"

    def cut(tensors: Tensors) -> Tensors:
        made = fused(tensors, "qwen3_moe")
        return made | {name: made[name][:, :1]}

    words = (
        rf"tensor '{name}' is F32 \[4, 1, 1\], must be BF16 or F16 or F32 or F8_E8M0 \[4, 2, 1\]"
    )
    with pytest.raises(ValueError, match=words):
        jmoe.load_pretrained(write_variant(one, tmp_path / "fused", cut))


def test_what_is_missing_of_fused_experts_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made = fused(tensors, "qwen3_moe")
        del made["model.layers.2.mlp.experts.down_proj"]
        return made

    folder = write_variant(CHECKPOINTS / "qwen3_moe", tmp_path / "fused", change)
    words = (
        r"tensor 'model.layers.2.mlp.experts.down_proj' is missing, must have shape \[4, 32, 8\]"
    )
    with pytest.raises(ValueError, match=words):
        jmoe.load_pretrained(folder)


def test_kimi_k2_has_the_tensors_of_deepseek_v3(tmp_path: Path) -> None:
    folder = write_variant(CHECKPOINTS / "deepseek_v3", tmp_path / "kimi", model_type="kimi_k2")
    expected, model = (jmoe.load_pretrained(one) for one in (CHECKPOINTS / "deepseek_v3", folder))
    np.testing.assert_array_equal(model(TOKENS), expected(TOKENS))
    jmoe.save_pretrained(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "kimi_k2"
    with (
        LazyCheckpoint(tmp_path / "saved") as lazy,
        LazyCheckpoint(CHECKPOINTS / "deepseek_v3") as published,
    ):
        assert lazy.routing_fingerprint == published.routing_fingerprint
        config = cut_config(lazy.config, (0, 1))
        write_cut_model(lazy, tmp_path / "cut", config, (0, 1), np.arange(config.num_experts)[None])
    assert jmoe.load_pretrained(tmp_path / "cut").config.num_hidden_layers == 2


# ---- heads


def test_a_stored_head_counts_where_it_differs_from_a_tied_embedding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The flag may be a default, or left by a merge; transformers 5 keeps both tensors too."""
    tied = write_variant(
        CHECKPOINTS / "mixtral", tmp_path / "tied", with_head, tie_word_embeddings=True
    )
    untied = write_variant(
        CHECKPOINTS / "mixtral", tmp_path / "untied", with_head, tie_word_embeddings=False
    )
    with caplog.at_level(logging.WARNING):
        model = jmoe.load_pretrained(tied)
    assert (
        "tie_word_embeddings = True, but the weights have a head that differs: it is used"
        in caplog.text
    )
    expected = np.asarray(jmoe.load_pretrained(untied)(TOKENS))
    np.testing.assert_array_equal(model(TOKENS), expected)
    assert (
        np.abs(expected - np.asarray(jmoe.load_pretrained(CHECKPOINTS / "mixtral")(TOKENS))).max()
        > 1
    )
    with LazyCheckpoint(tied) as checkpoint:
        assert not checkpoint.config.tie_word_embeddings
        np.testing.assert_array_equal(
            checkpoint.load_dense_arrays()["head",], model.decoder.head[...]
        )
    jmoe.save_pretrained(model, tmp_path / "saved")
    assert (
        json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    assert stored(tmp_path / "saved") == stored(tied)


def test_an_equal_head_stays_tied(tmp_path: Path) -> None:
    def again(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}

    folder = write_variant(CHECKPOINTS / "mixtral", tmp_path / "equal", again)
    model = jmoe.load_pretrained(folder)
    assert model.config.tie_word_embeddings and model.decoder.head is None


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = write_variant(CHECKPOINTS / "mixtral", tmp_path / "model", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"tensor .lm_head.weight. is missing, must have shape"):
        jmoe.load_pretrained(folder)


# ---- other names and sizes


def test_a_model_of_images_and_text_is_named(tmp_path: Path) -> None:
    for old, new in (("model.", "model.language_model."), ("model.", "language_model.model.")):
        folder = write_variant(
            CHECKPOINTS / "qwen3_moe",
            tmp_path / new,
            lambda tensors, old=old, new=new: {
                name.replace(old, new, 1): array for name, array in tensors.items()
            },
        )
        with pytest.raises(
            ValueError,
            match=rf"is missing, and lies under '{new}', as in a model of images and text",
        ):
            jmoe.load_pretrained(folder)


def test_further_layers_and_padded_vocabularies_are_refused(tmp_path: Path) -> None:
    def predicting(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return tensors | {"mtp.fc.weight": np.ones((4, 4), np.float32)}

    def padded(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        name = "model.embed_tokens.weight"
        return tensors | {name: np.pad(tensors[name], [(0, 8), (0, 0)])}

    for change, message in (
        (predicting, "tensor 'mtp.fc.weight' is unexpected"),
        (padded, r"'model.embed_tokens.weight' has shape \[72, 32\], must have \[64, 32\]"),
    ):
        folder = write_variant(CHECKPOINTS / "mixtral", tmp_path / change.__name__, change)
        with pytest.raises(ValueError, match=message):
            jmoe.load_pretrained(folder)


# ---- no model


def test_what_is_no_model_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every command that takes a MODEL, and in `load_pretrained`."""
    monkeypatch.chdir(tmp_path)
    hub = (
        r"a model of the Hub must be here first: hf download Qwen/Qwen3-30B-A3B --local-dir"
        r" Qwen3-30B-A3B"
    )
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "model-q4_0.gguf").write_bytes(b"GGUF")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    gguf = "a GGUF file is given itself, not its folder: serve.py FILE.gguf"
    adapter = "an adapter is no model: give the folder"
    for model, message in (
        ("Qwen/Qwen3-30B-A3B", hub),
        ("ggufs", gguf),
        ("lora", adapter),
    ):
        with pytest.raises(ValueError, match=rf"{model}/config.json: is missing; {message}"):
            jmoe.load_pretrained(model)
    for model, message in (
        ("Qwen/Qwen3-30B-A3B", hub),
        ("runs/tiny", r"a model of the Hub must be here first"),
        (str(tmp_path / "none"), "`make train` leaves a model in runs/tiny"),
    ):
        with (
            pytest.raises(ValueError, match=rf"MODEL = '{model}': must be a folder; {message}"),
            hugging_face_folder(model, print, "MODEL"),
        ):
            pass


def test_weights_of_pytorch_alone_are_refused(tmp_path: Path) -> None:
    shutil.copy(CHECKPOINTS / "mixtral" / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(
        ValueError, match=r"has neither model.safetensors nor model.safetensors.index.json"
    ):
        jmoe.load_pretrained(tmp_path)


# ---- positions


@pytest.mark.slow  # test_rotary.py has the frequencies
def test_scaled_positions_cached_and_streamed(tmp_path: Path) -> None:
    """Tokens generated from a cache are those that the whole sequence, run at once, prefers;
    experts from host memory give the same, and the scaling counts.
    """
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    plain = CHECKPOINTS / "qwen3_moe"
    folder = write_variant(plain, tmp_path / "scaled", rope_scaling=llama3, rope_parameters=...)
    options = {"max_new_tokens": 12, "ignore_eos": True, "logprobs": 1}
    prompt = TOKENS[0].tolist()
    with tiny_engine(folder, policy="resident") as engine:
        [found] = engine.generate([prompt], **options)
    with tiny_engine(folder, policy="ring", ring_slots=1) as engine:
        [streamed] = engine.generate([prompt], **options)
    assert (streamed.token_ids, streamed.logprobs) == (found.token_ids, found.logprobs)
    tokens = np.array([prompt + found.token_ids], np.int32)
    model = jmoe.load_pretrained(folder, dtype="float32")
    before_SV = np.asarray(model(tokens))[0, len(prompt) - 1 : -1]
    chosen = np.take_along_axis(before_SV, np.array(found.token_ids)[:, None], 1)[:, 0]
    assert (before_SV.max(axis=1) - chosen).max() < 1e-4
    unscaled = jmoe.load_pretrained(plain, dtype="float32")(tokens)
    assert np.abs(np.asarray(unscaled)[0, len(prompt) - 1 : -1] - before_SV).max() > 1e-2
