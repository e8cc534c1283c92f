"""Which compressed format a checkpoint's matrices are stored in: by their tensors, and by the
`quantization_config` of `config.json`.

`stored_formats.py` and `packed_formats.py` read the formats.
"""

from jmoe.config import check
from jmoe.models.gguf.formats import GgufBlocks, GgufTensor
from jmoe.models.packed_formats import Awq, Gptq, Nvfp4, PackedNvfp4
from jmoe.models.stored_formats import (
    Fp4Experts,
    Fp8Blocks,
    Fp8Scaled,
    Int8Values,
    PackedIntegers,
    PackedMxfp4,
    Stored,
    StoredFormat,
)
from jmoe.types import Json, JsonObject
from kernels_pallas.formats import FP8

COMPRESSION_FIELDS = ("quantization_config", "expert_dtype")  # of a `config.json`
MODELOPT_FILE = "hf_quant_config.json"  # describes the weights where config.json does not
METHODS = ("fp8", "compressed-tensors", "gptq", "awq", "modelopt")
# compressed-tensors' formats that `format_of_matrix` reads: (type, numbers of bits) of the weights
_COMPRESSED_TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "pack-quantized": ("int", (4, 8)),
    "int-quantized": ("int", (8,)),
    "float-quantized": ("float", (8,)),
    "mxfp4-pack-quantized": ("float", (4,)),
    "nvfp4-pack-quantized": ("float", (4,)),
}
# supported values of a compressed-tensors configuration's fields
_WEIGHT_FIELDS: dict[str, tuple[Json, ...]] = {
    "symmetric": (True,),
    "dynamic": (False, None),
    # "static" and "weight" are synonyms, and store columns in their original order
    "actorder": (None, False, "static", "weight"),
    "zp_dtype": (None,),
    "block_structure": (None,),
    "strategy": ("group", "channel"),
}
# and of those that differ for a format
_FORMAT_FIELDS: dict[str, dict[str, tuple[Json, ...]]] = {
    "float-quantized": {
        "strategy": ("channel", "tensor", "block"),
        "block_structure": (None, [FP8.block] * 2),
    },
    "nvfp4-pack-quantized": {
        "strategy": ("tensor_group",),
        "group_size": (16,),
        "zp_dtype": (None, "torch.float8_e4m3fn"),
    },
}
# Fields by which a compressed-tensors model changes more than its weights, with the values that
# disable each.
_OTHER_CHANGES: dict[str, tuple[Json, ...]] = {
    "transform_config": (None, {}, {"config_groups": {}}),
    "sparsity_config": (None, {}),
    "moe_sparsity_config": (None, {}),
}
# The cache's format in FP8: fields of ModelOpt, and of compressed-tensors and ModelOpt. An engine's
# cache has the compute dtype, which is more exact, unless `EngineConfig.kv_cache_dtype` says fp8.
_CACHE_FIELDS = ("kv_cache_quant_algo", "kv_cache_scheme")
_CACHE_SCHEME: JsonObject = {"num_bits": 8, "type": "float", "symmetric": True}
# supported values of the fields of other methods; None where a field may be missing
_METHOD_FIELDS: dict[str, dict[str, tuple[Json, ...]]] = {
    "fp8": {
        "weight_block_size": ([FP8.block] * 2, None),
        "fmt": ("e4m3", "float8_e4m3fn", None),  # of one format; MiniMax-M2 has the second
        "scale_fmt": ("ue8m0", "float", None),
        "expert_dtype": ("fp8", None),
    },
    # gptq_v2 stores zero points without the offset of 1
    "gptq": {
        "bits": (4, 8),
        "checkpoint_format": ("gptq", None),
        "is_marlin_format": (False, None),
    },
    "awq": {"bits": (4,), "version": ("gemm", "GEMM", None)},
    "modelopt": {"quant_algo": ("NVFP4", "FP8"), "group_size": (16, None)},
}
_INSTEAD = {
    "bitsandbytes": "; its packing is read by its own kernels: load the model in transformers, call"
    " dequantize() and save_pretrained(), and compress it with python -m jmoe.deploy.compress",
}


