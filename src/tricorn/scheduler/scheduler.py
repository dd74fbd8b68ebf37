"""The scheduler: who runs in the next step, on which pages.

Every running sequence contributes its next token; what is left of the step goes to pieces of prompts, in the order of
the policy, as many tokens as keep the step within the target time between tokens. A step may be scheduled while the one
before still runs: ids not sampled yet travel as references to its rows. A sequence that turns out to have ended while a
step that names it is in flight keeps its slot and pages until that step is done, and its extra row is thrown away.

A sequence gets the pages of all its known tokens when it is admitted and one more at a time as it grows. When none is
left, a running sequence is preempted: its computed tokens go to the tree, and it waits in its old place.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tricorn.cache.pool import PagePool
from tricorn.cache.radix import Match, RadixTree
from tricorn.grammar.workers import Workers
from tricorn.request import FinishReason, Output, Request, TokenLogprobs, TricornError
from tricorn.runtime.step import PAGE, StepResult
from tricorn.scheduler.admission import Outlook
from tricorn.scheduler.batch import Batch, build
from tricorn.scheduler.cost import CostModel, Work
from tricorn.scheduler.guides import Guides
from tricorn.scheduler.limits import Limits, check_request
from tricorn.scheduler.loading import Loading
from tricorn.scheduler.options import SchedulerOptions
from tricorn.scheduler.policies import make
from tricorn.scheduler.sequence import Sequence, Slots, arrival, pages_for

I32 = NDArray[np.int32]

EXPRESS_SHARE = 4
"""One part in this many of a step's room for prompts is offered to the shortest first, so that a short request never
waits for a long one to end."""

LEAST_CHUNK = 16
"""Prompts advance by so many tokens in a step, even when that takes longer than the target."""

LEAST_SECONDS = 1e-3
"""What is left of a step is not worth a piece of a prompt when it is less than this."""

UNKNOWN_CHUNK = 64
"""What a step with decoding sequences takes of prompts while the cost of a step is not known."""

MOST_FORCED = 32
"""Forced ids of a decoding sequence are computed beside it when they are no more than this, else as prompts are."""

RETRY_SECONDS = 0.25
"""When the first in the queue did not fit and nobody has left since, it is tried again after so long."""


@dataclass(slots=True)
class _Room:
    """What a step has left for prompts: token rows, sampled rows, and seconds."""

    tokens: int
    rows: int
    seconds: float


class Scheduler:
    """Joins the waiting queue, the page pool and the tree. Batches go to `commit` or `fail` in the order they came.
    `clock` gives seconds."""

    def __init__(
        self,
        pool: PagePool,
        tree: RadixTree,
        limits: Limits,
        options: SchedulerOptions = SchedulerOptions(),
        clock: Callable[[], float] = time.monotonic,
        loading: Loading | None = None,
        workers: Workers | None = None,
    ) -> None:
        if limits.context > pool.total * PAGE:
            raise TricornError(f"a context of {limits.context} tokens cannot fit in {pool.total} pages of {PAGE}")
        self.pool = pool
        self.tree = tree
        self.limits = limits
        self.options = options
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counts: Counter[str] = Counter()
        """Totals, under the names that EngineStats gives them."""
        self.finished: Counter[FinishReason] = Counter()
        self.costs = CostModel()
        self._policy = make(options.policy, tree)
        self._outlook = Outlook(options.admission)
        self._loading = loading
        self._clock = clock
        self._slots = Slots(limits)
        self._guides = Guides(workers, self._slots)
        self._sequences: dict[str, Sequence] = {}
        self._leaving: list[Sequence] = []
        self._flying: deque[Batch] = deque()
        self._order: I32 | None = None  # the slots of `running`; None when that changed
        self._copies: list[tuple[int, int]] = []
        self._sources: list[I32] = []  # pages copied from, held until their step is done
        self._arrivals = 0
        self._full_until = -math.inf  # the first in the queue did not fit, and nobody has left since
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap
        self._busy_seconds = 0.0
        self._ends: deque[float] = deque(maxlen=64)  # of the last requests, in busy seconds

    @property
    def idle(self) -> bool:
        """Nothing to run and nothing in flight."""
        return not (self.waiting or self.running or self._flying)

    @property
    def free_slots(self) -> int:
        """How many sequences could be admitted now, as far as is known."""
        return len(self._slots.free) if self._clock() >= self._full_until else 0

    @property
    def requests_per_second(self) -> float:
        """The rate at which requests have ended of late, while there was work; 0 when not known."""
        span = self._busy_seconds - self._ends[0] if self._ends else 0.0
        return (len(self._ends) - 1) / span if span > 0 else 0.0

    def add(self, request: Request) -> None:
        """Queues a request. Raises TricornError when it can never be served or its id is in use."""
        check_request(request, self.limits)
        if request.id in self._sequences:
            raise TricornError(f"the request id {request.id} is in use; ids must be unique")
        sequence = Sequence(request, self._arrivals, self._clock(), self.limits)
        self._guides.open(sequence)
        self._arrivals += 1
        self._sequences[sequence.id] = sequence
        self.waiting.append(sequence)
        if request.service.deadline is not None:
            heapq.heappush(self._deadlines, (request.service.deadline, sequence.arrival, sequence))

    def abort(self, id: str) -> Output | None:
        """Drops a request at any moment; gives its last output, or None when there is no such request (any more)."""
        sequence = self._sequences.get(id)
        if sequence is None:
            return None
        output = self._end(sequence, "abort")
        self._depart()
        return output

    def expire(self) -> list[Output]:
        """Ends the requests whose deadline has passed."""
        outputs = []
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.ended is None:
                outputs.append(self._end(sequence, "timeout"))
        if outputs:
            self._depart()
        return outputs

    def gather(self, seconds: float = 0.0) -> list[Output]:
        """Takes in masks that have come, or come within so many seconds; ends the requests whose constraint failed."""
        if not self._guides:
            return []
        return self._refuse(self._guides.gather(seconds))

    def fast_forward(self, on: bool) -> None:
        """Whether ids that a grammar forces are computed together, as they are at first, or sampled one by one."""
        self._guides.fast_forward = on

    def masks(self, batch: Batch) -> tuple[list[Output], I32, NDArray[np.uint32]]:
        """`mask_index` and `mask` of a batch whose masks follow, once everything before it is committed; and the ends
        of the requests whose constraint failed."""
        outputs = self._refuse(self._guides.wait(batch)) if self._guides else []
        index, mask = self._guides.masks(batch)
        return outputs, index, mask

    def schedule(self) -> Batch | None:
        """The next batch, or None when nothing can run now. At most one batch may be uncommitted."""
        if len(self._flying) > 1:
            raise TricornError("two steps are in flight already: commit one first")
        if self._loading and (tokens := self._loading.land()):
            self.counts["disk_hit_tokens"] += tokens
            self._full_until = -math.inf
        decodes, partial = self._split()
        prefills = self._prefills(partial, decodes)
        if not decodes and not prefills:
            return None
        batch = build(self._slots, decodes, prefills, self._copies)
        batch.releases.extend(self._sources)
        self._copies.clear()
        self._sources.clear()
        self._flying.append(batch)
        for sequence in decodes:
            self._policy.charge(sequence, 1)
        for sequence, tokens in prefills:
            self._policy.charge(sequence, tokens)
        self.counts["decode_rows"] += batch.work.decode_rows
        self.counts["prefill_rows"] += batch.work.prefill_tokens
        return batch

    def commit(self, batch: Batch, result: StepResult, seconds: float) -> list[Output]:
        """Takes in the result of the oldest batch in flight, which took so long; gives what is new, at most one output
        per sequence."""
        self._land(batch)
        self._busy_seconds += seconds
        self.costs.observe(batch.work, seconds)
        sampled = np.flatnonzero(batch.sampled)
        owners = batch.row_sequence[sampled]
        ids = result.ids[sampled]
        slot = np.array([sequence.slot for sequence in batch.sequences], np.int32)
        self._slots.tokens[slot[owners], batch.step.sampling.position[sampled]] = ids
        if not batch.sampled.all():
            self._score(batch, result)
        if len(batch.hidden_sequence):
            self._pool(batch, result)
        outputs = self._prefilled(batch)
        sequences = batch.sequences
        for row, owner, token in zip(sampled.tolist(), owners.tolist(), ids.tolist(), strict=True):
            sequence = sequences[owner]
            if sequence.ended is None:
                outputs.append(self._advance(sequence, token, result, row))
        self._depart()
        return outputs

    def fail(self, batch: Batch, message: str) -> list[Output]:
        """Ends the sequences of the oldest batch in flight, which failed. What it computed never enters the tree."""
        self._land(batch)
        for sequence in batch.sequences:
            sequence.publish = False
        outputs = [self._end(sequence, "error", message) for sequence in batch.sequences if sequence.ended is None]
        self._depart()
        return outputs

    def wait(self, seconds: float) -> None:
        """When there is nothing to schedule but the scheduler is not idle: until that may have changed, for so long at
        most."""
        if self._loading:
            self._loading.wait(seconds)
        elif self._guides:
            time.sleep(seconds)

    def check(self) -> None:
        """The debug switch: every page is accounted for. Raises TricornError otherwise."""
        self.pool.check()
        self.tree.check()
        holders = np.zeros(self.pool.total, np.int32)
        for sequence in self.running + self._leaving:
            holders[self._slots.pages[sequence.slot, : self._slots.page_count[sequence.slot]]] += 1
        loads = self._loading.held if self._loading else []
        for pages in loads + self._sources + [pages for batch in self._flying for pages in batch.releases]:
            holders[pages] += 1
        if not np.array_equal(holders, self.pool.holders):
            raise TricornError("pages are held by nobody, or used unheld; please report this")

    def state(self) -> dict[str, Any]:
        """The requests, for people."""
        return {
            "running": [self._facts(sequence) for sequence in self.running],
            "waiting": [self._facts(sequence) for sequence in self.waiting],
        }

    # Who runs

    def _split(self) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences that decode in this step, each with a page for its token, and those that prefill."""
        slots = self._slots
        order = self._running_slots()
        computed, prompt = slots.computed[order], slots.prompt[order]
        missing = np.minimum(slots.length[order], slots.goal[order]) - computed
        decoding = (missing == 1) & (computed >= prompt)
        if self._guides:
            decoding |= slots.guided[order] & (missing > 0) & (missing <= MOST_FORCED) & (computed >= prompt)
            decoding &= np.cumsum(np.where(decoding, missing, 1)) <= self.limits.max_tokens
        partial = (missing > 0) & ~decoding
        running = self.running
        partials = [running[i] for i in np.flatnonzero(partial).tolist()] if partial.any() else []
        decodes = running.copy() if decoding.all() else [running[i] for i in np.flatnonzero(decoding).tolist()]
        needy = np.flatnonzero((missing > 0) & (computed + missing > slots.page_count[order] * PAGE)).tolist()
        if needy:
            stalled = self._grow([(running[i], pages_for(int(computed[i] + missing[i]))) for i in needy])
            decodes = [sequence for sequence in decodes if sequence.runs and sequence not in stalled]
            partials = [sequence for sequence in partials if sequence.runs and sequence not in stalled]
        if self._guides:
            decodes = [sequence for sequence in decodes if not sequence.sits_out]
            partials = [sequence for sequence in partials if not sequence.sits_out]
        return decodes, partials

    def _grow(self, needy: list[tuple[Sequence, int]]) -> list[Sequence]:
        """Gives each so many pages in all, preempting others as need be. Returns those that must wait for a step in
        flight."""
        stalled = []
        for sequence, pages in sorted(needy, key=lambda pair: self._policy.rank(pair[0])):
            slots, slot = self._slots, sequence.slot
            while sequence.runs and not self._available(pages - int(slots.page_count[slot])):
                if self._leaving or any(batch.releases for batch in self._flying):
                    stalled.append(sequence)
                    break
                self._preempt(max(self.running, key=self._policy.rank))
            else:
                if sequence.runs:
                    have = int(slots.page_count[slot])
                    slots.pages[slot, have:pages] = self._alloc(pages - have)
                    slots.page_count[slot] = pages
        return stalled

    def _prefills(self, partial: list[Sequence], decodes: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Shares what the decoding sequences leave of the step among prefills under way and sequences that wait."""
        candidates = sorted(partial + self._admissible(), key=arrival)
        candidates = self._policy.order(candidates, self._clock()) if candidates else []
        if not candidates:
            return []
        room = self._room(decodes)
        granted: dict[Sequence, int] = {}
        for sequence, share in self._turns(candidates, room):
            first = share == 1 and sequence is candidates[0]
            if room.tokens < 1 or (room.seconds < LEAST_SECONDS and not first):
                continue
            if sequence.slot < 0 and (self._full or not self._admit(sequence, first, express=share > 1)):
                continue
            before = granted.get(sequence, 0)
            most = self._most(sequence, before, room, share, LEAST_CHUNK if first else 0)
            tokens, rows = self._chunk(sequence, before, most, room.rows)
            if tokens > before:
                granted[sequence] = tokens
                room.tokens -= tokens - before
                room.rows -= rows
                room.seconds -= self._prefill_seconds(sequence, before, tokens)
        return list(granted.items())

    def _room(self, decodes: list[Sequence]) -> _Room:
        slots, slot = self._slots, [sequence.slot for sequence in decodes]
        taken = int((np.minimum(slots.length[slot], slots.goal[slot]) - slots.computed[slot]).sum())
        tokens, rows = self.limits.max_tokens - taken, self.limits.max_rows - len(decodes)
        if not decodes or not self.options.target_itl:
            return _Room(tokens, rows, math.inf)
        if self.costs.cost is None:
            return _Room(min(tokens, UNKNOWN_CHUNK), rows, math.inf)
        work = Work(decode_rows=taken, decode_pairs=int(slots.computed[slot].sum()))
        return _Room(tokens, rows, self.options.target_itl - self.costs.cost.seconds(work))

    def _turns(self, candidates: list[Sequence], room: _Room) -> list[tuple[Sequence, int]]:
        """Who prefills, in turn, and one part in how many of the room is theirs; one may be named twice."""
        turns = [(sequence, 1) for sequence in candidates]
        if self._policy.express and room.tokens >= EXPRESS_SHARE and not candidates[0].refused:
            spare = len(self._slots.free) > 1  # the last free slot belongs to the first in the queue
            shortest = min((s for s in candidates if spare or s.slot >= 0), key=self._missing, default=candidates[0])
            if shortest is not candidates[0]:
                turns.insert(0, (shortest, EXPRESS_SHARE))
        return turns

    def _most(self, sequence: Sequence, before: int, room: _Room, share: int, least: int) -> int:
        """How many tokens of a prefill may run in this step, of which `before` are granted; `least` more of them
        whatever time they take."""
        most = room.tokens // share
        if room.seconds != math.inf and self.costs.cost is not None:
            start = int(self._slots.computed[sequence.slot]) + before
            most = min(most, max(self.costs.cost.prefill_within(start, room.seconds / share), least))
        return before + most

    def _prefill_seconds(self, sequence: Sequence, before: int, tokens: int) -> float:
        if self.costs.cost is None:
            return 0.0
        start = int(self._slots.computed[sequence.slot]) + before
        return self.costs.cost.prefill_seconds(start, tokens - before)

    def _admissible(self) -> list[Sequence]:
        """The waiting sequences that may be admitted in this step."""
        if self._full or not self._slots.free:
            return []
        return [sequence for sequence in self.waiting if not sequence.loading]

    @property
    def _full(self) -> bool:
        return self._clock() < self._full_until

    def _missing(self, sequence: Sequence) -> int:
        if sequence.slot < 0:
            return len(sequence.tokens)
        slots, slot = self._slots, sequence.slot
        return int(min(slots.length[slot], slots.goal[slot]) - slots.computed[slot])

    def _chunk(self, sequence: Sequence, before: int, most: int, rows: int) -> tuple[int, int]:
        """How many tokens of a prefill run in this step, at most `most`, with `rows` sampled rows to spare, when
        `before` were granted already; and how many more rows they take."""
        missing = self._missing(sequence)
        tokens = min(missing, most)
        if sequence.scoring:  # each row is scored or sampled
            tokens = min(tokens, before + rows)
            return tokens, tokens - before
        if tokens < missing or sequence.limit == 0 or before == missing:
            return tokens, 0
        if sequence.guide >= 0 and sequence.mask is None:  # what may follow the last token is not known yet
            return tokens - 1, 0
        return (tokens, 1) if rows else (tokens - 1, 0)

    def _admit(self, sequence: Sequence, first: bool, express: bool) -> bool:
        """Gives a waiting sequence a slot and pages for its tokens, reusing what the tree has of all but the last."""
        if not self._slots.free:
            return False
        tokens, tree, pool = sequence.tokens, self.tree, self.pool
        useful = sequence.reusable
        match = tree.match(sequence.namespace, tokens[:useful])
        count = pages_for(len(tokens)) - len(match.pages)
        if match.tail_page >= 0 and not self._fits(sequence, count):
            pool.release(np.array([match.tail_page], np.int32))
            match = Match(match.pages, -1, 0, len(match.pages) * PAGE)
        if not self._fits(sequence, count):
            pool.release(match.pages)
            if not express:
                self._full_until = self._clock() + RETRY_SECONDS
            sequence.refused = first
            return False
        if self._load(sequence, match, useful):
            return False
        fresh = self._alloc(count)
        if match.tail_page >= 0:
            self._copies.append((match.tail_page, int(fresh[0])))
            self._sources.append(np.array([match.tail_page], np.int32))
        self._slots.enter(sequence, np.concatenate([match.pages, fresh]), match.tokens, len(match.pages))
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=arrival)
        self._order = None
        if sequence.cached_tokens < 0:
            sequence.admitted = self._clock()
            sequence.cached_tokens = match.tokens
            self.counts["prefix_queried_tokens"] += sequence.prompt_tokens
            self.counts["prefix_hit_tokens"] += match.tokens
        self.counts["recomputed_tokens"] += max(sequence.lost - match.tokens, 0)
        return True

    def _load(self, sequence: Sequence, match: Match, useful: int) -> bool:
        """Begins to read back what the tier below memory has of the first `useful` tokens beyond a match, if it has
        any. Then the match is not the caller's any more."""
        if self._loading is None or sequence.loaded or sequence.scoring:
            return False
        sequence.loaded = True
        keys = self._loading.wanted(sequence, useful, len(match.pages), self.costs.cost)
        if not keys:
            return False
        if match.tail_page >= 0:
            self.pool.release(np.array([match.tail_page], np.int32))
        self._loading.begin(sequence, match.pages, self._alloc(len(keys)), keys)
        return True

    def _fits(self, sequence: Sequence, count: int) -> bool:
        """Whether a waiting sequence that takes `count` pages now can run beside those that do."""
        pool = self.pool
        if not self._available(count):
            return False
        if not self.running:
            return True
        if self._outlook.closed(pool.held, pool.total):
            return False
        slots, slot, length = self._slots, self._running_slots(), len(sequence.tokens)
        columns = (
            (slots.length[slot], length),
            (slots.goal[slot], sequence.goal),
            (slots.length[slot] - slots.prompt[slot], length - sequence.prompt_tokens),
            (slots.page_count[slot], pages_for(length)),
            (slots.page_count[slot] - slots.shared[slot], count),
        )
        peak = self._outlook.peak(pool.held + count, *(np.append(column, value) for column, value in columns))
        return peak <= pool.total

    # What came of it

    def _land(self, batch: Batch) -> None:
        if not self._flying or self._flying[0] is not batch:
            raise TricornError("batches must be committed in the order they were scheduled")
        self._flying.popleft()
        for sequence in batch.sequences:
            sequence.in_flight -= 1
        for pages in batch.releases:
            self.pool.release(pages)

    def _score(self, batch: Batch, result: StepResult) -> None:
        """Collects the logprobs of prompt tokens."""
        for row in np.flatnonzero(~batch.sampled).tolist():
            sequence = batch.sequences[batch.row_sequence[row]]
            if sequence.scores is not None:
                sequence.scores.append(_logprobs(result, row, sequence.request.params.prompt_logprobs or 0))

    def _pool(self, batch: Batch, result: StepResult) -> None:
        """Adds up hidden states in the order of their tokens, so that no bit depends on where a prompt was cut."""
        for owner, hidden in zip(batch.hidden_sequence.tolist(), result.hidden.astype(np.float64), strict=True):
            sequence = batch.sequences[owner]
            sequence.pooled = hidden if sequence.pooled is None else sequence.pooled + hidden

    def _prefilled(self, batch: Batch) -> list[Output]:
        """Publishes prefilled pages; ends sequences that only wanted their prompt computed."""
        outputs = []
        for sequence, end in zip(batch.sequences[batch.decodes :], batch.ends[batch.decodes :], strict=True):
            if sequence.leaving:
                continue
            self._publish(sequence, end)
            if sequence.limit == 0 and end == sequence.goal:
                self._count_prompt(sequence)
                outputs.append(self._end(sequence, "length"))
        return outputs

    def _advance(self, sequence: Sequence, token: int, result: StepResult, row: int) -> Output:
        """One sampled token for one sequence, and those that a grammar forces after it."""
        if token < 0:
            message = "no token can be sampled: everything is banned or the logits are not numbers"
            return self._end(sequence, "error", message, refused=sequence.bans is not None)
        first = not sequence.first_token
        if first:
            self._count_prompt(sequence)
        logprobs = None if sequence.logprobs is None else [_logprobs(result, row, sequence.logprobs)]
        forced, sequence.forced = sequence.forced, None
        self.counts["forced_tokens"] += 0 if forced is None else 1 + len(forced)
        tokens: list[int] = []
        for new in [token, *(forced or ())]:
            tokens.append(new)
            self.counts["generated_tokens"] += 1
            sequence.outputs += 1
            if new in sequence.stops:
                return self._end(sequence, "stop", None, tokens, logprobs)
            if sequence.outputs == sequence.limit:
                return self._end(sequence, "length", None, tokens, logprobs)
        if forced is None and self._guides:
            self._guides.accept(sequence, token)
        scores, sequence.scores = sequence.scores, None
        return Output(
            id=sequence.id,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=scores,
            cached_tokens=max(sequence.cached_tokens, 0),
            timings=sequence.timings(self._clock()) if first else None,
        )

    def _count_prompt(self, sequence: Sequence) -> None:
        """Its prompt is computed."""
        sequence.first_token = self._clock()
        self.counts["prompt_tokens"] += sequence.prompt_tokens

    def _refuse(self, failed: list[tuple[Sequence, str]]) -> list[Output]:
        return [self._end(sequence, "error", why, refused=True) for sequence, why in failed if sequence.ended is None]

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        refused: bool = False,
    ) -> Output:
        sequence.ended = reason
        if self._guides:
            self._guides.close(sequence)
        self.finished[reason] += 1
        del self._sequences[sequence.id]
        if sequence.slot >= 0:
            self._outlook.ended(sequence.outputs)
            self._ends.append(self._busy_seconds)
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
            self._full_until = -math.inf
        return Output(
            id=sequence.id,
            token_ids=token_ids or [],
            logprobs=logprobs,
            prompt_logprobs=sequence.scores if reason in ("stop", "length") else None,
            finish_reason=reason,
            stop_token=token_ids[-1] if reason == "stop" and token_ids else None,
            cached_tokens=max(sequence.cached_tokens, 0),
            error=error,
            refused=refused,
            timings=sequence.timings(self._clock()),
            embedding=_embedding(sequence) if reason == "length" else None,
        )

    # Pages in, pages out

    def _publish(self, sequence: Sequence, end: int) -> None:
        """Puts the full pages of a running sequence's first `end` tokens into the tree. Where the tree has such a page
        already, from a sequence that computed the same at the same time, it takes the place of the sequence's own."""
        slot, full = sequence.slot, end // PAGE
        own = self._slots.pages[slot, :full]
        retention = sequence.request.service.retention
        kept = self.tree.insert(sequence.namespace, self._slots.tokens[slot, : full * PAGE], own, retention)
        changed = kept != own
        if changed.any():
            self.pool.share(kept[changed])
            double = own[changed]
            own[:] = kept
            if sequence.in_flight:
                self._flying[-1].releases.append(double)
            else:
                self.pool.release(double)

    def _preempt(self, sequence: Sequence) -> None:
        self.counts["preemptions"] += 1
        self._outlook.preempted()
        self._leave(sequence)
        self._depart()

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of `running`; `_depart` takes it out of its slot when no step names it any more."""
        if not sequence.leaving:
            sequence.leaving = True
            self.running.remove(sequence)
            self._leaving.append(sequence)
            self._order = None

    def _depart(self) -> None:
        """Lets go of those that leave and that no step in flight names."""
        if not self._leaving:
            return
        ready = [sequence for sequence in self._leaving if not sequence.in_flight]
        self._leaving = [sequence for sequence in self._leaving if sequence.in_flight]
        for sequence in ready:
            self._vacate(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        slots, slot = self._slots, sequence.slot
        pages = slots.pages[slot, : slots.page_count[slot]].copy()
        computed = int(slots.computed[slot])
        if sequence.publish:
            service, tokens = sequence.request.service, slots.tokens[slot, :computed]
            pinned_until = self._clock() + service.pin_seconds if service.pin_seconds else 0.0
            own = pages[: pages_for(computed)]
            self.tree.insert(sequence.namespace, tokens, own, service.retention, pinned_until)
        self.pool.release(pages)
        if sequence.ended is None:
            sequence.tokens = slots.tokens[slot, : slots.length[slot]].copy()
            sequence.lost = computed
            sequence.leaving = False
            if sequence.scoring:
                sequence.scores = [None] * sequence.score_start
            sequence.pooled = None
            insort(self.waiting, sequence, key=arrival)
        slots.leave(sequence)
        self._full_until = -math.inf

    def _facts(self, sequence: Sequence) -> dict[str, Any]:
        slots, slot, now = self._slots, sequence.slot, self._clock()
        service = sequence.request.service
        facts: dict[str, Any] = {
            "id": sequence.id,
            "age_s": round(now - sequence.arrived, 3),
            "prompt_tokens": sequence.prompt_tokens,
            "output_tokens": sequence.outputs,
            "max_tokens": sequence.limit,
            "cached_tokens": max(sequence.cached_tokens, 0),
            "priority": service.priority,
            "tenant": service.namespace.tenant,
            "deadline_s": None if service.deadline is None else round(service.deadline - now, 3),
        }
        if slot >= 0:
            facts |= {
                "phase": "decode" if slots.computed[slot] >= slots.prompt[slot] else "prefill",
                "computed_tokens": int(slots.computed[slot]),
                "pages": slots.pages[slot, : slots.page_count[slot]].tolist(),
            }
        return facts

    def _available(self, count: int) -> bool:
        return self.pool.free + self.pool.cached >= count

    def _alloc(self, count: int) -> I32:
        if count > self.pool.free:
            self.tree.evict(count - self.pool.free)
        return self.pool.alloc(count)

    def _running_slots(self) -> I32:
        if self._order is None:
            self._order = np.array([sequence.slot for sequence in self.running], np.int32)
        return self._order


def _embedding(sequence: Sequence) -> bytes | None:
    """What a pooled sequence was for."""
    if sequence.pooled is None:
        return None
    count = sequence.prompt_tokens if sequence.request.params.pooling == "mean" else 1
    return (sequence.pooled / count).astype(np.float32).tobytes()


def _logprobs(result: StepResult, row: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(
        float(result.logprob[row]),
        int(result.rank[row]),
        result.top_ids[row, :count].tolist(),
        result.top_logprobs[row, :count].tolist(),
    )
