"""Metrics of a run over real HTTP: what a step, a save and an evaluation leave there, and ports
that cannot be had.
"""

import contextlib
import dataclasses
import json
import math
import signal
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jmoe.config import CheckpointConfig, MetricsConfig, TiersConfig, TrainConfig
from jmoe.run.prometheus import RunMetrics
from tests.train_runs import ENDLESS, Start, TrainRuns, committed, free_port, losses

STEP = {
    "loss": 4.5,
    "grad_norm": 0.25,
    "learning_rate": 1e-3,
    "dropped_fraction": 0.0,
    "step_s": 0.5,
}
TIERS = {"nvme_read_bytes": 3e9, "nvme_written_bytes": 2e9, "host_bytes": 5e9, "waited_s": 1.5}


def fetched(port: int) -> dict[str, float]:
    """The values by name, as Prometheus would read them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        text = answer.read().decode()
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    assert {sample.labels["run"] for sample in samples} and len(
        {sample.name for sample in samples}
    ) == len(samples)
    return {sample.name.removeprefix("jmoe_train_"): sample.value for sample in samples}


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "run.json").write_text(json.dumps({"run": "mine", "output_dir": str(tmp_path)}))
    local = MetricsConfig(free_port(), "127.0.0.1")
    return TrainConfig(
        output_dir=str(tmp_path), num_steps=20, batch_size=4, sequence_length=8, metrics=local
    )


def test_what_a_run_does_is_shown(config: TrainConfig, tmp_path: Path) -> None:
    with RunMetrics(config, "mine") as metrics:
        assert fetched(metrics.port) == {"num_steps": 20, "steps": 0, "tokens_total": 0}
        (tmp_path / "metrics.jsonl").write_text('{"event": "resume", "step": 6}\n')
        metrics.note_resume(6)
        metrics.note_step(6, STEP | {"tokens_per_s": 3.0, "compiled": True, "balance_loss": 1.0})
        shown = fetched(metrics.port)
        assert (shown["steps"], shown["tokens_total"], shown["restarts"]) == (7, 7 * 32, 1)
        assert (shown["loss"], shown["grad_norm"], shown["step_seconds"]) == (4.5, 0.25, 0.5)
        assert shown.keys().isdisjoint(
            {"tokens_per_second", "checkpoint_step", "held_out_loss", "tier_hit_rate"}
        )
        metrics.note_step(7, STEP | {"loss": math.nan, "tokens_per_s": 64.0})
        metrics.note_save(0.125)
        metrics.note_evaluation(4.25)
        (tmp_path / "checkpoints" / "5").mkdir(parents=True)
        (tmp_path / "checkpoints" / "10.orbax-checkpoint-tmp").mkdir()
        shown = fetched(metrics.port)
        assert math.isnan(shown["loss"])
        assert (shown["tokens_per_second"], shown["save_seconds"], shown["held_out_loss"]) == (
            64.0,
            0.125,
            4.25,
        )
        assert shown["checkpoint_step"] == 5 and shown["checkpoint_age_seconds"] >= 0
        assert (
            shown["checkpoint_timestamp_seconds"]
            == (tmp_path / "checkpoints" / "5").stat().st_mtime
        )
    assert not metrics._thread.is_alive()


def test_tiers_are_counted(config: TrainConfig) -> None:
    tiers = TiersConfig(experts="nvme", optimizer="nvme")
    streamed = dataclasses.replace(config, tiers=tiers, checkpoint=CheckpointConfig())
    with RunMetrics(streamed, "mine") as metrics:
        metrics.note_step(0, STEP | {"tokens_per_s": 1.0, "tiers": TIERS})
        assert "tier_hit_rate" not in fetched(metrics.port)
        metrics.note_step(1, STEP | {"tokens_per_s": 1.0, "tiers": TIERS | {"hit_rate": 0.75}})
        shown = fetched(metrics.port)
        assert (shown["tier_hit_rate"], shown["tier_wait_seconds_total"]) == (0.75, 1.5)
        moved = ("nvme_read", "nvme_written", "host")
        assert [shown[f"{name}_bytes_total"] for name in moved] == [3e9, 2e9, 5e9]


def test_ports_that_cannot_be_had(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(port: int, host: str = "127.0.0.1") -> None:
        with RunMetrics(dataclasses.replace(config, metrics=MetricsConfig(port, host)), "mine"):
            pytest.fail("it could be had")

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        at = r"cannot be listened on at metrics.host = '127.0.0.1'"
        with pytest.raises(
            ValueError, match=rf"metrics.port = {port}: {at}: Address already in use"
        ):
            start(port)
    with pytest.raises(
        ValueError, match=r"at metrics.host = '192.0.2.1': Cannot assign requested address"
    ):
        start(port, "192.0.2.1")
    with pytest.raises(ValueError, match=r"at metrics.host = 'no such host': "):
        start(port, "no such host")

    def refused(*_: Any) -> None:  # root, as whom tests may run, is not
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(prometheus_client, "start_http_server", refused)
        with pytest.raises(
            ValueError,
            match=rf"port = 80: {at}: Permission denied \(ports below 1024 are for root\)",
        ):
            start(80)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        ValueError, match=r"needs the package prometheus-client: pip install 'jmoe\[metrics\]'"
    ):
        start(port)


@pytest.mark.parametrize(("field", "value"), [("port", -1), ("port", 65536), ("host", "")])
def test_bad_settings_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"metrics.{field} = {value!r}: must be"):
        MetricsConfig(**{field: value})


@pytest.mark.slow
def test_a_real_run_is_watched(runs: TrainRuns, tmp_path: Path, start_python: Start) -> None:
    """Two of one port: the second one ends before it has compiled or written anything."""
    run, port = tmp_path / "run", free_port()
    options = (*ENDLESS, "--metrics.port", port, "--metrics.host", "127.0.0.1")
    process = start_python(runs.command(run, *options), tmp_path / "log", runs.environment())
    shown: dict[str, float] = {}

    def watched() -> bool:
        with contextlib.suppress(OSError):
            shown.update(fetched(port))
        return (
            shown.get("checkpoint_step", 0) >= 5
            and "save_seconds" in shown
            and "tokens_per_second" in shown
        )

    process.wait_until(watched)
    step = int(shown["steps"]) - 1
    assert dict(losses(run))[step] == shown["loss"]
    assert (
        shown["tokens_total"] == (step + 1) * 8 * 64
        and shown["num_steps"] == 1_000_000
        and shown["restarts"] == 0
    )
    assert shown["held_out_loss"] > 0 and shown["checkpoint_age_seconds"] >= 0
    said = runs.fail(tmp_path / "other", *options)
    assert (
        f"train.py: metrics.port = {port}: cannot be listened on" in said
        and "Address already in use" in said
    )
    assert not (tmp_path / "other").exists()
    process.send_signal(signal.SIGTERM)
    assert f"metrics for Prometheus on port {port}" in process.end(300)
    assert committed(run)[-1] == len(losses(run))
