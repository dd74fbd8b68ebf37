"""What the JSON body of any request must satisfy, and how it is read. Everything raises HttpError 400 that names the
field at fault.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from tricorn.server.errors import HttpError, printable

T = TypeVar("T")

Refusals = Mapping[str, tuple[Any, ...]]
"""Known fields that are not honoured, and the values with which they ask for nothing."""

MAX_DEPTH = 64
"""Levels of nested lists and objects in a body."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_STEPS = bytes(1 if byte in b"[{" else 255 for byte in range(256))
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def depth(body: bytes) -> int:
    """How deep lists and objects are nested, found without recursion."""
    steps = _STRING.sub(b"", body).translate(_STEPS, _NOT_BRACKETS)
    return int(np.cumsum(np.frombuffer(steps, np.int8), dtype=np.int32).max(initial=0))


def check_form(body: bytes, refused: Refusals) -> None:
    """Refuses what is not UTF-8, nests too deep, or carries a field that would be ignored silently."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the body is not UTF-8 (byte {error.start})", code="invalid_encoding") from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and depth(body) > MAX_DEPTH:
        raise HttpError(400, f"the body is nested deeper than {MAX_DEPTH} levels", code="too_deep")
    fields = decode(_fields, body)
    check_refused(fields, refused)


def check_refused(fields: Mapping[str, msgspec.Raw], refused: Refusals, place: str = "") -> None:
    """Raises HttpError 400 for a field of `refused` that holds another value than null and the neutral ones. `place`
    is the path of the fields.
    """
    for name in fields.keys() & refused.keys():
        value = msgspec.json.decode(fields[name])
        if value is not None and not any(value == neutral for neutral in refused[name]):
            raise HttpError(
                400, f"{place}{name} is not supported: leave it out", f"{place}{name}", "unsupported_parameter"
            )


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed(body, error) from None


def convert(values: Any, kind: type[T]) -> T:
    """The same for what has been decoded."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


def _invalid(message: str) -> HttpError:
    """From msgspec's "Expected `int`, got `str` - at `$.n`" to a message that begins with the field."""
    what, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    missing = re.search(r"missing required field `(\w+)`", what)
    param = missing[1] if missing else re.split(r"[.\[]", path, maxsplit=1)[0] or None
    text = f"{path}: {what[0].lower()}{what[1:]}" if path else f"the body: {what[0].lower()}{what[1:]}"
    return HttpError(400, printable(text), param, "invalid_type" if "got" in what else "invalid_value")


def _malformed(body: bytes, error: Exception) -> HttpError:
    """Names the field that holds NaN, Infinity or a lone surrogate, which strict JSON does not know but other writers
    produce.
    """
    try:
        fields = json.loads(body)
        for name, value in fields.items():
            if _not_json(value):
                return HttpError(400, f"{printable(name, 40)}: NaN, Infinity and lone surrogates are not JSON", name)
    except (ValueError, RecursionError, AttributeError):
        pass
    return HttpError(400, f"the body is not valid JSON: {error}", code="invalid_json")


def _not_json(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, str):
        return any("\ud800" <= letter <= "\udfff" for letter in value)
    if isinstance(value, dict):
        return any(map(_not_json, (*value.keys(), *value.values())))
    return isinstance(value, list) and any(map(_not_json, value))
