"""JSON schemas brought into the part of the language that the grammar engine enforces exactly.

What it lacks is said with what it has, where that means the same: `not` is pushed down to the keywords, `oneOf` becomes
`anyOf` of branches that exclude each other, `if` and dependencies become alternatives, a value of an `enum` that the
other keywords forbid is dropped. Everything else is refused, with the path and the keyword. Words that no version of
JSON Schema or OpenAPI gives a meaning to are annotations.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from tricorn.grammar.constraint import ConstraintError
from tricorn.grammar.formats import ALIASES, ANNOTATIONS, FARTHEST, INTEGERS, KNOWN, PATTERNS, looks_like
from tricorn.grammar.instances import Undecided, holds
from tricorn.grammar.patterns import translate

Schema = Any
"""JSON: a dict or a bool."""

TYPES = ("null", "boolean", "number", "string", "array", "object")
KEYWORD_TYPE = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern"), "string"),
    **dict.fromkeys(("minItems", "maxItems", "items", "additionalItems", "prefixItems"), "array"),
    **dict.fromkeys(("minProperties", "maxProperties", "properties"), "object"),
    **dict.fromkeys(("patternProperties", "additionalProperties", "required"), "object"),
}
IN_PLACE = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependencies", "dependentSchemas"}
REFUSED = {
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), "references that depend on who refers are not supported"),
    **dict.fromkeys(("contains", "minContains", "maxContains"), "counting items that match is not supported"),
    **dict.fromkeys(("discriminator", "extends", "disallow", "divisibleBy"), "this keyword is not supported"),
}
MOST_ALTERNATIVES = 128
"""Alternatives that one keyword may become."""

EXACT = 1 << 53
"""Integers up to here are exact as floating-point numbers."""

MOST_DEPTH = 100
NAMES = re.compile(r"\^\(([A-Za-z0-9_|-]+)\)\$|\^([A-Za-z0-9_-]+)\$")
"""Patterns that are lists of names."""

UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that no string of an answer holds."""


def normalize(root: Schema) -> Schema:
    """A schema that means the same and that the grammar engine enforces. Raises ConstraintError."""
    return _Normalizer(root).whole()


def locate(root: Schema, fails: Callable[[Schema], str]) -> tuple[str, dict[str, Any], str]:
    """The path of the innermost schema that fails, the schema, and what `fails` said of it; looks at the first 200."""
    found: tuple[str, dict[str, Any], str] = ("#", {}, "")
    for path, schema in itertools.islice(_subschemas(root, "#"), 200):
        normalizer = _Normalizer(root)
        try:
            normal = normalizer.inside(schema, path)
        except ConstraintError:
            continue
        fault = fails({**normal, "$defs": normalizer.definitions}) if isinstance(normal, dict) else ""
        if fault and path.startswith(found[0]):
            found = (path, schema, fault)
    return found


def _subschemas(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    if not isinstance(schema, dict):
        return
    yield path, schema
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions", "dependencies", "dependentSchemas"):
            for name, part in value.items() if isinstance(value, dict) else ():
                yield from _subschemas(part, f"{path}/{key}/{_escape(name)}")
        elif key in ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "propertyNames"):
            yield from _subschemas(value, f"{path}/{key}")
        if key in ("allOf", "anyOf", "oneOf", "prefixItems", "items") and isinstance(value, list):
            for index, part in enumerate(value):
                yield from _subschemas(part, f"{path}/{key}/{index}")


def any_of(options: list[Schema]) -> Schema:
    options = [option for option in options if option is not False]
    if any(option is True or option == {} for option in options):
        return True
    return {"anyOf": options} if len(options) > 1 else options[0] if options else False


def all_of(parts: list[Schema]) -> Schema:
    parts = [part for part in parts if part is not True and part != {}]
    if any(part is False for part in parts):
        return False
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def _of(type: str, **keywords: Any) -> dict[str, Any]:
    return {"type": type, **keywords}


