"""OpenTelemetry spans, one for each generation, when an endpoint is configured and the extra `otel` is installed.

Attributes are those of the semantic conventions for generative AI. A span is made when its request has ended, from the
times that were noted, so tracing costs a token nothing; it is sent from a thread of the exporter's own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from tricorn.server.journal import Entry

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

CLOSE_SECONDS = 1.0
"""How long the last spans may take."""


def open_tracing(environment: Mapping[str, str] = os.environ) -> Tracing | None:
    """What the environment asks for, if anything; says so once when it cannot be had."""
    if not any(environment.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        print(
            "tricorn: an OTLP endpoint is set but OpenTelemetry is not installed, so no traces are sent:"
            " pip install 'tricorn[otel]'",
            file=sys.stderr,
            flush=True,
        )
        return None
    name = environment.get("OTEL_SERVICE_NAME") or "tricorn"
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


class Tracing:
    """Makes the spans of requests that have ended."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tricorn")

    def record(self, entry: Entry, model: str, seconds: float) -> None:
        """The span of a generation that took so long, with its phases as children."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {} if entry.traceparent is None else {"traceparent": entry.traceparent}
        start = int(entry.arrived * 1e9)
        operation = "chat" if entry.route.endswith("/chat/completions") else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {model}",
            TraceContextTextMapPropagator().extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes=_attributes(entry, model, operation),
            start_time=start,
        )
        if entry.status >= 500:
            span.set_status(trace.StatusCode.ERROR)
        if entry.first_token is not None:
            span.add_event("first token", timestamp=start + _ns(entry.first_token - entry.started))
        if entry.timings is not None:
            inside = trace.set_span_in_context(span)
            at = start + _ns(seconds) - _ns(sum(_phases(entry).values()))  # what came before was text
            for name, phase in _phases(entry).items():
                child = self._tracer.start_span(name, inside, start_time=at)
                at += _ns(phase)
                child.end(at)
        span.end(start + _ns(seconds))

    def close(self) -> None:
        """Sends what is left, within bounds."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


def _phases(entry: Entry) -> dict[str, float]:
    timings = entry.timings
    return {} if timings is None else {"queue": timings.queued, "prefill": timings.prefill, "decode": timings.decode}


def _attributes(entry: Entry, model: str, operation: str) -> dict[str, Any]:
    params = entry.params
    assert params is not None
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tricorn",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.id": entry.id,
        "gen_ai.response.id": entry.answer_id,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.response.finish_reasons": entry.finish_reasons,
        "gen_ai.usage.input_tokens": entry.prompt_tokens,
        "gen_ai.usage.output_tokens": entry.output_tokens,
        "gen_ai.usage.cached_input_tokens": entry.cached_tokens,
        "http.route": entry.route,
        "http.response.status_code": entry.status,
    }
    if entry.first_token is not None:
        attributes["gen_ai.latency.time_to_first_token"] = entry.first_token - entry.started
    return attributes


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
