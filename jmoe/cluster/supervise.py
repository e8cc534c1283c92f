"""`jmoe-supervise`: start the processes of a run, and restart all of them when one is lost. For
hosts without a scheduler that restarts jobs.

    jmoe-supervise --processes 4 -- train.py PRESET [--section.field VALUE ...]

The supervisor never imports JAX and holds no device. OUTPUT_DIR/supervise holds each rank's log,
the ranks' heartbeats and `events.jsonl`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jmoe.cluster.clocks import RunningClock, probe_disk_time
from jmoe.cluster.heartbeat import CLOSED, HeartbeatListener
from jmoe.cluster.job import check_all_gpus_used
from jmoe.cluster.remote_process import PASSED_ON, LaunchOrder, RemoteProcess, wait_for_launchers
from jmoe.cluster.rendezvous import ranks_text
from jmoe.cluster.restarts import (
    ABORTED,
    AttemptEnding,
    RestartPolicy,
    exit_code_text,
    failure_kind,
    read_progress,
)
from jmoe.command_line import parse_supervise, parse_train
from jmoe.config import TrainConfig, check
from jmoe.config.supervise import SuperviseConfig
from jmoe.configs import PRESETS
from jmoe.runtime import EXIT_LOST, EXIT_STOPPED, ignore_output_errors, open_closed_standard_streams

FOLDER = "supervise"
POLL_S = 0.05
END_S = 10.0  # time for the other ranks to report why they end, after the first one has
BEGIN_S = 60.0  # beyond distributed.start_timeout_s until a rank's first sign of life
LOG_TAIL_BYTES = 1 << 16  # an aborted process ends with a long stack
# an entry of the compile cache written this shortly before a kill may be truncated
TORN_S = 5.0
# message of JAX's coordinator; each line ends with a rank
UNHEARD = re.compile(r"tasks are unhealthy[^\n]*:\n((?:[^\n]*\d\n)+)")
# prefixes of environment variables that are forwarded to other hosts
PASSED_DOWN = ("CUDA_", "GLOO_", "JAX_", "JMOE_", "NCCL_", "NPROC", "PYTHON", "XLA_")


def split_program_and_arguments(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (words that start a process, arguments of train.py) of a command such as `train.py
    tiny`.
    """
    first = Path(command[0]).name
    if first.endswith(".py"):
        return [sys.executable, command[0]], list(command[1:])
    words = 1 + (first.startswith("python") and 1 + (command[1:2] == ["-m"]))
    return list(command[:words]), list(command[words:])


class HostPoller:
    """Polls hosts that are away for their return, without blocking."""

    def __init__(
        self, ask: Callable[[contextlib.ExitStack], list[RemoteProcess]], config: SuperviseConfig
    ) -> None:
        self._ask, self._config = ask, config
        self._asked: list[RemoteProcess] = []
        self._since = time.monotonic()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> HostPoller:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def poll_returned_hosts(self) -> list[str]:
        """Return the hosts that answered the current poll; empty until every host has answered or
        the poll has timed out.
        """
        waited_s = time.monotonic() - self._since
        if not self._asked:
            if waited_s > self._config.return_check_s:
                self._asked, self._since = self._ask(self._stack), time.monotonic()
            return []
        present = wait_for_launchers(self._asked, 0.0)
        if (
            not all(remote.has_answered for remote in self._asked)
            and waited_s < self._config.host_timeout_s
        ):
            return []
        hosts = [remote.host for remote in present]
        self._stack.close()
        self._asked, self._since = [], time.monotonic()
        return hosts


