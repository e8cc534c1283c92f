"""A span for each generating request, sent to an OpenTelemetry collector (`pip install
'jmoe[otel]'`).

Names of spans and attributes are vLLM's: https://docs.vllm.ai/en/latest/examples/online_serving/opentelemetry.html.
A caller's trace goes on if its request has a `traceparent` header. The variables of OpenTelemetry's
SDK (`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, `OTEL_EXPORTER_OTLP_HEADERS`) have their effect.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from jmoe.config import check

if TYPE_CHECKING:
    from jmoe.serving.engine_loop import Generation

SPAN = "llm_request"
PACKAGE = "opentelemetry.exporter.otlp.proto.http"


def check_otel_installed(endpoint: str | None) -> None:
    """Raise ValueError if there is an endpoint, and the packages are not installed."""
    words = "needs OpenTelemetry's packages: pip install 'jmoe[otel]'"
    check(endpoint is None or is_otel_installed(), "otlp_traces_endpoint", endpoint, words)


def is_otel_installed() -> bool:
    """Return whether the packages of the extra `otel` are installed."""
    try:
        return find_spec(PACKAGE) is not None
    except ModuleNotFoundError:  # of a parent
        return False


class Tracer:
    """Sends spans in a thread of its own; a collector that cannot be reached costs no request
    anything.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        """endpoint: the collector's URL for traces, such as http://localhost:4318/v1/traces.
        model: the name of the served model.

        Raises ValueError if the packages are not installed.
        """
        check_otel_installed(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # the variables' name goes first
        resource = Resource.create({SERVICE_NAME: "jmoe"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("jmoe.serving")
        self._model = model

    def close(self) -> None:
        """Send the spans that wait, and end the thread."""
        self._provider.shutdown()

    def record_span(
        self, generation: Generation, request_id: str, headers: Mapping[str, str]
    ) -> None:
        """Record the span of a request that has ended, from its arrival until now.

        headers: of the request, which may continue a caller's trace.
        """
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now_s, now_ns = time.monotonic(), time.time_ns()
        sequences = generation.sequences
        arrived_s = min(sequence.arrived_s for sequence in sequences)
        model = sequences[0].adapter or self._model
        span = self._tracer.start_span(
            SPAN,
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            start_time=now_ns - round((now_s - arrived_s) * 1e9),
            attributes=_span_attributes(generation, now_s)
            | {"gen_ai.request.id": request_id, "gen_ai.response.model": model},
        )
        span.end(now_ns)


def _span_attributes(generation: Generation, now_s: float) -> dict[str, int | float]:
    """Return the numbers of a request: its parameters, tokens and times, the latter in seconds."""
    sequences = generation.sequences
    sampling, arrived_s = sequences[0].sampling, min(one.arrived_s for one in sequences)
    # of each prompt once
    prompts = {id(one.prompt_token_ids): len(one.prompt_token_ids) for one in sequences}
    numbers: dict[str, int | float] = {
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": len(sequences) // len(prompts),
        "gen_ai.usage.num_sequences": len(sequences),
        "gen_ai.usage.prompt_tokens": sum(prompts.values()),
        "gen_ai.usage.completion_tokens": generation.num_tokens,
        "gen_ai.latency.e2e": now_s - arrived_s,
    }
    started = [one.started_s for one in sequences if one.started_s]
    if started:
        numbers["gen_ai.latency.time_in_queue"] = min(started) - arrived_s
    first = [one.first_token_s for one in sequences if one.num_delivered_tokens]
    if first:
        last_s = max(one.last_token_s for one in sequences)
        numbers["gen_ai.latency.time_to_first_token"] = min(first) - arrived_s
        numbers["gen_ai.latency.time_in_model_prefill"] = min(first) - min(started)
        numbers["gen_ai.latency.time_in_model_decode"] = last_s - min(first)
    return numbers
