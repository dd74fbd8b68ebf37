"""An executor whose KV cache holds 64-bit fingerprints, so that any scheduling or paging mistake changes the output.

What a token leaves in the cache depends on every id before it and on its position. The id sampled after it depends on
what lies in all pages of its sequence, in order, read through the page table, and on every sampling column. `Answer`
computes the same from the prompt alone, with no pages. All arithmetic is modulo 2**64.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tricorn.request import FinishReason, Pooling, Request, SamplingParams, TricornError
from tricorn.runtime.step import I32, PAGE, U8, U64, Sampling, Step, StepResult
from tricorn.simulate.clock import VirtualClock

Score = tuple[float, int, list[int], list[float]]
"""A logprob, its rank, and the ids and logprobs of the alternatives."""

VOCAB = 97
_MASK = 2**64 - 1
_A, _B, _C, _D, _E = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F
_UA, _UB, _UC, _UD, _UE = (np.uint64(value) for value in (_A, _B, _C, _D, _E))
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)
_WEIGHTS = np.random.default_rng(1).integers(0, 2**63, 1 << 17, np.uint64) * np.uint64(2) + np.uint64(1)
_COLUMNS: list[int] = _WEIGHTS[-7:].tolist()


def _mix(z: U64) -> U64:
    z = (z ^ (z >> _30)) * _UB
    z = (z ^ (z >> _27)) * _UC
    return np.asarray(z ^ (z >> _31))


def _mix_one(z: int) -> int:
    z = ((z ^ (z >> 30)) * _B) & _MASK
    z = ((z ^ (z >> 27)) * _C) & _MASK
    return z ^ (z >> 31)


def _keys(tokens: I32, positions: I32) -> U64:
    return _mix(tokens.astype(np.uint64) * _UA + positions.astype(np.uint64) * _UD + _UE)


def _biased(mixed: int, bias: dict[int, float]) -> int:
    """The id that is sampled under a bias; -inf bans."""
    for i, value in sorted(bias.items()):
        if value > -np.inf:
            mixed = _mix_one(mixed ^ (hash((i, value)) & _MASK))
    token = mixed % VOCAB
    while bias.get(token) == -np.inf:
        token = (token + 1) % VOCAB
    return token


def _score(print_: int, token: int, count: int) -> Score:
    mixed = _mix_one(print_ ^ token)
    tops = [_mix_one(print_ + i) % VOCAB for i in range(count)]
    return -(mixed >> 50) / 1024, mixed % VOCAB + 1, tops, [-i / 8 for i in range(count)]


class Answer:
    """What an engine must answer to a request, whatever runs beside it, one token at a time. `reason` is None until the
    last."""

    def __init__(self, request: Request, context: int, eos: Iterable[int]) -> None:
        p = request.params
        self.reason: FinishReason | None = None
        self.limit = min(p.max_tokens, context - len(request.prompt))
        self._request = request
        self._stops = set(p.stop_token_ids) | (set() if p.ignore_eos else set(eos))
        self._bias = {i: float(np.float32(v)) for i, v in p.logit_bias.items()}
        self._columns = _columns(request)
        penalized = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
        self._history: list[int] | None = list(request.prompt) if penalized else None
        self._given = 0
        self._position = len(request.prompt)
        self._read(np.array(request.prompt, np.int32))
        if self.limit == 0:
            self.reason = "length"

    def _read(self, tokens: I32) -> None:
        """The state after the prompt: `_prefix` is the sum of all keys, `_full` that of all full pages, weighed, and
        `_open` that of the page begun."""
        positions = np.arange(len(tokens), dtype=np.int32)
        prefix = np.cumsum(_keys(tokens, positions), dtype=np.uint64)
        values = _mix(prefix)
        starts = np.arange(0, len(tokens), PAGE)
        sums = np.add.reduceat(values, starts) * _WEIGHTS[: len(starts)]
        last = len(tokens) % PAGE
        self._prefix = int(prefix[-1])
        self._full = int((sums[:-1] if last else sums).sum(dtype=np.uint64))
        self._open = int(values[len(tokens) - last :].sum(dtype=np.uint64)) if last else 0
        if last:
            self._print = _mix_one((self._full + self._open * int(_WEIGHTS[len(starts) - 1])) & _MASK)
        else:
            self._print = _mix_one(self._full)

    def next(self) -> int:
        """The next token."""
        token = self._sample()
        if token in self._stops:
            self.reason = "stop"
        self._given += 1
        if self.reason is None and self._given == self.limit:
            self.reason = "length"
        return token

    def next_scored(self, count: int) -> tuple[int, Score]:
        """The next token with its logprob and `count` alternatives."""
        print_ = self._print
        token = self.next()
        return token, _score(print_, token, count)

    def _sample(self) -> int:
        position = self._position
        seed = (self._request.seed * _A + position * _D + self._columns) & _MASK
        mixed = _mix_one(self._print ^ seed)
        history = self._history
        if history is not None:
            places = _WEIGHTS[: len(history)]
            total = int(((np.array(history, np.uint64) + np.uint64(1)) * places).sum(dtype=np.uint64))
            mixed = (mixed + total + len(self._request.prompt) * _E) & _MASK
        mixed = _mix_one(mixed)
        bias = self._bias
        if self._given < self._request.params.min_tokens and self._stops:
            bias = bias | dict.fromkeys(self._stops, -np.inf)
        token = _biased(mixed, bias) if bias else mixed % VOCAB
        if history is not None:
            history.append(token)
        self._prefix = (self._prefix + _mix_one((token * _A + position * _D + _E) & _MASK)) & _MASK
        self._open = (self._open + _mix_one(self._prefix)) & _MASK
        total = (self._full + self._open * int(_WEIGHTS[position // PAGE])) & _MASK
        self._print = _mix_one(total)
        self._position = position + 1
        if self._position % PAGE == 0:
            self._full, self._open = total, 0
        return token


def _columns(request: Request) -> int:
    """The hash of a row's sampling columns."""
    p = request.params
    floats = (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    bits: list[int] = np.array(floats, np.float32).view(np.uint32).tolist()
    return sum(a * b for a, b in zip([*bits, max(p.top_k, 0)], _COLUMNS, strict=True)) & _MASK


def prompt_scores(prompt: list[int], count: int) -> list[Score]:
    """What is told of each prompt token but the first."""
    scores = []
    for end in range(1, len(prompt)):
        request = Request(id="", prompt=prompt[:end], params=SamplingParams(), seed=0)
        scores.append(_score(Answer(request, end + 1, ())._print, prompt[end], count))
    return scores


@dataclass
class Expected:
    tokens: list[int]
    logprobs: list[Score]
    prompt_logprobs: list[Score]
    reason: FinishReason
    embedding: bytes | None


def pooled(prompt: list[int], pooling: Pooling) -> bytes:
    """The hidden states of a prompt as one: its fingerprints, as much of each as a float32 holds."""
    positions = np.arange(len(prompt), dtype=np.int32)
    values = _mix(np.cumsum(_keys(np.array(prompt, np.int32), positions), dtype=np.uint64))
    page = positions // PAGE
    sums = np.cumsum(values, dtype=np.uint64)
    opened = sums - (sums - values)[page * PAGE]
    weighed = opened * _WEIGHTS[page]
    full = np.cumsum(np.concatenate([np.zeros(1, np.uint64), weighed[PAGE - 1 :: PAGE]]), dtype=np.uint64)
    states = _mix(full[page] + weighed) >> np.uint64(40)
    wanted = states if pooling == "mean" else states[-1:]
    return np.array([int(wanted.sum()) / len(wanted)], np.float32).tobytes()


def expected(request: Request, context: int, eos: Iterable[int]) -> Expected:
    """The whole answer."""
    p = request.params
    answer = Answer(request, context, eos)
    rows = []
    while answer.reason is None:
        rows.append(answer.next_scored(p.logprobs or 0))
    scores = [] if p.prompt_logprobs is None else prompt_scores(request.prompt, p.prompt_logprobs)
    embedding = None if p.pooling is None else pooled(request.prompt, p.pooling)
    return Expected([token for token, _ in rows], [score for _, score in rows], scores, answer.reason, embedding)


@dataclass
class FakeExecutor:
    """Runs steps in order, each as late as possible: when its result, or a later one's, is asked for.

    `guard(pages, slots)` is called at submission and again at execution, with no slots for pages that are read and with
    the slot of each token that is written; it raises when that is forbidden. `fail_at` holds the numbers of the steps
    that fail half done. With a `clock`, each step takes `seconds(step)`, one after the other.
    """

    pages: int
    max_tokens: int = 64
    max_rows: int = 64
    vocab: int = VOCAB
    page_bytes: int = PAGE * 16
    guard: Callable[[I32, I32], None] | None = None
    fail_at: set[int] = field(default_factory=set)
    clock: VirtualClock | None = None
    seconds: Callable[[Step], float] | None = None
    steps: int = 0
    tokens_run: int = 0
    problem: AssertionError | None = None

    def __post_init__(self) -> None:
        # Of each place: the sum of all keys so far, and that of the values of its page so far. At first, garbage.
        self._kv = np.random.default_rng(0).integers(0, 2**63, (self.pages, 2, PAGE), np.uint64)
        self._queue: deque[_Handle] = deque()
        self._previous = np.zeros(0, np.int32)
        self._busy = 0.0

    def submit(self, step: Step) -> _Handle:
        self._checked(self._inspect, step)
        handle = _Handle(self, step, self.clock() if self.clock else 0.0)
        self._queue.append(handle)
        return handle

    def read_page(self, page: int) -> U8:
        return np.frombuffer(self._kv[page].tobytes(), np.uint8)

    def write_page(self, page: int, data: U8) -> None:
        assert data.dtype == np.uint8
        self._checked(self._untouched, page)
        self._kv[page] = np.ascontiguousarray(data).view(np.uint64).reshape(2, PAGE)

    def _untouched(self, page: int) -> None:
        """Nobody may be using a page that is written from outside."""
        for handle in list(self._queue):
            assert page not in handle.step.pages, "a page is written that a step under way names"
            assert page not in handle.step.copies, "a page is written that a step under way copies"
        if self.guard:
            self.guard(np.full(PAGE, page, np.int32), np.arange(PAGE, dtype=np.int32))

    def close(self) -> None:
        pass

    def run_until(self, handle: _Handle) -> None:
        while handle.outcome is None:
            current = self._queue.popleft()
            try:
                current.outcome = self._checked(self._run, current.step)
            except TricornError as error:
                current.outcome = error
                self._previous = np.zeros(len(current.step.sampling.rows), np.int32)
            if self.clock and self.seconds:
                self._busy = max(self._busy, current.submitted) + self.seconds(current.step)
                self.clock.until(self._busy)

    def _checked(self, call: Callable[[Any], Any], argument: Any) -> Any:
        """An engine lives on when a step raises; `problem` keeps what a test must hear of."""
        try:
            return call(argument)
        except AssertionError as error:
            self.problem = error
            raise

    def _inspect(self, step: Step) -> None:
        positions, row_start, page_start, pages = step.positions, step.row_start, step.page_start, step.pages
        rows = step.sampling.rows
        assert 0 < len(step.token_ids) <= self.max_tokens, "a step has no tokens, or too many"
        assert len(rows) <= self.max_rows, "a step samples too many rows"
        for array in (step.token_ids, positions, row_start, page_start, pages, step.copies):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
        assert row_start[-1] == len(step.token_ids) == len(positions)
        assert len(pages) == page_start[-1]
        count = row_start[1:] - row_start[:-1]
        assert count.min() > 0, "a sequence has no rows"
        assert (rows[1:] > rows[:-1]).all(), "sampled rows are out of order"
        first, last = positions[row_start[:-1]], positions[row_start[1:] - 1]
        assert (page_start[1:] - page_start[:-1] == last // PAGE + 1).all(), "a page table does not fit its positions"
        assert (last - first == count - 1).all(), "positions of a sequence do not follow each other"
        written = self._written(step)
        uses = np.bincount(pages, minlength=self.pages)
        assert (uses[written] == 1).all(), "a page is written that another sequence reads"
        self._guarded(step)

    def _guarded(self, step: Step) -> None:
        if self.guard:
            self.guard(np.concatenate([step.pages, step.copies[:, 0]]), step.pages[:0])
            self.guard(self._written(step), step.positions % PAGE)

    def _written(self, step: Step) -> I32:
        owner = np.repeat(step.page_start[:-1], step.row_start[1:] - step.row_start[:-1])
        pages: I32 = step.pages[owner + step.positions // PAGE]
        return pages

    def _run(self, step: Step) -> StepResult:
        self._guarded(step)
        assert not step.sampling.masks_follow, "the masks of a step have not come"
        self.steps += 1
        self.tokens_run += len(step.token_ids)
        if len(step.copies):
            source, to = step.copies.T
            self._kv[to] = self._kv[source]
        half = len(step.token_ids) // 2 if self.steps in self.fail_at else None
        self._write(step, half)
        if half is not None:
            raise TricornError("the fake executor was told to fail")
        result = self._sample(step.sampling, self._read(step, step.sampling.rows))
        hidden = (self._read(step, step.hidden) >> np.uint64(40)).astype(np.float32)  # as much as a float32 holds
        return replace(result, hidden=hidden[:, None])

    def _write(self, step: Step, most: int | None) -> None:
        """Fills the places of the step's tokens: of all, or of the first `most`."""
        positions, row_start = step.positions, step.row_start
        keys = _keys(self._known(step.token_ids), positions)
        pages, place = self._written(step), positions % PAGE
        begin = row_start[:-1]
        first = positions[begin]
        before = np.maximum(first - 1, 0)
        prefix = self._kv[step.pages[step.page_start[:-1] + before // PAGE], 0, before % PAGE]
        prefix[first == 0] = 0
        inside = self._kv[pages[begin], 1, np.maximum(place[begin] - 1, 0)]
        inside[place[begin] == 0] = 0
        if len(begin) == len(positions):
            prefix = prefix + keys
            sums = inside + _mix(prefix)
        else:
            count = row_start[1:] - begin
            total = np.cumsum(keys, dtype=np.uint64)
            prefix = total + np.repeat(prefix - (total[begin] - keys[begin]), count)
            values = _mix(prefix)
            total = np.cumsum(values, dtype=np.uint64)
            row = np.arange(len(positions), dtype=np.int32)
            start = np.maximum(np.repeat(begin, count), row - place)
            sums = total - (total[start] - values[start])
            sums += np.where(row - place < np.repeat(begin, count), np.repeat(inside, count), np.uint64(0))
        self._kv[pages[:most], 0, place[:most]] = prefix[:most]
        self._kv[pages[:most], 1, place[:most]] = sums[:most]

    def _read(self, step: Step, rows: I32) -> U64:
        """The fingerprint of each of these rows: of all its pages."""
        page_start = step.page_start
        count = page_start[1:] - page_start[:-1]
        index = np.arange(len(step.pages), dtype=np.int32) - np.repeat(page_start[:-1], count)
        total = np.zeros(len(step.pages) + 1, np.uint64)
        np.cumsum(self._kv[step.pages, 1, PAGE - 1] * _WEIGHTS[index], out=total[1:])
        owner = np.searchsorted(step.row_start, rows, side="right") - 1
        position = step.positions[rows]
        page = position // PAGE
        at = page_start[owner] + page
        last = self._kv[step.pages[at], 1, position % PAGE]
        return _mix(total[at] - total[page_start[owner]] + last * _WEIGHTS[page])

    def _known(self, tokens: I32) -> I32:
        unknown = tokens < 0
        if unknown.any():
            tokens = tokens.copy()
            tokens[unknown] = self._previous[-1 - tokens[unknown]]
        assert (tokens < VOCAB).all(), "an id outside the vocabulary"
        return tokens

    def _sample(self, s: Sampling, prints: U64) -> StepResult:
        count = len(s.rows)
        floats = (s.temperature, s.top_p, s.min_p, s.repetition, s.presence, s.frequency)
        bits = np.array(floats, np.float32).reshape(6, count).view(np.uint32)
        columns = np.concatenate([bits, s.top_k[None].view(np.uint32)]).astype(np.uint64)
        hashed = (columns * _WEIGHTS[-7:, None]).sum(axis=0, dtype=np.uint64)
        mixed = _mix(prints ^ (s.seed * _UA + s.position.astype(np.uint64) * _UD + hashed))
        if len(s.history_ids):
            mixed = mixed + self._histories(s)
        mixed = _mix(mixed)
        ids = (mixed % np.uint64(VOCAB)).astype(np.int32)
        if len(s.bias_ids):
            for row in np.flatnonzero(s.bias_start[1:] > s.bias_start[:-1]).tolist():
                ids[row] = _biased(int(mixed[row]), _bias(s, row))
        scored = s.target >= 0
        ids[scored] = s.target[scored]
        self._previous = ids
        return self._scores(s, prints, ids)

    def _histories(self, s: Sampling) -> U64:
        length = s.history_start[1:] - s.history_start[:-1]
        index = np.arange(len(s.history_ids)) - np.repeat(s.history_start[:-1], length)
        total = np.zeros(len(s.history_ids) + 1, np.uint64)
        tokens = self._known(s.history_ids).astype(np.uint64) + np.uint64(1)
        np.cumsum(tokens * _WEIGHTS[index], out=total[1:])
        return total[s.history_start[1:]] - total[s.history_start[:-1]] + s.history_prompt.astype(np.uint64) * _UE

    def _scores(self, s: Sampling, prints: U64, ids: I32) -> StepResult:
        count = len(ids)
        most = max(int(s.logprobs.max(initial=0)), 0)
        logprob, rank = np.zeros(count, np.float32), np.zeros(count, np.int32)
        top_ids = np.full((count, most), -1, np.int32)
        top_logprobs = np.full((count, most), -np.inf, np.float32)
        for row in np.flatnonzero(s.logprobs >= 0).tolist():
            wanted = int(s.logprobs[row])
            logprob[row], rank[row], tops, values = _score(int(prints[row]), int(ids[row]), wanted)
            top_ids[row, :wanted], top_logprobs[row, :wanted] = tops, values
        return StepResult(ids, logprob, rank, top_ids, top_logprobs)


def _bias(s: Sampling, row: int) -> dict[int, float]:
    span = slice(int(s.bias_start[row]), int(s.bias_start[row + 1]))
    bias: dict[int, float] = {}
    for i, value in zip(s.bias_ids[span].tolist(), s.bias_values[span].tolist(), strict=True):
        bias[i] = bias.get(i, 0.0) + value
    return bias


@dataclass(slots=True)
class _Handle:
    executor: FakeExecutor
    step: Step
    submitted: float
    outcome: StepResult | TricornError | None = None

    def put_masks(self, index: I32, mask: NDArray[np.uint32]) -> None:
        sampling = self.step.sampling
        sampling.mask_index, sampling.mask, sampling.masks_follow = index, mask, False

    def result(self) -> StepResult:
        self.executor.run_until(self)
        if isinstance(self.outcome, TricornError):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome
