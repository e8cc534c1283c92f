"""Fill the decoder's parameters from Hugging Face tensors, and write them back.

`tensor_names.py` says which tensors make up a parameter. All tensors are checked against the files'
headers first. Then each parameter's final buffer (or this process's shards of it) is filled piece
by piece, so peak memory is little more than the parameters'.

Legend:
A parameter is [layers?, experts?, rows, columns] or [layers?, experts?, columns]; rows are inputs,
columns are outputs.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.typing import DTypeLike

from jmoe.config import ModelConfig, check
from jmoe.mesh import is_expert, path_names
from jmoe.models.families.tensors import OUTSIDE, TensorSource
from jmoe.models.mxfp4 import decode_mxfp4_bfloat16
from jmoe.models.quantization import format_of_matrix
from jmoe.models.safetensors_io import (
    DTYPES,
    STAGING_BYTES,
    NewTensor,
    StoredTensor,
    TensorReader,
)
from jmoe.models.stored_formats import Stored, check_scales_finite, decompress_rows
from jmoe.models.tensor_names import (
    embedding_names,
    has_fused_experts,
    is_gguf,
    layer_sources,
    parameter_source,
)
from jmoe.models.weight_files import read_weight_headers
from jmoe.types import PyTree
from kernels_pallas.compressed import stored_fields
from kernels_pallas.formats import MXFP4, Format

Names = tuple[str, ...]
HOST_COPY_BYTES = 2**28  # bytes of a layer's experts per device-to-host copy
ALIGNMENT = 64  # bytes; JAX on a CPU uses such arrays without a copy
CACHE_LINE_BYTES = 64
FLOAT_DTYPES = ("F32", "BF16", "F16")
KEPT_FLOAT32 = "e_score_correction_bias"  # float32 in transformers whatever the model's dtype
# Tensors that do not affect logits here: rotary tables that older versions of transformers saved,
# ERNIE's block that predicts further tokens, and scales for quantized activations and KV caches,
# neither of which jmoe quantizes.
IGNORED = re.compile(
    r"^model\.mtp_(block|emb_norm|hidden_norm|linear_proj)\.\d+\.|\.rotary_emb\.inv_freq$|"
    r"\.((in|out)put_(global_)?scale|(\w+_)?activation_scale|[kqv]_scale)$"
)
ZERO_POINT = ".weight_zero_point"  # ignored if zero: some symmetric checkpoints store it


@dataclass(frozen=True)
class ParameterPiece:
    """One tensor on disk and the part of a parameter that it fills.

    head_dim: see `TensorSource.head_dims`.
    """

    name: str
    shape: tuple[int, ...]
    at: tuple[int, ...]  # index of the layer, and of the expert unless the tensor holds all experts
    columns: tuple[int, int]
    transposed: bool
    head_dim: int


@dataclass(frozen=True)
class Parameter:
    """A parameter of the decoder and the tensors that it is made of.

    layers: the layer's number for each entry of the stack; () outside the layers.
    """

    path: Names
    shape: tuple[int, ...]
    source: TensorSource
    layers: tuple[int, ...]
    experts: int  # 0 if the parameter belongs to no expert

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape [rows, columns] or [columns] for one layer and expert."""
        return self.shape[bool(self.layers) + bool(self.experts) :]

    def pieces(
        self, layers: slice = slice(None), experts: slice = slice(None)
    ) -> Iterator[ParameterPiece]:
        """Yield the parameter's tensors, or those of a range of its stack's entries and experts."""
        source, matrix = self.source, self.matrix_shape
        one_tensor = not self.experts or source.stacked
        spans = source.column_spans(matrix[-1])
        count = len(source.names)
        flags = source.each_transposed or (source.transposed,) * count
        parts = list(zip(source.names, spans, flags, source.head_dims or (0,) * count, strict=True))
        for n, layer in list(enumerate(self.layers or (-1,)))[layers]:
            for expert in (-1,) if one_tensor else range(self.experts)[experts]:
                at = ((n,) if self.layers else ()) + (() if one_tensor else (expert,))
                for name, columns, transposed, head_dim in parts:
                    shape = (*matrix[:-1], columns[1] - columns[0])
                    shape = shape[::-1] if transposed else shape
                    shape = (self.experts, *shape) if source.stacked else shape
                    shape = (1, *shape) if source.as_row else shape
                    shape = (shape[0], 1, *shape[1:]) if source.by_channel else shape
                    name = name.format(layer=layer, expert=expert)
                    yield ParameterPiece(name, shape, at, columns, transposed, head_dim)


