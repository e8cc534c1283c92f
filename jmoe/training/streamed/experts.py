"""A run's experts on their tiers, as its programs take them: the arrays of all devices, layer by
layer.

Legend: E experts of a layer, P those of this process, N layers with experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

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


class StreamedExperts:
    """The experts of a run whose step goes layer by layer; a trainer of such a run has them by
    inheritance.

    An error is for good: every later call raises it. shapes: of an expert's parameters. run: names
    the folder of its records, see `ExpertStores`. slotted: where experts lie, if not as the mesh
    splits them.
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
        # of all devices
        self._rows = config.model.num_experts if slotted is None else mesh.size * slotted.per_device
        self._split = split_over(EXPERT if slotted is None else ALL)
        self.experts: ExpertState | None = None
        self.stores = ExpertStores(
            config, ExpertIndex.from_model(config.model, self._owned), dict(shapes), run
        )
        self.records: RecordCheckpoints | None = self.stores.records

    def _take_over(self, before: Self) -> None:
        """Go on with the experts of another trainer of the run."""
        self.mesh, self._owned = before.mesh, before._owned
        self._rows, self._split = before._rows, before._split
        self.experts, self.stores, self.records = before.experts, before.stores, before.records

    def _open(
        self, replay_state: ReplayState, weights: ReadExperts | None, moments: ReadExperts | None
    ) -> None:
        self.end_experts()
        self.experts = self.stores.fill(replay_state, weights, moments)

    def end_experts(self) -> None:
        """End the threads that bring experts up to date and write records back; what is dirty is
        not written.

        Before a checkpoint's records become current: what such a thread still writes would be newer
        than they are.
        """
        experts, self.experts = self.experts, None
        if experts is not None:
            experts.close()

    def _load(self, step: int, weights: ReadExperts | None, moments: ReadExperts | None) -> None:
        """Take the experts to their tiers layer by layer. None: they are there already."""
        replay_state = (
            self.stores.replay_state(step)
            if weights is moments is None
            else self.stores.up_to_date(step)
        )
        self._open(replay_state, weights, moments)

    @property
    def _opened(self) -> ExpertState:
        if self.experts is None:
            raise ValueError("the experts are nowhere yet: init or load_state comes first")
        return self.experts

    def _joined(self, slot: Slot) -> DeviceStacks:
        """Return arrays [E, ...] of all devices from those of this process's devices."""
        if self.mesh.size == 1:
            return slot[0]
        sharding = NamedSharding(self.mesh, self._split)
        return {
            name: jax.make_array_from_single_device_arrays(
                (self._rows // self._owned.per_device * array.shape[0], *array.shape[1:]),
                sharding,
                [stacks[name] for stacks in slot],
            )
            for name, array in slot[0].items()
        }

    def _rows_of(self, chosen_P: NDArray[np.bool_], size: int) -> ChosenRows | None:
        """Return which rows of the slot fetched last hold these experts, of all devices; None: each
        has its own.

        size: of the arrays of a device; 0: there is a row for each expert.
        """
        if not size:
            return None
        rows = self._opened.chosen_rows(chosen_P, size)
        if self.mesh.size == 1:
            return ChosenRows(*map(jnp.asarray, rows[0]))
        sharding = NamedSharding(self.mesh, self._split)
        whole = (size * self._rows // self._owned.per_device,)
        parts = [
            jax.device_put(own, device)
            for own, device in zip(rows, self._owned.all_devices, strict=True)
        ]
        return ChosenRows(
            *(
                jax.make_array_from_single_device_arrays(whole, sharding, list(own))
                for own in zip(*parts, strict=True)
            )
        )

    def _mine(self, array: jax.Array) -> list[jax.Array]:
        """Return what an array has on each of this process's devices."""
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        return [shards[device] for device in self._owned.all_devices]

    def _chosen(self, arrived: Sequence[jax.Array]) -> NDArray[np.bool_]:
        """Return [P], whether rows arrived for an expert, in any of these arrays.

        An array has the experts that the mesh gives a device, summed over replicas, or in slots all
        experts, summed over all devices.
        """
        # devices with what those before have not
        firsts = np.cumsum([0, *map(len, self._owned.devices)])[:-1]
        firsts = firsts[:1] if isinstance(self._owned, SlottedExperts) else firsts
        each = [
            np.concatenate([np.asarray(self._mine(array)[first]) for first in firsts]) > 0
            for array in arrived
        ]
        chosen_P: NDArray[np.bool_] = np.any(each, axis=0)
        return chosen_P

    def _keep(
        self, number: int, chosen_P: NDArray[np.bool_], experts: Mapping[str, jax.Array]
    ) -> None:
        """Take the gradients of a layer's experts to their tier."""
        by_device = zip(*(self._mine(g) for g in experts.values()), strict=True)
        self._opened.keep(
            number, chosen_P, [dict(zip(experts, own, strict=True)) for own in by_device]
        )

    def _end_step(self, metrics: Mapping[str, jax.Array]) -> None:
        """Update the experts as a step's metrics say: its learning rate and clipping, or not at
        all where not `ok`.
        """
        values = jax.device_get({name: metrics[name] for name in ("ok", "learning_rate", "clip")})
        if values["ok"]:
            self._opened.commit(float(values["learning_rate"]), float(values["clip"]))
        else:
            self._opened.abandon()

    def _done(self, result: Any) -> Any:
        """Wait: on CPU collectives of two programs under way at once may wait for each other for
        ever.
        """
        return result if self.mesh.size == 1 else jax.block_until_ready(result)

    def expert_stats(self) -> ExpertStats:
        """Return what moved between tiers."""
        return self._opened.stats()

    def progress(self) -> tuple[int, ...]:
        """Return what changes as long as records are moved or brought up to date."""
        return (
            *self.stores.progress(),
            0 if self.experts is None else self.experts.stats().updates,
        )

    def close(self) -> None:
        """End the threads, and give the records' folders free."""
        try:
            self.end_experts()
        finally:
            self.stores.close()
