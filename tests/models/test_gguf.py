"""GGUF files as llama.cpp writes them: logits of transformers on the widened weights, types that
stay compressed, the tokenizer, and what is refused. The files: fixtures/make_gguf.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jmoe
from jmoe.config.engine import EngineConfig
from jmoe.deploy.model_folder import hugging_face_folder
from jmoe.inference.engine import Engine
from jmoe.models.chat_template import read_templates
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.tokenizer_file import open_tokenizer
from kernels_pallas.formats import INT4, INT8, MXFP4

gguf = pytest.importorskip("gguf")
from jmoe.models.gguf.config import config_fields  # noqa: E402
from jmoe.models.gguf.file import GgufFile, part_files, read_gguf  # noqa: E402
from jmoe.models.gguf.folder import gguf_folder  # noqa: E402
from jmoe.models.gguf.formats import GgufBlocks, block_bytes  # noqa: E402
from jmoe.models.gguf.names import layer_source  # noqa: E402
from jmoe.models.gguf.tokenizer import gguf_tokenizer  # noqa: E402
from jmoe.models.weight_files import read_weight_headers  # noqa: E402

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gguf"
TEXTS = ["def read(x):\n    return 12345", "It's  the\tthe end.\n\n", "naïve <|im_start|>user"]
FILES = ("qwen3moe", "olmoe", "glm4moe", "gpt-oss")
# experts in memory: as the file has them, and with --expert-dtype
KEPT = {"gpt-oss": (MXFP4, "mxfp4"), "olmoe": (INT4, "int4"), "glm4moe": (INT8, "int8")}


def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / name / "reference.npz") as arrays:
        return {key: arrays[key] for key in arrays}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a fixture's file."""
    return gguf_folder(FIXTURES / request.param / "model.gguf", tmp_path)


@pytest.mark.parametrize("folder", FILES, indirect=True)
def test_logits_of_the_widened_model(folder: Path, request: pytest.FixtureRequest) -> None:
    ref = reference(request.node.callspec.params["folder"])
    model = jmoe.load_pretrained(folder, dtype="float32")
    logits = model(ref["input_ids"].astype(np.int32))
    np.testing.assert_allclose(np.asarray(logits), ref["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_an_engine_serves_the_file(name: str, tmp_path: Path) -> None:
    """By `serve.py`'s way to a folder, with the dtypes of the file, streamed as resident."""
    answers = []
    with hugging_face_folder(FIXTURES / name / "model.gguf", print, cache_dir=tmp_path) as folder:
        for policy in ("resident", "ring"):
            options = {"policy": policy, "max_batch": 2, "max_seq_len": 32}
            with Engine(folder, EngineConfig(**options)) as engine:
                answers.append(engine.generate([[5, 6, 7, 8]], max_new_tokens=6))
    assert answers[0] == answers[1] and answers[0][0].token_ids


@pytest.mark.parametrize("name", KEPT)
def test_experts_stay_compressed(name: str, tmp_path: Path) -> None:
    """MXFP4 exactly, integers with scales rounded to bfloat16, if asked for."""
    kind, option = KEPT[name]
    folder = gguf_folder(FIXTURES / name / "model.gguf", tmp_path)
    with LazyCheckpoint(folder, "float32") as plain:
        assert plain.stored_format is (MXFP4 if kind is MXFP4 else None)
        assert ("no format in memory holds" in plain.expert_conversion) == (kind is not MXFP4)
        wide = plain.read_expert(0, 1)
    with LazyCheckpoint(folder, "float32", option) as kept:
        assert kept.expert_format is kind
        rounded = "their scales are rounded to bfloat16"
        assert kept.expert_conversion.endswith("" if kind is MXFP4 else rounded)
        views = {n: np.empty(s, d) for n, (s, d) in kept.expert_fields.items()}
        kept.fill_expert(0, 1, views)
    for field in ("w_up", "w_down"):
        found = decoded(views[field], views[f"{field}_scales"], kind.name)
        close = 0 if kind is MXFP4 else 2**-8
        np.testing.assert_allclose(found, wide[field], rtol=close, atol=1e-7)


def decoded(values: np.ndarray, scales: np.ndarray, kind: str) -> np.ndarray:
    """The float matrix [in, out] of an expert in memory."""
    if kind == "int8":
        numbers = values.astype(np.float32)
    else:
        codes = np.stack([values & 15, values >> 4], axis=1).reshape(-1, values.shape[1])
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        numbers = codes - 8.0 if kind == "int4" else np.concatenate([table, -table])[codes]
    if kind == "mxfp4":
        factors = 2.0 ** (scales.astype(np.float64) - 127)
    else:
        factors = (scales.astype(np.uint32) << 16).view(np.float32)
    result: np.ndarray = numbers * np.repeat(factors, 32, axis=0)
    return result


@pytest.mark.parametrize("folder", FILES, indirect=True)
def test_tokens_and_template(folder: Path, request: pytest.FixtureRequest) -> None:
    """Of transformers' class for the same vocabulary; the template and end token of the file."""
    ref = reference(request.node.callspec.params["folder"])
    tokenizer = open_tokenizer(folder / "tokenizer.json")
    for i, text in enumerate(TEXTS):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == ref[f"ids_{i}"].tolist(), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    templates = read_templates(folder)
    assert templates is not None and "<|im_start|>" in templates["templates"]["default"]
    with LazyCheckpoint(folder, "float32") as checkpoint:
        assert checkpoint.eos_token_ids == (tokenizer.token_to_id("<|im_end|>"),)


def test_a_tokenizer_beside_the_file_comes_first(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "olmoe" / "model.gguf", tmp_path / "x.gguf")
    text = gguf_tokenizer(read_gguf(tmp_path / "x.gguf")).to_str()
    (tmp_path / "tokenizer.json").write_text(text + "\n")
    folder = gguf_folder(tmp_path / "x.gguf")
    assert folder == tmp_path / "x.gguf.jmoe"
    assert (folder / "tokenizer.json").read_text() == text + "\n"
    assert not (folder / "tokenizer_config.json").exists()
    assert gguf_folder(tmp_path / "x.gguf") == folder  # written once


def changed(name: str, **changes: Any) -> GgufFile:
    """A fixture's file with other metadata; `...` removes a key."""
    file = read_gguf(FIXTURES / name / "model.gguf")
    metadata = {key: changes.get(key, value) for key, value in file.metadata.items()} | changes
    kept = {key: value for key, value in metadata.items() if value is not ...}
    return GgufFile(file.path, kept, file.tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "deepseek2"}, "architecture = 'deepseek2': must be one of qwen3"),
        ({"qwen3moe.logit_scale": 2.0}, "qwen3moe.logit_scale = 2.0: is not known"),
        (
            {"qwen3moe.rope.scaling.type": "longrope"},
            "rope.scaling.type = 'longrope': must be yarn",
        ),
        ({"qwen3moe.attention.value_length": 8}, "value_length = 8: must be attention.key_length"),
        ({"qwen3moe.expert_count": ...}, "qwen3moe.expert_count = None: is missing"),
    ],
)
def test_metadata_that_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_fields(changed("qwen3moe", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model = 'llama': must be gpt2"),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre = 'viking': must be one of default"),
    ],
)
def test_tokenizers_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gguf_tokenizer(changed("olmoe", **changes))


