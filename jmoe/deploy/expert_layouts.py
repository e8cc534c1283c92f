"""Layouts of compressed experts that transformers and vLLM load: the tensors of a matrix, and the
field of config.json that describes them.

`compress.py` writes these layouts, `jmoe/models/stored_formats.py` reads them and documents the
order of values in bytes, and `kernels_pallas/compressed.py` computes the values, as it also does
when an engine compresses experts while loading.

Legend: N outputs, K inputs of a matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from jmoe.config import check
from jmoe.types import Json, JsonObject
from kernels_pallas.compressed import compress
from kernels_pallas.formats import FP8, INT4, INT8, MXFP4, Format

BFLOAT16, E4M3 = np.dtype(jnp.bfloat16), np.dtype(jnp.float8_e4m3fn)
UINT8, INT32, INT64 = np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.int64)
# (N outputs, K inputs) of a matrix -> {suffix of a tensor's name: (shape, dtype)}
Fields = Callable[[int, int], dict[str, tuple[tuple[int, ...], np.dtype]]]
# (values, scales) as `compress` returns them -> contents of the tensors
Arrange = Callable[[np.ndarray, np.ndarray], Sequence[np.ndarray]]


@dataclass(frozen=True)
class ExpertLayout:
    """A way to store an expert's matrix in several tensors.

    kind: the format of the values; the number of inputs must be a multiple of its block. fields: a
    function of (outputs, inputs) that returns each tensor's suffix, shape and dtype. arrange: a
    function of the compressed values and scales that returns the tensors' contents in the order of
    `fields`; `compress_matrix` gives them the shapes of `fields`. config: the
    `quantization_config`, without the list of uncompressed modules. ignore: the field that holds
    this list.
    """

    kind: Format
    fields: Fields
    arrange: Arrange
    config: JsonObject = field(hash=False)
    ignore: str

    def compress_matrix(self, w_KN: np.ndarray) -> dict[str, np.ndarray]:
        """Return {suffix of a tensor's name: contents} for a matrix."""
        inputs, outputs = w_KN.shape
        wanted = self.fields(outputs, inputs).items()
        parts = self.arrange(*compress(w_KN, self.kind))
        return {
            end: part.reshape(shape) for (end, (shape, _)), part in zip(wanted, parts, strict=True)
        }

    def quantization_config(self, wide_modules: Sequence[str]) -> JsonObject:
        """Return the `quantization_config` of a model whose linear modules `wide_modules` are not
        compressed.
        """
        return self.config | {self.ignore: list(wide_modules)}


def _arrange_mxfp4(values: np.ndarray, scales: np.ndarray) -> Sequence[np.ndarray]:
    return values.T, scales.T


def _arrange_int4(values: np.ndarray, scales: np.ndarray) -> Sequence[np.ndarray]:
    # consecutive bytes form little-endian words
    words = np.ascontiguousarray(values.T).view(INT32)
    return words, scales.T.view(BFLOAT16), _matrix_shape_tensor(values, INT4)


def _arrange_int8(values: np.ndarray, scales: np.ndarray) -> Sequence[np.ndarray]:
    words = np.ascontiguousarray(values.view(UINT8).T ^ 128).view(INT32)  # this layout adds 128
    return words, scales.T.view(BFLOAT16), _matrix_shape_tensor(values, INT8)


def _arrange_fp8(values: np.ndarray, scales: np.ndarray) -> Sequence[np.ndarray]:
    return values.T.view(E4M3), scales.T[:: FP8.block]


def _matrix_shape_tensor(values: np.ndarray, kind: Format) -> np.ndarray:
    """Return the tensor with the shape [N, K] of the matrix."""
    return np.array([values.shape[1], values.shape[0] * kind.per_byte], INT64)


def _compressed_tensors_config(layout: str, **weights: Json) -> JsonObject:
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }


_GROUPS: JsonObject = {"strategy": "group", "group_size": MXFP4.block}


def _packed_integer_fields(kind: Format) -> Fields:
    """Return `ExpertLayout.fields` of a layout that packs integers into 32-bit words."""
    per_word = 4 * kind.per_byte
    return lambda n, k: {
        "_packed": ((n, k // per_word), INT32),
        "_scale": ((n, k // kind.block), BFLOAT16),
        "_shape": ((2,), INT64),
    }


_LAYOUTS = (
    ExpertLayout(
        MXFP4,
        lambda n, k: {"_packed": ((n, k // 2), UINT8), "_scale": ((n, k // MXFP4.block), UINT8)},
        _arrange_mxfp4,
        _compressed_tensors_config(
            "mxfp4-pack-quantized", num_bits=4, type="float", scale_dtype="torch.uint8", **_GROUPS
        ),
        "ignore",
    ),
    ExpertLayout(
        INT4,
        _packed_integer_fields(INT4),
        _arrange_int4,
        _compressed_tensors_config("pack-quantized", num_bits=4, type="int", **_GROUPS),
        "ignore",
    ),
    ExpertLayout(
        INT8,
        _packed_integer_fields(INT8),
        _arrange_int8,
        _compressed_tensors_config("pack-quantized", num_bits=8, type="int", **_GROUPS),
        "ignore",
    ),
    ExpertLayout(
        FP8,
        lambda n, k: {
            "": ((n, k), E4M3),
            "_scale_inv": ((n // FP8.block, k // FP8.block), np.dtype(np.float32)),
        },
        _arrange_fp8,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8.block, FP8.block],
        },
        "modules_to_not_convert",
    ),
)
LAYOUTS: dict[str, ExpertLayout] = {layout.kind.name: layout for layout in _LAYOUTS}
GPT_OSS = ExpertLayout(
    MXFP4,
    lambda n, k: {
        "_blocks": ((n, k // MXFP4.block, MXFP4.block // 2), UINT8),
        "_scales": ((n, k // MXFP4.block), UINT8),
    },
    _arrange_mxfp4,
    {"quant_method": "mxfp4"},
    "modules_to_not_convert",
)


def expert_layout(experts: str, family: str) -> ExpertLayout:
    """Return the layout of the format `experts` for a model family. Raises ValueError if there is
    none.
    """
    check(experts in LAYOUTS, "experts", experts, f"must be one of {', '.join(LAYOUTS)}")
    if family != "gpt_oss":
        return LAYOUTS[experts]
    own = GPT_OSS.kind.name
    words = f"must be {own} with model_type = 'gpt_oss', whose layout is its own"
    check(experts == own, "experts", experts, words)
    return GPT_OSS
