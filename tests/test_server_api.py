"""The HTTP API, over the application itself, with a scripted engine that says exactly what a case needs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from test_frontend_text import BYTES, CHATML, LITERAL, PIECES
from tricorn.engine.messages import EngineInfo, EngineStats, Status
from tricorn.frontend.generate import Frontend
from tricorn.frontend.template import ChatTemplate
from tricorn.frontend.tokenizer import Tokenizer
from tricorn.request import Output, Request, TokenLogprobs
from tricorn.scheduler.limits import Limits
from tricorn.server.app import ServerOptions, create_app

BPE = Tokenizer(BYTES.to_str())
SPM = Tokenizer(PIECES.to_str(), bos_id=2, add_bos=True)
CONTEXT = 256
EOS = BYTES.token_to_id("<|im_end|>")
VOCAB = 512


def info(vocab: int = VOCAB, max_sequences: int = 8) -> EngineInfo:
    limits = Limits(context=CONTEXT, vocab=vocab, max_sequences=max_sequences, max_tokens=512, max_rows=64)
    return EngineInfo(model="m", limits=limits, pages=100, page_size=16, page_bytes=1, executor="scripted", threads=1)


@dataclass
class ScriptedEngine:
    """Says `script` to every request, one token per output, then the end of sequence; `say` may choose by request."""

    script: list[int] = field(default_factory=list)
    say: Callable[[Request], list[int]] | None = None
    info: EngineInfo = field(default_factory=info)
    alive: bool = True
    delay: float = 0.0
    fail_after: int | None = None
    logprob: float = -0.5
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        self.requests.append(request)
        ended = False
        try:
            async for output in self.answer(request):
                ended = output.finish_reason is not None
                yield output
        finally:
            if not ended:
                self.aborted.append(request.id)

    async def answer(self, request: Request) -> AsyncGenerator[Output, None]:
        params = request.params
        scored: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            scored = [None, *(self.entry(id, params.prompt_logprobs) for id in request.prompt[1:])]
        ids = [*(self.say(request) if self.say else self.script), EOS]
        if params.max_tokens == 0:
            yield Output(id=request.id, token_ids=[], prompt_logprobs=scored, finish_reason="length")
        for place, id in enumerate(ids[: params.max_tokens]):
            await asyncio.sleep(self.delay)
            if place == self.fail_after:
                yield Output(id=request.id, token_ids=[], finish_reason="error", error="the engine died")
                return
            ended = id == EOS and not params.ignore_eos
            yield Output(
                id=request.id,
                token_ids=[id],
                logprobs=None if params.logprobs is None else [self.entry(id, params.logprobs)],
                prompt_logprobs=scored if place == 0 else None,
                finish_reason="stop" if ended else "length" if place + 1 == params.max_tokens else None,
                stop_token=EOS if ended else None,
                cached_tokens=3 if place == 0 else 0,
            )

    def entry(self, id: int, count: int) -> TokenLogprobs:
        values = [self.logprob, float("-inf"), float("-inf")][:count]
        return TokenLogprobs(self.logprob, 1, [id, 5, 6][: len(values)], values)

    @property
    def status(self) -> Status:
        return "ready" if self.alive else "dead"

    async def state(self, *, tree: bool = False) -> dict[str, Any]:
        return {"requests": len(self.requests)}

    def close(self) -> None:
        pass

    async def stats(self) -> EngineStats:
        return EngineStats(running=2, pages_total=10, pages_held=5, prefix_queried_tokens=40, prefix_hit_tokens=10)


def client_of(
    engine: ScriptedEngine, tokenizer: Tokenizer = BPE, template: str = CHATML, **options: Any
) -> httpx.AsyncClient:
    frontend = Frontend(tokenizer, ChatTemplate(template, tokenizer), engine)
    app = create_app(frontend, ServerOptions(name="m", **options))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=30)


def drive(work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]], engine: ScriptedEngine, **options: Any) -> Any:
    async def run() -> Any:
        async with client_of(engine, **options) as http:
            return await work(http)

    return asyncio.run(run())


def strict(text: str | bytes) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def post(engine: ScriptedEngine, path: str, body: Any, **options: Any) -> httpx.Response:
    async def work(http: httpx.AsyncClient) -> httpx.Response:
        if isinstance(body, bytes):
            return await http.post(path, content=body, headers={"content-type": "application/json"})
        return await http.post(path, json=body)

    response: httpx.Response = drive(work, engine, **options)
    strict(response.text) if response.headers["content-type"] == "application/json" else None
    return response


def complete(engine: ScriptedEngine, options: dict[str, Any] | None = None, **body: Any) -> Any:
    response = post(engine, "/v1/completions", {"prompt": "x", **body}, **(options or {}))
    assert response.status_code == 200, response.text
    return strict(response.text)


def events(response: httpx.Response) -> list[Any]:
    """The chunks of a stream; each is JSON of its own and [DONE] comes once, last."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [strict(line[6:]) for line in lines[:-1]]


