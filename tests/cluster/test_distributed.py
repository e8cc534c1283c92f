"""Starting together, noticing missing, dead and stuck ranks, stopping together: with real
processes.
"""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from jmoe.cluster import clocks, distributed
from jmoe.cluster.signals import PreemptionSignal, RequestSignal
from jmoe.cluster.watchdog import EXIT_CODE, Watchdog
from jmoe.config import DistributedConfig
from tests.fakes import wait_for, wait_for_text
from tests.processes import Child
from tests.train_runs import Run, Start, free_port

RunRanks = Callable[..., list[Child]]

# A run in small: RANK PROCESSES PORT OPTION=VALUE..., one all-reduce a step.
WORKER = """
import os, sys, time
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jmoe.config import DistributedConfig
from jmoe.cluster.distributed import join_processes
from jmoe.cluster.signals import PreemptionSignal
from jmoe.cluster.watchdog import Watchdog

rank, processes, port = map(int, sys.argv[1:4])
option = dict(word.split("=") for word in sys.argv[4:])
clock, ahead_s = time.time, dict(map(int, word.split(":")) for word in option.get("clocks", "").split(",") if word)
time.time = lambda: clock() + ahead_s.get(rank, 0)
print("imported", flush=True)
while not os.path.exists(option.get("go", "/")):
    time.sleep(0.01)
join_processes(DistributedConfig(
    coordinator_address=f"127.0.0.1:{port}", num_processes=processes, process_id=rank,
    start_timeout_s=int(option.get("start_s", 240)), heartbeat_timeout_s=int(option.get("heartbeat_s", 60)),
    step_timeout_s=240))
print("started", jax.process_index(), jax.process_count(), flush=True)
sharding = NamedSharding(jax.make_mesh((processes,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d"))
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))
total(jax.make_array_from_process_local_data(sharding, np.ones((1,), np.float32))).block_until_ready()
steps = int(option.get("steps", 1000000))
step_limit_s = float(option.get("step_s", 240))
with Watchdog(step_limit_s, float(option.get("heartbeat_s", 60))) as watchdog, PreemptionSignal() as preemption:
    pending = []
    for step in range(1, steps + 1):
        with watchdog.waiting_for("training data", step):
            time.sleep(float(option.get("pause_s", 0.05)))
            if option.get("stuck") == f"{rank}:{step}":
                time.sleep(1000)
            if option.get("error") == f"{rank}:{step}":
                raise OSError("no space left on the moon")
        with watchdog.waiting_for("training step", step):
            x = jax.make_array_from_process_local_data(sharding, np.full((1,), step, np.float32))
            pending.append(total(x))
            if len(pending) > 1:  # one step in flight
                assert float(pending.pop(0)) == processes * (step - 1)
        print("step", step, flush=True)
        if preemption.must_stop_after(step):
            print("stop", step, flush=True)
            time.sleep(float(option.get("save_s", 0)))  # the save
            print("saved", flush=True)
            break
print("end", flush=True)
"""


# Rank 0 answers, or fails: RANK PROCESSES PORT
ANSWERING = """
import errno, json, sys
from jmoe.config import DistributedConfig
from jmoe.cluster.coordinator import result_from_rank_0
from jmoe.cluster.distributed import join_processes

rank, processes, port = map(int, sys.argv[1:4])
join_processes(DistributedConfig(
    coordinator_address=f"127.0.0.1:{port}", num_processes=processes, process_id=rank,
    start_timeout_s=240, heartbeat_timeout_s=60, step_timeout_s=240))

def fail(error):
    raise error

for name, call in {
    "answer": lambda: "7",
    "mistake": lambda: fail(ValueError("num_steps = 3: must be at least 5")),
    "json": lambda: json.loads("{"),
    "disk": lambda: fail(OSError(errno.ENOSPC, "No space left on device", "/run")),
    "absent": lambda: open("/nowhere/at/all"),
    "taken": lambda: fail(OSError("/run: another run uses it")),
    "bug": lambda: {}["x"],
}.items():
    try:
        said = result_from_rank_0(name, call, 60)
    except Exception as error:
        kind = next(k for k in (FileNotFoundError, OSError, ValueError, Exception) if isinstance(error, k))
        said = f"{kind.__name__}: {error}"
    print("said", name, said, flush=True)
"""


