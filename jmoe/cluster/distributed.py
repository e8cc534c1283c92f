"""Start the processes of a run, name the missing, dead or stuck ones, and stop all of them after
the same step.

`train.py` and `serve.py` call `join_processes` or `join_and_connect_processes`, then work inside a
`Watchdog`; the training loop adds a `PreemptionSignal`. Ranks exchange reports through the
key-value store of JAX's coordination service, from background threads, so no device collective is
involved.

JAX's own failure handling stays in force: if a rank's heartbeats stop, JAX ends the whole run after
`distributed.heartbeat_timeout_s`. An outside supervisor (`jmoe-supervise`, SLURM requeue,
Kubernetes JobSet) then restarts every rank, and the run resumes from its checkpoint.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax

from jmoe.cluster import job
from jmoe.cluster.clocks import HostClocks, RunningClock
from jmoe.cluster.heartbeat import Heartbeat
from jmoe.cluster.rendezvous import connect_ranks_to_rank_0, ranks_text
from jmoe.config import DistributedConfig
from jmoe.runtime import EXIT_LOST
from jmoe.status import first_error_line
from jmoe.types import Json, JsonObject

REPORTS = "jmoe/rank/"  # + rank: what the rank is doing, as JSON
NOTICES = "jmoe/notice/"  # + rank: a line for everyone
ANSWERS = "jmoe/answer/"  # + name: rank 0's result of a `result_from_rank_0` call
STOPS = "jmoe/stop/"  # + rank: the step at whose end the rank learned that the run is to stop
# + number of earlier requests + / + rank: the step before which the rank saw the request
ASKED = "jmoe/asked/"
EXIT_CODE = EXIT_LOST  # exit code of a rank that its watchdog ended
CALL_TIMEOUT_S = 3.0
CLOSED = -1  # the last beat of a rank that has left its watchdog in order
NO_COORDINATOR = "rank 0 (the coordinator) does not answer: dead, stopped or out of reach"

# the kinds of rank 0's errors that the other ranks raise too; they raise RuntimeError for others
SHARED_ERRORS = {kind.__name__: kind for kind in (OSError, ValueError, RuntimeError)}

T = TypeVar("T")


# Start


def join_processes(config: DistributedConfig) -> None:
    """Join the other processes of the run, if there are any. Call this before any other use of JAX.

    The processes are the ones that the configuration names; otherwise the ones of the SLURM, Open
    MPI or Kubernetes job that JAX detects; otherwise only this process. Raises `TimeoutError` after
    `start_timeout_s`, on every rank that is present, naming the missing ranks. Raises `ValueError`
    if two processes claim the same rank, or if the job has more GPUs than the run uses.
    """
    for line in join_and_connect_processes(config).values():
        line.close()
    check_gpus_found_and_used(config)


def start_jax_backend() -> None:
    """Let JAX find its devices. Raises `ValueError` with the reason if it finds none."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # of JAX_PLATFORMS=cuda without a GPU
        wanted = os.environ.get("JAX_PLATFORMS", "")
        reason = (
            first_error_line(error)
            if str(error)
            else "the driver or JAX's plugin for it is missing"
        )
        raise ValueError(
            f"JAX_PLATFORMS = {wanted!r}: must name devices that JAX finds here, or be unset:"
            f" {reason}"
        ) from error


def check_gpus_found_and_used(config: DistributedConfig, devices: int | None = None) -> None:
    """Raise `ValueError` if JAX finds no devices, or if the job was given more GPUs than the run
    uses.

    devices: number of devices that a run of one process uses; None means every device JAX sees. The
    check is skipped under `jmoe-supervise` (`heartbeat_folder` is set), which has already assigned
    GPUs to its processes.
    """
    start_jax_backend()
    if config.heartbeat_folder is not None:
        return
    alone = jax.process_count() == 1
    if alone and config.coordinator_address is None:
        job.check_all_nodes_used()
    used = _num_local_gpus()
    if devices is not None and alone and devices < used:
        job.check_all_gpus_used(devices, option_for_more=f"--devices {used}")
    job.check_all_gpus_used(used)


