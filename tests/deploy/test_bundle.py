"""A bundle: served without compiling anything, on this device and JAX alone, and every damaged
file is named.
"""

import contextlib
import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

import serve
from jmoe.cluster.watchdog import EXIT_CODE
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.deploy import bundle as stage
from jmoe.deploy.bundle import OpenBundle, Segments, bundle
from jmoe.deploy.model_folder import hugging_face_folder
from jmoe.deploy.portable import PLAN, plan_json_text, read_plan
from jmoe.inference.engine import Engine
from tests.damage import flip
from tests.deploy.gpt_moe_models import gpt_moe_config, in_numpy, stored_arrays, write_model
from tests.deploy.test_prune import write_tokenizer
from tests.http_servers import HttpProcess, start_server
from tests.processes import Child, kill_group, one_device, start_logged
from tests.train_runs import Run, free_port

SIZES = (
    "--max-batch",
    "2",
    "--max-seq-len",
    "40",
    "--prefill-chunk-tokens",
    "16",
    "--dtype",
    "float32",
)


TEMPLATE = Path("additional_chat_templates", "default.jinja")


def bundled(
    folder: Path,
    run_python: Run,
    *options: str,
    sizes: tuple[str, ...] = SIZES,
    positions: int = 48,
    **env: str,
) -> Path:
    """A bundle of a small random model, written by a process of its own."""
    write_model(folder / "model", max_position_embeddings=positions)
    write_tokenizer(folder / "model")
    (folder / "model" / TEMPLATE.parent).mkdir()
    (folder / "model" / TEMPLATE).write_text("{{ messages }}")
    command = [
        "-m",
        "jmoe.deploy.bundle",
        folder / "model",
        "--out",
        folder / "bundle",
        *sizes,
        *options,
    ]
    done = run_python(command, env=one_device(folder / "cache") | env)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"/bundle: \d+ programs for cpu \S+ and JAX {jax.__version__}\n", done.stdout)
    assert not (folder / "cache").exists()  # every program is in the bundle, none elsewhere
    return folder / "bundle"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, run_python: Run) -> Path:
    return bundled(tmp_path_factory.mktemp("bundles"), run_python)


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def change_plan(folder: Path, **changes: Any) -> None:
    (folder / PLAN).write_text(plan_json_text(read_plan(folder) | changes))


def greedy_text(folder: Path, prompt: str, length: int) -> str:
    """What the model in a folder says, by numpy."""
    config, weights = gpt_moe_config(), stored_arrays(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(prompt).ids
    for _ in range(length):
        logits, _ = in_numpy(config, weights, np.array(tokens))
        tokens.append(int(logits[-1].argmax()))
    text: str = tokenizer.decode(tokens[-length:])
    return text


def check_served(folder: Path, tmp_path: Path, **env: str) -> None:
    """Serve a bundle where nothing is cached and no compiler is; it compiles nothing, also with
    requests.
    """
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    nothing = {"XDG_CACHE_HOME": str(tmp_path / "empty"), "CXX": "no-compiler"}
    server = start_server(tmp_path / "log", one_device(tmp_path / "unused") | nothing | env, folder)
    try:
        body = {"prompt": "hello there", "max_tokens": 8, "ignore_eos": True}
        said = server.post("/v1/completions", temperature=0, **body).json()["choices"][0]["text"]
        assert said == greedy_text(folder / "model", "hello there", 8)
        drawn = server.post(
            "/v1/completions", temperature=0.7, top_p=0.9, seed=3, logprobs=2, **body
        )
        assert drawn.status_code == 200, drawn.text
        number = len(list((folder / "programs").glob("*-cache")))
        counted = f"{number} programs from the bundle, 0 compiled\n"
        server.until_said(f"\n{counted}")
        assert server.terminate() == 0
    finally:
        server.kill()
    assert f"stopped; {counted}" in (tmp_path / "log").read_text()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert not (tmp_path / "empty").exists() and not (tmp_path / "unused").exists()


@pytest.mark.slow
def test_nothing_is_compiled(whole: Path, tmp_path: Path) -> None:
    """Moved to another place, by a real server."""
    check_served(
        Path(shutil.move(shutil.copytree(whole, tmp_path / "one"), tmp_path / "moved")), tmp_path
    )
    assert (whole / "model" / TEMPLATE).read_text() == "{{ messages }}"
    # by the bytes, once for all
    assert json.loads((whole / PLAN).read_text())["engine"]["policy"] == "resident"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "env"),
    [
        (("--policy", "ring", "--ring-slots", "2"), {}),
        (("--native", "off"), {}),
        (("--devices", "2"), {"JAX_NUM_CPU_DEVICES": "2"}),
    ],
)
def test_other_engines(
    options: tuple[str, ...], env: dict[str, str], tmp_path: Path, run_python: Run
) -> None:
    check_served(bundled(tmp_path, run_python, *options, **env), tmp_path, **env)


