"""OpenAI's Responses API.

POST   /v1/responses          whole or as a stream of named events
GET    /v1/responses/{id}     one that is kept
DELETE /v1/responses/{id}

Responses are kept in memory unless `store` is false, so that `previous_response_id` can go on from one: the latest
`MOST_KEPT`, as far as `MOST_BYTES` reach. Callers see their own only.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tricorn.engine.gate import Ticket
from tricorn.frontend.generate import Delta
from tricorn.frontend.tools import MOST_TOOLS, Tools
from tricorn.frontend.turn import Piece
from tricorn.request import Constraint, SamplingParams, Service
from tricorn.server import schema
from tricorn.server.bodies import Refusals, check_form, decode
from tricorn.server.constraints import json_constraint
from tricorn.server.errors import HttpError, printable, too_late
from tricorn.server.exchange import EVENTS, OPENAI, Dialect, Exchange, event
from tricorn.server.generation import Generations, service_of, unserved
from tricorn.server.routes import Operation, Routes
from tricorn.server.tools import Function, Offer, offered, whole_calls

Fields = dict[str, Any]

MOST_KEPT = 1024
MOST_BYTES = 32 << 20

DIALECT = Dialect(OPENAI.error, EVENTS, lambda value: f"event: {value.get('type', 'error')}\n".encode() + event(value))

# --- requests


class Tool(Function, frozen=True, kw_only=True):
    """A function; nothing else can be called here."""

    type: Literal["function"]


class Format(msgspec.Struct, frozen=True):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    schema: Fields | None = None


class Text(msgspec.Struct, frozen=True):
    """How the answer's text is to be; a verbosity beside the format changes nothing."""

    format: Format | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """How much to think first."""

    effort: Annotated[str, Meta(max_length=32)] | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    input: str | Annotated[list[Fields], Meta(min_length=1, max_length=schema.MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=schema.MAX_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[Tool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Fields | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    priority: schema.Priority | None = None

    @property
    def params(self) -> SamplingParams:
        """Raises HttpError 400."""
        return SamplingParams(
            max_tokens=schema.MAX_TOKENS if self.max_output_tokens is None else self.max_output_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            constraint=self._constraint,
        )

    @property
    def _constraint(self) -> Constraint | None:
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return Constraint("json_object")
        if form.schema is None:
            raise HttpError(400, "text.format.schema is missing", "text")
        return json_constraint(form.schema)

    @property
    def offered(self) -> Tools | None:
        """Raises HttpError 400."""
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":  # flat here, nested in chat
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        offers = [Offer("function", tool) for tool in self.tools or ()]
        return offered(offers, choice, self.parallel_tool_calls)


REFUSED: Refusals = {
    **dict.fromkeys(schema.KNOWN - set(Ask.__struct_fields__), ()),
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "n": (1,),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}

_ask = msgspec.json.Decoder(Ask)


def _messages(items: str | list[Fields]) -> list[Fields]:
    """The messages that stand for an input. Raises HttpError 400."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Fields] = []
    for index, item in enumerate(items):
        message = _message(item, f"input[{index}]")
        last = messages[-1] if messages else {}
        if "tool_calls" in message and last.get("role") == "assistant":  # calls of one turn are one message
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
        elif message["role"] == "assistant" and last.keys() == {"role", "reasoning_content", "content"}:
            messages[-1] = {**message, "reasoning_content": last["reasoning_content"]}
        else:
            messages.append(message)
    return messages


def _message(item: Fields, place: str) -> Fields:
    match item.get("type", "message"):
        case "message":
            return {"role": item.get("role"), "content": _text(item.get("content"), place)}
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"), place)}
        case "reasoning":
            return {"role": "assistant", "reasoning_content": _text(item.get("content") or "", place), "content": ""}
    raise HttpError(400, f"{place}.type {printable(str(item['type']), 40)!r} is not supported", "input")


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise HttpError(400, f"{place}: content is a text, or parts of text: this model reads text only", "input")
    return "\n".join(map(str, texts))


# --- answers


class Answer:
    """One response as it grows: its items, and the events that tell of them."""

    def __init__(self, ask: Ask, model: str, prompt_tokens: int) -> None:
        self.id = f"resp_{secrets.token_hex(12)}"
        self._ask, self._model, self._prompt_tokens = ask, model, prompt_tokens
        self._created = int(time.time())
        self._items: list[Fields] = []
        self._open: tuple[str, int] | None = None  # the kind of the last item, while it grows, and which of the calls
        self._numbered = 0
        self._cached = 0
        self._thought = 0

    def begin(self) -> list[Fields]:
        """The events before anything has come."""
        return [self._event("response.created", response=self.body("in_progress")),
                self._event("response.in_progress", response=self.body("in_progress"))]  # fmt: skip

    def push(self, delta: Delta, piece: Piece) -> list[Fields]:
        """What this delta adds. Raises HttpError 408."""
        events: list[Fields] = []
        self._cached = max(self._cached, delta.cached_tokens)
        if piece.thought:
            self._thought = delta.completion_tokens
            events += self._start(("reasoning", 0)) + self._grow("reasoning_text", piece.thought)
        if piece.words:
            events += self._start(("message", 0)) + self._grow("output_text", piece.words)
        for call in whole_calls(piece):
            events += self._start(("function_call", call.index), call_id=call.id, name=call.name)
            self._items[-1]["arguments"] += call.arguments
            events.append(self._at("response.function_call_arguments.delta", delta=call.arguments))
        if delta.finish_reason is None:
            return events
        if delta.finish_reason == "timeout":
            raise HttpError(408, "the request's time is over", code="request_timeout")
        status: Literal["completed", "incomplete"] = "incomplete" if delta.finish_reason == "length" else "completed"
        events += self._end(status)
        return [*events, self._event(f"response.{status}", response=self.body(status, delta.completion_tokens))]

    @property
    def messages(self) -> list[Fields]:
        """The answer as messages of a conversation. Calls that were cut off are none."""
        whole = [item for item in self._items if item["status"] == "completed" or item["type"] != "function_call"]
        return _messages(whole) if whole else []

    def body(self, status: str, output_tokens: int | None = None) -> Fields:
        """The response as it stands."""
        ask = self._ask
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id, "object": "response", "created_at": self._created, "status": status, "model": self._model,
            "output": [{**item} for item in self._items], "error": None, "incomplete_details": cut,
            "instructions": ask.instructions, "previous_response_id": ask.previous_response_id,
            "max_output_tokens": ask.max_output_tokens, "metadata": ask.metadata or {},
            "parallel_tool_calls": ask.parallel_tool_calls is not False, "store": ask.store is not False,
            "temperature": 1.0 if ask.temperature is None else ask.temperature,
            "top_p": 1.0 if ask.top_p is None else ask.top_p, "truncation": "disabled",
            "tool_choice": ask.tool_choice or "auto", "tools": msgspec.to_builtins(ask.tools or []),
            "text": {"format": {"type": "text"}} if ask.text is None else msgspec.to_builtins(ask.text),
            "usage": None if output_tokens is None else self._usage(output_tokens),
        }  # fmt: skip

    def _usage(self, output_tokens: int) -> Fields:
        return {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._cached},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thought},
            "total_tokens": self._prompt_tokens + output_tokens,
        }

    def _start(self, kind: tuple[str, int], **more: Any) -> list[Fields]:
        """Opens an item of this kind, unless it is open."""
        if self._open == kind:
            return []
        events = self._end("completed")
        self._open = kind
        item: Fields = {"id": f"{kind[0][:3]}_{secrets.token_hex(12)}", "type": kind[0], "status": "in_progress"}
        match kind[0]:
            case "message":
                item |= {"role": "assistant", "content": []}
            case "reasoning":
                item |= {"summary": [], "content": []}
            case _:
                item |= {**more, "arguments": ""}
        self._items.append(item)
        events.append(self._event("response.output_item.added", output_index=len(self._items) - 1, item={**item}))
        if kind[0] == "function_call":
            return events
        part: Fields = {"type": "output_text", "text": "", "annotations": []}
        if kind[0] == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
        item["content"] = [part]
        return [*events, self._at("response.content_part.added", content_index=0, part={**part})]

    def _grow(self, kind: str, text: str) -> list[Fields]:
        self._items[-1]["content"][0]["text"] += text
        return [self._at(f"response.{kind}.delta", content_index=0, delta=text, **_no_logprobs(kind))]

    def _end(self, status: str) -> list[Fields]:
        """Closes the open item, if there is one."""
        if self._open is None:
            return []
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            events = [self._at("response.function_call_arguments.done", name=name, arguments=arguments)]
        else:
            (part,) = item["content"]
            kind = part["type"]
            done = self._at(f"response.{kind}.done", content_index=0, text=part["text"], **_no_logprobs(kind))
            events = [done, self._at("response.content_part.done", content_index=0, part=part)]
        self._open = None
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item={**item})]

    def _at(self, kind: str, **fields: Any) -> Fields:
        """An event about the last item."""
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Fields:
        self._numbered += 1
        return {"type": kind, "sequence_number": self._numbered - 1, **fields}


def _no_logprobs(kind: str) -> Fields:
    return {"logprobs": []} if kind == "output_text" else {}


class Kept(msgspec.Struct, frozen=True):
    """A response, and the conversation up to its end; `size` is that of both as JSON."""

    response: Fields
    messages: list[Fields]
    size: int


class Store:
    """The latest responses by their caller and id."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._bytes = 0

    def put(self, tenant: str, response: Fields, messages: list[Fields]) -> None:
        """Keeps it, and forgets the oldest when there are too many."""
        size = len(msgspec.json.encode((response, messages)))
        self._kept[tenant, response["id"]] = Kept(response, messages, size)
        self._bytes += size
        while len(self._kept) > MOST_KEPT or self._bytes > MOST_BYTES:
            self._bytes -= self._kept.popitem(last=False)[1].size

    def get(self, tenant: str, id: str) -> Kept:
        """Raises HttpError 404."""
        kept = self._kept.get((tenant, id))
        if kept is None:
            message = f"there is no response {printable(id, 80)!r}: it was not stored, or is forgotten by now"
            raise HttpError(404, message, "previous_response_id", "not_found")
        return kept

    def drop(self, tenant: str, id: str) -> None:
        """Raises HttpError 404."""
        self._bytes -= self.get(tenant, id).size
        del self._kept[tenant, id]


class Responses:
    """The handlers."""

    def __init__(self, work: Generations) -> None:
        self._work = work
        self._frontend = work.frontend
        self._store = Store()

    @property
    def routes(self) -> Routes:
        return (
            Operation("POST", "/v1/responses", self.respond, "key", "Answer, and keep the answer", (Ask,)),
            Operation("GET", "/v1/responses/{id}", self.show, "key", "A response that is kept"),
            Operation("DELETE", "/v1/responses/{id}", self.drop, "key", "Forget a response"),
        )

    async def respond(self, exchange: Exchange) -> None:
        body = await exchange.body()
        self._work.open()
        check_form(body, REFUSED)
        ask = decode(_ask, body)
        service = msgspec.structs.replace(service_of(exchange), priority=ask.priority or 0)
        with await self._work.admit(ask.model) as ticket:
            await self._work.perform(exchange, self._answer(exchange, ticket, ask, service), service.deadline)

    async def _answer(self, exchange: Exchange, ticket: Ticket, ask: Ask, service: Service) -> None:
        before = []
        if ask.previous_response_id is not None:
            before = self._store.get(exchange.tenant, ask.previous_response_id).messages
        messages = [*before, *_messages(ask.input)]
        system = [] if ask.instructions is None else [{"role": "system", "content": ask.instructions}]
        params = ask.params
        ids, turn = await self._frontend.begin(
            [*system, *messages], _variables(ask), tools=ask.offered, constraint=params.constraint
        )
        params = msgspec.structs.replace(params, constraint=turn.constraint)
        reader, answer = turn.reader(), Answer(ask, self._work.name, len(ids))
        events, last = answer.begin(), Fields()
        async with self._work.run(exchange, ticket, [ids], params, service, answer.id, turn.visible) as deltas:
            async for delta in deltas:
                if unserved(delta):
                    raise too_late()
                events += answer.push(delta, reader.push(delta))
                if ask.stream:
                    await exchange.events(*events)
                last, events = (events or [last])[-1], []
        if ask.store is not False:
            self._store.put(exchange.tenant, last["response"], [*messages, *answer.messages])
        await (exchange.end_events(b"") if ask.stream else exchange.answer_json(last["response"]))

    async def show(self, exchange: Exchange) -> None:
        kept = self._store.get(exchange.tenant, exchange.path_parameter("id") or "")
        await exchange.answer_json(kept.response)

    async def drop(self, exchange: Exchange) -> None:
        id = exchange.path_parameter("id") or ""
        self._store.drop(exchange.tenant, id)
        await exchange.answer_json({"id": id, "object": "response", "deleted": True})


def _variables(ask: Ask) -> Fields:
    """What a chat template of a model that can think goes by."""
    effort = None if ask.reasoning is None else ask.reasoning.effort
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
