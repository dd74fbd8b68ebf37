"""What a sequence must not say: ids that are not on its list, and words, each a sequence of ids.

All of it is a mask over the next id. Which id would complete a word depends on the ids just before it, so the mask of a
step can be made only when the step before has ended, as those of constraints: the two are made together (see guides).
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from tricorn.request import Request
from tricorn.scheduler.limits import Limits

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]


class Bans:
    """The bans of one sequence."""

    __slots__ = ("_allowed", "_words")

    def __init__(self, request: Request, limits: Limits) -> None:
        allowed = request.params.allowed_token_ids
        bits = np.zeros(-(-limits.vocab // 32) * 32, np.uint8)
        bits[list(allowed) if allowed else slice(limits.vocab)] = 1
        bits[list(limits.undecodable)] = 0
        bits[[word[0] for word in request.banned if len(word) == 1]] = 0
        self._allowed: U32 = np.packbits(bits, bitorder="little").view(np.uint32)
        self._words: dict[int, list[tuple[I32, int]]] = defaultdict(list)
        """All but the last id of each longer word, and that, by the last but one."""
        for word in request.banned:
            if len(word) > 1:
                self._words[word[-2]].append((np.array(word[:-1], np.int32), word[-1]))

    def line(self, said: I32, row: U32 | None) -> U32:
        """What may follow the ids [n] that the sequence has said, as bits; `row` is what else it is bound to."""
        line = self._allowed.copy() if row is None else self._allowed & row
        for begun, last in self._words.get(int(said[-1]), ()) if len(said) else ():
            if np.array_equal(said[-len(begun) :], begun):
                line[last // 32] &= ~(np.uint32(1) << np.uint32(last % 32))
        return line


def bans(request: Request, limits: Limits) -> Bans | None:
    """None when it has none."""
    return Bans(request, limits) if request.params.allowed_token_ids or request.banned else None
