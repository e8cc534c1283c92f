"""One transformer block, split into phases that every runner of layers calls.

A dense block is `Block.apply_dense`: attention, then the MLP. A block with experts is `attend`,
`route`, `dispatch` and `apply_experts`; `Block.__call__` composes them. A decoder's block beside an
encoder has `attend_to_encoder` after `attend`. The training scan, the runner that streams experts
and the decoder with a KV cache call these phases and know nothing else of a layer.

Legend:
B batch
S sequence
M positions of an encoder
T tokens, B * S
D hidden
K experts that a token chooses
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmoe.collectives.exchange import DispatchedTokens
from jmoe.config import CROSS_KINDS, WITHOUT_EXPERTS, LayerKind, ModelConfig, Remat
from jmoe.layers.attention import Attention
from jmoe.layers.context import SplitSequences
from jmoe.layers.context_attention import attend_over_devices
from jmoe.layers.cross_attention import CrossAttention
from jmoe.layers.documents import Documents
from jmoe.layers.experts import MLP, affine, normal_parameter
from jmoe.layers.gated_delta import GatedDeltaNet
from jmoe.layers.latent_attention import LatentAttention
from jmoe.layers.moe import ExpertParallel, MoELayer, MoEStats, moe_stats
from jmoe.layers.norm import Norm
from jmoe.layers.router import Routing, TaskRouter
from jmoe.types import PyTree
from kernels_pallas.saved import mark_saved

# (the block's attention module, its normed input [..., D]) -> its output [..., D]
AttentionModule = Attention | GatedDeltaNet
AttentionFn = Callable[[AttentionModule, jax.Array], jax.Array]

# Residuals are the outputs of matrix products and of routing. The backward pass recomputes norms,
# rotations, casts and permutations, and gathers a layer's unsharded weights again: that costs less
# than writing and reading them.
SAVED = (
    "qkv",
    "attention",
    "after_attention",
    "routing",
    "expert_rows",
    "expert_up",
    "mlp_up",
)


def saved_residual_names(remat: Remat, in_loop: bool = True) -> tuple[str, ...]:
    """Return the names of the residuals that the backward pass does not recompute, for a `remat`
    setting.

    in_loop: as for `ApplyBlock`. Outside a loop a residual costs no copy, and the experts' gathered
    rows are saved too.
    """
    if remat == "layer":
        return ()
    if remat == "experts":
        return tuple(name for name in SAVED if name != "expert_up")
    return SAVED if in_loop else (*SAVED, "dispatched_rows")


def causal_attention_fn(
    window: int | None = None,
    documents: Documents | None = None,
    split: SplitSequences | None = None,
) -> AttentionFn:
    """Return a function for causal self-attention within each sequence, or within each document.

    window: the number of positions that a token attends to, its own included; None for all earlier
        ones. split: of sequences that lie on several devices, with their documents.
    """
    if split is not None:

        def attend_to_split(attention: AttentionModule, h_BSD: jax.Array) -> jax.Array:
            assert isinstance(attention, Attention), (
                "config/context.py refuses gated delta networks"
            )
            return attend_over_devices(attention, h_BSD, split, window)

        return attend_to_split
    return lambda attention, h_BSD: attention(h_BSD, window, documents)


def add_residual(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return x + y, in the dtype and shape of x."""
    return x + y.reshape(x.shape).astype(x.dtype)


def _attention_class(config: ModelConfig, kind: LayerKind) -> type[Attention] | type[GatedDeltaNet]:
    if kind == "linear_moe":
        return GatedDeltaNet
    return Attention if config.kv_lora_rank is None else LatentAttention