# Of 2 devices, 3 layers and 4 experts: uneven, and of the last layer expert 1 twice; each layer on
# one device; and the last layer's experts on both.
UNEVEN = [[[0, 1, 2], [0], [3, 1]], [[3], [1, 2, 3], [0, 2, 1]]]
BY_LAYERS = [[[0, 1, 2, 3], [], [0, 1, 2, 3]], [[], [0, 1, 2, 3], []]]
BOTH = [[[0, 1, 2, 3], [], [2, 0]], [[], [0, 1, 2, 3], [1, 3]]]


@pytest.mark.slow
@pytest.mark.parametrize("segments", [UNEVEN, BY_LAYERS, BOTH], ids=["uneven", "by layers", "both"])
def test_segments(segments: Segments, tmp_path: Path, run_python: Run) -> None:
    """Experts where a file says, on two devices: of one process without compiling, and of two,
    of which one is lost.
    """
    (tmp_path / "segments.json").write_text(json.dumps({"segments": segments}))
    options = ("--devices", "2", "--segments", str(tmp_path / "segments.json"))
    folder = bundled(tmp_path, run_python, *options, JAX_NUM_CPU_DEVICES="2")
    (tmp_path / "segments.json").unlink()
    plan = json.loads((folder / PLAN).read_text())
    assert (plan["segments"], plan["engine"]["mesh"]["segments"]) == (segments, None)
    check_served(folder, tmp_path, JAX_NUM_CPU_DEVICES="2")

    with two_processes(folder, tmp_path) as (server, follower):
        body = {"prompt": "hello there", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        said = server.post("/v1/completions", **body).json()["choices"][0]["text"]
        assert said == greedy_text(folder / "model", "hello there", 8)
        assert "programs for several processes, none from the bundle\n" in server.log.read_text()
        follower.kill_now()
        answer = server.post("/v1/completions", **body)
        assert (
            answer.status_code in (500, 503)
            and "rank 1 was lost" in answer.json()["error"]["message"]
        )


@contextlib.contextmanager
def two_processes(folder: Path, tmp_path: Path) -> Iterator[tuple[HttpProcess, Child]]:
    """Serve a bundle by two processes; yield the first, which answers, and the other."""
    env = one_device(tmp_path / "shared") | {"PYTHONUNBUFFERED": "1"}
    join = (
        "--distributed.coordinator-address",
        f"127.0.0.1:{free_port()}",
        "--distributed.num-processes",
        "2",
    )
    command = [
        str(folder),
        *join,
        "--distributed.heartbeat-timeout-s",
        "120",
        "--distributed.process-id",
    ]
    follower = start_logged(["serve.py", *command, "1"], tmp_path / "follower", env)
    server = None
    try:
        server = start_server(tmp_path / "leader", env, *command, "0")
        yield server, follower
    finally:
        kill_group(follower)
        if server is not None:
            server.kill()


@pytest.mark.slow
def test_a_process_is_killed_in_mid_stream(tmp_path: Path, run_python: Run) -> None:
    """Two long answers are streamed and three prompts wait: each ends with an error that names
    the rank.
    """
    length = 4096
    (tmp_path / "segments.json").write_text(json.dumps({"segments": BOTH}))
    options = ("--devices", "2", "--segments", str(tmp_path / "segments.json"))
    sizes = ("--max-batch", "2", "--max-seq-len", str(length), "--prefill-chunk-tokens", "16")
    folder = bundled(
        tmp_path, run_python, *options, sizes=sizes, positions=length, JAX_NUM_CPU_DEVICES="2"
    )
    with two_processes(folder, tmp_path) as (server, follower), ThreadPoolExecutor(3) as threads:
        asked = {"max_tokens": length - 10, "ignore_eos": True, "temperature": 0}
        with (
            server.stream(prompt="a", **asked) as first,
            server.stream(prompt="b", **asked) as second,
        ):
            texts = [next(events)["choices"][0]["text"] for events in (first, second)]
            waiting = [
                threads.submit(server.post, "/v1/completions", prompt=p, **asked) for p in "cde"
            ]
            server.until("/live", lambda live: live.json()["requests_waiting"] == 3)
            follower.kill_now()
            ends = [list(events)[-1] for events in (first, second)]
            answers = [request.result() for request in waiting]
        assert all(texts) and [answer.status_code for answer in answers] == [500] * 3
        for error in (
            *(end["error"] for end in ends),
            *(answer.json()["error"] for answer in answers),
        ):
            assert (error["type"], error["code"]) == ("server_error", "engine_failed")
            assert (
                error["message"] == "the engine has failed: rank 1 was lost: its process has ended"
            )
        assert server.terminate() == EXIT_CODE
    assert "Traceback" not in (tmp_path / "leader").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["evenly", "by layers", "both"])
