"""`tricorn bench soak`: random traffic for as long as you like, and the books checked after each minute.

A catalogue of requests is answered first, each alone. Then they come at random, many at once, whole and streamed, under
salts, tenants and priorities, among requests that are given up, that are wrong, or that have too little time, while the
engine is killed now and then. After each minute the traffic stops: every answer must have been the one from the
catalogue, no page may be held or lost, nothing may run or wait, and memory and open files must not have grown.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import uvloop

from tricorn.bench.load import GAVE_UP, Client, Metrics, Result, closed_loop, draw
from tricorn.bench.server import ServerProcess, memory, open_files
from tricorn.request import TricornError

OPTIONS = ("--kv-bytes", "64M", "--max-sequences", "12", "--policy", "fair", "--max-waiting", "64")
"""Memory is short, so that pages are evicted and sequences preempted."""

CLIENTS = 24
MINUTE = 60.0

KILL_SHARE = 0.3
"""Of the minutes, those in which the engine is killed."""

KINDS = {"right": 70, "given up": 15, "wrong": 8, "short of time": 7}
"""How often each kind of request comes."""

QUIET_SECONDS = 5.0
"""How long after the last answer the server may take to be at rest."""

STUCK_SECONDS = 120.0
"""A request that takes longer is stuck."""

MOST_GROWTH = 24 << 20
"""Bytes that a process may grow by from its first whole minute on: caches of a bounded size fill up."""

MOST_FILES = 16
"""Open files and sockets that may be added in this time."""

WRONG: tuple[tuple[dict[str, Any] | bytes, int], ...] = (
    ({"temperature": -1}, 400),
    ({"max_tokens": "many"}, 400),
    ({"top_p": 7}, 400),
    ({"prompt": [-1]}, 400),
    ({"prompt": []}, 400),
    ({"prompt": [1] * 100_000}, 400),
    ({"model": "another"}, 404),
    ({"timeout": -1}, 400),
    ({"logit_bias": {"x": 1}}, 400),
    (b'{"prompt": ', 400),
    (b"\xff\xfe", 400),
    (b"", 400),
)
"""What is wrong with a request, and the status that it must get."""

Progress = Callable[[str], None]


class Process(msgspec.Struct, frozen=True):
    """A process at rest: its own memory in bytes, and its open files."""

    pid: int
    memory: int
    files: int


class Minute(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in a minute. `answers` counts requests by how they ended; `seconds` is how long traffic ran."""

    seconds: float
    answers: dict[str, int]
    kills: int
    preemptions: int
    evicted_pages: int
    server: Process
    engine: Process
    violations: list[str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`violations` are those of all minutes."""

    model: str
    seed: int
    requests: int
    kills: int
    minutes: list[Minute]
    violations: list[str]
    ok: bool


def run(
    model: str,
    minutes: float = 10.0,
    seed: int = 0,
    tell: Progress = print,
    *,
    minute: float = MINUTE,
    entries: int = 48,
) -> Report:
    """`model` is what `tricorn serve` takes; a started minute counts as one. `minute` is how many seconds of traffic
    come before each check, `entries` the length of the catalogue. Raises TricornError when the server does not start or
    a request fails alone.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(model, minutes * MINUTE, seed, tell, minute, entries))


async def _run(model: str, seconds: float, seed: int, tell: Progress, minute: float, entries: int) -> Report:
    async with ServerProcess(model, *OPTIONS) as server:
        random = Random(seed)
        catalogue = _catalogue(random, await server.client.vocabulary(), entries)
        tell(f"answering {len(catalogue)} requests alone")
        wanted = [await server.client.stream("/v1/completions", body) for body in catalogue]
        if failed := next((result for result in wanted if not result.complete), None):
            raise TricornError(f"a request failed alone: status {failed.status} {failed.error}")
        soak = _Soak(server, random, list(zip(catalogue, wanted, strict=True)))
        minutes: list[Minute] = []
        while seconds > 0:
            minutes.append(await soak.minute(min(seconds, minute)))
            seconds -= minute
            tell(_line(len(minutes), minutes[-1]))
            if not server.running:
                break
        violations = [f"minute {n}: {each}" for n, found in enumerate(minutes, 1) for each in found.violations]
    if (code := server.code) != 0:
        violations.append(f"the server ended with exit code {code}: {server.last_words}")
    return Report(
        model=model,
        seed=seed,
        requests=sum(sum(found.answers.values()) for found in minutes),
        kills=sum(found.kills for found in minutes),
        minutes=minutes,
        violations=violations,
        ok=not violations,
    )


