"""`tricorn bench stalls`: what long prompts do to the streams of others.

Eight streams decode while prompts of 4,000 tokens come back to back. The time between two tokens of a stream is then
that of a step that holds a piece of a prompt, too: its 99th percentile may be twice its median at most. The same
without a bound on the step's time stands beside it, and what a short request waits behind a very long prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
import uvloop

from tricorn.bench.load import Client, Result, closed_loop, draw, percentile
from tricorn.bench.server import ServerProcess
from tricorn.request import TricornError

RATIO = 2.0
"""The 99th percentile of the gaps may be so many times the median of a mixed step."""

SHORT_SHARE = 0.5
"""A short request must begin within this share of the time that the long prompt before it takes."""

PROMPTS_AT_ONCE = 2
"""One is computed, and the next one is there already."""

STREAM_PROMPT = 32
SHORT_PROMPT = 10
BEHIND_SECONDS = 0.2

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes in tokens, times in seconds."""

    streams: int = 8
    prompt: int = 4000
    long: int = 6000
    calm: float = 5.0
    seconds: float = 40.0


SHORT = Scale(streams=2, prompt=160, long=200, calm=0.3, seconds=1.0)


class Gaps(msgspec.Struct, frozen=True, kw_only=True):
    """Between the tokens of the streams, in milliseconds. `calm` ones are from before the prompts; `mixed_step_ms_mean`
    is by the engine's own clock. `ratio` is p99 over the median of a mixed step, which is that of the gaps."""

    tokens: int
    prompts: int
    prompt_tok_s: float
    calm_ms_p50: float
    gap_ms_p50: float
    gap_ms_p99: float
    gap_ms_max: float
    mixed_step_ms_mean: float
    ratio: float


class Behind(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to the first token of a long prompt, and of a short request that came a moment after it."""

    long_ttft_s: float
    short_ttft_s: float


class Report(Gaps, frozen=True, kw_only=True):
    """With the bound of `tricorn serve` on the time of a step, and beside it without any."""

    model: str
    behind: Behind
    unbounded: Gaps
    unbounded_behind: Behind
    ok: bool


def run(
    model: str, seconds: float | None = None, *, short: bool = False, seed: int = 0, tell: Progress = print
) -> Report:
    """`model` is what `tricorn serve` takes. Raises TricornError when the server does not start or answer."""
    scale = SHORT if short else Scale()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(model, scale, seconds or scale.seconds, seed, tell))


async def _run(model: str, scale: Scale, seconds: float, seed: int, tell: Progress) -> Report:
    tell("long prompts among streams")
    async with ServerProcess(model) as server:
        gaps, behind = await _measure(server.client, scale, seconds, seed)
    tell("the same without a bound on the time of a step")
    async with ServerProcess(model, "--target-itl", "0") as server:
        unbounded, unbounded_behind = await _measure(server.client, scale, seconds, seed)
    return Report(
        **msgspec.structs.asdict(gaps),
        model=model,
        behind=behind,
        unbounded=unbounded,
        unbounded_behind=unbounded_behind,
        ok=gaps.ratio <= RATIO and behind.short_ttft_s <= SHORT_SHARE * behind.long_ttft_s,
    )


async def _measure(client: Client, scale: Scale, seconds: float, seed: int) -> tuple[Gaps, Behind]:
    random = Random(seed)
    vocabulary, context = await client.vocabulary(), await client.context()
    behind = await _behind(client, random, vocabulary, scale)
    streams = [
        asyncio.create_task(_ask(client, draw(random, vocabulary, STREAM_PROMPT), context - STREAM_PROMPT, until))
        for until in [scale.calm + seconds] * scale.streams
    ]
    calm = time.monotonic()
    await asyncio.sleep(scale.calm)
    before = await client.metrics()
    begin = time.monotonic()

    async def prompt(_: int) -> Result:
        return await _ask(client, draw(random, vocabulary, scale.prompt), 1, 10 * seconds)

    under_way = asyncio.create_task(closed_loop(PROMPTS_AT_ONCE, seconds, prompt))
    results = await asyncio.gather(*streams)
    end = time.monotonic()
    after = await client.metrics()
    prompts = [result for result in await under_way if result.complete]
    _check(results, prompts, end)
    gaps = [1000 * gap for result in results for gap in result.gaps(begin, end)]
    median = percentile(gaps, 50)
    steps, spent = (
        after.value(name, kind="mixed") - before.value(name, kind="mixed")
        for name in ("tricorn:steps_total", "tricorn:step_seconds_total")
    )
    rows = after.value("tricorn:step_rows_total", phase="prefill") - before.value(
        "tricorn:step_rows_total", phase="prefill"
    )
    return Gaps(
        tokens=sum(result.tokens(begin, end) for result in results),
        prompts=len(prompts),
        prompt_tok_s=round(rows / (end - begin), 1),
        calm_ms_p50=round(percentile([1000 * gap for result in results for gap in result.gaps(calm, begin)], 50), 2),
        gap_ms_p50=round(median, 2),
        gap_ms_p99=round(percentile(gaps, 99), 2),
        gap_ms_max=round(max(gaps), 2),
        mixed_step_ms_mean=round(1000 * spent / steps, 2) if steps else 0.0,
        ratio=round(percentile(gaps, 99) / median, 3),
    ), behind


async def _behind(client: Client, random: Random, vocabulary: list[int], scale: Scale) -> Behind:
    """A long prompt, and a short request right after it."""
    long = asyncio.create_task(_ask(client, draw(random, vocabulary, scale.long), 1))
    await asyncio.sleep(BEHIND_SECONDS)
    short = await _ask(client, draw(random, vocabulary, SHORT_PROMPT), SHORT_PROMPT)
    times = [result.ttft for result in (await long, short)]
    if times[0] is None or times[1] is None:
        raise TricornError(f"a request failed: {(await long).error or short.error}")
    return Behind(long_ttft_s=round(times[0], 4), short_ttft_s=round(times[1], 4))


async def _ask(client: Client, prompt: list[int], tokens: int, give_up: float = 600.0) -> Result:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return await client.stream("/v1/completions", {**body, "stream": True, "return_token_ids": True}, give_up=give_up)


def _check(streams: list[Result], prompts: list[Result], end: float) -> None:
    """Raises TricornError when what was to be measured did not happen."""
    for result in streams:
        if result.complete:
            raise TricornError("a stream came to its end while it was measured: give it less time")
        if result.status != 200:
            raise TricornError(f"a stream failed: status {result.status} {result.error}")
    if not prompts or not any(len(result.gaps(0, end)) > 1 for result in streams):
        raise TricornError("no prompt was answered in this time: give it longer")
