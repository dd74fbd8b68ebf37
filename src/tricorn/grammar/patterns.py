"""Patterns of JSON schemas (ECMAScript) as the grammar engine reads them (Rust), with the same meaning."""

from __future__ import annotations

import re

from tricorn.grammar.constraint import ConstraintError

CLASS = re.compile(r"\[(\^?)((?:[^\]\\]|\\.)*)\]", re.DOTALL)
PIECE = re.compile(
    r"\[\^?(?:[^\]\\]|\\.)*\]|\\[pP](?:\{[^}]*\}|[A-Z])|\\[xu](?:\{[^}]*\}|[0-9A-Fa-f]+)|\\.|.", re.DOTALL
)
ANCHORS = {"\\A", "\\z", "\\a"}
"""Letters to ECMAScript; to others the edges of the text, and a bell."""

DOUBLED = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??+(?:[*+?]|\{[0-9])")
"""A quantifier of a quantifier, in a pattern of which escapes and classes are left out."""

U0001 = re.compile(r"\\(?:x01|u0001|x\{0*1\}|u\{0*1\}|cA)|\x01")


def translate(pattern: str, path: str, keyword: str, *, quoted: bool = True) -> str:
    """The pattern with every class closed against two differences: inside of a class, Rust has nested classes and set
    operators; and a class with all control characters lets the engine write a quote or a backslash that the class
    forbids. U+0001, which our strings cannot hold, is taken out of every class, so that no class has all of them.

    `quoted` False is for text that is no JSON string: U+0001 stays. Raises ConstraintError for what cannot be said.
    """
    if DOUBLED.search(PIECE.sub(lambda found: found[0] if len(found[0]) == 1 else "x", pattern)):
        raise ConstraintError("a quantifier has nothing to repeat", path, keyword)
    return PIECE.sub(lambda found: _piece(found[0], path, keyword, quoted), pattern)


def _piece(piece: str, path: str, keyword: str, quoted: bool) -> str:
    if piece[0] == "\\" and piece[1:2] in ("p", "P"):
        return f"[{piece}&&[^\\x01]]" if quoted else piece
    found = CLASS.fullmatch(piece)
    if found is None:
        if quoted and piece in ANCHORS:
            raise ConstraintError(f"{piece} means different things to different readers", path, keyword)
        if quoted and U0001.fullmatch(piece):
            raise ConstraintError("strings cannot hold U+0001", path, keyword)
        return piece
    sign, inner = found[1], found[2]
    if not inner:
        raise ConstraintError(f"the class {piece!r} is empty or everything", path, keyword)
    inner = re.sub(r"(?<=[^\\])--", r"-\\-", inner)  # a range that ends with the minus
    if "--" in inner or "[:" in inner:
        raise ConstraintError(f"the class {piece!r} means different things to different readers", path, keyword)
    inner = re.sub(r"\\.|[\[&~]", lambda one: one[0] if one[0][0] == "\\" else "\\" + one[0], inner, flags=re.DOTALL)
    return f"[[{sign}{inner}]&&[^\\x01]]" if quoted else f"[{sign}{inner}]"
