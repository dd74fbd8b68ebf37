"""The Open Inference Protocol over HTTP and gRPC, with the real Triton clients against a served engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as http

from served import Served, served

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def server(engine_for: Callable[..., Any]) -> Iterator[Served]:
    with served(engine_for("llama")[1].path) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[http.InferenceServerClient]:
    with http.InferenceServerClient(server.url.removeprefix("http://"), network_timeout=60) as client:
        yield client


def tensors(kind: Any, **values: tuple[str, Any]) -> list[Any]:
    """Inputs of the client module `kind`: name=(datatype, value), each of one row."""
    made = []
    for name, (datatype, value) in values.items():
        elements = value if isinstance(value, list) else [value]
        array = np.array([elements], object if datatype == "BYTES" else _types()[datatype])
        tensor = kind.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def _types() -> dict[str, Any]:
    return {"INT32": np.int32, "INT64": np.int64, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}


def text_inputs(kind: Any, **more: tuple[str, Any]) -> list[Any]:
    fields: Any = {"text_input": ("BYTES", PROMPT), "max_tokens": ("INT32", 12), "temperature": ("FP32", 0.0)}
    return tensors(kind, **{**fields, **more})


def said(result: Any, name: str = "text_output") -> str:
    text: str | bytes = result.as_numpy(name).reshape(-1)[0]
    return text if isinstance(text, str) else text.decode()


def plain(server: Served, **fields: Any) -> Any:
    """What /v1/completions says."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]


def ids_of(server: Served) -> tuple[list[int], list[int]]:
    """The ids of the prompt and of its greedy answer."""
    choice = plain(server, return_token_ids=True)
    return choice["prompt_token_ids"], choice["token_ids"]


# --- HTTP


