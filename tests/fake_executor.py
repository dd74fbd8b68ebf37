"""An executor whose KV cache holds 64-bit fingerprints, so that any scheduling or paging mistake changes the output.

The fingerprint of a token depends on its id, its position and the fingerprints of all tokens before it, which are read
through the page table. The next id depends on the fingerprint of the last token and on every sampling column.
`expected` computes the same from the prompt alone, with no pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tricorn.request import Request, TricornError
from tricorn.runtime.step import PAGE, Sampling, Step, StepResult

VOCAB = 97
_MASK = 2**64 - 1
_WEIGHTS = np.random.default_rng(1).integers(0, 2**63, 100_000, np.uint64) * np.uint64(2) + np.uint64(1)
_WEIGHT_LIST = _WEIGHTS[:10_000].tolist()


def _mix(*values: int) -> int:
    z = 0x9E3779B97F4A7C15
    for value in values:
        z = ((z ^ (value & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        z ^= z >> 29
    return z


def _pick(
    print_: int, seed: int, position: int, columns: tuple[float, ...], history: list[int], prompt: int, bias: dict
) -> int:
    """The id sampled after a token of this fingerprint."""
    mixed = _mix(print_, seed, position, hash(columns), prompt, *history)
    mixed = _mix(mixed, *(hash((i, v)) for i, v in sorted(bias.items()) if v > -np.inf))
    token = mixed % VOCAB
    while bias.get(token) == -np.inf:
        token = (token + 1) % VOCAB
    return token


def _score(print_: int, token: int, count: int) -> tuple[float, int, list[int], list[float]]:
    """Logprob, rank and alternatives of an id after a token of this fingerprint."""
    mixed = _mix(print_, token)
    tops = [_mix(print_, i) % VOCAB for i in range(count)]
    return -(mixed >> 50) / 1024, mixed % VOCAB + 1, tops, [-i / 8 for i in range(count)]


@dataclass
class Expected:
    tokens: list[int]
    logprobs: list[tuple[float, int, list[int], list[float]]]
    prompt_logprobs: list[tuple[float, int, list[int], list[float]]]
    reason: str


def expected(request: Request, context: int, eos: tuple[int, ...]) -> Expected:
    """What the engine must answer, whatever ran beside it."""
    p = request.params
    out = Expected([], [], [], "length")
    tokens = list(request.prompt)
    stops = set(p.stop_token_ids) | (set() if p.ignore_eos else set(eos))
    columns = (
        p.temperature,
        max(p.top_k, 0),
        p.top_p,
        p.min_p,
        p.repetition_penalty,
        p.presence_penalty,
        p.frequency_penalty,
    )
    columns = tuple(float(np.float32(c)) for c in columns)
    penalized = bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1)
    limit = min(p.max_tokens, context - len(tokens))
    total, position = 0, 0
    while len(out.tokens) < limit or position < len(request.prompt) - 1:
        print_ = _mix(tokens[position], position, total)
        total = (total + print_ * _WEIGHT_LIST[position]) & _MASK
        position += 1
        if position < len(request.prompt):
            if p.prompt_logprobs is not None:
                out.prompt_logprobs.append(_score(print_, tokens[position], p.prompt_logprobs))
            continue
        bias = {i: float(np.float32(v)) for i, v in p.logit_bias.items()}
        if len(out.tokens) < p.min_tokens:
            bias |= dict.fromkeys(stops, -np.inf)
        history, prompt = (tokens, len(request.prompt)) if penalized else ([], 0)
        token = _pick(print_, request.seed, position, columns, history, prompt, bias)
        tokens.append(token)
        out.tokens.append(token)
        out.logprobs.append(_score(print_, token, p.logprobs or 0))
        if token in stops:
            out.reason = "stop"
            break
    return out


@dataclass
class FakeExecutor:
    """Runs steps in order, each as late as possible: when its result, or a later one's, is asked for.

    `guard(page, slot)` is called for each write, at submission and again at execution; it raises when the write is
    forbidden. `fail_at` holds the numbers of the steps that fail half done.
    """

    pages: int
    max_tokens: int = 64
    max_rows: int = 64
    vocab: int = VOCAB
    page_bytes: int = PAGE * 8
    guard: Callable[[np.ndarray, np.ndarray], None] | None = None
    fail_at: set[int] = field(default_factory=set)
    steps: int = 0
    tokens_run: int = 0
    problem: AssertionError | None = None

    def __post_init__(self) -> None:
        self.prints = np.random.default_rng(0).integers(0, 2**63, (self.pages, PAGE), np.uint64)
        self._queue: deque[_Handle] = deque()
        self._previous: list[int] = []

    def submit(self, step: Step) -> _Handle:
        self._checked(self._inspect, step)
        handle = _Handle(self, step)
        self._queue.append(handle)
        return handle

    def read_page(self, page: int) -> np.ndarray:
        return self.prints[page].view(np.uint8).copy()

    def write_page(self, page: int, data: np.ndarray) -> None:
        assert data.dtype == np.uint8
        self._checked(self._untouched, page)
        self.prints[page] = np.ascontiguousarray(data).view(np.uint64)

    def _untouched(self, page: int) -> None:
        """Nobody may be using a page that is written from outside."""
        for handle in list(self._queue):
            assert page not in handle.step.pages
            assert page not in handle.step.copies
        if self.guard:
            self.guard(np.full(PAGE, page, np.int32), np.arange(PAGE))

    def close(self) -> None:
        pass

    def run_until(self, handle: _Handle) -> None:
        while handle.outcome is None:
            current = self._queue.popleft()
            try:
                current.outcome = self._checked(self._run, current.step)
            except TricornError as error:
                current.outcome = error
                self._previous = [0] * len(current.step.sampling.rows)

    def _checked(self, call: Callable[[Any], Any], argument: Any) -> Any:
        """An engine lives on when a step raises; `problem` keeps what a test must hear of."""
        try:
            return call(argument)
        except AssertionError as error:
            self.problem = error
            raise

    def _inspect(self, step: Step) -> None:
        assert 0 < len(step.token_ids) <= self.max_tokens
        assert len(step.sampling.rows) <= self.max_rows
        assert np.all(np.diff(step.row_start) > 0)
        assert np.all(np.diff(step.sampling.rows) > 0)
        assert len(step.pages) == step.page_start[-1]
        assert step.row_start[-1] == len(step.token_ids) == len(step.positions)
        for array in (step.token_ids, step.positions, step.row_start, step.page_start, step.pages, step.copies):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
        owner = np.repeat(np.arange(len(step.row_start) - 1), np.diff(step.row_start))
        last = step.positions[step.row_start[1:] - 1]
        assert np.array_equal(np.diff(step.page_start), last // PAGE + 1)
        pages = step.pages[step.page_start[owner] + step.positions // PAGE]
        written = set(pages.tolist())
        for s in range(len(last)):  # nobody reads a page that another one writes in this step
            mine = set(pages[step.row_start[s] : step.row_start[s + 1]].tolist())
            assert not (written - mine) & set(step.pages[step.page_start[s] : step.page_start[s + 1]].tolist())
        if self.guard:
            self.guard(step.pages, step.pages[:0])
            self.guard(step.copies[:, 0], step.pages[:0])
            self.guard(pages, step.positions % PAGE)

    def _run(self, step: Step) -> StepResult:
        self._inspect(step)
        self.steps += 1
        self.tokens_run += len(step.token_ids)
        failing = self.steps in self.fail_at
        for source, to in step.copies.tolist():
            self.prints[to] = self.prints[source]
        prints: list[int] = []
        for s in range(len(step.row_start) - 1):
            rows = slice(int(step.row_start[s]), int(step.row_start[s + 1]))
            prints += self._sequence(step, rows, step.pages[step.page_start[s] : step.page_start[s + 1]])
            if failing:
                raise TricornError("the fake executor was told to fail")
        return self._sample(step.sampling, prints)

    def _sequence(self, step: Step, rows: slice, table: np.ndarray) -> list[int]:
        positions = step.positions[rows].tolist()
        first = positions[0]
        assert positions == list(range(first, first + len(positions)))
        before = np.arange(first)
        total = int(np.sum(self.prints[table[before // PAGE], before % PAGE] * _WEIGHTS[:first]))
        prints = []
        for token, position in zip(step.token_ids[rows].tolist(), positions, strict=True):
            print_ = _mix(self._known(token), position, total)
            total = (total + print_ * int(_WEIGHTS[position])) & _MASK
            self.prints[table[position // PAGE], position % PAGE] = print_
            prints.append(print_)
        return prints

    def _known(self, token: int) -> int:
        token = token if token >= 0 else self._previous[-1 - token]
        assert 0 <= token < VOCAB
        return token

    def _sample(self, s: Sampling, prints: list[int]) -> StepResult:
        count = len(s.rows)
        most = max([0, *s.logprobs.tolist()])
        ids = np.zeros(count, np.int32)
        logprob, rank = np.zeros(count, np.float32), np.zeros(count, np.int32)
        top_ids = np.full((count, most), -1, np.int32)
        top_logprobs = np.full((count, most), -np.inf, np.float32)
        floats = (s.temperature, s.top_k, s.top_p, s.min_p, s.repetition, s.presence, s.frequency)
        for r, row in enumerate(s.rows.tolist()):
            columns = tuple(float(column[r]) for column in floats)
            history = [self._known(t) for t in s.history_ids[s.history_start[r] : s.history_start[r + 1]].tolist()]
            span = slice(int(s.bias_start[r]), int(s.bias_start[r + 1]))
            bias: dict[int, float] = {}
            for i, v in zip(s.bias_ids[span].tolist(), s.bias_values[span].tolist(), strict=True):
                bias[i] = bias.get(i, 0.0) + v
            prompt = int(s.history_prompt[r])
            target = int(s.target[r])
            ids[r] = (
                target
                if target >= 0
                else _pick(prints[row], int(s.seed[r]), int(s.position[r]), columns, history, prompt, bias)
            )
            wanted = int(s.logprobs[r])
            logprob[r], rank[r], tops, top_values = _score(prints[row], int(ids[r]), max(wanted, 0))
            top_ids[r, : len(tops)] = tops
            top_logprobs[r, : len(tops)] = top_values
        self._previous = ids.tolist()
        return StepResult(ids, logprob, rank, top_ids, top_logprobs)


@dataclass
class _Handle:
    executor: FakeExecutor
    step: Step
    outcome: StepResult | TricornError | None = None

    def result(self) -> StepResult:
        self.executor.run_until(self)
        if isinstance(self.outcome, TricornError):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome
