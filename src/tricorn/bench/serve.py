"""`tricorn bench serve`: load on any server that speaks OpenAI's API, and what comes back.

Open loop: sessions begin at moments that do not depend on the server (at random, or as the workload says). Closed loop:
always so many are under way. Every request asks for a stream, greedy, of an exact number of tokens.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import urlsplit

import uvloop
from rich.console import Console
from rich.progress import Progress, TaskID

from tricorn.bench.load import Client, Headers, Metrics, Result, in_turn, open_loop, percentile
from tricorn.bench.server import ServerProcess, listening, peak_memory
from tricorn.bench.summary import Overhead, Run, Slo, summarize
from tricorn.bench.workloads import Session, sessions
from tricorn.request import TricornError

TICK = 0.005

WARM = 10**6
"""What is added to the seed of a run for its warm-up, whose prompts must not be found in a cache later."""

COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "prefix_cache_queries": "vllm:prefix_cache_queries_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
}

Told = Callable[[int, int], None]
"""Hears how many requests have ended, of how many."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is asked of a server, and how. `concurrency` is that of a closed loop; with a `rate`, in sessions a second,
    or a workload that says when, the loop is open. `endpoint` is "completions" or "chat"; `fields` go into every body.
    """

    workload: str
    requests: int
    concurrency: int | None = None
    rate: float | None = None
    endpoint: str = "completions"
    seed: int = 0
    warmup: int = 1
    slo: Slo | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Headers = field(default_factory=dict)

    @property
    def load(self) -> str:
        """In words."""
        if self.rate is not None:
            return f"{self.rate:g} sessions/s"
        return f"{self.concurrency} at a time" if self.concurrency is not None else "as it says"


def check(spec: Spec) -> None:
    """Raises TricornError for what goes together badly."""
    if spec.endpoint == "chat" and spec.workload in ("chat", "agent"):
        message = f"{spec.workload} has turns that go on from ids, which chat does not take: use --endpoint completions"
        raise TricornError(message)


async def measure(client: Client, spec: Spec, told: Told = lambda done, of: None) -> Run:
    """Runs the workload once, after the warm-up, which asks for other prompts. Raises TricornError when the server does
    not say what it serves."""
    check(spec)
    model, vocabulary = await client.model(), await client.vocabulary()
    asked = sessions(spec.workload, vocabulary, spec.requests, spec.seed)
    driver = _Driver(client, spec, model, vocabulary, sum(len(session.turns) for session in asked), told)
    warm = sessions("plain", vocabulary, spec.warmup, spec.seed + WARM)
    for result in await asyncio.gather(*(driver.session(session) for session in warm)):
        if not result[0].complete:
            raise TricornError(f"the server does not answer: {result[0].error or result[0].status}")
    driver.restart()
    before = await _counters(client)
    async with _watched() as watch:
        began = time.monotonic()
        results = await driver.run(asked)
        seconds = time.monotonic() - began
    after = await _counters(client)
    host, port = urlsplit(client.url).hostname, client.port
    pids = listening(port) if host in ("127.0.0.1", "localhost", "::1") else []
    summary = summarize(
        results,
        workload=spec.workload,
        load=spec.load if asked[0].at is None or spec.concurrency or spec.rate else "as it says",
        seconds=seconds,
        slo=spec.slo,
        client=watch.overhead(seconds, driver.late),
        server={name: after[name] - value for name, value in before.items() if name in after},
        peak_rss_mib=round(peak_memory(pids) / 2**20, 1) if pids else None,
    )
    return Run(summary, results, began)


def measure_all(url: str | None, model: str, specs: Sequence[Spec], options: Sequence[str] = ()) -> list[Run]:
    """One run after the other, with a progress bar, against the server at `url`, or against one of `model` that is
    started for it with these options. Raises TricornError.
    """
    for spec in specs:
        check(spec)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure_all(url, model, specs, options))


async def _measure_all(url: str | None, model: str, specs: Sequence[Spec], options: Sequence[str]) -> list[Run]:
    async with AsyncExitStack() as stack:
        if url is None:
            server = await stack.enter_async_context(ServerProcess(model, *options))
            url = f"http://127.0.0.1:{server.port}"
        console = Console(stderr=True)
        progress = stack.enter_context(Progress(console=console, disable=not console.is_terminal, transient=True))
        runs = []
        for spec in specs:
            task = progress.add_task(f"{spec.workload}, {spec.load}", total=None)

            def told(done: int, of: int, task: TaskID = task) -> None:
                progress.update(task, completed=done, total=of)

            runs.append(await measure(Client(url), spec, told))
        return runs


class _Driver:
    """Sends sessions and collects what comes back."""

    def __init__(
        self, client: Client, spec: Spec, model: str, vocabulary: Sequence[int], requests: int, told: Told
    ) -> None:
        self._client, self._spec, self._model, self._vocabulary = client, spec, model, vocabulary
        self._requests, self._told = requests, told
        self._random = Random(spec.seed)
        self._done = 0
        self.late: list[float] = []
        """Seconds by which sessions began after their moments."""

    def restart(self) -> None:
        self._done = 0
        self._told(0, self._requests)

    async def run(self, asked: Sequence[Session]) -> list[Result]:
        """In the order of the sessions and their turns."""

        async def work(number: int) -> list[Result]:
            return await self.session(asked[number])

        moments = self._moments(asked)
        if moments is None:
            groups = await in_turn(self._spec.concurrency or 1, len(asked), work)
        else:
            begin = time.monotonic()

            async def on_time(number: int) -> list[Result]:
                self.late.append(time.monotonic() - begin - moments[number])
                return await work(number)

            groups = await open_loop(moments, on_time)
        return [result for group in groups for result in group]

    def _moments(self, asked: Sequence[Session]) -> list[float] | None:
        """When sessions begin; None in a closed loop."""
        if self._spec.rate is not None:
            now, moments = 0.0, []
            for _ in asked:
                moments.append(now)
                now += self._random.expovariate(self._spec.rate)
            return moments
        if self._spec.concurrency is None and all(session.at is not None for session in asked):
            return [session.at or 0.0 for session in asked]
        return None

    async def session(self, session: Session) -> list[Result]:
        """Its turns, each with the history before it. It ends with the first that fails."""
        history: list[int] = []
        results = []
        for turn in session.turns:
            if isinstance(turn.new, str):
                prompt: list[int] | str = turn.new
            else:
                history += turn.new
                prompt = list(history)
            result = await self._ask(prompt, turn.output, turn.fields)
            results.append(result)
            self._done += 1
            self._told(self._done, self._requests)
            if not result.complete:
                break
            said = list(result.token_ids)
            if not said and result.usage:  # a server that tells no ids: what it said stands there in other words
                said = self._random.choices(self._vocabulary, k=result.usage.completion_tokens)
            history += said
        return results

    async def _ask(self, prompt: list[int] | str, output: int, fields: Mapping[str, Any]) -> Result:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not fields:
            body["ignore_eos"] = True  # exact lengths, unless the answer has an end of its own
        body |= {**fields, **self._spec.fields}
        if self._spec.endpoint == "chat":
            text = prompt if isinstance(prompt, str) else await self._client.text(prompt)
            body["messages"] = [{"role": "user", "content": text}]
            return await self._client.stream("/v1/chat/completions", body, self._spec.headers)
        body |= {"prompt": prompt, "return_token_ids": True}
        return await self._client.stream("/v1/completions", body, self._spec.headers)


class _Watch:
    """The client, watching itself."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._cpu = _cpu_seconds()

    async def tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK)
            self._lags.append(time.monotonic() - before - TICK)

    def overhead(self, seconds: float, late: Sequence[float]) -> Overhead:
        lag_p99, lag_max, late_p99 = (
            round(1000 * value, 3)
            for value in (percentile(self._lags, 99), percentile(self._lags, 100), percentile(late, 99))
        )
        return Overhead(round((_cpu_seconds() - self._cpu) / seconds, 4), lag_p99, lag_max, late_p99)


@asynccontextmanager
async def _watched() -> AsyncIterator[_Watch]:
    watch = _Watch()
    ticking = asyncio.create_task(watch.tick())
    try:
        yield watch
    finally:
        ticking.cancel()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _counters(client: Client) -> dict[str, float]:
    """Those of the server that it has."""
    try:
        metrics: Metrics = await client.metrics()
    except TricornError:
        return {}
    known = {name for name, _, _ in metrics.series}
    return {name: metrics.value(series) for name, series in COUNTERS.items() if series in known}
