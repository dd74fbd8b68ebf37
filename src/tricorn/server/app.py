"""The OpenAI-compatible API over a frontend.

POST /v1/chat/completions, /v1/completions      streamed (server-sent events) and not
GET  /v1/models, /v1/models/{id}                the one model served
GET  /health                                    200 unless the engine is gone for good
GET  /ready                                     200 when a request would be served at once, else 503
GET  /metrics                                   Prometheus
GET  /debug/state                               what lives in the server and the engine, for the operator
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tricorn.engine.gate import Gate, GateOptions, Ticket
from tricorn.engine.messages import Survival
from tricorn.frontend.generate import Delta, Frontend, join
from tricorn.request import Namespace, SamplingParams, Service, TricornError
from tricorn.server import answers, headers, schema
from tricorn.server.admin import check_admin
from tricorn.server.answers import Fields, Prompt
from tricorn.server.errors import HttpError, printable, too_late
from tricorn.server.exchange import Endpoint, Exchange, HeaderLimit, request_id
from tricorn.server.journal import Journal
from tricorn.server.loading import answer_ready
from tricorn.server.logs import Format, Level
from tricorn.server.metrics import Metrics, Watch
from tricorn.server.tracing import Tracing

CONTEXTS = 16
"""Prompt tokens that may wait, in contexts of the model, unless an option says how many."""

STATE_SECONDS = 2.0
"""How long the engine may take to tell its state; it does between two steps."""


@dataclass(frozen=True)
class ServerOptions:
    """How to serve. `name` is the model's name in the API. `max_waiting` bounds the sequences that wait for the engine
    beyond those that it runs at once, `max_waiting_tokens` their prompts (None: 16 contexts), and `max_wait` the
    seconds that a newcomer would wait (0: any): more are refused with 429. `drain_seconds` is how long requests may go
    on after a signal to stop. `admin_key` opens /debug/state.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    max_waiting: int = 256
    max_waiting_tokens: int | None = None
    max_wait: float = 60.0
    drain_seconds: float = 10.0
    admin_key: str | None = field(default=None, repr=False)
    log_level: Level = "warning"
    log_format: Format = "text"


def create_app(frontend: Frontend, options: ServerOptions, tracing: Tracing | None = None) -> FastAPI:
    """The ASGI application; its `state.api` is the Api."""
    api = Api(frontend, options, tracing)
    routes: list[BaseRoute] = [
        Route(path, Endpoint(path, handle, api.journal, api.metrics.error), methods=[method])
        for method, path, handle in (
            ("POST", "/v1/chat/completions", api.chat),
            ("POST", "/v1/completions", api.completions),
            ("GET", "/v1/models", api.models),
            ("GET", "/v1/models/{id:path}", api.models),
            ("GET", "/health", api.health),
            ("GET", "/ready", api.ready),
            ("GET", "/metrics", api.exposition),
            ("GET", "/debug/state", api.debug_state),
        )
    ]
    app = FastAPI(openapi_url=None, routes=routes, redirect_slashes=False)
    app.add_middleware(HeaderLimit)
    app.add_exception_handler(HTTPException, _http_exception)
    app.state.api = api
    return app


