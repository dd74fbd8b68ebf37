"""The world around an engine: what comes, what is given up, what breaks, all from one seed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from random import Random

import msgspec

from tricorn.cache.disk import DiskTier
from tricorn.engine.engine import Engine
from tricorn.engine.gate import Gate, GateOptions, Refused, Ticket
from tricorn.engine.ledger import MOST_DEATHS, Ledger
from tricorn.request import Namespace, Output, Request, SamplingParams, Service, TricornError
from tricorn.runtime.step import I32, Step
from tricorn.simulate.checks import (
    Fairness,
    Isolation,
    Patience,
    Record,
    Violation,
    check_empty,
    check_output,
    check_pages,
)
from tricorn.simulate.clock import VirtualClock
from tricorn.simulate.config import Config, request_seconds
from tricorn.simulate.disk import FaultyStore
from tricorn.simulate.executor import VOCAB, FakeExecutor
from tricorn.simulate.timing import seconds_of

TICK = 0.001
"""What an engine's turn takes when there is no step to wait for."""

RESTART_SECONDS = 0.5

LAST_TURNS = 100
"""After the last request has ended, the engine is idle within so many turns."""

DISK_STRIDE = 4096
"""Bytes of a page's record on disk."""

DISK_QUEUE_PAGES = 16
MOST_DISK_WORK = 10
"""Pieces of work that the disk does in a step, at most."""

FULL_CHECK_PAGES = 8
"""The books are counted anew in each step when the pool has so many pages, less often when it has more."""

PATIENCE_CHECK = 64
"""Steps between looks at those that have not ended."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to. `trace` is a hash of everything that was said, and when. `violation` is None when every
    invariant held."""

    config: Config
    steps: int
    virtual_seconds: float
    requests: int
    refused: int
    endings: dict[str, int]
    preemptions: int
    deaths: int
    hit_share: float
    disk_hit_tokens: int
    disk_faults: int
    worst_wait: float
    """The largest share of its bound that a request has waited."""
    worst_lead: float
    """The largest share of the fairness bound."""
    trace: str
    violation: str | None = None


