"""State of a run, read from its output folder during the run or after its end. Standard library
only; the folder is not changed.

`jmoe-status` and the Prometheus exporter call `read_overview`. Ages are measured by the clock that
stamps the folder's files (the disk's), or by this machine's clock if no file can be made there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from jmoe.cluster.clocks import SKEW_S, probe_disk_time
from jmoe.cluster.heartbeat import CLOSED, read_heartbeat
from jmoe.cluster.restarts import METRICS, read_progress
from jmoe.config import DistributedConfig
from jmoe.types import JsonObject

LOCK, IDENTITY = "run.lock", "run.json"  # those of `RunFolder`
SUPERVISE, EVENTS = "supervise", "events.jsonl"
RATE_STEPS = 32  # the rate is a median over at most this many last steps
SILENT_S = 5.0  # a rank beats about once a second
LATE_S = 0.1  # ranks never begin a wait at exactly the same moment

State = Literal["starting", "running", "ended", "stopped", "dead"]


@dataclass(frozen=True)
class RankHeartbeat:
    """A rank's last heartbeat.

    at: what the rank was doing. waits: number of waits begun; all ranks begin the same waits, so
    the count compares their positions. begun_time, beat_time: Unix time of the start of the last
    wait and of the heartbeat, by the disk's clock. silent_s: seconds since the heartbeat.
    """

    rank: int
    at: str
    waits: int
    begun_time: float
    beat_time: float
    silent_s: float


@dataclass(frozen=True)
class NewestSnapshotInMemory:
    """The newest step with snapshots in this host's memory, and the ranks whose shards the host
    holds.
    """

    step: int
    ranks: tuple[int, ...]
    age_s: float


@dataclass(frozen=True)
class RunOverview:
    """State of a run as its folder shows it; a field is None if the folder does not tell.

    state: `starting` if a supervisor is about to start processes; `running` if a process of the run
    holds the folder; `ended` if all steps are done and saved; `stopped` if no process is left and
    every finished step is saved; `dead` if no process is left and finished steps must be repeated.

    steps: finished steps, of `num_steps`. snapshot: of this host's memory only. tiers: counters of
    process 0 since its start. clock_ahead_s: this machine's clock minus the disk's clock.
    """

    folder: str
    run: str
    state: State
    why: str
    attempt: int | None
    steps: int
    num_steps: int | None
    loss: float | None
    tokens_per_s: float | None
    step_s: float | None
    step_age_s: float | None
    checkpoint: int | None
    checkpoint_age_s: float | None
    snapshot: NewestSnapshotInMemory | None
    restarts: int
    last_end: str
    ranks: tuple[RankHeartbeat, ...]
    slowest_rank: int | None
    tiers: dict[str, float] | None
    clock_ahead_s: float


def read_overview(folder: Path) -> RunOverview:
    """Return the state of the run in `folder`. Raises `ValueError` if `folder` is not the output
    folder of a run.
    """
    _check_run_folder(folder)
    config, events = _read_json_object(folder / "config.json"), _read_supervisor_events(folder)
    own_now = time.time()
    now = probe_disk_time(folder) or max(own_now, _modification_time(folder / METRICS) or 0.0)
    steps, resumes = _read_last_steps(folder / METRICS)
    progress, last = read_progress(folder), steps[-1] if steps else {}
    rates = [step for step in steps if not step.get("compiled")]
    checkpoint = progress.checkpoint if progress.checkpoint >= 0 else None
    checkpoint_time = (
        None if checkpoint is None else _modification_time(folder / "checkpoints" / str(checkpoint))
    )
    ranks, starts = _read_rank_heartbeats(folder, config, now), _start_events(events)
    num_steps, steps_done = config.get("num_steps"), progress.step + 1
    evidence = _RunEvidence(config, events, ranks, now)
    state, why = _state_and_reason(folder, evidence, steps_done, num_steps, checkpoint)
    run = str(_read_json_object(folder / IDENTITY).get("run", folder.resolve().name))
    return RunOverview(
        folder=str(folder),
        run=run,
        state=state,
        why=why,
        attempt=starts[-1].get("attempt") if starts else None,
        steps=steps_done,
        num_steps=num_steps,
        loss=_step_value(last, "loss"),
        tokens_per_s=median(step["tokens_per_s"] for step in rates) if rates else None,
        step_s=median(step["step_s"] for step in rates) if rates else None,
        step_age_s=None if not steps else _age_s(_modification_time(folder / METRICS), now),
        checkpoint=checkpoint,
        checkpoint_age_s=_age_s(checkpoint_time, now),
        snapshot=_find_newest_snapshot(config, run, own_now),
        restarts=max(len(starts) - 1, resumes),
        last_end=_last_end_reason(events),
        ranks=ranks,
        slowest_rank=find_slowest_rank(ranks) if state == "running" else None,
        tiers=last.get("tiers"),
        clock_ahead_s=own_now - now,
    )


def _check_run_folder(folder: Path) -> None:
    """Raise `ValueError` if `folder` has none of the files that every run has."""
    if any((folder / name).exists() for name in (IDENTITY, LOCK, METRICS, SUPERVISE)):
        return
    missing = (
        "must be a folder"
        if not folder.is_dir()
        else f"has no {IDENTITY}, {LOCK}, {METRICS} or {SUPERVISE}"
    )
    raise ValueError(f"run = {str(folder)!r}: must be the output folder of a run, and {missing}")


def _start_events(events: list[JsonObject]) -> list[JsonObject]:
    """Return the supervisor's records of attempts that began."""
    return [event for event in events if event["event"] == "start"]


