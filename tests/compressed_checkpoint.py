"""Checkpoints with compressed matrices, and those whose float32 weights are what their values and
scales mean.

Numbers are drawn first and packed one by one, by the formats' definitions alone.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmoe.models.huggingface import model_config
from jmoe.models.pretrained import abstract_decoder
from jmoe.models.safetensors_io import NewTensor, write_safetensors
from jmoe.models.weights import list_parameters
from tests.model_configs import CHECKPOINTS

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
# what such checkpoints leave as it is
WIDE = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "moe.gate.", "bias")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# hidden size, expert's: for fp8 more than one block each way, the last with fewer weights
SIZES = {
    "fp8": (160, 136),
    "int4": (160, 96),
    "int4 in 128": (256, 128),
    "int8": (160, 96),
    "int8 by row": (160, 96),
}
SIZES |= {
    "fp8 of rows": (160, 136),
    "fp8 of matrices": (160, 136),
    "gptq": (160, 96),
    "awq": (160, 96),
    "nvfp4": (160, 96),
    "fp8 of powers": (160, 136),
    "fp8 of bfloat16": (160, 136),
    "mxfp4": (160, 96),
    "mxfp4 of experts": (160, 96),
}


def compressed_tensors(layout: str, **weights: Any) -> dict[str, Any]:
    """Return a `quantization_config` as compressed-tensors writes it."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
    }


