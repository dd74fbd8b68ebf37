"""litellm: chat, streams, tools, embeddings and text completions."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from served import Served

HELLO = [{"role": "user", "content": "Name a colour."}]


def common(server: Served) -> dict[str, Any]:
    return {"model": "openai/small", "api_base": f"{server.url}/v1", "api_key": "none"}


def test_chat(server: Served) -> None:
    whole = litellm.completion(messages=HELLO, max_tokens=16, temperature=0, **common(server))
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 16
    parts = litellm.completion(messages=HELLO, max_tokens=16, temperature=0, stream=True, **common(server))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content


def test_a_forced_tool(server: Served) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    tool = {"type": "function", "function": {"name": "paint", "parameters": schema}}
    answer = litellm.completion(messages=HELLO, tools=[tool], tool_choice="required", max_tokens=200, **common(server))
    assert answer.choices[0].message.tool_calls
    for call in answer.choices[0].message.tool_calls:
        assert call.function.name == "paint"
        assert json.loads(call.function.arguments)["colour"] in ("red", "blue")


def test_text(server: Served) -> None:
    asked = {**common(server), "model": "text-completion-openai/small"}
    answer = litellm.text_completion(prompt="The sky is", max_tokens=8, temperature=0, logprobs=1, **asked)
    assert answer.choices[0].text
    assert len(answer.choices[0].logprobs.token_logprobs) == 8


def test_embeddings(server: Served) -> None:
    answer = litellm.embedding(input=["The sky is blue.", "Snow is white."], encoding_format="float", **common(server))
    assert [len(item["embedding"]) for item in answer.data] == [576, 576]


def test_a_refusal(server: Served) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=HELLO, temperature=9, **common(server))
