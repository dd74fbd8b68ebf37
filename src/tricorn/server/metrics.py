"""What Prometheus sees, under the names that dashboards for vLLM know. No label takes a client's words."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tricorn.engine.messages import EngineStats
from tricorn.frontend.generate import Delta

disable_created_metrics()  # type: ignore[no-untyped-call]

LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Bucket borders in seconds, for all three latencies."""

REASONS = ("stop", "length", "timeout", "abort", "error")


class Metrics:
    """The counters of one server. `model` is the label that every series carries."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._stats: EngineStats | None = None
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.between = self._histogram("inter_token_latency_seconds", "Between the tokens of one sequence.")
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end, completed requests.")
        finished = Counter(
            "vllm:request_success",
            "Sequences ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self.finished = {reason: finished.labels(model, reason) for reason in REASONS}
        self._errors = Counter(
            "tricorn:request_errors", "Requests refused or failed.", ["model_name", "status"], registry=self._registry
        )
        self._registry.register(self)  # collect() below adds the engine's own figures

    def error(self, status: int) -> None:
        """A request ended with this status."""
        self._errors.labels(self._model, str(status)).inc()

    def exposition(self, stats: EngineStats) -> bytes:
        """All series as text."""
        self._stats = stats
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        if stats is None:
            return
        gauges = {
            "num_requests_running": ("Sequences being computed.", stats.running),
            "num_requests_waiting": ("Sequences waiting for room.", stats.waiting),
            "kv_cache_usage_perc": (
                "Share of pages held by live sequences, 0 to 1.",
                stats.pages_held / max(1, stats.pages_total),
            ),
        }
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_queried_tokens),
            "prefix_cache_hits": ("Prompt tokens found there.", stats.prefix_hit_tokens),
            "num_preemptions": ("Sequences preempted.", stats.preemptions),
        }
        for family, series in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (help, value) in series.items():
                metric = family(f"vllm:{name}", help, labels=["model_name"])
                metric.add_metric([self._model], value)
                yield metric

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"vllm:{name}", help, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, help: str) -> Histogram:
        metric = Histogram(f"vllm:{name}", help, ["model_name"], buckets=LATENCY, registry=self._registry)
        return metric.labels(self._model)


class Watch:
    """Times one request and counts its tokens, delta by delta."""

    def __init__(self, metrics: Metrics, prompt_tokens: int, choices: int, started: float) -> None:
        self._metrics = metrics
        self._started = started
        self._last = [0.0] * choices
        self._tokens = [0] * choices
        self._reasons: list[str | None] = [None] * choices
        metrics.prompt_tokens.inc(prompt_tokens)

    def delta(self, delta: Delta) -> None:
        metrics, index, now = self._metrics, delta.index, time.monotonic()
        new = delta.completion_tokens - self._tokens[index]
        if new:
            if self._tokens[index] == 0:
                metrics.first.observe(now - self._started)
            else:
                metrics.between.observe((now - self._last[index]) / new)
            metrics.generation_tokens.inc(new)
            self._tokens[index], self._last[index] = delta.completion_tokens, now
        self._reasons[index] = delta.finish_reason

    def end(self, failed: bool) -> None:
        """The request is over; choices without a reason were aborted, or failed with the engine."""
        for reason in self._reasons:
            self._metrics.finished[reason or ("error" if failed else "abort")].inc()
        if all(self._reasons):
            self._metrics.whole.observe(time.monotonic() - self._started)
