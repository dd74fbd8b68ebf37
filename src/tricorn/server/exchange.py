"""One HTTP exchange over ASGI: a body read within bounds, an answer as JSON or as a stream of events.

Below FastAPI's own request and response classes because a stream should cost one `send` per event, because a body has
to be refused before it has been read, and because a client that goes away must end the work for it, streamed or not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from tricorn.frontend.errors import BadRequest, EngineFailure
from tricorn.server.errors import HttpError, from_bad_request

MAX_BODY = 8 * 2**20
"""Bytes in the body of a request."""

BODY_SECONDS = 30.0
"""How long a client may take to send one."""

MAX_HEADERS = 32 * 2**10
"""Bytes in the headers of a request."""

log = logging.getLogger("tricorn.server")


class ClientGone(Exception):
    """The client closed the connection (a half-closed one counts): nobody waits for the answer."""


class Exchange:
    """A request and the way to answer it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._started = False
        self._streaming = False

    # --- the request

    def header(self, name: bytes) -> bytes | None:
        """The value of a header. Raises HttpError 400 when it is given twice."""
        values = [value for key, value in self._scope["headers"] if key == name]
        if len(values) > 1:
            raise HttpError(400, f"the header {name.decode()} is given {len(values)} times")
        return values[0] if values else None

    def path_parameter(self, name: str) -> str | None:
        """The part of the path that a route has named."""
        value = self._scope.get("path_params", {}).get(name)
        return None if value is None else str(value)

    async def body(self) -> bytes:
        """The whole body, JSON by its content type. Raises HttpError 400, 408, 413 or 415, or ClientGone."""
        kind = (self.header(b"content-type") or b"application/json").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise HttpError(415, "the content type must be application/json", code="unsupported_media_type")
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > MAX_BODY:
            raise _too_large()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._read_body()
        except TimeoutError:
            raise HttpError(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from None

    async def _read_body(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > MAX_BODY:
                raise _too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    async def while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` to its end, or cancels it and raises ClientGone when the client goes away."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            task.result()
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # --- the answer

    async def answer(
        self, status: int, body: bytes, kind: bytes = b"application/json", headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        self._started = True
        fields = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})
        await self._send({"type": "http.response.body", "body": body})

    async def answer_json(self, value: Any) -> None:
        await self.answer(200, msgspec.json.encode(value))

    async def events(self, *values: Any) -> None:
        """Sends each value as one server-sent event; the first call opens the stream."""
        if not self._streaming:
            self._started = self._streaming = True
            fields = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": fields})
        await self._write(b"".join(b"data: " + msgspec.json.encode(value) + b"\n\n" for value in values), more=True)

    async def end_events(self, last: bytes = b"data: [DONE]\n\n") -> None:
        await self._write(last, more=False)

    async def _write(self, data: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        await self._send(message)

    async def fail(self, error: HttpError) -> None:
        """Answers with the error; in a stream that has begun, with an error event as its last."""
        if self._streaming:
            await self.end_events(b"data: " + error.body() + b"\n\n")
        elif not self._started:
            retry = () if error.retry_after is None else ((b"retry-after", str(error.retry_after).encode()),)
            close = ((b"connection", b"close"),) if error.status == 408 else ()
            await self.answer(error.status, error.body(), headers=(*retry, *close))


class Endpoint:
    """An ASGI application around one handler: whatever goes wrong in it becomes an answer. `refused` hears of each
    error's status.
    """

    def __init__(self, handle: Callable[[Exchange], Awaitable[None]], note_error: Callable[[int], None]) -> None:
        self._handle = handle
        self._note_error = note_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await self._handle(exchange)
        except ClientGone:
            pass
        except HttpError as error:
            await self._fail(exchange, error)
        except BadRequest as error:
            await self._fail(exchange, from_bad_request(error))
        except EngineFailure as error:
            await self._fail(exchange, HttpError(500, str(error), code="engine_failure"))
        except Exception:
            log.exception("a request failed")
            await self._fail(exchange, HttpError(500, "an internal error, see the server's log", code="internal_error"))

    async def _fail(self, exchange: Exchange, error: HttpError) -> None:
        self._note_error(error.status)
        await exchange.fail(error)


class HeaderLimit:
    """Middleware that refuses requests with too many bytes of headers."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and sum(len(key) + len(value) for key, value in scope["headers"]) > MAX_HEADERS:
            await Exchange(scope, receive, send).fail(
                HttpError(431, f"the headers hold more than {MAX_HEADERS} bytes", code="headers_too_large")
            )
            return
        await self._app(scope, receive, send)


def _too_large() -> HttpError:
    return HttpError(413, f"the body holds more than {MAX_BODY} bytes", code="body_too_large")
