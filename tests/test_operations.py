"""How a server behaves in service: who is let in, deadlines, what it tells about itself and to whom."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fake_executor import VOCAB, FakeExecutor
from test_frontend_text import CHATML
from test_server_api import BPE, CHAT, HI, ScriptedEngine, client_of, drive, events, info, post, refused, strict
from tricorn import cli
from tricorn.engine.client import InProcessClient
from tricorn.engine.factory import Opened
from tricorn.engine.gate import Gate, GateOptions, Refused, Ticket
from tricorn.engine.messages import EngineInfo, EngineStats
from tricorn.engine.options import EngineOptions
from tricorn.frontend.generate import Frontend
from tricorn.frontend.template import ChatTemplate
from tricorn.request import Output, Request, Timings, TricornError
from tricorn.runtime.step import PAGE, Step
from tricorn.scheduler.limits import Limits
from tricorn.server import logs, tracing
from tricorn.server.admin import read_key
from tricorn.server.app import ServerOptions, create_app

PLAIN = "/v1/completions"
SECRET = "the prompt of somebody"

# --- the gate


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_gate_keeps_its_books(data: st.DataObject) -> None:
    """Whatever comes and goes: bounds hold, refusals change nothing, and in the end nothing is left."""
    slots = data.draw(st.integers(1, 4))
    options = GateOptions(max_waiting=data.draw(st.integers(0, 5)), max_waiting_tokens=100, max_wait=0)
    now = 0.0
    gate = Gate(slots, options, lambda: now)
    stats = EngineStats(requests_per_second=data.draw(st.sampled_from([0.0, 0.5, 4.0])))
    tickets: list[tuple[Ticket, int, int]] = []  # with its tokens, and its sequences that wait
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.floats(0, 10))
        sequences = sum(ticket.sequences for ticket, _, _ in tickets)
        waiting = sum(tokens * left // ticket.sequences for ticket, tokens, left in tickets)
        assert (gate.sequences, gate.waiting_tokens) == (sequences, waiting)
        if not tickets or data.draw(st.booleans()):
            count, tokens = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 150))
            if sequences + count > slots + options.max_waiting:
                with pytest.raises(Refused) as error:
                    gate.enter(count, stats)
                assert error.value.reason == "sequences"
                continue
            ticket = gate.enter(count, stats)
            if waiting and waiting + tokens > options.max_waiting_tokens:
                with pytest.raises(Refused) as error, ticket:
                    ticket.queue(tokens, stats)
                assert error.value.reason == "tokens"
            else:
                ticket.queue(tokens, stats)
                tickets.append((ticket, tokens, count))
        else:
            place = data.draw(st.integers(0, len(tickets) - 1))
            ticket, tokens, left = tickets[place]
            if left and data.draw(st.booleans()):
                ticket.begin()
                tickets[place] = ticket, tokens, left - 1
            else:
                ticket.__exit__()
                del tickets[place]
    for ticket, _, _ in tickets:
        ticket.__exit__()
    assert (gate.sequences, gate.waiting_tokens) == (0, 0)


def refusal(gate: Gate, tokens: int, stats: EngineStats, sequences: int = 1) -> Refused | None:
    try:
        with gate.enter(sequences, stats) as ticket:
            ticket.queue(tokens, stats)
    except Refused as error:
        return error
    return None


def test_a_burst_is_counted_before_the_engine_knows_of_it() -> None:
    gate = Gate(2, GateOptions(max_waiting=4))
    with ExitStack() as let_in:
        for _ in range(6):
            let_in.enter_context(gate.enter(1, EngineStats(free_slots=2)))
        error = refusal(gate, 1, EngineStats(free_slots=2))
        assert error is not None
        assert (error.reason, error.retry_after) == ("sequences", 1.0)
        error = refusal(gate, 1, EngineStats(running=2, waiting=4, requests_per_second=0.5), sequences=3)
        assert error is not None
        assert error.retry_after == 6.0
    assert refusal(gate, 1, EngineStats()) is None


def test_the_wait_follows_from_the_measured_rates() -> None:
    options = GateOptions(max_waiting=100, max_wait=10)
    full = EngineStats(running=2, waiting=4, requests_per_second=0.5)
    gate = Gate(2, options)
    assert gate.wait(EngineStats(requests_per_second=0.5, free_slots=2)) == 0
    with ExitStack() as let_in:
        for _ in range(6):
            let_in.enter_context(gate.enter(1, full))
        assert gate.wait(full) == 8
        error = refusal(gate, 1, full)  # the seventh: five have to end before it has a slot
        assert error is None
        late = gate.enter(1, full)
        late.queue(1, full)
        error = refusal(gate, 1, full)  # the stats do not show the one that has just been let in
        assert error is not None
        assert (error.reason, error.retry_after) == ("time", 2.0)
        assert refusal(gate, 1, EngineStats(running=2, waiting=4)) is None  # nothing is known: nothing is claimed
        late.__exit__()
    prompts = Gate(8, options)
    costly = EngineStats(free_slots=8, prefill_token_seconds=0.1)
    assert refusal(prompts, 10**6, costly) is None  # nobody waits, so nobody would be served sooner
    with prompts.enter(1, costly) as first:
        first.queue(150, costly)
        error = refusal(prompts, 1, costly)
        assert error is not None
        assert (error.reason, error.retry_after) == ("time", 5.0)
        first.begin()
        assert refusal(prompts, 1, costly) is None


def test_a_quiet_hour_does_not_make_an_engine_slow() -> None:
    """Few requests came, so few ended; the slots, each held for two seconds, could have done more."""
    now = 0.0
    gate = Gate(10, GateOptions(max_wait=10), lambda: now)
    quiet = EngineStats(free_slots=0, running=10, requests_per_second=0.01)
    for _ in range(5):
        with gate.enter(1, quiet) as ticket:
            ticket.begin()
            now += 2.0
    with ExitStack() as let_in:
        for _ in range(20):
            let_in.enter_context(gate.enter(1, quiet))
        assert gate.wait(quiet) == pytest.approx(10 / 5)


# --- limits, over HTTP


async def until(condition: Any) -> None:
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError


class StatsEngine(ScriptedEngine):
    shown = EngineStats(free_slots=8)

    async def stats(self) -> EngineStats:
        return self.shown


@pytest.mark.parametrize(("reason", "options"), [("tokens", {"max_waiting_tokens": 40}), ("time", {"max_wait": 3.0})])
def test_waiting_prompts_are_bounded(reason: str, options: dict[str, Any]) -> None:
    engine = StatsEngine([5] * 9, delay=0.3)
    engine.shown = EngineStats(free_slots=8, prefill_token_seconds=0.125 if reason == "time" else 0.0)

    async def work(http: httpx.AsyncClient) -> None:
        body = {"prompt": [5] * 30, "max_tokens": 2}
        first = asyncio.create_task(http.post(PLAIN, json=body))
        await until(lambda: engine.requests)
        for streamed in (False, True):
            started = time.perf_counter()
            answer = await http.post(PLAIN, json={**body, "stream": streamed})
            assert time.perf_counter() - started < 0.1
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "overloaded"
            assert int(answer.headers["retry-after"]) >= 1
        assert (await first).status_code == 200
        assert len(engine.requests) == 1
        text = (await http.get("/metrics")).text
        assert f'tricorn:requests_refused_total{{model_name="m",reason="{reason}"}} 2.0' in text
        assert (await http.post(PLAIN, json=body)).status_code == 200

    drive(work, engine, **options)


def test_refusals_are_quick_under_load() -> None:
    engine = ScriptedEngine([5] * 100, delay=0.01, info=info(max_sequences=8))

    async def work(http: httpx.AsyncClient) -> float:
        running = [asyncio.create_task(http.post(PLAIN, json={"prompt": "x", "max_tokens": 90})) for _ in range(8)]
        await until(lambda: len(engine.requests) == 8)
        body = {"prompt": "word " * 200, "max_tokens": 3}
        seconds = []
        for _ in range(20):
            started = time.perf_counter()
            assert (await http.post(PLAIN, json=body)).status_code == 429
            seconds.append(time.perf_counter() - started)
        await asyncio.gather(*running)
        return sorted(seconds)[10]

    assert drive(work, engine, max_waiting=0) < 0.05


# --- how a request wants to be served


def test_what_a_request_wants_reaches_the_engine() -> None:
    engine = ScriptedEngine([5])

    async def work(http: httpx.AsyncClient) -> None:
        wants = {"priority": -7, "retention": 90, "pin_seconds": 60, "cache_salt": "s", "timeout": 30}
        started = time.monotonic()
        await http.post(PLAIN, json={"prompt": "x", **wants}, headers={"x-tenant": "t", "x-request-timeout": "5"})
        await http.post(PLAIN, json={"prompt": "x"}, headers={"x-request-timeout": "5.5"})
        await http.post(CHAT, json={"messages": HI, "priority": 100, "timeout": None})
        first, second, third = (request.service for request in engine.requests)
        assert (first.priority, first.retention, first.pin_seconds) == (-7, 90, 60.0)
        assert first.namespace == ("s", "t", "")
        assert 30 <= first.deadline - started < 31  # the field wins
        assert 5.5 <= second.deadline - started < 6.5
        assert (third.priority, third.deadline, third.retention, third.namespace) == (100, None, 50, ("", "", ""))

    drive(work, engine)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("timeout", [0, -1, 86_401, "5", True]),
        ("priority", [-101, 101, 1.5, "1"]),
        ("retention", [-1, 101, 0.5]),
        ("pin_seconds", [-1, 86_401, "1"]),
        ("cache_salt", ["", "x" * 129, 5]),
    ],
)
def test_wrong_wishes_are_named(field: str, values: list[Any]) -> None:
    for value in values:
        assert refused({"prompt": "x", field: value})["param"] == field


@pytest.mark.parametrize(
    ("header", "values"),
    [
        ("x-request-timeout", ["0", "-1", "1e3", "nan", "86401", "", "5 s", "1" * 400]),
        ("x-tenant", ["", "a b", "x" * 65, "\x7f", "é"]),
    ],
)
def test_wrong_headers_are_named(header: str, values: list[str]) -> None:
    engine = ScriptedEngine([5])

    async def work(http: httpx.AsyncClient) -> None:
        for value in values:
            given = [(header.encode(), value.encode())]
            answer = await http.post(PLAIN, json={"prompt": "x"}, headers=given)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, header), value
        twice = [(header.encode(), b"5"), (header.encode(), b"6")]
        assert (await http.post(PLAIN, json={"prompt": "x"}, headers=twice)).status_code == 400

    drive(work, engine)
    assert engine.requests == []


class SlowExecutor(FakeExecutor):
    def _run(self, step: Step) -> Any:
        time.sleep(0.01)
        return super()._run(step)


@pytest.fixture
def one_slot() -> Iterator[InProcessClient]:
    """A true engine that runs one sequence at a time, 10 ms for a token."""
    limits = Limits(context=512, vocab=VOCAB, max_sequences=1, max_tokens=64, max_rows=64)
    known = EngineInfo(model="m", limits=limits, pages=100, page_size=PAGE, page_bytes=1, executor="x", threads=1)
    client = InProcessClient(EngineOptions(path="", debug_checks=True), opened=Opened(SlowExecutor(100), known))
    yield client
    client.close()


def figures(text: str) -> dict[str, float]:
    """Every series; without the label that all have."""
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {re.sub(r'model_name="m",?', "", name).replace(",}", "}").replace("{}", ""): float(v) for name, v in pairs}


def test_deadlines(one_slot: InProcessClient) -> None:
    long = {"prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True}

    async def work() -> dict[str, float]:
        async with client_of(one_slot) as http:  # type: ignore[arg-type]
            running = asyncio.create_task(http.post(PLAIN, json=long))
            await asyncio.sleep(0.1)
            waiting = [
                asyncio.create_task(http.post(PLAIN, json={**long, "timeout": 0.1, "stream": streamed, "n": n}))
                for streamed in (False, True)
                for n in (1, 2)
            ]
            for answer in await asyncio.gather(*waiting):
                assert answer.status_code == 408
                assert answer.headers["content-type"] == "application/json"
                assert answer.json()["error"]["code"] == "request_timeout"
            assert (await running).json()["choices"][0]["finish_reason"] == "length"
            whole = (await http.post(PLAIN, json={**long, "max_tokens": 400, "timeout": 0.3})).json()
            assert whole["choices"][0]["finish_reason"] == "timeout"
            assert 0 < whole["usage"]["completion_tokens"] < 40
            chunks = events(await http.post(PLAIN, json={**long, "max_tokens": 400, "timeout": 0.3, "stream": True}))
            assert chunks[-1]["choices"][0]["finish_reason"] == "timeout"
            assert 0 < len(chunks) < 41
            return figures((await http.get("/metrics")).text)

    after = asyncio.run(work())
    assert after['vllm:request_success_total{finished_reason="timeout"}'] == 8
    assert after['tricorn:request_errors_total{status="408"}'] == 4
    assert after["vllm:request_queue_time_seconds_count"] >= 3
    assert after["vllm:request_prefill_time_seconds_count"] == 3
    assert after["vllm:e2e_request_latency_seconds_count"] == 3


def test_deadlines_hold_when_the_engine_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tricorn.server.exchange.GRACE_SECONDS", 0.1)
    engine = ScriptedEngine([5] * 9, delay=30)

    async def work(http: httpx.AsyncClient) -> None:
        for streamed in (False, True):
            started = time.perf_counter()
            answer = await http.post(PLAIN, json={"prompt": "x", "timeout": 0.1, "stream": streamed})
            assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
            assert 0.15 < time.perf_counter() - started < 5
        engine.delay = 0.05  # once there are tokens, it is the engine's to say what they are
        answer = await http.post(PLAIN, json={"prompt": "x", "timeout": 0.1, "max_tokens": 8})
        assert answer.json()["choices"][0]["finish_reason"] == "length"

    drive(work, engine)
    assert len(engine.aborted) == 2


def test_a_choice_in_time_is_answered_beside_one_that_is_too_late() -> None:
    class Late(ScriptedEngine):
        async def answer(self, request: Request) -> AsyncGenerator[Output, None]:
            if len(self.requests) == 1:
                yield Output(id=request.id, token_ids=[], finish_reason="timeout")
                return
            await asyncio.sleep(0.05)
            async for output in super().answer(request):
                yield output

    body = {"prompt": "x", "n": 2, "max_tokens": 3}
    for path, asked in ((PLAIN, body), (CHAT, {"messages": HI, "n": 2, "max_tokens": 3})):
        whole = strict(post(Late([5] * 3), path, asked).text)
        assert [choice["finish_reason"] for choice in whole["choices"]] == ["timeout", "length"]
        chunks = events(post(Late([5] * 3), path, {**asked, "stream": True}))
        reasons = {chunk["choices"][0]["index"]: chunk["choices"][0]["finish_reason"] for chunk in chunks}
        assert reasons == {0: "timeout", 1: "length"}


# --- health


def test_requests_wait_for_an_engine_that_is_restarted() -> None:
    class Restarting(ScriptedEngine):
        status = "restarting"

    async def work(http: httpx.AsyncClient) -> list[Any]:
        answers = [await http.get(path) for path in ("/health", "/ready")]
        answers.append(await http.post(PLAIN, json={"prompt": "x", "max_tokens": 2}))
        return [(answer.status_code, answer.json().get("status")) for answer in answers]

    assert drive(work, Restarting([5] * 3)) == [(200, "ok"), (503, "restarting"), (200, None)]
    dead = drive(work, ScriptedEngine([5] * 3, alive=False))
    assert dead == [(503, None), (503, "dead"), (503, None)]


# --- metrics


def test_counters_and_histograms_agree(one_slot: InProcessClient) -> None:
    def sums(now: dict[str, float]) -> tuple[float, float]:
        return now["vllm:request_prompt_tokens_sum"], now["vllm:request_generation_tokens_sum"]

    async def now_of(http: httpx.AsyncClient) -> dict[str, float]:
        return figures((await http.get("/metrics")).text)

    async def begin(http: httpx.AsyncClient) -> asyncio.Task[httpx.Response]:
        """A long request of 7 prompt tokens that has brought its first token."""
        begun = (await now_of(http))["vllm:time_to_first_token_seconds_count"]
        body = {"prompt": [5] * 7, "max_tokens": 400, "ignore_eos": True, "stream": True}
        task = asyncio.create_task(http.post(PLAIN, json=body))
        while (await now_of(http))["vllm:time_to_first_token_seconds_count"] == begun:
            await asyncio.sleep(0.01)
        return task

    async def leave(task: asyncio.Task[httpx.Response]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def work() -> None:
        async with client_of(one_slot, max_waiting=3) as http:  # type: ignore[arg-type]
            for _ in range(5):
                await http.post(PLAIN, json={"prompt": [5, 6], "max_tokens": 4, "ignore_eos": True})
            for _ in range(3):
                await http.post(PLAIN, json={"prompt": "x", "temperature": 9})
            for refused in (True, True, False, False, False):
                task = await begin(http)
                if refused:
                    assert (await http.post(PLAIN, json={"prompt": [5], "n": 4})).status_code == 429
                await leave(task)
            flying = await begin(http)
            now = await now_of(http)
            assert now["vllm:prompt_tokens_total"] == sums(now)[0] + 7
            assert now["vllm:generation_tokens_total"] > sums(now)[1]
            await leave(flying)
            await asyncio.sleep(0.1)
            now = await now_of(http)
            assert sums(now) == (now["vllm:prompt_tokens_total"], now["vllm:generation_tokens_total"])
            assert now['vllm:request_success_total{finished_reason="abort"}'] == 6
            assert now['vllm:request_success_total{finished_reason="length"}'] == 5
            assert now['tricorn:requests_refused_total{reason="invalid"}'] == 3
            assert now['tricorn:requests_refused_total{reason="sequences"}'] == 2
            assert now["vllm:request_prompt_tokens_count"] == 11
            assert now["vllm:time_to_first_token_seconds_count"] == 11
            assert now["vllm:e2e_request_latency_seconds_count"] == 5
            assert now["vllm:request_decode_time_seconds_count"] == 5
            assert now["vllm:iteration_tokens_total_count"] == sum(
                now[f'tricorn:steps_total{{kind="{kind}"}}'] for kind in ("prefill", "decode", "mixed")
            )
            for name in {name.split("_bucket{")[0] for name in now if "_bucket{" in name}:
                assert now[f'{name}_bucket{{le="+Inf"}}'] == now[f"{name}_count"], name
                assert now[f"{name}_sum"] >= 0

    asyncio.run(work())


def test_dashboards_find_what_they_ask_for() -> None:
    """The series of the usual dashboards are all there, and no label takes a client's words."""
    asked = [
        *[f"vllm:{name}_bucket" for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds")],
        *[f"vllm:{name}_bucket" for name in ("inter_token_latency_seconds", "request_time_per_output_token_seconds")],
        *[f"vllm:request_{tokens}_tokens_bucket" for tokens in ("prompt", "generation")],
        *[f"vllm:request_{phase}_time_seconds_sum" for phase in ("queue", "prefill", "decode", "inference")],
        *[f"vllm:{name}_total" for name in ("prompt_tokens", "generation_tokens", "request_success")],
        *[f"vllm:prefix_cache_{what}_total" for what in ("hits", "queries")],
        *["vllm:request_max_num_generation_tokens_sum", "vllm:num_preemptions_total", "vllm:kv_cache_usage_perc"],
        *[f"vllm:num_requests_{state}" for state in ("running", "waiting")],
    ]

    async def work(http: httpx.AsyncClient) -> str:
        word = "word-of-a-client"
        headers = {"x-request-id": word, "x-tenant": word, "user-agent": word, "traceparent": word}
        for more in ({}, {"model": word}, {word: 1}, {"stop": word}, {"cache_salt": word}, {"temperature": word}):
            await http.post(PLAIN, json={"prompt": word, "user": word, "max_tokens": 2, **more}, headers=headers)
        await http.get(f"/{word}", headers=headers)
        text = (await http.get("/metrics", headers=headers)).text
        assert word not in text
        return text

    series = {re.split(r"[{ ]", line)[0] for line in drive(work, ScriptedEngine([5] * 9)).splitlines()}
    assert set(asked) <= series


def test_phases_of_answers_that_a_stop_string_ended(one_slot: InProcessClient) -> None:
    """The engine never says how these ended; what it said with their first token counts."""

    async def work() -> dict[str, float]:
        async with client_of(one_slot) as http:  # type: ignore[arg-type]
            body = {"prompt": [5, 6], "max_tokens": 100, "ignore_eos": True, "seed": 1}
            whole = (await http.post(PLAIN, json=body)).json()["choices"][0]["text"]
            stopped = (await http.post(PLAIN, json={**body, "stop": [whole[20:24]]})).json()["choices"][0]
            assert stopped["finish_reason"] == "stop"
            return figures((await http.get("/metrics")).text)

    after = asyncio.run(work())
    for phase in ("queue", "prefill", "decode", "inference"):
        assert after[f"vllm:request_{phase}_time_seconds_count"] == 2
    assert after["vllm:request_decode_time_seconds_sum"] > 1.05  # 99 steps of 10 ms, and some more
    assert after['vllm:request_decode_time_seconds_bucket{le="0.05"}'] == 0


# --- looking inside


def test_the_state_is_shown_to_whom_it_concerns() -> None:
    engine = ScriptedEngine([5] * 99, delay=0.02)

    async def look(**options: Any) -> list[tuple[int, str]]:
        seen = []
        async with client_of(engine, **options) as http:
            for given in (
                {},
                {"authorization": "Bearer right"},
                {"authorization": "Bearer wrong"},
                {"authorization": "x"},
            ):
                answer = await http.get("/debug/state", headers=given)
                seen.append((answer.status_code, answer.text))
        return seen

    assert [status for status, _ in asyncio.run(look())] == [200] * 4
    assert [status for status, _ in asyncio.run(look(admin_key="right"))] == [401, 200, 401, 401]
    assert [status for status, _ in asyncio.run(look(admin_key="right", host="0.0.0.0"))] == [401, 200, 401, 401]
    public = asyncio.run(look(host="0.0.0.0"))
    assert [status for status, _ in public] == [403] * 4
    assert "--admin-key" in public[0][1]
    assert all(
        status == 200 for host in ("::1", "localhost", "127.0.0.7") for status, _ in asyncio.run(look(host=host))
    )
    assert "right" not in repr(ServerOptions(name="m", admin_key="right"))


def test_admin_keys_come_from_files(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    assert [read_key(text) for text in (None, "", "k", f"@{file}")] == [None, None, "k", "secret"]
    file.write_text("")
    for text in (f"@{file}", "@/nowhere", "two words", "é"):
        with pytest.raises(TricornError, match="admin key"):
            read_key(text)


def test_a_key_that_cannot_be_read_ends_the_start() -> None:
    for arguments, environment in ((["--admin-key", "@/nowhere"], {}), ([], {"TRICORN_ADMIN_KEY": "@/nowhere"})):
        result = CliRunner().invoke(cli.app, ["serve", "no-such-model", *arguments], env=environment)
        assert isinstance(result.exception, TricornError)
        assert "the admin key cannot be read from /nowhere" in str(result.exception)


def test_live_requests_are_shown() -> None:
    engine = ScriptedEngine([5] * 99, delay=0.02)

    async def work(http: httpx.AsyncClient) -> None:
        body = {"prompt": SECRET, "max_tokens": 20}
        running = asyncio.create_task(http.post(PLAIN, json=body, headers={"x-request-id": "mine"}))
        await asyncio.sleep(0.15)
        text = (await http.get("/debug/state")).text
        assert SECRET not in text
        assert json.loads(text)["engine"] == {"requests": 1}
        server = json.loads(text)["server"]
        mine = next(entry for entry in server["requests"] if entry["id"] == "mine")
        assert (mine["route"], mine["phase"], mine["prompt_tokens"]) == (PLAIN, "generating", len(BPE.encode(SECRET)))
        assert mine["age"] > 0.1
        assert mine["output_tokens"] > 0
        assert (server["status"], server["gate"]["sequences"]) == ("ready", 1)
        await running
        server = (await http.get("/debug/state")).json()["server"]
        assert [entry["route"] for entry in server["requests"]] == ["/debug/state"]
        assert (server["gate"]["sequences"], server["gate"]["waiting_tokens"]) == (0, 0)

    drive(work, engine)


# --- request ids


def test_every_answer_names_its_request() -> None:
    async def work(http: httpx.AsyncClient) -> None:
        calls = [
            ("POST", PLAIN, {"json": {"prompt": "x", "max_tokens": 2}}),
            ("POST", PLAIN, {"json": {"prompt": "x", "max_tokens": 2, "stream": True}}),
            ("POST", PLAIN, {"json": {"prompt": "x", "max_tokens": -2}}),
            ("POST", CHAT, {"content": b"{"}),
            *[("GET", path, {}) for path in ("/health", "/ready", "/metrics", "/v1/models", "/nothing", PLAIN)],
        ]
        for method, path, more in calls:
            for good in ("mine", "a b\"c'~", "x" * 128):
                answer = await http.request(method, path, headers={"x-request-id": good}, **more)
                assert answer.headers["x-request-id"] == good, path
            for bad in (b"x" * 129, b"\xff", b"a\tb", b"", None):
                headers = [] if bad is None else [(b"x-request-id", bad)]
                answer = await http.request(method, path, headers=headers, **more)
                assert re.fullmatch(r"req-[0-9a-f]{24}", answer.headers["x-request-id"]), (path, bad)
        big = await http.get("/health", headers={"x": "y" * 40_000, "x-request-id": "mine"})
        assert (big.status_code, big.headers["x-request-id"]) == (431, "mine")

    drive(work, ScriptedEngine([5] * 9))


# --- logs


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts to log; gives the lines so far, complete up to the last record."""
    reading, writing = os.pipe()
    writers: list[logs.Writer] = []
    received: list[bytes] = []

    class Errors:
        def fileno(self) -> int:
            return writing

    def read() -> None:
        while data := os.read(reading, 65536):
            received.append(data)

    thread = threading.Thread(target=read)
    thread.start()

    def begin(level: Any, form: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", Errors())
            writers.append(logs.configure(level, form))

        def finish() -> list[str]:
            writers[0].close()
            logs.log.removeHandler(writers[0])
            os.close(writing)
            thread.join(5)
            return b"".join(received).decode().splitlines()

        return finish

    yield begin
    os.close(reading)
    logs.log.propagate = True
    logs.log.setLevel(logging.NOTSET)


@dataclass
class TimedEngine(ScriptedEngine):
    async def answer(self, request: Request) -> AsyncGenerator[Output, None]:
        async for output in super().answer(request):
            ended = output.finish_reason is not None
            yield Output(
                id=output.id,
                token_ids=output.token_ids,
                finish_reason=output.finish_reason,
                stop_token=output.stop_token,
                cached_tokens=output.cached_tokens,
                timings=Timings(0.25, 0.5, 1.0) if ended else None,
            )


async def traffic(http: httpx.AsyncClient) -> None:
    named = {"x-request-id": "one two", "authorization": "Bearer KEY"}
    await http.post(PLAIN, json={"prompt": SECRET, "max_tokens": 4, "n": 2, "user": SECRET}, headers=named)
    await http.post(CHAT, json={"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2, "stream": True})
    await http.post(PLAIN, json={"prompt": SECRET, "model": "a\nb\x1b[31m" + SECRET})
    await http.get("/health")


def test_a_line_of_json_for_each_request(lines: Any) -> None:
    finish = lines("info", "json")
    drive(traffic, TimedEngine([5] * 9))
    text = finish()
    first, second, third = map(json.loads, text)
    assert SECRET not in "".join(text)
    assert "KEY" not in "".join(text)
    assert {key: first[key] for key in ("level", "message", "id", "route", "status")} == {
        "level": "info",
        "message": "request",
        "id": "one two",
        "route": PLAIN,
        "status": 200,
    }
    assert (first["output_tokens"], first["cached_tokens"], first["finish_reasons"]) == (8, 3, ["length", "length"])
    assert (first["queue_s"], first["prefill_s"], first["decode_s"]) == (0.25, 0.5, 1.0)
    assert first["total_s"] >= first["first_token_s"] > 0
    assert (second["route"], second["finish_reasons"], second["status"]) == (CHAT, ["length"], 200)
    assert (third["status"], third["error"]) == (404, "error")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])


def test_a_line_of_text_for_each_request(lines: Any) -> None:
    finish = lines("debug", "text")
    drive(traffic, TimedEngine([5] * 9))
    text = finish()
    assert len(text) == 4
    assert 'INFO request id="one two" route=/v1/completions status=200 prompt_tokens=' in text[0]
    assert "finish_reasons=length,length" in text[0]
    assert "DEBUG request" in text[3]
    assert all(line.isprintable() and SECRET not in line for line in text)


def test_failures_are_told_at_any_level(lines: Any) -> None:
    finish = lines("warning", "json")

    async def work(http: httpx.AsyncClient) -> None:
        for more in ({}, {"stream": True}, {"max_tokens": 1}, {"max_tokens": -1}):
            await http.post(PLAIN, json={"prompt": "x", "max_tokens": 9, **more})

    drive(work, ScriptedEngine([5] * 9, fail_after=2))
    told = [json.loads(line) for line in finish()]
    assert [(line["status"], line["error"], line["level"]) for line in told] == [
        (500, "engine_failure", "warning"),
        (200, "engine_failure", "warning"),
    ]


def test_nobody_waits_for_a_reader_of_the_log() -> None:
    reading, writing = os.pipe()
    writer = logs.Writer(logs.Text(), writing)
    try:
        started = time.perf_counter()
        for number in range(20_000):
            writer.emit(logging.LogRecord("x", logging.INFO, "", 0, "a line of some length %d", (number,), None))
        writer.close()
        assert time.perf_counter() - started < 5
    finally:
        os.close(reading)
        time.sleep(0.05)  # the writer sees a broken pipe
        os.close(writing)


# --- traces

needs_otel = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry.sdk") is None, reason="the extra otel is not installed"
)


@needs_otel
def test_each_generation_is_a_span() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    frontend = Frontend(BPE, ChatTemplate(CHATML, BPE), TimedEngine([5] * 9))
    app = create_app(frontend, ServerOptions(name="m"), tracing.Tracing(provider))

    async def work() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
            body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "temperature": 0.5}
            answer = await http.post(CHAT, json=body, headers={"traceparent": parent})
            assert answer.status_code == 200
            await http.post(PLAIN, json={"prompt": "x", "max_tokens": -1})
            await http.get("/health")
            await http.post(PLAIN, json={"prompt": "x", "max_tokens": 2}, headers={"traceparent": "nonsense"})

    asyncio.run(work())
    queue, prefill, decode, span, *_, other = exporter.get_finished_spans()
    assert [child.name for child in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert all(child.parent.span_id == span.context.span_id for child in (queue, prefill, decode))
    assert (span.name, other.name) == ("chat m", "text_completion m")
    assert f"{span.context.trace_id:x}" == "ab" * 16
    assert f"{span.parent.span_id:x}" == "cd" * 8
    assert other.parent is None
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    assert span.attributes["gen_ai.request.temperature"] == 0.5
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert span.attributes["gen_ai.response.id"].startswith("chatcmpl-")
    assert [event.name for event in span.events] == ["first token"]
    assert SECRET not in "".join(each.to_json() for each in exporter.get_finished_spans())


@needs_otel
def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        opened = tracing.open_tracing()
        assert opened is not None
        app = create_app(Frontend(BPE, None, TimedEngine([5] * 9)), ServerOptions(name="m"), opened)

        async def work() -> None:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
                await http.post(PLAIN, json={"prompt": "x", "max_tokens": 2})

        asyncio.run(work())
        opened.close()
        collector.shutdown()
        thread.join()
    ((path, body),) = received
    assert path == "/v1/traces"
    assert b"text_completion m" in body
    assert b"gen_ai.usage.output_tokens" in body


def test_a_missing_extra_is_one_clear_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert tracing.open_tracing({}) is None
    assert capsys.readouterr().err == ""
    assert tracing.open_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is None
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "tricorn[otel]" in line
