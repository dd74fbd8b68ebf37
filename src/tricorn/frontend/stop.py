"""Stop strings: found as the text streams, whatever the token borders, with only as much held back as could still be
one.

The stop whose last character comes first ends the text; when two end at the same character, the one that began first
counts. Each stop has a Knuth-Morris-Pratt automaton (Knuth, Morris, Pratt 1977): its state is the length of the
longest prefix of the stop that the text now ends with, so a character costs a constant time per stop and the largest
state is what to hold back.
"""

from __future__ import annotations

from functools import lru_cache


class StopMatcher:
    """Watches one text for the strings in `stops`, none of them empty."""

    __slots__ = ("_failures", "_states", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._failures = _failure_tables(stops)
        self._states = [0] * len(stops)

    @property
    def held(self) -> int:
        """How many characters at the end of the text so far may be the beginning of a stop."""
        return max(self._states, default=0)

    def push(self, text: str, *, armed: bool = True) -> tuple[int, str] | None:
        """Reads on. Gives (how many characters of `text` were read, the stop that they completed), or None when all of
        it was read.

        While not `armed` a complete stop is passed over.
        """
        for place, letter in enumerate(text):
            complete = self._step(letter)
            if complete and armed:
                return place + 1, complete
        return None

    def _step(self, letter: str) -> str | None:
        complete: str | None = None
        states = self._states
        for index, stop in enumerate(self._stops):
            state = states[index]
            failure = self._failures[index]
            while state and stop[state] != letter:
                state = failure[state - 1]
            if stop[state] == letter:
                state += 1
            if state == len(stop):
                if complete is None or len(stop) > len(complete):
                    complete = stop
                state = failure[state - 1]
            states[index] = state
        return complete


@lru_cache(maxsize=256)
def _failure_tables(stops: tuple[str, ...]) -> list[list[int]]:
    return [_failures(stop) for stop in stops]


def _failures(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = table[length - 1]
        if stop[place] == stop[length]:
            length += 1
        table[place] = length
    return table
