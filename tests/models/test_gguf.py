"""GGUF files as llama.cpp writes them: logits of transformers on the widened weights, types that
stay compressed, the tokenizer, and what is refused. The files: fixtures/make_gguf.py.
"""

from __future__ import annotations

import json
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jmoe
from jmoe.config import ModelConfig
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
from jmoe.models.gguf.formats import GgufBlocks, block_values_and_bytes  # noqa: E402
from jmoe.models.gguf.names import layer_source  # noqa: E402
from jmoe.models.gguf.tokenizer import gguf_tokenizer, tokenizer_settings  # noqa: E402
from jmoe.models.weight_files import read_weight_headers  # noqa: E402

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gguf"
TEXTS = ["def read(x):\n    return 12345", "It's  the\tthe end.\n\n", "naïve <|im_start|>user"]
FILES = ("qwen3moe", "olmoe", "glm4moe", "gpt-oss", "llama", "deepseek2")
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


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek2"])
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
        assert ("no format in memory holds" in plain.expert_conversion_note) == (kind is not MXFP4)
        wide = plain.read_expert(0, 1)
    with LazyCheckpoint(folder, "float32", option) as kept:
        assert kept.expert_format is kind
        rounded = "their scales are rounded to bfloat16"
        assert kept.expert_conversion_note.endswith("" if kind is MXFP4 else rounded)
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
    # the file's chat template and end tokens stay, unless other files beside it have them
    templates = read_templates(folder)
    assert templates is not None and "<|im_start|>" in templates["templates"]["default"]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    (tmp_path / "chat_template.jinja").write_text("{{ 'own' }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("{{ 'rag' }}")
    gguf_folder(tmp_path / "x.gguf")
    templates = read_templates(folder)
    assert templates is not None and set(templates["templates"]) == {"default", "rag"}
    assert templates["templates"]["default"] == "{{ 'own' }}"
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).unlink()
    gguf_folder(tmp_path / "x.gguf")  # nothing of the files that are gone stays
    templates = read_templates(folder)
    assert templates is not None and set(templates["templates"]) == {"default"}
    assert "<|im_start|>" in templates["templates"]["default"]


def test_a_folder_that_is_written_once(tmp_path: Path) -> None:
    """Of a file in a folder that cannot be written, it is read as it is, or the error says where
    else; files of the same name have folders of their own in a cache.
    """
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(FIXTURES / "olmoe" / "model.gguf", tmp_path / name / "x.gguf")
    cache = tmp_path / "cache"
    folders = [gguf_folder(tmp_path / name / "x.gguf", cache) for name in ("a", "b")]
    assert folders[0] != folders[1] and {folder.parent for folder in folders} == {cache}
    folder = gguf_folder(tmp_path / "a" / "x.gguf")
    times = {path: path.lstat().st_mtime_ns for path in [folder, *folder.iterdir()]}
    assert gguf_folder(tmp_path / "a" / "x.gguf") == folder
    assert {path: path.lstat().st_mtime_ns for path in [folder, *folder.iterdir()]} == times
    (tmp_path / "b" / "x.gguf.jmoe").write_text("no folder")
    with pytest.raises(OSError, match=r"x\.gguf\.jmoe: cannot be written: .* --cache-dir, or give"):
        gguf_folder(tmp_path / "b" / "x.gguf")


def test_processes_that_write_one_folder(tmp_path: Path) -> None:
    """Each finds a whole folder after its call, whatever the others do."""
    shutil.copy(FIXTURES / "olmoe" / "model.gguf", tmp_path / "x.gguf")
    read_gguf(tmp_path / "x.gguf")
    for _ in range(2):
        shutil.rmtree(tmp_path / "x.gguf.jmoe", ignore_errors=True)
        with ThreadPoolExecutor(8) as threads:
            folders = list(threads.map(lambda _: gguf_folder(tmp_path / "x.gguf"), range(8)))
        assert len(set(folders)) == 1
        assert json.loads((folders[0] / "config.json").read_text())["model_type"] == "olmoe"
        assert (folders[0] / "model.gguf").samefile(tmp_path / "x.gguf")
        assert not list(folders[0].glob(".*"))


