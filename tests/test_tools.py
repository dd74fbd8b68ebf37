"""Tools over every protocol, with the official clients against a served engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from engines import compiled
from served import Served, served

ASK = [{"role": "user", "content": "Is it warm in Rome?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
ANTHROPIC: Any = [{"name": "weather", "input_schema": SCHEMA}, {"name": "now", "input_schema": {"type": "object"}}]


TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls or () %}<tool_call>{{ call.function | tojson }}</tool_call>
{% endfor %}{% endfor %}{% for tool in tools or () %}{{ tool.function.name }} {% endfor %}
assistant: """
"""Short, for a model with a short context; of the form of Hermes."""


@pytest.fixture(scope="module")
def server(engine_for: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    checkpoint = replace(engine_for("llama")[0], chat_template=TEMPLATE)
    with served(compiled(checkpoint, tmp_path_factory.mktemp("tools")).path) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    """The model is random, so calls must be asked for, one at a time: it would never stop calling."""
    given = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 7, "max_tokens": 400, **fields}
    return client.chat.completions.create(model="small", messages=ASK, tools=TOOLS, **given)


def valid(name: str, arguments: Any) -> bool:
    if name == "now":
        return arguments == {}
    return name == "weather" and arguments["city"] in ("Oslo", "Rome") and arguments["days"] in (1, 2)


def test_a_required_call(client: openai.OpenAI) -> None:
    for seed in range(6):
        choice = ask(client, seed=seed).choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert call.id.startswith("call_")
        assert valid(call.function.name, json.loads(call.function.arguments))


def test_who_names_a_function_gets_one_call(client: openai.OpenAI) -> None:
    """Clients that make a model of the arguments take the first, and wait for the end."""
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for seed in range(6):
        choice = ask(client, tool_choice=named, parallel_tool_calls=openai.NOT_GIVEN, seed=seed).choices[0]
        assert len(choice.message.tool_calls) == 1
        assert choice.finish_reason == "tool_calls"


def test_a_named_call_and_allowed_ones(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice in (named, allowed):
        for seed in range(3):
            (call,) = ask(client, tool_choice=choice, seed=seed).choices[0].message.tool_calls
            assert call.function.name == "weather"
            assert valid("weather", json.loads(call.function.arguments))


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    for seed in range(4):
        whole = ask(client, seed=seed).choices[0].message.tool_calls[0].function
        chunks = [chunk.choices[0] for chunk in ask(client, seed=seed, stream=True)]
        pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
        assert [piece.function.name for piece in pieces] == [whole.name] + [None] * (len(pieces) - 1)
        assert "".join(piece.function.arguments for piece in pieces) == whole.arguments
        assert {piece.index for piece in pieces} == {0}
        assert chunks[-1].finish_reason == "tool_calls"
        assert not any(chunk.delta.content for chunk in chunks)


def test_choices_call_each_for_itself(client: openai.OpenAI) -> None:
    answer = ask(client, n=4, temperature=2.0)
    calls = [choice.message.tool_calls[0] for choice in answer.choices]
    assert len({call.id for call in calls}) == 4
    assert all(valid(call.function.name, json.loads(call.function.arguments)) for call in calls)


def test_several_calls(client: openai.OpenAI) -> None:
    """How many they are is the random model's choice; each that is complete is valid."""
    choice = ask(client, parallel_tool_calls=True, max_tokens=200).choices[0]
    calls = choice.message.tool_calls
    complete = calls if choice.finish_reason == "tool_calls" else calls[:-1]
    assert all(valid(call.function.name, json.loads(call.function.arguments)) for call in complete)
    assert len(calls) == len({call.id for call in calls})


def test_words_or_calls(client: openai.OpenAI) -> None:
    for choice in ("auto", "none"):
        message = ask(client, tool_choice=choice, max_tokens=8).choices[0].message
        assert message.content or message.tool_calls


def test_a_call_and_its_result_go_back(client: openai.OpenAI) -> None:
    message = ask(client).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"}
    answer = client.chat.completions.create(model="small", messages=[*ASK, message, result], max_tokens=4, tools=TOOLS)
    assert answer.usage
    assert answer.usage.prompt_tokens > len("21 degrees")


def test_the_helper_of_the_client_reads_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="small", messages=ASK, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False, max_tokens=400
    ) as stream:
        final = stream.get_final_completion()
    assert valid("weather", json.loads(final.choices[0].message.tool_calls[0].function.arguments))


def test_calls_asynchronously(server: Served) -> None:
    async def calls() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            one = {"model": "small", "messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 400}
            asked = [client.chat.completions.create(**one, seed=s, parallel_tool_calls=False) for s in range(8)]
            return await asyncio.gather(*asked)

    for answer in asyncio.run(calls()):
        (call,) = answer.choices[0].message.tool_calls
        assert valid(call.function.name, json.loads(call.function.arguments))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "stop": "x"}, None),
        ({"tools": TOOLS, "regex": "x"}, "tools"),
    ],
)
def test_bad_requests(server: Served, fields: dict[str, Any], param: str | None) -> None:
    response = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": ASK, "max_tokens": 1, **fields})
    assert response.status_code == 400
    assert param is None or response.json()["error"]["param"] == param


def test_a_strict_schema_that_cannot_be_enforced(server: Served) -> None:
    odd = {"type": "object", "properties": {"a": {"contains": {}}}}
    for strict, status in ((True, 400), (False, 200)):
        tool = {"type": "function", "function": {"name": "f", "parameters": odd, "strict": strict}}
        body = {"messages": ASK, "max_tokens": 1, "tools": [tool]}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == status, response.text
        assert ("contains" in response.text) == strict


def test_anthropic_s_client(server: Served) -> None:
    one = {"type": "any", "disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        fields: Any = {"model": "small", "max_tokens": 400, "messages": ASK, "tools": ANTHROPIC, "tool_choice": one}
        message = client.messages.create(**fields, extra_body={"temperature": 0.0})
        (use,) = message.content
        assert message.stop_reason == "tool_use"
        assert use.type == "tool_use"
        assert use.name == "now" or valid(use.name, use.input)
        with client.messages.stream(**fields, extra_body={"temperature": 0.0}) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_message()
        assert {"content_block_start", "content_block_delta", "content_block_stop", "message_stop"} <= kinds
        assert [(block.name, block.input) for block in streamed.content] == [(use.name, use.input)]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "21"}
        turns: Any = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        count = client.messages.count_tokens(model="small", messages=turns, tools=ANTHROPIC)
        assert count.input_tokens > client.messages.count_tokens(model="small", messages=turns).input_tokens
        named: Any = {**fields, "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}}
        (use,) = client.messages.create(**named).content
        assert valid("weather", use.input)


def test_ollama_s_client(server: Served) -> None:
    client = ollama.Client(host=server.url)
    options = {"num_predict": 40, "seed": 3}
    whole = client.chat("small", ASK, tools=TOOLS, options=options)
    parts = list(client.chat("small", ASK, tools=TOOLS, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.message.tool_calls for part in parts if part.message.tool_calls] == (
        [whole.message.tool_calls] if whole.message.tool_calls else []
    )
    call = {"function": {"name": "now", "arguments": {}}}
    turns = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_name": "now", "content": "noon"}]
    assert client.chat("small", turns, tools=TOOLS, options={"num_predict": 2}).done
    client._client.close()
