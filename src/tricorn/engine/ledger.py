"""What has been promised: the live requests, the ids that were sent for each, and who comes back when the engine dies.

A death counts against the requests that were in the step that died and had not brought a token since the engine
started. One that three deaths count against in a row is ended: a token proves that a request is not what kills the
engine. So that no innocent comes to that, one that the next death would end is tried alone: it is sent first, and all
others wait until it has brought a token.

Plain data, no clock and no threads: whoever calls has the lock, if there is to be one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from tricorn.request import Output, Request

MOST_DEATHS = 3


@dataclass(slots=True)
class _Entry:
    request: Request
    ids: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    """What the first engine said."""
    scored: bool = False
    """The prompt's logprobs have been delivered."""
    heard: int = 0
    """When its last token came, in outputs of all requests."""
    lives: int = 0
    """Engines that it was sent to."""
    deaths: int = 0
    """Deaths that count against it, since its last token."""
    aborted: bool = False


class Ledger:
    """The live requests in order of arrival. Every request that was opened ends exactly once: with an output of `note`,
    of `abort`, or of `died`."""

    def __init__(self) -> None:
        self._live: dict[str, _Entry] = {}
        self._unsent: dict[str, _Entry] = {}
        self._unproven: set[str] = set()
        """Of those sent, the ones that this engine has brought no token of."""
        self._trial: str | None = None
        """The suspect that the engine has now."""
        self._heard = 0
        self.resumed = 0
        """How often a request was sent to an engine again."""
        self.dropped = 0
        """Requests ended for three deaths."""

    def __len__(self) -> int:
        return len(self._live)

    def open(self, request: Request) -> None:
        """A new request, to be sent when `due` says so."""
        entry = _Entry(request)
        self._live[request.id] = self._unsent[request.id] = entry

    def due(self) -> list[Request]:
        """What is to be sent to the engine now; it counts as sent from here on. To be asked when an engine is there,
        after `open`, `note` and `abort`. Streams under way come first, the one that has been silent longest before the
        others, so that deaths in quick succession starve none; the rest follow in order of arrival."""
        if not self._unsent or self._trial is not None:
            return []
        held = list(self._unsent.values())
        suspect = next((entry for entry in held if entry.deaths == MOST_DEATHS - 1), None)
        if suspect is not None:
            self._trial = suspect.request.id
            return [self._send(suspect)]
        held.sort(key=lambda entry: (not entry.ids, entry.heard))
        return [self._send(entry) for entry in held]

    def note(self, outputs: list[Output]) -> list[Output]:
        """Takes in what the engine says; gives what the clients are to hear."""
        return [self._note(self._live[output.id], output) for output in outputs if output.id in self._live]

    def abort(self, id: str) -> Output | None:
        """Gives up a request, which is never sent again. Its last output, if the engine has not got it; otherwise the
        engine is to be told, and its last output comes from there. Unknown ids are ignored."""
        entry = self._live.get(id)
        if entry is None:
            return None
        entry.aborted = True
        if id not in self._unsent:
            return None
        del self._live[id], self._unsent[id]
        return _as_first(entry, Output(id=id, token_ids=[], finish_reason="abort"))

    def died(self, present: Collection[str] | None = None) -> list[Output]:
        """The engine is no more: the outputs of requests that end here. The others are due again, with the ids that
        were sent for them. `present` are the requests in the step that died, None when that is not known: then all
        that the engine had count."""
        ended: list[Output] = []
        for id, entry in list(self._live.items()):
            if id in self._unproven and (present is None or id in present):
                entry.deaths += 1
            if entry.aborted:
                ended.append(_as_first(entry, Output(id=id, token_ids=[], finish_reason="abort")))
            elif entry.deaths >= MOST_DEATHS:
                self.dropped += 1
                message = f"the engine died {MOST_DEATHS} times with this request before it could bring a token"
                ended.append(_as_first(entry, Output(id=id, token_ids=[], finish_reason="error", error=message)))
            else:
                continue
            del self._live[id]
        self._unsent = dict(self._live)
        self._unproven.clear()
        self._trial = None
        return ended

    def _send(self, entry: _Entry) -> Request:
        request = entry.request
        del self._unsent[request.id]
        self._unproven.add(request.id)
        entry.lives += 1
        self.resumed += entry.lives > 1
        if not entry.ids:
            return request
        params = msgspec.structs.replace(request.params, prompt_logprobs=None) if entry.scored else request.params
        return msgspec.structs.replace(request, params=params, resume=list(entry.ids))

    def _note(self, entry: _Entry, output: Output) -> Output:
        id, ended = output.id, output.finish_reason is not None
        entry.ids += output.token_ids
        self._heard += 1
        entry.heard = self._heard if output.token_ids else entry.heard
        entry.scored |= output.prompt_logprobs is not None
        if entry.cached_tokens is None:
            entry.cached_tokens = output.cached_tokens
        if output.token_ids or ended:
            entry.deaths = 0
            self._unproven.discard(id)
            if self._trial == id:
                self._trial = None
        if ended:
            del self._live[id]
            self._unsent.pop(id, None)
        return output if entry.lives < 2 else _as_first(entry, output)


def _as_first(entry: _Entry, output: Output) -> Output:
    """What a later engine says, as the first would have put it. The times of several lives make no sense together."""
    return msgspec.structs.replace(output, cached_tokens=entry.cached_tokens or 0, timings=None)
