"""Load on a server that speaks OpenAI's API: a client that costs little, prompts of exact length, and two drivers.

A request has a connection of its own, so that giving it up is closing it. Whatever a server does, a Result says so;
nothing here raises for it. Times are `time.monotonic()`, in seconds.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from tricorn.request import TricornError

T = TypeVar("T")

Headers = Mapping[str, str]
NO_HEADERS: Headers = {}

TIMEOUT_SECONDS = 600.0
"""How long a request may take altogether, unless its caller gives it up sooner."""

MAX_BODY = 64 << 20
"""Bytes of an answer that is not a stream, or of one event."""

GAVE_UP = "given up"
BROKE_OFF = "the answer broke off"

# Common words that most tokenizers know whole. Prompts are drawn from the ids that a server finds in this text.
TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which"
    " one you were all her she there would their we him been has when who will no more if out so up said what its"
    " about than into them can only other time new some could these two may first then do any like my now over such"
    " our man me even most made after also did many off before must well back through years where much your way down"
    " should because long each just state those people too mr how little good world make very year still see own work"
    " men day get here old life both between being under three never know same last another while us might great go"
    " come since against right came take used himself few house use place during high without again home around small"
    " however found part school thought went say general once upon war every left does got united number hand course"
    " water until always away public something fact less though far put head think set called enough end took night"
    " river stone light green morning bird slow sea winter field road door paper window summer tree letter music story"
)


# What came back


class UsageDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """As the server counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: UsageDetails | None = None

    @property
    def total(self) -> int:
        """Which does not depend on what is cached."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def cached(self) -> int:
        """Tokens of the prompt that came from a cache, as far as the server says."""
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `status` 0: there was none, and `error` says why; an error after the head leaves its status."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a request for one choice. `times` has the moment of each event that brought tokens, `counts` how
    many (1 where the server does not give ids). `error` is what the server said, or what befell the connection.
    """

    status: int
    sent: float
    ended: float
    times: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str = ""
    retry_after: float | None = None

    @property
    def complete(self) -> bool:
        """All that was asked for has come."""
        return not self.error and self.finish_reason in ("stop", "length")

    @property
    def seconds(self) -> float:
        return self.ended - self.sent

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None without one."""
        return self.times[0] - self.sent if self.times else None

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens, both of them in this span of time."""
        first, last = bisect.bisect_left(self.times, begin), bisect.bisect_right(self.times, end)
        return [b - a for a, b in itertools.pairwise(self.times[first:last])]

    def tokens(self, begin: float, end: float) -> int:
        """How many tokens came in this span of time."""
        first, last = bisect.bisect_left(self.times, begin), bisect.bisect_right(self.times, end)
        return sum(self.counts[first:last])


