"""Errors as the OpenAI API writes them: a status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import msgspec

from tricorn.frontend.errors import BadRequest

TYPES = {
    400: "invalid_request_error",
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
    """Ends a request with this status. `param` names the field at fault, `retry_after` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": TYPES.get(self.status, "server_error"),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


def from_bad_request(error: BadRequest) -> HttpError:
    """The client's fault, found by the frontend."""
    return HttpError(400, str(error), error.param, error.code)


def printable(text: str, limit: int = 400) -> str:
    """A client's words inside a message of ours: one bounded line that is valid UTF-8."""
    line = text.encode("utf-8", "replace").decode().replace("\n", " ")
    return line if len(line) <= limit else line[:limit] + "…"