class World:
    """Runs one configuration. `make` makes each engine; `told` hears a line for each thing that happens."""

    def __init__(
        self, config: Config, make: Callable[..., Engine] = Engine, told: Callable[[str], None] | None = None
    ) -> None:
        self.config = config
        self.clock = VirtualClock()
        self.steps = 0
        self._make = make
        self._told = told
        self._random = Random(f"world {config.seed}")
        self._jitter = Random(f"jitter {config.seed}")
        self._gate = Gate(
            config.limits.max_running,
            GateOptions(max_waiting=config.max_waiting, max_waiting_tokens=1 << 20, max_wait=config.max_wait),
            self.clock,
        )
        self._store = FaultyStore(Random(f"disk {config.seed}"), config.disk_fault_rate, config.disk_read_seconds)
        self._ledger = Ledger()
        self._live: dict[str, tuple[Record, Ticket]] = {}
        self._patience = Patience(config)
        self._fairness = Fairness(config)
        self._isolation = Isolation()
        self._stems = [self._ids(config.longest_prompt) for _ in range(config.stems)]
        self._interval = request_seconds(config) / config.load * config.burst
        self._next = 0.0
        self._serial = self._refused = self._deaths = self._preemptions = 0
        self._hits = self._queried = self._disk_hits = 0
        self._endings: Counter[str] = Counter()
        self._trace = hashlib.blake2b(digest_size=16)
        self._check_every = max(1, config.pages // FULL_CHECK_PAGES)
        self._failed = False
        self._start()

    def run(self, steps: int) -> Report:
        """So many steps of the engine, then as many as it takes until all have ended."""
        violation = None
        try:
            while self.steps < steps:
                self._arrive()
                self._disturb()
                self._turn()
            while self._live:
                self._turn()
            for _ in range(LAST_TURNS):
                if not self.engine.idle:
                    self._turn()
            check_empty(self.engine)
            self._count()
            if len(self._ledger):
                raise Violation("the ledger still has requests although every one has ended")
            if self._gate.sequences or self._gate.waiting_tokens:
                raise Violation("the gate still counts requests although every one has ended")
        except Violation as error:
            violation = str(error)
        except (AssertionError, TricornError) as error:
            violation = f"{type(error).__name__}: {error}"
        except Exception as error:  # whatever a broken scheduler comes to
            violation = f"{type(error).__name__}: {error}"
        return self._report(violation)

    def _start(self) -> None:
        """A fresh engine, whose cache is garbage."""
        config = self.config
        self.executor = FakeExecutor(
            config.pages,
            max_tokens=config.limits.max_tokens,
            max_rows=config.limits.max_rows,
            clock=self.clock,
            seconds=self._seconds,
            guard=self._guard,
        )
        tier = None
        if config.disk_pages:
            page_bytes = self.executor.page_bytes
            tier = DiskTier(
                self._store,
                page_bytes,
                config.disk_pages * DISK_STRIDE,
                queue_bytes=DISK_QUEUE_PAGES * page_bytes,
                threaded=False,
                clock=self._store.clock,
            )
        self.engine = self._make(
            self.executor,
            config.limits,
            config.options,
            overlap=config.overlap,
            clock=self.clock,
            tier=tier,
            engine_id=b"simulated",
        )

    def _seconds(self, step: Step) -> float:
        seconds = seconds_of(step, self.config.cost) * self._jitter.uniform(0.95, 1.05)
        if self._jitter.random() < 0.005:
            seconds *= 4
        self._patience.longest_step = max(self._patience.longest_step, seconds, TICK)
        return seconds

    def _guard(self, pages: I32, slots: I32) -> None:
        pool = self.engine.pool
        holders = pool.holders[pages]
        if len(slots):
            assert (holders == 1).all(), "a page is written that is shared or not held"
            assert not pool.in_tree[pages].any(), "a page of the tree is written"
        else:
            assert (holders > 0).all(), "a step names a page that nobody holds"

    # What comes

    def _arrive(self) -> None:
        if self.engine.idle:
            self.engine.tidy()
            self.clock.until(self._next)
        while self._next <= self.clock.now:
            self._next += self._random.expovariate(1 / self._interval)
            for _ in range(self.config.burst):
                self._offer(self._request())

    def _offer(self, request: Request) -> None:
        """At the gate, and on to the engine."""
        stats = self.engine.stats()
        try:
            ticket = self._gate.enter(1, stats)
        except Refused:
            self._refused += 1
            return
        try:
            ticket.queue(len(request.prompt), stats)
        except Refused:
            self._refused += 1
            ticket.__exit__()
            return
        poison = self._random.random() < self.config.poison_share
        self._live[request.id] = Record(request, self.config.limits.context, poison), ticket
        self._isolation.accept(request)
        self._say(f"add {request.id} prompt {len(request.prompt)} max {request.params.max_tokens} {request.service}")
        self._ledger.open(request)
        self._send(self._ledger.due())

    def _send(self, requests: list[Request]) -> None:
        for request in requests:
            self._patience.accept(self._live[request.id][0], self.clock.now)
            self.engine.add(request)

    def _request(self) -> Request:
        random, config = self._random, self.config
        self._serial += 1
        length = random.randint(1, config.longest_prompt)
        stem = random.choice(self._stems)
        shared = random.choice([0, length - 1, random.randrange(length)])
        prompt = stem[:shared] + self._ids(length - shared)
        output = min(1 + int(random.expovariate(2 / config.longest_output)), config.longest_output)
        tenant = 0 if random.random() < config.greedy else random.randrange(config.tenants)
        late = random.random() < config.deadline_share
        return Request(
            id=f"r{self._serial}",
            prompt=prompt,
            params=self._params(output),
            seed=random.getrandbits(64),
            service=Service(
                namespace=Namespace(f"s{random.randrange(config.salts)}", f"t{tenant}"),
                priority=random.randint(-config.priorities, config.priorities),
                deadline=self.clock.now + random.random() * config.longest_deadline if late else None,
                retention=random.choice([0, 50, 50, 100]),
                pin_seconds=random.choice([0.0, 0.0, 0.0, 1.0]),
            ),
        )

    def _params(self, output: int) -> SamplingParams:
        random = self._random
        kind = random.random()
        if kind < 0.03:
            return SamplingParams(max_tokens=random.choice([0, 1]), prompt_logprobs=1)
        if kind < 0.04:
            return SamplingParams(max_tokens=0, pooling="mean" if kind < 0.035 else "last")
        if kind < 0.06:
            return SamplingParams(max_tokens=output, frequency_penalty=0.5, min_tokens=3, logit_bias={5: 1.0})
        return SamplingParams(max_tokens=output, ignore_eos=kind < 0.5, temperature=0.0)

    def _ids(self, count: int) -> list[int]:
        return [int(self._random.random() * VOCAB) for _ in range(count)]

    # What goes wrong

    def _disturb(self) -> None:
        random, config = self._random, self.config
        if config.abort_share and self._live and random.random() < config.abort_share / 10:
            id = random.choice(list(self._live))
            self._say(f"abort {id}")
            output = self._ledger.abort(id)
            if output is None:
                self._hear(self.engine.abort(id))
            else:
                self._told_client(output)
        if config.failure_rate and random.random() < config.failure_rate:
            self.executor.fail_at = {self.executor.steps + random.randint(1, 3)}
        poisoned = config.poison_share and any(record.poison and record.sent for record, _ in self._live.values())
        if (poisoned and random.random() < 0.3) or random.random() < config.death_rate:
            self._die()

    def _die(self) -> None:
        """The engine dies, perhaps in the middle of a step; another one takes its place."""
        if self._random.random() < 0.5:
            self.engine.step()  # nobody hears of it
            self._check_executor()
        self._deaths += 1
        self._count()
        self._say("the engine dies")
        for record, _ in self._live.values():
            if record.sent:
                record.sent = False
                record.deaths += 1
                self._patience.finish(record)
        for output in self._ledger.died():
            self._told_client(output)
        self.clock.until(self.clock.now + RESTART_SECONDS)
        self._start()
        self._send(self._ledger.due())

    # What is said

    def _turn(self) -> None:
        """One step of the engine, and everything that must hold after it."""
        if self.engine.tier:
            for _ in range(self._random.randrange(MOST_DISK_WORK)):
                self.engine.tier.work()
        before, failures = self.clock.now, self.executor.steps
        outputs = self.engine.step()
        self.steps += 1
        if self.clock.now == before:
            self.clock.until(before + TICK)
        self._check_executor()
        self._failed = any(step in self.executor.fail_at for step in range(failures + 1, self.executor.steps + 1))
        self._hear(outputs)
        self._send(self._ledger.due())
        if self._live and self.engine.idle and not any(record.sent for record, _ in self._live.values()):
            raise Violation(f"{len(self._live)} requests are kept from an idle engine")
        check_pages(self.engine)
        if self.config.options.admission == "guaranteed" and self.engine.scheduler.counts["preemptions"]:
            raise Violation("a sequence was preempted although admission is guaranteed")
        if self._fairness.watching:
            self._fairness.check({sequence.namespace.tenant for sequence in self.engine.scheduler.waiting})
        if self.steps % self._check_every == 0:
            self.engine.scheduler.check()
        if self.steps % PATIENCE_CHECK == 0:
            for record, _ in self._live.values():
                if record.sent:
                    self._patience.check(record, self.clock.now)
                    self._check_deadline(record)

    def _check_executor(self) -> None:
        if self.executor.problem:
            raise self.executor.problem

    def _hear(self, outputs: list[Output]) -> None:
        """What the engine says; the ledger passes it on."""
        for output in outputs:
            if output.id not in self._live or not self._live[output.id][0].sent:
                raise Violation(f"{output.id} says something after its end, or was never asked for")
            for passed in self._ledger.note([output]):
                self._told_client(passed)

    def _told_client(self, output: Output) -> None:
        """One output, and everything that must hold of it."""
        if output.id not in self._live:
            raise Violation(f"{output.id} says something after its end")
        record, ticket = self._live[output.id]
        request, reason, tenant = record.request, output.finish_reason, record.request.service.namespace.tenant
        self._say(f"{output.id} {output.token_ids} {reason} {output.cached_tokens}")
        first, deaths = not record.began, record.deaths
        check_output(record, output)
        if reason == "error":
            self._check_error(record, output, deaths)
        if reason == "timeout":
            if request.service.deadline is None or self.clock.now < request.service.deadline:
                raise Violation(f"{request.id} ended with timeout before its deadline")
        elif record.sent:
            self._check_deadline(record)
        if first:
            ticket.begin()
            self._isolation.check(request, output.cached_tokens)
            self._hits += output.cached_tokens
            self._queried += len(request.prompt)
            if output.token_ids:
                self._fairness.done(tenant, len(request.prompt) - output.cached_tokens)
        self._fairness.done(tenant, len(output.token_ids))
        if reason is not None:
            self._end(record, ticket, reason)

    def _end(self, record: Record, ticket: Ticket, reason: str) -> None:
        if record.sent:
            self._patience.check(record, self.clock.now)
            self._patience.finish(record)
        self._endings[reason] += 1
        ticket.__exit__()
        del self._live[record.request.id]

    def _check_error(self, record: Record, output: Output, deaths: int) -> None:
        """Only a failed step and the engine's deaths may cost a request its answer."""
        if record.sent and self._failed and "told to fail" in (output.error or ""):
            return
        if not record.sent and deaths >= MOST_DEATHS:
            return
        raise Violation(f"{record.request.id} ended with an error that nothing has caused: {output.error}")

    def _check_deadline(self, record: Record) -> None:
        deadline = record.request.service.deadline
        if deadline is None:
            return
        heard = max(deadline, record.arrived)  # while no engine had it, none could tell
        if self.clock.now > heard + 3 * self._patience.longest_step:
            raise Violation(f"{record.request.id} lives on {self.clock.now - deadline:.3f} s after its deadline")

    def _say(self, line: str) -> None:
        line = f"{self.steps} {self.clock.now:.6f} {line}"
        self._trace.update(line.encode())
        if self._told:
            self._told(line)

    def _count(self) -> None:
        counts = self.engine.scheduler.counts
        self._preemptions += counts["preemptions"]
        self._disk_hits += counts["disk_hit_tokens"]

    def _report(self, violation: str | None) -> Report:
        return Report(
            config=self.config,
            steps=self.steps,
            virtual_seconds=round(self.clock.now, 3),
            requests=self._serial - self._refused,
            refused=self._refused,
            endings=dict(self._endings),
            preemptions=self._preemptions,
            deaths=self._deaths,
            disk_hit_tokens=self._disk_hits,
            disk_faults=self._store.faults,
            hit_share=round(self._hits / max(self._queried, 1), 4),
            worst_wait=round(self._patience.worst, 4),
            worst_lead=round(self._fairness.worst, 4),
            trace=self._trace.hexdigest(),
            violation=violation,
        )
