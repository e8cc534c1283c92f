"""Predicted GPU time of a compiled program, from its optimized HLO module. Pure functions.

A kernel takes the longer of two times, plus a launch: its bytes at the rate of a copy, and its
FLOPs at the rate of one large matrix product, each scaled by the share that such kernels reach.
Loops are multiplied by their trip count. Caches and occupancy are ignored, so small arrays that
stay in a cache are priced too high.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from jmoe.config.cluster import NetworkConfig
from jmoe.config.tiers import ACCELERATORS
from jmoe.planning.gpu_links import GPU_LINKS, GPUS_PER_NODE, collective_of
from jmoe.planning.hlo import HloArray, HloComputation, HloModule, HloOperation, dot_flops

# Fractions of its data sheet that an H100 SXM reached: 2.90 of 3.35 TB/s in a copy, 790 of 989
# TFLOP/s in one large bfloat16 product. Other GPUs are assumed to reach the same fractions; none
# of them was measured.
COPY_SHARE, PRODUCT_SHARE = 0.866, 0.799
LAUNCH_S = 2.5e-6  # time of an empty kernel, with the gap before the next one
MOST_HIDING = 3  # kinds of kernels that a collective's line lists
WAITING = "waiting"  # the kind of seconds in which a loop or a branch waits for its collectives


@dataclass(frozen=True)
class ReachedFractions:
    """Fractions that a kind of kernel reaches of a copy's bytes/s (`copy`) and of one large
    product's FLOP/s (`product`).
    """

    copy: float
    product: float = 1.0


# Measurements on an H100 in a training step of OLMoE's shape, kernel by kernel.
SHARES = {
    "pass": ReachedFractions(1.0),  # elementwise operations, reductions, copies
    "product": ReachedFractions(0.85, 0.9),
    "sum of products": ReachedFractions(0.71, 0.9),  # a product that is added to an array in memory
    "grouped_matmul": ReachedFractions(0.8, 0.86),
    "weight_gradient": ReachedFractions(0.8, 0.78),
    "gather_rows": ReachedFractions(0.64),
    "gather_sum": ReachedFractions(0.86),
    "attention": ReachedFractions(0.8, 0.6),
    # Assumed: no kernel in Triton was measured.
    "grouped_matmul in Triton": ReachedFractions(0.8, 0.7),
    "weight_gradient in Triton": ReachedFractions(0.8, 0.65),
    "gather_rows in Triton": ReachedFractions(0.64),
    "gather_sum in Triton": ReachedFractions(0.86),
    "paged_attention in Triton": ReachedFractions(0.8, 0.5),
    "combine_splits in Triton": ReachedFractions(0.8),
    "range_attention in Triton": ReachedFractions(0.8, 0.5),
}
# {kernel of attention to ranges of keys: products of a query's and of a value's size for a score}
RANGE_ATTENTION = {
    "range_attention": (1, 1),
    "range_attention_query_gradient": (2, 1),
    "range_attention_key_gradient": (2, 2),
}
TRITON = "__gpu$xla.gpu.triton"  # the target of XLA's custom calls
PASSES_IN_TRITON = (
    *("add_and_norm", "choose_experts", "activation_gradients"),
    *("rotated_heads", "rotated_heads_gradients"),
)
# Product rates of other dtypes relative to bfloat16, on data-centre GPUs. float32 means TF32;
# exact float32 (XLA's highest precision) runs without tensor cores, at 67 of 989 TFLOP/s
# on an H100, by its data sheet.
EXACT_FLOAT32 = "f32 exact"
DTYPE_RATES = {
    EXACT_FLOAT32: 0.068,
    "f32": 0.5,
    "f64": 0.068,
    "f8e4m3fn": 2.0,
    "f8e5m2": 2.0,
    "s8": 2.0,
}

_FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
    }
    | {"opt-barrier", "optimization-barrier", "domain", "add-dependency"}
)
_UNNAMED = {
    "while",
    "body",
    "cond",
    "eval_jaxpr",
    "checkpoint",
    "rematted_computation",
    "shard_map",
    "mpmd_map",
}
_UNNAMED |= {"closed_call", "custom_vjp_call", "pjit", ""}


@dataclass(frozen=True)
class GpuRates:
    """Rates that programs reach on a GPU, and the bandwidth of its links in each direction."""

    copy_bytes_per_s: float
    product_flops: float
    launch_s: float = LAUNCH_S
    links: NetworkConfig = GPU_LINKS
    devices_per_node: int = GPUS_PER_NODE


def gpu_rates(accelerator: str) -> GpuRates:
    """Return the rates of a GPU named in `ACCELERATORS`."""
    sheet = ACCELERATORS[accelerator]
    return GpuRates(COPY_SHARE * sheet.memory_bytes_per_s, PRODUCT_SHARE * sheet.flops)


@dataclass(frozen=True)
class GpuKernel:
    """All launches of one kernel; num_bytes, flops and seconds are totals over the launches."""

    name: str
    scope: str
    launches: int = 0
    num_bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        sizes = f"{self.num_bytes / 1e9:9.3f} GB {self.flops / 1e12:8.3f} TFLOP"
        return (
            f"{1e3 * self.seconds:9.2f} ms {self.launches:6,} x {sizes}  {self.name:34}"
            f" {self.scope}"
        )


@dataclass(frozen=True)
class Communication:
    """All collectives of one kind and group size.

    asynchronous: launches that start and end in different places of the program. away_bytes: part
    of `sent_bytes` that leaves the device's node. hidden_behind: {kind of kernel: part of `seconds`
    in which such kernels run}.
    """

    name: str
    launches: int = 0
    sent_bytes: float = 0.0
    seconds: float = 0.0
    away_bytes: float = 0.0
    asynchronous: int = 0
    hidden_behind: Mapping[str, float] = field(default_factory=dict)

    @property
    def hidden_s(self) -> float:
        """Return the part of `seconds` that overlaps with computation."""
        return sum(self.hidden_behind.values())

    def times(self, runs: int) -> "Communication":
        """Return the collectives of several runs."""
        sums = {name: runs * getattr(self, name) for name in _SUMS}
        return replace(self, **sums, hidden_behind=scaled(self.hidden_behind, runs))

    def plus(self, other: "Communication") -> "Communication":
        """Return these collectives and those of `other`."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        kinds = dict.fromkeys([*self.hidden_behind, *other.hidden_behind])
        behind = {
            kind: self.hidden_behind.get(kind, 0.0) + other.hidden_behind.get(kind, 0.0)
            for kind in kinds
        }
        return replace(self, **sums, hidden_behind=behind)

    def __str__(self) -> str:
        sizes = f"{self.launches:6,} x {self.sent_bytes / 1e9:9.2f} GB sent"
        in_order = sorted(self.hidden_behind.items(), key=lambda part: -part[1])
        longest = ", ".join(f"{1e3 * s:.2f} {kind}" for kind, s in in_order[:MOST_HIDING])
        behind = f" behind {longest}" if longest else ""
        return (
            f"{1e3 * self.seconds:9.2f} ms {sizes}  {self.name}, {self.asynchronous:,} of them"
            f" asynchronous, {1e3 * self.hidden_s:.2f} ms hidden{behind}"
        )


