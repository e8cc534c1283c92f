"""The experts of a streamed run as global arrays for its programs, layer by layer; the base class
of `StreamedRunner`.

Legend: E experts of a layer (over all devices), P experts of this process, N layers with experts.
"""

from collections.abc import Mapping, Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from jmoe.config import TrainConfig
from jmoe.memory.record_checkpoint import RecordCheckpoints
from jmoe.mesh import ALL, EXPERT, split_over
from jmoe.offload.expert_index import ExpertIndex, LocalExperts, SlottedExperts
from jmoe.offload.expert_state import ExpertState, ExpertStats, ReadExperts
from jmoe.offload.lazy_adamw import ReplayState
from jmoe.offload.slot_rows import ChosenRows
from jmoe.offload.train_stores import ExpertStores
from jmoe.offload.training_slots import DeviceStacks, Slot
from jmoe.types import PyTree


class StreamedExperts:
    """Fetches experts from their tiers and returns gradients to them, for a trainer that runs layer
    by layer.

    shapes: of one expert's parameters, by name. run: the folder name of the experts' records, see
    `ExpertStores`. slotted: the experts of each device if they differ from the mesh's even split.
    After an error every later call raises that error again.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        shapes: Mapping[str, tuple[int, ...]],
        run: str,
        slotted: SlottedExperts | None = None,
    ) -> None:
        self.mesh = mesh
        self._owned = (
            LocalExperts.from_mesh(mesh, config.model.num_experts) if slotted is None else slotted
        )
        # expert rows of a layer, over all devices
        self._rows = (
            config.model.num_experts
            if slotted is None
            else mesh.size * slotted.max_experts_per_device
        )
        self._split = split_over(EXPERT if slotted is None else ALL)
        self.experts: ExpertState | None = None
        self.stores = ExpertStores(
            config, ExpertIndex.from_model(config.model, self._owned), dict(shapes), run
        )
        self.records: RecordCheckpoints | None = self.stores.records

    def _take_over_experts(self, before: Self) -> None:
        """Use the experts and stores of `before`, another trainer of the same run, which must no
        longer be used.
        """
        self.mesh, self._owned = before.mesh, before._owned
        self._rows, self._split = before._rows, before._split
        self.experts, self.stores, self.records = before.experts, before.stores, before.records

    def _stop_threads_and_fill_stores(
        self, replay_state: ReplayState, weights: ReadExperts | None, moments: ReadExperts | None
    ) -> None:
        """Stop the threads of the experts loaded before, and load experts onto their tiers."""
        self.stop_expert_threads()
        self.experts = self.stores.fill_tiers(replay_state, weights, moments)

    def stop_expert_threads(self) -> None:
        """Stop the threads that update experts and write records back; dirty records are not
        written.

        Call this before a checkpoint's record versions become current: a record that such a thread
        wrote later would supersede them.
        """
        experts, self.experts = self.experts, None
        if experts is not None:
            experts.close()

    def _load_experts(
        self, step: int, weights: ReadExperts | None, moments: ReadExperts | None
    ) -> None:
        """Load the experts onto their tiers, one layer at a time, for a run at `step`. weights,
        moments: both None if the records are in place already.
        """
        replay_state = (
            self.stores.replay_state_at(step)
            if weights is moments is None
            else self.stores.fresh_replay_state(step)
        )
        self._stop_threads_and_fill_stores(replay_state, weights, moments)

    @property
    def _loaded_experts(self) -> ExpertState:
        """The experts; raises ValueError before they are loaded."""
        if self.experts is None:
            raise ValueError("the experts are nowhere yet: init or restore_state comes first")
        return self.experts

    def _global_arrays(self, slot: Slot) -> DeviceStacks:
        """Return global arrays [E, ...], by parameter, made from a slot's arrays on this process's
        devices.
        """
        if self.mesh.size == 1:
            return slot[0]
        sharding = NamedSharding(self.mesh, self._split)
        return {
            name: jax.make_array_from_single_device_arrays(
                (
                    self._rows // self._owned.max_experts_per_device * array.shape[0],
                    *array.shape[1:],
                ),
                sharding,
                [stacks[name] for stacks in slot],
            )
            for name, array in slot[0].items()
        }

    def _chosen_slot_rows(
        self, chosen_P: NDArray[np.bool_], size: int
    ) -> ChosenRows[jax.Array] | None:
        """Return the rows of the last fetched slot that hold the chosen experts, for all devices;
        None if the slot has one row for each expert.

        size: rows per device to return; 0 means one row for each expert.
        """
        if not size:
            return None
        rows = self._loaded_experts.chosen_slot_rows(chosen_P, size)
        if self.mesh.size == 1:
            return ChosenRows(*map(jnp.asarray, rows[0]))
        sharding = NamedSharding(self.mesh, self._split)
        whole = (size * self._rows // self._owned.max_experts_per_device,)
        by_device = [
            jax.device_put(own, device)
            for own, device in zip(rows, self._owned.all_devices, strict=True)
        ]
        return ChosenRows(
            *(
                jax.make_array_from_single_device_arrays(whole, sharding, list(own))
                for own in zip(*by_device, strict=True)
            )
        )

    def _local_shards(self, array: jax.Array) -> list[jax.Array]:
        """Return this process's shards of a global array, in the order of its devices."""
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        return [shards[device] for device in self._owned.all_devices]

    def _chosen_experts(self, arrived_counts: Sequence[jax.Array]) -> NDArray[np.bool_]:
        """Return bool [P]: whether any token chose the expert in any micro-batch.

        arrived_counts: per micro-batch, token counts by expert, [E] split over expert devices and
        summed over replicas; with slots, [E] of all experts, summed over all devices.
        """
        # the first device of each group that holds the same experts
        firsts = np.cumsum([0, *map(len, self._owned.devices)])[:-1]
        firsts = firsts[:1] if isinstance(self._owned, SlottedExperts) else firsts
        each = [
            np.concatenate([np.asarray(self._local_shards(array)[first]) for first in firsts]) > 0
            for array in arrived_counts
        ]
        chosen_P: NDArray[np.bool_] = np.any(each, axis=0)
        return chosen_P

    def _store_gradients(
        self, layer: int, chosen_P: NDArray[np.bool_], gradients: Mapping[str, jax.Array]
    ) -> None:
        """Send the gradients of a layer's chosen experts, by parameter, to their tier. layer: its
        index among layers with experts.
        """
        by_device = zip(*(self._local_shards(g) for g in gradients.values()), strict=True)
        self._loaded_experts.store_gradients(
            layer, chosen_P, [dict(zip(gradients, own, strict=True)) for own in by_device]
        )

    def _commit_or_discard_gradients(self, metrics: Mapping[str, jax.Array]) -> None:
        """Commit the experts' pending gradients with the step's learning rate and clip factor;
        discard them if the step is not `ok`.
        """
        values = jax.device_get({name: metrics[name] for name in ("ok", "learning_rate", "clip")})
        if values["ok"]:
            self._loaded_experts.commit_step(float(values["learning_rate"]), float(values["clip"]))
        else:
            self._loaded_experts.abandon_step()

    def _wait_on_cpu_mesh(self, result: PyTree) -> PyTree:
        """Return `result`, after waiting for it on several CPU devices: there, programs with
        collectives that run at the same time may deadlock. Accelerators run them in order.
        """
        waits = self.mesh.size > 1 and self.mesh.devices.flat[0].platform == "cpu"
        return jax.block_until_ready(result) if waits else result

    def expert_stats(self) -> ExpertStats:
        """Return the counters of traffic between tiers."""
        return self._loaded_experts.stats()

    def progress_counters(self) -> tuple[int, ...]:
        """Return counters that change while records are moving or being updated; for watchdogs."""
        return (
            *self.stores.progress_counters(),
            0 if self.experts is None else self.experts.stats().updates,
        )

    def close(self) -> None:
        """Stop the threads and release the records' folders."""
        try:
            self.stop_expert_threads()
        finally:
            self.stores.close()
