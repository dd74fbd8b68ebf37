"""Faults of constrained output that users of other servers reported: on the grammar alone where that tells, else on a
real server of a small engine (and of a real model, where it is pulled)."""

# ruff: noqa: E501 (tables of cases)

from __future__ import annotations

import json
import re
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

pytest.importorskip("tricorn._native", reason="the native extension is not built: run make setup")

from engines import checkpoint, compiled
from grammar_support import END, accepts, bits, byte_matchers, byte_tokenizer, engine_matchers, matcher
from served import Served, served
from tricorn.frontend.tokenizer import Tokenizer
from tricorn.grammar.constraint import ConstraintError
from tricorn.grammar.formats import ALIASES, INTEGERS, KNOWN, PATTERNS
from tricorn.grammar.translate import WHITESPACE
from tricorn.grammar.workers import Workers
from tricorn.request import Constraint

VOCAB = 400
TOKENIZER = byte_matchers()
TEXT = Tokenizer(byte_tokenizer())
LITERAL = "🦜🌋ď ขอบคุณ 한국 𝒳é"
DOCS = Path(__file__).parent.parent / "docs/structured-output.md"
BIO = {"type": "object", "properties": {"bio": {"type": "string"}}, "required": ["bio"], "additionalProperties": False}
NODE = {
    "type": "object", "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
    "required": ["v", "kids"], "additionalProperties": False,
}  # fmt: skip
BOUNDED: list[Any] = [
    {"type": "object", "properties": {"k": {"type": "string", "pattern": "^[a-z]+$", "minLength": 4, "maxLength": 6}}, "required": ["k"], "additionalProperties": False},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 2},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 3, "maxItems": 3},
    {"type": "object", "patternProperties": {"^s_": {"type": "integer"}}, "additionalProperties": False, "minProperties": 1},
]  # fmt: skip
OTHERS: list[Any] = [
    {"type": "string", "pattern": "^hi\\!$"}, {"type": "string", "maxLength": 5}, {"enum": ["a/b", 'he said "hi"', "tab\there", -1.5, [1, {"k": 2}]]},
    {"const": {"b": 1, "a": []}}, {"type": "object", "properties": {}, "maxProperties": 2}, {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
]  # fmt: skip


class Client:
    """Completions of a server; requests are greedy unless they say otherwise."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.http = httpx.Client(base_url=server.url, timeout=60)

    def body(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.server.model, "prompt": "x", "max_tokens": 60, "temperature": 0, **fields}

    def post(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=self.body(fields))

    def choice(self, **fields: Any) -> Any:
        answer = self.post(**fields)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return {**choice, "tokens": answer.json()["usage"]["completion_tokens"]}

    def refused(self, **fields: Any) -> str:
        answer = self.post(**fields)
        assert answer.status_code == 400, answer.text
        assert answer.headers["content-type"].startswith("application/json")
        return str(answer.json()["error"]["message"])

    def stream(self, **fields: Any) -> tuple[str, str]:
        """The joined text and the finish reason."""
        text, reason = "", ""
        with self.http.stream("POST", "/v1/completions", json=self.body({**fields, "stream": True})) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        for line in lines:
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
        return text, reason


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Over a small random model with a token for each byte, and logits wider than the tokenizer."""
    source = replace(checkpoint("llama", "F32", vocab_size=VOCAB), tokenizer=byte_tokenizer(), eos_ids=(END,))
    with served(compiled(source, tmp_path_factory.mktemp("engine")).path) as server:
        client = Client(server)
        yield client
        client.http.close()


@pytest.fixture(scope="module")
def real(real_engine: Callable[[str], Path]) -> Iterator[tuple[Client, tuple[int, ...]]]:
    """Over a real model, and the ids that end its sequences."""
    path = real_engine("smollm2-135m")
    with served(path) as server:
        client = Client(server)
        yield client, engine_matchers(path)[0].eos_ids
        client.http.close()


def takes(schema: Any, *texts: str | bytes) -> list[bool]:
    root = matcher(TOKENIZER, "json_schema", schema)
    return [accepts(TOKENIZER, root, text) for text in texts]


def id_of(text: str) -> int:
    (id,) = TEXT.encode(text, parse_special=False)
    return id


def valid_or_cut(choice: Any, schema: Any) -> bool:
    """Whether an answer ended by itself; then it must be valid."""
    if choice["finish_reason"] == "length":
        return False
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["text"]), schema)
    return True