_SUMS = "launches", "sent_bytes", "seconds", "away_bytes", "asynchronous"


def scaled(seconds: Mapping[str, float], times: float) -> dict[str, float]:
    """Return every value of `seconds` multiplied by `times`."""
    return {kind: times * each for kind, each in seconds.items()}


@dataclass(frozen=True)
class GpuEstimate:
    """Predicted kernels of a program, the slowest first, its collectives, and notes about
    operations that could not be priced.
    """

    kernels: tuple[GpuKernel, ...]
    communication: tuple[Communication, ...]
    notes: tuple[str, ...]

    @property
    def launches(self) -> int:
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def num_bytes(self) -> float:
        return sum(kernel.num_bytes for kernel in self.kernels)

    @property
    def flops(self) -> float:
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def exposed_s(self) -> float:
        """Return the seconds of collectives that do not overlap with computation."""
        return sum(each.seconds - each.hidden_s for each in self.communication)

    @property
    def seconds(self) -> float:
        return sum(kernel.seconds for kernel in self.kernels) + self.exposed_s


@dataclass(frozen=True)
class KernelFacts:
    """Facts about jmoe's kernels that the shapes of their operands do not show.

    num_experts: experts of one layer, for kernels whose operand holds the weights of several
    layers; 0: there are none. filled: fraction of a buffer's rows that hold tokens. attended:
    positions of the cache that each row of a step attends to; None for all of its table. chosen:
    expected number of a layer's experts that tokens choose; None for as many as that many rows
    would choose, which with kernels that pad few rows is too many.
    """

    num_experts: int = 0
    filled: float = 1.0
    chosen: float | None = None
    attended: int | None = None


