"""Some layers and experts of a model as one of its own."""

import errno
import json
import re
from pathlib import Path

import numpy as np
import pytest

import jmoe
from jmoe.deploy import merged_run
from jmoe.deploy.cut import (
    check_empty_or_new,
    creating_folder,
    creating_model_folder,
    cut_config,
    write_cut_model,
)
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from tests.deploy.gpt_moe_models import in_numpy, stored_arrays, write_model
from tests.model_configs import CHECKPOINTS
from tests.power_cut import Image, PowerCut

TOKENS = np.random.default_rng(3).integers(0, 64, 12)


def test_the_layers_and_experts_that_are_kept(tmp_path: Path) -> None:
    """A numpy decoder over the larger model's tensors, renumbered by hand."""
    write_model(tmp_path / "whole", mlp_only_layers=(1,))
    layers, kept_Nn = (1, 2), np.array([[0, 3]])
    with LazyCheckpoint(tmp_path / "whole") as source:
        config = cut_config(source.config, layers, num_experts=2)
        write_cut_model(source, tmp_path / "cut", config, layers, kept_Nn)
    assert config.layer_kinds == ("dense", "moe")
    renumbered = {}
    for name, tensor in stored_arrays(tmp_path / "whole").items():
        match = re.fullmatch(r"model\.layers\.(\d)\.(.*)", name)
        if match is None:
            renumbered[name] = tensor
        elif int(match[1]) in layers:
            rest = re.sub(
                r"experts\.3\.", "experts.1.", re.sub(r"experts\.[12]\.", "experts.x.", match[2])
            )
            cut = tensor[kept_Nn[0]] if rest == "mlp.gate.weight" else tensor
            renumbered[f"model.layers.{layers.index(int(match[1]))}.{rest}"] = cut
    expected, _ = in_numpy(config, renumbered, TOKENS)
    found = np.asarray(jmoe.load_pretrained(tmp_path / "cut")(TOKENS[None].astype(np.int32)))[0]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_windows_and_first_dense_layers_follow_their_layers() -> None:
    with LazyCheckpoint(CHECKPOINTS / "gpt_oss") as source:
        types = source.config.layer_types
        cut = cut_config(source.config, (1,), num_experts_per_tok=1)
    assert cut.layer_types == types[1:2] and (cut.num_hidden_layers, cut.num_experts_per_tok) == (
        1,
        1,
    )
    with LazyCheckpoint(CHECKPOINTS / "deepseek_v3") as source:
        assert source.config.first_k_dense_replace == 1
        last = source.config.num_hidden_layers - 1
        assert cut_config(source.config, (0, last)).layer_kinds == ("dense", "moe")
        assert cut_config(source.config, (last,)).layer_kinds == ("moe",)


def test_a_family_without_such_a_decoder_is_refused(tmp_path: Path) -> None:
    """A single expert's weight divided by itself would be 1 in transformers: nothing is written."""
    with LazyCheckpoint(CHECKPOINTS / "mixtral") as source:
        layers = range(source.config.num_hidden_layers)
        kept_Nn = np.tile(np.arange(2), (len(layers), 1))
        config = cut_config(source.config, layers, num_experts=2, num_experts_per_tok=1)
        with pytest.raises(ValueError, match="num_experts_per_tok = 1: is not supported"):
            write_cut_model(source, tmp_path / "out", config, layers, kept_Nn)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_no_new_one(tmp_path: Path) -> None:
    check_empty_or_new(tmp_path)
    check_empty_or_new(tmp_path / "none")
    (tmp_path / "config.json").write_text(json.dumps({}))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for folder in (tmp_path, tmp_path / "config.json", tmp_path / "link"):
        with pytest.raises(ValueError, match="must be an empty folder or none"):
            check_empty_or_new(folder)
    for folder in (Path(), Path("..")):
        with pytest.raises(
            ValueError, match=rf"out = '{folder}': must end in a name, which the new folder gets"
        ):
            check_empty_or_new(folder)
    with pytest.raises(
        ValueError, match=r"must be where a folder can be made, and .*config\.json is no folder"
    ):
        check_empty_or_new(tmp_path / "config.json" / "a" / "b")


def test_a_folder_is_written_by_one_process(tmp_path: Path) -> None:
    """What a killed process left is deleted; what another one is writing is not touched."""
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    (partial / "programs").mkdir(parents=True)
    (partial / "programs" / "half").write_text("left")
    (partial / "weights").write_text("left")
    with creating_folder(out) as first:
        assert list(first.iterdir()) == []
        (first / "weights").write_text("whole")
        said = r"out = '.*out': another process is writing it, in .*\.out\.partial"
        with pytest.raises(ValueError, match=said), creating_folder(out):
            pass
        assert (first / "weights").read_text() == "whole" and not out.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (
        out / "weights"
    ).read_text() == "whole"


@pytest.mark.parametrize("way", ["creating_folder", "merged"])
def test_a_power_cut_leaves_a_whole_folder_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The weights are flushed as they are written; the tokenizer and programs are copies."""
    cut = PowerCut(tmp_path / "place")

    def write(_: Path, folder: Path) -> int:
        (folder / "programs").mkdir(parents=True)
        (folder / "programs" / "one").write_text("whole" * 2000)
        (folder / "tokenizer.json").write_text("whole")
        return 3

    monkeypatch.setattr(merged_run, "merge_run_to_hugging_face", write)
    monkeypatch.setattr(merged_run, "_merged_folder_name", lambda *_: "step-3")
    with cut.recording():
        if way == "merged":
            merged_run._merge_newest_step(tmp_path / "run", cut.root)
        else:
            with creating_folder(cut.root / "step-3") as partial:
                write(tmp_path, partial)
        cut.promise = "it is there"
    found = set[bool]()

    def is_whole_or_not_there(image: Image) -> None:
        found.add((out := cut.root / "step-3").exists())
        assert out.exists() or image.promise is None
        if out.exists():
            contents = {path.name: path.read_text() for path in out.rglob("*") if path.is_file()}
            assert contents == {"one": "whole" * 2000, "tokenizer.json": "whole"}

    cut.check(is_whole_or_not_there)
    assert found == {True, False}


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """`write` says no place, which every folder has."""
    with (
        pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/out'"),
        creating_folder(tmp_path / "out"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(OSError, match="No space left on device: 'there'"),
        creating_folder(tmp_path / "out"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "there")
    assert list(tmp_path.iterdir()) == []


def test_files_beside_the_weights_are_copied(tmp_path: Path) -> None:
    """Chat templates in their folder too; weights and config.json are the new model's own."""
    source, template = tmp_path / "model", "additional_chat_templates/tool_use.jinja"
    (source / template).parent.mkdir(parents=True)
    beside = {"tokenizer.json", "LICENSE", template}
    for name in (*beside, "config.json", "model.safetensors"):
        (source / name).write_text(name)
    (source / "pack").mkdir()  # of a server
    with creating_model_folder(tmp_path / "out", source):
        pass
    out = tmp_path / "out"
    copied = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert copied == beside and (out / template).read_text() == template