def format_of_matrix(stored: Stored, name: str, shape: tuple[int, ...]) -> StoredFormat | None:
    """Return the compressed format in which a matrix is stored.

    None if it is stored as a single tensor of plain numbers, or is missing.
    """
    if name in stored:
        return _format_of_tensor(stored, name)
    packed = stored.get(name + "_packed")
    if packed is None:
        return _gptq_or_awq_format(stored, name, shape)
    if packed.dtype == "U8":
        return PackedNvfp4() if name + "_global_scale" in stored else PackedMxfp4()
    is_wider = len(packed.shape) == len(shape) == 2 and packed.shape[1] == -(-shape[1] // 4)
    return PackedIntegers(8 if is_wider else 4)


def _format_of_tensor(stored: Stored, name: str) -> StoredFormat | None:
    """Return the format of a matrix with a tensor of its own name, None for plain numbers."""
    if isinstance(tensor := stored[name], GgufTensor):
        return GgufBlocks(tensor.quant)
    if all(part in stored for part in Fp4Experts().tensor_names(name)):
        return Fp4Experts()
    match stored[name].dtype:
        case "F8_E4M3":
            is_scaled = name + "_scale" in stored and name + "_scale_inv" not in stored
            return Fp8Scaled() if is_scaled else Fp8Blocks()
        case "I8":
            return Int8Values()
        case "U8" if name + "_scale" in stored:
            return Nvfp4()
    return None


def _gptq_or_awq_format(stored: Stored, name: str, shape: tuple[int, ...]) -> StoredFormat | None:
    """Return GPTQ or AWQ, whichever has words of this shape; None if the matrix is not there."""
    words = stored.get(name.removesuffix("weight") + "qweight")
    if words is None or not name.endswith(".weight") or len(shape) != 2:
        return None
    if words.shape == (shape[1], shape[0] // 8):
        return Awq()
    return Gptq(8 if words.shape == (shape[1] // 4, shape[0]) else 4)


def announced_format(fields: JsonObject) -> StoredFormat | None:
    """Return the format in which a `config.json` says that its experts' matrices are stored.

    None for plain numbers, and for gpt-oss's MXFP4, whose tensors hold all experts.
    """
    if fields.get("expert_dtype") == "fp4":
        return Fp4Experts()
    quantization = fields.get("quantization_config") or {}
    match quantization.get("quant_method"):
        case "fp8":
            return Fp8Blocks() if quantization.get("weight_block_size") else Fp8Scaled()
        case "gptq":
            return Gptq(quantization.get("bits", 4))
        case "awq":
            return Awq()
        case "modelopt":
            return Nvfp4() if quantization.get("quant_algo") == "NVFP4" else Fp8Scaled()
        case "compressed-tensors":
            bits = [group["weights"]["num_bits"] for group in _config_groups(quantization)]
            return _format_of_compressed_tensors(quantization["format"], bits[0] if bits else 4)
    return None


def _format_of_compressed_tensors(layout: str, bits: int) -> StoredFormat:
    return {
        "pack-quantized": PackedIntegers(bits),
        "int-quantized": Int8Values(),
        "float-quantized": Fp8Scaled(),
        "mxfp4-pack-quantized": PackedMxfp4(),
        "nvfp4-pack-quantized": PackedNvfp4(),
    }[layout]


def announced_group_size(fields: JsonObject, num_inputs: int) -> int:
    """Return how many of a row's inputs share a scale of integers, by the `config.json`."""
    quantization = fields.get("quantization_config") or {}
    sizes = [(g.get("weights") or {}).get("group_size") for g in _config_groups(quantization)]
    size = next((s for s in [*sizes, quantization.get("group_size")] if s), num_inputs)
    return num_inputs if size < 0 else int(size)


def _config_groups(quantization: JsonObject) -> list[JsonObject]:
    return [group or {} for group in (quantization.get("config_groups") or {}).values()]


def check_quantization(fields: Json, kind: str, expert_dtype: Json = None) -> None:
    """Raise ValueError if jmoe cannot read a `quantization_config` or `expert_dtype`.

    Supported are the formats of `stored_formats.py` and `packed_formats.py`, and gpt-oss's MXFP4.
    """
    check(expert_dtype in (None, "fp4", "fp8"), "expert_dtype", expert_dtype, "must be fp4 or fp8")
    fields = fields if isinstance(fields, dict) or not fields else {"quant_method": fields}
    if expert_dtype is not None:
        goes = (fields or {}).get("quant_method", "fp8") == "fp8" and kind != "gpt_oss"
        check(
            goes,
            "expert_dtype",
            expert_dtype,
            "needs quantization_config.quant_method = 'fp8', or none",
        )
    if not fields:
        return
    method = fields.get("quant_method")
    known = ("mxfp4",) if kind == "gpt_oss" else METHODS
    prefix = "quantization_config."
    why = _INSTEAD.get(str(method), "")
    check(method in known, prefix + "quant_method", method, f"must be {' or '.join(known)}{why}")
    for name, allowed in _METHOD_FIELDS.get(str(method), {}).items():
        value = fields.get(name)
        check(value in allowed, prefix + name, value, f"must be {_join_with_or(allowed)}")
    if method == "compressed-tensors":
        _check_compressed_tensors(fields, prefix)
    for name in _CACHE_FIELDS:
        value = fields.get(name)
        words = "is not supported: must be FP8 with one symmetric scale, or null"
        check(not value or _is_fp8_cache(value), prefix + name, value, words)


def _is_fp8_cache(value: Json) -> bool:
    """Return whether a field of `_CACHE_FIELDS` asks for FP8, and nothing more."""
    if not isinstance(value, dict):
        return value == "FP8"
    said = {"symmetric": True} | value
    return all(said.get(name) == wanted for name, wanted in _CACHE_SCHEME.items())


def quantized_cache_note(fields: JsonObject, kv_cache_dtype: str = "auto") -> str:
    """Return a sentence on what an engine makes of a `config.json` that asks for a KV cache in FP8;
    "" if it asks for none.
    """
    quantization = fields.get("quantization_config") or {}
    for name in _CACHE_FIELDS:
        if value := quantization.get(name):
            what = "the KV cache is not quantized, it has the compute dtype; --kv-cache-dtype fp8"
            what += " quantizes it"
            if kv_cache_dtype == "fp8":
                what = "the KV cache is in FP8"
            return f"quantization_config.{name} = {value!r}: {what}"
    return ""


def _join_with_or(values: tuple[Json, ...]) -> str:
    return " or ".join("none" if value is None else str(value) for value in values)


def _check_compressed_tensors(fields: JsonObject, prefix: str) -> None:
    chosen, known = fields.get("format"), ", ".join(_COMPRESSED_TENSORS)
    check(str(chosen) in _COMPRESSED_TENSORS, prefix + "format", chosen, f"must be {known}")
    kind, usable = _COMPRESSED_TENSORS[str(chosen)]
    for field, harmless in _OTHER_CHANGES.items():
        value = fields.get(field)
        is_dense = (
            field == "sparsity_config"
            and isinstance(value, dict)
            and value.get("format") == "dense"
        )
        check(
            value in harmless or is_dense, prefix + field, value, "is not supported: must be null"
        )
    groups = fields.get("config_groups")
    check(isinstance(groups, dict), prefix + "config_groups", groups, "must be a table")
    assert isinstance(groups, dict)
    for name, group in groups.items():
        tables = group or {}, (group or {}).get("weights") if isinstance(group, dict) else None
        check(
            all(isinstance(table or {}, dict) for table in tables),
            f"{prefix}config_groups.{name}",
            group,
            "must be a table with a table of weights",
        )
        weights, at = (group or {}).get("weights") or {}, f"{prefix}config_groups.{name}.weights."
        own = (group or {}).get("format") or chosen
        check(
            own == chosen,
            f"{prefix}config_groups.{name}.format",
            own,
            f"must be format = {chosen!r}, or none",
        )
        bits, number = weights.get("num_bits"), weights.get("type", "int")
        known = f"must be {' or '.join(map(str, usable))} with format = {chosen!r}"
        check(bits in usable, at + "num_bits", bits, known)
        check(number == kind, at + "type", number, f"must be {kind!r}")
        for field, allowed in (_WEIGHT_FIELDS | _FORMAT_FIELDS.get(str(chosen), {})).items():
            value = weights.get(field, allowed[0])
            check(value in allowed, at + field, value, f"must be {' or '.join(map(str, allowed))}")
