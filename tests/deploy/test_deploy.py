"""All stages in one command: a smaller, compressed bundle on several devices, its losses, and what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jmoe.config.engine import EngineConfig
from jmoe.deploy import __main__ as command
from jmoe.deploy.__main__ import Stages, deploy
from jmoe.deploy.portable import PLAN, PortableModel
from jmoe.deploy.prune import PruneOptions, prune
from jmoe.models.pretrained import load_pretrained
from tests.deploy.gpt_moe_models import gpt_moe_config, in_numpy, stored_arrays, write_model
from tests.deploy.test_prune import TEXT, write_tokenizer
from tests.http_servers import start_server
from tests.processes import one_device
from tests.train_runs import Run

MACHINES = """
[[machines]]
devices = 2
device_bytes = 1e9
bytes_per_s = 1e12
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "machines.toml").write_text(MACHINES)
    return tmp_path / "model"


def silently(_: str) -> None:
    pass


@pytest.mark.slow
def test_every_stage(model: Path, tmp_path: Path, run_python: Run) -> None:
    """Pruned to two experts, compressed, over two devices, bundled, served without compiling."""
    env = one_device(tmp_path / "cache") | {"JAX_NUM_CPU_DEVICES": "2"}
    out = tmp_path / "bundle"
    options = "--experts 2 --weights mxfp4 --sequence-length 16 --max-tokens 900 --max-batch 3 --max-seq-len 40"
    files = ["--text", tmp_path / "text.txt", "--machines", tmp_path / "machines.toml"]
    done = run_python(["-m", "jmoe.deploy", model, "--out", out, *files, *options.split()], env=env)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(merged|2 experts|mxfp4) +([\d.]+) MB +([\d.]+) bits per byte$", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["merged", "2 experts", "mxfp4"]
    sizes = [float(row[1]) for row in rows]
    assert sizes[0] > sizes[1] > sizes[2]
    plan = json.loads((out / PLAN).read_text())
    assert plan["segments"] == [[[0]] * 3, [[1]] * 3] and plan["engine"]["max_batch"] == 4
    assert "quantization_config" in json.loads((out / "model" / "config.json").read_text())
    assert not list(tmp_path.glob(".*"))
    server = start_server(tmp_path / "log", env, out)
    try:
        answer = server.post("/v1/completions", prompt="hello", max_tokens=4, ignore_eos=True)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert server.terminate() == 0
    finally:
        server.kill()
    assert re.search(r"stopped; \d+ programs from the bundle, 0 compiled\n", server.log.read_text())


@pytest.mark.usefixtures("quick_compilation")
def test_the_portable_form(model: Path, tmp_path: Path) -> None:
    """Of a pruned model, whose tokens in numpy are the programs'."""
    stages = Stages(str(tmp_path / "text.txt"), 3, portable=True, max_tokens=300, sequence_length=16)
    options = EngineConfig(max_batch=1, max_seq_len=24, prefill_chunk_tokens=8, native="off")
    results = deploy(model, tmp_path / "out", stages, options, silently)
    assert [result.stage for result in results] == ["merged", "3 experts"]
    assert results[0].weight_bytes > results[1].weight_bytes
    assert all(result.bits_per_byte is not None and result.bits_per_byte > 1 for result in results)
    pruning = PruneOptions(3, str(tmp_path / "text.txt"), max_tokens=300, sequence_length=16)
    prune(model, tmp_path / "pruned", pruning, silently)
    weights, tokens = stored_arrays(tmp_path / "pruned"), [5, 6, 7]
    for _ in range(4):
        logits, _ = in_numpy(gpt_moe_config(num_experts=3), weights, np.array(tokens))
        tokens.append(int(logits[-1].argmax()))
    assert PortableModel(tmp_path / "out").generate([tokens[:3]], 4) == [tokens[3:]]
    assert not list(tmp_path.glob(".*"))


def test_what_is_refused_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="experts = 2: needs a text to prune by"):
        Stages(experts=2)
    with pytest.raises(ValueError, match="weights = 'int3': must be one of mxfp4, int4, int8, fp8"):
        Stages(weights="int3")
    with pytest.raises(ValueError, match="portable = True: must be left out with machines"):
        Stages(machines=tmp_path / "machines.toml", portable=True)
    with pytest.raises(ValueError, match=r"machines = '.*nowhere': No such file"):
        Stages(machines=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"out = .*: must be an empty folder or none"):
        deploy(model, model, Stages(), EngineConfig(), silently)

    def fail(folder: Path, *_: object) -> None:
        assert folder.is_dir()
        raise OSError("No space left on device")

    monkeypatch.setattr(command, "bundle", fail)
    before = np.asarray(load_pretrained(model).decoder.embedding[...])
    with pytest.raises(OSError, match="No space left"):
        deploy(model, tmp_path / "out", Stages(weights="mxfp4"), EngineConfig(), silently)
    np.testing.assert_array_equal(np.asarray(load_pretrained(model).decoder.embedding[...]), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["machines.toml", "model", "text.txt"]
