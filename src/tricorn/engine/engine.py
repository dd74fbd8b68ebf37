"""The engine: a scheduler and an executor in step, one batch ahead of the one that runs."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tricorn.cache.disk import DiskTier
from tricorn.cache.pool import PagePool
from tricorn.cache.radix import RadixTree
from tricorn.engine.messages import EngineState, EngineStats
from tricorn.grammar.workers import Workers
from tricorn.request import Output, Request, TricornError
from tricorn.runtime.step import I32, Executor, Handle, StepResult
from tricorn.scheduler.batch import Batch
from tricorn.scheduler.limits import Limits
from tricorn.scheduler.loading import Loading
from tricorn.scheduler.options import SchedulerOptions
from tricorn.scheduler.scheduler import Scheduler

IDLE_SECONDS = 1e-3
"""How long to wait for the disk when there is nothing else to do."""

TIDY_PAGES = 8
TIDY_SECONDS = 0.5
"""An idle engine saves so many pages between two looks for messages, each within this time."""

CLOSE_SECONDS = 5.0

SHOWN_PAGES = 65_536
SHOWN_RUNS = 2000
SHOWN_NODES = 8192
"""How much of the pool and the tree `state` shows: pages, and runs out of so many nodes."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """The handle of a step that the executor refused."""

    error: Exception

    def put_masks(self, index: I32, mask: NDArray[np.uint32]) -> None:
        pass

    def result(self) -> StepResult:
        raise self.error


class Engine:
    """Serves requests step by step. With `overlap`, a step is scheduled and submitted while the one before still runs;
    without, each is waited for. `debug` checks the books of the cache after every step."""

    def __init__(
        self,
        executor: Executor,
        limits: Limits,
        options: SchedulerOptions = SchedulerOptions(),
        *,
        overlap: bool = True,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
        tier: DiskTier | None = None,
        engine_id: bytes = b"",
        workers: Workers | None = None,
    ) -> None:
        self.executor = executor
        self.pool = PagePool(executor.pages)
        self.tier = tier
        self.workers = workers
        on_evict = None if tier is None else self._save
        tree = RadixTree(self.pool, clock=clock, engine_id=engine_id, on_evict=on_evict)
        loading = None if tier is None else Loading(self.pool, tree, tier, executor.write_page)
        self.scheduler = Scheduler(self.pool, tree, limits, options, clock, loading, workers)
        self.waiting_since: float | None = None
        """When it began to wait for a step that has not ended yet."""
        self.on_present: Callable[[list[str]], None] | None = None
        """Hears of the requests in the steps under way that have not brought a token yet, when they change."""
        self._present: list[str] = []
        self._clock = clock
        self._overlap = overlap
        self._debug = debug
        self._flying: tuple[Batch, Handle] | None = None
        self._ended = 0.0
        self._steps: Counter[str] = Counter()
        self._step_seconds: defaultdict[str, float] = defaultdict(float)
        self._host_seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def add(self, request: Request) -> None:
        """Queues a request. Raises TricornError when it can never be served."""
        self.scheduler.add(request)

    def abort(self, id: str) -> list[Output]:
        output = self.scheduler.abort(id)
        return [] if output is None else [output]

    def step(self) -> list[Output]:
        """Submits the next batch, then waits for the one before it; gives what that one brought. A step that fails ends
        its own requests with reason "error", and the engine lives on."""
        began = self._clock()
        outputs = self.scheduler.expire() + self.scheduler.gather()
        batch = self.scheduler.schedule()
        scheduled = self._spent("schedule", began)
        self._note_present(batch)
        submitted = None if batch is None else (batch, self._submit(batch))
        self._spent("submit", scheduled)
        if submitted is None and self._flying is None and not outputs:
            self.scheduler.wait(IDLE_SECONDS)
        if self._overlap:
            flying, self._flying = self._flying, submitted
            if flying:
                outputs += self._finish(*flying, began)
        if submitted:
            outputs += self._mask(*submitted)
        if submitted and not self._overlap:
            outputs += self._finish(*submitted, began)
        return outputs

    def tidy(self) -> bool:
        """For idle moments: saves a few cached pages in the tier below memory. False when there is nothing to do."""
        if self.tier is None or not self.tier.writing:
            return False
        unsaved = self.scheduler.tree.unsaved(TIDY_PAGES)
        for key, page in unsaved:
            self._save(key, page, TIDY_SECONDS)
        return bool(unsaved)

    def close(self) -> None:
        """Saves what is cached, for some seconds at most, and frees the executor."""
        until = self._clock() + CLOSE_SECONDS
        while self._clock() < until and self.tidy():
            pass
        if self.tier is not None:
            self.tier.close(CLOSE_SECONDS)
        if self.workers is not None:
            self.workers.shutdown()
        self.executor.close()

    def stats(self) -> EngineStats:
        scheduler, pool, cost = self.scheduler, self.pool, self.scheduler.costs.cost
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_slots=scheduler.free_slots,
            pages_total=pool.total,
            pages_free=pool.free,
            pages_held=pool.held,
            pages_cached=pool.cached,
            prefill_token_seconds=0.0 if cost is None else cost.prefill_seconds(0, 512) / 512,
            requests_per_second=scheduler.requests_per_second,
            evicted_pages=scheduler.tree.evicted_pages,
            finished={str(reason): count for reason, count in scheduler.finished.items()},
            steps=dict(self._steps),
            step_seconds=dict(self._step_seconds),
            host_seconds=dict(self._host_seconds),
            disk=None if self.tier is None else self.tier.stats(),
            **scheduler.counts,
        )

    def state(self, tree: bool = False) -> EngineState:
        """What is going on, for people. `requests` are those that run and wait; `pages` has a character for each page,
        as far as they are shown: free ".", cached "c", held "h", held by several "s". With `tree`, that of the prefixes
        as RadixTree.picture shows it."""
        pool = self.pool
        shown = slice(0, SHOWN_PAGES)
        kinds = np.where(pool.in_tree[shown], b"c", b".")
        kinds = np.where(pool.holders[shown] > 0, b"h", kinds)
        kinds = np.where(pool.holders[shown] > 1, b"s", kinds)
        pages = {"total": pool.total, "free": pool.free, "held": pool.held, "cached": pool.cached}
        state = {
            "requests": self.scheduler.state(),
            "cost": self.scheduler.costs.cost,
            "pages": {**pages, "map": kinds.tobytes().decode()},
        }
        if tree:
            state["tree"] = self.scheduler.tree.picture(SHOWN_RUNS, SHOWN_NODES)
        return EngineState(state)

    def _save(self, key: bytes, page: int, wait: float = 0.0) -> None:
        assert self.tier is not None
        if self.tier.writing and not self.tier.known([key]):
            self.tier.save(key, self.executor.read_page(page), wait)

    def _spent(self, phase: str, since: float) -> float:
        """Books the time since then as the host's; gives the time now."""
        now = self._clock()
        self._host_seconds[phase] += now - since
        return now

    def _submit(self, batch: Batch) -> Handle:
        try:
            return self.executor.submit(batch.step)
        except Exception as error:  # whatever it is, it belongs to this step alone
            return _Failed(error)

    def _note_present(self, batch: Batch | None) -> None:
        if self.on_present is None:
            return
        batches = [batch, self._flying[0] if self._flying else None]
        present = [s.id for under_way in batches if under_way for s in under_way.sequences if not s.first_token]
        if present != self._present:
            self._present = present
            self.on_present(present)

    def _mask(self, batch: Batch, handle: Handle) -> list[Output]:
        """Hands over the masks that a step in flight is about to need."""
        if not batch.step.sampling.masks_follow:
            return []
        outputs, index, mask = self.scheduler.masks(batch)
        handle.put_masks(index, mask)
        return outputs

    def _finish(self, batch: Batch, handle: Handle, began: float) -> list[Output]:
        self.waiting_since = self._clock()
        try:
            result = handle.result()
        except MemoryError:
            raise  # nothing can be promised any more: let the process end, and be replaced
        except Exception as error:
            outputs = self.scheduler.fail(batch, f"the step failed: {_line(error)}")
        else:
            ended = self._clock()
            kind = "decode" if batch.decodes == len(batch.sequences) else "mixed" if batch.decodes else "prefill"
            self._steps[kind] += 1
            seconds = ended - max(began, self._ended)
            self._step_seconds[kind] += seconds
            self._ended = ended
            outputs = self.scheduler.commit(batch, result, seconds)
            self._spent("commit", ended)
        self.waiting_since = None
        if self._debug:
            self.scheduler.check()
        return outputs


def _line(error: Exception) -> str:
    text = str(error) if isinstance(error, TricornError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:500]
