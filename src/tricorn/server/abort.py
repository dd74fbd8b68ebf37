"""POST /debug/abort: the operator ends one generation, whatever protocol asked for it.

Its client gets an error of status 403, or, in a stream that has begun, such an error as the last event. Clients ask
again by themselves after 408, 409, 429 and 5xx; what an operator has ended must not come back, so it is none of these.
"""

from __future__ import annotations

import msgspec

from tricorn.server.bodies import decode
from tricorn.server.errors import HttpError, printable
from tricorn.server.exchange import Exchange
from tricorn.server.generation import Generations
from tricorn.server.routes import Operation, Routes


class Abort(msgspec.Struct, frozen=True):
    """Names a live generation, as /debug/state does: by its `id`, or, where several share one, by its `number`."""

    id: str | None = None
    number: int | None = None


_abort = msgspec.json.Decoder(Abort)


class Aborts:
    """The handler."""

    def __init__(self, work: Generations) -> None:
        self._work = work

    @property
    def routes(self) -> Routes:
        return (Operation("POST", "/debug/abort", self.abort, "admin", "End a generation", (Abort,)),)

    async def abort(self, exchange: Exchange) -> None:
        body = await exchange.body()
        if exchange.header(b"content-type") is None:
            # Pages of any origin may send a body of no type to a server on this machine. JSON they must ask for.
            raise HttpError(415, "the content type must be application/json", code="unsupported_media_type")
        ended = self._find(decode(_abort, body))
        ended.cut(HttpError(403, "the operator of this server has ended this request", code="aborted"))
        await exchange.answer_json({"aborted": {"id": ended.entry.id, "number": ended.entry.number}})

    def _find(self, wanted: Abort) -> Exchange:
        """Raises HttpError 400, 404 or 409."""
        if (wanted.id is None) == (wanted.number is None):
            raise HttpError(400, "name the request by its id or by its number", "id", "invalid_value")
        if wanted.number is not None:
            found = [each for each in self._work.running if each.entry.number == wanted.number]
        else:
            found = [each for each in self._work.running if each.entry.id == wanted.id]
        if not found:
            named = wanted.number if wanted.id is None else repr(printable(wanted.id, 80))
            raise HttpError(404, f"no generation {named} is under way: GET /debug/state lists them", code="not_found")
        if len(found) > 1:
            numbers = ", ".join(str(each.entry.number) for each in found[:10])
            raise HttpError(409, f"{len(found)} generations have this id: name one by number ({numbers})", "id")
        return found[0]