@pytest.fixture
def run_ranks(start_python: Start, tmp_path: Path) -> RunRanks:
    """`run_ranks(ranks, processes, *options)` starts these ranks."""

    def run(ranks: list[int], processes: int, *options: str) -> list[Child]:
        port = free_port()
        environment = {"PYTHONUNBUFFERED": "1", "JAX_NUM_CPU_DEVICES": "1"}
        return [
            start_python(
                ["-c", WORKER, rank, processes, port, *options],
                tmp_path / f"{rank}.log",
                environment,
            )
            for rank in ranks
        ]

    return run


def ends(process: Child) -> int:
    """Its exit status. The limit is for what hangs: it ends by limits of its own."""
    return process.wait(timeout=300)


def in_step_20(ranks: list[Child]) -> list[Child]:
    """The ranks, once all have come so far."""
    for rank in ranks:
        wait_for_text(rank.log, "step 20\n")
    return ranks


@pytest.mark.parametrize("present", [[0, 2], pytest.param([2], marks=pytest.mark.slow)])
def test_a_missing_rank_is_named_on_every_rank_present(
    run_ranks: RunRanks, tmp_path: Path, present: list[int]
) -> None:
    """With rank 0 absent the others can name only it; else rank 0 names all that are missing."""
    ranks = run_ranks(present, 4, "start_s=4", f"go={tmp_path / 'go'}")
    for rank in ranks:
        # only then the limit begins, for all of them together
        wait_for_text(rank.log, "imported\n")
    (tmp_path / "go").touch()
    assert [ends(rank) for rank in ranks] == [1] * len(present)
    expected = (
        "TimeoutError: ranks 1, 3 did not start within"
        if 0 in present
        else "TimeoutError: rank 0 (the coord"
    )
    for rank in ranks:
        assert expected in rank.screen
        assert "distributed.start_timeout_s = 4 s" in rank.screen


def test_two_processes_with_one_rank_are_an_error_everywhere(
    tmp_path: Path, start_python: Start
) -> None:
    port = free_port()
    arguments = [(0, "a"), (1, "b"), (1, "c")]
    ranks = [
        start_python(["-c", WORKER, rank, 3, port, "start_s=200"], tmp_path / name)
        for rank, name in arguments
    ]
    assert [ends(rank) for rank in ranks] == [1, 1, 1]
    for rank in ranks:
        assert "ValueError: distributed: two processes were told process_id = 1" in rank.screen


def test_all_ranks_say_what_rank_0_says(tmp_path: Path, start_python: Start) -> None:
    """The same kind of error in the same words: a mistake of the user is one on every rank."""
    port = free_port()
    ranks = [
        start_python(["-c", ANSWERING, rank, 2, port], tmp_path / f"{rank}.log") for rank in (0, 1)
    ]
    assert [ends(rank) for rank in ranks] == [0, 0]
    first, second = (re.findall("^said .*", rank.screen, re.MULTILINE) for rank in ranks)
    assert first[:-1] == second[:-1] and len(first) == 7
    assert first[1] == "said mistake ValueError: num_steps = 3: must be at least 5"
    assert first[4].startswith("said absent FileNotFoundError: [Errno 2] No such file")
    assert second[-1] == "said bug Exception: rank 0: KeyError: 'x'"


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_and_the_others_end(run_ranks: RunRanks, killed: int) -> None:
    """Rank 0 is the coordinator: JAX aborts the others at once, after the line that names it."""
    ranks = in_step_20(run_ranks([0, 1, 2], 3, "heartbeat_s=8"))
    assert all(f"started {number} 3" in rank.screen for number, rank in enumerate(ranks))
    ranks[killed].kill()
    left = [rank for rank in range(3) if rank != killed]
    assert all(ends(ranks[rank]) != 0 for rank in left)
    logs = [ranks[rank].screen for rank in left]
    named = {
        0: r"rank 0 .the coordinator. does not answer: dead",
        1: r"rank 1: no sign of life.* dead or stopped",
    }
    assert any(re.search(named[killed], log) for log in logs), logs
    assert not any(re.search(f"rank {left}: no sign of life", log) for log in logs), logs


