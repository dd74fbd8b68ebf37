"""An engine over the fake executor, with all its books checked at every step."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import numpy as np

from fake_executor import VOCAB, FakeExecutor, expected
from tricorn.cache.disk import DiskTier
from tricorn.engine.engine import Engine
from tricorn.request import Namespace, Output, Request, SamplingParams, Service
from tricorn.runtime.step import PAGE
from tricorn.scheduler.limits import Limits
from tricorn.scheduler.options import SchedulerOptions

EOS = (0, 1)


class Bench:
    """An engine over a fake executor, and everything it has said so far."""

    def __init__(
        self,
        pages: int = 64,
        budget: int = 64,
        sequences: int = 8,
        overlap: bool = True,
        rows: int = 64,
        context: int = 10_000,
        options: SchedulerOptions = SchedulerOptions(),
        tier: DiskTier | None = None,
        executor: FakeExecutor | None = None,
    ) -> None:
        self.executor = executor or FakeExecutor(pages, max_tokens=budget, max_rows=rows)
        limits = Limits(
            context=min(pages * PAGE, context),
            vocab=VOCAB,
            max_sequences=sequences,
            max_tokens=budget,
            max_rows=rows,
            eos_ids=EOS,
        )
        self.now = 0.0
        """Virtual seconds; a step takes 0.01."""
        self.engine = Engine(
            self.executor,
            limits,
            options,
            overlap=overlap,
            debug=True,
            clock=lambda: self.now,
            tier=tier,
            engine_id=b"fake",
        )
        self.pool, self.scheduler = self.engine.pool, self.engine.scheduler
        self.executor.guard = self.guard
        self.said: dict[str, list[Output]] = defaultdict(list)
        self.requests: dict[str, Request] = {}
        self.ended: list[str] = []

    def guard(self, pages: np.ndarray, slots: np.ndarray) -> None:
        assert np.all(self.pool.holders[pages] > 0), "a step names a page that nobody holds"
        if len(slots):
            assert np.all(self.pool.holders[pages] == 1), "a shared page is written"
            tree = self.scheduler.tree.pages()
            assert all(tree.get(page, 0) <= slot for page, slot in zip(pages.tolist(), slots.tolist(), strict=True))

    def add(
        self, prompt: list[int], seed: int = 7, salt: str = "", service: Service | None = None, **params: object
    ) -> str:
        id = f"r{len(self.requests)}"
        request = Request(
            id=id,
            prompt=list(prompt),
            params=SamplingParams(**params),  # type: ignore[arg-type]
            seed=seed,
            service=service or Service(namespace=Namespace(salt)),
        )
        self.engine.add(request)
        self.requests[id] = request
        return id

    def step(self) -> None:
        self.now += 0.01
        self.hear(self.engine.step())
        if self.engine.tier:
            self.engine.tier.work()

    def hear(self, outputs: list[Output]) -> None:
        if self.executor.problem:
            raise self.executor.problem
        ids = [output.id for output in outputs]
        assert len(ids) == len(set(ids))
        for output in outputs:
            said = self.said[output.id]
            assert not said or said[-1].finish_reason is None, "an output after the last one"
            said.append(output)
            if output.finish_reason:
                self.ended.append(output.id)
        assert self.pool.free + self.pool.held + self.pool.cached == self.pool.total

    def abort(self, id: str) -> None:
        self.hear(self.engine.abort(id))

    def run(self, most: int = 20_000) -> None:
        for _ in range(most):
            if self.engine.idle:
                break
            self.step()
        assert self.engine.idle
        assert self.pool.held == 0
        self.scheduler.check()

    def tokens(self, id: str) -> list[int]:
        return [token for output in self.said[id] for token in output.token_ids]

    def verify(self, id: str, complete: bool = True) -> None:
        """The answer equals what the prompt alone says; of an aborted request, as far as it came."""
        request, said = self.requests[id], self.said[id]
        want = expected(request, self.scheduler.limits.context, EOS)
        got = self.tokens(id)
        assert got == want.tokens[: len(got)]
        if request.params.logprobs is not None:
            found = [entry for output in said for entry in output.logprobs or []]
            assert [(e.logprob, e.rank, e.top_ids, e.top_logprobs) for e in found] == want.logprobs[: len(found)]
            assert len(found) == len(got)
        if not complete:
            return
        last = said[-1]
        assert (got, last.finish_reason) == (want.tokens, want.reason)
        assert last.stop_token == (got[-1] if want.reason == "stop" else None)
        assert last.embedding == want.embedding
        assert all(0 <= output.cached_tokens < len(request.prompt) for output in said)
        if request.params.prompt_logprobs is not None:
            first = said[0].prompt_logprobs
            assert first is not None
            assert first[0] is None
            assert [(e.logprob, e.rank, e.top_ids, e.top_logprobs) for e in first[1:] if e] == want.prompt_logprobs
            assert not any(output.prompt_logprobs for output in said[1:])

    def verify_all(self) -> None:
        for id in self.requests:
            self.verify(id)


def ids(random: Random, count: int) -> list[int]:
    return [random.randrange(VOCAB) for _ in range(count)]
