"""Questions of capacity: many clients over many replicas, each a whole scheduler and cache, under a virtual clock.

A client asks, waits for the answer, thinks, and asks again. A router sends each request to a replica: to the one with
the least work outstanding, or, for prompts that begin alike, to one that has that beginning ("prefix"), unless that one
has much more to do than the least busy. A refused client comes back after the time that it was told.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Literal

import msgspec
import numpy as np

from tricorn.engine.engine import Engine
from tricorn.engine.gate import Gate, GateOptions, Refused, Ticket
from tricorn.request import Output, Request, SamplingParams
from tricorn.runtime.step import Step
from tricorn.scheduler.options import SchedulerOptions
from tricorn.simulate.clock import VirtualClock
from tricorn.simulate.executor import VOCAB, FakeExecutor
from tricorn.simulate.machine import Machine
from tricorn.simulate.timing import seconds_of

Router = Literal["least", "prefix"]

AFFINITY = 1.5
"""A replica keeps the prompts that begin alike until it has so many times the work of the least busy one, and
AFFINITY_REQUESTS more."""
AFFINITY_REQUESTS = 4


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """`clients` ask `requests` times each, `think` seconds after the last answer; they come within the first `ramp`
    seconds. Lengths vary by `spread` (a share) around `prompt` and `output`; the first `shared` prompt tokens are one
    of `groups` texts."""

    clients: int
    replicas: int
    prompt: int
    output: int
    requests: int = 3
    think: float = 1.0
    ramp: float = 10.0
    spread: float = 0.5
    shared: int = 0
    groups: int = 16
    router: Router = "least"
    max_waiting: int = 256
    max_wait: float = 60.0
    scheduler: SchedulerOptions = SchedulerOptions()
    seed: int = 0


class Quantiles(msgspec.Struct, frozen=True):
    """Seconds."""

    p50: float
    p99: float


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What the replicas come to. Rates are of all together, over the seconds from the first request to the last answer;
    shares are of all pages and of all replicas' time. `itl` is between two tokens, `per_token` the mean of that over an
    answer."""

    seconds: float
    requests: int
    refused: int
    ttft: Quantiles
    itl: Quantiles
    per_token: Quantiles
    latency: Quantiles
    output_tok_s: float
    prompt_tok_s: float
    hit_share: float
    preemptions: int
    busy_share: float
    pages_share_mean: float
    pages_share_most: float
    steps: int


class _Call:
    """A request under way: when the client asked first, and when it heard last."""

    __slots__ = ("asked", "client", "first", "heard", "ticket", "tokens")

    def __init__(self, client: int, asked: float, ticket: Ticket) -> None:
        self.client = client
        self.asked = asked
        self.first = self.heard = 0.0
        self.tokens = 0
        self.ticket = ticket


class _Replica:
    def __init__(self, machine: Machine, question: Question, replica: int) -> None:
        self.clock = VirtualClock()
        self.busy = 0.0
        self.steps = 0
        self.used: list[int] = []
        """Pages held, at each step."""
        self.calls: dict[str, _Call] = {}
        self.work = 0
        """Tokens of all requests that it has."""
        self.asleep = True
        jitter, cost = Random(f"jitter {question.seed} {replica}"), machine.cost

        def seconds(step: Step) -> float:
            took = seconds_of(step, cost) * jitter.uniform(0.97, 1.03)
            self.busy += took
            return took

        limits = machine.limits
        executor = FakeExecutor(machine.pages, limits.max_tokens, limits.max_rows, clock=self.clock, seconds=seconds)
        self.engine = Engine(executor, limits, question.scheduler, clock=self.clock)
        options = GateOptions(max_waiting=question.max_waiting, max_wait=question.max_wait)
        self.gate = Gate(limits.max_running, options, self.clock)

    def step(self, now: float) -> list[Output]:
        """One step that begins now; `clock` is then at its end."""
        self.clock.until(now)
        outputs = self.engine.step()
        self.steps += 1
        self.used.append(self.engine.pool.held)
        if self.clock.now == now and not self.engine.idle:
            self.clock.until(now + 1e-4)
        return outputs