# --- forced literals, and grammars that are none


def test_forced_literals_arrive_whole(client: Client) -> None:  # A-001, A-002
    asked = {"structured_outputs": {"regex": LITERAL}, "logprobs": 2}
    whole = client.choice(**asked)
    assert (whole["text"], whole["finish_reason"]) == (LITERAL, "stop")
    assert client.stream(**asked) == (LITERAL, "stop")
    size = len(LITERAL.encode())
    assert whole["tokens"] <= size + 1
    for most in range(1, whole["tokens"]):
        cut = client.choice(**asked, max_tokens=most)
        assert (cut["finish_reason"], cut["tokens"]) == ("length", most)
        assert client.stream(**asked, max_tokens=most) == (cut["text"], "length")
        assert LITERAL.startswith(cut["text"].removesuffix("\ufffd"))


def test_malformed_constraints_are_refused_before_they_stream(client: Client) -> None:  # A-011, A-050
    plain = {"prompt": "abc", "max_tokens": 200, "logit_bias": {str(END): -100}}
    reference = client.stream(**plain)
    assert client.choice(structured_outputs={"regex": "^(.*)$"}, max_tokens=3)["tokens"] <= 3
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.stream, **plain)
        for stream in (False, True):
            for pattern in ("[a-", "(", "*a"):
                assert "regex" in client.refused(structured_outputs={"regex": pattern}, stream=stream)
            assert "missing" in client.refused(structured_outputs={"grammar": "root ::= missing"}, stream=stream)
            client.refused(structured_outputs={"grammar": ""}, stream=stream)
            assert "type" in client.refused(structured_outputs={"json": {"type": "strin"}}, stream=stream)
            assert "$ref" in client.refused(structured_outputs={"json": {"$ref": "#/nope"}}, stream=stream)
            client.refused(structured_outputs={"json": '"x"'}, stream=stream)
            assert "choice" in client.refused(structured_outputs={"choice": []}, stream=stream)
        assert running.result() == reference
    assert client.choice(structured_outputs={"choice": [""]})["text"] == ""
    assert client.choice(structured_outputs={"regex": "a{3}"})["text"] == "aaa"


@pytest.mark.parametrize("schema", [*BOUNDED, *OTHERS])
def test_whatever_is_answered_is_valid(client: Client, schema: Any) -> None:  # A-051, A-052
    form = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}
    answers = [client.choice(response_format=form, temperature=1.5, seed=seed, max_tokens=80) for seed in range(20)]
    assert sum(valid_or_cut(choice, schema) for choice in answers) >= 2


