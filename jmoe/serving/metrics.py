"""Prometheus metrics for `/metrics`: vLLM's names where the meaning is the same, else `jmoe:`
names.

https://docs.vllm.ai/en/latest/usage/metrics
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from jmoe.inference.scheduler import SchedulerStats
from jmoe.inference.sequence import Output
from jmoe.inference.stats import EngineStats

if TYPE_CHECKING:
    from jmoe.inference.mesh.expert_placer import PlacementStats

LABEL = "model_name"
SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

BUSIEST = (
    "Tokens of a layer's busiest expert in the last steps, as a multiple of the mean; 0: no tokens."
)
BALANCE = (
    "Tokens of a layer's mean device, as a part of the busiest one's; 1: no device waits for"
    " another."
)


@dataclass(frozen=True)
class EngineSnapshot:
    """Statistics of the engine and scheduler, taken between two steps."""

    engine: EngineStats
    scheduler: SchedulerStats


@dataclass(frozen=True)
class ExpertView:
    """Where experts are and how often tokens choose them; computed at most once per `VIEW_S`.

    slots: for each device slot the (layer, expert) in it, None if it is empty. The list is empty if
        all experts stay on the device.
    """

    slots: list[tuple[int, int] | None]
    expert_counts: list[list[int]]  # [layer][expert]: tokens routed in the last steps


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merge_metrics(text_by_replica: Mapping[str, str]) -> bytes:
    """Return the metrics of several servers as one text in Prometheus's format. The label `replica`
    of each sample is the server's key in `text_by_replica`.
    """
    families: dict[str, Metric] = {}
    for replica, text in text_by_replica.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type, family.unit)
            )
            merged.samples += [
                sample._replace(labels={**sample.labels, "replica": replica})
                for sample in family.samples
            ]
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)


class EngineStatsSource(Protocol):
    """The part of `EngineLoop` that `Metrics` reads.

    kv_tokens_total: capacity of the KV cache, in tokens.
    """

    snapshot: EngineSnapshot
    last_view: ExpertView
    kv_tokens_total: int


class Metrics(Collector):
    """Prometheus metrics of requests, and of the engine's own statistics."""

    def __init__(self, model_name: str) -> None:
        self.registry, self.model_name = CollectorRegistry(), model_name
        self.prompt_tokens_total = self.generation_tokens_total = 0

        def make_histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, [LABEL], registry=self.registry, buckets=buckets).labels(
                model_name
            )

        def make_counter(name: str, text: str, *labels: str) -> Callable[..., Counter]:
            return partial(
                Counter(name, text, [LABEL, *labels], registry=self.registry).labels, model_name
            )

        self.time_to_first_token = make_histogram(
            "vllm:time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            SECONDS,
        )
        self.inter_token_latency = make_histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", SECONDS
        )
        self.time_per_output_token = make_histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of a token after the first.",
            SECONDS,
        )
        self.latency = make_histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", SECONDS
        )
        self.request_prompt_tokens = make_histogram(
            "vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS
        )
        self.request_generation_tokens = make_histogram(
            "vllm:request_generation_tokens", "Tokens drawn.", TOKENS
        )
        self.prompt_tokens = make_counter("vllm:prompt_tokens", "Tokens of prompts.")()
        self.generation_tokens = make_counter("vllm:generation_tokens", "Tokens drawn.")()
        self.finished = make_counter(
            "vllm:request_success", "Sequences that ended.", "finished_reason"
        )
        self.rejected = make_counter(
            "jmoe:requests_rejected", "Requests that were not taken in.", "reason"
        )

    def observe_output(self, output: Output, now_s: float) -> None:
        """Count an output, and update its sequence's token count and times.

        now_s: the time of the output, by `time.monotonic`.
        """
        sequence, num_tokens = output.sequence, len(output.token_ids)
        prompt_tokens = len(sequence.prompt_token_ids)
        self.generation_tokens.inc(num_tokens)
        self.generation_tokens_total += num_tokens
        if not sequence.num_delivered_tokens:
            self.time_to_first_token.observe(now_s - sequence.arrived_s)
            self.prompt_tokens.inc(prompt_tokens)
            self.prompt_tokens_total += prompt_tokens
            sequence.first_token_s = now_s
        else:
            self.inter_token_latency.observe(now_s - sequence.last_token_s)
        sequence.num_delivered_tokens += num_tokens
        sequence.last_token_s = now_s
        if output.finish_reason is not None:
            self.finished(output.finish_reason).inc()
            self.latency.observe(now_s - sequence.arrived_s)
            self.request_prompt_tokens.observe(prompt_tokens)
            self.request_generation_tokens.observe(sequence.num_delivered_tokens)
            if sequence.num_delivered_tokens > 1:
                mean_s = (now_s - sequence.first_token_s) / (sequence.num_delivered_tokens - 1)
                self.time_per_output_token.observe(mean_s)

    def register_stats_source(self, loop: EngineStatsSource) -> None:
        """Add the statistics of `loop` to the metrics."""
        self._loop = loop
        self.registry.register(self)

    def render_text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the engine's metrics; the registry calls it for `text`."""
        snapshot = self._loop.snapshot  # read once: the engine thread replaces it
        engine = snapshot.engine
        yield from self._engine_families(snapshot)
        if engine.placement is not None:
            yield from self._placement_families(engine.placement)
        experts = enumerate(self._loop.last_view.expert_counts)
        load = {
            str(layer): max(counts) * len(counts) / max(1, sum(counts)) for layer, counts in experts
        }
        moved = {"host": engine.streamed_bytes, "nvme": engine.nvme_bytes}
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield self._make_family(gauge, "jmoe:expert_load_max", BUSIEST, "layer", load)
        yield self._make_family(counter, "jmoe:tier_bytes", "Read from this tier.", "tier", moved)

    def _engine_families(self, snapshot: EngineSnapshot) -> Iterator[Metric]:
        """Yield the engine's and the scheduler's metrics of one value each."""
        engine, scheduler = snapshot.engine, snapshot.scheduler
        kv_usage = scheduler.blocks_used / scheduler.blocks
        copying = engine.roofline_fraction
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for family, name, text, value in (
            (gauge, "vllm:num_requests_running", "Sequences that run.", scheduler.running),
            (
                gauge,
                "vllm:num_requests_waiting",
                "Sequences that wait for a place.",
                scheduler.waiting,
            ),
            (gauge, "vllm:kv_cache_usage_perc", "Part of the cache in use, 0 to 1.", kv_usage),
            (gauge, "jmoe:kv_blocks", "Blocks of the cache.", scheduler.blocks),
            (gauge, "jmoe:kv_blocks_used", "Blocks of running sequences.", scheduler.blocks_used),
            (
                gauge,
                "jmoe:kv_blocks_cached",
                "Blocks of ended sequences whose tokens can be reused.",
                scheduler.blocks_cached,
            ),
            (
                gauge,
                "jmoe:expert_hit_rate",
                "Of the experts that tokens chose, those in a slot.",
                engine.hit_rate,
            ),
            (
                gauge,
                "jmoe:roofline_fraction",
                "Part of the time in which experts were copied.",
                copying,
            ),
            (gauge, "jmoe:device_expert_bytes", "Memory of the slots.", engine.device_expert_bytes),
            (gauge, "jmoe:host_expert_bytes", "Host memory of experts.", engine.host_expert_bytes),
            (
                counter,
                "vllm:prefix_cache_queries",
                "Prompt tokens that were looked up in the cache.",
                scheduler.prompt_tokens,
            ),
            (
                counter,
                "vllm:num_preemptions",
                "Sequences that gave back their part of the cache, to be computed again.",
                scheduler.preemptions,
            ),
            (
                counter,
                "vllm:prefix_cache_hits",
                "Prompt tokens that were not computed again.",
                scheduler.reused_tokens,
            ),
            (counter, "vllm:spec_decode_num_drafts", "Drafts that steps verified.", engine.drafts),
            (
                counter,
                "vllm:spec_decode_num_draft_tokens",
                "Tokens of these drafts.",
                engine.drafted,
            ),
            (
                counter,
                "vllm:spec_decode_num_accepted_tokens",
                "Tokens of these drafts that became output.",
                engine.accepted,
            ),
            (counter, "jmoe:steps", "Steps of the engine.", engine.steps),
            (counter, "jmoe:step_seconds", "Time in steps.", engine.step_s),
            (
                counter,
                "jmoe:waited_seconds",
                "Time in which the device waited for experts.",
                engine.waited_s,
            ),
        ):
            yield self._make_family(family, name, text, None, {"": value})

    def _placement_families(self, placement: "PlacementStats") -> Iterator[Metric]:
        """Yield the metrics of experts placed on several devices, per layer or per device."""
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        balancedness = {str(layer): share for layer, share in enumerate(placement.balancedness)}
        loads = {str(device): load for device, load in enumerate(placement.loads)}
        yield self._make_family(gauge, "jmoe:device_balancedness", BALANCE, "layer", balancedness)
        copies = {str(device): number for device, number in enumerate(placement.copies)}
        yield self._make_family(
            counter, "jmoe:device_load", "Choices of tokens that it computed.", "device", loads
        )
        yield self._make_family(
            counter, "jmoe:device_copies", "Experts copied to it.", "device", copies
        )
        for name, text, value in (
            (
                "jmoe:placement_replans",
                "Placements that were planned again after a gate.",
                placement.replans,
            ),
            ("jmoe:placement_swaps", "Placements that were changed.", placement.swaps),
            (
                "jmoe:swapped_bytes",
                "Experts copied to the server's own devices.",
                placement.swapped_bytes,
            ),
            (
                "jmoe:placement_waited_seconds",
                "Time in which devices waited for copies.",
                placement.waited_s,
            ),
        ):
            yield self._make_family(counter, name, text, None, {"": value})

    def _make_family(
        self,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        label: str | None,
        values: Mapping[str, float],
    ) -> Metric:
        """Return a metric family with one sample per value of `label`.

        label: None for a metric without a further label; `values` then has the single key "".
        """
        metric = family(name, text, labels=[LABEL] if label is None else [LABEL, label])
        for label_value, value in values.items():
            metric.add_metric(
                [self.model_name] if label is None else [self.model_name, label_value], value
            )
        return metric
