"""Batches of the OpenAI API: files of requests, answered while nobody else wants the engine.

POST /v1/batches, GET /v1/batches, GET /v1/batches/{id}, POST /v1/batches/{id}/cancel

A batch goes line by line through the handlers of the routes that it names, so it meets what any request meets, at the
lowest priority and only in slots that are free. Every answer is on disk when it is counted: a server that starts again
goes on with the lines that have none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from tricorn.scheduler.limits import MAX_PRIORITY
from tricorn.server.bodies import check_form, decode
from tricorn.server.errors import HttpError, printable
from tricorn.server.exchange import MAX_BODY, Endpoint, Exchange, new_request_id
from tricorn.server.files import Files, new_id
from tricorn.server.routes import Operation, Routes

Fields = dict[str, Any]

PARALLEL = 16
"""Lines that are answered at once, at most."""

MAX_LINES = 50_000
MAX_BATCHES = 1000
WINDOW_SECONDS = 86_400
ROOM_SECONDS = 0.05
"""How often a line that waits looks for a free slot."""

BATCHED = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""What a line may ask."""

log = logging.getLogger("tricorn.server")

# --- one line


class Line(msgspec.Struct, frozen=True):
    """A request of a batch."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    url: str
    body: dict[str, msgspec.Raw]
    method: Literal["POST"] = "POST"


_line = msgspec.json.Decoder(Line)
_known = msgspec.json.Decoder(dict[str, Any])


class Answer(NamedTuple):
    """What a handler said; `retry_after` in seconds when it may be asked again."""

    status: int
    body: bytes
    request_id: str
    retry_after: float | None


def read_lines(content: bytes, url: str | None = None) -> tuple[list[Line], list[Fields]]:
    """The requests of a file, all for one `url` if given, and what is wrong with it by line."""
    lines: list[Line] = []
    faults: list[Fields] = []
    seen: set[str] = set()
    for number, text in enumerate(content.split(b"\n"), 1):
        if not text.strip():
            continue
        try:
            if len(text) > MAX_BODY:
                raise HttpError(400, f"the line holds more than {MAX_BODY} bytes")
            check_form(text, {})
            line = decode(_line, text)
            if line.custom_id in seen:
                raise HttpError(400, f"custom_id {printable(line.custom_id, 80)!r} is there twice", "custom_id")
            if line.url not in BATCHED or line.url != (url or line.url):
                raise HttpError(400, f"url must be {url or ' or '.join(BATCHED)}", "url")
            if "stream" in line.body and msgspec.json.decode(line.body["stream"]):
                raise HttpError(400, "a batch streams nothing: leave stream out", "body.stream")
        except HttpError as error:
            faults.append({"code": "invalid_request", "line": number, "message": error.message, "param": error.param})
            continue
        seen.add(line.custom_id)
        lines.append(line)
    if not lines and not faults:
        faults.append({"code": "empty_file", "line": None, "message": "the file holds no request", "param": None})
    if len(lines) > MAX_LINES:
        message = f"the file holds more than {MAX_LINES} requests"
        faults.append({"code": "too_many_requests", "line": None, "message": message, "param": None})
    return lines, faults


class Inside:
    """Calls handlers without a network. `endpoints` are by path; `room` says whether a slot of the engine is free."""

    def __init__(self, endpoints: Mapping[str, Endpoint], room: Callable[[], bool]) -> None:
        self.endpoints = endpoints
        self._room = room

    async def answer(self, line: Line, caller: str) -> Answer:
        """Asks until the server has room. Leaving ends the work."""
        priority = msgspec.json.encode(-MAX_PRIORITY)
        body = msgspec.json.encode({**line.body, "priority": msgspec.Raw(priority)})
        while True:
            while not self._room():
                await asyncio.sleep(ROOM_SECONDS)
            answer = await self._ask(line.url, body, caller)
            if answer.retry_after is None:
                return answer
            await asyncio.sleep(answer.retry_after)

    async def _ask(self, url: str, body: bytes, caller: str) -> Answer:
        parts: list[bytes] = []
        head: Fields = {}
        unread = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            return unread.pop() if unread else await asyncio.Event().wait()  # nobody hangs up

        async def send(message: Any) -> None:
            head.update(message) if message["type"] == "http.response.start" else parts.append(message["body"])

        headers = [(b"content-type", b"application/json"), (b"x-request-id", new_request_id().encode())]
        scope = {"type": "http", "method": "POST", "path": url, "headers": headers, "tricorn.caller": caller}
        await self.endpoints[url](scope, receive, send)
        given = dict(head["headers"])
        again = head["status"] in (429, 503)
        retry = float(given.get(b"retry-after", 1)) if again else None
        return Answer(head["status"], b"".join(parts), given[b"x-request-id"].decode(), retry)


def said(line: Line, answer: Answer) -> bytes:
    """A line of an output file."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body)}
    fields = {"id": new_id("batch_req"), "custom_id": line.custom_id, "response": response, "error": None}
    return msgspec.json.encode(fields) + b"\n"


