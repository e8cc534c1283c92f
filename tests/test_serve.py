"""serve.py from the command line: the plan, mistakes, and a run of train.py that is served."""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import fastapi
import pytest

import serve
from jmoe.config.engine import EngineConfig
from jmoe.deploy.merge import merge_run_to_hugging_face
from jmoe.deploy.model_folder import hugging_face_folder
from jmoe.inference.engine import Engine
from jmoe.programs import generate
from jmoe.run.checkpoint_contents import read_step_manifest, write_step_manifest
from tests.compiled import compilations
from tests.file_systems import read_only
from tests.http_servers import START_LIMIT_S, HttpProcess, start_server
from tests.model_configs import CHECKPOINTS
from tests.train_runs import Run, Start, TrainRuns


def mixtral(tmp_path: Path) -> Path:
    """A model with a tokenizer of no tokens, which will do as long as nothing is loaded."""
    folder = tmp_path / "mixtral"
    shutil.copytree(CHECKPOINTS / "mixtral", folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    return folder


def test_the_plan_needs_no_weights(run_python: Run, tmp_path: Path) -> None:
    """--dry-run: from the headers alone; no byte of a weight is read."""
    folder = mixtral(tmp_path)
    weights = next(folder.glob("*.safetensors"))
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    with weights.open("r+b") as file:  # a hole where the weights were
        size = os.fstat(file.fileno()).st_size
        file.truncate(header)
        file.truncate(size)
    options = ("--policy", "ring", "--ring-slots", 1, "--max-batch", 3)
    done = run_python(["serve.py", folder, "--dry-run", *map(str, options)])
    assert done.returncode == 0, done.stderr
    assert f"mixtral from {folder}: 3 sequences at once, 64 tokens each" in done.stdout
    assert "policy ring, experts from host" in done.stdout and "keys and values" in done.stdout


@pytest.mark.parametrize("positions", [40960, 10**9])
def test_the_default_context_is_what_fits(
    positions: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All the positions that the model has, or as many as memory has room for; the start says
    so.
    """
    folder = mixtral(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    serve.run([str(folder), "--dry-run"])
    said = capsys.readouterr().out
    (length,) = re.findall(r"8 sequences at once, ([\d,]+) tokens each", said)
    tokens = int(length.replace(",", ""))
    if positions == 40960:
        assert tokens == positions and "the model has" not in said
    else:
        assert (
            40960 < tokens < positions
            and "the model has 1,000,000,000 positions; --max-seq-len allows" in said
        )


def test_mistakes(run_python: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Told in a line, before anything is loaded."""
    keys = tmp_path / "keys"
    keys.write_text("\n")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    model = str(mixtral(tmp_path))
    no_template, no_tokenizer = (
        shutil.copytree(model, tmp_path / name) for name in ("no template", "no tokenizer")
    )
    (no_template / "tokenizer_config.json").write_text('{"chat_template": 1}')
    (no_tokenizer / "tokenizer.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, message in (
            ([tmp_path / "nothing"], "must be a folder; `make train` leaves a model in runs/tiny"),
            ([tmp_path], "config.json: is missing"),
            ([tmp_path / "run"], "the run has no checkpoint yet"),
            ([CHECKPOINTS / "olmoe"], "must hold a tokenizer.json"),
            ([model, "--ring-slots", "9"], "ring_slots = 9: must be between 1 and 2"),
            (
                [model, "--max-seq-len", "65"],
                "max_seq_len = 65: must not exceed the model's 64 positions",
            ),
            (
                [model, "--max-seq-len", "100000", "--dry-run"],
                "must not exceed the model's 64 positions",
            ),
            ([model, "--api-key-file", keys], "api_key_file = "),
            ([no_tokenizer, "--port", "0"], "tokenizer.json: not a readable tokenizer.json"),
            (
                [no_template, "--port", "0"],
                "tokenizer_config.json: chat_template must be a string or a list of",
            ),
            ([model, "--port", str(port)], f"port = {port}: Address already in use"),
        ):
            with pytest.raises((ValueError, OSError), match=re.escape(message)):
                serve.run(list(map(str, arguments)))
        assert "loading" not in capsys.readouterr().out, "no weight was read for any of them"
        done = run_python(["serve.py", model, "--port", str(port)])
    assert done.returncode == 1 and f"port = {port}: Address already in use" in done.stderr, (
        done.stderr
    )
    assert "Traceback" not in done.stderr
    for option, message in (
        ("--policy=fast", "invalid choice"),
        ("--estimator=luck", "invalid choice"),
        ("--port=70000", "port = 70000"),
        ("--allowed-origins=https://a.example/", "allowed_origins = 'https://a.example/'"),
        ("--max-seq-len=0", "max_seq_len = 0: must be at least 2"),
        ("--max-prefill-tokens=511", "max_prefill_tokens = 511"),
    ):
        with pytest.raises(SystemExit):
            serve.run([model, option])
        assert message in capsys.readouterr().err


def test_a_package_that_is_not_installed_is_named(run_python: Run, tmp_path: Path) -> None:
    """With what installs it, before JAX is imported and without a traceback; help needs none of
    them.
    """
    packages = tmp_path / "site-packages"
    packages.mkdir()
    for path in Path(fastapi.__file__).parents[1].iterdir():
        if not path.name.startswith(("fastapi", "starlette")):
            (packages / path.name).symlink_to(path)
    # without site-packages of its own
    env = {
        "PYTHONPATH": f"{packages}{os.pathsep}{Path(serve.__file__).parent}",
        "JMOE_RUNTIME": "1",
    }
    done = run_python(["-S", "serve.py", "no-model"], env=env)
    assert done.returncode == 1
    assert (
        done.stderr == "serve.py: needs the package fastapi, which is not installed: pip install"
        " 'jmoe[serve]'\n"
    )
    assert run_python(["-S", "serve.py", "--help"], env=env).returncode == 0


def test_every_option_is_described(run_python: Run) -> None:
    """Beside its name, not in a paragraph for all."""
    done = run_python(["serve.py", "--help"])
    assert done.returncode == 0, done.stderr
    options = re.findall(
        r"--([a-z0-9-]+) (.*?)\(default:", " ".join(done.stdout.replace("│", " ").split())
    )
    assert {name for name, _ in options} >= {
        "host",
        "port",
        "api-key-file",
        "max-seq-len",
        "policy",
        "dry-run",
    }
    bare = [name for name, words in options if len(words.split()) < 4]
    assert bare == []


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of the last change of everything in a folder."""
    found = {path: path.stat() for path in sorted(folder.rglob("*"))}
    return {
        str(path.relative_to(folder)): (stat.st_size, stat.st_mtime_ns)
        for path, stat in found.items()
    }


@pytest.fixture(scope="module")
def trained(runs: TrainRuns, run_python: Run) -> Path:
    """The output folder of a run of 5 steps; not to be changed."""
    output_dir = runs.folder / "trained"
    done = run_python(
        runs.command(output_dir, "--num-steps", 5, data=runs.text), env=runs.environment()
    )
    assert done.returncode == 0, done.stderr
    return output_dir


def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run from which nothing was served yet."""
    return shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("merged"))


def merged_step(output_dir: Path, *others: str) -> Path:
    """The one merge of step 5 in a run's folder, beside these."""
    (merged,) = (output_dir / "merged").glob("step-5-*")
    names = sorted(path.name for path in (output_dir / "merged").iterdir())
    assert names == sorted(["merge.lock", merged.name, *others])
    return merged


@pytest.mark.slow
def test_servers_that_start_at_once(
    trained: Path, runs: TrainRuns, start_python: Start, tmp_path: Path
) -> None:
    """Three of one run: one merges it, the others wait for that, and none fails."""
    output_dir = copied(trained, tmp_path)
    (output_dir / "merged" / "partial-of-one-that-was-killed").mkdir(parents=True)
    logs = [tmp_path / f"log-{i}" for i in range(3)]
    command = ["serve.py", output_dir, "--dry-run"]
    processes = [start_python(command, log, env=runs.environment()) for log in logs]
    for process, log in zip(processes, logs, strict=True):
        assert process.wait(START_LIMIT_S) == 0, log.read_text()
        assert f"step 5 of {output_dir} is in {merged_step(output_dir)}\n" in log.read_text()


@pytest.mark.slow
def test_a_merge_stays_while_it_is_served(trained: Path, tmp_path: Path) -> None:
    """A newer one removes older ones, but none that a server may still read experts from."""
    output_dir = copied(trained, tmp_path)
    merges = output_dir / "merged"
    for step in (3, 4):
        (merges / f"step-{step}").mkdir(parents=True)
    in_use = os.open(merges / "step-3", os.O_RDONLY)
    fcntl.flock(in_use, fcntl.LOCK_SH)
    with hugging_face_folder(output_dir, print) as folder:
        written = contents(folder)
        with hugging_face_folder(output_dir, print) as again:
            assert again == folder == merged_step(output_dir, "step-3")
            assert contents(again) == written, "merged once"
        other = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for descriptor in (in_use, other):
        os.close(descriptor)
    manifest = output_dir / "checkpoints" / "5" / "manifest.json"
    # another step of that number
    write_step_manifest(manifest, read_step_manifest(manifest) | {"packing": 2})
    with hugging_face_folder(output_dir, print) as again:
        assert again != folder and again == merged_step(output_dir), (
            "merged anew; nobody uses the others"
        )


@pytest.mark.slow
def test_a_step_that_was_trained_again_is_merged_again(
    trained: Path, runs: TrainRuns, run_python: Run, tmp_path: Path
) -> None:
    """The number is the same, the weights are not: what is served are those of the checkpoint."""
    output_dir = copied(trained, tmp_path)
    with hugging_face_folder(output_dir, print) as folder:
        first = (folder / "model.safetensors").read_bytes()
    shutil.rmtree(output_dir / "checkpoints")
    again = ("--num-steps", 5, "--optimizer.weight-decay", 0.3)
    done = run_python(runs.command(output_dir, *again, data=runs.text), env=runs.environment())
    assert done.returncode == 0, done.stderr
    merge_run_to_hugging_face(output_dir, tmp_path / "expected")
    with hugging_face_folder(output_dir, print) as folder:
        served = (folder / "model.safetensors").read_bytes()
    assert served == (tmp_path / "expected" / "model.safetensors").read_bytes() != first
    assert merged_step(output_dir) == folder


def test_a_run_that_cannot_be_written_is_served_from_elsewhere(
    trained: Path, tmp_path: Path
) -> None:
    output_dir, said = copied(trained, tmp_path), list[str]()
    with read_only(output_dir):
        words = (
            rf"^model = '{output_dir}': its newest step cannot be merged in .*; merge it elsewhere"
            r" by python -m "
        )
        with pytest.raises(OSError, match=words), hugging_face_folder(output_dir, said.append):
            pass
        for _ in range(2):
            with hugging_face_folder(
                output_dir, said.append, cache_dir=tmp_path / "cache"
            ) as folder:
                assert folder.parent == tmp_path / "cache" / "merged"
                assert (folder / "model.safetensors").is_file()
        assert len([line for line in said if line.startswith("merging")]) == 1
    with hugging_face_folder(output_dir, said.append) as folder:
        pass
    with read_only(output_dir):
        with hugging_face_folder(output_dir, said.append) as again:
            assert again == folder, "merged before"
        options = {
            "policy": "experts",
            "expert_tier": "nvme",
            "device_bytes": 1 << 20,
            "host_cache_bytes": 1 << 20,
        }
        words = (
            r"^cache_dir = None: experts of the tier nvme cannot be written to"
            rf" {folder}/jmoe_experts: "
        )
        with pytest.raises(OSError, match=words):
            Engine(folder, EngineConfig(max_batch=1, **options))


IMPORTING = """
import sys
import serve
from jmoe.runtime import import_ahead
assert not {"jax", "numpy", "tyro", "jmoe.config"} & sys.modules.keys(), "before the re-execution"
import_ahead("jmoe.inference.engine", "jmoe.serving.app", "jmoe.serving.http_server")
import jmoe.deploy.bundle, jmoe.deploy.model_folder, jmoe.programs.generate
print(*sorted({".".join(name.split(".")[:2]) for name in sys.modules}))
"""


def test_a_start_imports_no_trainer(run_python: Run) -> None:
    """Neither Orbax, whose import takes half a second, nor what trains: the folder of a run needs
    them, that of a model does not.
    """
    done = run_python(["-c", IMPORTING])
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert {"jax", "jmoe.inference", "jmoe.serving"} <= set(imported)
    unwanted = ("orbax.checkpoint", "tensorstore", "grain", "jmoe.training", "jmoe.optim")
    assert [name for name in imported if name.startswith(unwanted)] == []


def test_prompts_of_any_length_run_the_same_programs(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for prompt, new_tokens in (("def f(", 3), ("class A", 5)):
        arguments = ["generate", str(trained), prompt, "--max-new-tokens", str(new_tokens)]
        monkeypatch.setattr(sys, "argv", arguments)
        with compilations() as compiled:
            generate.main()
    # Without the native library, experts run in bundles of 8, 4, 2 or 1; the program of a size
    # compiles when that many experts are first chosen.
    assert [name for name in compiled if name != "jit(_add_bundle_on_all_tokens)"] == []


def test_generate(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a run's folder; as many tokens as the model has positions for, and no more."""

    def say(*options: object) -> str:
        monkeypatch.setattr(sys, "argv", ["generate", str(trained), *map(str, options)])
        generate.main()
        found = capsys.readouterr()
        said.append(found.err)
        return found.out

    said: list[str] = []
    assert say("def f(", "--max-new-tokens", 5).startswith("def f(")
    assert (
        re.search(r"^loading .*: \d+\.\d s$", said[0], re.MULTILINE)
        and "\ncompiling and generating ...\n" in said[0]
    )
    assert say(
        "def f(", "--max-new-tokens", 5, "--expert-dtype", "int8", "--policy", "resident"
    ).startswith("def f(")
    sizes = [float(re.findall(r"on the device \((\S+) MB\)", text)[0]) for text in said]
    assert sizes[0] > sizes[1], "8.5 bits a weight where float32 has 32"
    for options, message in (
        (
            ["def f(", "--max-new-tokens", 5000],
            r"max_new_tokens = 5000: must be at most 2\d\d: the prompt has \d tokens",
        ),
        (["def f(", "--max-new-tokens", 0], "max_new_tokens = 0: must be an integer, at least 1"),
        (["", "--max-new-tokens", 5], "prompt = '': must hold at least one token"),
        (
            ["a b c " * 200],
            r"prompt = 'a b c .*\.\.\.': has \d+ tokens; the model has 256 positions",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            say(*options)


def test_a_run_is_served(trained: Path, runs: TrainRuns, tmp_path: Path) -> None:
    """Its newest checkpoint, merged once, with the tokenizer that it was trained with."""
    output_dir, env = copied(trained, tmp_path), runs.environment()
    # the run may still go on
    unfinished = output_dir / "checkpoints" / "6.orbax-checkpoint-tmp" / "state"
    unfinished.mkdir(parents=True)
    (unfinished / "manifest.ocdbt").touch()
    checkpoints = contents(output_dir / "checkpoints")
    for start in range(2):
        server = start_server(
            tmp_path / f"log-{start}",
            env,
            output_dir,
            "--max-batch",
            1,
            "--prefill-chunk-tokens",
            16,
        )
        try:
            models = server.get("/v1/models").json()["data"]
            assert [(m["id"], m["max_model_len"]) for m in models] == [("run", 256)]
            answer = server.post("/v1/completions", prompt="def f(", max_tokens=4).json()
            assert answer["usage"]["completion_tokens"] >= 1
            assert server.terminate() == 0, server.log.read_text()
        finally:
            server.kill()
        assert f"step 5 of {output_dir}" in server.log.read_text()
    assert contents(output_dir / "checkpoints") == checkpoints, (
        "nothing written, nothing cleaned up"
    )
    assert json.loads((merged_step(output_dir) / "config.json").read_text())["vocab_size"] == 512


@pytest.mark.slow
def test_a_newer_step_is_loaded(
    trained: Path, runs: TrainRuns, run_python: Run, tmp_path: Path
) -> None:
    """At SIGHUP: the run went on meanwhile, and the server answers as one that starts then."""
    output_dir, env = copied(trained, tmp_path), runs.environment()
    options = ("--max-batch", 1, "--prefill-chunk-tokens", 16)
    body = {"prompt": "def f(", "max_tokens": 0, "echo": True, "logprobs": 0}

    def logprobs(server: HttpProcess) -> list[float]:
        choice = server.post("/v1/completions", **body).json()["choices"][0]
        return choice["logprobs"]["token_logprobs"][1:]

    server = start_server(tmp_path / "log", env, output_dir, *options)
    try:
        old = logprobs(server)
        done = run_python(runs.command(output_dir, "--num-steps", 10, data=runs.text), env=env)
        assert done.returncode == 0, done.stderr
        assert logprobs(server) == old
        server.process.send_signal(signal.SIGHUP)
        server.until_said("reloaded from ")
        assert f"step 10 of {output_dir}" in server.log.read_text()
        new = logprobs(server)
        assert server.terminate() == 0
    finally:
        server.kill()
    fresh = start_server(tmp_path / "fresh", env, output_dir, *options)
    try:
        assert logprobs(fresh) == new != old
    finally:
        fresh.kill()