def flatten_by_path(tree: PyTree) -> dict[Names, PyTree]:
    """Return {names along the path: leaf} of nested dictionaries."""
    return {path_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def list_parameters(
    shapes: PyTree, config: ModelConfig, family: str, stored: Collection[str] = ()
) -> list[Parameter]:
    """Return the decoder's parameters with the tensors that they are made of.

    shapes: tree of arrays or shapes.
    stored: names of the checkpoint's tensors, which show whether all experts of a layer are in one.
    """
    gguf, result = stored if is_gguf(stored) else (), []
    fused = not gguf and has_fused_experts(stored, family)
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        names = path_names(path)
        layers = [i for i, layer in enumerate(config.layers) if layer.stack_name == names[0]]
        source = parameter_source(names, config, family, fused=fused, gguf=gguf)
        experts = config.num_experts if is_expert(path) else 0
        result.append(Parameter(names, tuple(leaf.shape), source, tuple(layers), experts))
    return result


def _checked_tensors(
    stored: dict[str, StoredTensor], piece: ParameterPiece, folder: Path
) -> list[StoredTensor]:
    """Return the stored tensors of a piece: one plain tensor, or those of a compressed matrix.

    Raises ValueError naming the file and the tensor that is missing or has a wrong shape or dtype.
    """
    if (form := format_of_matrix(stored, piece.name, piece.shape)) is not None:
        return form.find_tensors(stored, piece.name, piece.shape)
    if piece.name in stored:
        tensor = stored[piece.name]
        if tensor.shape != piece.shape:
            raise tensor.error(f"has shape {list(tensor.shape)}, must have {list(piece.shape)}")
        if tensor.dtype not in FLOAT_DTYPES:
            raise tensor.error(
                f"has dtype {tensor.dtype}, must have one of {', '.join(FLOAT_DTYPES)}"
            )
        return [tensor]
    blocks, scales = (stored.get(f"{piece.name}_{part}") for part in ("blocks", "scales"))
    if blocks is None or scales is None:
        near = (
            next(iter(stored.values())).file
            if len({t.file for t in stored.values()}) == 1
            else folder
        )
        raise ValueError(
            f"{near}: tensor {piece.name!r} is missing, {_missing_tensor_hint(stored, piece)}"
        )
    (experts, rows, columns), size = piece.shape, MXFP4.block
    if rows % size:
        raise blocks.error(f"is MXFP4, which needs rows of a multiple of {size}, not {rows}")
    for tensor, shape in (
        (blocks, (experts, columns, rows // size, size // 2)),
        (scales, (experts, columns, rows // size)),
    ):
        if tensor.shape != shape or tensor.dtype != "U8":
            raise tensor.error(f"is {tensor.dtype}{list(tensor.shape)}, must be U8{list(shape)}")
    return [blocks, scales]


def _missing_tensor_hint(stored: Mapping[str, StoredTensor], piece: ParameterPiece) -> str:
    """Return the end of an error about a missing tensor: the prefix under which a multimodal model
    stores it, or the shape that it must have.
    """
    for prefix in ("model.language_model.", "language_model.model."):
        if prefix + piece.name.removeprefix("model.") in stored:
            return (
                f"and lies under {prefix!r}, as in a model of images and text: save its language"
                " model alone"
            )
    return f"must have shape {list(piece.shape)}"


def has_untied_head(stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether the checkpoint has a head, in any format, whose values differ from the
    embedding's.
    """
    (head,) = OUTSIDE["head"].names
    parts = [tensor for name, tensor in stored.items() if name.startswith(head)]
    embeddings = [stored[name] for name in embedding_names() if name in stored]
    if not parts or not embeddings:
        return False
    one, other = embeddings[0], parts[0]
    if (
        len(parts) > 1
        or one.shape != other.shape
        or one.dtype != other.dtype
        or one.dtype not in FLOAT_DTYPES
    ):
        return True
    with TensorReader() as reader, TensorReader() as second:
        rows = zip(
            *(r.read_chunks(t, 0, t.shape[0]) for r, t in ((reader, one), (second, other))),
            strict=True,
        )
        return not all(np.array_equal(a, b) for (*_, a), (*_, b) in rows)


def check_tensors(
    wanted: list[Parameter],
    stored: dict[str, StoredTensor],
    folder: Path,
    config: ModelConfig,
    dtype: DTypeLike | None,
) -> dict[Names, np.dtype]:
    """Check the stored tensors of all parameters, and return {path: the parameter's dtype in
    memory}.

    dtype: dtype of all parameters; None for the stored ones.

    Raises ValueError naming the file and the tensor that is missing, wrong or unexpected.
    """
    used: set[str] = set()
    dtypes: dict[Names, np.dtype] = {}
    for parameter in wanted:
        kinds: dict[str, StoredTensor] = {}
        for piece in parameter.pieces():
            tensors = _checked_tensors(stored, piece, folder)
            used |= {tensor.name for tensor in tensors}
            is_plain = len(tensors) == 1 and tensors[0].dtype in FLOAT_DTYPES
            kinds[tensors[0].dtype if is_plain else "BF16"] = tensors[0]
        if dtype is not None:
            dtypes[parameter.path] = np.dtype(
                np.float32 if parameter.path[-1] == KEPT_FLOAT32 else dtype
            )
        elif len(kinds) > 1:
            tensor = list(kinds.values())[-1]
            raise tensor.error(
                f"has another dtype than its like in other layers ({', '.join(kinds)}): give dtype"
            )
        elif "F16" in kinds:
            raise kinds["F16"].error("has dtype F16: give dtype='float32' or dtype='bfloat16'")
        else:
            dtypes[parameter.path] = DTYPES[next(iter(kinds))]
    for name in sorted(stored.keys() - used):
        if not _is_ignorable(stored[name], config):
            raise stored[name].error("is unexpected: the configuration has no place for it")
    return dtypes


def name_may_be_ignored(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor of this name that belongs to no parameter may be ignored: a layer for
    multi-token prediction, a name that matches `IGNORED`, a zero point, or the output head of a
    model that ties its embeddings.
    """
    is_tied_head = config.tie_word_embeddings and name == "lm_head.weight"
    return (
        predicts_further_tokens(name, config)
        or is_tied_head
        or IGNORED.search(name) is not None
        or name.endswith(ZERO_POINT)
    )


def predicts_further_tokens(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor is of a layer that predicts further tokens, as DeepSeek, GLM, ERNIE
    and Qwen3-Next publish them.
    """
    layer = re.match(r"(?:model\.layers|blk)\.(\d+)\.", name)
    if name.startswith("mtp.") and config.has_linear_attention:
        return True
    if name.startswith("model.mtp_"):
        return IGNORED.search(name) is not None
    predicts = config.kv_lora_rank is not None or config.router.rules.limits_groups > 0
    return predicts and layer is not None and int(layer[1]) >= config.num_hidden_layers


def _is_ignorable(tensor: StoredTensor, config: ModelConfig) -> bool:
    """Return whether a tensor that belongs to no parameter can be ignored: `name_may_be_ignored`,
    and a zero point's values are all zero.
    """
    if tensor.name.endswith(ZERO_POINT) and not predicts_further_tokens(tensor.name, config):
        if tensor.dtype not in DTYPES:
            return False
        with TensorReader() as reader:
            parts = reader.read_chunks(tensor, 0, math.prod(tensor.shape[:-1]))
            return not any(values.view(np.uint8).any() for _, _, values in parts)
    return name_may_be_ignored(tensor.name, config)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized array that JAX on a CPU uses without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def _as_uint16(x: np.ndarray) -> np.ndarray:
    """Return bfloat16 as uint16, which numpy copies faster; other dtypes of 2 bytes too."""
    return x.view(np.uint16) if x.dtype.itemsize == 2 else x


def _transpose_into(out: np.ndarray, x: np.ndarray) -> None:
    """Write x^T to `out`, one cache line of each row of `out` at a time: twice as fast as numpy."""
    step = CACHE_LINE_BYTES // out.itemsize
    for i in range(0, x.shape[0], step):
        out[:, i : i + step] = x[i : i + step].T


class ParameterLoader:
    """Fills parameters, or shards of them, from stored tensors."""

    def __init__(self, stored: dict[str, StoredTensor], reader: TensorReader) -> None:
        self._stored, self._reader = stored, reader

    def load(
        self, parameter: Parameter, dtype: np.dtype, sharding: jax.sharding.Sharding | None
    ) -> jax.Array:
        """Return a parameter on the default device, or with this sharding.

        Waits until the copy is done, so host buffers are freed on return, unless a CPU array uses
        them.
        """
        shard = partial(self.read_slice, parameter, dtype)
        if sharding is None:
            return jax.block_until_ready(
                jax.device_put(shard((slice(None),) * len(parameter.shape)))
            )
        return jax.block_until_ready(jax.make_array_from_callback(parameter.shape, sharding, shard))

    def read_slice(
        self, parameter: Parameter, dtype: np.dtype, index: tuple[slice, ...]
    ) -> np.ndarray:
        """Return the slice `index` of a parameter, read into a new host array."""
        spans = [s.indices(size)[:2] for s, size in zip(index, parameter.shape, strict=True)]
        out = aligned_empty(tuple(end - start for start, end in spans), dtype)
        lead = len(parameter.shape) - len(parameter.matrix_shape)
        matrix_spans = [(0, 1)] * (2 - len(parameter.matrix_shape)) + spans[lead:]
        leading = [slice(*span) for span in spans[:lead]]
        layers = leading.pop(0) if parameter.layers else slice(None)
        for piece in parameter.pieces(layers, *leading):
            part = out[tuple(i - spans[axis][0] for axis, i in enumerate(piece.at))]
            if not parameter.source.stacked:
                self._fill_matrix(np.atleast_2d(part), piece, parameter, self._stored, matrix_spans)
                continue
            for expert in range(*spans[lead - 1]):
                matrix = np.atleast_2d(part[expert - spans[lead - 1][0]])
                stored = self._tensors_of_expert(piece, expert)
                self._fill_matrix(matrix, piece, parameter, stored, matrix_spans)
        return out

    def _tensors_of_expert(self, piece: ParameterPiece, expert: int) -> Stored:
        """Return the tensors of one expert's matrix: entries of those that hold all experts."""
        form = format_of_matrix(self._stored, piece.name, piece.shape)
        plain = (piece.name, f"{piece.name}_blocks", f"{piece.name}_scales")
        names = plain if form is None else form.tensor_names(piece.name)
        return {name: self._stored[name].entry(expert) for name in names if name in self._stored}

    def _fill_matrix(
        self,
        out: np.ndarray,
        piece: ParameterPiece,
        parameter: Parameter,
        stored: Stored,
        spans: list[tuple[int, int]],
    ) -> None:
        """Fill rows and columns `spans` of one matrix at `out` from the tensors `stored`."""
        source, (first, end) = parameter.source, piece.columns
        (row0, row1), (column0, column1) = spans
        low, high = max(first, column0), min(end, column1)
        if low >= high:
            return
        # a stored row is a column of the parameter
        if piece.head_dim:
            rows = low - first, high - first
            self._fill_heads(out, piece, stored, spans, rows)
            return
        if piece.transposed or piece.name not in stored:
            for a, b, values in self._decompressed_rows(stored, piece, low - first, high - first):
                columns = _target_columns(a + first, b - a, end - first, source.interleaved)
                values = _as_uint16(values[:, row0:row1].astype(out.dtype, copy=False))
                for step, at in enumerate(columns):
                    part = _as_uint16(out)[:, at.start - column0 : at.stop - column0]
                    _transpose_into(part, values[step :: len(columns)])
            return
        for a, b, values in self._decompressed_rows(stored, piece, row0, row1):
            values = _as_uint16(values.astype(out.dtype, copy=False))
            target = _as_uint16(out)[a - row0 : b - row0]
            if source.interleaved:
                half = values.shape[1] // 2
                target[:, :half], target[:, half:] = values[:, 0::2], values[:, 1::2]
            else:
                target[:, low - column0 : high - column0] = values[:, low - first : high - first]

    def _fill_heads(
        self,
        out: np.ndarray,
        piece: ParameterPiece,
        stored: Stored,
        spans: list[tuple[int, int]],
        wanted: tuple[int, int],
    ) -> None:
        """Fill the columns `wanted` of a matrix whose stored rows alternate between the halves of
        each head.

        wanted: columns within the piece.
        """
        (row0, row1), (column0, _) = spans
        d, (low, high) = piece.head_dim, wanted
        heads = low // d * d, -(-high // d) * d
        for a, b, values in self._decompressed_rows(stored, piece, *heads):
            stored_rows = np.arange(a, b)
            head, place = np.divmod(stored_rows, d)
            columns = head * d + place // 2 + place % 2 * (d // 2)
            here = (columns >= low) & (columns < high)
            part = values[:, row0:row1].astype(out.dtype, copy=False)
            out[:, columns[here] + piece.columns[0] - column0] = part[here].T

    def memory_format(self, parameter: Parameter, *, rounded: bool = False) -> Format | None:
        """Return the compressed in-memory format that represents all matrices of a parameter
        exactly.

        None if there is none. rounded: scales may be rounded to the format's dtype.
        """
        kinds: set[Format | None] = set()
        for piece in parameter.pieces():
            form = format_of_matrix(self._stored, piece.name, piece.shape)
            if form is None or not parameter.source.transposed:
                kinds.add(None)
            elif rounded:
                kinds.add(form.format_with_rounded_scales(self._stored, piece.name))
            else:
                kinds.add(form.memory_format(self._stored, piece.name))
            if len(kinds) > 1 or kinds == {None}:
                return None
        return kinds.pop() if kinds else None

    def stored_label(self, parameter: Parameter) -> str:
        """Return the name of the compressed format of a parameter's first matrix; "" if it has
        none.
        """
        piece = next(parameter.pieces())
        form = format_of_matrix(self._stored, piece.name, piece.shape)
        return "" if form is None else form.label

    def read_compressed(
        self, parameter: Parameter, layer: int, expert: int, kind: Format
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return one expert's matrix in its `memory_format`, `kind`: (values, scales).

        See `kernels_pallas/compressed.py` for their layout.
        """
        fields = stored_fields(kind, "", parameter.matrix_shape).values()
        values, scales = (np.empty(shape, dtype) for shape, dtype in fields)
        for piece in parameter.pieces(slice(layer, layer + 1), slice(expert, expert + 1)):
            stacked = parameter.source.stacked
            stored = self._tensors_of_expert(piece, expert) if stacked else self._stored
            form = format_of_matrix(stored, piece.name, piece.shape)
            assert form is not None
            part = form.read_in_memory_format(
                self._read_rows, stored, piece.name, piece.shape[-2:], kind
            )
            values[:, slice(*piece.columns)], scales[:, slice(*piece.columns)] = part
        return values, scales

    def _read_rows(self, tensor: StoredTensor, start: int, end: int) -> np.ndarray:
        rows = np.concatenate(
            [rows.copy() for _, _, rows in self._reader.read_chunks(tensor, start, end)]
        )
        check_scales_finite(tensor, rows)
        return rows

    def _decompressed_rows(
        self, stored: Stored, piece: ParameterPiece, start: int, end: int
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield rows start..end of the matrix in `stored` in chunks: (first row, end row, values).

        The values are decompressed, and may be overwritten by the next chunk.
        """
        if (form := format_of_matrix(stored, piece.name, piece.shape)) is not None:
            step = max(1, STAGING_BYTES // 4 // piece.shape[-1])
            yield from decompress_rows(
                form, self._read_rows, stored, piece.name, (start, end), step
            )
            return
        if piece.name in stored:
            yield from self._reader.read_chunks(stored[piece.name], start, end)
            return
        blocks, scales = stored[f"{piece.name}_blocks"], stored[f"{piece.name}_scales"]
        for a, b, packed in self._reader.read_chunks(blocks, start, end, trailing=2):
            packed = packed.copy()  # the next read overwrites it
            yield a, b, decode_mxfp4_bfloat16(packed, self._read_rows(scales, a, b))


def _target_columns(first: int, count: int, total: int, interleaved: bool) -> list[slice]:
    """Return the parameter's columns that `count` consecutive stored rows, from row `first` on,
    fill.

    Interleaved rows go alternately to the parameter's two halves, so the result has two slices.
    """
    if not interleaved:
        return [slice(first, first + count)]
    return [slice(first // 2 + half, (first + count) // 2 + half) for half in (0, total // 2)]


def load_arrays(
    folder: Path, config: ModelConfig, family: str, shapes: PyTree, dtype: DTypeLike | None
) -> dict[Names, jax.Array]:
    """Return {path: array} of a decoder's parameters from a folder's safetensors files.

    shapes: tree of shapes, with shardings for arrays that are to be sharded.
    dtype: dtype of all arrays; None for the stored ones.
    """
    stored = read_weight_headers(folder)
    wanted = list_parameters(shapes, config, family, stored)
    dtypes = check_tensors(wanted, stored, folder, config, dtype)
    places = flatten_by_path(shapes)
    with TensorReader() as reader:
        loader = ParameterLoader(stored, reader)
        return {
            p.path: loader.load(p, dtypes[p.path], getattr(places[p.path], "sharding", None))
            for p in wanted
        }


def _transformers_sort_key(parameter: Parameter, family: str) -> tuple[int, int]:
    """Return a sort key for transformers' order of parameters: embeddings, layers, norm, head."""
    if not parameter.layers:
        outside = list(OUTSIDE)
        at = outside.index(".".join(parameter.path))
        return (0 if at < outside.index("norm.scale") else 2), at
    return 1, list(layer_sources(family)).index(".".join(parameter.path[1:]))


class _HostSliceCache:
    """Copies arrays from a device to the host slice by slice, and caches the last slice.

    Tensors are written in the order in which a slice holds them (the experts of a layer, the
    columns of a matrix). So each byte crosses the link once, in large transfers, and the host holds
    one slice.
    """

    def __init__(self) -> None:
        self._of: tuple[jax.Array, tuple[int | slice, ...]] | None = None
        self._copy = np.empty(0)

    def read(self, array: jax.Array, at: tuple[int, ...]) -> np.ndarray:
        """Return `array[at]` on the host; `at` is (), (layer,) or (layer, expert)."""
        if [device.platform for device in array.devices()] == ["cpu"]:
            return np.asarray(array)[at]
        if len(at) < 2:
            return self._cached_slice(array, at)
        layer, expert = at
        size = max(1, HOST_COPY_BYTES // (math.prod(array.shape[2:]) * array.dtype.itemsize))
        first = expert // size * size
        return self._cached_slice(array, (layer, slice(first, min(first + size, array.shape[1]))))[
            expert - first
        ]

    def _cached_slice(self, array: jax.Array, at: tuple[int | slice, ...]) -> np.ndarray:
        if self._of is None or self._of[0] is not array or self._of[1] != at:
            # frees the last slice before the next one is copied
            self._of, self._copy = None, np.empty(0)
            self._of, self._copy = (array, at), np.asarray(array[at])
        return self._copy


@dataclass(frozen=True)
class StoredExperts:
    """An expert parameter that is read one expert at a time.

    read: (index among the layers with experts, expert) -> that expert's array.
    """

    read: Callable[[int, int], np.ndarray]
    dtype: np.dtype
    is_fully_addressable: bool = True

    def read_matrix(self, piece: ParameterPiece, num_experts: int) -> np.ndarray:
        """Return the matrix of a piece's expert, or of all experts of a layer, [E, ...]."""
        if len(piece.at) == 2:
            return self.read(*piece.at)
        return np.stack([self.read(piece.at[0], expert) for expert in range(num_experts)])


def _elements_in_file_layout(
    copies: _HostSliceCache,
    array: jax.Array | StoredExperts,
    parameter: Parameter,
    piece: ParameterPiece,
) -> np.ndarray:
    """Return a tensor's elements in the layout of the file."""
    source = parameter.source
    if isinstance(array, StoredExperts):
        x = array.read_matrix(piece, parameter.experts)
    else:
        x = copies.read(array, piece.at)
    x = x[..., slice(*piece.columns)]
    if source.interleaved:
        return np.stack(np.split(_as_uint16(x), 2, axis=-1), axis=-1).reshape(x.shape).view(x.dtype)
    if not source.transposed:
        return x.reshape(piece.shape)
    if source.stacked:
        return np.ascontiguousarray(_as_uint16(x).swapaxes(-1, -2)).view(x.dtype)
    out = np.empty(x.shape[::-1], x.dtype)
    _transpose_into(_as_uint16(out), _as_uint16(x))
    return out.reshape(piece.shape) if source.by_channel else out


def new_tensors(
    arrays: Mapping[Names, jax.Array | StoredExperts],
    shapes: PyTree,
    config: ModelConfig,
    family: str,
) -> list[NewTensor]:
    """Return the tensors that transformers expects, in its order; each is made when it is written.

    Raises ValueError if this process does not hold all of a parameter.
    """
    tensors, copies = [], _HostSliceCache()
    for parameter in list_parameters(shapes, config, family):
        array = arrays[parameter.path]
        whole = "must lie in this process whole to be saved"
        check(array.is_fully_addressable, "model", ".".join(parameter.path), whole)
        section, place = _transformers_sort_key(parameter, family)
        for piece in parameter.pieces():
            layer = parameter.layers[piece.at[0]] if parameter.layers else 0
            tensor = NewTensor(
                piece.name,
                np.dtype(array.dtype),
                piece.shape,
                partial(_elements_in_file_layout, copies, array, parameter, piece),
            )
            tensors.append(((section, layer, place), tensor))
    return [tensor for _, tensor in sorted(tensors, key=lambda entry: entry[0])]
