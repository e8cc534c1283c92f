"""Snapshots of a run's state in host memory, so that a restart need not read a checkpoint from
disk.

Each process writes its shards to a folder in its host's memory (a tmpfs such as /dev/shm), and a
copy goes to the memory of its partner, a process on another host if there is one. The idea is
Gemini's (Wang et al., SOSP 2023): if a machine is lost, another machine's memory still has its
shards. After a restart all processes agree on the newest step of which all shards exist.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import jax
import numpy as np

from jmoe.cluster.processes import Pairs, exchange_bytes, gather_json, split_into_rounds
from jmoe.config import CheckpointConfig
from jmoe.run.snapshot_file import (
    ShardLayout,
    allocate_file,
    layout_of_shards,
    map_verified_snapshot,
    read_description,
    read_state,
    snapshot_file_bytes,
    total_shard_bytes,
    verify_snapshot,
    write_snapshot,
)
from jmoe.types import Json, JsonObject, PyTree

KEPT = 2  # a crash during a write leaves the previous snapshot
# upper bound of a file's header and JSON, for the check of free memory
DESCRIPTION_BYTES = 1 << 20
NEW = ".new"  # suffix of a file that is still being written
_NOTHING = np.empty(0, np.uint8)

Key = tuple[int, int]  # (step, rank that owns the shards)


@dataclass(frozen=True)
class StateSnapshot:
    """One step's state, data position and configuration, read from a snapshot."""

    step: int
    state: PyTree
    data: Json
    config: JsonObject


@dataclass(frozen=True)
class SnapshotEntry:
    """Facts about a snapshot file, known without reading its shards. checkpoint: newest checkpoint
    on disk when it was made.
    """

    num_bytes: int
    checkpoint: int


def choose_partners(machines: Sequence[str]) -> list[int]:
    """Return, for each process, the process that keeps a copy of its shards. Each process is a
    partner exactly once.

    machines: machine name of every process. Partners are on different machines if that is possible
    for all processes.
    """
    order = sorted(range(len(machines)), key=lambda rank: (machines.index(machines[rank]), rank))
    most = max(machines.count(machine) for machine in machines)
    shift = most if most < len(machines) else 1
    partner = {rank: order[(at + shift) % len(order)] for at, rank in enumerate(order)}
    return [partner[rank] for rank in range(len(machines))]


