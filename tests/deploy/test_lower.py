"""The portable form: tokens of the engine where nothing but JAX is installed, one folder or
none, and bad input.
"""

import json
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.config.engine import EngineConfig
from jmoe.deploy import lower as stage
from jmoe.deploy.lower import PortablePrograms, lower
from jmoe.deploy.portable import (
    PLAN,
    PortableModel,
    _open_tokenizer,
    file_sizes_and_hashes,
    plan_json_text,
    read_plan,
)
from jmoe.inference.engine import Engine
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from tests.damage import flip
from tests.deploy.gpt_moe_models import gpt_moe_config, random_model
from tests.model_configs import CHECKPOINTS
from tests.word_tokenizers import BOS, LONG, write_word_tokenizer

OPTIONS = EngineConfig(
    max_batch=2, max_seq_len=40, prefill_chunk_tokens=8, dtype="float32", native="off"
)
# more than rows, and more than a chunk
PROMPTS = [[1, 2, 3], [7, 9, 30, 2, 5, 5, 8, 1, 4, 12, 3], [11]]
# Runs a program where only JAX and what comes with it can be imported.
BARE = """
import runpy, sys
ABSENT = {"jmoe", "kernels_pallas", "flax", "optax", "orbax", "tokenizers", "safetensors", "tests", "flatbuffers"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def silently(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows, sinks, biases and experts in MXFP4."""
    made = tmp_path_factory.mktemp("lowered")
    source = shutil.copytree(CHECKPOINTS / "gpt_oss_mxfp4", made / "model")
    write_word_tokenizer(source, add_bos_token=True, bos_token="<s>")
    lower(source, made / "portable", OPTIONS, silently)
    return made / "portable"


@pytest.fixture
def copied(portable: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(portable, tmp_path / "copy"))


def change_plan(folder: Path, **changes: Any) -> None:
    (folder / PLAN).write_text(plan_json_text(read_plan(folder) | changes))


def tokens_of_engine(folder: Path, **options: Any) -> list[list[int]]:
    with Engine(
        folder, EngineConfig(max_batch=2, max_seq_len=40, native="off", **options)
    ) as engine:
        return [one.token_ids for one in engine.generate(PROMPTS, max_new_tokens=12)]


def test_tokens_are_the_engine_s(portable: Path) -> None:
    expected = tokens_of_engine(CHECKPOINTS / "gpt_oss_mxfp4", dtype="float32")
    model = PortableModel(portable)
    before = model._caches[0][0]
    assert model.generate(PROMPTS, 12) == expected
    assert before.is_deleted()  # the cache is written in place
    assert model.generate(PROMPTS[1:2], 12) == expected[1:2]  # whatever the rows held before
    # no more than the row has room for
    assert [len(answer) for answer in model.generate([[5] * 38], 12)] == [2]


def test_where_only_jax_is_installed(
    portable: Path, run_python: Callable[..., Any], tmp_path: Path
) -> None:
    """A real process that cannot import jmoe, flax or anything else, started anywhere."""
    (expected,) = PortableModel(portable).generate(PROMPTS[:1], 5)
    moved = shutil.copytree(portable, tmp_path / "moved")
    (tmp_path / "bare.py").write_text(BARE)
    command = ["-I", tmp_path / "bare.py", moved / "run.py"]
    done = run_python(
        [*command, "--tokens", "1,2,3", "--max-new-tokens", "5"], {"PYTHONPATH": None}
    )
    assert (done.stdout, done.returncode) == (",".join(map(str, expected)) + "\n", 0), done.stderr
    flip(moved / "model.safetensors", 5000)
    damaged: subprocess.CompletedProcess[str] = run_python(
        [*command, "--tokens", "1"], {"PYTHONPATH": None}
    )
    assert damaged.returncode == 1
    assert (
        damaged.stderr
        == f"run: {moved}/model.safetensors: is damaged: its SHA-256 is not the one in plan.json\n"
    )


def test_texts_are_tokens_as_the_engine_has_them(portable: Path) -> None:
    """The folder's tokenizer.json cut them at 8 tokens, and left the first one to
    tokenizer_config.json.
    """
    assert _open_tokenizer(portable).encode(LONG).ids == [BOS, *[1, 2, 3, 4, 5] * 20]


