"""Write a Mixtral or Qwen3-MoE folder as GGUF; run by the Python of transformers' environment.

    ENVIRONMENT/bin/python benchmarks/peers/to_gguf.py MODEL OUT.gguf bf16

The last argument is the format of all matrices: f32, bf16, q8_0, q5_1, q4_1 or q4_0. --dense gives
the matrices outside the experts another one. A tokenizer of any byte-level BPE is written as
GPT-2's: only speed is compared, on token ids.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

FORMATS = ("f32", "bf16", "q8_0", "q5_1", "q4_1", "q4_0")
ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("--dense", choices=FORMATS, help="default: that of the experts")
    return parser.parse_args()


def pairs_side_by_side(weight: Any, heads: int) -> Any:
    """Return a projection whose rotated rows are neighbours, not halves as at Hugging Face."""
    rows = weight.shape[0]
    return (
        weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def describe(writer: Any, config: dict[str, Any], experts: int, head_dim: int) -> None:
    """Write the model's sizes."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10000.0)
    writer.add_name(config["model_type"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Write the vocabulary and its merges."""
    added = tokenizer.get("added_tokens", [])
    names = {i: token for token, i in tokenizer["model"]["vocab"].items()} | {
        t["id"]: t["content"] for t in added
    }
    special = {t["id"] for t in added if t.get("special")}
    ids = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(i, f"[UNUSED{i}]") for i in ids])
    writer.add_token_types([3 if i in special else 1 if i in names else 5 for i in ids])
    writer.add_token_merges(
        [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    )
    writer.add_bos_token_id(config.get("bos_token_id") or 1)
    writer.add_eos_token_id(config.get("eos_token_id") or 2)
    writer.add_add_bos_token(False)


def main() -> None:
    a = parse()
    config = json.loads((a.model / "config.json").read_text())
    if config["model_type"] not in ARCHITECTURES:
        raise SystemExit(
            f"model_type = {config['model_type']!r}: must be one of {', '.join(ARCHITECTURES)}"
        )
    import gguf
    import torch
    from safetensors import safe_open

    architecture, heads = ARCHITECTURES[config["model_type"]], config["num_attention_heads"]
    experts = config.get("num_local_experts") or config["num_experts"]
    writer = gguf.GGUFWriter(a.out, architecture)
    describe(writer, config, experts, config.get("head_dim") or config["hidden_size"] // heads)
    add_tokenizer(writer, json.loads((a.model / "tokenizer.json").read_text()), config)
    kinds = {name: gguf.GGMLQuantizationType[name.upper()] for name in FORMATS}

    files = [safe_open(path, "pt") for path in sorted(a.model.glob("*.safetensors"))]
    file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def read(name: str) -> Any:
        return file_of[name].get_tensor(name).to(torch.float32).numpy()

    def add(name: str, value: Any, kind: str) -> None:
        value = np.ascontiguousarray(value, np.float32)
        kind = "f32" if value.ndim == 1 else kind
        stored = value if kind == "f32" else gguf.quants.quantize(value, kinds[kind])
        writer.add_tensor(name, stored, raw_dtype=kinds[kind])

    dense = a.dense or a.format
    embedding = read("model.embed_tokens.weight")
    add("token_embd.weight", embedding, dense)
    add(
        "output.weight", read("lm_head.weight") if "lm_head.weight" in file_of else embedding, dense
    )
    add("output_norm.weight", read("model.norm.weight"), "f32")
    for layer in range(config["num_hidden_layers"]):
        source, target = f"model.layers.{layer}.", f"blk.{layer}."
        add(target + "attn_norm.weight", read(source + "input_layernorm.weight"), "f32")
        add(target + "ffn_norm.weight", read(source + "post_attention_layernorm.weight"), "f32")
        for name, number in (("q", heads), ("k", config["num_key_value_heads"])):
            weight = read(f"{source}self_attn.{name}_proj.weight")
            add(
                f"{target}attn_{name}.weight",
                pairs_side_by_side(weight, number) if architecture == "llama" else weight,
                dense,
            )
        add(target + "attn_v.weight", read(source + "self_attn.v_proj.weight"), dense)
        add(target + "attn_output.weight", read(source + "self_attn.o_proj.weight"), dense)
        if architecture == "qwen3moe":
            add(target + "attn_q_norm.weight", read(source + "self_attn.q_norm.weight"), "f32")
            add(target + "attn_k_norm.weight", read(source + "self_attn.k_norm.weight"), "f32")
        llama = architecture == "llama"
        moe, names = (
            ("block_sparse_moe.", ("w1", "w3", "w2"))
            if llama
            else ("mlp.", ("gate_proj", "up_proj", "down_proj"))
        )
        add(target + "ffn_gate_inp.weight", read(f"{source}{moe}gate.weight"), "f32")
        for name, kind in zip(names, ("gate", "up", "down"), strict=True):
            stack = np.stack(
                [read(f"{source}{moe}experts.{e}.{name}.weight") for e in range(experts)]
            )
            add(f"{target}ffn_{kind}_exps.weight", stack, a.format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
