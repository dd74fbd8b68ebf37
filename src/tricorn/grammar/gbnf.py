"""GBNF, the grammar notation of llama.cpp, read and said in Lark.

GBNF speaks of characters, Lark of lexemes that take the longest match. A grammar without recursion becomes a single
regular expression; any other keeps its rules and has lexemes of one character, so that no match is longer than another.
"""

from __future__ import annotations

import re

from tricorn.grammar.constraint import ConstraintError
from tricorn.grammar.rules import Alt, Class, Node, Ref, Repeat, Rules, Seq, Text, check, is_regular

MOST_DEPTH = 64
MOST_REGEX = 1 << 20
"""Characters of the single regular expression; a larger one stays a grammar."""

SPACE = re.compile(r"(?:[ \t]|#[^\n]*)*")
LINES = re.compile(r"(?:\s|#[^\n]*)*")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
COUNT = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
LETTERS = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]", "-": "-", "^": "^"}


def to_lark(source: str) -> str:
    """The Lark grammar that has the same sentences. Raises ConstraintError with the place of the fault."""
    rules = parse(source)
    check(rules, "root")
    if is_regular(rules, "root"):
        pattern = _regex(rules["root"], rules)
        if len(pattern) <= MOST_REGEX:
            return f"start: SENTENCE\nSENTENCE: /{pattern}/\n"
    names = {name: f"r{index}" for index, name in enumerate(rules)}
    lines = [f"{names[name]}: {_lark(node, names)}" for name, node in rules.items()]
    return "\n".join([f"start: {names['root']}", *lines]) + "\n"


def parse(source: str) -> Rules:
    return _Reader(source).rules()


