"""How a route is registered: one `Operation` each, which states who may use it and what it reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tricorn.server.exchange import Exchange
from tricorn.server.guard import Access

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True)
class Operation:
    """A method and a path, their handler, and who may use them. For the API's description: `about` says in a line what
    it does, `reads` has the structs that read its JSON body, `gives` is the media type of its answer.
    """

    method: str
    path: str
    handle: Handler
    access: Access
    about: str = ""
    reads: tuple[type, ...] = ()
    gives: str = "application/json"


Routes = tuple[Operation, ...]
