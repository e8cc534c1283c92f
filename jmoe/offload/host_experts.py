"""Computes some experts on the CPU, from weights in host memory, while a device computes others.

With few tokens an expert's time is the time to read its weights. Sending the tokens to the weights
is cheaper than sending the weights to the device wherever host memory is faster than the link
(KTransformers, SOSP 2025). `residency.open_experts` makes these objects; the inference runner calls
them.

Legend:
  T  tokens
  D  hidden size
  K  choices of a token
  E  experts of a layer
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.layers.slot_experts import ExpertInputs, sum_outputs
from jmoe.memory.record_store import HostRecords
from jmoe.memory.tiered_store import TieredStore
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.policies import ChosenExperts, ResidencyStats
from jmoe.offload.slot_arrays import Fields, jax_view
from jmoe.offload.slots import ExpertSlots, NativeSlots
from kernels_pallas.expert_choices import WeightedOutputs
from kernels_pallas.native import MAX_ROWS, ExpertByteOffsets, slot_mlp

SMOOTHING = 0.9  # weight of the previous estimate in the moving average of a rate
LEAST_SHARE = 0.02  # least share of copies and of CPU experts, so that both rates stay measured
MEASURED_S = 0.1
Array = jax.Array | np.ndarray
Tokens = tuple[Array, Array, Array]


class HostExperts:
    """Experts in host memory, multiplied by native CPU operations, for few tokens.

    is_known: whether a native operation supports the experts' fields and the tokens' dtype.
    """

    def __init__(self, records: HostRecords, fields: Fields, dtype: np.dtype | type) -> None:
        """Take the records of all experts, or of those that this process owns.

        fields: shape and dtype of an expert's arrays. dtype: of the tokens.
        """
        self._cpu = jax.local_devices(backend="cpu")[0]
        at = {field.name: field.offset_bytes for field in records.layout.fields}
        assert isinstance(records.slots_MR, np.ndarray)  # a list would be pinned memory
        self._slots = NativeSlots(jax_view(records.slots_MR, self._cpu), fields, at)
        self.is_known = self._slots.supports(1, dtype)
        self.expert_bytes = records.layout.data_bytes
        self._fields, self._dtype, self._num_records = fields, dtype, records.num_records
        # -1 for records that other processes own, which no token asks for here
        self._slot_of_record = np.full(records.num_records, -1, np.int32)
        self._slot_of_record[list(records.owned)] = np.arange(len(records.owned))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="experts on the host")

    def start_compute(
        self, tokens: Tokens, rows_E: np.ndarray, activation: str
    ) -> Future[tuple[np.ndarray, float]]:
        """Begin to compute each token's weighted sum of experts in a thread.

        Return a future of (float32 [T, D], seconds). tokens: (h_TD, idx_TK with E for no
        expert, weights_TK), on any device. rows_E: each expert's record number.
        """
        return self._thread.submit(
            self._compute_weighted_sums, tokens, self._slot_of_record[rows_E], activation
        )

    def start_compute_rows(
        self, rows_TD: np.ndarray, idx_T: np.ndarray, rows_E: np.ndarray, activation: str
    ) -> Future[tuple[np.ndarray, float]]:
        """Begin to compute the expert `idx_T` of each row; return a future as `start_compute` does.

        Rows are padded to whole blocks of `MAX_ROWS`, so that one compiled program serves all
        numbers of them: the result has the padding too.
        """
        padding = -len(idx_T) % MAX_ROWS
        h_TD = np.pad(rows_TD, ((0, padding), (0, 0)))
        idx_T1 = np.pad(idx_T, (0, padding), constant_values=rows_E.size)[:, None]
        ones_T1 = np.ones(idx_T1.shape, np.float32)
        tokens = h_TD, idx_T1.astype(np.int32), ones_T1
        return self.start_compute(tokens, rows_E, activation)

    def compile_rows(self, num_experts: int, activation: str) -> None:
        """Compile the program of `start_compute_rows` for layers of `num_experts` experts, by
        running it on padding.
        """
        row_1D = np.zeros((1, self._fields["w_down"][0][1]), self._dtype)
        numbers_E, none = np.zeros(num_experts, np.int64), np.full(1, num_experts)
        self.start_compute_rows(row_1D, none, numbers_E, activation).result()

    def measure_bytes_per_s(self, num_experts: int, activation: str) -> float:
        """Return the measured rate, in bytes per second, at which one token's computation reads
        experts.

        Each repetition reads other experts, so that no cache holds them.
        """
        hidden = self._fields["w_down"][0][1]
        idx_TK = np.arange(num_experts, dtype=np.int32)[None]
        ones_TK = np.ones((1, num_experts), np.float32)
        tokens = jnp.ones((1, hidden), self._dtype), jnp.asarray(idx_TK), jnp.asarray(ones_TK)
        rates: list[float] = []
        begun = first = time.perf_counter()
        while len(rates) < 2 or begun - first < MEASURED_S:
            start = len(rates) * num_experts % max(1, self._num_records - num_experts)
            _, seconds = self._compute_weighted_sums(
                tokens, np.arange(start, start + num_experts, dtype=np.int32), activation
            )
            rates.append(num_experts * self.expert_bytes / seconds)
            begun = time.perf_counter()
        return float(np.median(rates[1:]))

    def close(self) -> None:
        """End the thread, after its current work; queued work is dropped."""
        self._thread.shutdown(cancel_futures=True)

    def _compute_weighted_sums(
        self, tokens: Tokens, rows_E: np.ndarray, activation: str
    ) -> tuple[np.ndarray, float]:
        """Return the result of the future of `start_compute`."""
        here = jax.device_get(jax.block_until_ready(tokens))
        begun, parts = time.perf_counter(), []
        for start in range(0, len(here[0]), MAX_ROWS):
            some = jax.device_put([x[start : start + MAX_ROWS] for x in here], self._cpu)
            parts.append(
                _weighted_expert_sum(
                    self._slots.layout, activation, *some, self._slots.slots_MR, rows_E
                )
            )
        y_TD = np.concatenate(jax.device_get(parts))
        return y_TD, time.perf_counter() - begun


@partial(jax.jit, static_argnums=(0, 1))
def _weighted_expert_sum(
    layout: ExpertByteOffsets, activation: str, h_TD: jax.Array, *arrays: jax.Array
) -> jax.Array:
    """Return float32 [T, D], the weighted sum of each token's experts, by a native operation."""
    idx_TK, weights_TK, slots_MR, rows_E = arrays
    tokens = h_TD, idx_TK, weights_TK, jnp.zeros(h_TD.shape, jnp.float32)
    return slot_mlp(tokens, slots_MR, rows_E, layout, activation)


