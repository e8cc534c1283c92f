"""Checkpoints of a run: asynchronous, atomic, and verified by a manifest of file sizes and CRC-32
sums.

A step is one folder, `DIRECTORY/STEP`, with these items, and the run's tokenizer:

state    arrays, in Orbax's OCDBT format
data     position in the training data, JSON
config   configuration of the run, JSON
records  expert records, only if experts are stored in host memory or on NVMe

Orbax calls fsync for the array files only. This module syncs all other files before Orbax renames
the folder, so a step with its final name is complete on disk. All processes must share the folder.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jmoe.config import CheckpointConfig, check
from jmoe.memory.direct_io import fsync, make_folder_durably
from jmoe.memory.record_checkpoint import (
    ITEM,
    RecordCheckpoints,
    RecordsHandler,
    RecordsSave,
    is_record_path,
)
from jmoe.run.checkpoint_contents import (
    PACKING,
    dtype_and_shape,
    dtype_and_shape_text,
    file_crc32,
    files_in_folder,
    names_leaves_and_structure,
    read_step_manifest,
    shape_with_sharding,
    split_files_over_readers,
    write_step_manifest,
)
from jmoe.status import first_error_line
from jmoe.types import Json, JsonObject, PyTree

MANIFEST = "manifest.json"
ASIDE = re.compile(r"incomplete-(\d+)-\d+")  # an incomplete step that was renamed
SLOWEST_BYTES_PER_S = 2e7  # a slower disk counts as stuck
# in practice no limit: each process limits its own work before this barrier
MEETING_LIMIT_MS = 10 * 24 * 3_600_000


class Checkpoints:
    """Saves and restores the checkpoints of one run in `directory`, keeping the newest
    `config.num_kept_checkpoints` of them.

    Every process of a run makes the same calls in the same order. The directory is not touched
    before the first `save`. No background wait lasts longer than `save_limit_s`.

    records: expert records on tiers, saved and restored with every step. Flush their caches before
    `save`. `save` first waits until the records of the previous step are copied, so that at least
    one of two kept steps is durable. timeout_s: lower bound of `save_limit_s`. Raises `ValueError`
    if records on NVMe are used with `config.keep` = 1.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        *,
        records: RecordCheckpoints | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.directory, self._config = Path(directory).absolute(), config
        self._kept = config.num_kept_checkpoints
        self._manager: ocp.CheckpointManager | None = None
        self.replace_records(records)
        self._without_records: set[int] = set()  # steps skipped by `latest_step`
        self._timeout_s = max(1, int(timeout_s))
        self._commit: threading.Thread | None = None
        self._error: BaseException | None = None
        self._step = -1  # the step being saved, or saved last
        self._arrays: JsonObject = {}  # manifest entries of `_step`'s arrays
        self._bytes = 0  # size of `_step`'s arrays
        self._meetings = 0  # barriers of `wait_for_records` so far
        self._files: dict[str, bytes] = {}  # further files of the step, by relative path
        self._packing = 1  # expert packing of the step
        # By default Orbax's barriers are device collectives, which background threads dispatch
        # in another order than the training step's. With active_processes set they do not use the
        # devices.
        named = set(range(jax.process_count())) if jax.process_count() > 1 else None
        self._processes = ocp.options.MultiprocessingOptions(active_processes=named)

    def replace_records(self, records: RecordCheckpoints | None) -> None:
        """Save and restore the expert records of another trainer of the run from now on. Call this
        after `close`, or before the first save.
        """
        assert self._manager is None, "the checkpoints of the records before are still open"
        pins = records is not None and bool(records.stores)
        constraint = "must be greater than 1 with records"
        check(not pins or self._config.keep > 1, "checkpoint.keep", self._config.keep, constraint)
        self._records: RecordCheckpoints | None = records

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    # Reading

    def steps(self) -> list[int]:
        """Return the complete steps, in ascending order."""
        return [step for step in self._steps_on_disk() if self._why_incomplete(step) is None]

    def newest_step_on_disk(self) -> int:
        """Return the largest step number in the directory, complete or not, as this process sees
        it; -1 if there is none.
        """
        return max(self._steps_on_disk(), default=-1)

    def latest_step(self) -> int | None:
        """Return the newest step that can be restored, the same on every process, or None if there
        are no steps.

        A step is skipped with a warning if it is incomplete, or if some process finds a record
        neither on its machine nor in the step. Raises `ValueError` if there are steps but all were
        skipped.
        """
        skipped = set[int]()
        while (newest := self._newest_complete_step(skipped)) is not None:
            problem = self._why_records_unusable(newest)
            if problem is not None:
                self._warn_skipped(newest, problem)
            if not self._ranks_with_flag(problem is not None):
                break
            skipped.add(newest)
        self._without_records = skipped
        if newest is None and self._broadcast_from_process_0(len(self._steps_on_disk())):
            names = ", ".join(str(self.step_folder(step)) for step in self._steps_on_disk())
            raise ValueError(
                f"no checkpoint in {self.directory} can be restored (see the warnings above); "
                f"delete {names or 'its steps'} to start anew"
            )
        return newest

    def _why_records_unusable(self, step: int) -> str | None:
        """Return why this process cannot restore the step's records, or None. Damaged files that
        are not needed only cause a warning.
        """
        # missing if the saving run kept its experts on the device
        folder = self.records_folder(step)
        if self._records is None or not folder.is_dir():
            return None
        damage = self._find_damage(step, prefix=f"{ITEM}/")
        if damage is not None:
            return damage
        records = self._records.verify_records(folder)
        for line in records.damaged:
            print(f"warning: {line}", file=sys.stderr, flush=True)
        return (
            f"lacks {len(records.missing)} records, the first {records.missing[0]}"
            if records.missing
            else None
        )

    def _newest_complete_step(self, skipped: set[int]) -> int | None:
        """Return the newest complete step that is not in `skipped`, as process 0 sees it; warn of
        each incomplete one.
        """
        newest = -1
        if jax.process_index() == 0:
            for step in sorted(set(self._steps_on_disk()) - skipped, reverse=True):
                if (reason := self._why_incomplete(step)) is None:
                    newest = step
                    break
                self._warn_skipped(step, reason)
        return None if (newest := self._broadcast_from_process_0(newest)) < 0 else newest

    def _warn_skipped(self, step: int, reason: str) -> None:
        print(
            f"warning: checkpoint {self.step_folder(step)} {reason}; skipped",
            file=sys.stderr,
            flush=True,
        )

    def _ranks_with_flag(self, flag: bool) -> list[int]:
        """Return the ranks of the processes that pass a true `flag`. Collective: every process must
        call this.
        """
        if jax.process_count() == 1:
            return [0] if flag else []
        flags = multihost_utils.process_allgather(np.int32(flag))
        return [int(rank) for rank in np.flatnonzero(flags)]

    def step_folder(self, step: int) -> Path:
        return self.directory / str(step)

    def records_folder(self, step: int) -> Path:
        return self.step_folder(step) / ITEM

    def newest_config(self) -> JsonObject | None:
        """Return the configuration saved with the newest complete step whose copy of it is intact,
        or None.
        """
        for step in reversed(self.steps()):
            if self._find_damage(step, prefix="config/") is None:
                config: JsonObject = json.loads(
                    (self.step_folder(step) / "config" / "metadata").read_text()
                )
                return config
        return None

    def newest_packing(self) -> int:
        """Return the expert packing (`comm.packing`) of the newest complete step; 1 if there are no
        steps.
        """
        steps = self.steps()
        return int(self._read_manifest(steps[-1]).get(PACKING, 1)) if steps else 1

    def saved_config(self, step: int) -> JsonObject:
        """Return the configuration saved with `step`. Raises `ValueError` if it is damaged."""
        self._verify_files(step, prefix="config/")
        return self._read_json(step, "config")

    def array_names(self, step: int) -> list[str]:
        return list(self._read_manifest(step)["arrays"])

    def restore(
        self,
        step: int,
        abstract_state: PyTree,
        *,
        skipped_arrays: Collection[str] = (),
        records: bool = True,
    ) -> tuple[PyTree, Json, JsonObject]:
        """Return (state, data_state, saved configuration) of `step`.

        abstract_state: tree of the state with `jax.ShapeDtypeStruct` leaves, whose shardings say
        where each array goes; the mesh and the number of processes may differ from those of the
        save. skipped_arrays: names of saved arrays to leave out. records: whether to restore the
        expert records too.

        Raises `ValueError` naming the step if a file is damaged (and the newest intact older step),
        or if the saved arrays do not match `abstract_state`.
        """
        self._verify_files(step)
        names, leaves, tree = names_leaves_and_structure(abstract_state)
        self._check_arrays(step, dict(zip(names, leaves, strict=True)), skipped_arrays)
        targets = {
            name: shape_with_sharding(leaf) for name, leaf in zip(names, leaves, strict=True)
        }
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=self._processes)
        places = ocp.checkpoint_utils.construct_restore_args(targets)
        args = ocp.args.PyTreeRestore(
            targets, restore_args=places, partial_restore=bool(skipped_arrays)
        )
        with ocp.Checkpointer(handler, multiprocessing_options=self._processes) as reader:
            arrays = reader.restore(self.step_folder(step) / "state", args=args)
        state = jax.tree.unflatten(tree, [arrays[name] for name in names])
        if self._records is not None and records and self.records_folder(step).is_dir():
            self._records.restore_records(self.records_folder(step))
        self._step = step  # a `save` of the same step does nothing
        return state, self._read_json(step, "data"), self._read_json(step, "config")

    def _steps_on_disk(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return sorted(
            int(entry.name)
            for entry in self.directory.iterdir()
            if entry.name.isdigit() and entry.is_dir()
        )

    def _read_manifest(self, step: int) -> JsonObject:
        return read_step_manifest(self.step_folder(step) / MANIFEST)

    def _why_incomplete(self, step: int) -> str | None:
        """Return why the step is incomplete, or None if it is complete."""
        try:
            files = self._read_manifest(step)["files"]
        except FileNotFoundError:
            return f"is incomplete: it has no {MANIFEST}"
        except ValueError:  # malformed JSON or UTF-8
            return f"is incomplete: its {MANIFEST} cannot be read"
        missing = [name for name in files if not (self.step_folder(step) / name).is_file()]
        return f"is incomplete: {missing[0]} is missing" if missing else None

    def _find_damage(
        self, step: int, prefix: str = "", reader: int = 0, readers: int = 1
    ) -> str | None:
        """Return a description of the first damaged file of the step, or None.

        prefix: check only files whose name starts with it. reader, readers: check only this
        process's share of the files.
        """
        reason = self._why_incomplete(step)
        if reason is not None:
            return reason
        files = {
            name: entry
            for name, entry in self._read_manifest(step)["files"].items()
            if name.startswith(prefix)
        }
        for name in split_files_over_readers(files, readers)[reader]:
            size_bytes, crc = files[name]
            path = self.step_folder(step) / name
            if path.stat().st_size != size_bytes:
                return f"is damaged: {name} has {path.stat().st_size} of {size_bytes} bytes"
            if file_crc32(path) != crc:
                return f"is damaged: the content of {name} has changed since it was written"
        return None

    def _verify_files(self, step: int, prefix: str = "") -> None:
        """Raise `ValueError` on every process if a file of the step is damaged. Each process
        verifies the files that it will read.
        """
        if not self.step_folder(step).is_dir():
            raise ValueError(
                f"step = {step}: no such checkpoint in {self.directory}; there are {self.steps()}"
            )
        self._check_step_number(step)
        damage = self._find_damage(step, prefix, jax.process_index(), jax.process_count())
        ranks = self._ranks_with_flag(damage is not None)
        damage = damage or (f"is damaged: process {ranks[0]} names the file" if ranks else None)
        if damage is None:
            return
        advice = "there is no intact older step"
        older = [s for s in reversed(self.steps()) if s < step and self._find_damage(s) is None]
        if older:
            advice = f"step {older[0]} is intact: delete {self.step_folder(step)} to go on from it"
        raise ValueError(f"checkpoint {self.step_folder(step)} {damage}; {advice}")

    def _check_step_number(self, step: int) -> None:
        """Raise `ValueError` if somebody has given the folder of another step this name."""
        if (
            self._why_incomplete(step) is None
            and (saved := self._read_manifest(step)["step"]) != step
        ):
            raise ValueError(
                f"checkpoint {self.step_folder(step)} is step {saved}: rename it to"
                f" {self.step_folder(saved)}"
            )

    def _check_arrays(
        self, step: int, wanted: dict[str, jax.Array], skipped_arrays: Collection[str]
    ) -> None:
        """Raise `ValueError` listing the arrays of the step, by name, whose dtype or shape differs
        from `wanted`, or that only one of the two has.
        """
        saved = {
            name: entry
            for name, entry in self._read_manifest(step)["arrays"].items()
            if name not in skipped_arrays
        }
        lines = []
        for name in sorted(saved.keys() | wanted.keys()):
            now = dtype_and_shape(wanted[name]) if name in wanted else None
            if saved.get(name) != now:
                before = dtype_and_shape_text(saved.get(name))
                lines.append(f"{name}: {before} -> {dtype_and_shape_text(now)}")
        if lines:
            shown = "; ".join(lines[:8]) + (
                f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
            )
            raise ValueError(
                f"checkpoint {self.step_folder(step)} holds other arrays (saved -> now): {shown}"
            )

    def _read_json(self, step: int, item: str) -> Json:
        with ocp.Checkpointer(
            ocp.JsonCheckpointHandler(), multiprocessing_options=self._processes
        ) as reader:
            return reader.restore(self.step_folder(step) / item, args=ocp.args.JsonRestore())

    def _broadcast_from_process_0(self, value: int) -> int:
        if jax.process_count() == 1:
            return value
        return int(multihost_utils.broadcast_one_to_all(np.int32(value)))

    # Writing

    def save(
        self,
        step: int,
        state: PyTree,
        data_state: Json,
        config_json: str,
        files: Mapping[str, bytes] | None = None,
        packing: int = 1,
    ) -> None:
        """Start saving `step`. Returns once the arrays are copied to the host, so the caller may
        donate `state`.

        Waits for the previous save first. Saving the step that was saved last does nothing. files:
        further files for the step's folder, content by relative path. packing: the run's expert
        packing, for the manifest; `state` does not depend on it. Raises `OSError` if the previous
        save failed or this one cannot begin, and `ValueError` if `step` is already saved or older
        than a saved step.
        """
        self.wait_for_save()
        if step == self._step:
            return
        self._bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        manager = self._open_manager()
        check(
            not self.step_folder(step).exists(), "step", step, f"already saved in {self.directory}"
        )
        newest = max(self._steps_on_disk(), default=step)
        constraint = (
            f"{self.directory} has got step {newest} meanwhile, which this run did not save"
        )
        check(newest <= step, "step", step, constraint)  # else Orbax would delete this step
        names, leaves, _ = names_leaves_and_structure(state)
        self._files, self._packing = dict(files or {}), packing
        self._step, self._arrays = (
            step,
            {name: dtype_and_shape(leaf) for name, leaf in zip(names, leaves, strict=True)},
        )
        items: dict[str, ocp.args.CheckpointArgs] = {
            "state": ocp.args.StandardSave(dict(zip(names, leaves, strict=True))),
            "data": ocp.args.JsonSave(data_state),
            "config": ocp.args.JsonSave(json.loads(config_json)),
        }
        if self._records is not None:
            self._records.wait_until_drained()
            items[ITEM] = RecordsSave(self._records, step)
        try:
            manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:
            self._raise_save_failed(error)
        self._commit = threading.Thread(
            target=self._finish_save, args=(manager, step), name=f"checkpoint {step}"
        )
        self._commit.start()

    @property
    def save_limit_s(self) -> float:
        """Return the time limit of the current save in seconds, without records: `timeout_s` plus
        the time that the arrays need at `SLOWEST_BYTES_PER_S`.
        """
        return self._timeout_s + self._bytes / SLOWEST_BYTES_PER_S

    def wait_for_records(self) -> None:
        """Wait, without a practical time limit, until every process has copied the expert records
        of the step saved last.
        """
        if self._records is None:
            return
        self.wait_for_save()
        self._records.wait_until_drained()
        if jax.process_count() > 1:
            self._meetings += 1
            barrier = ocp.multihost.get_barrier_sync_fn(processes=self._processes.active_processes)
            barrier(key=f"jmoe_drained_{self._meetings}", timeout_ms=MEETING_LIMIT_MS)

    def raise_save_error(self) -> None:
        """Raise the error of a failed background save, if any. Never waits."""
        if self._commit is not None and not self._commit.is_alive():
            self.wait_for_save()
        if self._records is not None:
            self._records.raise_drain_error()

    def wait_for_save(self) -> None:
        """Wait until the current save is complete on disk. Raises `OSError` naming the folder and
        the step if the save failed.
        """
        if self._commit is not None:
            self._commit.join()
            self._commit = None
        if self._error is not None:
            self._raise_save_failed(self._error)

    def close(self) -> None:
        """Wait for the current save, including expert records, and close Orbax's manager."""
        self.wait_for_save()
        self.wait_for_records()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _open_manager(self) -> ocp.CheckpointManager:
        """Return Orbax's manager, made at the first call after setting incomplete steps aside."""
        if self._manager is not None:
            return self._manager
        problem = ""
        if jax.process_index() == 0:
            try:
                make_folder_durably(self.directory)
                self._set_incomplete_steps_aside()
            except OSError as error:
                problem = f"checkpoint folder {self.directory} cannot be written: {error}"
        self._check_folder_shared(problem)
        options = ocp.CheckpointManagerOptions(
            create=False,  # made above; Orbax cannot make it with active_processes set
            cleanup_tmp_directories=True,
            preservation_policy=ocp.checkpoint_managers.LatestN(self._kept),
            async_options=ocp.AsyncOptions(
                # below the watchdog's limit, so that this error is raised first
                timeout_secs=max(1, int(0.8 * self.save_limit_s)),
                barrier_sync_fn=self._wait_at_barrier,
                post_finalization_callback=self._write_manifest_and_sync,
                # records in host memory are written before `save` returns
                create_directories_asynchronously=False,
            ),
            multiprocessing_options=self._processes,
        )
        handlers: dict[str, ocp.CheckpointHandler] = {
            "state": ocp.StandardCheckpointHandler(multiprocessing_options=self._processes),
            "data": ocp.JsonCheckpointHandler(multiprocessing_options=self._processes),
            "config": ocp.JsonCheckpointHandler(multiprocessing_options=self._processes),
        }
        if self._records is not None:
            handlers[ITEM] = RecordsHandler()
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_not_repeated_error)
        if getattr(sys.unraisablehook, "func", None) is not _report_unless_after_failed_write:
            sys.unraisablehook = partial(_report_unless_after_failed_write, sys.unraisablehook)
        self._manager = ocp.CheckpointManager(
            self.directory, options=options, item_names=tuple(handlers), item_handlers=handlers
        )
        return self._manager

    def _set_incomplete_steps_aside(self) -> None:
        """Rename the folders of incomplete steps: Orbax would count them among the steps to keep,
        and refuse to save them again.
        """
        for step in self._steps_on_disk():
            if self._why_incomplete(step) is not None or step in self._without_records:
                names = (
                    self.directory / f"incomplete-{step}-{number}" for number in itertools.count(1)
                )
                aside = next(name for name in names if not name.exists())
                self.step_folder(step).rename(aside)
                print(
                    f"warning: incomplete checkpoint moved to {aside}", file=sys.stderr, flush=True
                )

    def _delete_old_steps_set_aside(self) -> None:
        """Delete renamed incomplete steps that are older than every complete step; most are
        interrupted deletions.
        """
        oldest = min(self.steps(), default=0)
        for entry in self.directory.iterdir():
            named = ASIDE.fullmatch(entry.name)
            if named is not None and int(named[1]) < oldest and entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
                print(
                    f"{entry}: removed an incomplete checkpoint, as all complete ones are newer",
                    flush=True,
                )

    def _check_folder_shared(self, problem: str) -> None:
        """Raise `OSError` on all processes unless process 0 can write the folder and every process
        sees its files.

        problem: the error that process 0 met so far, or "".
        """
        mark = self._broadcast_from_process_0(0 if problem else 1 + secrets.randbits(30))
        if mark == 0:
            raise OSError(
                problem or f"process 0 cannot write the checkpoint folder {self.directory}"
            )
        if jax.process_count() == 1:
            return
        probe = self.directory / f".shared-{mark}"
        if jax.process_index() == 0:
            probe.touch()
        self._broadcast_from_process_0(0)  # the probe exists
        deadline = time.monotonic() + min(3, self._timeout_s)
        while not (seen := probe.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)  # a network file system may lag
        blind = self._ranks_with_flag(not seen)
        if jax.process_index() == 0:
            probe.unlink()
        if blind:
            raise OSError(
                f"checkpoint folder {self.directory}: processes {blind} do not see what process 0"
                " writes; it must lie on a file system that all processes share"
            )

    def _raise_save_failed(self, error: BaseException) -> None:
        """Raise `OSError` naming the step whose save failed, and forget that save."""
        step, self._step, self._error = self._step, -1, None
        self._manager = None  # the next save begins afresh and removes what this one left
        root = _root_error(error)
        older = self.steps()
        last = f"step {older[-1]} is complete" if older else "there is no older checkpoint"
        what = f"checkpoint of step {step} in {self.directory}"
        raise OSError(f"{what} was not written: {first_error_line(root)}; {last}") from root

    def _finish_save(self, manager: ocp.CheckpointManager, step: int) -> None:
        """Wait, in the background thread, for Orbax's rename, then make the rename durable and let
        the records drop old versions.
        """
        try:
            manager.wait_until_finished()
            if jax.process_index() == 0:
                fsync(self.step_folder(step))
                fsync(self.directory)
                self._delete_old_steps_set_aside()
            if self._records is not None:
                self._records.begin_drain(self.records_folder(step), self._steps_on_disk())
        except BaseException as error:  # raised at the next call, in the caller's thread
            self._error = error

    def _folder_being_written(self) -> Path | None:
        return next(self.directory.glob(f"{self._step}.orbax-checkpoint-tmp*"), None)

    def _wait_at_barrier(self, *, key: str, timeout_ms: int) -> None:
        """Wait at one of Orbax's barriers between processes. Orbax calls this in its background
        threads. Raises `TimeoutError` if the others do not arrive in time.
        """
        if jax.process_count() == 1:
            return
        rank = jax.process_index()
        if "async_write_complete" in key and rank != 0:
            self._write_own_checksums(rank)
        wait = ocp.multihost.get_barrier_sync_fn(processes=self._processes.active_processes)
        try:
            wait(key=key, timeout_ms=timeout_ms)
        except RuntimeError as error:
            raise TimeoutError(
                f"process {rank} waited for the others at {key!r}, at most {timeout_ms // 1000} s: "
                + " ".join(str(error).split())
            ) from error

    def _write_own_checksums(self, rank: int) -> None:
        """Write the sizes and CRC-32 sums of the array files that this process wrote, for process 0
        to merge into the manifest.
        """
        if (folder := self._folder_being_written()) is None:
            return
        own = {
            f"state/{path.relative_to(item)}": [path.stat().st_size, file_crc32(path)]
            for item in folder.glob("state*")  # Orbax gives it its final name later
            for path in files_in_folder(item / f"ocdbt.process_{rank}")
        }
        (folder / f"files-{rank}.json").write_text(json.dumps(own))

    def _write_manifest_and_sync(self) -> None:
        """Write the manifest and sync every file and folder. Orbax calls this on process 0 after
        all writes, before the rename.
        """
        folder = self._folder_being_written()
        assert folder is not None, f"Orbax writes step {self._step} somewhere else"
        for name, content in self._files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        files: dict[str, list[int]] = {}
        for listed in folder.glob("files-*.json"):
            files |= json.loads(listed.read_text())
            listed.unlink()
        written_once_more = ("_CHECKPOINT_METADATA", "commit_success.txt")
        for path in files_in_folder(folder):
            name = str(path.relative_to(folder))
            has_own_sum = name in files or is_record_path(path.relative_to(folder))
            if not has_own_sum and name not in written_once_more:
                files[name] = [path.stat().st_size, file_crc32(path)]
        manifest = {
            "step": self._step,
            "files": files,
            "arrays": self._arrays,
            PACKING: self._packing,
        }
        write_step_manifest(folder / MANIFEST, manifest)
        for path in (*files_in_folder(folder), *(p for p in folder.glob("**/") if p.is_dir())):
            fsync(path)


