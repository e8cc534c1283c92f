"""What a supervisor does when processes end, are killed, stop or are told to: real processes,
without JAX.
"""

import contextlib
import json
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jmoe.cluster import supervise
from jmoe.cluster.heartbeat import Heartbeat, HeartbeatListener, heartbeat_file, read_heartbeat
from jmoe.cluster.overview import read_overview
from jmoe.cluster.remote_process import (
    LaunchOrder,
    RemoteProcess,
    describe_oom_kill,
    reserve_port,
    wait_for_launchers,
)
from jmoe.cluster.restarts import (
    AttemptEnding,
    RestartPolicy,
    RunProgress,
    exit_code_text,
    failure_kind,
    read_progress,
)
from jmoe.cluster.supervise import Supervisor, split_program_and_arguments
from jmoe.cluster.watchdog import Watchdog
from jmoe.command_line import parse_supervise
from jmoe.config.supervise import SuperviseConfig
from tests.fakes import wait_for, wait_for_text
from tests.file_systems import full_disk
from tests.processes import ROOT, memory_cgroup
from tests.train_runs import ENDLESS, Run, Start, TrainRuns, committed, losses, ranks_of, resumes

# A launcher of a host: "down" beside it holds the names of those that are away.
LAUNCHER = """
import os, sys
away, host = sys.argv[1:3]
if host in open(away).read().split():
    sys.exit(255)
os.environ["SUPERVISED_HOST"] = host
os.execv(sys.argv[3], sys.argv[3:])
"""


LINGER = "import os, time; print('begun', os.getpid(), flush=True); time.sleep(1000)"


