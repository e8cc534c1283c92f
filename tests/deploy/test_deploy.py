"""All stages in one command: a smaller, compressed bundle on several devices, its losses, and
what is refused.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jmoe.config.engine import EngineConfig
from jmoe.deploy import stages as command
from jmoe.deploy.__main__ import main
from jmoe.deploy.portable import PLAN, PortableModel
from jmoe.deploy.prune import PruneOptions, prune
from jmoe.deploy.stages import DistilStage, StageResult, Stages, deploy
from jmoe.models.pretrained import load_pretrained
from tests.deploy.gpt_moe_models import gpt_moe_config, in_numpy, stored_arrays, write_model
from tests.deploy.test_prune import TEXT, write_tokenizer
from tests.http_servers import start_server
from tests.processes import one_device
from tests.train_runs import Run, losses

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
    """Distilled to two layers, pruned to two experts, compressed, over two devices, bundled,
    served, all measured.
    """
    env = one_device(tmp_path / "cache") | {"JAX_NUM_CPU_DEVICES": "2"}
    out = tmp_path / "bundle"
    options = (
        "--experts 2 --weights mxfp4 --sequence-length 16 --max-tokens 900 --max-batch 3"
        " --max-seq-len 40"
    )
    options += " --distil-steps 3 --distil-layers 2 --batch-size 4 --optimizer.warmup-steps 1"
    options += " --evaluation.sample-tokens 0 --comm.embedding replicated --compute-dtype float32"
    files = ["--text", tmp_path / "text.txt", "--machines", tmp_path / "machines.toml"]
    command = ["-m", "jmoe.deploy", model, "--out", out, *files, *options.split()]
    done = run_python(command, env=env)
    assert done.returncode == 0, done.stderr
    row = r"^(merged|distilled|2 experts|mxfp4) +([\d.]+) MB +([\d.]+) bits per byte$"
    rows = re.findall(row, done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["merged", "distilled", "2 experts", "mxfp4"]
    sizes = [float(row[1]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert re.search(
        r"^segmented, each of 2 +[\d.]+ MB\nbundled, all files +[\d.]+ MB$",
        done.stdout,
        re.MULTILINE,
    )
    assert losses(tmp_path / "bundle.student") and len(losses(tmp_path / "bundle.student")) == 3
    other = run_python(
        [
            *command[:4],
            tmp_path / "another",
            *command[5:],
            "--distil-experts",
            "3",
            "--distil-run",
            out,
        ]
    )
    assert other.returncode == 1 and "distil_run = " in other.stderr
    plan = json.loads((out / PLAN).read_text())
    assert plan["segments"] == [[[0]] * 2, [[1]] * 2] and plan["engine"]["max_batch"] == 4
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


def test_the_portable_form(model: Path, tmp_path: Path) -> None:
    """Of a pruned model, whose tokens in numpy are the programs'."""
    stages = Stages(
        str(tmp_path / "text.txt"), 3, portable=True, max_tokens=300, sequence_length=16
    )
    options = EngineConfig(max_batch=1, max_seq_len=24, prefill_chunk_tokens=8, native="off")
    results = deploy(model, tmp_path / "out", stages, options, silently)
    assert [result.stage for result in results] == ["merged", "3 experts", "lowered, all files"]
    assert results[0].num_bytes > results[1].num_bytes
    assert all(
        result.bits_per_byte is not None and result.bits_per_byte > 1 for result in results[:2]
    )
    files = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert results[2] == StageResult("lowered, all files", files)
    pruning = PruneOptions(3, str(tmp_path / "text.txt"), max_tokens=300, sequence_length=16)
    prune(model, tmp_path / "pruned", pruning, silently)
    weights, tokens = stored_arrays(tmp_path / "pruned"), [5, 6, 7]
    for _ in range(4):
        logits, _ = in_numpy(gpt_moe_config(num_experts=3), weights, np.array(tokens))
        tokens.append(int(logits[-1].argmax()))
    assert PortableModel(tmp_path / "out").generate([tokens[:3]], 4) == [tokens[3:]]
    assert not list(tmp_path.glob(".*"))