def test_both_platforms_and_no_kernel_of_ours(portable: Path) -> None:
    """Lowered for a GPU too, on a machine without one."""
    with LazyCheckpoint(CHECKPOINTS / "gpt_oss_mxfp4", "float32") as checkpoint:
        program = PortablePrograms(checkpoint).export_step(OPTIONS, 2, 1, stage.PLATFORMS)
    assert program.platforms == ("cpu", "cuda")
    assert "custom_call" not in str(program.mlir_module())
    # weights are arguments, not constants
    assert (portable / "decode.stablehlo").stat().st_size < 200_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deepseek_v3_yarn", {"dtype": "float32"}),
        ("qwen2_moe", {"dtype": "float32"}),
        ("olmoe", {"dtype": "float32", "expert_dtype": "fp8"}),
        ("mixtral", {"dtype": "bfloat16"}),
        ("gpt_moe", {"dtype": "float32"}),
    ],
)
def test_every_family(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = CHECKPOINTS / name
    if name == "gpt_moe":
        jmoe.save_pretrained(random_model(gpt_moe_config()), folder := tmp_path / "model")
    lower(
        folder,
        tmp_path / "out",
        EngineConfig(max_batch=2, max_seq_len=40, native="off", **options),
        silently,
    )
    model = PortableModel(tmp_path / "out")
    if options["dtype"] == "float32":
        assert model.generate(PROMPTS, 12) == tokens_of_engine(folder, **options)
        return
    dtypes = {str(array.dtype) for array in model._weights.values()}
    assert dtypes == {"bfloat16", "uint16"}  # experts are kept as their bits
    assert all(len(answer) == 12 for answer in model.generate(PROMPTS, 12))


def test_a_damaged_or_missing_file_is_named(copied: Path) -> None:
    change_plan(copied, form="other")
    with pytest.raises(
        ValueError, match=re.escape("plan.json: form = 'other': must be 'portable'")
    ):
        PortableModel(copied)
    change_plan(copied, form="portable")
    plan = (copied / PLAN).read_text()
    (copied / PLAN).write_text(plan.replace('"max_batch": 2', '"max_batch": 3'))
    with pytest.raises(
        ValueError, match=r"plan\.json: is damaged: its SHA-256 is not the one that it says"
    ):
        PortableModel(copied)
    (copied / PLAN).write_text(plan)
    (copied / "decode.stablehlo").write_bytes(b"short")
    with pytest.raises(
        ValueError, match=r"decode\.stablehlo: is damaged: has 5 bytes, plan\.json says \d+"
    ):
        PortableModel(copied)
    (copied / "decode.stablehlo").unlink()
    with pytest.raises(ValueError, match=r"decode\.stablehlo: is missing; plan\.json lists it"):
        PortableModel(copied)
    (copied / PLAN).write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json: is damaged"):
        PortableModel(copied)
    (copied / PLAN).unlink()
    with pytest.raises(ValueError, match=r"plan\.json: is missing"):
        PortableModel(copied)


def changed_decode(plan: Any, **changes: Any) -> Any:
    programs = plan["programs"]
    return {"programs": programs | {"decode": programs["decode"] | changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda plan: {"caches": None}, r"plan\.json: is damaged or of another version of jmoe"),
        (lambda plan: {"jax": {}}, r"plan\.json: is damaged or of another .* KeyError"),
        (lambda plan: {"max_batch": 50}, "decode: takes 2 x 1 tokens, must take 50 x 1"),
        (
            lambda plan: changed_decode(plan, file="../decode.stablehlo"),
            "decode.file = '../decode.stablehlo': must be one of the files that the plan lists",
        ),
        (
            lambda plan: changed_decode(plan, kept_arguments=[0]),
            r"decode\.stablehlo: JAX .* cannot take it",
        ),
    ],
    ids=["field", "part", "rows", "outside", "arguments"],
)
def test_a_plan_with_a_checksum_of_its_own_is_not_believed(
    copied: Path, changes: Callable[[Any], dict[str, Any]], message: str
) -> None:
    shutil.copy(copied / "decode.stablehlo", copied.parent)
    change_plan(copied, **changes(read_plan(copied)))
    with pytest.raises(ValueError, match=message) as refused:
        PortableModel(copied)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"shape": [7, 7]}, "tensor {name}: is damaged: ValueError"),
        ({"dtype": "F99"}, "tensor {name}: is damaged: KeyError"),
        (None, "is damaged: its header is none"),
    ],
)
def test_weights_with_checksums_of_their_own_are_not_believed(
    copied: Path, entry: dict[str, Any] | None, message: str
) -> None:
    """None: a header of 2**60 bytes."""
    file = copied / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = next(name for name in header if name != "__metadata__")
    header[name] |= entry or {}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if entry else 2**60) + text + data)
    files = file_sizes_and_hashes(copied)
    del files[PLAN]
    change_plan(copied, files=files)
    with pytest.raises(ValueError, match=rf"model\.safetensors: {message.format(name=name)}"):
        PortableModel(copied)