def _is_not_repeated_error(record: logging.LogRecord) -> bool:
    """Return False for log records of Orbax and asyncio that repeat an error which the next call
    raises.

    If several arrays cannot be written, the first error is raised; asyncio reports every later one
    as the error of a task.
    """
    raised = record.exc_info is not None and record.filename in (
        "async_checkpointer.py",
        "checkpoint_manager.py",
    )
    message = record.getMessage()
    later = (
        message.startswith("Task exception was never retrieved") and "/orbax/checkpoint/" in message
    )
    return not raised and not later and "_SignalingThread.run() raised an exception" not in message


def _report_unless_after_failed_write(
    report: Callable[[sys.UnraisableHookArgs], object], unraisable: sys.UnraisableHookArgs
) -> None:
    """Report an unraisable error through `report`, unless it comes from a write that ends after an
    earlier write failed.

    The failed write closes the event loop of its save, so each later write would print a traceback;
    `_raise_save_failed` raises the first error.
    """
    late = (
        isinstance(unraisable.exc_value, RuntimeError)
        and str(unraisable.exc_value) == "Event loop is closed"
    )
    if not late:
        report(unraisable)


def _root_error(error: BaseException) -> BaseException:
    """Return the error at the start of the chain of causes, skipping JAX's own errors: barriers
    that fail afterwards would hide it.
    """
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return next(
        (link for link in reversed(chain) if not isinstance(link, jax.errors.JaxRuntimeError)),
        error,
    )