def read_answered(path: Path) -> dict[str, int]:
    """The status of each line in a file of `said` lines; what was not written to its end goes away."""
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)
    answered = map(_known.decode, whole.splitlines())
    return {line["custom_id"]: line["response"]["status_code"] for line in answered}


async def answers(inside: Inside, lines: Iterable[Line], caller: str = "") -> AsyncIterator[tuple[Line, Answer]]:
    """Every line with its answer, as they come."""
    left = iter(lines)
    running: dict[asyncio.Task[Answer], Line] = {}
    try:
        while True:
            while len(running) < PARALLEL and (line := next(left, None)) is not None:
                running[asyncio.create_task(inside.answer(line, caller))] = line
            if not running:
                return
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield running.pop(task), task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


# --- batches

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OVER = ("failed", "completed", "expired", "cancelled")


class Batch(msgspec.Struct, kw_only=True):
    """What is known of a batch. `caller` is whose it is; times are in seconds since 1970, by status."""

    id: str
    caller: str
    endpoint: str
    input_file_id: str
    created_at: int
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    times: dict[str, int] = {}
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[Fields] = []
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def fields(self) -> Fields:
        """As the OpenAI API writes it."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "created_at": self.created_at,
            "expires_at": self.created_at + WINDOW_SECONDS,
            **{f"{status}_at": self.times.get(status) for status in ("in_progress", "finalizing", "cancelling", *OVER)},
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class Wanted(msgspec.Struct, frozen=True):
    """The body of a new batch."""

    input_file_id: Annotated[str, Meta(max_length=64)]
    endpoint: Annotated[str, Meta(max_length=64)]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None


_wanted = msgspec.json.Decoder(Wanted)


class Batches:
    """The batches, their handlers, and the task that works them off, the oldest first."""

    def __init__(self, files: Files, inside: Inside) -> None:
        self._files = files
        self._inside = inside
        self._batches: dict[str, Batch] = {}
        if files.folder is not None:
            found = sorted(files.folder.read("batch", Batch), key=lambda batch: batch.created_at)
            self._batches = {batch.id: batch for batch in found}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._current: tuple[Batch, asyncio.Task[None]] | None = None

    @property
    def routes(self) -> Routes:
        return (
            Operation("POST", "/v1/batches", self.create, "key", "Answer the requests of a file", (Wanted,)),
            Operation("GET", "/v1/batches", self.index, "key", "The batches of this key"),
            Operation("GET", "/v1/batches/{id}", self.show, "key", "How a batch stands"),
            Operation("POST", "/v1/batches/{id}/cancel", self.cancel, "key", "End a batch"),
        )

    def start(self) -> None:
        """Begins, or goes on, with the batches that are not over."""
        if self._files.folder is not None:
            self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Leaves the rest for the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    # --- handlers

    async def create(self, exchange: Exchange) -> None:
        body = await exchange.body()
        check_form(body, {})
        wanted = decode(_wanted, body)
        file = self._files.find(exchange, wanted.input_file_id)
        if wanted.endpoint not in BATCHED:
            raise HttpError(400, f"endpoint must be {' or '.join(BATCHED)}", "endpoint", "invalid_value")
        if len(self._batches) >= MAX_BATCHES:
            self._forget()
        batch = Batch(
            id=new_id("batch"),
            caller=exchange.caller,
            endpoint=wanted.endpoint,
            input_file_id=file.id,
            created_at=int(time.time()),
            metadata=wanted.metadata,
        )
        self._batches[batch.id] = batch
        self._save(batch)
        self._news.set()
        await exchange.answer_json(batch.fields)

    async def index(self, exchange: Exchange) -> None:
        self._files.open()
        mine = [batch.fields for batch in reversed(self._batches.values()) if batch.caller == exchange.caller]
        await exchange.answer_json({"object": "list", "data": mine, "has_more": False})

    async def show(self, exchange: Exchange) -> None:
        await exchange.answer_json(self._find(exchange).fields)

    async def cancel(self, exchange: Exchange) -> None:
        await exchange.read(MAX_BODY)
        batch = self._find(exchange)
        if batch.status not in OVER and batch.status != "cancelling":
            self._enter(batch, "cancelling")
            if self._current is not None and self._current[0] is batch:
                self._current[1].cancel()
            self._news.set()
        await exchange.answer_json(batch.fields)

    def _find(self, exchange: Exchange) -> Batch:
        self._files.open()
        id = exchange.path_parameter("id") or ""
        batch = self._batches.get(id)
        if batch is None or batch.caller != exchange.caller:
            raise HttpError(404, f"no batch {printable(id, 80)!r}", "batch_id", "not_found")
        return batch

    def _forget(self) -> None:
        """The oldest that is over makes room. Raises HttpError 429."""
        over = next((batch for batch in self._batches.values() if batch.status in OVER), None)
        if over is None:
            raise HttpError(429, f"{MAX_BATCHES} batches wait already", code="too_many_batches", retry_after=60)
        del self._batches[over.id]
        self._files.open().remove(over.id)

    # --- work

    def _enter(self, batch: Batch, status: Status) -> None:
        batch.status = status
        batch.times[status] = int(time.time())
        self._save(batch)

    def _save(self, batch: Batch) -> None:
        self._files.open().write(batch.id, batch)

    async def _work(self) -> None:
        while True:
            self._news.clear()
            batch = next((batch for batch in self._batches.values() if batch.status not in OVER), None)
            if batch is None:
                await self._news.wait()
                continue
            task = asyncio.create_task(self._run(batch))
            self._current = batch, task
            try:
                await asyncio.wait((task,))
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                self._current = None
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a batch failed", exc_info=error)
                batch.errors = [{"code": "internal_error", "line": None, "message": "see the server's log"}]
                self._enter(batch, "failed")
            elif task.cancelled() and batch.status == "cancelling":
                self._finish(batch, "cancelled")

    async def _run(self, batch: Batch) -> None:
        if batch.status == "cancelling":
            self._finish(batch, "cancelled")
            return
        path = self._files.open().content(batch.input_file_id)
        content = await asyncio.to_thread(path.read_bytes) if path.exists() else b""
        lines, batch.errors = await asyncio.to_thread(read_lines, content, batch.endpoint)
        if batch.errors:
            self._enter(batch, "failed")
            return
        answered = self._answered(batch)
        batch.total = len(lines)
        if batch.status == "validating":
            self._enter(batch, "in_progress")
        try:
            async with asyncio.timeout(batch.created_at + WINDOW_SECONDS - time.time()):
                await self._answer(batch, [line for line in lines if line.custom_id not in answered])
        except TimeoutError:
            self._finish(batch, "expired")
            return
        self._enter(batch, "finalizing")
        self._finish(batch, "completed")

    async def _answer(self, batch: Batch, lines: list[Line]) -> None:
        with self._part(batch, "out").open("ab") as out, self._part(batch, "err").open("ab") as err:
            async for line, answer in answers(self._inside, lines, batch.caller):
                target = out if answer.status == 200 else err
                target.write(said(line, answer))
                target.flush()
                batch.completed += answer.status == 200
                batch.failed += answer.status != 200

    def _answered(self, batch: Batch) -> set[str]:
        """The lines that have an answer, counted."""
        found: set[str] = set()
        counts = []
        for name, id in (("out", batch.output_file_id), ("err", batch.error_file_id)):
            path = self._part(batch, name) if id is None else self._files.open().content(id)
            ids = read_answered(path)
            found.update(ids)
            counts.append(len(ids))
        batch.completed, batch.failed = counts
        return found

    def _finish(self, batch: Batch, status: Status) -> None:
        """Makes files of what there is."""
        for name, kind in (("out", "output"), ("err", "error")):
            path = self._part(batch, name)
            if path.exists() and path.stat().st_size:
                file = self._files.add(batch.caller, f"{batch.id}_{kind}.jsonl", "batch_output", path)
                setattr(batch, f"{kind}_file_id", file.id)
                self._save(batch)
            path.unlink(missing_ok=True)
        self._enter(batch, status)

    def _part(self, batch: Batch, name: str) -> Path:
        return self._files.open().path / f"{batch.id}.{name}"
