"""The decoder of the engine over several devices: each has rows of the cache, and experts of every layer.

Legend: N devices, R cache rows of a device, P rows of a step on a device, M = N P, Q chunks of a group, C tokens a row,
T = P C tokens of a device, D hidden, E experts of a layer, K choices a token.
Every process runs the same programs in the same order. A layer is two: attention and router, whose choices all
processes read (4 K bytes a token), and the experts, to which tokens are sent. Where experts are, and how large buffers
are, each process computes from the choices of all tokens, so that nothing more has to be agreed on.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.config import ModelConfig
from jmoe.config.engine import EngineConfig
from jmoe.inference.expert_placer import ExpertPlacer, SwapCosts
from jmoe.inference.kv_cache import KVCache, empty_caches
from jmoe.inference.lockstep import Leader, led
from jmoe.inference.mesh_programs import (
    ExchangeShape,
    Gate,
    attend_on_mesh,
    copy_row_on_mesh,
    embed_on_mesh,
    experts_on_mesh,
    finish_on_mesh,
    gather_row_on_mesh,
    pick,
    timed_experts,
)
from jmoe.inference.path_table import PathTable
from jmoe.inference.runner import RECENT_STEPS, Arrays, Hidden, logits_after, logits_of_row
from jmoe.inference.scheduler import ROWS_RATIO, ChunkGroup, bucket, buckets
from jmoe.layers.experts import SLOT_MULTIPLE
from jmoe.mesh import BATCH, REPLICATED, put
from jmoe.models.block import Block
from jmoe.models.functional import Structure, split
from jmoe.models.lazy_checkpoint import EmbedAndHead, LazyCheckpoint
from jmoe.offload.placed_experts import PlacedExperts
from jmoe.planning.placement import Placement

BUFFER_FACTORS = (1.25, 1.5, 2.0, 4.0, 8.0, 16.0)  # sizes of buffers / a device's fair share
FEW_ROWS = 64  # buffers of so many have one size: a smaller one would save too little for a program of its own
TIMED_RUNS = 3


class MeshBatch(NamedTuple):
    """The chunks of a group, dealt out to the devices of their rows; a position of S marks padding.

    rows_M: of the device's own part of the cache. place_Q: where each of the group's chunks is among the M.
    """

    tokens_MC: np.ndarray
    rows_M: np.ndarray
    positions_MC: np.ndarray
    place_Q: np.ndarray


class MeshHidden(NamedTuple):
    """Hidden states of a batch: of the last token of each row, on every device. number: the batch's in the step."""

    last_MD: jax.Array
    place_Q: np.ndarray
    number: int