class _Normalizer:
    """One schema under way. References become definitions, one for each target and sign, made when first met."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.definitions: dict[str, Schema] = {}
        self.names: dict[tuple[str, bool], str] = {}
        self.chain: list[tuple[str, bool]] = []
        """References that led here without a step into a value: meeting one again is a circle."""
        self.contradictions: list[tuple[str, str]] = []
        """Where no value is left, and by which keyword: it is at fault only when nothing is left of the whole."""
        self.compared: dict[tuple[str, str], bool] = {}
        self.anchors = dict(_anchors(root))
        self.base = next(
            (root[key] for key in ("$id", "id") if isinstance(root, dict) and isinstance(root.get(key), str)), ""
        )

    def whole(self) -> Schema:
        result = self.yes(self.root, "#")
        if not self.productive(result):
            path, keyword = self.contradictions[0] if self.contradictions else ("#", _first_keyword(self.root))
            raise ConstraintError("no finite value satisfies the schema", path, keyword)
        if isinstance(result, dict) and self.definitions:
            return {**result, "$defs": self.definitions}
        return result

    def productive(self, result: Schema) -> bool:
        """Whether some finite value may exist: the least fixed point over the definitions."""
        known: set[str] = set()
        while True:
            new = {name for name, body in self.definitions.items() if _inhabited(body, known)}
            if new == known:
                return _inhabited(result, known)
            known = new

    # --- references

    def resolve(self, reference: Any, path: str = "#") -> Schema:
        """What a reference points to. Only the schema itself is looked into."""
        if not isinstance(reference, str):
            raise ConstraintError("must be a string", path, "$ref")
        if reference in self.anchors:
            return self.anchors[reference]
        address, _, fragment = reference.partition("#")
        if address and address != self.base.partition("#")[0]:
            raise ConstraintError(f"{reference[:100]!r} is outside of the schema; put it into $defs", path, "$ref")
        node = self.root
        for part in unquote(fragment).split("/")[1:] if fragment.startswith("/") else [fragment] if fragment else []:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(name)] if isinstance(node, list) else node[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise ConstraintError(f"nothing is at {reference[:100]!r}", path, "$ref") from None
        return node

    def refer(self, reference: Any, path: str, sign: bool) -> Schema:
        """A reference to the definition of a target, or of its negation."""
        target = self.resolve(reference, path)
        key = (reference, sign)
        if key in self.chain:
            raise ConstraintError("the reference leads back to itself and says nothing", path, "$ref")
        if key not in self.names:
            self.names[key] = name = f"d{len(self.names)}"
            chain, self.chain = self.chain, [*self.chain, key]
            self.definitions[name] = (self.yes if sign else self.no)(target, reference)
            self.chain = chain
        body = self.definitions.get(self.names[key])
        return body if isinstance(body, bool) else {"$ref": f"#/$defs/{self.names[key]}"}

    def inside(self, schema: Schema, path: str, sign: bool = True) -> Schema:
        """A schema of a part of the value."""
        chain, self.chain = self.chain, []
        try:
            return (self.yes if sign else self.no)(schema, path)
        finally:
            self.chain = chain

    # --- what holds

    def yes(self, schema: Schema, path: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ConstraintError("a schema is an object, true or false", path)
        if path.count("/") > 2 * MOST_DEPTH:
            raise ConstraintError("nested too deeply", path[:100])
        _check(schema, path)
        values = self.finite(schema)
        if values is not None:
            values = [value for value in values if _writable(value)]
            if not values:
                keyword = "enum" if "enum" in schema else "const" if "const" in schema else _first_keyword(schema)
                self.contradictions.append((path, keyword))
                return False
            return {"enum": values}
        out: dict[str, Any] = {}
        also: list[Schema] = []
        for keyword, value in schema.items():
            at = f"{path}/{_escape(keyword)}"
            self.keyword(schema, keyword, value, path, at, out, also)
        if also:
            out["allOf"] = [*out.get("allOf", []), *also]
        return out

    def properties(self, schema: dict[str, Any], path: str, out: dict[str, Any]) -> None:
        """Properties, and patterns of names; a pattern that is a list of names makes properties, so that patterns which
        the engine needs to be disjoint more often are."""
        named: dict[str, list[Schema]] = {
            name: [self.inside(part, f"{path}/properties/{_escape(name)}")]
            for name, part in schema.get("properties", {}).items()
        }
        patterns: dict[str, Schema] = {}
        for pattern, part in schema.get("patternProperties", {}).items():
            rule = self.inside(part, f"{path}/patternProperties/{_escape(pattern)}")
            names = NAMES.fullmatch(pattern)
            if names is None:
                patterns[translate(pattern, path, "patternProperties")] = rule
                continue
            for name in (names[1] or names[2]).split("|"):
                named.setdefault(name, []).append(rule)
        if named or "properties" in schema:
            out["properties"] = {name: all_of(rules) for name, rules in named.items()}
        if patterns:
            out["patternProperties"] = patterns

    def finite(self, schema: dict[str, Any], depth: int = 0) -> list[Any] | None:
        """The values of a schema that names them, all other keywords considered; None when it does not, or when its
        keywords cannot be judged value by value."""
        values = self.listed(schema)
        if values is None:
            return None
        try:
            named = "const" if "const" in schema else "enum"
            rest = {key: part for key, part in schema.items() if key != named}
            return [value for value in values if holds(rest, value, self.resolve)]
        except (Undecided, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def listed(self, schema: Schema, depth: int = 0) -> list[Any] | None:
        if not isinstance(schema, dict) or depth > 8:
            return None
        own = _listed(schema)
        if own is not None:
            return own
        inner = [*schema.get("allOf", [])]
        if "$ref" in schema:
            inner.append(self.resolve(schema["$ref"]))
        for part in inner:
            found = self.listed(part, depth + 1)
            if found is not None:
                return found
        return None

    def keyword(
        self, schema: dict[str, Any], key: str, value: Any, path: str, at: str, out: dict[str, Any], also: list[Schema]
    ) -> None:
        """Adds one keyword of a schema to `out`, or what stands for it to `also`."""
        match key:
            case "type" | "const" | "enum" | "required" | "multipleOf":
                out[key] = value
            case "pattern":
                out[key] = translate(value, path, key)
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                out[key] = _inward(key, value)
            case "minLength" | "maxLength" | "minItems" | "maxItems":
                out[key] = int(value)
            case "properties" | "patternProperties" if key not in out:
                self.properties(schema, path, out)
            case "additionalProperties" | "additionalItems":
                out[key] = self.inside(value, at)
            case "items" | "prefixItems" if isinstance(value, list):
                out[key] = [self.inside(part, f"{at}/{index}") for index, part in enumerate(value)]
            case "items":
                out[key] = self.inside(value, at)
            case "$ref":
                also.append(self.refer(value, path, True))
            case "allOf":
                also.extend(self.yes(part, f"{at}/{index}") for index, part in enumerate(value))
            case "anyOf":
                also.append(any_of([self.yes(part, f"{at}/{index}") for index, part in enumerate(value)]))
            case "oneOf":
                also.append(self.one_of(value, at))
            case "not":
                also.append(self.no(value, at))
            case "if":
                also.append(self.conditional(schema, path))
            case "dependencies" | "dependentRequired" | "dependentSchemas":
                for name, need in value.items():
                    present = {"required": need} if isinstance(need, list) else self.yes(need, f"{at}/{_escape(name)}")
                    also.append(any_of([{"properties": {name: False}}, all_of([{"required": [name]}, present])]))
            case "format":
                self.format(schema, value, path, also)
            case "minProperties" | "maxProperties":
                if key == "minProperties" or "minProperties" not in schema:
                    self.count_properties(schema, path, also)
            case "propertyNames":
                self.property_names(schema, value, at, also)
            case "uniqueItems" if value:
                also.append(self.unique(schema, path))
            case "unevaluatedProperties" | "unevaluatedItems":
                if value is not True and value != {}:
                    self.unevaluated(schema, key, value, path, out)
            case "nullable" if value is True:
                raise ConstraintError('say "type": ["...", "null"] instead', path, key)
            case _ if key in REFUSED:
                raise ConstraintError(REFUSED[key], path, key)

    def one_of(self, options: list[Schema], at: str) -> Schema:
        """Exactly one: each branch together with the negation of those that it may overlap with."""
        result = []
        for index, option in enumerate(options):
            others = [(i, other) for i, other in enumerate(options) if i != index and not self.disjoint(option, other)]
            try:
                rivals = [self.rival(option, other, f"{at}/{i}") for i, other in others]
            except ConstraintError as error:
                raise ConstraintError(
                    f"its branches may overlap, and {error}", at.rpartition("/")[0], "oneOf"
                ) from None
            result.append(all_of([self.yes(option, f"{at}/{index}"), *rivals]))
        return any_of(result)

    def rival(self, option: Schema, other: Schema, at: str) -> Schema:
        """What keeps values of `option` from satisfying `other` too: its negation, or less where they meet in the
        empty array alone."""
        a, b = self.flat(option), self.flat(other)
        plain = a.get("type") == b.get("type") == "array" and not any(
            "prefixItems" in one or isinstance(one.get("items"), list) for one in (a, b)
        )
        if plain and self.disjoint(a.get("items", True), b.get("items", True)):
            return {"type": "array", "minItems": 1}
        return self.no(other, at)

    def flat(self, schema: Schema) -> dict[str, Any]:
        """A schema behind plain references."""
        for _ in range(8):
            if not (isinstance(schema, dict) and schema.keys() & SHAPES.keys() == set() and "$ref" in schema):
                break
            schema = self.resolve(schema["$ref"])
        return schema if isinstance(schema, dict) else {}

    def conditional(self, schema: dict[str, Any], path: str) -> Schema:
        condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
        return any_of(
            [
                all_of([self.yes(condition, f"{path}/if"), self.yes(then, f"{path}/then")]),
                all_of([self.no(condition, f"{path}/if"), self.yes(otherwise, f"{path}/else")]),
            ]
        )

    def format(self, schema: dict[str, Any], name: str, path: str, also: list[Schema]) -> None:
        name = ALIASES.get(name, name)
        if name in INTEGERS:
            also.append(any_of([{"type": [t for t in TYPES if t != "number"]}, _of("number", **INTEGERS[name])]))
        elif name in PATTERNS:
            also.append(
                any_of(
                    [
                        {"type": [t for t in TYPES if t != "string"]},
                        _of("string", pattern=translate(PATTERNS[name], path, "format")),
                    ]
                )
            )
        elif name in KNOWN:
            also.append(any_of([{"type": [t for t in TYPES if t != "string"]}, _of("string", format=name)]))
        elif name not in ANNOTATIONS and looks_like(name):
            known = ", ".join(sorted({*INTEGERS, *PATTERNS, *KNOWN, *ALIASES}))
            raise ConstraintError(f"{name[:64]!r} is not enforced; known are {known}", path, "format")

    def count_properties(self, schema: dict[str, Any], path: str, also: list[Schema]) -> None:
        """minProperties and maxProperties. The engine counts names beside the listed ones, but not whether they are
        distinct, so it may be asked for one of them at most; listed ones are counted by cases."""
        low, high = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        required = list(dict.fromkeys(schema.get("required", [])))
        closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        names = list(dict.fromkeys([*schema.get("properties", {}), *required]))
        optional = [name for name in names if name not in required]
        if low > len(required):
            missing = low - len(required)
            self.limit(math.comb(len(optional), min(missing, len(optional))), path, "minProperties")
            cases: list[Schema] = [{"required": list(some)} for some in itertools.combinations(optional, missing)]
            if not closed:
                if missing > 1:
                    raise ConstraintError("distinct names cannot be counted beyond one", path, "minProperties")
                cases.append({"properties": dict.fromkeys(optional, False), "minProperties": low})
            also.append(self.objects(any_of(cases)))
        if high is None:
            return
        if not optional:
            also.append(
                self.objects(
                    {"properties": dict.fromkeys(names, True), "required": required, "maxProperties": int(high)}
                )
            )
        elif closed:
            absent = len(names) - int(high)
            if absent > 0:
                self.limit(math.comb(len(optional), min(absent, len(optional))), path, "maxProperties")
                some = itertools.combinations(optional, absent)
                also.append(self.objects(any_of([{"properties": dict.fromkeys(part, False)} for part in some])))
        else:
            self.limit(2 ** min(len(optional), 30), path, "maxProperties")
            also.append(
                self.objects(
                    any_of(
                        [
                            {
                                "properties": {name: name in some for name in optional} | dict.fromkeys(required, True),
                                "required": [*required, *some],
                                "maxProperties": int(high),
                            }
                            for count in range(len(optional) + 1)
                            for some in itertools.combinations(optional, count)
                            if len(required) + count <= int(high)
                        ]
                    )
                )
            )

    @staticmethod
    def objects(schema: Schema) -> Schema:
        """A schema for objects alone; other values pass."""
        return any_of([{"type": [t for t in TYPES if t != "object"]}, all_of([{"type": "object"}, schema])])

    @staticmethod
    def limit(cases: int, path: str, keyword: str) -> None:
        if cases > MOST_ALTERNATIVES:
            raise ConstraintError(f"it has too many cases ({cases})", path, keyword)

    def property_names(self, schema: dict[str, Any], names: Schema, at: str, also: list[Schema]) -> None:
        """Names that have to match one pattern, or to be one of a list."""
        path = at.rpartition("/")[0]
        if names is True or names == {}:
            return
        rule = {} if names is False else names
        if names is False:
            also.append(self.objects({"maxProperties": 0}))
            return
        values = self.finite(rule)
        used = {
            key
            for key in rule
            if key in KEYWORD_TYPE or key in REFUSED or key in IN_PLACE or key in ("format", "const", "enum")
        }
        if values is not None:
            allowed = {value: True for value in values if isinstance(value, str)}
            also.append(self.objects({"properties": allowed, "additionalProperties": False}))
        elif used == {"pattern"}:
            also.append(
                self.objects(
                    {
                        "patternProperties": {translate(rule["pattern"], at, "pattern"): True},
                        "additionalProperties": False,
                    }
                )
            )
        elif used <= {"minLength", "maxLength"}:
            bounds = f"{int(rule.get('minLength', 0))},{int(rule['maxLength']) if 'maxLength' in rule else ''}"
            pattern = f"^(?s:.{{{bounds}}})$"
            also.append(self.objects({"patternProperties": {pattern: True}, "additionalProperties": False}))
        else:
            raise ConstraintError("only pattern, lengths, enum and const of names are supported", path, "propertyNames")

    def unique(self, schema: dict[str, Any], path: str) -> Schema:
        """Arrays of distinct values: trivial, or written out when the items are few and known."""
        most = schema.get("maxItems")
        if most is not None and most <= 1:
            return True
        items = schema.get("items", True)
        values = self.finite(items) if isinstance(items, dict) and "prefixItems" not in schema else None
        if values is None:
            raise ConstraintError("items cannot be compared; only enumerated ones are supported", path, "uniqueItems")
        longest = len(values) if most is None else min(int(most), len(values))
        counts = range(int(schema.get("minItems", 0)), longest + 1)
        self.limit(sum(math.perm(len(values), count) for count in counts), path, "uniqueItems")
        arrays = [list(some) for count in counts for some in itertools.permutations(values, count)]
        if not arrays:
            raise ConstraintError("there are not enough distinct items", path, "uniqueItems")
        return any_of([{"type": [t for t in TYPES if t != "array"]}, {"enum": arrays}])

    def unevaluated(self, schema: dict[str, Any], key: str, value: Schema, path: str, out: dict[str, Any]) -> None:
        """Without other schemas at the same place it is the plain keyword."""
        plain = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}[key]
        if IN_PLACE & schema.keys():
            raise ConstraintError(f"is supported beside no other schemas only; use {plain}", path, key)
        if plain not in schema:
            out[plain] = self.inside(value, f"{path}/{key}")

    # --- what does not hold

    def no(self, schema: Schema, path: str) -> Schema:
        """The negation: some keyword fails. Raises ConstraintError naming a keyword whose failure cannot be said."""
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            raise ConstraintError("a schema is an object, true or false", path)
        _check(schema, path)
        options = []
        for keyword, value in schema.items():
            options += self.fails(schema, keyword, value, path, f"{path}/{_escape(keyword)}")
        return any_of(options)

    def fails(self, schema: dict[str, Any], key: str, value: Any, path: str, at: str) -> list[Schema]:
        """The ways in which one keyword fails."""
        match key:
            case "type":
                return self.other_types(schema, value, path)
            case "const":
                return self.other_values([value], path, key)
            case "enum":
                return self.other_values(value, path, key)
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                return [
                    _of("number", **{side: _inward(side, edge)}) for side, edge in _outside(schema, key, value).items()
                ]
            case "minLength":
                return [_of("string", maxLength=int(value) - 1)] if value else []
            case "maxLength":
                return [_of("string", minLength=int(value) + 1)]
            case "minItems":
                return [_of("array", maxItems=int(value) - 1)] if value else []
            case "maxItems":
                return [_of("array", minItems=int(value) + 1)]
            case "minProperties" if value:
                return [self.yes(_of("object", maxProperties=int(value) - 1), at)]
            case "maxProperties":
                return [self.yes(_of("object", minProperties=int(value) + 1), at)]
            case "required":
                return [_of("object", properties={name: False}) for name in value]
            case "properties":
                return [
                    _of("object", properties={name: part}, required=[name])
                    for name, sub in value.items()
                    if (part := self.inside(sub, f"{at}/{_escape(name)}", False)) is not False
                ]
            case "items" | "prefixItems" if isinstance(value, list):
                ahead = [self.inside(part, f"{at}/{index}", False) for index, part in enumerate(value)]
                return [
                    _of("array", prefixItems=[*[True] * index, part], minItems=index + 1)
                    for index, part in enumerate(ahead)
                    if part is not False
                ]
            case "items" | "additionalItems" | "additionalProperties" | "patternProperties" | "unevaluatedProperties":
                return self.other_parts(schema, key, value, path, at)
            case "$ref":
                return [self.refer(value, path, False)]
            case "not":
                return [self.yes(value, at)]
            case "allOf":
                return [self.no(part, f"{at}/{index}") for index, part in enumerate(value)]
            case "anyOf":
                return [all_of([self.no(part, f"{at}/{index}") for index, part in enumerate(value)])]
            case "oneOf":
                none = all_of([self.no(part, f"{at}/{index}") for index, part in enumerate(value)])
                pairs = itertools.combinations([self.yes(part, f"{at}/{index}") for index, part in enumerate(value)], 2)
                return [none, *(all_of(list(pair)) for pair in pairs)]
            case "if":
                holding, failing = self.yes(value, at), self.no(value, at)
                then, otherwise = schema.get("then", True), schema.get("else", True)
                return [
                    all_of([holding, self.no(then, f"{path}/then")]),
                    all_of([failing, self.no(otherwise, f"{path}/else")]),
                ]
            case "dependencies" | "dependentRequired" | "dependentSchemas":
                return [
                    all_of([_of("object", required=[name]), self.no(need, f"{at}/{_escape(name)}")])
                    for name, part in value.items()
                    for need in ([{"required": part}] if isinstance(part, list) else [part])
                ]
            case "format" if value in ANNOTATIONS or not looks_like(ALIASES.get(value, value)):
                return []
            case "uniqueItems" if not value:
                return []
            case (
                "pattern" | "format" | "multipleOf" | "propertyNames" | "uniqueItems" | "unevaluatedItems" | "nullable"
            ):
                raise ConstraintError("its negation is not supported", path, key)
            case _ if key in REFUSED:
                raise ConstraintError(REFUSED[key], path, key)
        return []

    def other_types(self, schema: dict[str, Any], value: Any, path: str) -> list[Schema]:
        types = {value} if isinstance(value, str) else set(value)
        if "integer" in types and "number" not in types:
            bounded = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"} & schema.keys()
            raise ConstraintError(
                "numbers that are no integers cannot be told apart" + (" beyond the bounds" if bounded else ""),
                path,
                "type",
            )
        rest = [name for name in TYPES if name not in types]
        return [{"type": rest}] if rest else []

    def other_values(self, values: list[Any], path: str, key: str) -> list[Schema]:
        """Everything but the listed values, type by type."""
        result: list[Schema] = []
        scalars = [value for value in values if not isinstance(value, list | dict)]
        numbers = sorted({value for value in scalars if isinstance(value, int | float) and not isinstance(value, bool)})
        strings = sorted({value for value in scalars if isinstance(value, str)})
        if None not in scalars:
            result.append({"type": "null"})
        result += [{"const": flag} for flag in (True, False) if not any(value is flag for value in scalars)]
        edges = [None, *numbers, None]
        for low, high in itertools.pairwise(edges):
            bound = {"exclusiveMinimum": low} if low is not None else {}
            result.append(_of("number", **bound, **({"exclusiveMaximum": high} if high is not None else {})))
        result.append(_of("string", **({"pattern": translate(_other_strings(strings), path, key)} if strings else {})))
        arrays = [value for value in values if isinstance(value, list)]
        objects = [value for value in values if isinstance(value, dict)]
        result.append(all_of([_of("array"), *(any_of(self.other_array(value, path, key)) for value in arrays)]))
        result.append(all_of([_of("object"), *(any_of(self.other_object(value, path, key)) for value in objects)]))
        return result

    def other_array(self, value: list[Any], path: str, key: str) -> list[Schema]:
        shorter = [_of("array", maxItems=len(value) - 1)] if value else []
        differing = [
            _of(
                "array", prefixItems=[*[True] * index, any_of(self.other_values([item], path, key))], minItems=index + 1
            )
            for index, item in enumerate(value)
        ]
        return [*shorter, _of("array", minItems=len(value) + 1), *differing]

    def other_object(self, value: dict[str, Any], path: str, key: str) -> list[Schema]:
        missing = [_of("object", properties={name: False}) for name in value]
        more = _of("object", properties=dict.fromkeys(value, True), required=list(value), minProperties=len(value) + 1)
        differing = [
            _of("object", properties={name: any_of(self.other_values([item], path, key))}, required=[name])
            for name, item in value.items()
        ]
        return [*missing, more, *differing]

    def other_parts(self, schema: dict[str, Any], key: str, value: Schema, path: str, at: str) -> list[Schema]:
        """An item or property, not listed, that fails: only when any would fail."""
        if key == "patternProperties":
            if all(self.inside(part, at, False) is False for part in value.values()):
                return []
        elif self.inside(value, at, False) is False:
            return []
        elif key == "items" and self.inside(value, at, False) is True:
            return [_of("array", minItems=len(schema.get("prefixItems", [])) + 1)]
        elif (
            key == "additionalProperties"
            and self.inside(value, at, False) is True
            and "patternProperties" not in schema
        ):
            names = list(schema.get("properties", {}))
            self.limit(2 ** min(len(names), 30), path, key)
            return [
                _of(
                    "object",
                    properties={name: name in some for name in names},
                    required=list(some),
                    minProperties=count + 1,
                )
                for count in range(len(names) + 1)
                for some in itertools.combinations(names, count)
            ]
        raise ConstraintError("its negation is not supported", path, key)

    # --- which schemas exclude each other

    def disjoint(self, a: Schema, b: Schema) -> bool:
        """Whether certainly no value satisfies both: seen at once, or found by the grammar engine, which knows when
        patterns or bounds exclude each other."""
        if self.apart(a, b):
            return True
        key = (json.dumps(a), json.dumps(b))
        if key not in self.compared:
            self.compared[key] = False  # the answer to a question inside the question
            self.compared[key] = self.empty([a, b])
        return self.compared[key]

    def empty(self, parts: list[Schema]) -> bool:
        from llguidance import LLMatcher

        inner = _Normalizer(self.root)
        inner.compared = self.compared
        try:
            both = all_of([inner.inside(part, "#") for part in parts])
        except ConstraintError:
            return False
        if not inner.productive(both):
            return True
        if isinstance(both, bool):
            return not both
        grammar = LLMatcher.grammar_from_json_schema(json.dumps({**both, "$defs": inner.definitions}))
        return LLMatcher.validate_grammar(grammar).startswith("Unsatisfiable schema")

    def apart(self, a: Schema, b: Schema, depth: int = 0) -> bool:
        if a is False or b is False:
            return True
        if depth > 6 or not isinstance(a, dict) or not isinstance(b, dict):
            return False
        for one, other in ((a, b), (b, a)):
            values = self.finite(one)
            if values is not None:
                try:
                    return not any(holds(other, value, self.resolve) for value in values)
                except (Undecided, TypeError, KeyError, AttributeError, RecursionError):
                    pass
            parts = [*one.get("allOf", []), *([self.resolve(one["$ref"])] if "$ref" in one else [])]
            if any(self.apart(part, other, depth + 1) for part in parts):
                return True
            for key in ("anyOf", "oneOf"):
                if key in one and all(self.apart(part, other, depth + 1) for part in one[key]):
                    return True
        shared = self.types(a) & self.types(b)
        return not shared or (shared == {"object"} and self.disjoint_objects(a, b, depth))

    def disjoint_objects(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        for one, other in ((a, b), (b, a)):
            for name in one.get("required", []):
                closed = other.get("additionalProperties") is False and not other.get("patternProperties")
                if closed and name not in other.get("properties", {}):
                    return True
                mine, theirs = one.get("properties", {}).get(name, True), other.get("properties", {}).get(name, True)
                if self.apart(mine, theirs, depth + 1):
                    return True
        return False

    @staticmethod
    def types(schema: dict[str, Any]) -> set[str]:
        listed = schema.get("type", TYPES)
        names = [listed] if isinstance(listed, str) else listed
        return {"number" if name == "integer" else name for name in names}


def _listed(schema: dict[str, Any]) -> list[Any] | None:
    """The values that the schema itself names: of both keywords, the single one."""
    return [schema["const"]] if "const" in schema else list(schema["enum"]) if "enum" in schema else None


def _inhabited(schema: Schema, known: set[str]) -> bool:
    """Whether a value of a schema may exist, given the definitions that have one. Errs towards yes."""
    if isinstance(schema, bool):
        return schema
    for key, value in schema.items():
        if key == "$ref" and value.removeprefix("#/$defs/") not in known:
            return False
        if key == "allOf" and not all(_inhabited(part, known) for part in value):
            return False
        if key == "anyOf" and not any(_inhabited(part, known) for part in value):
            return False
    types = schema.get("type", TYPES)
    types = {types} if isinstance(types, str) else set(types)
    if types == {"object"}:
        properties = schema.get("properties", {})
        return all(_inhabited(properties.get(name, True), known) for name in schema.get("required", []))
    if types == {"array"} and schema.get("minItems", 0) > 0:
        count, ahead = schema["minItems"], schema.get("prefixItems", [])
        ahead = schema["items"] if isinstance(schema.get("items"), list) else ahead
        rest = (
            schema.get("items", True)
            if not isinstance(schema.get("items"), list)
            else schema.get("additionalItems", True)
        )
        return all(_inhabited(part, known) for part in ahead[:count]) and (
            count <= len(ahead) or _inhabited(rest, known)
        )
    return True


def _outside(schema: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The bound of the numbers that a bound forbids."""
    match key:
        case "minimum":
            return {"maximum" if schema.get("exclusiveMinimum") is True else "exclusiveMaximum": value}
        case "maximum":
            return {"minimum" if schema.get("exclusiveMaximum") is True else "exclusiveMinimum": value}
        case "exclusiveMinimum" if not isinstance(value, bool):
            return {"maximum": value}
        case "exclusiveMaximum" if not isinstance(value, bool):
            return {"minimum": value}
    return {}