def test_the_server_and_the_model_are_described(client: http.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("small")
    assert client.is_model_ready("small", "1")
    assert not client.is_model_ready("other")
    assert not client.is_model_ready("small", "2")
    assert client.get_server_metadata()["name"] == "tricorn"
    metadata = client.get_model_metadata("small")
    assert metadata["versions"] == ["1"]
    assert {"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]} in metadata["inputs"]
    assert metadata["outputs"][0]["name"] == "text_output"
    assert client.get_model_metadata("tensorrt_llm", "1")["outputs"][0]["name"] == "output_ids"
    assert client.get_model_config("ensemble")["model_transaction_policy"]["decoupled"]
    assert client.get_model_repository_index() == [{"name": "small", "version": "1", "state": "READY"}]


@pytest.mark.parametrize("binary", [True, False])
def test_infer_text(server: Served, client: http.InferenceServerClient, binary: bool) -> None:
    outputs = [http.InferRequestedOutput("text_output", binary_data=binary)]
    inputs = []
    for name, datatype, value in (("text_input", "BYTES", PROMPT), ("max_tokens", "INT32", 12)):
        array = np.array([[value]], object if datatype == "BYTES" else np.int32)
        inputs.append(http.InferInput(name, [1, 1], datatype))
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    inputs += tensors(http, temperature=("FP32", 0.0))
    result = client.infer("ensemble", inputs, outputs=outputs, request_id="r1")
    assert said(result) == plain(server)["text"]
    assert result.get_response()["id"] == "r1"
    assert ("parameters" in result.get_response()["outputs"][0]) is binary


def test_infer_ids(server: Served, client: http.InferenceServerClient) -> None:
    prompt, output = ids_of(server)
    fields: Any = {
        "input_ids": ("INT32", [*prompt, 7, 7]),
        "input_lengths": ("INT32", len(prompt)),
        "request_output_len": ("INT32", 12),
        "temperature": ("FP32", 0.0),
        "return_log_probs": ("BOOL", True),
    }
    result = client.infer("tensorrt_llm", tensors(http, **fields))
    assert result.as_numpy("output_ids").reshape(-1).tolist() == output
    assert result.as_numpy("sequence_length").tolist() == [[len(output)]]
    logprobs = result.as_numpy("output_log_probs")
    assert logprobs.shape == (1, 1, 12)
    assert np.isclose(result.as_numpy("cum_log_probs")[0, 0], logprobs.sum(), rtol=1e-5)
    whole = client.infer("small", tensors(http, **fields, exclude_input_in_output=("BOOL", False)))
    assert whole.as_numpy("output_ids").reshape(-1).tolist() == prompt + output
    assert whole.as_numpy("sequence_length").tolist() == [[len(prompt + output)]]


def test_sampling_is_that_of_other_protocols(server: Served, client: http.InferenceServerClient) -> None:
    sampled = text_inputs(
        http,
        temperature=("FP32", 1.5),
        top_k=("INT32", 50),
        top_p=("FP32", 0.5),
        random_seed=("UINT64", 2**63 + 5),
        repetition_penalty=("FP32", 2.0),
        presence_penalty=("FP32", 0.5),
        frequency_penalty=("FP32", 0.25),
        min_length=("INT32", 3),
        pad_id=("INT32", 2),
    )
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    same = plain(server, temperature=1.5, top_k=50, top_p=0.5, seed=2**63 + 5, min_tokens=3, **penalties)
    assert said(client.infer("small", sampled)) == same["text"]


def test_words_and_ids_that_stop(server: Served, client: http.InferenceServerClient) -> None:
    full = plain(server)["text"]
    word = full[len(full) // 2 :][:2]
    stopped = client.infer("small", text_inputs(http, stop_words=("BYTES", ["", "\x00never", word])))
    assert said(stopped) == full[: full.index(word)]
    assert said(client.infer("small", text_inputs(http, stop_words=("BYTES", "")))) == full
    prompt, output = ids_of(server)
    fields: Any = {"input_ids": ("INT32", prompt), "request_output_len": ("INT32", 12), "temperature": ("FP32", 0.0)}
    before = output[: output.index(output[5])]
    ended = client.infer("small", tensors(http, **fields, end_id=("INT32", output[5])))
    assert ended.as_numpy("output_ids").reshape(-1).tolist() == before
    inputs = tensors(http, **fields)
    words = http.InferInput("stop_words_list", [1, 2, 2], "INT32")
    words.set_data_from_numpy(np.array([[[output[5], 0], [1, -1]]], np.int32))
    assert client.infer("small", [*inputs, words]).as_numpy("output_ids").reshape(-1).tolist() == before


def test_generate(server: Served) -> None:
    url = f"{server.url}/v2/models/ensemble/generate"
    body = {"text_input": PROMPT, "max_tokens": 12, "temperature": 0, "bad_words": "", "stop_words": ""}
    answer = httpx.post(url, json=body, timeout=60).json()
    assert answer == {"model_name": "ensemble", "model_version": "1", "text_output": plain(server)["text"]}
    parameters = {"parameters": {"max_tokens": 12, "temperature": 0}, "text_input": PROMPT, "id": "7"}
    again = httpx.post(url.replace("ensemble", "small/versions/1"), json=parameters, timeout=60).json()
    assert (again["text_output"], again["id"]) == (answer["text_output"], "7")
    echoed = httpx.post(url, json={**body, "exclude_input_in_output": False}, timeout=60).json()
    assert echoed["text_output"] == PROMPT + answer["text_output"]


def test_generate_stream(server: Served) -> None:
    body = {"text_input": PROMPT, "max_tokens": 12, "temperature": 0, "stream": True}
    response = httpx.post(f"{server.url}/v2/models/small/generate_stream", json=body, timeout=60)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(block.removeprefix("data: ")) for block in response.text.strip().split("\n\n")]
    assert len(events) > 2
    assert "".join(event["text_output"] for event in events) == plain(server)["text"]
    single = httpx.post(f"{server.url}/v2/models/small/generate_stream", json={**body, "stream": False}, timeout=60)
    assert single.text.count("data: ") == 1


BAD_FIELDS = [
    ({"text_input": None}, "text_input"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"stream": True}, "stream"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"beam_width": 2}, "beam_width"),
    ({"num_return_sequences": 2}, "num_return_sequences"),
    ({"guided_decoding_guide": "{}"}, "guided_decoding_guide"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"parameters": {"sequence_id": 3}}, "sequence_id"),
]


