"""What can be wrong with a request, told apart so that a server can answer each with its own status."""

from __future__ import annotations

from tricorn.request import TricornError


class BadRequest(TricornError):
    """The request itself is at fault. `param` names the field, `code` the kind of fault (machine-readable)."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineFailure(TricornError):
    """The engine could not finish a request; the client may try again."""
