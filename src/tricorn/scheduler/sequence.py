"""What the scheduler knows of a sequence: a small object each, and flat arrays by slot that steps are built from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tricorn.grammar.workers import Mask
from tricorn.request import FinishReason, Pooling, Request, Timings, TokenLogprobs
from tricorn.runtime.step import PAGE
from tricorn.scheduler.bans import bans
from tricorn.scheduler.limits import Limits

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


class Sequence:
    """One request on its way. While it waits its tokens are in `tokens`; while it runs they are in its slot."""

    __slots__ = (
        "__weakref__",
        "admitted",
        "arrival",
        "arrived",
        "ban",
        "bans",
        "bias",
        "cached_tokens",
        "ended",
        "first_token",
        "forced",
        "goal",
        "guide",
        "id",
        "in_flight",
        "leaving",
        "limit",
        "loaded",
        "loading",
        "logprobs",
        "lost",
        "mask",
        "min_tokens",
        "namespace",
        "outputs",
        "pooled",
        "prompt_tokens",
        "publish",
        "refused",
        "request",
        "score_start",
        "scores",
        "sits_out",
        "slot",
        "stops",
        "tokens",
        "total",
    )

    def __init__(self, request: Request, arrival: int, arrived: float, limits: Limits) -> None:
        params = request.params
        self.request = request
        self.id = request.id
        self.namespace = request.service.namespace
        self.arrival = arrival
        """Its number in the order of arrival."""
        self.arrived = arrived
        self.admitted = 0.0
        self.first_token = 0.0
        """When that happened, in the seconds of the scheduler's clock; 0 while it has not."""
        self.slot = -1
        self.tokens: I32 = np.array(request.prompt + request.resume, np.int32)
        self.prompt_tokens = len(request.prompt)
        self.limit = min(params.max_tokens, limits.context - self.prompt_tokens)
        self.total = self.prompt_tokens + self.limit
        self.goal = self.total if params.pooling else max(self.total - 1, 1)
        """How many tokens are to be computed: the last one sampled never is."""
        self.outputs = len(request.resume)
        self.min_tokens = params.min_tokens
        self.stops = frozenset(params.stop_token_ids + (() if params.ignore_eos else limits.eos_ids))
        self.logprobs = params.logprobs
        self.cached_tokens = -1  # not admitted yet
        self.score_start = min(max(params.prompt_logprobs_start, 1), self.prompt_tokens)
        """The first token of the prompt that is scored, when they are."""
        self.scores: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self.scores = [None] * self.score_start
        """The prompt's logprobs so far; None when not asked for or sent already."""
        self.pooled: F64 | None = None
        """The sum of the hidden states so far, or the one that is wanted."""
        self.in_flight = 0
        """Steps not committed yet that name this sequence. Its slot and pages stay until there are none."""
        self.ended: FinishReason | None = None
        self.leaving = False
        """No step takes it any more: it ended, or was preempted."""
        self.loading = False
        """Its pages are being read back from the tier below memory: it is not to be admitted yet."""
        self.loaded = False
        """The tier was asked once; that is enough."""
        self.lost = 0
        """How many tokens were computed when it was preempted."""
        self.refused = False
        """It was the first in the queue once and did not fit: nobody may overtake it any more."""
        self.publish = True
        """Whether its computed tokens may go into the tree; a failed step makes them doubtful."""
        self.guide = -1
        """Its place among the constrained sequences, if it is one (see guides.py)."""
        self.mask: Mask | None = None
        """What may follow its tokens; None while that is not known."""
        self.forced: list[int] | None = None
        """Ids that the grammar forces behind the one that the step in flight samples; [] for that one alone."""
        self.sits_out = False
        """Its mask was late: it waits for it."""
        self.bans = bans(request, limits)
        ids = list(params.logit_bias)
        values = [max(value, -1e30) for value in params.logit_bias.values()]
        self.bias = _bias(ids, values)
        self.ban = _bias(ids + sorted(self.stops), values + [-np.inf] * len(self.stops))
        """The bias while fewer than `min_tokens` have come: nothing may end the sequence."""

    @property
    def runs(self) -> bool:
        return self.slot >= 0 and not self.leaving

    @property
    def reusable(self) -> int:
        """How many of its tokens may come from the cache. One at least is computed; a token is scored where the one
        before it is computed; and a mean wants all of them."""
        if self.request.params.pooling == "mean":
            return 0
        most = min(len(self.tokens), self.goal) - 1
        return min(most, self.score_start - 1) if self.scoring else most

    @property
    def scoring(self) -> bool:
        """Whether prompt tokens remain to be scored, so that they and the one before must be computed."""
        return self.scores is not None and len(self.scores) < self.prompt_tokens

    def timings(self, now: float) -> Timings:
        """How long each phase took, if it ended now."""
        admitted = self.admitted or now
        first_token = self.first_token or now
        return Timings(admitted - self.arrived, first_token - admitted, now - first_token)

    def bias_at(self, outputs: int) -> tuple[I32, F32]:
        return self.ban if outputs < self.min_tokens else self.bias


