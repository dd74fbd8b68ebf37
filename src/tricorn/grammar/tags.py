"""Structural tags: free text in which certain parts, such as calls of tools, are constrained.

Two forms: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}` and `{"format": {...}}` with the formats
below. In free text a trigger cannot be written but as the beginning of one of its tags. A tag may begin with a token
(`{"type": "token", "token": id}`) in place of a text; "token_triggered_tags" is free text with such tags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tricorn.grammar.constraint import ConstraintError
from tricorn.grammar.gbnf import literal

MOST_DEPTH = 32
ANY = "(?s:.*)"


def to_lark(tag: Any, json_schema: Callable[[Any, str], str], regex: Callable[[str], str], not_first: str = "") -> str:
    """The Lark grammar of a structural tag. `json_schema` gives the text of a normalized schema, `regex` an
    expression as it stands between slashes. Free text does not begin with `not_first`, if that is given."""
    writer = _Writer(json_schema, regex, not_first)
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
    def __init__(self, json_schema: Callable[[Any, str], str], regex: Callable[[str], str], not_first: str) -> None:
        self.json_schema, self.regex = json_schema, regex
        self.not_first = [not_first] if not_first else []
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
            case "token":
                return f"{self.token(format, path)} {tail}"
            case "const_string":
                _only(format, {"type", "value"}, path)
                return self.text(_string(format, "value", path) + end)
            case "json_schema":
                return self.rule(f"%json {self.schema(format, path)}") + f" {tail}"
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
            case "triggered_tags" | "token_triggered_tags":
                if not last or end:
                    raise ConstraintError("nothing can follow the free text", path, kind)
                return self.triggered(format, path) if kind == "triggered_tags" else self.marked(format, path)
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

    def schema(self, format: dict[str, Any], path: str) -> str:
        """With `strict` false a schema that cannot be enforced becomes that of any object."""
        _only(format, {"type", "json_schema", "strict"}, path)
        if not isinstance(format.get("json_schema"), dict | bool):
            raise ConstraintError("must be a schema", path, "json_schema")
        try:
            return self.json_schema(format["json_schema"], f"{path}/json_schema")
        except ConstraintError:
            if format.get("strict") is not False:
                raise
            return self.json_schema({"type": "object"}, path)

    def any_text(self, format: Any, path: str, last: bool, end: str) -> str:
        _only(format, {"type", "excludes", "not_first"}, path)
        excluded, firsts = _texts(format, "excludes", path), _texts(format, "not_first", path)
        if last and not end:
            return self.free("", excluded, firsts)
        if not end:
            raise ConstraintError("must be last, or followed by a text where it ends", path, "any_text")
        return self.rule(self.free(end, [text for text in excluded if text not in end], firsts), "[lazy]")

    def free(self, end: str = "", excluded: Iterable[str] = (), firsts: Iterable[str] = ()) -> str:
        """Text up to `end` that has nothing `excluded` in it and does not begin with any of `firsts`."""
        without = [f"{ANY}{literal(text)}{ANY}" for text in excluded]
        without += [rf"\s*{literal(text)}{ANY}" for text in (*self.not_first, *firsts)]
        return self.terminal(f"/{ANY}{literal(end)}/" + "".join(f" & ~/{pattern}/" for pattern in without))

    def tag(self, tag: Any, path: str, begin: str | None = None) -> str:
        """Begin (or what is left of it), content and end."""
        _only(tag, {"type", "begin", "content", "end"}, path)
        if _is(tag.get("begin"), "token"):
            head = self.token(tag["begin"], f"{path}/begin")
        else:
            head = self.text(_string(tag, "begin", path) if begin is None else begin)
        end = _string(tag, "end", path)
        return self.rule(f"{head} {self.format(tag.get('content'), f'{path}/content', end=end)}")

    @staticmethod
    def token(format: dict[str, Any], path: str) -> str:
        """A token by its id, such as a marker, which no text spells."""
        _only(format, {"type", "token"}, path)
        if type(format.get("token")) is not int or format["token"] < 0:
            raise ConstraintError("must be the id of a token", path, "token")
        return f"<[{format['token']}]>"

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
        parts = []
        for trigger, tags in bodies.items():
            head = self.rule(self.free(trigger, [other for other in triggers if other not in trigger]), "[lazy]")
            parts.append(f"{head} ({' | '.join(tags)})")
        one = self.rule(" | ".join(parts))
        rest = self.free("", triggers)
        if format.get("stop_after_first"):
            return f"({one})" if format.get("at_least_one") else f"({one} | {rest})"
        return f"({one}){'+' if format.get('at_least_one') else '*'} {rest}"

    def marked(self, format: dict[str, Any], path: str) -> str:
        """Free text with tags that begin with tokens, which free text has none of."""
        _only(format, {"type", "tags", "at_least_one", "stop_after_first"}, path)
        tags = _list(format, "tags", path)
        odd = next(
            (index for index, tag in enumerate(tags) if not _is(tag, "tag") or not _is(tag.get("begin"), "token")), None
        )
        if odd is not None:
            raise ConstraintError("must begin with a token", f"{path}/tags/{odd}", "begin")
        options = " | ".join(self.tag(tag, f"{path}/tags/{index}") for index, tag in enumerate(tags))
        text = self.free()
        one = self.rule(f"{text} ({options})")
        if format.get("stop_after_first"):
            return f"({one})" if format.get("at_least_one") else f"({one} | {text})"
        return f"({one}){'+' if format.get('at_least_one') else '*'} {text}"


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


def _texts(value: dict[str, Any], key: str, path: str) -> list[str]:
    texts = value.get(key, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ConstraintError("must be a list of texts", path, key)
    return texts


def _list(value: dict[str, Any], key: str, path: str) -> list[Any]:
    if not isinstance(value.get(key), list) or not value[key]:
        raise ConstraintError("must be a list, not empty", path, key)
    return list(value[key])
