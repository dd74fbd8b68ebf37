"""More of the faults that users of other servers reported; FIELD_FAULTS.md lists every case and where it is tested."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from checkpoints import write_folder
from test_field_faults_api import (
    CHAT,
    COUNT,
    MODELS,
    PLAIN,
    PROGRAM,
    Server,
    exact,
    greedy,
    own,
    pulled,
    server,
    text_of,
    texts,
)
from test_frontend_text import BYTES
from test_invariance import GREEDY, Model, assert_as_alone, request, run
from test_server_api import BPE, ScriptedEngine, drive
from tricorn.engine.client import InProcessClient
from tricorn.engine.messages import EngineInfo
from tricorn.engine.options import EngineOptions
from tricorn.frontend.errors import BadRequest
from tricorn.frontend.template import normalize
from tricorn.frontend.tokenizer import Tokenizer
from tricorn.request import Request, SamplingParams, TricornError
from tricorn.scheduler.limits import Limits
from tricorn.weights.tokenizer import undecodable_ids

__all__ = ["own", "server", "texts"]  # fixtures


@pytest.fixture(scope="module")
def gemma() -> Iterator[Server]:
    server = Server(pulled("gemma3-270m"))
    yield server
    server.stop()


def test_the_list_of_cases_is_whole() -> None:
    """Every case once, every test that the list names defined."""
    here = Path(__file__).parent
    listed: list[int] = []
    for line in (here / "FIELD_FAULTS.md").read_text().splitlines():
        if line.startswith("| A-"):
            first, last = (re.findall(r"A-(\d+)", line.split("|")[1]) * 2)[:2]
            listed += range(int(first), int(last) + 1)
        for file, test in re.findall(r"`(test_\w+\.py)::(test_\w+)`", line):
            assert re.search(rf"^def {test}\(", (here / file).read_text(), re.MULTILINE), f"{file}::{test}"
    assert listed == list(range(1, 98))


# --- text


def test_words_of_random_letters_take_linear_time(texts: dict[str, Any]) -> None:
    draw = random.Random(5)
    for tokenizer, _ in texts.values():
        seconds = []
        for count in (20_000, 80_000):
            text = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=count))
            started = time.perf_counter()
            tokenizer.encode(text)
            seconds.append(time.perf_counter() - started)
        assert seconds[1] < 8 * seconds[0] + 0.1


@pytest.mark.parametrize("name", ["server", "gemma"])
def test_a_continuation_keeps_its_first_space(name: str, request: pytest.FixtureRequest) -> None:
    over: Server = request.getfixturevalue(name)
    body = greedy("Once upon a", 4)
    whole = over.choice(body)["text"]
    assert whole.startswith(" ")
    assert "".join(chunk["choices"][0]["text"] for chunk in over.chunks(body)) == whole


def test_echoed_streams_of_a_real_model_equal_the_whole(server: Server) -> None:
    body = {"prompt": "The sky é is", "echo": True, "logprobs": 1, "max_tokens": 5, "temperature": 0}
    choice = server.choice(body)
    chunks = [chunk["choices"][0] for chunk in server.chunks(body)]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    for key, values in choice["logprobs"].items():
        assert [item for chunk in chunks for item in chunk["logprobs"][key]] == values
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert choice["logprobs"]["token_logprobs"].count(None) == 1


def test_any_number_of_alternatives(server: Server) -> None:
    for count in (0, 20):
        body = {"messages": COUNT, "max_tokens": 2, "logprobs": True, "top_logprobs": count}
        content = server.choice(body, CHAT)["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [count] * 2
    only = server.choice({"prompt": "yes or", "max_tokens": 2, "temperature": 1, "top_k": 1, "logprobs": 5})
    assert all(len(top) == 5 for top in only["logprobs"]["top_logprobs"])


@pytest.mark.parametrize("model", MODELS)
def test_parts_of_a_message_come_in_order(texts: dict[str, Any], model: str) -> None:
    _, template = text_of(texts, model)
    parts = [{"type": "text", "text": "alpha"}, {"type": "text", "text": "beta"}]
    user = {"role": "user", "content": "x"}
    turns = {"user": [{"role": "user", "content": parts}], "system": [{"role": "system", "content": parts}, user]}
    if model.startswith("qwen"):
        turns["tool"] = [user, {"role": "tool", "content": parts}]
    for messages in turns.values():
        assert "alpha\nbeta" in template.render(normalize(messages))


def test_gemma_never_loses_a_turn(texts: dict[str, Any]) -> None:
    """What its template cannot place is refused, never left out."""
    _, template = text_of(texts, "gemma3-270m")
    user, system = {"role": "user", "content": "U"}, {"role": "system", "content": "SYS"}
    for turns in ([system], [user, system], [user, system, user], [{"role": "tool", "content": "T"}]):
        with pytest.raises(BadRequest, match="template"):
            template.encode(normalize(turns))
    developer = template.render(normalize([{"role": "developer", "content": "SYS"}, user]))
    assert developer == template.render(normalize([system, user]))


# --- a model with a start token, byte tokens and two ends of sequence


def test_an_empty_prompt_is_the_start_token(gemma: Server, texts: dict[str, Any]) -> None:
    tokenizer, _ = text_of(texts, "gemma3-270m")
    answer = gemma.post(greedy("", 1))
    assert answer["choices"][0]["prompt_token_ids"] == [tokenizer.bos_id]
    assert answer["usage"]["prompt_tokens"] == 1
    for prompt in ("hi", "<bos>hi"):
        ids = gemma.choice(greedy(prompt, 1))["prompt_token_ids"]
        assert ids == [tokenizer.bos_id, *tokenizer.encode("hi")]
    chat = gemma.choice({"messages": COUNT, "max_tokens": 1, "return_token_ids": True}, CHAT)["prompt_token_ids"]
    assert [place for place, id in enumerate(chat) if id == tokenizer.bos_id] == [0]


def test_a_model_that_emits_invalid_bytes(gemma: Server, texts: dict[str, Any]) -> None:
    tokenizer, _ = text_of(texts, "gemma3-270m")
    for byte in (0x80, 0xF0):
        id = next(id for id in range(tokenizer.size) if tokenizer.token_bytes(id) == bytes([byte]))
        body = greedy("a", 4, logit_bias={str(id): 100}, logprobs=3)
        choice = gemma.choice(body)
        assert choice["token_ids"] == [id] * 4
        assert set(choice["text"]) == {"\ufffd"}
        assert "".join(chunk["choices"][0]["text"] for chunk in gemma.chunks(body)) == choice["text"]
    gemma.alive()


def test_each_end_of_sequence_waits_for_min_tokens(gemma: Server) -> None:
    for end in (1, 106):  # <eos>, <end_of_turn>
        for least in (0, 5):
            answer = gemma.post(greedy("The sky is", 32, logit_bias={str(end): 100}, min_tokens=least))
            choice = answer["choices"][0]
            assert (len(choice["token_ids"]), choice["finish_reason"]) == (least, "stop")
            assert not {1, 106} & set(choice["token_ids"])
            assert answer["usage"]["completion_tokens"] == least + 1
        choice = gemma.choice(greedy("The sky is", 9, logit_bias={str(end): 100}, ignore_eos=True))
        assert (choice["token_ids"], choice["finish_reason"]) == ([end] * 9, "length")
        assert choice["text"] == ""


# --- padding of the vocabulary


async def sampled(client: InProcessClient, prompt: list[int], **params: Any) -> list[int]:
    asked = Request(id="r", prompt=prompt, params=SamplingParams(**params), seed=1)
    return [id async for output in client.submit(asked) for id in output.token_ids]


def test_ids_without_a_token_are_never_sampled(tmp_path: Path) -> None:
    """The small model's logits are 320 wide, its tokenizer knows 260 ids."""
    folder = write_folder(tmp_path, "llama", seed=3)
    client = InProcessClient(EngineOptions(path=str(folder), executor="reference", kv_bytes=1 << 20))
    assert client.info.limits.undecodable == tuple(range(260, 320))
    for params in ({"temperature": 0.0}, {"temperature": 2.0}, {"temperature": 1.0, "top_k": 5}):
        bias = dict.fromkeys(range(260, 320), 100.0)
        plain = asyncio.run(sampled(client, [5, 6], max_tokens=20, ignore_eos=True, **params))
        forced = asyncio.run(sampled(client, [5, 6], max_tokens=20, ignore_eos=True, logit_bias=bias, **params))
        assert max(plain) < 260
        assert forced == plain
    client.close()


