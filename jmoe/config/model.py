"""Configuration of a decoder, or of an encoder and a decoder. Field names follow Hugging Face
configurations where one exists.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from jmoe.config.attention import CHUNKED_ATTENTION, check_attention
from jmoe.config.checks import (
    check,
    check_field,
    check_field_types,
    check_not_negative,
    check_positive,
    check_positive_or_none,
)
from jmoe.config.layers import CROSS_KINDS, TOKEN_ROUTED, Layer, LayerKind, layer_table
from jmoe.config.linear_attention import LINEAR_ATTENTION, num_linear_attention_parameters
from jmoe.config.moe import HiddenAct, MoEConfig
from jmoe.config.positions import RopeScaling
from jmoe.config.router import RouterConfig

# what a backward pass computes again, see `TrainConfig.remat`
Remat = Literal["none", "experts", "layer"]
NO_WINDOW = 2**30  # tokens


# What of a model concerns its training only; a run that starts from a checkpoint (`init_from`)
# keeps its own.
ROUTER_TRAINING_ONLY = ("jitter_noise", "second_expert_policy", "z_loss_coef", "bias_update_speed")
TRAINING_ONLY = ("capacity_factor", *(f"router.{name}" for name in ROUTER_TRAINING_ONLY))


# What is counted one by one before a tensor is looked at, and sizes of arrays beyond which XLA
# counts wrongly or ends the process.
MODEL_LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "num_encoder_layers"), 10_000),
    **dict.fromkeys(("num_experts", "num_attention_heads", "head_dim"), 1 << 16),
    "hidden_size": 1 << 20,
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 1 << 24
    ),
    "vocab_size": 1 << 24,
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), NO_WINDOW),
    "attention_chunk_size": NO_WINDOW - 1,
}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: every language-model family by configuration; or an encoder and a decoder."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 4
    # layers of an encoder, to whose output the `num_hidden_layers` of the decoder attend (T5);
    # trained by span corruption. 0: a decoder alone
    num_encoder_layers: int = 0
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048
    intermediate_size: int = 1024  # dense feed-forward layers
    moe_intermediate_size: int = 1024  # one expert
    num_experts: int = 8  # 0: every layer is dense
    num_experts_per_tok: int = 2
    decoder_sparse_step: int = 1  # every n-th layer after the dense first ones has experts
    first_k_dense_replace: int = 0  # this many first layers are dense
    mlp_only_layers: tuple[int, ...] = ()  # these layers are dense too
    shared_expert_intermediate_size: int = 0  # 0: no shared expert
    # the shared expert's output is multiplied by sigmoid(x @ gate) (Qwen2-MoE)
    shared_expert_gate: bool = False
    hidden_act: HiddenAct = "swiglu"
    # zero_centered_rmsnorm multiplies by 1 + its scale (Qwen3-Next)
    norm: Literal["rmsnorm", "layernorm", "zero_centered_rmsnorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    position: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    # rotate (x[2i], x[2i + 1]) instead of (x[i], x[i + d/2])
    rope_interleave: bool = False
    partial_rotary_factor: float = 1.0  # share of a head's dimensions that is rotated, the first
    sliding_window: int | None = None  # a token sees this many: itself and those before it
    # sliding_attention, full_attention, chunked_attention or linear_attention (a gated delta
    # network) per layer; empty: all alike
    layer_types: tuple[str, ...] = ()
    # chunked_attention (Llama 4): a token sees the earlier ones of its chunk of this many; beside
    # it, layers of full_attention have no rotary positions, and their queries are multiplied by
    # 1 + attn_scale log(1 + floor((position + 1) / floor_scale))
    attention_chunk_size: int | None = None
    attn_scale: float = 0.0
    floor_scale: int = 8192
    linear_num_key_heads: int = 0  # gated delta networks: heads of queries and keys
    linear_num_value_heads: int = 0  # gated delta networks: heads of values, a multiple of these
    linear_key_head_dim: int = 0  # gated delta networks
    linear_value_head_dim: int = 0  # gated delta networks
    linear_conv_kernel_dim: int = 0  # gated delta networks: inputs that a convolution's output sees
    # gated delta networks: projections of one key head lie side by side (Qwen3-Next), see
    # `GatedDeltaNet`
    linear_projections_by_head: bool = False
    # attention's output is multiplied by sigmoid(x @ gate), before its projection (Qwen3-Next)
    attention_gate: bool = False
    attention_sinks: bool = False  # one learned logit per head in every softmax (gpt-oss)
    # per head (Qwen3), per head after rotation (Hunyuan), the same without a scale in layers with
    # rotary positions (Llama 4: rotated_l2), or over all heads (OLMoE)
    qk_norm: Literal["none", "head", "rotated_head", "rotated_l2", "full"] = "none"
    # bounds of every query, key and value, after qk_norm and before rotation (OLMoE)
    clip_qkv: float | None = None
    attention_bias: bool = False  # q, k, v and the output
    qkv_bias: bool = False  # q, k and v only (Qwen2)
    kv_lora_rank: int | None = None  # latent attention (DeepSeek-V2/V3); None: ordinary attention
    q_lora_rank: int | None = None  # latent attention: None: queries straight from the hidden state
    qk_nope_head_dim: int = 0  # latent attention: part of a query or key without position
    qk_rope_head_dim: int = 0  # latent attention: rotated part, its key shared by all heads
    v_head_dim: int = 0  # latent attention
    # every token attends to all tokens of its sequence (BERT); trained on masked tokens
    bidirectional: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    head_bias: bool = False  # logits = hidden @ head + bias (Phi-3.5-MoE)
    # Granite: factors of token embeddings, of what a layer adds to the residual stream, and of
    # attention scores (None: dim_per_head ** -0.5); logits are divided by logits_scaling
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0
    initializer_range: float = 0.02
    capacity_factor: float | None = None  # rows per destination device / fair share; None: dropless
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(
            self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"
        )
        check_positive(
            self,
            "num_key_value_heads",
            "max_position_embeddings",
            "intermediate_size",
            "moe_intermediate_size",
        )
        for name, most in MODEL_LIMITS.items():
            check_field((getattr(self, name) or 0) <= most, self, name, f"must be at most {most:,}")
        check_positive(self, "decoder_sparse_step", "norm_eps", "rope_theta", "initializer_range")
        check_not_negative(
            self, "num_experts", "first_k_dense_replace", "shared_expert_intermediate_size"
        )
        self._check_multipliers()
        check_attention(self)
        if self.num_experts:
            self._check_experts()

    def _check_multipliers(self) -> None:
        of_stream = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        check_positive(self, *of_stream)
        check_positive_or_none(self, "attention_multiplier")
        for name in of_stream:
            rope = self.position == "rope" or getattr(self, name) == 1.0
            check_field(rope, self, name, "needs position = 'rope'")

    def _check_experts(self) -> None:
        _ = self.moe  # raises `ValueError` for what does not fit
        layers = self.num_hidden_layers
        inside = all(0 <= layer < layers for layer in self.mlp_only_layers)
        check_field(inside, self, "mlp_only_layers", f"must lie between 0 and {layers - 1}")
        first, step = self.first_k_dense_replace, self.decoder_sparse_step
        check(
            first < layers,
            "first_k_dense_replace",
            first,
            f"must be less than num_hidden_layers = {layers}",
        )
        check(
            step <= layers - first,
            "decoder_sparse_step",
            step,
            f"must not exceed the {layers - first} layers left",
        )
        check_field(
            self.num_moe_layers > 0, self, "mlp_only_layers", "must leave a layer with experts"
        )
        gate, shared = self.shared_expert_gate, self.shared_expert_intermediate_size
        check(
            not gate or shared > 0,
            "shared_expert_gate",
            gate,
            "needs shared_expert_intermediate_size",
        )

    @property
    def is_causal(self) -> bool:
        """Whether a token attends only to itself and earlier tokens, in every layer."""
        return not self.bidirectional and not self.num_encoder_layers

    @property
    def num_layers(self) -> int:
        """Layers of the encoder and of the decoder."""
        return self.num_encoder_layers + self.num_hidden_layers

    def without_encoder(self) -> ModelConfig:
        """Return the decoder's own configuration, of which every layer is causal."""
        return dataclasses.replace(self, num_encoder_layers=0)

    @property
    def dim_per_head(self) -> int:
        """Dimension of a query or key head."""
        if self.kv_lora_rank is not None:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores before the softmax."""
        multiplier = self.attention_multiplier
        return self.dim_per_head**-0.5 if multiplier is None else multiplier

    @property
    def stream_scale(self) -> float:
        """Factor of the embeddings that enter the first layer.

        The residual stream is held divided by `residual_multiplier`, so that layers add to it
        without a factor: the norms before attention, feed-forward and head, with
        `stream_norm_eps`, give the same result for both.
        """
        return self.embedding_multiplier / self.residual_multiplier

    @property
    def stream_norm_eps(self) -> float:
        """Epsilon of the norms that read the residual stream; see `stream_scale`."""
        return self.norm_eps / self.residual_multiplier**2

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a query or key head that are rotated, the first ones."""
        return int(self.dim_per_head * self.partial_rotary_factor)

    @property
    def experts_per_image(self) -> int:
        """Experts per image in a layer routed by task."""
        return 1

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return of each layer whether its feed-forward is one MLP (`dense`) or experts (`moe`,
        `linear_moe` after a gated delta network). With an encoder its layers come first, and those
        of the decoder are `cross_dense` and `cross_moe`.
        """
        if self.num_encoder_layers:
            decoder = self.without_encoder()
            encoder = dataclasses.replace(decoder, num_hidden_layers=self.num_encoder_layers)
            crossing = (CROSS_KINDS[kind] for kind in decoder.layer_kinds)
            return (*encoder.layer_kinds, *crossing)
        first = self.first_k_dense_replace
        step = self.decoder_sparse_step
        dense = self.mlp_only_layers
        types = self.layer_types or ("",) * self.num_hidden_layers
        return tuple(
            ("linear_moe" if types[i] == LINEAR_ATTENTION else "moe")
            if self.num_experts and i >= first and (i - first + 1) % step == 0 and i not in dense
            else "dense"
            for i in range(self.num_hidden_layers)
        )

    @property
    def has_linear_attention(self) -> bool:
        """Whether some layer is a gated delta network."""
        return LINEAR_ATTENTION in self.layer_types

    @property
    def has_chunked_attention(self) -> bool:
        """Whether some layer attends within chunks; those of full attention have no positions."""
        return CHUNKED_ATTENTION in self.layer_types

    def check_no_linear_attention(self, program: str) -> None:
        """Raise ValueError if some layer is a gated delta network, which `program` does not
        support.
        """
        words = f"must have no {LINEAR_ATTENTION} for {program}"
        check_field(not self.has_linear_attention, self, "layer_types", words)

    def check_one_attention_chunk(self, field: str, num_tokens: int, program: str) -> None:
        """Raise ValueError if sequences of `num_tokens` have several chunks of attention, which
        `program` does not support.

        field: the name of the option that has `num_tokens`.
        """
        size = self.attention_chunk_size or num_tokens
        words = f"must not exceed attention_chunk_size = {size} for {program}"
        check(num_tokens <= size, field, num_tokens, words)

    @property
    def linear_key_dim(self) -> int:
        """Dimensions of all key heads of a gated delta network."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        """Dimensions of all value heads of a gated delta network."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Return the layers in the order of the forward pass."""
        types = self.layer_types or ("sliding_attention",) * self.num_layers
        full = None if self.sliding_window is None else NO_WINDOW
        if self.has_chunked_attention:
            full = NO_WINDOW
        sizes = {
            "sliding_attention": self.sliding_window,
            CHUNKED_ATTENTION: self.attention_chunk_size,
        }
        windows = [sizes.get(kind, full) for kind in types]
        return layer_table(self.layer_kinds, windows)

    @property
    def expert_layers(self) -> tuple[Layer, ...]:
        """Return the layers with experts, in the order of `ExpertIndex`."""
        return tuple(layer for layer in self.layers if layer.has_experts)

    @property
    def moe(self) -> MoEConfig:
        """Return the configuration of a layer with experts."""
        return MoEConfig(
            hidden_size=self.hidden_size,
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            hidden_act=self.hidden_act,
            bias=self.mlp_bias,
            capacity_factor=self.capacity_factor,
            initializer_range=self.initializer_range,
            output_initializer_range=self.output_initializer_range,
            router=self.router,
        )

    @property
    def output_initializer_range(self) -> float:
        """Return the standard deviation of projections that add to the hidden states: smaller if
        deeper (GPT-2).
        """
        return self.initializer_range / math.sqrt(2 * self.num_hidden_layers)

    @property
    def num_moe_layers(self) -> int:
        return sum(layer.kind in TOKEN_ROUTED for layer in self.layers)

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention to their own tokens: all but gated delta networks."""
        return sum(layer.kind != "linear_moe" for layer in self.layers)

    def _num_attention_parameters(self) -> int:
        d, dh, heads = self.hidden_size, self.dim_per_head, self.num_attention_heads
        if self.kv_lora_rank is None:
            q, kv = heads * dh, self.num_key_value_heads * dh
            bias = (q + 2 * kv) * (self.attention_bias or self.qkv_bias) + d * self.attention_bias
            by_head = dict.fromkeys(("head", "rotated_head"), 2 * dh)
            qk_norm = {**by_head, "full": q + kv}.get(self.qk_norm, 0)
            gate = d * q * self.attention_gate
            sinks = heads * self.attention_sinks
            return d * (q + 2 * kv) + gate + q * d + bias + qk_norm + sinks
        rank, rope, v = self.kv_lora_rank, self.qk_rope_head_dim, self.v_head_dim
        bias = (rank + rope + d + (self.q_lora_rank or 0)) * self.attention_bias
        q = d * heads * dh if self.q_lora_rank is None else self.q_lora_rank * (d + 1 + heads * dh)
        return (
            q
            + d * (rank + rope)
            + rank
            + rank * heads * (self.qk_nope_head_dim + v)
            + heads * v * d
            + bias
        )

    def _num_cross_attention_parameters(self) -> tuple[int, int]:
        """Return the parameters of a cross-attention that (a token of the decoder, a token of the
        encoder) passes.
        """
        d, dh = self.hidden_size, self.dim_per_head
        q, kv = self.num_attention_heads * dh, self.num_key_value_heads * dh
        has_bias = self.attention_bias or self.qkv_bias
        own = 2 * d * q + q * has_bias + d * self.attention_bias
        return own, 2 * d * kv + 2 * kv * has_bias

    def _num_mlp_parameters(self, hidden_units: int) -> int:
        up, d = 1 if self.hidden_act == "gelu" else 2, self.hidden_size
        return (up + 1) * d * hidden_units + (up * hidden_units + d if self.mlp_bias else 0)

    @property
    def parameters_per_expert(self) -> int:
        """Return the number of parameters of one expert."""
        return self._num_mlp_parameters(self.moe_intermediate_size)

    def total_and_active_parameters(self) -> tuple[int, int]:
        """Return (total, active per token) parameters, embeddings included; of a model with an
        encoder, those active per token of either side.
        """
        d = self.hidden_size
        norm = d * (2 if self.norm == "layernorm" else 1)
        attention = self._num_attention_parameters()
        moe_layers, experts, k = self.num_moe_layers, self.num_experts, self.num_experts_per_tok
        dense_layers = self.num_layers - moe_layers
        shared = (
            self._num_mlp_parameters(self.shared_expert_intermediate_size)
            if self.shared_expert_intermediate_size
            else 0
        )
        shared += d * self.shared_expert_gate
        bias = experts * (self.router.bias + self.router.rules.has_bias)
        common = self.vocab_size * d * (1 if self.tie_word_embeddings else 2) + norm
        common += self.vocab_size * self.head_bias
        common += self.max_position_embeddings * d if self.position == "learned" else 0
        linear_layers = self.num_layers - self.num_attention_layers
        common += self.num_attention_layers * attention + self.num_layers * 2 * norm
        if self.num_encoder_layers:
            crossing = sum(self._num_cross_attention_parameters()) + 2 * norm
            common += self.num_hidden_layers * crossing
        common += linear_layers * num_linear_attention_parameters(self)
        common += dense_layers * self._num_mlp_parameters(self.intermediate_size)
        common += moe_layers * (d * experts + bias + shared)
        expert = self.parameters_per_expert
        return common + moe_layers * experts * expert, common + moe_layers * k * expert

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the model FLOPs of one trained token: 6 per active matrix parameter, plus
        attention, plus three products with the state of a gated delta network.
        """
        _, active = self.total_and_active_parameters()
        lookup = self.vocab_size * self.hidden_size if not self.tie_word_embeddings else 0
        lookup += (
            self.max_position_embeddings * self.hidden_size if self.position == "learned" else 0
        )
        value_dim = self.v_head_dim if self.kv_lora_rank is not None else self.dim_per_head
        heads, dims = self.num_attention_heads, self.dim_per_head + value_dim
        seen = sequence_length * (1 if self.is_causal else 2)  # keys of two queries
        attention = 3 * self.num_attention_layers * heads * dims * seen
        state = self.linear_num_value_heads * self.linear_key_head_dim * self.linear_value_head_dim
        linear = 18 * (self.num_layers - self.num_attention_layers) * state
        return 6.0 * (active - lookup) + attention + linear

    def flops_per_sequence(self, encoder_tokens: int, decoder_tokens: int) -> float:
        """Return the model FLOPs of one trained sequence that has so many tokens on each side of
        an encoder and a decoder.
        """
        decoder = self.without_encoder()
        layers = self.num_encoder_layers
        encoder = dataclasses.replace(
            decoder, num_hidden_layers=layers, bidirectional=True, head_bias=False
        )
        head = 6.0 * self.vocab_size * self.hidden_size
        own, of_encoder = self._num_cross_attention_parameters()
        products = 12 * self.num_attention_heads * self.dim_per_head * encoder_tokens
        crossing = decoder_tokens * (6.0 * own + products) + encoder_tokens * 6.0 * of_encoder
        return (
            encoder_tokens * (encoder.flops_per_token(encoder_tokens) - head)
            + decoder_tokens * decoder.flops_per_token(decoder_tokens)
            + self.num_hidden_layers * crossing
        )
