"""Prometheus exporter of a training run, on process 0: step, loss, rate, checkpoints, restarts and
tiers under `/metrics`.

Metric names follow https://prometheus.io/docs/practices/naming
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from jmoe.cluster.clocks import probe_disk_time
from jmoe.cluster.overview import read_overview
from jmoe.cluster.restarts import read_progress
from jmoe.config import TrainConfig
from jmoe.types import Json

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Gauges from a step's record: (name in the record, metric name, help text).
STEP_GAUGES = (
    ("loss", "loss", "Loss of the last step, nats per token."),
    ("grad_norm", "grad_norm", "Norm of the gradient in the last step."),
    ("learning_rate", "learning_rate", "Learning rate of the last step."),
    (
        "dropped_fraction",
        "dropped_fraction",
        "Of the last step's assignments of tokens to experts, those dropped.",
    ),
    ("step_s", "step_seconds", "Duration of the last step."),
    (
        "tokens_per_s",
        "tokens_per_second",
        "Tokens of the last step by its duration; not of steps that compile.",
    ),
)
TIER_COUNTERS = (
    (
        "nvme_read_bytes",
        "nvme_read_bytes",
        "Records of experts read from NVMe by process 0 since its start.",
    ),
    (
        "nvme_written_bytes",
        "nvme_written_bytes",
        "Records of experts written to NVMe by process 0 since its start.",
    ),
    (
        "host_bytes",
        "host_bytes",
        "Records of experts taken from host memory by process 0 since its start.",
    ),
    (
        "waited_s",
        "tier_wait_seconds",
        "Time in which process 0 waited for experts since its start.",
    ),
)


@dataclass
class _Metric:
    """kind: `gauge` or `counter`. text: help text. value: None while unknown; the metric is then
    left out.
    """

    kind: str
    text: str
    value: float | None = None


class RunMetrics:
    """Context manager that answers `GET /metrics` on `metrics.port` from its own thread. Port 0
    selects a free port.

    Checkpoints are read from the output folder at each request, so a checkpoint appears once it is
    complete. Raises `ValueError` naming `metrics.port` if prometheus-client is missing or the port
    cannot be opened.
    """

    def __init__(self, config: TrainConfig, run: str) -> None:
        self._config, self._output_dir = config, Path(config.output_dir)
        self._tokens_until = config.tokens_before_step
        self._metrics: dict[str, _Metric] = {}
        self._labels = {"run": run}
        self._lock = threading.Lock()  # all values of a step appear at once
        self._define_metric(
            "gauge", "num_steps", "Steps that the run is to have.", config.num_steps
        )
        self._define_metric("gauge", "steps", "Steps that are done.", 0)
        self._define_metric(
            "counter",
            "tokens",
            "Tokens of all steps that are done, those before a resume included.",
            0,
        )
        for _, name, text in STEP_GAUGES:
            self._define_metric("gauge", name, text)
        self._define_metric(
            "gauge", "last_step_timestamp_seconds", "When the last step was done, Unix time."
        )
        self._define_metric(
            "gauge", "held_out_loss", "Loss on the held-out data when it was last evaluated."
        )
        self._define_metric(
            "gauge", "save_seconds", "Time for which the last save kept the steps waiting."
        )
        self._define_metric("gauge", "restarts", "Restarts of the run so far.")
        may_offload = not config.tiers.all_on_device or config.comm.packing == "auto"
        if may_offload and config.lora.rank is None:
            self._define_metric(
                "gauge",
                "tier_hit_rate",
                "Of the experts looked up in host memory, those that were there.",
            )
            for _, name, text in TIER_COUNTERS:
                self._define_metric("counter", name, text)

    def __enter__(self) -> Self:
        name, host, port = "metrics.port", self._config.metrics.host, self._config.metrics.port
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            reason = "needs the package prometheus-client: pip install 'jmoe[metrics]'"
            raise ValueError(f"{name} = {port}: {reason}") from error
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]  # prometheus-client only calls `collect`
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            privileged = (
                " (ports below 1024 are for root)" if isinstance(error, PermissionError) else ""
            )
            reason = (
                f"cannot be listened on at metrics.host = {host!r}: {error.strerror}{privileged}"
            )
            raise ValueError(f"{name} = {port}: {reason}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        """Return the port that the server listens on."""
        return int(self._server.server_port)

    def note_resume(self, steps: int) -> None:
        """Set the number of steps done before this process began, and read the number of restarts
        from the output folder.
        """
        restarts = read_overview(self._output_dir).restarts
        self._set_values(steps=steps, tokens=self._tokens_until(steps), restarts=restarts)

    def note_step(self, step: int, record: Mapping[str, Json]) -> None:
        """Record a finished step. record: the step's record as in metrics.jsonl."""
        known = {name: record[key] for key, name, _ in STEP_GAUGES if record.get(key) is not None}
        if record.get("compiled"):
            known.pop("tokens_per_second", None)
        if (tiers := record.get("tiers")) is not None:
            known |= {name: tiers[key] for key, name, _ in TIER_COUNTERS}
            known |= {"tier_hit_rate": tiers["hit_rate"]} if "hit_rate" in tiers else {}
        done = step + 1
        self._set_values(
            **known,
            steps=done,
            tokens=self._tokens_until(done),
            last_step_timestamp_seconds=time.time(),
        )

    def note_save(self, seconds: float) -> None:
        """Record for how many seconds the last save blocked training."""
        self._set_values(save_seconds=seconds)

    def note_evaluation(self, loss: float) -> None:
        """Record the loss on held-out data."""
        self._set_values(held_out_loss=loss)

    def collect(self) -> list[Metric]:
        """Return all known metrics as metric families. prometheus-client calls this at each
        request.
        """
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        family: dict[str, type[GaugeMetricFamily | CounterMetricFamily]] = {
            "gauge": GaugeMetricFamily,
            "counter": CounterMetricFamily,
        }
        with self._lock:
            metrics = {name: replace(metric) for name, metric in self._metrics.items()}
        families: list[Metric] = []
        for name, metric in (metrics | self._checkpoint_metrics()).items():
            if metric.value is not None:
                made = family[metric.kind](
                    f"jmoe_train_{name}", metric.text, labels=list(self._labels)
                )
                made.add_metric(list(self._labels.values()), metric.value)
                families.append(made)
        return families

    def _checkpoint_metrics(self) -> dict[str, _Metric]:
        step = read_progress(self._output_dir).checkpoint
        folder = self._output_dir / "checkpoints" / str(step)
        try:
            saved_time = folder.stat().st_mtime
        except OSError:  # there is none, or it was just deleted
            return {}
        now = probe_disk_time(folder.parent) or time.time()
        return {
            "checkpoint_step": _Metric("gauge", "Steps in the newest complete checkpoint.", step),
            "checkpoint_timestamp_seconds": _Metric(
                "gauge", "When it was written, Unix time.", saved_time
            ),
            "checkpoint_age_seconds": _Metric("gauge", "Its age.", max(0.0, now - saved_time)),
        }

    def _define_metric(self, kind: str, name: str, text: str, value: float | None = None) -> None:
        self._metrics[name] = _Metric(kind, text, value)

    def _set_values(self, **values: float) -> None:
        with self._lock:
            for name, value in values.items():
                self._metrics[name].value = float(value)