def test_padding_of_a_real_model(texts: dict[str, Any]) -> None:
    from tricorn.compiler import ensure

    tokenizer, _ = text_of(texts, "qwen2.5-coder-0.5b")
    client = InProcessClient(EngineOptions(path=str(ensure("qwen2.5-coder-0.5b", False)), kv_bytes=64 << 20))
    padding = client.info.limits.undecodable
    assert all(tokenizer.token_bytes(id) == b"" for id in padding)
    assert all(tokenizer.token_bytes(id) for id in set(range(client.info.vocab)) - set(padding))
    prompt = tokenizer.encode("def add(a, b):")
    params: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0}
    plain = asyncio.run(sampled(client, prompt, **params))
    assert asyncio.run(sampled(client, prompt, logit_bias={padding[7]: 100.0, padding[-1]: 100.0}, **params)) == plain
    client.close()


def test_ids_of_every_kind_of_tokenizer() -> None:
    added = '"added_tokens": [{"id": 5, "content": "x"}]'
    assert undecodable_ids('{"model": {"vocab": {"a": 0, "b": 2}}, ' + added + "}", 7) == (1, 3, 4, 6)
    assert undecodable_ids('{"model": {"vocab": [["a", 0.0], ["b", -1]]}, ' + added + "}", 6) == (2, 3, 4)
    assert undecodable_ids(BYTES.to_str(), BPE.size) == ()
    with pytest.raises(TricornError, match="tokenizer cannot be read"):
        undecodable_ids("{}", 5)