def test_a_stopped_rank_is_named_and_the_others_end(run_ranks: RunRanks) -> None:
    """SIGSTOP: no connection breaks, only the signs of life end."""
    ranks = in_step_20(run_ranks([0, 1], 2, "heartbeat_s=5"))
    os.kill(ranks[1].pid, signal.SIGSTOP)
    assert ends(ranks[0]) != 0
    log = ranks[0].screen
    # its last report may be one between two waits
    assert re.search(
        r"jmoe: rank 1: no sign of life for \d+ s, dead or stopped, at (the end of )?training", log
    ), log


def test_a_stopped_coordinator_ends_the_others(run_ranks: RunRanks) -> None:
    ranks = in_step_20(run_ranks([0, 1], 2, "heartbeat_s=60", "step_s=4"))
    os.kill(ranks[0].pid, signal.SIGSTOP)
    assert ends(ranks[1]) == EXIT_CODE
    log = ranks[1].screen
    assert re.search(
        r"rank 1 has waited \d+ s for training step \d+ .*; rank 0 .the coord.* does not answer",
        log,
    ), log


def test_hosts_whose_clocks_differ_are_named_and_train(run_ranks: RunRanks) -> None:
    ranks = run_ranks([0, 1, 2], 3, "clocks=1:3600,2:-7200")
    for words in (
        r"rank 1 on \S+ is 3[56]\d\d s ahead of rank 0's",
        r"rank 2 on \S+ is 7[12]\d\d s behind rank 0's",
    ):
        ranks[0].wait_until(
            lambda words=words: re.search(f"jmoe: warning: the clock of {words}", ranks[0].screen)
        )
    at = ranks[0].screen.count("step ")
    ranks[0].wait_until(lambda: ranks[0].screen.count("step ") > at + 5)


def test_a_stuck_rank_is_named_and_prints_its_own_stack(run_ranks: RunRanks) -> None:
    """Rank 1 is alive but does not come on: heartbeats go on, steps do not."""
    ranks = run_ranks([0, 1], 2, "stuck=1:10", "step_s=4")
    assert [ends(rank) for rank in ranks] == [EXIT_CODE] * 2
    logs = [rank.screen for rank in ranks]
    # Whichever limit ran out first told the other rank.
    told = r"rank 1 is behind, at training data 10|rank 1 has waited \d+ s for training data 10"
    assert all(re.search(told, log) for log in logs), logs
    assert all("most recent call first" in log for log in logs), logs


def test_an_error_on_one_rank_is_told_to_the_others(run_ranks: RunRanks) -> None:
    """No rank waits for the shutdown barrier, in which the failed one would keep it for
    `step_timeout_s`.
    """
    ranks = run_ranks([0, 1], 2, "error=0:10", "heartbeat_s=5")
    assert ends(ranks[0]) == 1
    assert ends(ranks[1]) != 0
    logs = [rank.screen for rank in ranks]
    assert "OSError: no space left on the moon" in logs[0]
    assert "jmoe: rank 0 ended with OSError: no space left on the moon" in logs[1]


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGTERM, signal.SIGUSR1],
        pytest.param([signal.SIGUSR1, None], marks=pytest.mark.slow),
        pytest.param([None, signal.SIGTERM], marks=pytest.mark.slow),
    ],
)
def test_all_ranks_stop_after_the_same_step(
    run_ranks: RunRanks, numbers: list[signal.Signals | None]
) -> None:
    """The signal comes to all ranks at different times, or to one only; it comes again during
    the save.
    """
    ranks = in_step_20(run_ranks([0, 1], 2, "pause_s=0.02", "save_s=1"))
    for rank, number in zip(ranks, numbers, strict=True):
        if number is not None:
            rank.send_signal(number)
            time.sleep(0.1)
    for rank in ranks:
        wait_for_text(rank.log, "stop ")
        rank.send_signal(signal.SIGTERM)
    assert [ends(rank) for rank in ranks] == [0, 0]
    logs = [rank.screen for rank in ranks]
    # what a signal has begun, between any two lines
    said = [re.sub(r"(?m)^jmoe: .*\n", "", log) for log in logs]
    stops = [re.findall(r"stop (\d+)\nsaved\nend", log) for log in said]
    assert stops[0] == stops[1], stops
    assert len(stops[0]) == 1


