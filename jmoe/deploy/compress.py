"""Write a model with compressed experts: python -m jmoe.deploy.compress MODEL --out FOLDER
--experts FORMAT.

The values of each expert's matrices are rounded to 4 or 8 bits, with one scale per block; all other
tensors are copied bit for bit. transformers and vLLM can load the folder, and jmoe serves it
without conversion. One matrix is in memory at a time.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from jmoe.config import ModelConfig, check
from jmoe.deploy.cut import check_empty_or_new, creating_model_folder, weight_bytes
from jmoe.deploy.expert_layouts import LAYOUTS, ExpertLayout, expert_layout
from jmoe.deploy.model_folder import hugging_face_folder
from jmoe.models.huggingface import family_of, model_config
from jmoe.models.pretrained import MAX_SHARD_BYTES, abstract_decoder, read_config
from jmoe.models.quantization import COMPRESSION_FIELDS, format_of_matrix
from jmoe.models.safetensors_io import (
    DTYPES,
    NewTensor,
    StoredTensor,
    TensorReader,
    replace_text_durably,
    write_safetensors,
)
from jmoe.models.stored_formats import Fp8Blocks, StoredFormat
from jmoe.models.tensor_names import has_fused_experts, layer_sources
from jmoe.models.weight_files import read_weight_headers
from jmoe.models.weights import Parameter, ParameterPiece, check_tensors, list_parameters
from jmoe.runtime import end_at_once_on_interrupt
from jmoe.status import status
from jmoe.types import JsonObject
from kernels_pallas.formats import FP8, MXFP4


class _CompressedMatrix:
    """The tensors of one compressed matrix, or of the stacked matrices of all experts of a layer,
    computed when the first of them is written.

    Legend: K inputs, N outputs, E experts.
    """

    def __init__(
        self,
        source: "_SourceModel",
        piece: ParameterPiece,
        parameter: Parameter,
        layout: ExpertLayout,
    ) -> None:
        self._model = source
        self._piece = piece
        self._source = parameter.source
        self._layout = layout
        *_, rows, columns = piece.shape
        n, k = (rows, columns) if self._source.transposed else (columns, rows)
        experts = piece.shape[:1] if self._source.stacked else ()
        self._fields = {
            end: ((*experts, *shape), dtype) for end, (shape, dtype) in layout.fields(n, k).items()
        }
        self._made: dict[str, np.ndarray] = {}

    def new_tensors(self) -> list[NewTensor]:
        """Return the tensors of the matrix, computed when the first is written.

        Write each once, in this order.
        """
        return [
            NewTensor(self._piece.name + end, dtype, shape, partial(self._pop_computed_tensor, end))
            for end, (shape, dtype) in self._fields.items()
        ]

    def _pop_computed_tensor(self, suffix: str) -> np.ndarray:
        if not self._made:
            self._made = self._compute_tensors()
        return self._made.pop(suffix)

    def _compute_tensors(self) -> dict[str, np.ndarray]:
        rows = self._piece.shape[-2]
        if self._model.compressed_format(self._piece) is not None:
            return self._convert_mxfp4_to_fp8(rows)
        stored = self._model.stored[self._piece.name]
        if not self._source.stacked:
            matrix = self._read_finite_rows(stored, 0, rows)
            return self._layout.compress_matrix(matrix.T if self._source.transposed else matrix)
        made = {end: np.empty(shape, dtype) for end, (shape, dtype) in self._fields.items()}
        for expert in range(stored.shape[0]):
            for end, part in self._layout.compress_matrix(
                self._read_finite_rows(stored, expert * rows, (expert + 1) * rows)
            ).items():
                made[end][expert] = part
        return made

    def _read_finite_rows(self, stored: StoredTensor, start: int, end: int) -> np.ndarray:
        matrix = self._model.read_rows(stored, start, end)
        if not np.isfinite(matrix).all():
            raise stored.error("has values that are not finite: it cannot be compressed")
        return matrix

    def _convert_mxfp4_to_fp8(self, num_rows: int) -> dict[str, np.ndarray]:
        """Return the fp8 tensors of an MXFP4 matrix. Raises ValueError if fp8 cannot represent it
        exactly.
        """
        form = self._model.compressed_format(self._piece)
        assert form is not None
        matrix_NK = form.decompress(
            *form.read_compressed(
                self._model.read_rows, self._model.stored, self._piece.name, 0, num_rows
            )
        )
        made = self._layout.compress_matrix(matrix_NK.T)
        values, scales = made.values()
        if not np.array_equal(
            Fp8Blocks().decompress(values, np.repeat(scales, FP8.block, axis=0)), matrix_NK
        ):
            stored = self._model.stored[form.tensor_names(self._piece.name)[0]]
            raise stored.error(
                "has scales more than 2^14 apart in 128 x 128 weights: fp8 would not be the same"
                " numbers"
            )
        return made


class _SourceModel:
    """The tensors of the model to compress."""

    def __init__(self, stored: Mapping[str, StoredTensor], reader: TensorReader) -> None:
        self.stored, self._reader = stored, reader

    def compressed_format(self, piece: ParameterPiece) -> StoredFormat | None:
        """Return the format in which a matrix is already compressed; None if it is not."""
        return format_of_matrix(self.stored, piece.name, piece.shape)

    def first_tensor_name(self, piece: ParameterPiece) -> str:
        """Return the name of a matrix's first tensor, which may be one of several."""
        form = self.compressed_format(piece)
        return piece.name if form is None else form.tensor_names(piece.name)[0]

    def read_rows(self, tensor: StoredTensor, start: int, end: int) -> np.ndarray:
        """Return rows start..end of a tensor (its leading dimensions flattened), in the stored
        dtype.
        """
        out = np.empty((end - start, tensor.shape[-1]), DTYPES[tensor.dtype])
        for first, last, rows in self._reader.read_chunks(tensor, start, end):
            out[first - start : last - start] = rows
        return out

    def unchanged_copy(self, tensor: StoredTensor) -> NewTensor:
        """Return an unchanged copy of a tensor, which is read only when it is written."""

        def read_whole() -> np.ndarray:
            return self.read_rows(tensor, 0, math.prod(tensor.shape[:-1])).reshape(tensor.shape)

        return NewTensor(tensor.name, DTYPES[tensor.dtype], tensor.shape, read_whole)

    def check_uncompressed(
        self, fields: JsonObject, matrices: Sequence[tuple[ParameterPiece, Parameter]], experts: str
    ) -> None:
        """Raise ValueError if matrices are compressed already. Allowed are MXFP4 experts that
        become fp8.
        """
        forms = [
            (form, piece, p)
            for piece, p in matrices
            if (form := self.compressed_format(piece)) is not None
        ]
        is_mxfp4 = all(
            p.experts and form.memory_format(self.stored, piece.name) is MXFP4
            for form, piece, p in forms
        )
        if forms and is_mxfp4 and experts == FP8.name:
            return
        for name in COMPRESSION_FIELDS:
            value = fields.get(name)
            said = (
                value.get("format", value.get("quant_method")) if isinstance(value, dict) else value
            )
            constraint = (
                "the model is compressed already: must be one whose weights are wide, or mxfp4 with"
                " experts = "
            )
            check(not value, name, said, constraint + repr(FP8.name))
        for piece, _ in matrices:
            if piece.name not in self.stored or self.compressed_format(piece) is not None:
                tensor = next(
                    tensor for name, tensor in self.stored.items() if name.startswith(piece.name)
                )
                raise tensor.error("is compressed already: must be a wide matrix")


