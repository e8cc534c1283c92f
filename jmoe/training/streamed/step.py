"""The streamed trainer of text models.

Legend: A accumulation steps, B batch, S sequence, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import flax.nnx as nnx
import jax
from jax.sharding import Mesh, NamedSharding

from jmoe.config import LayerKind, TrainConfig
from jmoe.config.cluster import LinksConfig
from jmoe.data.sample_rows import SampleRows
from jmoe.mesh import ACCUMULATED_BATCH, BATCH, REPLICATED
from jmoe.models.decoder import Decoder
from jmoe.offload.expert_state import ReadExperts
from jmoe.optim.loss_scale import initial_loss_scale
from jmoe.training.sample_batch import documents_of
from jmoe.training.state import Batch, TrainState, without_experts
from jmoe.training.streamed.programs import jit_over_mesh
from jmoe.training.streamed.runner import StreamedRunner, initial_state_without_experts
from jmoe.training.streamed.text import StreamedDecoder, TokenMicroBatch, split_samples
from jmoe.types import PyTree


@dataclass(frozen=True)
class TextPrograms:
    """The compiled programs specific to text, besides `StepPrograms`."""

    unstack: Callable[[jax.Array], list[jax.Array]]
    split: Callable[[jax.Array], TokenMicroBatch]
    split_samples: Callable[[SampleRows], list[TokenMicroBatch]]
    summed_nll: Callable[..., jax.Array]
    logits: Callable[..., jax.Array]


def make_text_programs(model: StreamedDecoder) -> TextPrograms:
    """Return the programs of a text model. Each compiles at its first call."""
    make, outside = partial(jit_over_mesh, model), model.outside_spec
    return TextPrograms(
        unstack=make(list, ACCUMULATED_BATCH, out=BATCH),
        split=make(lambda t_BS: TokenMicroBatch(t_BS[:, :-1], t_BS[:, 1:]), BATCH, out=BATCH),
        split_samples=make(
            partial(split_samples, config=model.config.data, num_devices=model.sharded.mesh.size),
            ACCUMULATED_BATCH,
            out=BATCH,
        ),
        summed_nll=make(model.summed_nll, outside, BATCH, BATCH, BATCH, out=REPLICATED),
        logits=make(model.logits, outside, BATCH, REPLICATED, out=REPLICATED),
    )


class StreamedTrainer(StreamedRunner[TokenMicroBatch]):
    """The `Trainer` of text runs with experts on tiers; see `StreamedRunner`.

    chunk_bytes, links: see `ShardedDecoder.reverse_scan` and `ShardedDecoder`. run: see
    `StreamedExperts`.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        chunk_bytes: int | None = None,
        run: str = "run",
        links: LinksConfig | None = None,
    ) -> None:
        streamed = StreamedDecoder(config, mesh, chunk_bytes, links)
        self.model = model = streamed.decoder
        self._text = make_text_programs(streamed)
        super().__init__(streamed, run)
        self._device = mesh.devices.flat[0] if mesh.size == 1 else None
        self._tokens_place = self._device or NamedSharding(mesh, ACCUMULATED_BATCH)
        self._batch_place = self._device or NamedSharding(mesh, BATCH)
        self.notes = [*model.notes, self.stores.note]
        # Evaluation then holds as many hidden states as training saves as layer inputs.
        self.evaluation_batches = len(self._layers) * config.gradient_accumulation_steps

    # State

    def init(self) -> TrainState:
        """Return the state of step 0, with the same random parameters as `FusedTrainer`; draws
        experts onto their tiers one layer at a time.
        """
        # Small experts save memory; the other parameters' random values do not depend on the size.
        config, small = self.config, replace(self.config.model, moe_intermediate_size=1)

        def draw_dense() -> TrainState:
            decoder = Decoder(small, rngs=nnx.Rngs(config.seed))
            return self.model.from_saved(
                initial_state_without_experts(decoder, initial_loss_scale(config))
            )

        shape = self.model.state_shape.map_params_and_moments(without_experts)
        places = None if self._device else jax.tree.map(lambda s: s.sharding, shape)
        state: TrainState = jax.jit(draw_dense, out_shardings=places)()
        self._draw_experts()
        return state

    def _random_experts(self, kind: LayerKind, number: jax.Array) -> nnx.Module:
        return Decoder.init_layer_experts(self.config.model, number, nnx.Rngs(self.config.seed))

    def prepare_state_for_save(self, state: TrainState) -> TrainState:
        """Return the state for a checkpoint, without experts, and prepare the experts' records for
        it.

        With moments on the tier nvme, the records are durable afterwards and experts keep their
        pending updates; otherwise all pending updates are applied first.
        """
        with self._loaded_experts.permanent_errors():
            self.stores.prepare_checkpoint(self._loaded_experts)
            return self.model.to_saved(state)

    def restore_state(
        self,
        saved: TrainState,
        weights: ReadExperts | None = None,
        moments: ReadExperts | None = None,
    ) -> TrainState:
        """Return the training state, and load experts onto their tiers one layer at a time.
        weights, moments: both None if the records are in place already.
        """
        self._load_experts(int(saved.step), weights, moments)
        if self._device:
            return jax.device_put(saved, self._device)
        return self.model.from_saved(saved)

    # Passes

    def _micro_batches(
        self, state: TrainState, batch: jax.Array | SampleRows
    ) -> list[TokenMicroBatch]:
        placed = jax.device_put(batch, self._tokens_place)
        if isinstance(placed, SampleRows):
            return self._wait_on_cpu_mesh(self._text.split_samples(placed))
        return [self._text.split(tokens_BS) for tokens_BS in self._text.unstack(placed)]

    def evaluate_batches(
        self, state: TrainState, batches: Sequence[Batch | SampleRows]
    ) -> list[jax.Array]:
        """Return the summed negative log-likelihood of each batch, in nats. Each layer's experts
        are fetched once for all batches.
        """
        batches = [jax.device_put(batch, self._batch_place) for batch in batches]
        micro_batches = [self._wait_on_cpu_mesh(self._held_out_micro_batch(one)) for one in batches]
        outside, xs = self._last_hidden_states(state, micro_batches)
        each = zip(xs, micro_batches, (weights for _, weights, *_ in batches), strict=True)
        return [
            self._wait_on_cpu_mesh(
                self._text.summed_nll(outside, x, micro_batch.labels_BS, weights)
            )
            for x, micro_batch, weights in each
        ]

    def _held_out_micro_batch(self, batch: PyTree) -> TokenMicroBatch:
        micro_batch = self._text.split(batch[0])
        return micro_batch._replace(documents=documents_of(batch, self.config.data))

    def next_logits(
        self, state: TrainState, tokens_BS: jax.Array, position: jax.Array
    ) -> jax.Array:
        """Return logits [V] after the token at `position` of the first sequence of `tokens_BS`."""
        tokens = jax.device_put(tokens_BS, self._batch_place)
        outside, (x_BSD,) = self._last_hidden_states(state, [TokenMicroBatch(tokens, tokens)])
        logits_V: jax.Array = self._wait_on_cpu_mesh(self._text.logits(outside, x_BSD, position))
        return logits_V
