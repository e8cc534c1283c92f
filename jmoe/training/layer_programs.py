"""The training step in pieces: compiled programs for one layer at a time, forward and backward, on one device.

Legend: A accumulation steps, B batch, S sequence, T = B S tokens, D hidden, V vocabulary, E experts, K choices a
token, N layers of a kind.

Every program serves all layers of its kind: it is given the stacked dense parameters and the layer's number. A layer
with experts is cut in two on its way forward, since what the router chose says which experts have to be there; its
backward pass is one program, which computes the layer again from its input and keeps to the choices that were made.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jmoe.config import TrainConfig
from jmoe.layers.loss import cross_entropy
from jmoe.layers.router import RouterBias, Routing, balance_loss_local, updated_bias
from jmoe.mesh import EXPERTS_PATH
from jmoe.models.decoder import DecoderLayer
from jmoe.training.optimizer import advance, decays, learning_rate
from jmoe.training.step import PureDecoder, TrainState

Arrays = Mapping[str, Any]  # nested dictionaries of arrays
Experts = Mapping[str, jax.Array]  # the experts of a layer, [E, ...] each


class Routed(NamedTuple):
    """A layer with experts, half done: after its attention, and what its router chose."""

    x_BSD: jax.Array
    h_TD: jax.Array
    routing: Routing


class Layer(NamedTuple):
    """Which layer of its kind, and how far its attention looks. window: int32 scalar, None: all tokens before."""

    number: jax.Array
    window: jax.Array | None


class _Part:
    """A module of the decoder as a function of its parameters in nested dictionaries."""

    def __init__(self, module: nnx.Module) -> None:
        split: Any = nnx.split(module, nnx.Param, RouterBias)
        self.graph, params, bias = split
        self.params, self.bias = nnx.to_pure_dict(params), nnx.to_pure_dict(bias)
        self._params, self._bias = jax.tree.structure(params), jax.tree.structure(bias)

    def __call__(self, params: Any, bias: Any = ()) -> Any:
        state = jax.tree.unflatten(self._params, jax.tree.leaves(params))
        return nnx.merge(self.graph, state, jax.tree.unflatten(self._bias, jax.tree.leaves(bias)))


def _at(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, index, 0, keepdims=False), tree)


def _added_at(tree: Any, index: jax.Array, values: Any) -> Any:
    return jax.tree.map(lambda total, g: total.at[index].add(g), tree, values)


def _added(tree: Any, values: Any) -> Any:
    return jax.tree.map(jnp.add, tree, values)


class LayerPrograms:
    """The compiled functions of one run, by what they do.

    Parameters, gradients and moments are nested dictionaries named as in `TrainState`, without the experts; those
    come as [E, ...] arrays of one layer. `outside` is everything outside the layers. Gradients are summed into what
    is given, which is donated.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.config = config
        self._model = model = PureDecoder(config, mesh)
        self.dtype = model.dtype
        self._num_tokens = config.batch_size * config.sequence_length // config.gradient_accumulation_steps
        decoder: Any = nnx.eval_shape(model.build)
        self._experts = _Part(decoder.moe_layers.moe.experts)
        del decoder.moe_layers.moe.experts
        self._moe = _Part(decoder.moe_layers)
        self._dense = _Part(decoder.dense_layers) if decoder.dense_layers is not None else None
        decoder.dense_layers = decoder.moe_layers = None
        self._outside = _Part(decoder)
        self.experts: dict[str, jax.ShapeDtypeStruct] = self._experts.params  # of all layers, [N, E, ...]

        self.embed = jax.jit(self._embed)
        self.dense = jax.jit(self._dense_layer)
        self.route = jax.jit(self._route, static_argnames="train")
        self.add_experts = jax.jit(self._add_experts)
        self.losses = jax.jit(self._losses)
        self.loss_gradients = jax.jit(self._loss_gradients, donate_argnums=3)
        self.moe_gradients = jax.jit(self._moe_gradients, donate_argnums=(7, 8))
        self.dense_gradients = jax.jit(self._dense_gradients, donate_argnums=4)
        self.embed_gradients = jax.jit(self._embed_gradients, donate_argnums=3)
        self.expert_gradients = jax.jit(self._expert_gradients, donate_argnums=0, static_argnames="dtype")
        self.zeros = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree))
        self.finish = jax.jit(self._finish, donate_argnums=0)
        self.nll = jax.jit(self._nll)
        self.logits = jax.jit(self._logits)

    # Forward

    def outside(self, params: Any) -> Any:
        """The parameters outside the layers."""
        return {name: tree for name, tree in params.items() if not name.endswith("_layers")}

    def _embed(self, outside: Any, tokens_BS: jax.Array) -> jax.Array:
        x_BSD: jax.Array = self._outside(self._model.gather(outside)).embed(tokens_BS, self.dtype)
        return x_BSD

    def _dense_layer(self, stack: Any, layer: Layer, x_BSD: jax.Array) -> jax.Array:
        return self._run_dense(_at(stack, layer.number), layer, x_BSD)

    def _run_dense(self, params: Any, layer: Layer, x_BSD: jax.Array) -> jax.Array:
        assert self._dense is not None
        module: DecoderLayer = self._dense(self._model.gather(params))
        assert module.mlp is not None
        x_BSD = module.attend(x_BSD, layer.window, self.dtype)
        with jax.named_scope("mlp"):
            y_BSD = module.mlp(module.feed_forward_norm(x_BSD, self.dtype))
        return x_BSD + y_BSD.astype(x_BSD.dtype)

    def _moe_module(self, params: Any, bias: Any) -> DecoderLayer:
        module: DecoderLayer = self._moe(self._model.gather(params), bias)
        return module

    def _route(
        self, stack: Any, bias: Any, layer: Layer, x_BSD: jax.Array, key: jax.Array | None, *, train: bool
    ) -> Routed:
        """A layer up to its router's choices."""
        module = self._moe_module(_at(stack, layer.number), _at(bias, layer.number))
        return self._run_router(module, layer, x_BSD, key, train=train)

    def _run_router(
        self, module: DecoderLayer, layer: Layer, x_BSD: jax.Array, key: jax.Array | None, **options: Any
    ) -> Routed:
        assert module.moe is not None
        x_BSD = module.attend(x_BSD, layer.window, self.dtype)
        h_TD = module.feed_forward_norm(x_BSD, self.dtype).reshape(-1, x_BSD.shape[-1])
        with jax.named_scope("router"):
            routing = module.moe.router(h_TD, key=key, **options)
        return Routed(x_BSD, h_TD, routing)

    def _add_experts(self, stack: Any, layer: Layer, experts: Experts, routed: Routed) -> jax.Array:
        """The layer's output, from the experts that its tokens chose; the others may be anything finite."""
        bias = jax.tree.map(lambda b: jnp.zeros(b.shape[1:], b.dtype), self._moe.bias)
        return self._run_experts(self._moe_module(_at(stack, layer.number), bias), experts, routed)

    def _run_experts(self, module: DecoderLayer, experts: Experts, routed: Routed) -> jax.Array:
        assert module.moe is not None
        module.moe.experts = self._experts(self._model.gather({EXPERTS_PATH: experts})[EXPERTS_PATH])
        with jax.named_scope("moe"):
            y_TD, _ = module.moe.routed(routed.h_TD, routed.routing)
            if module.shared_expert is not None:
                y_TD = y_TD + module.shared(routed.h_TD)
        return routed.x_BSD + y_TD.reshape(routed.x_BSD.shape).astype(routed.x_BSD.dtype)

    def _losses(self, routing: Routing) -> tuple[jax.Array, jax.Array]:
        """A layer's part of the (weighted) balance and z losses of one accumulation step."""
        model, router = self.config.model, self.config.model.router
        parts = model.num_moe_layers * self.config.gradient_accumulation_steps
        balance = balance_loss_local(
            routing.probs_sum_E, routing.counts_E, self._num_tokens, model.num_experts, model.num_experts_per_tok
        )
        return router.aux_loss_coef * balance / parts, router.z_loss_coef * routing.z_sum / self._num_tokens / parts

    def _head(self, outside: Any, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the last norm's output [T, D], lm_head [D, V])."""
        module = self._outside(self._model.gather(outside))
        x_TD = module.norm(x_BSD, self.dtype).reshape(-1, x_BSD.shape[-1])
        return x_TD, module.lm_head().astype(self.dtype)

    def _nll(self, outside: Any, x_BSD: jax.Array, labels_BS: jax.Array, weights_BS: jax.Array) -> jax.Array:
        return cross_entropy(*self._head(outside, x_BSD), labels_BS.reshape(-1), weights_BS.reshape(-1))

    def _logits(self, outside: Any, x_BSD: jax.Array, position: jax.Array) -> jax.Array:
        """float32 [V]: after the token at `position` of the first sequence."""
        x_TD, head_DV = self._head(outside, x_BSD[:1])
        last_D = lax.dynamic_index_in_dim(x_TD, position, 0, keepdims=False)
        return jnp.dot(last_D.astype(jnp.float32), head_DV.astype(jnp.float32))

    # Backward

    def _loss_gradients(
        self, outside: Any, x_BSD: jax.Array, labels_BS: jax.Array, grads: Any
    ) -> tuple[jax.Array, jax.Array, Any]:
        """(loss, dx, summed gradients of what is outside the layers)."""
        scale = 1.0 / (self._num_tokens * self.config.gradient_accumulation_steps)
        weights_BS = jnp.full(labels_BS.shape, scale, jnp.float32)
        with jax.named_scope("loss"):
            loss, (doutside, dx_BSD) = jax.value_and_grad(self._nll, argnums=(0, 1))(
                outside, x_BSD, labels_BS, weights_BS
            )
        return loss, dx_BSD, _added(grads, doutside)

    def _moe_gradients(
        self,
        stack: Any,
        bias: Any,
        layer: Layer,
        experts: Experts,
        x_BSD: jax.Array,
        key: jax.Array | None,
        topk_idx_TK: jax.Array,
        grads: Any,
        dexperts: Experts | None,
        dy_BSD: jax.Array,
    ) -> tuple[jax.Array, Any, Experts]:
        """(dx, summed gradients of the stack, summed gradients of the layer's experts) from a layer's input.

        dexperts: None for the first accumulation step.
        """
        bias = _at(bias, layer.number)

        def run(params: Any, experts: Experts, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
            module = self._moe_module(params, bias)
            routed = self._run_router(module, layer, x_BSD, key, train=True, topk_idx_TK=topk_idx_TK)
            balance, z = self._losses(routed.routing)
            return self._run_experts(module, experts, routed), balance + z

        _, pull = jax.vjp(run, _at(stack, layer.number), experts, x_BSD)
        dparams, dnew, dx_BSD = pull((dy_BSD, jnp.ones((), jnp.float32)))
        return dx_BSD, _added_at(grads, layer.number, dparams), dnew if dexperts is None else _added(dexperts, dnew)

    def _dense_gradients(
        self, stack: Any, layer: Layer, x_BSD: jax.Array, dy_BSD: jax.Array, grads: Any
    ) -> tuple[jax.Array, Any]:
        _, pull = jax.vjp(lambda params, x: self._run_dense(params, layer, x), _at(stack, layer.number), x_BSD)
        dparams, dx_BSD = pull(dy_BSD)
        return dx_BSD, _added_at(grads, layer.number, dparams)

    def _embed_gradients(self, outside: Any, tokens_BS: jax.Array, dx_BSD: jax.Array, grads: Any) -> Any:
        return _added(grads, jax.vjp(lambda o: self._embed(o, tokens_BS), outside)[1](dx_BSD)[0])

    def _expert_gradients(self, dexperts: Experts, *, dtype: str) -> tuple[jax.Array, Experts]:
        """(sum of squares, the gradients in the dtype they are kept in)."""
        square = sum((jnp.square(g).sum() for g in dexperts.values()), jnp.zeros((), jnp.float32))
        return square, {name: g.astype(dtype) for name, g in dexperts.items()}

    # Update

    def _finish(
        self,
        state: TrainState,
        grads: Any,
        squares: Sequence[jax.Array],
        sums: Mapping[str, Any],
        routings: Sequence[Sequence[Routing]],
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """The dense state after its update, and the step's metrics.

        squares: of each layer's experts' gradients. sums: lists of scalars to add up. routings: [N][A].
        """
        config = self.config
        metrics = {name: sum(values, jnp.zeros((), jnp.float32)) for name, values in sums.items()}
        counts_NE = jnp.stack([sum(r.counts_E for r in layer) for layer in routings])
        total_tokens = self._num_tokens * config.gradient_accumulation_steps
        entropy_N = jnp.stack([sum(r.entropy_sum for r in layer) for layer in routings]) / total_tokens
        norms = self._squared_norms(grads, squares)
        norm = jnp.sqrt(sum(jnp.sum(square) for square in norms.values()))
        ok = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
        limit = config.optimizer.clip_norm
        clip = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12)) if limit else jnp.float32(1.0)
        lr = jnp.asarray(learning_rate(config.optimizer, config.num_steps)(state.step.astype(jnp.float32)), jnp.float32)
        options: dict[str, Any] = {"config": config.optimizer, "lr": lr, "step": state.step, "clip": clip, "ok": ok}
        leaves, tree = jax.tree_util.tree_flatten_with_path(state.params)
        old = zip(leaves, *(jax.tree.leaves(part) for part in (state.m, state.v, grads)), strict=True)
        new = [advance(w, m, v, g, decay=decays(path, w), **options) for (path, w), m, v, g in old]
        params, m, v = (jax.tree.unflatten(tree, part) for part in zip(*new, strict=True))
        speed = config.model.router.bias_update_speed
        bias = jax.tree.map(lambda b: jnp.where(ok, updated_bias(b, counts_NE, speed), b), state.router_bias)
        metrics |= {
            "counts": counts_NE,
            "entropy": entropy_N,
            "dropped": jnp.zeros(len(routings), jnp.int32),
            "grad_norm": norm,
            "grad_norms": jax.tree.map(jnp.sqrt, norms),
            "learning_rate": lr,
            "clip": clip,
            "overflow": jnp.bool_(False),
            "ok": ok,
        }
        return TrainState(params, m, v, bias, state.step + ok.astype(jnp.int32)), metrics

    def _squared_norms(self, grads: Any, squares: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """As the ordinary step's: one for each part of the decoder, one per layer for the stacks."""
        norms: dict[str, jax.Array] = {}
        for name, tree in grads.items():
            stacked = name.endswith("_layers")
            axes = lambda g, stacked=stacked: tuple(range(1, g.ndim)) if stacked else None  # noqa: E731
            parts = [jnp.square(g).sum(axis=axes(g)) for g in jax.tree.leaves(tree)]
            norms[name] = sum(parts[1:], parts[0])
        norms["moe_layers"] = norms["moe_layers"] + jnp.stack(list(squares))
        return norms