def test_files_that_are_refused(tmp_path: Path) -> None:
    source = FIXTURES / "olmoe" / "model.gguf"
    short = tmp_path / "short.gguf"
    short.write_bytes(source.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"short\.gguf: "):
        read_gguf(short)
    (tmp_path / "no.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ValueError, match=r"no\.gguf: is no GGUF file or is damaged"):
        read_gguf(tmp_path / "no.gguf")
    part = tmp_path / "m-00001-of-00002.gguf"
    shutil.copy(source, part)
    with pytest.raises(ValueError, match=r"m-00002-of-00002\.gguf: is missing, a part of"):
        part_files(part)
    with pytest.raises(ValueError, match="type Q9_9 is not known"):
        block_bytes("Q9_9")
    with pytest.raises(ValueError, match=r"no tensor for attention\.w_kv_a of deepseek_v3"):
        layer_source("attention.w_kv_a", "deepseek_v3")


def test_tensors_of_a_split_model(tmp_path: Path) -> None:
    """All parts together; metadata of the first."""
    source = FIXTURES / "olmoe" / "model.gguf"
    for i in (1, 2):
        shutil.copy(source, tmp_path / f"m-0000{i}-of-00002.gguf")
    file = read_gguf(tmp_path / "m-00002-of-00002.gguf")
    assert file.tensors.keys() == read_gguf(source).tensors.keys()
    folder = gguf_folder(tmp_path / "m-00001-of-00002.gguf", tmp_path / "cache")
    assert read_weight_headers(folder).keys() == file.tensors.keys()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "olmoe"


def test_blocks_of_a_type() -> None:
    assert block_bytes("Q4_K") == (256, 144)
    (values,) = GgufBlocks("Q6_K").expected_tensors(8, 512)
    assert values == (("U8",), [(8, 2 * 210)])