class Supervised:
    """Runs of the stand-in in one folder. plan: by attempt and rank."""

    def __init__(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.output_dir = folder / "run"
        self._folder = folder
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self.away = folder / "away"
        self.away.write_text("")

    def make(
        self, plan: dict[str, str], *, options: tuple[str, ...] = (), **settings: Any
    ) -> Supervisor:
        (self._folder / "plan").write_text(json.dumps(plan))
        self._monkeypatch.setenv("SUPERVISED_PLAN", str(self._folder / "plan"))
        self._monkeypatch.setenv("SUPERVISED_AWAY", str(self.away))
        command = [
            str(ROOT / "tests" / "supervised.py"),
            "tiny",
            "--output-dir",
            str(self.output_dir),
            *options,
        ]
        if settings.get("hosts"):
            (self._folder / "launcher.py").write_text(LAUNCHER)
            settings["launch"] = (
                f"{sys.executable} {self._folder / 'launcher.py'} {self.away} {{host}}"
            )
        return Supervisor(
            SuperviseConfig(**({"processes": 2, "backoff_s": 0.01} | settings)), command
        )

    def end(self, plan: dict[str, str], **settings: Any) -> tuple[int, str]:
        """(Exit code, screen) of a run of this plan."""
        code = self.make(plan, **settings).run()
        return code, self._capsys.readouterr().out

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.output_dir / "supervise" / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def log(self, rank: int) -> str:
        return (self.output_dir / "supervise" / f"rank-{rank}.log").read_text()


@pytest.fixture
def supervised_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Supervised:
    return Supervised(tmp_path, capsys, monkeypatch)


def test_a_signal_that_arrives_while_another_is_passed_on(supervised_run: Supervised) -> None:
    """It reaches the ranks in the next round, though it came after the round's list was read."""
    supervisor, sent = supervised_run.make({}), list[int]()
    supervisor._signals.append(signal.SIGUSR1)

    class Rank(RemoteProcess):
        def __init__(self) -> None: ...

        def send_signal(self, number: int) -> None:
            if not sent:
                supervisor._signals.append(signal.SIGTERM)
            sent.append(number)

    passed = supervisor._pass_on_signals([Rank()], 0)
    assert supervisor._pass_on_signals([Rank()], passed) == 2
    assert sent == [signal.SIGUSR1, signal.SIGTERM]


def test_gpus_of_a_job_without_a_process_are_refused(
    supervised_run: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of several processes on a machine has one GPU."""
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(
        ValueError,
        match="would use 2 of the job's GPUs on this node: give a process for each of them",
    ):
        supervised_run.make({})
    supervised_run.make({}, processes=8)
    supervised_run.make({}, processes=1)  # which has all of them


def test_all_ranks_end(supervised_run: Supervised) -> None:
    code, screen = supervised_run.end({})
    assert code == 0
    assert (
        "attempt 1: 2 processes, coordinator 127.0.0.1:" in screen
        and "attempt 1 rank 0 of 2" in screen
    )
    assert "attempt 1 rank 1 of 2" in supervised_run.log(1) and "rank 1" not in screen
    assert [event["kind"] for event in supervised_run.events("end")] == ["done"]


def test_a_killed_rank_starts_all_again(supervised_run: Supervised) -> None:
    """Those that are left are killed at once: the stand-in would sleep on."""
    code, screen = supervised_run.end({"1 0": "beat 1; steps 3; signal 9", "1 1": "sleep 1000"})
    assert code == 0
    assert "rank 0: killed by SIGKILL, at step 7: " in screen and "did not rise): ask who" in screen
    assert "all processes start again, from checkpoint 3 (restart 1 in a row)" in screen
    assert "attempt 2 rank 1 of 2" in supervised_run.log(1)
    assert [event["attempt"] for event in supervised_run.events("start")] == [1, 2]


def test_a_mistake_is_not_started_again(
    supervised_run: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is to blame, not rank 0, which says nothing and is killed."""
    monkeypatch.setattr(supervise, "END_S", 0.2)
    code, screen = supervised_run.end({"1 0": "sleep 1000", "1 1": "exit 1"})
    assert code == 1
    assert "rank 1: exit code 1: rank 1 ends with 1; which a new start does not mend" in screen
    assert len(supervised_run.events("start")) == 1


def test_an_aborted_rank_says_why_in_words_of_its_own(
    supervised_run: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line of its log is one of the stack that JAX prints."""
    monkeypatch.setattr(supervise, "END_S", 0.2)
    _, screen = supervised_run.end({"1 0": "sleep 1000", "1 1": "abort 0"})
    assert (
        "rank 1: killed by SIGABRT: jmoe: rank 0: no sign of life, dead or stopped; all processes"
        " start" in screen
    )


def test_ranks_that_jax_does_not_hear_are_named(
    supervised_run: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is stopped before the others watch: JAX alone knows which one."""
    monkeypatch.setattr(supervise, "END_S", 0.2)
    _, screen = supervised_run.end({"1 0": "sleep 1000", "1 1": "unheard 0"})
    assert (
        "rank 1: killed by SIGABRT: ranks 0, 7: JAX has heard nothing, dead or stopped; all"
        " processes" in screen
    )


def test_the_same_step_twice_is_given_up(supervised_run: Supervised) -> None:
    code, screen = supervised_run.end({"1 0": "steps 3; exit 70", "2 0": "exit 70"})
    assert code == 70
    assert "given up: 2 attempts in a row have ended after step 2 (same_step_limit)" in screen


def test_a_stopped_rank_is_named_and_all_start_again(supervised_run: Supervised) -> None:
    supervisor = supervised_run.make({"1 0": "sleep 1000", "1 1": "beat 1; signal 19"})
    supervisor._silence_s = 0.5  # rank 0 has no limit yet: it has not begun
    assert supervisor.run() == 0
    first, last = supervised_run.events("end")
    assert first["why"].startswith("rank 1: no sign of life for ") and first["why"].endswith(
        "stopped, at step 7"
    )
    assert last["kind"] == "done"


def test_a_rank_that_never_begins_is_named(supervised_run: Supervised) -> None:
    supervisor = supervised_run.make({"1 0": "sleep 1000", "2 0": "sleep 1000"}, processes=1)
    supervisor._begin_s = 0.2
    assert supervisor.run() == 70
    assert all(
        "rank 0: has not begun within" in event["why"] for event in supervised_run.events("end")
    )
    assert len(supervised_run.events("end")) == 2  # twice before the first step


@pytest.mark.parametrize(
    ("number", "options", "code"),
    [
        (signal.SIGUSR1, (), 0),
        (signal.SIGHUP, ("--distributed.stopped-exit-code", "3"), 3),  # the terminal is gone
    ],
)
def test_a_signal_is_passed_on_and_stops_the_run(
    supervised_run: Supervised, number: signal.Signals, options: tuple[str, ...], code: int
) -> None:
    supervisor = supervised_run.make({"1 0": "wait 75", "1 1": "wait 0"}, options=options)

    def tell() -> None:
        for rank in range(2):
            wait_for_text(supervisor.folder / f"rank-{rank}.log", "attempt 1 rank")
        os.kill(os.getpid(), number)

    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(tell)
        assert supervisor.run() == code
        told.result()
    assert all(f"told {int(number)}" in supervised_run.log(rank) for rank in range(2))
    assert len(supervised_run.events("start")) == 1


def test_a_signal_while_the_processes_are_started_stops_the_run(
    supervised_run: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervised_run.make({"1 0": "wait 75", "1 1": "wait 0"})
    start = supervisor._start_attempt

    def signalled(ranks: Any) -> Any:
        listener = start(ranks)
        for rank in range(2):
            wait_for_text(supervisor.folder / f"rank-{rank}.log", "attempt 1 rank")
        os.kill(os.getpid(), signal.SIGUSR1)
        return listener

    monkeypatch.setattr(supervisor, "_start_attempt", signalled)
    assert supervisor.run() == 0
    assert all(f"told {int(signal.SIGUSR1)}" in supervised_run.log(rank) for rank in range(2))


def test_a_rank_that_its_host_stops_is_started_again(supervised_run: Supervised) -> None:
    """As where a machine is taken away with a warning: the run has saved and stopped in order."""
    code, screen = supervised_run.end({"1 0": "steps 2; exit 75"})
    assert (
        code == 0
        and "stopped by a signal that was not the supervisor's; all processes start again" in screen
    )


def test_a_host_goes_and_comes_back(supervised_run: Supervised) -> None:
    plan = {"1 0": "sleep 1000", "1 1": "steps 4; leave 0", "2 0": "return 0; wait 75"}
    settings = {
        "processes": None,
        "hosts": ("a=127.0.0.1", "b"),
        "min_processes": 1,
        "return_check_s": 0.05,
    }
    code, screen = supervised_run.end(plan, **settings)
    assert code == 0
    assert (
        "rank 1 on b: killed by SIGKILL" in screen
        and "attempt 2: 1 processes" in screen
        and "away: b" in screen
    )
    assert "back: b; the run is saved and goes on with more processes" in screen
    assert [event["processes"] for event in supervised_run.events("start")] == [2, 1, 2]
    assert [event["kind"] for event in supervised_run.events("end")] == ["lost", "stopped", "done"]


def test_the_run_is_split_over_as_many_processes_as_divide_it(supervised_run: Supervised) -> None:
    supervised_run.away.write_text("c")
    hosts = {"processes": None, "hosts": ("a=127.0.0.1", "b", "c")}
    whole = ("--mesh.context", "1")  # else two processes would share each sequence
    code, _ = supervised_run.end(
        {}, min_processes=1, options=(*whole, "--batch-size", "9"), **hosts
    )
    assert code == 0 and supervised_run.events("start")[0]["processes"] == 1
    with pytest.raises(ValueError, match="batch_size = 9: must be a multiple of 2"):
        supervised_run.end({}, min_processes=2, options=(*whole, "--batch-size", "9"), **hosts)


def test_hosts_that_stay_away_end_the_run(supervised_run: Supervised) -> None:
    supervised_run.away.write_text("a b")
    with pytest.raises(
        OSError, match=r"0 of 2 processes can run after 0.01 s \(host_wait_s\); hosts away: a, b"
    ):
        supervised_run.end({}, processes=None, hosts=("a", "b"), host_wait_s=0.01)


def test_one_supervisor_a_run_in_a_folder_that_can_be_written(
    supervised_run: Supervised, tmp_path: Path
) -> None:
    first, second = supervised_run.make({}), supervised_run.make({})
    with contextlib.ExitStack() as stack:
        first._lock_folder(stack)
        with pytest.raises(OSError, match="has a supervisor already"):
            second.run()
    assert second.run() == 0
    (tmp_path / "file").touch()
    supervised_run.output_dir = tmp_path / "file" / "run"
    with pytest.raises(OSError, match="must be a folder that can be written: Not a directory"):
        supervised_run.end({})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--distributed.heartbeat-folder", "x"),
            "distributed.heartbeat_folder = 'x': must not be given",
        ),
        (("--plan",), "plan = True: must not be given to a supervised run"),
    ],
)
def test_what_the_supervisor_gives_is_refused(
    supervised_run: Supervised, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        supervised_run.make({}, options=options)


def test_commands_of_every_form() -> None:
    forms = {"train.py": [sys.executable, "train.py"], "jmoe-train": ["jmoe-train"]}
    forms |= {
        "python3 train.py": ["python3", "train.py"],
        "python -m jmoe.x": ["python", "-m", "jmoe.x"],
    }
    for words, program in forms.items():
        assert split_program_and_arguments([*words.split(), "tiny", "--plan"]) == (
            program,
            ["tiny", "--plan"],
        )


def test_restarts_and_their_waits() -> None:
    """The budget and the waits begin anew with every checkpoint, and equal steps count only in a
    row.
    """
    config = SuperviseConfig(max_restarts=4, same_step_limit=3, backoff_s=5.0, max_backoff_s=15.0)
    lost, restarts = AttemptEnding("lost", 70), RestartPolicy(config, RunProgress(9, 10))
    assert [
        restarts.delay_s_or_stop_reason(lost, RunProgress(step, 10)) for step in (11, 12, 12, 13)
    ] == [
        0.0,
        5.0,
        10.0,
        15.0,
    ]
    assert (
        restarts.delay_s_or_stop_reason(lost, RunProgress(14, 10))
        == "given up: 4 restarts in a row have made no checkpoint (max_restarts)"
    )
    assert [restarts.delay_s_or_stop_reason(lost, RunProgress(14, 15)) for _ in range(2)] == [
        0.0,
        5.0,
    ]
    assert "3 attempts in a row have ended after step 14" in str(
        restarts.delay_s_or_stop_reason(lost, RunProgress(14, 15))
    )
    assert "before the first step" in str(
        RestartPolicy(SuperviseConfig(same_step_limit=1), RunProgress()).delay_s_or_stop_reason(
            lost, RunProgress()
        )
    )
    assert (
        RestartPolicy(config, RunProgress()).delay_s_or_stop_reason(
            AttemptEnding("mistake", 1), RunProgress(5, 5)
        )
        == "which a new start does not mend"
    )


def test_exit_codes() -> None:
    assert [failure_kind(code) for code in (1, 2, 70, 134, 137)] == [
        "mistake",
        "mistake",
        "lost",
        "lost",
        "lost",
    ]
    assert [exit_code_text(code) for code in (1, 137, 255)] == [
        "exit code 1",
        "killed by SIGKILL",
        "exit code 255",
    ]


def test_how_far_a_run_has_come(tmp_path: Path) -> None:
    assert read_progress(tmp_path) == RunProgress()
    (tmp_path / "checkpoints" / "30").mkdir(parents=True)
    (tmp_path / "checkpoints" / "40.orbax-checkpoint-tmp").mkdir()
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 33}\n{"event": "evaluation", "step": 34}\n{"step": 34')
    assert read_progress(tmp_path) == RunProgress(33, 30)
    log.write_text('{"step": 29}\n{"event": "resume", "step": 30}\n')
    assert read_progress(tmp_path) == RunProgress(29, 30)


def test_signs_of_life(tmp_path: Path) -> None:
    """A rank is silent only after its first sign, and says that it is at its end."""
    listener = HeartbeatListener(tmp_path, 2)
    listener.update_beat_times()
    assert (
        not listener.has_begun(1)
        and listener.silence_s(1) == 0.0
        and listener.last_activity(1) == ""
    )
    rank = Heartbeat(tmp_path, 1, 4)
    rank.beat("step 3")
    listener.update_beat_times()
    assert (
        listener.has_begun(1)
        and listener.last_activity(1) == "step 3"
        and listener.devices_per_process() == 4
    )
    before = listener.silence_s(1)
    assert listener.silence_s(1) > before
    with Watchdog(100.0, heartbeat=rank) as watchdog, watchdog.waiting_for("step", 4):
        assert listener.last_activity(1) != "step 3"
        wait_for(lambda: read_heartbeat(heartbeat_file(tmp_path, 1)).get("waits") == 1)
    assert listener.last_activity(1) == "closed"


def test_a_full_disk_is_no_silence(tmp_path: Path) -> None:
    """Ranks that run on would be killed as dead."""
    with full_disk(tmp_path) as fill:
        now = [100.0]
        listener, rank = HeartbeatListener(tmp_path, 1, lambda: now[0]), Heartbeat(tmp_path, 0, 1)
        rank.beat("step 1")
        listener.update_beat_times()
        fill()
        for _ in range(3):
            now[0] += 50.0
            rank.beat("step 2")
            listener.update_beat_times()
            assert listener.silence_s(0) == 0.0
        assert listener.last_activity(0) == "step 1"
        (tmp_path / "filler").unlink()
        rank.beat("step 3")
        assert listener.last_activity(0) == "step 3"


def test_events_that_cannot_be_written_end_nothing(supervised_run: Supervised) -> None:
    folder = supervised_run.output_dir / "supervise"
    folder.mkdir(parents=True)
    (folder / "events.jsonl").symlink_to("/dev/full")
    code, screen = supervised_run.end({"1 0": "signal 9"})
    assert code == 0 and "all processes start again" in screen
    assert f"warning: {folder}/events.jsonl lacks the event 'end': No space left" in screen


def test_the_clocks_of_hosts_need_not_agree(tmp_path: Path) -> None:
    """A beat that is dated years ago, or ahead, is as good a sign of life as any other."""
    now = [100.0]
    listener, rank = HeartbeatListener(tmp_path, 1, lambda: now[0]), Heartbeat(tmp_path, 0, 1)
    for dated in (1.0, 4e9, 2.0):
        rank.beat("step 1")
        os.utime(heartbeat_file(tmp_path, 0), (dated, dated))
        now[0] += 50.0
        listener.update_beat_times()
        assert listener.has_begun(0) and listener.silence_s(0) == 0.0
    now[0] += 7.0
    listener.update_beat_times()
    assert listener.silence_s(0) == 7.0


def test_a_reserved_port_is_for_who_is_told_it() -> None:
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        socket.create_server(("", port)).close()
        with socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        ) as server:
            assert server.getsockname()[1] == port


def test_a_process_ends_with_its_tether(tmp_path: Path) -> None:
    (remote,) = wait_for_launchers([RemoteProcess("", 0, [])], 240)
    with contextlib.closing(remote):
        remote.start(
            LaunchOrder(
                [sys.executable, "-c", LINGER], str(tmp_path), {}, str(tmp_path / "log"), "a title"
            )
        )
        wait_for_text(tmp_path / "log", "begun")
        assert "a title" in (tmp_path / "log").read_text()
        pid = int((tmp_path / "log").read_text().split()[-1])
        os.kill(pid, 0)
        remote.kill()
        wait_for(lambda: remote.exit_code() is not None)
        assert remote.exit_code() == 137
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_the_shell_of_a_host_prints_is_skipped(tmp_path: Path) -> None:
    """A greeting before the launcher's line; its numbers are no ports."""
    greets = ["sh", "-c", 'echo Welcome; echo 42; exec "$@"', "sh"]
    mute = ["sh", "-c", "echo 42; echo jmoe-port none", "sh"]
    remotes = [RemoteProcess("", 0, prefix) for prefix in (greets, mute)]
    with contextlib.ExitStack() as stack:
        for remote in remotes:
            stack.callback(remote.close)
        (remote,) = wait_for_launchers(remotes, 240)
        assert remote is remotes[0] and remote.port not in (None, 42)
        code = [sys.executable, "-c", "raise SystemExit(3)"]
        remote.start(LaunchOrder(code, str(tmp_path), {}, str(tmp_path / "log"), "a title"))
        wait_for(lambda: remote.exit_code() is not None)
        assert remote.exit_code() == 3


def test_why_a_process_was_killed() -> None:
    cgroup, machine = Path("/sys/fs/cgroup/job/memory.events"), Path("/proc/vmstat")
    before = {cgroup: 1, machine: 8}
    for after, words in (
        ({cgroup: 3, machine: 10}, f"ran out (oom_kill of {cgroup} rose by 2): give the job more"),
        (
            {cgroup: 1, machine: 9},
            f"perhaps by the kernel for lack of memory (oom_kill of {machine}",
        ),
        (before, f"(oom_kill of {cgroup} and {machine} did not rise): ask who else ends"),
        ({}, "perhaps by the kernel for lack of memory: dmesg or the job's accounting"),
    ):
        assert words in describe_oom_kill(before, after)


def test_a_process_that_its_cgroup_kills_is_named(tmp_path: Path) -> None:
    """The launcher, which shares the cgroup, lives on and says it."""
    with memory_cgroup(64 << 20) as folder:
        enter = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
        (remote,) = wait_for_launchers([RemoteProcess("", 0, ["sh", "-c", enter, "sh"])], 240)
        with contextlib.closing(remote):
            fill = [sys.executable, "-c", "x = bytearray(1 << 30)"]
            remote.start(LaunchOrder(fill, str(tmp_path), {}, str(tmp_path / "log"), "a title"))
            wait_for(lambda: remote.exit_code() is not None)
            assert remote.exit_code() == 137
            words = remote.read_launch_error()
        assert f"its cgroup ran out (oom_kill of {folder}/" in words and "rose by 1" in words


def test_what_a_process_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """A child that was forked has its parent's devices and locks, for which the next attempt
    would wait.
    """
    forks = """if True:
        import os, sys, time
        if os.fork():
            while not os.path.exists("child"):
                time.sleep(0.01)
            sys.exit(3)
        with open("new", "w") as file:
            file.write(str(os.getpid()))
        os.rename("new", "child")
        time.sleep(1000)
    """
    (remote,) = wait_for_launchers([RemoteProcess("", 0, [])], 240)
    with contextlib.closing(remote):
        remote.start(
            LaunchOrder(
                [sys.executable, "-c", forks], str(tmp_path), {}, str(tmp_path / "log"), "a title"
            )
        )
        wait_for(lambda: remote.exit_code() is not None)
        assert remote.exit_code() == 3
    child = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    # nobody may have asked for its end
    wait_for(lambda: not child.exists() or " Z " in child.read_text())


def test_a_process_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    for log, program, code, words in (
        ("log", "/no/such/program", 127, "No such file or directory: '/no/such/program'"),
        ("absent/log", sys.executable, 73, "it must be on a disk that all hosts share"),
    ):
        (remote,) = wait_for_launchers([RemoteProcess("", 0, [])], 240)
        with contextlib.closing(remote):
            remote.start(LaunchOrder([program], str(tmp_path), {}, str(tmp_path / log), ""))
            wait_for(lambda remote=remote: remote.exit_code() is not None)
            assert remote.exit_code() == code and words in remote.read_launch_error()


def test_the_supervisor_imports_no_jax(run_python: Run) -> None:
    done = run_python(
        [
            "-c",
            (
                "import sys, jmoe.cluster.supervise, jmoe.cluster.remote_process; print('jax' in"
                " sys.modules)"
            ),
        ]
    )
    assert done.stdout == "False\n", done.stderr


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="give the command after `--`"):
        parse_supervise(["--processes", "2"])
    config, command = parse_supervise(
        ["--hosts", "a", "b", "--min-processes", "1", "--", "train.py", "tiny", "--plan"]
    )
    assert (config.num_processes, config.fewest_processes, command) == (
        2,
        1,
        ["train.py", "tiny", "--plan"],
    )
    assert (
        config.launch_command_words("a")[0] == "ssh"
        and config.launch_command_words("a")[-1] == "a"
        and config.launch_command_words("") == []
    )