def _catalogue(random: Random, vocabulary: list[int], entries: int) -> list[dict[str, Any]]:
    """Requests of all sorts whose answers are certain: greedy, or sampled from a seed. Some begin alike."""
    stems = [draw(random, vocabulary, random.randint(40, 400)) for _ in range(4)]
    return [_entry(random, vocabulary, stems) for _ in range(entries)]


def _entry(random: Random, vocabulary: list[int], stems: list[list[int]]) -> dict[str, Any]:
    stem = random.choice([*stems, []])
    body: dict[str, Any] = {
        "prompt": stem[: random.randint(0, len(stem))] + draw(random, vocabulary, random.randint(1, 80)),
        "max_tokens": random.randint(1, 96),
        "return_token_ids": True,
        "ignore_eos": random.random() < 0.7,
        "temperature": 0,
    }
    if random.random() < 0.6:
        body |= {"temperature": random.choice([0.5, 1.0]), "seed": random.getrandbits(63)}
        body |= random.choice([{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}])
    if random.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
    if random.random() < 0.2:
        body["stop"] = [" the", "\n\n"]
    if random.random() < 0.2:
        body["logprobs"] = random.choice([0, 3])
    return body


@dataclass(slots=True)
class _Soak:
    """The traffic, and what is remembered from one check to the next."""

    server: ServerProcess
    random: Random
    catalogue: list[tuple[dict[str, Any], Result]]
    violations: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    baselines: dict[int, Process] = field(default_factory=dict)
    """Of each process, as it was when it had lived through a whole minute."""
    killed: int = 0
    """The process that was killed last."""

    async def minute(self, seconds: float) -> Minute:
        self.violations, self.answers = [], Counter()
        client, engine = self.server.client, self.server.engine()
        before = await client.metrics()
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            killing = group.create_task(self._kill(seconds))
            group.create_task(closed_loop(CLIENTS, seconds, self._ask))
        spent = time.monotonic() - began
        after = await self._check_rest(client)
        processes = [Process(pid, memory(pid), open_files(pid)) for pid in (self.server.pid, self.server.engine())]
        for process in processes:
            if process.pid in (self.server.pid, engine):
                self._check_growth(process)
        return Minute(
            seconds=round(spent, 1),
            answers=dict(sorted(self.answers.items())),
            kills=killing.result(),
            preemptions=round(after.value(PREEMPTIONS) - before.value(PREEMPTIONS)),
            evicted_pages=round(after.value(EVICTIONS) - before.value(EVICTIONS)),
            server=processes[0],
            engine=processes[1],
            violations=self.violations,
        )

    # Traffic

    async def _ask(self, number: int) -> None:
        random = self.random
        kind = random.choices(list(KINDS), list(KINDS.values()))[0]
        entry, wanted = random.choice(self.catalogue)
        body, headers = self._dress(entry)
        if kind == "wrong":
            await self._ask_wrong(body)
            return
        if kind == "short of time":
            body["timeout"] = round(random.uniform(0.01, 2.0), 3)
        give_up = random.uniform(0.001, 3.0) if kind == "given up" else STUCK_SECONDS
        result = await self.server.client.stream("/v1/completions", body, headers, give_up)
        self.answers[
            result.finish_reason or result.error[:40] if result.status in (0, 200) else str(result.status)
        ] += 1
        if problem := judge(result, wanted, kind):
            self.violations.append(f"{problem}: {_short(body)}")

    def _dress(self, entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """A request with all that changes nothing about its answer."""
        random, body, headers = self.random, dict(entry), {}
        if random.random() < 0.7:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if random.random() < 0.3:
            body["cache_salt"] = random.choice(["north", "south"])
        if random.random() < 0.3:
            body["priority"] = random.randint(-100, 100)
        if random.random() < 0.2:
            body |= {"retention": random.randint(0, 100), "pin_seconds": random.choice([0.0, 1.0])}
        if random.random() < 0.5:
            headers["x-tenant"] = random.choice(["a", "b", "c"])
        return body, headers

    async def _ask_wrong(self, body: dict[str, Any]) -> None:
        fault, status = self.random.choice(WRONG)
        sent = fault if isinstance(fault, bytes) else {**body, **fault}
        result = await self.server.client.stream("/v1/completions", sent, give_up=STUCK_SECONDS)
        self.answers[str(result.status)] += 1
        if result.status not in (status, 429):
            self.violations.append(f"status {result.status} {result.error} instead of {status}: {_short(sent)}")

    async def _kill(self, seconds: float) -> int:
        """Kills the engine at some moment of some minutes."""
        if self.random.random() >= KILL_SHARE:
            return 0
        await asyncio.sleep(self.random.uniform(0.1, 0.7) * seconds)
        engine = self.server.engine()
        if not engine or engine == self.killed:
            return 0
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)
        self.killed = engine
        return 1

    # Checks

    async def _check_rest(self, client: Client) -> Metrics:
        """Nobody asks for anything: the books of the server and the engine must say so soon."""
        until = time.monotonic() + QUIET_SECONDS
        while True:
            metrics = await client.metrics()
            state = await client.json("/debug/state")
            problems = unrest(metrics, state["server"])
            if not problems or time.monotonic() > until:
                self.violations += problems
                return metrics
            await asyncio.sleep(0.1)

    def _check_growth(self, now: Process) -> None:
        then = self.baselines.setdefault(now.pid, now)
        if now.memory - then.memory > MOST_GROWTH:
            self.violations.append(f"process {now.pid} grew from {then.memory >> 20} to {now.memory >> 20} MiB")
        if now.files - then.files > MOST_FILES:
            self.violations.append(f"process {now.pid} has {now.files} open files, it had {then.files}")


