"""`tricorn advise`: what this machine will do with a workload, and whether it does.

The costs of steps are measured with the engine alone; then the scheduler itself runs the workload under a virtual clock
with those costs, so that batching, chunks, waiting and the cache count as they will.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tricorn.bench.serve import Spec, measure_all
from tricorn.bench.summary import Slo
from tricorn.runtime.step import PAGE
from tricorn.simulate.capacity import Capacity, Fleet, Question
from tricorn.simulate.machine import Machine

ROUNDS = 4
"""Requests of each client; 8 at least in all."""

NEAR = 0.25
"""How far a measurement may be from its prediction, as a share of it."""


class Point(msgspec.Struct, frozen=True):
    """`concurrency` clients, each with one request at a time, of `prompt` tokens, the first `shared` of which are the
    same for all, and `output` tokens out."""

    prompt: int
    output: int
    concurrency: int
    shared: int = 0

    @property
    def rounds(self) -> int:
        return max(ROUNDS, -(-8 // self.concurrency))


class Figures(msgspec.Struct, frozen=True):
    """Milliseconds (medians), and output tokens per second of all clients together."""

    ttft_ms: float
    token_ms: float
    output_tok_s: float


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction. `pages` is what the point needs at most at once, `options` what to start a server with;
    `measured` and `holds` come with a verification."""

    point: Point
    predicted: Figures
    pages: int
    kv_mib: float
    options: list[str]
    slo_kept: bool | None
    measured: Figures | None = None
    off: float | None = None
    """The largest deviation of a figure, as a share of the prediction."""
    holds: bool | None = None


def advise(machine: Machine, point: Point, page_bytes: int, slo: Slo | None) -> Advice:
    question = Question(
        clients=point.concurrency,
        replicas=1,
        prompt=point.prompt,
        output=point.output,
        requests=point.rounds,
        think=0.0,
        ramp=0.0,
        spread=0.0,
        shared=point.shared,
        groups=1,
        max_waiting=point.concurrency,
        max_wait=0.0,
    )
    found = Fleet(machine, question).run()
    predicted = _figures(found)
    pages = _pages(point)
    keeps = None
    if slo is not None:
        bounds = ((slo.ttft, predicted.ttft_ms), (slo.tpot, predicted.token_ms), (slo.e2e, 1000 * found.latency.p50))
        keeps = all(bound is None or value <= bound for bound, value in bounds)
    kv_mib = round(pages * page_bytes / 2**20, 1)
    options = [f"--max-sequences {point.concurrency}", f"--kv-bytes {int(kv_mib) + 1}M"]
    return Advice(point=point, predicted=predicted, pages=pages, kv_mib=kv_mib, options=options, slo_kept=keeps)


def _pages(point: Point) -> int:
    """What is shared is there once."""
    common = point.shared // PAGE
    return common + point.concurrency * (-(-(point.prompt + point.output) // PAGE) - common)


def _figures(found: Capacity) -> Figures:
    return Figures(round(1000 * found.ttft.p50, 1), round(1000 * found.per_token.p50, 2), round(found.output_tok_s, 1))


def verify(model: str, advice: Sequence[Advice], told: Callable[[str], None]) -> list[Advice]:
    """Runs each point against a server of its own that is started for all of them. Raises TricornError."""
    specs = []
    for number, each in enumerate(advice):
        point = each.point
        work = f"{point.prompt}/{point.output}/{point.shared}"
        requests = point.concurrency * point.rounds
        specs.append(Spec(workload=work, requests=requests, concurrency=point.concurrency, seed=number))
        told(f"running {work}, {point.concurrency} at a time")
    most = max(each.point.concurrency for each in advice)
    runs = measure_all(None, model, specs, ("--max-sequences", str(max(most, 16))))
    return [
        _verified(each, run.summary.ttft.p50, run.summary.tpot.p50, run.summary.output_tok_s)
        for each, run in zip(advice, runs, strict=True)
    ]


def _verified(advice: Advice, ttft: float, token: float, rate: float) -> Advice:
    measured = Figures(round(ttft, 1), round(token, 2), round(rate, 1))
    pairs = zip(msgspec.structs.astuple(measured), msgspec.structs.astuple(advice.predicted), strict=True)
    off = max(abs(value / wanted - 1) if wanted else 0.0 for value, wanted in pairs)
    return msgspec.structs.replace(advice, measured=measured, off=round(off, 3), holds=off <= NEAR)


def told(machine: Machine, advice: Sequence[Advice]) -> str:
    """For people."""
    first = advice[0].point
    shared = f", {first.shared} of them shared" if first.shared else ""
    lines = [
        f"{machine.model}: {first.prompt} tokens in{shared}, {first.output} out",
        f"{'clients':>7} {'TTFT ms':>18} {'ms per token':>18} {'output tok/s':>18} {'pages':>6}  serve with",
    ]
    for each in advice:
        cells = []
        for name in Figures.__struct_fields__:
            value = f"{getattr(each.predicted, name):g}"
            cells.append(value if each.measured is None else f"{value} ({getattr(each.measured, name):g})")
        marks = [mark for mark, held in (("keeps the SLO", each.slo_kept), ("holds", each.holds)) if held]
        marks += [mark for mark, held in (("misses the SLO", each.slo_kept), ("off", each.holds)) if held is False]
        tail = " ".join([*each.options, *(f"[{mark}]" for mark in marks)])
        lines.append(
            f"{each.point.concurrency:>7} {cells[0]:>18} {cells[1]:>18} {cells[2]:>18} {each.pages:>6}  {tail}"
        )
    if advice[0].measured is not None:
        lines.append("In brackets: what a run of each point came to.")
    lines.append(
        f"How it knows: the costs of this engine's steps, measured here (median error {machine.error:.0%}), and the"
        " scheduler itself under a virtual clock."
    )
    return "\n".join(lines)