QUANTIZATION = {
    "fp8": FP8,
    "fp8 of powers": FP8 | {"scale_fmt": "ue8m0"},
    "fp8 of bfloat16": FP8 | {"scale_fmt": "float"},  # Qwen3's
    "int4": compressed_tensors(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32
    ),
    "int4 in 128": compressed_tensors(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=128
    ),
    "int8": compressed_tensors(
        "pack-quantized", num_bits=8, type="int", strategy="group", group_size=32
    ),
    "int8 by row": compressed_tensors("int-quantized", num_bits=8, type="int", strategy="channel"),
    "fp8 of rows": compressed_tensors(
        "float-quantized", num_bits=8, type="float", strategy="channel"
    ),
    "fp8 of matrices": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "gptq": {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "mxfp4 of experts": FP8,  # with expert_dtype: fp4
    "mxfp4": compressed_tensors(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
    ),
}


def lengthen_rotary_factors(fields: dict[str, Any], times: int) -> dict[str, Any]:
    """Return the configuration with every factor of LongRoPE this many times in a row."""
    for group in ("rope_parameters", "rope_scaling"):
        for name in ("short_factor", "long_factor"):
            factors = (fields.get(group) or {}).get(name)
            if factors is not None:
                fields[group][name] = [factor for factor in factors for _ in range(times)]
    return fields


def write_compressed_checkpoint(
    kind: str, name: str, compressed: Path, wide: Path, sizes: tuple[int, int] | None = None
) -> None:
    """Write both, with random weights; name: the fixture with the rest of the configuration."""
    hidden, inner = sizes or SIZES[kind]
    changed = {"hidden_size": hidden, "moe_intermediate_size": inner, "intermediate_size": inner}
    fields = json.loads((CHECKPOINTS / name / "config.json").read_text())
    if "head_dim" not in fields:  # heads widen with the hidden size, and their rotation with them
        fields = lengthen_rotary_factors(fields, hidden // fields["hidden_size"])
    fields |= changed
    described = {"quantization_config": QUANTIZATION[kind]}
    if kind == "mxfp4 of experts":
        described["expert_dtype"] = "fp4"
    for folder, more in ((compressed, described), (wide, {})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields | more))
    rng, config = np.random.default_rng(0), model_config(fields)
    kept: dict[str, np.ndarray] = {}
    widened: dict[str, np.ndarray] = {}
    for parameter in list_parameters(abstract_decoder(config)[2], config, name):
        for piece in parameter.pieces():
            is_matrix = len(piece.shape) == 2
            if is_matrix and (kind.startswith("fp8") or ".experts." in piece.name):
                is_wide = any(word in piece.name for word in WIDE)
            else:
                is_wide = True
            if is_wide:
                values = rng.normal(1.0 if "norm" in piece.name else 0.0, 0.1, piece.shape).astype(
                    np.float32
                )
                kept[piece.name] = widened[piece.name] = values
                continue
            tensors, widened[piece.name] = _drawn(kind, piece.shape, rng)
            for suffix, tensor in tensors.items():
                at = piece.name if suffix[:1] in ("", "_") else piece.name.removesuffix("weight")
                kept[at + suffix] = tensor
    for folder, tensors in ((compressed, kept), (wide, widened)):
        made = [
            NewTensor(name, x.dtype, x.shape, partial(np.asarray, x)) for name, x in tensors.items()
        ]
        write_safetensors(folder, made, 1 << 30)


def _drawn(
    kind: str, shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return (tensors by the suffix of their name, the float32 matrix that they mean)."""
    rows, columns = shape
    if kind in ("fp8 of rows", "fp8 of matrices"):
        size = (rows, 1) if kind == "fp8 of rows" else (1,)
        scale = np.asarray(rng.uniform(0.002, 0.004, size), np.float32)
        values = (30 * rng.normal(size=shape)).astype(jnp.float8_e4m3fn)
        return {"": values, "_scale": scale}, values.astype(np.float32) * scale
    if kind in ("gptq", "awq"):
        return _drawn_by_input(kind, shape, rng)
    if kind == "nvfp4":
        codes = rng.integers(0, 16, shape)
        scales = rng.uniform(1, 300, (rows, columns // 16)).astype(jnp.float8_e4m3fn)
        whole = np.float32(3e-4)
        packed = _packed(codes, 4).view(np.uint8).reshape(rows, -1)
        signed = np.array([*E2M1, *(-x for x in E2M1)], np.float32)[codes]
        wide = signed * np.repeat(scales.astype(np.float32) * whole, 16, axis=1)
        return {"": packed, "_scale": scales, "_scale_2": np.array([whole])}, wide
    if kind.startswith("fp8"):
        stored = scales = rng.uniform(0.002, 0.004, (-(-rows // 128), -(-columns // 128))).astype(
            np.float32
        )
        if kind == "fp8 of powers":
            stored = np.exp2(np.round(np.log2(scales))).astype(jnp.float8_e8m0fnu)
            scales = stored.astype(np.float32)
        if kind == "fp8 of bfloat16":
            stored = scales.astype(jnp.bfloat16)
            scales = stored.astype(np.float32)
        values = (30 * rng.normal(size=shape)).astype(jnp.float8_e4m3fn)
        factors = np.array(
            [[scales[n // 128, k // 128] for k in range(columns)] for n in range(rows)]
        )
        return {"": values, "_scale_inv": stored}, (values.astype(np.float32) * factors).astype(
            np.float32
        )
    if kind.startswith("mxfp4"):
        codes = rng.integers(0, 16, shape)
        powers = rng.integers(119, 123, (rows, columns // 32)).astype(np.uint8)
        signed = np.array([*E2M1, *(-x for x in E2M1)], np.float32)[codes]
        packed = _packed(codes, 4).view(np.uint8).reshape(rows, -1)
        tensors = {"_packed": packed, "_scale": powers}
        if kind == "mxfp4 of experts":
            tensors = {"": packed.view(np.int8), "scale": powers.view(jnp.float8_e8m0fnu)}
        return tensors, (
            signed * 2.0 ** (np.repeat(powers, 32, axis=1).astype(np.float64) - 127)
        ).astype(np.float32)
    bits = 4 if kind.startswith("int4") else 8
    group = {"int4 in 128": 128, "int8 by row": columns}.get(kind, 32)
    largest = 0.8 / 2**bits
    scales = rng.uniform(largest / 2, largest, (rows, columns // group)).astype(jnp.bfloat16)
    values = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape)
    wide = values * np.repeat(scales.astype(np.float32), group, axis=1)
    if kind == "int8 by row":
        return {"": values.astype(np.int8), "_scale": scales}, wide.astype(np.float32)
    packed = _packed(values + 2 ** (bits - 1), bits)
    return {"_packed": packed, "_scale": scales, "_shape": np.array(shape, np.int64)}, wide.astype(
        np.float32
    )


def _drawn_by_input(
    kind: str, shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """GPTQ in 8 bits with inputs out of order, or AWQ: integers [K, N] in groups of 32 inputs."""
    outputs, inputs = shape
    bits = 8 if kind == "gptq" else 4
    groups = np.arange(inputs) // 32
    if kind == "gptq":
        rng.shuffle(groups)
    codes = rng.integers(0, 2**bits, (inputs, outputs))
    zeros = rng.integers(1, 2**bits, (inputs // 32, outputs))
    scales = rng.uniform(0.01, 0.02, zeros.shape).astype(np.float16)
    wide = ((codes - zeros[groups]).astype(np.float32) * scales[groups].astype(np.float32)).T
    if kind == "gptq":
        words = np.ascontiguousarray(_packed(codes.T, bits).T)
        tensors = {"qweight": words, "qzeros": _packed(zeros - 1, bits)}
        return tensors | {"scales": scales, "g_idx": groups.astype(np.int32)}, wide
    # nibble i of a word holds column (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    columns = np.arange(outputs).reshape(-1, 8)[:, order].reshape(-1)
    tensors = {"qweight": _packed(codes[:, columns], 4), "qzeros": _packed(zeros[:, columns], 4)}
    return tensors | {"scales": scales}, wide


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return int32 words of a row's unsigned codes, the first in the lowest bits."""
    words = np.zeros((codes.shape[0], codes.shape[1] * bits // 32), np.uint32)
    for column in range(codes.shape[1]):
        word, place = divmod(column * bits, 32)
        words[:, word] |= codes[:, column].astype(np.uint32) << place
    return words.view(np.int32)