def test_another_jax_is_named(copied: Path) -> None:
    newest = jax.export.maximum_supported_calling_convention_version
    change_plan(copied, jax={"version": "9.1", "calling_convention": newest + 1})
    message = f"calling convention {newest + 1} of jax.export, and JAX {jax.__version__} reads"
    with pytest.raises(
        ValueError, match=f"{message} .* they need a newer JAX, such as the 9.1 that wrote them"
    ):
        PortableModel(copied)
    change_plan(copied, jax={"version": "0.2", "calling_convention": 1})
    with pytest.raises(ValueError, match="they need an older JAX"):
        PortableModel(copied)
    change_plan(copied, jax={"version": "9.1", "calling_convention": newest}, platforms=["cuda"])
    with pytest.raises(ValueError, match="the programs run on cuda, JAX has cpu here"):
        PortableModel(copied)
    change_plan(copied, platforms=["cpu", "cuda"])
    (copied / "prefill.stablehlo").write_bytes(b"ML\xefRStableHLO_v99.0.0")
    with pytest.raises(
        ValueError,
        match=rf"prefill.stablehlo: JAX {jax.__version__} cannot take it, JAX 9.1 wrote it",
    ):
        PortableModel(with_new_sums(copied))


def with_new_sums(folder: Path) -> Path:
    change_plan(
        folder,
        files={
            name: entry for name, entry in file_sizes_and_hashes(folder).items() if name != PLAN
        },
    )
    return folder


def test_bad_prompts(portable: Path) -> None:
    model = PortableModel(portable, check_contents=False)
    for prompts, message in [
        ([[1], []], "prompt 1: has 0 tokens"),
        ([[0] * 40], "must have 1 to 39"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.generate(prompts)
    with pytest.raises(ValueError, match=r"prompt 0: token 1000000 must be below \d+"):
        model.generate([[1_000_000]])
    with pytest.raises(ValueError, match="max_new_tokens = 0: must be at least 1"):
        model.generate([[1]], 0)
    model._weights = {
        name: jnp.full_like(w, np.nan) if w.dtype == jnp.float32 else w
        for name, w in model._weights.items()
    }
    with pytest.raises(FloatingPointError, match="not finite"):
        model.generate([[1]])


def test_what_is_refused_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CHECKPOINTS / "qwen3_moe"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("mine")
    with pytest.raises(
        ValueError, match="must be an empty folder or none: nothing is written over"
    ):
        lower(folder, tmp_path / "full", OPTIONS, silently)
    with pytest.raises(ValueError, match="max_seq_len = 1000000: must not exceed the model's"):
        lower(folder, tmp_path / "out", EngineConfig(max_seq_len=1_000_000), silently)
    with pytest.raises(ValueError, match="platforms = 'abacus': must be of cpu, cuda"):
        lower(folder, tmp_path / "out", OPTIONS, silently, ["abacus"])

    def fail(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(stage, "write_safetensors", fail)
    with pytest.raises(OSError, match="No space left"):
        lower(folder, tmp_path / "out", OPTIONS, silently)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["full", "kept.txt"]