class _Reader:
    def __init__(self, source: str) -> None:
        self.source, self.at, self.rule = source, 0, "root"

    def fail(self, message: str) -> ConstraintError:
        line = self.source.count("\n", 0, self.at) + 1
        near = self.source[self.at : self.at + 20].split("\n")[0]
        return ConstraintError(f"{message}, line {line}, at {near!r}", self.rule)

    def skip(self, inside: bool) -> None:
        found = (LINES if inside else SPACE).match(self.source, self.at)
        self.at = found.end() if found else self.at

    def rules(self) -> Rules:
        rules: Rules = {}
        self.skip(True)
        while self.at < len(self.source):
            name = NAME.match(self.source, self.at)
            if name is None:
                raise self.fail("expected the name of a rule")
            self.at, self.rule = name.end(), name[0]
            self.skip(False)
            if not self.source.startswith("::=", self.at):
                raise self.fail("expected ::=")
            if name[0] in rules:
                raise self.fail("the rule comes twice")
            self.at += 3
            self.skip(True)
            rules[name[0]] = self.alternatives(0)
            self.skip(True)
        return rules

    def alternatives(self, depth: int) -> Node:
        if depth > MOST_DEPTH:
            raise self.fail("groups are nested too deeply")
        options = [self.sequence(depth)]
        while True:
            ahead = self.at
            self.skip(True)
            if not self.source.startswith("|", self.at):
                if not depth:
                    self.at = ahead
                return Alt(tuple(options)) if len(options) > 1 else options[0]
            self.at += 1
            self.skip(True)
            options.append(self.sequence(depth))

    def sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while (part := self.atom(depth)) is not None:
            while (count := self.count()) is not None:
                if isinstance(part, Repeat) and part.part == Text(""):
                    break
                part = Repeat(part, *count)
            parts.append(part)
            self.skip(depth > 0)
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def atom(self, depth: int) -> Node | None:
        letter = self.source[self.at : self.at + 1]
        if letter == '"':
            return self.text()
        if letter == "[":
            return self.characters()
        if letter == ".":
            self.at += 1
            return Class("(?s:.)")
        if letter == "(":
            self.at += 1
            self.skip(True)
            inner = self.alternatives(depth + 1)
            self.skip(True)
            if not self.source.startswith(")", self.at):
                raise self.fail("expected )")
            self.at += 1
            return inner
        name = NAME.match(self.source, self.at)
        if name is None:
            if letter and letter not in "|)\r\n":
                raise self.fail("there is nothing to repeat" if letter in "*+?{" else "unexpected character")
            return None
        ahead = SPACE.match(self.source, name.end())
        if self.source.startswith("::=", ahead.end() if ahead else name.end()):
            return None  # the next rule begins
        self.at = name.end()
        return Ref(name[0])

    def count(self) -> tuple[int, int | None] | None:
        ahead = SPACE.match(self.source, self.at)
        place = ahead.end() if ahead else self.at
        letter = self.source[place : place + 1]
        if letter in ("*", "+", "?"):
            self.at = place + 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[letter]
        if letter != "{":
            return None
        self.at = place
        found = COUNT.match(self.source, place)
        if found is None or not (found[1] or found[2]) or max(len(found[1]), len(found[3])) > 6:
            raise self.fail("expected a count such as {2} or {1,3}")
        least = int(found[1] or 0)
        most = int(found[3]) if found[3] else None if found[2] else least
        if most is not None and most < least:
            raise self.fail("the count ends before it begins")
        self.at = found.end()
        return least, most

    def character(self) -> str:
        if self.at >= len(self.source) or self.source[self.at] == "\n":
            raise self.fail("the text does not end on its line")
        if self.source[self.at] != "\\":
            self.at += 1
            return self.source[self.at - 1]
        found = ESCAPE.match(self.source, self.at)
        if found is None or (found[4] and found[4] not in LETTERS):
            raise self.fail("unknown escape")
        code = int(found[1] or found[2] or found[3] or "0", 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self.fail("no such character")
        self.at = found.end()
        return LETTERS[found[4]] if found[4] else chr(code)

    def text(self) -> Node:
        self.at += 1
        letters = []
        while not self.source.startswith('"', self.at):
            letters.append(self.character())
        self.at += 1
        return Text("".join(letters))

    def characters(self) -> Node:
        self.at += 1
        inverted = self.source.startswith("^", self.at)
        self.at += inverted
        ranges = []
        while not self.source.startswith("]", self.at):
            low = high = self.character()
            if self.source.startswith("-", self.at) and not self.source.startswith("-]", self.at):
                self.at += 1
                high = self.character()
            if high < low:
                raise self.fail("the range ends before it begins")
            ranges.append(f"{literal(low)}-{literal(high)}" if high != low else literal(low))
        self.at += 1
        if not ranges:
            if not inverted:
                raise self.fail("the class is empty")
            return Class("(?s:.)")
        return Class(f"[{'^' if inverted else ''}{''.join(ranges)}]")


def literal(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _regex(node: Node, rules: Rules) -> str:
    match node:
        case Text(text):
            return f"(?:{literal(text)})"
        case Class(pattern):
            return pattern
        case Ref(name):
            return _regex(rules[name], rules)
        case Seq(parts):
            return f"(?:{''.join(_regex(part, rules) for part in parts)})"
        case Alt(options):
            return f"(?:{'|'.join(_regex(option, rules) for option in options)})"
    return f"(?:{_regex(node.part, rules)}){{{node.least},{'' if node.most is None else node.most}}}"


def _lark(node: Node, names: dict[str, str]) -> str:
    match node:
        case Text(text):
            return f"({' '.join(f'/{literal(c)}/' for c in text)})" if text else '""'
        case Class(pattern):
            return f"/{pattern}/"
        case Ref(name):
            return names[name]
        case Seq(parts):
            return f"({' '.join(_lark(part, names) for part in parts)})" if parts else '""'
        case Alt(options):
            return f"({' | '.join(_lark(option, names) for option in options)})"
    return f"({_lark(node.part, names)}){{{node.least},{'' if node.most is None else node.most}}}"
