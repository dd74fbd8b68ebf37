"""Generations, whatever protocol asks for them: who is let in, what is under way, and how it is counted.

A handler reads its request, then

    work.open()                                          nothing new while the server stops
    with await work.admit(model, sequences) as ticket:   a place, before any work is spent on the prompt
        await work.perform(exchange, answer(...), deadline)

and inside `answer` iterates `async with work.run(exchange, ticket, ...) as deltas`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import msgspec

from tricorn.engine.gate import Gate, Ticket
from tricorn.frontend.generate import Delta, Frontend
from tricorn.request import Namespace, SamplingParams, Service
from tricorn.server import headers
from tricorn.server.errors import HttpError, printable
from tricorn.server.exchange import Exchange
from tricorn.server.metrics import Metrics, Watch
from tricorn.server.rates import Rates


class Generations:
    """The generations of one server. `name` is the model's; `drain_seconds` how long a stopping server may take;
    `rates` what each caller may use.
    """

    def __init__(
        self, frontend: Frontend, gate: Gate, rates: Rates, metrics: Metrics, name: str, drain_seconds: float
    ) -> None:
        self.frontend = frontend
        self.name = name
        self.gate = gate
        self._rates = rates
        self.draining = False
        """Whether new requests are refused, so that the server may stop when the last one has ended."""
        self._metrics = metrics
        self._drain_seconds = drain_seconds
        self._running: set[Exchange] = set()

    @property
    def status(self) -> str:
        """ "ready", or why not: "draining", or that of the engine."""
        engine = self.frontend.client.status
        if engine == "dead" or not self.draining:
            return "loading" if engine == "starting" else engine
        return "draining"

    @property
    def busy(self) -> bool:
        """Whether a generation is under way."""
        return bool(self._running)

    def cut(self) -> None:
        """Ends the generations that are under way with an error."""
        for exchange in self._running:
            exchange.cut(HttpError(503, "the server stops", code="shutting_down", retry_after=1, close=True))

    @property
    def running(self) -> list[Exchange]:
        """The generations that are under way."""
        return list(self._running)

    def open(self) -> None:
        """Raises HttpError 503 when nothing new is taken. A request that comes while the engine is being restarted
        waits for it.
        """
        if self.status == "draining":
            raise HttpError(
                503,
                "the server is about to stop: ask another one, or this one again later",
                code="shutting_down",
                retry_after=self._drain_seconds,
                close=True,
            )
        if self.status == "dead":
            raise HttpError(503, "the engine is not running", code="engine_unavailable", retry_after=5)

    def check_model(self, model: str | None) -> None:
        """Raises HttpError 404 for a name that is not the model's. None is any."""
        if model is not None and model != self.name:
            raise HttpError(404, f"the model {printable(model, 80)!r} is not served here: use {self.name!r}", "model")

    async def admit(self, model: str | None, sequences: int = 1) -> Ticket:
        """Lets a request in before any work is spent on its prompt, or refuses it. Raises HttpError or Refused."""
        self.check_model(model)
        if sequences > self.gate.capacity:
            raise HttpError(
                400,
                f"the request asks for {sequences} sequences; this server holds at most {self.gate.capacity}",
                "n",
                "too_many_sequences",
            )
        return self.gate.enter(sequences, await self.frontend.client.stats())

    async def perform(self, exchange: Exchange, work: Coroutine[Any, Any, None], deadline: float | None) -> None:
        """Runs the work of a request that was let in, as long as its client waits for it."""
        exchange.entry.phase = "tokenizing"
        self._running.add(exchange)
        try:
            await exchange.while_connected(work, deadline)
        finally:
            self._running.discard(exchange)

    @asynccontextmanager
    async def run(
        self,
        exchange: Exchange,
        ticket: Ticket,
        prompts: list[list[int]],
        params: SamplingParams,
        service: Service,
        answer_id: str,
        visible: frozenset[int] = frozenset(),
    ) -> AsyncIterator[AsyncIterator[Delta]]:
        """The deltas of every choice, counted as they come, of as many at a time as were let in; tokens that are
        `visible` show. Leaving early aborts what is left."""
        lengths = [len(prompt) for prompt in prompts]
        deltas = self.frontend.generate(prompts, params, service=service, visible=visible, together=ticket.sequences)
        counted = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, self.frontend.context))
        with self._reserved(exchange, lengths, counted):
            ticket.queue(sum(lengths), await self.frontend.client.stats())
            exchange.entry.phase, exchange.entry.answer_id = "waiting", answer_id
            async with self._watched(deltas, Watch(self._metrics, exchange.entry, ticket, counted, lengths)) as watched:
                yield watched

    @contextmanager
    def _reserved(self, exchange: Exchange, lengths: list[int], params: SamplingParams) -> Iterator[None]:
        """Takes from the caller's rate what the generation may use, and in the end gives back what it did not."""
        room = sum(min(params.max_tokens, self.frontend.context - length) for length in lengths)
        reservation = self._rates.reserve(exchange.caller, sum(lengths) + room * params.n)
        exchange.extra = self._rates.headers(exchange.caller)
        try:
            yield
        finally:
            reservation.settle(exchange.entry.prompt_tokens + exchange.entry.output_tokens)

    @asynccontextmanager
    async def _watched(
        self, deltas: AsyncGenerator[Delta, None], watch: Watch
    ) -> AsyncIterator[AsyncGenerator[Delta, None]]:
        failed = False
        try:
            async with aclosing(deltas), aclosing(_counted(deltas, watch)) as watched:
                yield watched
        except Exception:
            failed = True
            raise
        finally:
            watch.end(failed)


async def _counted(deltas: AsyncGenerator[Delta, None], watch: Watch) -> AsyncGenerator[Delta, None]:
    async for delta in deltas:
        watch.delta(delta)
        yield delta


def service_of(exchange: Exchange, timeout: float | None = None) -> Service:
    """How a request asks to be served by its headers. `timeout`, in seconds, is that of its body."""
    if timeout is None:
        timeout = headers.timeout(exchange.header(b"x-request-timeout"))
    return Service(
        namespace=Namespace(tenant=exchange.tenant),
        deadline=None if timeout is None else exchange.entry.started + timeout,
    )


def unserved(delta: Delta) -> bool:
    """Whether a choice ended because its time was over before it had begun."""
    return delta.finish_reason == "timeout" and delta.completion_tokens == 0