def test_what_is_refused_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="experts = 2: needs a text to prune by"):
        Stages(experts=2)
    with pytest.raises(ValueError, match="weights = 'int3': must be one of mxfp4, int4, int8, fp8"):
        Stages(weights="int3")
    with pytest.raises(ValueError, match="portable = True: must be left out with machines"):
        Stages(machines=tmp_path / "machines.toml", portable=True)
    with pytest.raises(ValueError, match="by = 'layers': needs machines to segment the model over"):
        Stages(by="layers")
    with pytest.raises(ValueError, match="distil_steps = 5: needs a text to learn from"):
        Stages(distil=DistilStage(5, tmp_path / "run"))
    with pytest.raises(ValueError, match="distil_steps = 0: must be greater than 0"):
        DistilStage(0, tmp_path / "run")
    with pytest.raises(ValueError, match=r"machines = '.*nowhere': No such file"):
        Stages(machines=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"out = .*: must be an empty folder or none"):
        deploy(model, model, Stages(), EngineConfig(), silently)

    text = str(tmp_path / "text.txt")
    for wrong, message in (
        (
            Stages(text, 3, distil=DistilStage(1, tmp_path / "run", experts=5)),
            "experts = 5: must be between 1 and the",
        ),
        (
            Stages(text, 3, distil=DistilStage(1, tmp_path / "run", experts=2)),
            "experts = 3: must not exceed the model's",
        ),
        (Stages(text, 5), "experts = 5: must not exceed the model's num_experts = 4"),
        (Stages(weights="fp8"), "hidden_size = 32: must be a multiple of 128"),
    ):
        with pytest.raises(ValueError, match=message):
            deploy(model, tmp_path / "out", wrong, EngineConfig(), silently)
    with pytest.raises(
        ValueError, match="max_seq_len = 4000: must not exceed the model's 48 positions"
    ):
        deploy(model, tmp_path / "out", Stages(text, 3), EngineConfig(max_seq_len=4000), silently)
    for run in ("out", "out/student", "."):
        learning = DistilStage(1, tmp_path / run, experts=3)
        with pytest.raises(
            ValueError, match=r"distil_run = .*: must not lie in out = '.*out', nor that in it"
        ):
            deploy(model, tmp_path / "out", Stages(text, distil=learning), EngineConfig(), silently)
    for devices, message in (
        (99, "has 99 devices: must have at most the "),
        (1, "has one device: must have several"),
    ):
        (tmp_path / "machines.toml").write_text(
            MACHINES.replace("devices = 2", f"devices = {devices}")
        )
        with pytest.raises(ValueError, match=rf"machines = '.*machines.toml': {message}"):
            deploy(
                model,
                tmp_path / "out",
                Stages(text, 3, machines=tmp_path / "machines.toml"),
                EngineConfig(),
                silently,
            )
    with pytest.raises(ValueError, match="sequence_length = 0: must be at least 2"):
        main(
            [
                str(model),
                "--out",
                str(tmp_path / "out"),
                "--text",
                text,
                "--experts",
                "3",
                "--sequence-length",
                "0",
            ]
        )
    for wrong_words in (("--num-steps", "3"), ("--distil-experts", "3")):
        with pytest.raises(SystemExit):
            main([str(model), "--out", str(tmp_path / "out"), *wrong_words])
    # of train.py, whose options are looked at before anything is done
    with pytest.raises(SystemExit):
        main(
            [
                str(model),
                "--out",
                str(tmp_path / "out"),
                "--text",
                text,
                "--distil-steps",
                "3",
                "--learning-rat",
                "3",
            ]
        )

    def fail(folder: Path, *_: object) -> None:
        assert folder.is_dir()
        raise OSError("No space left on device")

    monkeypatch.setattr(command, "bundle", fail)
    before = np.asarray(load_pretrained(model).decoder.embedding[...])
    with pytest.raises(OSError, match="No space left"):
        deploy(model, tmp_path / "out", Stages(weights="mxfp4"), EngineConfig(), silently)
    np.testing.assert_array_equal(np.asarray(load_pretrained(model).decoder.embedding[...]), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "machines.toml",
        "model",
        "text.txt",
    ]
