"""Calls of tools: what the forms have in common, and how an answer is taken apart into words and calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tricorn.frontend.stop import StopMatcher
from tricorn.frontend.tools import Tool, Tools

Format = dict[str, Any]
"""A part of a structural tag (see `grammar.tags`)."""

BETWEEN = " \t\r\n,;]"
"""What may stand between calls and after the last."""

MarkerIds = Callable[[str], int | None]
"""The id of a marker, None for one that is written as text."""


@dataclass(frozen=True)
class Form:
    """One way to write calls.

    `begin` comes before the first call; with none, an answer that begins with a brace is one. `header` matches from
    there, or from the end of the call before, up to the arguments, and has the group "name". `tail` matches what
    follows them; an `end` in it ends the calls, otherwise another may follow. `grammar` makes the format that answers
    must have. `markers` are tokens of `begin` and `header` that text does not show otherwise. A call's id has
    `id_length` letters and digits after `id_prefix`.
    """

    name: str
    fits: Callable[[str], bool]
    begin: str
    header: re.Pattern[str]
    tail: re.Pattern[str]
    grammar: Callable[[Tools, MarkerIds], Format]
    end: str = ""
    markers: tuple[str, ...] = ()
    id_prefix: str = "call_"
    id_length: int = 24
    taught: bool = True
    """Whether the chat template explains it, and knows tools."""


def named(label: str) -> re.Pattern[str]:
    """The header of `{"name": ..., LABEL: {`."""
    return re.compile(rf'[\s,;\[]*\{{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:{label})"\s*:\s*(?=\{{)')


def arguments(tool: Tool) -> Format:
    """What a tool is called with."""
    return {"type": "json_schema", "json_schema": tool.schema, "strict": tool.strict}


def object_tag(tool: Tool, label: str, before: str = "", after: str = "") -> Format:
    """A call as the object of a name and arguments."""
    begin = f'{before}{{"name": {json.dumps(tool.name)}, "{label}": '
    return {"type": "tag", "begin": begin, "content": arguments(tool), "end": "}" + after}


def one_or_more(tags: list[Format], tools: Tools, separator: str) -> Format:
    """Calls and nothing else."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not tools.parallel,
    }


def calls_or_words(calls: Format) -> Format:
    """For forms without a marker: words do not begin with a brace."""
    return {"type": "or", "elements": [calls, {"type": "any_text", "not_first": ["{"]}]}


class Call(msgspec.Struct, frozen=True):
    """What is new in the call of this index. `id` and `name` come with the first piece; `arguments` are a piece of a
    JSON object.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class CallReader:
    """Splits a text, as it comes, into words and calls. Pure but for the ids: however it is cut up, words and
    arguments are the same. What looks like a call and is none stays words.
    """

    def __init__(self, form: Form, new_id: Callable[[], str]) -> None:
        self._form = form
        self._new_id = new_id
        self._marker = StopMatcher((form.begin,)) if form.begin else None
        self._state = self._words if form.begin else self._first
        self._rest = ""  # not read yet, or not given out yet
        self._unseen = 0  # characters of `_rest` that the marker has not been looked for in
        self._blanks = ""  # after words: shown when more words follow
        self._skipped = ""  # what was taken for the beginning of a call
        self._scanner = _ObjectScanner()
        self.count = 0

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[Call]]:
        """The words and pieces of calls that `text` brings; `last` when nothing follows."""
        self._rest += text
        self._unseen += len(text)
        words: list[str] = []
        calls: list[Call] = []
        while self._state(words, calls, last):
            pass
        return "".join(words), calls

    # Each state reads on from `_rest` and says whether another has become its turn.

    def _words(self, words: list[str], calls: list[Call], last: bool) -> bool:
        assert self._marker is not None
        start = len(self._rest) - self._unseen
        found = self._marker.push(self._rest[start:])
        self._unseen = 0
        if found is not None:
            read = start + found[0]
            self._say(self._rest[: read - len(self._form.begin)], words)
            self._rest, self._blanks, self._skipped = self._rest[read:], "", self._form.begin
            self._state = self._header
            return True
        sure = len(self._rest) if last else len(self._rest) - self._marker.held
        self._say(self._rest[:sure], words)
        self._rest = self._rest[sure:]
        if last:
            words.append(self._blanks)
            self._blanks = ""
        return False

    def _say(self, text: str, words: list[str]) -> None:
        """Blanks at the end wait: before a call they are no part of the words."""
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        words.append(shown)

    def _first(self, words: list[str], calls: list[Call], last: bool) -> bool:
        begun = self._rest.lstrip()
        if not begun and not last:
            return False
        self._state = self._header if begun.startswith("{") else self._plain
        return True

    def _plain(self, words: list[str], calls: list[Call], last: bool) -> bool:
        words.append(self._rest)
        self._rest = ""
        return False

    def _header(self, words: list[str], calls: list[Call], last: bool) -> bool:
        found = self._form.header.match(self._rest)
        if found is not None:
            calls.append(Call(self.count, "", self._new_id(), found["name"]))
            self._rest = self._rest[found.end() :]
            self._scanner = _ObjectScanner()
            self._state = self._arguments
            return True
        broken = bool(self._form.end) and self._form.end in self._rest
        if broken or last:
            return self._give_up(words)
        return False

    def _give_up(self, words: list[str]) -> bool:
        """What was no call after all becomes words."""
        text = self._skipped + self._rest if self._skipped else self._rest.lstrip(BETWEEN)
        if text.strip():
            words.append(text)
        self._rest, self._skipped, self._unseen = "", "", 0
        self._state = self._words if self._form.begin else self._plain
        return False

    def _arguments(self, words: list[str], calls: list[Call], last: bool) -> bool:
        read, complete = self._scanner.push(self._rest)
        if read:
            calls.append(Call(self.count, self._rest[:read]))
        self._rest = self._rest[read:]
        if complete:
            self.count += 1
            self._skipped = ""
            self._state = self._tail
        return complete

    def _tail(self, words: list[str], calls: list[Call], last: bool) -> bool:
        found = self._form.tail.match(self._rest)
        if found is None:
            return False
        self._rest = self._rest[found.end() :]
        if self._form.end:
            self._unseen = len(self._rest)
            self._state = self._words
        else:
            self._state = self._header
        return True


class _ObjectScanner:
    """Finds the end of a JSON object."""

    _STRUCTURE = re.compile(r'[{}"]')
    _STRING = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def push(self, text: str) -> tuple[int, bool]:
        """How many characters of `text` belong to the object, and whether it is complete."""
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while found := (self._STRING if self._quoted else self._STRUCTURE).search(text, at):
            at = found.end()
            match found[0]:
                case '"':
                    self._quoted = not self._quoted
                case "\\":
                    self._escaped = at == len(text)
                    at += 1
                case "{":
                    self._depth += 1
                case "}":
                    self._depth -= 1
                    if self._depth == 0:
                        return at, True
        return len(text), False
