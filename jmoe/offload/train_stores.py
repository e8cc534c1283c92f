"""Opens and fills the stores of a training run's expert records, on the tiers that the config
names.

`training/streamed/experts.py` calls this.

Legend:
  E  experts of a layer
  P  experts of this process
"""

import contextlib
import math
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.config import TrainConfig, check
from jmoe.memory.buffers import allocate_slots
from jmoe.memory.moesys_counts import record_ranks_factory
from jmoe.memory.pinned import HostAllocator, choose_host_allocator
from jmoe.memory.record_checkpoint import RecordCheckpoints
from jmoe.memory.record_store import Fill, HostRecords
from jmoe.memory.tiered_store import TieredStore
from jmoe.memory.version_store import VersionStore, layout_with_seal
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.expert_state import (
    ExpertArrays,
    ExpertState,
    ReadExperts,
    RecordTiers,
    SlotSizes,
    record_layouts,
)
from jmoe.offload.expert_updates import (
    DeviceUpdate,
    ExpertUpdate,
    HostUpdate,
    load_native_adamw,
)
from jmoe.offload.lazy_adamw import ReplayState

# one folder per dtype: the dtype may change on resume
GRADIENTS = {"float32": "gradients", "bfloat16": "gradients-bfloat16"}
THREADS = 2  # reader threads, and as many writers, per kind of record


