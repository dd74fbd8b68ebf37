"""`tricorn bench claims`: the headline figures of the techniques that serving engines are known for, each measured here
with the technique and without, in one run on one machine.

A row says what was published, what came out here, and whether that holds: whether it is as good as what was published,
or the row of a technique that is not built yet, which says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import uvloop

from tricorn.bench import stalls, storm, structured
from tricorn.bench.load import Client, Result, draw, in_turn, percentile
from tricorn.bench.server import ServerProcess
from tricorn.bench.workloads import Session, sessions
from tricorn.compiler import ensure
from tricorn.engine.engine import Engine
from tricorn.engine.factory import open_engine
from tricorn.engine.options import EngineOptions
from tricorn.request import Request, SamplingParams, TricornError
from tricorn.runtime.step import PAGE

Tell = Callable[[str], None]

SLOTS = 16


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """`here` in `unit`; both None where `note` says why there is nothing to measure."""

    claim: str
    published: str
    here: float | None = None
    unit: str = ""
    holds: bool | None = None
    command: str = "tricorn bench claims"
    note: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    rows: list[Row]
    ok: bool


def run(model: str, *, short: bool, tell: Tell) -> Report:
    """Raises TricornError when an engine or a server does not start."""
    path = ensure(model)
    rows: list[Row] = []
    for make in (_batching, _pages, _cache, _chunks, _start, _overload, _forced, _missing):
        for row in make(model, path, short, tell):
            rows.append(row)
            here = row.note if row.here is None else f"{row.here:g} {row.unit}"
            tell(f"{row.claim}: {here}")
    return Report(model=model, rows=rows, ok=all(row.holds is not False for row in rows))


def _engine(path: Path, **options: Any) -> Engine:
    engine, _ = open_engine(msgspec.convert({"path": str(path), "max_sequences": SLOTS, **options}, EngineOptions))
    return engine


def _requests(engine: Engine, count: int, seed: int, longest: int) -> list[Request]:
    """Short prompts, and answers whose lengths differ as those of people's questions do."""
    random = Random(seed)
    vocabulary = range(engine.scheduler.limits.vocab)
    return [
        Request(
            id=f"{seed} {number}",
            prompt=random.choices(vocabulary, k=random.randint(16, 64)),
            params=SamplingParams(
                max_tokens=min(longest, 8 + int(random.expovariate(4 / longest))), temperature=0.0, ignore_eos=True
            ),
            seed=0,
        )
        for number in range(count)
    ]


def _batching(model: str, path: Path, short: bool, tell: Tell) -> list[Row]:
    """Orca's and vLLM's claim: a place that is free is taken at once, rather than when its whole batch has ended."""
    engine = _engine(path)
    asked = _requests(engine, (2 if short else 6) * SLOTS, 1, 32 if short else 256)
    seconds = []
    for size in (SLOTS, len(asked)):  # static: a batch after the other; continuous: all offered at once
        engine.scheduler.tree.clear()
        began = time.perf_counter()
        for place in range(0, len(asked), size):
            for request in asked[place : place + size]:
                engine.add(msgspec.structs.replace(request, id=f"{size} {request.id}"))
            while not engine.idle:
                engine.step()
        seconds.append(time.perf_counter() - began)
    engine.close()
    ratio = round(seconds[0] / seconds[1], 2)
    return [
        Row(
            claim="continuous against static batching, throughput",
            published="2.3 times",
            here=ratio,
            unit="times",
            holds=ratio >= 2.3,
        )
    ]


def _pages(model: str, path: Path, short: bool, tell: Tell) -> list[Row]:
    """PagedAttention's: of the memory that is held for sequences, how much holds tokens; and how much would, if each
    sequence had its most reserved."""
    engine = _engine(path)
    held, filled, reserved = 0, 0, 0
    for request in _requests(engine, 3 * SLOTS, 2, 64 if short else 512):
        engine.add(request)
    while not engine.idle:
        engine.step()
        running = engine.scheduler.running
        tokens = sum(len(sequence.tokens) for sequence in running)
        held += engine.pool.held * PAGE
        filled += min(tokens, engine.pool.held * PAGE)
        reserved += len(running) * engine.scheduler.limits.context
    engine.close()
    share, before = round(100 * filled / held, 1), round(100 * filled / reserved, 1)
    return [
        Row(claim="KV memory that holds tokens", published="95 % or more", here=share, unit="%", holds=share >= 95),
        Row(
            claim="the same with the whole context reserved",
            published="20 to 40 %",
            here=before,
            unit="%",
            note="what it is for this model's context",
        ),
    ]


