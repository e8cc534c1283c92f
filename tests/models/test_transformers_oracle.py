"""jmoe beside transformers 5, where that is installed: every field of its configuration classes,
logits, tokens.

`benchmarks/peers/setup.py transformers FOLDER` makes an environment with it; jmoe and what `pytest`
needs go there too:

    FOLDER/bin/python -m pip install -e '.[dev]' && FOLDER/bin/python -m pytest
    tests/models/test_transformers_oracle.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.models import families
from jmoe.models.config_fields import CONFIG_FIELDS
from jmoe.models.families.outcomes import HARMLESS, HONOURED, TrainingOnlyField
from jmoe.models.tokenizer_file import open_tokenizer
from tests.checkpoint_variants import Tensors, fused, read_tensors, with_head, write_variant
from tests.compressed_checkpoint import write_compressed_checkpoint
from tests.model_configs import CHECKPOINTS
from tests.models.test_config_fields import EXPERTS, read
from tests.word_tokenizers import BOS, LONG, word_tokenizer, write_word_tokenizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", "5", reason="needs transformers 5")
    torch = pytest.importorskip("torch")
    from tests.roundings import TOLERANCE, nudged, tolerance_of

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = tuple(name for name in families.FAMILIES if name not in ("gpt_moe", "bailing_moe"))
FUSED_FAMILIES = tuple(name for name in FAMILIES if families.FAMILIES[name].fused_tensors)
# Granite's experts are published stacked, and nowhere in FP8
FP8_FAMILIES = tuple(name for name in FUSED_FAMILIES if name != "granitemoe")
TOKENS = np.random.default_rng(0).integers(3, 64, (2, 40))
# Of transformers' base class or of published files: no family's class has them.
ELSEWHERE = {
    *"""model_type name_or_path _name_or_path torch_dtype auto_map num_labels output_attentions tie_last_hidden_states
    attn_implementation experts_implementation per_layer_config quantization_config expert_dtype rope_scaling rope_theta
    original_max_position_embeddings partial_rotary_factor head_dim sliding_window layer_types max_window_layers
    qk_head_dim scoring_func topk_method moe_layer_freq ep_size aux_loss_alpha seq_aux initial_context_length
    experts_per_token attention_dropout pretraining_tp num_nextn_predict_layers num_mtp_layers num_mtp_modules use_mtp
    mtp_transformer_layers use_routing_bias use_qk_norm qk_norm_type rotary_dim attn_type_list
    shared_intermediate_size use_cla mlp_bias moe_layer_num_skipped num_shared_expert
    moe_intermediate_size full_attention_interval attn_output_gate mamba_ssm_dtype
    mtp_num_hidden_layers mtp_use_dedicated_embeddings for_llm_compressor""".split()  # noqa: SIM905
}


# ---- the table of fields


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_has_every_field_of_the_class(family: str) -> None:
    """Under all its names, those that the modelling code reads too; and no field that nobody
    has.
    """
    kind = transformers.CONFIG_MAPPING[family]
    fields = {field.name for field in dataclasses.fields(kind)} | kind.attribute_map.keys()
    fields |= set(kind.attribute_map.values())
    (modeling,) = Path(inspect.getfile(kind)).parent.glob("modeling_*.py")
    # a file that has vision models too reads their fields under the same name
    code = "" if family.endswith("_text") else modeling.read_text()
    read = set(re.findall(r"\bconfig\.([a-z]\w*)|getattr\((?:self\.)?config, \"(\w+)\"", code))
    fields |= {one or other for one, other in read} - {"get_text_config"}
    assert fields - CONFIG_FIELDS[family].keys() == set()
    # Qwen3-Next has a size of dense layers, which share its reader
    elsewhere = ELSEWHERE | ({"intermediate_size"} if family == "qwen3_5_moe_text" else set())
    assert CONFIG_FIELDS[family].keys() - fields - elsewhere == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_out_is_the_class_s_default_or_named(family: str) -> None:
    """But for `num_key_value_heads`: where it is left out, the shapes of the tensors say whether
    it is all heads.
    """
    fields = json.loads((CHECKPOINTS / family / "config.json").read_text())
    for field in dataclasses.fields(transformers.CONFIG_MAPPING[family]):
        if CONFIG_FIELDS[family][field.name] != HONOURED or field.name == "num_key_value_heads":
            continue
        aliases = EXPERTS if field.name in EXPERTS else (field.name,)
        absent = read({name: value for name, value in fields.items() if name not in aliases})
        if not (isinstance(absent, str) and absent.startswith(f"{field.name} = None: must be")):
            assert read(fields | dict.fromkeys(aliases) | {field.name: field.default}) == absent, (
                field.name
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_harmless_fields_change_no_logits(family: str, tmp_path: Path) -> None:
    """Those that have another value of their own kind; the rest are names and descriptions."""
    others: dict[str, Any] = {
        "bos_token_id": 3,
        "pad_token_id": 5,
        "use_cache": False,
        "output_hidden_states": True,
        "output_router_logits": True,
        "chunk_size_feed_forward": 4,
        "max_window_layers": 0,
        "num_mtp_layers": 1,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 2,
        "eod_token_id": 5,
        "sep_token_id": 5,
        "attention_dropout": 0.5,
        "router_jitter_noise": 0.5,
        "input_jitter_noise": 0.5,
        "tie_last_hidden_states": False,
        "hidden_act": "gelu",
        "ep_size": 4,
        "aux_loss_alpha": 0.5,
        "seq_aux": False,
        "qk_head_dim": 3,
        "experts_per_token": 1,
        "initial_context_length": 8,
        "layer_types": ["sliding_attention"] * 4,
    }
    harmless = {
        name
        for name, outcome in CONFIG_FIELDS[family].items()
        if outcome == HARMLESS or isinstance(outcome, TrainingOnlyField)
    }
    expected = logits_of(load_model(CHECKPOINTS / family))
    for name in sorted(harmless & others.keys()):
        folder = write_variant(CHECKPOINTS / family, tmp_path / name, **{name: others[name]})
        np.testing.assert_array_equal(logits_of(load_model(folder)), expected, name)


# ---- logits


def load_model(folder: Path, **options: Any) -> Any:
    """Return transformers' model of a folder, in float32; every tensor must have its place."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        **options,
    )
    assert not any(info.values()), info
    return model.eval()


