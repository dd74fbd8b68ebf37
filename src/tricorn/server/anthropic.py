"""The Anthropic Messages API.

POST /v1/messages                  whole or as a stream of named events
POST /v1/messages/count_tokens     how many tokens a prompt would have

`max_tokens` is required, as it is there; the answer's `input_tokens` leave out what came from the cache, which
`cache_read_input_tokens` counts. A last message of the assistant begins the answer.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tricorn.engine.gate import Ticket
from tricorn.frontend.generate import Delta, join
from tricorn.frontend.template import PART_JOINER
from tricorn.request import SamplingParams, Service
from tricorn.server import schema
from tricorn.server.bodies import Refusals, check_form, decode
from tricorn.server.constraints import json_constraint
from tricorn.server.errors import HttpError, too_late
from tricorn.server.exchange import EVENTS, Dialect, Exchange, event
from tricorn.server.generation import Generations, service_of, unserved
from tricorn.server.routes import Operation, Routes

Fields = dict[str, Any]

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error(error: HttpError) -> Fields:
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def named(value: Fields) -> bytes:
    """A server-sent event with the name that its value carries."""
    return f"event: {value['type']}\n".encode() + event(value)


DIALECT = Dialect(error, EVENTS, named, id_header=b"request-id")

# --- requests


class Text(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A part of a message; `cache_control` beside it changes nothing, as every prompt is cached."""

    text: str


class ToolUse(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call that the assistant has made."""

    id: str
    name: str
    input: Fields


class ToolResult(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """What it gave."""

    tool_use_id: str
    content: str | list[Text] | None = None


class Thinking(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """What the assistant thought before it spoke."""

    thinking: str


class Message(msgspec.Struct, frozen=True):
    """One turn, or a part of one."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Text | ToolUse | ToolResult | Thinking]


class Format(msgspec.Struct, frozen=True):
    """What the answer must be."""

    type: Literal["json_schema"]
    schema: Fields


class OutputConfig(msgspec.Struct, frozen=True):
    """How the answer is to be; an effort beside it changes nothing."""

    format: Format | None = None


class Prompt(msgspec.Struct, frozen=True):
    """The fields that make a prompt."""

    model: Annotated[str, Meta(max_length=512)]
    messages: Annotated[list[Message], Meta(min_length=1, max_length=schema.MAX_MESSAGES)]
    system: str | list[Text] | None = None


class Ask(Prompt, frozen=True, kw_only=True):
    """The fields of /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=schema.MAX_TOKENS)]
    stop_sequences: Annotated[list[schema.StopString], Meta(max_length=schema.MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    metadata: Fields | None = None
    output_config: OutputConfig | None = None

    @property
    def params(self) -> SamplingParams:
        form = None if self.output_config is None else self.output_config.format
        return SamplingParams(
            constraint=None if form is None else json_constraint(form.schema),
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=tuple(self.stop_sequences or ()),
        )


REFUSED: Refusals = {
    **dict.fromkeys(schema.KNOWN - set(Ask.__struct_fields__), ()),
    "container": (),
    "context_management": ({},),
    "mcp_servers": ([],),
    "output_format": (),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "tools": ([],),
}

_ask = msgspec.json.Decoder(Ask)
_prompt = msgspec.json.Decoder(Prompt)


def conversation(prompt: Prompt) -> tuple[list[Fields], str]:
    """The messages as a chat template takes them, and the text with which the answer begins. Neighbours of one role
    are one turn.
    """
    turns: list[Fields] = []
    system = _joined(prompt.system or "")
    for turn in ([{"role": "system", "content": system}] if system else []) + [
        turn for message in prompt.messages for turn in _turns(message)
    ]:
        if turns and turn.keys() == turns[-1].keys() == {"role", "content"} and turn["role"] == turns[-1]["role"]:
            turns[-1] = {**turn, "content": turns[-1]["content"] + PART_JOINER + turn["content"]}
        else:
            turns.append(turn)
    last = turns[-1]
    if last["role"] != "assistant":
        return turns, ""
    if len(turns) == 1 or last.keys() != {"role", "content"}:
        raise HttpError(400, "messages: a last message of the assistant needs one before it, and only text", "messages")
    return turns[:-1], last["content"]


def _turns(message: Message) -> list[Fields]:
    """One message; results of tools are messages of their own there, and come before what the user says to them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content or "")}
        for block in message.content
        if isinstance(block, ToolResult)
    ]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in message.content
        if isinstance(block, ToolUse)
    ]
    thoughts = [block.thinking for block in message.content if isinstance(block, Thinking)]
    texts = [block for block in message.content if isinstance(block, Text)]
    if not texts and not calls:
        return results
    turn: Fields = {"role": message.role, "content": _joined(texts)}
    if calls:
        turn["tool_calls"] = calls
    if thoughts:
        turn["reasoning_content"] = PART_JOINER.join(thoughts)
    return [*results, turn]


