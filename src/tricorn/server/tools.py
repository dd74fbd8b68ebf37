"""Tools as OpenAI's clients offer them, and how answers show calls and thoughts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tricorn.frontend.parsers.calls import Call
from tricorn.frontend.tools import MOST_TOOLS, Tool, Tools
from tricorn.frontend.turn import Piece
from tricorn.server.errors import HttpError

Fields = dict[str, Any]


class Function(msgspec.Struct, frozen=True):
    """What may be called; no `parameters` is a function of none."""

    name: str
    description: str | None = None
    parameters: Fields | None = None
    strict: bool | None = None

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {}, bool(self.strict))


class Offer(msgspec.Struct, frozen=True):
    """One tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class Name(msgspec.Struct, frozen=True):
    """A tool by its name."""

    name: str


class Named(msgspec.Struct, frozen=True):
    """The function that must be called."""

    type: Literal["function"]
    function: Name


class Allowed(msgspec.Struct, frozen=True):
    """Which of the tools may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: list[Named]


class AllowedTools(msgspec.Struct, frozen=True):
    """The same as clients write it."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


Offers = Annotated[list[Offer], Meta(max_length=MOST_TOOLS)]
Choice = Literal["none", "auto", "required"] | Fields


def offered(offers: list[Offer] | None, choice: Choice | None, parallel: bool | None) -> Tools | None:
    """What is offered; None when nothing may be called. Raises HttpError 400."""
    if not offers:
        if choice not in (None, "none", "auto"):
            raise HttpError(400, "tool_choice needs tools", "tool_choice", "invalid_value")
        return None
    given = Tools(tuple(offer.function.tool for offer in offers), parallel=parallel is not False)
    match choice:
        case "none":
            return None
        case None | "auto":
            return given
        case "required":
            return msgspec.structs.replace(given, choice="required")
    kind: Any = AllowedTools if choice.get("type") == "allowed_tools" else Named
    try:
        named = msgspec.convert(choice, kind)
    except msgspec.ValidationError as error:
        raise HttpError(400, f"tool_choice: {error}", "tool_choice", "invalid_value") from None
    if isinstance(named, Named):  # who names a function awaits one call of it, unless he says that there may be more
        only = frozenset([named.function.name])
        return msgspec.structs.replace(given, choice="required", callable=only, parallel=parallel is True)
    names = frozenset(tool.function.name for tool in named.allowed_tools.tools)
    return msgspec.structs.replace(given, choice=named.allowed_tools.mode, callable=names)


def message(piece: Piece) -> Fields:
    """A whole answer. Thoughts go by both names in use."""
    calls = [_call(call) for call in whole_calls(piece)]
    content = piece.words if piece.words or not calls else None
    fields: Fields = {"role": "assistant", "content": content, "refusal": None, **_thought(piece)}
    return {**fields, "tool_calls": calls} if calls else fields


def delta(piece: Piece) -> Fields:
    """What a piece adds to an answer."""
    fields = _thought(piece)
    if piece.words:
        fields["content"] = piece.words
    if piece.calls:
        fields["tool_calls"] = [{"index": call.index, **_call(call)} for call in whole_calls(piece)]
    return fields


def whole_calls(piece: Piece) -> list[Call]:
    """What a piece brings to each call, in one."""
    joined: dict[int, Call] = {}
    for call in piece.calls:
        first = joined.setdefault(call.index, call)
        if first is not call:
            joined[call.index] = msgspec.structs.replace(first, arguments=first.arguments + call.arguments)
    return list(joined.values())


def _thought(piece: Piece) -> Fields:
    return {"reasoning": piece.thought, "reasoning_content": piece.thought} if piece.thought else {}


def _call(call: Call) -> Fields:
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
