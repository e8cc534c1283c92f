"""The training step: one `shard_map` over the whole mesh, from tokens to the updated state.

Legend: A accumulation steps, B local batch, S sequence, T = B S local tokens, D hidden, N MoE layers, E experts.

Inside it everything is explicit: each device computes its part of the loss (parts add up to the global loss), takes
the gradient of that part, and gradients are reduced once. No collective lies on a differentiable path except the
exchange and the parameter gathers, whose transposes are themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jmoe.collectives.fusion import Part, all_reduce_local, gather_fused_local, gather_local
from jmoe.collectives.schedule import MAX_CHUNK_BYTES, SCHEDULES, chunk_bytes
from jmoe.config import TrainConfig
from jmoe.layers.embedding import Embedding
from jmoe.layers.moe import ExpertParallel
from jmoe.layers.router import RouterBias
from jmoe.memory.record_checkpoint import RecordCheckpoints
from jmoe.mesh import (
    ACCUMULATED_BATCH,
    ALL,
    BATCH,
    DATA,
    EXPERT,
    REPLICATED,
    hierarchy,
    is_expert,
    param_specs,
    path_names,
    shard_dim,
    shardings,
    split_over,
)
from jmoe.models.decoder import Decoder, LayerScan
from jmoe.planning.embedding import Vocabulary, plan_embedding
from jmoe.training.bandwidth import gathered_bytes_per_s
from jmoe.training.reverse_scan import ReverseScan
from jmoe.training.state import TrainState as TrainState
from jmoe.training.state import experts_of
from jmoe.training.update import (
    auxiliary_losses,
    finish_step,
    over_devices,
    router_key,
    tokens_per_accumulation_step,
)

LOOKUP_TABLES = ("embedding", "positions")  # read by row: cast after the lookup, so that gradients add in float32


Batch = tuple[jax.Array, jax.Array]  # held-out tokens [B, S + 1], and their targets' weights [B, S]


@dataclass(frozen=True)
class Program:
    """The jitted functions of one run. `state_shape` has the shapes and shardings of the state.

    to_saved, from_saved: between the state and what a checkpoint holds, of `saved_shape`, the same whatever the mesh;
    the latter only where experts are part of the state.
    exchange: which one takes tokens to their experts, and why; empty without experts on other devices.
    embedding: how the table is split over devices, and why; empty on one. records: what a checkpoint holds in files of
    its own; full_state: the saved state with all of that, of `full_shape`. from_layers: the state from one without
    experts and what reads weights and moments of experts of a layer (None: they are in their records already); None
    where experts are part of the state. evaluation_batches: how many batches `evaluate`
    is best given at once. expert_stats: what moved between tiers (`expert_state.ExpertStats`); None where nothing does.
    progress: what changes as long as records are moved, for limits on waits. close: end threads.
    """

    init: Callable[[], TrainState]
    step: Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]
    step_full_capacity: Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[TrainState, Sequence[Batch]], list[jax.Array]]
    next_logits: Callable[[TrainState, jax.Array, jax.Array], jax.Array]
    state_shape: TrainState
    saved_shape: TrainState
    to_saved: Callable[[TrainState], TrainState]
    from_saved: Callable[[TrainState], TrainState]
    exchange: str
    embedding: str
    full_shape: TrainState
    full_state: Callable[[TrainState], TrainState]
    records: RecordCheckpoints | None = None
    evaluation_batches: int = 1
    expert_stats: Callable[[], Any] = lambda: None
    from_layers: Callable[[TrainState, Any, Any], TrainState] | None = None
    progress: Callable[[], object] | None = None
    close: Callable[[], None] = lambda: None

    @property
    def has_experts(self) -> bool:
        """Whether any layer of the model has experts."""
        return bool(experts_of(self.full_shape.params))


def _pure(state: Any) -> Any:
    return nnx.to_pure_dict(state)


def _plan_embedding(config: TrainConfig, mesh: Mesh) -> Embedding:
    model, inside = config.model, mesh.shape[ALL[-1]]
    tokens = config.batch_size * config.sequence_length // config.gradient_accumulation_steps // mesh.size
    itemsize = jnp.dtype(config.compute_dtype).itemsize
    tied, sharded = model.tie_word_embeddings, config.comm.shard_dense
    vocabulary = Vocabulary(model.vocab_size, model.hidden_size, tied, tokens, itemsize, sharded)
    plan = plan_embedding(config.comm.embedding, vocabulary, num_nodes=mesh.size // inside, devices_per_node=inside)
    return Embedding(plan, ALL, tied)


class PureDecoder:
    """The decoder as a pure function of nested dicts of this device's parameters."""

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.dtype = jnp.dtype(config.compute_dtype)
        self.hierarchy = hierarchy(mesh, config.comm.hierarchical)
        self.fused = config.comm.shard_dense and config.comm.fuse_dense and mesh.size > 1
        self.abstract = nnx.eval_shape(self.build)
        split: Any = nnx.split(self.abstract, nnx.Param, RouterBias)
        self.graph, params, bias = split
        self.structure, self.bias_structure = jax.tree.structure(params), jax.tree.structure(bias)
        self.shapes, self.bias_shapes = _pure(params), _pure(bias)
        self.embedding = _plan_embedding(config, mesh)
        self.specs = param_specs(self.shapes, mesh, config.comm.shard_dense, self.fused)
        self.specs |= {name: split_over(ALL, dim) for name, dim in self.embedding.split.items()}
        self.shard_dims = {}  # path inside a layer -> dimension split over all devices
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.shapes):
            dim = shard_dim(path, leaf.shape, mesh.size, config.comm.shard_dense, self.fused)
            names = tuple(name for name in path_names(path) if not name.endswith("_layers"))
            if dim >= 0:
                self.shard_dims[names] = dim - (len(path_names(path)) - len(names))
        self.shard_dims |= {(name,): dim for name, dim in self.embedding.split.items()}

    @property
    def exchange(self) -> str:
        layers = self.abstract.moe_layers
        if layers is None or layers.moe.exchange_plan.num_devices == 1:
            return ""
        return f"{layers.moe.exchange_plan.kind} exchange: {layers.moe.exchange_plan.reason}"

    def build(self) -> Decoder:
        config = self.config
        return Decoder(
            config.model,
            ExpertParallel(
                self.mesh,
                EXPERT,
                exchange=config.comm.exchange,
                num_chunks=SCHEDULES[config.comm.schedule].num_chunks if self.fused else 1,
            ),
            rngs=nnx.Rngs(config.seed),
        )

    def _compute_dtype(self, names: tuple[str, ...], ndim: int) -> Any:
        matrix = ndim >= 2 and "router" not in names and names[-1] not in LOOKUP_TABLES
        return self.dtype if matrix else jnp.float32

    def part(self, path: tuple[Any, ...], shape: tuple[int, ...]) -> Part | None:
        """How this device's shard of a parameter, without a layer dimension, lies in the flat buffer, if it does."""
        names = tuple(name for name in path_names(path) if name != "value")
        dim = -1 if names[0] in self.embedding.split else self.shard_dims.get(names, -1)
        return None if dim < 0 else Part(shape, dim, self._compute_dtype(names, len(shape)))

    def cast(self, tree: Any) -> Any:
        """Unsharded parameters, and those that stay in parts, as they are used."""

        def used(path: tuple[Any, ...], w: jax.Array) -> jax.Array:
            names = tuple(name for name in path_names(path) if name != "value")
            stays = names[0] in self.embedding.split
            return w if stays else w.astype(self._compute_dtype(names, w.ndim - is_expert(path)))

        return jax.tree_util.tree_map_with_path(used, tree)

    def gather(self, tree: Any) -> Any:
        """This device's parameters (of one layer, or outside the layers) made unsharded, in the compute dtype."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        unsharded = {}
        for i, (path, w) in enumerate(leaves):
            names = tuple(name for name in path_names(path) if name != "value")
            dtype, part = self._compute_dtype(names, w.ndim - is_expert(path)), self.part(path, w.shape)
            stays = names[0] in self.embedding.split  # in parts
            unsharded[i] = part or (w if stays else w.astype(dtype))
        parts = {i: part for i, part in unsharded.items() if isinstance(part, Part)}
        shards = [leaves[i][1] for i in parts]
        if parts and self.fused:
            fetched = gather_fused_local(shards, tuple(parts.values()), self.hierarchy)
        else:
            pairs = zip(shards, parts.values(), strict=True)
            fetched = [gather_local(w, part.dim, part.dtype, ALL) for w, part in pairs]
        unsharded |= dict(zip(parts, fetched, strict=True))
        return jax.tree.unflatten(structure, list(unsharded.values()))

    def reverse_scan(self) -> ReverseScan | None:
        """What runs the layers in training when their parameters travel as one buffer."""
        config = self.config.comm
        if not self.fused:
            return None
        limit_bytes = config.chunk_bytes or MAX_CHUNK_BYTES
        if not config.chunk_bytes and jax.process_count() > 1:
            limit_bytes = chunk_bytes(gathered_bytes_per_s(self.mesh))
        return ReverseScan(
            lambda path, w: self.part(path, w.shape[1:]),
            self.hierarchy,
            SCHEDULES[config.schedule],
            config.bucket_bytes,
            limit_bytes,
        )

    def __call__(
        self, params: Any, router_bias: Any, tokens: jax.Array, layers: LayerScan | None = None, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """(hidden [B, S, D], head as `Embedding` made it, stats) of local tokens [B, S].

        layers: None to gather each by itself.
        """
        stacks = {name: tree for name, tree in params.items() if name.endswith("_layers")}
        with jax.named_scope("gather"):
            outside = self.gather({name: tree for name, tree in params.items() if name not in stacks})
        state = jax.tree.unflatten(self.structure, jax.tree.leaves(outside | stacks))
        bias = jax.tree.unflatten(self.bias_structure, jax.tree.leaves(router_bias))
        model = nnx.merge(self.graph, state, bias)
        kwargs |= {"gather": self.gather} if layers is None else {"layers": layers}
        hidden, stats = model(tokens, dtype=self.dtype, lookup=self.embedding.lookup, **kwargs)
        head = None if model.head is None else model.head[...]
        return hidden, self.embedding.head(model.embedding[...], head, self.dtype), stats


def _make_loss(
    config: TrainConfig, model: PureDecoder, full_capacity: bool, layers: LayerScan | None
) -> Callable[..., Any]:
    accumulation = config.gradient_accumulation_steps
    num_tokens = tokens_per_accumulation_step(config)
    has_moe = config.model.num_moe_layers > 0

    def loss_fn(params: Any, router_bias: Any, tokens: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Any]:
        hidden, head, stats = model(
            params,
            router_bias,
            tokens[:, :-1],
            key=key,
            train=True,
            full_capacity=full_capacity,
            layers=layers,
            remat=config.remat == "layer",
        )
        labels_T = tokens[:, 1:].reshape(-1)
        with jax.named_scope("loss"):
            weights_T = jnp.full(labels_T.shape, 1.0 / (num_tokens * accumulation), jnp.float32)
            hidden_TD = hidden.reshape(-1, hidden.shape[-1])
            nll = model.embedding.cross_entropy(hidden_TD, head, labels_T, weights_T)
        sums = {"loss": nll}
        if has_moe:
            with jax.named_scope("auxiliary_losses"):
                counts_NE = lax.psum(stats.counts_E, ALL)
                balance, z = auxiliary_losses(config, stats.probs_sum_E, stats.z_sum, counts_NE)
            sums |= {
                "balance_loss": balance,
                "z_loss": z,
                "counts": stats.counts_E,
                "entropy": stats.entropy_sum / (num_tokens * accumulation),
                "dropped": stats.dropped,
            }
        total = nll + (sums["balance_loss"] + sums["z_loss"] if has_moe else 0.0)
        return total, lax.stop_gradient(sums)

    return loss_fn


def _reduce(grads: Any, model: PureDecoder) -> Any:
    """Sum gradients over the devices that hold the same parameter (gathered ones are summed already)."""
    mesh = model.mesh
    leaves, structure = jax.tree_util.tree_flatten_with_path(grads)
    sums, everywhere = {}, {}
    for i, (path, g) in enumerate(leaves):
        names = tuple(name for name in path_names(path) if not name.endswith("_layers"))
        if is_expert(path):
            sums[i] = lax.psum(g.astype(jnp.float32), DATA) if mesh.shape[DATA] > 1 else g
        elif names in model.shard_dims or mesh.size == 1:
            sums[i] = g
        else:
            everywhere[i] = g
    sums |= all_reduce_local(everywhere, model.hierarchy)
    return jax.tree.unflatten(structure, [sums[i] for i in range(len(leaves))])


def squared_norms_local(grads: Any, model: PureDecoder) -> dict[str, jax.Array]:
    """This device's part of the squared gradient norms: `embedding`, `head`, ... scalars; stacks one per layer."""
    sums: dict[str, jax.Array] = {}
    mesh = model.mesh
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        names = path_names(path)
        stacked = names[0].endswith("_layers")
        square = jnp.square(g.astype(jnp.float32)).sum(axis=tuple(range(1, g.ndim)) if stacked else None)
        if is_expert(path):
            square = square / mesh.shape[DATA]
        elif names[1 if stacked else 0 :] not in model.shard_dims:
            square = square / mesh.size
        sums[names[0]] = sums[names[0]] + square if names[0] in sums else square
    return sums


