"""The server as a process of its own, over real sockets, with a scripted engine inside."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from test_frontend_text import CHATML
from test_server_api import BPE, ScriptedEngine
from tricorn.frontend.generate import Frontend
from tricorn.frontend.template import ChatTemplate
from tricorn.request import Request, TricornError
from tricorn.server.app import ServerOptions
from tricorn.server.serve import listen, run

DEATH = "die"


def main() -> None:
    """The server process: 20 ms for a token; the prompt "die" kills the engine in its stream. A second argument says
    what else is so: loading is "slow", or has "failed" after a while, requests are "logged", or the engine takes long
    to end since it is "saving".
    """
    engine = ScriptedEngine(delay=0.02)

    def say(request: Request) -> list[int]:
        if request.prompt == BPE.encode(DEATH):
            engine.alive, engine.fail_after = False, 3
        return [BPE.encode("a")[0]] * 1000

    engine.say = say
    frontend = Frontend(BPE, ChatTemplate(CHATML, BPE), engine)
    how = sys.argv[2] if len(sys.argv) > 2 else ""
    if how == "saving":
        engine.close = lambda: time.sleep(20)  # type: ignore[method-assign]
    level = "info" if how == "logged" else "warning"
    options = ServerOptions(name="m", port=0, drain_seconds=3, log_level=level, log_format="json")
    try:
        listener = listen("127.0.0.1", int(sys.argv[1]))
    except TricornError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None

    async def loaded() -> Frontend:
        await asyncio.sleep(1.0 if how else 0.0)
        if how == "failed":
            raise TricornError("the model is broken")
        return frontend

    async def serve() -> int:
        return await run(loaded(), options, listener)

    try:
        raise SystemExit(asyncio.run(serve()))
    except TricornError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def memory(self) -> int:
        """Resident bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def start(port: int = 0, loading: str = "") -> Server:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "import test_server_http; test_server_http.main()", str(port), loading]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert process.stdout is not None
    if loading:
        return Server(process, port)
    line = process.stdout.readline()
    if "http://" not in line:
        return Server(process, 0)
    return Server(process, int(line.split(":")[-1].split("/")[0]))


def stop(server: Server) -> None:
    server.process.kill()
    server.process.communicate()


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    server = start()
    yield server
    stop(server)


@pytest.fixture
def own() -> Iterator[Server]:
    server = start()
    yield server
    stop(server)


