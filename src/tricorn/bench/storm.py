"""`tricorn bench storm`: three times what a server can do, offered for two minutes.

First its capacity is measured, with every place taken and nobody turned away. Then requests come three times as fast as
it can answer, at random moments, each with a deadline: what counts is the output of those that were answered in full
before theirs. Beside it stands the naive setting: everybody is let in and admitted, and clients leave when they have
waited for as long.

Prompts are all different. Answers end at lengths that the server cannot know: each names a bound, and ends long before
it by a stop token. The KV pool holds far fewer sequences than may run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
import uvloop

from tricorn.bench.load import (
    GAVE_UP,
    TIMEOUT_SECONDS,
    Client,
    Metrics,
    Result,
    closed_loop,
    draw,
    open_loop,
    percentile,
    poisson,
)
from tricorn.bench.server import ServerProcess
from tricorn.request import TricornError

LOAD = 3
"""Times capacity."""

GOODPUT_SHARE = 0.9
RECOMPUTED_SHARE = 0.02
REJECT_MS = 50.0
"""What must hold."""

SLACK = 2.0
"""The deadline, in times of the slowest hundredth of the answers at capacity."""

WAIT_SHARE = 0.25
"""Of the deadline, what a newcomer may have to wait."""

RAMP = 0.2
"""Share of the measurement of capacity that comes before it counts."""

EVERYBODY = str(10**9)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes in tokens and times in seconds. Prompts and outputs are between two bounds; `most` is max_tokens."""

    prompt: tuple[int, int] = (64, 256)
    output: tuple[int, int] = (16, 256)
    most: int = 256
    clients: int = 64
    kv: str = "192M"
    capacity: float = 40.0
    storm: float = 120.0


SHORT = Scale(prompt=(16, 48), output=(4, 24), most=32, clients=4, kv="16M", capacity=1.0, storm=2.0)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """How a setting fared. `goodput_tok_s` is of requests that were completed within their deadline, `goodput_share` of
    capacity; `recomputed_share` of the token rows computed; times in milliseconds."""

    goodput_tok_s: float
    goodput_share: float
    recomputed_share: float
    offered: int
    completed: int
    rejected: int
    timed_out: int
    failed: int
    preemptions: int
    reject_ms_p50: float
    reject_ms_p99: float
    reject_ms_max: float
    seconds_p50: float
    seconds_p99: float


class Report(Setting, frozen=True, kw_only=True):
    """The storm, with admission as it is by default, and beside it without. `deadline_s` was that of each request."""

    model: str
    seconds: float
    capacity_tok_s: float
    deadline_s: float
    naive: Setting
    ok: bool


def run(
    model: str, seconds: float | None = None, *, short: bool = False, seed: int = 0, tell: Progress = print
) -> Report:
    """`model` is what `tricorn serve` takes. Raises TricornError when the server does not start or answer."""
    scale = SHORT if short else Scale()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(model, scale, seconds or scale.storm, seed, tell))


async def _run(model: str, scale: Scale, seconds: float, seed: int, tell: Progress) -> Report:
    common = ("--kv-bytes", scale.kv, "--max-sequences", str(scale.clients))
    tell("measuring capacity")
    async with ServerProcess(model, *common, "--max-waiting", EVERYBODY, "--max-wait", "0") as server:
        work = Work(await server.client.vocabulary(), scale, seed)
        capacity, slowest = await _capacity(server.client, work, scale)
    deadline = float(math.ceil(SLACK * slowest))
    rate = LOAD * capacity / work.mean_output
    tell(f"{capacity:.0f} tok/s at capacity; now {rate:.1f} requests a second, for {seconds:g} s")
    async with ServerProcess(model, *common, "--max-wait", f"{WAIT_SHARE * deadline:g}") as server:
        guarded = await _storm(server.client, work, scale, rate, seconds, capacity, deadline, naive=False)
    tell("the same without admission control")
    nobody_refused = ("--max-waiting", EVERYBODY, "--max-waiting-tokens", EVERYBODY, "--max-wait", "0")
    async with ServerProcess(model, *common, *nobody_refused, "--admission", "none") as server:
        naive = await _storm(server.client, work, scale, rate, seconds, capacity, deadline, naive=True)
    return Report(
        **msgspec.structs.asdict(guarded),
        model=model,
        seconds=seconds,
        capacity_tok_s=round(capacity, 1),
        deadline_s=deadline,
        naive=naive,
        ok=holds(guarded),
    )


def holds(setting: Setting) -> bool:
    """The promise of admission control."""
    return (
        setting.goodput_share >= GOODPUT_SHARE
        and setting.recomputed_share < RECOMPUTED_SHARE
        and setting.reject_ms_p99 < REJECT_MS
        and not setting.failed
    )