def check_expert_sizes_fit_blocks(config: ModelConfig, layout: ExpertLayout, experts: str) -> None:
    """Raise ValueError naming the field if the model has no experts, or if their sizes are not
    multiples of the format's block.
    """
    check(config.num_moe_layers > 0, "num_experts", config.num_experts, "no layer has experts")
    for name in ("hidden_size", "moe_intermediate_size"):
        fits = getattr(config, name) % layout.kind.block == 0
        constraint = f"must be a multiple of {layout.kind.block} with experts = {experts!r}"
        check(fits, name, getattr(config, name), constraint)


def compress_model(folder: Path, out: Path, experts: str) -> None:
    """Write the model of a Hugging Face folder with its experts in the format `experts`.

    Raises ValueError naming the option, field or tensor, before anything is written.
    """
    check(experts in LAYOUTS, "experts", experts, f"must be one of {', '.join(LAYOUTS)}")
    check_empty_or_new(out)
    fields = read_config(folder)
    config, family = model_config(fields), family_of(fields)
    layout = expert_layout(experts, family)
    stored = read_weight_headers(folder)
    words = (
        "its experts are fused, as transformers 5 holds them: write it anew first, with"
        " jmoe.save_pretrained"
    )
    check(not has_fused_experts(stored, family), "MODEL", str(folder), words)
    experts_up = layer_sources(family)["moe.experts.w_up"]
    words = "has all experts of a layer in one tensor, for which there is no compressed layout"
    check(not (experts_up.stacked and experts_up.transposed), "model_type", family, words)
    wanted = list_parameters(abstract_decoder(config)[2], config, family)
    check_tensors(wanted, stored, folder, config, np.float32)
    matrices = [(piece, parameter) for parameter in wanted for piece in parameter.pieces()]
    linear = {
        piece.name.removesuffix(".weight")
        for piece, p in matrices
        if p.source.transposed and not p.experts
    }
    changed: JsonObject = {
        "quantization_config": layout.quantization_config(sorted(linear | {"lm_head"}))
    }
    if config.kv_lora_rank is not None:
        # multi-token-prediction layers are not written
        changed["num_nextn_predict_layers"] = 0
    fields_left = {name: value for name, value in fields.items() if name not in COMPRESSION_FIELDS}
    with TensorReader() as reader:
        source = _SourceModel(stored, reader)
        source.check_uncompressed(fields, matrices, experts)
        check_expert_sizes_fit_blocks(config, layout, experts)
        by_tensor = {
            source.first_tensor_name(piece): (piece, parameter) for piece, parameter in matrices
        }
        with creating_model_folder(out, folder) as partial_folder:
            tensors: list[NewTensor] = []
            for tensor in stored.values():  # in file order, so that reads are sequential
                if tensor.name not in by_tensor:
                    continue
                piece, parameter = by_tensor[tensor.name]
                if parameter.experts and len(parameter.matrix_shape) == 2:
                    tensors += _CompressedMatrix(source, piece, parameter, layout).new_tensors()
                else:
                    tensors.append(source.unchanged_copy(tensor))
            write_safetensors(partial_folder, tensors, MAX_SHARD_BYTES)
            replace_text_durably(
                partial_folder / "config.json", json.dumps(fields_left | changed, indent=2) + "\n"
            )


def main(arguments: list[str]) -> None:
    """Write the model that the command line names with compressed experts."""
    parser = argparse.ArgumentParser(
        prog="python -m jmoe.deploy.compress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder, or the output folder of a run"
    )
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        help="where the compressed model is written: no files yet",
    )
    parser.add_argument(
        "--experts",
        required=True,
        choices=tuple(LAYOUTS),
        help="the format of the experts' matrices",
    )
    options = parser.parse_args(arguments)
    say = partial(print, flush=True)
    check_empty_or_new(options.out)
    with hugging_face_folder(options.model, say, "MODEL") as folder:
        with status(f"writing {options.out}", say):
            compress_model(folder, options.out, options.experts)
        before, after = weight_bytes(folder), weight_bytes(options.out)
    say(
        f"{before / 1e6:,.1f} -> {after / 1e6:,.1f} MB of weights, experts in {options.experts}; in"
        f" {options.out}"
    )


if __name__ == "__main__":
    end_at_once_on_interrupt()
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"compress: {error}")
