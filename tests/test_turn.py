"""Calls of tools and thoughts: what each model's form demands of an answer, and how an answer is read."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from grammar_support import byte_matchers, byte_tokenizer
from tricorn.frontend.errors import BadRequest
from tricorn.frontend.generate import Delta
from tricorn.frontend.parsers import plain
from tricorn.frontend.template import normalize
from tricorn.frontend.tokenizer import Tokenizer
from tricorn.frontend.tools import Tool, Tools, check
from tricorn.frontend.turn import Manner, Turn
from tricorn.grammar.translate import to_grammar
from tricorn.request import Constraint

TOKENIZER = Tokenizer(byte_tokenizer())
MATCHERS = byte_matchers()
MARKS = {"[TOOL_CALLS]": 0, "[ARGS]": 1}
"""Markers of the tests' tokenizer that stand for Mistral's."""

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (Tool("weather", "of a city", CITY), Tool("now"))
WEATHER = '{"city": "a}\\"{b"}'

HERMES, LLAMA, MISTRAL, NAMED = "<tool_call>", "tools ipython", "[TOOL_CALLS]", "[TOOL_CALLS] [ARGS]"
THINKING = HERMES + "<think></think>"


def call(name: str, arguments: str, label: str = "arguments") -> str:
    return f'{{"name": "{name}", "{label}": {arguments}}}'


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in calls)


WRITTEN = [
    (HERMES, "Let me see.\n" + tagged(call("weather", WEATHER), call("now", "{}"))),
    (LLAMA, "; ".join([call("weather", WEATHER, "parameters"), call("now", "{}", "parameters")])),
    (MISTRAL, f"[TOOL_CALLS][{call('weather', WEATHER)}, {call('now', '{}')}]"),
    (NAMED, f"[TOOL_CALLS]weather[ARGS]{WEATHER}[TOOL_CALLS]now[ARGS]{{}}"),
    ("", "\n".join([call("weather", WEATHER), call("now", "{}")])),
]
"""Two calls, as each form has them."""


def turn(template: str, tools: Tools | None, constraint: Constraint | None = None, prompt: str = "x") -> Turn:
    manner = Manner(template, TOKENIZER)
    manner._ids.update(MARKS)
    return manner.turn(TOKENIZER.encode(prompt), tools, constraint, "")


def ids(text: str) -> list[int]:
    """Markers as their ids, the rest as text."""
    parts = re.split(r"(\[TOOL_CALLS\]|\[ARGS\])", text)
    return [id for part in parts for id in ([MARKS[part]] if part in MARKS else TOKENIZER.encode(part))]


def may_be(asked: Turn, text: str) -> bool:
    """Whether the turn's constraint allows just this answer."""
    assert asked.constraint is not None
    matcher = LLMatcher(MATCHERS, to_grammar(asked.constraint))
    assert not matcher.get_error(), matcher.get_error()
    return matcher.consume_tokens(ids(text)) and matcher.is_accepting()


def read(asked: Turn, pieces: list[str], reason: Any = "stop") -> tuple[str, str, list[tuple[str, str]], Any]:
    """Thought, words, calls (name, arguments) and the finish reason of an answer that comes in these pieces."""
    reader = asked.reader()
    thought, words, calls, last = "", "", dict[int, list[str]](), None
    for index, text in enumerate(pieces):
        piece = reader.push(delta(text, reason if index == len(pieces) - 1 else None))
        thought, words, last = thought + piece.thought, words + piece.words, piece.finish_reason
        for part in piece.calls:
            assert (part.index in calls) == (part.name is None) == (part.id is None)
            calls.setdefault(part.index, [part.name or "", ""])[1] += part.arguments
    return thought, words, [(name, arguments) for name, arguments in calls.values()], last


def delta(text: str, reason: Any) -> Delta:
    return Delta(
        index=0, text=text, token_ids=[], offsets=[], logprobs=None, finish_reason=reason, stop_reason=None,
        completion_tokens=0, cached_tokens=0, prompt_logprobs=None,
    )  # fmt: skip


@pytest.mark.parametrize(("template", "text"), WRITTEN, ids=["hermes", "llama3", "mistral", "mistral-named", "plain"])
def test_calls_are_allowed_and_read(template: str, text: str) -> None:
    asked = turn(template, Tools(TOOLS))
    assert may_be(asked, text)
    _, words, calls, reason = read(asked, [text])
    assert calls == [("weather", WEATHER), ("now", "{}")]
    assert reason == "tool_calls"
    assert words == ("Let me see." if template == HERMES else "")
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize(("template", "text"), WRITTEN)
def test_words_are_allowed_unless_a_call_is_required(template: str, text: str) -> None:
    for words in ("", "a < b, {c}", "no"):
        asked = turn(template, Tools(TOOLS))
        assert may_be(asked, words)
        assert read(asked, [words]) == ("", words, [], "stop")
        assert not may_be(turn(template, Tools(TOOLS, "required")), words)
    assert template == HERMES or may_be(turn(template, Tools(TOOLS, "required")), text)


@pytest.mark.parametrize(("template", "text"), WRITTEN)
def test_nothing_but_the_tools_is_called(template: str, text: str) -> None:
    for choice in ("auto", "required"):
        assert not may_be(turn(template, Tools(TOOLS, choice)), text.replace("now", "never"))
        assert not may_be(turn(template, Tools(TOOLS, choice)), text.replace("city", "town"))
        assert not may_be(turn(template, Tools(TOOLS, choice, frozenset(["now"]))), text)
        assert not may_be(turn(template, Tools(TOOLS, choice, parallel=False)), text)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(WRITTEN), st.lists(st.integers(0, 200), max_size=12))
