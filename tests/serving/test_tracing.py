"""Spans of a real server at a collector that the test is. Skipped without OpenTelemetry's packages
(`pip install 'jmoe[otel]'`), but for the message that names them.
"""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from jmoe.config.serving import ServeConfig
from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.sequence import Sequence
from jmoe.serving import tracing
from jmoe.serving.tracing import Tracer, check_otel_installed, is_otel_installed
from tests.http_servers import HttpProcess

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NEEDS_OTEL = pytest.mark.skipif(not is_otel_installed(), reason="pip install 'jmoe[otel]'")


class Collector(ThreadingHTTPServer):
    """Keeps the bodies that are posted to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def test_the_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "PACKAGE", "opentelemetry_that_is_missing.http")
    with pytest.raises(ValueError, match=r"otlp_traces_endpoint = 'http://x': .* 'jmoe\[otel\]'"):
        check_otel_installed("http://x")
    with pytest.raises(ValueError, match="otlp_traces_endpoint = 'localhost:4318': must begin"):
        ServeConfig("m", otlp_traces_endpoint="localhost:4318")


@NEEDS_OTEL
def test_a_span_for_each_request(start: Callable[..., HttpProcess], collector: Collector) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    server = start("--otlp-traces-endpoint", url, "--policy", "resident", OTEL_SERVICE_NAME="moe")
    try:
        body = {"prompt": [5] * 9, "max_tokens": 4, "temperature": 0.5, "n": 2, "ignore_eos": True}
        with server.client(headers={"traceparent": PARENT, "x-request-id": "r1"}) as client:
            assert client.post("/v1/completions", json=body).status_code == 200
        with server.stream(prompt="x", max_tokens=3) as events:
            list(events)
        assert server.terminate() == 0
    finally:
        server.kill()
    spans = []
    for data in collector.bodies:
        request = ExportTraceServiceRequest.FromString(data)
        for resource in request.resource_spans:
            named = {a.key: a.value.string_value for a in resource.resource.attributes}
            assert named["service.name"] == "moe"
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert [span.name for span in spans] == ["llm_request"] * 2
    assert spans[0].trace_id.hex() == PARENT.split("-")[1]
    assert spans[0].parent_span_id.hex() == PARENT.split("-")[2]
    assert not spans[1].parent_span_id
    values = {}
    for attribute in spans[0].attributes:
        kind = attribute.value.WhichOneof("value")
        values[attribute.key.removeprefix("gen_ai.")] = getattr(attribute.value, kind)
    assert values["request.id"] == "r1"
    assert (values["usage.prompt_tokens"], values["usage.completion_tokens"]) == (9, 8)
    assert (values["request.n"], values["usage.num_sequences"]) == (2, 2)
    assert (values["request.max_tokens"], values["request.temperature"]) == (4, 0.5)
    whole = values["latency.e2e"]
    assert 0 <= values["latency.time_in_queue"] <= values["latency.time_to_first_token"] <= whole
    assert whole == pytest.approx(
        (spans[0].end_time_unix_nano - spans[0].start_time_unix_nano) / 1e9
    )


@NEEDS_OTEL
def test_names_of_the_service_and_of_an_adapter(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the SDK's variables the service is jmoe; a request's model is its adapter."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    tracer = Tracer(f"http://127.0.0.1:{collector.server_port}/v1/traces", "model")
    for adapter in ("", "a"):
        sequences = [Sequence([1], SamplingParams(), adapter=adapter)]
        tracer.record_span(SimpleNamespace(sequences=sequences, num_tokens=0), "r", {})  # type: ignore[arg-type]
    tracer.close()
    (data,) = collector.bodies
    (resource,) = ExportTraceServiceRequest.FromString(data).resource_spans
    named = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert named["service.name"] == "jmoe"
    models = [
        attribute.value.string_value
        for span in resource.scope_spans[0].spans
        for attribute in span.attributes
        if attribute.key == "gen_ai.response.model"
    ]
    assert models == ["model", "a"]