def logits_of(model: Any) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.from_numpy(TOKENS), use_cache=False).logits.numpy()
    return logits


def check_logits(
    folder: Path,
    record: Callable[[str, Any], None],
    reference: Path | None = None,
    **options: Any,
) -> None:
    """Compare jmoe's logits of a folder with transformers' of the same folder, or of another.

    Where they are apart by more than `TOLERANCE`, it counts what a rounding of the weights moves.
    """
    found = np.asarray(jmoe.load_pretrained(folder, dtype="float32")(TOKENS.astype(np.int32)))
    model = load_model(reference or folder, **options)
    expected, tolerance = logits_of(model), TOLERANCE
    difference = float(np.abs(found - expected).max())
    if difference >= TOLERANCE:
        with nudged(model):
            tolerance = tolerance_of(float(np.abs(logits_of(model) - expected).max()))
    record("largest difference of a logit", difference)
    record("tolerance of a logit", tolerance)
    assert difference < tolerance


def same(tensors: Tensors) -> Tensors:
    return tensors


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
OLD = {"rope_parameters": ..., "rope_theta": 500.0}
ROPE = {"rope_parameters", "rope_scaling"}
VARIANTS: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any]]] = {
    "as stored": (same, {}),
    "a head beside a tied embedding": (with_head, {"tie_word_embeddings": True}),
    "YaRN in rope_parameters": (same, {"rope_parameters": YARN | {"rope_theta": 500.0}}),
    "YaRN in rope_scaling": (same, OLD | {"rope_scaling": YARN}),
    "YaRN in rope_scaling, beside rope_parameters": (
        same,
        {"rope_scaling": YARN, "rope_parameters": PLAIN, "rope_theta": 500.0},
    ),
    "YaRN, original positions beside it": (
        same,
        OLD | {"rope_scaling": YARN, "original_max_position_embeddings": 64},
    ),
    "linear in rope_parameters": (
        same,
        {"rope_parameters": PLAIN | {"rope_type": "linear", "factor": 3.0}},
    ),
    "linear in rope_scaling": (same, OLD | {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "dynamic, of sequences beyond the model's positions": (
        same,
        {
            "rope_parameters": PLAIN | {"rope_type": "dynamic", "factor": 2.0},
            "max_position_embeddings": 16,
        },
    ),
    "llama3 in rope_parameters": (same, {"rope_parameters": PLAIN | LLAMA3}),
    "llama3 in rope_scaling": (same, OLD | {"rope_scaling": LLAMA3}),
}


# Of scaled positions Phi has LongRoPE alone
CASES = [
    (family, variant)
    for family in FAMILIES
    for variant, (_, fields) in VARIANTS.items()
    if family != "phimoe" or not ROPE & fields.keys()
]


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_logits(
    family: str, variant: str, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    change, fields = VARIANTS[variant]
    if family == "mixtral":
        fields = fields | {"head_dim": 8}  # transformers' YaRN fails where this is null
    check_logits(
        write_variant(CHECKPOINTS / family, tmp_path / "model", change, **fields), record_property
    )


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_logits_of_fused_experts(
    family: str, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    """As transformers itself writes them, which are the tensors that `fused` makes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / family)
    model.save_pretrained(tmp_path / "theirs", save_original_format=False)
    ours = write_variant(CHECKPOINTS / family, tmp_path / "ours", partial(fused, family=family))
    check_logits(tmp_path / "theirs", record_property)
    one, other = (
        jmoe.load_pretrained(folder)(TOKENS.astype(np.int32))
        for folder in (tmp_path / "theirs", ours)
    )
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["fp8", "fp8 of bfloat16"])
@pytest.mark.parametrize("family", FP8_FAMILIES)
def test_logits_of_fp8(
    family: str, kind: str, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    """Scales in float32 and in bfloat16; transformers makes weights wide, as on a CPU it must."""
    write_compressed_checkpoint(
        kind, family, tmp_path / "model", tmp_path / "wide", sizes=(256, 128)
    )
    wide = transformers.FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True)
    check_logits(tmp_path / "model", record_property, quantization_config=wide)


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("family", FP8_FAMILIES)
def test_logits_of_fused_fp8_experts(
    family: str, scale_fmt: str, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    """Experts that transformers itself fuses, quantizes and decompresses.

    Its `from_pretrained` leaves the scales of such a folder out on a CPU, so its conversions are
    called one by one.
    """
    write_compressed_checkpoint(
        "fp8", family, tmp_path / "one", tmp_path / "wide", sizes=(256, 128)
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "wide", dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    described = transformers.FineGrainedFP8Config(scale_fmt=scale_fmt)
    quantize = transformers.quantizers.AutoHfQuantizer.from_config(described).get_quantize_ops()

    def change(tensors: Tensors, *, wide: bool) -> Tensors:
        made: Tensors = {}
        for name, array in tensors.items():
            if ".experts." not in name or array.ndim != 3:
                made[name] = array
                continue
            parts = quantize.convert({name: torch.from_numpy(array.copy())})
            if wide:
                [parts[name]] = quantize.reverse_op.convert(parts)[name]
                parts = {name: parts[name].to(torch.float32)}
            made |= {part: numpy_of(tensor) for part, tensor in parts.items()}
        return made

    fields = {"quantization_config": json.loads(json.dumps(described.to_dict()))}
    folder = write_variant(
        tmp_path / "fused", tmp_path / "model", partial(change, wide=False), **fields
    )
    assert any(name.endswith("down_proj_scale_inv") for name in read_tensors(folder))
    reference = write_variant(
        tmp_path / "fused", tmp_path / "reference", partial(change, wide=True)
    )
    check_logits(folder, record_property, reference)


def numpy_of(tensor: Any) -> np.ndarray:
    """Return a torch tensor of an 8-bit or 32-bit dtype as NumPy's."""
    dtypes = {"float8_e4m3fn": jnp.float8_e4m3fn, "float8_e8m0fnu": jnp.float8_e8m0fnu}
    eight = dtypes.get(str(tensor.dtype).removeprefix("torch."))
    array: np.ndarray = (tensor if eight is None else tensor.view(torch.uint8)).numpy()
    return array if eight is None else array.view(eight)


# ---- tokens


@pytest.mark.parametrize("begins", [False, True])
def test_tokens(begins: bool, tmp_path: Path) -> None:
    """Texts are whole and unpadded, and begin as tokenizer.json says. (`add_bos_token` is of
    transformers 4.)
    """
    end = {"content": "<|im_end|>", "normalized": False, "special": True}
    numbered = {"8": end, "7": end | {"content": "<tool>", "special": False}}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "added_tokens_decoder": numbered,
    }
    file = write_word_tokenizer(tmp_path, **settings)
    if begins:
        tokenizer = word_tokenizer()
        template = transformers.tokenization_utils_tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
        )
        tokenizer.post_processor = template
        tokenizer.enable_truncation(max_length=8)
        tokenizer.enable_padding(pad_id=0, pad_token="<unk>")
        tokenizer.save(str(file))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = open_tokenizer(file)
    for text in ("hello", LONG, "", "hello<|im_end|> <tool> <s>"):
        assert ours.encode(text).ids == theirs(text)["input_ids"]
        assert (
            ours.encode(text, add_special_tokens=False).ids
            == theirs(text, add_special_tokens=False)["input_ids"]
        )
    batch = ["hello", "hello world this"]
    assert [one.ids for one in ours.encode_batch(batch)] == theirs(batch)["input_ids"]
