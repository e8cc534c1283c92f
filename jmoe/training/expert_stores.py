"""Which tier holds which records of a process's experts, and how they get there.

Legend: E experts of a layer, P of them this process's.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jmoe.config import TrainConfig, check
from jmoe.memory.buffers import RecordBuffers
from jmoe.memory.record_checkpoint import RecordCheckpoints
from jmoe.memory.record_store import Fill, HostRecords, PackError, RecordLayout, read_manifest
from jmoe.memory.tiered_store import TieredStore
from jmoe.memory.version_store import VersionStore, remove_store, sealed
from jmoe.training.expert_state import ExpertState, Owned, Stores, layouts

ExpertArrays = dict[str, NDArray[np.float32]]
OfLayer = Callable[[int], ExpertArrays]  # layer -> arrays [P, ...] by name
THREADS = 2  # that read, and as many that write, of each kind of record


class ExpertStores:
    """The records of a run's experts. On the tier nvme they are opened as they are found; all else begins with `fill`.

    shapes: of an expert's parameters. records: what a checkpoint has in files of its own: weights and moments of all
    experts. Every process has a folder of its own, `tiers.path/RUN/process-NUMBER`: runs with one path do not meet.
    """

    def __init__(self, config: TrainConfig, owned: Owned, shapes: dict[str, tuple[int, ...]], run: str = "run") -> None:
        self._config, self._tiers, self._owned, self._shapes = config, config.tiers, owned, shapes
        self._num_layers, self._num_experts = config.model.num_moe_layers, config.model.num_experts
        self._num_records = self._num_layers * self._num_experts
        self._owned_records = owned.records(self._num_layers, self._num_experts)
        self.layouts = layouts(shapes, self._tiers.gradient_dtype)
        self._held = contextlib.ExitStack()
        self._versions = self._open_versions(run)
        saved = {kind: store for kind, store in self._versions.items() if kind != "gradients"}
        self.records = RecordCheckpoints(
            saved,
            memory={kind: self.layouts[kind] for kind in ("weights", "moments") if kind not in saved},
            owned=self._owned_records,
            process=jax.process_index(),
            num_processes=jax.process_count(),
            stall_limit_s=config.checkpoint.drain_timeout_s,
        )

    def _open_versions(self, run: str) -> dict[str, VersionStore]:
        tiers, fingerprint = self._tiers, f"jmoe experts of {run}"
        kinds = {"weights": tiers.experts, "moments": tiers.optimizer, "gradients": tiers.gradients}
        layouts = {kind: self.layouts[kind] for kind, tier in kinds.items() if tier == "nvme"}
        least_bytes = min(2, len(self._owned_records)) * sum(sealed(layout).record_bytes for layout in layouts.values())
        given = tiers.host_cache_bytes
        enough = f"must be 0 or hold two records of every kind on the tier nvme, {least_bytes} bytes"
        check(not layouts or not given or given >= least_bytes, "tiers.host_cache_bytes", given, enough)
        folder = Path(tiers.path or Path(self._config.output_dir) / "records") / run / f"process-{jax.process_index()}"
        opened = {}
        for kind, layout in layouts.items():
            if kind == "gradients" and not _has_layout(folder / kind, layout):
                remove_store(folder / kind, fingerprint)  # of another gradient_dtype; no checkpoint has gradients
            opened[kind] = VersionStore.open(
                folder / kind, layout, self._num_records, fingerprint=fingerprint, owned=self._owned_records
            )
            self._held.callback(opened[kind].close)
        return opened

    def fill(self, step: int, weights: OfLayer | None, moments: OfLayer | None) -> ExpertState:
        """Fill the tiers from each layer's weights and moments; None: they are in their records already."""
        tiers = self._tiers
        resident = tiers.experts == "device"
        state = ExpertState(
            Stores(
                None if resident else self._store("weights", tiers.experts, weights),
                self._store("moments", tiers.optimizer, moments),
                self._store("gradients", tiers.gradients, None),
            ),
            optimizer=self._config.optimizer,
            num_layers=self._num_layers,
            num_experts=self._num_experts,
            owned=self._owned,
            shapes=self._shapes,
            num_slots=self._num_layers if resident else tiers.device_layers,
            step=step,
            initial=weights if resident else None,
            wait_limit_s=self._config.distributed.step_timeout_s,
        )
        if resident:
            state.settle()  # now, while `weights` can be read
        self.records.memory = {"weights": state.each_weights, "moments": state.each_moments}
        return state

    def _store(self, kind: str, tier: str, of_layer: OfLayer | None) -> TieredStore:
        tiers, versions = self._tiers, self._versions.get(kind)
        if versions is None:
            fill = self._filling(of_layer)
            records = HostRecords.fill(self.layouts[kind], self._num_records, fill, self._owned_records)
            return TieredStore(host_records=records)
        if of_layer is not None:
            write_all(versions, self._filling(of_layer))
        return TieredStore(
            versions,
            cache_bytes=self._cache_bytes(versions.layout.record_bytes),
            threads=THREADS,
            write_threads=THREADS,
            beta=tiers.beta,
            decay_every_steps=tiers.decay_every_steps,
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
        return given * record_bytes // sum(store.layout.record_bytes for store in self._versions.values())

    def progress(self) -> tuple[int, ...]:
        """What changes as long as records are filled, drained or restored."""
        written = tuple(store.stats().writes for store in self._versions.values())
        return written + self.records.progress()

    def close(self) -> None:
        """Wait for what is being saved, and give the folders free."""
        with self._held:
            self.records.close()


def _has_layout(folder: Path, layout: RecordLayout) -> bool:
    try:
        return bool(read_manifest(folder)["layout"] == sealed(layout).describe())
    except (PackError, KeyError):
        return False


def write_all(store: VersionStore, fill: Fill) -> None:
    """Let `fill` write every record anew, whatever the store holds."""
    record_R = RecordBuffers(1, store.layout.record_bytes).slot(0)
    for index in store.owned:
        record_R[:] = 0
        fill(index, store.layout.views(record_R))
        store.write(index, record_R)
    store.sync()