def _local_gradients(
    config: TrainConfig, model: PureDecoder, full_capacity: bool, layers: LayerScan | None
) -> Callable[[TrainState, jax.Array], tuple[Any, dict[str, jax.Array]]]:
    loss_fn = jax.value_and_grad(_make_loss(config, model, full_capacity, layers), has_aux=True)
    jitter = config.model.router.jitter_noise > 0

    def gradients(state: TrainState, tokens: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        def one(key_index: jax.Array, tokens: jax.Array) -> tuple[Any, Any]:
            key = router_key(config, state.step, lax.axis_index(ALL), key_index) if jitter else None
            (_, sums), grads = loss_fn(state.params, state.router_bias, tokens, key)
            return grads, sums

        if tokens.shape[0] == 1:
            return one(jnp.int32(0), tokens[0])

        def accumulate(carry: Any, xs: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, one(*xs)), None

        steps = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, steps[0], tokens[0]))
        return lax.scan(accumulate, zeros, (steps, tokens))[0]

    return gradients


def _make_step(
    config: TrainConfig, model: PureDecoder, full_capacity: bool, layers: LayerScan | None
) -> Callable[..., Any]:
    gradients = _local_gradients(config, model, full_capacity, layers)
    dropless, num_devices = config.model.capacity_factor is None, model.mesh.size

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, sums = gradients(state, tokens)
        with jax.named_scope("reduce_gradients"):
            grads = _reduce(grads, model)
            metrics = over_devices(num_devices, sums)
        squares = over_devices(num_devices, squared_norms_local(grads, model))
        overflow = metrics["dropped"].sum() > 0 if dropless and "dropped" in metrics else jnp.bool_(False)
        return finish_step(config, state, grads, squares, metrics, overflow)

    return step


