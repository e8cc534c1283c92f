"""Measure how fast this machine computes a model's layers and copies its experts to the device.

The engine calls `calibrate` after its first answer, while it has no requests, to choose how each
step gets its experts.

Legend:
E experts of a layer
P rows of a step
C tokens a row
D hidden
"""

import math
import statistics
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np

from jmoe.inference.kv_cache import KVCache
from jmoe.inference.runner import ModelRunner
from jmoe.inference.runner_protocol import TokenBatch
from jmoe.inference.sampler import Sampler
from jmoe.inference.scheduler import Chunk, ChunkGroup
from jmoe.inference.sequence import Sequence
from jmoe.memory.link import LinkStats
from jmoe.memory.tiered_store import TieredStore
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.host_experts import HybridExperts
from jmoe.offload.policies import COPY_THREADS, Residency, ResidencyStats, copy_record
from jmoe.offload.slots import ExpertSlots
from jmoe.planning.streaming import Calibration

COPY_BYTES = 256 << 20  # bytes of experts that the first copies move, but at least one layer's
FILL_S = 1.0  # time limit of the first copies, beyond one layer
COPY_S = 0.1  # duration of the repeated copies that measure the host's bandwidth
RUN_S = 0.5  # a program is repeated for up to this time
MAX_RUNS = 3  # repetitions of a program, at most


class _FilledSlotsResidency(Residency):
    """A residency that maps every layer's experts to the slots that are filled.

    Steps compute as much as with their own experts, and wait for no copy.
    """

    def __init__(
        self, slots: ExpertSlots, index: ExpertIndex, num_filled: int, streams: bool
    ) -> None:
        super().__init__(slots, index)
        self._num_filled, self.streams = num_filled, streams

    def acquire(self, moe_layer: int, chosen: np.ndarray | None) -> np.ndarray:
        return self.index.record_numbers(moe_layer).astype(np.int32) % np.int32(self._num_filled)

    def stats(self) -> ResidencyStats:
        return ResidencyStats("resident")

    def occupancy(self) -> list[tuple[int, int] | None]:
        return []


def calibrate(
    runner: ModelRunner,
    store: TieredStore | None,
    sampler: Sampler,
    *,
    max_batch: int,
    prefill_tokens: int,
    position: int,
) -> Calibration:
    """Return the measured seconds of layers by step size, and the bandwidths of copies.

    Times decode steps of 1 and of `max_batch` tokens at `position`, and a prompt's first
    `prefill_tokens` tokens. Tokens are random; experts and routers are real. All programs of these
    shapes must be compiled already. Overwrites rows of the KV cache, and the experts' slots.

    store: holds the streamed experts; None if all experts are on the device.
    """
    residency, layers = runner.residency, runner.config.num_moe_layers
    if store is None:
        num_filled, calibration = residency.slots.num_slots, Calibration((), ())
    else:
        num_filled, calibration = _fill_slots_and_measure_transfers(runner, store)
    filled = _FilledSlotsResidency(residency.slots, residency.index, num_filled, residency.streams)
    if runner.needs_no_choice_readback:
        filled.tables_NE = np.stack([filled.acquire(layer, None) for layer in range(layers)])
    runner.residency = filled
    try:
        step_tokens, layer_s, rest_s = _measure_steps(
            runner, sampler, max_batch=max_batch, prefill_tokens=prefill_tokens, position=position
        )
    finally:
        runner.residency = residency
    return replace(calibration, step_tokens=step_tokens, layer_s=layer_s, rest_s=rest_s)


def _measure_steps(
    runner: ModelRunner, sampler: Sampler, *, max_batch: int, prefill_tokens: int, position: int
) -> tuple[tuple[int, ...], tuple[float, ...], float]:
    """Return (tokens of the measured steps, ascending; seconds of one of their layers, for each;
    seconds of a step beside its layers).
    """
    tokens = (
        np.random.default_rng(0)
        .integers(0, runner.config.vocab_size, max(max_batch, prefill_tokens))
        .tolist()
    )
    sequence = Sequence(tokens)
    # a small cache has fewer blocks than these sequences would need; times do not depend on content
    num_blocks = next(c for c in runner.caches if isinstance(c, KVCache)).k_NGLd.shape[0]
    tables = [
        array("i", [(row * runner.table_width + i) % num_blocks for i in range(runner.table_width)])
        for row in range(max_batch)
    ]
    decode = tuple(
        Chunk(sequence, row, position, [tokens[row]], block_ids=tables[row])
        for row in range(max_batch)
    )
    prefill = Chunk(sequence, 0, 0, tokens[:prefill_tokens], block_ids=tables[0])
    batch = runner.make_batch(ChunkGroup(decode, max_batch, 1))
    by_tokens = {
        prefill_tokens: _measure_layers_s(
            runner, runner.make_batch(ChunkGroup((prefill,), 1, prefill_tokens))
        ),
        max_batch: _measure_layers_s(runner, batch),
        1: _measure_layers_s(runner, runner.make_batch(ChunkGroup(decode[:1], 1, 1))),
    }
    (output,) = runner.forward([batch])
    output = output._replace(logits_PV=None)
    rest_s = _median_s(
        lambda: sampler.greedy_tokens_on_host(runner.logits(output, np.zeros(max_batch, np.int32)))
    )
    steps, layers = sorted(by_tokens), runner.config.num_moe_layers
    return tuple(steps), tuple(by_tokens[n] / layers for n in steps), rest_s


