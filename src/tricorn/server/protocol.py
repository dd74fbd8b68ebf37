"""HTTP/1.1 for uvicorn, with the head of a request bounded while it arrives and with errors as JSON."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tricorn.server.errors import HttpError
from tricorn.server.exchange import MAX_HEADERS, new_request_id

HEAD_SECONDS = 20.0
"""How long a client may take from its connection, or the first byte of a further request, to the end of the head."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol keeps a header of any length in memory until it ends, and waits for it as long as it takes;
    this one gives up with 431 and 408.
    """

    _head = 0
    """Bytes received since the last head was complete."""
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_no_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        if self._patience is None:
            self._expect_head()
        super().on_message_begin()

    def _expect_head(self) -> None:
        self._patience = self.loop.call_later(HEAD_SECONDS, self._lose_patience)

    def _expect_no_head(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        self._patience = None
        if self.transport.is_closing():
            return
        if self._head and (self.cycle is None or self.cycle.response_complete):
            message = f"the headers did not arrive within {HEAD_SECONDS:.0f} seconds"
            self._refuse(HttpError(408, message, code="headers_timeout"))
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._head += len(data)
        super().data_received(data)
        if self._head > 2 * MAX_HEADERS and not self.transport.is_closing():
            self._refuse(HttpError(431, f"the headers hold more than {MAX_HEADERS} bytes", code="headers_too_large"))

    def eof_received(self) -> None:
        """A client that ends in the middle of its request hears so; one that ends after it no longer waits."""
        cycle = self.cycle
        if self._head or (cycle is not None and cycle.more_body and not cycle.response_started):
            self._refuse(HttpError(400, "the connection ended before the request did", code="incomplete_request"))

    def on_headers_complete(self) -> None:
        self._head = 0
        self._expect_no_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HttpError(400, "this is not valid HTTP/1.1", code="invalid_http"))

    def _refuse(self, error: HttpError) -> None:
        body = error.body()
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: %s\r\nconnection: close\r\n\r\n"
            % (len(body), new_request_id().encode())
        )
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
