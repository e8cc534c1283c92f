"""The Hugging Face tensors that make up each parameter of the decoder: the names that most families
share.

A parameter here is that of one layer (and one expert): a matrix [in, out] or a vector. Hugging Face
stores a linear layer as [out, in]; matrices that jmoe concatenates (q|k|v, gate|up) are several
tensors there, or have interleaved columns.

Legend:
D hidden
F expert hidden
H query heads
G key/value heads
d head dimension
E experts
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSource:
    """The tensors that fill the columns of one parameter, from left to right.

    names: tensor names, with the placeholders `{layer}` and `{expert}`.
    each_transposed: for each tensor whether it is stored as [out, in]; empty if all are as
        `transposed` says.
    head_dims: for each tensor the columns of a head if its stored columns alternate between the
        halves of every head, else 0; empty for none.
    """

    names: tuple[str, ...]
    transposed: bool = False  # stored as [out, in]
    stacked: bool = False  # one tensor holds all experts, with a leading E
    interleaved: bool = False  # stored columns alternate between the parameter's two halves
    as_row: bool = False  # a vector [n] that is stored as [1, n]
    by_channel: bool = False  # a matrix [taps, channels] that is stored as [channels, 1, taps]
    widths: tuple[int, ...] = ()  # columns that each tensor fills; empty for equal widths
    each_transposed: tuple[bool, ...] = ()
    head_dims: tuple[int, ...] = ()

    def column_spans(self, total: int) -> list[tuple[int, int]]:
        """Return (first, end) of the parameter's columns that each tensor fills.

        total: columns of the parameter.
        """
        widths = self.widths or (total // len(self.names),) * len(self.names)
        ends = [sum(widths[: i + 1]) for i in range(len(widths))]
        assert ends[-1] == total, (self.names, widths, total)
        return list(zip([0, *ends[:-1]], ends, strict=True))


def as_stored_source(*names: str) -> TensorSource:
    """Return the source of vectors, or of matrices stored as [in, out]."""
    return TensorSource(names)


def transposed_source(*names: str) -> TensorSource:
    """Return the source of matrices stored as [out, in]."""
    return TensorSource(names, transposed=True)


def stacked_source(name: str, *, interleaved: bool = False) -> TensorSource:
    """Return the source of a tensor [E, ...] that holds all experts, each as [in, out]."""
    return TensorSource((name,), stacked=True, interleaved=interleaved)


OUTSIDE = {
    "embedding": as_stored_source("model.embed_tokens.weight"),
    "positions": as_stored_source("model.embed_positions.weight"),
    "norm.scale": as_stored_source("model.norm.weight"),
    "norm.bias": as_stored_source("model.norm.bias"),
    "head": transposed_source("lm_head.weight"),
    "head_bias": as_stored_source("lm_head.bias"),
}
# Names below model.layers.{layer}; `Family.tensors` overrides them.
LAYER = {
    "attention_norm.scale": as_stored_source("input_layernorm.weight"),
    "attention_norm.bias": as_stored_source("input_layernorm.bias"),
    "attention.w_qkv": transposed_source(
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"
    ),
    "attention.b_qkv": as_stored_source(
        "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"
    ),
    "attention.q_norm.scale": as_stored_source("self_attn.q_norm.weight"),
    "attention.k_norm.scale": as_stored_source("self_attn.k_norm.weight"),
    "attention.sinks": as_stored_source("self_attn.sinks"),
    "attention.w_q": transposed_source("self_attn.q_proj.weight"),
    "attention.w_q_a": transposed_source("self_attn.q_a_proj.weight"),
    "attention.b_q_a": as_stored_source("self_attn.q_a_proj.bias"),
    "attention.q_a_norm.scale": as_stored_source("self_attn.q_a_layernorm.weight"),
    "attention.w_q_b": transposed_source("self_attn.q_b_proj.weight"),
    "attention.w_kv_a": transposed_source("self_attn.kv_a_proj_with_mqa.weight"),
    "attention.b_kv_a": as_stored_source("self_attn.kv_a_proj_with_mqa.bias"),
    "attention.kv_a_norm.scale": as_stored_source("self_attn.kv_a_layernorm.weight"),
    "attention.w_kv_b": transposed_source("self_attn.kv_b_proj.weight"),
    "attention.w_out": transposed_source("self_attn.o_proj.weight"),
    "attention.b_out": as_stored_source("self_attn.o_proj.bias"),
    "feed_forward_norm.scale": as_stored_source("post_attention_layernorm.weight"),
    "feed_forward_norm.bias": as_stored_source("post_attention_layernorm.bias"),
    "mlp.w_up": transposed_source("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.w_down": transposed_source("mlp.down_proj.weight"),
    "moe.router.kernel": transposed_source("mlp.gate.weight"),
    "moe.router.e_score_correction_bias": as_stored_source("mlp.gate.e_score_correction_bias"),
    "moe.experts.w_up": transposed_source(
        "mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"
    ),
    "moe.experts.w_down": transposed_source("mlp.experts.{expert}.down_proj.weight"),
    "shared_expert.w_up": transposed_source(
        "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"
    ),
    "shared_expert.w_down": transposed_source("mlp.shared_expert.down_proj.weight"),
    "shared_expert_gate": transposed_source("mlp.shared_expert_gate.weight"),
}
# transformers 5 holds a layer's experts in one tensor [E, out, in], and saves them so unless it is
# asked for the published names.
FUSED = {
    "moe.router.kernel": transposed_source("mlp.gate.weight"),
    "moe.experts.w_up": TensorSource(("mlp.experts.gate_up_proj",), transposed=True, stacked=True),
    "moe.experts.w_down": TensorSource(("mlp.experts.down_proj",), transposed=True, stacked=True),
}
