"""The metrics of several servers as one text."""

from prometheus_client.parser import text_string_to_metric_families

from jmoe.serving.metrics import Metrics, merge_metrics


def test_each_sample_keeps_its_value_and_names_its_replica() -> None:
    servers = {"a": Metrics("olmoe"), "b": Metrics("olmoe")}
    for number, metrics in enumerate(servers.values(), start=1):
        metrics.prompt_tokens.inc(10 * number)
        metrics.latency.observe(0.5 * number)
        metrics.finished("stop").inc(number)
    merged = merge_metrics({name: m.render_text().decode() for name, m in servers.items()})
    families = list(text_string_to_metric_families(merged.decode()))
    assert len({family.name for family in families}) == len(families)
    types = {family.name: family.type for family in families}
    assert types["vllm:prompt_tokens"] == "counter"
    assert types["vllm:e2e_request_latency_seconds"] == "histogram"
    for name, metrics in servers.items():
        own = text_string_to_metric_families(metrics.render_text().decode())
        expected = {(s.name, *sorted(s.labels.items())): s.value for f in own for s in f.samples}
        found = {
            (s.name, *sorted((k, v) for k, v in s.labels.items() if k != "replica")): s.value
            for family in families
            for s in family.samples
            if s.labels["replica"] == name
        }
        assert found == expected and len(found) > 40


def test_no_replica_has_no_metrics() -> None:
    assert merge_metrics({}) == b""
