"""Compute a text model's held-out loss, and sample text from it, during training. Called by
`Session`.

Legend: B sequences (all devices), S sequence length, V vocabulary.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from tokenizers import Tokenizer

from jmoe.config import TrainConfig
from jmoe.data.context_rows import ContextRows
from jmoe.data.corpus import Corpus
from jmoe.data.loader import held_out_windows
from jmoe.data.sample_rows import held_out_rows, num_loss_terms, rows_of_windows
from jmoe.mesh import BATCH
from jmoe.training.state import TrainState
from jmoe.training.trainer import LanguageTrainer, Trainer


def split_over_devices(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """Return a global array split over all devices in its first dimension; every process holds the
    whole `array`.
    """
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, BATCH), lambda index: array[index]
    )


def held_out_loss(
    trainer: Trainer, state: TrainState, corpus: Corpus, config: TrainConfig, mesh: Mesh
) -> float:
    """Return the mean negative log-likelihood, in nats per token, over all held-out tokens; of
    samples, over the tokens to learn; of preferences, the mean loss of the pairs.
    """
    batch = config.batch_size // config.gradient_accumulation_steps
    batches: Iterator[Any]
    if corpus.held_out_samples is not None:
        batches = held_out_rows(corpus, config.sequence_length, batch, config.data)
    else:
        batches = held_out_windows(corpus, config.sequence_length, batch)
        if config.data.mask_documents:
            batches = (rows_of_windows(*window, corpus.eot) for window in batches)
    divided = ContextRows(config.devices_per_sequence(mesh.size), mesh.size)
    total = targets = 0.0
    while some := list(islice(batches, trainer.evaluation_batches)):
        targets += sum(map(num_loss_terms, some))
        placed = [
            jax.tree.map(partial(split_over_devices, mesh=mesh), divided.divide(one))
            for one in some
        ]
        total += sum(map(float, trainer.evaluate_batches(state, placed)))
    return total / targets


def sample_text(
    trainer: LanguageTrainer,
    state: TrainState,
    tokenizer: Tokenizer,
    eot: int,
    config: TrainConfig,
    mesh: Mesh,
) -> str:
    """Return text that the model generates after an end-of-text token, of at most
    `evaluation.sample_tokens` tokens.

    Every token recomputes the whole window, without a KV cache: this works with any mesh and any
    expert placement, but is only fast enough for a short sample.
    """
    length = min(config.evaluation.sample_tokens + 1, config.sequence_length)
    rng = np.random.default_rng(config.seed)
    divided = ContextRows(config.devices_per_sequence(mesh.size), mesh.size)
    sequences = mesh.size // divided.size
    tokens = np.full((sequences, config.sequence_length), eot, np.int32)
    for position in range(length - 1):
        logits_V = np.asarray(
            trainer.next_logits(
                state,
                split_over_devices(divided.divide_inputs(tokens), mesh),
                jnp.int32(position),
            ),
            np.float64,
        )
        logits_V = logits_V[: tokenizer.get_vocab_size()]
        if config.evaluation.sample_temperature == 0:
            choice = int(np.argmax(logits_V))
        else:
            p_V = np.exp((logits_V - np.max(logits_V)) / config.evaluation.sample_temperature)
            choice = int(rng.choice(p_V.size, p=p_V / p_V.sum()))
        if choice == eot:
            length = position + 1
            break
        tokens[:, position + 1] = choice
    return tokenizer.decode(tokens[0, 1:length].tolist())