def _inward(key: str, value: Any) -> Any:
    """A bound as the grammar engine, which computes in 64-bit floating point, can keep it: integers beyond 2**53 move
    inwards to the next one that it has, so that nothing beyond is let through."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) <= EXACT:
        return value
    lower = key in ("minimum", "exclusiveMinimum")
    near = int(math.nextafter(float(value), -math.inf if not lower else math.inf))
    moved = value if int(float(value)) == value else int(float(value)) if (int(float(value)) > value) == lower else near
    if (lower and moved > FARTHEST) or (not lower and moved < -FARTHEST):
        raise ConstraintError("beyond 64-bit integers", "", key)
    return max(moved, -FARTHEST) if lower else min(moved, FARTHEST)


def _other_strings(strings: list[str]) -> str:
    """A pattern for every string but these: it leaves their tree of prefixes at some character, or ends inside."""

    strings = [text for text in strings if "\x01" not in text]  # cannot be written anyway

    def rest(tails: list[str]) -> str:
        """What may follow here, for tails that must not."""
        heads = sorted({tail[0] for tail in tails if tail})
        branches = [f"{_literal(head)}{rest([tail[1:] for tail in tails if tail[:1] == head])}" for head in heads]
        if heads:
            branches.append(f"[^{''.join(map(_literal, heads))}](?s:.*)")
        else:
            branches.append("(?s:.+)")
        if "" not in tails:
            branches.append("")
        return f"(?:{'|'.join(branches)})"

    return f"^{rest(strings)}$"


def _literal(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"


def _anchors(node: Schema) -> Iterator[tuple[str, Schema]]:
    stack = [node]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            for key in ("$anchor", "$id", "id"):
                name = node.get(key)
                if isinstance(name, str):
                    yield (f"#{name}" if key == "$anchor" else name), node
            stack += node.values()
        elif isinstance(node, list):
            stack += node


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _first_keyword(schema: Schema) -> str:
    return next(iter(schema), "") if isinstance(schema, dict) else ""


def _schemas(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0


def _count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and float(value).is_integer()


def _finite(value: Any) -> bool:
    """A number that the grammar engine, which computes in 64-bit floating point, keeps as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _type(value: Any) -> bool:
    listed = [value] if isinstance(value, str) else value
    return _names(listed) and len(listed) > 0 and set(listed) <= {*TYPES, "integer"}