def percentile(values: Sequence[float], percent: float) -> float:
    """With this share of the values at or below it, between neighbours by proportion; 0 when there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# The client


class Client:
    """Of one server, by its address, such as http://127.0.0.1:8000."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TricornError(f"{url} is no address of a server: give one such as http://127.0.0.1:8000")
        self.url = url
        self._secure = parts.scheme == "https"
        self._host, self.port = parts.hostname, parts.port or (443 if self._secure else 80)
        self._base = parts.path.rstrip("/")
        self._netloc = parts.netloc.rpartition("@")[2]

    async def stream(
        self,
        path: str,
        body: Mapping[str, Any] | bytes,
        headers: Headers = NO_HEADERS,
        give_up: float = TIMEOUT_SECONDS,
    ) -> Result:
        """Posts a request for one choice, streamed or not, and reads its answer. After `give_up` seconds, or when
        cancelled, it closes the connection."""
        transcript = _Transcript()
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        sent = time.monotonic()
        exchange, error = await self._exchange("POST", path, data, headers, transcript.feed, give_up)
        return transcript.result(exchange, sent, error)

    async def feed(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[bytes], None],
        headers: Headers = NO_HEADERS,
        give_up: float = TIMEOUT_SECONDS,
    ) -> Answer:
        """Posts a request and hands its answer on, piece by piece; the one that it gives has no body."""
        data = msgspec.json.encode(body)
        exchange, error = await self._exchange("POST", path, data, headers, lambda _, piece: read(piece), give_up)
        return Answer(exchange.status, exchange.headers, b"", error)

    async def fetch(
        self, method: str, path: str, body: bytes = b"", headers: Headers = NO_HEADERS, give_up: float = TIMEOUT_SECONDS
    ) -> Answer:
        """Any request, and its whole answer."""
        read = bytearray()

        def feed(exchange: _Exchange, data: bytes) -> None:
            read.extend(data)
            _check_size(read)

        exchange, error = await self._exchange(method, path, body, headers, feed, give_up)
        return Answer(exchange.status, exchange.headers, bytes(read), error)

    async def json(self, path: str) -> Any:
        """What a GET brings. Raises TricornError when that is no JSON."""
        answer = await self.fetch("GET", path)
        if answer.status != 200 or answer.error:
            raise TricornError(f"GET {path}: status {answer.status} {answer.error}".rstrip())
        try:
            return msgspec.json.decode(answer.body)
        except msgspec.DecodeError as error:
            raise TricornError(f"GET {path} brought no JSON: {error}") from None

    async def metrics(self) -> Metrics:
        """Raises TricornError when the server has none."""
        answer = await self.fetch("GET", "/metrics")
        if answer.status != 200 or answer.error:
            raise TricornError(f"GET /metrics: status {answer.status} {answer.error}".rstrip())
        return Metrics(answer.body.decode(errors="replace"))

    async def context(self) -> int:
        """Tokens that prompt and output may have together. Raises TricornError when the server does not say."""
        card = (await self.json("/v1/models"))["data"][0]
        if not isinstance(card.get("max_model_len"), int):
            raise TricornError("the server does not tell its max_model_len")
        return int(card["max_model_len"])

    async def model(self) -> str:
        """The name of the first model that is served. Raises TricornError."""
        try:
            return str((await self.json("/v1/models"))["data"][0]["id"])
        except (LookupError, TypeError):
            raise TricornError("GET /v1/models names no model") from None

    async def vocabulary(self) -> list[int]:
        """Ids of the served tokenizer to draw prompts from, as /tokenize tells them (in vLLM's words, which are ours,
        or in llama.cpp's). Raises TricornError when the server does not tell ids."""
        said = ""
        for body in ({"prompt": TEXT, "add_special_tokens": False}, {"content": TEXT, "add_special": False}):
            answer = await self.fetch("POST", "/tokenize", msgspec.json.encode(body))
            said = f"status {answer.status} {answer.error or answer.body[:200].decode(errors='replace')}"
            with suppress(msgspec.DecodeError, LookupError, TypeError, ValueError):
                if found := sorted(set(map(int, msgspec.json.decode(answer.body)["tokens"]))):
                    return found
        raise TricornError(f"POST /tokenize tells no tokens: {said}")

    async def text(self, ids: Sequence[int]) -> str:
        """What these ids say. Raises TricornError when the server does not tell."""
        answer = await self.fetch("POST", "/detokenize", msgspec.json.encode({"tokens": ids}))
        try:
            said = msgspec.json.decode(answer.body)
            return str(said["prompt"] if "prompt" in said else said["content"])
        except (msgspec.DecodeError, LookupError, TypeError):
            raise TricornError(f"POST /detokenize tells no text: status {answer.status} {answer.error}") from None

    async def _exchange(
        self, method: str, path: str, body: bytes, headers: Headers, read: _Read, give_up: float
    ) -> tuple[_Exchange, str]:
        """One request; gives also what went wrong with the connection."""
        loop = asyncio.get_running_loop()
        head = {"host": self._netloc, "connection": "close", "content-type": "application/json", **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        request = f"{method} {self._base}{path} HTTP/1.1\r\n{lines}content-length: {len(body)}\r\n\r\n".encode()
        exchange = _Exchange(request + body, read, loop.create_future())
        try:
            async with asyncio.timeout(give_up):
                await loop.create_connection(lambda: exchange, self._host, self.port, ssl=self._secure or None)
                return exchange, await exchange.done
        except TimeoutError:
            return exchange, GAVE_UP
        except OSError as error:
            return exchange, f"the connection failed: {error}"
        finally:
            exchange.close()


class _Exchange(asyncio.Protocol):
    """The connection of one request. `done` gets what went wrong, or "" when the answer is whole."""

    def __init__(self, request: bytes, read: _Read, done: asyncio.Future[str]) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.done = done
        self._request = request
        self._read = read
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
            self._end(f"the answer cannot be read: {cause}")

    def connection_lost(self, error: Exception | None) -> None:
        until_closed = self.status and not {b"content-length", b"transfer-encoding"} & self.headers.keys()
        self._end("" if until_closed and error is None else BROKE_OFF)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._read(self, data)

    def on_message_complete(self) -> None:
        if self.status >= 200:  # those below announce another
            self._end("")
        else:
            self.status = 0
            self.headers.clear()

    def _end(self, error: str) -> None:
        if not self.done.done():
            self.done.set_result(error)


_Read = Callable[[_Exchange, bytes], None]


class _Said(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Said | None = None
    message: _Said | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    """An event of a stream, or a whole answer."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_chunks = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class _Transcript:
    """An answer as it comes in."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str = ""
    finished: bool = False
    unread: bytearray = field(default_factory=bytearray)

    def feed(self, exchange: _Exchange, data: bytes) -> None:
        """Raises ValueError for what cannot be read; the parser of HTTP hands it on."""
        self.unread += data
        if exchange.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            now = time.monotonic()
            *lines, rest = self.unread.split(b"\n")
            self.unread = rest
            for line in lines:
                if line.startswith(b"data:"):
                    self._event(bytes(line[5:].strip()), now)
        _check_size(self.unread)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.finished = True
        elif not self.finished and not self.error:
            self._take(_chunks.decode(data), now)

    def _take(self, chunk: _Chunk, now: float) -> None:
        self.usage = chunk.usage or self.usage
        if chunk.error is not None:
            self.error = _message(chunk.error)
        for choice in chunk.choices:
            said = choice.delta or choice.message
            text = choice.text or (said.content if said else None) or ""
            count = len(choice.token_ids) if choice.token_ids is not None else int(bool(text))
            if count:
                self.times.append(now)
                self.counts.append(count)
            self.text.append(text)
            self.token_ids += choice.token_ids or ()
            self.finish_reason = choice.finish_reason or self.finish_reason

    def result(self, exchange: _Exchange, sent: float, error: str) -> Result:
        ended = time.monotonic()
        streamed = exchange.headers.get(b"content-type", b"").startswith(b"text/event-stream")
        if not streamed and exchange.status and not error:
            error = self._whole(exchange.status, ended)
        elif streamed and not error and not self.finished:
            error = BROKE_OFF
        return Result(
            status=exchange.status,
            sent=sent,
            ended=ended,
            times=tuple(self.times),
            counts=tuple(self.counts),
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            usage=self.usage,
            error=self.error or error,
            retry_after=_seconds(exchange.headers.get(b"retry-after")),
        )

    def _whole(self, status: int, now: float) -> str:
        """Takes in an answer that is no stream; gives what is wrong with it."""
        try:
            self._take(_chunks.decode(self.unread), now)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return f"status {status}, and no JSON: {error}"
        return "" if status == 200 else f"status {status}"


def _check_size(data: bytearray) -> None:
    if len(data) > MAX_BODY:
        raise ValueError(f"more than {MAX_BODY} bytes without an end")


def _message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or error)


def _seconds(value: bytes | None) -> float | None:
    return float(value) if value is not None and value.isdigit() else None


# What a server says of itself


class Metrics:
    """One scrape of /metrics."""

    def __init__(self, text: str) -> None:
        self._text = text

    @cached_property
    def series(self) -> list[tuple[str, dict[str, str], float]]:
        """Name, labels and value of each."""
        found = re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", self._text, re.MULTILINE)
        return [(name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)) for name, labels, value in found]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the series of this name that have these labels; 0 when there are none."""
        return sum(v for n, found, v in self.series if n == name and labels.items() <= found.items())

    def label(self, name: str, label: str) -> str:
        """What a label of the first series of this name says; "" when there is none."""
        return next((labels.get(label, "") for n, labels, _ in self.series if n == name), "")


# What is sent, and when


def draw(random: Random, vocabulary: Sequence[int], tokens: int) -> list[int]:
    """A prompt of exactly so many tokens, for /v1/completions."""
    return random.choices(vocabulary, k=tokens)


def poisson(random: Random, rate: float, seconds: float) -> list[float]:
    """Moments of arrivals, `rate` in a second, within so many seconds."""
    moments: list[float] = []
    now = random.expovariate(rate)
    while now < seconds:
        moments.append(now)
        now += random.expovariate(rate)
    return moments


async def open_loop(moments: Iterable[float], work: Callable[[int], Awaitable[T]]) -> list[T]:
    """Begins the work with each number at its moment, in seconds from now, whatever became of the others."""
    begin = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, moment in enumerate(moments):
            await asyncio.sleep(begin + moment - time.monotonic())
            tasks.append(group.create_task(_awaited(work(number))))
    return [task.result() for task in tasks]


async def in_turn(concurrency: int, count: int, work: Callable[[int], Awaitable[T]]) -> list[T]:
    """The work with each number below `count`, so many at a time. Results come in the order of the numbers."""
    numbers = iter(range(count))
    results: dict[int, T] = {}

    async def one_by_one() -> None:
        for number in numbers:
            results[number] = await work(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(one_by_one())
    return [results[number] for number in range(count)]


async def closed_loop(concurrency: int, seconds: float, work: Callable[[int], Awaitable[T]]) -> list[T]:
    """Always has so many under way, each followed by the next, until so many seconds have passed; waits for the last
    ones to end. Results come in the order of their ends."""
    end = time.monotonic() + seconds
    numbers = itertools.count()
    results: list[T] = []

    async def one_by_one() -> None:
        while time.monotonic() < end:
            results.append(await work(next(numbers)))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_by_one())
    return results


async def _awaited(work: Awaitable[T]) -> T:
    return await work