def test_what_cannot_be_enforced_is_refused_by_name(client: Client) -> None:  # A-051, A-052
    for schema, keyword in [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}}, "#/properties/a 'pattern'"),
        ({"type": "string", "format": "date", "maxLength": 3}, "'format'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    ]:
        assert keyword in client.refused(response_format={"type": "json_schema", "json_schema": {"schema": schema}})


def test_formats_are_documented() -> None:  # A-052
    named = set(re.findall(r"`([^`]+)`", DOCS.read_text().split("formats that are enforced")[1]))
    assert {*KNOWN, *PATTERNS, *INTEGERS, *ALIASES} <= named


# --- strings and values


def test_bounds_leave_the_escapes_in() -> None:  # A-053
    text = r'"a\"b\\c\nd"'
    for schema in (
        {"type": "string", "maxLength": 50},
        {"type": "string", "pattern": r"^[\s\S]{0,50}$"},
        {"type": "string"},
    ):
        assert takes(schema, text, '"é😀/"', r'"\b\f\r\t"') == [True] * 3
        assert takes(schema, r'"\u00e9"', r'"\ud83d\ude00"', r'"\/"', r'"\x"') == [False] * 4
    assert takes({"type": "string", "pattern": "^.{0,50}$"}, r'"a\"b\\c"', text) == [
        True,
        False,
    ]  # a dot is no line end
    three = {"type": "string", "maxLength": 3}
    assert takes(three, r'"\n\n\n"', '"😀😀😀"', r'"\n\n\n\n"', '"😀😀😀😀"') == [True, True, False, False]


def test_raw_control_characters_and_broken_utf8() -> None:  # A-054
    schema = {"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"]}
    for character in [*map(chr, range(0x20)), "\x7f"]:
        assert takes(schema, f'{{"t":"{character}x"}}') == [False]
    assert takes(schema, '{"t":"\u2028x"}', '{"t":"é"}') == [True, True]
    broken = [b"\xff", b"\xc3", b"\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\xe4\xbd"]
    assert takes(schema, *(b'{"t":"' + part + b'x"}' for part in broken)) == [False] * len(broken)
    state = matcher(TOKENIZER, "json_schema", {"type": "string"}).deep_copy()
    assert state.try_consume_tokens([id_of('"'), 3 + 0xE4]) == 2
    allowed = {id - 3 for id in bits(state.compute_bitmask())}
    assert allowed
    assert allowed <= set(range(0x80, 0xC0))


def test_listed_values_are_all_there_and_nothing_else() -> None:  # A-055
    values = ["a/b", 'he said "hi"', "tab\there", "back\\slash", "naïve", "😀", "", None, 0, -1.5, True, [1, {"k": 2}]]
    schema = {"enum": values}
    for value in values:
        text = json.dumps(value, ensure_ascii=False)
        assert takes(schema, text, json.dumps(value, ensure_ascii=False, separators=(",", ":"))) == [True, True]
    assert takes(schema, '"a"', "1", "false", "[1]", "-1", '"naive"', "") == [False] * 7
    assert takes({"const": {"b": 1, "a": []}}, '{"b":1,"a":[]}', '{"b":1}', '{"b":1,"a":[],"c":1}') == [
        True,
        False,
        False,
    ]
    for empty in ({"enum": []}, {"enum": [1], "type": "string"}, {"enum": ["\x01"]}):
        with pytest.raises(ConstraintError, match="'enum'"):
            matcher(TOKENIZER, "json_schema", empty)
    with pytest.raises(ConstraintError, match="'const'"):
        matcher(TOKENIZER, "json_schema", {"const": "\x7f"})


def test_objects_without_properties_and_with_optional_ones(client: Client) -> None:  # A-056
    for schema in ({"type": "object", "properties": {}}, {"type": "object"}, {}, True):
        assert takes(schema, "{}") == [True]
    three = {
        "type": "object",
        "properties": {k: {"type": "integer"} for k in "abc"},
        "required": ["b"],
        "additionalProperties": False,
    }
    good = ['{"b":1}', '{"a":1,"b":2}', '{"b":1,"c":2}', '{"a":1,"b":2,"c":3}']
    bad = ["{}", '{"a":1}', '{"b":1,}', '{,"b":1}', '{"a":1,,"b":1}', '{"b":1 "c":2}', '{"b":1,"a":2}']
    assert takes(three, *good, *bad) == [True] * len(good) + [False] * len(bad)
    assert "'required'" in client.refused(structured_outputs={"json": {**three, "required": ["z"]}})
    client.refused(structured_outputs={"json": "false"})
    assert json.loads(client.choice(structured_outputs={"json": {"type": "object", "maxProperties": 0}})["text"]) == {}


@pytest.mark.parametrize("count", [500, 1500])
def test_many_optional_members(count: int) -> None:  # A-056, A-059
    part = {"type": "object", "properties": {"x": {"type": "integer"}}}
    schema = {"type": "object", "properties": {f"name_{i}": part for i in range(count)}}
    assert takes(schema, "{}", '{"name_3":{"x":1},"name_9":{}}', '{"name_3":1}') == [True, True, False]