def _placed_shape(init: Callable[[], TrainState], state_shardings: TrainState) -> TrainState:
    """The shapes of a state with the shardings it is kept in."""
    placed: TrainState = jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        jax.eval_shape(init),
        state_shardings,
    )
    return placed


def _with_tables(state: TrainState, change: Callable[[Any], Any]) -> TrainState:
    """The state with `change` made to the embedding table and its moments."""
    trees = (getattr(state, name) for name in ("params", "m", "v"))
    params, m, v = (tree | {"embedding": change(tree["embedding"])} for tree in trees)
    return replace(state, params=params, m=m, v=v)


def _saved_form(model: PureDecoder, init: Callable[[], TrainState], shape: TrainState) -> tuple[Any, Any, TrainState]:
    """(to_saved, from_saved, saved_shape): a table kept in stripes is saved whole, split by columns."""
    if not model.embedding.striped:
        return (lambda state: state), (lambda state: state), shape
    table = model.shapes["embedding"]
    dim = next(d for d in (1, 0) if table.shape[d] % model.mesh.size == 0)
    place = shardings(split_over(ALL, dim), model.mesh)
    kept = shape.params["embedding"].sharding
    save = jax.jit(lambda table: table.reshape(-1, table.shape[-1]), out_shardings=place)
    restore = jax.jit(model.embedding.kept, out_shardings=kept)
    saved_shape = _with_tables(shape, lambda _: jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=place))
    return (lambda state: _with_tables(state, save)), (lambda state: _with_tables(state, restore)), saved_shape


