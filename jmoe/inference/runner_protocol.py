"""The interface of a runner: the batches that it takes, and the outputs that it returns.

Legend:
P rows of a step
C tokens a row
T tokens, P * C
D hidden
V vocabulary
E experts of a layer
K experts that a token chooses
N layers with experts
W blocks of a table
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jmoe.config import ModelConfig
from jmoe.inference.kv_cache import LayerCache
from jmoe.inference.sampler import TokensInStep
from jmoe.inference.sampler_arrays import BatchParams
from jmoe.inference.scheduler import ChunkGroup
from jmoe.offload.policies import ExpertResidency


class TokenBatch(NamedTuple):
    """The tokens of one program, as host arrays; tokens_T may be on the device.

    tokens_T: int32.
    blocks_PW: int32, each row's table of blocks of the cache; the places that no token reaches may
        hold any block.
    positions_PC: int32, positions of each row; S = W * `BLOCK` marks padding.
    adapter_P: int32, the number of each row's LoRA adapter; None if the model has none.
    sampling: the parameters of at least P rows if the program is to sample by `sample_settled`;
        only for single tokens in programs of several layers, see `ModelRunner.samples_in_step`.
    rows_P: int32, the engine's row of each row, which has the states of gated delta networks; None
        if the model has none.
    previous_PCD: hidden states of the tokens before, which a prediction layer joins with these;
        None for a decoder.
    """

    tokens_T: Any
    blocks_PW: Any
    positions_PC: Any
    adapter_P: Any = None
    sampling: BatchParams | None = None
    rows_P: Any = None
    previous_PCD: Any = None


class BatchChoices(NamedTuple):
    """The experts that a batch's tokens chose.

    layers: int32 arrays [N', T, K] that concatenate to [N, T, K]; E marks padding.
    lost: tokens of a step that ran ahead whose sequence had ended, to be counted as padding.
    """

    layers: list[jax.Array]
    lost: tuple[int, ...] = ()


class BatchOutput(NamedTuple):
    """Hidden states after the last layer, [P, C, D], and the experts that the tokens chose.

    logits_PV: float32; only set for single tokens whose last program computed logits.
    step_tokens: the tokens sampled in the program of the logits, if it did.
    """

    x_PCD: jax.Array
    choices: BatchChoices
    logits_PV: jax.Array | None = None
    step_tokens: TokensInStep | None = None


class Runner(Protocol):
    """Runs a model for an engine, on one device or on a mesh.

    `make_batch` and `padding_batches` return batches of the runner's own type, which `forward`
    takes; `forward` and `zero_output` return its own type of outputs, which `logits`,
    `logits_of_chunk` and `logits_of_all` take.
    """

    config: ModelConfig
    caches: list[LayerCache]
    readback_s: float
    estimate_s: float

    @property
    def residency(self) -> ExpertResidency: ...
    @property
    def recent_choices(self) -> deque[Any]: ...
    def make_batch(self, group: ChunkGroup) -> Any: ...
    def padding_batches(self, num_rows: int, width: int) -> list[Any]: ...
    def begin_step(self, *, whole_layers: bool, on_host: bool = False) -> None: ...
    def zero_output(self, num_rows: int, width: int) -> Any: ...
    def forward(self, batches: Sequence[Any], /) -> list[Any]: ...
    def copy_cache_blocks(self, copies: Any, count: int) -> None: ...
    def logits(self, hidden: Any, at_P: np.ndarray, /) -> jax.Array: ...
    def logits_of_chunk(self, hidden: Any, row: int, /) -> jax.Array: ...
    def logits_of_all(self, hidden: Any, /) -> jax.Array: ...
    def tokens_per_expert(self) -> np.ndarray: ...
    def last_expert_choices(self) -> list[np.ndarray]: ...
