"""LoRA adapters that an engine applies by name: one batch may have sequences of several adapters.

The adapters of a weight are one `LowRank`; see `jmoe.layers.low_rank`.

Legend: P rows of a step, E experts, I inputs, O outputs, r rank of an adapter, R of all together.
"""

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
from jmoe.models.peft_files import AdapterFolder, read_adapter_folder, stored_elements
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
    def load(cls, lora: Sequence[str], config: ModelConfig, family: str, dtype: DTypeLike) -> Self:
        """Return the adapters of `EngineConfig.lora` on the default device, in the model's dtype.

        Raises ValueError naming the option for an adapter of another model, or with parts that are
        not served.
        """
        folders = split_options(lora)
        layers: list[_LayerParts] = [{} for _ in config.layers]
        for number, (name, folder) in enumerate(folders.items(), 1):
            with _option_in_errors(name, folder):
                own = read_adapter_folder(folder, config, family)
            for parameter in own.parameters:
                _check_served(f"{name}={folder}", parameter, own)
                _append_parts(layers, parameter, own, number)
        return cls(
            tuple(folders),
            [
                {path: _joined(parts, path, dtype) for path, parts in sorted(layer.items())}
                for layer in layers
            ],
        )

    def check_name(self, name: str) -> None:
        """Raise ValueError if no adapter has this name; "" stands for the model as it is."""
        known = f"must be one of {', '.join(self.names)}" if self.names else "must be empty"
        check(name in self._numbers, "adapter", name, known)

    def of_rows(self, group: ChunkGroup) -> NDArray[np.int32] | None:
        """Return int32 [P], the number of each row's adapter; None if there are no adapters."""
        if not self.names:
            return None
        adapter_P = np.full(group.num_rows, BASE, np.int32)
        for row, chunk in enumerate(group.chunks):
            adapter_P[row] = self._numbers[chunk.sequence.adapter]
        return adapter_P

    def of_layer(self, layer: int, adapter_P: jax.Array | None) -> LayerAdapters | None:
        """Return a layer's adapters for the rows of a step; None if there are no adapters."""
        return None if adapter_P is None else LayerAdapters(self._layers[layer], adapter_P)

    def of_layers(
        self, some: slice, adapter_P: jax.Array | None, count: int
    ) -> list[LayerAdapters | None]:
        """Return `of_layer` for the `count` layers of a slice."""
        return [self.of_layer(some.start + i, adapter_P) for i in range(count)]


NO_ADAPTERS = ServedAdapters()


def split_options(lora: Sequence[str]) -> dict[str, Path]:
    """Return the folder of each adapter, by name, of options that read NAME=FOLDER."""
    pairs = (option.partition("=") for option in lora)
    return {name: Path(folder).expanduser() for name, _, folder in pairs}


def adapter_bytes(lora: Sequence[str], dtype: DTypeLike) -> int:
    """Return the bytes of these adapters' stored elements in `dtype`. Reads headers only."""
    elements = 0
    for name, folder in split_options(lora).items():
        with _option_in_errors(name, folder):
            elements += stored_elements(folder)
    return elements * jnp.dtype(dtype).itemsize


@contextmanager
def _option_in_errors(name: str, folder: Path) -> Iterator[None]:
    """Raise the block's ValueError or OSError as a ValueError that names the option."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"lora = '{name}={folder}': {error}") from error


def _check_served(option: str, parameter: Parameter, own: AdapterFolder) -> None:
    """Refuse adapters of a weight that the engine keeps in another form than the checkpoint."""
    changed = get_at_path(own.adapters, parameter.path)["b"].any()
    check(
        parameter.path[-1] != "w_kv_b" or not changed,
        "lora",
        option,
        "adapts kv_b_proj, which latent attention keeps split: merge it by python -m"
        " jmoe.deploy.merge FOLDER OUT --base MODEL",
    )


def _append_parts(
    layers: Sequence[_LayerParts], parameter: Parameter, own: AdapterFolder, number: int
) -> None:
    """Add an adapter's arrays of one parameter to those of its layers; nothing if B is zero."""
    adapter = get_at_path(own.adapters, parameter.path)
    if not adapter["b"].any():
        return
    spans = parameter.source.column_spans(parameter.shape[-1])
    for entry, layer in enumerate(parameter.layers):
        parts = layers[layer].setdefault("/".join(parameter.path[1:]), [])
        a, b = adapter["a"][entry], own.lora.scale * adapter["b"][entry]
        for piece, (low, high) in enumerate(spans):
            inside = np.zeros_like(b)
            inside[..., low:high] = b[..., low:high]
            parts.append((a[..., piece, :, :], inside, number))


def _joined(
    parts: Sequence[tuple[NDArray[np.float32], NDArray[np.float32], int]],
    path: str,
    dtype: DTypeLike,
) -> LowRank:
    """Return the adapters of a weight side by side. Those of routers stay float32."""
    kind = jnp.float32 if path == "moe/router/kernel" else dtype
    owner_R = np.concatenate([np.full(a.shape[-1], number, np.int32) for a, _, number in parts])
    a = np.concatenate([a for a, _, _ in parts], axis=-1).astype(kind)
    b = np.concatenate([b for _, b, _ in parts], axis=-2).astype(kind)
    return LowRank(*jax.device_put((a, b, owner_R), jax.devices()[0]))