async def _http_exception(request: HttpRequest, error: Exception) -> Response:
    """No such route, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {printable(request.url.path, 80)}: {error.detail.lower()}"
    body = HttpError(error.status_code, message).body()
    headers = {**(error.headers or {}), "x-request-id": request_id(request.scope)}
    return Response(body, error.status_code, headers, "application/json")


@dataclass(frozen=True)
class Job:
    """One validated request on its way through the engine. `chat` tells which of the two shapes its answer takes."""

    prompts: list[Prompt]
    params: SamplingParams
    head: Fields
    chat: bool
    echo: bool
    ids: bool
    usage: bool
    deltas: AsyncGenerator[Delta, None]
    watch: Watch

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.params.n


class Api:
    """The handlers, and who may use them when."""

    def __init__(self, frontend: Frontend, options: ServerOptions, tracing: Tracing | None = None) -> None:
        info = frontend.client.info
        self.metrics = Metrics(options.name, info)
        self.journal = Journal(options.name, tracing)
        self.draining = False
        """Whether new requests are refused, so that the server may stop when the last one has ended."""
        self._frontend = frontend
        self._options = options
        self._name = options.name
        self._created = int(time.time())
        self._running: set[Exchange] = set()
        tokens = options.max_waiting_tokens
        self._gate = Gate(
            info.max_sequences,
            GateOptions(
                max_waiting=options.max_waiting,
                max_waiting_tokens=CONTEXTS * info.context if tokens is None else tokens,
                max_wait=options.max_wait,
            ),
        )

    @property
    def status(self) -> str:
        """ "ready", or why not: "draining", or that of the engine."""
        engine = self._frontend.client.status
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
            exchange.cut()

    # --- generation

    async def chat(self, exchange: Exchange) -> None:
        body = await exchange.body()  # even to be refused: a client that is still sending hears no answer
        self._open()
        sampling, chat, params = schema.read_chat(body)
        service = self._service(exchange, sampling)
        with await self._admit(sampling.model, params.n) as ticket:
            await self._work(exchange, self._chat(exchange, ticket, sampling, chat, params, service), service)

    async def _chat(
        self,
        exchange: Exchange,
        ticket: Ticket,
        body: schema.Sampling,
        chat: schema.Chat,
        params: SamplingParams,
        service: Service,
    ) -> None:
        ids = await self._frontend.encode_chat(chat.messages, chat.chat_template_kwargs)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        head = answers.header(kind, "chatcmpl", self._name)
        await self._run(exchange, ticket, body, [Prompt(ids)], params, head, service, chat=True, echo=False)

    async def completions(self, exchange: Exchange) -> None:
        body = await exchange.body()
        self._open()
        sampling, completion, params = schema.read_completion(body)
        prompts = schema.prompts(completion)
        service = self._service(exchange, sampling)
        with await self._admit(sampling.model, len(prompts) * params.n) as ticket:
            work = self._complete(exchange, ticket, sampling, completion, prompts, params, service)
            await self._work(exchange, work, service)

    async def _complete(
        self,
        exchange: Exchange,
        ticket: Ticket,
        body: schema.Sampling,
        completion: schema.Completion,
        given: list[str | list[int]],
        params: SamplingParams,
        service: Service,
    ) -> None:
        parse = completion.parse_special is not False
        echo = bool(completion.echo)
        prompts = []
        for prompt in given:
            ids = await self._frontend.encode(prompt, parse_special=parse) if isinstance(prompt, str) else prompt
            self._frontend.check(ids, params)
            prompts.append(answers.echoed(self._frontend.tokenizer, ids) if echo else Prompt(ids))
            await asyncio.sleep(0)  # many prompts must not hold up the others
        head = answers.header("text_completion", "cmpl", self._name)
        await self._run(exchange, ticket, body, prompts, params, head, service, chat=False, echo=echo)

    async def _run(
        self,
        exchange: Exchange,
        ticket: Ticket,
        body: schema.Sampling,
        prompts: list[Prompt],
        params: SamplingParams,
        head: Fields,
        service: Service,
        *,
        chat: bool,
        echo: bool,
    ) -> None:
        lengths = [len(prompt.ids) for prompt in prompts]
        deltas = self._frontend.generate([prompt.ids for prompt in prompts], params, service=service)
        ticket.queue(sum(lengths), await self._frontend.client.stats())
        exchange.entry.phase, exchange.entry.answer_id = "waiting", head["id"]
        limit = min(params.max_tokens, self._frontend.context)
        counted = msgspec.structs.replace(params, max_tokens=limit)
        watch = Watch(self.metrics, exchange.entry, ticket, counted, lengths)
        wants_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        job = Job(prompts, params, head, chat, echo, bool(body.return_token_ids), wants_usage, deltas, watch)
        failed = False
        try:
            async with aclosing(deltas):
                await (self._stream(exchange, job) if body.stream else self._whole(exchange, job))
        except Exception:
            failed = True
            raise
        finally:
            watch.end(failed)

    async def _work(self, exchange: Exchange, work: Coroutine[Any, Any, None], service: Service) -> None:
        """Runs a generation that was let in."""
        exchange.entry.phase = "tokenizing"
        self._running.add(exchange)
        try:
            await exchange.while_connected(work, service.deadline)
        finally:
            self._running.discard(exchange)

    def _open(self) -> None:
        """Raises HttpError 503 when nothing new is taken. A request that comes while the engine is being restarted
        waits for it.
        """
        if self.status == "draining":
            raise HttpError(
                503,
                "the server is about to stop: ask another one, or this one again later",
                code="shutting_down",
                retry_after=self._options.drain_seconds,
                close=True,
            )
        if self.status == "dead":
            raise HttpError(503, "the engine is not running", code="engine_unavailable", retry_after=5)

    async def _admit(self, model: str | None, sequences: int) -> Ticket:
        """Lets a request in before any work is spent on its prompt, or refuses it. Raises HttpError or Refused."""
        if model is not None and model != self._name:
            raise HttpError(404, f"the model {printable(model, 80)!r} is not served here: use {self._name!r}", "model")
        if sequences > self._gate.capacity:
            raise HttpError(
                400,
                f"the request asks for {sequences} sequences; this server holds at most {self._gate.capacity}",
                "n",
                "too_many_sequences",
            )
        return self._gate.enter(sequences, await self._frontend.client.stats())

    def _service(self, exchange: Exchange, body: schema.Sampling) -> Service:
        timeout = body.timeout if body.timeout is not None else headers.timeout(exchange.header(b"x-request-timeout"))
        return Service(
            namespace=Namespace(salt=body.cache_salt or "", tenant=headers.tenant(exchange.header(b"x-tenant"))),
            priority=body.priority or 0,
            deadline=None if timeout is None else exchange.entry.started + timeout,
            retention=50 if body.retention is None else body.retention,
            pin_seconds=body.pin_seconds or 0.0,
        )

    async def _whole(self, exchange: Exchange, job: Job) -> None:
        collected: list[list[Delta]] = [[] for _ in range(job.choices)]
        async for delta in job.deltas:
            job.watch.delta(delta)
            collected[delta.index].append(delta)
        deltas = [join(group) for group in collected]
        if all(_unserved(delta) for delta in deltas):
            raise too_late()
        choices = [self._choice(job, delta, streamed=False, first=True) for delta in deltas]
        await exchange.answer_json({**job.head, "choices": choices, "usage": self._usage(job, deltas)})

    async def _stream(self, exchange: Exchange, job: Job) -> None:
        last: list[Delta | None] = [None] * job.choices
        cached = [0] * job.choices
        unsent: list[Fields] = []
        async for delta in job.deltas:
            job.watch.delta(delta)
            first = last[delta.index] is None
            last[delta.index] = delta
            cached[delta.index] = max(cached[delta.index], delta.cached_tokens)
            choice = self._choice(job, delta, streamed=True, first=first)
            if first and job.chat:
                opening = {"index": delta.index, "delta": {"role": "assistant", "content": ""}}
                unsent.append({**job.head, "choices": [{**opening, "logprobs": None, "finish_reason": None}]})
            unsent.append({**job.head, "choices": [choice]})
            if not _unserved(delta):  # as long as there is nothing to show, a status can still say so
                await exchange.events(*unsent)
                unsent.clear()
        ended = [delta for delta in last if delta is not None]
        if all(map(_unserved, ended)):
            raise too_late()
        if job.usage:
            unsent.append({**job.head, "choices": [], "usage": self._usage(job, ended, cached)})
        await exchange.events(*unsent)
        await exchange.end_events()

    def _choice(self, job: Job, delta: Delta, *, streamed: bool, first: bool) -> Fields:
        """One choice of an answer, or what a delta adds to it."""
        prompt = job.prompts[delta.index // job.params.n]
        tokenizer = self._frontend.tokenizer
        choice: Fields = {"index": delta.index}
        if job.chat and streamed:
            choice["delta"] = {"content": delta.text} if delta.text else {}
            choice["logprobs"] = answers.chat_logprobs(tokenizer, delta)
        elif job.chat:
            choice["message"] = {"role": "assistant", "content": delta.text, "refusal": None}
            choice["logprobs"] = answers.chat_logprobs(tokenizer, delta)
        else:
            opening = job.echo and first
            choice["text"] = prompt.text + delta.text if opening else delta.text
            choice["logprobs"] = answers.completion_logprobs(tokenizer, delta, prompt, echo=opening)
        choice["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if job.ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = prompt.ids
        return choice

    def _usage(self, job: Job, last: list[Delta], cached: list[int] | None = None) -> Fields:
        """Counts every sampled token of every choice; `cached_tokens` are those of each prompt's first choice."""
        known = [delta.cached_tokens for delta in last] if cached is None else cached
        return answers.usage(job.prompts, sum(d.completion_tokens for d in last), sum(known[:: job.params.n]))

    # --- the rest

    async def models(self, exchange: Exchange) -> None:
        card: Fields = {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "tricorn",
            "max_model_len": self._frontend.context,
        }
        wanted: Any = exchange.path_parameter("id")
        if wanted is None:
            await exchange.answer_json({"object": "list", "data": [card]})
        elif wanted == self._name:
            await exchange.answer_json(card)
        else:
            raise HttpError(404, f"the model {printable(wanted, 80)!r} is not served here", "model")

    async def health(self, exchange: Exchange) -> None:
        if self.status == "dead":
            raise HttpError(503, "the engine is not running", code="engine_unavailable")
        await exchange.answer_json({"status": "ok"})

    async def ready(self, exchange: Exchange) -> None:
        await answer_ready(exchange, self.status)

    async def exposition(self, exchange: Exchange) -> None:
        client = self._frontend.client
        survival: Survival | None = getattr(client, "survival", None)
        text = self.metrics.exposition(await client.stats(), survival, getattr(client, "pid", None))
        await exchange.answer(200, text, b"text/plain; version=0.0.4; charset=utf-8")

    async def debug_state(self, exchange: Exchange) -> None:
        """Everything that lives here. Without the text of any prompt; ids of requests are the clients' own."""
        check_admin(exchange.header(b"authorization"), self._options.admin_key, self._options.host)
        gate = self._gate
        server = {
            "status": self.status,
            "requests": self.journal.live(),
            "gate": {
                "sequences": gate.sequences,
                "capacity": gate.capacity,
                "waiting_tokens": gate.waiting_tokens,
                "wait_seconds": round(gate.wait(await self._frontend.client.stats()), 3),
                **msgspec.to_builtins(gate.options),
            },
        }
        await exchange.answer_json({"server": server, "engine": await self._engine_state()})

    async def _engine_state(self) -> Fields | None:
        """None when the engine does not answer now."""
        try:
            async with asyncio.timeout(STATE_SECONDS):
                return await self._frontend.client.state()
        except (TimeoutError, TricornError):
            return None


def _unserved(delta: Delta) -> bool:
    """Whether a choice ended because its time was over before it had begun."""
    return delta.finish_reason == "timeout" and delta.completion_tokens == 0