def talk(server: Server, *parts: bytes, pause: float = 0.0, close_writing: bool = False) -> bytes:
    """Sends bytes as they are and reads until the server closes, or falls silent for a second."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(1.0)
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
        except (BrokenPipeError, ConnectionResetError):
            pass
        if close_writing:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        try:
            while data := connection.recv(65536):
                received += data
        except (TimeoutError, ConnectionResetError):
            pass
        return received


def status(answer: bytes) -> int:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head, answer[:300]
    assert b"\r\nx-request-id: req-" in head
    assert json.loads(body)["error"]["message"]
    return int(head.split()[1])


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def alive(server: Server) -> None:
    assert httpx.get(server.url + "/health", timeout=2).status_code == 200
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": "2+2=", "max_tokens": 1}, timeout=2)
    assert answer.status_code == 200


def test_broken_requests_get_an_answer(shared: Server) -> None:
    cases = [
        ([b"\x00\xff nonsense\r\n\r\n"], 400),
        ([b"GET / HTTP/9.9\r\n\r\n"], 400),
        ([HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd"], 400),
        ([HEAD + b"content-length: 5000000000\r\n\r\n" + b"x" * 1024], 413),
        ([HEAD + b'content-length: 5\r\n\r\n{"prompt": "x"}'], 400),
        ([HEAD + b"content-length: -5\r\n\r\n"], 400),
        ([HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"], 400),
        ([HEAD + b"x: " + b"y" * 40_000 + b"\r\ncontent-length: 2\r\n\r\n{}"], 431),
        ([HEAD + b"x: ", *[b"y" * 30_000] * 10], 431),
        ([HEAD, *[b"x%d: " % index + b"y" * 1000 + b"\r\n" for index in range(100)]], 431),
        ([b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n"], 431),
    ]
    for parts, expected in cases:
        answer = talk(shared, *parts, pause=0.001)
        first = answer[: answer.find(b"HTTP/1.1 ", 1)] if answer.find(b"HTTP/1.1 ", 1) > 0 else answer
        assert status(first) == expected, (parts[0][:80], answer[:200])
    alive(shared)


def test_requests_cut_short_get_an_answer(shared: Server) -> None:
    for request in (
        b"POST /v1/comp",
        HEAD,
        HEAD + b"content-length: 50\r\n\r\n{",
        HEAD + b"transfer-encoding: chunked\r\n\r\n",
    ):
        answer = talk(shared, request, close_writing=True)
        assert status(answer) == 400
    assert talk(shared, b"", close_writing=True) == b""
    for path in (b"/%ff%0a", b"/\xff", b"//v1/completions", b"/v1/completions/", b"*"):
        assert status(talk(shared, b"POST " + path + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")) in (
            400,
            404,
        )
    upgrade = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    assert talk(shared, upgrade).startswith(b"HTTP/1.1 200")
    assert talk(shared, b"HEAD /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").startswith(b"HTTP/1.1 200")
    alive(shared)


def test_endless_bodies_cost_no_memory(shared: Server) -> None:
    alive(shared)
    before = shared.memory()
    chunk = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
    answer = talk(shared, HEAD + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 100)
    assert status(answer) == 413
    text = b'{"prompt": "' + b"x" * (64 * 2**20) + b'"}'
    answer = talk(shared, HEAD + b"content-length: %d\r\n\r\n" % len(text), text)
    assert status(answer) == 413
    assert shared.memory() - before < 2 * 8 * 2**20 + 2**22
    alive(shared)


def test_others_are_served_while_a_long_prompt_is_read(shared: Server) -> None:
    def send() -> None:
        httpx.post(shared.url + "/v1/completions", json={"prompt": "ab" * 300_000}, timeout=10)

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
    slowest = 0.0
    with httpx.Client(base_url=shared.url) as http:
        for _ in range(10):
            started = time.perf_counter()
            assert http.get("/health").status_code == 200
            slowest = max(slowest, time.perf_counter() - started)
    for thread in threads:
        thread.join()
    assert slowest < 0.2


def test_connections_are_reused_after_errors_and_streams(shared: Server) -> None:
    with httpx.Client(base_url=shared.url) as http:
        for body, expected in (
            ({"prompt": "x", "n": 0}, 400),
            ({"prompt": "x", "max_tokens": 3, "stream": True}, 200),
            ({"prompt": "x", "max_tokens": 3}, 200),
        ):
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == expected
            assert "close" not in answer.headers.get("connection", "")


def metric(server: Server, series: str) -> float:
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(series))


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_closed_connections_abort(shared: Server, streamed: bool, half: bool) -> None:
    series = 'vllm:request_success_total{finished_reason="abort",model_name="m"}'
    before = metric(shared, series)
    body = json.dumps({"prompt": "x", "max_tokens": 200, "n": 2, "stream": streamed}).encode()
    connection = socket.create_connection(("127.0.0.1", shared.port))
    connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    time.sleep(0.2)
    connection.shutdown(socket.SHUT_WR) if half else connection.close()
    time.sleep(0.3)
    assert metric(shared, series) == before + 2
    connection.close()


def test_a_busy_port_is_one_clear_line(shared: Server) -> None:
    second = start(shared.port)
    _, errors = second.process.communicate(timeout=20)
    assert second.process.returncode == 1
    assert errors.count("\n") == 1
    assert f"port {shared.port}" in errors
    assert "in use" in errors


def test_a_signal_lets_streams_finish(own: Server) -> None:
    with httpx.stream(
        "POST", own.url + "/v1/completions", json={"prompt": "x", "max_tokens": 40, "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        own.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert own.process.wait(5) == 0
    again = start(own.port)
    assert again.port == own.port
    stop(again)


def test_new_requests_are_refused_while_others_finish(own: Server) -> None:
    body = {"prompt": "x", "max_tokens": 40, "stream": True}
    with httpx.Client(base_url=own.url) as http, http.stream("POST", "/v1/completions", json=body) as answer:
        assert http.get("/ready").json() == {"status": "ready"}
        lines = answer.iter_lines()
        next(lines)
        own.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        for streamed in (False, True):
            large = {**body, "stream": streamed, "prompt": "x" * 2**22}
            refused = httpx.post(own.url + "/v1/completions", json=large)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert refused.json()["error"]["code"] == "shutting_down"
            assert int(refused.headers["retry-after"]) > 0
        assert httpx.get(own.url + "/health").status_code == 200
        ready = http.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        assert metric(own, 'tricorn:requests_refused_total{model_name="m",reason="unavailable"}') == 2
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert own.process.wait(5) == 0


def test_the_drain_has_an_end(own: Server) -> None:
    whole: list[httpx.Response] = []
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    thread = threading.Thread(target=lambda: whole.append(httpx.post(own.url + "/v1/completions", json=body)))
    thread.start()
    with httpx.stream("POST", own.url + "/v1/completions", json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        own.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        rest = [line for line in lines if line]
    assert json.loads(rest[-1][6:])["error"]["code"] == "shutting_down"
    assert own.process.wait(5) == 0
    assert 2.5 < time.monotonic() - started < 5
    thread.join()
    assert (whole[0].status_code, whole[0].json()["error"]["code"]) == (503, "shutting_down")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def until_it_listens(server: Server) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            assert httpx.get(server.url + "/health").status_code == 200
            return
        except httpx.ConnectError:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_it_listens_while_it_loads() -> None:
    server = start(free_port(), "slow")
    try:
        until_it_listens(server)
        with httpx.Client(base_url=server.url) as http:
            assert http.get("/health").status_code == 200
            ready = http.get("/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "loading"})
            large = {"prompt": "x" * 2**22}
            for answer in (http.post("/v1/completions", json=large), http.get("/metrics")):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
                assert int(answer.headers["retry-after"]) > 0
                assert answer.headers["x-request-id"].startswith("req-")
            while http.get("/ready").status_code != 200:
                time.sleep(0.02)
        alive(server)
    finally:
        stop(server)


def test_a_signal_while_it_loads_ends_it() -> None:
    server = start(free_port(), "slow")
    until_it_listens(server)
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    output, errors = server.process.communicate(timeout=5)
    assert server.process.returncode == 0
    assert time.monotonic() - started < 0.9
    assert (output, errors) == ("", "")
    socket.create_server(("127.0.0.1", server.port)).close()


def test_a_second_signal_does_not_wait_for_the_engine() -> None:
    server = start(free_port(), "saving")
    until_it_listens(server)
    while httpx.get(server.url + "/ready").status_code != 200:
        time.sleep(0.02)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    server.process.communicate(timeout=5)
    assert server.process.returncode == 0
    assert time.monotonic() - started < 2


def test_requests_are_told_on_standard_error() -> None:
    server = start(free_port(), "logged")
    until_it_listens(server)
    while httpx.get(server.url + "/ready").status_code != 200:
        time.sleep(0.02)
    for streamed in (False, True):
        body = {"prompt": "somebody's secret", "max_tokens": 3, "stream": streamed}
        httpx.post(server.url + "/v1/completions", json=body, headers={"x-request-id": f"streamed {streamed}"})
    server.process.send_signal(signal.SIGTERM)
    _, errors = server.process.communicate(timeout=5)
    lines = [json.loads(line) for line in errors.splitlines()]
    assert [(line["id"], line["status"], line["output_tokens"]) for line in lines] == [
        ("streamed False", 200, 3),
        ("streamed True", 200, 3),
    ]
    assert "secret" not in errors


def test_a_model_that_does_not_load_ends_it() -> None:
    server = start(free_port(), "failed")
    output, errors = server.process.communicate(timeout=20)
    assert server.process.returncode == 1
    assert (output, errors) == ("", "the model is broken\n")


def test_a_second_signal_ends_at_once(own: Server) -> None:
    body = {"prompt": "x", "max_tokens": 200, "stream": True}
    with httpx.stream("POST", own.url + "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        own.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert own.process.poll() is None
        started = time.perf_counter()
        own.process.send_signal(signal.SIGTERM)
        assert own.process.wait(5) == 0
        assert time.perf_counter() - started < 2


def test_the_engine_s_death_ends_streams_and_the_server(own: Server) -> None:
    body = {"prompt": DEATH, "max_tokens": 50, "stream": True}
    answer = httpx.post(own.url + "/v1/completions", json=body)
    lines = [line for line in answer.text.split("\n\n") if line]
    assert "the engine died" in json.loads(lines[-1][6:])["error"]["message"]
    assert own.process.wait(5) == 1
    _, errors = own.process.communicate()
    request, last = errors.splitlines()
    assert json.loads(request)["error"] == "engine_failure"
    assert json.loads(last)["message"] == "the engine died; the server stops"
