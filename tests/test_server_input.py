"""Bad input: each case gets 400 (or its own 4xx) and a JSON error that names the field, and none reaches the engine."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import pytest

from test_frontend_text import BYTES
from test_server_api import CHAT, CONTEXT, HI, VOCAB, ScriptedEngine, complete, drive, post, refused
from tricorn.server import bodies, exchange, schema

ENGINE = ScriptedEngine([5] * 9)


def raw(fields: str) -> bytes:
    """A completion's body written by hand, so that it may hold what no JSON writer writes."""
    return ('{"prompt": "x", ' + fields + "}").encode("utf-8", "surrogatepass")


NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", '"NaN"', "[1]", "true"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("temperature", ["-0.1", "2.1"]),
        ("top_p", ["0", "-1", "1.01"]),
        ("min_p", ["-0.1", "1.5"]),
        ("presence_penalty", ["-2.1", "3"]),
        ("frequency_penalty", ["-2.1", "3"]),
        ("repetition_penalty", ["0", "-1", "11"]),
        ("top_k", ["-2", "1.5", "2147483648"]),
        ("n", ["0", "-1", "129", "1000000000", '"2"', "1.0"]),
        ("max_tokens", ["-1", "1.0", '"5"', "1e18", "1000000000000000000"]),
        ("min_tokens", ["-1", "17"]),
        ("logprobs", ["1000000", "-1", "21"]),
        ("stream", ['"true"', "1"]),
        ("echo", ['"x"']),
        ("seed", ["18446744073709551616", "-9223372036854775809", "1" + "0" * 40, '"100"', "1.5"]),
    ],
)
def test_numbers_are_strict_and_bounded(name: str, more: list[str]) -> None:
    values = [value for value in NUMBERS if not (value == "true" and name in ("stream", "echo"))]
    for value in [*values, *more]:
        assert refused(raw(f'"{name}": {value}'))["param"] == name


def test_logit_bias() -> None:
    for key in (str(VOCAB), "-1", "99999999999", "1.5", "abc", "", " 1", "\u0661"):
        assert refused({"prompt": "x", "logit_bias": {key: 1}})["param"] == "logit_bias"
    for value in ("101", '"x"', "null", "NaN", "-100.5", "1e999"):
        assert refused(raw(f'"logit_bias": {{"1": {value}}}'))["param"] == "logit_bias"
    many = {str(index): 1 for index in range(20_000)}
    assert refused({"prompt": "x", "logit_bias": many})["param"] == "logit_bias"
    complete(ENGINE, logit_bias={str(VOCAB - 1): 5, "0": -100})
    assert ENGINE.requests[-1].params.logit_bias == {VOCAB - 1: 5.0, 0: -100.0}


def test_token_ids() -> None:
    for ids in ([999999], [-1], [VOCAB], [2**31], [1.0], ["a"], [None]):
        assert refused({"prompt": "ping", "min_tokens": 1, "stop_token_ids": ids})["param"] == "stop_token_ids"
    for prompt in ([1, 2, VOCAB], [-1], [], [[]], [1.5], [[1], ["a"]], [True], ["a", 1], [[1], []], [2**70], {}, 5):
        assert refused({"prompt": prompt})["param"] == "prompt"
    assert refused({"max_tokens": 1})["param"] == "prompt"
    assert "prompt[2]" in refused({"prompt": [1, 2, VOCAB]})["message"]


def test_empty_prompts() -> None:
    for prompt in ("", [""], ["ok", ""]):
        assert refused({"prompt": prompt})["param"] == "prompt"
    assert refused({"messages": []}, path=CHAT)["param"] == "messages"
    assert refused({}, path=CHAT)["param"] == "messages"
    assert post(ENGINE, CHAT, {"messages": [{"role": "user", "content": ""}]}).status_code == 200


def test_limits_of_tokens_agree_in_chat() -> None:
    error = refused({"messages": HI, "max_tokens": 3, "max_completion_tokens": 4}, path=CHAT)
    assert error["param"] == "max_tokens"
    post(ENGINE, CHAT, {"messages": HI, "max_completion_tokens": 4})
    assert ENGINE.requests[-1].params.max_tokens == 4
    complete(ENGINE, max_tokens=None)
    assert ENGINE.requests[-1].params.max_tokens == 16


def test_context() -> None:
    for length in (CONTEXT, CONTEXT + 1, 10 * CONTEXT):
        error = refused({"prompt": [5] * length, "max_tokens": 1})
        assert error["code"] == "context_length_exceeded"
        assert str(length) in error["message"]
    engine = ScriptedEngine([5] * 2 * CONTEXT)
    for wanted in (1, CONTEXT):
        choice = complete(engine, prompt=[5] * (CONTEXT - 1), max_tokens=wanted)["choices"][0]
        assert choice["finish_reason"] == "length"
        assert engine.requests[-1].params.max_tokens == 1