# --- bad input beside good


def test_every_route_is_on_the_list() -> None:
    """Every route states who may use it (test_guard.py), and no other spelling of a path reaches one."""

    async def work(http: httpx.AsyncClient) -> list[int]:
        spellings = ["//v1/completions", "/V1/completions", "/v1/completions/", "/v1/%2563ompletions"]
        answers = [await http.post(path, json={"prompt": "x"}) for path in spellings]
        answers += [await http.request(method, PLAIN) for method in ("HEAD", "OPTIONS", "PUT")]
        return [answer.status_code for answer in answers]

    assert drive(work, ScriptedEngine()) == [404] * 4 + [405] * 3


def test_refusals_do_not_slow_a_stream() -> None:
    engine = ScriptedEngine([5] * 200, delay=0.01)

    async def stream_seconds(http: httpx.AsyncClient) -> float:
        started = time.perf_counter()
        answer = await http.post(PLAIN, json={"prompt": "x", "max_tokens": 100, "stream": True})
        assert answer.status_code == 200
        return time.perf_counter() - started

    async def work(http: httpx.AsyncClient) -> tuple[float, float]:
        alone = await stream_seconds(http)
        bodies = [{"stop": [str(index) for index in range(100_000)]}, {"stop": "a" * 2**20}, {"stop": ["a"] * 17}]

        async def bother() -> None:
            for body in bodies * 2:
                assert (await http.post(PLAIN, json={"prompt": "x", **body})).status_code == 400

        beside, _ = await asyncio.gather(stream_seconds(http), bother())
        return alone, beside

    alone, beside = drive(work, engine)
    assert beside < 1.2 * alone + 0.2


def leave(server: Server, body: dict[str, Any], seconds: float, headers: dict[str, str] | None = None) -> None:
    """A client that closes its connection after so many seconds."""
    with suppress(httpx.TimeoutException):
        httpx.post(server.url + PLAIN, json=body, headers=headers, timeout=seconds)


