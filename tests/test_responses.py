"""The Responses API, with the official client against a served engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from engines import compiled
from served import Served, served
from test_tools import SCHEMA, TEMPLATE, valid
from tricorn.request import TricornError
from tricorn.server.errors import HttpError
from tricorn.server.responses import MOST_KEPT, Store, _messages

ASK: Any = {"model": "small", "temperature": 0, "max_output_tokens": 12}
TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def server(engine_for: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    checkpoint = replace(engine_for("llama")[0], chat_template=TEMPLATE)
    with served(compiled(checkpoint, tmp_path_factory.mktemp("responses")).path) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.responses.create(input="Hello!", instructions="Be brief.", metadata={"a": "b"}, **ASK)
    assert answer.status == "incomplete"
    assert answer.incomplete_details
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text
    assert answer.usage
    assert answer.usage.output_tokens == 12
    chat = client.chat.completions.create(
        model="small", temperature=0, max_tokens=12,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}],
    )  # fmt: skip
    assert answer.output_text == chat.choices[0].message.content


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = client.responses.create(input="Hello!", **ASK)
    events = list(client.responses.create(input="Hello!", stream=True, **ASK))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage or events[-1].response.usage.output_tokens == 12


def test_the_client_s_own_stream(client: openai.OpenAI) -> None:
    fields: Any = {**ASK, "max_output_tokens": 400}
    with client.responses.stream(input="Is it warm?", tools=[TOOL], tool_choice="required",
                                 parallel_tool_calls=False, **fields) as stream:  # fmt: skip
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    (call,) = final.output
    assert "response.function_call_arguments.delta" in kinds
    assert call.type == "function_call"
    assert valid(call.name, json.loads(call.arguments))


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(input="Hello!", **ASK)
    second = client.responses.create(input="And now?", previous_response_id=first.id, **ASK)
    told: Any = [
        {"role": "user", "content": "Hello!"},
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": "And now?"},
    ]
    same = client.responses.create(input=told, store=False, **ASK)
    assert second.output_text == same.output_text
    assert second.usage
    assert same.usage
    assert second.usage.input_tokens == same.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    for gone in (same.id, "resp_unknown"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="forgotten"):
        client.responses.create(input="And now?", previous_response_id=first.id, **ASK)


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "name": "weather"}
    fields: Any = {**ASK, "max_output_tokens": 300, "tools": [TOOL], "parallel_tool_calls": False}
    first = client.responses.create(input="Is it warm?", tool_choice=named, **fields)
    (call,) = first.output
    assert call.type == "function_call"
    assert valid(call.name, json.loads(call.arguments))
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    second = client.responses.create(
        input=[result], previous_response_id=first.id, **{**fields, "max_output_tokens": 4}
    )
    assert second.usage
    assert first.usage
    assert second.usage.input_tokens > first.usage.input_tokens


def test_a_format(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}}
    answer = client.responses.create(input="Is it warm?", text=form, **{**ASK, "max_output_tokens": 300})
    assert valid("weather", json.loads(answer.output_text))


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    messages = _messages([{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, thought, call, call])
    assert messages[0] == {"role": "user", "content": "a"}
    assert messages[1]["reasoning_content"] == "hm"
    assert len(messages[1]["tool_calls"]) == 2
    assert len(messages) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"seed": 1}, "seed"),
        ({"guided_regex": "x"}, "guided_regex"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_bad_requests(server: Served, fields: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{server.url}/v1/responses", json={"input": "x", **fields}, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_what_is_kept_is_bounded_and_one_s_own() -> None:
    store = Store()
    for number in range(MOST_KEPT + 1):
        store.put("a", {"id": str(number)}, [])
    with pytest.raises(HttpError):
        store.get("a", "0")
    with pytest.raises(HttpError):
        store.get("b", "1")
    assert store.get("a", "1").response == {"id": "1"}
    store.put("a", {"id": "big"}, [{"content": "x" * (33 << 20)}])
    with pytest.raises((HttpError, TricornError)):
        store.get("a", "big")
