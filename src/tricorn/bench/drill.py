"""`tricorn drill`: a real server whose engine is killed, stopped and starved while clients stream.

Every transcript (text, ids, logprobs, reasons) must equal that of the same request when nothing happened, byte for
byte. Kills come at random moments, by a seed: when so many tokens have arrived, and now and then while a new engine is
still starting.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from tricorn.bench.server import ServerProcess
from tricorn.request import TricornError

STREAM_SECONDS = 600.0
"""A stream that takes longer counts as lost."""

AFTER_SECONDS = 0.1
"""The longest time from the token that sets off a kill to the kill."""

STARTING_SECONDS = 0.5
"""A kill of a starting engine comes within this time of its appearance."""

EVERY_STARTING = 6
"""One kill in so many hits an engine that is starting."""

MOST_ROUNDS = 10
"""The streams run again until all kills have been done, so often at most."""

DISASTER_STREAMS = 8
FILE_BYTES = 64 << 10
"""How long a file may become when the disk is full."""

WORDS = ("the", "light", "of", "sea", "and", "stone", "under", "river", "slow", "green", "morning", "to", "bird", "we")

Progress = Callable[[str], None]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How streams fared in a disaster; `deaths` counts those of the engine."""

    streams: int = 0
    mismatched: int = 0
    lost: int = 0
    deaths: int = 0
    longest_pause_s: float = 0.0
    failures: list[str] = []
    """Why streams were lost."""

    @property
    def ok(self) -> bool:
        return not self.mismatched and not self.lost


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the drill came to. `lost` streams broke off or ended with an error, `mismatched` ones ended with something
    else than undisturbed; `longest_pause_s` is the longest time between two events of a stream, in seconds, which may
    span several deaths."""

    streams: int
    kills: int
    mismatched: int
    lost: int
    longest_pause_s: float
    failures: list[str]
    disasters: dict[str, Outcome]
    ok: bool


class Transcript(msgspec.Struct, kw_only=True):
    """What a client sees of one stream, put together; `pause` in seconds and `failure` are about how it came."""

    text: str = ""
    token_ids: list[int] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[Any] = []
    reasons: list[Any] = []
    usage: list[int] = []
    pause: float = 0.0
    failure: str | None = None

    def same(self, other: Transcript) -> bool:
        def bare(transcript: Transcript) -> bytes:
            return msgspec.json.encode(msgspec.structs.replace(transcript, pause=0.0))

        return bare(self) == bare(other)


def run(
    model: str,
    streams: int = 64,
    kills: int = 20,
    *,
    short: bool = False,
    seed: int = 0,
    tell: Progress = lambda _: None,
) -> Report:
    """The whole drill. Raises TricornError when the server cannot start. `short` has shorter answers."""
    return asyncio.run(_run(model, streams, kills, short, seed, tell))


async def _run(model: str, streams: int, kills: int, short: bool, seed: int, tell: Progress) -> Report:
    random = Random(seed)
    bodies = [_body(random, short) for _ in range(streams)]
    few = bodies[: min(streams, 2 if short else DISASTER_STREAMS)]
    disasters: dict[str, Outcome] = {}
    async with ServerProcess(model) as process:
        server = _Server(process)
        tell(f"{streams} streams, undisturbed")
        wanted = await _streams(server, bodies)
        if broken := next((each.failure for each in wanted if each.failure), None):
            raise TricornError(f"a stream failed although nothing was done to it: {broken}")
        killed, main = await _kill(server, bodies, wanted, kills, random, tell)
        for name, disaster, chosen in (("stopped", _stop, few), ("memory", _starve, bodies)):
            tell(f"{len(chosen)} streams, {name}")
            disasters[name] = await _disaster(server, chosen, wanted, disaster, random)
    with tempfile.TemporaryDirectory(prefix="tricorn-drill-") as folder:
        async with ServerProcess(model, "--kv-disk", folder, "--kv-disk-size", "256M") as process:
            server = _Server(process)
            tell(f"{len(few)} streams, disk full")
            disasters["disk full"] = await _fill(server, few, wanted)
    return Report(
        streams=streams,
        kills=killed,
        mismatched=main.mismatched,
        lost=main.lost,
        longest_pause_s=main.longest_pause_s,
        failures=main.failures,
        disasters=disasters,
        ok=killed == kills and main.ok and all(outcome.ok for outcome in disasters.values()),
    )


def _body(random: Random, short: bool) -> dict[str, Any]:
    """A request: greedy or sampled, of any length, some with logprobs, penalties or a stop."""
    body: dict[str, Any] = {
        "prompt": " ".join(random.choices(WORDS, k=random.randint(2, 40 if short else 120))),
        "max_tokens": random.randint(24, 48) if short else random.randint(48, 192),
        "temperature": random.choice([0.0, 0.7, 1.0]),
        "seed": random.getrandbits(32),
        "ignore_eos": random.random() < 0.8,
    }
    if random.random() < 0.3:
        body["logprobs"] = random.choice([0, 1, 5])
    if random.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
    if random.random() < 0.1:
        body["stop"] = [" zebra", "\n\n\n\n"]
    return body


# Disasters


async def _kill(
    server: _Server, bodies: list[dict[str, Any]], wanted: list[Transcript], kills: int, random: Random, tell: Progress
) -> tuple[int, Outcome]:
    """All streams, while the engine is killed so often; gives how often it was."""
    done, outcome = 0, Outcome()
    for _ in range(MOST_ROUNDS):
        if done >= kills:
            break
        total = sum(len(each.token_ids) for each in wanted)
        moments = sorted(random.randint(1, max(1, total * 9 // 10)) for _ in range(kills - done))
        work = asyncio.create_task(_streams(server, bodies))
        first = server.tokens
        for moment in moments:
            starting = done % EVERY_STARTING == EVERY_STARTING - 1
            await (server.new_engine(work) if starting else server.heard(first + moment, work))
            await asyncio.sleep(random.uniform(0, STARTING_SECONDS if starting else AFTER_SECONDS))
            if work.done():
                break
            if server.signal(signal.SIGKILL):
                done += 1
                tell(f"{len(bodies)} streams, {done} of {kills} kills")
        outcome = _join(outcome, _compare(await work, wanted, 0))
    return done, msgspec.structs.replace(outcome, deaths=done)


async def _disaster(
    server: _Server,
    bodies: list[dict[str, Any]],
    wanted: list[Transcript],
    strike: Callable[[_Server], None],
    random: Random,
) -> Outcome:
    """Strikes at a random moment of some streams."""
    before = await server.deaths()
    total = sum(len(each.token_ids) for each in wanted[: len(bodies)])
    work = asyncio.create_task(_streams(server, bodies))
    await server.heard(server.tokens + random.randint(1, total // 2), work)
    strike(server)
    transcripts = await work
    return _compare(transcripts, wanted, await server.deaths() - before)


def _stop(server: _Server) -> None:
    server.signal(signal.SIGSTOP)


def _starve(server: _Server) -> None:
    """The engine gets no more memory than it has."""
    if engine := server.engine():
        most = int(Path(f"/proc/{engine}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(engine, resource.RLIMIT_AS, (most, most))


async def _fill(server: _Server, bodies: list[dict[str, Any]], wanted: list[Transcript]) -> Outcome:
    """No file of the engine may grow any more. Raises TricornError when the disk tier does not notice."""
    await server.until("tricorn:disk_writing", 1)
    if engine := server.engine():  # 0 would be this process
        resource.prlimit(engine, resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    outcome = Outcome()
    for _ in range(2):  # after the first, the idle engine saves its pages
        outcome = _join(outcome, _compare(await _streams(server, bodies), wanted, 0))
        await asyncio.sleep(0.5)
    await server.until("tricorn:disk_writing", 0)
    return msgspec.structs.replace(outcome, deaths=await server.deaths())


def _compare(transcripts: list[Transcript], wanted: list[Transcript], deaths: int) -> Outcome:
    whole = [(each, want) for each, want in zip(transcripts, wanted, strict=False) if each.failure is None]
    return Outcome(
        streams=len(transcripts),
        mismatched=sum(not each.same(want) for each, want in whole),
        lost=len(transcripts) - len(whole),
        deaths=deaths,
        longest_pause_s=round(max(each.pause for each in transcripts), 3),
        failures=sorted({each.failure for each in transcripts if each.failure}),
    )


def _join(a: Outcome, b: Outcome) -> Outcome:
    return Outcome(
        streams=b.streams,
        mismatched=a.mismatched + b.mismatched,
        lost=a.lost + b.lost,
        deaths=a.deaths + b.deaths,
        longest_pause_s=max(a.longest_pause_s, b.longest_pause_s),
        failures=sorted({*a.failures, *b.failures}),
    )


# The server, and clients


class _Server:
    """A server under the drill. `tokens` counts what its streams have brought."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self.tokens = 0
        self._killed = 0

    def engine(self) -> int:
        return self._process.engine()

    def signal(self, number: int) -> bool:
        """Tells whether there was an engine to get it that had not been killed."""
        engine = self.engine()
        if not engine or engine == self._killed:
            return False
        os.kill(engine, number)
        if number == signal.SIGKILL:
            self._killed = engine
        return True

    async def heard(self, tokens: int, work: asyncio.Task[Any]) -> None:
        """Until so many tokens have come, and at least one since this call."""
        tokens = max(tokens, self.tokens + 1)
        while self.tokens < tokens and not work.done():
            await asyncio.sleep(0.002)

    async def new_engine(self, work: asyncio.Task[Any]) -> None:
        """Until the engine is not the one killed last."""
        while self.engine() in (0, self._killed) and not work.done():
            await asyncio.sleep(0.002)

    async def deaths(self) -> int:
        return int(await self.metric("tricorn:engine_deaths_total"))

    async def until(self, name: str, value: float) -> None:
        """Waits for a metric to have this value. Raises TricornError when it does not come to it."""
        for _ in range(50):
            if await self.metric(name) == value:
                return
            await asyncio.sleep(0.1)
        found = await self.metric(name)
        raise TricornError(
            f"{name} of the server should be {value:g}, it is {found:g}; its log: {self._process.said()}"
        )

    async def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        return (await self._process.client.metrics()).value(name)

    async def stream(self, body: dict[str, Any]) -> Transcript:
        """Sends a request and takes in its events."""
        transcript = Transcript(failure="it broke off")
        unread = bytearray()
        last = 0.0

        def read(data: bytes) -> None:
            nonlocal last
            unread.extend(data)
            while (end := unread.find(b"\n\n")) >= 0:
                event = bytes(unread[:end])
                del unread[: end + 2]
                if last:
                    transcript.pause = max(transcript.pause, time.monotonic() - last)
                last = time.monotonic()
                self.tokens += _take(transcript, event)

        wanted = {**body, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        answer = await self._process.client.feed("/v1/completions", wanted, read, give_up=STREAM_SECONDS)
        if answer.error:
            transcript.failure = answer.error
        elif answer.status != 200:
            transcript.failure = f"status {answer.status}: {bytes(unread).decode(errors='replace')}"
        return transcript


async def _streams(server: _Server, bodies: list[dict[str, Any]]) -> list[Transcript]:
    return await asyncio.gather(*(server.stream(body) for body in bodies))


def _take(transcript: Transcript, event: bytes) -> int:
    """Adds one event to a transcript; gives the number of its tokens."""
    data = event.removeprefix(b"data: ")
    if data == b"[DONE]":
        transcript.failure = None if any(transcript.reasons) else "it has no finish reason"
        return 0
    fields = msgspec.json.decode(data)
    if "error" in fields:
        transcript.failure = str(fields["error"])
        return 0
    if fields.get("usage"):
        transcript.usage = [fields["usage"]["prompt_tokens"], fields["usage"]["completion_tokens"]]
    tokens = 0
    for choice in fields["choices"]:
        tokens += len(choice["token_ids"])
        transcript.text += choice["text"]
        transcript.token_ids += choice["token_ids"]
        if choice["logprobs"]:
            transcript.token_logprobs += choice["logprobs"]["token_logprobs"]
            transcript.top_logprobs += choice["logprobs"]["top_logprobs"] or []
        if choice["finish_reason"]:
            transcript.reasons += [choice["finish_reason"], choice["stop_reason"]]
    return tokens