class ExpertStores:
    """The expert records of one process of a run.

    On the tier nvme the files in the folder are opened with the content they have; `fill_tiers`
    loads the other tiers. The folder is `tiers.path/RUN/process-NUMBER`, so that runs and processes
    do not share files.

    shapes: of an expert's parameters, by name. records: saves and restores the records with
    checkpoints. layouts: by kind of record. note: says whether host memory is pinned.
    """

    def __init__(
        self,
        config: TrainConfig,
        index: ExpertIndex,
        shapes: dict[str, tuple[int, ...]],
        run: str = "run",
    ) -> None:
        self._config, self._tiers, self._index, self._shapes = config, config.tiers, index, shapes
        self._own, self._saved = index.local_records, frozenset(index.saved_records)
        self.layouts = record_layouts(shapes, self._tiers.gradient_dtype)
        assert index.local_experts is not None
        self._devices = index.local_experts.all_devices
        self._allocate, self.note = self._choose_record_memory()
        self._update = self._make_update()
        self._open_stores = contextlib.ExitStack()
        self._versions = self._open_version_stores(run)
        lazy = self._tiers.optimizer == "nvme"
        saved = self._versions if lazy else {}
        self._replay_state: ReplayState | None = None  # at the last save or restore
        # record -> step of the gradient in its file, if gradients are in host memory
        self._written: dict[int, int] = {}
        self.records = RecordCheckpoints(
            saved,
            memory={
                kind: self.layouts[kind] for kind in ("weights", "moments") if kind not in saved
            },
            owned=self._own,
            process=jax.process_index(),
            num_processes=jax.process_count(),
            stall_limit_s=config.checkpoint.drain_timeout_s,
            partial=("gradients",) if lazy else (),
        )
        if len(self._saved) < len(self._own):
            self.records.save_only |= {"weights": self._saved, "moments": self._saved}
        self.records.settings = self.fresh_replay_state(0).settings

    def _choose_allocator(self, devices: Sequence[jax.Device]) -> HostAllocator:
        return choose_host_allocator(self._tiers.pin_host_memory, "tiers.pin_host_memory", devices)

    def _choose_record_memory(self) -> HostAllocator:
        """Return the allocator of the records' memory: ordinary memory if the host updates them,
        as the devices then get weights from memory of their own.
        """
        if self._tiers.update != "host":
            return self._choose_allocator(self._devices)
        kinds = {self._choose_allocator([d]).allocate is allocate_slots for d in self._devices}
        kind = "ordinary" if True in kinds else "pinned"
        note = f"records in ordinary host memory, sent from {kind} host memory"
        return HostAllocator(allocate_slots, note)

    def _make_update(self) -> ExpertUpdate:
        """Return the update on the device or on the host, as `tiers.update` says."""
        optimizer, shapes, update = self._config.optimizer, self._shapes, self._tiers.update
        needed = "must be device or host here: `jmoe.run.planner.with_chosen_tiers` chooses"
        check(update != "auto", "tiers.update", update, needed)
        if update == "device":
            return DeviceUpdate(optimizer, shapes, self._tiers.gradient_dtype)
        dtypes = {
            name: jnp.dtype(self._config.compute_dtype if len(shape) >= 2 else "float32")
            for name, shape in shapes.items()
        }
        is_native = load_native_adamw(self._config.native)
        return HostUpdate(
            *(optimizer, shapes, dtypes, self._devices),
            is_native=is_native,
            allocate=lambda device: self._choose_allocator([device]).allocate,
        )

    def _open_version_stores(self, run: str) -> dict[str, VersionStore]:
        """Open the stores of the kinds of records that have files on nvme, by kind."""
        tiers, fingerprint = self._tiers, f"jmoe experts of {run}"
        kinds = {"weights": tiers.experts, "moments": tiers.optimizer, "gradients": tiers.gradients}
        layouts = {kind: self.layouts[kind] for kind, tier in kinds.items() if tier == "nvme"}
        # bytes of one record of each kind on nvme
        self._cached_bytes = sum(
            layout_with_seal(layout).record_bytes for layout in layouts.values()
        )
        least_bytes = min(2, len(self._own)) * self._cached_bytes
        cache_bytes = tiers.host_cache_bytes
        enough = (
            f"must be 0 or hold two records of every kind on the tier nvme, {least_bytes} bytes"
        )
        holds_enough = not layouts or not cache_bytes or cache_bytes >= least_bytes
        check(holds_enough, "tiers.host_cache_bytes", cache_bytes, enough)
        if tiers.optimizer == "nvme":
            # pending gradients are saved to files even if their tier is host memory
            layouts["gradients"] = self.layouts["gradients"]
        folder = (
            Path(tiers.path or Path(self._config.output_dir) / "records")
            / run
            / f"process-{jax.process_index()}"
        )
        opened = {}
        for kind, layout in layouts.items():
            place = folder / (GRADIENTS[tiers.gradient_dtype] if kind == "gradients" else kind)
            num_records = self._index.num_records
            opened[kind] = VersionStore.open(
                place, layout, num_records, fingerprint=fingerprint, owned=self._own
            )
            self._open_stores.callback(opened[kind].close)
        return opened

    def prepare_checkpoint(self, experts: ExpertState) -> None:
        """Prepare the records for a checkpoint, which `records` then pins: write dirty records, and
        make the files durable.

        If the moments are not on the tier nvme, all pending updates are applied instead, and
        `records` saves from memory.
        """
        if self._tiers.optimizer != "nvme":
            experts.apply_pending_updates()
            return
        self._replay_state = replay_state = experts.flush_records()
        if self._tiers.gradients == "host":
            self._write_pending_gradients(experts.stores.gradients, replay_state)
        saved = replay_state.select_records(self._saved)
        self.records.save_only["gradients"] = saved.pending
        self.records.replay_json = saved.to_json()

    def _write_pending_gradients(self, gradients: TieredStore, replay_state: ReplayState) -> None:
        """Write the gradients in host memory that records still lack to files on nvme, durably."""
        store = self._versions["gradients"]
        steps = {index: replay_state.applied[index] for index in sorted(replay_state.pending)}
        new = [index for index, step in steps.items() if self._written.get(index) != step]

        def write(indices: list[int]) -> None:
            record_R = store.layout.zeros()
            for index in indices:
                with gradients.get(index) as record:
                    for name, array in store.layout.views(record_R).items():
                        if name in self._shapes:
                            np.copyto(array, record[name])
                store.write(index, record_R)

        with ThreadPoolExecutor(THREADS, "save gradients") as pool:
            list(pool.map(write, [new[first::THREADS] for first in range(THREADS)]))
        store.sync()
        self._written = steps

    def replay_state_at(self, step: int) -> ReplayState:
        """Return the replay state of the records at `step`.

        This is the state of the records restored or saved last, if that was at `step`; otherwise
        the records are up to date.
        """
        if self.records.restored is not None:
            self._replay_state = ReplayState.from_record_lists(self.records.restored)
            self.records.restored = None
        if self._replay_state is not None and self._replay_state.step == step:
            return self._replay_state
        return self.fresh_replay_state(step)

    def fresh_replay_state(self, step: int) -> ReplayState:
        """Return the replay state of records that have skipped no step."""
        return ReplayState.up_to_date(step, self._config.optimizer, self._tiers.gradient_dtype)

    def fill_tiers(
        self, replay_state: ReplayState, weights: ReadExperts | None, moments: ReadExperts | None
    ) -> ExpertState:
        """Fill the tiers layer by layer, and return the experts' state for training.

        weights, moments: functions of a layer and its local experts that return their arrays; None
        if the records on nvme already hold them.
        """
        tiers = self._tiers
        resident = tiers.experts == "device"
        own = replay_state.select_records(self._own)
        state = ExpertState(
            RecordTiers(
                None if resident else self._open_store("weights", tiers.experts, weights),
                self._open_store("moments", tiers.optimizer, moments),
                self._open_store("gradients", tiers.gradients, None, own.pending),
            ),
            update=self._update,
            index=self._index,
            shapes=self._shapes,
            slot_sizes=SlotSizes(
                self._index.num_layers if resident else tiers.device_layers,
                self._initial_experts_per_slot(),
            ),
            replay_state=own,
            initial=weights if resident else None,
            wait_limit_s=self._config.distributed.step_timeout_s,
        )
        if resident:
            state.apply_pending_updates()  # before the caller closes the source of `weights`
        self.records.memory = {"weights": state.iterate_weights, "moments": state.iterate_moments}
        self._written = {index: own.applied[index] for index in own.pending}
        return state

    def _initial_experts_per_slot(self) -> int | None:
        """Return the initial number of a device's experts that fits a slot; None means all."""
        assert self._index.local_experts is not None
        per_device = self._index.local_experts.max_experts_per_device
        num_rows = math.ceil(self._tiers.device_experts * per_device)
        return None if num_rows == per_device else num_rows

    def _open_store(
        self, kind: str, tier: str, read: ReadExperts | None, written: Collection[int] = ()
    ) -> TieredStore:
        """Open the store of one kind of record.

        read: a function of a layer and its local experts that returns their arrays, which fill the
        records; None leaves nvme records unchanged and fills host records with zeros. written:
        records that host memory loads from the kind's nvme files instead.
        """
        versions = self._versions.get(kind)
        if tier != "nvme" or versions is None:
            fill = (
                self._record_filler(read)
                if not written or versions is None
                else _copying_filler(versions, written)
            )
            num_records, own = self._index.num_records, self._own
            return TieredStore(
                HostRecords.allocate_and_fill(
                    self.layouts[kind], num_records, fill, own, self._allocate
                )
            )
        if read is not None:
            versions.write_all_records(self._record_filler(read))
        record_bytes = versions.layout.record_bytes
        # each kind gets cache in proportion to its record size
        cache_bytes = self._tiers.host_cache_bytes * record_bytes // self._cached_bytes
        return TieredStore(
            versions,
            cache_bytes=cache_bytes or max(len(self._own) // 4, 2) * record_bytes,
            threads=THREADS,
            write_threads=THREADS,
            write_back_every_steps=self._tiers.write_back_every_steps or None,
            wait_limit_s=self._config.distributed.step_timeout_s,
            allocate=self._allocate,
            make_ranks=record_ranks_factory(self._tiers),
        )

    def _record_filler(self, read: ReadExperts | None) -> Fill:
        """Return a function that writes each record from `read`'s arrays of its layer; zeros if
        `read` is None.
        """
        last, arrays = -1, ExpertArrays()

        def fill(index: int, views: dict[str, np.ndarray]) -> None:
            nonlocal last, arrays
            local = self._index.local_experts
            if read is None or local is None:
                return
            layer, expert = self._index.layer_and_expert_of(index)
            if layer != last:
                last, arrays = layer, read(layer, local.local_experts_in_layer(layer))
            place = np.searchsorted(local.local_experts_in_layer(layer), expert)
            for name, array in arrays.items():
                np.copyto(views[name], array[place])

        return fill

    def progress_counters(self) -> tuple[int, ...]:
        """Return counters that change while records are filled, drained or restored, for a stall
        check.
        """
        written = tuple(store.stats().writes for store in self._versions.values())
        return written + self.records.progress_counters()

    def close(self) -> None:
        """Wait for the save under way, unlock the folders, and drop the records in host memory."""
        with self._open_stores:
            self.records.close()
        self.records.memory.clear()


def _copying_filler(store: VersionStore, indices: Collection[int]) -> Fill:
    """Return a function that fills the records of `indices` from the store, and leaves the others
    zero.
    """
    record_R = store.layout.zeros()

    def fill(index: int, views: dict[str, np.ndarray]) -> None:
        if index in indices:
            store.read_into(index, record_R)
            arrays = store.layout.views(record_R)
            for name, view in views.items():
                np.copyto(view, arrays[name])

    return fill
