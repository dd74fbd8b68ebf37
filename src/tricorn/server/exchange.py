"""One HTTP exchange over ASGI: a body read within bounds, an answer as JSON or as a stream of events.

Below FastAPI's own request and response classes because a stream should cost one `send` per event, because a body has
to be refused before it has been read, and because a client that goes away must end the work for it, streamed or not.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.types import Message, Receive, Scope, Send

from tricorn.engine.gate import Refused
from tricorn.frontend.errors import BadRequest, EngineFailure
from tricorn.server.errors import HttpError, from_bad_request, from_refused, too_late
from tricorn.server.headers import tenant
from tricorn.server.journal import Entry, Journal

MAX_BODY = 8 * 2**20
"""Bytes in the body of a request."""

BODY_SECONDS = 30.0
"""How long a client may take to send one."""

MAX_HEADERS = 32 * 2**10
"""Bytes in the headers of a request."""

MAX_HEADER_COUNT = 128

GRACE_SECONDS = 1.0
"""How late the engine may be to end a request whose deadline has passed."""

MAX_REQUEST_ID = 128
"""Characters in a client's own request id; a longer one is replaced by one of ours."""

log = logging.getLogger("tricorn.server")


class ClientGone(Exception):
    """The client closed the connection (a half-closed one counts): nobody waits for the answer."""


def request_id(scope: Scope) -> str:
    """The client's `X-Request-Id`, or one of ours when it gives none, several, or one that is not printable ASCII. For
    people and logs only: nothing inside goes by it.
    """
    given: list[bytes] = [value for key, value in scope["headers"] if key == b"x-request-id"]
    if len(given) == 1 and 0 < len(given[0]) <= MAX_REQUEST_ID and all(0x20 <= byte < 0x7F for byte in given[0]):
        return given[0].decode()
    return new_request_id()


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def _traceparent(scope: Scope) -> str | None:
    given: list[bytes] = [value for key, value in scope["headers"] if key == b"traceparent"]
    return given[0].decode("latin-1") if len(given) == 1 else None


@dataclass(frozen=True)
class Dialect:
    """How a protocol writes errors and streams: the JSON value of an error, the media type of a stream, the bytes of
    one of its messages, and the header in which its clients look for the id of a request.
    """

    error: Callable[[HttpError], Any]
    media: bytes
    frame: Callable[[Any], bytes]
    id_header: bytes = b"x-request-id"


def event(value: Any) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


EVENTS = b"text/event-stream; charset=utf-8"
OPENAI = Dialect(HttpError.fields, EVENTS, event)


