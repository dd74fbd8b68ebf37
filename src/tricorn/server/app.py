"""The OpenAI-compatible API over a frontend.

POST /v1/chat/completions, /v1/completions      streamed (server-sent events) and not
GET  /v1/models, /v1/models/{id}                the one model served
GET  /health                                    200 while the engine lives, else 503
GET  /metrics                                   Prometheus
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tricorn.frontend.generate import Delta, Frontend, join
from tricorn.request import Namespace, SamplingParams, Service
from tricorn.server import answers, schema
from tricorn.server.answers import Fields, Prompt
from tricorn.server.errors import HttpError, printable
from tricorn.server.exchange import Endpoint, Exchange, HeaderLimit
from tricorn.server.metrics import Metrics, Watch


@dataclass(frozen=True)
class ServerOptions:
    """How to serve. `name` is the model's name in the API; `max_waiting` bounds the sequences that wait for the engine
    beyond those that it runs at once: more are refused with 429. `drain_seconds` is how long streams may go on after
    a signal to stop.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    max_waiting: int = 256
    drain_seconds: float = 10.0


def create_app(frontend: Frontend, options: ServerOptions) -> FastAPI:
    """The ASGI application."""
    api = Api(frontend, options)
    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", Endpoint(api.chat, api.metrics.error), methods=["POST"]),
        Route("/v1/completions", Endpoint(api.completions, api.metrics.error), methods=["POST"]),
        Route("/v1/models", Endpoint(api.models, api.metrics.error), methods=["GET"]),
        Route("/v1/models/{id:path}", Endpoint(api.models, api.metrics.error), methods=["GET"]),
        Route("/health", Endpoint(api.health, api.metrics.error), methods=["GET"]),
        Route("/metrics", Endpoint(api.exposition, api.metrics.error), methods=["GET"]),
    ]
    app = FastAPI(openapi_url=None, routes=routes, redirect_slashes=False)
    app.add_middleware(HeaderLimit)
    app.add_exception_handler(HTTPException, _http_exception)
    return app


async def _http_exception(request: HttpRequest, error: Exception) -> Response:
    """No such route, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {printable(request.url.path, 80)}: {error.detail.lower()}"
    body = HttpError(error.status_code, message).body()
    return Response(body, error.status_code, error.headers, "application/json")


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
    """The handlers, and the count of sequences that they have let in."""

    def __init__(self, frontend: Frontend, options: ServerOptions) -> None:
        self.metrics = Metrics(options.name)
        self._frontend = frontend
        self._name = options.name
        self._created = int(time.time())
        self._capacity = frontend.client.info.max_sequences + options.max_waiting
        self._live = 0

    # --- generation

    async def chat(self, exchange: Exchange) -> None:
        started = time.monotonic()
        sampling, chat, params = schema.read_chat(await exchange.body())
        with self._admit(sampling.model, params.n):
            await exchange.while_connected(self._chat(exchange, sampling, chat, params, started))

    async def _chat(
        self, exchange: Exchange, body: schema.Sampling, chat: schema.Chat, params: SamplingParams, started: float
    ) -> None:
        ids = await self._frontend.encode_chat(chat.messages, chat.chat_template_kwargs)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        head = answers.header(kind, "chatcmpl", self._name)
        await self._run(exchange, body, [Prompt(ids)], params, head, started, chat=True, echo=False)

    async def completions(self, exchange: Exchange) -> None:
        started = time.monotonic()
        sampling, completion, params = schema.read_completion(await exchange.body())
        prompts = schema.prompts(completion)
        with self._admit(sampling.model, len(prompts) * params.n):
            await exchange.while_connected(self._complete(exchange, sampling, completion, prompts, params, started))

    async def _complete(
        self,
        exchange: Exchange,
        body: schema.Sampling,
        completion: schema.Completion,
        given: list[str | list[int]],
        params: SamplingParams,
        started: float,
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
        await self._run(exchange, body, prompts, params, head, started, chat=False, echo=echo)

    async def _run(
        self,
        exchange: Exchange,
        body: schema.Sampling,
        prompts: list[Prompt],
        params: SamplingParams,
        head: Fields,
        started: float,
        *,
        chat: bool,
        echo: bool,
    ) -> None:
        deltas = self._frontend.generate(
            [prompt.ids for prompt in prompts], params, service=Service(namespace=Namespace(salt=body.cache_salt or ""))
        )
        watch = Watch(self.metrics, sum(len(prompt.ids) for prompt in prompts), len(prompts) * params.n, started)
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

    @contextmanager
    def _admit(self, model: str | None, sequences: int) -> Iterator[None]:
        """Lets a request in before any work is spent on its prompt, or refuses it. Raises HttpError 404, 429 or 503."""
        if model is not None and model != self._name:
            raise HttpError(404, f"the model {printable(model, 80)!r} is not served here: use {self._name!r}", "model")
        if not self._frontend.client.alive:
            raise HttpError(503, "the engine is not running", code="engine_unavailable", retry_after=5)
        if self._live + sequences > self._capacity:
            raise HttpError(
                429,
                f"the server holds {self._live} of at most {self._capacity} sequences, {sequences} more do not fit",
                code="overloaded",
                retry_after=1,
            )
        self._live += sequences
        try:
            yield
        finally:
            self._live -= sequences

    async def _whole(self, exchange: Exchange, job: Job) -> None:
        collected: list[list[Delta]] = [[] for _ in range(job.choices)]
        async for delta in job.deltas:
            job.watch.delta(delta)
            collected[delta.index].append(delta)
        deltas = [join(group) for group in collected]
        choices = [self._choice(job, delta, streamed=False, first=True) for delta in deltas]
        await exchange.answer_json({**job.head, "choices": choices, "usage": self._usage(job, deltas)})

    async def _stream(self, exchange: Exchange, job: Job) -> None:
        last: list[Delta | None] = [None] * job.choices
        cached = [0] * job.choices
        async for delta in job.deltas:
            job.watch.delta(delta)
            first = last[delta.index] is None
            last[delta.index] = delta
            cached[delta.index] = max(cached[delta.index], delta.cached_tokens)
            choice = self._choice(job, delta, streamed=True, first=first)
            chunks = [{**job.head, "choices": [choice]}]
            if first and job.chat:
                opening = {"index": delta.index, "delta": {"role": "assistant", "content": ""}}
                chunks.insert(0, {**job.head, "choices": [{**opening, "logprobs": None, "finish_reason": None}]})
            await exchange.events(*chunks)
        if job.usage:
            await exchange.events(
                {**job.head, "choices": [], "usage": self._usage(job, [d for d in last if d], cached)}
            )
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
        if not self._frontend.client.alive:
            raise HttpError(503, "the engine is not running", code="engine_unavailable")
        await exchange.answer_json({"status": "ok"})

    async def exposition(self, exchange: Exchange) -> None:
        text = self.metrics.exposition(await self._frontend.client.stats())
        await exchange.answer(200, text, b"text/plain; version=0.0.4; charset=utf-8")
