"""LoRA over experts that lie in host memory or on NVMe: the host runs layer by layer while the next
layer's experts arrive.

Each layer runs for all micro-batches before the next one starts, so a step reads each layer's
experts once forwards and once backwards. The experts have no gradients and no optimizer state, and
nothing is written back.

Legend: A accumulation steps, B batch, S sequence, T = B S tokens, D hidden, V vocabulary, L layers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jmoe.config import STACKS, Layer, LayerKind, TrainConfig, check
from jmoe.data.sample_rows import SampleRows
from jmoe.layers.documents import Documents
from jmoe.layers.moe import MoEStats
from jmoe.memory.pinned import choose_host_allocator
from jmoe.memory.record_layout import RecordLayout
from jmoe.mesh import REPLICATED
from jmoe.models.block import saved_residual_names
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.frozen_ring import FrozenExpertRing
from jmoe.offload.residency import ExpertTier, open_expert_store
from jmoe.offload.slot_arrays import Arrays
from jmoe.training.frozen_experts import (
    decoded_matrices,
    decoded_zeros,
    is_compressed,
    open_frozen_experts,
    stored_matrices,
)
from jmoe.training.fused.adapting import ADAPTERS, AdapterTrainer, FrozenModel, LayerInputs
from jmoe.training.gradient_reduction import squared_norms_local
from jmoe.training.sample_batch import documents_of, sample_totals_local
from jmoe.training.state import Batch, TrainState
from jmoe.training.update import finish_step, router_key, tokens_per_accumulation_step
from jmoe.training.vjp import apply_vjp, vjp_with_residuals
from jmoe.types import PyTree

Metrics = dict[str, jax.Array]
WANTED = (0, 1)  # arguments of a layer's function that have gradients: its adapters and its input


class MicroBatch(NamedTuple):
    """One accumulation step: tokens and labels [B, S], the labels' weights in the loss, and the
    documents of rows of samples.
    """

    tokens_BS: jax.Array
    labels_BS: jax.Array
    weights_BS: jax.Array
    documents: Documents | None


class StepValues(NamedTuple):
    """The values of a step from which its metrics are computed: auxiliary losses and statistics of
    routing by layer and micro-batch ([L][A]), terms of the loss by micro-batch, and the number of
    tokens.
    """

    losses: list[list[tuple[jax.Array, jax.Array]]]  # balance and z
    stats: list[list[MoEStats]]
    terms: list[Metrics]
    num_tokens: jax.Array


class StreamedAdapterTrainer(AdapterTrainer):
    """An `AdapterTrainer` on one device whose model has its experts on the tier `tiers.experts`.

    Compressed experts are decoded once a pass for all micro-batches, each layer into the memory of
    the one before. run: the folder name of the experts' records on the tier nvme. Raises ValueError
    on several devices.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, run: str = "run") -> None:
        tier = config.tiers.experts
        words = f"must be device on {mesh.size} devices with lora.rank: one device streams experts"
        check(mesh.size == 1, "tiers.experts", tier, words)
        super().__init__(config, mesh)
        self._run, self._layers = run, config.model.layers
        self.ring: FrozenExpertRing | None = None
        self._decoded: Arrays | None = None  # of the layer that runs; None if nothing is compressed
        self._filled = 0
        self.progress_counters = lambda: self._filled
        self.evaluation_batches = len(self._layers) * config.gradient_accumulation_steps
        self.step = self._step_streamed  # type: ignore[assignment]
        program = self._program
        self._decode = program(self._decode_layer, donate=(1,))
        self._split = program(self._split_batch)
        self._embed = program(self.model.embed_tokens)
        self._loss = program(self._loss_and_gradient)
        self._zeros = program(partial(jax.tree.map, jnp.zeros_like))
        self._finish = program(self._finish_step, donate=(0,))
        self._nll = program(self._summed_nll)
        self._last_logits = program(self._logits_of)
        self._forward, self._backward = cache(self._forward_program), cache(self._backward_program)

    def _program(self, body: Callable[..., PyTree], donate: tuple[int, ...] = ()) -> PyTree:
        """Return `body` compiled for the mesh's one device."""

        def run(*args: PyTree) -> PyTree:
            specs = tuple(REPLICATED for _ in args)
            return self.shard_over_mesh(body, in_specs=specs, out_specs=REPLICATED)(*args)

        # a donated argument that is not read must stay, or its memory could not be the result's
        return jax.jit(run, donate_argnums=donate, keep_unused=bool(donate))

    # Experts

    def _load_frozen(self) -> tuple[PyTree, PyTree]:
        """Return (frozen parameters without the experts' matrices, router biases), and put the
        experts on their tier.
        """
        if self.ring is None:
            self.ring = self._open_ring()
        return super()._load_frozen()

    def _open_ring(self) -> FrozenExpertRing:
        config, tiers, device = self.config, self.config.tiers, self.model.mesh.devices.flat[0]
        assert tiers.experts in ("host", "nvme")
        place = Path(tiers.path or Path(config.output_dir, "records"), self._run, "frozen")
        memory = choose_host_allocator(tiers.pin_host_memory, "tiers.pin_host_memory", [device])

        def count(record: int) -> None:
            self._filled += 1

        with open_frozen_experts(config) as checkpoint:
            fields = checkpoint.expert_fields
            index = ExpertIndex.from_model(config.model)
            records_bytes = RecordLayout.from_arrays(fields).record_bytes * index.num_records
            tier = ExpertTier(
                tiers.experts,
                tiers.host_cache_bytes or records_bytes // 4,
                place,
                f"tiers.path = {tiers.path!r}",
            )
            store = open_expert_store(
                checkpoint, index, tier, allocate=memory.allocate, on_record=count
            )
            return FrozenExpertRing(
                store, index, stored_matrices(fields), device, tiers.device_layers
            )

    @property
    def _open_experts(self) -> FrozenExpertRing:
        if self.ring is None:
            raise ValueError("the experts are nowhere yet: init or restore_state comes first")
        return self.ring

    @contextmanager
    def _experts_of(self, layer: Layer, results: list[PyTree]) -> Iterator[Arrays]:
        """Yield the matrices of a layer's experts, decoded if they are compressed; {} for a dense
        layer. results: what reads them, which a CPU waits for.
        """
        if layer.kind == "dense":
            yield {}
            return
        with self._open_experts.next_layer(layer.record) as stored:
            if not is_compressed(stored):
                yield stored
                self._wait_on_cpu(results)
                return
            if self._decoded is None:
                self._decoded = decoded_zeros(stored, self.model.dtype)
            self._decoded = self._decode(stored, self._decoded)
            self._wait_on_cpu(self._decoded)
        yield self._decoded
        self._wait_on_cpu(results)

    def _decode_layer(self, stored: Arrays, memory: Arrays) -> Arrays:
        """Return the decoded matrices of a layer's experts, in the memory of its donated
        argument.
        """
        return decoded_matrices(stored, self.model.dtype)

    def _wait_on_cpu(self, results: PyTree) -> None:
        """Wait for `results` on a CPU, whose programs read the ring's memory itself. A GPU runs its
        programs and the copies into the ring in order.
        """
        if self.model.mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(results)

    def close(self) -> None:
        """Stop the threads that copy experts, and close their store."""
        if self.ring is not None:
            self.ring.close()

    # A step

    def _step_streamed(
        self, state: TrainState, batch: PyTree, full_capacity: bool = False
    ) -> tuple[TrainState, Metrics]:
        """Return (new state, metrics) after one optimizer step, like `Trainer.step`. One device has
        buffers for all tokens whatever `full_capacity` is.
        """
        model = FrozenModel(state.frozen, state.router_bias)
        micro_batches, keys, num_tokens = self._split(batch, state.step)
        down = [layer.record for layer in self._layers if layer.kind == "moe"]
        self._open_experts.begin_pass(down + down[::-1])
        xs = [self._embed(model, m.tokens_BS, m.documents) for m in micro_batches]
        values = StepValues([], [], [], num_tokens)
        inputs = [
            LayerInputs(model, {}, jnp.int32(0), key, m.documents)
            for key, m in zip(keys, micro_batches, strict=True)
        ]
        passed = self._run_forward(state.params[ADAPTERS], inputs, xs, values)
        for a, micro_batch in enumerate(micro_batches):
            terms, xs[a] = self._loss(model, xs[a], micro_batch)
            values.terms.append(terms)
        grads = self._run_backward(state.params[ADAPTERS], inputs, xs, passed)
        stepped, metrics = self._finish(replace(state, frozen=None), grads, values)
        return replace(stepped, frozen=state.frozen), metrics

    def _run_forward(
        self,
        adapters: PyTree,
        inputs: Sequence[LayerInputs],
        xs: list[jax.Array],
        values: StepValues,
    ) -> list[list[tuple[jax.Array, PyTree]]]:
        """Return each layer's (input, residuals) of every micro-batch; replaces `xs` by the last
        layer's outputs, and adds losses and statistics to `values`.
        """
        passed = []
        for layer in self._layers:
            forward = self._forward(layer.kind, layer.window, True)
            saved, results = list[tuple[jax.Array, PyTree]](), list[PyTree]()
            with self._experts_of(layer, results) as stored:
                for a, own in enumerate(inputs):
                    own = own._replace(stored=stored, number=jnp.int32(layer.number))
                    result, residuals = forward(adapters, xs[a], own)
                    saved.append((xs[a], residuals))
                    results.append(result)
                    xs[a] = result.y_BSD
            passed.append(saved)
            if layer.kind == "moe":
                values.losses.append([result.losses for result in results])
                values.stats.append([result.stats for result in results])
        return passed

    def _run_backward(
        self,
        adapters: PyTree,
        inputs: Sequence[LayerInputs],
        dxs: list[jax.Array],
        passed: list[list[tuple[jax.Array, PyTree]]],
    ) -> PyTree:
        """Return the adapters' gradients. dxs: of the last layer's outputs. Empties `passed`."""
        grads = self._zeros(adapters)
        for layer in reversed(self._layers):
            backward, saved = self._backward(layer.kind, layer.window), passed.pop()
            results = list[PyTree]()
            with self._experts_of(layer, results) as stored:
                for a, own in enumerate(inputs):
                    own = own._replace(stored=stored, number=jnp.int32(layer.number))
                    grads, dxs[a] = backward(grads, adapters, own, *saved[a], dxs[a])
                results.append((grads, dxs))
        return grads

    def _forward_program(self, kind: LayerKind, window: int | None, train: bool) -> PyTree:
        """Return the compiled function of (adapters, x, inputs) to (`LayerResults`, residuals);
        without training the residuals are None.
        """
        run = partial(self.model.apply_layer, kind, window, train=train)

        def forward(adapters: PyTree, x_BSD: jax.Array, inputs: LayerInputs) -> PyTree:
            own = _of_layer(adapters, kind, inputs.number)
            if not train:
                return run(own, x_BSD, inputs), None
            names = saved_residual_names(self.config.remat)
            return vjp_with_residuals(run, (own, x_BSD, inputs), WANTED, names)

        return self._program(forward)

    def _backward_program(self, kind: LayerKind, window: int | None) -> PyTree:
        """Return the compiled function of (gradients, adapters, inputs, x, residuals, dy) to
        (gradients with the layer's added, dx). It donates the gradients and dy.
        """
        run = partial(self.model.apply_layer, kind, window, train=True)

        def backward(
            grads: PyTree,
            adapters: PyTree,
            inputs: LayerInputs,
            x_BSD: jax.Array,
            residuals: PyTree,
            dy_BSD: jax.Array,
        ) -> tuple[PyTree, jax.Array]:
            own = _of_layer(adapters, kind, inputs.number)
            args = own, x_BSD, inputs
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(run, *args))
            ones = jax.tree.map(jnp.ones_like, zeros.losses)
            dresults = zeros._replace(y_BSD=dy_BSD, losses=ones)
            dadapters, dx_BSD = apply_vjp(residuals, args, dresults)
            name = STACKS[kind]
            if name not in grads:
                return grads, dx_BSD
            added = jax.tree.map(
                lambda total, g: total.at[inputs.number].add(g), grads[name], dadapters
            )
            return grads | {name: added}, dx_BSD

        return self._program(backward, donate=(0, 5))

    # What the programs compute

    def _split_batch(
        self, batch: PyTree, step: jax.Array
    ) -> tuple[list[MicroBatch], list[jax.Array | None], jax.Array]:
        """Return (micro-batches, their PRNG keys, the number of tokens that the loss is a mean
        of).
        """
        config, steps = self.config, self.config.gradient_accumulation_steps
        keys: list[jax.Array | None] = [None] * steps
        if self.draws_random_numbers:
            keys = [router_key(config, step, 0, jnp.int32(a)) for a in range(steps)]
        if isinstance(batch, SampleRows):
            totals = sample_totals_local(batch, 1)
            rows = [SampleRows(*one) for one in zip(*batch, strict=True)]
            weights = [one.weights / totals.weight for one in rows]
            num_tokens, documents = totals.tokens, [documents_of(one, config.data) for one in rows]
            tokens = [one.tokens for one in rows]
        else:
            num_tokens = jnp.float32(tokens_per_accumulation_step(config) * steps)
            tokens, documents = list(batch), [None] * steps
            each = jnp.full(batch.shape[1:2] + (batch.shape[2] - 1,), 1.0 / num_tokens, jnp.float32)
            weights = [each] * steps
        split = [(t[:, :-1], t[:, 1:]) for t in tokens]
        micro_batches = [
            MicroBatch(*both, w, d) for both, w, d in zip(split, weights, documents, strict=True)
        ]
        return micro_batches, keys, num_tokens

    def _loss_and_gradient(
        self, model: FrozenModel, x_BSD: jax.Array, micro_batch: MicroBatch
    ) -> tuple[Metrics, jax.Array]:
        """Return (the loss and counts of a micro-batch, the gradient of the last hidden states)."""

        def token_loss(x_BSD: jax.Array) -> tuple[jax.Array, Metrics]:
            labels_T, weights_T = (
                part.reshape(-1) for part in (micro_batch.labels_BS, micro_batch.weights_BS)
            )
            head = self.model.norm_and_head(model, x_BSD)
            return self.token_loss_local(*head, labels_T, weights_T, micro_batch)

        (_, terms), dx_BSD = jax.value_and_grad(token_loss, has_aux=True)(x_BSD)
        if micro_batch.documents is not None:
            terms |= micro_batch.documents.token_counts()
        return terms, dx_BSD

    def _finish_step(
        self, state: TrainState, grads: PyTree, values: StepValues
    ) -> tuple[TrainState, Metrics]:
        """Return (the state after AdamW, the step's metrics)."""
        metrics = jax.tree.map(lambda *terms: sum(terms), *values.terms)
        by_layer = [jax.tree.map(lambda *each: sum(each), *stats) for stats in values.stats]
        losses = [loss for layer in values.losses for loss in layer]
        metrics |= {
            "balance_loss": sum(balance for balance, _ in losses),
            "z_loss": sum(z for _, z in losses),
            "counts": jnp.stack([stats.counts_E for stats in by_layer]),
            "entropy": jnp.stack([stats.entropy_sum for stats in by_layer]) / values.num_tokens,
            "dropped": jnp.stack([stats.dropped for stats in by_layer]),
        }
        own = {ADAPTERS: grads}
        return finish_step(self.config, state, own, squared_norms_local(own, self.model), metrics)

    # Without gradients

    def _last_hidden_states(
        self, state: TrainState, batches: Sequence[tuple[jax.Array, Documents | None]]
    ) -> tuple[FrozenModel, list[jax.Array]]:
        """Return (the frozen model, last hidden states of each batch of (tokens, documents)). Each
        layer's experts are read once for all batches.
        """
        model = FrozenModel(state.frozen, state.router_bias)
        down = [layer.record for layer in self._layers if layer.kind == "moe"]
        self._open_experts.begin_pass(down)
        xs = [self._embed(model, *batch) for batch in batches]
        for layer in self._layers:
            forward = self._forward(layer.kind, layer.window, False)
            with self._experts_of(layer, xs) as stored:
                for i, (_, documents) in enumerate(batches):
                    number = jnp.int32(layer.number)
                    own = LayerInputs(model, stored, number, None, documents)
                    xs[i] = forward(state.params[ADAPTERS], xs[i], own)[0].y_BSD
        return model, xs

    def evaluate_batches(
        self, state: TrainState, batches: Sequence[Batch | SampleRows]
    ) -> list[jax.Array]:
        """Return the summed negative log-likelihood of each batch, in nats."""
        inputs = [(one[0][:, :-1], documents_of(one, self.config.data)) for one in batches]
        model, xs = self._last_hidden_states(state, inputs)
        return [
            self._nll(model, x, one[0][:, 1:], one[1]) for x, one in zip(xs, batches, strict=True)
        ]

    def _summed_nll(
        self, model: FrozenModel, x_BSD: jax.Array, labels_BS: jax.Array, weights_BS: jax.Array
    ) -> jax.Array:
        head = self.model.norm_and_head(model, x_BSD)
        nll: jax.Array = self.model.head.cross_entropy(
            *head, labels_BS.reshape(-1), weights_BS.reshape(-1)
        )
        return nll

    def next_logits(
        self, state: TrainState, tokens_BS: jax.Array, position: jax.Array
    ) -> jax.Array:
        """Return logits [V] after the token at `position` of the first sequence of `tokens_BS`."""
        model, (x_BSD,) = self._last_hidden_states(state, [(tokens_BS, None)])
        logits_V: jax.Array = self._last_logits(model, x_BSD, position)
        return logits_V

    def _logits_of(self, model: FrozenModel, x_BSD: jax.Array, position: jax.Array) -> jax.Array:
        hidden_TD, head = self.model.norm_and_head(model, x_BSD[:1])
        last_D = lax.dynamic_index_in_dim(hidden_TD, position, 0, keepdims=False)
        logits_V: jax.Array = self.model.head.logits(last_D.astype(jnp.float32), head)
        return logits_V


def _of_layer(adapters: PyTree, kind: LayerKind, number: jax.Array) -> PyTree:
    """Return the adapters of layer `number` of its kind; {} if that kind has none."""
    pick = partial(lax.dynamic_index_in_dim, index=number, axis=0, keepdims=False)
    return jax.tree.map(pick, adapters.get(STACKS[kind], {}))