class Exchange:
    """A request and the way to answer it. `entry` is what the journal knows of it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, route: str = "", dialect: Dialect = OPENAI) -> None:
        self.entry = Entry(request_id(scope), route, _traceparent(scope))
        self.caller: str = scope.get("tricorn.caller", "")
        """Whose key the request shows; "" where none is asked for."""
        self.extra: tuple[tuple[bytes, bytes], ...] = ()
        """Further headers of the answer."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._dialect = dialect
        self._started = False
        self._streaming = False
        self._work: asyncio.Future[None] | None = None
        self._ended_by: HttpError | None = None

    # --- the request

    def header(self, name: bytes) -> bytes | None:
        """The value of a header. Raises HttpError 400 when it is given twice."""
        values = [value for key, value in self._scope["headers"] if key == name]
        if len(values) > 1:
            raise HttpError(400, f"the header {name.decode()} is given {len(values)} times")
        return values[0] if values else None

    @property
    def tenant(self) -> str:
        """On whose account the request counts: its caller's, or, where no keys are asked for, whom it names. Raises
        HttpError 400.
        """
        return self.caller or tenant(self.header(b"x-tenant"))

    def query(self, name: str) -> str | None:
        """The value of a parameter behind the path's question mark. Raises HttpError 400 when it is given twice."""
        given = parse_qs(self._scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True).get(name, [])
        if len(given) > 1:
            raise HttpError(400, f"the parameter {name} is given {len(given)} times", name, "invalid_value")
        return given[0] if given else None

    def path_parameter(self, name: str) -> str | None:
        """The part of the path that a route has named."""
        value = self._scope.get("path_params", {}).get(name)
        return None if value is None else str(value)

    async def body(self, *, binary: bool = False) -> bytes:
        """The whole body, JSON by its content type; bytes too if they may be `binary`. Raises HttpError 400, 408, 413
        or 415, or ClientGone.
        """
        kind = (self.header(b"content-type") or b"application/json").split(b";")[0].strip().lower()
        if kind != b"application/json" and not (binary and kind == b"application/octet-stream"):
            raise HttpError(415, "the content type must be application/json", code="unsupported_media_type")
        return await self.read(MAX_BODY)

    async def read(self, limit: int) -> bytes:
        """The whole body, whatever it is, of at most `limit` bytes. Raises HttpError 400, 408 or 413, or ClientGone."""
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(BODY_SECONDS * max(1, limit // MAX_BODY)):
                return await self._read_body(limit)
        except TimeoutError:
            message = f"the body did not arrive within {BODY_SECONDS:.0f} seconds"
            raise HttpError(408, message, code="body_timeout", close=True) from None

    async def _read_body(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def while_connected(self, work: Coroutine[Any, Any, None], deadline: float | None = None) -> None:
        """Runs `work` to its end, or cancels it and raises ClientGone when the client goes away. Raises what `cut`
        was called with when somebody did, and HttpError 408 when there is no token some time after the deadline, a
        `time.monotonic()`: it is the engine that keeps deadlines, but it may be hung or starting anew.
        """
        task = self._work = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._disconnected())
        try:
            left = None if deadline is None else max(0.0, deadline + GRACE_SECONDS - time.monotonic())
            done, _ = await asyncio.wait((task, watch), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done and self.entry.first_token is None:
                raise too_late()
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            if self._ended_by is not None:
                raise self._ended_by
            task.result()
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    def cut(self, error: HttpError) -> None:
        """Ends the work of a generation, whose client is told this. Too late, it does nothing."""
        if self._work is not None and not self._work.done():
            self._ended_by = error
            self._work.cancel()

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # --- the answer

    async def answer(
        self, status: int, body: bytes, kind: bytes = b"application/json", headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        length = () if status == 304 else ((b"content-length", b"%d" % len(body)),)
        await self._open(status, (b"content-type", kind), *length, *headers)
        await self._send({"type": "http.response.body", "body": body})

    async def answer_json(self, value: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        await self.answer(status, msgspec.json.encode(value), headers=headers)

    async def events(self, *values: Any) -> None:
        """Sends each value as one message of a stream; the first call opens it."""
        if not values:
            return
        if not self._streaming:
            self._streaming = True
            await self._open(200, (b"content-type", self._dialect.media), (b"cache-control", b"no-cache"))
        await self._write(b"".join(map(self._dialect.frame, values)), more=True)

    async def end_events(self, last: bytes = b"data: [DONE]\n\n") -> None:
        await self._write(last, more=False)

    async def _open(self, status: int, *headers: tuple[bytes, bytes]) -> None:
        self._started = True
        self.entry.status = status
        names = {b"x-request-id", self._dialect.id_header}
        fields = [*headers, *self.extra, *((name, self.entry.id.encode()) for name in names)]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})

    async def _write(self, data: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        await self._send(message)

    async def fail(self, error: HttpError) -> None:
        """Answers with the error; in a stream that has begun, with an error as its last message."""
        self.entry.error = error.code or "error"
        fields = self._dialect.error(error)
        if self._streaming:
            await self.end_events(self._dialect.frame(fields))
        elif not self._started:
            await self.answer_json(fields, error.status, error.headers)


def http_error(error: Exception) -> HttpError:
    """What the client is told of whatever went wrong in a handler; what nobody has foreseen is logged."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, BadRequest):
        return from_bad_request(error)
    if isinstance(error, Refused):
        return from_refused(error)
    if isinstance(error, EngineFailure):
        return HttpError(500, str(error), code="engine_failure")
    log.error("a request failed", exc_info=error)
    return HttpError(500, "an internal error, see the server's log", code="internal_error")


class Endpoint:
    """An ASGI application around one handler: whatever goes wrong in it becomes an answer, and the journal and
    `note_error` hear of it. `route` is how logs name it, `dialect` how its errors and streams are written; `admit`
    raises HttpError for who may not come in.
    """

    def __init__(
        self,
        route: str,
        handle: Callable[[Exchange], Awaitable[None]],
        journal: Journal,
        note_error: Callable[[HttpError], None],
        dialect: Dialect = OPENAI,
        admit: Callable[[Exchange], None] = lambda exchange: None,
    ) -> None:
        self._route = route
        self._handle = handle
        self._admit = admit
        self._journal = journal
        self._note_error = note_error
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._route, self._dialect)
        with self._journal.follow(exchange.entry):
            try:
                self._admit(exchange)
                await self._handle(exchange)
            except ClientGone:
                pass
            except Exception as error:
                await self._fail(exchange, http_error(error))

    async def _fail(self, exchange: Exchange, error: HttpError) -> None:
        self._note_error(error)
        await exchange.fail(error)


class HeaderLimit:
    """Middleware that refuses requests with too many headers, or too many bytes of them."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        if sum(len(key) + len(value) for key, value in headers) > MAX_HEADERS:
            await self._refuse(scope, receive, send, f"the headers hold more than {MAX_HEADERS} bytes")
        elif len(headers) > MAX_HEADER_COUNT:
            await self._refuse(scope, receive, send, f"there are more than {MAX_HEADER_COUNT} headers")
        else:
            await self._app(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, message: str) -> None:
        await Exchange(scope, receive, send).fail(HttpError(431, message, code="headers_too_large"))


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body holds more than {limit} bytes", code="body_too_large")
