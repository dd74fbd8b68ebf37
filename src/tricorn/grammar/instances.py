"""Whether one JSON value satisfies a JSON schema: what narrows an `enum` to the values that its siblings let pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Resolve = Callable[[str], Any]


class Undecided(Exception):
    """The schema says something that only a grammar can judge."""


def is_type(value: Any, name: str) -> bool:
    match name:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return is_type(value, "number") and float(value).is_integer()
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
    raise Undecided


def equal(a: Any, b: Any) -> bool:
    """Equality of JSON: 1 is 1.0 but not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return bool(type(a) is type(b) or (is_type(a, "number") and is_type(b, "number"))) and bool(a == b)


def holds(schema: Any, value: Any, resolve: Resolve, depth: int = 0) -> bool:
    """Whether `value` satisfies `schema`. Raises Undecided for what this does not know, and when it is too deep."""
    if depth > 64:
        raise Undecided
    if isinstance(schema, bool):
        return schema

    def sub(part: Any, of: Any = value) -> bool:
        return holds(part, of, resolve, depth + 1)

    return all(_keyword(key, part, schema, value, sub, resolve) for key, part in schema.items())


def _keyword(key: str, part: Any, schema: Any, value: Any, sub: Callable[..., bool], resolve: Resolve) -> bool:
    match key:
        case "$ref":
            return sub(resolve(part))
        case "type":
            return any(is_type(value, name) for name in (part if isinstance(part, list) else [part]))
        case "enum":
            return any(equal(value, one) for one in part)
        case "const":
            return equal(value, part)
        case "allOf":
            return all(map(sub, part))
        case "anyOf":
            return any(map(sub, part))
        case "oneOf":
            return sum(map(sub, part)) == 1
        case "not":
            return not sub(part)
        case "if":
            return sub(schema.get("then", True) if sub(part) else schema.get("else", True))
        case "format" if isinstance(value, str):
            raise Undecided
    if is_type(value, "number"):
        return _number(key, part, schema, value)
    if isinstance(value, str):
        return _string(key, part, value)
    if isinstance(value, list):
        return _array(key, part, schema, value, sub)
    if isinstance(value, dict):
        return _object(key, part, schema, value, sub)
    return True


def _number(key: str, part: Any, schema: Any, value: float) -> bool:
    match key:
        case "minimum":
            return bool(value > part if schema.get("exclusiveMinimum") is True else value >= part)
        case "maximum":
            return bool(value < part if schema.get("exclusiveMaximum") is True else value <= part)
        case "exclusiveMinimum" if not isinstance(part, bool):
            return bool(value > part)
        case "exclusiveMaximum" if not isinstance(part, bool):
            return bool(value < part)
        case "multipleOf":
            if not (isinstance(value, int) and isinstance(part, int)):
                raise Undecided  # of floating-point numbers, validators disagree
            return value % part == 0
    return True


def _string(key: str, part: Any, value: str) -> bool:
    match key:
        case "minLength":
            return bool(len(value) >= part)
        case "maxLength":
            return bool(len(value) <= part)
        case "pattern":
            return matches(part, value)
    return True


def matches(pattern: str, value: str) -> bool:
    """Whether the pattern is found in the value; \\d and \\w are ASCII as in ECMAScript."""
    if re.search(r"\\[pPbBsSkuc]|\(\?|\$.|[^\[\\(|]\^", pattern, re.DOTALL):
        raise Undecided  # spelled or meant differently by Python
    try:
        return re.search(re.sub(r"(?<!\\)\$$", r"\\Z", pattern), value, re.ASCII) is not None
    except (re.error, OverflowError, RecursionError):
        raise Undecided from None


def _array(key: str, part: Any, schema: Any, value: list[Any], sub: Callable[..., bool]) -> bool:
    ahead = schema.get("prefixItems", schema["items"] if isinstance(schema.get("items"), list) else [])
    match key:
        case "minItems":
            return bool(len(value) >= part)
        case "maxItems":
            return bool(len(value) <= part)
        case "prefixItems":
            return all(map(sub, part, value))
        case "items" if isinstance(part, list):
            return all(map(sub, part, value))
        case "items":
            return all(sub(part, item) for item in value[len(ahead) :])
        case "additionalItems" if isinstance(schema.get("items"), list):
            return all(sub(part, item) for item in value[len(ahead) :])
        case "uniqueItems":
            return not part or all(not equal(a, b) for i, a in enumerate(value) for b in value[:i])
        case "contains":
            count = sum(sub(part, item) for item in value)
            return bool(schema.get("minContains", 1) <= count <= schema.get("maxContains", count))
        case "unevaluatedItems":
            raise Undecided
    return True


def _object(key: str, part: Any, schema: Any, value: dict[str, Any], sub: Callable[..., bool]) -> bool:
    patterns = schema.get("patternProperties", {})
    match key:
        case "minProperties":
            return bool(len(value) >= part)
        case "maxProperties":
            return bool(len(value) <= part)
        case "required":
            return all(name in value for name in part)
        case "properties":
            return all(sub(part[name], value[name]) for name in part if name in value)
        case "patternProperties":
            return all(sub(part[p], value[name]) for p in part for name in value if matches(p, name))
        case "additionalProperties":
            named = schema.get("properties", {})
            return all(
                sub(part, value[name])
                for name in value
                if name not in named and not any(matches(p, name) for p in patterns)
            )
        case "propertyNames":
            return all(sub(part, name) for name in value)
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            met = [need for name, need in part.items() if name in value]
            return all(set(need) <= value.keys() if isinstance(need, list) else sub(need) for need in met)
        case "unevaluatedProperties":
            raise Undecided
    return True
