"""The OpenAI-compatible API over a frontend.

POST /v1/chat/completions, /v1/completions      streamed (server-sent events) and not
POST /v1/responses, /v1/embeddings              see `responses`, `embeddings`
POST /v1/messages, /api/chat, /v2/...           see `anthropic`, `ollama`, `kserve`
POST /tokenize, /detokenize, ...                see `helpers`
GET  /v1/models, /v1/models/{id}                the one model served
GET  /health                                    200 unless the engine is gone for good
GET  /ready                                     200 when a request would be served at once, else 503
GET  /metrics                                   Prometheus
GET  /debug/state                               what lives in the server and the engine, for the operator
POST /debug/abort                               see `abort`
GET  /console                                   see `console`
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tricorn.engine.gate import Gate, GateOptions, Ticket
from tricorn.engine.messages import Survival
from tricorn.frontend.generate import Delta, Frontend, join
from tricorn.frontend.turn import Turn, TurnReader
from tricorn.request import Namespace, SamplingParams, Service, TricornError
from tricorn.server import answers, anthropic, headers, kserve, ollama, responses, schema, tools
from tricorn.server.abort import Aborts
from tricorn.server.answers import Fields, Prompt
from tricorn.server.batches import BATCHED, Batches, Inside
from tricorn.server.console import Console
from tricorn.server.embeddings import Embeddings
from tricorn.server.errors import HttpError, printable, too_late
from tricorn.server.exchange import OPENAI, Dialect, Endpoint, Exchange, HeaderLimit, request_id
from tricorn.server.files import Files, open_folder
from tricorn.server.generation import Generations, unserved
from tricorn.server.guard import Guard, GuardOptions
from tricorn.server.helpers import Helpers
from tricorn.server.inference import Inference
from tricorn.server.journal import Journal
from tricorn.server.loading import answer_ready
from tricorn.server.logs import Format, Level
from tricorn.server.metrics import Metrics
from tricorn.server.openapi import Description
from tricorn.server.rates import RateOptions
from tricorn.server.routes import Operation, Routes
from tricorn.server.tracing import Tracing

CONTEXTS = 16
"""Prompt tokens that may wait, in contexts of the model, unless an option says how many."""

NOTHING: Fields = {"delta": {}, "logprobs": None, "finish_reason": None}
"""A choice of a chat's stream that says nothing."""

STATE_SECONDS = 2.0
"""How long the engine may take to tell its state; it does between two steps."""


