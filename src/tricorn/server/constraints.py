"""Constraints as clients of all engines write them, as one of ours. At most one may be given."""

from __future__ import annotations

from typing import Any

import msgspec

from tricorn.request import Constraint, ConstraintKind
from tricorn.server.errors import HttpError, printable


class Constrained(msgspec.Struct, frozen=True):
    """The fields that constrain an answer: OpenAI's and vLLM's, then vLLM's old ones, SGLang's and llama.cpp's."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    structural_tag: dict[str, Any] | str | None = None


_decoder = msgspec.json.Decoder(Constrained)
_FIELDS: dict[str, ConstraintKind | None] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": None,
    "regex": "regex",
    "ebnf": None,
    "grammar": None,
    "json_schema": "json_schema",
    "structural_tag": "structural_tag",
}
_STRUCTURED: dict[str, ConstraintKind | None] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": None,
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}


def read(body: bytes) -> Constraint | None:
    """The constraint of a request's body. Raises HttpError 400 naming the field at fault."""
    try:
        fields = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise HttpError(400, f"a constraint is malformed: {error}", code="invalid_type") from None
    found = {}
    for name, kind in _FIELDS.items():
        if (value := getattr(fields, name)) is not None:
            found[name] = _constraint(kind, value)
    if fields.structured_outputs is not None:
        found["structured_outputs"] = _structured(fields.structured_outputs)
    if fields.response_format is not None and (constraint := _response_format(fields.response_format)):
        found["response_format"] = constraint
    if len(found) > 1:
        raise HttpError(400, f"only one of {', '.join(found)} may be given", next(iter(found)), "invalid_value")
    return next(iter(found.values()), None)


def _constraint(kind: ConstraintKind | None, value: Any) -> Constraint:
    """`kind` None: a grammar, in the notation it is written in."""
    if kind is None:
        kind = grammar_kind(value)
    if kind == "json_object":
        return Constraint(kind)
    if kind in ("json_schema", "structural_tag", "choice") and not isinstance(value, str):
        return Constraint(kind, msgspec.json.encode(value).decode())
    return Constraint(kind, value)


def grammar_kind(source: str) -> ConstraintKind:
    """The notation in which a grammar is written."""
    return "gbnf" if "::=" in source else "lark"


def json_constraint(schema: Any) -> Constraint:
    """JSON that a schema allows."""
    return Constraint("json_schema", msgspec.json.encode(schema).decode())


def _response_format(value: dict[str, Any]) -> Constraint | None:
    name = "response_format"
    match value.get("type"):
        case "text":
            return None
        case "json_object" if isinstance(value.get("schema"), dict):  # as llama.cpp's clients write it
            return _constraint("json_schema", value["schema"])
        case "json_object":
            return Constraint("json_object")
        case "json_schema":
            inner = value.get("json_schema")
            if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict | bool):
                raise HttpError(400, f"{name}.json_schema.schema must be an object", name, "invalid_value")
            return _constraint("json_schema", inner["schema"])
        case "regex" | "grammar" | "choice" as kind if kind in value:
            return _structured({kind: value[kind]}, name)
        case "structural_tag":
            return _constraint("structural_tag", value)
    raise HttpError(400, f"{name}.type {printable(str(value.get('type')), 40)!r} is not known", name, "invalid_value")


def _structured(value: dict[str, Any], name: str = "structured_outputs") -> Constraint:
    given = {key: inner for key, inner in value.items() if inner is not None and inner is not False}
    if len(given) != 1 or not given.keys() <= _STRUCTURED.keys():
        raise HttpError(400, f"{name} must hold one of {', '.join(_STRUCTURED)}", name, "invalid_value")
    ((kind, inner),) = given.items()
    wanted: dict[str, type | tuple[type, ...]] = {"regex": str, "grammar": str, "choice": list, "json_object": bool}
    if not isinstance(inner, wanted.get(kind, (dict, str))):
        raise HttpError(400, f"{name}.{kind} has the wrong type", name, "invalid_type")
    return _constraint(_STRUCTURED[kind], inner)
