"""The Anthropic Messages API, with the official client against a served engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest

from served import Served, served

HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def server(engine_for: Callable[..., Any]) -> Iterator[Served]:
    with served(engine_for("llama")[1].path) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def asked(**fields: Any) -> Any:
    """Greedy, so that answers can be compared."""
    return {"model": "small", "max_tokens": 12, "messages": HELLO, "temperature": 0.0, **fields}


def call(**fields: Any) -> Any:
    """The same for the client, some of whose versions do not know every field of sampling."""
    body = asked(**fields)
    extra = {name: body.pop(name) for name in ("temperature", "top_k", "top_p") if name in body}
    return {**body, "extra_body": extra}


def text(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_whole_answer(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**call(system="Be brief.", top_k=5, top_p=0.9, metadata={"user_id": "u"}))
    assert message.type == "message"
    assert message.role == "assistant"
    assert message.model == "small"
    assert message.id.startswith("msg_")
    assert message.stop_reason == "max_tokens"
    assert message.stop_sequence is None
    assert message.usage.output_tokens == 12
    assert text(message)
    assert message._request_id


def test_a_stream_says_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**call())
    with client.messages.stream(**call()) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == text(final) == text(whole)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == 12
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == (
        whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    )


def test_events_come_in_their_order(client: anthropic.Anthropic) -> None:
    kinds = [event.type for event in client.messages.create(**call(stream=True))]
    middle = kinds[2:-3]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert middle == ["content_block_delta"] * len(middle)
    assert len(middle) > 1
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_the_bytes_of_a_stream(server: Served) -> None:
    response = httpx.post(f"{server.url}/v1/messages", json=asked(stream=True, max_tokens=2), timeout=60)
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.strip().split("\n\n")
    assert [block.split("\n")[0] for block in blocks][:2] == ["event: message_start", "event: ping"]
    assert blocks[-1] == 'event: message_stop\ndata: {"type":"message_stop"}'
    assert "[DONE]" not in response.text


def test_async(server: Served) -> None:
    async def both() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
            whole = await client.messages.create(**call())
            async with client.messages.stream(**call()) as stream:
                return text(whole), "".join([piece async for piece in stream.text_stream])

    whole, streamed = asyncio.run(both())
    assert whole == streamed != ""


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    full = text(client.messages.create(**call()))
    stop = full[len(full) // 2 :][:2]
    message = client.messages.create(**call(stop_sequences=["\x00never", stop]))
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == stop
    assert text(message) == full[: full.index(stop)]


def test_forms_of_one_conversation(client: anthropic.Anthropic) -> None:
    """Strings and blocks, one message and neighbours of one role, are the same prompt."""
    plain = call(system="A\nB", messages=[{"role": "user", "content": "one\ntwo"}])
    blocks = [{"type": "text", "text": "A"}, {"type": "text", "text": "B", "cache_control": {"type": "ephemeral"}}]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    others = [
        call(system=blocks, messages=[{"role": "user", "content": parts}]),
        call(system="A\nB", messages=[{"role": "user", "content": word} for word in ("one", "two")]),
    ]
    first = client.messages.create(**plain)
    for other in others:
        again = client.messages.create(**other)
        assert text(again) == text(first)
        assert again.usage.cache_read_input_tokens


def test_an_answer_begun(client: anthropic.Anthropic) -> None:
    full = text(client.messages.create(**call()))
    begun = client.messages.count_tokens(model="small", messages=[*HELLO, {"role": "assistant", "content": full}])
    bare = client.messages.count_tokens(model="small", messages=HELLO)
    message = client.messages.create(**call(messages=[*HELLO, {"role": "assistant", "content": full}]))
    assert begun.input_tokens > bare.input_tokens
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == begun.input_tokens


def test_counted_tokens_are_those_of_the_prompt(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="small", messages=HELLO, system="Be brief.")
    usage = client.messages.create(**call(system="Be brief.")).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_end_of_the_context(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**call(max_tokens=8000))
    assert message.stop_reason in ("model_context_window_exceeded", "end_turn")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"tools": [{"name": "a b"}]}, "tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"name": "a"}], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"guided_regex": "x"}, "guided_regex"),
        ({"seed": 1}, "seed"),
    ],
)
def test_bad_requests_name_the_field(server: Served, fields: dict[str, Any], named: str) -> None:
    body = {key: value for key, value in asked(**fields).items() if value is not None}
    response = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60)
    assert response.status_code == 400
    assert response.headers["request-id"]
    answer = response.json()
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert named in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def test_errors_are_those_of_the_client(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.create(**call(model="other"))
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**call(temperature=9))
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="other", messages=HELLO)
    late = {"x-request-timeout": "0.000000001"}
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**call(), extra_headers=late)
    assert caught.value.status_code == 408


def test_an_answer_of_a_schema(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    message = client.messages.create(**call(max_tokens=64, output_config=form))
    assert list(json.loads(text(message))) == ["ok"]
    assert message.stop_reason == "end_turn"


def test_both_protocols_say_the_same(server: Served, client: anthropic.Anthropic) -> None:
    body = {"model": "small", "messages": HELLO, "temperature": 0, "max_tokens": 12}
    other = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert text(client.messages.create(**call())) == other["choices"][0]["message"]["content"]
