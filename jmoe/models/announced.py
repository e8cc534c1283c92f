"""The tensors that a `config.json` announces, before the files that hold them are there.

With `model.safetensors.index.json` their names are known, so that missing and unexpected tensors
are named; without it, experts are taken to be in the format that the configuration names and all
other tensors to be plain numbers of its dtype.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from jmoe.models.folder import has_file
from jmoe.models.huggingface import family_of, model_config
from jmoe.models.pretrained import abstract_decoder, read_config_file, read_json_object
from jmoe.models.quantization import announced_format, announced_group_size
from jmoe.models.safetensors_io import INDEX, SINGLE, StoredTensor
from jmoe.models.stored_formats import StoredFormat
from jmoe.models.weight_files import GGUF_LINK
from jmoe.models.weights import (
    KEPT_FLOAT32,
    Parameter,
    ParameterPiece,
    list_parameters,
    name_may_be_ignored,
)
from jmoe.types import JsonObject
from kernels_pallas.formats import MXFP4

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
NO_STAMP = (0, 0)


@dataclass(frozen=True)
class AnnouncedCheckpoint:
    """A folder whose weights are not all there, described by its `config.json` and index.

    fields: the `config.json`. tensors: the tensors that its model needs, by name. absent: names of
    tensors that it needs and the index lacks. unexpected: names in the index without a place in the
    model. file_bytes: the bytes of all files that the index names, or None.
    """

    fields: JsonObject
    tensors: dict[str, StoredTensor]
    absent: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    file_bytes: int | None = None

    def check_complete(self, folder: Path) -> None:
        """Raise ValueError naming a tensor that the index lacks, or has without a place for it."""
        for names, problem in ((self.absent, "lacks"), (self.unexpected, "has an unexpected")):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise ValueError(f"{folder / INDEX}: {problem} tensor {names[0]!r}{more}")


def has_all_weights(folder: Path) -> bool:
    """Return whether all files of a checkpoint's weights are there."""
    if has_file(folder / SINGLE) or has_file(folder / GGUF_LINK):
        return True
    places = read_index(folder)
    return places is not None and all((folder / file).is_file() for file in set(places.values()))


def read_index(folder: Path) -> dict[str, str] | None:
    """Return {tensor: file} of a folder's index, or None if it has no index."""
    if not has_file(folder / INDEX):
        return None
    places = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(f, str) for f in places.values()):
        raise ValueError(f"{folder / INDEX}: has no weight_map of tensors to files")
    return places


def read_announced(folder: Path) -> AnnouncedCheckpoint:
    """Return what `config.json` and, where present, the index say of a checkpoint.

    Raises ValueError as `model_config` does.
    """
    fields, places = read_config_file(folder), read_index(folder)
    config, family = model_config(fields), family_of(fields)
    names = None if places is None else places.keys()
    shapes = abstract_decoder(config)[2]
    form = announced_format(fields)
    files = {file: folder / file for file in {SINGLE, *(places or {}).values()}}
    tensors: dict[str, StoredTensor] = {}
    for parameter in list_parameters(shapes, config, family, names or ()):
        for piece in parameter.pieces():
            for name, dtype, shape in _tensors_of_piece(piece, parameter, fields, form, names):
                file = SINGLE if places is None else places.get(name, SINGLE)
                tensors[name] = StoredTensor(name, files[file], dtype, shape, 0, NO_STAMP)
    if places is None:
        return AnnouncedCheckpoint(fields, tensors)
    others = places.keys() - tensors.keys()
    return AnnouncedCheckpoint(
        fields,
        tensors,
        tuple(name for name in tensors if name not in places),
        tuple(sorted(name for name in others if not name_may_be_ignored(name, config))),
        _total_bytes_in_index(folder),
    )


def _total_bytes_in_index(folder: Path) -> int | None:
    metadata = read_json_object(folder / INDEX).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(size) if isinstance(size, int | float) else None


def _tensors_of_piece(
    piece: ParameterPiece,
    parameter: Parameter,
    fields: JsonObject,
    form: StoredFormat | None,
    names: Collection[str] | None,
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (name, dtype, shape) of each tensor that stores a piece of a parameter.

    form: the format of the configuration. names: tensors of the index, or None without one.
    """
    plain = DTYPES.get(str(fields.get("dtype") or fields.get("torch_dtype")), "BF16")
    if parameter.path[-1] == KEPT_FLOAT32:
        plain = "F32"
    is_linear = parameter.source.transposed and len(parameter.matrix_shape) == 2
    if _is_gpt_oss_mxfp4(fields) and parameter.experts and len(parameter.matrix_shape) == 2:
        experts, rows, columns = piece.shape
        groups = rows // MXFP4.block
        return [
            (f"{piece.name}_blocks", "U8", (experts, columns, groups, MXFP4.block // 2)),
            (f"{piece.name}_scales", "U8", (experts, columns, groups)),
        ]
    is_stored = is_linear and form is not None and (len(piece.shape) == 2 or form.may_stack)
    if form is None or not is_stored:
        return [(piece.name, plain, piece.shape)]
    parts = form.tensor_names(piece.name)
    if not (parameter.experts if names is None else all(part in names for part in parts)):
        return [(piece.name, plain, piece.shape)]
    *experts_dim, n, k = piece.shape
    result = []
    for name, (dtypes, shapes) in zip(parts, form.expected_tensors(n, k), strict=True):
        group = announced_group_size(fields, k)
        shape = next((s for s in shapes if len(s) == 2 and s[1] * group == k), shapes[0])
        dtype = plain if plain in dtypes else dtypes[0]
        result.append((name, dtype, (*experts_dim, *shape)))
    return result


def _is_gpt_oss_mxfp4(fields: JsonObject) -> bool:
    quantization = fields.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