def _fill_slots_and_measure_transfers(
    runner: ModelRunner, store: TieredStore
) -> tuple[int, Calibration]:
    """Return (number of slots filled, a `Calibration` of what streamed experts cost beyond layers).

    It has the bandwidths of copies and of experts on the host, and the seconds in which a layer
    reads its choices back.
    """
    residency, config = runner.residency, runner.config
    residency.forget_slots()
    num_filled, calibration = _fill_slots_and_measure_bandwidths(
        store, residency.slots, config.num_experts
    )
    before_s = runner.readback_s
    runner.forward([runner.make_batch(ChunkGroup((), 1, 1))])  # padding alone needs no expert
    sync_s = (runner.readback_s - before_s) / config.num_moe_layers
    calibration = replace(calibration, sync_s=sync_s)
    if isinstance(residency, HybridExperts):
        rate = residency.host.measure_bytes_per_s(config.num_experts_per_tok, config.hidden_act)
        calibration = replace(calibration, host_bytes_per_s=rate)
    return num_filled, calibration


def _measure_layers_s(runner: ModelRunner, batch: TokenBatch) -> float:
    """Return the seconds of a batch's layers, less those of logits that the same program
    computes.
    """
    forward_s = _median_s(lambda: jax.block_until_ready(runner.forward([batch])))
    (output,) = runner.forward([batch])
    if output.logits_PV is None:
        return forward_s
    alone, at_P = output._replace(logits_PV=None), np.zeros(len(batch.blocks_PW), np.int32)
    jax.block_until_ready(runner.logits(alone, at_P))  # compiles outside of the timing
    return max(
        0.0, forward_s - _median_s(lambda: jax.block_until_ready(runner.logits(alone, at_P)))
    )


def _median_s(run: Callable[[], object]) -> float:
    """Return the median seconds of up to `MAX_RUNS` calls of `run`."""
    seconds: list[float] = []
    while len(seconds) < MAX_RUNS and sum(seconds) < RUN_S:
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _fill_slots_and_measure_bandwidths(
    store: TieredStore, slots: ExpertSlots, num_experts: int
) -> tuple[int, Calibration]:
    """Copy experts into slots; return (number of slots filled, a `Calibration` with the bandwidths
    of host and NVMe in bytes/s).

    The first copies read NVMe and touch new host memory; only repeated copies count for the host's
    bandwidth.
    """
    wanted = min(
        max(num_experts, -(-COPY_BYTES // store.layout.data_bytes)),
        slots.num_slots,
        store.num_records,
    )
    num_filled, begun, empty = 0, time.perf_counter(), store.stats()
    with ThreadPoolExecutor(COPY_THREADS) as threads:

        def copy_records_to_slots(first: int, end: int) -> None:
            store.prefetch(np.arange(first, end))
            list(threads.map(lambda i: copy_record(store, i, slots, i), range(first, end)))

        while num_filled < num_experts or (
            num_filled < wanted and time.perf_counter() - begun < FILL_S
        ):
            filled = min(num_filled + num_experts, wanted)
            copy_records_to_slots(num_filled, filled)
            num_filled = filled
        before, begun = store.stats(), time.perf_counter()
        while time.perf_counter() - begun < COPY_S:
            copy_records_to_slots(0, num_filled)
    nvme, host = (
        _bytes_per_s(empty.nvme, before.nvme),
        _bytes_per_s(before.host, store.stats().host),
    )
    return num_filled, Calibration((), (), bandwidth_bytes_per_s=host, nvme_bytes_per_s=nvme)


def _bytes_per_s(before: LinkStats, after: LinkStats) -> float:
    """Return bytes per second between two readings of a link's counters; infinite if nothing
    moved.
    """
    moved_bytes = after.num_bytes - before.num_bytes
    return moved_bytes / (after.seconds - before.seconds) if moved_bytes else math.inf
