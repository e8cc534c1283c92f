"""Which tier holds which records of a process's experts, and how they get there.

Legend: E experts of a layer, P of them this process's.
"""

import contextlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jmoe.config import TrainConfig, check
from jmoe.memory.buffers import RecordBuffers
from jmoe.memory.record_checkpoint import RecordCheckpoints
from jmoe.memory.record_store import Fill, HostRecords
from jmoe.memory.tiered_store import TieredStore
from jmoe.memory.version_store import VersionStore, sealed
from jmoe.offload.expert_state import ExpertState, LocalExperts, Stores, layouts
from jmoe.offload.lazy_adamw import Laziness

ExpertArrays = dict[str, NDArray[np.float32]]
OfLayer = Callable[[int], ExpertArrays]  # layer -> arrays [P, ...] by name
GRADIENTS = {"float32": "gradients", "bfloat16": "gradients-bfloat16"}  # folders: the dtype may change on resume
THREADS = 2  # that read, and as many that write, of each kind of record


class ExpertStores:
    """The records of a run's experts. On the tier nvme they are opened as they are found; all else begins with `fill`.

    shapes: of an expert's parameters. records: what a checkpoint has in files of its own: weights and moments of all
    experts. Every process has a folder of its own, `tiers.path/RUN/process-NUMBER`: runs with one path do not meet.
    """

    def __init__(
        self, config: TrainConfig, owned: LocalExperts, shapes: dict[str, tuple[int, ...]], run: str = "run"
    ) -> None:
        self._config, self._tiers, self._owned, self._shapes = config, config.tiers, owned, shapes
        self._num_layers, self._num_experts = config.model.num_moe_layers, config.model.num_experts
        self._num_records = self._num_layers * self._num_experts
        self._owned_records = owned.records(self._num_layers, self._num_experts)
        self.layouts = layouts(shapes, self._tiers.gradient_dtype)
        self._held = contextlib.ExitStack()
        self._versions = self._open_versions(run)
        lazy = self._tiers.optimizer == "nvme"
        saved = self._versions if lazy else {}
        self._laziness: Laziness | None = None  # of what was saved last
        self._written: dict[int, int] = {}  # record -> the step whose gradient its file has, without a tier's own files
        self.records = RecordCheckpoints(
            saved,
            memory={kind: self.layouts[kind] for kind in ("weights", "moments") if kind not in saved},
            owned=self._owned_records,
            process=jax.process_index(),
            num_processes=jax.process_count(),
            stall_limit_s=config.checkpoint.drain_timeout_s,
            partial=("gradients",) if lazy else (),
        )
        self.records.settings = self.up_to_date(0).settings

    def _open_versions(self, run: str) -> dict[str, VersionStore]:
        tiers, fingerprint = self._tiers, f"jmoe experts of {run}"
        kinds = {"weights": tiers.experts, "moments": tiers.optimizer, "gradients": tiers.gradients}
        layouts = {kind: self.layouts[kind] for kind, tier in kinds.items() if tier == "nvme"}
        self._cached_bytes = sum(sealed(layout).record_bytes for layout in layouts.values())  # one record of each kind
        least_bytes = min(2, len(self._owned_records)) * self._cached_bytes
        given = tiers.host_cache_bytes
        enough = f"must be 0 or hold two records of every kind on the tier nvme, {least_bytes} bytes"
        check(not layouts or not given or given >= least_bytes, "tiers.host_cache_bytes", given, enough)
        if tiers.optimizer == "nvme":
            layouts["gradients"] = self.layouts["gradients"]  # those that wait are saved, wherever they are
        folder = Path(tiers.path or Path(self._config.output_dir) / "records") / run / f"process-{jax.process_index()}"
        opened = {}
        for kind, layout in layouts.items():
            place = folder / (GRADIENTS[tiers.gradient_dtype] if kind == "gradients" else kind)
            opened[kind] = VersionStore.open(
                place, layout, self._num_records, fingerprint=fingerprint, owned=self._owned_records
            )
            self._held.callback(opened[kind].close)
        return opened

    def save(self, experts: ExpertState) -> None:
        """Make all records durable as they stand, those of host memory excepted, for `records` to pin.

        Written is what has changed since it was last written, and nothing else. Without the moments on the tier nvme
        every expert is brought up to date instead.
        """
        if self._tiers.optimizer != "nvme":
            experts.flush_updates()
            return
        self._laziness = laziness = experts.save()
        if self._tiers.gradients == "host":
            self._write_gradients(experts.stores.gradients, laziness)
        self.records.save_only = {"gradients": laziness.pending}
        self.records.beside = laziness.to_json()

    def _write_gradients(self, gradients: TieredStore, laziness: Laziness) -> None:
        """Give those that wait in host memory files."""
        store = self._versions["gradients"]
        steps = {index: laziness.applied[index] for index in sorted(laziness.pending)}
        new = [index for index, step in steps.items() if self._written.get(index) != step]

        def write(indices: list[int]) -> None:
            record_R = RecordBuffers(1, store.layout.record_bytes).slot(0)
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

    def laziness(self, step: int) -> Laziness:
        """How far the records are behind: those just restored, or else those saved last, if that was at this step."""
        if self.records.restored is not None:
            self._laziness, self.records.restored = Laziness.of_lists(self.records.restored), None
        if self._laziness is not None and self._laziness.step == step:
            return self._laziness
        return self.up_to_date(step)

    def up_to_date(self, step: int) -> Laziness:
        """Nothing is behind."""
        return Laziness.up_to_date(step, self._config.optimizer, self._tiers.gradient_dtype)

    def fill(self, laziness: Laziness, weights: OfLayer | None, moments: OfLayer | None) -> ExpertState:
        """Fill the tiers from each layer's weights and moments; None: they are in their records already."""
        tiers = self._tiers
        resident = tiers.experts == "device"
        mine = laziness.of(self._owned_records)
        state = ExpertState(
            Stores(
                None if resident else self._store("weights", tiers.experts, weights),
                self._store("moments", tiers.optimizer, moments),
                self._store("gradients", tiers.gradients, None, mine.pending),
            ),
            optimizer=self._config.optimizer,
            num_layers=self._num_layers,
            num_experts=self._num_experts,
            owned=self._owned,
            shapes=self._shapes,
            num_slots=self._num_layers if resident else tiers.device_layers,
            laziness=mine,
            initial=weights if resident else None,
            wait_limit_s=self._config.distributed.step_timeout_s,
        )
        if resident:
            state.flush_updates()  # now, while `weights` can be read
        self.records.memory = {"weights": state.each_weights, "moments": state.each_moments}
        self._written = {index: mine.applied[index] for index in mine.pending}
        return state

    def _store(self, kind: str, tier: str, of_layer: OfLayer | None, written: Collection[int] = ()) -> TieredStore:
        """One kind of records. written: in host memory, the records that their files fill."""
        versions = self._versions.get(kind)
        if tier != "nvme" or versions is None:
            fill = self._filling(of_layer) if not written or versions is None else _reading(versions, written)
            records = HostRecords.fill(self.layouts[kind], self._num_records, fill, self._owned_records)
            return TieredStore(host_records=records)
        if of_layer is not None:
            write_all(versions, self._filling(of_layer))
        return TieredStore(
            versions,
            cache_bytes=self._cache_bytes(versions.layout.record_bytes),
            threads=THREADS,
            write_threads=THREADS,
            wait_limit_s=self._config.distributed.step_timeout_s,
        )

    def _filling(self, of_layer: OfLayer | None) -> Fill:
        """Writes record after record from arrays of a layer; of None: leaves zeros."""
        layer, arrays = -1, dict[str, NDArray[np.float32]]()

        def fill(index: int, views: dict[str, NDArray[Any]]) -> None:
            nonlocal layer, arrays
            if of_layer is None:
                return
            if index // self._num_experts != layer:
                layer = index // self._num_experts
                arrays = of_layer(layer)
            place = np.searchsorted(self._owned.experts, index % self._num_experts)
            for name, array in arrays.items():
                np.copyto(views[name], array[place])

        return fill

    def _cache_bytes(self, record_bytes: int) -> int:
        """A store's share of the host cache: as its share of the bytes on the tier nvme."""
        given = self._tiers.host_cache_bytes
        if not given:
            return max(len(self._owned_records) // 4, 2) * record_bytes
        return given * record_bytes // self._cached_bytes

    def progress(self) -> tuple[int, ...]:
        """What changes as long as records are filled, drained or restored."""
        written = tuple(store.stats().writes for store in self._versions.values())
        return written + self.records.progress()

    def close(self) -> None:
        """Wait for what is being saved, and give the folders free."""
        with self._held:
            self.records.close()


def _reading(store: VersionStore, indices: Collection[int]) -> Fill:
    """Reads these records; leaves zeros in the others."""
    record_R = RecordBuffers(1, store.layout.record_bytes).slot(0)

    def fill(index: int, views: dict[str, NDArray[Any]]) -> None:
        if index in indices:
            store.read_into(index, record_R)
            found = store.layout.views(record_R)
            for name, view in views.items():
                np.copyto(view, found[name])

    return fill


def write_all(store: VersionStore, fill: Fill) -> None:
    """Let `fill` write every record anew, whatever the store holds."""
    record_R = RecordBuffers(1, store.layout.record_bytes).slot(0)
    for index in store.owned:
        record_R[:] = 0
        fill(index, store.layout.views(record_R))
        store.write(index, record_R)
    store.sync()
