"""Embeddings, with the official clients against a served engine, and offline."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest

from served import Served, served
from tricorn import LLM, TricornError
from tricorn.frontend.embedding import vector

TEXTS = ["The sky is blue.", "Snow is white and cold.", "x"]


@pytest.fixture(scope="module")
def server(engine_for: Callable[..., Any]) -> Iterator[Served]:
    with served(engine_for("llama")[1].path) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def embed(client: openai.OpenAI, given: Any, **more: Any) -> list[list[float]]:
    return [item.embedding for item in client.embeddings.create(model="small", input=given, **more).data]


def refused(server: Served, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": "x", **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_many_texts_and_each_alone_have_the_same_vectors(client: openai.OpenAI) -> None:
    """More of them than the engine has slots, too: they wait in the request."""
    together = embed(client, TEXTS * 100)
    assert len(together) == 300
    assert together[:3] == [embed(client, text)[0] for text in TEXTS]
    assert together[297:] == together[:3]
    assert all(abs(np.linalg.norm(item) - 1) < 1e-6 for item in together)


def test_ids_are_texts_read(client: openai.OpenAI, server: Served) -> None:
    ids = [httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
    assert embed(client, ids) == embed(client, TEXTS)
    assert embed(client, ids[0]) == embed(client, TEXTS[0])


def test_base64_holds_the_same_numbers(server: Served) -> None:
    """The client asks for it unless told otherwise; here is what goes over the wire."""
    ask = {"model": "small", "input": TEXTS, "encoding_format": "base64"}
    coded = httpx.post(f"{server.url}/v1/embeddings", json=ask).json()
    plain = httpx.post(f"{server.url}/v1/embeddings", json={**ask, "encoding_format": "float"}).json()
    for one, other in zip(coded["data"], plain["data"], strict=True):
        numbers = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
        assert numbers.tolist() == other["embedding"]
    assert coded["usage"] == plain["usage"]
    assert coded["usage"]["prompt_tokens"] == coded["usage"]["total_tokens"] > len(TEXTS)
    assert coded["timings"]["predicted_n"] == 0


def test_fewer_dimensions_are_the_first_ones_of_length_1(client: openai.OpenAI) -> None:
    (whole,), (cut,) = embed(client, "x"), embed(client, "x", dimensions=8)
    first = np.array(whole[:8])
    np.testing.assert_allclose(cut, first / np.linalg.norm(first), rtol=1e-5)
    with pytest.raises(openai.BadRequestError, match="above the width"):
        embed(client, "x", dimensions=10**6)


def test_poolings_and_no_normalization(client: openai.OpenAI) -> None:
    """The mean of the vectors of all beginnings is that of the whole."""
    ids = [5, 9, 200, 31]
    last = [embed(client, ids[:end], extra_body={"pooling": "last", "normalize": False})[0] for end in range(1, 5)]
    (mean,) = embed(client, ids, extra_body={"normalize": False})
    np.testing.assert_allclose(mean, np.mean(last, axis=0), rtol=1e-4, atol=1e-5)


def test_a_long_text_is_refused_or_cut(client: openai.OpenAI, server: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="context is 512"):
        embed(client, "x" * 2000)
    cut = embed(client, "x" * 2000, extra_body={"truncate_prompt_tokens": -1})
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "x" * 512}).json()["tokens"]
    assert len(ids) == 512
    assert cut == embed(client, ids)
    assert embed(client, ids, extra_body={"truncate_prompt_tokens": 5}) == embed(client, ids[:5])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["x", 1]}, "input"),
        ({"input": [[1, 2], []]}, "prompt"),
        ({"input": [99999]}, "prompt"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"temperature": 0.5}, "temperature"),
        ({"embed_dtype": "float16"}, "embed_dtype"),
    ],
)
def test_what_is_refused(server: Served, fields: dict[str, Any], param: str) -> None:
    assert refused(server, **fields)["param"] == param


def test_ollama(server: Served, client: openai.OpenAI) -> None:
    asked = ollama.Client(host=server.url)
    both = asked.embed("small", TEXTS[:2])
    assert [list(item) for item in both.embeddings] == embed(client, TEXTS[:2])
    assert both.prompt_eval_count
    assert asked.embed("small", "x" * 2000).embeddings
    with pytest.raises(ollama.ResponseError, match="context is 512"):
        asked.embed("small", "x" * 2000, truncate=False)
    assert asked.embed("small", "").embeddings == []
    (cut,) = asked.embed("small", "x", dimensions=4).embeddings
    assert len(cut) == 4
    raw = asked.embeddings("small", "x").embedding
    np.testing.assert_allclose(raw / np.linalg.norm(raw), embed(client, "x")[0], rtol=1e-5)
    asked._client.close()


def test_offline_and_by_the_reference(engine_for: Callable[..., Any]) -> None:
    """What the native kernels give is near what the float32 reference gives, and has the same bits every time."""
    path = str(engine_for("llama")[1].path)
    with LLM(path, threads=1, kv_bytes=2**24, progress=False) as llm:
        vectors = llm.embed(TEXTS)
        assert vectors.dtype == np.float32
        assert np.array_equal(vectors, np.concatenate([llm.embed(text) for text in TEXTS]))
        assert llm.embed("x", dimensions=3).shape == (1, 3)
        with pytest.raises(TricornError, match="above the width"):
            llm.embed("x", dimensions=10**6)
    with LLM(path, threads=1, kv_bytes=2**24, executor="reference", progress=False) as llm:
        reference = llm.embed(TEXTS)
    assert np.all(np.sum(vectors * reference, axis=1) > 0.99)


def test_nothing_has_no_direction() -> None:
    assert not vector(np.zeros(4, np.float32).tobytes()).any()