def _num_local_gpus() -> int:
    return 0 if jax.default_backend() == "cpu" else jax.local_device_count()


def join_and_connect_processes(
    config: DistributedConfig, *, rank_0_outlives: bool = False
) -> dict[int, socket.socket]:
    """Join the other processes like `join_processes`, without the GPU check, and return the open
    connections of `connect_ranks_to_rank_0`.

    The result maps rank to socket, and is empty in a run of one process. The caller closes the
    sockets. rank_0_outlives: keep JAX from ending rank 0 when another rank dies, so that rank 0 can
    still report the loss to its clients.
    """
    if config.coordinator_address is not None:
        assert config.num_processes is not None and config.process_id is not None
        address = config.coordinator_address
        processes = config.num_processes
        rank = config.process_id
    else:
        detected = _detect_address_size_and_rank(config.start_timeout_s)
        if detected is None:
            return {}
        address, processes, rank = detected
    if processes == 1:
        return {}
    device_ids = job.local_device_ids(os.environ, job.count_visible_gpus())
    deadline = time.monotonic() + config.start_timeout_s
    lines = connect_ranks_to_rank_0(address, processes, rank, config.start_timeout_s)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    jax.config.update("jax_enable_recoverability", rank_0_outlives)
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=processes,
        process_id=rank,
        local_device_ids=device_ids,
        cluster_detection_method="deactivate",  # JAX would assign one device per process
        initialization_timeout=max(10, int(deadline - time.monotonic())),
        heartbeat_timeout_seconds=config.heartbeat_timeout_s,
        shutdown_timeout_seconds=config.step_timeout_s,
    )
    # runs before JAX's own handler, which waits for all ranks
    atexit.register(_exit_if_failed)
    return lines


def _exit_if_failed(code: int = 0, linger_s: float = 0.0) -> None:
    """End this rank at interpreter exit if it failed, skipping JAX's shutdown barrier, which would
    wait for the other ranks.
    """
    if code or getattr(sys, "last_value", None) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(linger_s)
        os._exit(code or 1)


def _detect_address_size_and_rank(
    timeout_s: float, environment: Mapping[str, str] = os.environ
) -> tuple[str, int, int] | None:
    """Return (coordinator address, processes, rank) of the cluster job that JAX detects, or None
    outside a job of several processes.

    Raises `ValueError` if a launcher started several processes but its variables are incomplete, or
    JAX cannot find the others.
    """
    launcher = job.find_launcher(environment)
    if launcher is None:
        return None
    if launcher == "k8s":
        _require_kubernetes_client()
    # jax.distributed.initialize() detects these values too, but does not return them
    from jax._src.clusters import ClusterEnv

    problem: RuntimeError | None = None
    try:
        if launcher != "ompi" or "OMPI_MCA_orte_hnp_uri" in environment:
            unset = (None, None, None, None)
            address, processes, rank, _ = ClusterEnv.auto_detect_unset_distributed_params(
                *unset, launcher, int(timeout_s)
            )
            if address is not None and processes is not None and rank is not None:
                return address, processes, rank
    # Open MPI 5 without mpi4py, or a pod without permission to list the job's pods
    except RuntimeError as error:
        problem = error
    raise ValueError(
        "JAX cannot find the other processes of this job"
        f" ({problem or 'unknown version of Open MPI'}); {job.OPTIONS} (Open MPI:"
        " $OMPI_COMM_WORLD_SIZE and $OMPI_COMM_WORLD_RANK)"
    ) from problem


def _require_kubernetes_client() -> None:
    try:
        import kubernetes  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "JOB_COMPLETION_INDEX is set (an indexed Kubernetes job), but JAX needs the package"
            f" `kubernetes` to find the job's other pods: pip install 'jax[k8s]', or {job.OPTIONS}"
        ) from error


