"""Admission: which pages the running requests may still come to need.

A request has the pages of its known tokens when it is admitted, and takes one more at a time. "guaranteed" reckons with
the most that each may take, so that none is ever preempted. "expected" reckons with as many tokens as outputs of late
had, given how long each is already, and with the pages that come back when the shorter ones end (the idea is the
Past-Future scheduler's: Gong et al., 2025). When it is wrong and preempts, it closes until usage has fallen. "none"
reckons with nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tricorn.runtime.step import PAGE
from tricorn.scheduler.options import Admission

I32 = NDArray[np.int32]

KEPT = 512
"""Outputs remembered."""

PRIOR = np.full(16, 256, np.int32)
"""What outputs are taken to be like before there are any."""

REOPEN = 0.8
"""After a preemption, nothing is admitted before the share of pages in use has fallen to this."""


class Outlook:
    """Looks ahead for the scheduler. All arrays have one place per sequence."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._lengths = np.concatenate([PRIOR, np.zeros(KEPT - len(PRIOR), np.int32)])
        self._seen = len(PRIOR)
        self._sorted: I32 | None = None
        self._closed = False

    def ended(self, outputs: int) -> None:
        """An output of so many tokens is complete."""
        self._lengths[self._seen % KEPT] = outputs
        self._seen += 1
        self._sorted = None

    def preempted(self) -> None:
        self._closed = self._admission == "expected"

    def closed(self, held: int, total: int) -> bool:
        self._closed = self._closed and held > REOPEN * total
        return self._closed

    def peak(self, held: int, length: I32, most: I32, outputs: I32, pages: I32, own: I32) -> int:
        """The most pages that will be held, of which `held` are now.

        `length` is how many tokens each sequence has, `most` how many it may come to have, `outputs` how many of them
        it has sampled, `pages` how many pages it has, and `own` how many of them nobody else holds.
        """
        if self._admission == "none":
            return held
        remaining = most - length
        if self._admission == "guaranteed":
            return held + int(np.maximum(_pages(most) - pages, 0).sum())
        remaining = np.minimum(remaining, self._remaining(outputs))
        times = remaining[:, None]
        growth = np.maximum(_pages(length + times) - pages, 0)
        return held + int(np.where(remaining >= times, growth, -own).sum(axis=1).max(initial=0))

    def _remaining(self, outputs: I32) -> I32:
        """How many more tokens to expect of outputs that are so long already: the mean of the longer ones seen, and as
        many again when none was longer."""
        if self._sorted is None:
            self._sorted = np.sort(self._lengths[: min(self._seen, KEPT)])
        lengths = self._sorted
        longer = np.searchsorted(lengths, outputs, side="right")
        count = len(lengths) - longer
        sums = np.concatenate([np.cumsum(lengths[::-1])[::-1], [0]])[longer]
        mean = sums / np.maximum(count, 1)
        return np.ceil(np.where(count > 0, mean - outputs, np.maximum(outputs, 1))).astype(np.int32)


def _pages(tokens: I32) -> I32:
    return -(-tokens // PAGE)
