"""What a server says before its engine is there."""

from __future__ import annotations

from contextlib import suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from tricorn.server.errors import HttpError
from tricorn.server.exchange import ClientGone, Exchange

RETRY_SECONDS = 1


class Door:
    """The application that is served from the first moment on: until `app` is set, only health."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        if scope["path"] in ("/health", "/v2/health/live"):
            await exchange.answer_json({"status": "ok"})
        elif scope["path"] in ("/ready", "/v2/health/ready"):
            await answer_ready(exchange, "loading")
        else:
            with suppress(HttpError, ClientGone):
                await exchange.body()  # a client that is still sending hears no answer
            await exchange.fail(
                HttpError(503, "the model is being loaded", code="loading", retry_after=RETRY_SECONDS, close=True)
            )


async def answer_ready(exchange: Exchange, status: str) -> None:
    """200 for "ready", else 503; the body says which."""
    if status == "ready":
        await exchange.answer_json({"status": status})
    else:
        await exchange.answer_json({"status": status}, 503, ((b"retry-after", b"%d" % RETRY_SECONDS),))