def changed(name: str, **changes: Any) -> GgufFile:
    """A fixture's file with other metadata; `...` removes a key."""
    file = read_gguf(FIXTURES / name / "model.gguf")
    metadata = {key: changes.get(key, value) for key, value in file.metadata.items()} | changes
    kept = {key: value for key, value in metadata.items() if value is not ...}
    return GgufFile(file.path, kept, file.tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "qwen2moe"}, "architecture = 'qwen2moe': must be one of qwen3"),
        ({"qwen3moe.logit_scale": 2.0}, "qwen3moe.logit_scale = 2.0: is not known"),
        (
            {"qwen3moe.rope.scaling.type": "longrope"},
            "rope.scaling.type = 'longrope': must be yarn",
        ),
        ({"qwen3moe.attention.value_length": 8}, "value_length = 8: must be attention.key_length"),
        ({"qwen3moe.expert_count": ...}, "qwen3moe.expert_count = None: is missing"),
        (
            {"qwen3moe.rope.scaling.type": "yarn"},
            "qwen3moe.rope.scaling.factor = None: is missing",
        ),
        (
            {"qwen3moe.rope.scaling.type": "yarn", "qwen3moe.rope.scaling.factor": 2.0},
            "qwen3moe.rope.scaling.original_context_length = None: is missing",
        ),
    ],
)
def test_metadata_that_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_fields(changed("qwen3moe", **changes))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"rope.dimension_count": 4}, "llama.rope.dimension_count = 4: must be 8"),
        ("llama", {"expert_count": ...}, "llama.expert_count = None: is missing"),
        ("deepseek2", {"rope.dimension_count": ...}, "rope.dimension_count = None: is missing"),
        (
            "deepseek2",
            {"attention.key_length": ..., "attention.key_length_mla": ...},
            "deepseek2.attention.key_length = None: is missing",
        ),
        (
            "deepseek2",
            {"expert_gating_func": 3},
            "expert_gating_func = 3: must be 1, softmax, or 2",
        ),
    ],
)
def test_sizes_that_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_fields(changed(name, **{f"{name}.{key}": value for key, value in changes.items()}))


def test_groups_of_experts() -> None:
    """Of the file; without them, those of DeepSeek-V3 for its 256 experts, and one for others."""
    without = {"deepseek2.expert_group_count": ..., "deepseek2.expert_group_used_count": ...}

    def groups(**changes: Any) -> tuple[Any, ...]:
        fields = config_fields(changed("deepseek2", **changes))
        return tuple(fields.get(name) for name in ("topk_method", "n_group", "topk_group"))

    assert groups() == (None, 4, 2)
    assert groups(**without) == (None, 1, 1)
    assert groups(**without, **{"deepseek2.expert_count": 256}) == (None, 8, 4)
    softmax = {"deepseek2.expert_gating_func": 1}
    assert groups(**softmax) == ("group_limited_greedy", 4, 2)
    assert groups(**without, **softmax) == ("greedy", None, None)
    assert config_fields(changed("deepseek2", **softmax))["model_type"] == "deepseek_v2"


def test_keys_and_values_in_one_tensor() -> None:
    """As files before 2025 have them."""
    source = layer_source("attention.w_kv_b", "deepseek_v3", ModelConfig(), ())
    assert source.names == ("attn_kv_b.weight",) and not source.each_transposed


@pytest.mark.parametrize(("name", "nan"), [("olmoe", b"\0\x7e"), ("gpt-oss", b"\xff")])
def test_scales_that_are_not_finite_are_named(name: str, nan: bytes, tmp_path: Path) -> None:
    """Of experts that are widened, and of those that stay compressed."""
    file = tmp_path / "x.gguf"
    data = bytearray((FIXTURES / name / "model.gguf").read_bytes())
    tensor = read_gguf(FIXTURES / name / "model.gguf").tensors["blk.0.ffn_up_exps.weight"]
    data[tensor.offset : tensor.offset + len(nan)] = nan
    file.write_bytes(data)
    folder, message = gguf_folder(file), r"blk\.0\.ffn_up_exps\.weight' has scales that are NaN"
    with pytest.raises(ValueError, match=message):
        jmoe.load_pretrained(folder, dtype="float32")
    with LazyCheckpoint(folder, "float32", KEPT[name][1]) as kept:
        views = {n: np.empty(s, d) for n, (s, d) in kept.expert_fields.items()}
        with pytest.raises(ValueError, match=message):
            kept.fill_expert(0, 0, views)


def test_float16_needs_a_dtype(tmp_path: Path) -> None:
    folder = gguf_folder(FIXTURES / "llama" / "model.gguf", tmp_path)
    with pytest.raises(ValueError, match="has dtype F16: give dtype='float32' or dtype='bfloat16'"):
        LazyCheckpoint(folder)


