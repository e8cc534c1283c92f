"""Expected tokens/s of serving on a machine, from data sheets and the bytes that a step moves. Pure
functions, used by `serve.py --dry-run`.

A step takes what `StreamingPlan` predicts for the fastest policy, from rates that data sheets give
in place of measurements. Routing is uniform.
"""

from dataclasses import dataclass

from jmoe.config.engine import Policy
from jmoe.config.tiers import ACCELERATORS, MachineConfig
from jmoe.planning.gpu_estimate import COPY_SHARE, LAUNCH_S, PRODUCT_SHARE
from jmoe.planning.gpu_links import GPU_LINKS, GPUS_PER_NODE
from jmoe.planning.memory_plan import MemoryPlan
from jmoe.planning.roofline import StepPrediction, busiest_device_experts
from jmoe.planning.streaming import Calibration, StreamingPlan

LINK_SHARE = 0.84  # of PCIe's data sheet: 54 of 64 GB/s from pinned memory, measured on an H100
# kernels reach this share of a copy's bytes/s (`gpu_estimate.SHARES`)
KERNEL_SHARE = 0.8
# programs of OLMoE and gpt-oss compiled for an H100 (benchmarks/results/decode_estimates.json)
LAUNCHES_PER_LAYER = 9
LAUNCHES_PER_LAYER_OF_DEVICES = 42  # assumed: that many before kernels of one device were joined
SYNC_S = 3e-5  # assumed: a GPU's choices of experts reach the host, which begins the next program


@dataclass(frozen=True)
class ServingRates:
    """Rates that a device reaches, and its share of its host's rates.

    exchange_bytes_per_s, exchange_latency_s: to the other devices, and of a collective with next to
    no data. launches_s: time of starting a layer's kernels.
    """

    memory_bytes_per_s: float
    flops: float
    link_bytes_per_s: float
    host_memory_bytes_per_s: float
    nvme_bytes_per_s: float
    exchange_bytes_per_s: float
    exchange_latency_s: float
    launches_s: float
    sync_s: float

    @property
    def copy_bytes_per_s(self) -> float:
        """The rate of copies from host memory, which its devices share."""
        return min(self.link_bytes_per_s, self.host_memory_bytes_per_s)

    @property
    def host_compute_bytes_per_s(self) -> float:
        """The rate at which the host's cores read experts beside the copies, above 0."""
        return max(self.host_memory_bytes_per_s - self.copy_bytes_per_s, 1.0)


def serving_rates(machine: MachineConfig, num_devices: int) -> ServingRates:
    """Return the rates of a machine with `num_devices` devices, at most `GPUS_PER_NODE` a host.

    Figures that `machine` gives count as reached. Of a data sheet's, programs reach a share that
    was measured on an H100. Without an accelerator, the device is the host's CPU.
    """
    sheet, nominal = ACCELERATORS.get(machine.accelerator), machine.resolve_device_peaks()
    on_cpu = sheet is None and not machine.device_bytes
    reached = KERNEL_SHARE * COPY_SHARE if sheet else 1.0
    link = machine.link_bytes_per_s or nominal.link_bytes_per_s * (LINK_SHARE if sheet else 1.0)
    sharing = min(num_devices, GPUS_PER_NODE)
    has_nvlink = sheet is not None and not machine.accelerator.startswith("rtx")
    launches = LAUNCHES_PER_LAYER if num_devices == 1 else LAUNCHES_PER_LAYER_OF_DEVICES
    return ServingRates(
        memory_bytes_per_s=machine.memory_bytes_per_s or reached * nominal.memory_bytes_per_s,
        flops=machine.flops or (PRODUCT_SHARE if sheet else 1.0) * nominal.flops,
        link_bytes_per_s=link,
        host_memory_bytes_per_s=machine.host_memory_bytes_per_s / sharing,
        nvme_bytes_per_s=machine.nvme_read_bytes_per_s / sharing,
        exchange_bytes_per_s=GPU_LINKS.inside_bytes_per_s if has_nvlink else link,
        exchange_latency_s=GPU_LINKS.inside_latency_s,
        launches_s=0.0 if on_cpu else launches * LAUNCH_S,
        sync_s=0.0 if on_cpu else SYNC_S,
    )