def test_seeds() -> None:
    for seed, expected in ((0, 0), (-1, 2**64 - 1), (2**63, 2**63), (2**64 - 1, 2**64 - 1), (-(2**63), 2**63)):
        complete(ENGINE, seed=seed)
        assert ENGINE.requests[-1].seed == expected


def test_zeros_are_values() -> None:
    complete(ENGINE, temperature=0, top_k=0, min_p=0, presence_penalty=0, min_tokens=0, logprobs=0)
    params = ENGINE.requests[-1].params
    assert (params.temperature, params.top_k, params.logprobs) == (0.0, 0, 0)
    complete(ENGINE, temperature=5e-324, top_k=-1, top_p=1e-9, min_p=1)
    params = ENGINE.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (5e-324, 0, 1e-9, 1.0)
    complete(ENGINE, top_k=9999999)
    complete(
        ENGINE, temperature=None, top_p=None, top_k=None, n=None, seed=None, stop=None, logit_bias=None, stream=None
    )
    params = ENGINE.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.n) == (1.0, 1.0, 0, 1)


def test_stops() -> None:
    for stop in ("", [""], [None], ["a", ""], ["a"] * 17, [str(index) for index in range(100_000)], "a" * 2**20, 5):
        started = time.perf_counter()
        assert refused({"prompt": "x", "stop": stop})["param"] == "stop"
        assert time.perf_counter() - started < 1.0
    assert refused(raw('"stop": "\\ud800"'))["param"] == "stop"
    for stop in ([], None, "\x00", ["a"] * 16):
        complete(ENGINE, stop=stop)


@pytest.mark.parametrize("name", sorted(schema.REFUSED))
def test_fields_not_honoured_are_refused_by_name(name: str) -> None:
    for value in ({"x": 1}, "anything", 3.5):
        for body, path in (({"prompt": "x"}, "/v1/completions"), ({"messages": HI}, CHAT)):
            assert refused({**body, name: value}, path=path)["param"] == name
    for value in (None, *schema.REFUSED[name]):
        assert post(ENGINE, CHAT, {"messages": HI, name: value}).status_code == 200


def test_the_scope_of_templates_is_closed() -> None:
    for name in ("messages", "bos_token", "chat_template", "tools"):
        error = refused({"messages": HI, "chat_template_kwargs": {name: "x"}}, path=CHAT)
        assert error["param"] == "chat_template_kwargs"
    for value in ({"a": [1]}, {"a": {}}, "x", {str(index): 1 for index in range(33)}):
        assert refused({"messages": HI, "chat_template_kwargs": value}, path=CHAT)["param"] == "chat_template_kwargs"
    template = "{{ messages[0].content }}{% if enable_thinking %} think{% endif %}"
    body = {"messages": HI, "chat_template_kwargs": {"enable_thinking": True}}
    assert post(ENGINE, CHAT, body, template=template).status_code == 200
    assert BYTES.decode(ENGINE.requests[-1].prompt) == "hi think"


def test_messages() -> None:
    for messages in ("hi", [1], [[]], [{}], [{"role": "user"}], [{"role": "alien", "content": "x"}], {"role": "user"}):
        assert str(refused({"messages": messages}, path=CHAT)["param"]).startswith("messages")
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    error = refused({"messages": [{"role": "user", "content": image}]}, path=CHAT)
    assert error["param"] == "messages[0].content[0]"
    template = "{{ raise_exception('roles must alternate') }}"
    assert "roles must alternate" in refused({"messages": HI}, path=CHAT, template=template)["message"]
    for value in (21, -1, True):
        assert refused({"messages": HI, "logprobs": True, "top_logprobs": value}, path=CHAT)["param"] == "top_logprobs"
    assert refused({"messages": HI, "top_logprobs": 2}, path=CHAT)["param"] == "top_logprobs"


