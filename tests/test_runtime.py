"""What a process prints where nobody can read it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jmoe import runtime
from tests.processes import ROOT
from tests.train_runs import TrainRuns, losses

SAYS = """if True:
    import logging, sys
    from jmoe.runtime import log_to_stderr, ignore_output_errors
    ignore_output_errors()
    log_to_stderr()
    for step in range(1000):
        print(f"step {step} 日本語", flush=True)
        logging.getLogger("jmoe").info("step %d", step)
    open(sys.argv[1], "w").write("done")
"""


def test_a_process_outlives_the_reader_of_its_screen(tmp_path: Path) -> None:
    """`train.py PRESET | head -1`; the other stream says once that lines are lost."""
    command = [sys.executable, "-c", SAYS, tmp_path / "end"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "step 0 日本語\n"
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0 and (tmp_path / "end").read_text() == "done"
    assert said.count(": goes on, but what it prints is lost: Broken pipe\n") == 1
    assert said.count("INFO jmoe: step ") == 1000


def test_a_process_outlives_a_full_disk_with_its_log(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", SAYS, tmp_path / "end"]
        subprocess.run(command, cwd=ROOT, stdout=full, stderr=full, check=True)
    assert (tmp_path / "end").read_text() == "done"


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """As a service starts a process: what XLA or a traceback prints went into a checkpoint."""
    code = """if True:
        import os, sys
        from jmoe.runtime import reexec_with_env
        reexec_with_env()
        with open(sys.argv[1], "w") as file:
            os.write(2, b"printed")
            file.write(str(file.fileno()))
    """
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    subprocess.run(
        [*closed, tmp_path / "file"], cwd=ROOT, env=os.environ | {"JMOE_RUNTIME": "1"}, check=True
    )
    assert int((tmp_path / "file").read_text()) > 2


def test_characters_that_a_screen_lacks_are_escaped(tmp_path: Path) -> None:
    """A run of hours ended in its last line, which showed a text."""
    done = subprocess.run(
        [sys.executable, "-c", SAYS, tmp_path / "end"],
        cwd=ROOT,
        env={"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("step 0 \\u65e5\\u672c\\u8a9e\n")


@pytest.mark.slow
def test_a_run_outlives_its_screen(runs: TrainRuns, tmp_path: Path) -> None:
    command = runs.command(tmp_path / "run", "--num-steps", 7)
    environment = {k: v for k, v in runs.environment().items() if v is not None}
    with Path("/dev/full").open("w") as full:
        subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=full,
            stderr=full,
            check=True,
        )
    assert len(losses(tmp_path / "run")) == 7


def test_jax_may_take_nine_tenths_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it takes three quarters. What the user has set stays, and a CPU run sets nothing."""
    monkeypatch.setattr(runtime, "find_spec", lambda name: name == "jax_cuda13_plugin" or None)
    wanted = {"XLA_CLIENT_MEM_FRACTION": "0.9"}
    assert runtime.gpu_memory_environment({}) == wanted
    assert runtime.gpu_memory_environment({"JAX_PLATFORMS": "cuda"}) == wanted
    for given in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        assert runtime.gpu_memory_environment({given: "0.5"}) == {}
    assert runtime.gpu_memory_environment({"JAX_PLATFORMS": "cpu"}) == {}
    monkeypatch.setattr(runtime, "find_spec", lambda name: None)
    assert runtime.gpu_memory_environment({}) == {}