class Block(nnx.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + feed_forward(norm(x)).

    The feed-forward is an `MLP` (kind "dense"), or a `MoELayer` whose experts are chosen per token
    (kind "moe") or per task (kind "task"), optionally beside a shared expert. In a block of kind
    "linear_moe", which is otherwise as "moe", a gated delta network stands in attention's place. A
    block of kind "cross_dense" or "cross_moe" is a decoder's beside an encoder, and also has
    x + cross_attention(norm(x), norm(encoder's output)) before its feed-forward.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: LayerKind,
        parallel: ExpertParallel | None = None,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        d, crosses = config.hidden_size, kind in CROSS_KINDS.values()
        shared = config.shared_expert_intermediate_size
        out_std = config.output_initializer_range
        self.attention_norm = Norm(d, config.norm, config.stream_norm_eps)
        own = config.without_encoder() if crosses else config
        self.attention = _attention_class(config, kind)(own, out_std, rngs=rngs)
        self.cross_attention = CrossAttention(config, out_std, rngs=rngs) if crosses else None
        self.cross_attention_norm, self.encoder_norm = (
            Norm(d, config.norm, config.stream_norm_eps) if crosses else None for _ in range(2)
        )
        self.feed_forward_norm = Norm(d, config.norm, config.stream_norm_eps)
        mlp: dict[str, Any] = {
            "activation": config.hidden_act,
            "bias": config.mlp_bias,
            "init_std": config.initializer_range,
            "init_out_std": out_std,
            "rngs": rngs,
        }
        moe = kind not in WITHOUT_EXPERTS
        self.mlp = None if moe else MLP(d, config.intermediate_size, **mlp)
        self.shared_expert = MLP(d, shared, **mlp) if moe and shared else None
        routed = (
            config.moe.with_routing_by_task(config.experts_per_image)
            if kind == "task"
            else config.moe
            if moe
            else None
        )
        router = TaskRouter(config.num_experts) if kind == "task" else None
        self.moe = None if routed is None else MoELayer(routed, parallel, router=router, rngs=rngs)
        gate = moe and config.shared_expert_gate
        self.shared_expert_gate = (
            normal_parameter(rngs, (d, 1), config.initializer_range) if gate else None
        )

    @property
    def kind(self) -> LayerKind:
        """The layer kind: "dense" for an MLP, "moe" and "linear_moe" for experts chosen per token,
        "task" for experts chosen per task; "cross_dense" and "cross_moe" with cross-attention.
        """
        if self.cross_attention is not None:
            return CROSS_KINDS["dense" if self.moe is None else "moe"]
        if self.moe is None:
            return "dense"
        if isinstance(self.attention, GatedDeltaNet):
            return "linear_moe"
        return "task" if isinstance(self.moe.router, TaskRouter) else "moe"

    def attend(self, x_BSD: jax.Array, attention: AttentionFn, dtype: DTypeLike) -> jax.Array:
        """Return x + attention(norm(x)), [B, S, D]: the first half of the block.

        dtype: compute dtype of the matrix products.
        """
        with jax.named_scope("attention"):
            h_BSD = attention(self.attention, self.attention_norm(x_BSD, dtype))
            return mark_saved(x_BSD + h_BSD.astype(x_BSD.dtype), "after_attention")

    def attend_to_encoder(
        self, x_BSD: jax.Array, encoded_BMD: jax.Array, dtype: DTypeLike
    ) -> jax.Array:
        """Return x + cross_attention(norm(x), norm(encoded)), [B, S, D]; only for blocks with
        cross-attention.

        encoded_BMD: the output of the encoder's last layer.
        """
        assert self.cross_attention is not None
        assert self.cross_attention_norm is not None and self.encoder_norm is not None
        with jax.named_scope("cross_attention"):
            encoded_BMD = self.encoder_norm(encoded_BMD, dtype)
            h_BSD = self.cross_attention(self.cross_attention_norm(x_BSD, dtype), encoded_BMD)
            return mark_saved(x_BSD + h_BSD.astype(x_BSD.dtype), "after_attention")

    def feed_forward(self, x_BSD: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return mlp(norm(x)), [T, D], without the residual; only for dense blocks."""
        assert self.mlp is not None
        with jax.named_scope("mlp"):
            return self.mlp(self.feed_forward_norm(x_BSD, dtype))

    def apply_dense(self, x_BSD: jax.Array, attention: AttentionFn, dtype: DTypeLike) -> jax.Array:
        """Return the output of a dense block, [B, S, D]: attention and MLP, each with its
        residual.
        """
        x_BSD = self.attend(x_BSD, attention, dtype)
        return add_residual(x_BSD, self.feed_forward(x_BSD, dtype))

    def route(
        self,
        x_BSD: jax.Array,
        dtype: DTypeLike,
        *,
        key: jax.Array | None = None,
        train: bool = False,
        topk_idx_TK: jax.Array | None = None,
        topk_weights_TK: jax.Array | None = None,
        documents: Documents | None = None,
    ) -> tuple[jax.Array, Routing]:
        """Return (h_TD, routing): the normed input of the experts, and each token's experts and
        weights.

        key: PRNG key for router noise.
        topk_idx_TK, topk_weights_TK: experts and weights to use instead of the router's; see
            `MoELayer.route`.
        documents: which tokens go to experts, and which the router's losses count.
        """
        assert self.moe is not None
        with jax.named_scope("moe"):
            h_TD = self.feed_forward_norm(x_BSD, dtype).reshape(-1, x_BSD.shape[-1])
            arrays = {"topk_idx_TK": topk_idx_TK, "topk_weights_TK": topk_weights_TK}
            if documents is not None:
                arrays["token_mask_T"] = documents.token_mask_BS.reshape(-1)
                arrays["loss_mask_T"] = documents.in_loss_BS.reshape(-1)
            return h_TD, self.moe.route(h_TD, key=key, train=train, **arrays)

    def dispatch(
        self, h_TD: jax.Array, routing: Routing, *, full_capacity: bool = False
    ) -> DispatchedTokens:
        """Send every token to the devices of its experts and return the rows that arrived here; see
        `MoELayer.dispatch`.
        """
        assert self.moe is not None
        with jax.named_scope("moe"):
            return self.moe.dispatch(h_TD, routing, full_capacity=full_capacity)

    def apply_experts(
        self, x_BSD: jax.Array, h_TD: jax.Array, dispatched: DispatchedTokens
    ) -> jax.Array:
        """Return x + the weighted sum of each token's experts + the shared expert's output, [B, S,
        D].
        """
        assert self.moe is not None
        with jax.named_scope("moe"):
            y_TD = self.moe.apply_experts(dispatched)
            if self.shared_expert is not None:
                y_TD = y_TD + self.shared_output(h_TD)
        return add_residual(x_BSD, y_TD)

    def shared_output(self, h_TD: jax.Array) -> jax.Array:
        """Return the shared expert's output, float32 [T, D], times its sigmoid gate if the block
        has one.

        Zeros if the block has no shared expert.
        """
        if self.shared_expert is None:
            return jnp.zeros(h_TD.shape, jnp.float32)
        y_TD = self.shared_expert(h_TD)
        if self.shared_expert_gate is None:
            return y_TD
        return y_TD * jax.nn.sigmoid(affine(h_TD, self.shared_expert_gate))

    def __call__(  # noqa: PLR0913  what a layer may need to know
        self,
        x_BSD: jax.Array,
        window: int | None = None,
        *,
        dtype: DTypeLike,
        key: jax.Array | None = None,
        train: bool = False,
        full_capacity: bool = False,
        keep_routing: bool = False,
        documents: Documents | None = None,
        split: SplitSequences | None = None,
        encoded_BMD: jax.Array | None = None,
        **choices: PyTree,
    ) -> tuple[jax.Array, MoEStats | None]:
        """Return (output [B, S, D], routing statistics); the statistics are None for a dense block.

        full_capacity: use buffers large enough for every token, so that none is dropped.
        keep_routing: also put every token's `Routing` into the statistics.
        documents: the documents of each sequence; None if each sequence is one.
        split: of sequences that lie on several devices; None if each device has whole ones.
        encoded_BMD: the encoder's output, which a block with cross-attention needs.
        choices: keyword arguments of `route` that replace the router's choice of experts.
        """
        attention = causal_attention_fn(window, documents, split)
        if self.kind == "dense":
            return self.apply_dense(x_BSD, attention, dtype), None
        x_BSD = self.attend(x_BSD, attention, dtype)
        if self.cross_attention is not None:
            assert encoded_BMD is not None
            x_BSD = self.attend_to_encoder(x_BSD, encoded_BMD, dtype)
        if self.moe is None:
            return add_residual(x_BSD, self.feed_forward(x_BSD, dtype)), None
        choices["documents"] = documents
        h_TD, routing = self.route(x_BSD, dtype, key=key, train=train, **choices)
        dispatched = self.dispatch(h_TD, routing, full_capacity=full_capacity)
        y_BSD = self.apply_experts(x_BSD, h_TD, dispatched)
        return y_BSD, moe_stats(routing, dispatched, keep_routing=keep_routing)


@dataclass(frozen=True)
class ApplyBlock:
    """Applies one layer of a stack of blocks to x, with rematerialization in its backward pass.

    graphs: the `nnx.split` graph of a block, for each kind of layer.
    gather: a function from one layer's parameter shards on this device to unsharded parameters.
    remat: selects the residuals that are saved; see `saved_residual_names`.
    prepare: changes the merged block, from what `gather` takes too; None changes nothing.
    options: keyword arguments of `Block.__call__`.
    in_loop: whether a loop over layers runs the layer. Elsewhere XLA would merge what the backward
        pass computes again with the forward pass and save it, which a barrier prevents that the
        layer's weights do not pass.
    encoder_length: the first positions of x that are an encoder's, M; the others are the decoder's.
        A layer changes the positions of its own side. 0 without an encoder.
    """

    graphs: Mapping[LayerKind, nnx.GraphDef["Block"]]
    gather: Callable[[PyTree], PyTree]
    remat: Remat
    options: Mapping[str, Any]
    prepare: Callable[[Block, PyTree], None] | None = None
    in_loop: bool = True
    encoder_length: int = 0

    def __call__(
        self,
        kind: LayerKind,
        state: PyTree,
        key: jax.Array | None,
        window: int | None,
        x_BSD: jax.Array,
    ) -> tuple[jax.Array, MoEStats | None]:
        def merge_and_apply(
            state: PyTree, key: jax.Array | None, x_BSD: jax.Array
        ) -> tuple[jax.Array, MoEStats | None]:
            block: Block = nnx.merge(self.graphs[kind], self.gather(state))
            if self.prepare is not None:
                self.prepare(block, state)
            return self._apply_to_own_positions(block, x_BSD, window, key)

        names = saved_residual_names(self.remat, self.in_loop)
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        prevent_cse = False if self.in_loop else (False, False, True)
        block = jax.checkpoint(merge_and_apply, policy=policy, prevent_cse=prevent_cse)
        y_BSD, stats = block(state, key, x_BSD)
        return y_BSD, stats

    def _apply_to_own_positions(
        self, block: Block, x_BSD: jax.Array, window: int | None, key: jax.Array | None
    ) -> tuple[jax.Array, MoEStats | None]:
        """Return (x with the block applied to the positions of its side, routing statistics)."""
        if not self.encoder_length:
            return block(x_BSD, window, key=key, **self.options)
        encoded_BMD, decoded_BSD = jnp.split(x_BSD, [self.encoder_length], axis=1)
        if block.cross_attention is None:
            encoded_BMD, stats = block(encoded_BMD, window, key=key, **self.options)
        else:
            options = {"key": key, "encoded_BMD": encoded_BMD, **self.options}
            decoded_BSD, stats = block(decoded_BSD, window, **options)
        return jnp.concatenate([encoded_BMD, decoded_BSD], axis=1), stats
