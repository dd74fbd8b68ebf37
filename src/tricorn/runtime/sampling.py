"""From logits to tokens, in NumPy: what the native sampler does, written to be read.

Order: penalties, bias, mask, temperature, top-k, top-p, min-p, draw. Ties go to the lower id. Sums are float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tricorn.runtime.random import uniform
from tricorn.runtime.step import F32, I32, Sampling, StepResult

F64 = NDArray[np.float64]
IDS = NDArray[np.intp]

GREEDY_BELOW = 1e-5
"""Temperatures below this are taken as 0."""


@dataclass(frozen=True, slots=True)
class Report:
    """The raw distribution of a row, seen from one id."""

    logprob: float
    rank: int
    top_ids: IDS
    top_logprobs: F64


def sample(logits: F32, sampling: Sampling, history_ids: I32) -> StepResult:
    """Chooses a token for each row of `logits` [R, V]. `history_ids` is `sampling`'s with no negative ids left."""
    count = len(logits)
    alternatives = min(max(0, int(sampling.logprobs.max(initial=-1))), logits.shape[1])
    ids = np.full(count, -1, np.int32)
    logprob, rank = np.zeros(count, np.float32), np.zeros(count, np.int32)
    top_ids = np.full((count, alternatives), -1, np.int32)
    top_logprobs = np.full((count, alternatives), -np.inf, np.float32)
    for row in range(count):
        scored = sampling.target[row] >= 0
        ids[row] = sampling.target[row] if scored else choose(logits[row], sampling, history_ids, row)
        if sampling.logprobs[row] < 0 or ids[row] < 0:
            continue
        report = describe(logits[row], int(ids[row]), int(sampling.logprobs[row]))
        logprob[row], rank[row] = report.logprob, report.rank
        top_ids[row, : len(report.top_ids)] = report.top_ids
        top_logprobs[row, : len(report.top_ids)] = report.top_logprobs
    return StepResult(ids, logprob, rank, top_ids, top_logprobs)


def scoring(rows: I32, targets: I32 | None = None, alternatives: int = 0) -> Sampling:
    """Sampling that chooses greedily in `rows`, or reports the logprobs of `targets`; nothing else is set."""
    count = len(rows)

    def full(value: float, kind: Any = np.float32) -> Any:
        return np.full(count, value, kind)

    return Sampling(
        rows=rows.astype(np.int32),
        target=full(-1, np.int32) if targets is None else targets.astype(np.int32),
        temperature=full(0),
        top_k=full(0, np.int32),
        top_p=full(1),
        min_p=full(0),
        repetition=full(1),
        presence=full(0),
        frequency=full(0),
        seed=full(0, np.uint64),
        position=full(0, np.int32),
        logprobs=full(alternatives, np.int32),
        bias_start=np.zeros(count + 1, np.int32),
        bias_ids=np.zeros(0, np.int32),
        bias_values=np.zeros(0, np.float32),
        history_start=np.zeros(count + 1, np.int32),
        history_ids=np.zeros(0, np.int32),
        history_prompt=full(0, np.int32),
        mask_index=full(-1, np.int32),
        mask=np.zeros((0, 0), np.uint32),
    )


def describe(logits: F32, token: int, alternatives: int) -> Report:
    """The logprob and rank of `token` under the raw logits [V], and the best `alternatives`."""
    top = logits.max()
    logprobs = logits.astype(np.float64) - (float(top) + np.log(np.exp(logits - top, dtype=np.float64).sum()))
    ties_before = np.count_nonzero(logits[:token] == logits[token])
    rank = 1 + np.count_nonzero(logits > logits[token]) + ties_before
    best = by_rank(logits)[:alternatives] if alternatives else np.zeros(0, np.intp)
    return Report(float(logprobs[token]), int(rank), best, logprobs[best])


def by_rank(logits: F32) -> IDS:
    """Ids from the best logit to the worst, the lower id first where they are equal."""
    return np.argsort(-logits, kind="stable")


def choose(logits: F32, sampling: Sampling, history_ids: I32, row: int) -> int:
    """The token that row `row` of a batch chooses from its raw logits [V]; -1 when everything is banned."""
    work = penalized(logits, sampling, history_ids, row)
    if work.max() == -np.inf:
        return -1
    temperature, top_k = float(sampling.temperature[row]), int(sampling.top_k[row])
    if temperature < GREEDY_BELOW or top_k == 1:
        return int(work.argmax())
    chances = np.exp((work - work.max()).astype(np.float64) / temperature)
    order = kept(work, chances, top_k, float(sampling.top_p[row]))
    order = order[chances[order] >= float(sampling.min_p[row])]  # the best chance is 1
    cumulative = np.cumsum(chances[order])
    target = uniform(int(sampling.seed[row]), int(sampling.position[row])) * cumulative[-1]
    return int(order[np.searchsorted(cumulative, target, side="right")])


def penalized(logits: F32, sampling: Sampling, history_ids: I32, row: int) -> F32:
    """A copy of the logits after penalties, bias and mask."""
    work = logits.copy()
    history = history_ids[sampling.history_start[row] : sampling.history_start[row + 1]]
    output = history[sampling.history_prompt[row] :]
    seen = np.unique(history)
    work[seen] = np.where(work[seen] > 0, work[seen] / sampling.repetition[row], work[seen] * sampling.repetition[row])
    said, times = np.unique(output, return_counts=True)
    work[said] -= sampling.frequency[row] * times.astype(np.float32)
    work[said] -= sampling.presence[row]
    bias = slice(sampling.bias_start[row], sampling.bias_start[row + 1])
    np.add.at(work, sampling.bias_ids[bias], sampling.bias_values[bias])
    if sampling.mask_index[row] >= 0:
        words = sampling.mask[sampling.mask_index[row]]
        ids = np.arange(len(work))
        work[(words[ids // 32] >> (ids % 32).astype(np.uint32) & 1) == 0] = -np.inf
    return work


def kept(work: F32, chances: F64, top_k: int, top_p: float) -> IDS:
    """The ids that pass top-k and top-p, in the order in which they are drawn: by rank if either cuts, else by id."""
    cuts = 0 < top_k < len(work)
    if not cuts and top_p >= 1:
        return np.arange(len(work))
    order = by_rank(work)
    order = order[:top_k] if cuts else order
    if top_p < 1:
        cumulative = np.cumsum(chances[order])
        order = order[: 1 + np.searchsorted(cumulative, top_p * cumulative[-1], side="left")]
    return order