def _exact(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_exact, value.values()))
    if isinstance(value, list):
        return all(map(_exact, value))
    return isinstance(value, str | bool | None) or (
        _finite(value) and (isinstance(value, float) or abs(value) <= EXACT)
    )


def _writable(value: Any) -> bool:
    """Whether the strings of a value can be written: control characters only with the short escapes."""
    if isinstance(value, dict):
        return all(map(_writable, value.values()))
    if isinstance(value, list):
        return all(map(_writable, value))
    return not isinstance(value, str) or UNWRITABLE.search(value) is None


def _object(value: Any) -> bool:
    return isinstance(value, dict)


SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_type, "must be one or several of null, boolean, integer, number, string, array, object"),
    "enum": (
        lambda value: isinstance(value, list) and len(value) > 0 and _exact(value),
        "must list values, numbers up to 2**53",
    ),
    "const": (_exact, "numbers go up to 2**53"),
    "required": (_names, "must be a list of names"),
    "pattern": (lambda value: isinstance(value, str), "must be a string"),
    "format": (lambda value: isinstance(value, str), "must be a string"),
    "multipleOf": (lambda value: _finite(value) and value > 0, "must be a number above 0"),
    **dict.fromkeys(("minimum", "maximum"), (_finite, "must be a number")),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"),
        (lambda value: isinstance(value, bool) or _finite(value), "must be a number"),
    ),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (_count, "must be a whole number, 0 or more"),
    ),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), (_schemas, "must be a list of schemas, not empty")),
    **dict.fromkeys(
        ("properties", "patternProperties", "dependencies", "dependentRequired", "dependentSchemas"),
        (_object, "must be an object"),
    ),
    "prefixItems": (_schemas, "must be a list of schemas, not empty"),
}


def _check(schema: dict[str, Any], path: str) -> None:
    """Refuses keywords of the wrong shape."""
    for keyword, value in schema.items():
        shape = SHAPES.get(keyword)
        if shape is not None and not shape[0](value):
            raise ConstraintError(shape[1], path, keyword)
