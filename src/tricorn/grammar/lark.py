"""Lark grammars of clients: JSON schemas in them are normalized as any other, and rules that never end are found."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from tricorn.grammar.constraint import ConstraintError
from tricorn.grammar.rules import Alt, Node, Ref, Repeat, Rules, Seq, Text, check

MOST_DEPTH = 64
TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)|(?P<newline>\n)|(?P<space>[ \t\r]+)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)|(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<directive>%[a-z]+)|(?P<special><[^>\n]*>)|(?P<count>\{\s*\d*\s*,?\s*\d*\s*\}|~\s*\d+(?:\s*\.\.\s*\d+)?)
    |(?P<name>[@!?]?[A-Za-z_][A-Za-z0-9_.-]*)|(?P<attributes>\[[^\]\n]*=[^\]\n]*\]|\[(?:lazy|capture|suffix|stop)\])
    |(?P<range>\.\.)|(?P<symbol>->|[:|()\[\]*+?~&,{}.\-])""",
    re.VERBOSE,
)
Token = tuple[str, str]
Rewrite = Callable[[str], str]


def prepare(source: str, json_schema: Rewrite) -> str:
    """The grammar with each `%json` schema replaced by what `json_schema` makes of it. Raises ConstraintError."""
    parts: list[str] = []
    tokens: list[Token] = []
    at = 0
    while at < len(source):
        found = TOKEN.match(source, at)
        if found is None or found.lastgroup is None:
            line = source.count("\n", 0, at) + 1
            raise ConstraintError(f"unexpected character, line {line}, at {source[at : at + 20]!r}")
        kind, text = found.lastgroup, found[0]
        at = found.end()
        if kind == "directive" and text in ("%json", "%llguidance", "%lark"):
            if text == "%lark":
                raise ConstraintError("nested grammars are not supported", "", text)
            end = _json_end(source, at)
            value = source[at:end]
            at = end
            if text == "%json":
                parts.append(f"%json {json_schema(value)}")
                tokens.append(("string", ""))
            else:
                parts.append(text + value)
            continue
        parts.append(text)
        if kind not in ("comment", "space"):
            tokens.append((kind, text))
    rules = _Reader(tokens).rules()
    if rules is not None:
        check(rules, "start")
    return "".join(parts)


def _json_end(source: str, at: int) -> int:
    """Where the JSON value ends that begins at `at`."""
    import json

    try:
        begin = at + len(source[at:]) - len(source[at:].lstrip())
        return json.JSONDecoder().raw_decode(source, begin)[1]
    except (ValueError, RecursionError):
        line = source.count("\n", 0, at) + 1
        raise ConstraintError(f"not JSON, line {line}", "", "%json") from None


def decode_json(source: str) -> Any:
    """JSON of a client. Raises ConstraintError."""
    try:
        return msgspec.json.decode(source)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConstraintError(f"not JSON: {error}") from None


class _Reader:
    """The rules' tree, as far as needed to see which end. What this does not understand is left to the compiler."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at = tokens, 0

    def peek(self, ahead: int = 0) -> Token:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ("end", "")

    def rules(self) -> Rules | None:
        rules: Rules = {}
        while self.peek()[0] != "end":
            kind, text = self.peek()
            if kind == "name" and self.begins_rule():
                while self.peek()[1] != ":":
                    self.at += 1
                self.at += 1
                rules[text.lstrip("?!").partition(".")[0]] = self.alternatives(0)
            else:
                self.skip_line()
        known = set(rules)
        return {name: _known(node, known) for name, node in rules.items()} if "start" in known else None

    def begins_rule(self) -> bool:
        ahead = 1
        while self.peek(ahead)[0] in ("attributes",) or (self.peek(ahead)[1] == "." and ahead < 3):
            ahead += 1
        return self.peek(ahead)[1] == ":"

    def skip_line(self) -> None:
        while self.peek()[0] not in ("newline", "end"):
            self.at += 1
        self.at += self.peek()[0] == "newline"

    def skip_newlines(self, depth: int) -> None:
        """Over line ends that do not end the rule."""
        ahead = 0
        while self.peek(ahead)[0] == "newline":
            ahead += 1
        if depth or self.peek(ahead)[1] == "|":
            self.at += ahead

    def alternatives(self, depth: int) -> Node:
        if depth > MOST_DEPTH:
            raise ConstraintError("groups are nested too deeply")
        options = [self.sequence(depth)]
        self.skip_newlines(depth)
        while self.peek()[1] == "|":
            self.at += 1
            options.append(self.sequence(depth))
            self.skip_newlines(depth)
        return Alt(tuple(options))

    def sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while True:
            self.skip_newlines(depth)
            kind, text = self.peek()
            if kind in ("newline", "end") or (kind == "symbol" and text in ("|", ")", "]")):
                return Seq(tuple(parts))
            self.at += 1
            if text in ("(", "["):
                inner = self.alternatives(depth + 1)
                self.at += 1
                parts.append(inner if text == "(" else Repeat(inner, 0, 1))
            elif kind == "name":
                parts.append(Ref(text))
            elif text == "->":
                self.at += 1
            elif kind == "count" or text in ("*", "+", "?"):
                digits = re.search(r"\d+", text)
                least = int(digits[0]) if digits else int(text == "+")
                if parts:
                    parts[-1] = Repeat(parts[-1], least, None)
            else:
                parts.append(Text(text))


def _known(node: Node, known: set[str]) -> Node:
    """The tree with names of other things than rules taken for text."""
    match node:
        case Ref(name):
            return node if name in known else Text(name)
        case Seq(parts):
            return Seq(tuple(_known(part, known) for part in parts))
        case Alt(options):
            return Alt(tuple(_known(option, known) for option in options))
        case Repeat(part, least, most):
            return Repeat(_known(part, known), least, most)
    return node