def _joined(content: str | list[Text]) -> str:
    return content if isinstance(content, str) else PART_JOINER.join(block.text for block in content)


# --- answers


class Answer:
    """One answer as it grows."""

    def __init__(self, model: str, prompt_tokens: int, params: SamplingParams, context: int) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._limited = params.max_tokens <= context - prompt_tokens
        self._cached: int | None = None  # None: nothing has come yet
        self._open = False  # whether the block of text is

    def whole(self, delta: Delta) -> Fields:
        self._cached = delta.cached_tokens
        content = [{"type": "text", "text": delta.text}] if delta.text else []
        return {**self._head(content, delta.completion_tokens), **self._reason(delta)}

    def events(self, delta: Delta) -> list[Fields]:
        """What this delta adds to a stream."""
        events: list[Fields] = []
        if self._cached is None:
            self._cached = delta.cached_tokens
            head = {**self._head([], 0), "stop_reason": None, "stop_sequence": None}
            events += {"type": "message_start", "message": head}, {"type": "ping"}
        if delta.text:
            if not self._open:
                self._open = True
                block = {"type": "text", "text": ""}
                events.append({"type": "content_block_start", "index": 0, "content_block": block})
            text = {"type": "text_delta", "text": delta.text}
            events.append({"type": "content_block_delta", "index": 0, "delta": text})
        if delta.finish_reason is not None:
            if self._open:
                events.append({"type": "content_block_stop", "index": 0})
            usage = self._usage(delta.completion_tokens)
            events.append({"type": "message_delta", "delta": self._reason(delta), "usage": usage})
            events.append({"type": "message_stop"})
        return events

    def _head(self, content: list[Fields], output_tokens: int) -> Fields:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "usage": self._usage(output_tokens),
        }

    def _usage(self, output_tokens: int) -> Fields:
        cached = self._cached or 0
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
        }

    def _reason(self, delta: Delta) -> Fields:
        """Raises HttpError 408 when the request's time is over: there is no word for it."""
        if delta.finish_reason == "timeout":
            raise HttpError(408, "the request's time is over", code="request_timeout")
        if delta.finish_reason == "length":
            reason = "max_tokens" if self._limited else "model_context_window_exceeded"
            return {"stop_reason": reason, "stop_sequence": None}
        stop = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        return {"stop_reason": "end_turn" if stop is None else "stop_sequence", "stop_sequence": stop}


class Anthropic:
    """The handlers."""

    def __init__(self, work: Generations) -> None:
        self._work = work
        self._frontend = work.frontend

    @property
    def routes(self) -> Routes:
        return (
            Operation("POST", "/v1/messages", self.messages, "key", "Answer a conversation", (Ask,)),
            Operation("POST", "/v1/messages/count_tokens", self.count_tokens, "key", "Count its tokens", (Prompt,)),
        )

    async def messages(self, exchange: Exchange) -> None:
        body = await exchange.body()
        self._work.open()
        check_form(body, REFUSED)
        ask = decode(_ask, body)
        service = service_of(exchange)
        with await self._work.admit(ask.model) as ticket:
            await self._work.perform(exchange, self._answer(exchange, ticket, ask, service), service.deadline)

    async def _answer(self, exchange: Exchange, ticket: Ticket, ask: Ask, service: Service) -> None:
        ids = await self._encode(ask)
        params = ask.params
        answer = Answer(self._work.name, len(ids), params, self._frontend.context)
        async with self._work.run(exchange, ticket, [ids], params, service, answer.id) as deltas:
            if not ask.stream:
                delta = join([delta async for delta in deltas])
                if unserved(delta):
                    raise too_late()
                await exchange.answer_json(answer.whole(delta))
                return
            async for delta in deltas:
                if unserved(delta):
                    raise too_late()
                await exchange.events(*answer.events(delta))
            await exchange.end_events(b"")

    async def count_tokens(self, exchange: Exchange) -> None:
        body = await exchange.body()
        self._work.open()
        check_form(body, REFUSED)
        prompt = decode(_prompt, body)
        self._work.check_model(prompt.model)
        await exchange.answer_json({"input_tokens": len(await self._encode(prompt))})

    async def _encode(self, prompt: Prompt) -> list[int]:
        messages, begun = conversation(prompt)
        return await self._frontend.encode_chat(messages, continuation=begun)
