"""Asynchronous scheduling: a decoding step begun before the host has read the tokens of the one
before.

Legend: P rows of a decoding step, B drawn tokens (P or `max_batch`), V vocabulary.

The device has the tokens, and the next step's programs need nothing else. So it computes while the
host reads, decides who goes on, and hands the tokens out. A sequence that ends with a token has a
row in the step already begun: the row is lost, the others are kept unless fewer rows would do. What
it wrote into the cache lies behind all that is counted as computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jmoe.inference.runner import BatchOutput, ModelRunner, TokenBatch
from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.scheduler import Chunk, ChunkGroup
from jmoe.inference.sequence import Sequence

NOWHERE = 2**30  # a row that no cache has
# of a row that nobody waits for
IDLE = Chunk(Sequence([0], SamplingParams(temperature=0.0)), NOWHERE, 0, [0])


@partial(jax.jit, static_argnums=1)
def _first(tokens_B: jax.Array, num_rows: int) -> jax.Array:
    return tokens_B[:num_rows]


class StepOutcome(NamedTuple):
    """A decoding group in the rows of the step that was begun for it, with idle ones between,
    and what it gave.
    """

    group: ChunkGroup
    output: BatchOutput


@dataclass(frozen=True)
class StepAhead:
    """A decoding step under way. places: by sequence its row in the programs, and its column of
    the cache.
    """

    places: dict[Sequence, tuple[int, int]]
    output: BatchOutput  # with logits

    @classmethod
    def begin(
        cls, runner: ModelRunner, group: ChunkGroup, tokens_B: jax.Array, going_on: set[Sequence]
    ) -> StepAhead:
        """Run the tokens that were just drawn, one of each row of a decoding group; the host need
        not know them.

        going_on: the sequences of the group that will not surely end with these tokens.
        """
        places: dict[Sequence, tuple[int, int]] = {}
        rows_P = np.zeros(group.num_rows, np.int32)
        positions_P1 = np.full((group.num_rows, 1), runner.caches[0].length, np.int32)  # of padding
        for row, chunk in enumerate(group.chunks):
            if chunk.sequence in going_on:
                rows_P[row], positions_P1[row, 0] = chunk.row, chunk.end
                places[chunk.sequence] = row, chunk.end
        tokens_P = tokens_B if tokens_B.size == group.num_rows else _first(tokens_B, group.num_rows)
        output = runner.run_batch(TokenBatch(tokens_P, rows_P, positions_P1))
        logits_PV = runner.logits(output, np.zeros(group.num_rows, np.int32))
        return cls(places, output._replace(logits_PV=logits_PV))

    def take(self, group: ChunkGroup) -> StepOutcome | None:
        """Return what this step gave for a decoding group; None if it does not run all its
        chunks, in as many rows.
        """
        num_rows = self.output.x_PCD.shape[0]
        if group.num_rows != num_rows:  # other programs: sums may be of another order
            return None
        chunks = [IDLE] * num_rows
        for chunk in group.chunks:
            row, start = self.places.get(chunk.sequence, (-1, -1))
            if start != chunk.start:
                return None
            chunks[row] = chunk
        lost = tuple(row for row, _ in self.places.values() if chunks[row] is IDLE)
        output = self.output._replace(choices=self.output.choices._replace(lost=lost))
        return StepOutcome(ChunkGroup(tuple(chunks), num_rows, 1), output)


def warm_up_ahead(max_batch: int, num_rows: int) -> None:
    """Compile what hands the tokens of `max_batch` rows on to a step of `num_rows`."""
    _first(jax.device_put(np.zeros(max_batch, np.int32), jax.devices()[0]), num_rows)