def _last_end_reason(events: list[JsonObject]) -> str:
    """Return why the last attempt under a supervisor ended; "" if none has."""
    ends = [
        str(event.get("why") or event.get("kind", ""))
        for event in events
        if event["event"] == "end"
    ]
    return ends[-1] if ends else ""


def find_slowest_rank(ranks: tuple[RankHeartbeat, ...]) -> int | None:
    """Return the rank that holds up the others, or None.

    It is the rank that has been silent longest, or else the rank that began its current wait last.
    """
    silent = [rank for rank in ranks if rank.silent_s > SILENT_S and rank.at != CLOSED]
    if silent:
        return max(silent, key=lambda rank: rank.silent_s).rank
    at_work = [rank for rank in ranks if rank.at != CLOSED]
    late_s = {rank.rank: max(_seconds_behind(rank, other) for other in at_work) for rank in at_work}
    late = [rank for rank in at_work if late_s[rank.rank] > LATE_S]
    return min(late, key=lambda rank: (rank.waits, -late_s[rank.rank])).rank if late else None


def _seconds_behind(rank: RankHeartbeat, other: RankHeartbeat) -> float:
    """Return how many seconds later than `other` this rank began the same wait, or has still not
    begun it.

    Ranks report at different moments, so a rank counts as behind only if `other` had begun the
    later wait before this rank's report.
    """
    if other.waits == rank.waits:
        return rank.begun_time - other.begun_time
    return rank.beat_time - other.begun_time if other.waits > rank.waits else 0.0


# State


@dataclass(frozen=True)
class _RunEvidence:
    """A run's configuration, its supervisor's events and its ranks, as read from the run's folder
    at the Unix time `now`.
    """

    config: JsonObject
    events: list[JsonObject]
    ranks: tuple[RankHeartbeat, ...]
    now: float


def _state_and_reason(
    folder: Path, evidence: _RunEvidence, done: int, num_steps: int | None, checkpoint: int | None
) -> tuple[State, str]:
    """Return the run's state and a clause that gives the evidence for it."""
    owner = _read_json_object(folder / LOCK)
    held, elsewhere = (
        _is_locked(folder / LOCK),
        owner.get("host") not in (None, socket.gethostname()),
    )
    silent_s, limit_s = _silence_and_limit_s(folder, evidence)
    by = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "a process"
    if held:
        return "running", f"{by} holds the folder"
    if (held is None or elsewhere) and owner and silent_s <= limit_s:
        return "running", f"last sign of life of {by} {silent_s:.0f} s ago"
    if (
        num_steps is not None
        and done >= num_steps
        and checkpoint is not None
        and checkpoint >= num_steps
    ):
        return "ended", "all steps are done and saved"
    awaited = bool(evidence.events) and (
        evidence.events[-1]["event"] == "start" or evidence.events[-1].get("kind") != "done"
    )
    if awaited and _is_locked(folder / SUPERVISE / "lock"):
        return "starting", "its supervisor starts its processes"
    if checkpoint is not None and checkpoint == done:
        return "stopped", "no process is left, all steps so far are saved"
    lost = "no step is saved" if checkpoint is None else f"goes on from step {checkpoint}"
    silent = (
        f"no sign of life for {silent_s:.0f} s"
        if elsewhere or held is None
        else "no process is left"
    )
    return "dead", f"{silent}, {lost}"


