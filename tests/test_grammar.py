"""Masks against matchers: every id of the vocabulary, for every kind of constraint; and what each kind accepts."""

# ruff: noqa: E501 (tables of cases)

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grammar_support import END, accepts, bits, byte_matchers, engine_matchers, matcher
from tricorn.frontend.tokenizer import Tokenizer
from tricorn.grammar import gbnf
from tricorn.grammar.constraint import ConstraintError, content_key
from tricorn.request import Constraint

TOKENIZER = byte_matchers()
TAGS = {
    "structures": [
        {"begin": "<f>", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}, "end": "</f>"},
        {"begin": "<g=", "schema": {"type": "boolean"}, "end": ">"},
    ],
    "triggers": ["<f", "<g"],
}  # fmt: skip
EXPRESSION = 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"  # nested\n'
KINDS: list[tuple[str, Any]] = [
    ("regex", "(a|b)*abb"),
    ("regex", "[a-c]{2,4}é?"),
    ("choice", ["yes", "yesterday", "no", ""]),
    ("gbnf", EXPRESSION),
    ("gbnf", 'root ::= "a" "bc" | "ab" "d"'),
    ("lark", 'start: "begin" NAME ("," NAME)* "end"\nNAME: /[a-z]{1,3}/'),
    (
        "json_schema",
        {"type": "object", "properties": {"name": {"type": "string", "maxLength": 3}}, "required": ["name"]},
    ),
    ("json_schema", {"enum": ["a/b", 'he "', 1.5, None, [True]]}),
    ("json_object", ""),
    ("structural_tag", TAGS),
]


def walks(root: Any, seed: int, steps: int) -> Any:
    """States along a random sentence."""
    picker = random.Random(seed)
    state = root.deep_copy()
    for _ in range(steps):
        allowed = [id for id in bits(state.compute_bitmask()) if id != END]
        yield state, allowed
        if not allowed:
            return
        assert state.consume_token(picker.choice(allowed))


@pytest.mark.parametrize(("kind", "source"), KINDS)
def test_a_bit_is_set_for_the_ids_that_the_matcher_takes(kind: str, source: Any) -> None:
    root = matcher(TOKENIZER, kind, source)
    for seed in range(3):
        for state, allowed in walks(root, seed, 6):
            taken = [
                id for id in range(TOKENIZER.vocab_size) if id != END and state.deep_copy().try_consume_tokens([id])
            ]
            forced = state.compute_ff_tokens()
            if forced:  # the only one is the tokenizer's own choice
                assert allowed == forced[:1]
                assert forced[0] in taken
                assert state.deep_copy().try_consume_tokens(forced) == len(forced)
            else:
                assert allowed == taken


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|b)*abb",
        "[a/]b",
        "[1[]?b",
        "[ac]{2}&?",
        "a{2,3}b?",
        "[^a]b",
        r"\d+",
        "a|",
        "(ab|a)(c|bcd)",
        "[^\\x00-\\x{10ffff}a]|b",
    ],
)
def test_a_regex_is_matched_as_a_whole(pattern: str) -> None:
    root = matcher(TOKENIZER, "regex", pattern)
    reference = re.compile(pattern.replace("\\x{10ffff}", "\\U0010ffff"))
    for length in range(6):
        for letters in itertools.product("ab1c" if length < 5 else "ab", repeat=length):
            text = "".join(letters)
            assert accepts(TOKENIZER, root, text) == (reference.fullmatch(text) is not None), text


@pytest.mark.parametrize(
    "pattern",
    ["(?<=x)*", "+", "{3}", "a{5,2}", "(?=a)b", r"\1", r"\b", "[]", "[z-a]", "a{99999999999}", "(" * 60_000 + ")" * 60_000, "[^\\s\\S]"],
)  # fmt: skip
def test_regexes_that_cannot_be_kept_are_refused(pattern: str) -> None:
    with pytest.raises(ConstraintError):
        matcher(TOKENIZER, "regex", pattern)


def test_choices_are_exact() -> None:
    choices = ["yes", "yesterday", 'a"b', "a\\b", "é😀", "new\nline", "[x]*", ""]
    root = matcher(TOKENIZER, "choice", choices)
    for choice in choices:
        assert accepts(TOKENIZER, root, choice)
    for other in ("ye", "yesyes", "no", "x", "[x]", "é"):
        assert not accepts(TOKENIZER, root, other)
    for bad in ([], "yes", [1], None):
        with pytest.raises(ConstraintError):
            matcher(TOKENIZER, "choice", bad)