@pytest.mark.parametrize(("fields", "named"), BAD_FIELDS)
def test_generate_names_the_field_at_fault(server: Served, fields: dict[str, Any], named: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": 12, **fields}
    response = httpx.post(f"{server.url}/v2/models/small/generate", json=body, timeout=60)
    assert response.status_code == 400, response.text
    assert set(response.json()) == {"error"}
    assert named in response.json()["error"]
    assert "\n" not in response.json()["error"]


BAD_TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": ("BYTES", "x")}, "temperature: expected FP32, got BYTES"),
    ({"max_tokens": ("INT32", [1, 2])}, "max_tokens: 2 elements"),
    ({"text_input": ("BYTES", b"\xff")}, "text_input: not UTF-8"),
    ({"temperature": ("FP32", float("nan"))}, "temperature"),
    ({"unheard_of": ("INT32", 1)}, "unheard_of"),
    ({"stream": ("BOOL", True)}, "stream"),
]


@pytest.mark.parametrize(("fields", "named"), BAD_TENSORS)
def test_infer_names_the_tensor_at_fault(
    client: http.InferenceServerClient, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(http.InferenceServerException, match=named) as caught:
        client.infer("small", text_inputs(http, **fields))
    assert caught.value.status() == "400"


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        ({"name": "x", "datatype": "WORDS", "shape": [1], "data": [1]}, "x: unknown datatype WORDS"),
        ({"name": "x", "datatype": "INT32", "shape": [2], "data": [1]}, "x: 1 elements"),
        ({"name": "x", "datatype": "INT32", "shape": [1], "data": [2**31]}, "x: an element is not"),
        ({"name": "x", "datatype": "BOOL", "shape": [1], "data": [1]}, "x: an element is not"),
        ({"name": "x", "datatype": "INT32", "shape": [-1], "data": [1]}, "x: a shape"),
        ({"name": "x", "datatype": "INT32", "shape": [1]}, "x: neither data"),
        (
            {"name": "x", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}},
            "x: binary_data_size",
        ),
        ({"datatype": "INT32", "shape": [1], "data": [1]}, "name"),
    ],
)
def test_tensors_that_are_none(server: Served, tensor: dict[str, Any], named: str) -> None:
    response = httpx.post(f"{server.url}/v2/models/small/infer", json={"inputs": [tensor]}, timeout=60)
    assert response.status_code == 400
    assert named in response.json()["error"]


def test_binary_bodies_that_lie(server: Served) -> None:
    url = f"{server.url}/v2/models/small/infer"
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}
    head = json.dumps({"inputs": [tensor]}).encode()

    def error(length: str, rest: bytes) -> str:
        names = {"inference-header-content-length": length, "content-type": "application/octet-stream"}
        response = httpx.post(url, content=head + rest, headers=names, timeout=60)
        assert response.status_code == 400
        message: str = response.json()["error"]
        return message

    assert "inference-header-content-length" in error("999999", b"")
    assert "inference-header-content-length" in error("x", b"")
    assert "text_input: the lengths" in error(str(len(head)), b"\x09\x00\x00\x00x")
    assert "binary_data_size" in error(str(len(head)), b"\x01")
    assert "2 bytes more" in error(str(len(head)), b"\x01\x00\x00\x00xyz")


def test_what_is_not_there(client: http.InferenceServerClient) -> None:
    with pytest.raises(http.InferenceServerException, match="not served here") as caught:
        client.infer("other", text_inputs(http))
    assert caught.value.status() == "404"
    with pytest.raises(http.InferenceServerException, match="no version"):
        client.infer("small", text_inputs(http), model_version="2")
    with pytest.raises(http.InferenceServerException, match="image: no such output"):
        client.infer("small", text_inputs(http), outputs=[http.InferRequestedOutput("image")])


def test_a_timeout_in_microseconds(client: http.InferenceServerClient) -> None:
    with pytest.raises(http.InferenceServerException) as caught:
        client.infer("small", text_inputs(http), timeout=1)
    assert caught.value.status() == "408"