def test_references(client: Client) -> None:  # A-057
    value: Any = {"v": 0, "kids": []}
    for depth in range(6):
        value = {"v": depth, "kids": [value, value]}
    began = time.monotonic()
    assert takes({"$defs": {"n": NODE}, "$ref": "#/$defs/n"}, json.dumps(value), '{"v":1}') == [True, False]
    assert time.monotonic() - began < 5  # far below a second on a machine of its own
    assert takes({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"const": 7}}}, "7", "1") == [True, False]
    circle = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    with socket.create_server(("127.0.0.1", 0)) as remote:
        away = {"$ref": f"http://127.0.0.1:{remote.getsockname()[1]}/x"}
        for schema in (circle, {"$ref": "#"}, away):
            assert "'$ref'" in client.refused(structured_outputs={"json": schema})
        assert not select.select([remote], [], [], 0.2)[0]


# --- what costs


def large(bound: int) -> list[Any]:
    text = {"type": "string", "maxLength": bound}
    nested: Any = text
    for _ in range(3):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    many = {f"p{i}": {**text, "maxLength": bound + i} for i in range(40)}
    return [
        text,
        nested,
        {"type": "array", "items": text, "maxItems": 50},
        {"type": "object", "properties": many, "required": list(many)},
    ]


def test_large_bounds_are_cheap() -> None:  # A-058
    """All compile within the memory and time given here, which the kernel enforces."""
    workers = Workers(byte_tokenizer(), VOCAB, [END], memory=200 << 20, compile_seconds=2)
    try:
        for bound in (1999, 2000, 2001, 65_536, 10**9):
            for schema in large(bound):
                workers.check(Constraint("json_schema", json.dumps(schema)))
        array = {"type": "array", "items": {"type": "string", "maxLength": 2001}, "minItems": 3000}
        both = {"type": "object", "properties": {f"p{i}": array for i in range(40)}}
        workers.check(Constraint("json_schema", json.dumps(both)))
    finally:
        workers.shutdown()
    items = ["[" + ",".join(["1"] * count) + "]" for count in (2999, 3000)]
    assert takes({"type": "array", "items": {"type": "integer"}, "minItems": 3000}, *items) == [False, True]


