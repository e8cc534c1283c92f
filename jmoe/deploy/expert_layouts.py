"""Layouts of compressed experts that transformers and vLLM load: the tensors of a matrix, and the
field of config.json that describes them.

`compress.py` writes these layouts, `jmoe/models/stored_formats.py` reads them and documents the
order of values in bytes, and `kernels_pallas/compressed.py` computes the values, as it also does
when an engine compresses experts while loading.

Legend: N outputs, K inputs of a matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jmoe.config import check
from kernels_pallas.compressed import BLOCK, FP8, INT4, INT8, MXFP4, compress

BFLOAT16, E4M3 = np.dtype(jnp.bfloat16), np.dtype(jnp.float8_e4m3fn)
UINT8, INT32, INT64 = np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.int64)
# (N outputs, K inputs) of a matrix -> {suffix of a tensor's name: (shape, dtype)}
Fields = Callable[[int, int], dict[str, tuple[tuple[int, ...], np.dtype[Any]]]]


@dataclass(frozen=True)
class ExpertLayout:
    """A way to store an expert's matrix in several tensors.

    multiple: the number of inputs must be a multiple of it. fields: the tensors. encode: returns
    the tensors' contents for w [K, N], in the order of `fields` but without their shapes.
    described: the `quantization_config`, without the list of uncompressed modules. ignore: the
    field that holds this list.
    """

    multiple: int
    fields: Fields
    encode: Callable[[NDArray[Any]], Sequence[NDArray[Any]]]
    described: dict[str, Any] = field(hash=False)
    ignore: str

    def tensors(self, w_KN: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return {suffix of a tensor's name: contents} for a matrix."""
        inputs, outputs = w_KN.shape
        wanted = self.fields(outputs, inputs).items()
        return {
            end: part.reshape(shape)
            for (end, (shape, _)), part in zip(wanted, self.encode(w_KN), strict=True)
        }

    def quantization(self, wide_modules: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a model whose linear modules `wide_modules` are not
        compressed.
        """
        return self.described | {self.ignore: list(wide_modules)}


def _mxfp4(w_KN: NDArray[Any]) -> Sequence[NDArray[Any]]:
    values, scales = compress(w_KN, MXFP4)
    return values.T, scales.T


def _int4(w_KN: NDArray[Any]) -> Sequence[NDArray[Any]]:
    values, scales = compress(w_KN, INT4)
    # consecutive bytes form little-endian words
    words = np.ascontiguousarray(values.T).view(INT32)
    return words, scales.T.view(BFLOAT16), np.array(w_KN.shape[::-1], INT64)


def _int8(w_KN: NDArray[Any]) -> Sequence[NDArray[Any]]:
    values, scales = compress(w_KN, INT8)
    words = np.ascontiguousarray(values.view(UINT8).T ^ 128).view(INT32)  # this layout adds 128
    return words, scales.T.view(BFLOAT16), np.array(w_KN.shape[::-1], INT64)


def _fp8(w_KN: NDArray[Any]) -> Sequence[NDArray[Any]]:
    values, scales = compress(w_KN, FP8)
    return values.T.view(E4M3), scales.T[:: FP8.block]


def _compressed_tensors(layout: str, **weights: Any) -> dict[str, Any]:
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


_GROUPS: dict[str, Any] = {"strategy": "group", "group_size": BLOCK}
LAYOUTS = {
    "mxfp4": ExpertLayout(
        BLOCK,
        lambda n, k: {"_packed": ((n, k // 2), UINT8), "_scale": ((n, k // BLOCK), UINT8)},
        _mxfp4,
        _compressed_tensors(
            "mxfp4-pack-quantized", num_bits=4, type="float", scale_dtype="torch.uint8", **_GROUPS
        ),
        "ignore",
    ),
    "int4": ExpertLayout(
        BLOCK,
        lambda n, k: {
            "_packed": ((n, k // 8), INT32),
            "_scale": ((n, k // BLOCK), BFLOAT16),
            "_shape": ((2,), INT64),
        },
        _int4,
        _compressed_tensors("pack-quantized", num_bits=4, type="int", **_GROUPS),
        "ignore",
    ),
    "int8": ExpertLayout(
        BLOCK,
        lambda n, k: {
            "_packed": ((n, k // 4), INT32),
            "_scale": ((n, k // BLOCK), BFLOAT16),
            "_shape": ((2,), INT64),
        },
        _int8,
        _compressed_tensors("pack-quantized", num_bits=8, type="int", **_GROUPS),
        "ignore",
    ),
    "fp8": ExpertLayout(
        FP8.block,
        lambda n, k: {
            "": ((n, k), E4M3),
            "_scale_inv": ((n // FP8.block, k // FP8.block), np.dtype(np.float32)),
        },
        _fp8,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8.block, FP8.block],
        },
        "modules_to_not_convert",
    ),
}
GPT_OSS = ExpertLayout(
    BLOCK,
    lambda n, k: {
        "_blocks": ((n, k // BLOCK, BLOCK // 2), UINT8),
        "_scales": ((n, k // BLOCK), UINT8),
    },
    _mxfp4,
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
    check(
        experts == "mxfp4",
        "experts",
        experts,
        "must be mxfp4 with model_type = 'gpt_oss', whose layout is its own",
    )
    return GPT_OSS