class Fleet:
    """Answers one question. The events are clients that ask and replicas whose step has ended, in order of time."""

    def __init__(self, machine: Machine, question: Question) -> None:
        self._question = question
        self._random = Random(f"fleet {question.seed}")
        self._replicas = [_Replica(machine, question, replica) for replica in range(question.replicas)]
        self._context = machine.context
        self._texts = [self._ids(question.shared) for _ in range(question.groups)]
        self._group = [self._random.randrange(question.groups) for _ in range(question.clients)]
        self._homes: dict[int, int] = {}  # the replica of each group
        self._asked = [0] * question.clients
        self._events: list[tuple[float, int, int, float]] = []  # time, client or -1 - replica, serial, asked first
        self._serial = 0
        self._ttft: list[float] = []
        self._itl: list[float] = []
        self._per_token: list[float] = []
        self._latency: list[float] = []
        self._tokens = self._prompts = self._hits = self._refused = self._done = 0
        self._last = 0.0

    def run(self, told: Callable[[int, int], None] = lambda done, total: None) -> Capacity:
        """`told` hears now and then how many requests have been answered, and of how many."""
        question = self._question
        total = question.clients * question.requests
        for client in range(question.clients):
            at = self._random.random() * question.ramp
            self._at(at, client, at)
        while self._events:
            now, who, _, asked = heapq.heappop(self._events)
            if who >= 0:
                self._ask(who, now, asked)
            else:
                self._step(-1 - who, now)
            if self._serial % 1000 == 0:
                told(self._done, total)
        told(self._done, total)
        return self._capacity()

    def _at(self, time: float, who: int, asked: float = 0.0) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time, who, self._serial, asked))

    def _ids(self, count: int) -> list[int]:
        return [int(self._random.random() * VOCAB) for _ in range(count)]

    def _about(self, length: int) -> int:
        return max(1, round(length * self._random.uniform(1 - self._question.spread, 1 + self._question.spread)))

    def _ask(self, client: int, now: float, asked: float) -> None:
        question = self._question
        text = self._texts[self._group[client]]
        prompt = text + self._ids(max(self._about(question.prompt) - len(text), 1))
        prompt = prompt[: self._context - 1]
        output = min(self._about(question.output), self._context - len(prompt))
        index = self._route(client)
        replica = self._replicas[index]
        if replica.asleep:
            replica.clock.until(now)
        stats = replica.engine.stats()
        ticket = None
        try:
            ticket = replica.gate.enter(1, stats)
            ticket.queue(len(prompt), stats)
        except Refused as refused:
            if ticket is not None:
                ticket.__exit__()
            self._refused += 1
            self._at(now + refused.retry_after * self._random.uniform(1, 1.5), client, asked)
            return
        id = f"c{client} {self._asked[client]}"
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        replica.engine.add(Request(id=id, prompt=prompt, params=params, seed=client))
        replica.calls[id] = _Call(client, asked, ticket)
        self._prompts += len(prompt)
        if replica.asleep:
            replica.asleep = False
            self._at(now, -1 - index)

    def _route(self, client: int) -> int:
        question = self._question
        loads = [replica.gate.sequences for replica in self._replicas]
        least = min(range(len(loads)), key=loads.__getitem__)
        if question.router == "least" or not question.shared:
            return least
        home = self._homes.setdefault(self._group[client], least)
        if loads[home] > AFFINITY * loads[least] + AFFINITY_REQUESTS:
            home = self._homes[self._group[client]] = least
        return home

    def _step(self, index: int, now: float) -> None:
        replica = self._replicas[index]
        outputs = replica.step(now)
        for output in outputs:
            self._hear(replica, output)
        replica.asleep = replica.engine.idle
        if not replica.asleep:
            self._at(replica.clock.now, -1 - index)

    def _hear(self, replica: _Replica, output: Output) -> None:
        now, call, question = replica.clock.now, replica.calls[output.id], self._question
        if output.token_ids and not call.heard:
            self._ttft.append(now - call.asked)
            self._hits += output.cached_tokens
            call.first = now
            call.ticket.begin()
        elif output.token_ids:
            self._itl.append(now - call.heard)
        self._tokens += len(output.token_ids)
        call.tokens += len(output.token_ids)
        call.heard = now
        if output.finish_reason is None:
            return
        call.ticket.__exit__()
        del replica.calls[output.id]
        if call.tokens > 1:
            self._per_token.append((now - call.first) / (call.tokens - 1))
        self._latency.append(now - call.asked)
        self._done += 1
        self._last = max(self._last, now)
        self._asked[call.client] += 1
        if self._asked[call.client] < question.requests:
            again = now + self._random.expovariate(1 / question.think) if question.think else now
            self._at(again, call.client, again)

    def _capacity(self) -> Capacity:
        replicas = self._replicas
        pages = replicas[0].engine.pool.total
        used = np.concatenate([np.array(replica.used) for replica in replicas if replica.used]) / pages
        return Capacity(
            seconds=round(self._last, 3),
            requests=self._done,
            refused=self._refused,
            ttft=_quantiles(self._ttft),
            itl=_quantiles(self._itl),
            per_token=_quantiles(self._per_token),
            latency=_quantiles(self._latency),
            output_tok_s=round(self._tokens / self._last, 1),
            prompt_tok_s=round(self._prompts / self._last, 1),
            hit_share=round(self._hits / self._prompts, 4),
            preemptions=sum(replica.engine.stats().preemptions for replica in replicas),
            busy_share=round(sum(replica.busy for replica in replicas) / (len(replicas) * self._last), 4),
            pages_share_mean=round(float(used.mean()), 4),
            pages_share_most=round(float(used.max()), 4),
            steps=sum(replica.steps for replica in replicas),
        )


def _quantiles(seconds: list[float]) -> Quantiles:
    if not seconds:
        return Quantiles(0.0, 0.0)
    p50, p99 = np.quantile(seconds, [0.5, 0.99])
    return Quantiles(round(float(p50), 6), round(float(p99), 6))
