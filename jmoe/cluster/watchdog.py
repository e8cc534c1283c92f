"""Limit on every wait of a rank: an overdue wait ends the run, and names the ranks that are behind,
dead or stopped.

Ranks exchange reports through the key-value store of JAX's coordination service, from background
threads, so no device collective is involved.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import jax

from jmoe.cluster.clocks import HostClocks, RunningClock
from jmoe.cluster.coordinator import (
    CALL_TIMEOUT_S,
    NO_COORDINATOR,
    coordinator_address,
    is_connection_refused,
    is_coordinator_silent,
    key_value_client,
    read_json_by_rank,
)
from jmoe.cluster.distributed import exit_if_failed, print_to_stderr
from jmoe.cluster.heartbeat import Heartbeat
from jmoe.cluster.rendezvous import ranks_text
from jmoe.config import DistributedConfig
from jmoe.runtime import EXIT_LOST
from jmoe.status import first_error_line
from jmoe.types import JsonObject

REPORTS = "jmoe/rank/"  # + rank: what the rank is doing, as JSON
NOTICES = "jmoe/notice/"  # + rank: a line for everyone
EXIT_CODE = EXIT_LOST  # exit code of a rank that its watchdog ended
CLOSED = -1  # the last beat of a rank that has left its watchdog in order
T = TypeVar("T")


class Watchdog:
    """Context manager that ends this process when one wait takes longer than `timeout_s`, naming
    the wait and the ranks that are behind.

    In a run of several processes each rank publishes its position about once a second. Every rank
    then names any rank that is behind, dead or stopped, and a rank that gives up makes all others
    print their stacks and end. If an exception leaves the context, the rank exits without JAX's
    shutdown barrier, which would wait for the other ranks. Time in which the process was suspended
    does not count. heartbeat: file that a supervisor reads to see that this process is alive.
    """

    def __init__(
        self,
        timeout_s: float,
        heartbeat_timeout_s: float = 10.0,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._heartbeat = heartbeat
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._tick_s = min(1.0, timeout_s / 10)
        self._beat_s = min(1.0, heartbeat_timeout_s / 10)
        self._rank, self._processes = jax.process_index(), jax.process_count()
        self._client = key_value_client()
        self._wait: _Wait | None = None
        # Waits begun so far. All ranks run the same program, so the count compares their positions.
        self._waits = 0
        self._clock = RunningClock(min(self._tick_s, self._beat_s))
        self._begun_s = self._clock.now()  # when the last wait began
        self._clocks = HostClocks(socket.gethostname())
        self._last = "nothing yet"
        # When the coordinator last answered; inf: no answer is expected, or silence was reported.
        self._answered_s = math.inf
        self._closing = threading.Event()
        self._ending = threading.Lock()
        self._threads = [
            threading.Thread(target=self._watch_until_closed, name="watchdog", daemon=True)
        ]
        if self._client is not None:
            self._threads.append(
                threading.Thread(
                    target=self._exchange_reports_until_closed, name="watchdog reports", daemon=True
                )
            )
            if self._rank > 0:  # not joined at exit: the thread waits for rank 0's end
                threading.Thread(
                    target=self._end_when_rank_0_ends, name="line to rank 0", daemon=True
                ).start()

    @contextlib.contextmanager
    def waiting_for(
        self,
        phase: str,
        step: int | None = None,
        *,
        timeout_s: float | None = None,
        progress: Callable[[], object] | None = None,
        option: str = "distributed.step_timeout_s",
    ) -> Iterator[None]:
        """Return a context manager whose block must end within `timeout_s` (default: this
        watchdog's own). Blocks may nest.

        phase, step: name of the wait in messages. progress: the time limit starts again whenever
        this function's value has changed, on this rank or on another rank in a wait with progress;
        a text value is also shown in messages. option: name of the setting that holds the limit,
        for the message.
        """
        label = phase if step is None else f"{phase} {step}"
        begun_s = self._clock.now()
        wait = _Wait(
            label, self.timeout_s if timeout_s is None else timeout_s, progress, option, begun_s
        )
        if progress is not None:
            wait.seen = {self._rank: str(progress())}
        outer, self._wait = self._wait, wait
        self._waits, self._begun_s = self._waits + 1, begun_s
        try:
            try:
                yield
            finally:
                self._wait, self._last = outer, label
        except Exception as error:
            if outer is None:
                self._explain_failure(label, error)
            raise

    def progress_of_rank_0(self) -> str | None:
        """Return the progress text that rank 0's current wait last published, or None if there is
        none.
        """
        report = _result_within_timeout(
            lambda: json.loads(self._client.key_value_try_get(f"{REPORTS}0"))
        )
        return None if report is None else report["progress"]

    def __enter__(self) -> Watchdog:
        self._write_heartbeat()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        regular = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if error is not None and not regular and self._client is not None:
            words = (
                f"rank {self._rank} ended with {type(error).__name__}: {first_error_line(error)}"
            )
            _result_within_timeout(lambda: self._publish_notice(words, ends_all_ranks=False))
            # the store ends with rank 0: let the other ranks read the notice first
            code = EXIT_LOST if isinstance(error, TimeoutError) or _comes_from_jax(error) else 1
            atexit.register(exit_if_failed, code, 2 * self._beat_s if self._rank == 0 else 0.0)
        self._closing.set()
        for thread in self._threads:
            thread.join(CALL_TIMEOUT_S)
        if self._heartbeat is not None:
            self._heartbeat.close()
        if regular and self._client is not None:
            _result_within_timeout(lambda: self._publish_report(CLOSED))

    def _watch_until_closed(self) -> None:
        """Run a thread that beats, reports a silent coordinator, and ends the process at an overdue
        wait.
        """
        while not self._closing.wait(min(self._tick_s, self._beat_s)):
            wait, now_s = self._wait, self._clock.skip_suspension()
            self._write_heartbeat()
            # A call to a frozen coordinator returns nothing, not even an error; JAX then ends this
            # process unexplained.
            silent_s = now_s - self._answered_s
            if silent_s > 0.6 * self._heartbeat_timeout_s and not self._closing.is_set():
                self._answered_s = math.inf
                print_to_stderr(
                    f"{NO_COORDINATOR}, for {silent_s:.0f} s; this rank is at"
                    f" {self._describe_position()}"
                )
            if (
                wait is not None
                and now_s > wait.since + wait.timeout_s
                and not self._closing.is_set()
            ):
                if self._has_progressed(wait):
                    wait.since = self._clock.now()
                else:
                    self._end_overdue_wait(wait)

    def _write_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat(
                self._describe_position(), self._waits, self._clock.now() - self._begun_s
            )

    def _has_progressed(self, wait: _Wait) -> bool:
        """Return True if any rank's progress has changed since the last call, for a wait with
        progress.
        """
        if wait.progress is None:
            return False
        reports = _result_within_timeout(self._read_reports) or {}
        now = {rank: report["progress"] for rank, report in reports.items()} | {
            self._rank: str(wait.progress())
        }
        changed = now != wait.seen
        wait.seen = now
        return changed

    def _end_overdue_wait(self, wait: _Wait) -> None:
        """Print and publish which wait is overdue and which ranks are behind; end this process."""
        waited_s = self._clock.now() - wait.since
        words = f"rank {self._rank} has waited {waited_s:.0f} s for {wait.describe()}"
        words += " without progress" if wait.progress is not None else ""
        words += f" (limit {wait.timeout_s:g} s, {wait.option})"
        reports = _result_within_timeout(self._read_reports)
        if self._client is not None:
            words += "; " + (
                NO_COORDINATOR if reports is None else self._describe_ranks_behind(reports)
            )
        print_to_stderr(words)
        if reports:
            _result_within_timeout(lambda: self._publish_notice(words, ends_all_ranks=True))
        self._exit_process()

    def _exit_process(self, *, stacks: bool = True) -> None:
        """End this process at once, by default after printing the stacks of its threads."""
        self._ending.acquire()  # only the first thread prints and exits
        if stacks:
            faulthandler.dump_traceback(file=2)
        sys.stdout.flush()
        sys.stderr.flush()
        if self._rank == 0 and self._client is not None:
            # the run ends with rank 0: let the others read the notice and print their stacks
            time.sleep(2.5 * self._beat_s)
        os._exit(EXIT_CODE)

    def _describe_ranks_behind(self, reports: dict[int, JsonObject]) -> str:
        """Return text that names the ranks behind this one, or says that there are none."""
        lines = []
        for rank in range(self._processes):
            report = reports.get(rank)
            if report is None:
                lines.append(f"rank {rank} has not begun")
            elif report["waits"] < self._waits:
                lines.append(f"rank {rank} is behind, at {report['at']}")
        return "; ".join(lines) or f"all {self._processes} ranks have come as far"

    def _explain_failure(self, label: str, error: Exception) -> None:
        """Print which silent or ended ranks explain this error, before the error propagates.

        If JAX raised the error and another rank explains it, this rank exits here: a traceback
        would add nothing.
        """
        if self._client is None or self._closing.is_set():
            return
        # print at once: JAX may end this process at any moment
        gone = f" ({NO_COORDINATOR})" if is_coordinator_silent() else ""
        print_to_stderr(f"rank {self._rank} failed in {label}: {first_error_line(error)}{gone}")
        before = _result_within_timeout(self._read_reports)
        time.sleep(2.5 * self._beat_s)
        after = _result_within_timeout(self._read_reports)
        if before is None or after is None:
            print_to_stderr(NO_COORDINATOR)
            explained = True
        else:
            ended = (_result_within_timeout(self._read_notices) or {}).keys() - {self._rank}
            silent = [
                r for r in after if r not in {self._rank, *ended} and before.get(r) == after[r]
            ]
            if silent:
                print_to_stderr(f"{ranks_text(silent)}: no sign of life, dead or stopped")
            explained = bool(ended or silent)
        if explained and _comes_from_jax(error):
            words = f"rank {self._rank} was at {label}; ends too"
            print_to_stderr(words)
            _result_within_timeout(lambda: self._publish_notice(words, ends_all_ranks=False))
            self._exit_process(stacks=False)

    def _end_when_rank_0_ends(self) -> None:
        """End this rank, with a line that says why, as soon as rank 0's process has ended.

        JAX's client notices it as well, and aborts the process with a stack that says nothing.
        """
        while not self._closing.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(coordinator_address(), CALL_TIMEOUT_S) as line,
            ):
                line.settimeout(None)
                while line.recv(1 << 12):  # the server closes an idle connection after a while
                    pass
            if not self._closing.is_set() and is_connection_refused():
                print_to_stderr(
                    f"rank 0 (the coordinator) does not answer: dead; rank {self._rank} was at"
                    f" {self._describe_position()}; ends too"
                )
                self._exit_process(stacks=False)
            self._closing.wait(self._beat_s)

    # Reports run in their own thread: a call to a stopped coordinator does not return

    def _exchange_reports_until_closed(self) -> None:
        """Run a thread that publishes this rank's reports, prints other ranks' notices, and ends
        the process if a notice says so.
        """
        seen: set[str] = set()
        changed: dict[int, tuple[int, float]] = {}
        beat = 0
        while not self._closing.is_set():
            beat += 1
            try:
                self._publish_report(beat)
                self._answered_s = self._clock.now()
                if self._rank == 0:
                    self._publish_silent_ranks(changed)
                for rank, notice in self._read_notices().items():
                    if rank != self._rank and notice["line"] not in seen:
                        seen.add(notice["line"])
                        print_to_stderr(notice["line"])
                        if notice["ends"]:
                            print_to_stderr(
                                f"rank {self._rank} was at {self._describe_position()}; ends too"
                            )
                            self._exit_process()
            except jax.errors.JaxRuntimeError as error:
                self._answered_s = math.inf
                if not self._closing.is_set():
                    print_to_stderr(f"{NO_COORDINATOR}: {first_error_line(error)}")
                return
            self._closing.wait(self._beat_s)

    def _publish_report(self, beat: int) -> None:
        wait = self._wait
        progress = str(wait.progress()) if wait is not None and wait.progress is not None else None
        report = {
            "beat": beat,
            "waits": self._waits,
            "at": self._describe_position(),
            "progress": progress,
        }
        report |= {"host": socket.gethostname(), "time": time.time()}
        self._client.key_value_set(
            f"{REPORTS}{self._rank}", json.dumps(report), allow_overwrite=True
        )

    def _publish_silent_ranks(self, changed: dict[int, tuple[int, float]]) -> None:
        """Publish, on rank 0, which ranks stopped reporting, before JAX ends the run for missing
        heartbeats.
        """
        now, begun_s = self._clock.now(), time.time()
        reports = self._read_reports()
        for line in self._clocks.new_skew_warnings(reports, begun_s):
            print_to_stderr(line)
        for rank, report in reports.items():
            if rank not in changed or changed[rank][0] != report["beat"]:
                changed[rank] = (report["beat"], now)
            silent_s = now - changed[rank][1]
            if silent_s > 0.5 * self._heartbeat_timeout_s and report["beat"] != CLOSED:
                changed[rank] = (report["beat"], math.inf)  # report the silence once
                words = (
                    f"rank {rank}: no sign of life for {silent_s:.0f} s, dead or stopped, at"
                    f" {report['at']}"
                )
                self._publish_notice(words, ends_all_ranks=False, rank=rank)

    def _describe_position(self) -> str:
        """Return what this rank waits for and for how long, or the last wait that ended."""
        wait = self._wait
        if wait is None:
            return f"the end of {self._last}"
        return f"{wait.describe()} since {self._clock.now() - wait.since:.0f} s"

    def _publish_notice(self, line: str, *, ends_all_ranks: bool, rank: int | None = None) -> None:
        """Publish a line that all ranks print; `ends_all_ranks` makes them end as well."""
        key = f"{NOTICES}{self._rank if rank is None else rank}"
        self._client.key_value_set(
            key, json.dumps({"line": line, "ends": ends_all_ranks}), allow_overwrite=True
        )

    def _read_reports(self) -> dict[int, JsonObject]:
        return {} if self._client is None else read_json_by_rank(self._client, REPORTS)

    def _read_notices(self) -> dict[int, JsonObject]:
        return read_json_by_rank(self._client, NOTICES)


def make_watchdog(limits: DistributedConfig) -> Watchdog:
    """Return a `Watchdog` with the time limits and the heartbeat file that the configuration
    gives.
    """
    heartbeat = None
    if limits.heartbeat_folder is not None:
        heartbeat = Heartbeat(
            Path(limits.heartbeat_folder), jax.process_index(), jax.local_device_count()
        )
    return Watchdog(limits.step_timeout_s, limits.heartbeat_timeout_s, heartbeat)


@dataclass
class _Wait:
    """One active `with watchdog.waiting_for(...)` block. seen: progress of every rank at the last
    check.
    """

    label: str
    timeout_s: float
    progress: Callable[[], object] | None
    option: str
    since: float
    seen: dict[int, str] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the label of the wait, followed by its progress if `progress` returns text."""
        now = self.progress() if self.progress is not None else None
        return f"{self.label}, {now}" if isinstance(now, str) and now else self.label


def _comes_from_jax(error: BaseException | None) -> bool:
    """Return True if the error, or an error in its chain of causes, is a `JaxRuntimeError`."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


def _result_within_timeout(call: Callable[[], T]) -> T | None:
    """Return the call's result, or None if it fails or is not back after `CALL_TIMEOUT_S`."""
    result: list[T] = []

    def run_call() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            result.append(call())

    thread = threading.Thread(target=run_call, daemon=True)
    thread.start()
    thread.join(CALL_TIMEOUT_S)
    return result[0] if result else None