def test_an_abort_hits_its_own_request_only(server: Server) -> None:
    bodies = [greedy(f"{word} is", 30, ignore_eos=True, request_id="same") for word in ("Snow", "Rain", "Hail")]
    alone = [exact(server.choice(body)) for body in bodies]
    headers = {"x-request-id": "same"}
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(server.http.post, PLAIN, json=body, headers=headers) for body in bodies]
        threads.submit(leave, server, greedy("Sleet is", 4000, ignore_eos=True, request_id="same"), 0.2, headers)
        assert [exact(answer.result().json()["choices"][0]) for answer in running] == alone
    answer = server.http.post(PLAIN, json={"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "a" * 10_000})
    assert answer.status_code == 200
    server.idle()


def test_a_salt_is_no_part_of_the_text(server: Server) -> None:
    def cached(salt: str, prompt: str) -> int:
        answer = server.post({"prompt": prompt, "max_tokens": 1, "cache_salt": salt})
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    text = "bcd " * 20
    assert [cached("a", text), cached("ab", text[1:]), cached("a", text)] == [0, 0, cached("a", text)]
    server.post({"prompt": text, "cache_salt": ""}, status=400)


# --- prefix cache


def test_twins_beside_a_crowd(tmp_path: Path) -> None:
    """Eight times the same prompt at once, in chunks, in a pool that others churn."""
    from engines import checkpoint, compiled

    source = checkpoint("llama", ("Q8_0", "Q4_K"), max_position_embeddings=1024, num_hidden_layers=2)
    model = Model(compiled(source, tmp_path), 1024, 320)
    prompt = model.prompt(300, 1)
    twins = [request(f"twin{i}", prompt, 40, **GREEDY) for i in range(8)]
    others = [request(f"other{i}", model.prompt(20 + 5 * i, i + 2), 10, **GREEDY) for i in range(20)]
    engine = model.engine(pages=64, budget=64)
    mixed = [*itertools.chain.from_iterable(zip(twins, others, strict=False)), *others[8:]]
    assert_as_alone(model, mixed, run(engine, mixed))
    stats = engine.stats()
    assert (stats.pages_held, stats.pages_free + stats.pages_cached) == (0, 64)
    model.close()


@pytest.fixture(params=["small", "gemma3-270m"])
def windowed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Model]:
    """A small Gemma 3 and the real one; the window of both is 512 tokens."""
    from engines import checkpoint, compiled
    from tricorn.compiler import EngineFile, ensure

    if request.param == "small":
        sizes = {"sliding_window": 512, "sliding_window_pattern": 2, "max_position_embeddings": 1400}
        model = Model(compiled(checkpoint("gemma3_text", "Q8_0", **sizes), tmp_path), 1400, 320)
    else:
        file = EngineFile.open(ensure(pulled(request.param), False))
        model = Model(file, 1400, file.graph.vocab)
    yield model
    model.close()


def test_reuse_beyond_a_window(windowed: Model) -> None:
    """Lengths about the window and twice the window, a long prompt again, a shared beginning: as with a new engine."""
    long = windowed.prompt(1200, 1)
    real = windowed.vocab > 320
    engine = windowed.engine(pages=240)
    prompts = [long, long, long[:700] + windowed.prompt(20, 2)]
    if not real:
        prompts += [long[:700] + windowed.prompt(9, 3)]
        prompts += [windowed.prompt(length, 4) for length in (511, 512, 513, 1024, 1025, 513)]
    for place, prompt in enumerate(prompts):
        asked = request(f"r{place}", prompt, 10 if real else 40, **GREEDY)
        assert_as_alone(windowed, [asked], run(engine, [asked]))
    assert engine.stats().prefix_hit_tokens >= 1199 + 700
    if not real:
        again = [request(f"a{place}", prompt, 4, **GREEDY) for place, prompt in enumerate(prompts[-2:])]
        assert_as_alone(windowed, again, run(engine, again))


# --- figures


def figures(server: Server) -> dict[str, float]:
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line and line[0] != "#"]
    return {line.rpartition(" ")[0].replace('model_name="smollm2-135m"', ""): float(line.split()[-1]) for line in lines}


