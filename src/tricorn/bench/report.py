"""Runs of `tricorn bench serve` as one HTML file: tables and plots, no script, nothing to be fetched."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from tricorn import __version__
from tricorn.bench.load import Result
from tricorn.bench.summary import ROWS, Run, tpot

WIDTH, HEIGHT, LEFT, BOTTOM, RIGHT = 420, 220, 52, 34, 22
BUCKETS = 60
MOST_DOTS = 2000
COLORS = ("#1f6feb", "#d1570a", "#1a7f4b", "#8250df", "#bf3989", "#6e7781")

Point = tuple[float, float]
Line = tuple[str, Sequence[Point]]

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:66rem;margin:2rem auto;padding:0 1rem}
h1{margin:0}h2{margin:2.2rem 0 .4rem}table{border-collapse:collapse;margin:.6rem 0}
td,th{padding:.2rem .9rem .2rem 0;text-align:right;border-bottom:1px solid #8884;font-variant-numeric:tabular-nums}
td:first-child,th:first-child{text-align:left}
.plots{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0;break-inside:avoid}
svg{max-width:100%;height:auto}text{fill:currentColor;font:11px system-ui,sans-serif}
figcaption{font-weight:600}.grid{stroke:#8884}.axis{stroke:currentColor}
@media print{body{margin:0;max-width:none}h2{break-after:avoid}}
"""


def page(title: str, runs: Sequence[Run]) -> str:
    """All runs beside each other, then each with its plots."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><h1>{html.escape(title)}</h1>",
        f"<p>Measured by tricorn {__version__}. A time to first token counts from the sending of the request.</p>",
        table(runs),
    ]
    for run in runs:
        summary = run.summary
        parts.append(f"<h2>{html.escape(summary.workload)}, {html.escape(summary.load)}</h2>")
        if summary.errors:
            counts = ", ".join(f"{html.escape(kind)}: {count}" for kind, count in summary.errors.items())
            parts.append(f"<p>Failed: {counts}.</p>")
        parts.append(f"<div class=plots>{''.join(_plots(run))}</div>")
    return "\n".join(parts) + "\n"


def table(runs: Sequence[Run]) -> str:
    heads = "".join(f"<th>{html.escape(run.summary.workload)}<br>{html.escape(run.summary.load)}" for run in runs)
    lines = (
        f"<tr><td>{html.escape(label)}" + "".join(f"<td>{html.escape(show(run.summary))}" for run in runs)
        for label, show in ROWS
    )
    return f"<table><tr><th>{heads}{''.join(lines)}</table>"


def _plots(run: Run) -> list[str]:
    complete = [result for result in run.results if result.complete and result.times]
    if not complete:
        return []
    firsts = [1000 * (result.times[0] - result.sent) for result in complete]
    each = [1000 * value for result in complete if (value := tpot(result)) is not None]
    ends = [1000 * result.seconds for result in complete]
    lengths = [
        (result.usage.prompt_tokens, first) for result, first in zip(complete, firsts, strict=True) if result.usage
    ]
    return [
        plot("Time to first token, ms", "share of requests", [("", _shares(firsts))]),
        plot("Time per further token, ms", "share of requests", [("", _shares(each))]),
        plot("End to end, ms", "share of requests", [("", _shares(ends))]),
        plot("Output tokens per second, over seconds", "tok/s", [("", _rates(run))]),
        plot("Requests under way, over seconds", "requests", _queue(run)),
        plot("Time to first token in ms, by prompt tokens", "ms", [("", lengths[:MOST_DOTS])], dots=True),
    ]


def _shares(values: Sequence[float]) -> list[Point]:
    ordered = sorted(values)
    return [(value, (place + 1) / len(ordered)) for place, value in enumerate(ordered)]


def _span(run: Run) -> float:
    return max((result.ended for result in run.results), default=run.began + 1) - run.began


def _rates(run: Run) -> list[Point]:
    width = _span(run) / BUCKETS
    sums = [0] * (BUCKETS + 1)
    for result in run.results:
        for moment, count in zip(result.times, result.counts, strict=True):
            sums[min(BUCKETS, int((moment - run.began) / width))] += count
    return [((place + 0.5) * width, total / width) for place, total in enumerate(sums[:BUCKETS])]


def _queue(run: Run) -> list[Line]:
    def count(until: Callable[[Result], float]) -> list[Point]:
        moments = [_span(run) * place / BUCKETS for place in range(BUCKETS + 1)]
        return [(at, sum(r.sent <= run.began + at < until(r) for r in run.results)) for at in moments]

    return [
        ("under way", count(lambda result: result.ended)),
        ("waiting for a token", count(lambda result: result.times[0] if result.times else result.ended)),
    ]


def plot(title: str, unit: str, lines: Sequence[Line], *, dots: bool = False) -> str:
    """A figure of lines, or of dots, from 0 on both axes."""
    points = [point for _, line in lines for point in line]
    right, top = (_ceiling(max((point[axis] for point in points), default=1.0)) for axis in (0, 1))

    def at(point: Point) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / right
        y = HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 12) * point[1] / top
        return f"{x:.1f},{y:.1f}"

    parts = []
    for step in range(5):
        x, y = at((right * step / 4, top * step / 4)).split(",")
        parts.append(f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={y} y2={y} />")
        parts.append(f"<text x={LEFT - 6} y={float(y) + 4} text-anchor=end>{_short(top * step / 4)}</text>")
        parts.append(f"<text x={x} y={HEIGHT - BOTTOM + 16} text-anchor=middle>{_short(right * step / 4)}</text>")
    parts.append(f"<line class=axis x1={LEFT} x2={WIDTH - RIGHT} y1={HEIGHT - BOTTOM} y2={HEIGHT - BOTTOM} />")
    for number, (name, line) in enumerate(lines):
        color = COLORS[number % len(COLORS)]
        if dots:
            places = (at(point).split(",") for point in line)
            parts += [f"<circle cx={x} cy={y} r=2.5 fill='{color}' fill-opacity=.6 />" for x, y in places]
        else:
            path = " ".join(map(at, line))
            parts.append(f"<polyline fill=none stroke='{color}' stroke-width=1.8 points='{path}' />")
        if name:
            label = f"<text x={WIDTH - RIGHT} y={22 + 14 * number} text-anchor=end style='fill:{color}'>"
            parts.append(f"{label}{html.escape(name)}</text>")
    drawn = f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width={WIDTH} role=img aria-label='{html.escape(title)}'>"
    caption = f"<figcaption>{html.escape(title)} <small>({html.escape(unit)})</small></figcaption>"
    return f"<figure>{caption}{drawn}{''.join(parts)}</svg></figure>"


def _ceiling(value: float) -> float:
    """A round number at or above it."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value * 0.999)


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
