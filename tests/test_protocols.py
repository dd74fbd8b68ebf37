"""What all protocols have in common: limits, keys, and a document that names what they read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic as clients
import httpx
import numpy as np
import ollama as ollama_client
import pytest
import tritonclient.grpc as triton

from served import Served, served
from tricorn.server import anthropic, inference, kserve, ollama
from tricorn.server.grpc_server import CLASSES

TEXT = (Path(__file__).parent.parent / "docs/protocols.md").read_text()


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def cells(title: str, columns: int = 1) -> set[str]:
    """The code in the first cells of each line of the tables of a section."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    parts = [part for line in lines for part in line.split("|")[1 : columns + 1]]
    return {span for part in parts for span in re.findall(r"`([^`]+)`", part)}


@pytest.mark.parametrize(
    ("title", "structs"),
    [
        ("Anthropic", (anthropic.Ask,)),
        ("Ollama", (ollama.Chat, ollama.Generate, ollama.Options)),
    ],
)
def test_every_field_is_named(title: str, structs: tuple[Any, ...]) -> None:
    assert cells(title) == {name for struct in structs for name in struct.__struct_fields__}


def test_every_tensor_is_named() -> None:
    ports = {*inference.TEXT_INPUTS, *inference.ID_INPUTS}
    assert {port.name for port in ports} <= cells("KServe and Triton", 2)
    fields = {*inference.Text.__struct_encode_fields__, *inference.Numbers.__struct_encode_fields__}
    assert fields == {port.name for port in ports}
    outputs = {*inference.TEXT_OUTPUTS, *inference.ID_OUTPUTS}
    assert all(f"`{port.name}`" in section("KServe and Triton") for port in outputs)


def test_every_method_is_named() -> None:
    methods = {
        name.removesuffix("Response") for name in CLASSES if f"{name.removesuffix('Response')}Request" in CLASSES
    }
    assert methods | {"ModelStreamInfer"} <= cells("KServe and Triton", 2)


@pytest.mark.parametrize("protocol", [anthropic.Anthropic, ollama.Ollama])
def test_every_route_is_named(protocol: Any) -> None:
    routes = protocol(_Work()).routes
    assert all(f"`{route.method} {route.path}`" in TEXT for route in routes)


def test_every_route_of_kserve_is_named() -> None:
    for route in kserve.Kserve(_Inference()).routes:  # type: ignore[arg-type]
        path = route.path.replace("{model:path}", "{m}")
        if "{version}" not in path and not path.endswith(("{m}", "{m}/ready", "{m}/config")):
            assert f"`{route.method} {path}`" in TEXT


class _Work:
    frontend = None


class _Inference:
    work = _Work()


# --- limits and keys, which are the same for all

KEY = "sk-of-a-test"
BEARER = {"authorization": f"Bearer {KEY}"}
HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def narrow(engine_for: Callable[..., Any]) -> Iterator[Served]:
    """A server that wants a key, holds one sequence, and lets nobody wait."""
    flags = ["--api-key", KEY, "--max-sequences", "1", "--max-waiting", "0", "--grpc-port", "0"]
    with served(engine_for("llama", max_position_embeddings=16384)[1].path, *flags) as running:
        yield running


@pytest.fixture
def full(narrow: Served) -> Iterator[Served]:
    """The same while a stream runs."""
    body = {"prompt": "x", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    url = f"{narrow.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=BEARER, timeout=60) as response:
        events = response.iter_bytes()
        assert next(events).startswith(b"data: ")
        yield narrow


def anthropic_says(server: Served, key: str) -> int:
    """The status that the client hears."""
    with clients.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
        try:
            client.messages.create(model="small", max_tokens=2, messages=HELLO)
        except clients.APIStatusError as error:
            body: Any = error.body
            return error.status_code if body["type"] == "error" else 0
    return 200


def ollama_says(server: Served, key: str) -> int:
    client = ollama_client.Client(host=server.url, headers={"authorization": f"Bearer {key}"})
    try:
        client.chat(model="small", messages=HELLO, options={"num_predict": 2})
    except ollama_client.ResponseError as error:
        return error.status_code
    finally:
        client._client.close()
    return 200


def generate_says(server: Served, key: str) -> int:
    url = f"{server.url}/v2/models/small/generate"
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(url, json={"text_input": "x", "max_tokens": 2}, headers=headers, timeout=60)
    assert answer.status_code == 200 or set(answer.json()) == {"error"}
    return answer.status_code


def grpc_says(server: Served, key: str) -> str:
    tensor = triton.InferInput("text_input", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([["x"]], object))
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        assert client.is_server_live()  # whoever asks
        try:
            client.infer("small", [tensor], headers={"authorization": f"Bearer {key}"})
        except triton.InferenceServerException as error:
            return str(error.status())
    return "OK"


def test_a_key_opens_all_protocols(narrow: Served) -> None:
    for says in (anthropic_says, ollama_says, generate_says):
        assert says(narrow, KEY) == 200
        assert says(narrow, "sk-wrong") == 401
    assert grpc_says(narrow, KEY) == "OK"
    assert grpc_says(narrow, "sk-wrong") == "StatusCode.UNAUTHENTICATED"
    with triton.InferenceServerClient(f"127.0.0.1:{narrow.grpc}") as client:
        with pytest.raises(triton.InferenceServerException):
            client.get_server_metadata()
        assert client.get_server_metadata(headers=BEARER).name == "tricorn"


def test_a_full_server_refuses_in_all_protocols(full: Served) -> None:
    for says in (anthropic_says, ollama_says, generate_says):
        assert says(full, KEY) == 429
    assert grpc_says(full, KEY) == "StatusCode.RESOURCE_EXHAUSTED"


def test_a_deadline_in_the_middle_of_a_stream(narrow: Served) -> None:
    """Of an answer that a schema keeps from ending."""
    soon = {"x-request-timeout": "0.5"}
    endless = {"type": "string", "minLength": 15_000}
    heard: list[str] = []
    with clients.Anthropic(base_url=narrow.url, api_key=KEY, max_retries=0) as client:
        config: Any = {"format": {"type": "json_schema", "schema": endless}}
        with (
            client.messages.create(
                model="small",
                max_tokens=16_000,
                messages=HELLO,
                stream=True,
                output_config=config,
                extra_headers=soon,
            ) as stream,
            pytest.raises(clients.APIStatusError, match="time is over"),
        ):
            heard.extend(event.type for event in stream)
    assert "content_block_delta" in heard
    other = ollama_client.Client(host=narrow.url, headers={**BEARER, **soon})
    parts = list(other.generate(model="small", prompt="x", raw=True, format=endless, stream=True))
    other._client.close()
    assert len(parts) > 1
    assert parts[-1].done_reason == "timeout"