@pytest.mark.parametrize("key", ["rope.dimension_count", "attention.key_length"])
def test_glm_needs_the_sizes_of_a_head(key: str) -> None:
    with pytest.raises(ValueError, match=f"glm4moe.{key} = None: is missing"):
        config_fields(
            changed("glm4moe", **{f"glm4moe.{key}": ..., "glm4moe.attention.value_length": ...})
        )


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ...}, r"tokenizer\.ggml\.tokens = None: must be a list"),
        ({"tokens": ["a", "b", "a"]}, r"tokenizer\.ggml\.tokens = 3: has 1 tokens twice"),
        ({"token_type": [1, 3]}, r"tokenizer\.ggml\.token_type = 2: must be as many as tokens"),
        ({"merges": ["a"]}, r"tokenizer\.ggml\.merges = 'a ': must be two tokens whose"),
        ({"merges": ["a 漢"]}, r"tokenizer\.ggml\.merges = 'a 漢': must be two tokens whose"),
        ({"eos_token_id": 10**6}, r"eos_token_id = 1000000: must be below \d+, the tokens"),
    ],
)
def test_damaged_tokenizers(changes: dict[str, Any], message: str) -> None:
    if "tokens" in changes:
        changes = {"token_type": ..., **changes}
    file = changed("olmoe", **{f"tokenizer.ggml.{key}": v for key, v in changes.items()})
    read = tokenizer_settings if "eos_token_id" in changes else gguf_tokenizer
    with pytest.raises(ValueError, match=message):
        read(file)


def packed_gguf(counts: tuple[int, int], metadata: bytes, tensors: bytes = b"") -> bytes:
    """A GGUF file of version 3 with these counts (tensors, metadata) and descriptions."""
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + metadata + tensors


def packed_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def packed_tensor(shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return packed_text("x") + dims + struct.pack("<IQ", kind, offset)


DAMAGED = {
    # a list of 2**60 bytes: gguf's own reader fills memory with empty arrays
    "list": packed_gguf((0, 1), packed_text("a") + struct.pack("<IIQ", 9, 0, 2**60)),
    "text": packed_gguf((0, 1), packed_text("a") + struct.pack("<IQ", 8, 2**62)),
    "counts": packed_gguf((2**62, 2**62), b""),
    "no bytes": packed_gguf((1, 0), b"", packed_tensor((8, 0), 0)),
    "no shape": packed_gguf((1, 0), b"", packed_tensor((), 2)),
    # 2**64 elements are 0 in 64 bits
    "elements": packed_gguf((1, 0), b"", packed_tensor((2**32, 2**32), 0)),
    "offset": packed_gguf((1, 0), b"", packed_tensor((8,), 0, 2**64 - 64) + bytes(256)),
    "type": packed_gguf((1, 0), b"", packed_tensor((32,), 999) + bytes(256)),
    "not decoded": packed_gguf((1, 0), b"", packed_tensor((32,), 9) + bytes(256)),  # Q8_1
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.filterwarnings("ignore:overflow")
def test_damaged_files(name: str, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(DAMAGED[name])
    with pytest.raises(ValueError, match=r"x\.gguf: |type Q8_1 is not decoded"):
        read_gguf(file)


def test_the_other_byte_order(tmp_path: Path) -> None:
    """The package gguf reads its header, and the weights' bytes would be taken as they are."""
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64))
    with pytest.raises(ValueError, match=r"x\.gguf: is in the other byte order"):
        read_gguf(file)


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
        block_values_and_bytes("Q9_9")
    with pytest.raises(ValueError, match=r"no tensor for shared_expert_gate of qwen2_moe"):
        layer_source("shared_expert_gate", "qwen2_moe", ModelConfig(), ())


def test_tensors_of_a_split_model(tmp_path: Path) -> None:
    """All parts together; metadata of the first."""
    source = FIXTURES / "olmoe" / "model.gguf"
    for i in (1, 2):
        shutil.copy(source, tmp_path / f"m-0000{i}-of-00002.gguf")
    file = read_gguf(tmp_path / "m-00002-of-00002.gguf")
    assert file.tensors.keys() == read_gguf(source).tensors.keys()
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    # as a download cache has them: links to files whose names say nothing
    for i, part in enumerate(parts):
        part.rename(tmp_path / f"{i}")
        part.symlink_to(f"{i}")
    folder = gguf_folder(parts[0], tmp_path / "cache")
    parts[1].unlink()
    with pytest.raises(ValueError, match=r"m-00002-of-00002\.gguf: is missing"):
        read_weight_headers(folder)
    parts[1].symlink_to("1")
    assert read_weight_headers(folder).keys() == file.tensors.keys()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "olmoe"


def test_parts_of_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata, tensors = {"split.tensors.count": 5}, read_gguf(FIXTURES / "olmoe/model.gguf").tensors
    monkeypatch.setattr("jmoe.models.gguf.file._read_part", lambda *_: (metadata, tensors))
    with pytest.raises(ValueError, match=r"split\.tensors\.count is 5, and its 1 files hold \d+"):
        read_gguf(FIXTURES / "olmoe" / "model.gguf")


def test_blocks_of_a_type() -> None:
    assert block_values_and_bytes("Q4_K") == (256, 144)
    (values,) = GgufBlocks("Q6_K").expected_tensors(8, 512)
    assert values == (("U8",), [(8, 2 * 210)])
