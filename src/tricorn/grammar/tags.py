"""Structural tags: free text in which certain parts, such as calls of tools, are constrained.

Two forms: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}` and `{"format": {...}}` with the formats
below. In free text a trigger cannot be written but as the beginning of one of its tags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tricorn.grammar.constraint import ConstraintError
from tricorn.grammar.gbnf import literal

MOST_DEPTH = 32
ANY = "(?s:.*)"


def to_lark(tag: Any, json_schema: Callable[[Any, str], str], regex: Callable[[str], str]) -> str:
    """The Lark grammar of a structural tag. `json_schema` gives the text of a normalized schema, `regex` an
    expression as it stands between slashes."""
    writer = _Writer(json_schema, regex)
    if not isinstance(tag, dict):
        raise ConstraintError("must be an object", "#")
    if "structures" in tag:
        _only(tag, {"type", "structures", "triggers"}, "#")
        structures = _list(tag, "structures", "#")
        tags = [
            {
                "begin": one.get("begin"),
                "content": {"type": "json_schema", "json_schema": one.get("schema")},
                "end": one.get("end"),
            }
            for index, one in enumerate(structures)
            if _only(one, {"begin", "schema", "end"}, f"#/structures/{index}")
        ]
        start = writer.triggered({"triggers": tag.get("triggers"), "tags": tags}, "#")
    else:
        _only(tag, {"type", "format"}, "#")
        if "format" not in tag:
            raise ConstraintError("is missing", "#", "format")
        start = writer.format(tag["format"], "#/format", last=True)
    return "\n".join([f"start: {start}", *writer.lines]) + "\n"


class _Writer:
    def __init__(self, json_schema: Callable[[Any, str], str], regex: Callable[[str], str]) -> None:
        self.json_schema, self.regex = json_schema, regex
        self.lines: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def terminal(self, pattern: str) -> str:
        """A lexeme; `pattern` is written in Lark's terms."""
        name = f"X{len(self.lines)}"
        self.lines.append(f"{name}: {pattern}")
        return name

    def format(self, format: Any, path: str, last: bool = False, end: str = "") -> str:
        """What stands for a format followed by the text `end`; `last` when the answer ends with it."""
        if path.count("/") > 2 * MOST_DEPTH:
            raise ConstraintError("nested too deeply", path[:100])
        kind = format.get("type") if isinstance(format, dict) else None
        tail = self.text(end)
        match kind:
            case "const_string":
                _only(format, {"type", "value"}, path)
                return self.text(_string(format, "value", path) + end)
            case "json_schema":
                _only(format, {"type", "json_schema"}, path)
                if not isinstance(format.get("json_schema"), dict | bool):
                    raise ConstraintError("must be a schema", path, "json_schema")
                schema = self.json_schema(format["json_schema"], f"{path}/json_schema")
                return self.rule(f"%json {schema}") + f" {tail}"
            case "regex":
                _only(format, {"type", "pattern"}, path)
                pattern = self.regex(_string(format, "pattern", path))
                return self.terminal(f"/(?:{pattern}){literal(end)}/")
            case "any_text":
                return self.any_text(format, path, last, end)
            case "sequence":
                _only(format, {"type", "elements"}, path)
                parts = _list(format, "elements", path)
                final = len(parts) - 1
                written = [
                    self.format(
                        part,
                        f"{path}/elements/{i}",
                        last and i == final,
                        end if i == final else self.next_text(parts, i),
                    )
                    for i, part in enumerate(parts)
                    if i == 0 or not (_is(parts[i - 1], "any_text") and _is(part, "const_string"))
                ]
                return self.rule(" ".join(written))
            case "or":
                _only(format, {"type", "elements"}, path)
                options = [
                    self.format(part, f"{path}/elements/{i}", last, end)
                    for i, part in enumerate(_list(format, "elements", path))
                ]
                return self.rule(" | ".join(options))
            case "optional" | "star" | "plus":
                _only(format, {"type", "content"}, path)
                mark = {"optional": "?", "star": "*", "plus": "+"}[kind]
                return self.rule(f"({self.format(format.get('content'), f'{path}/content')}){mark} {tail}")
            case "tag":
                return self.rule(f"{self.tag(format, path)} {tail}")
            case "tags_with_separator":
                _only(format, {"type", "tags", "separator", "at_least_one", "stop_after_first"}, path)
                options = [self.tag(tag, f"{path}/tags/{i}") for i, tag in enumerate(_list(format, "tags", path))]
                one = self.rule(" | ".join(options))
                more = (
                    ""
                    if format.get("stop_after_first")
                    else f"({self.text(_string(format, 'separator', path))} {one})*"
                )
                body = self.rule(f"{one} {more}")
                return f"{body} {tail}" if format.get("at_least_one") else f"({body})? {tail}"
            case "triggered_tags":
                if not last or end:
                    raise ConstraintError("nothing can follow the free text", path, "triggered_tags")
                return self.triggered(format, path)
        raise ConstraintError(f"unknown format {str(kind)[:64]!r}", path, "type")

    @staticmethod
    def next_text(parts: list[Any], index: int) -> str:
        """Text that has to follow a part of free text, which ends where it first comes."""
        return (
            str(parts[index + 1].get("value", ""))
            if _is(parts[index], "any_text") and _is(parts[index + 1], "const_string")
            else ""
        )

    def text(self, text: str) -> str:
        return f"/{literal(text)}/" if text else ""

    def any_text(self, format: Any, path: str, last: bool, end: str) -> str:
        _only(format, {"type", "excludes"}, path)
        excluded = format.get("excludes", [])
        if not isinstance(excluded, list) or not all(isinstance(text, str) and text for text in excluded):
            raise ConstraintError("must be a list of texts", path, "excludes")
        without = "".join(f" & ~/{ANY}{literal(text)}{ANY}/" for text in excluded)
        if last and not end:
            return self.terminal(f"/{ANY}/{without}")
        if not end:
            raise ConstraintError("must be last, or followed by a text where it ends", path, "any_text")
        within = "".join(f" & ~/{ANY}{literal(text)}{ANY}/" for text in excluded if text not in end)
        return self.rule(self.terminal(f"/{ANY}{literal(end)}/{within}"), "[lazy]")

    def tag(self, tag: Any, path: str, begin: str | None = None) -> str:
        """Begin (or what is left of it), content and end."""
        _only(tag, {"type", "begin", "content", "end"}, path)
        begin = _string(tag, "begin", path) if begin is None else begin
        end = _string(tag, "end", path)
        return self.rule(f"{self.text(begin)} {self.format(tag.get('content'), f'{path}/content', end=end)}")

    def triggered(self, format: dict[str, Any], path: str) -> str:
        _only(format, {"type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes"}, path)
        if format.get("excludes"):
            raise ConstraintError("is not supported here", path, "excludes")
        triggers = _list(format, "triggers", path)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise ConstraintError("must be texts, not empty", path, "triggers")
        bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for index, tag in enumerate(_list(format, "tags", path)):
            at = f"{path}/tags/{index}"
            begin = _string(tag, "begin", at)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise ConstraintError("begins with none of the triggers", at, "begin")
            bodies[trigger].append(self.tag(tag, at, begin[len(trigger) :]))
        idle = next((trigger for trigger, tags in bodies.items() if not tags), None)
        if idle is not None:
            raise ConstraintError(f"no tag begins with {idle[:64]!r}", path, "triggers")
        found = "|".join(map(literal, triggers))
        parts = []
        for trigger, tags in bodies.items():
            others = "".join(f" & ~/{ANY}(?:{literal(other)}){ANY}/" for other in triggers if other not in trigger)
            head = self.rule(self.terminal(f"/{ANY}{literal(trigger)}/{others}"), "[lazy]")
            parts.append(f"{head} ({' | '.join(tags)})")
        one = self.rule(" | ".join(parts))
        rest = self.terminal(f"/{ANY}/ & ~/{ANY}(?:{found}){ANY}/")
        if format.get("stop_after_first"):
            return f"({one})" if format.get("at_least_one") else f"({one} | {rest})"
        return f"({one}){'+' if format.get('at_least_one') else '*'} {rest}"


def _is(format: Any, kind: str) -> bool:
    return isinstance(format, dict) and format.get("type") == kind


def _only(value: Any, known: set[str], path: str) -> bool:
    if not isinstance(value, dict):
        raise ConstraintError("must be an object", path)
    for key in value:
        if key not in known:
            raise ConstraintError("is not known here", path, str(key)[:64])
    return True


def _string(value: dict[str, Any], key: str, path: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get(key), str):
        raise ConstraintError("must be a string", path, key)
    return str(value[key])


def _list(value: dict[str, Any], key: str, path: str) -> list[Any]:
    if not isinstance(value.get(key), list) or not value[key]:
        raise ConstraintError("must be a list, not empty", path, key)
    return list(value[key])