# One process


def test_devices_that_jax_does_not_find_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX_PLATFORMS=cuda without a GPU is an assertion of JAX, without words."""

    def none_found() -> None:
        raise AssertionError

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(distributed.jax, "devices", none_found)
    with pytest.raises(ValueError, match=r"JAX_PLATFORMS = 'cuda': must name .* plugin for it is"):
        distributed.start_jax_backend()


def test_one_process_stops_at_once() -> None:
    """Handlers are put back, unless a stop was asked for: then the process is about to end, and
    may do so in peace.
    """
    before = {number: signal.getsignal(number) for number in PreemptionSignal.SIGNALS}
    for number in PreemptionSignal.SIGNALS:
        with PreemptionSignal() as preemption:
            assert not preemption.must_stop_after(1)
        assert {number: signal.getsignal(number) for number in before} == before
        with PreemptionSignal() as preemption:
            signal.raise_signal(number)
            if number is not signal.SIGINT:  # a second Ctrl-C ends the process
                signal.raise_signal(number)
            assert preemption.must_stop_after(2)
        after = [signal.getsignal(number) for number in PreemptionSignal.SIGNALS]
        assert after == [signal.SIG_IGN, signal.SIG_IGN, signal.SIG_IGN, signal.SIG_DFL]
        for other, handler in before.items():
            signal.signal(other, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_the_shell_lets_a_process_ignore_stays_ignored(number: signal.Signals) -> None:
    """Of a background job Ctrl-C, under nohup the end of the terminal."""
    before = {each: signal.getsignal(each) for each in PreemptionSignal.SIGNALS}
    signal.signal(number, signal.SIG_IGN)
    with PreemptionSignal() as preemption:
        signal.raise_signal(number)
        assert not preemption.must_stop_after(1)
        signal.raise_signal(signal.SIGTERM)
        assert preemption.must_stop_after(2)
    for each, handler in before.items():
        signal.signal(each, handler)


def test_one_process_is_asked_again_and_again() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with RequestSignal() as asked:
        assert not asked.is_due(1)
        for times in (1, 2):
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR2)
            assert [asked.is_due(step) for step in (2, 3)] == [True, False]
            assert (asked.name, asked.times) == ("SIGUSR2", times)
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    signal.signal(signal.SIGUSR2, before)


def test_a_wait_that_is_too_long_names_its_phase_and_ends_the_process(
    run_python: Run,
) -> None:
    code = """if True:
        import time
        from jmoe.cluster.watchdog import Watchdog
        with Watchdog(1.0) as watchdog:
            with watchdog.waiting_for("evaluation", 7, timeout_s=30):
                with watchdog.waiting_for("training data", 7):
                    print("begun", flush=True)
                    time.sleep(60)
    """
    ended = run_python(["-c", code], timeout=240)
    assert ended.returncode == EXIT_CODE
    assert ended.stdout == "begun\n"
    assert re.search(
        r"jmoe: rank 0 has waited \d+ s for training data 7 \(limit 1 s,"
        r" distributed.step_timeout_s\)",
        ended.stderr,
    )
    assert 'File "<string>", line 8 in <module>' in ended.stderr


def test_a_suspended_process_is_not_ended_when_it_goes_on(
    start_python: Start, tmp_path: Path
) -> None:
    """As by `scontrol suspend`: it was stopped for longer than its limit, which counts the time
    in which it ran.
    """
    code = """if True:
        import time
        from jmoe.cluster.watchdog import Watchdog
        with Watchdog(3.0) as watchdog:
            with watchdog.waiting_for("evaluation"):
                with watchdog.waiting_for("training data", 7):
                    print("begun", flush=True)
                    for _ in range(10):
                        time.sleep(0.1)
            print("done", flush=True)
            with watchdog.waiting_for("training data", 8):
                time.sleep(60)
    """
    process = start_python(["-c", code], tmp_path / "log")
    process.wait_until(lambda: "begun" in process.screen)
    process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    process.send_signal(signal.SIGCONT)
    assert process.wait(240) == EXIT_CODE  # of what did get stuck
    assert "done" in process.screen
    assert re.search(r"rank 0 has waited \d+ s for training data 8 \(limit 3 s", process.screen)


@pytest.mark.slow
def test_a_wait_that_makes_progress_goes_on(
    run_python: Run,
) -> None:
    code = """if True:
        import time
        from jmoe.cluster.watchdog import Watchdog
        moved = 0
        with Watchdog(4.0) as watchdog:
            with watchdog.waiting_for("records", progress=lambda: moved):
                for moved in range(45):
                    time.sleep(0.1)
                print("moved", flush=True)
                time.sleep(60)
    """
    ended = run_python(["-c", code], timeout=240)
    assert ended.returncode == EXIT_CODE
    assert ended.stdout == "moved\n"
    assert re.search(
        r"jmoe: rank 0 has waited \d+ s for records without progress \(limit 4 s, d", ended.stderr
    )


def test_waits_in_time_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own, at which the watchdog looks several times after every
    change.
    """
    now_s, looks = 0.0, 0

    def monotonic() -> float:
        nonlocal looks
        looks += 1
        return now_s

    def wait(seconds: float) -> None:
        nonlocal now_s
        for _ in range(3):  # at once it would look as if the process had been suspended
            now_s, before = now_s + seconds / 3, looks
            wait_for(lambda: looks > before + 6)  # noqa: B023

    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic=monotonic))
    # so it looks every hundredth of a second
    with Watchdog(2.5, heartbeat_timeout_s=0.1) as watchdog:
        for step in range(4):
            with watchdog.waiting_for("training step", step):
                wait(2.4)
        wait(2.6)  # between waits there is no limit
        with watchdog.waiting_for("evaluation", timeout_s=60):
            for step in range(3):
                with watchdog.waiting_for("held-out batch", step):
                    wait(2.4)