def test_eight_devices(split: str, tmp_path: Path, run_python: Run) -> None:
    """Each expert on one device; each layer on one of three; layers on two, two and four
    devices.
    """
    options = ["--devices", "8", "--max-batch", "8"]
    if split != "evenly":
        homes = {"by layers": [[0], [3], [7]], "both": [[0, 1], [2, 3], [4, 5, 6, 7]]}[split]
        placed = [
            [[e for e in range(4) if home[e % len(home)] == n] for home in homes] for n in range(8)
        ]
        (tmp_path / "segments.json").write_text(json.dumps({"segments": placed}))
        options += ["--segments", str(tmp_path / "segments.json")]
    folder = bundled(tmp_path, run_python, *options, JAX_NUM_CPU_DEVICES="8")
    segments = json.loads((folder / PLAN).read_text())["segments"]
    assert len(segments) == 8 and sorted(e for layers in segments for e in layers[2]) == [
        0,
        1,
        2,
        3,
    ]
    assert split == "evenly" or segments == placed
    check_served(folder, tmp_path, JAX_NUM_CPU_DEVICES="8")


def test_a_damaged_or_missing_file_is_named(copied: Path, run_python: Run) -> None:
    program = min((copied / "programs").iterdir())
    flip(program, program.stat().st_size // 2)
    done = run_python(["serve.py", copied, "--port", "0"], env=one_device(copied / "none"))
    assert done.returncode == 1
    assert (
        done.stderr == f"serve.py: {program}: is damaged: its SHA-256 is not the one in plan.json\n"
    )
    OpenBundle(copied, EngineConfig(), check_contents=False).close()
    tokenizer, weights = copied / "model" / "tokenizer.json", copied / "model" / "model.safetensors"
    kept = tokenizer.read_bytes()
    tokenizer.unlink()
    with pytest.raises(ValueError, match=r"model/tokenizer.json: is missing; plan.json lists it"):
        OpenBundle(copied, EngineConfig(), check_contents=False)
    tokenizer.write_bytes(kept)
    os.truncate(weights, 1000)
    with pytest.raises(
        ValueError, match=rf"{weights}: is damaged: has 1000 bytes, plan.json says \d+"
    ):
        serve.run([str(copied), "--check-files", "sizes"])
    (copied / PLAN).write_text("[]")
    with pytest.raises(ValueError, match=r"plan.json: is damaged"):
        serve.run([str(copied)])
    (copied / PLAN).unlink()
    with pytest.raises(ValueError, match=r"plan.json: is missing"):
        serve.run([str(copied)])


def test_damage_to_any_file_is_named(copied: Path) -> None:
    """Of the files of a bundle, of two programs: a bit, the last bytes, the file. Of the plan: a
    bit of any byte.
    """
    programs = sorted((copied / "programs").iterdir())
    files = [
        *programs[:2],
        *(file for file in copied.rglob("*") if file.is_file() and file not in programs),
    ]
    assert {file.suffix for file in files[2:]} == {".json", ".jinja", ".safetensors"} and len(
        programs
    ) > 10

    def named(file: Path, said: str) -> None:
        with pytest.raises(ValueError, match=rf"^{re.escape(str(file))}: {said}"):
            OpenBundle(copied, EngineConfig())

    for file in files:
        content = file.read_bytes()
        flip(file, len(content) // 2, bit=3)
        named(file, "is damaged")
        file.write_bytes(content[:-2])
        named(
            file,
            "is damaged" if file.name == PLAN else rf"is damaged: has {len(content) - 2} bytes",
        )
        file.unlink()
        named(file, "is missing")
        file.write_bytes(content)
    plan = (copied / PLAN).read_bytes()
    for at in range(0, len(plan), 11):
        flip(copied / PLAN, at)
        with pytest.raises(ValueError, match=r"plan\.json: is damaged"):
            read_plan(copied)
        (copied / PLAN).write_bytes(plan)
    OpenBundle(copied, EngineConfig()).close()


@pytest.mark.parametrize(
    "name",
    [
        "model/chat_template.jinja",
        "model/additional_chat_templates/x.jinja",
        "programs/other.so",
        "programs/x-cache",
    ],
)
def test_files_that_were_added_are_named(copied: Path, name: str) -> None:
    """Templates would be rendered, programs and libraries run, though no checksum has been
    compared.
    """
    added = copied / name
    added.parent.mkdir(exist_ok=True)
    for link in (False, True):
        if link:
            added.symlink_to(copied / PLAN)
        else:
            added.write_text("x")
        with pytest.raises(
            ValueError,
            match=rf"^{re.escape(str(added))}: is not a file of the bundle: plan.json does not",
        ):
            OpenBundle(copied, EngineConfig(), check_contents=False)
        added.unlink()


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"/etc/passwd": {"bytes": 1, "sha256": ""}}},
        {"files": {"../model/config.json": {"bytes": 1, "sha256": ""}}},
        {"files": {"model/config.json": {"bytes": 1}}},
        {"files": {"model/config.json": [1, ""]}},
        {"files": {"model/config.json": {"bytes": "1", "sha256": ""}}},
        {"engine": []},
        {"engine": {"mesh": {}, "nothing": 1}},
        {"segments": [[]], "versions": "1"},
        {"device": {"platform": "cpu"}},
    ],
    ids=str,
)
def test_a_plan_with_a_checksum_of_its_own_is_not_believed(
    copied: Path, changes: dict[str, Any]
) -> None:
    change_plan(copied, **changes)
    with pytest.raises(ValueError, match=r"plan\.json: is damaged or of another version of jmoe: "):
        OpenBundle(copied, EngineConfig())