@pytest.mark.slow  # restarts of small programs, above, and the kills of test_train.py are quick
def test_a_real_run_loses_a_rank_and_goes_on(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """Two processes of train.py, of which one is killed: steps that are done again have the same
    losses.
    """
    run = tmp_path / "run"
    command = (
        "-m",
        "jmoe.cluster.supervise",
        "--processes",
        "2",
        "--",
        *runs.command(run, *ENDLESS),
    )
    supervisor = start_python(command, tmp_path / "log", runs.environment())
    supervisor.wait_until(lambda: committed(run))
    ranks_of(supervisor.pid)[1].kill()
    before = dict(losses(run))  # the other rank makes no step alone
    supervisor.wait_until(lambda: resumes(run) and len(losses(run)) > len(before))
    overview = read_overview(run)
    assert (overview.state, overview.attempt, overview.restarts) == ("running", 2, 1)
    assert "rank 1: killed by SIGKILL, at" in overview.last_end
    assert [sign.rank for sign in overview.ranks] == [0, 1]
    supervisor.send_signal(signal.SIGTERM)
    screen = supervisor.end(300)
    assert read_overview(run).state == "stopped"
    assert "rank 1: killed by SIGKILL, at" in screen and "restart 1 in a row" in screen
    assert "SIGTERM: the run finishes this step, saves and stops" in screen
    after = losses(run)
    assert [step for step, _ in after] == list(range(len(after))) and resumes(run)[0] <= len(before)
    assert before == {step: loss for step, loss in after if step in before}