def test_bodies_that_are_not_a_json_object() -> None:
    bodies = [
        b"null",
        b"[]",
        b"{",
        b"",
        b"5",
        b"\xff\xfe",
        '{"prompt":"漢"}'.encode("utf-16"),
        '{"prompt":"漢"}'.encode("gbk"),
    ]
    bodies += [
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "x"} x',
        b'{"prompt": "a\x01b"}',
        b'{"unknown": "\xff", "prompt": "x"}',
    ]
    for body in bodies:
        refused(body)
    assert refused(b'{"prompt": "\\ud83d"}')["param"] == "prompt"
    assert refused(b'{"prompt": "\\udc00x"}')["param"] == "prompt"
    assert refused(b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', path=CHAT)["param"] == "messages"
    complete(ENGINE, prompt="a\x00b", unknown={"a": [1]})
    assert post(ENGINE, "/v1/completions", b'{"prompt": "x", "n": 1, "n": 2}').status_code == 200


def test_content_types() -> None:
    async def work(http: Any) -> list[int]:
        kinds = ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8", None]
        headers = [{"content-type": kind} if kind else {} for kind in kinds]
        codes = [
            (await http.post("/v1/completions", content=b'{"prompt":"x"}', headers=h)).status_code for h in headers
        ]
        twice = [("content-type", "application/json"), ("content-type", "text/plain")]
        return [*codes, (await http.post("/v1/completions", content=b'{"prompt":"x"}', headers=twice)).status_code]

    assert drive(work, ENGINE) == [415, 415, 200, 200, 400]


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting(opening: str, closing: str) -> None:
    for depth in (100, 1_000, 10_000, 200_000):
        nest = opening * depth + "1" + closing * depth
        for field in (
            '"unknown": NEST',
            '"tools": NEST',
            '"response_format": NEST',
            '"metadata": NEST',
            '"tools": [{"p": NEST}]',
        ):
            body = raw(field.replace("NEST", nest))
            started = time.perf_counter()
            assert refused(body)["code"] == "too_deep"
            assert time.perf_counter() - started < 1.0
        body = ('{"messages": [{"role": "user", "content": ' + nest + "}]}").encode()
        assert refused(body, path=CHAT)["code"] == "too_deep"
        unclosed = raw('"unknown": ' + opening * depth)
        assert refused(unclosed)["code"] == "too_deep"
    complete(ENGINE, unknown=json.loads("[" * 60 + "]" * 60), text='[{"' * 1000)
    assert bodies.depth(b'{"a": "[[[\\"[[", "b": [1, [2]]}') == 3


def test_large_bodies_and_headers() -> None:
    async def work(http: Any) -> list[int]:
        big = b'{"prompt": "' + b"x" * exchange.MAX_BODY + b'"}'
        json_type = {"content-type": "application/json"}

        async def chunks() -> Any:
            for _ in range(20):
                yield b"x" * 2**20

        return [
            (await http.post("/v1/completions", content=big, headers=json_type)).status_code,
            (await http.post("/v1/completions", content=chunks(), headers=json_type)).status_code,
            (await http.post("/v1/completions", content=b"{}", headers={**json_type, "x": "y" * 65536})).status_code,
            (await http.get("/health", headers={"x": "y" * 65536})).status_code,
        ]

    assert drive(work, ScriptedEngine([5])) == [413, 413, 431, 431]


def test_bodies_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_SECONDS", 0.05)

    async def work(http: Any) -> int:
        async def chunks() -> Any:
            yield b"{"
            await asyncio.sleep(1)

        headers = {"content-type": "application/json"}
        return int((await http.post("/v1/completions", content=chunks(), headers=headers)).status_code)

    assert drive(work, ScriptedEngine([5])) == 408


def test_prompts_too_long_for_any_tokenizer() -> None:
    for letter in ("a", "_", " ", "\n", "漢"):
        started = time.perf_counter()
        assert refused({"prompt": letter * 640_000})["code"] == "context_length_exceeded"
        assert refused({"messages": [{"role": "user", "content": letter * 640_000}]}, path=CHAT)["param"] == "prompt"
        assert time.perf_counter() - started < 2.0


JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    2**70,
    -1e308,
    "",
    "x",
    "\x00",
    "<|im_end|>",
    [],
    [[]],
    {},
    {"": {}},
    ["a", 1],
]
JUNK += [
    [{"role": "user", "content": "x"}],
    [{"role": "assistant", "tool_calls": 5}],
    {"type": "function"},
    [None] * 70,
]


def test_random_bodies_never_break_the_server() -> None:
    draw = random.Random(11)
    names = [*schema.Sampling.__struct_fields__, *schema.Chat.__struct_fields__, *schema.Completion.__struct_fields__]
    inside = ["role", "content", "name", "tool_calls", "tool_call_id", "type", "text", "function", "arguments"]

    def junk(depth: int = 0) -> Any:
        if depth < 3 and draw.random() < 0.4:
            return {draw.choice(inside): junk(depth + 1) for _ in range(draw.randrange(4))}
        return [junk(depth + 1) for _ in range(draw.randrange(3))] if draw.random() < 0.2 else draw.choice(JUNK)

    async def work(http: Any) -> set[int]:
        codes = set()
        for _ in range(1500):
            body: dict[str, Any] = {"prompt": "x", "messages": HI, "max_tokens": 2}
            for name in draw.sample(names, draw.randint(1, 3)):
                body[name] = junk()
            if draw.random() < 0.5:
                body["messages"] = [{"role": "user", draw.choice(inside): junk(), "content": junk()}]
            answer = await http.post(draw.choice([CHAT, "/v1/completions"]), json=body)
            assert answer.status_code < 500, (body, answer.text)
            codes.add(answer.status_code)
        return codes

    assert drive(work, ScriptedEngine([5] * 9)) >= {200, 400}


def test_the_client_s_words_stay_short_in_errors() -> None:
    error = refused({"prompt": "x", "model": "a\nb" * 100}, 404)
    assert len(error["message"]) < 300
    assert refused({"prompt": "x", "model": "a" * 1000})["param"] == "model"