class Work:
    """The requests, each made from the seed and its number alone."""

    def __init__(self, vocabulary: list[int], scale: Scale, seed: int) -> None:
        self._vocabulary = vocabulary
        self._scale = scale
        self._seed = seed

    @property
    def mean_output(self) -> float:
        """Tokens of an answer: the logarithms of the lengths are spread evenly."""
        low, high = self._scale.output
        return (high - low) / math.log(high / low)

    def body(self, number: int, timeout: float | None = None) -> dict[str, Any]:
        """After `min_tokens` its stop token is all but certain."""
        random = Random(f"{self._seed} {number}")
        stop = self._vocabulary[0]
        low, high = self._scale.output
        output = round(low * (high / low) ** random.random())
        body: dict[str, Any] = {
            "prompt": draw(random, self._vocabulary, random.randint(*self._scale.prompt)),
            "max_tokens": self._scale.most,
            "min_tokens": output - 1,
            "stop_token_ids": [stop],
            "logit_bias": {str(stop): 100},
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        return body if timeout is None else {**body, "timeout": timeout}


async def _capacity(client: Client, work: Work, scale: Scale) -> tuple[float, float]:
    """Output tokens per second with every place taken, and the seconds of the slowest hundredth. Raises TricornError
    when a request fails."""

    async def ask(number: int) -> Result:
        return await client.stream("/v1/completions", work.body(number))

    results = await closed_loop(scale.clients, scale.capacity, ask)
    if failed := [result for result in results if not result.complete]:
        raise TricornError(f"a request failed although nobody was to be refused: {failed[0].status} {failed[0].error}")
    begin = min(result.sent for result in results)
    first, last = begin + RAMP * scale.capacity, begin + scale.capacity
    tokens = sum(result.tokens(first, last) for result in results)
    return tokens / (last - first), percentile([result.seconds for result in results], 99)


async def _storm(
    client: Client, work: Work, scale: Scale, rate: float, seconds: float, capacity: float, deadline: float, naive: bool
) -> Setting:
    """The same requests at the same moments for every setting; what came within these seconds counts, after the time
    that capacity was given to begin with."""
    timeout = None if naive else deadline
    patience = deadline if naive else TIMEOUT_SECONDS
    moments = poisson(Random(work._seed), rate, seconds)
    if not moments:
        raise TricornError(f"no request falls into {seconds:g} s: give it longer")

    async def ask(number: int) -> Result:
        # far from the numbers that capacity was measured with
        return await client.stream("/v1/completions", work.body(10**6 + number, timeout), give_up=patience)

    before = await client.metrics()
    results = await open_loop(moments, ask)
    after = await client.metrics()
    begin = min(result.sent for result in results)
    good = [result for result in results if result.complete and result.seconds <= deadline]
    ramp = min(RAMP * scale.capacity, seconds / 2)
    goodput = sum(result.tokens(begin + ramp, begin + seconds) for result in good) / (seconds - ramp)
    rejected = [result for result in results if result.status in (429, 503)]
    late = [result for result in results if _late(result, deadline)]
    rejections = [1000 * result.seconds for result in rejected]
    spent = [result.seconds for result in good]
    return Setting(
        goodput_tok_s=round(goodput, 1),
        goodput_share=round(goodput / capacity, 4),
        recomputed_share=round(_recomputed_share(before, after), 4),
        offered=len(results),
        completed=len(good),
        rejected=len(rejected),
        timed_out=len(late),
        failed=len(results) - len(good) - len(rejected) - len(late),
        preemptions=round(_grown("vllm:num_preemptions_total", before, after)),
        reject_ms_p50=round(percentile(rejections, 50), 1),
        reject_ms_p99=round(percentile(rejections, 99), 1),
        reject_ms_max=round(max(rejections, default=0.0), 1),
        seconds_p50=round(percentile(spent, 50), 2),
        seconds_p99=round(percentile(spent, 99), 2),
    )


def _late(result: Result, deadline: float) -> bool:
    """Its time was over: by the server's word, or by the client's patience."""
    by_server = result.status == 408 or result.finish_reason == "timeout"
    return by_server or result.error == GAVE_UP or (result.complete and result.seconds > deadline)


def _recomputed_share(before: Metrics, after: Metrics) -> float:
    rows = _grown("tricorn:step_rows_total", before, after)
    return _grown("tricorn:recomputed_tokens_total", before, after) / rows if rows else 0.0


def _grown(name: str, before: Metrics, after: Metrics) -> float:
    return after.value(name) - before.value(name)