def stream(
    engine: ScriptedEngine, path: str = "/v1/completions", options: dict[str, Any] | None = None, **body: Any
) -> list[Any]:
    base = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    response = post(engine, path, {**base, "stream": True, **body}, **(options or {}))
    assert response.status_code == 200, response.text
    return events(response)


def refused(body: Any, status: int = 400, path: str = "/v1/completions", **options: Any) -> dict[str, Any]:
    """The error of a request that must not reach the engine."""
    engine = options.pop("engine", None) or ScriptedEngine([5])
    response = post(engine, path, body, **options)
    assert response.status_code == status, response.text
    assert engine.requests == []
    error: dict[str, Any] = strict(response.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    return error


def texts(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def letters(text: str) -> list[int]:
    """One token per character, so that stops cross token borders wherever they can."""
    return [id for letter in text for id in BPE.encode(letter)]


HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def test_shapes_of_whole_answers() -> None:
    engine = ScriptedEngine(BPE.encode("one two"))
    answer = complete(engine, max_tokens=50)
    assert (answer["object"], answer["model"]) == ("text_completion", "m")
    assert answer["choices"] == [
        {"index": 0, "text": "one two", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    count = len(engine.script) + 1
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": count,
        "total_tokens": count + 1,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    answer = strict(post(engine, CHAT, {"messages": HI, "max_tokens": 50}).text)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "one two", "refusal": None}
    assert engine.requests[-1].params.max_tokens == 50
    post(engine, CHAT, {"messages": HI})
    assert engine.requests[-1].params.max_tokens == CONTEXT - len(engine.requests[-1].prompt)


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_literals_arrive_whole(path: str) -> None:
    for literal in (LITERAL, "  two  gaps and\ttab", " leading", "no lead"):
        for tokenizer in (BPE, SPM):
            engine = ScriptedEngine(tokenizer.encode(literal))
            chunks = stream(engine, path, max_tokens=200, options={"tokenizer": tokenizer})
            assert texts(chunks) == literal
            assert all("\ufffd" not in texts([chunk]) for chunk in chunks)
    engine = ScriptedEngine(BPE.encode(LITERAL))
    assert complete(engine, max_tokens=200)["choices"][0]["text"] == LITERAL


def test_token_limits_inside_characters() -> None:
    engine = ScriptedEngine(BPE.encode(LITERAL))
    for limit in range(1, len(engine.script) + 1):
        answer = complete(engine, max_tokens=limit, logprobs=2)
        choice = answer["choices"][0]
        chunks = stream(engine, max_tokens=limit, logprobs=2)
        assert texts(chunks) == choice["text"]
        assert LITERAL.startswith(choice["text"].removesuffix("\ufffd"))
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == limit


def test_invalid_bytes_are_valid_json() -> None:
    for byte in ("<0x80>", "<0xF0>"):
        engine = ScriptedEngine([PIECES.token_to_id(byte)] * 4)
        options = {"tokenizer": SPM}
        answer = complete(engine, max_tokens=4, logprobs=3, options=options)
        assert set(answer["choices"][0]["text"]) == {"\ufffd"}
        assert texts(stream(engine, max_tokens=4, logprobs=3, options=options)) == answer["choices"][0]["text"]
        body = {"messages": HI, "max_tokens": 4, "logprobs": True, "top_logprobs": 1}
        content = strict(post(engine, CHAT, body, **options).text)["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in content] == [[int(byte[3:5], 16)]] * 4


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_stops_across_tokens(path: str) -> None:
    text = "one two three four five six"
    engine = ScriptedEngine(letters(text))
    for stop, expected in ((["ree", "two thr"], "one "), (["our"], "one two three f"), ("e", "on"), (["zz"], text)):
        chunks = stream(engine, path, max_tokens=100, stop=stop)
        assert texts(chunks) == expected
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        key = {"prompt": "x"} if path == "/v1/completions" else {"messages": HI}
        choice = strict(post(engine, path, {**key, "max_tokens": 100, "stop": stop}).text)["choices"][0]
        assert choice.get("text", choice.get("message", {}).get("content")) == expected
    assert len(engine.aborted) == 6  # the engine is told at once; a natural end needs no abort


def test_only_possible_stops_are_held_back() -> None:
    literal = "a\nb\n\nc\n<|no\nend"
    engine = ScriptedEngine(letters(literal))
    chunks = stream(engine, max_tokens=100, stop=["\n<|nope|>"])
    assert texts(chunks) == literal
    assert texts(chunks[:1]) == "a"


def test_logprobs_are_cut_with_the_stop() -> None:
    engine = ScriptedEngine(letters("one two three"))
    body = {"max_tokens": 100, "stop": ["o th"]}
    answer = complete(engine, logprobs=2, **body)
    choice = answer["choices"][0]
    assert choice["text"] == "one tw"
    assert choice["logprobs"]["tokens"] == list("one tw")
    chunks = stream(engine, logprobs=2, **body)
    for key, values in choice["logprobs"].items():
        assert [item for chunk in chunks for item in chunk["choices"][0]["logprobs"][key]] == values
    chat = {"messages": HI, "logprobs": True, "top_logprobs": 2, **body}
    content = strict(post(engine, CHAT, chat).text)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "one tw"
    chunks = stream(engine, CHAT, logprobs=True, top_logprobs=2, **body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == content


def test_usage_in_streams() -> None:
    engine = ScriptedEngine([5] * 20)
    base = {"max_tokens": 7, "ignore_eos": True}
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        assert all("usage" not in chunk and chunk["choices"] for chunk in stream(engine, CHAT, **base, **options))
    for n in (1, 2):
        chunks = stream(engine, CHAT, n=n, stream_options={"include_usage": True}, **base)
        assert [chunk["choices"] == [] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        usage = chunks[-1]["usage"]
        assert usage["completion_tokens"] == 7 * n
        assert usage == strict(post(engine, CHAT, {"messages": HI, "n": n, **base}).text)["usage"]
    error = refused({"messages": HI, "stream_options": {"include_usage": True}}, path=CHAT)
    assert error["param"] == "stream_options"


def test_streams_of_several_choices() -> None:
    engine = ScriptedEngine(say=lambda request: [5 + request.seed % 7] * 20)
    chunks = stream(engine, CHAT, n=3, max_tokens=12, temperature=1, seed=5)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    for index in range(3):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        assert all("finish_reason" in choice for choice in choices)
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        assert choices[-1]["finish_reason"] == "length"


def test_invalid_streams_are_refused_before_they_begin() -> None:
    refused({"stream": True, "messages": HI, "max_tokens": -3}, path=CHAT)
    error = refused({"stream": True, "prompt": [5] * CONTEXT})
    assert error["code"] == "context_length_exceeded"


def test_failures_of_the_engine() -> None:
    async def work(http: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        whole = await http.post("/v1/completions", json={"prompt": "x"})
        return whole, await http.post("/v1/completions", json={"prompt": "x", "stream": True})

    whole, begun = drive(work, ScriptedEngine([5] * 9, fail_after=2))
    assert whole.status_code == 500
    assert strict(whole.text)["error"]["message"] == "the engine died"
    lines = [line for line in begun.text.split("\n\n") if line]
    assert strict(lines[-1][6:])["error"]["message"] == "the engine died"
    assert '"finish_reason":"' not in begun.text
    at_once = post(ScriptedEngine([5] * 9, fail_after=0), "/v1/completions", {"prompt": "x", "stream": True})
    assert at_once.status_code == 500


def test_echo_offsets_count_from_the_start_of_the_text() -> None:
    engine = ScriptedEngine(BPE.encode(" blue and wide"))
    prompt = "The sky é is"
    base = {"prompt": prompt, "echo": True, "logprobs": 1}
    for limit in (5, 0):
        choice = complete(engine, max_tokens=limit, **base)["choices"][0]
        logprobs = choice["logprobs"]
        count = len(BPE.encode(prompt))
        assert choice["text"].startswith(prompt)
        assert len(logprobs["tokens"]) == count + limit
        assert logprobs["token_logprobs"][0] is None
        assert None not in logprobs["token_logprobs"][1:]
        offsets = logprobs["text_offset"]
        assert offsets == sorted(offsets)
        assert offsets[0] == 0
        for token, offset in zip(logprobs["tokens"], offsets, strict=True):
            assert "\ufffd" in token or choice["text"][offset:].startswith(token)
        chunks = stream(engine, max_tokens=limit, **base)
        assert texts(chunks) == choice["text"]
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert {key: [item for part in parts for item in part[key]] for key in logprobs} == logprobs
    assert complete(engine, prompt=prompt, echo=True, max_tokens=0)["choices"][0]["text"] == prompt
    answer = complete(engine, max_tokens=0)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 0)
    assert engine.requests[-1].params.prompt_logprobs is not None  # nothing to compute, so the engine was not asked


def test_infinite_logprobs_are_json() -> None:
    engine = ScriptedEngine([5, 6], logprob=float("-inf"))
    logprobs = complete(engine, max_tokens=2, logprobs=3)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0, -9999.0]
    for count in (0, 3, 20):
        body = {"messages": HI, "max_tokens": 2, "logprobs": True, "top_logprobs": count}
        content = strict(post(engine, CHAT, body).text)["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [min(count, 3)] * 2


def test_prompts_of_every_form() -> None:
    engine = ScriptedEngine(say=lambda request: request.prompt[:1])
    ab = [BPE.encode("a"), BPE.encode("b")]
    for prompt in (["a", "b"], ab):
        answer = complete(engine, prompt=prompt, n=2, max_tokens=1)
        assert [choice["text"] for choice in answer["choices"]] == ["a", "a", "b", "b"]
        assert answer["usage"]["prompt_tokens"] == 2
    assert complete(engine, prompt=ab[0])["usage"]["prompt_tokens"] == 1


def test_token_ids_on_demand() -> None:
    engine = ScriptedEngine(BPE.encode("one two"))
    choice = complete(engine, prompt="ab", max_tokens=50, return_token_ids=True)["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (engine.script, BPE.encode("ab"))
    chunks = stream(engine, CHAT, max_tokens=50, return_token_ids=True)
    assert [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", [])] == engine.script


def test_unicode_and_special_tokens_of_raw_prompts() -> None:
    engine = ScriptedEngine([5])
    complete(engine, prompt="a<|im_end|>")
    complete(engine, prompt="a<|im_end|>", parse_special=False)
    assert [EOS in request.prompt for request in engine.requests] == [True, False]


def test_models_with_a_start_token_take_empty_prompts() -> None:
    answer = complete(ScriptedEngine([PIECES.token_to_id("b")]), prompt="", options={"tokenizer": SPM})
    assert answer["usage"]["prompt_tokens"] == 1


def test_salts_reach_the_engine() -> None:
    engine = ScriptedEngine([5])
    complete(engine, cache_salt="x")
    complete(engine)
    assert [request.service.namespace.salt for request in engine.requests] == ["x", ""]
    assert refused({"prompt": "x", "cache_salt": ""})["param"] == "cache_salt"


def test_models_health_and_unknown_routes() -> None:
    async def work(http: httpx.AsyncClient) -> list[httpx.Response]:
        paths = ["/v1/models", "/v1/models/m", "/v1/models/other", "/health", "/nothing", "/v1/completions"]
        return [await http.get(path) for path in paths]

    models, one, other, health, nothing, method = drive(work, ScriptedEngine())
    assert models.json()["data"] == [one.json()]
    assert (one.json()["id"], one.json()["max_model_len"]) == ("m", CONTEXT)
    assert health.json() == {"status": "ok"}
    assert [other.status_code, nothing.status_code, method.status_code] == [404, 404, 405]
    for response in (other, nothing, method):
        assert response.json()["error"]["message"]
    dead = drive(work, ScriptedEngine(alive=False))
    assert dead[3].status_code == 503
    assert refused({"prompt": "x", "model": "other"}, 404)["param"] == "model"
    assert refused({"prompt": "x"}, 503, engine=ScriptedEngine(alive=False))["code"] == "engine_unavailable"


def test_metrics() -> None:
    async def work(http: httpx.AsyncClient) -> str:
        for _ in range(2):
            await http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 4})
        await http.post("/v1/completions", json={"prompt": "ab", "max_tokens": -1})
        return (await http.get("/metrics")).text

    text = drive(work, ScriptedEngine([5] * 9))
    label = '{model_name="m"}'
    for line in (
        f"vllm:num_requests_running{label} 2.0",
        f"vllm:num_requests_waiting{label} 0.0",
        f"vllm:kv_cache_usage_perc{label} 0.5",
        f"vllm:prefix_cache_queries_total{label} 40.0",
        f"vllm:prefix_cache_hits_total{label} 10.0",
        f"vllm:num_preemptions_total{label} 0.0",
        f"vllm:prompt_tokens_total{label} {2.0 * len(BPE.encode('ab'))}",
        f"vllm:generation_tokens_total{label} 8.0",
        f"vllm:time_to_first_token_seconds_count{label} 2.0",
        f"vllm:inter_token_latency_seconds_count{label} 6.0",
        f"vllm:e2e_request_latency_seconds_count{label} 2.0",
        'vllm:request_success_total{finished_reason="length",model_name="m"} 2.0',
        'vllm:request_success_total{finished_reason="abort",model_name="m"} 0.0',
        'tricorn:request_errors_total{model_name="m",status="400"} 1.0',
    ):
        assert line in text.splitlines()


def test_the_queue_is_bounded() -> None:
    async def work(http: httpx.AsyncClient) -> list[httpx.Response]:
        body = {"prompt": "x", "max_tokens": 3}
        first = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(40)))
        more = await http.post("/v1/completions", json={**body, "n": 7})
        return [*first, more, await http.post("/v1/completions", json=body)]

    engine = ScriptedEngine([5] * 9, delay=0.05, info=info(max_sequences=2))
    *burst, seven, idle = drive(work, engine, max_waiting=4)
    assert sorted(response.status_code for response in burst) == [200] * 6 + [429] * 34
    assert all(int(response.headers["retry-after"]) > 0 for response in burst if response.status_code == 429)
    assert (seven.status_code, idle.status_code) == (400, 200)  # seven never fit
    assert "7 sequences" in seven.json()["error"]["message"]


async def gone_after(app: Any, body: dict[str, Any], seconds: float) -> None:
    """A client that sends a request and closes the connection."""
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await asyncio.sleep(seconds)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        pass

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    await app(
        {**scope, "http_version": "1.1", "scheme": "http", "root_path": "", "server": None, "client": None},
        receive,
        send,
    )


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_aborts(streamed: bool) -> None:
    engine = ScriptedEngine([5] * 200, delay=0.02)

    async def run() -> None:
        app = create_app(Frontend(BPE, None, engine), ServerOptions(name="m"))
        body = {"prompt": "x", "max_tokens": 200, "n": 4, "stream": streamed}
        await asyncio.wait_for(gone_after(app, body, 0.1), 2)

    asyncio.run(run())
    assert sorted(engine.aborted) == sorted(request.id for request in engine.requests)
    assert len(engine.aborted) == 4


def test_one_request_s_abort_leaves_the_others() -> None:
    engine = ScriptedEngine(say=lambda request: request.prompt * 5)

    async def work(http: httpx.AsyncClient) -> list[str]:
        headers = {"x-request-id": "same"}
        bodies = [{"prompt": letter, "request_id": "same", "max_tokens": 3} for letter in "abcd"]
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body, headers=headers) for body in bodies))
        return [answer.json()["choices"][0]["text"] for answer in answers]

    assert drive(work, engine) == ["aaa", "bbb", "ccc", "ddd"]
    assert len({request.id for request in engine.requests}) == 4