# Where the processes are


def test_no_launcher_means_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed.join_processes(DistributedConfig())
    alone = {"SLURM_NTASKS": "1", "OMPI_COMM_WORLD_SIZE": "1"}
    assert distributed._detect_address_size_and_rank(1, alone) is None
    # not a pod of an indexed job
    assert (
        distributed._detect_address_size_and_rank(1, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
        is None
    )
    for name, value in {"NTASKS": "4", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)  # inside sbatch, but not started by srun
    assert distributed._detect_address_size_and_rank(1) is None


def test_slurm_and_open_mpi_jobs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = {
        "JOB_ID": "42",
        "STEP_NODELIST": "node[007-009]",
        "NTASKS": "6",
        "PROCID": "5",
        "LOCALID": "1",
        "STEP_TASKS_PER_NODE": "2(x3)",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert distributed._detect_address_size_and_rank(1) == (f"node007:{61440 + 42}", 6, 5)
    for name in slurm:
        monkeypatch.delenv(f"SLURM_{name}")
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1314521088.0;tcp://10.96.0.1,10.148.0.1:34911")
    for name, value in {"SIZE": "8", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    address, processes, rank = distributed._detect_address_size_and_rank(1) or ("", 0, 0)
    assert (address.partition(":")[0], processes, rank) == ("10.96.0.1", 8, 3)


def test_a_job_that_jax_cannot_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every process would train by itself, all into one folder."""
    for name, value in {"SIZE": "8", "RANK": "3", "LOCAL_RANK": "1"}.items():  # Open MPI 5
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(
        ValueError, match=r"cannot find the other processes .*--distributed.process-id I"
    ):
        distributed.join_processes(DistributedConfig())
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ValueError, match="JAX needs the package `kubernetes`"):
        distributed.join_processes(DistributedConfig())


def test_jax_asks_kubernetes_in_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.clusters.k8s_cluster import K8sCluster

    def ask() -> bool:
        raise RuntimeError("Kubernetes API Error: 403")

    monkeypatch.setattr(K8sCluster, "is_env_present", ask)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    monkeypatch.setitem(sys.modules, "kubernetes", SimpleNamespace())
    with pytest.raises(ValueError, match=r"processes of this job \(Kubernetes API Error: 403\)"):
        distributed.join_processes(DistributedConfig())


def test_a_bad_address_is_an_error() -> None:
    config = DistributedConfig(coordinator_address="somewhere", num_processes=2, process_id=1)
    with pytest.raises(
        ValueError, match=r"distributed.coordinator_address = 'somewhere': must read HOST:PORT"
    ):
        distributed.join_processes(config)
    with socket.create_server(("", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = DistributedConfig(coordinator_address=address, num_processes=2, process_id=0)
        with pytest.raises(OSError, match="process 0 cannot listen there"):
            distributed.join_processes(config)


# Preparing data: RANK PROCESSES PORT TEXT CACHE SLOW; process 0 takes SLOW seconds over every piece
# of text.
PREPARING = """
import sys, time
from pathlib import Path
from jmoe.config import DataConfig, DistributedConfig
from jmoe.data import corpus, tokenizing_job
from jmoe.cluster.distributed import join_processes
from jmoe.cluster.watchdog import Watchdog
from jmoe.data.progress import PreparationProgress

rank, processes, port = map(int, sys.argv[1:4])
text, cache, slow_s = sys.argv[4], Path(sys.argv[5]), float(sys.argv[6])
join_processes(DistributedConfig(coordinator_address=f"127.0.0.1:{port}", num_processes=processes, process_id=rank,
                        heartbeat_timeout_s=240))
encode = tokenizing_job.encode_pieces

def slowly(tokenizer, pieces):
    for piece in encode(tokenizer, pieces):
        time.sleep(slow_s)
        yield piece

tokenizing_job.encode_pieces = slowly
with Watchdog(240, 240) as watchdog:
    begun = time.monotonic()
    seen, option = PreparationProgress(lambda line: print(line, flush=True), every_s=1), "distributed.start_timeout_s"
    with watchdog.waiting_for("data", timeout_s=6, progress=seen.progress_text, option=option):
        role = corpus.PreparationRole(rank == 0, seen.report, 6, watchdog.progress_of_rank_0)
        made = corpus.prepare_corpus(DataConfig(path=(text,)), 300, cache, role)
    print("prepared", made.fingerprint, f"after {time.monotonic() - begun:.1f} s", flush=True)
"""


def prepare_slowly(start_python: Start, folder: Path, slow_s: float) -> list[tuple[int, str]]:
    """(return code, log) of two ranks that prepare 20 files with a limit of 6 s."""
    (folder / "text").mkdir()
    for i in range(20):
        (folder / "text" / f"{i}.txt").write_text(f"a document of no importance, {i}\n" * 50)
    arguments = [2, free_port(), folder / "text", folder / "cache", slow_s]
    ranks = [
        start_python(["-c", PREPARING, rank, *arguments], folder / f"{rank}.log")
        for rank in range(2)
    ]
    return [(ends(rank), rank.screen) for rank in ranks]


@pytest.mark.slow
def test_preparing_data_has_no_limit_while_it_goes_on(start_python: Start, tmp_path: Path) -> None:
    """Process 0 takes at least twice the limit; the other waits for it as long, from when it has
    started itself.
    """
    results = prepare_slowly(start_python, tmp_path, 0.6)
    assert [code for code, _ in results] == [0, 0], results
    fingerprints = set()
    assert re.search(r"preparing data: tokenising, \d+ % of 0.0 MB, \d:\d\d", results[0][1])
    for (_, log), least_s in zip(results, (12, 7), strict=True):
        (line,) = (line for line in log.splitlines() if line.startswith("prepared "))
        fingerprints.add(line.split()[1])
        assert float(line.split()[3]) >= least_s
    assert len(fingerprints) == 1


@pytest.mark.slow
def test_preparing_data_that_stands_still_ends_both_and_names_the_limit(
    start_python: Start, tmp_path: Path
) -> None:
    results = prepare_slowly(start_python, tmp_path, 1000)
    assert all(code != 0 for code, _ in results), results
    limit = r"\(limit 6 s, distributed.start_timeout_s\)"
    assert re.search(
        rf"rank 0 has waited \d+ s for data, .*\) without progress {limit}", results[0][1]
    ), results[0][1]
    for _, log in results:
        assert "distributed.start_timeout_s" in log, log
