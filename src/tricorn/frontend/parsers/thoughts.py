"""What models think aloud before they answer: which markers they use, and how an answer is taken apart."""

from __future__ import annotations

from typing import NamedTuple

from tricorn.frontend.stop import StopMatcher


class Markers(NamedTuple):
    """What a thought is written between."""

    begin: str
    end: str


THINK = Markers("<think>", "</think>")
"""DeepSeek R1, Qwen 3, and most others."""

MISTRAL = Markers("[THINK]", "[/THINK]")


def markers_of(template: str) -> Markers | None:
    """What a chat template says of thoughts; None when it knows none."""
    return next((markers for markers in (THINK, MISTRAL) if markers.end in template), None)


class ThoughtReader:
    """Splits a text, as it comes, into the thought at its beginning and the rest. `open`: the prompt has begun it.

    Blanks around the thought belong to neither part. A thought whose end does not come is all there is.
    """

    def __init__(self, markers: Markers, *, open: bool) -> None:
        self._begin = markers.begin
        self._end = StopMatcher((markers.end,))
        self._end_length = len(markers.end)
        self._state = "opening" if open else "before"
        self._rest = ""

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """(thought, rest) of what `text` brings; `last` when nothing follows."""
        self._rest += text
        thought = ""
        if self._state == "before":
            self._before(last)
        if self._state == "opening" and (self._rest.strip() or last):
            self._rest = self._rest.lstrip()
            self._read = 0
            self._state = "thinking"
        if self._state == "thinking":
            thought = self._think(last)
        if self._state == "behind":
            self._rest = self._rest.lstrip()
            if self._rest:
                self._state = "answer"
        if self._state != "answer":
            return thought, ""
        rest, self._rest = self._rest, ""
        return thought, rest

    def _before(self, last: bool) -> None:
        begun = self._rest.lstrip()
        if begun.startswith(self._begin):
            self._rest = begun[len(self._begin) :]
            self._state = "opening"
        elif last or not self._begin.startswith(begun):
            self._state = "answer"

    def _think(self, last: bool) -> str:
        """Takes the thought out of `_rest`; what may be its end, or blanks before it, waits."""
        found = self._end.push(self._rest[self._read :])
        if found is not None:
            after = self._read + found[0]
            thought, self._rest = self._rest[: after - self._end_length].rstrip(), self._rest[after:]
            self._state = "behind"
            return thought
        sure = len(self._rest) if last else len(self._rest) - self._end.held
        thought = self._rest[:sure] if last else self._rest[:sure].rstrip()
        self._rest = self._rest[len(thought) :]
        self._read = len(self._rest)
        return thought
