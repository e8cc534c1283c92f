"""A model with compressed experts: python -m jmoe.deploy.compress MODEL --out FOLDER --experts mxfp4|int4|int8|fp8.

Every expert's matrices are rounded to blocks of few bits under one scale; everything else stays what it is, to the bit.
The folder is one that transformers or vLLM read, and jmoe serves as it is stored. One matrix is in memory at a time.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jmoe.config import ModelConfig, check
from jmoe.deploy.cut import check_new_folder, new_model_folder, weight_bytes
from jmoe.deploy.expert_layouts import LAYOUTS, ExpertLayout, expert_layout
from jmoe.deploy.merged import hugging_face_folder
from jmoe.models.huggingface import model_config
from jmoe.models.pretrained import MAX_SHARD_BYTES, abstract_decoder, read_config
from jmoe.models.safetensors_io import (
    DTYPES,
    NewTensor,
    StoredTensor,
    TensorReader,
    read_headers,
    replace_text,
    write_safetensors,
)
from jmoe.models.stored_formats import COMPRESSION_FIELDS, format_of_matrix
from jmoe.models.weights import Parameter, Piece, check_tensors, parameters
from jmoe.runtime import end_at_once_on_interrupt
from jmoe.status import status


class _Matrices:
    """The tensors of a compressed matrix (or those of all experts of a layer), made when the first is written.

    Legend: K inputs, N outputs, E experts.
    """

    def __init__(self, reader: TensorReader, stored: StoredTensor, parameter: Parameter, layout: ExpertLayout) -> None:
        self._reader, self._stored, self._source, self._layout = reader, stored, parameter.source, layout
        *_, rows, columns = stored.shape
        n, k = (rows, columns) if self._source.transposed else (columns, rows)
        experts = stored.shape[:1] if self._source.stacked else ()
        self._fields = {end: ((*experts, *shape), dtype) for end, (shape, dtype) in layout.fields(n, k).items()}
        self._made: dict[str, NDArray[Any]] = {}

    def new_tensors(self) -> list[NewTensor]:
        """Return them, each of which is to be made once, in this order."""
        return [
            NewTensor(self._stored.name + end, dtype, shape, partial(self._tensor, end))
            for end, (shape, dtype) in self._fields.items()
        ]

    def _tensor(self, end: str) -> NDArray[Any]:
        if not self._made:
            self._made = self._make()
        return self._made.pop(end)

    def _make(self) -> dict[str, NDArray[Any]]:
        rows = self._stored.shape[-2]
        if not self._source.stacked:
            stored = self._matrix(0, rows)
            return self._layout.tensors(stored.T if self._source.transposed else stored)
        made = {end: np.empty(shape, dtype) for end, (shape, dtype) in self._fields.items()}
        for expert in range(self._stored.shape[0]):
            for end, part in self._layout.tensors(self._matrix(expert * rows, (expert + 1) * rows)).items():
                made[end][expert] = part
        return made

    def _matrix(self, start: int, end: int) -> NDArray[Any]:
        matrix = _rows(self._reader, self._stored, start, end)
        if not np.isfinite(matrix).all():
            raise self._stored.wrong("has values that are not finite: it cannot be compressed")
        return matrix


def _rows(reader: TensorReader, tensor: StoredTensor, start: int, end: int) -> NDArray[Any]:
    out = np.empty((end - start, tensor.shape[-1]), DTYPES[tensor.dtype])
    for first, last, rows in reader.chunks(tensor, start, end):
        out[first - start : last - start] = rows
    return out


def _as_stored(reader: TensorReader, tensor: StoredTensor) -> NewTensor:
    def read() -> NDArray[Any]:
        return _rows(reader, tensor, 0, math.prod(tensor.shape[:-1])).reshape(tensor.shape)

    return NewTensor(tensor.name, DTYPES[tensor.dtype], tensor.shape, read)


def _check_wide(fields: dict[str, Any], stored: dict[str, StoredTensor], pieces: Sequence[Piece]) -> None:
    """Refuse a model with matrices that are compressed already."""
    for name in COMPRESSION_FIELDS:
        value = fields.get(name)
        said = value.get("format", value.get("quant_method")) if isinstance(value, dict) else value
        check(not value, name, said, "the model is compressed already: must be one whose weights are wide")
    for piece in pieces:
        if piece.name not in stored or format_of_matrix(stored, piece.name, piece.shape) is not None:
            compressed = next(tensor for name, tensor in stored.items() if name.startswith(piece.name))
            raise compressed.wrong("is compressed already: must be a wide matrix")


def _check_sizes(config: ModelConfig, layout: ExpertLayout, experts: str) -> None:
    check(config.num_moe_layers > 0, "num_experts", config.num_experts, "no layer has experts")
    for name in ("hidden_size", "moe_intermediate_size"):
        fits = getattr(config, name) % layout.multiple == 0
        constraint = f"must be a multiple of {layout.multiple} with experts = {experts!r}"
        check(fits, name, getattr(config, name), constraint)


def compress_model(folder: Path, out: Path, experts: str) -> None:
    """Write the model in a Hugging Face folder with its experts in this format.

    Raises `ValueError` naming the option, field or tensor before anything is written.
    """
    check(experts in LAYOUTS, "experts", experts, f"must be one of {', '.join(LAYOUTS)}")
    check_new_folder(out)
    fields = read_config(folder)
    config, family = model_config(fields), fields["model_type"]
    layout = expert_layout(experts, family)
    stored = read_headers(folder)
    wanted = parameters(abstract_decoder(config)[2], config, family)
    check_tensors(wanted, stored, folder, config, np.float32)
    pieces = {piece.name: (piece, parameter) for parameter in wanted for piece in parameter.pieces()}
    _check_wide(fields, stored, [piece for piece, _ in pieces.values()])
    _check_sizes(config, layout, experts)
    linear = {name.removesuffix(".weight") for name, (_, p) in pieces.items() if p.source.transposed and not p.experts}
    changed: dict[str, Any] = {"quantization_config": layout.quantization(sorted(linear | {"lm_head"}))}
    if config.kv_lora_rank is not None:
        changed["num_nextn_predict_layers"] = 0  # the layers that predict further tokens are left out
    with TensorReader() as reader, new_model_folder(out, folder) as partial_folder:
        tensors: list[NewTensor] = []
        for tensor in stored.values():  # in the order in which they lie in files
            _, parameter = pieces.get(tensor.name, (None, None))
            if parameter is not None and parameter.experts and len(parameter.matrix) == 2:
                tensors += _Matrices(reader, tensor, parameter, layout).new_tensors()
            elif parameter is not None:
                tensors.append(_as_stored(reader, tensor))
        write_safetensors(partial_folder, tensors, MAX_SHARD_BYTES)
        replace_text(partial_folder / "config.json", json.dumps(fields | changed, indent=2) + "\n")


def main(arguments: list[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jmoe.deploy.compress", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, or the output folder of a run")
    parser.add_argument("--out", required=True, type=Path, help="where the compressed model is written: no files yet")
    parser.add_argument("--experts", required=True, choices=tuple(LAYOUTS), help="the format of the experts' matrices")
    options = parser.parse_args(arguments)
    say = partial(print, flush=True)
    check_new_folder(options.out)
    with hugging_face_folder(options.model, say, "MODEL") as folder:
        with status(f"writing {options.out}", say):
            compress_model(folder, options.out, options.experts)
        before, after = weight_bytes(folder), weight_bytes(options.out)
    say(f"{before / 1e6:,.1f} -> {after / 1e6:,.1f} MB of weights, experts in {options.experts}; in {options.out}")


if __name__ == "__main__":
    end_at_once_on_interrupt()
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"compress: {error}")
