"""JSON schemas: what is enforced, what is refused and how, and random schemas against a validator."""

# ruff: noqa: E501 (tables of cases)

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import jsonschema
import pytest

from grammar_support import END, accepts, bits, byte_matchers, matcher
from tricorn.grammar.constraint import ConstraintError
from tricorn.grammar.patterns import translate
from tricorn.grammar.schema import normalize

TOKENIZER = byte_matchers()


def takes(schema: Any, *values: Any) -> list[bool]:
    """Which values (text stands for itself) the schema's grammar accepts."""
    root = matcher(TOKENIZER, "json_schema", schema)
    return [accepts(TOKENIZER, root, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for v in values]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": "^[a-z]+$", "minLength": 4, "maxLength": 6}, ['"abcd"', '"abcdef"'], ['"abc"', '"abcdefg"', '"abc1"']),
        ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, [-3, 0, 11], [-4, 12, 1.5]),
        ({"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 2}, [0, 0.5, 2, 1.5], [0.3, 2.5, -0.5]),
        ({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 3, "maxItems": 3}, [[1, 2, 3], [3, 1, 2]], [[1, 1, 2], [1, 2]]),
        (
            {"type": "object", "patternProperties": {"^s_": {"type": "integer"}}, "additionalProperties": False, "minProperties": 1},
            [{"s_a": 1}, {"s_": 2, "s_b": 3}], [{}, {"a": 1}, {"s_a": "x"}],
        ),
        ({"enum": ["a/b", 'he said "hi"', "tab\there", "back\\slash", "naïve", "😀", "", None, 0, -1.5, True, [1, {"k": 2}]]},
         ["a/b" and '"a/b"', '"he said \\"hi\\""', '"tab\\there"', '"back\\\\slash"', '"naïve"', '"😀"', '""', "null", "0", "-1.5", "true", '[1, {"k": 2}]'],
         ['"a"', "1", "false", "[1]", "[]", "{}", '"naive"']),
        ({"const": None}, ["null"], ["0", '""']),
        ({"const": {"b": 1, "a": []}}, ['{"b": 1, "a": []}'], ["{}", '{"b": 1}', '{"b": 1, "a": [], "c": 1}']),
        ({"type": "object", "properties": {}}, ["{}", '{"a": 1}'], ["[]", ""]),
        ({}, ["{}", "1", "null", '"x"', "[[]]"], ["", "x", "{", "1 1", "{} ", " {}"]),
        (True, ["{}", "1"], ["", "nul"]),
        (
            {"type": "object", "properties": {k: {"type": "integer"} for k in "abc"}, "required": ["b"], "additionalProperties": False},
            ['{"b": 1}', '{"a": 1, "b": 2}', '{"b": 1, "c": 2}', '{"a": 1, "b": 2, "c": 3}'],
            ["{}", '{"a": 1}', '{"b": 1,}', '{,"b": 1}', '{"b": 1 "c": 2}', '{"b": 1, "b": 1}', '{"\\u0062": 1}'],
        ),
        ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"const": 7}}}, ["7"], ["1"]),
        ({"$ref": "#x", "$defs": {"z": {"$anchor": "x", "const": 7}}}, ["7"], ["1"]),
        ({"type": "string"}, ['"a\\"b\\\\c\\nd"', '"\u2028"', '"<|im_start|>"'], ['"\t"', '"\n"', '"\x00"', '"\x1f"', '"\\x"', '"\\ud800"']),
        ({"type": "string", "maxLength": 3}, ['"\\n\\n\\n"', '"😀😀😀"', '"é\\"b"'], ['"\\n\\n\\n\\n"', '"😀😀😀😀"']),
        ({"type": "string", "pattern": "^.{0,3}$"}, ['"\\"\\"\\""', '"\\\\a"'], ['"aaaa"', '"\\n"']),
        ({"type": "string", "pattern": '^[^"\\\\]+$'}, ['"a/\\n"'], ['"\\""', '"\\\\"', '"a\\\\b"', '""']),
        ({"properties": {"a": {"type": "integer"}}, "type": "object"}, ['{"a": 1, "b": "x"}'], ['{"\\u0061": "x"}', '{"a": "x"}', '{"b": 1, "a": "x"}']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2023-12-31"'], ['"2023-02-29"', '"2023-13-01"', '"1900-02-29"', '"2023-1-1"']),
        ({"type": "integer", "format": "int32"}, [2**31 - 1, -(2**31)], [2**31, 1e3]),
        ({"type": "integer", "maximum": 2**63 - 1}, [0, 2**62], [2**63, 2**64]),
        ({"type": "string", "format": "of-the-house"}, ['"x"'], ["1"]),
        ({"type": "integer", "format": "uint8"}, [0, 255], [-1, 256]),
        ({"not": {"required": ["a"]}, "type": "object"}, [{"b": 1}, {}], [{"a": 1}]),
        ({"type": ["integer", "string"], "not": {"enum": [3, "ab"]}}, ["2", "4", '"a"', '"abc"', '"b"'], ["3", '"ab"']),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "additionalProperties": {"type": "null"}},
         ['{"a": null}', '{"b": null, "c": null}'], ["{}", '{"a": null, "b": null}']),
        ({"type": "integer", "oneOf": [{"minimum": 3}, {"maximum": 5}]}, ["2", "6"], ["3", "4", "5"]),
        ({"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^[b-d]$"}]}, ['"ab"', '"c"'], ['"x"', '"bb"']),
        ({"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["v"]}, "else": {"not": {"required": ["v"]}}, "type": "object",
          "properties": {"k": {"enum": [1, 2]}, "v": {"type": "null"}}, "additionalProperties": False},
         ['{"k": 1, "v": null}', '{"k": 2}', "{}"], ['{"k": 1}', '{"k": 2, "v": null}', '{"v": null}']),
        ({"type": "object", "properties": {k: {"const": 1} for k in "abc"}, "dependentRequired": {"a": ["b"]}, "additionalProperties": False},
         ['{"a": 1, "b": 1}', '{"b": 1}', '{"c": 1}', "{}"], ['{"a": 1}', '{"a": 1, "c": 1}']),
        ({"type": "object", "propertyNames": {"pattern": "^[a-c]$"}, "additionalProperties": {"const": 0}}, ['{"a": 0, "c": 0}', "{}"], ['{"d": 0}', '{"a": 1}']),
        ({"type": "object", "properties": {k: {"const": 1} for k in "abc"}, "minProperties": 2, "additionalProperties": False},
         ['{"a": 1, "b": 1}', '{"a": 1, "b": 1, "c": 1}', '{"b": 1, "c": 1}'], ["{}", '{"a": 1}']),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, ['{"a": 1}', "{}"], ['{"b": 1}']),
        ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, ["[1]", "[]"], ["[1, 2]", "[2]"]),
        ({"x-unknown": 1, "title": "t", "type": "null", "examples": [3]}, ["null"], ["3"]),
    ],
)  # fmt: skip
def test_what_a_schema_lets_through(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert takes(schema, *good) == [True] * len(good), [
        g for g, t in zip(good, takes(schema, *good), strict=True) if not t
    ]
    assert takes(schema, *bad) == [False] * len(bad), [b for b, t in zip(bad, takes(schema, *bad), strict=True) if t]


@pytest.mark.parametrize(
    ("schema", "path", "keyword"),
    [
        ({"enum": []}, "#", "enum"), ({"enum": [1], "type": "string"}, "#", "enum"), (False, "#", ""),
        ({"properties": {"a": {"type": "strin"}}}, "#/properties/a", "type"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "#/properties/a", "uniqueItems"),
        ({"items": {"contains": {"const": 1}}}, "#/items", "contains"),
        ({"type": "string", "not": {"pattern": "a"}}, "#/not", "pattern"),
        ({"properties": {"a/b": {"format": "regex"}}}, "#/properties/a~1b", "format"),
        ({"type": "string", "format": "date", "maxLength": 3}, "#", "format"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False}, "#", "required"),
        ({"$ref": "#"}, "#", "$ref"), ({"$ref": "http://127.0.0.1:9/x"}, "#", "$ref"), ({"$ref": "#/$defs/none"}, "#", "$ref"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "", "$ref"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#", ""),
        ({"properties": {"a": {"pattern": "(?=a)b"}}}, "#/properties/a", "pattern"),
        ({"properties": {"a": {"pattern": "("}}}, "#/properties/a", "pattern"),
        ({"items": {"type": "string", "format": "datetime"}}, "#/items", "format"),
        ({"$dynamicRef": "#x"}, "#", "$dynamicRef"), ({"nullable": True, "type": "string"}, "#", "nullable"),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "#", "unevaluatedProperties"),
        ({"minLength": -1}, "#", "minLength"), ({"maximum": "3"}, "#", "maximum"), ({"required": "a"}, "#", "required"),
        ({"const": 2**60 + 1}, "#", "const"), ({"type": "object", "minProperties": 2}, "#", "minProperties"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "#", "minimum"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "#", "allOf"),
        ([1], "#", ""), ("x", "#", ""),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(schema: Any, path: str, keyword: str) -> None:
    with pytest.raises(ConstraintError) as refused:
        matcher(TOKENIZER, "json_schema", schema)
    error = refused.value
    assert error.path.startswith(path) if path == "" else error.path == path, str(error)
    assert keyword in ("", error.keyword), str(error)
    assert "\n" not in str(error)


def test_recursion_compiles_and_goes_deep() -> None:
    node = {
        "type": "object", "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
        "required": ["v", "kids"], "additionalProperties": False,
    }  # fmt: skip
    value: Any = {"v": 0, "kids": []}
    for depth in range(6):
        value = {"v": depth, "kids": [value, value]}
    assert takes({"$defs": {"n": node}, "$ref": "#/$defs/n"}, value, {"v": 1}) == [True, False]


@pytest.mark.parametrize("bound", [1999, 2000, 2001, 65_536, 10**9])
@pytest.mark.parametrize("place", ["top", "nested", "array"])
def test_large_bounds_hold_wherever_they_sit(bound: int, place: str) -> None:
    schema: Any = {"type": "string", "maxLength": bound}
    wrap = {"top": "{}", "nested": '{{"a": {{"a": {}}}}}', "array": "[{}]"}[place]
    if place == "nested":
        for _ in range(2):
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    if place == "array":
        schema = {"type": "array", "items": schema, "maxItems": 50}
    length = min(bound, 3000)
    expected = [True, bound > 3000]
    texts = [wrap.format(json.dumps("a" * length)), wrap.format(json.dumps("a" * (length + 1)))]
    assert takes(schema, *texts) == expected


def test_whitespace_is_bounded() -> None:
    """Between tokens: two blanks, or a line end and an indentation; nothing before or after."""
    schema = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "required": ["a", "b"]}
    good = ['{"a":null,"b":null}', '{"a": null, "b": null}', json.dumps({"a": None, "b": None}, indent=4)]
    bad = [
        '{   "a":null,"b":null}',
        '{\n\n"a":null,"b":null}',
        ' {"a":null,"b":null}',
        '{"a":null,"b":null} ',
        '{"a":null,"b":null}\n',
    ]
    assert takes(schema, *good) == [True] * 3
    assert takes(schema, *bad) == [False] * 5
    root = matcher(TOKENIZER, "json_object", "")
    state, steps = root.deep_copy(), 0  # a model that writes whitespace whenever it may
    while spaces := [i for i in bits(state.compute_bitmask()) if i > END and not TOKENIZER.decode_bytes([i]).strip()]:
        assert state.consume_token(spaces[0])
        steps += 1
        assert steps < 40


@pytest.mark.filterwarnings("ignore:Possible set")
def test_classes_mean_what_ecmascript_means() -> None:
    letters = ["a", "[", "]", "&", "~", "-", "\\", '"', "\n", "é", "b"]
    for pattern in [
        "^[a[b]$",
        "^[a&&b]$",
        "^[^[]$",
        '^[^"]$',
        "^[^\\\\\\n]$",
        "^[a~~b]$",
        "^[\\]]$",
        "^[a\\-b]$",
        "^[^a-b]$",
        "^[\\[\\\\]$",
    ]:
        taken = takes(
            {"type": "string", "pattern": pattern}, *(json.dumps(letter, ensure_ascii=False) for letter in letters)
        )
        with_brackets = re.compile(
            pattern[:-1].replace("[", "\\[").replace("\\[", "[", 1).replace("\\\\[", "\\[") + r"\Z"
        )
        assert taken == [with_brackets.search(letter) is not None for letter in letters], pattern
    assert translate("a", "#", "pattern") == "a"


def test_normal_forms_of_negations() -> None:
    assert normalize({"not": {"not": {"type": "null"}}}) == {"allOf": [{"type": "null"}]}
    assert normalize({"enum": [1, "a", 2.5], "type": "integer"}) == {"enum": [1]}


# --- random schemas


class Random:
    """Schemas and values over few names and letters, so that they meet."""

    PATTERNS = ("^a+$", "^[a-c]{1,3}$", "b", '^[^"]{0,3}$', "^[^\\\\/]*$", "^\\d{2}$", "^(x|y)$", "^[^ab]$")

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def often(self, share: float) -> bool:
        return self.random.random() < share

    def value(self, depth: int = 0) -> Any:
        pick = self.random
        match pick.randrange(8 if depth < 2 else 6):
            case 0:
                return None
            case 1:
                return pick.choice([True, False])
            case 2:
                return pick.randint(-3, 12)
            case 3:
                return pick.choice([0.5, -1.5, 3.25, 0, 1])
            case 4 | 5:
                return pick.choice(["", "a", "ab", 'b"', "\\", "x", "abc", "c/d", "12"])
            case 6:
                return [self.value(depth + 1) for _ in range(pick.randrange(3))]
        return {pick.choice("abxy"): self.value(depth + 1) for _ in range(pick.randrange(3))}

    def schema(self, depth: int = 0) -> Any:
        pick = self.random
        if self.often(0.04):
            return pick.choice([True, False, {}])
        schema: dict[str, Any] = {}
        kinds = ["null", "boolean", "integer", "number", "string", "array", "object"]
        if self.often(0.75):
            schema["type"] = pick.choice([*kinds, "object", "array", pick.sample(kinds, 2)])
        types = schema.get("type", ["integer", "string", "object"])
        for kind in [types] if isinstance(types, str) else types:
            self.keywords(schema, kind, depth)
        if self.often(0.12):
            schema["enum"] = [self.value() for _ in range(pick.randint(1, 5))]
        if depth < 3:
            for keyword, share in (("anyOf", 0.12), ("oneOf", 0.12), ("allOf", 0.08)):
                if self.often(share):
                    schema[keyword] = [self.schema(depth + 1) for _ in range(2)]
            if self.often(0.1):
                schema["not"] = self.schema(depth + 1)
            if self.often(0.05):
                schema |= {keyword: self.schema(depth + 1) for keyword in ("if", "then", "else")}
        return schema

    def keywords(self, schema: dict[str, Any], kind: str, depth: int) -> None:
        pick = self.random
        options: dict[str, tuple[float, Any]] = {}
        if kind in ("integer", "number"):
            options = {
                "minimum": (0.4, lambda: pick.choice([0, -2, 1.5])), "maximum": (0.3, lambda: pick.choice([3, 10, 2.5])),
                "exclusiveMaximum": (0.15, lambda: 5), "multipleOf": (0.15, lambda: pick.choice([2, 0.5])),
            }  # fmt: skip
        elif kind == "string":
            options = {
                "minLength": (0.3, lambda: pick.randrange(3)), "maxLength": (0.5, lambda: pick.randrange(5)),
                "pattern": (0.4, lambda: pick.choice(self.PATTERNS)),
            }  # fmt: skip
        elif kind == "array":
            options = {
                "maxItems": (0.9, lambda: pick.randrange(4)), "minItems": (0.3, lambda: pick.randrange(3)),
                "items": (0.6 * (depth < 3), lambda: self.schema(depth + 1)), "uniqueItems": (0.1, lambda: True),
                "prefixItems": (0.25 * (depth < 3), lambda: [self.schema(depth + 1)]),
            }  # fmt: skip
        elif kind == "object":
            nested = 1.0 * (depth < 3)
            options = {
                "properties": (nested, lambda: {k: self.schema(depth + 1) for k in pick.sample("abxy", pick.randrange(4))}),
                "required": (0.5, lambda: pick.sample("abxy", pick.randrange(3))),
                "additionalProperties": (0.7, lambda: self.often(0.3) and depth < 3 and self.schema(depth + 1)),
                "patternProperties": (0.15 * nested, lambda: {pick.choice(self.PATTERNS): self.schema(depth + 1)}),
                "minProperties": (0.15, lambda: pick.randrange(3)), "maxProperties": (0.2, lambda: pick.randrange(4)),
                "propertyNames": (0.1, lambda: pick.choice([{"pattern": "^[a-z]$"}, {"maxLength": 1}, {"enum": ["a", "b"]}])),
                "dependentRequired": (0.1, lambda: {"a": ["b"]}),
            }  # fmt: skip
        for keyword, (share, make) in options.items():
            if self.often(share):
                schema[keyword] = make()

    def text(self, root: Any) -> bytes | None:
        """A random sentence that favours short tokens, None when it does not come to an end."""
        state, written = root.deep_copy(), bytearray()
        for step in range(60):
            allowed = [id for id in bits(state.compute_bitmask()) if id != END]
            if state.is_accepting() and (step > 30 or self.often(0.3) or not allowed):
                return bytes(written)
            few = self.random.sample(allowed, min(len(allowed), 30))
            id = min(few, key=lambda id: len(TOKENIZER.decode_bytes([id]))) if self.often(0.5) else few[0]
            assert state.consume_token(id)
            written += TOKENIZER.decode_bytes([id])
        return None


@pytest.mark.parametrize("seed", range(6))
def test_sampled_texts_always_validate(seed: int) -> None:
    """Of random schemas: whatever is sampled under the masks is valid, whatever is valid is reachable."""
    source, compiled, sampled = Random(seed), 0, 0
    for _ in range(70):
        schema = source.schema()
        validator = jsonschema.Draft202012Validator(schema)
        try:
            root = matcher(TOKENIZER, "json_schema", schema)
        except ConstraintError:
            continue
        compiled += 1
        for _ in range(5):
            text = source.text(root)
            if text is not None:
                assert validator.is_valid(json.loads(text)), (schema, text)
                sampled += 1
        for value in itertools.islice(filter(validator.is_valid, (source.value() for _ in range(40))), 10):
            single = not isinstance(value, dict) or len(value) < 2  # the order of members is the schema's
            if single and not any(len(part) > 1 for part in _dicts(value)):
                assert accepts(TOKENIZER, root, json.dumps(value, ensure_ascii=False)), (schema, value)
    assert compiled > 15
    assert sampled > 50


def _dicts(value: Any) -> list[dict[str, Any]]:
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [*([value] if isinstance(value, dict) else []), *(found for part in parts for found in _dicts(part))]
