"""`tricorn bench structured`: what constraints cost, and what forced ids save, on the engine alone.

Constrained against unconstrained streams of the same length; the gaps between the tokens of plain streams while hostile
grammars arrive; calls of a tool with long argument names, with and without fast-forward.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from tricorn.compiler.engine_file import EngineFile
from tricorn.engine.engine import Engine
from tricorn.engine.factory import open_engine
from tricorn.engine.options import EngineOptions
from tricorn.frontend.generate import load_text
from tricorn.request import Constraint, Request, SamplingParams

STREAMS = 16
PLAIN = 8
HOSTILE = 8
ROUNDS = 3

LEAST_THROUGHPUT = 0.95
MOST_GAP = 1.2
LEAST_FORCED = 0.4
MOST_TIME = 0.7

TOOL = {
    "type": "object",
    "properties": {
        "departure_airport_iata_code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "destination_airport_iata_code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "number_of_adult_passengers": {"type": "integer", "minimum": 1, "maximum": 9},
        "preferred_cabin_class": {"enum": ["economy", "premium_economy", "business", "first"]},
        "include_flexible_dates_in_search": {"type": "boolean"},
        "maximum_number_of_stopovers": {"type": "integer", "minimum": 0, "maximum": 3},
    },
    "additionalProperties": False,
}
TOOL["required"] = list(TOOL["properties"])  # type: ignore[call-overload]

Tell = Callable[[str], None]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`throughput_share` is constrained by unconstrained tokens a second; `gap_ratio` the p99 gap of plain streams
    beside hostile grammars by that without; `forced_share` the tokens of tool calls that were forced, `time_share` the
    time of the calls by that without fast-forward, `steps_share` likewise the steps."""

    throughput_share: float
    gap_ms_p99: float
    gap_ratio: float
    forced_share: float
    steps_share: float
    time_share: float
    mask_us_p50: float
    mask_us_p99: float
    ok: bool


def run(options: EngineOptions, tokens: int, tell: Tell) -> Report:
    """`tokens` is the length of each plain answer. Raises TricornError when the engine cannot be opened."""
    engine, _ = open_engine(options)
    tokenizer, _ = load_text(EngineFile.open(Path(options.path), check_body=False))
    try:
        bench = _Bench(engine, tokenizer.encode("A form, filled in:\n", add_special=True, parse_special=False))
        tell("constrained against unconstrained streams")
        throughput = median(bench.throughput(tokens) for _ in range(ROUNDS))
        tell("hostile grammars")
        quiet, loud = bench.gaps(tokens, hostile=False), bench.gaps(tokens, hostile=True)
        tell("forced ids")
        forced, steps, seconds = map(median, zip(*(bench.forced() for _ in range(ROUNDS)), strict=True))
        masks = sorted(engine.workers.stats().mask_us) if engine.workers else [0.0]
    finally:
        engine.close()
    report = Report(
        throughput_share=round(throughput, 3),
        gap_ms_p99=round(loud * 1e3, 1),
        gap_ratio=round(loud / quiet, 2),
        forced_share=round(forced, 3),
        steps_share=round(steps, 3),
        time_share=round(seconds, 3),
        mask_us_p50=round(masks[len(masks) // 2], 1),
        mask_us_p99=round(masks[len(masks) * 99 // 100], 1),
        ok=False,
    )
    ok = (
        report.throughput_share >= LEAST_THROUGHPUT
        and report.gap_ratio <= MOST_GAP
        and report.forced_share >= LEAST_FORCED
        and report.time_share <= MOST_TIME
    )
    return msgspec.structs.replace(report, ok=ok)


class _Bench:
    def __init__(self, engine: Engine, prompt: list[int]) -> None:
        self._engine = engine
        self._prompt = prompt
        self._serial = 0
        self._warm()

    def _add(self, constraint: Constraint | None, tokens: int, ignore_eos: bool = False) -> None:
        self._serial += 1
        params = SamplingParams(max_tokens=tokens, temperature=0.8, constraint=constraint, ignore_eos=ignore_eos)
        self._engine.add(Request(id=f"b{self._serial}", prompt=self._prompt, params=params, seed=self._serial))

    def _drain(self) -> tuple[int, float]:
        """Runs all to their ends; gives tokens and seconds."""
        began, tokens = time.perf_counter(), 0
        while not self._engine.idle:
            tokens += sum(len(output.token_ids) for output in self._engine.step())
        return tokens, time.perf_counter() - began

    def _warm(self) -> None:
        for constraint in (None, Constraint("json_object")):
            self._add(constraint, 8)
        self._drain()

    def throughput(self, tokens: int) -> float:
        """Tokens a second with a constraint, by those without, one after the other."""
        lines = {"type": "array", "items": {"type": "string"}, "minItems": 2000}  # ends nowhere near
        free = Constraint("json_schema", json.dumps(lines))
        rates = []
        for constraint in (None, free):
            for _ in range(STREAMS):
                self._add(constraint, tokens, ignore_eos=constraint is None)
            count, seconds = self._drain()
            rates.append(count / seconds)
        return rates[1] / rates[0]

    def gaps(self, tokens: int, *, hostile: bool) -> float:
        """The 99th percentile of the seconds between tokens of plain streams, after their first."""
        for _ in range(PLAIN):
            self._add(None, 2 * tokens, ignore_eos=True)
        times: dict[str, list[float]] = {}
        step = 0
        while not self._engine.idle:
            if hostile and step >= 10 and step % 10 == 0 and step // 10 <= HOSTILE:
                self._add(_hostile(step // 10), 8)
            for output in self._engine.step():
                times.setdefault(output.id, []).append(time.perf_counter())
            step += 1
        plain = [moments for moments in times.values() if len(moments) > tokens]
        gaps = sorted(later - earlier for moments in plain for earlier, later in pairwise(moments[1:]))
        return gaps[len(gaps) * 99 // 100]

    def forced(self) -> tuple[float, float, float]:
        """The share of forced tokens; steps and seconds with fast-forward, by those without."""
        constraint = Constraint("json_schema", json.dumps(TOOL))
        found = []
        for fast in (True, False):
            self._engine.scheduler.fast_forward(fast)
            before = self._engine.stats()
            for _ in range(PLAIN):
                self._add(constraint, 400)
            count, seconds = self._drain()
            after = self._engine.stats()
            steps = sum(after.steps.values()) - sum(before.steps.values())
            found.append(((after.forced_tokens - before.forced_tokens) / count, steps, seconds))
        self._engine.scheduler.fast_forward(True)
        return found[0][0], found[0][1] / found[1][1], found[0][2] / found[1][2]


def _hostile(number: int) -> Constraint:
    """Grammars that take long to compile, or to follow."""
    nested: dict[str, object] = {"type": "integer"}
    for level in range(11):
        nested = {"type": "object", "properties": {f"p{level}_{i}": nested for i in range(2)}}
    kinds = (
        Constraint("regex", f"(a|aa)*(b{{0,999}}c?){{0,{990 + number}}}"),
        Constraint("regex", f"((x{{0,9}}){{0,9}}){{0,{900 + number}}}y"),
        Constraint("json_schema", json.dumps(nested | {"title": str(number)})),
        Constraint("gbnf", f'root ::= "{number}"? a\na ::= a a | "x" a | [a-z]{{0,500}} | a "y"'),
    )
    return kinds[number % len(kinds)]