class CopyShares:
    """Decides which of a layer's missing experts are copied to slots while the CPU computes the
    others.

    Their recent rates decide how many are copied, so that both finish together; the experts with
    the highest hit counts are copied, since they are the most likely to be used again. On several
    devices the rate of copies is that of all links together, and the CPU is shared.
    """

    def __init__(self, store: TieredStore) -> None:
        """Begin without measured rates; `store` counts the copies."""
        self._store = store
        self.host_bytes_per_s = self.link_bytes_per_s = 0.0
        self._link_before = store.stats().host
        self._owed = 0.0  # fraction of an expert still to copy, carried over between layers

    def measure_link(self) -> None:
        """Take the copies since the last call into the link's rate."""
        link = self._store.stats().host
        moved = link.num_bytes - self._link_before.num_bytes
        seconds = link.seconds - self._link_before.seconds
        if moved > 0 and seconds > 0:
            self.link_bytes_per_s = _smoothed_rate(self.link_bytes_per_s, moved / seconds)
            self._link_before = link

    def record_computed(self, num_bytes: int, seconds: float) -> None:
        """Take experts that the CPU has computed into its rate."""
        self.host_bytes_per_s = _smoothed_rate(self.host_bytes_per_s, num_bytes / seconds)

    def choose_copied(self, missing: Sequence[int], scores: np.ndarray) -> list[int]:
        """Return the missing records to copy. scores: the hit count of every record."""
        both = self.link_bytes_per_s + self.host_bytes_per_s
        share = (
            self.link_bytes_per_s / both
            if min(self.link_bytes_per_s, self.host_bytes_per_s) > 0
            else 0.5
        )
        self._owed += len(missing) * min(max(share, LEAST_SHARE), 1 - LEAST_SHARE)
        copied = min(int(self._owed), len(missing))
        self._owed -= copied
        return sorted(missing, key=lambda record: -scores[record])[:copied]


class PartlyCopiedExperts(ChosenExperts):
    """A hot set of experts in the slots of one device; in steps of few tokens `shares` decides
    which of the other chosen experts are copied to slots, and the CPU computes the rest.
    """

    def __init__(
        self,
        slots: ExpertSlots,
        store: TieredStore,
        index: ExpertIndex,
        shares: CopyShares,
        *,
        experts: np.ndarray | None = None,
    ) -> None:
        """Make the policy over empty slots. experts: see `ChosenExperts`."""
        super().__init__(slots, store, index, experts=experts)
        self.shares = shares
        self._stats = ResidencyStats("hybrid")
        self._on_host = False

    def begin_step(self, *, whole_layers: bool, on_host: bool = False) -> None:
        self._on_host = on_host and not whole_layers
        super().begin_step(whole_layers=whole_layers)

    def count_on_host(self, num_experts: int) -> None:
        """Count experts that the CPU computes."""
        self._stats.on_host += num_experts

    def fail(self, error: Exception) -> None:
        """Let every later step raise `error`, with which the CPU's part of a layer has ended."""
        self._failed = error

    def _records_to_copy(self, records: list[int]) -> list[int]:
        """Return the records in slots, and the missing ones that the link copies while the CPU
        computes the others.
        """
        if not self._on_host:
            return records
        slot_of = self.pool.slot_of
        missing = [r for r in records if slot_of[r] < 0]
        copied = self.shares.choose_copied(missing, self.pool.counts.scores)
        return sorted([r for r in records if slot_of[r] >= 0] + copied)