def test_time_to_first_token_is_the_client_s(server: Server) -> None:
    before = figures(server)
    started = time.perf_counter()
    body = {"prompt": [11, *range(2000, 2699)], "max_tokens": 3, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", PLAIN, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        seen = time.perf_counter() - started
        list(lines)
    after = figures(server)
    told = after["vllm:time_to_first_token_seconds_sum{}"] - before["vllm:time_to_first_token_seconds_sum{}"]
    assert seen - 0.1 < told < seen


def test_counters_tell_how_requests_ended(server: Server) -> None:
    server.idle()
    before = figures(server)
    for _ in range(5):
        server.post({"prompt": "x", "max_tokens": 4, "ignore_eos": True})
    for _ in range(3):
        server.post({"prompt": "x", "temperature": 9}, status=400)
    for _ in range(2):
        server.post({"prompt": ["x"] * 10, "n": 128}, status=400)
    with ThreadPoolExecutor(12) as threads:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        for _ in range(12):
            threads.submit(leave_midway, server, body)
    server.idle()
    after = figures(server)
    rise = {name: after[name] - before.get(name, 0) for name in after}

    def of(prefix: str) -> dict[str, float]:
        return {name: value for name, value in rise.items() if name.startswith(prefix) and value}

    assert sorted(of("vllm:request_success").values()) == [5, 12]
    assert rise['vllm:request_success_total{finished_reason="abort",}'] == 12
    assert rise['vllm:request_success_total{finished_reason="length",}'] == 5
    assert list(of("tricorn:request_errors_total").values()) == [5]
    assert rise["vllm:time_to_first_token_seconds_count{}"] == 17
    assert rise["vllm:e2e_request_latency_seconds_count{}"] == 5
    assert rise["vllm:prompt_tokens_total{}"] == 17
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert after[f'vllm:{name}_seconds_bucket{{le="+Inf",}}'] == after[f"vllm:{name}_seconds_count{{}}"]
    tokens = rise["vllm:generation_tokens_total{}"]
    assert tokens >= 17 + rise["vllm:inter_token_latency_seconds_count{}"]
    assert tokens >= 5 * 4 + 12


def leave_midway(server: Server, body: dict[str, Any]) -> None:
    with httpx.stream("POST", server.url + PLAIN, json=body, timeout=20) as answer:
        next(answer.iter_lines())


def test_clients_that_leave_while_they_wait(server: Server) -> None:
    """More sequences than run at once: some are in the queue when their client goes."""
    before = figures(server)['vllm:request_success_total{finished_reason="abort",}']
    leave(server, {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "n": 100}, 0.4)
    leave(server, {"prompt": [13, *range(3000, 6000)], "max_tokens": 4000}, 0.2)
    server.idle()
    assert figures(server)['vllm:request_success_total{finished_reason="abort",}'] == before + 101
    server.alive()


def test_a_full_queue_refuses_before_any_work() -> None:
    class Counting(Tokenizer):
        encoded = 0

        def encode(self, *args: Any, **options: Any) -> list[int]:
            Counting.encoded += 1
            return super().encode(*args, **options)

    limits = Limits(context=32768, vocab=512, max_sequences=2, max_tokens=512, max_rows=64)
    known = EngineInfo(model="m", limits=limits, pages=9, page_size=16, page_bytes=1, executor="x", threads=1)
    engine = ScriptedEngine([5] * 9, delay=0.2, info=known)
    body = {"prompt": "word " * 3000, "max_tokens": 3}

    async def post(http: httpx.AsyncClient, **more: Any) -> tuple[int, float]:
        started = time.perf_counter()
        answer = await http.post(PLAIN, json={**body, **more})
        return answer.status_code, time.perf_counter() - started

    async def work(http: httpx.AsyncClient) -> None:
        answers = await asyncio.gather(*(post(http) for _ in range(40)))
        assert sorted(status for status, _ in answers) == [200] * 6 + [429] * 34
        assert max(seconds for status, seconds in answers if status == 429) < 0.5
        assert Counting.encoded == 6
        four = [asyncio.create_task(post(http)) for _ in range(4)]
        await asyncio.sleep(0.1)
        assert (await post(http, n=3))[0] == 429
        assert (await post(http, n=2))[0] == 200
        await asyncio.gather(*four)
        assert (await post(http))[0] == 200

    drive(work, engine, tokenizer=Counting(BYTES.to_str()), max_waiting=4)


# --- the process


def test_a_stopped_engine_is_noticed(own: Server) -> None:
    """SIGSTOP: readiness falls in some five seconds, then another engine gives the rest of the stream."""
    body = greedy("Snow is", 300, ignore_eos=True)
    undisturbed = own.choice(body)["text"]
    (engine,) = own.children()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(own.chunks, body)
        time.sleep(0.3)
        os.kill(engine, signal.SIGSTOP)
        stopped = time.monotonic()
        assert own.http.get("/ready").status_code == 200  # a moment is no stall
        while own.http.get("/ready").status_code == 200:
            assert time.monotonic() - stopped < 8
            time.sleep(0.02)
        assert time.monotonic() - stopped > 3
        assert own.http.get("/health").status_code == 200
        assert "".join(chunk["choices"][0]["text"] for chunk in running.result()) == undisturbed
    assert not Path(f"/proc/{engine}").exists()
    own.alive()


def test_a_pause_of_the_engine_is_survived(server: Server) -> None:
    (engine,) = server.children()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(server.choice, greedy("Snow is", 60, ignore_eos=True))
        time.sleep(0.1)
        os.kill(engine, signal.SIGSTOP)
        time.sleep(2)
        os.kill(engine, signal.SIGCONT)
        assert running.result()["finish_reason"] == "length"
    server.alive()


def test_a_busy_server_is_healthy(server: Server) -> None:
    async def work() -> None:
        async with httpx.AsyncClient(base_url=server.url, limits=httpx.Limits(max_connections=None)) as http:
            body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}
            tasks = [asyncio.create_task(http.post(PLAIN, json=body, timeout=60)) for _ in range(200)]
            await asyncio.sleep(0.5)
            for _ in range(5):
                started = time.perf_counter()
                assert (await http.get("/health")).status_code == 200
                assert time.perf_counter() - started < 1
                await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(work())
    server.idle()


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def test_a_signal_amid_loading_leaves_nothing() -> None:
    model = pulled("smollm2-135m")
    source = str(Path(__file__).parent.parent / "src")
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": folder}
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, model], env=environment, stdout=subprocess.DEVNULL)
        while not (engine := children(process.pid)):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(3) == 0
        assert list(Path(folder).iterdir()) == []
    end = time.monotonic() + 3
    while any(Path(f"/proc/{pid}").exists() for pid in engine):
        assert time.monotonic() < end
        time.sleep(0.05)