@dataclass(frozen=True)
class ServerOptions:
    """How to serve. `name` is the model's name in the API. `max_waiting` bounds the sequences that wait for the engine
    beyond those that it runs at once, `max_waiting_tokens` their prompts (None: 16 contexts), and `max_wait` the
    seconds that a newcomer would wait (0: any): more are refused with 429. `drain_seconds` is how long requests may go
    on after a signal to stop. `grpc_port` serves gRPC too. Of `api_keys`, if there are any, a request must show one;
    `admin_key` opens /debug/state. `rate_limit_requests` and `rate_limit_tokens` are what each key may use in a minute.
    Pages of `cors_origins` may call from a browser. `state_dir` keeps files and batches; None keeps none.
    With `tls_cert` and `tls_key`, both in PEM, all ports speak TLS.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    max_waiting: int = 256
    max_waiting_tokens: int | None = None
    max_wait: float = 60.0
    drain_seconds: float = 10.0
    admin_key: str | None = field(default=None, repr=False)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    rate_limit_requests: int | None = None
    rate_limit_tokens: int | None = None
    cors_origins: tuple[str, ...] = ()
    state_dir: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log_level: Level = "warning"
    log_format: Format = "text"

    @property
    def guard(self) -> GuardOptions:
        rates = RateOptions(self.rate_limit_requests, self.rate_limit_tokens)
        return GuardOptions(self.api_keys, self.admin_key, self.host, rates)


def create_app(frontend: Frontend, options: ServerOptions, tracing: Tracing | None = None) -> FastAPI:
    """The ASGI application; its `state.api` is the Api."""
    api = Api(frontend, options, tracing)
    description = Description()
    groups: dict[str, tuple[Dialect, Routes]] = {
        "OpenAI": (OPENAI, (*api.routes, *api.embeddings.routes, *api.files.routes, *api.batches.routes)),
        "Responses": (responses.DIALECT, api.responses.routes),
        "Console": (OPENAI, (*Console().routes, *Aborts(api.work).routes)),
        "Helpers": (OPENAI, Helpers(api.work).routes),
        "Anthropic": (anthropic.DIALECT, anthropic.Anthropic(api.work).routes),
        "Ollama": (ollama.DIALECT, ollama.Ollama(api.work).routes),
        "Open Inference Protocol": (kserve.DIALECT, kserve.Kserve(Inference(api.work)).routes),
        "This description": (OPENAI, description.routes),
    }
    description.describe(groups)
    routes: list[BaseRoute] = [
        api.route(operation, dialect) for dialect, operations in groups.values() for operation in operations
    ]
    api.operations = tuple(operation for _, operations in groups.values() for operation in operations)
    app = FastAPI(openapi_url=None, routes=routes, redirect_slashes=False)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
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
    """One validated request on its way through the engine. Answers of a chat have a `turn`."""

    body: schema.Sampling
    prompts: list[Prompt]
    params: SamplingParams
    head: Fields
    turn: Turn | None
    echo: bool
    ids: bool
    usage: bool
    deltas: AsyncIterator[Delta]

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.params.n


class Api:
    """The handlers, and who may use them when."""

    def __init__(self, frontend: Frontend, options: ServerOptions, tracing: Tracing | None = None) -> None:
        info = frontend.client.info
        self.metrics = Metrics(options.name, info)
        self.journal = Journal(options.name, tracing)
        self._frontend = frontend
        self._options = options
        self._name = options.name
        self._created = int(time.time())
        tokens = options.max_waiting_tokens
        gate = Gate(
            info.max_sequences,
            GateOptions(
                max_waiting=options.max_waiting,
                max_waiting_tokens=CONTEXTS * info.context if tokens is None else tokens,
                max_wait=options.max_wait,
            ),
        )
        self.guard = Guard(options.guard)
        self.operations: Routes = ()
        """Every route that is served, those of all protocols."""
        self.work = Generations(frontend, gate, self.guard.rates, self.metrics, options.name, options.drain_seconds)

        self.embeddings = Embeddings(self.work)
        self.responses = responses.Responses(self.work)
        self.files = Files(*open_folder(options.state_dir))
        endpoints = {
            operation.path: Endpoint(operation.path, operation.handle, self.journal, self.metrics.error)
            for operation in (*self.routes, *self.embeddings.routes, *self.responses.routes)
            if operation.path in BATCHED
        }
        slots = info.max_sequences
        self.inside = Inside(endpoints, lambda: gate.sequences < max(1, slots - 1))
        self.batches = Batches(self.files, self.inside)

    @property
    def routes(self) -> Routes:
        return (
            Operation(
                "POST",
                "/v1/chat/completions",
                self.chat,
                "key",
                "Answer a conversation",
                (schema.Sampling, schema.Chat),
            ),
            Operation(
                "POST",
                "/v1/completions",
                self.completions,
                "key",
                "Go on with a text",
                (schema.Sampling, schema.Completion),
            ),
            Operation("GET", "/v1/models", self.models, "key", "The models: one"),
            Operation("GET", "/v1/models/{id:path}", self.models, "key", "One model"),
            Operation("GET", "/health", self.health, "open", "Whether the engine lives"),
            Operation("GET", "/ready", self.ready, "open", "Whether a request would be served at once"),
            Operation("GET", "/metrics", self.exposition, "key", "For Prometheus", gives="text/plain"),
            Operation("GET", "/debug/state", self.debug_state, "admin", "What lives in the server and the engine"),
        )

    def route(self, operation: Operation, dialect: Dialect) -> Route:
        """Where a request to the operation ends up."""
        counted = operation.method == "POST"
        admit = partial(self.guard.admit, access=operation.access, counted=counted)
        handle, path = operation.handle, operation.path
        endpoint = Endpoint(path, handle, self.journal, self.metrics.error, dialect, admit)
        return Route(path, endpoint, methods=[operation.method])

    # --- generation

    async def chat(self, exchange: Exchange) -> None:
        body = await exchange.body()  # even to be refused: a client that is still sending hears no answer
        self.work.open()
        sampling, chat, params = schema.read_chat(body)
        service = self._service(exchange, sampling)
        with await self.work.admit(sampling.model, params.n) as ticket:
            work = self._chat(exchange, ticket, sampling, chat, params, service)
            await self.work.perform(exchange, work, service.deadline)

    async def _chat(
        self,
        exchange: Exchange,
        ticket: Ticket,
        body: schema.Sampling,
        chat: schema.Chat,
        params: SamplingParams,
        service: Service,
    ) -> None:
        messages, begun = chat.conversation
        variables = schema.variables(chat, self._frontend.template)
        ids, turn = await self._frontend.begin(
            messages, variables, tools=chat.offered, constraint=params.constraint, continuation=begun
        )
        if chat.include_reasoning is False:
            turn = replace(turn, silent=True)
        params = msgspec.structs.replace(params, constraint=turn.constraint)
        ids = schema.truncated(ids, body, params.max_tokens, self._frontend.context)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        head = answers.header(kind, "chatcmpl", self._name)
        await self._run(exchange, ticket, body, [Prompt(ids)], params, head, service, turn, echo=False)

    async def completions(self, exchange: Exchange) -> None:
        body = await exchange.body()
        self.work.open()
        sampling, completion, params = schema.read_completion(body)
        prompts = schema.prompts(completion.prompt)
        service = self._service(exchange, sampling)
        with await self.work.admit(sampling.model, len(prompts) * params.n) as ticket:
            work = self._complete(exchange, ticket, sampling, completion, prompts, params, service)
            await self.work.perform(exchange, work, service.deadline)

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
        special, parse = completion.add_special_tokens is not False, completion.parse_special is not False
        echo = bool(completion.echo)
        prompts = []
        for prompt in given:
            ids = prompt if isinstance(prompt, list) else []
            if isinstance(prompt, str):
                ids = await self._frontend.encode(prompt, add_special=special, parse_special=parse)
            ids = schema.truncated(ids, body, params.max_tokens, self._frontend.context)
            self._frontend.check(ids, params)
            prompts.append(answers.echoed(self._frontend.tokenizer, ids) if echo else Prompt(ids))
            await asyncio.sleep(0)  # many prompts must not hold up the others
        head = answers.header("text_completion", "cmpl", self._name)
        await self._run(exchange, ticket, body, prompts, params, head, service, None, echo=echo)

    async def _run(
        self,
        exchange: Exchange,
        ticket: Ticket,
        body: schema.Sampling,
        prompts: list[Prompt],
        params: SamplingParams,
        head: Fields,
        service: Service,
        turn: Turn | None,
        *,
        echo: bool,
    ) -> None:
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        ids = [prompt.ids for prompt in prompts]
        visible = frozenset[int]() if turn is None else turn.visible
        async with self.work.run(exchange, ticket, ids, params, service, head["id"], visible) as deltas:
            job = Job(body, prompts, params, head, turn, echo, bool(body.return_token_ids), usage, deltas)
            await (self._stream(exchange, job) if body.stream else self._whole(exchange, job))

    def _service(self, exchange: Exchange, body: schema.Sampling) -> Service:
        timeout = body.timeout if body.timeout is not None else headers.timeout(exchange.header(b"x-request-timeout"))
        return Service(
            namespace=Namespace(salt=body.cache_salt or "", tenant=exchange.tenant),
            priority=body.priority or 0,
            deadline=None if timeout is None else exchange.entry.started + timeout,
            retention=50 if body.retention is None else body.retention,
            pin_seconds=body.pin_seconds or 0.0,
        )

    async def _whole(self, exchange: Exchange, job: Job) -> None:
        collected: list[list[Delta]] = [[] for _ in range(job.choices)]
        async for delta in job.deltas:
            collected[delta.index].append(delta)
        deltas = [join(group) for group in collected]
        if all(unserved(delta) for delta in deltas):
            raise too_late()
        choices = [self._choice(job, delta, None if job.turn is None else job.turn.reader()) for delta in deltas]
        totals = {"usage": self._usage(job, deltas), "timings": self._timings(job, deltas)}
        await exchange.answer_json({**job.head, "choices": choices, **totals})

    async def _stream(self, exchange: Exchange, job: Job) -> None:
        readers = [None if job.turn is None else job.turn.reader() for _ in range(job.choices)]
        last: list[Delta | None] = [None] * job.choices
        cached = [0] * job.choices
        unsent: list[Fields] = []
        continuous = schema.reports_continuously(job.body)
        async for delta in job.deltas:
            first = last[delta.index] is None
            last[delta.index] = delta
            cached[delta.index] = max(cached[delta.index], delta.cached_tokens)
            choice = self._choice(job, delta, readers[delta.index], streamed=True, first=first)
            if first and job.turn:
                opening = {"index": delta.index, "delta": {"role": "assistant", "content": ""}}
                unsent.append({**job.head, "choices": [{**opening, "logprobs": None, "finish_reason": None}]})
            if choice != {**NOTHING, "index": delta.index}:  # what came may still be the beginning of a call
                unsent.append({**job.head, "choices": [choice]})
            so_far = [known for known in last if known is not None] if continuous or delta.finish_reason else []
            if continuous:
                usage = self._usage(job, so_far, cached)
                for chunk in unsent:
                    chunk.setdefault("usage", usage)
            if not job.usage and sum(known.finish_reason is not None for known in so_far) == job.choices:
                unsent[-1]["timings"] = self._timings(job, so_far, cached)
            if not unserved(delta):  # as long as there is nothing to show, a status can still say so
                await exchange.events(*unsent)
                unsent.clear()
        ended = [delta for delta in last if delta is not None]
        if all(map(unserved, ended)):
            raise too_late()
        if job.usage:
            totals = {"usage": self._usage(job, ended, cached), "timings": self._timings(job, ended, cached)}
            unsent.append({**job.head, "choices": [], **totals})
        await exchange.events(*unsent)
        await exchange.end_events()

    def _choice(
        self, job: Job, delta: Delta, reader: TurnReader | None, *, streamed: bool = False, first: bool = True
    ) -> Fields:
        """One choice of an answer, or what a delta adds to it."""
        prompt = job.prompts[delta.index // job.params.n]
        tokenizer = answers.Numbers() if job.body.return_tokens_as_token_ids else self._frontend.tokenizer
        choice: Fields = {"index": delta.index}
        reason: str | None = delta.finish_reason
        if reader is not None:
            piece = reader.push(delta)
            reason = piece.finish_reason
            choice |= {"delta": tools.delta(piece)} if streamed else {"message": tools.message(piece)}
            choice["logprobs"] = answers.chat_logprobs(tokenizer, delta)
        else:
            opening = job.echo and first
            choice["text"] = prompt.text + delta.text if opening else delta.text
            choice["logprobs"] = answers.completion_logprobs(tokenizer, delta, prompt, echo=opening)
        choice["finish_reason"] = reason
        if reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if job.body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            choice["prompt_logprobs"] = answers.prompt_logprobs(tokenizer, prompt, delta.prompt_logprobs)
        if job.ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = prompt.ids
        return choice

    def _usage(self, job: Job, last: list[Delta], cached: list[int] | None = None) -> Fields:
        """Counts every sampled token of every choice."""
        return answers.usage(job.prompts, sum(d.completion_tokens for d in last), self._cached(job, last, cached))

    def _timings(self, job: Job, last: list[Delta], cached: list[int] | None = None) -> Fields:
        return answers.timings(job.prompts, last, self._cached(job, last, cached))

    def _cached(self, job: Job, last: list[Delta], cached: list[int] | None) -> int:
        """The cached tokens of each prompt's first choice."""
        known = [delta.cached_tokens for delta in last] if cached is None else cached
        return sum(known[:: job.params.n])

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
        if self.work.status == "dead":
            raise HttpError(503, "the engine is not running", code="engine_unavailable")
        await exchange.answer_json({"status": "ok"})

    async def ready(self, exchange: Exchange) -> None:
        await answer_ready(exchange, self.work.status)

    async def exposition(self, exchange: Exchange) -> None:
        client = self._frontend.client
        survival: Survival | None = getattr(client, "survival", None)
        text = self.metrics.exposition(await client.stats(), survival, getattr(client, "pid", None))
        await exchange.answer(200, text, b"text/plain; version=0.0.4; charset=utf-8")

    async def debug_state(self, exchange: Exchange) -> None:
        """Everything that lives here; with ?tree=1, the cached prefixes too. Without the text of any prompt; ids of
        requests are the clients' own."""
        tree = exchange.query("tree")
        if tree not in (None, "0", "1"):
            raise HttpError(400, "tree must be 0 or 1", "tree", "invalid_value")
        gate = self.work.gate
        server = {
            "status": self.work.status,
            "requests": self.journal.live(),
            "gate": {
                "sequences": gate.sequences,
                "capacity": gate.capacity,
                "waiting_tokens": gate.waiting_tokens,
                "wait_seconds": round(gate.wait(await self._frontend.client.stats()), 3),
                **msgspec.to_builtins(gate.options),
            },
        }
        await exchange.answer_json({"server": server, "engine": await self._engine_state(tree == "1")})

    async def _engine_state(self, tree: bool) -> Fields | None:
        """None when the engine does not answer now."""
        try:
            async with asyncio.timeout(STATE_SECONDS):
                return await self._frontend.client.state(tree=tree)
        except (TimeoutError, TricornError):
            return None
