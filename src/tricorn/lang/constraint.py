"""What a `gen` must match, and how each backend is told. Nothing is ever generated without its constraint."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tricorn import request
from tricorn.request import SamplingParams, TricornError

Kind = Literal["json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True)
class Constraint:
    """`source` is a regex, the text of a JSON schema or of a grammar (Lark), or the choices as a JSON list. `parse`
    makes an object of a text that holds it, for schemas only."""

    kind: Kind
    source: str
    parse: Callable[[str], Any] | None = None

    def check(self, text: str) -> None:
        """Raises TricornError when a text that ended by itself breaks the constraint, as far as can be told here: a
        server may not know the field and ignore it."""
        if self.kind == "choice" and text not in json.loads(self.source):
            raise TricornError(f"the server did not keep to the choices: it wrote {text[:80]!r}")
        if self.kind == "json_schema":
            try:
                json.loads(text)
            except ValueError:
                raise TricornError(f"the server did not keep to the schema: it wrote {text[:80]!r}") from None


def constrain(
    *, regex: str | None, schema: Any, choices: Sequence[str] | None, grammar: str | None
) -> Constraint | None:
    """The one constraint that is given, or None. Raises TricornError for several."""
    given = [name for name, value in locals().items() if value is not None]
    if len(given) > 1:
        raise TricornError(f"gen() takes one constraint, not {' and '.join(given)}")
    if regex is not None:
        return Constraint("regex", regex)
    if choices is not None:
        if isinstance(choices, str) or not choices:
            raise TricornError("gen() needs a list of choices with at least one in it")
        return Constraint("choice", json.dumps(list(choices)))
    if grammar is not None:
        return Constraint("lark", grammar)
    return None if schema is None else _from_schema(schema)


def _from_schema(schema: Any) -> Constraint:
    """From a JSON schema as an object or as text, or from a pydantic model (anything with its two methods)."""
    if hasattr(schema, "model_json_schema"):
        return Constraint("json_schema", json.dumps(schema.model_json_schema()), schema.model_validate_json)
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise TricornError(f"gen(): the schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise TricornError(f"gen(): a schema is a JSON schema or a pydantic model, not {type(schema).__name__}")
    return Constraint("json_schema", json.dumps(schema), json.loads)


def for_engine(params: SamplingParams, constraint: Constraint | None) -> SamplingParams:
    """`params` with the constraint in it, for the engine in this process."""
    if constraint is None:
        return params
    return msgspec.structs.replace(params, constraint=request.Constraint(constraint.kind, constraint.source))


def for_server(constraint: Constraint | None) -> dict[str, Any]:
    """The fields of a request's body; a server that does not know them is to refuse them."""
    if constraint is None:
        return {}
    if constraint.kind == "json_schema":
        schema = {"name": "schema", "schema": json.loads(constraint.source), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if constraint.kind == "choice":
        return {"structured_outputs": {"choice": json.loads(constraint.source)}}
    return {"structured_outputs": {"grammar" if constraint.kind == "lark" else constraint.kind: constraint.source}}
