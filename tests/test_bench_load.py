"""The load commands in their short form, and the client against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

from tricorn.bench import soak, stalls, storm
from tricorn.bench.load import (
    BROKE_OFF,
    GAVE_UP,
    Client,
    Metrics,
    Result,
    Usage,
    closed_loop,
    draw,
    open_loop,
    percentile,
    poisson,
)
from tricorn.bench.server import ServerProcess, memory, open_files
from tricorn.request import TricornError
from tricorn.weights.hub import is_pulled

T = TypeVar("T")

MODEL = "smollm2-135m"
pulled = pytest.mark.skipif(not is_pulled(MODEL), reason=f"{MODEL} is not here: run tricorn pull {MODEL}")

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def against(reply: bytes, use: Callable[[Client], Awaitable[T]], *, hang: bool = False) -> tuple[T, bool]:
    """What a client makes of a server that sends this, byte by byte, and hangs up (or does nothing more); and whether
    the client has closed its connection."""
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            for place in range(len(reply)):
                writer.write(reply[place : place + 1])
                await writer.drain()
                await asyncio.sleep(0)
            while hang and await reader.read(1 << 16):
                pass
        except ConnectionError:
            pass
        closed.set()
        writer.close()

    async def main() -> tuple[T, bool]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            result = await use(Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            await asyncio.wait_for(closed.wait(), 5)
            return result, closed.is_set()

    return asyncio.run(main())


def stream(reply: bytes, give_up: float = 20.0, *, hang: bool = False) -> Result:
    return against(reply, lambda client: client.stream("/v1/completions", {"prompt": [1]}, give_up=give_up), hang=hang)[
        0
    ]


def event(end: bytes = b"\n\n", **fields: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": "é", "token_ids": [5, 6], **fields}]}).encode() + end


def whole(status: int, body: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 %d X" % status, b"content-type: application/json", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def test_a_stream_is_read() -> None:
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}}\n\n'
    result = stream(STREAM + b": hello\n\n" + event() + event(finish_reason="stop") + usage + DONE)
    assert result.complete
    assert (result.text, result.token_ids, result.counts) == ("éé", (5, 6, 5, 6), (2, 2))
    assert (result.usage, result.finish_reason, result.status) == (Usage(1, 4), "stop", 200)
    assert result.ttft is not None
    assert 0 < result.ttft <= result.seconds
    assert list(result.times) == sorted(result.times)
    assert result.tokens(result.sent, result.ended) == 4
    assert result.tokens(result.ended, result.ended + 1) == 0
    assert len(result.gaps(result.sent, result.ended)) == 1


def test_other_servers_shapes_are_read() -> None:
    chat = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\r\n\r\n'
    chat += b'event: x\r\ndata:{"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]}\r\n\r\n'
    result = stream(STREAM + chat + DONE)
    assert (result.complete, result.text, result.counts, result.token_ids) == (True, "a", (1,), ())
    body = b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}'
    result = stream(whole(200, body))
    assert (result.complete, result.text, result.usage) == (True, "hi", Usage(0, 2))
    chunked = STREAM.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n")
    data = event(finish_reason="stop") + DONE
    cut = data[:20], data[20:]
    result = stream(chunked + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in cut) + b"0\r\n\r\n")
    assert (result.complete, result.token_ids) == (True, (5, 6))
    assert stream(b"HTTP/1.1 100 Continue\r\n\r\n" + STREAM + data).complete


@pytest.mark.parametrize(
    ("reply", "status", "tokens", "error"),
    [
        (STREAM + event() + event(), 200, 2, BROKE_OFF),
        (STREAM + event(finish_reason="stop"), 200, 1, BROKE_OFF),
        (STREAM, 200, 0, BROKE_OFF),
        (STREAM + event() + b'data: {"error": {"message": "no more"}}\n\n' + DONE, 200, 1, "no more"),
        (STREAM + b'data: {"error": "plain"}\n\n' + event(finish_reason="stop") + DONE, 200, 0, "plain"),
        (STREAM + b"data: {nonsense\n\n", 200, 0, "cannot be read"),
        (STREAM + b'data: {"choices": 7}\n\n', 200, 0, "cannot be read"),
        (STREAM + b'data: {"choices": [{"text": "\xff"}]}\n\n', 200, 0, "cannot be read"),
        (whole(200, b"[]"), 200, 0, "no JSON"),
        (whole(200, b""), 200, 0, "no JSON"),
        (whole(400, b'{"error": {"message": "bad"}}'), 400, 0, "bad"),
        (whole(500, b"<html>"), 500, 0, "status 500"),
        (whole(429, b"{}", b"Retry-After: 7"), 429, 0, "status 429"),
        (whole(200, b"{}x")[:-2], 200, 0, BROKE_OFF),
        (b"HTTP/1.1 200 OK\r\ncontent-le", 0, 0, BROKE_OFF),
        (b"nonsense\r\n\r\n", 0, 0, "cannot be read"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 200, 0, "cannot be read"),
        (b"", 0, 0, BROKE_OFF),
    ],
)
def test_whatever_a_server_does_is_told(reply: bytes, status: int, tokens: int, error: str) -> None:
    result = stream(reply)
    assert (result.status, len(result.times)) == (status, tokens)
    assert error in result.error
    assert not result.complete
    assert result.retry_after == (7.0 if status == 429 else None)


def test_an_endless_line_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tricorn.bench.load.MAX_BODY", 1000)
    assert "without an end" in stream(STREAM + b"x" * 1500).error


def test_giving_up_closes_the_connection() -> None:
    result = stream(STREAM + event(), give_up=0.3, hang=True)
    assert (result.error, result.token_ids, result.complete) == (GAVE_UP, (5, 6), False)
    assert 0.25 < result.seconds < 5

    async def cancelled(client: Client) -> bool:
        task = asyncio.create_task(client.stream("/v1/completions", {"prompt": [1]}))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert against(STREAM + event(), cancelled, hang=True) == (True, True)


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        result = asyncio.run(Client(f"http://127.0.0.1:{bound.getsockname()[1]}").stream("/", {}))
    assert (result.status, result.complete) == (0, False)
    assert "the connection failed" in result.error
    with pytest.raises(TricornError, match="no address"):
        Client("localhost:8000")


def test_percentiles() -> None:
    assert [percentile([4, 1, 3, 2, 5], percent) for percent in (0, 50, 90, 100)] == [1, 3, pytest.approx(4.6), 5]
    assert percentile([7], 99) == 7
    assert percentile([], 50) == 0


def test_load_comes_as_told() -> None:
    moments = poisson(Random(1), 100.0, 20.0)
    assert moments == poisson(Random(1), 100.0, 20.0) == sorted(moments)
    assert 1800 < len(moments) < 2200
    assert moments[-1] < 20
    prompt = draw(Random(1), [3, 5], 17)
    assert (len(prompt), set(prompt)) == (17, {3, 5})
    under_way: list[int] = [0]

    async def send(number: int) -> int:
        under_way.append(under_way[-1] + 1)
        await asyncio.sleep(0.02)
        under_way.append(under_way[-1] - 1)
        return number

    begin = time.monotonic()
    assert asyncio.run(open_loop([0.0, 0.001, 0.2], send)) == [0, 1, 2]
    assert max(under_way) == 2
    assert time.monotonic() - begin >= 0.2
    done = asyncio.run(closed_loop(3, 0.1, send))
    assert sorted(done) == list(range(len(done)))
    assert max(under_way) == 3


def test_metrics_are_read() -> None:
    text = '# HELP a b\na{m="x",k="p"} 2.0\na{m="x",k="q"} 3e2\nab{m="x"} 7\nbare 1\n'
    metrics = Metrics(text)
    assert [metrics.value("a"), metrics.value("a", k="q"), metrics.value("bare"), metrics.value("c")] == [
        302,
        300,
        1,
        0,
    ]
    assert (metrics.label("a", "k"), metrics.label("c", "k")) == ("p", "")


def result(**fields: Any) -> Result:
    return Result(**{"status": 200, "sent": 0.0, "ended": 1.0, "finish_reason": "stop", "token_ids": (1, 2), **fields})


def test_the_soak_sees_what_is_wrong() -> None:
    wanted = result(text="ab", usage=Usage(1, 2))
    assert soak.judge(wanted, wanted, "right") == ""
    assert soak.judge(result(text="ab"), wanted, "right") == ""
    for other in ({"text": "a"}, {"token_ids": (1, 3)}, {"finish_reason": "length"}, {"usage": Usage(1, 3)}):
        assert "differs" in soak.judge(result(**{"text": "ab", **other}), wanted, "right")
    late = result(finish_reason="timeout", token_ids=(1,))
    assert soak.judge(late, wanted, "short of time") == ""
    assert soak.judge(late, wanted, "right")
    assert soak.judge(result(finish_reason="timeout", token_ids=(2,)), wanted, "short of time")
    assert soak.judge(result(status=408, error="late", finish_reason=None), wanted, "short of time") == ""
    assert soak.judge(result(status=500, error="broken", finish_reason=None), wanted, "given up")
    assert soak.judge(result(error=GAVE_UP, finish_reason=None, token_ids=()), wanted, "given up") == ""
    assert soak.judge(result(error=GAVE_UP, finish_reason=None, token_ids=()), wanted, "right")
    assert soak.judge(result(status=429, retry_after=1.0), wanted, "right") == ""
    assert soak.judge(result(status=429), wanted, "right")
    lines = 'tricorn:pages{state="free"} %d\ntricorn:pages{state="held"} %d\ntricorn:pages{state="cached"} 4\n'
    lines += 'vllm:cache_config_info{num_cpu_blocks="10"} 1.0\nvllm:num_requests_running %d\n'
    server: dict[str, Any] = {"requests": [1], "gate": {"sequences": 0, "waiting_tokens": 0}}
    assert soak.unrest(Metrics(lines % (6, 0, 0)), server) == []
    assert len(soak.unrest(Metrics(lines % (4, 1, 1)), {**server, "requests": [1, 2]})) == 4


def test_a_storm_is_judged() -> None:
    good = storm.Setting(
        goodput_tok_s=90.0, goodput_share=0.9, recomputed_share=0.01, offered=3, completed=1, rejected=2, timed_out=0,
        failed=0, preemptions=0, reject_ms_p50=1.0, reject_ms_p99=49.0, reject_ms_max=99.0, seconds_p50=1.0,
        seconds_p99=2.0,
    )  # fmt: skip
    assert storm.holds(good)
    for field, value in (("goodput_share", 0.89), ("recomputed_share", 0.02), ("reject_ms_p99", 50.0), ("failed", 1)):
        assert not storm.holds(storm.msgspec.structs.replace(good, **{field: value}))


# On a real server and model


@pulled
def test_a_server_process_leaves_nothing() -> None:
    async def main() -> tuple[list[int], int]:
        async with ServerProcess(MODEL, "--kv-bytes", "16M") as server:
            client = server.client
            assert (await client.fetch("GET", "/ready")).status == 200
            assert len(await client.vocabulary()) > 50
            assert await client.context() > 100
            assert (await client.metrics()).value("tricorn:pages") > 10
            first = server.engine()
            os.kill(first, signal.SIGKILL)
            again = await client.stream("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True})
            assert again.complete
            pids = [server.pid, first, server.engine()]
            assert pids[2] not in (0, first)
            assert memory(pids[0]) > 1 << 20 < memory(pids[2])
            assert open_files(pids[0]) > 3
            port = server.port
        assert server.code == 0
        return pids, port

    pids, port = asyncio.run(main())
    assert [memory(pid) for pid in pids] == [0, 0, 0]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with socket.socket() as free:
        assert free.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_that_cannot_start_is_told() -> None:
    async def main() -> None:
        async with ServerProcess("/nowhere/model.gguf"):
            pass

    with pytest.raises(TricornError, match="did not start"):
        asyncio.run(main())


def bench(*arguments: str) -> dict[str, Any]:
    """The report of a command, whatever it says of the speed of a busy machine."""
    command = [sys.executable, "-m", "tricorn.cli", "bench", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    return report


@pulled
def test_a_short_storm() -> None:
    report = bench("storm", "--short")
    for setting in (report, report["naive"]):
        ended = (setting[kind] for kind in ("completed", "rejected", "timed_out", "failed"))
        assert setting["offered"] == sum(ended)
        assert setting["failed"] == 0
        assert setting["completed"] > 0
        assert setting["goodput_share"] > 0
        assert 0 <= setting["recomputed_share"] < 1
    assert report["rejected"] > 0 < report["reject_ms_p99"]
    assert report["naive"]["rejected"] == 0
    assert report["offered"] == report["naive"]["offered"]


@pulled
def test_short_stalls() -> None:
    report = bench("stalls", "--short")
    for gaps in (report, report["unbounded"]):
        assert gaps["prompts"] > 0
        assert 0 < gaps["gap_ms_p50"] <= gaps["gap_ms_p99"] <= gaps["gap_ms_max"]
        assert gaps["ratio"] == pytest.approx(gaps["gap_ms_p99"] / gaps["gap_ms_p50"], rel=0.01)
        assert gaps["mixed_step_ms_mean"] > 0
    assert report["behind"]["long_ttft_s"] > 0 < report["behind"]["short_ttft_s"]


@pulled
def test_a_short_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a death of the engine in it."""
    monkeypatch.setattr(soak, "KILL_SHARE", 1.0)
    monkeypatch.setattr(soak, "CLIENTS", 6)
    told: list[str] = []
    report = soak.run(MODEL, 4 / 60, seed=3, tell=told.append, minute=2.0, entries=6)
    assert report.violations == []
    assert report.ok
    assert (len(report.minutes), report.kills, len(told)) == (2, 2, 3)
    assert report.requests > 10
    for minute in report.minutes:
        assert minute.server.memory > 1 << 20 < minute.engine.memory
        assert minute.answers.get("length", 0) + minute.answers.get("stop", 0) > 0


def test_what_stalls_measure_must_have_happened() -> None:
    running = result(error=GAVE_UP, finish_reason=None, times=(1.0, 2.0, 3.0), counts=(1, 1, 1))
    stalls._check([running], [result()], 9.0)
    for streams, prompts in (([result()], [result()]), ([result(status=500, error="x")], [result()]), ([running], [])):
        with pytest.raises(TricornError):
            stalls._check(streams, prompts, 9.0)