# Watchdog


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
            atexit.register(_exit_if_failed, code, 2 * self._beat_s if self._rank == 0 else 0.0)
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
                _print_to_stderr(
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
        _print_to_stderr(words)
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
        gone = f" ({NO_COORDINATOR})" if _is_coordinator_silent() else ""
        _print_to_stderr(f"rank {self._rank} failed in {label}: {first_error_line(error)}{gone}")
        before = _result_within_timeout(self._read_reports)
        time.sleep(2.5 * self._beat_s)
        after = _result_within_timeout(self._read_reports)
        if before is None or after is None:
            _print_to_stderr(NO_COORDINATOR)
            explained = True
        else:
            ended = (_result_within_timeout(self._read_notices) or {}).keys() - {self._rank}
            silent = [
                r for r in after if r not in {self._rank, *ended} and before.get(r) == after[r]
            ]
            if silent:
                _print_to_stderr(f"{ranks_text(silent)}: no sign of life, dead or stopped")
            explained = bool(ended or silent)
        if explained and _comes_from_jax(error):
            words = f"rank {self._rank} was at {label}; ends too"
            _print_to_stderr(words)
            _result_within_timeout(lambda: self._publish_notice(words, ends_all_ranks=False))
            self._exit_process(stacks=False)

    def _end_when_rank_0_ends(self) -> None:
        """End this rank, with a line that says why, as soon as rank 0's process has ended.

        JAX's client notices it as well, and aborts the process with a stack that says nothing.
        """
        while not self._closing.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(_coordinator_address(), CALL_TIMEOUT_S) as line,
            ):
                line.settimeout(None)
                while line.recv(1 << 12):  # the server closes an idle connection after a while
                    pass
            if not self._closing.is_set() and _is_connection_refused():
                _print_to_stderr(
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
                        _print_to_stderr(notice["line"])
                        if notice["ends"]:
                            _print_to_stderr(
                                f"rank {self._rank} was at {self._describe_position()}; ends too"
                            )
                            self._exit_process()
            except jax.errors.JaxRuntimeError as error:
                self._answered_s = math.inf
                if not self._closing.is_set():
                    _print_to_stderr(f"{NO_COORDINATOR}: {first_error_line(error)}")
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
            _print_to_stderr(line)
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
        return {} if self._client is None else _read_json_by_rank(self._client, REPORTS)

    def _read_notices(self) -> dict[int, JsonObject]:
        return _read_json_by_rank(self._client, NOTICES)


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


def result_from_rank_0(name: str, call: Callable[[], str], timeout_s: float) -> str:
    """Run `call` on rank 0 and return its result on every rank. Each `name` may be used once per
    run.

    If `call` raises, rank 0 raises that error. The other ranks raise `OSError` or `ValueError` with
    the same text if rank 0's error is one of these, otherwise `RuntimeError`. Raises `TimeoutError`
    on the other ranks after `timeout_s`.
    """
    store = key_value_client()
    if store is None:
        return call()
    if jax.process_index() == 0:
        try:
            value = call()
        except Exception as error:
            answer = json.dumps(
                {"error": _shared_error_name(error), "words": _shared_error_arguments(error)}
            )
            store.key_value_set(f"{ANSWERS}{name}", answer)
            raise
        store.key_value_set(f"{ANSWERS}{name}", json.dumps({"value": value}))
        return value
    try:
        answer = json.loads(store.blocking_key_value_get(f"{ANSWERS}{name}", int(timeout_s * 1000)))
    except jax.errors.JaxRuntimeError as error:
        raise TimeoutError(
            f"waited {timeout_s:g} s for rank 0: {name}: {first_error_line(error)}"
        ) from error
    if "error" in answer:
        raise SHARED_ERRORS[answer["error"]](*answer["words"])
    return str(answer["value"])


def _shared_error_name(error: Exception) -> str:
    """Return the name of the error class that the other ranks raise for rank 0's `error`: OSError,
    ValueError, or RuntimeError for every other kind.
    """
    kinds = (name for name, kind in SHARED_ERRORS.items() if isinstance(error, kind))
    return next(kinds, RuntimeError.__name__)


def _shared_error_arguments(error: Exception) -> list[Any]:
    """Return the constructor arguments of the other ranks' error, such that its text is that of
    rank 0's `error`; of an error that becomes a RuntimeError, after the words `rank 0: KIND`.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return [
            error.errno,
            error.strerror,
            None if error.filename is None else str(error.filename),
        ]
    is_shared = isinstance(error, tuple(SHARED_ERRORS.values()))
    return [str(error) if is_shared else f"rank 0: {type(error).__name__}: {error}"]


def key_value_client() -> Any:
    """Return the client of JAX's key-value store, or None in a run of one process."""
    if jax.process_count() == 1:
        return None
    from jax._src import distributed  # the store has no public name

    return distributed.global_state.client


def _coordinator_address() -> tuple[str, int]:
    """Return (host, port) of JAX's coordinator."""
    from jax._src import distributed

    host, _, port = str(distributed.global_state.coordinator_address).rpartition(":")
    return host.strip("[]"), int(port)


def _is_coordinator_silent() -> bool:
    """Return True if nothing answers at the coordinator's address. A live gRPC server sends the
    first byte at once.
    """
    try:
        with socket.create_connection(_coordinator_address(), timeout=0.5) as line:
            return not line.recv(1)
    except OSError:
        return True


def _is_connection_refused() -> bool:
    """Return True only if the coordinator's host refuses the connection; False if the host does not
    answer.
    """
    try:
        with socket.create_connection(_coordinator_address(), timeout=CALL_TIMEOUT_S):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def _comes_from_jax(error: BaseException | None) -> bool:
    """Return True if the error, or an error in its chain of causes, is a `JaxRuntimeError`."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


def _read_json_by_rank(store: Any, folder: str) -> dict[int, Json]:
    return {
        int(key.rpartition("/")[2]): json.loads(value)
        for key, value in store.key_value_dir_get(folder)
    }


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


def _print_to_stderr(line: str) -> None:
    print(f"jmoe: {line}", file=sys.stderr, flush=True)


# Stop


class AgreedStep:
    """Agreement of all ranks on one step, soon after at least one rank asked for it.

    A rank that was asked, or sees that another was, publishes the step it has reached. Once every
    rank has published, the agreed step is max(published) + 1 + steps_in_flight. No rank can pass
    that step before it has read all published steps, because a training step needs every rank.

    keys: prefix of the published keys. steps_in_flight: steps that the loop may have dispatched
    beyond the last one whose result it has seen (0: the loop waits for each step). poll_s: seconds
    between two looks at the other ranks.
    """

    def __init__(self, keys: str, *, steps_in_flight: int, poll_s: float) -> None:
        self._keys, self._margin_steps, self._poll_s = keys, 1 + steps_in_flight, poll_s
        self.asked = threading.Event()
        self._published = False
        self._step: int | None = None
        self._client = key_value_client()
        self._closing = threading.Event()

    def start_listening(self) -> None:
        """Start a thread that watches for requests made on other ranks."""
        if self._client is not None:
            threading.Thread(
                target=self._listen_until_asked, name="agreed step", daemon=True
            ).start()

    def close(self) -> None:
        """Stop the thread that `start_listening` started."""
        self._closing.set()

    def is_reached(self, step: int) -> bool:
        """Return True if `step` is the agreed step or a later one. Every rank gets the same answer
        for the same step.
        """
        if not self.asked.is_set():
            return False
        if self._client is None:
            return True
        if not self._published:
            self._client.key_value_set(
                f"{self._keys}{jax.process_index()}", str(step), allow_overwrite=True
            )
            self._published = True
        if self._step is None:
            steps = _read_json_by_rank(self._client, self._keys)
            if len(steps) == jax.process_count():
                self._step = max(steps.values()) + self._margin_steps
        return self._step is not None and step >= self._step

    def _listen_until_asked(self) -> None:
        """Run a thread that sets `asked` once another rank has published a step."""
        while not self.asked.is_set() and not self._closing.wait(self._poll_s):
            try:
                if _read_json_by_rank(self._client, self._keys):
                    self.asked.set()
            except jax.errors.JaxRuntimeError:
                return  # no coordinator, no run: JAX ends this process


class RequestSignal:
    """Context manager that turns SIGUSR2, sent to any rank, into a request that all ranks see
    before the same step.

    The context serves any number of requests; signals that arrive before the ranks have agreed
    count as one. The handler only sets a flag. After the context, SIGUSR2 is ignored. The loop must
    wait for the result of each step.
    """

    NUMBER = signal.SIGUSR2

    def __init__(self, *, poll_s: float = 0.5) -> None:
        self.times = 0  # number of requests served so far
        self.name = self.NUMBER.name
        self._poll_s = poll_s

    def _begin_agreement(self) -> None:
        """Begin to listen for the next request."""
        self._agreed = AgreedStep(f"{ASKED}{self.times}/", steps_in_flight=0, poll_s=self._poll_s)
        self._agreed.start_listening()

    def __enter__(self) -> RequestSignal:
        self._begin_agreement()
        signal.signal(self.NUMBER, lambda *_: self._agreed.asked.set())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        signal.signal(self.NUMBER, signal.SIG_IGN)
        self._agreed.close()

    def is_due(self, step: int) -> bool:
        """Return True, once per request and on all ranks alike, if the request is due before
        `step`.
        """
        if not self._agreed.is_reached(step):
            return False
        self.times += 1
        self._begin_agreement()
        return True


class PreemptionSignal:
    """Context manager that stops all ranks after the same step on SIGTERM, SIGUSR1 (SLURM before a
    time limit), SIGHUP (the terminal is gone) or Ctrl-C.

    The handlers only set a flag, so a second signal does not disturb the save that follows: leave
    the context once the save is done. After a stop was requested, all but SIGINT stay ignored. A
    second Ctrl-C ends the process at once, without a save. steps_in_flight: see `AgreedStep`.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)

    def __init__(self, *, steps_in_flight: int = 1, poll_s: float = 0.5) -> None:
        self._agreed = AgreedStep(STOPS, steps_in_flight=steps_in_flight, poll_s=poll_s)
        self._asked = self._agreed.asked
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> PreemptionSignal:
        # Python runs signal handlers only once the main thread returns from XLA, but writes to the
        # wakeup file descriptor at once.
        self._heard, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._previous_fd = signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)
        for number in self.SIGNALS:
            # A shell's background job ignores SIGINT, and nohup SIGHUP: they stay ignored.
            stays = number in (signal.SIGINT, signal.SIGHUP)
            if not stays or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, lambda *_: self._asked.set())
        threading.Thread(target=self._announce_signals, name="signals", daemon=True).start()
        self._agreed.start_listening()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._agreed.close()
        for number, previous in self._previous.items():
            after = signal.SIG_DFL if number is signal.SIGINT else signal.SIG_IGN
            signal.signal(number, after if self._asked.is_set() else previous)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._tell)

    def must_stop_after(self, step: int) -> bool:
        """Return True if the run must stop after `step`, which has just finished. Every rank gets
        the same answer for the same step.
        """
        return self._agreed.is_reached(step)

    def _announce_signals(self) -> None:
        """Print a message for each signal as soon as it arrives, even while the main thread is
        inside XLA.
        """
        told: set[int] = set()
        while numbers := os.read(self._heard, 64):
            for number in numbers:
                if number == signal.SIGINT and number in told:
                    _print_to_stderr("a second Ctrl-C: ended at once, nothing is saved")
                    os._exit(128 + number)
                if number in self._previous and number not in told:
                    told.add(number)
                    again = "; Ctrl-C once more ends it at once" if number == signal.SIGINT else ""
                    _print_to_stderr(
                        f"{signal.Signals(number).name}: the run finishes this step, saves and"
                        f" stops{again}"
                    )
        os.close(self._heard)