class Snapshots:
    """The newest snapshots of one run in memory, below `config.memory_dir`. Every process makes the
    same calls.

    Used as a context manager, which deletes the snapshots if the run ends normally or by a
    `FloatingPointError`, and keeps them otherwise, for the restart. run: the run's name. starts:
    tokens of the run's starts, the current one last; snapshots of other starts belong to a clone of
    the run and are ignored. Raises `OSError` on every process if one process cannot write its
    folder.
    """

    def __init__(self, config: CheckpointConfig, run: str, starts: Sequence[str]) -> None:
        assert config.memory_dir is not None
        self.folder = Path(config.memory_dir).absolute() / f"jmoe-{run}"
        self._setting, self._run = f"checkpoint.memory_dir = {config.memory_dir!r}", run
        self._starts = tuple(starts)
        self._rank, self._processes = jax.process_index(), jax.process_count()
        place, problem = "", ""
        try:
            place = _make_private_folder(self.folder)
        except OSError as error:
            problem = f"must be a folder that can be written: {error.strerror}"
        self._raise_on_all(OSError, problem)
        views = gather_json([socket.gethostname(), place])
        self._places = [place for _, place in views]
        partners = enumerate(choose_partners([machine for machine, _ in views]))
        self._pairs: Pairs = tuple(
            (a, b) for a, b in partners if self._places[a] != self._places[b]
        )
        self._first_here = self._places.index(place) == self._rank

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, FloatingPointError):
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def location_note(self) -> str:
        """Return a line to print about where snapshots are stored."""
        copies = (
            f"and {len(self._pairs)} copies on other hosts"
            if self._pairs
            else "without copies, because all processes share the folder"
        )
        return f"snapshots in memory: {self.folder}, one a process ({self._processes}), {copies}"

    def check_free_memory(self, abstract_state: PyTree) -> None:
        """Raise `ValueError` on every process if a host has too little free memory for `KEPT`
        snapshots of its processes and their copies.
        """
        own_bytes = total_shard_bytes(layout_of_shards(abstract_state)) + DESCRIPTION_BYTES
        sizes, place = gather_json(own_bytes), self._places[self._rank]
        written = [rank for rank in range(self._processes) if self._places[rank] == place]
        written += [source for source, target in self._pairs if self._places[target] == place]
        needed_bytes = KEPT * sum(sizes[rank] for rank in written)
        status = os.statvfs(self.folder)
        free_bytes = status.f_bavail * status.f_frsize + sum(
            path.stat().st_size for path in self.folder.iterdir()
        )
        short = (
            f"must have {needed_bytes:,} bytes free on {socket.gethostname()}, for {KEPT} snapshots"
            f" of {len(written)} processes; it has {free_bytes:,}"
        )
        self._raise_on_all(ValueError, short if free_bytes < needed_bytes else "")

    # Writing

    def save(
        self, step: int, state: PyTree, data: Json, config: Mapping[str, Json], checkpoint: int
    ) -> str:
        """Write the snapshot of `step` and the partner's copy. Return "" or the reason why no
        snapshot was written.

        data, config: JSON values of the data position and the configuration. checkpoint: step of
        the newest checkpoint on disk.
        """
        layout = layout_of_shards(state)
        description = {
            "run": self._run,
            "start": self._starts[-1],
            "step": step,
            "rank": self._rank,
            "processes": self._processes,
        }
        description |= {"data": data, "config": dict(config), "checkpoint": checkpoint}
        sizes = gather_json(snapshot_file_bytes(layout, description))
        source = next((a for a, b in self._pairs if b == self._rank), None)
        files, problem = {}, ""
        try:
            for rank in [self._rank] if source is None else [self._rank, source]:
                self._remove_old_snapshots(rank)
                files[rank] = allocate_file(self._snapshot_path(step, rank, NEW), sizes[rank])
        except OSError as error:
            problem = f"process {self._rank} on {socket.gethostname()}: {error.strerror}"
        problems = [problem for problem in gather_json(problem) if problem]
        if problems:
            for rank in files:
                self._snapshot_path(step, rank, NEW).unlink()
            return problems[0]
        write_snapshot(files[self._rank], state, layout, description)
        if self._pairs:
            outgoing = files[self._rank] if self._rank in dict(self._pairs) else _NOTHING
            incoming = _NOTHING if source is None else files[source]
            exchange_bytes(
                outgoing, incoming, self._pairs, max(sizes[rank] for rank in dict(self._pairs))
            )
        for rank in files:
            self._snapshot_path(step, rank, NEW).rename(self._snapshot_path(step, rank))
        return ""

    def remove_other_steps(self, step: int | None) -> None:
        """Delete the snapshots of all steps except `step`, from which training continues; None
        deletes all.
        """
        if self._first_here:
            for path in self.folder.iterdir():
                if step is None or not path.name.startswith(f"{step}-") or path.name.endswith(NEW):
                    path.unlink()
        gather_json(None)  # barrier: no process writes before all have deleted

    def _remove_old_snapshots(self, rank: int) -> None:
        """Delete old snapshots of a process's shards, so that one more may be written."""
        paths = sorted(
            self.folder.glob(f"*-of-{rank}"), key=lambda path: int(path.name.partition("-")[0])
        )
        for path in [*paths[: 1 - KEPT], *self.folder.glob(f"*-of-{rank}{NEW}")]:
            path.unlink()

    def _snapshot_path(self, step: int, rank: int, end: str = "") -> Path:
        return self.folder / f"{step}-of-{rank}{end}"

    # Reading

    def read_newest(
        self, abstract_state: PyTree, checkpoint: int | None, newest_folder: int
    ) -> tuple[StateSnapshot | None, str]:
        """Return (newest complete snapshot, which has the same step on every process; reasons why
        newer ones are not used).

        The snapshot is None if it would be older than `checkpoint`, the newest step on disk.
        newest_folder: largest step number on disk, complete or not; a snapshot made when a larger
        one existed belongs to a deleted history and is not used.
        """
        layout, lines = layout_of_shards(abstract_state), list[str]()
        held, problems = self._usable_files(layout)
        while True:
            own = [[*key, entry.num_bytes, entry.checkpoint] for key, entry in held.items()]
            views = gather_json([own, problems, newest_folder])
            lines += [line for _, others, _ in views for line in others]
            entries_by_process = [
                {(step, rank): SnapshotEntry(*rest) for step, rank, *rest in entries}
                for entries, _, _ in views
            ]
            step, why = _newest_step(entries_by_process, self._processes)
            if step is None:
                return None, "; ".join(dict.fromkeys([*lines, *([why] if why else [])]))
            past = max(
                entry.checkpoint
                for entries in entries_by_process
                for key, entry in entries.items()
                if key[0] == step
            )
            if past > views[0][2]:
                lines.append(f"checkpoint {past}, which step {step} came after, has been deleted")
                return None, "; ".join(dict.fromkeys(lines))
            if checkpoint is not None and step < checkpoint:
                lines.append(f"step {step} is older than the checkpoint")
                return None, "; ".join(dict.fromkeys(lines))
            snapshot, unusable, problems = self._read_step(
                step, entries_by_process, abstract_state, layout
            )
            if snapshot is not None:
                return snapshot, "; ".join(dict.fromkeys(lines))
            held = {key: entry for key, entry in held.items() if key not in unusable}

    def _usable_files(self, layout: ShardLayout) -> tuple[dict[Key, SnapshotEntry], list[str]]:
        """Return this host's snapshots that this run can read, by (step, rank), and a clause about
        each other file.

        A file is rejected if its description is damaged, or if the start that wrote it, the number
        of processes or this process's shards differ. The shards' contents are not checked.
        """
        held, problems = dict[Key, SnapshotEntry](), list[str]()
        for path in sorted(self.folder.iterdir()):
            if path.name.endswith(NEW):
                continue  # a process was killed during the write
            try:
                description = read_description(path)
                if path != self._snapshot_path(description["step"], description["rank"]):
                    raise ValueError(
                        f"is step {description['step']} of process {description['rank']},"
                        " under another name"
                    )
                self._check_start(description)
                if description["processes"] != self._processes:
                    raise ValueError(
                        f"is of {description['processes']} processes; there are {self._processes}"
                    )
                if description["rank"] == self._rank:
                    _check_layout(description, layout)
            except (OSError, ValueError) as error:
                problems.append(f"{self._path_on_host(path)} {error}")
            else:
                held[description["step"], description["rank"]] = SnapshotEntry(
                    path.stat().st_size, description["checkpoint"]
                )
        return held, problems

    def _read_step(
        self,
        step: int,
        entries_by_process: list[dict[Key, SnapshotEntry]],
        abstract_state: PyTree,
        layout: ShardLayout,
    ) -> tuple[StateSnapshot | None, set[Key], list[str]]:
        """Return (snapshot, unusable files, clauses about them); the snapshot is None if a file
        turned out to be damaged.
        """
        holders = [
            [rank for rank, entries in enumerate(entries_by_process) if (step, whose) in entries]
            for whose in self._all_ranks
        ]
        sources = [
            whose if whose in holders[whose] else holders[whose][0] for whose in self._all_ranks
        ]
        files, bad = {}, dict[int, str]()
        for whose in (whose for whose in self._all_ranks if sources[whose] == self._rank):
            path = self._snapshot_path(step, whose)
            try:
                files[whose] = map_verified_snapshot(path)
            except (OSError, ValueError) as error:
                bad[whose] = f"{self._path_on_host(path)} {error}"
        bad_ones = gather_json([[whose, line] for whose, line in bad.items()])
        if any(bad_ones):
            here = [
                rank for rank in self._all_ranks if self._places[rank] == self._places[self._rank]
            ]
            return (
                None,
                {(step, whose) for rank in here for whose, _ in bad_ones[rank]},
                list(bad.values()),
            )
        moves = [(source, whose) for whose, source in enumerate(sources) if source != whose]
        sizes = [
            entries_by_process[source][step, whose].num_bytes
            for whose, source in enumerate(sources)
        ]
        for pairs in split_into_rounds(moves):
            target, arrives = dict(pairs).get(self._rank), self._rank in dict(pairs).values()
            if arrives:
                files[self._rank] = np.empty(sizes[self._rank], np.uint8)
            outgoing = _NOTHING if target is None else files[target]
            incoming = files[self._rank] if arrives else _NOTHING
            exchange_bytes(outgoing, incoming, pairs, max(sizes[whose] for _, whose in pairs))
        own, problem, snapshot = files[self._rank], "", None
        try:
            description = verify_snapshot(own)
            self._check_start(description)
            _check_layout(description, layout)
            snapshot = StateSnapshot(
                step, read_state(own, abstract_state), description["data"], description["config"]
            )
        except ValueError as error:
            problem = f"step {step} of process {self._rank} {error}"
        if any(gather_json(problem)):
            return None, {(step, whose) for whose in self._all_ranks}, [problem] if problem else []
        return snapshot, set(), []

    def _check_start(self, description: Mapping[str, Json]) -> None:
        """Raise `ValueError` with a clause if the snapshot was not written by a start in this run's
        history.
        """
        if description.get("start") not in self._starts:
            raise ValueError(
                "is of a clone of this run: the start that wrote it is not in run.json"
            )

    @property
    def _all_ranks(self) -> range:
        return range(self._processes)

    def _path_on_host(self, path: Path) -> str:
        return f"{path.name} on {socket.gethostname()}"

    def _raise_on_all(self, kind: type[Exception], problem: str) -> None:
        """Raise an error of type `kind` on every process if any process passes a problem.
        Collective.
        """
        problems = [(rank, problem) for rank, problem in enumerate(gather_json(problem)) if problem]
        if problems:
            rank, words = problems[0]
            raise kind(
                f"{self._setting}: {words}" + (f" (process {rank})" if self._processes > 1 else "")
            )


