"""The Ollama API.

POST /api/chat, /api/generate     as lines of JSON (unless `stream` is false)
POST /api/embed, /api/embeddings  vectors of texts
POST /api/show                    what the model is
GET  /api/tags, /api/ps           the one model served
GET  /api/version

Defaults of sampling are Ollama's, but for `repeat_penalty`, which is off and counts the whole text. A model is there as
long as the server is: what asks to load or unload it succeeds and does nothing. Durations are in nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tricorn import __version__
from tricorn.engine.gate import Ticket
from tricorn.frontend.generate import Delta, join
from tricorn.frontend.parsers.calls import Call as NewCall
from tricorn.frontend.turn import Turn as FrontendTurn
from tricorn.request import Constraint, SamplingParams, Service
from tricorn.server import answers, schema
from tricorn.server.bodies import Refusals, check_form, check_refused, decode
from tricorn.server.constraints import json_constraint
from tricorn.server.embeddings import Dimensions, Embedded, Embedder, Work
from tricorn.server.errors import HttpError, too_late
from tricorn.server.exchange import Dialect, Exchange
from tricorn.server.generation import Generations, service_of, unserved
from tricorn.server.routes import Operation, Routes
from tricorn.server.tools import Offers, offered

Fields = dict[str, Any]


def error(error: HttpError) -> Fields:
    return {"error": error.message}


def line(value: Any) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(value) + b"\n"


DIALECT = Dialect(error, b"application/x-ndjson", line)

# --- requests


class Options(msgspec.Struct, frozen=True):
    """What may change an answer. `num_predict` below 0 is as much as the context leaves; a `repeat_last_n` of 0 turns
    the penalty off.
    """

    num_predict: Annotated[int, Meta(ge=-2, le=schema.MAX_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    repeat_last_n: Literal[-1, 0] | None = None
    presence_penalty: schema.Penalty | None = None
    frequency_penalty: schema.Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: schema.StopString | Annotated[list[schema.StopString], Meta(max_length=schema.MAX_STOPS)] | None = None

    def params(self, logprobs: int | None) -> SamplingParams:
        limit = -1 if self.num_predict is None else self.num_predict
        return SamplingParams(
            max_tokens=schema.MAX_TOKENS if limit < 0 else limit,
            temperature=_given(self.temperature, 0.8),
            top_k=max(0, _given(self.top_k, 40)),
            top_p=_given(self.top_p, 0.9),
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repeat_last_n == 0 else _given(self.repeat_penalty, 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            logprobs=logprobs,
        )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


class Call(msgspec.Struct, frozen=True):
    """A call that the assistant has made."""

    function: Fields


class Turn(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[Any], Meta(max_length=0)] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None

    @property
    def message(self) -> Fields:
        """As a chat template takes it."""
        message = {"role": self.role, "content": self.content or ""}
        calls = [{"type": "function", "function": call.function} for call in self.tool_calls or ()]
        rest = {"tool_calls": calls, "name": self.tool_name, "reasoning_content": self.thinking}
        return {**message, **{name: value for name, value in rest.items() if value}}


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chat and generate share."""

    model: Annotated[str, Meta(max_length=512)]
    stream: bool | None = None
    options: Options | None = None
    format: Literal["", "json"] | Fields | None = None
    logprobs: bool | None = None
    top_logprobs: schema.Alternatives | None = None
    think: bool | Literal["low", "medium", "high"] | None = None

    @property
    def variables(self) -> Fields:
        """What a chat template of a model that can think goes by."""
        return {} if self.think is None else {"enable_thinking": bool(self.think)}

    @property
    def params(self) -> SamplingParams:
        params = (self.options or Options()).params((self.top_logprobs or 0) if self.logprobs else None)
        if not self.format:
            return params
        constraint = Constraint("json_object") if self.format == "json" else json_constraint(self.format)
        return msgspec.structs.replace(params, constraint=constraint)