@dataclass(frozen=True)
class DecodeStep:
    """A step of `num_tokens` sequences, one token each, as one device sees it.

    context: tokens before each token. dense_bytes: weights outside of routed experts that are read.
    cache_bytes: keys and values that are read. flops: of the model, this device's part. sent_bytes:
    rows that the device sends to experts of a layer, and gets back.
    """

    num_tokens: int
    context: int
    dense_bytes: float
    cache_bytes: float
    flops: float
    sent_bytes: float = 0.0


@dataclass(frozen=True)
class TimeTerm:
    """A part of a step's time, and the bytes or calls that it consists of."""

    name: str
    seconds: float
    what: str

    def __str__(self) -> str:
        return f"  {self.name:<34}{1e3 * self.seconds:>10.2f} ms  {self.what}"


@dataclass(frozen=True)
class DecodeEstimate:
    """The expected time of a step. terms: its parts, some of which overlap."""

    step: DecodeStep
    policy: Policy
    seconds: float
    terms: tuple[TimeTerm, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.step.num_tokens / self.seconds

    @property
    def longest_term(self) -> TimeTerm:
        """The part that takes longest."""
        return max(self.terms, key=lambda term: term.seconds)

    def __str__(self) -> str:
        n = self.step.num_tokens
        sequences = f"{n} sequence{'s' * (n > 1)}, {self.step.context:,} tokens before each"
        share = 100 * self.longest_term.seconds / self.seconds
        return "\n".join(
            [
                f"{sequences}: {self.tokens_per_s:,.4g} tokens/s, {1e3 * self.seconds:.3g} ms a"
                f" step, policy {self.policy}",
                *map(str, self.terms),
                f"  longest: {self.longest_term.name}, {share:.0f} % of the step",
            ]
        )


class ServingEstimator:
    """Estimates steps of an engine whose bytes lie as a memory plan says."""

    def __init__(self, memory: MemoryPlan, rates: ServingRates, num_layers: int) -> None:
        """num_layers: all layers of the model, with experts or without."""
        self._memory, self._rates, self._num_layers = memory, rates, num_layers

    def estimate(self, step: DecodeStep) -> DecodeEstimate:
        """Return the expected time of a step under the fastest policy that the plan allows."""
        weights, rates = self._memory.model.weights, self._rates
        on_device = self._device_terms(step)
        reads, products, launches, *between = on_device
        compute_s = max(reads.seconds, products.seconds) + launches.seconds
        compute_s += sum(term.seconds for term in between)
        streams = self._memory.expert_tier is not None
        plan = StreamingPlan(
            self._memory,
            Calibration(
                (step.num_tokens,),
                (compute_s / weights.num_layers,),
                sync_s=0.0 if between else rates.sync_s,  # counted between devices
                bandwidth_bytes_per_s=rates.copy_bytes_per_s if streams else float("inf"),
                nvme_bytes_per_s=rates.nvme_bytes_per_s if streams else float("inf"),
                host_bytes_per_s=rates.host_compute_bytes_per_s if self._host_computes else 0.0,
            ),
        )
        policy = plan.choose_policy(step.num_tokens)
        chosen = next(p for p in plan.predictions(step.num_tokens) if p.policy == policy)
        terms = [*on_device, *self._streaming_terms(plan, chosen, step, bool(between))]
        return DecodeEstimate(step, policy, chosen.step_s, tuple(terms))

    @property
    def _host_computes(self) -> bool:
        """Whether the host's cores may compute experts: with policy auto not on several devices,
        nor where the CPU is the device.
        """
        memory, on_cpu = self._memory, not self._rates.launches_s
        may = memory.policy == "hybrid" or (memory.num_devices == 1 and not on_cpu)
        return may and memory.expert_tier == "host"

    def _device_terms(self, step: DecodeStep) -> list[TimeTerm]:
        """Return the times of memory, products and launches, then of exchanges if there are several
        devices.
        """
        weights, rates, n = self._memory.model.weights, self._rates, self._memory.num_devices
        sizes = weights.num_experts, weights.num_experts_per_tok
        active = busiest_device_experts(*sizes, step.num_tokens, n)
        expert_bytes = weights.num_layers * active * weights.expert_bytes
        total = step.dense_bytes + expert_bytes + step.cache_bytes
        parts = (
            f"{total / 1e9:.4g} GB at {rates.memory_bytes_per_s / 1e12:.3g} TB/s: experts"
            f" {expert_bytes / 1e9:.3g}, other weights {step.dense_bytes / 1e9:.3g}, keys and"
            f" values {step.cache_bytes / 1e9:.3g}"
        )
        launches_s = self._num_layers * rates.launches_s
        terms = [
            TimeTerm("device memory is read", total / rates.memory_bytes_per_s, parts),
            TimeTerm("products", step.flops / rates.flops, f"{step.flops / 1e12:.3g} TFLOP"),
            TimeTerm("kernels are launched", launches_s, f"{self._num_layers} layers"),
        ]
        if n > 1:
            each = 2 * (step.sent_bytes / rates.exchange_bytes_per_s + rates.exchange_latency_s)
            what = (
                f"{weights.num_layers} layers, there and back, {step.sent_bytes / 1e6:.3g} MB at"
                f" {rates.exchange_bytes_per_s / 1e9:.3g} GB/s"
            )
            terms.append(TimeTerm("rows cross between devices", weights.num_layers * each, what))
            terms.append(self._readback_term())
        return terms

    def _readback_term(self) -> TimeTerm:
        """Return the time in which the host reads the choices of all layers."""
        layers = self._memory.model.weights.num_layers
        what = f"{layers} layers with experts"
        return TimeTerm("choices reach the host", layers * self._rates.sync_s, what)

    def _streaming_terms(
        self, plan: StreamingPlan, chosen: StepPrediction, step: DecodeStep, readback_counted: bool
    ) -> list[TimeTerm]:
        """Return the times of the experts that stream to the devices.

        readback_counted: whether the other terms have the time to read choices back.
        """
        rates, terms = self._rates, list[TimeTerm]()
        if chosen.policy in ("experts", "hybrid") and not readback_counted:
            terms.append(self._readback_term())
        if not chosen.streamed_bytes:
            return terms
        moved, computed = chosen.streamed_bytes, 0.0
        if chosen.policy == "hybrid":
            every = next(p for p in plan.predictions(step.num_tokens) if p.policy == "experts")
            computed = every.streamed_bytes - moved
        by_rate = lambda size, rate: f"{size / 1e9:.3g} GB at {rate / 1e9:.3g} GB/s"  # noqa: E731
        link = by_rate(moved, rates.link_bytes_per_s)
        n = self._memory.num_devices
        if n > 1:
            link += f", over each of {n} links"
        terms.append(TimeTerm("experts cross the link", moved / rates.link_bytes_per_s, link))
        host = (moved + computed) / rates.host_memory_bytes_per_s
        if self._memory.expert_tier == "nvme":
            missed = 1 - self._memory.host_bytes / (
                self._memory.model.num_experts * self._memory.model.record_bytes
            )
            read = missed * moved
            what = by_rate(read, rates.nvme_bytes_per_s)
            terms.append(
                TimeTerm("experts are read from NVMe", read / rates.nvme_bytes_per_s, what)
            )
        what = by_rate(moved + computed, rates.host_memory_bytes_per_s) + " a device"
        if computed:
            what += f", {computed / 1e9:.3g} of it by experts that the CPU computes"
        return [*terms, TimeTerm("host memory is read", host, what)]
