"""What a run of a benchmark comes to."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tricorn.bench.load import Result, percentile
from tricorn.request import TricornError


class Spread(msgspec.Struct, frozen=True):
    """A distribution, in milliseconds."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


def spread(seconds: Sequence[float]) -> Spread:
    if not seconds:
        return Spread()
    points = (percentile(seconds, percent) for percent in (50, 90, 95, 99, 100))
    return Spread(*(round(1000 * value, 3) for value in (sum(seconds) / len(seconds), *points)))


class Slo(msgspec.Struct, frozen=True):
    """What a request must keep to count as good, in milliseconds: to its first token, for each further one (their
    mean), and to its end. None is no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From `ttft=1000,tpot=50`. Raises TricornError."""
        try:
            bounds = {
                name.strip(): float(value) for name, _, value in (part.partition("=") for part in text.split(","))
            }
            return msgspec.convert(bounds, cls) if bounds.keys() <= set(cls.__struct_fields__) else cls.parse("?")
        except ValueError:
            message = f"{text!r} is no service level: use ttft, tpot and e2e in milliseconds, such as ttft=1000,tpot=50"
            raise TricornError(message) from None

    def kept(self, result: Result) -> bool:
        """Whether a request that is complete was good."""
        found = (result.ttft, tpot(result), result.seconds)
        return all(
            bound is None or 1000 * (value or 0.0) <= bound
            for bound, value in zip((self.ttft, self.tpot, self.e2e), found, strict=True)
        )


class Overhead(msgspec.Struct, frozen=True):
    """What the client itself took and missed: its share of a core, how late its clock ticked (every 5 ms), and how late
    requests left that had a moment to leave at."""

    cpu_share: float
    lag_ms_p99: float
    lag_ms_max: float
    late_ms_p99: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Rates are per second of the whole run. `ttft` counts from the sending of a request to its first token,
    `tpot` is the mean time of each further token of a request, `itl` the gap between two events of a stream, `e2e` the
    time to the end. `goodput` counts the requests that kept the service level; None without one. `server` is by how
    much the counters of /metrics grew, `peak_rss_mib` the sum over the server's processes, where it is local."""

    workload: str
    load: str
    seconds: float
    requests: int
    completed: int
    errors: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_s: float
    output_tok_s: float
    total_tok_s: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    goodput_requests_s: float | None
    goodput_share: float | None
    client: Overhead
    server: dict[str, float]
    peak_rss_mib: float | None


def tpot(result: Result) -> float | None:
    """Mean seconds of each token after the first; None without one."""
    tokens = output_tokens(result)
    return (result.times[-1] - result.times[0]) / (tokens - 1) if tokens > 1 else None


def output_tokens(result: Result) -> int:
    """As the server counts; what was seen where it does not."""
    return result.usage.completion_tokens if result.usage else sum(result.counts)


@dataclass(frozen=True)
class Run:
    """One measurement, with all that came back, from `began` on."""

    summary: Summary
    results: Sequence[Result]
    began: float


def summarize(
    results: Sequence[Result],
    *,
    workload: str,
    load: str,
    seconds: float,
    slo: Slo | None,
    client: Overhead,
    server: Mapping[str, float],
    peak_rss_mib: float | None,
) -> Summary:
    """Figures are of the requests that were completed; the others count in `errors`, by kind."""
    complete = [result for result in results if result.complete]
    prompt = sum(result.usage.prompt_tokens for result in complete if result.usage)
    output = sum(map(output_tokens, complete))
    good = None if slo is None else sum(map(slo.kept, complete))
    return Summary(
        workload=workload,
        load=load,
        seconds=round(seconds, 3),
        requests=len(results),
        completed=len(complete),
        errors=dict(Counter(_kind(result) for result in results if not result.complete)),
        prompt_tokens=prompt,
        cached_tokens=sum(result.usage.cached for result in complete if result.usage),
        output_tokens=output,
        requests_s=round(len(complete) / seconds, 3),
        output_tok_s=round(output / seconds, 1),
        total_tok_s=round((prompt + output) / seconds, 1),
        ttft=spread([result.ttft for result in complete if result.ttft is not None]),
        tpot=spread([value for value in map(tpot, complete) if value is not None]),
        itl=spread([b - a for result in complete for a, b in itertools.pairwise(result.times)]),
        e2e=spread([result.seconds for result in complete]),
        goodput_requests_s=None if good is None else round(good / seconds, 3),
        goodput_share=None if good is None else round(good / len(results), 3) if results else 0.0,
        client=client,
        server=dict(server),
        peak_rss_mib=peak_rss_mib,
    )


def _kind(result: Result) -> str:
    if result.status not in (0, 200):
        return f"status {result.status}"
    return result.error[:60] or f"ended by {result.finish_reason}"


ROWS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("output tok/s", lambda s: f"{s.output_tok_s:.1f}"),
    ("requests/s", lambda s: f"{s.requests_s:.3f}"),
    ("completed", lambda s: f"{s.completed}/{s.requests}"),
    ("TTFT ms p50 / p99", lambda s: f"{s.ttft.p50:.0f} / {s.ttft.p99:.0f}"),
    ("time per token ms p50 / p99", lambda s: f"{s.tpot.p50:.1f} / {s.tpot.p99:.1f}"),
    ("gap ms p50 / p99 / max", lambda s: f"{s.itl.p50:.1f} / {s.itl.p99:.1f} / {s.itl.max:.0f}"),
    ("end to end s p50 / p99", lambda s: f"{s.e2e.p50 / 1000:.2f} / {s.e2e.p99 / 1000:.2f}"),
    ("goodput", lambda s: "" if s.goodput_share is None else f"{s.goodput_requests_s:.3f}/s ({s.goodput_share:.0%})"),
    ("cached of prompt", lambda s: f"{s.cached_tokens / s.prompt_tokens:.0%}" if s.prompt_tokens else ""),
    ("peak RSS MiB", lambda s: "" if s.peak_rss_mib is None else f"{s.peak_rss_mib:.0f}"),
    ("client: core, lag ms p99", lambda s: f"{s.client.cpu_share:.0%}, {s.client.lag_ms_p99:.1f}"),
)
"""The lines of a table for people: what, and how it is written."""


def flat(summary: Summary) -> dict[str, object]:
    """One row of a table for programs: nested names joined with a dot."""
    row: dict[str, object] = {}
    for name, value in msgspec.to_builtins(summary).items():
        if isinstance(value, dict) and name != "errors":
            row.update({f"{name}.{part}": item for part, item in value.items()})
        else:
            row[name] = sum(value.values()) if name == "errors" else value
    return row