class Chat(Ask, frozen=True, kw_only=True):
    """The fields of /api/chat."""

    messages: Annotated[list[Turn], Meta(max_length=schema.MAX_MESSAGES)] = []
    tools: Offers | None = None


class Generate(Ask, frozen=True, kw_only=True):
    """The fields of /api/generate. `raw` leaves the chat template out."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class Embed(msgspec.Struct, frozen=True):
    """The fields of /api/embed. Texts that are too long are cut unless `truncate` is false."""

    model: Annotated[str, Meta(max_length=512)]
    input: str | Annotated[list[str], Meta(max_length=schema.MAX_PROMPTS)] = ""
    truncate: bool | None = None
    dimensions: Dimensions | None = None


class EmbedOne(msgspec.Struct, frozen=True):
    """The fields of /api/embeddings, whose vectors are not normalized."""

    model: Annotated[str, Meta(max_length=512)]
    prompt: str = ""


class Named(msgspec.Struct, frozen=True):
    """What asks about a model; older clients call it `name`."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    name: Annotated[str, Meta(max_length=512)] | None = None


class _Given(msgspec.Struct, frozen=True):
    options: dict[str, msgspec.Raw] | None = None


REFUSED: Refusals = {
    "context": ([],),
    "images": ([],),
    "suffix": ("",),
    "template": ("",),
}

REFUSED_OPTIONS: Refusals = {
    **dict.fromkeys(schema.KNOWN - set(Options.__struct_fields__), ()),
    "mirostat": (0,),
    "penalize_newline": (True,),
    "tfs_z": (1,),
    "typical_p": (1,),
}

_chat = msgspec.json.Decoder(Chat)
_generate = msgspec.json.Decoder(Generate)
_embed = msgspec.json.Decoder(Embed)
_embed_one = msgspec.json.Decoder(EmbedOne)
_named = msgspec.json.Decoder(Named)
_given_options = msgspec.json.Decoder(_Given)


def _check(body: bytes) -> None:
    check_form(body, REFUSED)
    check_refused(decode(_given_options, body).options or {}, REFUSED_OPTIONS, "options.")


def bare(model: str) -> str:
    """A model's name without the tag that says nothing."""
    return model.removesuffix(":latest")


# --- answers


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class _Voice:
    """Turns deltas into what a message says: thoughts and words as they come, calls when they are complete."""

    def __init__(self, turn: FrontendTurn | None) -> None:
        self._reader = None if turn is None else turn.reader()
        self._calls: dict[int, NewCall] = {}

    def push(self, delta: Delta) -> Fields:
        """Fields of a message."""
        if self._reader is None:
            return {"content": delta.text}
        piece = self._reader.push(delta)
        for call in piece.calls:
            known = self._calls.get(call.index)
            pieces = (
                call if known is None else msgspec.structs.replace(known, arguments=known.arguments + call.arguments)
            )
            self._calls[call.index] = pieces
        said: Fields = {"content": piece.words}
        if piece.thought:
            said["thinking"] = piece.thought
        if piece.finish_reason == "tool_calls":
            said["tool_calls"] = [_called(call) for call in self._calls.values()]
        return said


def _called(call: NewCall) -> Fields:
    function = {"index": call.index, "name": call.name, "arguments": msgspec.json.decode(call.arguments)}
    return {"id": call.id, "function": function}