def _cache(model: str, path: Path, short: bool, tell: Tell) -> list[Row]:
    """SGLang's: prompts that begin alike, on `alpha`; without the cache each request has a salt of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(_alpha(model, short))
    cached, alone, hit, miss = found
    at_p99 = round(percentile(alone, 99) / percentile(cached, 99), 2)
    saved = round(100 * (1 - hit / miss), 1)
    return [
        Row(
            claim="time to first token without the prefix cache against with it, p99 on alpha",
            published="3.5 times",
            here=at_p99,
            unit="times",
            holds=at_p99 >= 3.5,
        ),
        Row(
            claim="time to first token saved by a hit of 65 % of the prompt",
            published="42 to 65 %",
            here=saved,
            unit="%",
            holds=saved >= 42,
        ),
    ]


async def _alpha(model: str, short: bool) -> tuple[list[float], list[float], float, float]:
    """Times to first token with the cache and without; and of single requests, those that hit and that miss."""
    async with ServerProcess(model, "--max-sequences", str(SLOTS)) as server:
        client = server.client
        vocabulary = await client.vocabulary()
        sizes = "256/8/168" if short else "alpha"
        asked = sessions(sizes, vocabulary, 8 if short else 24, 3)
        for session in asked[:4]:
            await _ttft(client, session, "")
        cached = await in_turn(2, len(asked), lambda number: _ttft(client, asked[number], ""))
        alone = await in_turn(2, len(asked), lambda number: _ttft(client, asked[number], f"own {number}"))
        fresh = sessions(sizes, vocabulary, 8, 3)[4:]
        miss = [await _ttft(client, session, f"miss {number}") for number, session in enumerate(fresh)]
        random = Random(4)
        hits = []
        for session in fresh:  # its beginning is known, its end is new
            prompt = session.turns[0].new
            assert isinstance(prompt, list)
            shared = len(prompt) * 65 // 100
            own = prompt[:shared] + draw(random, vocabulary, len(prompt) - shared)
            hits.append(await _first(client, own, ""))
    return cached, alone, percentile(hits, 50), percentile(miss, 50)


async def _ttft(client: Client, session: Session, salt: str) -> float:
    prompt = session.turns[0].new
    assert isinstance(prompt, list)
    return await _first(client, prompt, salt)


async def _first(client: Client, prompt: Sequence[int], salt: str) -> float:
    body: dict[str, Any] = {"prompt": list(prompt), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    if salt:
        body["cache_salt"] = salt
    result: Result = await client.stream("/v1/completions", {**body, "stream": True})
    if result.ttft is None:
        raise TricornError(f"a request failed: status {result.status} {result.error}")
    return result.ttft


def _chunks(model: str, path: Path, short: bool, tell: Tell) -> list[Row]:
    """Sarathi's: gaps between the tokens of streams while prompts of 4,000 tokens arrive. The step that is not cut
    still ends at 512 rows, so this is against a chunk as long as that."""
    report = stalls.run(model, 10.0, short=short, tell=tell)
    ratio = round(report.unbounded.gap_ms_p99 / report.gap_ms_p99, 2)
    return [
        Row(
            claim="gap between tokens at p99 under long prompts, steps without a bound on their time against with one",
            published="above 1",
            here=ratio,
            unit="times",
            holds=ratio > 1,
            command="tricorn bench stalls",
        )
    ]


def _start(model: str, path: Path, short: bool, tell: Tell) -> list[Row]:
    async def started() -> float:
        began = time.monotonic()
        async with ServerProcess(model) as server:
            await server.client.stream("/v1/completions", {"prompt": "Hello", "max_tokens": 1})
            return time.monotonic() - began

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seconds = round(runner.run(started()), 2)
    return [
        Row(
            claim="start of a server whose engine is built, to the first token",
            published="15 to 30 minutes of compilation",
            here=seconds,
            unit="s",
            holds=seconds < 60,
        )
    ]


def _overload(model: str, path: Path, short: bool, tell: Tell) -> list[Row]:
    report = storm.run(model, None if not short else 2.0, short=short, tell=tell)
    ratio = round(report.goodput_share / report.naive.goodput_share, 2) if report.naive.goodput_share else 99.0
    return [
        Row(
            claim="goodput at three times capacity, with admission control against without",
            published="above 1",
            here=ratio,
            unit="times",
            holds=ratio > 1,
            command="tricorn bench storm",
        )
    ]


def _forced(model: str, path: Path, short: bool, tell: Tell) -> list[Row]:
    report = structured.run(EngineOptions(path=str(path)), 16 if short else 128, tell)
    return [
        Row(
            claim="time of tool calls with fast-forward, of that with masks alone",
            published="at most 0.7",
            here=round(report.time_share, 3),
            unit="of the time",
            holds=report.time_share <= 0.7,
            command="tricorn bench structured",
        )
    ]


def _missing(model: str, path: Path, short: bool, tell: Tell) -> list[Row]:
    """What there is nothing of yet."""
    return [
        Row(
            claim="compiled plan against the unfused graph by the same kernels",
            published="15 to 25 %",
            note="not built: the reference executor runs the graph in numpy, so there is nothing to compare with",
        ),
        Row(
            claim="capacity of an 8-bit KV cache", published="2 times", note="not built: the cache is f16, bf16 or f32"
        ),
    ]


def table(report: Report) -> str:
    """Markdown."""
    lines = ["| claim | published | here | holds | command |", "| --- | --- | --- | --- | --- |"]
    for row in report.rows:
        here = row.note if row.here is None else f"{row.here:g} {row.unit}"
        held = {None: "", True: "yes", False: "no"}[row.holds]
        lines.append(f"| {row.claim} | {row.published} | {here} | {held} | `{row.command}` |")
    return "\n".join(lines)