def _is_locked(path: Path) -> bool | None:
    """Return True if a process holds `flock` on the file, False if none does, and None if the file
    system cannot tell.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError as error:
        return True if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None


def _silence_and_limit_s(folder: Path, evidence: _RunEvidence) -> tuple[float, float]:
    """Return (seconds since the run's last sign of life, seconds of silence after which the run
    counts as dead).
    """
    limits = dataclasses.asdict(DistributedConfig()) | evidence.config.get("distributed", {})
    if evidence.ranks:
        return min(rank.silent_s for rank in evidence.ranks), 5.0 + 1.5 * limits[
            "heartbeat_timeout_s"
        ]
    ages = [_age_s(_modification_time(folder / name), evidence.now) for name in (METRICS, LOCK)]
    known = [age for age in ages if age is not None]
    return min(known, default=float("inf")), max(
        limits["step_timeout_s"], limits["start_timeout_s"]
    )


def _read_rank_heartbeats(
    folder: Path, config: JsonObject, now: float
) -> tuple[RankHeartbeat, ...]:
    """Return the heartbeats of the most recent attempt that left any, sorted by rank."""
    beats = sorted(
        folder.glob(f"{SUPERVISE}/heartbeat-*"), key=lambda path: int(path.name.rpartition("-")[2])
    )
    configured = config.get("distributed", {}).get("heartbeat_folder")
    beats = beats or ([Path(configured)] if configured else [])
    ranks = []
    for path in beats[-1].glob("rank-*.json") if beats else ():
        beat, beat_time = read_heartbeat(path), _modification_time(path)
        if beat and beat_time is not None:
            rank = int(path.stem.partition("-")[2])
            silent_s = max(0.0, now - beat_time)
            begun_time = beat_time - float(beat.get("since_s", 0.0))
            waits = int(beat.get("waits", 0))
            ranks.append(
                RankHeartbeat(rank, str(beat.get("at", "")), waits, begun_time, beat_time, silent_s)
            )
    return tuple(sorted(ranks, key=lambda sign: sign.rank))


def _find_newest_snapshot(
    config: JsonObject, run: str, now: float
) -> NewestSnapshotInMemory | None:
    """Return the newest snapshot that `jmoe/run/snapshots.py` left in this host's memory, or
    None.
    """
    memory_dir = config.get("checkpoint", {}).get("memory_dir")
    times: dict[int, dict[int, float]] = {}
    for path in Path(memory_dir).absolute().glob(f"jmoe-{run}/*-of-*") if memory_dir else ():
        step, _, rank = path.name.partition("-of-")
        moment = _modification_time(path)
        if step.isdigit() and rank.isdigit() and moment is not None:
            times.setdefault(int(step), {})[int(rank)] = moment
    if not times:
        return None
    newest = times[max(times)]
    return NewestSnapshotInMemory(
        max(times), tuple(sorted(newest)), max(0.0, now - max(newest.values()))
    )


# Files, any of which may be half-written


def _read_last_steps(metrics: Path) -> tuple[list[JsonObject], int]:
    """Return (records of the last `RATE_STEPS` steps, number of times the run was resumed)."""
    last: deque[bytes] = deque(maxlen=RATE_STEPS)
    resumes = 0
    with contextlib.suppress(OSError), metrics.open("rb") as file:
        for line in file:
            if line.startswith(b'{"step"') and line.endswith(b"\n"):
                last.append(line)
            resumes += line.startswith(b'{"event": "resume"') and line.endswith(b"\n")
    return [
        record
        for record in map(_parse_json_object, last)
        if {"tokens_per_s", "step_s"} <= record.keys()
    ], resumes


def _read_supervisor_events(folder: Path) -> list[JsonObject]:
    """Return the supervisor's start and end events in order; empty without a supervisor."""
    with contextlib.suppress(OSError), (folder / SUPERVISE / EVENTS).open("rb") as file:
        return [event for event in map(_parse_json_object, file) if "event" in event]
    return []