def one_of(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for level in range(depth):
        schema = {
            "oneOf": [schema, {"type": "string", "maxLength": level}, {"type": "array", "items": schema, "minItems": 1}]
        }
    return schema


def tree(pid: int) -> set[int]:
    """A process and those below it."""
    found = {pid}
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found |= {one for child in path.read_text().split() for one in tree(int(child))}
        except OSError:
            continue
    return found


def computed(pid: int) -> int:
    """The ticks, of 10 ms, that a process and those below it have computed."""
    ticks = 0
    for one in tree(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks


def test_hostile_grammars_cost_their_own_request(client: Client) -> None:  # A-059
    slow = [
        {"oneOf": [{"properties": {f"p{i}{n}": {"const": j} for j in range(40)}} for i in range(40)]} for n in range(4)
    ]
    url, body = f"{client.server.url}/v1/completions", client.body({"max_tokens": 5})

    def leave(schema: Any) -> None:
        with httpx.Client(timeout=0.5) as http, suppress(httpx.TimeoutException):
            refused = http.post(url, json={**body, "structured_outputs": {"json": schema}})
            assert refused.status_code == 400  # a quick machine

    with ThreadPoolExecutor(4) as pool:
        leaving = [pool.submit(leave, schema) for schema in slow]
        while not all(one.done() for one in leaving):  # others are served meanwhile
            began = time.monotonic()
            assert client.choice(max_tokens=2)["tokens"] == 2
            assert time.monotonic() - began < 2
            time.sleep(0.05)
        for one in leaving:
            one.result()
    end = time.monotonic() + 15  # 2 s of computing for each of four, on a machine that others use
    while True:
        before = computed(client.server.pid)
        time.sleep(0.5)
        if computed(client.server.pid) - before <= 10:
            break
        assert time.monotonic() < end, "the work goes on for nobody"
    assert re.search("takes more than|too large", client.refused(structured_outputs={"json": slow[0]}))


@pytest.mark.parametrize("pattern", ["(a|aa)*b{0,4000}", "((a{0,50}){0,50}){0,50}", "(.*a){20}"])
def test_costly_patterns_are_kept_or_refused(client: Client, pattern: str) -> None:  # A-059
    began = time.monotonic()
    answer = client.post(structured_outputs={"regex": pattern}, max_tokens=20)
    assert time.monotonic() - began < 10
    if answer.status_code == 200:
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "length" or re.fullmatch(r"a*b*|[^\n]*a", choice["text"])
    else:
        assert answer.status_code == 400


def test_deep_and_long_schemas_are_kept_or_refused(client: Client) -> None:  # A-059
    assert "'oneOf'" in client.refused(structured_outputs={"json": one_of(12)})
    properties = {f"name_{i}": {"type": "object", "properties": {"x": {"type": "integer"}}} for i in range(400)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False, "required": ["name_0"]}
    assert len(json.dumps(schema, indent=1).splitlines()) > 3000
    valid_or_cut(client.choice(structured_outputs={"json": schema}, temperature=1, seed=1), schema)


@pytest.mark.parametrize(
    "pattern",
    ["(?<=x)*", "+", "a**", "{3}", "a{5,2}", "a{,3}", "(?=a)b", r"\1", r"\b", "(?i)a", "[]", "[z-a]", r"\p{L}+", "a{99999999999}",
     "a++a", "a?+", "a{2}{3}", "(" * 60_000 + ")" * 60_000],
)  # fmt: skip
def test_odd_patterns_are_kept_or_refused(client: Client, pattern: str) -> None:  # A-060
    kept = {"(?i)a": "[aA]", r"\p{L}+": r"[^\W\d_]+"}
    for field in ({"regex": pattern}, {"json": {"type": "string", "pattern": f"^(?:{pattern})$"}}):
        if pattern not in kept:
            client.refused(structured_outputs=field)
            continue
        choice = client.choice(structured_outputs=field, temperature=1, seed=3, max_tokens=40)
        text = choice["text"] if "regex" in field else choice["text"].strip('"')
        assert choice["finish_reason"] == "length" or re.fullmatch(kept[pattern], text)
    assert client.choice(max_tokens=1)["tokens"] == 1


def test_letters_that_others_read_as_anchors() -> None:  # A-060
    for pattern in (r"\A", r"^\Aa$", r"a\z", r"\a?b"):
        with pytest.raises(ConstraintError, match="'pattern'"):
            matcher(TOKENIZER, "json_schema", {"type": "string", "pattern": pattern})
    for pattern in ("a??", "a{2}?", "[*+]+", r"\*+", r"\{2}*", "(a*)*"):  # these quantify one thing once
        matcher(TOKENIZER, "json_schema", {"type": "string", "pattern": pattern})


def test_odd_grammars_are_kept_or_refused(client: Client) -> None:  # A-060
    for grammar in ("root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, 'root ::= root "a"'):
        client.refused(structured_outputs={"grammar": grammar})
    assert client.choice(structured_outputs={"grammar": 'root ::= ""*'})["text"] == ""
    assert client.choice(structured_outputs={"grammar": 'root ::= ("a"?)* "b"'}, max_tokens=4)["text"][:1] in ("a", "b")


# --- ends


def test_no_end_comes_before_the_grammar_s(client: Client) -> None:  # A-061
    schema = {**BIO, "properties": {"bio": {"type": "string", "maxLength": 8}}}
    for bias in (100, 30):
        choice = client.choice(structured_outputs={"json": schema}, logit_bias={str(END): bias})
        assert valid_or_cut(choice, schema)
        for stop in (id_of("e"), id_of('"'), id_of("}"), 0, 1):
            fields = {"stop_token_ids": [stop], "logit_bias": {str(stop): bias}}
            assert valid_or_cut(client.choice(structured_outputs={"json": schema}, **fields), schema)
    for seed in range(10):
        fields = {"stop_token_ids": [id_of("e"), 0], "temperature": 1.5, "seed": seed}
        assert valid_or_cut(client.choice(structured_outputs={"json": schema}, **fields), schema)


def test_a_satisfied_grammar_ends_the_answer(client: Client) -> None:  # A-062
    for fields in ({}, {"logit_bias": {str(END): -100}}, {"temperature": 2, "seed": 5, "logprobs": 3}):
        choice = client.choice(structured_outputs={"choice": ["yes"]}, max_tokens=50, **fields)
        assert (choice["text"], choice["finish_reason"]) == ("yes", "stop")
        assert choice["tokens"] <= 4
    assert "ignore_eos" in client.refused(structured_outputs={"choice": ["yes"]}, ignore_eos=True)
    assert "min_tokens" in client.refused(structured_outputs={"choice": ["yes"]}, min_tokens=20)


def check_blanks(text: str) -> None:
    """Outside of strings, blanks come in short runs, and none at the edges."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*(?:"|$)', '""', text)
    assert all(re.fullmatch(WHITESPACE, run) for run in re.findall(r"\s+", bare)), text
    assert text == text.lstrip()


def test_blanks_are_bounded(client: Client) -> None:  # A-063
    bias = {str(id_of(text)): 20 for text in (" ", "\n", "\t", "  ")}
    schema = {
        "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"], "additionalProperties": False,
    }  # fmt: skip
    choice = client.choice(structured_outputs={"json": schema}, logit_bias=bias, max_tokens=200)
    assert valid_or_cut(choice, schema)
    check_blanks(choice["text"])
    assert choice["text"] == choice["text"].strip()
    for seed in range(5):
        any_object = client.choice(
            response_format={"type": "json_object"}, logit_bias=bias, max_tokens=200, temperature=1, seed=seed
        )
        check_blanks(any_object["text"])
        valid_or_cut(any_object, {"type": "object"})


def test_ids_without_text_are_masked(client: Client) -> None:  # A-064
    size = TEXT.size
    assert size < VOCAB
    for id in (0, 1, size, VOCAB - 1):  # markers, and ids that only pad the logits
        choice = client.choice(
            structured_outputs={"json": {"type": "string", "maxLength": 10}}, logit_bias={str(id): 100}
        )
        assert valid_or_cut(choice, {"type": "string", "maxLength": 10})


def test_markers_can_be_written_as_text(client: Client) -> None:  # A-064
    """Forced or chosen, in a schema or in a choice: ordinary tokens spell them."""
    text = "<s>a<pad></s><|im_start|>"
    answer = client.choice(structured_outputs={"json": {"const": text}})
    assert (json.loads(answer["text"]), answer["finish_reason"]) == (text, "stop")
    assert client.choice(structured_outputs={"choice": [text]})["text"] == text
    keys = {"type": "object", "properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False}
    assert json.loads(client.choice(structured_outputs={"json": keys})["text"]) == {text: 1}


def test_a_real_model(real: tuple[Client, tuple[int, ...]]) -> None:  # A-001, A-061, A-062, A-063, A-064
    client, ends = real
    for stream in (False, True):
        asked: dict[str, Any] = {"structured_outputs": {"regex": LITERAL}, "max_tokens": 100}
        if stream:
            assert client.stream(**asked) == (LITERAL, "stop")
        else:
            assert client.choice(**asked)["text"] == LITERAL
    short = {**BIO, "properties": {"bio": {"type": "string", "maxLength": 30}}}
    for id in {*ends, 0, 1, 2}:
        for fields in ({}, {"stop_token_ids": [id]}):
            choice = client.choice(structured_outputs={"json": short}, logit_bias={str(id): 100}, **fields)
            assert valid_or_cut(choice, short)
    marker = client.choice(structured_outputs={"json": {"const": "<|im_start|>system"}})
    assert json.loads(marker["text"]) == "<|im_start|>system"
    yes = client.choice(structured_outputs={"choice": ["yes"]}, max_tokens=50)
    assert (yes["text"], yes["finish_reason"]) == ("yes", "stop")
    story = client.choice(prompt="Once upon a time", response_format={"type": "json_object"}, max_tokens=120)
    check_blanks(story["text"])
    valid_or_cut(story, {"type": "object"})
