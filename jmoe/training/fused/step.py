"""The training step with everything on the devices: one `shard_map` over the mesh, from tokens to
the updated state.

Each device computes its addend to the global loss and that addend's gradient; gradients are reduced
once. No collective is differentiated except the expert exchange and the parameter gathers, whose
transposes are collectives of the same kinds.

Legend:
A accumulation steps
B local batch
S sequence
T = B S local tokens
D hidden
N MoE layers
E experts
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jmoe.collectives.schedule import compiler_options
from jmoe.config import STACKS, TrainConfig
from jmoe.config.cluster import LinksConfig
from jmoe.data.sample_rows import AnyRows, SampleRows
from jmoe.layers.context import ContextGroup, SplitSequences, split_sequences
from jmoe.layers.documents import Documents
from jmoe.layers.loss import HeadWeight
from jmoe.memory.record_checkpoint import RecordCheckpoints
from jmoe.mesh import ACCUMULATED_BATCH, ALL, BATCH, REPLICATED, shapes_with_shardings, shardings
from jmoe.offload.expert_state import ReadExperts
from jmoe.optim.loss_scale import LossScale, scale_loss, undo_loss_scale
from jmoe.optim.moments import describe_moments
from jmoe.training.fused.reverse_scan import ReverseScan
from jmoe.training.gradient_reduction import reduce_gradients_local, squared_norms_local
from jmoe.training.native import trace_natively_if
from jmoe.training.sample_batch import (
    SampleTotals,
    documents_of,
    inputs_and_targets,
    sample_totals_local,
    split_of,
)
from jmoe.training.sharded_decoder import ShardedDecoder
from jmoe.training.state import Batch, TrainState, read_missing_experts
from jmoe.training.trained_parts import (
    check_train_and_freeze_patterns,
    describe_trained_and_frozen,
    subtree_like,
    trained_subtree,
)
from jmoe.training.update import (
    auxiliary_losses,
    evaluation_program,
    finish_step,
    loss_tokens_of,
    num_dropped_assignments,
    router_key,
    run_without_drops,
    sum_over_mesh,
    tokens_of_layers,
    tokens_per_accumulation_step,
)
from jmoe.types import PyTree

Metrics = dict[str, jax.Array]


class FusedTrainer:
    """The `Trainer` of text runs whose state lies entirely on the devices.

    `step` is one compiled program and donates its state. chunk_bytes: see
    `ShardedDecoder.reverse_scan`. links: see `ShardedDecoder`.
    """

    decoder: type[ShardedDecoder] = ShardedDecoder
    evaluation_batches = 1
    records: RecordCheckpoints | None = None
    progress_counters: Callable[[], object] | None = None

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        chunk_bytes: int | None = None,
        links: LinksConfig | None = None,
    ) -> None:
        self.config, self.model = config, (model := self.decoder(config, mesh, links))
        check_train_and_freeze_patterns(config, model.shapes)
        self._layer_runner = model.reverse_scan(chunk_bytes)
        size = config.devices_per_sequence(mesh.size)
        self._context = ContextGroup(size, mesh.size) if size > 1 else None
        self.saved_shape = self.full_shape = model.saved_shape
        self.notes = [
            *model.notes,
            *describe_trained_and_frozen(config, model.shapes),
            *describe_moments(config.optimizer, trained_subtree(config, model.shapes)),
        ]
        sharded = self.shard_over_mesh
        copies = jax.eval_shape(model.cast_copies, model.state_shape.params)
        on_one: PyTree = tuple(REPLICATED for _ in copies)
        state = self.state_specs = replace(model.state_specs, cast=on_one)
        places = shardings(state, mesh)
        self.state_shape: TrainState = shapes_with_shardings(
            replace(model.state_shape, cast=copies), places
        )
        self.init = jax.jit(
            lambda: self.refresh_cast_copies(model.initial_state()), out_shardings=places
        )

        def step(state_now: TrainState, batch: PyTree, full_capacity: bool = False) -> PyTree:
            body = partial(self._step_local, full_capacity=full_capacity)
            return sharded(
                body, in_specs=(state, ACCUMULATED_BATCH), out_specs=(state, REPLICATED)
            )(state_now, batch)

        self.step = self._compiled_step(step)
        self._nll = evaluation_program(sharded, self._summed_nll_local, state, BATCH)
        self._logits = evaluation_program(sharded, self._logits_local, state, BATCH, REPLICATED)

    def _compiled_step(self, step: Callable[..., PyTree]) -> jax.stages.Wrapped:
        """Return `step` as one compiled program that donates its first argument, the state."""
        options = dict[str, int]()
        if self._layer_runner is not None:
            device = self.model.mesh.devices.flat[0]
            options = compiler_options(self._layer_runner.schedule, device)
        return jax.jit(
            step, static_argnames="full_capacity", donate_argnums=0, compiler_options=options
        )

    def shard_over_mesh(
        self, body: Callable[..., PyTree], **specs: PyTree
    ) -> Callable[..., PyTree]:
        """Return `body` in a `shard_map` over the whole mesh, traced with native CPU operations if
        the run uses them. specs: `in_specs` and `out_specs`.
        """
        native_body = trace_natively_if(self.model.native, body)
        return jax.shard_map(native_body, mesh=self.model.mesh, check_vma=False, **specs)

    @property
    def draws_random_numbers(self) -> bool:
        """Whether a training step draws random numbers."""
        return bool(self.config.model.router.draws_random_numbers or self.config.lora.dropout)

    # A step

    def _step_local(
        self, state: TrainState, batch: PyTree, *, full_capacity: bool, **constants: PyTree
    ) -> tuple[TrainState, PyTree]:
        """Return (new state, metrics); the state is unchanged if the loss or gradient is not
        finite, or a dropless buffer overflows.
        """
        grads, metrics = self.gradients_local(
            state, batch, full_capacity=full_capacity, **constants
        )
        num_devices = self.model.mesh.size
        with jax.named_scope("reduce_gradients"):
            already_reduced: Collection[str] = () if self._layer_runner is None else STACKS.values()
            grads = reduce_gradients_local(grads, self.model, already_reduced)
            metrics = sum_over_mesh(num_devices, metrics)
        grads = subtree_like(grads, state.m)
        squares = sum_over_mesh(num_devices, squared_norms_local(grads, self.model))
        state, metrics = finish_step(self.config, state, grads, squares, metrics, self.model.specs)
        return self.refresh_cast_copies(state), metrics

    def refresh_cast_copies(self, state: TrainState) -> TrainState:
        """Return the state with fresh compute-dtype copies of its parameters in `cast`."""
        return replace(state, cast=self.model.cast_copies(state.params))

    def gradients_local(
        self, state: TrainState, batch: PyTree, *, full_capacity: bool, **constants: PyTree
    ) -> tuple[PyTree, Metrics]:
        """Return this device's addends to (gradients, metrics), summed over accumulation steps.

        With a `ReverseScan`, the layers' gradients are reduced over devices already; gradients
        outside the layers are not. batch: tokens [A, B, S + 1], `SampleRows`, or another tuple
        whose first leaf they are. constants: keyword arguments of `token_loss_local`.
        """
        options: dict[str, PyTree] = {
            "loss_scale": state.loss_scale,
            "full_capacity": full_capacity,
            **_frozen_as_keyword(state),
        } | constants
        if isinstance(batch, AnyRows):
            options["totals"] = sample_totals_local(batch, self.model.mesh.size)
        run = partial(self._accumulate_gradients_local, state, batch, options)
        num_micro_batches = jax.tree.leaves(batch)[0].shape[0]
        layer_runner = self._layer_runner
        if num_micro_batches == 1 or layer_runner is None or not self.model.needs_layer_all_reduce:
            return run(range(num_micro_batches), layer_runner)
        grads, metrics = run(range(num_micro_batches - 1), replace(layer_runner, reduces=False))
        earlier = {kind: grads.pop(name) for kind, name in STACKS.items() if name in grads}
        last, last_metrics = run(
            range(num_micro_batches - 1, num_micro_batches), replace(layer_runner, summed=earlier)
        )
        sums = {name: jax.tree.map(jnp.add, g, last[name]) for name, g in grads.items()}
        return last | sums, jax.tree.map(jnp.add, metrics, last_metrics)

    def _accumulate_gradients_local(
        self,
        state: TrainState,
        batch: PyTree,
        options: dict[str, PyTree],
        micro_batch_range: range,
        layer_runner: ReverseScan | None,
    ) -> tuple[PyTree, Metrics]:
        """Return this device's (gradients, metrics), summed over the micro-batches of the batch in
        `micro_batch_range`. options: keyword arguments of `loss_local`.
        """

        def micro_batch_gradients(
            index: jax.Array, micro_batch: PyTree, layer_runner: ReverseScan | None = layer_runner
        ) -> tuple[PyTree, Metrics]:
            loss_and_gradients = jax.value_and_grad(
                partial(self.loss_local, layer_runner=layer_runner, **options), has_aux=True
            )
            key = None
            if self.draws_random_numbers:
                key = router_key(self.config, state.step, lax.axis_index(ALL), index)
            params = self.model.with_cast_copies(state.params, state.cast)
            (_, metrics), grads = loss_and_gradients(params, state.router_bias, micro_batch, key)
            return jax.tree.map(lambda g, w: g.astype(w.dtype), grads, state.params), metrics

        first, end = micro_batch_range.start, micro_batch_range.stop
        if len(micro_batch_range) == 1:
            return micro_batch_gradients(jnp.int32(first), jax.tree.map(lambda x: x[first], batch))

        def add_micro_batch(carry: PyTree, xs: PyTree) -> tuple[PyTree, None]:
            if layer_runner is None or layer_runner.reduces:
                return jax.tree.map(jnp.add, carry, micro_batch_gradients(*xs)), None
            # the layers add their gradients to the sums, which need no second stack of layers
            sums, metrics = carry
            earlier = {kind: sums[name] for kind, name in STACKS.items() if name in sums}
            adding = replace(layer_runner, summed=earlier)
            grads, more = micro_batch_gradients(xs[0], xs[1], layer_runner=adding)
            added = {
                name: jax.tree.map(jnp.add, sums[name], g)
                for name, g in grads.items()
                if name not in STACKS.values()
            }
            return (grads | added, jax.tree.map(jnp.add, metrics, more)), None

        xs = jnp.arange(first, end, dtype=jnp.int32), jax.tree.map(lambda x: x[first:end], batch)
        shapes = jax.eval_shape(micro_batch_gradients, *jax.tree.map(lambda x: x[0], xs))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        grads_and_metrics: tuple[PyTree, Metrics] = lax.scan(add_micro_batch, zeros, xs)[0]
        return grads_and_metrics

    def loss_local(
        self,
        params: PyTree,
        router_bias: PyTree,
        micro_batch: PyTree,
        key: jax.Array | None,
        *,
        loss_scale: LossScale | None,
        full_capacity: bool,
        layer_runner: ReverseScan | None = None,
        totals: SampleTotals | None = None,
        **constants: PyTree,
    ) -> tuple[jax.Array, Metrics]:
        """Return (this device's addend to the loss, times the loss scale; its terms, unscaled, as
        metrics).

        micro_batch: tokens [B, S + 1] of one accumulation step, `SampleRows`, or another tuple
        whose first leaf they are. key: the routers' PRNG key. layer_runner: see
        `ShardedDecoder.__call__`. totals: of the step's `SampleRows`. constants: `frozen` of
        the state if it is not None, and keyword arguments of `token_loss_local`.
        """
        config = self.config
        num_tokens: jax.Array | int = (
            tokens_per_accumulation_step(config) * config.gradient_accumulation_steps
        )
        documents: Documents | None = None
        weights_T, counted = None, Metrics()
        if totals is not None:
            documents = documents_of(micro_batch, config.data, self._context)
            assert documents is not None
            weights_T, num_tokens = micro_batch.weights.reshape(-1) / totals.weight, totals.tokens
            counted = documents.token_counts()
        options: PyTree = {"key": key, "train": True, "full_capacity": full_capacity}
        options["documents"] = documents
        options["split"] = split = split_of(micro_batch, config.data, self._context)
        if "frozen" in constants:
            options["frozen"] = constants.pop("frozen")
        inputs_BS, targets_BS, shares_BS = self.examples_local(micro_batch, split)
        hidden, head, stats = self.model(
            params, router_bias, inputs_BS, layer_runner, remat=config.remat, **options
        )
        labels_T = targets_BS.reshape(-1)
        with jax.named_scope("loss"):
            if weights_T is None:
                weights_T = jnp.full(labels_T.shape, 1.0 / num_tokens, jnp.float32)
            if shares_BS is not None:
                weights_T = weights_T * shares_BS.reshape(-1)
            weights_T = scale_loss(weights_T, loss_scale)
            hidden_TD = hidden.reshape(-1, hidden.shape[-1])
            loss, terms = self.token_loss_local(
                hidden_TD, head, labels_T, weights_T, micro_batch, **constants
            )
            terms = {name: undo_loss_scale(value, loss_scale) for name, value in terms.items()}
            terms |= counted
        if stats is None:
            return loss + 0.0, lax.stop_gradient(terms)
        layer_tokens: PyTree = num_tokens
        if totals is None:
            layer_tokens = tokens_of_layers(config) * config.gradient_accumulation_steps
        with jax.named_scope("auxiliary_losses"):
            loss_tokens = lax.psum(loss_tokens_of(stats), ALL)
            balance, z = auxiliary_losses(config, stats.probs_sum_E, stats.z_sum, loss_tokens)
        metrics = terms | {
            "balance_loss": balance,
            "z_loss": z,
            "counts": stats.counts_E,
            "entropy": stats.entropy_sum / layer_tokens,
            "dropped": stats.dropped,
        }
        return loss + scale_loss(balance + z, loss_scale), lax.stop_gradient(metrics)

    def examples_local(
        self, micro_batch: PyTree, split: SplitSequences | None
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return (inputs, targets) [B, S] of a micro-batch, and what multiplies the weight of each
        target, None for 1. Subclasses override this; a model with an encoder has more inputs.
        """
        return *inputs_and_targets(jax.tree.leaves(micro_batch)[0], split), None

    def token_loss_local(
        self,
        hidden_TD: jax.Array,
        head: HeadWeight,
        labels_T: jax.Array,
        weights_T: jax.Array,
        micro_batch: PyTree,
    ) -> tuple[jax.Array, Metrics]:
        """Return this device's (token loss, metrics), without the routers' losses;
        `DistillingTrainer` overrides this.

        The loss and the metrics must be linear in `weights_T`, the weight of each token: with
        float16 these weights include the loss scale.
        """
        nll = self.model.head.cross_entropy(hidden_TD, head, labels_T, weights_T)
        return nll, {"loss": nll}

    # Without gradients

    def _hidden_states_local(
        self, state: TrainState, tokens_BS: jax.Array, **options: PyTree
    ) -> tuple[jax.Array, HeadWeight, PyTree]:
        """Return (last hidden states, output head, MoE statistics) of this device's tokens."""
        return self.model(
            self.model.with_cast_copies(state.params, state.cast),
            state.router_bias,
            tokens_BS,
            **_frozen_as_keyword(state),
            **options,
        )

    def _summed_nll_local(
        self, state: TrainState, batch: PyTree, *, full_capacity: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return (summed negative log-likelihood in nats, dropped assignments), both over all
        devices.
        """
        tokens_BS, weights_BS, *_ = batch
        split = split_of(batch, self.config.data, self._context)
        inputs_BS, targets_BS = inputs_and_targets(tokens_BS, split)
        hidden, head, stats = self._hidden_states_local(
            state,
            inputs_BS,
            full_capacity=full_capacity,
            documents=documents_of(batch, self.config.data, self._context),
            split=split,
        )
        hidden_TD, labels_T = hidden.reshape(-1, hidden.shape[-1]), targets_BS.reshape(-1)
        nll = lax.psum(
            self.model.head.cross_entropy(hidden_TD, head, labels_T, weights_BS.reshape(-1)), ALL
        )
        return nll, num_dropped_assignments(stats)

    def evaluate_batches(
        self, state: TrainState, batches: Sequence[Batch | SampleRows]
    ) -> list[jax.Array]:
        return [run_without_drops(partial(self._nll, state, batch)) for batch in batches]

    def _logits_local(
        self, state: TrainState, tokens_BS: jax.Array, position: jax.Array, *, full_capacity: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return (logits [V] as of `next_logits`, dropped assignments), equal on all devices."""
        split, group = None, self._context
        device: jax.Array | int = 0
        if group is not None:
            split = split_sequences(group, tokens_BS.shape[1])
            device, position = group.device_and_index(position, tokens_BS.shape[1])
        hidden, head, stats = self._hidden_states_local(
            state, tokens_BS, full_capacity=full_capacity, split=split
        )
        last = lax.dynamic_index_in_dim(hidden[0], position, 0, keepdims=False).astype(jnp.float32)
        last = lax.psum(jnp.where(lax.axis_index(ALL) == device, last, 0), ALL)
        return self.model.head.logits(last, head), num_dropped_assignments(stats)

    def next_logits(
        self, state: TrainState, tokens_BS: jax.Array, position: jax.Array
    ) -> jax.Array:
        """Return logits [V] after the token at `position` of the first sequence of `tokens_BS`."""
        logits_V: jax.Array = run_without_drops(partial(self._logits, state, tokens_BS, position))
        return logits_V

    # Checkpoints

    def prepare_state_for_save(self, state: TrainState) -> TrainState:
        """Return the state in the layout of a checkpoint, without the copies in `cast`."""
        return self.model.to_saved(replace(state, cast=()))

    def restore_state(
        self,
        saved: TrainState,
        weights: ReadExperts | None = None,
        moments: ReadExperts | None = None,
    ) -> TrainState:
        """Return the training state for a checkpoint's state. weights, moments: functions that read
        the experts that `saved` lacks; None if it has them.
        """
        layers = self.config.model.expert_layers
        whole = read_missing_experts(saved, self.saved_shape, layers, weights, moments)
        return self.refresh_cast_copies(self.model.from_saved(whole))

    def expert_stats(self) -> None:
        """Return None: no expert moves between tiers."""

    def close(self) -> None:
        """Do nothing: this trainer has no threads."""


def _frozen_as_keyword(state: TrainState) -> dict[str, PyTree]:
    """Return {"frozen": the frozen parameters}, keyword arguments of the model; {} if all
    parameters are trained.
    """
    return {} if state.frozen is None else {"frozen": state.frozen}