class Supervisor:
    """Supervisor of one run, from its first attempt to its last. Raises `ValueError` if the command
    sets an option that the supervisor sets.
    """

    def __init__(self, config: SuperviseConfig, command: Sequence[str]) -> None:
        self._config = config
        self._program, self._arguments = split_program_and_arguments(command)
        self._train: TrainConfig = parse_train(self._arguments, PRESETS)
        limits = self._train.distributed
        for name in ("coordinator_address", "num_processes", "process_id", "heartbeat_folder"):
            value = getattr(limits, name)
            check(
                value is None,
                f"distributed.{name}",
                value,
                "must not be given: the supervisor gives it",
            )
        check(not self._train.plan, "plan", True, "must not be given to a supervised run")
        estimate = self._train.estimate
        check(not estimate, "estimate", estimate, "must not be given to a supervised run")
        if config.processes_per_host > 1 and not config.hosts:  # each process has one GPU
            check_all_gpus_used(
                config.processes_per_host,
                option_for_more="a process for each of them (--processes)",
            )
        self.output_dir = Path(self._train.output_dir).absolute()
        self.folder = self.output_dir / FOLDER
        # longer than the ranks' own limit, so that a rank reports first
        self._silence_s = 5.0 + 1.5 * limits.heartbeat_timeout_s
        self._begin_s = BEGIN_S + limits.start_timeout_s
        self._attempt = 0
        self._signals: list[int] = []
        self._growing = False
        self._local_devices = 1
        self._clock = RunningClock(POLL_S)  # of an attempt

    def run(self) -> int:
        """Supervise the run until it is done, stopped or given up; return the supervisor's exit
        code.
        """
        with contextlib.ExitStack() as stack:
            self._lock_folder(stack)
            for number in (n for n in PASSED_ON if signal.getsignal(n) is not signal.SIG_IGN):
                stack.callback(
                    signal.signal,
                    number,
                    signal.signal(number, lambda n, _: self._signals.append(n)),
                )
            restarts = RestartPolicy(self._config, read_progress(self.output_dir))
            while True:
                with contextlib.ExitStack() as ranks_stack:
                    ranks = self._connect_launchers(ranks_stack)
                    if not ranks:
                        return 128 + self._signals[-1]
                    poller = ranks_stack.enter_context(self._make_absent_host_poller(ranks))
                    ending = self._watch_attempt(ranks, self._start_attempt(ranks), poller)
                code = self._decide_after_attempt(ending, restarts)
                if code is not None:
                    return code

    def _lock_folder(self, stack: contextlib.ExitStack) -> None:
        """Make the supervisor's folder and lock it. Raises `OSError` if another supervisor of the
        run holds the lock.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((self.folder / "lock").open("w"))
        except OSError as error:
            reason = f"must be a folder that can be written: {error.strerror}"
            raise OSError(f"output_dir = {str(self.output_dir)!r}: {reason}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(
                f"output_dir = {str(self.output_dir)!r}: has a supervisor already"
            ) from error

    def _decide_after_attempt(self, ending: AttemptEnding, restarts: RestartPolicy) -> int | None:
        """Return the supervisor's exit code after an attempt ended; or wait out the back-off and
        return None, for another attempt.
        """
        now = read_progress(self.output_dir)
        self._append_event(
            "end",
            kind=ending.kind,
            code=ending.code,
            why=ending.why,
            step=now.step,
            checkpoint=now.checkpoint,
        )
        if ending.kind == "done":
            return 0
        if self._signals:
            return (
                self._train.distributed.stopped_exit_code
                if ending.kind == "stopped"
                else ending.code
            )
        if self._growing and ending.kind == "stopped":
            return None
        self._delete_recent_cache_entries()
        decision = restarts.delay_s_or_stop_reason(ending, now)
        checkpoint = f"checkpoint {now.checkpoint}" if now.checkpoint >= 0 else "the start"
        checkpoint += (
            " or a newer snapshot" if self._train.checkpoint.memory_dir is not None else ""
        )
        why = ending.why or "stopped by a signal that was not the supervisor's"
        if isinstance(decision, str):
            self._print_line(f"{why}; {decision}")
            return ending.code or 1
        later = f" in {decision:g} s" if decision else ""
        self._print_line(
            f"{why}; all processes start again{later}, from {checkpoint} (restart"
            f" {restarts.in_a_row} in a row)"
        )
        deadline = time.monotonic() + decision
        while time.monotonic() < deadline and not self._signals:
            time.sleep(POLL_S)
        return 128 + self._signals[-1] if self._signals else None

    # Start

    def _connect_launchers(self, stack: contextlib.ExitStack) -> list[RemoteProcess]:
        """Return one `RemoteProcess` per rank of the next attempt, whose launcher has answered and
        waits for its `LaunchOrder`; empty if a signal arrived first.

        Raises `OSError` if too few hosts are available within `host_wait_s`.
        """
        config, deadline = self._config, time.monotonic() + self._config.host_wait_s
        while not self._signals:
            with contextlib.ExitStack() as trying:
                present = wait_for_launchers(
                    self._start_launchers(trying, self._host_of_each_process()),
                    config.host_timeout_s,
                )
                number = self._largest_usable_process_count(len(present))
                if number:
                    stack.push(trying.pop_all())
                    for remote in present[number:]:
                        remote.close()
                    return present[:number]
            away = ", ".join(sorted(self._absent_hosts(present))) or "none"
            if time.monotonic() > deadline:
                raise OSError(
                    f"{len(present)} of {config.fewest_processes} processes can run after"
                    f" {config.host_wait_s:g} s (host_wait_s); hosts away: {away}"
                )
            self._print_line(
                f"waiting for hosts: {len(present)} of {config.fewest_processes} processes can run;"
                f" away: {away}"
            )
            time.sleep(1.0)
        return []

    def _host_of_each_process(self) -> list[str]:
        """Return the host name of each process that the run may have; "" is this machine."""
        names = [host.partition("=")[0] for host in self._config.hosts] or [""]
        return [name for name in names for _ in range(self._config.processes_per_host)]

    def _absent_hosts(self, present: Sequence[RemoteProcess]) -> set[str]:
        """Return the hosts of the run that none of these processes is on."""
        return set(self._host_of_each_process()) - {remote.host for remote in present}

    def _start_launchers(
        self, stack: contextlib.ExitStack, hosts: Sequence[str]
    ) -> list[RemoteProcess]:
        """Return a `RemoteProcess` for each entry of `hosts`, not yet answered; `stack`
        closes them.
        """
        remotes: list[RemoteProcess] = []
        for host in hosts:
            local_rank = sum(remote.host == host for remote in remotes)
            try:
                remotes.append(
                    RemoteProcess(host, local_rank, self._config.launch_command_words(host))
                )
            except OSError as error:
                raise OSError(f"launch = {self._config.launch!r}: {error}") from error
            stack.callback(remotes[-1].close)
        return remotes

    def _largest_usable_process_count(self, available: int) -> int:
        """Return the largest number of processes, at most `available`, over which the run can be
        split; 0 if there are too few.

        Raises the configuration's `ValueError` if no allowed number fits the mesh.
        """
        config, problem = self._config, None
        if available >= config.num_processes:
            return config.num_processes
        for number in range(available, config.fewest_processes - 1, -1):
            try:
                per_host = self._local_devices * config.processes_per_host
                self._train.checked_mesh_shape(number * self._local_devices, per_host)
                return number
            except ValueError as error:
                problem = error
        if problem is not None:
            raise problem
        return 0

    def _start_attempt(self, ranks: Sequence[RemoteProcess]) -> HeartbeatListener:
        """Start a new attempt: send every rank its `LaunchOrder` with a new coordinator port;
        return the listener for the heartbeats.
        """
        self._attempt += 1
        self._growing = False
        for old in self.folder.glob("heartbeat-*"):
            shutil.rmtree(old, ignore_errors=True)
        heartbeats = self.folder / f"heartbeat-{self._attempt}"
        heartbeats.mkdir()
        addresses = {
            name: address or name
            for name, _, address in (h.partition("=") for h in self._config.hosts)
        }
        coordinator = f"{addresses.get(ranks[0].host, '127.0.0.1')}:{ranks[0].port}"
        self._append_event(
            "start", attempt=self._attempt, processes=len(ranks), coordinator=coordinator
        )
        away = (
            f"; away: {', '.join(sorted(self._absent_hosts(ranks)))}"
            if self._absent_hosts(ranks)
            else ""
        )
        self._print_line(
            f"attempt {self._attempt}: {len(ranks)} processes, coordinator {coordinator}{away}"
        )
        for rank, remote in enumerate(ranks):
            options = {
                "coordinator-address": coordinator,
                "num-processes": len(ranks),
                "process-id": rank,
                "heartbeat-folder": heartbeats,
                "stopped-exit-code": EXIT_STOPPED,
            }
            words = [
                word
                for name, value in options.items()
                for word in (f"--distributed.{name}", str(value))
            ]
            title = f"attempt {self._attempt}, rank {rank} of {len(ranks)}"
            command = [*self._program, *self._arguments, *words]
            remote.start(
                LaunchOrder(
                    command,
                    os.getcwd(),
                    self._environment_changes(remote),
                    str(self._log_path(rank)),
                    title,
                )
            )
        self._clock = RunningClock(POLL_S)
        return HeartbeatListener(heartbeats, len(ranks), self._clock.now)

    def _environment_changes(self, remote: RemoteProcess) -> dict[str, str]:
        """Return {variable: value} to change in a rank's environment: the shared compile cache, and
        the rank's own GPU if hosts run several processes.
        """
        changes = {
            "JAX_COMPILATION_CACHE_DIR": str(self._compile_cache_folder),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONUNBUFFERED": "1",
        }
        changes = {name: value for name, value in changes.items() if name not in os.environ}
        if remote.host:
            changes |= {
                name: value for name, value in os.environ.items() if name.startswith(PASSED_DOWN)
            }
        if self._config.processes_per_host > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            several = len(visible) > remote.local_rank and visible != [""]
            changes["CUDA_VISIBLE_DEVICES"] = (
                visible[remote.local_rank] if several else str(remote.local_rank)
            )
        return changes

    @property
    def _compile_cache_folder(self) -> Path:
        return Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or self.folder / "compiled")

    def _delete_recent_cache_entries(self) -> None:
        """Delete the entries of the compile cache written in the last `TORN_S` seconds: JAX writes
        entries in place, and a truncated entry would fail at every start.
        """
        try:
            newest_s = (probe_disk_time(self._compile_cache_folder) or time.time()) - TORN_S
            for entry in self._compile_cache_folder.iterdir():
                if entry.is_file() and entry.stat().st_mtime > newest_s:
                    entry.unlink()
        except OSError:
            pass  # no cache yet, or it is gone

    # Watch

    def _watch_attempt(
        self, ranks: Sequence[RemoteProcess], listener: HeartbeatListener, poller: HostPoller
    ) -> AttemptEnding:
        """Watch one attempt to its end; return how it ended, after all of its processes have
        ended.
        """
        began, position = self._clock.now(), self._rank_0_log_bytes()
        first: AttemptEnding | None = None
        deadline = float("inf")
        # 0: a signal may have arrived while the processes were started
        passed = 0
        while True:
            self._clock.skip_suspension()
            passed = self._pass_on_signals(ranks, passed)
            position = self._copy_new_log(position)
            listener.update_beat_times()
            codes = [remote.exit_code() for remote in ranks]
            if (
                first is None
                and (first := self._kill_silent_and_find_ending(ranks, codes, listener, began))
                is not None
            ):
                says_why = any(
                    code not in (None, 0, EXIT_STOPPED) for code in codes
                ) and not _is_killed_by_signal(first.code)
                deadline = self._clock.now() + (END_S if says_why else 0.0)
            elif (
                first is None
                and deadline == float("inf")
                and any(code is not None for code in codes)
            ):
                deadline = self._clock.now() + self._train.distributed.step_timeout_s
            if None not in codes or self._clock.now() > deadline:
                break
            if (
                first is None
                and not (self._growing or self._signals)
                and self._can_grow(ranks, poller.poll_returned_hosts())
            ):
                self._growing = True
                for remote in ranks:
                    remote.send_signal(signal.SIGTERM)
            time.sleep(POLL_S)
        self._local_devices = listener.devices_per_process() or self._local_devices
        self._kill_and_wait_for_processes(ranks)
        self._copy_new_log(position)
        left = [rank for rank, code in enumerate(codes) if code is None]
        if first is None and left:
            first = AttemptEnding(
                "lost", EXIT_LOST, f"rank {left[0]} has not ended after the others had"
            )
        return first or (
            AttemptEnding("done", 0) if codes[0] == 0 else AttemptEnding("stopped", EXIT_STOPPED)
        )

    def _pass_on_signals(self, ranks: Sequence[RemoteProcess], num_passed: int) -> int:
        """Send all processes the signals received so far except the first `num_passed`, which they
        have; return the number that they have now.
        """
        new = self._signals[num_passed:]  # more may arrive meanwhile
        for number in new:
            for remote in ranks:
                remote.send_signal(number)
        return num_passed + len(new)

    @staticmethod
    def _kill_and_wait_for_processes(ranks: Sequence[RemoteProcess]) -> None:
        """Kill the processes that are left, and wait for the end of each."""
        for remote in ranks:
            remote.kill()
        for remote in ranks:
            remote.close()

    def _kill_silent_and_find_ending(
        self,
        ranks: Sequence[RemoteProcess],
        codes: Sequence[int | None],
        listener: HeartbeatListener,
        began: float,
    ) -> AttemptEnding | None:
        """Return the ending of the rank that caused the attempt to fail, or None; a rank that is
        silent too long is killed first.
        """
        bad = [rank for rank, code in enumerate(codes) if code not in (None, 0, EXIT_STOPPED)]
        limit_s = self._silence_s / 3 if bad else self._silence_s
        waited_s = self._clock.now() - began
        for rank, remote in enumerate(ranks):
            if codes[rank] is not None or any(_is_killed_by_signal(codes[other]) for other in bad):
                continue
            late = waited_s > self._begin_s and not listener.has_begun(rank)
            silent_s = listener.silence_s(rank)
            if late or (silent_s > limit_s and listener.last_activity(rank) != CLOSED):
                at = f", at {listener.last_activity(rank)}" if listener.last_activity(rank) else ""
                what = (
                    f"has not begun within {waited_s:.0f} s"
                    if late
                    else f"no sign of life for {silent_s:.0f} s"
                )
                remote.close()
                return AttemptEnding(
                    "lost",
                    EXIT_LOST,
                    f"{self._rank_and_host(rank, remote)}: {what}, dead or stopped{at}",
                )
        if not bad:
            return None
        rank = min(bad, key=lambda rank: (not _is_killed_by_signal(codes[rank]), codes[rank]))
        code = codes[rank]
        assert code is not None
        at = f", at {listener.last_activity(rank)}" if listener.last_activity(rank) else ""
        words = ranks[rank].read_launch_error()
        if not words and not _is_killed_by_signal(code):
            words = self._last_log_line(rank)
        why = f"{self._rank_and_host(rank, ranks[rank])}: {exit_code_text(code)}{at}"
        return AttemptEnding(failure_kind(code), code, f"{why}: {words}" if words else why)

    def _make_absent_host_poller(self, ranks: Sequence[RemoteProcess]) -> HostPoller:
        """Return a `HostPoller` for the hosts that this attempt runs without."""
        hosts = sorted(self._absent_hosts(ranks))
        return HostPoller(lambda stack: self._start_launchers(stack, hosts), self._config)

    def _can_grow(self, ranks: Sequence[RemoteProcess], returned: Sequence[str]) -> bool:
        """Return True, and print it, if the returned hosts let the run use more processes."""
        if not returned:
            return False
        more = len(ranks) + len(returned) * self._config.processes_per_host
        with contextlib.suppress(ValueError):
            if self._largest_usable_process_count(more) > len(ranks):
                self._print_line(
                    f"back: {', '.join(returned)}; the run is saved and goes on with more processes"
                )
                return True
        return False

    # Say

    def _rank_and_host(self, rank: int, remote: RemoteProcess) -> str:
        return f"rank {rank}" + (f" on {remote.host}" if remote.host else "")

    def _log_path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def _rank_0_log_bytes(self) -> int:
        return self._log_path(0).stat().st_size if self._log_path(0).exists() else 0

    def _last_log_line(self, rank: int) -> str:
        """Return the last line that jmoe printed in a rank's log of this attempt; without one,
        JAX's report of lost ranks, or else the last line of any kind. A text says so if the log is
        missing or empty.
        """
        try:
            text = self._log_path(rank).read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        except OSError:
            return "no log"
        text = text.rpartition("\n=== ")[2]
        lines = [line.strip() for line in text.splitlines()[1:] if line.strip()]
        own = [line for line in lines if line.startswith(("jmoe: ", "train.py: ", "jmoe-train: "))]
        if not own and (unheard := UNHEARD.search(text)):
            ranks = [int(line) for line in re.findall(r"(\d+)\n", unheard[1])]
            return f"{ranks_text(ranks)}: JAX has heard nothing, dead or stopped"
        return ([*lines, *own] or ["its log is empty"])[-1]

    def _copy_new_log(self, position: int) -> int:
        """Copy new output of rank 0 to the screen; return the position reached in its log."""
        with contextlib.suppress(OSError), self._log_path(0).open("rb") as log:
            log.seek(position)
            new = log.read()
            sys.stdout.buffer.write(new)
            sys.stdout.flush()
            return position + len(new)
        return position

    def _append_event(self, event: str, **values: object) -> None:
        """Append an event to `events.jsonl`; warn if it cannot be written, as on a full disk."""
        path = self.folder / "events.jsonl"
        try:
            with path.open("a") as file:
                file.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")
        except OSError as error:
            self._print_line(f"warning: {path} lacks the event {event!r}: {error.strerror}")

    def _print_line(self, text: str) -> None:
        print(f"jmoe-supervise: {text}", flush=True)


def _is_killed_by_signal(code: int | None) -> bool:
    """Return True if a signal ended the process, other than the SIGABRT that JAX raises itself."""
    return code is not None and code > 128 and code != ABORTED


def main() -> None:
    """Supervise the run that the command line names, and exit."""
    open_closed_standard_streams()
    config, command = parse_supervise(sys.argv[1:])
    ignore_output_errors()
    try:
        sys.exit(Supervisor(config, command).run())
    except (ValueError, OSError) as error:
        sys.exit(f"jmoe-supervise: {error}")


if __name__ == "__main__":
    main()
