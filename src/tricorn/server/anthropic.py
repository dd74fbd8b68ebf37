"""The Anthropic Messages API.

POST /v1/messages                  whole or as a stream of named events
POST /v1/messages/count_tokens     how many tokens a prompt would have

`max_tokens` is required, as it is there; the answer's `input_tokens` leave out what came from the cache, which
`cache_read_input_tokens` counts. A last message of the assistant begins the answer.
"""

from __future__ import annotations

import secrets
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tricorn.engine.gate import Ticket
from tricorn.frontend.generate import Delta, join
from tricorn.frontend.template import PART_JOINER
from tricorn.frontend.tools import MOST_TOOLS, Tools
from tricorn.frontend.tools import Tool as FrontendTool
from tricorn.frontend.turn import Piece
from tricorn.request import SamplingParams, Service
from tricorn.server import schema
from tricorn.server.bodies import Refusals, check_form, decode
from tricorn.server.constraints import json_constraint
from tricorn.server.errors import HttpError, too_late
from tricorn.server.exchange import EVENTS, Dialect, Exchange, event
from tricorn.server.generation import Generations, service_of, unserved
from tricorn.server.routes import Operation, Routes
from tricorn.server.tools import whole_calls

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


class Tool(msgspec.Struct, frozen=True):
    """A tool of the client's own; those of Anthropic's servers are not here."""

    name: str
    description: str | None = None
    input_schema: Fields | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether a tool must be used, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thoughts(msgspec.Struct, frozen=True):
    """Whether thoughts are wanted. A budget beside it changes nothing: they are as long as the model makes them."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputConfig(msgspec.Struct, frozen=True):
    """How the answer is to be; an effort beside it changes nothing."""

    format: Format | None = None


class Prompt(msgspec.Struct, frozen=True):
    """The fields that make a prompt."""

    model: Annotated[str, Meta(max_length=512)]
    messages: Annotated[list[Message], Meta(min_length=1, max_length=schema.MAX_MESSAGES)]
    system: str | list[Text] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thoughts | None = None

    @property
    def thinks(self) -> bool:
        """Whether thoughts are wanted."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def offered(self) -> Tools | None:
        """Raises HttpError 400."""
        choice = self.tool_choice or ToolChoice("auto")
        if not self.tools:
            if choice.type in ("any", "tool"):
                raise HttpError(400, "tool_choice needs tools", "tool_choice")
            return None
        if choice.type == "none":
            return None
        if (choice.type == "tool") != (choice.name is not None):
            raise HttpError(400, "tool_choice: a name goes with the type tool, and only with it", "tool_choice")
        return Tools(
            tuple(
                FrontendTool(tool.name, tool.description or "", tool.input_schema or {}, bool(tool.strict))
                for tool in self.tools
            ),
            "auto" if choice.type == "auto" else "required",
            None if choice.name is None else frozenset([choice.name]),
            not choice.disable_parallel_tool_use,
        )


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
        self._open: tuple[str, int] | None = None  # the block that is: its kind, and which of the calls
        self._blocks = 0

    def whole(self, delta: Delta, piece: Piece) -> Fields:
        """Raises HttpError 408."""
        self._cached = delta.cached_tokens
        content: list[Fields] = []
        if piece.thought:
            content.append({"type": "thinking", "thinking": piece.thought, "signature": ""})
        if piece.words:
            content.append({"type": "text", "text": piece.words})
        cut = piece.finish_reason != "tool_calls"  # the last call may be in pieces: it is none
        for call in whole_calls(piece):
            with suppress(msgspec.DecodeError) if cut else nullcontext():
                given = msgspec.json.decode(call.arguments)
                content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        return {**self._head(content, delta.completion_tokens), **self._reason(delta, piece)}

    def events(self, delta: Delta, piece: Piece) -> list[Fields]:
        """What this delta adds to a stream. Raises HttpError 408."""
        events: list[Fields] = []
        if self._cached is None:
            self._cached = delta.cached_tokens
            head = {**self._head([], 0), "stop_reason": None, "stop_sequence": None}
            events += {"type": "message_start", "message": head}, {"type": "ping"}
        if piece.thought:
            block: Fields = {"type": "thinking", "thinking": "", "signature": ""}
            events += self._grow(("thinking", 0), block, {"type": "thinking_delta", "thinking": piece.thought})
        if piece.words:
            text = {"type": "text_delta", "text": piece.words}
            events += self._grow(("text", 0), {"type": "text", "text": ""}, text)
        for call in whole_calls(piece):
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            json = {"type": "input_json_delta", "partial_json": call.arguments}
            events += self._grow(("tool_use", call.index), block, json)
        if delta.finish_reason is not None:
            events += self._close()
            usage = self._usage(delta.completion_tokens)
            events.append({"type": "message_delta", "delta": self._reason(delta, piece), "usage": usage})
            events.append({"type": "message_stop"})
        return events

    def _grow(self, kind: tuple[str, int], block: Fields, more: Fields) -> list[Fields]:
        """Adds to the open block, or closes it and opens another when it is not of this kind."""
        events: list[Fields] = []
        if self._open != kind:
            events += self._close()
            self._open = kind
            events.append({"type": "content_block_start", "index": self._blocks, "content_block": block})
        return [*events, {"type": "content_block_delta", "index": self._blocks, "delta": more}]

    def _close(self) -> list[Fields]:
        if self._open is None:
            return []
        self._open = None
        self._blocks += 1
        return [{"type": "content_block_stop", "index": self._blocks - 1}]

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

    def _reason(self, delta: Delta, piece: Piece) -> Fields:
        """Raises HttpError 408 when the request's time is over: there is no word for it."""
        if delta.finish_reason == "timeout":
            raise HttpError(408, "the request's time is over", code="request_timeout")
        if delta.finish_reason == "length":
            reason = "max_tokens" if self._limited else "model_context_window_exceeded"
            return {"stop_reason": reason, "stop_sequence": None}
        if piece.finish_reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
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
        messages, begun = conversation(ask)
        params = ask.params
        ids, turn = await self._frontend.begin(
            messages, _variables(ask), tools=ask.offered, constraint=params.constraint, continuation=begun
        )
        params = msgspec.structs.replace(params, constraint=turn.constraint)
        reader = replace(turn, silent=not ask.thinks).reader()
        answer = Answer(self._work.name, len(ids), params, self._frontend.context)
        async with self._work.run(exchange, ticket, [ids], params, service, answer.id, turn.visible) as deltas:
            if not ask.stream:
                delta = join([delta async for delta in deltas])
                if unserved(delta):
                    raise too_late()
                await exchange.answer_json(answer.whole(delta, reader.push(delta)))
                return
            async for delta in deltas:
                if unserved(delta):
                    raise too_late()
                await exchange.events(*answer.events(delta, reader.push(delta)))
            await exchange.end_events(b"")

    async def count_tokens(self, exchange: Exchange) -> None:
        body = await exchange.body()
        self._work.open()
        check_form(body, REFUSED)
        prompt = decode(_prompt, body)
        self._work.check_model(prompt.model)
        messages, begun = conversation(prompt)
        ids = await self._frontend.encode_chat(messages, _variables(prompt), tools=prompt.offered, continuation=begun)
        await exchange.answer_json({"input_tokens": len(ids)})


def _variables(prompt: Prompt) -> Fields:
    """What a chat template of a model that can think goes by; others have no use for it."""
    return {} if prompt.thinking is None else {"enable_thinking": prompt.thinks}
