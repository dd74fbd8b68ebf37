"""What must hold at every step, whatever comes: the invariants.

- Pages: each is free, held or cached, the counts agree, nobody writes a page that another one reads, and the tree and
  the pool agree.
- Order: the tokens of a request are those that its prompt says, in order, each once.
- Survival: what an engine's death interrupts goes on where it stopped; only a request that three engines died with in
  a row, without a token of it, is given up.
- One ending: each accepted request ends once, for a reason that it can have.
- Deadlines: none ends of its deadline before it; none says anything when it is past by more than three steps.
- Isolation: a request finds nothing cached before somebody in its namespace has begun alike.
- No starvation: each ends within a bound (see `Patience`).
- Fairness: of two tenants that both wait, under the fair policy, neither gets more than `fairness_bound` ahead.
- Admission: "guaranteed" never preempts.
- The end: when all have ended nothing is held, and the cache can be emptied to the last page.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from itertools import combinations

import numpy as np

from tricorn.cache.radix import RadixTree
from tricorn.engine.engine import Engine
from tricorn.request import Namespace, Output, Request
from tricorn.scheduler.policies.fair import QUANTUM
from tricorn.scheduler.policies.prefixes import PATIENCE_SECONDS
from tricorn.scheduler.policies.priority import SECONDS_PER_POINT
from tricorn.scheduler.scheduler import LEAST_CHUNK, RETRY_SECONDS
from tricorn.simulate.config import EOS, Config
from tricorn.simulate.executor import Answer, pooled


class Violation(Exception):
    """An invariant does not hold: one line."""


class Record:
    """A request that was accepted, and what has come of it."""

    __slots__ = (
        "answer",
        "arrived",
        "began",
        "deaths",
        "finished_before",
        "given",
        "poison",
        "reason",
        "request",
        "sent",
        "steps",
    )

    def __init__(self, request: Request, context: int, poison: bool) -> None:
        self.request = request
        self.answer = Answer(request, context, EOS)
        self.poison = poison
        """It kills the engine before it brings a token."""
        self.sent = False
        """An engine has it now."""
        self.arrived = 0.0
        """When it was sent to the engine that has it."""
        self.began = False
        self.given = 0
        self.deaths = 0
        """Of engines that had it, since its last token."""
        self.reason: str | None = None
        self.steps = 0
        self.finished_before = 0


class Patience:
    """Bounds how long a request may take.

    A request needs at most `steps` steps when it comes first: LEAST_CHUNK prompt tokens or one output token are done in
    each, unless a step has fewer rows. It waits for nobody but those accepted before it, or within the head start that
    the policy may give to others; under "fair", its tenant gets one turn in as many as there are tenants. Preemption
    may double the work. The bound is that many steps, each as long as the longest one yet.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        limits = config.limits
        others = limits.max_running - 1  # each may take a row
        self._chunk = min(LEAST_CHUNK, limits.max_tokens - others)
        self._scored_chunk = min(self._chunk, limits.max_rows - others)
        self._times: list[float] = []
        self._accepted: list[int] = [0]
        self._finished = 0
        self.longest_step = config.cost.step
        self.worst = 0.0
        """The largest share of its bound that a request has taken."""

    def accept(self, record: Record, now: float) -> None:
        """From `now` on an engine has the request."""
        request = record.request
        record.sent = True
        record.arrived = now
        record.finished_before = self._finished
        chunk = self._chunk if request.params.prompt_logprobs is None else self._scored_chunk
        record.steps = -(-len(request.prompt) // chunk) + record.answer.limit + 2
        self._times.append(now)
        self._accepted.append(self._accepted[-1] + record.steps)

    def finish(self, record: Record) -> None:
        """The request has ended, or its engine has."""
        self._finished += record.steps

    def check(self, record: Record, now: float) -> None:
        wait = now - record.arrived
        share = wait / self._bound(record)
        self.worst = max(self.worst, share)
        if share > 1:
            raise Violation(f"{record.request.id} starves: {wait:.2f} s, the bound is {self._bound(record):.2f} s")

    def _bound(self, record: Record) -> float:
        policy = self._config.options.policy
        head_start = 0.0
        if policy == "priority":
            head_start = (self._config.priorities - record.request.service.priority) * SECONDS_PER_POINT
        elif policy in ("lpm", "dfs-weight"):
            head_start = PATIENCE_SECONDS
        turns = self._config.tenants if policy == "fair" else 1
        ahead = self._accepted[bisect_right(self._times, record.arrived + head_start)] - record.finished_before
        return head_start + 2 * RETRY_SECONDS + 2 * turns * ahead * self.longest_step


def fairness_bound(config: Config) -> int:
    """Tokens of work by which two tenants may differ: a quantum, what the running requests of one may still do, and as
    much again, since work is seen only when it brings a token."""
    largest = min(config.limits.context, config.longest_prompt + config.longest_output)
    return QUANTUM + 2 * config.limits.max_running * largest


class Fairness:
    """Follows how far ahead each tenant gets of each other while both wait."""

    def __init__(self, config: Config) -> None:
        self.watching = config.options.policy == "fair" and config.tenants > 1 and config.plain
        self.worst = 0.0
        self._bound = fairness_bound(config)
        self._done = {f"t{tenant}": 0 for tenant in range(config.tenants)}
        self._spans: dict[tuple[str, str], tuple[int, int]] = {}  # the least and the most lead since both wait

    def done(self, tenant: str, tokens: int) -> None:
        self._done[tenant] += tokens

    def check(self, waiting: set[str]) -> None:
        for pair in combinations(self._done, 2):
            if not waiting.issuperset(pair):
                self._spans.pop(pair, None)
                continue
            lead = self._done[pair[0]] - self._done[pair[1]]
            low, high = self._spans.get(pair, (lead, lead))
            low, high = self._spans[pair] = min(low, lead), max(high, lead)
            self.worst = max(self.worst, (high - low) / self._bound)
            if high - low > self._bound:
                raise Violation(
                    f"tenants {pair[0]} and {pair[1]} both waited, and one got {high - low} tokens ahead of the other;"
                    f" the bound is {self._bound}"
                )


class Isolation:
    """Who may find what: how many requests of each namespace begin with each token."""

    def __init__(self) -> None:
        self._begun: Counter[tuple[Namespace, int]] = Counter()

    def accept(self, request: Request) -> None:
        self._begun[request.service.namespace, request.prompt[0]] += 1

    def check(self, request: Request, cached: int) -> None:
        if cached and self._begun[request.service.namespace, request.prompt[0]] < 2:
            raise Violation(f"{request.id} found {cached} tokens of another namespace")
        if cached >= len(request.prompt):
            raise Violation(f"{request.id} has {cached} cached tokens, its prompt {len(request.prompt)}")


def check_pages(engine: Engine) -> None:
    """Counts, cheap enough for every step."""
    pool = engine.pool
    held = int(np.count_nonzero(pool.holders))
    if pool.held != held or min(pool.free, pool.cached, int(pool.holders.min())) < 0:
        raise Violation(
            f"{pool.free} pages are free, {pool.held} held and {pool.cached} cached of {pool.total}; holders say {held}"
        )


def check_empty(engine: Engine) -> None:
    """Everything has ended."""
    if not engine.idle:
        raise Violation("the engine is not idle although every request has ended")
    if engine.pool.held:
        raise Violation(f"{engine.pool.held} pages are held although every request has ended")
    engine.scheduler.check()
    tree: RadixTree = engine.scheduler.tree
    tree.clear()
    engine.scheduler.check()
    if engine.pool.free != engine.pool.total:
        raise Violation(f"{engine.pool.free} of {engine.pool.total} pages are free after the cache was emptied")


def check_output(record: Record, output: Output) -> None:
    """The tokens are those that come next, and the ending is the one that they call for."""
    request, answer = record.request, record.answer
    if record.reason is not None:
        raise Violation(f"{request.id} says something after it ended with {record.reason}")
    for token in output.token_ids:
        if answer.reason is not None:
            raise Violation(f"{request.id} goes on after its answer ended with {answer.reason}")
        expected = answer.next()
        if token != expected:
            raise Violation(f"{request.id} says {token} as token {record.given}, it should be {expected}")
        record.given += 1
        record.deaths = 0
    reason = output.finish_reason
    if reason in ("stop", "length", None) and reason != answer.reason:
        raise Violation(f"{request.id} ends with {reason} after {record.given} tokens, it should be {answer.reason}")
    if request.params.prompt_logprobs is not None and not record.began and reason not in ("abort", "error", "timeout"):
        scores = output.prompt_logprobs or []
        if len(scores) != len(request.prompt):
            raise Violation(f"{request.id} brings {len(scores)} prompt logprobs for {len(request.prompt)} tokens")
    pooling = request.params.pooling
    if pooling and reason == "length" and output.embedding != pooled(request.prompt, pooling):
        raise Violation(f"{request.id} brings an embedding that is not its prompt's")
    record.began = True
    record.reason = reason