ALL_ROWS = KernelFacts()
Trips = Callable[[str], int | None]  # trip count of the loop with this scope; None: unknown


def estimate_module(
    module: HloModule,
    rates: GpuRates,
    facts: KernelFacts = ALL_ROWS,
    trips: Trips = lambda scope: None,
) -> GpuEstimate:
    """Return the predicted time of one run of a module.

    trips: a function of a loop's scope that returns its trip count, for loops whose count XLA does
    not know. If it returns None, the loop counts once, with a note.
    """
    pricing = _ModuleEstimator(module, rates, facts, trips)
    pricing.add_computation(module.entry, 1)
    return pricing.estimate()


def join_estimates(parts: Iterable[tuple[str, int, GpuEstimate]]) -> GpuEstimate:
    """Return the estimate of several programs that run one after another. parts: (name, number of
    runs, estimate).
    """
    kernels, communication, notes = [], [], dict[str, None]()
    for program, times, part in parts:
        for kernel in part.kernels:
            sums = {
                key: times * getattr(kernel, key)
                for key in ("launches", "num_bytes", "flops", "seconds")
            }
            kernels.append(replace(kernel, name=f"{program}: {kernel.name}", **sums))
        for each in part.communication:
            communication.append(replace(each.times(times), name=f"{program}: {each.name}"))
        notes |= dict.fromkeys(part.notes)
    kernels.sort(key=lambda kernel: -kernel.seconds)
    return GpuEstimate(tuple(kernels), tuple(communication), tuple(notes))


def short_scope(scope: str) -> str:
    """Return the readable part of an operation's scope, such as `loss/dot_general`, without the
    names of JAX's transformations.
    """
    names = re.sub(r"\w+\(|\)", "", re.sub(r"^jit\(\w+\)/", "", scope)).split("/")
    return "/".join(
        name for name in names if name not in _UNNAMED and not name.startswith("branch_")
    )


@dataclass
class _KernelWork:
    """One kernel launch: name, scope, kind (a key of `SHARES`), bytes moved and FLOPs."""

    name: str
    scope: str
    kind: str
    num_bytes: float
    flops: float = 0.0
    dtype: str = "bf16"


