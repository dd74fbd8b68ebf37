"""Errors as the OpenAI API writes them: a status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from tricorn.engine.gate import Refused
from tricorn.frontend.errors import BadRequest

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "unavailable_error",
}


class HttpError(Exception):
    """Ends a request with this status. `param` names the field at fault, `retry_after` is in seconds. `close` ends the
    connection too; `reason` tells refusals of one status apart in the metrics.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        *,
        close: bool = False,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.close = close
        self.reason = reason or _reason(status)
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        if retry_after is not None:
            self.headers += ((b"retry-after", b"%d" % max(1, math.ceil(retry_after))),)
        if close:
            self.headers += ((b"connection", b"close"),)

    def fields(self) -> dict[str, Any]:
        """As the OpenAI API writes it."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        return msgspec.json.encode(self.fields())


def too_late() -> HttpError:
    """The deadline passed while a request waited."""
    return HttpError(408, "the request's time was over before it could begin", code="request_timeout")


def from_refused(error: Refused) -> HttpError:
    """No room now; the gate knows for how long."""
    return HttpError(429, str(error), code="overloaded", retry_after=error.retry_after, reason=error.reason)


def from_bad_request(error: BadRequest) -> HttpError:
    """The client's fault, found by the frontend."""
    return HttpError(400, str(error), error.param, error.code)


def _reason(status: int) -> str | None:
    """Under which name a refusal is counted; None for what is none."""
    return "unavailable" if status == 503 else "invalid" if 400 <= status < 500 else None


def printable(text: str, limit: int = 400) -> str:
    """A client's words inside a message of ours: one bounded line that is valid UTF-8."""
    line = text.encode("utf-8", "replace").decode().replace("\n", " ")
    return line if len(line) <= limit else line[:limit] + "…"
