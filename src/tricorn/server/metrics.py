"""What Prometheus sees, under the names that dashboards for vLLM know. No label takes a client's words."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tricorn.engine import gate
from tricorn.engine.messages import DeathReason, EngineInfo, EngineStats, Survival
from tricorn.frontend.generate import Delta
from tricorn.request import SamplingParams, Timings
from tricorn.server.errors import HttpError
from tricorn.server.journal import Entry

disable_created_metrics()  # type: ignore[no-untyped-call]

LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Bucket borders in seconds, for all latencies."""

TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
"""Bucket borders in tokens."""

CHOICES = (1, 2, 5, 10, 20, 50, 100)

FINISH_REASONS = ("stop", "length", "timeout", "abort", "error")
REFUSAL_REASONS = (*gate.REASONS, "rate", "invalid", "unavailable")
STEP_KINDS = ("prefill", "decode", "mixed")
DEATH_REASONS: tuple[DeathReason, ...] = get_args(DeathReason)
HOST_PHASES = ("schedule", "submit", "commit")

Values = Sequence[tuple[tuple[str, ...], float]]
"""The values of the further labels, and what they are worth."""


class Metrics:
    """The counters of one server. `model` is the label that every series carries."""

    def __init__(self, model: str, info: EngineInfo | None = None) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._stats: EngineStats | None = None
        self._survival: Survival | None = None
        self._engine: int | None = None
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.first = self._seconds("time_to_first_token_seconds", "From arrival to the first token.")
        self.between = self._seconds("inter_token_latency_seconds", "Between the tokens of one sequence.")
        self.per_token = self._seconds("request_time_per_output_token_seconds", "The mean of it, one per sequence.")
        self.whole = self._seconds("e2e_request_latency_seconds", "From arrival to the end, completed requests.")
        self.queue = self._seconds("request_queue_time_seconds", "Until a sequence was admitted.")
        self.prefill = self._seconds("request_prefill_time_seconds", "From admission to the first token.")
        self.decode = self._seconds("request_decode_time_seconds", "From the first token to the last.")
        self.inference = self._seconds("request_inference_time_seconds", "From admission to the last token.")
        self.request_prompt = self._tokens("request_prompt_tokens", "Prompt tokens of a request that ended.")
        self.request_generation = self._tokens("request_generation_tokens", "Tokens generated for a request, in all.")
        self.request_longest = self._tokens("request_max_num_generation_tokens", "Tokens of its longest choice.")
        self.request_limit = self._tokens("request_params_max_tokens", "Its max_tokens.")
        self.request_n = self._histogram("request_params_n", "Its n.", CHOICES)
        self.finished = self._counters(
            "vllm:request_success", "Sequences ended, by reason.", "finished_reason", FINISH_REASONS
        )
        self._refused = self._counters(
            "tricorn:requests_refused", "Requests refused, by reason.", "reason", REFUSAL_REASONS
        )
        self._errors = Counter(
            "tricorn:request_errors", "Requests refused or failed.", ["model_name", "status"], registry=self._registry
        )
        self._constants(info)
        ProcessCollector(registry=self._registry)
        self._registry.register(self)  # collect() below adds the engine's own figures

    def error(self, error: HttpError) -> None:
        """A request ended with this error."""
        self._errors.labels(self._model, str(error.status)).inc()
        if error.reason is not None:
            self._refused[error.reason].inc()

    def exposition(self, stats: EngineStats, survival: Survival | None = None, engine: int | None = None) -> bytes:
        """All series as text. An engine in a process of its own has a `survival`; `engine` is its process."""
        self._stats, self._survival, self._engine = stats, survival, engine
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        if stats is None:
            return
        survival = self._survival or Survival()
        for name, help, values, *labels in _gauges(stats, survival):
            yield self._family(GaugeMetricFamily(name, help, labels=["model_name", *labels]), values)
        for name, help, values, *labels in [*_counters(stats), *_survived(survival)]:
            yield self._family(CounterMetricFamily(name, help, labels=["model_name", *labels]), values)
        rows = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Token rows of a step: their sum and the steps.", labels=["model_name"]
        )
        rows.add_metric([self._model], [("+Inf", sum(stats.steps.values()))], stats.prefill_rows + stats.decode_rows)
        yield rows
        if self._engine is not None and (memory := _resident(self._engine)) is not None:
            family = GaugeMetricFamily("tricorn:engine_resident_memory_bytes", "Of the engine process.", labels=[NAME])
            yield self._family(family, [((), memory)])

    def _family(self, family: Metric, values: Values) -> Metric:
        for labels, value in values:
            family.add_metric([self._model, *labels], value)  # type: ignore[attr-defined]
        return family

    def _constants(self, info: EngineInfo | None) -> None:
        labels = {"version": version("tricorn"), "python_version": platform.python_version()}
        build = Gauge("tricorn:build_info", "What runs.", ["model_name", *labels], registry=self._registry)
        build.labels(self._model, *labels.values()).set(1)
        if info is not None:
            sizes = {"block_size": info.page_size, "num_cpu_blocks": info.pages, "executor": info.executor}
            config = Gauge("vllm:cache_config_info", "The KV cache.", ["model_name", *sizes], registry=self._registry)
            config.labels(self._model, *map(str, sizes.values())).set(1)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, ["model_name"], registry=self._registry).labels(self._model)

    def _counters(self, name: str, help: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        """One for each value of a label, all there from the start."""
        counter = Counter(name, help, ["model_name", label], registry=self._registry)
        return {value: counter.labels(self._model, value) for value in values}

    def _seconds(self, name: str, help: str) -> Histogram:
        return self._histogram(name, help, LATENCY)

    def _tokens(self, name: str, help: str) -> Histogram:
        return self._histogram(name, help, TOKENS)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(f"vllm:{name}", help, ["model_name"], buckets=buckets, registry=self._registry)
        return metric.labels(self._model)


NAME = "model_name"

Rows = Iterator[tuple[str, str, Values, *tuple[str, ...]]]
"""Name, help, values, and the labels beside the model's name."""


def _one(value: float) -> Values:
    return [((), value)]


def _by(values: Mapping[str, float], known: Sequence[str]) -> Values:
    return [((key,), values.get(key, 0)) for key in known]


def _gauges(stats: EngineStats, survival: Survival) -> Rows:
    total = max(1, stats.pages_total)
    pages = {"free": stats.pages_free, "held": stats.pages_held, "cached": stats.pages_cached}
    yield "vllm:num_requests_running", "Sequences being computed.", _one(stats.running)
    yield "vllm:num_requests_waiting", "Sequences waiting for room.", _one(stats.waiting)
    yield "vllm:kv_cache_usage_perc", "Share of pages held by live sequences, 0 to 1.", _one(stats.pages_held / total)
    yield "tricorn:pages", "Pages of the KV cache, by state.", _by(pages, list(pages)), "state"
    yield "tricorn:free_slots", "Sequences that could be admitted at once.", _one(stats.free_slots)
    yield "tricorn:prefill_token_seconds", "What one more prompt token costs.", _one(stats.prefill_token_seconds)
    yield "tricorn:engine_longest_pause_seconds", "Without an engine, with requests.", _one(survival.longest_pause)
    if stats.disk is not None:
        yield "tricorn:disk_pages", "Pages in the disk tier.", _one(stats.disk.pages)
        yield "tricorn:disk_writing", "1 while the disk tier takes pages in.", _one(stats.disk.writing)


def _counters(stats: EngineStats) -> Rows:
    sources = {"host": stats.prefix_hit_tokens - stats.disk_hit_tokens, "disk": stats.disk_hit_tokens}
    rows = {"prefill": stats.prefill_rows, "decode": stats.decode_rows}
    yield "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", _one(stats.prefix_queried_tokens)
    yield "vllm:prefix_cache_hits", "Prompt tokens found there.", _one(stats.prefix_hit_tokens)
    yield (
        "vllm:prompt_tokens_cached_by_source",
        "Of the hits, those in memory and those read from disk.",
        _by(sources, list(sources)),
        "source",
    )
    yield "vllm:num_preemptions", "Sequences preempted.", _one(stats.preemptions)
    yield "tricorn:recomputed_tokens", "Tokens computed again after a preemption.", _one(stats.recomputed_tokens)
    yield "tricorn:evicted_pages", "Pages that left the cache.", _one(stats.evicted_pages)
    yield "tricorn:steps", "Steps, by what they held.", _by(stats.steps, STEP_KINDS), "kind"
    yield "tricorn:step_seconds", "Time of the steps, one after the other.", _by(stats.step_seconds, STEP_KINDS), "kind"
    yield "tricorn:host_seconds", "Python's part of it.", _by(stats.host_seconds, HOST_PHASES), "phase"
    yield "tricorn:step_rows", "Token rows in the steps.", _by(rows, list(rows)), "phase"
    if stats.disk is not None:
        pages = {
            "written": stats.disk.written_pages,
            "read": stats.disk.read_pages,
            "corrupt": stats.disk.corrupt_pages,
            "dropped": stats.disk.dropped_pages,
        }
        yield (
            "tricorn:disk_page_operations",
            "What happened to pages of the disk tier.",
            _by(pages, list(pages)),
            "kind",
        )
        yield "tricorn:disk_read_seconds", "Time spent reading them.", _one(stats.disk.read_seconds)


def _survived(survival: Survival) -> Rows:
    deaths = {str(reason): count for reason, count in survival.deaths.items()}
    yield "tricorn:engine_deaths", "Deaths of the engine process.", _by(deaths, DEATH_REASONS), "reason"
    yield "tricorn:engine_restarts", "Engine processes started after the first.", _one(survival.restarts)
    yield "tricorn:resumed_requests", "Requests that went on in another engine.", _one(survival.resumed_requests)
    yield "tricorn:dropped_requests", "Requests given up after three deaths.", _one(survival.dropped_requests)


def _resident(pid: int) -> int | None:
    """Bytes of memory that a process has; None when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


class Watch:
    """Times one request and counts its tokens, delta by delta. Everything that it has begun to count is counted once
    more when the request ends, as one request, however it ends.
    """

    def __init__(
        self, metrics: Metrics, entry: Entry, ticket: gate.Ticket, params: SamplingParams, prompts: list[int]
    ) -> None:
        choices = len(prompts) * params.n
        self._metrics = metrics
        self._entry = entry
        self._ticket = ticket
        self._cached = [0] * choices
        self._n = params.n
        self._first = [0.0] * choices
        self._last = [0.0] * choices
        self._tokens = [0] * choices
        self._reasons: list[str | None] = [None] * choices
        self._timings: list[Timings] = []
        entry.params = params
        entry.prompt_tokens = sum(prompts)
        metrics.prompt_tokens.inc(entry.prompt_tokens)

    def delta(self, delta: Delta) -> None:
        metrics, index, now = self._metrics, delta.index, time.monotonic()
        new = delta.completion_tokens - self._tokens[index]
        if new:
            if self._tokens[index] == 0:
                self._begin(index, now)
            else:
                metrics.between.observe((now - self._last[index]) / new)
            metrics.generation_tokens.inc(new)
            self._tokens[index], self._last[index] = delta.completion_tokens, now
            self._entry.output_tokens += new
        if delta.cached_tokens > self._cached[index]:
            self._cached[index] = delta.cached_tokens
        if delta.finish_reason is not None:
            self._reasons[index] = delta.finish_reason
            if delta.timings is not None:
                self._timings.append(delta.timings)

    def _begin(self, index: int, now: float) -> None:
        """The first token of a choice."""
        entry = self._entry
        self._metrics.first.observe(now - entry.started)
        self._first[index] = now
        self._ticket.begin()
        if entry.first_token is None:
            entry.first_token, entry.phase = now, "generating"

    def end(self, failed: bool) -> None:
        """The request is over; choices without a reason were aborted, or failed with the engine."""
        metrics, entry = self._metrics, self._entry
        reasons = [reason or ("error" if failed else "abort") for reason in self._reasons]
        for reason in reasons:
            metrics.finished[reason].inc()
        if all(self._reasons) and not failed:
            metrics.whole.observe(time.monotonic() - entry.started)
        for first, last, tokens in zip(self._first, self._last, self._tokens, strict=True):
            if tokens > 1:
                metrics.per_token.observe((last - first) / (tokens - 1))
        metrics.request_prompt.observe(entry.prompt_tokens)
        metrics.request_generation.observe(entry.output_tokens)
        metrics.request_longest.observe(max(self._tokens))
        metrics.request_n.observe(self._n)
        assert entry.params is not None
        metrics.request_limit.observe(entry.params.max_tokens)
        for timings in self._timings:
            self._phases(timings)
        entry.finish_reasons = reasons
        entry.cached_tokens = sum(self._cached[:: self._n])
        entry.timings = self._timings[-1] if self._timings else None

    def _phases(self, timings: Timings) -> None:
        """A phase that the sequence did not reach is not counted."""
        metrics = self._metrics
        metrics.queue.observe(timings.queued)
        if timings.prefill:
            metrics.prefill.observe(timings.prefill)
            metrics.inference.observe(timings.prefill + timings.decode)
        if timings.decode:
            metrics.decode.observe(timings.decode)