def test_reading_does_not_depend_on_the_pieces(written: tuple[str, str], cuts: list[int]) -> None:
    template, text = written
    for whole in (text, "<think> a <tool_call> b\n</think>\n\n" + text, "<think>", "words <tool_c", text[:-4]):
        asked = turn(template + "</think>", Tools(TOOLS))
        edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
        pieces = [whole[begin:end] for begin, end in itertools.pairwise(edges)]
        assert read(asked, pieces) == read(asked, [whole])


def test_what_only_looks_like_a_call_is_words() -> None:
    asked = turn(HERMES, Tools(TOOLS))
    for text in ("<tool_call>\nnothing\n</tool_call>", "<tool_cal", "<tool_call>\n{"):
        assert read(asked, [*text]) == ("", text, [], "stop")


def test_a_call_cut_off_says_so() -> None:
    asked = turn(HERMES, Tools(TOOLS))
    text = tagged(call("weather", WEATHER))[:50]
    assert read(asked, [text], "length") == ("", "", [("weather", text.partition('s": ')[2])], "length")


def test_thoughts() -> None:
    asked = turn(THINKING, Tools(TOOLS))
    thought = "<think>\nIs it <tool_call>?\n</think>\n\n"
    assert may_be(asked, thought + "No.")
    assert read(asked, [thought + "No."]) == (
        "Is it <tool_call>?",
        "No.",
        [],
        "stop",
    )
    assert may_be(asked, thought + tagged(call("now", "{}")))
    assert may_be(asked, "No.")
    opened = turn(THINKING, Tools(TOOLS), prompt="so <think>\n")
    assert may_be(opened, "hm</think>" + tagged(call("now", "{}")))
    assert not may_be(opened, tagged(call("now", "{}")))
    assert read(opened, ["hm ", "</th", "ink> No."]) == ("hm", "No.", [], "stop")
    assert read(opened, ["hm"], "length") == ("hm", "", [], "length")
    closed = turn(THINKING, None, prompt="<think>\n\n</think>\n\n")
    assert closed.constraint is None
    assert read(closed, ["<think>"]) == ("", "<think>", [], "stop")


@pytest.mark.parametrize(
    ("kind", "source", "answer"),
    [("json_object", "", "{}"), ("regex", "[0-9]+", "12"), ("choice", '["yes"]', "yes"), ("lark", 'start: "a"', "a"),
     ("gbnf", 'root ::= "b"', "b"), ("json_schema", '{"type": "null"}', "null")],
)  # fmt: skip
def test_constraints_of_every_kind_begin_behind_the_thought(kind: Any, source: str, answer: str) -> None:
    asked = turn("</think>", None, Constraint(kind, source))
    assert may_be(asked, answer)
    assert may_be(asked, f"<think>or {answer}</think>\n\n{answer}")
    assert not may_be(asked, "<think>or</think>no!")
    assert not may_be(asked, "<think>or")
    opened = turn("</think>", None, Constraint(kind, source), "<think>\n")
    assert may_be(opened, f"hm</think>{answer}")
    assert not may_be(opened, answer)


def test_tools_or_a_format() -> None:
    schema = Constraint.schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    asked = turn(HERMES, Tools(TOOLS), schema)
    assert may_be(asked, '{"a": 1}')
    assert may_be(asked, tagged(call("now", "{}")))
    assert not may_be(asked, "words")
    with pytest.raises(BadRequest, match="choose one"):
        turn(HERMES, Tools(TOOLS, "required"), schema)
    with pytest.raises(BadRequest, match="JSON formats only"):
        turn(HERMES, Tools(TOOLS), Constraint("regex", "a"))


def test_schemas_that_cannot_be_enforced() -> None:
    odd = {"type": "object", "properties": {"a": {"contains": {}}}}
    assert may_be(turn(HERMES, Tools((Tool("f", "", odd),))), tagged(call("f", '{"b": 1}')))
    with pytest.raises(Exception, match="contains"):
        may_be(turn(HERMES, Tools((Tool("f", "", odd, strict=True),))), "")


@pytest.mark.parametrize(
    ("tools", "match"),
    [
        (Tools((Tool("a b"),)), "not a name"),
        (Tools((Tool("a"), Tool("a"))), "twice"),
        (Tools((Tool("a", "", {"type": "array"}),)), "type object"),
        (Tools(tuple(Tool(f"t{i}") for i in range(129))), "more than 128"),
        (Tools((Tool("a"),), callable=frozenset("b")), "no tool 'b'"),
    ],
)
def test_bad_tools(tools: Tools, match: str) -> None:
    with pytest.raises(BadRequest, match=match):
        check(tools)


def test_a_model_without_tools_hears_of_them_in_words() -> None:
    messages = normalize(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Time?"},
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "now", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "noon"},
            {"role": "user", "content": "So?"},
        ]
    )
    turns = plain.explained(messages, Tools(TOOLS))
    assert [message["role"] for message in turns] == ["system", "user", "assistant", "user"]
    assert turns[0]["content"].startswith("Be brief.")
    assert '"weather"' in turns[0]["content"]
    assert "now" in turns[2]["content"]
    assert "noon" in turns[3]["content"]
    assert turns[3]["content"].endswith("So?")
    assert plain.explained(messages[:2], None) == messages[:2]