def _bias(ids: list[int], values: list[float]) -> tuple[I32, F32]:
    return np.array(ids, np.int32), np.array(values, np.float32)


NO_ROW, LAST_ROW, EVERY_ROW = range(3)
POOLING: dict[Pooling | None, int] = {None: NO_ROW, "last": LAST_ROW, "mean": EVERY_ROW}

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class Slots:
    """Arrays of one line per running sequence, preallocated for `limits.max_running`.

    `tokens` [S, context] are all ids known; -1-j stands for the id that row j of the step in flight will sample.
    `pages` [S, P] is the page table, `shared` how many of its pages came from the tree. `length` counts tokens,
    `computed` those whose KV is computed or in flight, `goal` is where computing ends, `total` where the sequence ends.
    `pooling` tells which rows' hidden states are wanted.
    """

    def __init__(self, limits: Limits) -> None:
        count = limits.max_running
        self.free = list(range(count - 1, -1, -1))
        self.sequences: list[Sequence | None] = [None] * count
        self.tokens = np.zeros((count, limits.context), np.int32)
        self.pages = np.zeros((count, pages_for(limits.context)), np.int32)
        self.page_count, self.length, self.computed, self.goal, self.total, self.prompt = np.zeros((6, count), np.int32)
        self.shared = np.zeros(count, np.int32)
        self.floats = np.zeros((len(FLOATS), count), np.float32)
        self.top_k, self.logprobs, self.prompt_logprobs, self.min_tokens = np.zeros((4, count), np.int32)
        self.score_start = np.zeros(count, np.int32)
        self.seed = np.zeros(count, np.uint64)
        self.pooling = np.zeros(count, np.int8)
        self.penalized, self.biased, self.scoring, self.guided, self.masked = np.zeros((5, count), np.bool_)
        self.mask = _decodable(limits)

    def enter(self, sequence: Sequence, pages: I32, computed: int, shared: int) -> None:
        """Gives a waiting sequence a slot, with `pages` for all its tokens, the first `shared` of them not its own; the
        first `computed` tokens have their KV there."""
        slot = sequence.slot = self.free.pop()
        self.sequences[slot] = sequence
        tokens, params = sequence.tokens, sequence.request.params
        self.tokens[slot, : len(tokens)] = tokens
        self.pages[slot, : len(pages)] = pages
        self.page_count[slot] = len(pages)
        self.shared[slot] = shared
        self.length[slot] = len(tokens)
        self.computed[slot] = computed
        self.total[slot] = sequence.total
        self.goal[slot] = sequence.goal
        self.prompt[slot] = sequence.prompt_tokens
        self.floats[:, slot] = [getattr(params, name) for name in FLOATS]
        self.top_k[slot] = max(params.top_k, 0)
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.prompt_logprobs[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.min_tokens[slot] = sequence.min_tokens
        self.seed[slot] = sequence.request.seed
        self.penalized[slot] = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        )
        self.biased[slot] = bool(params.logit_bias)
        self.pooling[slot] = POOLING[params.pooling]
        self.scoring[slot] = sequence.scoring
        self.guided[slot] = sequence.guide >= 0
        self.masked[slot] = sequence.guide >= 0 or sequence.bans is not None
        self.score_start[slot] = sequence.score_start

    def leave(self, sequence: Sequence) -> None:
        self.sequences[sequence.slot] = None
        self.free.append(sequence.slot)
        sequence.slot = -1


def _decodable(limits: Limits) -> NDArray[np.uint32]:
    """[1, V/32] the ids that may be sampled, as bits; no line when all may."""
    words = -(-limits.vocab // 32)
    if not limits.undecodable:
        return np.zeros((0, words), np.uint32)
    bits = np.ones(words * 32, np.uint8)
    bits[list(limits.undecodable)] = 0
    return np.packbits(bits, bitorder="little").view(np.uint32)[None]


def arrival(sequence: Sequence) -> int:
    """The sort key of lists of sequences. A preempted one keeps the place of its first arrival."""
    return sequence.arrival


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)
