"""The scheduler: who runs in the next step, on which pages.

Every running sequence contributes its next token; what is left of the token budget goes to prefill chunks. A step may
be scheduled while the one before still runs: ids not sampled yet travel as references to its rows. A sequence that
turns out to have ended while a step that names it is in flight keeps its slot and pages until that step is done, and
its extra row is thrown away.

A sequence gets the pages of all its known tokens when it is admitted and one more at a time as it grows. When none is
left, the youngest running sequence is preempted: its computed tokens go to the tree, and it waits in its old place.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tricorn.cache.pool import PagePool
from tricorn.cache.radix import Match, RadixTree
from tricorn.request import FinishReason, Output, Request, TokenLogprobs, TricornError
from tricorn.runtime.step import PAGE, StepResult
from tricorn.scheduler.batch import Batch, build
from tricorn.scheduler.limits import Limits, check_request
from tricorn.scheduler.options import SchedulerOptions
from tricorn.scheduler.policy import first_come, prefill_order
from tricorn.scheduler.sequence import Sequence, Slots, pages_for

I32 = NDArray[np.int32]

_NO_MATCH = Match(np.zeros(0, np.int32), -1, 0, 0)


class Scheduler:
    """Joins the waiting queue, the page pool and the tree. Batches go to `commit` or `fail` in the order they came."""

    def __init__(
        self,
        pool: PagePool,
        tree: RadixTree,
        limits: Limits,
        options: SchedulerOptions = SchedulerOptions(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if limits.context > pool.total * PAGE:
            raise TricornError(f"a context of {limits.context} tokens cannot fit in {pool.total} pages of {PAGE}")
        self.pool = pool
        self.tree = tree
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counts: Counter[str] = Counter()
        """Totals: preemptions, prefix_queried_tokens, prefix_hit_tokens, prompt_tokens, generated_tokens."""
        self.finished: Counter[FinishReason] = Counter()
        self._slots = Slots(limits)
        self._sequences: dict[str, Sequence] = {}
        self._leaving: list[Sequence] = []
        self._flying: deque[Batch] = deque()
        self._order: I32 | None = None  # the slots of `running`; None when that changed
        self._copies: list[tuple[int, int]] = []
        self._sources: list[I32] = []  # pages copied from, held until their step is done
        self._arrivals = 0
        self._full = False  # the head of the queue did not fit, and nobody has left since

    @property
    def idle(self) -> bool:
        """Nothing to run and nothing in flight."""
        return not (self.waiting or self.running or self._flying)

    def add(self, request: Request) -> None:
        """Queues a request. Raises TricornError when it can never be served or its id is in use."""
        check_request(request, self.limits)
        if request.id in self._sequences:
            raise TricornError(f"the request id {request.id} is in use; ids must be unique")
        sequence = Sequence(request, self._arrivals, self.limits)
        self._arrivals += 1
        self._sequences[sequence.id] = sequence
        insort(self.waiting, sequence, key=first_come)

    def abort(self, id: str) -> Output | None:
        """Drops a request at any moment; gives its last output, or None when there is no such request (any more)."""
        sequence = self._sequences.get(id)
        if sequence is None:
            return None
        output = self._end(sequence, "abort")
        self._depart()
        return output

    def schedule(self) -> Batch | None:
        """The next batch, or None when nothing can run now. At most one batch may be uncommitted."""
        if len(self._flying) > 1:
            raise TricornError("two steps are in flight already: commit one first")
        decodes, partial = self._split()
        prefills = self._prefills(partial, len(decodes))
        if not decodes and not prefills:
            return None
        batch = build(self._slots, decodes, prefills, self._copies)
        batch.releases.extend(self._sources)
        self._copies.clear()
        self._sources.clear()
        self._flying.append(batch)
        return batch

    def commit(self, batch: Batch, result: StepResult) -> list[Output]:
        """Takes in the result of the oldest batch in flight; gives what is new, at most one output per sequence."""
        self._land(batch)
        sampled = np.flatnonzero(batch.sampled)
        owners = batch.row_sequence[sampled]
        ids = result.ids[sampled]
        slot = np.array([sequence.slot for sequence in batch.sequences], np.int32)
        self._slots.tokens[slot[owners], batch.step.sampling.position[sampled]] = ids
        if not batch.sampled.all():
            self._score(batch, result)
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

    def check(self) -> None:
        """The debug switch: every page is accounted for. Raises TricornError otherwise."""
        self.pool.check()
        self.tree.check()
        holders = np.zeros(self.pool.total, np.int32)
        for sequence in self.running + self._leaving:
            holders[self._slots.pages[sequence.slot, : self._slots.page_count[sequence.slot]]] += 1
        for pages in self._sources + [pages for batch in self._flying for pages in batch.releases]:
            holders[pages] += 1
        if not np.array_equal(holders, self.pool.holders):
            raise TricornError("pages are held by nobody, or used unheld; please report this")

    # Who runs

    def _split(self) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences that decode in this step, each with a page for its token, and those that prefill."""
        slots = self._slots
        order = self._running_slots()
        computed = slots.computed[order]
        missing = np.minimum(slots.length[order], slots.goal[order]) - computed
        decoding = (missing == 1) & (computed >= slots.prompt[order])
        partial = (missing > 0) & ~decoding
        running = self.running
        partials = [running[i] for i in np.flatnonzero(partial).tolist()] if partial.any() else []
        decodes = running.copy() if decoding.all() else [running[i] for i in np.flatnonzero(decoding).tolist()]
        needy = np.flatnonzero(decoding & (computed >= slots.page_count[order] * PAGE)).tolist()
        if needy:
            stalled = self._grow([running[i] for i in needy])
            decodes = [sequence for sequence in decodes if sequence.runs and sequence not in stalled]
            partials = [sequence for sequence in partials if sequence.runs]
        return decodes, partials

    def _grow(self, needy: list[Sequence]) -> list[Sequence]:
        """Gives each a page, preempting the youngest as need be. Returns those that must wait for a step in flight."""
        stalled = []
        for sequence in sorted(needy, key=first_come):
            while sequence.runs and not self._available(1):
                if self._leaving:
                    stalled.append(sequence)
                    break
                self._preempt(max(self.running, key=first_come))
            else:
                if sequence.runs:
                    slot = sequence.slot
                    self._slots.pages[slot, self._slots.page_count[slot]] = self._alloc(1)[0]
                    self._slots.page_count[slot] += 1
        return stalled

    def _prefills(self, partial: list[Sequence], decodes: int) -> list[tuple[Sequence, int]]:
        """Shares what the decoding sequences leave of the step among prefills under way and sequences that wait."""
        budget = self.limits.max_tokens - decodes
        rows = self.limits.max_rows - decodes
        candidates = partial + self._admissible()
        if not candidates:
            return []
        granted: dict[Sequence, int] = {}
        candidates.sort(key=first_come)
        for sequence, most in prefill_order(candidates, [self._missing(sequence) for sequence in candidates], budget):
            if budget < 1:
                break
            if sequence.slot < 0 and (self._full or not self._admit(sequence)):
                continue
            before = granted.get(sequence, 0)
            tokens, used = self._chunk(sequence, before, min(before + most, before + budget), rows)
            if tokens > before:
                granted[sequence] = tokens
                budget -= tokens - before
                rows -= used
        return list(granted.items())

    def _admissible(self) -> list[Sequence]:
        """The waiting sequences that may be admitted in this step."""
        if self._full or not self.waiting:
            return []
        return self.waiting[: min(len(self._slots.free), 1 if self.waiting[0].refused else len(self.waiting))]

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
        return (tokens, 1) if rows else (tokens - 1, 0)

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence a slot and pages for its tokens, reusing what the tree has of all but the last."""
        tokens, tree, pool = sequence.tokens, self.tree, self.pool
        useful = min(len(tokens), max(sequence.total - 1, 1)) - 1  # one token at least is computed
        match = _NO_MATCH if sequence.scoring else tree.match(sequence.namespace, tokens[:useful])
        count = pages_for(len(tokens)) - len(match.pages)
        # Each running sequence may need a page soon; without this one could be preempted as soon as it is back.
        reserve = len(self.running)
        if match.tail_page >= 0 and not self._available(count + reserve):
            pool.release(np.array([match.tail_page], np.int32))
            match = Match(match.pages, -1, 0, len(match.pages) * PAGE)
        if not self._available(count + reserve):
            pool.release(match.pages)
            self._full = True
            sequence.refused = sequence is self.waiting[0]
            return False
        fresh = self._alloc(count)
        if match.tail_page >= 0:
            self._copies.append((match.tail_page, int(fresh[0])))
            self._sources.append(np.array([match.tail_page], np.int32))
        self._slots.enter(sequence, np.concatenate([match.pages, fresh]), match.tokens)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=first_come)
        self._order = None
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = match.tokens
            self.counts["prefix_queried_tokens"] += sequence.prompt_tokens
            self.counts["prefix_hit_tokens"] += match.tokens
        return True

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

    def _prefilled(self, batch: Batch) -> list[Output]:
        """Publishes prefilled pages; ends sequences that only wanted their prompt computed."""
        outputs = []
        for sequence, end in zip(batch.sequences[batch.decodes :], batch.ends[batch.decodes :], strict=True):
            if sequence.leaving:
                continue
            self._publish(sequence, end)
            if sequence.limit == 0 and end == self._slots.goal[sequence.slot]:
                outputs.append(self._end(sequence, "length"))
        return outputs

    def _advance(self, sequence: Sequence, token: int, result: StepResult, row: int) -> Output:
        """One sampled token for one sequence."""
        if token < 0:
            return self._end(
                sequence, "error", "no token can be sampled: everything is banned or the logits are not numbers"
            )
        if sequence.outputs == 0:
            self.counts["prompt_tokens"] += sequence.prompt_tokens
        self.counts["generated_tokens"] += 1
        sequence.outputs += 1
        logprobs = None if sequence.logprobs is None else [_logprobs(result, row, sequence.logprobs)]
        if token in sequence.stops:
            return self._end(sequence, "stop", None, [token], logprobs)
        if sequence.outputs == sequence.limit:
            return self._end(sequence, "length", None, [token], logprobs)
        scores, sequence.scores = sequence.scores, None
        return Output(
            id=sequence.id,
            token_ids=[token],
            logprobs=logprobs,
            prompt_logprobs=scores,
            cached_tokens=max(sequence.cached_tokens, 0),
        )

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> Output:
        sequence.ended = reason
        self.finished[reason] += 1
        del self._sequences[sequence.id]
        if sequence.slot >= 0:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
            self._full = False
        return Output(
            id=sequence.id,
            token_ids=token_ids or [],
            logprobs=logprobs,
            prompt_logprobs=sequence.scores if reason in ("stop", "length") else None,
            finish_reason=reason,
            stop_token=token_ids[0] if reason == "stop" and token_ids else None,
            cached_tokens=max(sequence.cached_tokens, 0),
            error=error,
        )

    # Pages in, pages out

    def _publish(self, sequence: Sequence, end: int) -> None:
        """Puts the full pages of a running sequence's first `end` tokens into the tree. Where the tree has such a page
        already, from a sequence that computed the same at the same time, it takes the place of the sequence's own."""
        slot, full = sequence.slot, end // PAGE
        own = self._slots.pages[slot, :full]
        kept = self.tree.insert(sequence.namespace, self._slots.tokens[slot, : full * PAGE], own)
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
            self.tree.insert(sequence.namespace, slots.tokens[slot, :computed], pages[: pages_for(computed)])
        self.pool.release(pages)
        if sequence.ended is None:
            sequence.tokens = slots.tokens[slot, : slots.length[slot]].copy()
            sequence.leaving = False
            if sequence.scoring:
                sequence.scores = [None]
            insort(self.waiting, sequence, key=first_come)
        slots.leave(sequence)
        self._full = False

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


def _logprobs(result: StepResult, row: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(
        float(result.logprob[row]),
        int(result.rank[row]),
        result.top_ids[row, :count].tolist(),
        result.top_logprobs[row, :count].tolist(),
    )