def test_gbnf_says_what_it_says() -> None:
    root = matcher(TOKENIZER, "gbnf", EXPRESSION)
    assert all(accepts(TOKENIZER, root, text) for text in ("1", "12+3", "(1+2)+3", "((7))"))
    assert not any(accepts(TOKENIZER, root, text) for text in ("", "1+", "(1", "1)", "+1", "()"))
    longest = matcher(TOKENIZER, "gbnf", 'root ::= x\nx ::= "a" "bc" | "ab" "d" | "(" x ")"')
    assert all(accepts(TOKENIZER, longest, text) for text in ("abc", "abd", "(abc)"))
    greedy = matcher(TOKENIZER, "gbnf", 'root ::= [a-z]+ "a" | "(" root ")"')
    assert accepts(TOKENIZER, greedy, "bcaa")
    assert not accepts(TOKENIZER, greedy, "a")
    odd = matcher(TOKENIZER, "gbnf", 'root ::= "\\"\\x41\\u00e9" [^\\]a-] .\n')
    assert accepts(TOKENIZER, odd, '"Aéb/')
    assert not accepts(TOKENIZER, odd, '"Aéa/')


def _sentences(node: gbnf.Node, rules: gbnf.Rules, depth: int) -> set[str]:
    """All texts up to a depth of rules and three repetitions."""
    if depth == 0:
        return set()
    match node:
        case gbnf.Text(text):
            return {text}
        case gbnf.Class(pattern):
            return {letter for letter in "ab1" if re.fullmatch(pattern, letter)}
        case gbnf.Ref(name):
            return _sentences(rules[name], rules, depth - 1)
        case gbnf.Alt(options):
            return set().union(*(_sentences(option, rules, depth) for option in options))
        case gbnf.Seq(parts):
            found = {""}
            for part in parts:
                found = {a + b for a in found for b in _sentences(part, rules, depth)}
            return found
    each, found, result = _sentences(node.part, rules, depth), {""}, set()
    for count in range(min(3, node.most if node.most is not None else 3) + 1):
        if count >= node.least:
            result |= found
        found = {a + b for a in found for b in each}
    return result


@pytest.mark.parametrize("seed", range(25))
def test_random_gbnf_accepts_its_sentences_and_no_others(seed: int) -> None:
    pick = random.Random(seed)

    def node(depth: int) -> str:
        match pick.randrange(6 if depth else 3):
            case 0:
                return f'"{"".join(pick.choices("ab1", k=pick.randint(1, 2)))}"'
            case 1:
                return pick.choice(["[ab]", "[^a]", "[a-b]"])
            case 2:
                return pick.choice(["r1", "r2"])
            case 3:
                return f"({node(depth - 1)} | {node(depth - 1)})"
            case 4:
                return f"({node(depth - 1)}){pick.choice(['?', '{0,2}', '{1,2}'])}"
        return f"{node(depth - 1)} {node(depth - 1)}"

    source = f'root ::= {node(2)}\nr1 ::= "a" | {node(1)}\nr2 ::= "b" r1 | "1"\n'
    root = matcher(TOKENIZER, "gbnf", source)
    rules = gbnf.parse(source)
    sentences = _sentences(rules["root"], rules, 7)
    for length in range(5):
        for text in map("".join, itertools.product("ab1", repeat=length)):
            if text in sentences:
                assert accepts(TOKENIZER, root, text), (source, text)
    if gbnf.is_regular(rules, "root"):  # then the sentences are all there
        for text in map("".join, itertools.product("ab1", repeat=4)):
            assert accepts(TOKENIZER, root, text) == (text in sentences), (source, text)


@pytest.mark.parametrize(
    "source",
    [
        "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, 'root ::= root "a"', "root ::= *", 'x ::= "a"', "root ::= y",
        'root ::= "a', "root ::= [", "root ::= []", "root ::= [z-a]", 'root ::= "a"{3,1}', 'root ::= "\\q"', "root =",
        'root ::= "a"\nroot ::= "b"', "root ::= (", "",
    ],
)  # fmt: skip
def test_gbnf_that_cannot_be_kept_is_refused(source: str) -> None:
    with pytest.raises(ConstraintError):
        matcher(TOKENIZER, "gbnf", source)


@pytest.mark.parametrize(
    "source",
    [
        'start: "a" start', "start: x\nx: y\ny: x", 'start: "a" b', "start: /(?=a)b/", 'start: (("a"', "x: /a/",
        'start: %json {"not": {"pattern": "a"}}', 'start: %json {"uniqueItems": true}', "start: %json {", 'start: A\nA: "x" A?',
        'start: %json {"type": "integer", "minimum": 3, "maximum": 1}', "start: %lark { start: /a/ }",
    ],
)  # fmt: skip
def test_lark_that_cannot_be_kept_is_refused(source: str) -> None:
    with pytest.raises(ConstraintError):
        matcher(TOKENIZER, "lark", source)


