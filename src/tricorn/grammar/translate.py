"""From a constraint to the text that the grammar engine compiles."""

from __future__ import annotations

import json
import re
from typing import Any

from tricorn.grammar import gbnf, lark, patterns, tags
from tricorn.grammar.constraint import ConstraintError
from tricorn.grammar.schema import normalize
from tricorn.request import Constraint, Thought

WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,32}"
"""Between two tokens of JSON: up to two blanks, or a new line and its indentation. None before or after the value."""

ESCAPES = 'nrbtf\\"'
"""Each character has one spelling in a string, so that a name cannot come twice under two spellings. What cannot be
written so (control characters beside these, and U+007F) is not written at all."""

OPTIONS = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}
MOST_SOURCE = 1 << 20


def to_grammar(constraint: Constraint) -> str:
    """The grammar that `llguidance` compiles. Raises ConstraintError naming what cannot be enforced."""
    if len(constraint.source) > MOST_SOURCE:
        raise ConstraintError(f"larger than {MOST_SOURCE} characters")
    answer = {"lark_grammar": _answer(constraint)}
    if constraint.thought is None:
        return json.dumps({"grammars": [answer]})
    return json.dumps({"grammars": [{"lark_grammar": _thoughtful(constraint.thought)}, {"name": "answer", **answer}]})


def _answer(constraint: Constraint) -> str:
    match constraint.kind:
        case "json_schema":
            return f"start: %json {json_text(lark.decode_json(constraint.source))}\n"
        case "json_object":
            return f"start: %json {json_text({'type': 'object'})}\n"
        case "regex":
            return f"start: SENTENCE\nSENTENCE: /{slashes(constraint.source)}/\n"
        case "choice":
            return f"start: SENTENCE\nSENTENCE: /{_choice(lark.decode_json(constraint.source))}/\n"
        case "lark":
            return lark.prepare(constraint.source, lambda text: json_text(lark.decode_json(text)))
        case "gbnf":
            return gbnf.to_lark(constraint.source)
        case "structural_tag":
            thought = constraint.thought
            first = thought.begin if thought and not thought.open and isinstance(thought.begin, str) else ""
            return tags.to_lark(lark.decode_json(constraint.source), json_text, slashes, first)
    raise ConstraintError(f"unknown kind {constraint.kind!r}")


def _thoughtful(thought: Thought) -> str:
    """Free text up to the end marker and the blanks behind it, then the grammar named "answer"."""
    if isinstance(thought.end, int):
        rule = f"thought: /{tags.ANY}/ <[{thought.end}]> gap"
    else:
        rule = f"thought: inner gap\ninner[lazy]: /{tags.ANY}{gbnf.literal(thought.end)}/"
    begin = f"<[{thought.begin}]>" if isinstance(thought.begin, int) else f"/{gbnf.literal(thought.begin)}/"
    start = "thought @answer" if thought.open else f"({begin} thought)? @answer"
    return f"start: {start}\n{rule}\ngap: /[ \\t\\r\\n]*/\n"


def json_text(schema: Any, path: str = "#") -> str:
    """A normalized schema with our options, as JSON for `%json`."""
    try:
        normal = normalize(schema)
    except ConstraintError as error:
        where = path + error.path.removeprefix("#") if path != "#" else error.path
        raise ConstraintError(error.message, where, error.keyword) from None
    except RecursionError:
        raise ConstraintError("nested too deeply", path) from None
    if normal is False:
        raise ConstraintError("no value satisfies the schema", path)
    return json.dumps({"x-guidance": OPTIONS, **(normal if isinstance(normal, dict) else {})}, ensure_ascii=False)


def slashes(pattern: str) -> str:
    """A regular expression as it is written between slashes; classes are those of Python."""
    if not pattern:
        return "(?:)"
    pattern = patterns.translate(pattern, "", "regex", quoted=False)
    escaped = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return escaped.replace("\n", "\\n").replace("\r", "\\r")


def _choice(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ConstraintError("must be a list of strings, not empty", "#", "choice")
    return f"(?:{'|'.join(map(gbnf.literal, dict.fromkeys(choices)))})"
