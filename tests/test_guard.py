"""Who may come in, on whose account, and how much they may ask for."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from served import served
from test_frontend_text import CHATML
from test_server_api import BPE, CHAT, HI, ScriptedEngine, client_of, drive
from tricorn.frontend.generate import Frontend
from tricorn.frontend.template import ChatTemplate
from tricorn.request import TricornError
from tricorn.server import protocol
from tricorn.server.app import ServerOptions, create_app
from tricorn.server.errors import HttpError
from tricorn.server.exchange import Exchange
from tricorn.server.guard import Guard, GuardOptions, read_keys, unguarded
from tricorn.server.protocol import BoundedHttp
from tricorn.server.rates import MINUTE, RateOptions, Rates, duration
from tricorn.server.serve import tls_of

PLAIN = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 1}
KEYS = ("sk-first-of-two", "sk-second-of-two")


def app_of(**options: Any) -> Any:
    frontend = Frontend(BPE, ChatTemplate(CHATML, BPE), ScriptedEngine([5]))
    return create_app(frontend, ServerOptions(name="m", **options))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# --- access

OPEN = {"/health", "/ready", "/api/version", "/v2/health/live", "/v2/health/ready", "/docs", "/openapi.json"}
OPEN |= {"/console", "/console/{file}", "/version"}
ADMIN = {"/debug/state", "/debug/abort"}


def test_every_route_has_a_rule_and_keeps_it() -> None:
    """Every route that is registered, under whatever application, over HTTP without a key and with each."""
    app = app_of(api_keys=KEYS, admin_key="sk-admin")
    operations = {(operation.method, operation.path): operation for operation in app.state.api.operations}
    found = set()
    for route in app.routes:
        assert isinstance(route, Route), f"{route} is registered in a way that states no rule of access"
        for method in route.methods - {"HEAD"}:
            operation = operations[method, route.path]
            assert operation.access in ("open", "key", "admin")
            assert operation.access == ("open" if route.path in OPEN else "admin" if route.path in ADMIN else "key")
            found.add((method, route.path))
    assert found == set(operations)

    async def work() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            for (method, path), operation in operations.items():
                path = path.replace("{model:path}", "m").replace("{version}", "1").replace("{id:path}", "m")
                for given in ({}, bearer("sk-wrong"), {"x-api-key": "sk-wrong"}, {"authorization": "Basic eDp4"}):
                    answer = await http.request(method, path, headers=given, json=BODY if method == "POST" else None)
                    assert (answer.status_code == 401) == (operation.access != "open"), (method, path)
                    assert (answer.headers.get("www-authenticate") == "Bearer") == (answer.status_code == 401)
                key = "sk-admin" if operation.access == "admin" else KEYS[1]
                answer = await http.request(method, path, headers=bearer(key), json=BODY if method == "POST" else None)
                assert answer.status_code not in (401, 403), (method, path)
                if operation.access == "admin":
                    assert (await http.request(method, path, headers=bearer(KEYS[0]))).status_code == 401

    asyncio.run(work())


def test_either_header_and_any_key() -> None:
    engine = ScriptedEngine([5])

    async def work(http: httpx.AsyncClient) -> None:
        for headers in (
            bearer(KEYS[0]),
            bearer(KEYS[1]),
            {"authorization": f"bearer  {KEYS[0]} "},
            {"x-api-key": KEYS[1]},
            {"x-api-key": KEYS[1], "authorization": "Bearer EMPTY"},
            bearer("sk-admin"),
        ):
            assert (await http.post(PLAIN, json=BODY, headers=headers)).status_code == 200
        for headers in (
            bearer(""),
            bearer(KEYS[0][:-1]),
            bearer(KEYS[0] + "x"),
            bearer(" ".join(KEYS)),
            {"authorization": KEYS[0]},
            {"authorization": f"Basic {KEYS[0]}"},
            {"x-api-key": ""},
        ):
            assert (await http.post(PLAIN, json=BODY, headers=headers)).status_code == 401, headers
        twice = [("x-api-key", KEYS[0]), ("x-api-key", "other")]
        assert (await http.post(PLAIN, json=BODY, headers=twice)).status_code == 400

    drive(work, engine, api_keys=KEYS, admin_key="sk-admin")
    assert len(engine.requests) == 6


def test_refusals_have_the_shape_of_their_protocol() -> None:
    async def work(http: httpx.AsyncClient) -> None:
        answer = await http.post(CHAT, json={"messages": HI})
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        answer = await http.post("/v1/messages", json={})
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "authentication_error"
        for path in ("/api/chat", "/v2/models/m/infer"):
            assert list((await http.post(path, json={})).json()) == ["error"]

    drive(work, ScriptedEngine([5]), api_keys=KEYS)


def test_the_key_is_the_tenant() -> None:
    """Holders of different keys share no cached pages, whatever they claim to be."""
    engine = ScriptedEngine([5])

    async def work(http: httpx.AsyncClient) -> None:
        for key in (KEYS[0], KEYS[1], KEYS[0]):
            for path, body in ((PLAIN, BODY), ("/v1/messages", {"model": "m", "messages": HI, "max_tokens": 1})):
                headers = {"x-api-key": key, "x-tenant": "somebody"}
                assert (await http.post(path, json=body, headers=headers)).status_code == 200

    drive(work, engine, api_keys=KEYS)
    tenants = [request.service.namespace.tenant for request in engine.requests]
    assert tenants[0] == tenants[1] == tenants[4] != tenants[2]
    assert len(set(tenants)) == 2
    assert not any(key in tenant for key in KEYS for tenant in tenants)


def test_without_keys_a_header_names_the_tenant() -> None:
    engine = ScriptedEngine([5])

    async def work(http: httpx.AsyncClient) -> None:
        for headers in ({"x-tenant": "a"}, {}, bearer("anything")):
            assert (await http.post(PLAIN, json=BODY, headers=headers)).status_code == 200

    drive(work, engine)
    assert [request.service.namespace.tenant for request in engine.requests] == ["a", "", ""]


def test_keys_are_never_told(caplog: pytest.LogCaptureFixture) -> None:
    secret = "sk-ABCDEFGHIJKLMNOP"
    options = ServerOptions(name="m", api_keys=(secret,), admin_key=secret + "-admin")
    assert "ABCDEF" not in repr(options) + repr(options.guard)
    told = []

    async def work(http: httpx.AsyncClient) -> None:
        for key in (secret, secret + "x"):
            for path in (PLAIN, "/metrics", "/nowhere", "/debug/state"):
                answer = await http.post(path, json=BODY, headers={**bearer(key), "x-api-key": key})
                told.append(answer.text + str(answer.headers))
        for path in ("/metrics", "/debug/state"):
            told.append((await http.get(path, headers=bearer(secret + "-admin"))).text)

    caplog.set_level(logging.DEBUG)
    drive(work, ScriptedEngine([5]), api_keys=(secret,), admin_key=secret + "-admin")
    assert "ABCDEF" not in "".join(told) + caplog.text + "".join(str(vars(record)) for record in caplog.records)


def test_keys_from_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-a\n\n  sk-b \nsk-a\n")
    assert read_keys(["sk-c", f"@{file}"]) == ("sk-c", "sk-a", "sk-b")
    assert read_keys([]) == ()
    file.write_text("# none\n")
    for text in (f"@{file}", "@/nowhere", "", "a b", "é", "\x07"):
        with pytest.raises(TricornError, match="API key"):
            read_keys([text])


def test_a_warning_when_anybody_may_come() -> None:
    for host, keys, warned in (
        ("127.0.0.1", (), False),
        ("localhost", (), False),
        ("::1", (), False),
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("192.168.1.7", (), True),
        ("0.0.0.0", KEYS, False),
    ):
        assert (unguarded(GuardOptions(keys, host=host)) is not None) == warned


# --- rates


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def refusal(work: Callable[[], None]) -> int | None:
    """After how many seconds to ask again; None when it is not refused."""
    try:
        work()
    except HttpError as error:
        return int(dict(error.headers)[b"retry-after"]) if error.status == 429 else 0
    return None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_minute_has_more_requests_than_two_buckets(data: st.DataObject) -> None:
    """Over any span: at most a full bucket, and what flowed in meanwhile. Whoever waits as told is let in."""
    clock, limit = Clock(), data.draw(st.integers(1, 50))
    rates = Rates(RateOptions(requests=limit), clock)
    allowed: list[float] = []
    for pause in data.draw(st.lists(st.floats(0, 30), min_size=1, max_size=60)):
        clock.now += pause
        wait = refusal(lambda: rates.request("a"))
        if wait is not None:
            assert 1 <= wait <= MINUTE
            clock.now += wait
            rates.request("a")
        allowed.append(clock.now)
        rates.request(f"somebody else at {clock.now}")  # nobody's limit is another's
    for first, start in enumerate(allowed):
        for last in range(first, len(allowed)):
            assert last - first + 1 <= limit + limit * (allowed[last] - start) / MINUTE + 1e-6


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_tokens_are_reserved_and_settled(data: st.DataObject) -> None:
    """What is used over any time is at most a bucket, what flowed in, and what the last one used beyond a bucket."""
    clock, limit = Clock(), data.draw(st.integers(10, 1000))
    rates = Rates(RateOptions(tokens=limit), clock)
    used, start, beyond = 0, clock.now, 0
    running = []
    for _ in range(data.draw(st.integers(1, 40))):
        clock.now += data.draw(st.floats(0, 20))
        if running and data.draw(st.booleans()):
            reservation, tokens = running.pop(data.draw(st.integers(0, len(running) - 1)))
            spent = data.draw(st.integers(0, tokens))
            reservation.settle(spent)
            reservation.settle(spent)  # counts once
            used += spent
            beyond += max(0, spent - limit)
        else:
            tokens = data.draw(st.integers(1, 2 * limit))
            if refusal(lambda: running.append((rates.reserve("a", tokens), tokens))) is not None:  # noqa: B023
                assert running or used
        assert used <= limit + limit * (clock.now - start) / MINUTE + beyond + 1e-6
    for reservation, _ in running:
        reservation.settle(0)
    clock.now += 100 * MINUTE
    assert dict(rates.headers("a"))[b"x-ratelimit-remaining-tokens"] == b"%d" % limit


def test_a_large_generation_is_let_in_when_the_bucket_is_full() -> None:
    clock = Clock()
    rates = Rates(RateOptions(tokens=60), clock)
    rates.reserve("a", 1000).settle(90)  # a debt of 30
    with pytest.raises(HttpError, match="60 tokens per minute") as refused:
        rates.reserve("a", 1)
    assert dict(refused.value.headers)[b"retry-after"] == b"31"
    clock.now += 31
    rates.reserve("a", 1)


def test_durations() -> None:
    values = (0, 0.02, 1, 1.5, 59.999, 60, 361)
    assert [duration(value) for value in values] == ["0ms", "20ms", "1s", "1.5s", "1m0s", "1m0s", "6m1s"]


def test_rates_over_http() -> None:
    engine = ScriptedEngine(BPE.encode("one two three"))

    async def work(http: httpx.AsyncClient) -> None:
        body = {"prompt": [5] * 10, "max_tokens": 40}
        answer = await http.post(PLAIN, json=body, headers=bearer(KEYS[0]))
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == "2"
        assert answer.headers["x-ratelimit-reset-requests"].startswith(("20s", "19.9"))
        assert answer.headers["x-ratelimit-limit-tokens"] == "100"
        used = answer.json()["usage"]["total_tokens"]
        answer = await http.post(PLAIN, json={**body, "stream": True}, headers=bearer(KEYS[0]))
        assert answer.status_code == 200
        assert abs(int(answer.headers["x-ratelimit-remaining-tokens"]) - (100 - used - 50)) <= 1
        answer = await http.post(PLAIN, json={**body, "max_tokens": 80}, headers=bearer(KEYS[0]))
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert "tokens" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) > 0
        answer = await http.post("/v1/messages", json={}, headers=bearer(KEYS[0]))
        assert answer.status_code == 429
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await http.get("/v1/models", headers=bearer(KEYS[0]))).status_code == 200
        assert (await http.post(PLAIN, json=body, headers=bearer(KEYS[1]))).status_code == 200
        text = (await http.get("/metrics", headers=bearer(KEYS[1]))).text
        assert 'tricorn:requests_refused_total{model_name="m",reason="rate"} 2.0' in text

    drive(work, engine, api_keys=KEYS, rate_limit_requests=3, rate_limit_tokens=100)


def test_what_was_refused_later_costs_no_tokens() -> None:
    async def work(http: httpx.AsyncClient) -> None:
        for _ in range(3):
            answer = await http.post(PLAIN, json={"prompt": "x", "max_tokens": 1, "stop_token_ids": [10**6]})
            assert answer.status_code == 400
        answer = await http.get("/v1/models")
        assert answer.headers["x-ratelimit-remaining-tokens"] == "100"

    drive(work, ScriptedEngine([5]), rate_limit_tokens=100)


def test_the_guard_counts_only_what_is_counted() -> None:
    guard = Guard(GuardOptions(rates=RateOptions(requests=1)), Clock())

    def exchange() -> Exchange:
        return Exchange({"type": "http", "headers": []}, None, None)  # type: ignore[arg-type]

    for _ in range(3):
        guard.admit(exchange(), "key", counted=False)
        guard.admit(exchange(), "open")
    guard.admit(exchange(), "key")
    with pytest.raises(HttpError):
        guard.admit(exchange(), "key")
    assert client_of is not None


# --- over the network


@dataclass
class Node:
    """An application behind the server's own HTTP."""

    app: Any

    async def __aenter__(self) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(self.app, http=BoundedHttp, lifespan="off", log_config=None, access_log=False)
        self.server = uvicorn.Server(config)
        self.task = asyncio.create_task(self.server.serve(sockets=[listener]))
        while not self.server.started:
            await asyncio.sleep(0.01)
        return int(listener.getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self.server.should_exit = True
        await self.task


async def answered(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """What comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


def test_slow_heads_do_not_hold_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    body = b'{"prompt": "x", "max_tokens": 30}'

    async def work() -> None:
        app = create_app(
            Frontend(BPE, ChatTemplate(CHATML, BPE), ScriptedEngine([5] * 40, delay=0.02)), ServerOptions(name="m")
        )
        async with Node(app) as port:
            started = time.monotonic()
            assert await answered(port) == b""
            assert (await answered(port, head)).startswith(b"HTTP/1.1 408 ")
            drops = [b"GET /health HTTP/1.1\r\n", b"x: y\r\n"]
            assert (await answered(port, *drops, pause=0.1)).startswith(b"HTTP/1.1 408 ")
            assert time.monotonic() - started < 5
            slow = await answered(
                port, head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )  # the answer may take longer than a head
            assert slow.startswith(b"HTTP/1.1 200 ")
            again = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            both = await answered(port, again, head, pause=0.1)
            assert both.startswith(b"HTTP/1.1 200 ")
            assert b"HTTP/1.1 408 " in both

    asyncio.run(work())


def test_too_many_headers() -> None:
    async def work() -> None:
        async with Node(app_of()) as port:
            for count, status in ((100, b"200"), (200, b"431")):
                head = b"GET /health HTTP/1.1\r\nconnection: close\r\n" + b"x: y\r\n" * count + b"\r\n"
                assert (await answered(port, head)).startswith(b"HTTP/1.1 " + status)

    asyncio.run(work())


def test_pages_of_other_origins_may_call_only_when_told() -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}

    async def closed(http: httpx.AsyncClient) -> None:
        for answer in (
            await http.options(PLAIN, headers=ask),
            await http.post(PLAIN, json=BODY, headers={**ask, **bearer(KEYS[0])}),
        ):
            assert not any(name.startswith("access-control") for name in answer.headers)

    async def opened(http: httpx.AsyncClient) -> None:
        answer = await http.options(PLAIN, headers={**ask, "access-control-request-headers": "authorization"})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        answer = await http.post(PLAIN, json=BODY, headers={**ask, **bearer(KEYS[0])})
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        answer = await http.post(PLAIN, json=BODY, headers=ask)
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        answer = await http.post(PLAIN, json=BODY, headers={"origin": "https://b.example", **bearer(KEYS[0])})
        assert "access-control-allow-origin" not in answer.headers

    drive(closed, ScriptedEngine([5]), api_keys=KEYS)
    drive(opened, ScriptedEngine([5]), api_keys=KEYS, cors_origins=("https://a.example",))


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """For 127.0.0.1, with its key."""
    tool = shutil.which("openssl")
    if tool is None:
        pytest.skip("openssl is needed to make a certificate")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [tool, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


def test_a_served_model_behind_keys_and_tls(
    engine_for: Callable[..., Any], certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real command, under OpenAI's and Triton's clients."""
    cert, key = certificate
    file = tmp_path / "keys"
    file.write_text("\n".join(KEYS))
    monkeypatch.setenv("TRICORN_API_KEY", f"@{file} sk-from-environment")
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--grpc-port", "0", "--rate-limit-requests", "5")
    with served(engine_for("llama")[1].path, *flags) as server:
        url = f"https://127.0.0.1:{server.port}"
        trusting = httpx.Client(verify=ssl.create_default_context(cafile=str(cert)))
        for secret in (*KEYS, "sk-from-environment"):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key=secret, http_client=trusting, max_retries=0)
            assert client.completions.create(model="small", prompt="x", max_tokens=2).usage is not None
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="sk-other", http_client=trusting, max_retries=0).models.list()
        for _ in range(4):
            client.completions.create(model="small", prompt="x", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as limited:
            client.completions.create(model="small", prompt="x", max_tokens=1)
        assert int(limited.value.response.headers["retry-after"]) <= 13
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{server.port}/health")
        assert httpx.get(f"{url}/health", verify=ssl.create_default_context(cafile=str(cert))).status_code == 200
        for pid in (server.pid, server.engine_pid):
            assert b"sk-" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_what_tls_needs(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    bad = tmp_path / "bad.pem"
    bad.write_text("nothing")
    for pair in ((cert, None), (None, key), (cert, bad), (bad, key), (cert, tmp_path / "none"), (cert, cert)):
        with pytest.raises(TricornError, match=r"tls|PEM"):
            tls_of(ServerOptions(name="m", tls_cert=pair[0], tls_key=pair[1]))
    assert tls_of(ServerOptions(name="m", tls_cert=cert, tls_key=key)) is not None
