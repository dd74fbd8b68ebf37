"""The Open Inference Protocol over HTTP and gRPC, with the real Triton clients against a served engine."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http

from served import Served, served
from tricorn.server.grpc_messages import CLASSES, MESSAGES

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def server(engine_for: Callable[..., Any]) -> Iterator[Served]:
    with served(engine_for("llama")[1].path, "--grpc-port", "0") as running:
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


def test_without_a_word_on_sampling_the_answer_is_greedy(server: Served, client: http.InferenceServerClient) -> None:
    inputs = tensors(http, text_input=("BYTES", PROMPT), max_tokens=("INT32", 12))
    assert said(client.infer("ensemble", inputs)) == plain(server)["text"]
    sampled = {said(client.infer("ensemble", [*inputs, *tensors(http, top_p=("FP32", 0.99))])) for _ in range(4)}
    assert len(sampled) > 1


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


def test_guided_decoding(client: http.InferenceServerClient) -> None:
    guides = {"regex": "(yes|no)", "ebnf_grammar": 'root ::= "yes" | "no"'}
    for kind, guide in guides.items():
        fields = {"guided_decoding_guide_type": ("BYTES", kind), "guided_decoding_guide": ("BYTES", guide)}
        assert said(client.infer("small", text_inputs(http, **fields))) in ("yes", "no")


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
    ({"guided_decoding_guide_type": "xml", "guided_decoding_guide": "x"}, "guided_decoding_guide_type"),
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


# --- gRPC


@pytest.fixture
def stub(server: Served) -> Iterator[grpc.InferenceServerClient]:
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        yield client


def streamed(stub: grpc.InferenceServerClient, *requests: dict[str, Any]) -> list[Any]:
    """All responses, or errors, of these requests in one stream."""
    heard: queue.Queue[Any] = queue.Queue()
    stub.start_stream(callback=lambda result, error: heard.put(error or result), stream_timeout=60)
    for request in requests:
        stub.async_stream_infer("small", **request)
    stub.stop_stream()
    return [heard.get_nowait() for _ in range(heard.qsize())]


def final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def test_numbers_of_fields_are_the_published_ones() -> None:
    """The wire form is held against that of the client's own generated code."""
    from tritonclient.grpc import model_config_pb2, service_pb2

    published: dict[str, Any] = {}
    for file in (service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR):
        for message in file.message_types_by_name.values():
            published |= {message.name: message, **message.nested_types_by_name}
    for name, fields in MESSAGES.items():
        known = published[name].fields_by_name
        ours = CLASSES[name].DESCRIPTOR.fields_by_name
        for field in fields:
            assert (ours[field].number, ours[field].is_repeated) == (known[field].number, known[field].is_repeated)
            enumerated = known[field].enum_type is not None  # travels as a number
            assert enumerated or ours[field].type == known[field].type


def test_grpc_describes_the_server_and_the_model(stub: grpc.InferenceServerClient) -> None:
    assert stub.is_server_live()
    assert stub.is_server_ready()
    assert stub.is_model_ready("small", "1")
    assert stub.get_server_metadata().name == "tricorn"
    metadata = stub.get_model_metadata("small")
    assert (metadata.inputs[0].name, metadata.inputs[0].datatype) == ("text_input", "BYTES")
    assert list(metadata.outputs[0].shape) == [-1, 1]
    config = stub.get_model_config("tensorrt_llm").config
    assert config.model_transaction_policy.decoupled
    assert (config.input[0].name, config.input[0].data_type, list(config.input[0].dims)) == ("input_ids", 8, [-1])
    assert config.input[2].optional
    assert stub.get_model_repository_index().models[0].state == "READY"


def test_grpc_infer_says_the_same_as_http(
    server: Served, stub: grpc.InferenceServerClient, client: http.InferenceServerClient
) -> None:
    result = stub.infer("ensemble", text_inputs(grpc), request_id="r2", timeout=60_000_000)
    assert said(result) == said(client.infer("ensemble", text_inputs(http))) == plain(server)["text"]
    assert result.get_response().id == "r2"
    prompt, output = ids_of(server)
    fields: Any = {"input_ids": ("INT32", prompt), "request_output_len": ("INT64", 12), "temperature": ("FP32", 0.0)}
    outputs = [grpc.InferRequestedOutput("output_ids")]
    chosen = stub.infer("tensorrt_llm", tensors(grpc, **fields), outputs=outputs)
    assert chosen.as_numpy("output_ids").reshape(-1).tolist() == output
    assert chosen.as_numpy("sequence_length") is None


def test_grpc_takes_typed_contents(server: Served) -> None:
    """As clients without raw bytes send them."""
    import grpc as transport

    typed = {
        "text_input": ("BYTES", {"bytes_contents": [PROMPT.encode()]}),
        "max_tokens": ("INT32", {"int_contents": [12]}),
        "temperature": ("FP32", {"fp32_contents": [0.0]}),
        "random_seed": ("UINT64", {"uint64_contents": [7]}),
    }
    inputs = [
        {"name": name, "datatype": datatype, "shape": [1, 1], "contents": contents}
        for name, (datatype, contents) in typed.items()
    ]
    with transport.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            CLASSES["ModelInferRequest"].SerializeToString,
            CLASSES["ModelInferResponse"].FromString,
        )
        response = call(CLASSES["ModelInferRequest"](model_name="small", inputs=inputs), timeout=60)
    assert response.raw_output_contents[0][4:].decode() == plain(server)["text"]


