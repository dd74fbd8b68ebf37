"""The assistant's turn in a conversation: what it must be, and what its text turns out to hold."""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from tricorn.frontend.errors import BadRequest
from tricorn.frontend.parsers import form_of
from tricorn.frontend.parsers.calls import Call, CallReader, Form, Format
from tricorn.frontend.parsers.thoughts import Markers, ThoughtReader, markers_of
from tricorn.frontend.tokenizer import Tokenizer
from tricorn.frontend.tools import Tools
from tricorn.request import Constraint, FinishReason, Thought

if TYPE_CHECKING:
    from tricorn.frontend.generate import Delta

TAIL = 16
"""Ids at the end of a prompt in which its last marker is looked for."""

LETTERS = string.ascii_letters + string.digits


class Piece(msgspec.Struct, frozen=True):
    """What a delta brings to a turn: thoughts, words, calls. `finish_reason` is "tool_calls" in place of "stop" when
    there were any.
    """

    thought: str
    words: str
    calls: list[Call]
    finish_reason: FinishReason | Literal["tool_calls"] | None


class Manner:
    """How one model calls tools and thinks aloud, as its chat template tells."""

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self.form = form_of(template)
        self.thoughts = markers_of(template)
        self._ids = {text: id for id, text in tokenizer.special.items()}
        self._tokenizer = tokenizer

    def turn(self, prompt: list[int], tools: Tools | None, constraint: Constraint | None, begun: str) -> Turn:
        """The turn that follows a prompt, which has `begun` its text. Raises BadRequest when what is asked for does not
        go together.
        """
        thinking = self._thinking(prompt, begun)
        required = constraint if tools is None else self._calls(tools, constraint)
        if required is not None and self.thoughts is not None and thinking != "over":
            begin, end = (self._ids.get(marker, marker) for marker in self.thoughts)
            required = msgspec.structs.replace(required, thought=Thought(begin, end, thinking == "open"))
        shown = self.form.markers if tools is not None else ()
        visible = frozenset(self._ids[text] for text in (*shown, *(self.thoughts or ())) if text in self._ids)
        return Turn(
            required,
            visible,
            None if tools is None else self.form,
            None if thinking == "over" else self.thoughts,
            thinking == "open",
        )

    def _thinking(self, prompt: list[int], begun: str) -> Literal["open", "over", "either"]:
        """Whether the prompt leaves a thought open, has closed it, or leaves it to the model."""
        if self.thoughts is None:
            return "over"
        tail = begun or self._tokenizer.decode(prompt[-TAIL:], skip_special=False)
        opened, closed = (tail.rfind(marker) for marker in self.thoughts)
        if begun:
            return "open" if opened > closed else "over"
        if tail.rstrip().endswith(self.thoughts.begin):
            return "open"
        return "over" if tail.rstrip().endswith(self.thoughts.end) else "either"

    def _calls(self, tools: Tools, constraint: Constraint | None) -> Constraint:
        """What an answer with tools has to be."""
        if constraint is None:
            return _tagged(self.form.grammar(tools, self._ids.get))
        if constraint.kind not in ("json_schema", "json_object"):
            raise BadRequest("tools go together with JSON formats only: leave one of them out", "tools")
        if tools.choice == "required":
            raise BadRequest("an answer cannot be calls of tools and another format: choose one", "tool_choice")
        schema = json.loads(constraint.source or '{"type": "object"}')
        calls = self.form.grammar(msgspec.structs.replace(tools, choice="required"), self._ids.get)
        return _tagged({"type": "or", "elements": [calls, {"type": "json_schema", "json_schema": schema}]})


def _tagged(format: Format) -> Constraint:
    return Constraint("structural_tag", msgspec.json.encode({"type": "structural_tag", "format": format}).decode())


@dataclass(frozen=True)
class Turn:
    """A turn that is to be generated under `constraint`, the tokens `visible` shown in its text. The thoughts of a
    `silent` one are left out.
    """

    constraint: Constraint | None
    visible: frozenset[int]
    form: Form | None
    thoughts: Markers | None
    opened: bool
    silent: bool = False

    def reader(self) -> TurnReader:
        """For one choice."""
        return TurnReader(self)


class TurnReader:
    """Takes the text of one choice apart as it comes."""

    def __init__(self, turn: Turn) -> None:
        self._silent = turn.silent
        self._thoughts = None if turn.thoughts is None else ThoughtReader(turn.thoughts, open=turn.opened)
        self._calls = None if turn.form is None else CallReader(turn.form, lambda: _call_id(turn.form))

    def push(self, delta: Delta) -> Piece:
        """What the next delta of the choice brings."""
        last = delta.finish_reason is not None
        thought, words, calls = "", delta.text, list[Call]()
        if self._thoughts is not None:
            thought, words = self._thoughts.push(words, last=last)
        if self._calls is not None:
            words, calls = self._calls.push(words, last=last)
        called = delta.finish_reason == "stop" and self._calls is not None and self._calls.count > 0
        return Piece("" if self._silent else thought, words, calls, "tool_calls" if called else delta.finish_reason)


def _call_id(form: Form | None) -> str:
    assert form is not None
    return form.id_prefix + "".join(secrets.choice(LETTERS) for _ in range(form.id_length))
