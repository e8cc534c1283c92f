"""Asynchronous scheduling: begin a decode step before the host reads the previous step's tokens.

The sampled tokens are on the device already, and the next step's programs need no other input. So
the device computes while the host reads the tokens, decides which sequences go on, and delivers the
output. A sequence that turns out to have ended wastes its row of the step begun ahead; the other
rows are used, unless fewer rows would now do. What the wasted row wrote to the KV cache lies beyond
the positions that count as computed. Called by `Engine`.

Legend:
P rows of a decode step
B sampled tokens (P or `max_batch`)
C tokens a row, 1
D hidden
V vocabulary
W blocks of a table
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jmoe.inference.runner import ModelRunner
from jmoe.inference.runner_protocol import BatchOutput, TokenBatch
from jmoe.inference.sampler_arrays import BatchParams
from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.scheduler import Chunk, ChunkGroup
from jmoe.inference.sequence import Sequence

NOWHERE = 2**30  # an invalid row
# fills the rows of a step that belong to no running sequence
IDLE = Chunk(Sequence([0], SamplingParams(temperature=0.0)), NOWHERE, 0, [0])


@partial(jax.jit, static_argnums=1)
def _first_tokens(tokens_B: jax.Array, num_rows: int) -> jax.Array:
    """Return the tokens of the first `num_rows` rows, on the device."""
    return tokens_B[:num_rows]


class StepOutcome(NamedTuple):
    """The output of a step that ran ahead.

    group: the step's chunks, in the rows in which the step ran them; unused rows hold `IDLE`.
    """

    group: ChunkGroup
    output: BatchOutput


@dataclass(frozen=True)
class StepAhead:
    """A decode step that the device runs before the host has read the previous step's tokens.

    places: each sequence's row in the programs and its token's position.
    """

    places: dict[Sequence, tuple[int, int]]
    output: BatchOutput  # its logits_PV is not None

    @classmethod
    def begin(
        cls,
        runner: ModelRunner,
        group: ChunkGroup,
        tokens_B: jax.Array,
        continuing: set[Sequence],
        sampling: BatchParams | None = None,
    ) -> StepAhead:
        """Start the next step of a decode group, from sampled tokens that are still on the device.

        tokens_B: int32, the token sampled for each row of the group.
        continuing: the group's sequences that may continue after these tokens, each with a block
            for its next token.
        sampling: see `TokenBatch`.
        """
        places: dict[Sequence, tuple[int, int]] = {}
        blocks_PW = np.zeros((group.num_rows, runner.table_width), np.int32)
        positions_P1 = np.full((group.num_rows, 1), runner.num_table_positions, np.int32)  # padding
        for row, chunk in enumerate(group.chunks):
            if chunk.sequence in continuing:
                blocks_PW[row, : len(chunk.block_ids)] = chunk.block_ids
                positions_P1[row, 0] = chunk.end
                places[chunk.sequence] = row, chunk.end
        tokens_P = (
            tokens_B if tokens_B.size == group.num_rows else _first_tokens(tokens_B, group.num_rows)
        )
        adapter_P = runner.adapters.adapter_numbers_of_rows(group)
        rows_P = runner.state_rows(group)
        batch = TokenBatch(tokens_P, blocks_PW, positions_P1, adapter_P, sampling, rows_P)
        output = runner.run_batch(batch)
        logits_PV = runner.logits(output, np.zeros(group.num_rows, np.int32))
        return cls(places, output._replace(logits_PV=logits_PV))

    def outcome_for(self, group: ChunkGroup) -> StepOutcome | None:
        """Return the outcome of this step for the decode group that was scheduled in the meantime.

        None if the group has another number of rows, or a chunk that this step does not run.
        """
        num_rows = self.output.x_PCD.shape[0]
        if group.num_rows != num_rows:  # another program may add in another order
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


def warm_up_token_slice(max_batch: int, num_rows: int) -> None:
    """Compile the program that cuts the sampled tokens of `max_batch` rows to `num_rows` rows, the
    input of the next step.
    """
    _first_tokens(jax.device_put(np.zeros(max_batch, np.int32), jax.devices()[0]), num_rows)