def test_grpc_streams(server: Served, stub: grpc.InferenceServerClient) -> None:
    inputs = text_inputs(grpc, stream=("BOOL", True))
    results = streamed(stub, {"inputs": inputs, "request_id": "a", "enable_empty_final_response": True})
    assert len(results) > 2
    assert "".join(map(said, results)) == plain(server)["text"]
    assert [final(result) for result in results] == [False] * (len(results) - 1) + [True]
    assert {result.get_response().id for result in results} == {"a"}


def test_grpc_streams_hold_many_requests(server: Served, stub: grpc.InferenceServerClient) -> None:
    wanted = text_inputs(grpc, stream=("BOOL", True))
    requests = [
        {"inputs": wanted, "request_id": "a"},
        {"inputs": text_inputs(grpc, temperature=("BYTES", "x")), "request_id": "bad"},
        {"inputs": wanted, "request_id": "b"},
        {"inputs": text_inputs(grpc), "request_id": "whole"},
    ]
    results = streamed(stub, *requests)
    errors = [result for result in results if isinstance(result, Exception)]
    assert ["temperature" in str(error) for error in errors] == [True]
    for name in ("a", "b", "whole"):
        mine = [r for r in results if not isinstance(r, Exception) and r.get_response().id == name]
        assert "".join(map(said, mine)) == plain(server)["text"]
        assert (len(mine) == 1) == (name == "whole")


def test_grpc_async(server: Served) -> None:
    import tritonclient.grpc.aio as aio

    async def both() -> tuple[str, str]:
        async with aio.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
            whole = await client.infer("small", text_inputs(grpc))

            async def requests() -> Any:
                yield {"model_name": "small", "inputs": text_inputs(grpc, stream=("BOOL", True))}

            parts = [said(result) async for result, error in client.stream_infer(requests()) if error is None]
            return said(whole), "".join(parts)

    whole, parts = asyncio.run(both())
    assert whole == parts != ""


def test_a_cancelled_stream_ends_its_generation(server: Served, stub: grpc.InferenceServerClient) -> None:
    heard: queue.Queue[Any] = queue.Queue()
    stub.start_stream(callback=lambda result, error: heard.put(error or result))
    stub.async_stream_infer("small", text_inputs(grpc, stream=("BOOL", True), max_tokens=("INT32", 100_000)))
    assert said(heard.get(timeout=60))
    stub.stop_stream(cancel_requests=True)
    for _ in range(200):
        state = httpx.get(f"{server.url}/debug/state", timeout=60).json()["server"]
        if state["gate"]["sequences"] == 0:
            break
    assert state["gate"]["sequences"] == 0
    assert [request["route"] for request in state["requests"]] == ["/debug/state"]


def test_a_stream_outlives_its_engine(server: Served, stub: grpc.InferenceServerClient) -> None:
    inputs = text_inputs(grpc, stream=("BOOL", True), max_tokens=("INT32", 100_000))
    (whole,) = streamed(stub, {"inputs": text_inputs(grpc, max_tokens=("INT32", 100_000))})
    heard: queue.Queue[Any] = queue.Queue()
    stub.start_stream(callback=lambda result, error: heard.put(error or result))
    stub.async_stream_infer("small", inputs)
    first = heard.get(timeout=60)
    os.kill(server.engine_pid, signal.SIGKILL)
    stub.stop_stream()
    results = [first, *(heard.get_nowait() for _ in range(heard.qsize()))]
    assert final(results[-1])
    assert "".join(map(said, results)) == said(whole)


@pytest.mark.parametrize(("fields", "named"), BAD_TENSORS)
def test_grpc_names_the_tensor_at_fault(stub: grpc.InferenceServerClient, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(grpc.InferenceServerException, match=named) as caught:
        stub.infer("small", text_inputs(grpc, **fields))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_grpc_errors(stub: grpc.InferenceServerClient) -> None:
    with pytest.raises(grpc.InferenceServerException, match="not served here") as caught:
        stub.infer("other", text_inputs(grpc))
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(grpc.InferenceServerException) as caught:
        stub.infer("small", text_inputs(grpc), timeout=1)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    with pytest.raises(grpc.InferenceServerException) as caught:
        stub.infer("small", text_inputs(grpc), headers={"x-request-timeout": "never"})
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(grpc.InferenceServerException) as caught:
        stub.get_inference_statistics("small")
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_grpc_counts_in_the_metrics(server: Served, stub: grpc.InferenceServerClient) -> None:
    def counted() -> float:
        lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))

    before = counted()
    stub.infer("small", text_inputs(grpc))
    assert counted() == before + 12
