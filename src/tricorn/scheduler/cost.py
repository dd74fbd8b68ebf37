"""What a step costs: a linear model of its time, fitted to the steps of late.

Time is taken to be a constant, plus so much for each prompt token, for each pair of a prompt token and a token before
it, for each decoding sequence, and for each token before those. The fit minimizes relative errors by least squares, and
once more without the worst steps, since a step that the system has interrupted says nothing.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

KEPT = 128
"""Steps remembered of each kind, with prompts and without."""

REFIT = 32
"""A new fit after so many new steps, or when there are twice as many as at the last one."""

LEAST_STEPS = 8
LEAST_TOKENS = 128
"""Nothing is known before so many steps, and so many prompt tokens, have been seen."""

OUTLIER = 3.0
"""A step counts as disturbed when its error is above so many times the median one."""


class Work(msgspec.Struct, frozen=True):
    """What a step has to do: `prefill_pairs` and `decode_pairs` count the tokens before each row."""

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    decode_rows: int = 0
    decode_pairs: int = 0


class Cost(msgspec.Struct, frozen=True):
    """Seconds: of any step, and for each unit of work."""

    step: float
    prefill_token: float
    prefill_pair: float
    decode_row: float
    decode_pair: float

    def seconds(self, work: Work) -> float:
        return self.step + float(_row(work)[1:] @ msgspec.structs.astuple(self)[1:])

    def prefill_seconds(self, start: int, tokens: int) -> float:
        """What `tokens` more prompt tokens at position `start` add to a step."""
        return tokens * self.prefill_token + tokens * (start + tokens / 2) * self.prefill_pair

    def prefill_within(self, start: int, seconds: float) -> int:
        """How many prompt tokens at position `start` add at most so much to a step."""
        if seconds <= 0:
            return 0
        linear = self.prefill_token + start * self.prefill_pair
        root = linear + math.sqrt(linear * linear + 2 * self.prefill_pair * seconds)
        return int(min(2 * seconds / root, 1 << 30)) if root > 0 else 1 << 30


class CostModel:
    """Learns a Cost from steps; `cost` is None until there are enough."""

    def __init__(self) -> None:
        self.cost: Cost | None = None
        self._rows = np.zeros((2, KEPT, 5))
        self._seconds = np.zeros((2, KEPT))
        self._seen = [0, 0]
        self._prefilled = 0
        self._due = LEAST_STEPS

    def observe(self, work: Work, seconds: float) -> None:
        """A step with this work took so long."""
        kind = int(work.prefill_tokens > 0)
        place = self._seen[kind] % KEPT
        self._rows[kind, place] = _row(work)
        self._seconds[kind, place] = max(seconds, 1e-9)
        self._seen[kind] += 1
        self._prefilled += work.prefill_tokens
        if sum(self._seen) >= self._due and self._prefilled >= LEAST_TOKENS:
            self._due = sum(self._seen) + min(sum(self._seen), REFIT)
            self._fit()

    def _fit(self) -> None:
        counts = [min(seen, KEPT) for seen in self._seen]
        rows = np.concatenate([self._rows[kind, :count] for kind, count in enumerate(counts)])
        seconds = np.concatenate([self._seconds[kind, :count] for kind, count in enumerate(counts)])
        relative = rows / seconds[:, None]
        cost = _least_squares(relative)
        error = np.abs(relative @ cost - 1)
        good = error <= OUTLIER * max(float(np.median(error)), 0.01)
        self.cost = Cost(*_least_squares(relative[good]).tolist())


def _row(work: Work) -> F64:
    return np.array([1, work.prefill_tokens, work.prefill_pairs, work.decode_rows, work.decode_pairs], np.float64)


def _least_squares(relative: F64) -> F64:
    """Coefficients, none negative, such that relative @ coefficients is near 1: those that come out negative are left
    out, the worst first."""
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-30)
    used = np.ones(5, np.bool_)
    coefficients = np.zeros(5)
    while used.any():
        solved = np.linalg.lstsq(relative[:, used] / scale[used], np.ones(len(relative)), rcond=1e-6)[0]
        if solved.min() >= 0:
            coefficients[used] = solved / scale[used]
            break
        used[np.flatnonzero(used)[int(solved.argmin())]] = False
    return coefficients
