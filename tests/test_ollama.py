"""The Ollama API, with the official client against a served engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import ollama
import pytest

from served import Served, served

HELLO = [{"role": "user", "content": "Hello!"}]
GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def server(engine_for: Callable[..., Any]) -> Iterator[Served]:
    with served(engine_for("llama")[1].path) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[ollama.Client]:
    client = ollama.Client(host=server.url)
    yield client
    client._client.close()


def chat(client: ollama.Client, **fields: Any) -> Any:
    return client.chat(**{"model": "small", "messages": HELLO, "options": GREEDY, **fields})


def generate(client: ollama.Client, prompt: str = "Hello!", **fields: Any) -> Any:
    return client.generate(**{"model": "small", "prompt": prompt, "options": GREEDY, **fields})


def test_a_whole_chat(client: ollama.Client) -> None:
    answer = chat(client)
    assert answer.model == "small"
    assert answer.done
    assert answer.done_reason == "length"
    assert answer.message.role == "assistant"
    assert answer.message.content
    assert answer.eval_count == 12
    assert answer.prompt_eval_count > 0
    assert answer.total_duration >= answer.eval_duration > 0
    assert answer.total_duration >= answer.prompt_eval_duration


def test_a_streamed_chat_says_the_same(client: ollama.Client) -> None:
    whole = chat(client)
    parts = list(chat(client, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 2
    assert parts[-1].eval_count == 12
    assert parts[0].eval_count is None


def test_lines_come_without_asking(server: Served) -> None:
    body = {"model": "small", "messages": HELLO, "options": GREEDY}
    response = httpx.post(f"{server.url}/api/chat", json=body, timeout=60)
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert lines[-1]["done"]
    assert not any(line["done"] for line in lines[:-1])


def test_generate_with_and_without_the_template(client: ollama.Client) -> None:
    assert generate(client).response == chat(client).message.content
    raw = generate(client, "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n", raw=True)
    assert raw.response == chat(client).message.content
    assert generate(client, raw=True).prompt_eval_count < raw.prompt_eval_count


def test_generate_streams(client: ollama.Client) -> None:
    parts = list(generate(client, stream=True))
    assert "".join(part.response for part in parts) == generate(client).response
    assert parts[-1].done_reason == "length"


def test_system(client: ollama.Client) -> None:
    spoken = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert generate(client, system="Be brief.").prompt_eval_count == chat(client, messages=spoken).prompt_eval_count
    assert generate(client, system="Be brief.").response == chat(client, messages=spoken).message.content


def test_async(server: Served) -> None:
    async def both() -> tuple[str, str]:
        client = ollama.AsyncClient(host=server.url)
        fields: Any = {"model": "small", "messages": HELLO, "options": GREEDY}
        whole = await client.chat(**fields)
        parts = [part.message.content async for part in await client.chat(**fields, stream=True)]
        await client._client.aclose()
        return whole.message.content, "".join(parts)

    whole, streamed = asyncio.run(both())
    assert whole == streamed != ""


def test_options(client: ollama.Client) -> None:
    full = chat(client).message.content
    stop = full[len(full) // 2 :][:2]
    stopped = chat(client, options={**GREEDY, "stop": [stop]})
    assert stopped.message.content == full[: full.index(stop)]
    assert stopped.done_reason == "stop"
    sampled = {"num_predict": 12, "temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7}
    once, again = (chat(client, options=sampled).message.content for _ in range(2))
    assert once == again
    assert once != chat(client, options={**sampled, "seed": 8}).message.content
    plain = chat(client, options={**GREEDY, "num_predict": 40}).message.content
    penalties = {"repeat_penalty": 5.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    penal = {**GREEDY, "num_predict": 40, **penalties, "repeat_last_n": -1}
    assert chat(client, options=penal).message.content != plain
    assert chat(client, options={**penal, "presence_penalty": 0, "frequency_penalty": 0, "repeat_last_n": 0}) != plain
    assert chat(client, options={**GREEDY, "num_ctx": 64, "num_thread": 2, "num_gpu": 1}).message.content == full


def test_logprobs(client: ollama.Client) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3)
    assert len(answer.logprobs) == 12
    for entry in answer.logprobs:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.logprob in [top.logprob for top in entry.top_logprobs]
    parts = list(chat(client, logprobs=True, stream=True))
    assert sum(len(part.logprobs or ()) for part in parts) == 12


def test_format(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    options = {"temperature": 0, "num_predict": 64}
    answer = chat(client, format={**schema, "additionalProperties": False}, options=options)
    assert list(json.loads(answer.message.content)) == ["ok"]
    assert answer.done_reason == "stop"
    assert generate(client, format="json", options=options).response.lstrip()[0] == "{"


def test_no_prompt_asks_to_load(client: ollama.Client) -> None:
    assert generate(client, "", keep_alive=0).done_reason == "load"
    assert chat(client, messages=[]).done_reason == "load"


def test_the_model_is_shown(client: ollama.Client, server: Served) -> None:
    assert [model.model for model in client.list().models] == ["small"]
    assert [model.model for model in client.ps().models] == ["small"]
    assert client.ps().models[0].context_length > 0
    shown = client.show("small:latest")
    assert shown.capabilities == ["completion", "tools", "embedding"]
    assert shown.modelinfo["general.context_length"] == client.ps().models[0].context_length
    assert shown.template
    assert httpx.get(f"{server.url}/api/version").json()["version"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": None}, "model"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]}, "messages[0].images"),
        ({"format": "xml"}, "format"),
        ({"options": {"guided_regex": "x"}}, "options.guided_regex"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"think": "much"}, "think"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"num_predict": "x"}}, "options.num_predict"),
        ({"options": {"max_tokens": 5}}, "options.max_tokens"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"stop": [""]}}, "options.stop[0]"),
    ],
)
def test_bad_requests_name_the_field(server: Served, fields: dict[str, Any], named: str) -> None:
    body = {"model": "small", "messages": HELLO, **fields}
    response = httpx.post(f"{server.url}/api/chat", json={k: v for k, v in body.items() if v is not None}, timeout=60)
    assert response.status_code == 400
    assert set(response.json()) == {"error"}
    assert named in response.json()["error"]
    assert "\n" not in response.json()["error"]


def test_errors_are_those_of_the_client(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="not served here") as caught:
        chat(client, model="other")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="not served here"):
        client.show("other")
    with pytest.raises(ollama.ResponseError, match="characters"):
        generate(client, "long " * 100_000)