class _CollectiveQueue:
    """The time of one run of a computation, whose collectives run one after another in the order of
    their starts, beside what computes.

    seconds: {kind of kernel, or `WAITING`: seconds of the run so far}. hidden_behind: {label of a
    collective: {kind of kernel: seconds in which both ran}}.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.hidden_behind: dict[str, dict[str, float]] = {}
        self._now_s = 0.0
        self._under_way: dict[str, tuple[str, float, float]] = {}  # name: label, begin, end
        self._free_s = 0.0

    def enqueue(self, name: str, label: str, seconds: float) -> None:
        """Put a collective behind those under way."""
        begin_s = max(self._now_s, self._free_s)
        self._free_s = begin_s + seconds
        self._under_way[name] = label, begin_s, self._free_s

    def compute(self, seconds: Mapping[str, float]) -> None:
        """Pass the time of kernels, {kind: seconds}, beside the collectives under way."""
        end_s = self._now_s + sum(seconds.values())
        for label, begins_s, ends_s in self._under_way.values():
            both_s = min(ends_s, end_s) - max(begins_s, self._now_s)
            if both_s > 0:
                behind = self.hidden_behind.setdefault(label, {})
                _add_to(behind, scaled(seconds, both_s / (end_s - self._now_s)))
        _add_to(self.seconds, seconds)
        self._now_s = end_s

    def wait_for(self, name: str) -> None:
        """Wait until the collective `name` has ended; nothing happens if none has this name."""
        if name not in self._under_way:
            return
        end_s = max(self._now_s, self._under_way.pop(name)[2])
        _add_to(self.seconds, {WAITING: end_s - self._now_s})
        self._now_s = end_s


def _add_to(sums: dict[str, float], added: Mapping[str, float]) -> None:
    """Add each value to the sum of the same name."""
    for name, value in added.items():
        sums[name] = sums.get(name, 0.0) + value


@dataclass
class _ModuleEstimator:
    """Walks a compiled module, loops and branches included, and adds up estimated seconds, bytes
    and launches: of kernels by name, of collectives by label.
    """

    module: HloModule
    rates: GpuRates
    facts: KernelFacts
    trips: Trips
    kernels: dict[str, GpuKernel] = field(default_factory=dict)
    communication: dict[str, Communication] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def estimate(self) -> GpuEstimate:
        """Return the sums so far, kernels and collectives by falling seconds."""
        kernels = sorted(self.kernels.values(), key=lambda kernel: -kernel.seconds)
        communication = sorted(self.communication.values(), key=lambda each: -each.seconds)
        return GpuEstimate(tuple(kernels), tuple(communication), tuple(self.notes))

    def add_computation(self, computation: HloComputation, times: int) -> dict[str, float]:
        """Add everything that a computation runs, `times` times; return {kind of kernel, or
        `WAITING`: seconds of one run}.

        Computation between the start and the end of a collective hides that much of the collectives
        under way, which run one after another.
        """
        queue = _CollectiveQueue()
        for operation in computation.values():
            if collective := collective_of(self.module, computation, operation):
                if not collective.groups:
                    self.notes[
                        f"a collective of unknown devices is not priced: {operation.name}"
                    ] = None
                per_node = self.rates.devices_per_node
                seconds = collective.duration_s(self.rates.links, per_node)
                is_start = operation.kind.endswith("-start")
                added = Communication(
                    collective.label,
                    1,
                    collective.sent_bytes,
                    seconds,
                    collective.away_bytes(per_node),
                    asynchronous=int(is_start and not collective.is_synchronous),
                )
                self._add_communication(added.times(times))
                queue.enqueue(operation.name, collective.label, seconds)
                ended = "" if is_start else operation.name
            else:
                ended = operation.operands[0] if operation.kind.endswith("-done") else ""
                queue.compute(self._add_operation(computation, operation, times))
            queue.wait_for(ended)
        for label, behind in queue.hidden_behind.items():
            self._add_communication(Communication(label, hidden_behind=scaled(behind, times)))
        return queue.seconds

    def _add_communication(self, added: Communication) -> None:
        """Add to the sums of the collectives with the same label."""
        old = self.communication.get(added.name, Communication(added.name))
        self.communication[added.name] = old.plus(added)

    def _add_operation(
        self, computation: HloComputation, operation: HloOperation, times: int
    ) -> dict[str, float]:
        """Add everything that an operation launches, `times` times; return {kind of kernel, or
        `WAITING`: seconds of one run}.
        """
        kind = operation.kind
        if kind == "while":
            return self._add_loop(operation, times)
        if kind == "conditional":
            return self.add_computation(
                max(self.module.branch_computations(operation), key=self._computation_s), times
            )
        if kind in ("call", "async-start"):
            return self.add_computation(
                self.module.called_computation(operation, "to_apply", "calls"), times
            )
        allocates = operation.attribute("custom_call_target") == "AllocateBuffer"
        if kind in _FREE or kind.endswith("-done") or allocates:
            return {}
        work = self._operation_work(computation, operation)
        share, rates = SHARES[work.kind], self.rates
        flops_per_s = share.product * DTYPE_RATES.get(work.dtype, 1.0) * rates.product_flops
        seconds = max(
            work.num_bytes / (share.copy * rates.copy_bytes_per_s), work.flops / flops_per_s
        )
        seconds += rates.launch_s
        old = self.kernels.get(work.name, GpuKernel(work.name, short_scope(work.scope)))
        self.kernels[work.name] = replace(
            old,
            launches=old.launches + times,
            num_bytes=old.num_bytes + times * work.num_bytes,
            flops=old.flops + times * work.flops,
            seconds=old.seconds + times * seconds,
        )
        return {work.kind: seconds}

    def _add_loop(self, operation: HloOperation, times: int) -> dict[str, float]:
        """Add a loop that runs `times` times; return {kind of kernel, or `WAITING`: seconds of one
        run}, all trips together.
        """
        trips = operation.known_trip_count
        if trips is None and (trips := self.trips(operation.scope)) is None:
            self.notes[f"a loop of unknown length counts once: {short_scope(operation.scope)}"] = (
                None
            )
            trips = 1
        body = self.module.called_computation(operation, "body")
        return scaled(self.add_computation(body, times * trips), trips)

    def _computation_s(self, computation: HloComputation) -> float:
        """Return the seconds of a computation without adding it to the sums."""
        alone = _ModuleEstimator(self.module, self.rates, self.facts, self.trips)
        return sum(alone.add_computation(computation, 1).values())

    def _operation_work(self, computation: HloComputation, operation: HloOperation) -> _KernelWork:
        """Return the bytes and FLOPs of the kernel that an operation launches."""
        kind, name, scope = operation.kind, operation.name, operation.scope
        if kind in ("fusion", "fusion-start"):
            return self._fusion_work(operation)
        if kind == "custom-call":
            return self._custom_call_work(computation, operation)
        operands = [computation[operand] for operand in operation.operands]
        moved = operation.num_bytes + sum(operand.num_bytes for operand in operands)
        if kind == "dot":
            left = operands[0].results[0]
            return _KernelWork(
                name,
                scope,
                "product",
                moved,
                dot_flops(operation, left),
                _dtype_rate_key(operation, left),
            )
        if kind in ("dynamic-slice", "slice", "gather"):
            moved = 2 * operation.num_bytes
        elif kind == "dynamic-update-slice":
            moved = 2 * operands[1].num_bytes
        return _KernelWork(name, scope, "pass", moved)

    def _fusion_work(self, operation: HloOperation) -> _KernelWork:
        """Return the work of a fusion: a product if it has a dot, else a pass over its bytes."""
        body = self.module.called_computation(operation, "calls")
        name = operation.name
        scope = operation.scope
        moved = body.read_bytes() + body.written_bytes()
        calls = [part for part in body.values() if part.kind == "custom-call"]
        if calls:  # a library's or jmoe's kernel, fused with the slices that it reads and writes
            return replace(self._custom_call_work(body, calls[0]), num_bytes=moved)
        dots = [part for part in body.values() if part.kind == "dot"]
        if not dots:
            return _KernelWork(name, scope, "pass", moved)
        lefts = [body[dot.operands[0]].results[0] for dot in dots]
        flops = sum(dot_flops(dot, left) for dot, left in zip(dots, lefts, strict=True))
        users = [user for user in body.users_of(dots[0].name) if user.kind == "add"]
        is_added = any(body[name].kind == "parameter" for user in users for name in user.operands)
        kind = "sum of products" if is_added else "product"
        return _KernelWork(name, scope, kind, moved, flops, _dtype_rate_key(dots[0], lefts[0]))

    def _custom_call_work(
        self, computation: HloComputation, operation: HloOperation
    ) -> _KernelWork:
        """Return the work of a Pallas kernel or library call; of an unknown one its bytes alone."""
        target, scope = operation.attribute("custom_call_target"), operation.scope
        arrays = [array for name in operation.operands for array in computation[name].results]
        moved = operation.num_bytes + sum(array.num_bytes for array in arrays)
        is_own = target.startswith("mosaic") or target == TRITON
        kernel = re.search(r"(\w+)_kernel\b", scope) if is_own else None
        if kernel and kernel[1] == "paged_attention":
            return _paged_attention_work(operation, arrays, self.facts)
        if kernel and kernel[1] == "rotated_attention":
            return _rotated_attention_work(operation, arrays, self.facts)
        if kernel and kernel[1] in RANGE_ATTENTION:
            return _range_attention_work(kernel[1], operation, arrays)
        if kernel and kernel[1] == "rotate_and_write":  # moves one token of the cache it is given
            moved = 2 * arrays[0].num_bytes
            return _KernelWork("rotate_and_write in Triton", scope, "pass", moved)
        if kernel and kernel[1] == "loss_gradients":  # reads the logits a second time
            moved += arrays[0].num_bytes
            return _KernelWork("loss_gradients in Triton", scope, "pass", moved)
        if kernel and kernel[1] in PASSES_IN_TRITON:
            return _KernelWork(f"{kernel[1]} in Triton", scope, "pass", moved)
        if kernel and kernel[1] == "combine_splits":
            return _KernelWork("combine_splits in Triton", scope, "combine_splits in Triton", moved)
        if kernel and kernel[1] in SHARES:
            work = _pallas_kernel_work(kernel[1], operation, arrays, self.facts)
            in_triton = f"{kernel[1]} in Triton"
            return replace(work, name=in_triton, kind=in_triton) if target == TRITON else work
        if target.startswith("__cublas"):
            left = arrays[0]
            name = f"{target} {operation.name}"
            return _KernelWork(
                name, scope, "product", moved, dot_flops(operation, left), left.dtype
            )
        if target.startswith("__cudnn$fmha"):
            return _KernelWork(
                target, scope, "attention", moved, _attention_flops(operation, arrays)
            )
        self.notes[f"a kernel is priced by its bytes alone: {target or operation.name}"] = None
        return _KernelWork(target or operation.name, scope, "pass", moved)


def _dtype_rate_key(dot: HloOperation, left: HloArray) -> str:
    """Return the key of `DTYPE_RATES` for a product."""
    is_exact = left.dtype == "f32" and "operand_precision={highest" in dot.attributes
    return EXACT_FLOAT32 if is_exact else left.dtype


def _pallas_kernel_work(
    name: str, operation: HloOperation, arrays: list[HloArray], facts: KernelFacts
) -> _KernelWork:
    """Return the work of a kernel of `kernels_pallas`: `grouped_matmul`, `weight_gradient`, or one
    of `token_permute`.
    """
    out, scope = operation.results[0], operation.scope
    read = [array.num_bytes for array in arrays]
    if name == "grouped_matmul":  # (Mosaic: count,) tiles, rows, weights of groups, what they need
        at = 2 if len(arrays[0].shape) == 1 else 1
        rows, weights = arrays[at : at + 2]
        num_rows, inner = facts.filled * out.shape[0], rows.num_elements // rows.shape[-2]
        inner *= 2 if rows.dtype == "u32" else 1  # pairs of 16-bit values
        groups = min(facts.num_experts or weights.shape[0], weights.shape[0])
        used = facts.chosen  # or the expected number under uniform routing
        if used is None:
            used = groups * (1 - (1 - 1 / groups) ** num_rows)
        read[at] *= facts.filled
        read[at + 1 :] = [size * used / weights.shape[0] for size in read[at + 1 :]]
        # a gate and an up projection of one launch give half as many columns
        per_byte = 2 if weights.dtype == "u8" and weights.shape[1] < inner else 1
        outer, fits = weights.shape[2], weights.shape[1] * per_byte == inner
        if not fits:  # transposed
            outer, fits = weights.shape[1], weights.shape[2] == inner
        is_gated = fits and outer == 2 * out.shape[1]
        flops = facts.filled * 2.0 * out.num_elements * inner * (2 if is_gated else 1)
        dtype = "f8e4m3fn" if rows.dtype == "u8" else rows.dtype  # E4M3 as its bits
        return _KernelWork(
            name, scope, name, sum(read) + facts.filled * out.num_bytes, flops, dtype
        )
    if name == "weight_gradient":  # bounds, rows, gradients of what the products make
        _, rows, gradients = arrays[:3]
        flops = facts.filled * 2.0 * gradients.num_elements * rows.shape[-1]
        read[1:3] = [facts.filled * size for size in read[1:3]]
        return _KernelWork(name, scope, name, sum(read) + out.num_bytes, flops, rows.dtype)
    table, index = arrays[:2]  # table of rows, and the row index of each output row
    read[0] = min(read[0], table.num_bytes / table.shape[0] * index.num_elements)
    return _KernelWork(name, scope, name, sum(read) + out.num_bytes)


def _paged_attention_work(
    operation: HloOperation, arrays: list[HloArray], facts: KernelFacts
) -> _KernelWork:
    """Return the work of attention over a cache in blocks, which reads the blocks that its tables
    name. arrays: queries [P, C, H, d], tables, positions, window, keys [N, G, L, d], perhaps values
    [N, G, L, e], perhaps sinks.
    """
    queries, tables, _, _, *cached = arrays
    cached = [array for array in cached if len(array.shape) == 4]
    num_rows, num_tokens, num_heads, key_dim = queries.shape
    num_blocks, _, length, _ = cached[0].shape
    attended = tables.shape[1] * length if facts.attended is None else facts.attended
    of_position = sum(array.num_bytes for array in cached) / (num_blocks * length)
    out = operation.results[0]
    flops = 2.0 * num_rows * num_tokens * num_heads * attended * (key_dim + out.shape[-1])
    moved = queries.num_bytes + operation.num_bytes + num_rows * attended * of_position
    name = "paged_attention in Triton"
    return _KernelWork(name, operation.scope, name, moved, flops, queries.dtype)


def _rotated_attention_work(
    operation: HloOperation, arrays: list[HloArray], facts: KernelFacts
) -> _KernelWork:
    """Return the work of attention of single tokens that also rotates them and writes to the cache,
    which its results share. arrays: tables, positions, window, columns of queries, keys and values
    [P, 1, X], ..., keys [N, G, L, d], values.
    """
    tables, columns, keys = arrays[0], arrays[3], arrays[-2]
    num_blocks, groups, length, dim = keys.shape
    num_rows, num_heads = columns.shape[0], columns.shape[2] // dim - 2 * groups
    attended = tables.shape[1] * length if facts.attended is None else facts.attended
    of_position = sum(array.num_bytes for array in arrays[-2:]) / (num_blocks * length)
    flops = 4.0 * num_rows * num_heads * attended * dim
    moved = sum(array.num_bytes for array in [*arrays[:-2], *operation.results[:-2]])
    moved += num_rows * (attended + 1) * of_position
    name, kind = "rotated_attention in Triton", "paged_attention in Triton"
    return _KernelWork(name, operation.scope, kind, moved, flops, columns.dtype)


def _range_attention_work(
    name: str, operation: HloOperation, arrays: list[HloArray]
) -> _KernelWork:
    """Return the work of attention to ranges of keys, as if each row were one document: ranges are
    data, which the module does not show. arrays: ranges (2), queries [B, S, H, d], keys [B, C, G,
    d], values [B, C, G, e], ...
    """
    queries, keys, values = arrays[2:5]
    batch, num_queries, num_heads, key_dim = queries.shape
    num_keys, of_key, of_value = keys.shape[1], *RANGE_ATTENTION[name]
    scores = batch * num_heads * num_queries * (num_keys - min(num_keys, num_queries) / 2)
    flops = 2.0 * scores * (of_key * key_dim + of_value * values.shape[-1])
    moved = operation.num_bytes + sum(array.num_bytes for array in arrays)
    kind = "range_attention in Triton"
    return _KernelWork(f"{name} in Triton", operation.scope, kind, moved, flops, queries.dtype)


def _attention_flops(operation: HloOperation, arrays: list[HloArray]) -> float:
    """Return the FLOPs of attention over the scores that its mask leaves: two products forward, or
    five backward. arrays: queries, keys, values, ...
    """
    batch, heads, queries, keys = operation.attribute_integers(
        "dimensions"
    )  # the first: of the scores
    key_dim, value_dim = arrays[0].shape[-1], arrays[2].shape[-1]
    backward = "Backward" in operation.attributes
    per_score = 3 * key_dim + 2 * value_dim if backward else key_dim + value_dim
    window = re.search(r'"sliding_window_length": ?"?(\d+)', operation.attributes)
    seen = min(int(window[1]), keys) if window and int(window[1]) else keys
    is_causal = re.search(r'"mask_type": ?"CAUSAL"', operation.attributes)
    scores = seen * (queries - seen / 2) if is_causal else queries * keys
    return 2.0 * batch * heads * scores * per_score