def make_program(config: TrainConfig, mesh: Mesh) -> Program:
    """Build the jitted functions of a run on `mesh`; compiles nothing yet, but may measure the network.

    step(state, tokens [A, B, S + 1]) -> (state, metrics); the state is donated. `metrics["ok"]` is False, and the
    state unchanged, if the loss or gradient norm is not finite or a dropless buffer overflowed (`overflow`; then
    `step_full_capacity` runs the same step with room for every token). evaluate(state, batches) -> the summed negative
    log-likelihood of each batch in nats. next_logits(state, tokens [devices, S], position) -> [V].
    """
    model = PureDecoder(config, mesh)
    layers = model.reverse_scan()
    step_spec: Any = REPLICATED
    bias_specs = jax.tree.map(lambda _: REPLICATED, model.bias_shapes)
    state_specs = TrainState(model.specs, model.specs, model.specs, bias_specs, step_spec)
    state_shardings = shardings(state_specs, mesh)

    def init() -> TrainState:
        split: Any = nnx.split(model.build(), nnx.Param, RouterBias)
        _, params, bias = split
        zeros = jax.tree.map(jnp.zeros_like, _pure(params))
        return TrainState(_pure(params), zeros, jax.tree.map(jnp.copy, zeros), _pure(bias), jnp.int32(0))

    def initial() -> TrainState:
        return _with_tables(init(), model.embedding.kept)

    def sharded(f: Callable[..., Any], in_specs: Any, out_specs: Any, **jit: Any) -> Callable[..., Any]:
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False), **jit)

    def evaluate(state: TrainState, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        hidden, head, _ = model(state.params, state.router_bias, tokens[:, :-1], full_capacity=True)
        hidden_TD, labels_T = hidden.reshape(-1, hidden.shape[-1]), tokens[:, 1:].reshape(-1)
        return lax.psum(model.embedding.cross_entropy(hidden_TD, head, labels_T, weights.reshape(-1)), ALL)

    def next_logits(state: TrainState, tokens: jax.Array, position: jax.Array) -> jax.Array:
        hidden, head, _ = model(state.params, state.router_bias, tokens, full_capacity=True)
        last = lax.dynamic_index_in_dim(hidden[0], position, 0, keepdims=False).astype(jnp.float32)
        last = lax.psum(jnp.where(lax.axis_index(ALL) == 0, last, 0), ALL)
        return model.embedding.logits(last, head)

    def step(full_capacity: bool) -> Callable[..., Any]:
        body = _make_step(config, model, full_capacity, layers)
        return sharded(body, (state_specs, ACCUMULATED_BATCH), (state_specs, REPLICATED), donate_argnums=0)

    nll = sharded(evaluate, (state_specs, BATCH, BATCH), REPLICATED)
    shape = _placed_shape(initial, state_shardings)
    to_saved, from_saved, saved_shape = _saved_form(model, init, shape)
    return Program(
        init=jax.jit(initial, out_shardings=state_shardings),
        step=step(full_capacity=False),
        step_full_capacity=step(full_capacity=True),
        evaluate=lambda state, batches: [jax.block_until_ready(nll(state, *batch)) for batch in batches],
        next_logits=sharded(next_logits, (state_specs, BATCH, REPLICATED), REPLICATED),
        state_shape=shape,
        saved_shape=saved_shape,
        to_saved=to_saved,
        from_saved=from_saved,
        full_shape=saved_shape,
        full_state=to_saved,
        exchange=model.exchange,
        embedding="" if mesh.size == 1 else f"{model.embedding.plan.kind} embedding: {model.embedding.plan.reason}",
    )