@pytest.mark.parametrize(
    "place",
    [{"cache_dir": "/tmp"}, {"native": "off", "mesh": {"devices": 2, "segments": "/etc/passwd"}}],
    ids=str,
)
def test_a_plan_names_no_place_on_a_machine(copied: Path, place: dict[str, Any]) -> None:
    engine = read_plan(copied)["engine"]
    change_plan(copied, engine=engine | place | {"mesh": engine["mesh"] | place.get("mesh", {})})
    with pytest.raises(
        ValueError, match=r"plan\.json: engine = .*: must name no place on a machine"
    ):
        OpenBundle(copied, EngineConfig())


def test_a_plan_that_is_nested_or_long(copied: Path) -> None:
    for text in ("[" * 100_000, '{"form": "bundle", "files": {' + " " * (65 << 20) + "}}"):
        (copied / PLAN).write_text(text)
        with pytest.raises(ValueError, match=r"plan\.json: is damaged"):
            OpenBundle(copied, EngineConfig())


def test_a_disk_that_fills_while_programs_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX by itself would only warn, and leave a program's first bytes, for which the plan would
    have a checksum.
    """
    write_model(tmp_path / "model")
    write_tokenizer(tmp_path / "model")

    def on_a_full_disk(*arguments: Any) -> Any:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with Engine(*arguments) as engine:
                engine.compile_all_programs()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(stage, "Engine", on_a_full_disk)
    options = EngineConfig(max_batch=1, max_seq_len=16, prefill_chunk_tokens=8, native="off")
    with pytest.raises(OSError, match="File too large"):
        bundle(tmp_path / "model", tmp_path / "out", options, lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_process_left_is_no_bundle(copied: Path) -> None:
    left = copied.rename(copied.with_name(".out.partial"))
    (left / PLAN).unlink()  # which is written last
    with pytest.raises(ValueError, match=r"plan\.json: is missing"):
        serve.run([str(left)])


@pytest.mark.slow
def test_a_process_that_is_killed_in_mid_way(tmp_path: Path, run_python: Run) -> None:
    """There is no bundle, and the same command makes one and leaves nothing else."""
    write_model(tmp_path / "model", max_position_embeddings=48)
    write_tokenizer(tmp_path / "model")
    out, left, env = tmp_path / "out", tmp_path / ".out.partial", one_device(tmp_path / "cache")
    command = ["-m", "jmoe.deploy.bundle", tmp_path / "model", "--out", out, *SIZES]
    child = start_logged(command, tmp_path / "log", env)
    try:
        child.wait_until(lambda: out.exists() or list(left.glob("programs/*-cache")))
        child.kill_now()
    finally:
        kill_group(child)
    if not out.exists():  # the process may have been faster
        with pytest.raises(ValueError, match=r"plan\.json: is missing"):
            serve.run([str(left)])
        done = run_python(command, env=env)
        assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"log", "model", "out"}
    OpenBundle(out, EngineConfig()).close()


def test_another_jax_or_device_is_named(copied: Path) -> None:
    plan = json.loads((copied / PLAN).read_text())
    change_plan(copied, versions=plan["versions"] | {"jaxlib": "0.9.9"})
    with pytest.raises(
        ValueError, match=r"plan.json: needs jaxlib 0.9.9, this is \S+; make the bundle again here"
    ):
        serve.run([str(copied)])
    change_plan(
        copied,
        versions=plan["versions"],
        device=plan["device"] | {"platform": "gpu", "kind": "NVIDIA H200"},
    )
    with pytest.raises(
        ValueError,
        match=r"needs the device gpu NVIDIA H200, this is cpu \S+; make the bundle again",
    ):
        serve.run([str(copied)])
    change_plan(
        copied,
        device=plan["device"] | {"instructions": [*plan["device"]["instructions"], "avx4096"]},
    )
    with pytest.raises(
        ValueError, match=r"needs a processor with avx4096; make the bundle again here"
    ):
        serve.run([str(copied)])
    change_plan(copied, device=plan["device"], engine=plan["engine"] | {"magic": 1})
    with pytest.raises(ValueError, match=r"is damaged or of another version of jmoe: .*magic"):
        serve.run([str(copied)])
    change_plan(copied, form="portable")
    (copied / "run.py").write_text("")
    with pytest.raises(
        ValueError, match=rf"form = 'portable': must be 'bundle'; {copied}/run.py runs this one"
    ):
        serve.run([str(copied)])


def test_options_of_a_bundle_are_its_own(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "max_batch = 4: must be 2, which the bundle's programs are made for, or left out"
    with pytest.raises(ValueError, match=re.escape(message)):
        serve.run([str(whole), "--max-batch", "4"])
    before = jax.config.values["jax_compilation_cache_dir"]
    serve.run([str(whole), "--max-batch", "2", "--cache-dir", "elsewhere", "--dry-run"])
    assert "bundle/model: 2 sequences at once, 40 tokens each" in capsys.readouterr().out
    assert jax.config.values["jax_compilation_cache_dir"] == before
    with OpenBundle(whole, EngineConfig(cache_dir="elsewhere")) as one:
        assert (one.engine.cache_dir, one.engine.max_batch, one.model) == (
            "elsewhere",
            2,
            whole / "model",
        )
        assert jax.config.values["jax_compilation_cache_dir"] == str(whole / "programs")


def test_what_is_refused_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: Callable[[str], None] = lambda _: None  # noqa: E731
    write_model(tmp_path / "model")
    with pytest.raises(ValueError, match=r"MODEL = .*model': must hold a tokenizer.json"):
        bundle(tmp_path / "model", tmp_path / "out", EngineConfig(), said)
    write_tokenizer(tmp_path / "model")
    with pytest.raises(ValueError, match=r"mesh\.devices = 99: must be at most the \d+ of this"):
        bundle(
            tmp_path / "model",
            tmp_path / "out",
            EngineConfig(max_batch=99, mesh=EngineMesh(devices=99)),
            said,
        )
    with pytest.raises(
        ValueError, match="max_seq_len = 4000: must not exceed the model's 48 positions"
    ):
        bundle(tmp_path / "model", tmp_path / "out", EngineConfig(max_seq_len=4000), said)
    with pytest.raises(
        ValueError, match=r"out = .*: must be an empty folder or none: nothing is written over"
    ):
        bundle(tmp_path / "model", tmp_path / "model", EngineConfig(), said)
    message = (
        rf"MODEL = '{tmp_path}': is a bundle: must be a Hugging Face folder, such as its"
        rf" {tmp_path}/model"
    )
    with pytest.raises(ValueError, match=message), hugging_face_folder(tmp_path, said, "MODEL"):
        pass

    def fail(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(stage, "Engine", fail)
    before = jax.config.values["jax_compilation_cache_dir"]
    with pytest.raises(OSError, match="No space left"):
        bundle(tmp_path / "model", tmp_path / "out", EngineConfig(), said)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert jax.config.values["jax_compilation_cache_dir"] == before
