"""The text model of a streamed step: `StreamedDecoder`, used by `StreamedTrainer`.

Legend:
B batch
S sequence
T = B S tokens
D hidden
V vocabulary
E experts
N layers with experts
A accumulation steps
R devices
C elements of a device's shard of a layer's flat buffer
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jmoe.collectives.fusion import all_gather_buffer_local, flatten_shards, unflatten_parameters
from jmoe.config import STACKS, DataConfig, LayerKind, TrainConfig
from jmoe.config.cluster import LinksConfig
from jmoe.data.sample_rows import SampleRows
from jmoe.layers.documents import Documents
from jmoe.layers.loss import HeadWeight
from jmoe.layers.moe import MoEStats
from jmoe.layers.router import LossTokens
from jmoe.mesh import ALL, BATCH, REPLICATED
from jmoe.optim.loss_scale import LossScale, scale_loss, undo_loss_scale
from jmoe.training.gradient_reduction import StreamedGradients, reduce_streamed_gradients_local
from jmoe.training.sample_batch import documents_of, sample_totals_local
from jmoe.training.sharded_decoder import ShardedDecoder
from jmoe.training.state import TrainState, without_experts
from jmoe.training.streamed.model import (
    Choices,
    FinishStepInputs,
    FirstGatheredParams,
    LayerOptions,
    Metrics,
    ModelModules,
    Params,
    StreamedModel,
)
from jmoe.training.update import (
    auxiliary_losses,
    finish_step,
    sum_over_mesh,
    tokens_per_accumulation_step,
)
from jmoe.types import PyTree


class TokenMicroBatch(NamedTuple):
    """One accumulation step's tokens, and the next token of each as its label.

    weights_BS: of each label in the loss, which sum to 1 over a step; None for equal weights.
    documents: of rows of samples; None for windows of text.
    """

    inputs_BS: jax.Array
    labels_BS: jax.Array
    weights_BS: jax.Array | None = None
    documents: Documents | None = None


def split_samples(batch: SampleRows, config: DataConfig, num_devices: int) -> list[TokenMicroBatch]:
    """Return the micro-batches of a step's rows of samples [A, B, ...], of which this device has a
    part.
    """
    weight = sample_totals_local(batch, num_devices).weight
    rows = [SampleRows(*micro_batch) for micro_batch in zip(*batch, strict=True)]
    return [
        TokenMicroBatch(
            micro_batch.tokens[:, :-1],
            micro_batch.tokens[:, 1:],
            micro_batch.weights / weight,
            documents_of(micro_batch, config),
        )
        for micro_batch in rows
    ]


class StreamedDecoder(StreamedModel[TokenMicroBatch]):
    """The `StreamedModel` of a text run. chunk_bytes: see `ShardedDecoder.reverse_scan`. links: see
    `ShardedDecoder`.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        chunk_bytes: int | None = None,
        links: LinksConfig | None = None,
    ) -> None:
        self.config, self.sharded = config, (model := ShardedDecoder(config, mesh, links))
        self.decoder, self.dtype, self.native = model, model.dtype, model.native
        self.modules, self.scan = ModelModules.from_sharded(model), model.reverse_scan(chunk_bytes)
        self.saves_residuals = config.remat != "layer"
        specs = without_experts(model.specs)
        stacks, whole = STACKS.values(), partial(jax.tree.map, lambda _: REPLICATED)
        self.stack_specs = {name: specs[name] for name in stacks if name in specs}
        self.outside_spec = {
            name: specs[name] if name in model.embedding.split_dims else whole(shapes)
            for name, shapes in model.shapes.items()
            if name not in stacks
        }
        split: PyTree = BATCH
        self.micro_batch_spec = TokenMicroBatch(split, split, split, split)

    def gather_first_params(self, params: Params, *, first_kind: LayerKind) -> FirstGatheredParams:
        scan, model, stacks = self.scan, self.decoder, STACKS.values()
        outside = {name: tree for name, tree in params.items() if name not in stacks}
        if scan is None or not model.fused:
            return FirstGatheredParams(outside, None, {}, None)
        flat: dict[LayerKind, jax.Array] = {}
        for kind, name in STACKS.items():
            if name in params:
                layout = model.buffer_layout(params[name], stacked=True)
                row = partial(flatten_shards, entries=layout.entries)
                flatten_layers = jax.vmap(row, axis_size=layout.num_layers)
                flat[kind] = flatten_layers(layout.split(params[name])[0])
        layout = model.buffer_layout(outside)
        shards, outside_buffer = layout.split(outside)
        if shards:
            rows_RC = all_gather_buffer_local(
                flatten_shards(shards, layout.entries), scan.hierarchy
            )
            outside = layout.join(
                unflatten_parameters(rows_RC, layout.entries, scan.hierarchy), outside_buffer
            )
        row_C = flat[first_kind][0]
        gathered = [gather(lambda row: row) for gather in scan.all_gathers_by_chunk(row_C)]
        return FirstGatheredParams(outside, None, flat, scan.join_gathered_chunks(gathered, row_C))

    def embed(
        self, outside: Params, micro_batch: TokenMicroBatch
    ) -> tuple[jax.Array, list[Choices]]:
        module = self.modules.outside(self.decoder.cast_params(outside))
        lookup = self.decoder.embedding.lookup
        return module.embed(micro_batch.inputs_BS, self.dtype, lookup, micro_batch.documents), []

    def layer_options(
        self,
        kind: LayerKind,
        common: LayerOptions,
        step: jax.Array,
        micro_batch: TokenMicroBatch,
        number: int,
    ) -> LayerOptions:
        common = common._replace(documents=micro_batch.documents)
        if kind == "dense":
            return common
        return common._replace(step=step, accumulation=jnp.int32(number))

    def auxiliary_loss(
        self, kind: LayerKind, stats: MoEStats, loss_tokens: LossTokens | None
    ) -> jax.Array:
        assert loss_tokens is not None
        sums = stats.probs_sum_E[0], stats.z_sum[0]
        balance, z = auxiliary_losses(self.config, *sums, loss_tokens)
        return balance + z

    def loss_gradients(
        self,
        outside: Params,
        x_BSD: jax.Array,
        micro_batch: TokenMicroBatch,
        loss_scale: LossScale | None,
    ) -> tuple[Metrics, jax.Array, Params]:
        weight = micro_batch.weights_BS
        if weight is None:
            weight = jnp.full(micro_batch.labels_BS.shape, 1.0 / self._num_step_tokens, jnp.float32)
        with jax.named_scope("loss"):
            loss_and_gradients = jax.value_and_grad(self._nll_addend_local, argnums=(0, 1))
            loss, (doutside, dx_BSD) = loss_and_gradients(
                outside, x_BSD, micro_batch.labels_BS, scale_loss(weight, loss_scale)
            )
        metrics = {"loss": undo_loss_scale(loss, loss_scale)[None]}
        if (documents := micro_batch.documents) is not None:
            metrics |= {name: count[None] for name, count in documents.token_counts().items()}
        return metrics, dx_BSD, doutside

    @property
    def _num_step_tokens(self) -> int:
        """Number of tokens in a step, over all devices."""
        steps = self.config.gradient_accumulation_steps
        return tokens_per_accumulation_step(self.config) * steps

    def local_metric_addends(self, step: FinishStepInputs) -> Metrics:
        zero, loss_tokens = jnp.zeros((), jnp.float32), step.totals.loss_tokens
        assert loss_tokens is not None
        router_losses = [
            auxiliary_losses(
                self.config,
                s.probs_sum_E[0],
                s.z_sum[0],
                jax.tree.map(lambda totals, at=(n, a): totals[at], loss_tokens),
            )
            for n, layer in enumerate(step.stats)
            for a, s in enumerate(layer)
        ]
        entropies = [sum(s.entropy_sum[0] for s in layer) for layer in step.stats]
        num_tokens: jax.Array | int = self._num_step_tokens
        if loss_tokens.number is not None:
            num_tokens = jnp.maximum(loss_tokens.number[0].sum(), 1).astype(jnp.float32)
        losses = jax.tree.map(lambda *values: sum(value[0] for value in values), *step.losses)
        return losses | {
            "balance_loss": sum((balance for balance, _ in router_losses), zero),
            "z_loss": sum((z for _, z in router_losses), zero),
            "entropy": jnp.stack(entropies) / num_tokens,
        }

    def reduce_gradients(self, params: Params, grads: StreamedGradients) -> Params:
        return reduce_streamed_gradients_local(self.decoder, params, grads)

    def update_state(
        self, state: TrainState, grads: Params, squares: dict[str, jax.Array], metrics: Metrics
    ) -> tuple[TrainState, Metrics]:
        return finish_step(self.config, state, grads, squares, metrics)

    # Without gradients

    def _norm_and_head(self, outside: Params, x_BSD: jax.Array) -> tuple[jax.Array, HeadWeight]:
        """Return (the final norm's output [T, D], the output head)."""
        module = self.modules.outside(self.decoder.cast_params(outside))
        x_TD = module.norm(x_BSD, self.dtype).reshape(-1, x_BSD.shape[-1])
        return x_TD, self.decoder.head_weight(module)

    def _nll_addend_local(
        self, outside: Params, x_BSD: jax.Array, labels_BS: jax.Array, weights_BS: jax.Array
    ) -> jax.Array:
        """Return this device's addend to `summed_nll`, before the sum over devices."""
        head = self._norm_and_head(outside, x_BSD)
        labels_T, weights_T = labels_BS.reshape(-1), weights_BS.reshape(-1)
        return self.decoder.head.cross_entropy(*head, labels_T, weights_T)

    def summed_nll(
        self, outside: Params, x_BSD: jax.Array, labels_BS: jax.Array, weights_BS: jax.Array
    ) -> jax.Array:
        """Return the weighted negative log-likelihood in nats, summed over all devices' tokens."""
        own = self._nll_addend_local(outside, x_BSD, labels_BS, weights_BS)
        total: jax.Array = sum_over_mesh(self.decoder.mesh.size, own)
        return total

    def logits(self, outside: Params, x_BSD: jax.Array, position: jax.Array) -> jax.Array:
        """Return logits [V] after the token at `position` of the first sequence."""
        x_TD, head = self._norm_and_head(outside, x_BSD[:1])
        last_D = lax.dynamic_index_in_dim(x_TD, position, 0, keepdims=False).astype(jnp.float32)
        if self.decoder.mesh.size > 1:
            last_D = lax.psum(jnp.where(lax.axis_index(ALL) == 0, last_D, 0), ALL)
        return self.decoder.head.logits(last_D, head)