# --- loading


def test_two_starts_build_one_engine(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "llama")
    code = "import sys; from tricorn.compiler import ensure; print(ensure(sys.argv[1], False))"
    source = str(Path(__file__).parent.parent / "src")
    environment = {**os.environ, "TRICORN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": source}
    command = [sys.executable, "-c", code, str(folder)]
    starts = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {start.communicate()[0].strip() for start in starts}
    assert [start.returncode for start in starts] == [0, 0]
    (path,) = paths
    assert list((tmp_path / "cache" / "engines").iterdir()) == [Path(path)]


def cut(folder: Path) -> str:
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1024])
    return path.name


def without(folder: Path) -> str:
    (folder / "model-00002-of-00002.safetensors").unlink()
    return "model-00002-of-00002.safetensors"


def unknown(folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"llama"', '"mamba"'))
    return "mamba"


@pytest.mark.parametrize("damage", [cut, without, unknown])
def test_a_damaged_model_does_not_start(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    folder = write_folder(tmp_path / "model", "llama", shards=2)
    named = damage(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    source = str(Path(__file__).parent.parent / "src")
    environment = {**os.environ, "TRICORN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": source}
    command = [sys.executable, "-m", "tricorn.cli", "serve", str(folder), "--port", str(port)]
    start = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10, check=False)
    assert start.returncode == 1
    assert named in start.stderr
    assert len(start.stderr.strip().splitlines()) == 1
    assert not list((tmp_path / "cache").glob("engines/*"))