def _newest_step(
    entries_by_process: list[dict[Key, SnapshotEntry]], processes: int
) -> tuple[int | None, str]:
    """Return (newest step with the shards of all processes, why newer steps are incomplete); the
    step is None if there is none.
    """
    there = {key for entries in entries_by_process for key in entries}
    why = ""
    for step in sorted({step for step, _ in there}, reverse=True):
        missing = [rank for rank in range(processes) if (step, rank) not in there]
        if not missing:
            return step, why
        why = why or f"step {step} lacks the shards of process {missing[0]}"
    return None, why


def _check_layout(description: Mapping[str, Json], layout: ShardLayout) -> None:
    """Raise `ValueError` with a clause unless the snapshot's arrays and shards equal `layout`."""
    saved = {name: rest for name, *rest in description["layout"]}
    now = {name: rest for name, *rest in layout}
    other = [name for name in sorted(saved.keys() | now.keys()) if saved.get(name) != now.get(name)]
    if other:
        raise ValueError(
            f"is of another layout: {other[0]} has other shards, or another type or shape"
        )


def _make_private_folder(folder: Path) -> str:
    """Make the folder, private to this user; return a text that identifies it across hosts (host,
    boot, device, inode). Raises `PermissionError` if it belongs to another user.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(1, f"{folder} belongs to another user")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot} {status.st_dev} {status.st_ino}"