def _read_json_object(path: Path) -> JsonObject:
    """Return the JSON object in a file; an empty dict if the file is missing or incomplete."""
    with contextlib.suppress(OSError):
        return _parse_json_object(path.read_bytes())
    return {}


def _parse_json_object(text: bytes) -> JsonObject:
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        return value if isinstance(value, dict) else {}
    return {}


def _step_value(record: JsonObject, name: str) -> float | None:
    """Return the value `name` of a step's record in metrics.jsonl, None if the record lacks it.
    Infinite and nan values are stored as text, under `non_finite`.
    """
    apart = record.get("non_finite", {})
    return float(apart[name]) if name in apart else record.get(name)


def _modification_time(path: Path) -> float | None:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return None


def _age_s(moment: float | None, now: float) -> float | None:
    return None if moment is None else max(0.0, now - moment)


# In words


def overview_lines(run: RunOverview) -> Iterator[str]:
    """Yield the overview as text, one line for each known fact."""
    attempt = f", attempt {run.attempt}" if run.attempt is not None else ""
    yield f"{run.run} in {run.folder}: {run.state} ({run.why}{attempt})"
    if abs(run.clock_ahead_s) > SKEW_S:
        how = "ahead of" if run.clock_ahead_s > 0 else "behind"
        yield (
            f"clock         this machine's is {abs(run.clock_ahead_s):,.0f} s {how} the disk's,"
            " which ages are by"
        )
    of = (
        f" of {run.num_steps:,} ({100 * run.steps // max(1, run.num_steps)} %)"
        if run.num_steps is not None
        else ""
    )
    if run.num_steps is not None and run.steps > run.num_steps:
        of = f", more than the {run.num_steps:,} that it was last told"
    yield f"steps         {run.steps:,}{of}{_age_text(run.step_age_s)}"
    if run.tokens_per_s is not None:
        yield f"rate          {run.tokens_per_s:,.0f} tokens/s, {run.step_s:.3g} s a step"
    if run.loss is not None:
        yield f"loss          {run.loss:.4f}"
    saved = (
        "none yet"
        if run.checkpoint is None
        else f"step {run.checkpoint:,}{_age_text(run.checkpoint_age_s)}"
    )
    yield f"checkpoint    {saved}"
    if run.snapshot is not None:
        ranks = ", ".join(map(str, run.snapshot.ranks))
        age = _age_text(run.snapshot.age_s)
        yield (
            f"in memory     step {run.snapshot.step:,}{age}; on this host the shards of process"
            f" {ranks}"
        )
    end = f"; the last attempt that ended: {run.last_end}" if run.last_end else ""
    yield f"restarts      {run.restarts}{end}"
    for sign in run.ranks:
        if sign.rank == run.slowest_rank:
            yield f"slowest rank  {sign.rank}, at {sign.at}; heard {sign.silent_s:.0f} s ago"
    if run.tiers is not None:
        hits = run.tiers.get("hit_rate")
        rate = "" if hits is None else f"hit rate {100 * hits:.1f} %, "
        read, written, host = (
            run.tiers[f"{name}_bytes"] / 1e9 for name in ("nvme_read", "nvme_written", "host")
        )
        moved = f"NVMe {read:.2f} GB read, {written:.2f} GB written, host memory {host:.2f} GB"
        yield (
            f"tiers         {rate}{moved}, {run.tiers['waited_s']:.1f} s waited (process 0 since"
            " its start)"
        )


def _age_text(age_s: float | None) -> str:
    return "" if age_s is None else f", {age_s:,.0f} s ago"
