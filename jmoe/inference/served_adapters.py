"""LoRA adapters that an engine applies by name: one batch may have sequences of several adapters.

The adapters of a weight are one `LowRank`; see `jmoe.layers.low_rank`.

Legend: P rows of a step, E experts, I inputs, O outputs, r rank of an adapter, R of all together.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jmoe.config import ModelConfig, check
from jmoe.inference.scheduler import ChunkGroup
from jmoe.layers.low_rank import BASE, LayerAdapters, LowRank
from jmoe.models.lora import get_at_path
from jmoe.models.peft_files import AdapterFolder, read_adapter_folder, read_adapter_header
from jmoe.models.weights import Parameter

# the weights of one layer by path, each with (A [.., I, r], B [.., r, O], adapter) of its adapters
_LayerParts = dict[str, list[tuple[NDArray[np.float32], NDArray[np.float32], int]]]


class ServedAdapters:
    """Adapters by name, and their arrays on the device.

    names: in the order of their numbers, which begin at 1.
    """

    def __init__(
        self, names: Sequence[str] = (), layers: Sequence[Mapping[str, LowRank]] = ()
    ) -> None:
        """layers: the adapters of each layer's weights, by path in the layer."""
        self.names = tuple(names)
        self._numbers = {name: i + 1 for i, name in enumerate(self.names)} | {"": BASE}
        self._layers = layers

    @classmethod
    def load(
        cls, folders: Mapping[str, Path], config: ModelConfig, family: str, dtype: DTypeLike
    ) -> Self:
        """Return adapters on the default device, in the model's dtype.

        folders: by the adapters' names (`EngineConfig.adapter_folders`).

        Raises ValueError naming the option for an adapter of another model, or with parts that are
        not served.
        """
        layers: list[_LayerParts] = [{} for _ in config.layers]
        for number, (name, folder) in enumerate(folders.items(), 1):
            with _name_option_in_errors(name, folder):
                own = read_adapter_folder(folder, config, family)
            for parameter in own.parameters:
                _check_servable(f"{name}={folder}", parameter, own)
                _append_layer_adapters(layers, parameter, own, number)
        return cls(
            tuple(folders),
            [
                {
                    path: _concatenate_adapters(parts, path, dtype)
                    for path, parts in sorted(layer.items())
                }
                for layer in layers
            ],
        )

    def check_adapter_name(self, name: str) -> None:
        """Raise ValueError if no adapter has this name; "" stands for the model as it is."""
        known = f"must be one of {', '.join(self.names)}" if self.names else "must be empty"
        check(name in self._numbers, "adapter", name, known)

    def adapter_numbers_of_rows(self, group: ChunkGroup) -> NDArray[np.int32] | None:
        """Return int32 [P], the number of each row's adapter; None if there are no adapters."""
        if not self.names:
            return None
        adapter_P = np.full(group.num_rows, BASE, np.int32)
        for row, chunk in enumerate(group.chunks):
            adapter_P[row] = self._numbers[chunk.sequence.adapter]
        return adapter_P

    def layer_adapters_for_rows(
        self, layer: int, adapter_P: jax.Array | None
    ) -> LayerAdapters | None:
        """Return a layer's adapters for the rows of a step; None if there are no adapters."""
        return None if adapter_P is None else LayerAdapters(self._layers[layer], adapter_P)


NO_ADAPTERS = ServedAdapters()


def max_adapter_bytes(
    folders: Mapping[str, Path], config: ModelConfig, family: str, dtype: DTypeLike
) -> int:
    """Return the bytes of device memory that `ServedAdapters.load` takes at most: less if a stored
    B is zero. Reads headers only, and raises as `load` does for these.
    """
    num_bytes = 0
    for name, folder in folders.items():
        with _name_option_in_errors(name, folder):
            header = read_adapter_header(folder, config, family)
        assert header.lora.rank is not None
        for parameter in header.parameters:
            ranks = header.lora.rank * header.count_tensors(parameter)  # R of this adapter
            elements = ranks * math.prod(parameter.shape[:-2]) * sum(parameter.matrix_shape)
            num_bytes += elements * _device_dtype(_path_in_layer(parameter), dtype).itemsize
            num_bytes += ranks * len(parameter.layers) * np.dtype(np.int32).itemsize  # owner_R
    return num_bytes


def _path_in_layer(parameter: Parameter) -> str:
    """Return the parameter's path within its layer, such as "moe/router/kernel"."""
    return "/".join(parameter.path[1:])


def _device_dtype(path: str, dtype: DTypeLike) -> np.dtype:
    """Return the dtype of a weight's adapters: float32 for routers, the model's for others."""
    return jnp.dtype(jnp.float32 if path == "moe/router/kernel" else dtype)


@contextmanager
def _name_option_in_errors(name: str, folder: Path) -> Iterator[None]:
    """Return a context that re-raises a ValueError or OSError as a ValueError naming the option."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"lora = '{name}={folder}': {error}") from error


def _check_servable(option: str, parameter: Parameter, adapter_folder: AdapterFolder) -> None:
    """Refuse adapters of a weight that the engine keeps in another form than the checkpoint."""
    changed = get_at_path(adapter_folder.adapters, parameter.path)["b"].any()
    check(
        parameter.path[-1] != "w_kv_b" or not changed,
        "lora",
        option,
        "adapts kv_b_proj, which latent attention keeps split: merge it by python -m"
        " jmoe.deploy.merge FOLDER OUT --base MODEL",
    )


def _append_layer_adapters(
    layers: Sequence[_LayerParts], parameter: Parameter, adapter_folder: AdapterFolder, number: int
) -> None:
    """Add an adapter's arrays of one parameter to those of its layers: A and B of each tensor that
    fills some of the parameter's columns, unless B is zero in all layers.
    """
    adapter = get_at_path(adapter_folder.adapters, parameter.path)
    for piece, (low, high) in enumerate(parameter.source.column_spans(parameter.shape[-1])):
        if not adapter["b"][..., low:high].any():
            continue
        for entry, layer in enumerate(parameter.layers):
            a, b = adapter["a"][entry], adapter["b"][entry]
            inside = np.zeros_like(b)
            inside[..., low:high] = adapter_folder.lora.scale * b[..., low:high]
            parts = layers[layer].setdefault(_path_in_layer(parameter), [])
            parts.append((a[..., piece, :, :], inside, number))


def _concatenate_adapters(
    parts: Sequence[tuple[NDArray[np.float32], NDArray[np.float32], int]],
    path: str,
    dtype: DTypeLike,
) -> LowRank:
    """Return all adapters of one weight as one array each of A and B, with their owners."""
    kept = _device_dtype(path, dtype)
    owner_R = np.concatenate([np.full(a.shape[-1], number, np.int32) for a, _, number in parts])
    a = np.concatenate([a for a, _, _ in parts], axis=-1).astype(kept)
    b = np.concatenate([b for _, b, _ in parts], axis=-2).astype(kept)
    return LowRank(*jax.device_put((a, b, owner_R), jax.devices()[0]))