def test_lark_with_a_schema_inside() -> None:
    root = matcher(
        TOKENIZER,
        "lark",
        'start: "begin " %json {"oneOf": [{"type": "integer"}, {"type": "null"}], "x-guidance": {"lenient": true}} "end"',
    )
    assert accepts(TOKENIZER, root, "begin 12end")
    assert accepts(TOKENIZER, root, "begin nullend")
    assert not accepts(TOKENIZER, root, "begin 1.5end")


def test_structural_tags() -> None:
    root = matcher(TOKENIZER, "structural_tag", TAGS)
    for text in ("", "free < text", 'a <f>{"n": 1}</f> b <g=true>', '<f>{"n":1}</f><f>{"n":2}</f>', "<g=false>"):
        assert accepts(TOKENIZER, root, text), text
    for text in ("a <f", "<f>", '<f>{"n": "x"}</f>', "<g=1>", "<fx", "x <g", '<f>{"n":1}'):
        assert not accepts(TOKENIZER, root, text), text
    once = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags", "triggers": ["<f"], "at_least_one": True, "stop_after_first": True,
            "tags": [{"begin": "<f>", "content": {"type": "regex", "pattern": ".*"}, "end": "</f>"}],
        },
    }  # fmt: skip
    root = matcher(TOKENIZER, "structural_tag", once)
    assert accepts(TOKENIZER, root, "so <f>abc</f>")
    assert not accepts(TOKENIZER, root, "so")
    assert not accepts(TOKENIZER, root, "so <f>abc</f> on")
    parts = [
        {"type": "const_string", "value": "<t>"},
        {"type": "any_text"},
        {"type": "const_string", "value": "</t>"},
        {
            "type": "or",
            "elements": [
                {"type": "json_schema", "json_schema": {"type": "boolean"}},
                {"type": "any_text", "excludes": ["a"]},
            ],
        },
    ]
    root = matcher(TOKENIZER, "structural_tag", {"format": {"type": "sequence", "elements": parts}})
    assert accepts(TOKENIZER, root, "<t>anything</t>true")
    assert accepts(TOKENIZER, root, "<t></t>b c")
    assert not accepts(TOKENIZER, root, "<t>x</t>bad a")
    assert not accepts(TOKENIZER, root, "<t>x")


@pytest.mark.parametrize(
    ("tag", "word"),
    [
        ({}, "format"), ({"format": {"type": "qwen"}}, "type"), ({"structures": [], "triggers": ["a"]}, "structures"),
        ({"structures": [{"begin": "a", "schema": {"not": {"pattern": "b"}}, "end": ""}], "triggers": ["a"]}, "pattern"),
        ({"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}, "begin"),
        ({"structures": [{"begin": "a", "schema": {}, "end": "", "x": 1}], "triggers": ["a"]}, "x"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "regex", "pattern": "a"}]}}, "any_text"),
    ],
)  # fmt: skip
def test_structural_tags_that_cannot_be_kept_are_refused(tag: Any, word: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(repr(word))):
        matcher(TOKENIZER, "structural_tag", tag)


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma3-270m"])
def test_tokens_are_the_bytes_that_we_decode(name: str, real_engine: Callable[[str], Path]) -> None:
    file, tokens = engine_matchers(real_engine(name))
    ours = Tokenizer(file.tokenizer)
    for id in range(0, ours.size, 1 if ours.size < 60_000 else 7):
        if id in ours.special:
            assert tokens.is_special_token(id)
        else:
            whole = ours.token_bytes(id)  # the byte 0xFF is in no text; the grammar engine has no such token
            assert tokens.decode_bytes([id]) == (whole if whole != b"\xff" else b""), id
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    root = matcher(tokens, "json_schema", schema)
    text = '{"city": "a <|im_start|> \\"b\\" é😀"}'
    ids = ours.encode(text, parse_special=False)
    for id in ids:  # the way that a model writes is open, markers' text included
        mask = bits(root.compute_bitmask())
        assert id in mask
        assert not set(ours.special) & set(mask)
        assert all(other < ours.size for other in mask)
        assert root.consume_token(id)
    assert root.is_accepting()


def test_equal_constraints_have_equal_keys() -> None:
    def key(kind: Any, source: str) -> str:
        return content_key(Constraint(kind, source))

    one = key("json_schema", '{"a": 1, "b": [2]}')
    assert one == key("json_schema", '{ "a":1,"b":[ 2 ] }')
    assert one != key("json_schema", '{"b": [2], "a": 1}')
    assert one != key("structural_tag", '{"a": 1, "b": [2]}')
    assert key("regex", "a b") != key("regex", "ab")
    assert key("json_schema", "{") != key("json_schema", "[")