PREEMPTIONS = "vllm:num_preemptions_total"
EVICTIONS = "tricorn:evicted_pages_total"


def judge(result: Result, wanted: Result, kind: str) -> str:
    """What is wrong with an answer; "" when nothing is. Whoever gives up, or has little time, may get a part."""
    if result.status == 429:
        return "" if result.retry_after else "429 without Retry-After"
    if kind == "short of time" and result.status == 408:
        return ""
    partial = kind == "given up" and result.error == GAVE_UP
    partial |= kind == "short of time" and result.finish_reason == "timeout"
    if partial:
        begun = result.token_ids == wanted.token_ids[: len(result.token_ids)]
        return "" if begun else "a part of an answer differs from the reference"
    if not result.complete:
        return f"status {result.status}, {result.error or result.finish_reason}"
    if (result.text, result.token_ids, result.finish_reason) != (wanted.text, wanted.token_ids, wanted.finish_reason):
        return "an answer differs from the reference"
    if result.usage is not None and (wanted.usage is None or result.usage.total != wanted.usage.total):
        return "the usage differs from the reference"
    return ""


def unrest(metrics: Metrics, server: dict[str, Any]) -> list[str]:
    """What a server that nobody asks for anything should not show; `server` is its part of /debug/state."""
    pages = {state: metrics.value("tricorn:pages", state=state) for state in ("free", "held", "cached")}
    total = float(metrics.label("vllm:cache_config_info", "num_cpu_blocks") or 0)
    found = [
        (pages["held"], "pages are held"),
        (total - sum(pages.values()), "pages are lost"),
        (metrics.value("vllm:num_requests_running"), "sequences run"),
        (metrics.value("vllm:num_requests_waiting"), "sequences wait"),
        (len(server["requests"]) - 1, "requests live beside the one that asks"),
        (server["gate"]["sequences"], "sequences are counted at the gate"),
        (server["gate"]["waiting_tokens"], "tokens are counted at the gate"),
    ]
    return [f"{count:g} {what}, and no client waits" for count, what in found if count]


def _line(number: int, minute: Minute) -> str:
    answers = ", ".join(f"{count} {ending}" for ending, count in minute.answers.items())
    sizes = f"{minute.server.memory >> 20} + {minute.engine.memory >> 20} MiB"
    verdict = f"VIOLATIONS: {'; '.join(minute.violations[:3])}" if minute.violations else "ok"
    return (
        f"minute {number}: {answers}; {minute.kills} kills, {minute.preemptions} preemptions,"
        f" {minute.evicted_pages} pages evicted, {sizes}; {verdict}"
    )


def _short(body: dict[str, Any] | bytes) -> str:
    """A request in a line."""
    return (body if isinstance(body, bytes) else msgspec.json.encode(body)).decode(errors="replace")[-300:]