class HybridExperts(PartlyCopiedExperts):
    """Experts of one device: in its slots, copied to a slot, or computed on the CPU. Copies and CPU
    computation run at the same time.
    """

    def __init__(
        self, slots: ExpertSlots, store: TieredStore, index: ExpertIndex, host: HostExperts
    ) -> None:
        super().__init__(slots, store, index, CopyShares(store))
        self.host = host
        # experts that the CPU computes in the layer in use
        self._cold_E: np.ndarray | None = None
        self._rows_E = np.zeros(0, np.int64)
        self._is_counted_E = np.zeros(0, np.bool_)  # those that are in the counters already
        self._awaited_records: list[int] = []

    def begin_step(self, *, whole_layers: bool, on_host: bool = False) -> None:
        self.shares.measure_link()
        self._cold_E = None
        super().begin_step(whole_layers=whole_layers, on_host=on_host)

    def prefetch_guessed(self, moe_layer: int, guessed: np.ndarray) -> None:
        if not self._on_host:  # otherwise the copies of chosen experts keep the link busy
            super().prefetch_guessed(moe_layer, guessed)

    def acquire(self, moe_layer: int, chosen: np.ndarray | None) -> np.ndarray:
        """Return the table int32 [E] of the layer's slots; copies may still be under way.

        Experts that the CPU will compute have no slot; `add_expert_outputs` does not read their
        entries.
        """
        if not self._on_host or chosen is None:
            return super().acquire(moe_layer, chosen)
        self._awaited_records = self.begin_acquire(moe_layer, chosen)
        self._rows_E = self.index.record_numbers(moe_layer)
        slot_E = self.pool.slot_of[self._rows_E]
        self._cold_E, self._is_counted_E = slot_E < 0, np.zeros(slot_E.size, np.bool_)
        return np.maximum(slot_E, 0)

    def add_expert_outputs(
        self, routed: ExpertInputs, table_E: np.ndarray, activation: str
    ) -> jax.Array | WeightedOutputs:
        if self._cold_E is None:
            return super().add_expert_outputs(routed, table_E, activation)
        idx_TK, none = np.asarray(routed.idx_TK), self._cold_E.size
        is_cold = np.append(self._cold_E, False)[idx_TK]
        part = None
        if is_cold.any():
            cold = np.unique(idx_TK[is_cold])
            self.count_on_host(int((~self._is_counted_E[cold]).sum()))
            self._is_counted_E[cold] = True
            cold_TK = np.where(is_cold, idx_TK, none).astype(np.int32)
            part = self.host.start_compute(
                (routed.h_TD, cold_TK, routed.weights_TK), self._rows_E, activation
            )
        self._wait_for_copies(self._awaited_records)
        self._awaited_records = []
        y_TD: jax.Array | WeightedOutputs = routed.y_TD
        warm_TK = np.where(is_cold, none, idx_TK).astype(np.int32)
        if part is None:
            return super().add_expert_outputs(routed, table_E, activation)
        if (warm_TK < none).any():
            warm = routed._replace(idx_TK=jax.device_put(warm_TK, routed.h_TD.device))
            y_TD = super().add_expert_outputs(warm, table_E, activation)
        try:
            cold_TD, seconds = part.result()
        except Exception as error:
            self.fail(error)
            raise
        num_bytes = np.unique(idx_TK[is_cold]).size * self.host.expert_bytes
        self.shares.record_computed(num_bytes, seconds)
        sum_TD: jax.Array = _sum(y_TD, jax.device_put(cold_TD, routed.h_TD.device))
        return sum_TD

    def close(self) -> None:
        self.host.close()
        super().close()


_sum = jax.jit(lambda y, cold_TD: sum_outputs(y) + cold_TD)


def _smoothed_rate(rate: float, new: float) -> float:
    """Return the exponential moving average of a rate after the sample `new`."""
    return new if rate == 0 else SMOOTHING * rate + (1 - SMOOTHING) * new
