"""Reads the experts of a training checkpoint into host memory, one layer at a time, from any tier.

Offloaded experts are in the checkpoint's records, the others among its Orbax arrays.
`deploy/merge.py` and `training/resume.py` call this.

Legend:
  P  experts asked for
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorstore
from numpy.typing import NDArray

from jmoe.config import EXPERT_STACKS, Layer
from jmoe.memory.record_checkpoint import ITEM
from jmoe.memory.saved_records import SavedRecords, read_record_lists
from jmoe.mesh import EXPERTS_PATH
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.expert_state import ExpertArrays, record_layouts
from jmoe.offload.lazy_adamw import ReplayState

# stack -> prefix of an array's name, without "params.", "m." or "v."
PREFIXES = {stack: f"{stack}.moe.{EXPERTS_PATH}." for stack in EXPERT_STACKS}


def expert_array_names(names: Sequence[str]) -> list[str]:
    """Return the names, among a checkpoint's array names, that belong to experts."""
    return [name for name in names if name.partition(".")[2].startswith(tuple(PREFIXES.values()))]


class SavedExperts:
    """Weights and moments of the experts of one checkpoint step.

    step_folder: folder of the step. shapes: of an expert's parameters, by name. layers:
    `ModelConfig.expert_layers`. kinds: which of "weights" and "moments" are stored as records.
    replay_state: the optimizer steps that the records have skipped, applied on reading; None if
    there are none.
    """

    def __init__(
        self,
        step_folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        index: ExpertIndex,
        layers: Sequence[Layer],
    ) -> None:
        self._shapes, self._index, self._layers = shapes, index, layers
        folder = step_folder / ITEM
        self.replay_state = (
            ReplayState.from_record_lists(read_record_lists(folder).values())
            if folder.is_dir()
            else None
        )
        dtype = "float32" if self.replay_state is None else self.replay_state.gradient_dtype
        self._records = (
            SavedRecords(folder, record_layouts(shapes, dtype)) if folder.is_dir() else None
        )
        self.kinds = {"weights", "moments"} & set(
            self._records.kinds if self._records is not None else ()
        )
        # the last record brought up to date, and its arrays
        self._last: tuple[int, Mapping[str, np.ndarray]] = (-1, {})
        self._state = step_folder / "state"
        self._arrays: dict[str, tensorstore.TensorStore] = {}

    def read_weights(self, layer: int, experts: NDArray[np.int64]) -> ExpertArrays:
        """Return {name: float32 [P, ...]}, the weights of these experts of a layer."""
        if "weights" in self.kinds:
            return self._read_from_records("weights", layer, experts)
        return {
            name: self._read_from_array("params", name, layer, experts) for name in self._shapes
        }

    def read_moments(self, layer: int, experts: NDArray[np.int64]) -> ExpertArrays:
        """Return {"m.name", "v.name": float32 [P, ...]}, the moments of a layer's experts."""
        if "moments" in self.kinds:
            return self._read_from_records("moments", layer, experts)
        return {
            f"{p}.{name}": self._read_from_array(p, name, layer, experts)
            for p in "mv"
            for name in self._shapes
        }

    def read_parameter(self, name: str, layer: int, expert: int) -> NDArray[np.float32]:
        """Return one parameter of one expert's weights, float32."""
        return self.read_weights(layer, np.array([expert]))[name][0]

    def _read_from_records(self, kind: str, layer: int, experts: NDArray[np.int64]) -> ExpertArrays:
        """Return the experts' weights or moments, float32 [P, ...] by name, from record files."""
        assert self._records is not None
        prefixes = ("",) if kind == "weights" else ("m.", "v.")
        arrays = {
            f"{prefix}{name}": np.empty((experts.size, *shape), np.float32)
            for prefix in prefixes
            for name, shape in self._shapes.items()
        }
        for place, index in enumerate(self._index.record_numbers(layer, experts).tolist()):
            record = self._up_to_date_record(kind, index)
            for name, array in arrays.items():
                np.copyto(array[place], record[name])
        return arrays

    def _up_to_date_record(self, kind: str, index: int) -> Mapping[str, np.ndarray]:
        """Return a record's arrays, with skipped optimizer steps applied."""
        assert self._records is not None
        if self.replay_state is None or index not in self.replay_state.applied:
            return self._records.read_record(kind, index)
        last, arrays = self._last
        if last == index:
            return arrays
        weights, moments = (
            self._records.read_record(kind, index) for kind in ("weights", "moments")
        )
        gradient = (
            self._records.read_record("gradients", index)
            if index in self.replay_state.pending
            else None
        )
        behind = [{name: weights[name] for name in self._shapes}]
        behind += [{name: moments[f"{part}.{name}"] for name in self._shapes} for part in "mv"]
        g = None if gradient is None else {name: gradient[name] for name in self._shapes}
        w, m, v = self.replay_state.catch_up(index, behind[0], behind[1], behind[2], g)
        arrays = {
            **w,
            **{f"m.{name}": a for name, a in m.items()},
            **{f"v.{name}": a for name, a in v.items()},
        }
        self._last = index, arrays
        return arrays

    def _read_from_array(
        self, state_field: str, name: str, layer: int, experts: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Return one parameter of these experts, or its moment, [P, ...], from a checkpoint's
        arrays.

        state_field: the field of `TrainState`: "params", "m" or "v".
        """
        own = self._layers[layer]
        key = f"{state_field}.{PREFIXES[own.stack_name]}{name}"
        if key not in self._arrays:
            self._arrays[key] = _open_array(self._state, key)
        array: NDArray[np.float32] = self._arrays[key][own.number, experts.tolist()].read().result()
        return array


def _open_array(folder: Path, name: str) -> tensorstore.TensorStore:
    """Open an Orbax array for partial reads; its chunk cache holds the whole array, so no chunk is
    decoded twice.
    """
    store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    spec = {"driver": "zarr", "kvstore": store}
    array = tensorstore.open(spec, open=True, read=True).result()
    size_bytes = array.dtype.numpy_dtype.itemsize * int(np.prod(array.shape))
    cache = tensorstore.Context({"cache_pool": {"total_bytes_limit": 2 * size_bytes}})
    return tensorstore.open(spec, open=True, read=True, context=cache).result()