class Ollama:
    """The handlers."""

    def __init__(self, work: Generations) -> None:
        self._work = work
        self._frontend = work.frontend
        self._embedder = Embedder(work)
        self._since = _now()

    @property
    def routes(self) -> Routes:
        return (
            Operation("POST", "/api/chat", self.chat, "key", "Answer a conversation", (Chat,)),
            Operation("POST", "/api/generate", self.generate, "key", "Answer or go on with a text", (Generate,)),
            Operation("POST", "/api/embed", self.embed, "key", "Vectors of texts", (Embed,)),
            Operation("POST", "/api/embeddings", self.embed_one, "key", "The vector of a text", (EmbedOne,)),
            Operation("POST", "/api/show", self.show, "key", "What the model is", (Named,)),
            Operation("GET", "/api/tags", self.tags, "key", "The models: one"),
            Operation("GET", "/api/ps", self.ps, "key", "The models that are loaded: one"),
            Operation("GET", "/api/version", self.version, "open", "The version of the server"),
        )

    async def chat(self, exchange: Exchange) -> None:
        body = await exchange.body()
        self._work.open()
        _check(body)
        ask = decode(_chat, body)
        await self._serve(exchange, ask, loading=not ask.messages)

    async def generate(self, exchange: Exchange) -> None:
        body = await exchange.body()
        self._work.open()
        _check(body)
        ask = decode(_generate, body)
        await self._serve(exchange, ask, loading=not ask.prompt)

    async def _serve(self, exchange: Exchange, ask: Chat | Generate, *, loading: bool) -> None:
        if loading:
            self._work.check_model(bare(ask.model))
            await exchange.answer_json({**self._part(ask, {}), "done": True, "done_reason": "load"})
            return
        service = service_of(exchange)
        with await self._work.admit(bare(ask.model)) as ticket:
            await self._work.perform(exchange, self._answer(exchange, ticket, ask, service), service.deadline)

    async def _answer(self, exchange: Exchange, ticket: Ticket, ask: Chat | Generate, service: Service) -> None:
        if isinstance(ask, Generate) and ask.raw:
            await self._run(exchange, ticket, ask, service, await self._frontend.encode(ask.prompt or ""), None)
            return
        messages = _conversation(ask)
        begun = ""
        if len(messages) > 1 and messages[-1].keys() == {"role", "content"} and messages[-1]["role"] == "assistant":
            begun = messages.pop()["content"]
        tools = offered(ask.tools, None, None) if isinstance(ask, Chat) else None
        constraint = ask.params.constraint
        ids, turn = await self._frontend.begin(
            messages, ask.variables, tools=tools, constraint=constraint, continuation=begun
        )
        await self._run(exchange, ticket, ask, service, ids, replace(turn, silent=ask.think is False))

    async def _run(
        self,
        exchange: Exchange,
        ticket: Ticket,
        ask: Chat | Generate,
        service: Service,
        ids: list[int],
        turn: FrontendTurn | None,
    ) -> None:
        params, visible = ask.params, frozenset[int]()
        if turn is not None:
            params, visible = msgspec.structs.replace(params, constraint=turn.constraint), turn.visible
        voice = _Voice(turn)
        async with self._work.run(exchange, ticket, [ids], params, service, "", visible) as deltas:
            if ask.stream is False:
                delta = join([delta async for delta in deltas])
                if unserved(delta):
                    raise too_late()
                said = self._said(ask, voice.push(delta), delta)
                await exchange.answer_json({**said, **self._end(exchange, delta)})
                return
            async for delta in deltas:
                if unserved(delta):
                    raise too_late()
                said = voice.push(delta)
                if said != {"content": ""} or delta.logprobs:
                    await exchange.events(self._said(ask, said, delta))
                if delta.finish_reason is not None:
                    await exchange.events({**self._part(ask, {}), **self._end(exchange, delta)})
            await exchange.end_events(b"")

    def _part(self, ask: Ask, said: Fields) -> Fields:
        """A piece of an answer: `content`, and what else a message has."""
        head = {"model": ask.model, "created_at": _now(), "done": False}
        if isinstance(ask, Chat):
            return {**head, "message": {"role": "assistant", "content": "", **said}}
        thought = {"thinking": said["thinking"]} if "thinking" in said else {}
        return {**head, "response": said.get("content", ""), **thought}

    def _said(self, ask: Ask, said: Fields, delta: Delta) -> Fields:
        part = self._part(ask, said)
        logprobs = answers.chat_logprobs(self._frontend.tokenizer, delta)
        return part if logprobs is None else {**part, "logprobs": logprobs["content"]}

    def _end(self, exchange: Exchange, delta: Delta) -> Fields:
        """What the last object of an answer says besides."""
        entry, now = exchange.entry, time.monotonic()
        prefill = 0.0 if delta.timings is None else delta.timings.prefill
        return {
            "done": True,
            "done_reason": delta.finish_reason,
            "total_duration": _nanoseconds(now - entry.started),
            "load_duration": 0,
            "prompt_eval_count": entry.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(prefill),
            "eval_count": delta.completion_tokens,
            "eval_duration": _nanoseconds(0.0 if entry.first_token is None else now - entry.first_token),
        }

    # --- embeddings

    async def embed(self, exchange: Exchange) -> None:
        body = await exchange.body()
        self._work.open()
        _check(body)
        ask = decode(_embed, body)
        texts = [ask.input] if ask.input and isinstance(ask.input, str) else list(ask.input)
        longest = None if ask.truncate is False else -1
        work = Work(texts, dimensions=ask.dimensions, longest=longest)

        def shown(embedded: Embedded) -> Fields:
            counted = {"prompt_eval_count": exchange.entry.prompt_tokens, "load_duration": 0}
            spent = {"total_duration": _nanoseconds(time.monotonic() - exchange.entry.started)}
            vectors = [vector.tolist() for vector in embedded.vectors]
            return {"model": ask.model, "embeddings": vectors, **spent, **counted}

        await self._embed(exchange, ask.model, work, shown)

    async def embed_one(self, exchange: Exchange) -> None:
        body = await exchange.body()
        self._work.open()
        _check(body)
        ask = decode(_embed_one, body)
        work = Work([ask.prompt] if ask.prompt else [], normalize=False, longest=-1)

        def shown(embedded: Embedded) -> Fields:
            return {"embedding": [number for vector in embedded.vectors for number in vector.tolist()]}

        await self._embed(exchange, ask.model, work, shown)

    async def _embed(self, exchange: Exchange, model: str, work: Work, shown: Callable[[Embedded], Fields]) -> None:
        """No text loads the model, which is there already."""
        if not work.prompts:
            self._work.check_model(bare(model))
            await exchange.answer_json(shown(Embedded([], [], [])))
            return
        service = service_of(exchange)

        async def run(ticket: Ticket) -> None:
            await exchange.answer_json(shown(await self._embedder.embed(exchange, ticket, work, service, "")))

        with await self._embedder.admit(bare(model), len(work.prompts)) as ticket:
            await self._work.perform(exchange, run(ticket), service.deadline)

    # --- the model

    async def show(self, exchange: Exchange) -> None:
        body = await exchange.body()
        check_form(body, {})
        asked = decode(_named, body)
        name = asked.model or asked.name
        if name is None:
            raise HttpError(400, "model is missing", "model")
        self._work.check_model(bare(name))
        info, template = self._frontend.client.info, self._frontend.template
        await exchange.answer_json(
            {
                "modified_at": self._since,
                "template": "" if template is None else template.source,
                "details": self._details(),
                "capabilities": ["completion", *(["tools"] if template else []), "embedding"],
                "model_info": {
                    "general.name": info.model,
                    "general.context_length": info.context,
                    "general.vocabulary": info.vocab,
                },
            }
        )

    async def tags(self, exchange: Exchange) -> None:
        await exchange.answer_json({"models": [self._card()]})

    async def ps(self, exchange: Exchange) -> None:
        info = self._frontend.client.info
        await exchange.answer_json({"models": [{**self._card(), "context_length": info.context, "size_vram": 0}]})

    async def version(self, exchange: Exchange) -> None:
        await exchange.answer_json({"version": __version__})

    def _card(self) -> Fields:
        name = self._work.name
        return {"name": name, "model": name, "modified_at": self._since, "details": self._details()}

    def _details(self) -> Fields:
        return {"format": "tricorn", "parent_model": "", "families": []}


def _conversation(ask: Chat | Generate) -> list[Fields]:
    if isinstance(ask, Chat):
        return [turn.message for turn in ask.messages]
    system = [{"role": "system", "content": ask.system}] if ask.system else []
    return [*system, {"role": "user", "content": ask.prompt or ""}]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
