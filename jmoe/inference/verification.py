"""Sample the tokens of a step whose sequences have drafts, one position after the other.

Called by `Engine`, which takes in each position's tokens before it asks for the next ones: so
penalties, constraints and ends of sequences see the same tokens as without drafts.

Legend:
P rows of a step
C tokens a row: the latest token, then the draft
B rows of the sampler, `max_batch`
V vocabulary
"""

import jax
import numpy as np

from jmoe.inference.sampler import Draw, Sampler
from jmoe.inference.scheduler import Chunk, ChunkGroup
from jmoe.inference.sequence import Sequence


@jax.jit
def _gather_logits(logits_PCV: jax.Array, rows_B: jax.Array, position: jax.Array) -> jax.Array:
    """Return the logits after token `position` of the rows `rows_B`, [B, V]."""
    return logits_PCV[rows_B, position]


class DraftVerifier:
    """Samples tokens after any token of a group's chunks.

    If all requests are plainly greedy, one program finds the tokens of all positions.
    """

    def __init__(
        self, sampler: Sampler, group: ChunkGroup, logits_PCV: jax.Array, max_batch: int
    ) -> None:
        """Begin to sample; does not wait.

        logits_PCV: float32, after every token of the group.
        """
        self.chunks = group.chunks
        self._sampler, self._logits_PCV, self._max_batch = sampler, logits_PCV, max_batch
        self._row_of = {chunk.sequence: row for row, chunk in enumerate(group.chunks)}
        self._greedy_PC: jax.Array | None = None
        sequences = [chunk.sequence for chunk in group.chunks]
        if all(s.constraint is None and s.sampling.is_plain_greedy for s in sequences):
            self._greedy_PC = sampler.start_greedy(logits_PCV)

    def sample_after(self, position: int, chunks: list[Chunk]) -> dict[Sequence, Draw]:
        """Return the token sampled after token `position` of each of these chunks of the group.

        The sampler's state must have counted the tokens before it.
        """
        rows = [self._row_of[chunk.sequence] for chunk in chunks]
        sequences = [chunk.sequence for chunk in chunks]
        if self._greedy_PC is not None:
            tokens = np.asarray(self._greedy_PC)[rows, position].tolist()
            return {s: Draw(token, None) for s, token in zip(sequences, tokens, strict=True)}
        rows_B = np.zeros(self._max_batch, np.int32)
        rows_B[: len(rows)] = rows
        logits_BV = _gather_logits(self._logits_PCV, rows_B, np.int32(position))
        draws = self._sampler.start_sampling(
            logits_BV, [chunk.single_token_chunk(position) for chunk in chunks]
        )
        return dict(zip(sequences, draws.wait_and_read(), strict=True))


def warm_up_verification(sampler: Sampler, logits_PCV: jax.Array, max_batch: int) -> None:
    """Compile the programs that verify drafts with logits of this shape."""
    sampler.start_greedy(logits_PCV).block_until_ready()
    _gather_logits(logits_PCV, np.zeros(max_batch, np.int32), np.int32(0))