class MeshRunner:
    """Runs tokens through all layers on a mesh of devices; holds the caches.

    What is `led` every process calls in the same order, with the same arguments; what it returns one of them uses.
    """

    def __init__(
        self,
        config: ModelConfig,
        ends: EmbedAndHead,
        layers: Sequence[Block],
        experts: PlacedExperts,
        placer: ExpertPlacer,
        caches: Sequence[KVCache],
    ) -> None:
        """Copy the modules to every device. caches: split over the devices by rows."""
        self.config, self.residency, self.placer, self.mesh = config, experts, placer, experts.mesh
        self.leader: Leader | None = None  # of other processes
        self.readback_s, self.estimate_s = 0.0, 0.0  # see `EngineStats`
        self.recent_choices: deque[list[np.ndarray]] = deque(maxlen=RECENT_STEPS)  # steps, layers
        self.caches = list(caches)
        self.dtype = ends.embedding[...].dtype
        self._rows_per_device = self.caches[0].k_BGSd.shape[0] // self.mesh.size
        self._ends = self._replicated(ends)
        self._ends_here = self._ends[0], tuple(w.addressable_data(0) for w in self._ends[1])
        self._layers = [self._replicated(layer) for layer in layers]
        self._moe_index = (np.cumsum([kind == "moe" for kind in config.layer_kinds]) - 1).tolist()
        windows = config.windows
        self._windows = [None if windows is None else np.int32(w) for w in windows or [0] * len(layers)]
        self._x_MCD: list[jax.Array] = []  # of the last step's batches

    def tokens(self, group: ChunkGroup) -> MeshBatch:
        """Return the chunks of a group by device, as numpy arrays padded to [M, width]."""
        counts_N = np.bincount([chunk.row // self._rows_per_device for chunk in group.chunks], minlength=self.mesh.size)
        return self._batch(group, bucket(max(1, int(np.max(counts_N))), self._sizes(group.width)))

    def padding(self, num_rows: int, width: int) -> list[MeshBatch]:
        """Return batches without tokens, in every shape that a group of this size may take, to compile programs."""
        most = bucket(min(num_rows, self._rows_per_device), self._sizes(width))
        group = ChunkGroup((), num_rows, width)
        return [self._batch(group, size) for size in self._sizes(width) if size <= most]

    @led
    def zeros(self, num_rows: int, width: int) -> MeshHidden:
        """Return hidden states as `forward` gives them, to compile what follows."""
        batch = self.padding(num_rows, width)[-1]
        size = batch.rows_M.size, width, self.config.hidden_size
        self._x_MCD = [put(np.zeros(size, self.dtype), self.mesh, BATCH)]
        last_MD = put(np.zeros((size[0], size[2]), self.dtype), self.mesh, REPLICATED)
        return MeshHidden(last_MD, batch.place_Q, 0)

    @led
    def forward(self, batches: Sequence[MeshBatch]) -> list[MeshHidden]:
        """Return hidden states of every batch; phase one of a layer runs beside its attention, phase two after."""
        self.placer.between_steps()
        groups = [[put(a, self.mesh, BATCH) for a in batch[:3]] for batch in map(MeshBatch._make, batches)]
        xs = [embed_on_mesh(self.mesh, *self._ends, tokens, positions, self.dtype) for tokens, _, positions in groups]
        path: list[np.ndarray] = []
        for i, layer in enumerate(self._layers):
            ys: list[jax.Array] = []
            gates: list[Gate] = []
            for n, (_, rows_M, positions_MC) in enumerate(groups):
                x, self.caches[i], y = attend_on_mesh(
                    self.mesh, *layer, self.caches[i], xs[n], rows_M, positions_MC, self._windows[i]
                )
                xs[n] = xs[n]._replace(x_PCD=x)
                if isinstance(y, Gate):
                    gates.append(y)
                else:
                    ys.append(y)
            if gates:
                ys = self._run_experts(self._moe_index[i], gates, path)
            xs = [Hidden(x.x_PCD, y) for x, y in zip(xs, ys, strict=True)]
        self.placer.end_step()
        self.recent_choices.append(path)
        after = [
            finish_on_mesh(self.mesh, x, group[2], self.caches[0].length) for x, group in zip(xs, groups, strict=True)
        ]
        self._x_MCD = [x_MCD for x_MCD, _ in after]
        return [MeshHidden(last_MD, batches[n][3], n) for n, (_, last_MD) in enumerate(after)]

    @led
    def copy_row(self, source: int, target: int) -> None:
        """Copy one row of every cache over another."""
        (from_n, from_row), (to_n, to_row) = (divmod(row, self._rows_per_device) for row in (source, target))
        at = np.asarray([from_n, from_row, to_n, to_row], np.int32)
        self.caches = [copy_row_on_mesh(self.mesh, from_n != to_n, cache, at) for cache in self.caches]

    @led
    def gather_row(self, number: int, place: int) -> jax.Array:
        """Return [C, D] on every device: a row of the last step's batch of this number."""
        return gather_row_on_mesh(self.mesh, self._x_MCD[number], np.int32(place))

    def logits(self, hidden: MeshHidden, at_Q: np.ndarray) -> jax.Array:
        """Return float32 [Q, V]: the logits after each chunk's last token, which is all that `hidden` has of it."""
        x_QCD = pick(hidden.last_MD.addressable_data(0), hidden.place_Q)
        return logits_after(*self._ends_here, x_QCD, np.zeros_like(at_Q))

    def all_logits(self, hidden: MeshHidden, row: int) -> jax.Array:
        """Return float32 [C, V]: the logits after every token of one chunk."""
        x_CD = self.gather_row(hidden.number, int(hidden.place_Q[row])).addressable_data(0)
        return logits_of_row(*self._ends_here, x_CD[None], np.int32(0))

    def expert_use(self) -> np.ndarray:
        """Return int64 [L, E]: tokens that each expert of each layer got in the last `RECENT_STEPS` steps."""
        experts = self.config.num_experts
        use_LE = np.zeros((self.config.num_moe_layers, experts + 1), np.int64)  # the last: padding
        for layers in self.recent_choices:
            for layer, idx_TK in enumerate(layers):
                use_LE[layer] += np.bincount(idx_TK.reshape(-1), minlength=experts + 1)
        return use_LE[:, :-1]

    def last_choices(self) -> list[np.ndarray]:
        """Return int32 [T, K] of each layer, what the tokens of the last step chose; E for padding."""
        return list(self.recent_choices[-1]) if self.recent_choices else []

    def measure_costs(self) -> SwapCosts:
        """Return what an expert for a row of tokens, and the copy of an expert, take on this process's first device."""
        weights = jax.tree.map(lambda w: w.addressable_data(0), self.residency.weights(0))
        num_rows = SLOT_MULTIPLE * weights.w_up.shape[0]
        x_ND = jnp.zeros((num_rows, self.config.hidden_size), self.dtype, device=jax.local_devices()[0])
        run = partial(timed_experts, self.config.hidden_act, x_ND, weights)
        return SwapCosts(_seconds(run) / num_rows, _seconds(self.residency.copy_again))

    @led
    def set_costs(self, row_s: float, copy_s: float) -> None:
        """Let placements change by these costs, which must be the same in every process."""
        self.placer.costs = SwapCosts(row_s, copy_s)

    def _run_experts(self, moe_layer: int, gates: list[Gate], path: list[np.ndarray]) -> list[jax.Array]:
        """Return what a layer's experts add to every batch. path: choices of the layers before, and then of this."""
        self.placer.before(moe_layer, path)
        self.estimate_s = self.placer.estimate_s
        here = [gate.all_idx_TK.addressable_data(0) for gate in gates]
        for choices in here:
            choices.copy_to_host_async()
        jax.block_until_ready(here)  # computing them is not part of reading them
        begun = time.perf_counter()
        chosen = [np.asarray(idx_TK) for idx_TK in here]
        path.append(np.concatenate(chosen))
        self.readback_s += time.perf_counter() - begun
        self.placer.after(moe_layer, path[-1])
        placement = self.residency.placements[moe_layer]
        weights, turns_EC = self.residency.weights(moe_layer), self.residency.turns(moe_layer)
        out = []
        for gate, idx_TK in zip(gates, chosen, strict=True):
            for rows in _buffer_rows(placement, idx_TK):
                exchange = ExchangeShape(rows, placement.slots_per_device, self.config.hidden_act)
                y_TD = experts_on_mesh(self.mesh, exchange, gate.routed, turns_EC, weights)
            out.append(y_TD)
        return out

    def _sizes(self, width: int) -> tuple[int, ...]:
        """Return the rows of a device that programs are compiled for, ascending."""
        if width == 1:
            return buckets(self._rows_per_device)
        sizes = [1]
        while sizes[-1] * ROWS_RATIO < self._rows_per_device:
            sizes.append(sizes[-1] * ROWS_RATIO)
        return tuple(sorted({*sizes, self._rows_per_device}))

    def _batch(self, group: ChunkGroup, rows_per_device: int) -> MeshBatch:
        num_rows = self.mesh.size * rows_per_device
        tokens_MC = np.zeros((num_rows, group.width), np.int32)
        rows_M = np.zeros(num_rows, np.int32)
        positions_MC = np.full((num_rows, group.width), self.caches[0].length, np.int32)
        place_Q, free_N = np.zeros(group.num_rows, np.int32), np.arange(self.mesh.size) * rows_per_device
        for q, chunk in enumerate(group.chunks):
            device, rows_row = divmod(chunk.row, self._rows_per_device)
            at = place_Q[q] = free_N[device]
            free_N[device] += 1
            rows_M[at] = rows_row
            tokens_MC[at, : len(chunk.tokens)] = chunk.tokens
            positions_MC[at, : len(chunk.tokens)] = np.arange(chunk.start, chunk.end)
        return MeshBatch(tokens_MC, rows_M, positions_MC, place_Q)

    def _replicated(self, module: Any) -> tuple[Structure, Arrays]:
        structure, arrays = split(module)
        return structure, tuple(put(np.asarray(w), self.mesh, REPLICATED) for w in arrays)


def _buffer_rows(placement: Placement, idx_TK: np.ndarray) -> Sequence[int]:
    """Return the size of buffers that holds what every device sends to every other; all of them for padding alone.

    idx_TK: of the tokens of all devices, in their order.
    """
    num_devices, (num_tokens, k) = placement.num_devices, idx_TK.shape
    mine = num_tokens // num_devices
    everything, fair = mine * k, mine * k / num_devices
    sizes = {everything}
    if everything > FEW_ROWS:
        sizes.update(min(everything, math.ceil(factor * fair)) for factor in BUFFER_FACTORS)
    token, choice = np.nonzero(idx_TK < placement.num_experts)
    if not token.size:
        return sorted(sizes)
    device = placement.physical(token, idx_TK[token, choice]) // placement.slots_per_device
    sent = np.bincount(token // mine * num_devices + device)
    return [bucket(int(np.max(sent)), tuple(sorted(sizes)))]


def make_mesh_runner(
    checkpoint: LazyCheckpoint, options: EngineConfig, experts: PlacedExperts, table: PathTable | None
) -> MeshRunner:
    """Load everything but the experts to every device, and make room for keys and values."""
    assert options.max_seq_len is not None, "the model's positions say it"
    config, length, mesh = checkpoint.config, options.max_seq_len, experts.mesh
    ends, layers = checkpoint.load_rest()
    shapes = jax.eval_shape(lambda: empty_caches(config, options.max_batch, length, checkpoint.dtype))
    caches = jax.tree.map(lambda x: put(np.zeros(x.shape, x.dtype), mesh, BATCH), shapes)
    placer = ExpertPlacer(options.mesh, experts, config.num_experts_per_tok, options.estimator is not None, table)
    return MeshRunner(config, ends, layers, experts, placer, caches)


def _seconds(run: Any) -> float:
    """Return how long a call takes, the shortest of a few after one that compiles."""
    times = []
    for _ in range(1 + TIMED_RUNS):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begun)
    return min(times[1:])
