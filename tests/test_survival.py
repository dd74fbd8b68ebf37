"""Engines that die, hang and run out of memory, in real processes: what clients see is what they would have seen."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_executor import expected
from tricorn.bench import drill
from tricorn.compiler import ensure
from tricorn.engine.client import InProcessClient, ProcessClient
from tricorn.engine.options import EngineOptions
from tricorn.engine.process import SILENT_SECONDS
from tricorn.request import Output, Request, SamplingParams, TricornError
from tricorn.runtime.step import PAGE
from tricorn.weights.hub import is_pulled

PAGES = 200
EOS = (0, 1)
POISON, HANG, MEMORY, FAULT = 90, 91, 92, 93
"""Seeds of requests that kill the engine process, hang it, and, as long as the file `once` is there, exhaust its memory
or fail in its loop."""

ENGINE = f"""
import os, signal, sys, time
from pathlib import Path
import tricorn.engine.__main__ as process
from tricorn.engine.engine import Engine
from tricorn.engine.messages import EngineInfo
from tricorn.request import TricornError
from tricorn.scheduler.limits import Limits
from tricorn.simulate.executor import VOCAB, FakeExecutor

class Faulty(FakeExecutor):
    def _run(self, step):
        time.sleep(0.005)
        seeds = set(step.sampling.seed.tolist())
        if {POISON} in seeds:
            os.kill(os.getpid(), signal.SIGSEGV)
        if {HANG} in seeds:
            time.sleep(1000)
        if {MEMORY} in seeds and once():
            raise MemoryError
        if {FAULT} in seeds and once():
            self.fault = True
        return super()._run(step)

class Fragile(Engine):
    def step(self):
        if getattr(self.executor, "fault", False):
            raise RuntimeError("the fault hook")
        return super().step()

def once():
    try:
        (Path(sys.argv[0]).parent / "once").unlink()
    except FileNotFoundError:
        return False
    return True

def open_engine(options):
    if (Path(sys.argv[0]).parent / "broken").exists():
        raise TricornError("the model is gone")
    limits = Limits(context={PAGES * PAGE}, vocab=VOCAB, max_sequences=8, max_tokens=64, max_rows=64, eos_ids={EOS})
    info = EngineInfo(model="fake", limits=limits, pages={PAGES}, page_size={PAGE}, page_bytes=1, executor="fake",
                      threads=1)
    return Fragile(Faulty({PAGES}), limits, debug=True), info

process.open_engine = open_engine
sys.exit(process.main())
"""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Engine processes run ENGINE: a fake executor with faults. Files in this folder direct it."""
    code, program = tmp_path / "engine.py", tmp_path / "python"
    code.write_text(ENGINE)
    program.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {code} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return tmp_path


@pytest.fixture
def client(room: Path) -> Iterator[ProcessClient]:
    client = ProcessClient(EngineOptions(path="", step_timeout=1.0))
    yield client
    client.close()
    assert not Path(f"/proc/{client.pid}").exists()


def request(id: str, prompt: list[int], tokens: int, seed: int = 5, **params: Any) -> Request:
    chosen = SamplingParams(**{"max_tokens": tokens, "ignore_eos": True, **params})
    return Request(id=id, prompt=prompt, params=chosen, seed=seed)


async def collect(client: ProcessClient | InProcessClient, request: Request) -> list[Output]:
    return [output async for output in client.submit(request)]


def ids(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def check(asked: Request, said: list[Output]) -> None:
    """The whole answer, each part of it once."""
    want = expected(asked, PAGES * PAGE, EOS)
    assert ids(said) == want.tokens
    assert [output.finish_reason for output in said] == [None] * (len(said) - 1) + [want.reason]
    if asked.params.logprobs is not None:
        scores = [(s.logprob, s.rank, s.top_ids, s.top_logprobs) for o in said for s in o.logprobs or []]
        assert scores == [(float(a), b, c, d) for a, b, c, d in want.logprobs]
    scored = [output.prompt_logprobs for output in said if output.prompt_logprobs is not None]
    assert len(scored) == (asked.params.prompt_logprobs is not None)
    assert len({output.cached_tokens for output in said}) == 1


def some_requests(count: int, tokens: int) -> list[Request]:
    rng = random.Random(3)
    return [
        request(
            f"r{i}",
            [2 + rng.randrange(80) for _ in range(1 + rng.randrange(70))],
            tokens + rng.randrange(tokens),
            logprobs=2 if i % 3 == 0 else None,
            prompt_logprobs=1 if i % 4 == 0 else None,
            ignore_eos=i % 5 != 0,
        )
        for i in range(count)
    ]


def within(seconds: float, work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, seconds))


async def status(client: ProcessClient, wanted: str, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while client.status != wanted:
        assert time.monotonic() < end, client.status
        await asyncio.sleep(0.01)


def test_streams_outlive_engines(client: ProcessClient) -> None:
    """A-093: kill -9, five times, with more streams than run at once: each gets what it would have got."""
    requests = some_requests(24, 120)

    async def main() -> None:
        tasks = [asyncio.create_task(collect(client, asked)) for asked in requests]
        rng = random.Random(1)
        for _ in range(5):
            await status(client, "ready")
            await asyncio.sleep(rng.uniform(0.05, 0.4))
            os.kill(client.pid, signal.SIGKILL)
            await status(client, "restarting")
        for asked, said in zip(requests, await asyncio.gather(*tasks), strict=True):
            check(asked, said)

    within(60, main())
    survival = client.survival
    assert survival.deaths == {"signal": 5}
    assert survival.restarts == 5
    assert survival.resumed_requests > 0
    assert survival.dropped_requests == 0
    assert 0 < survival.longest_pause < 20


def test_counters_go_on_after_a_death(client: ProcessClient) -> None:
    async def settled(tokens: int) -> None:
        while (await client.stats()).generated_tokens != tokens or (await client.stats()).running:
            await asyncio.sleep(0.01)

    async def main() -> None:
        await collect(client, request("a", [5] * 20, 30))
        await settled(30)
        os.kill(client.pid, signal.SIGKILL)
        await status(client, "restarting")
        stats = await client.stats()
        assert (stats.generated_tokens, stats.running, stats.pages_total) == (30, 0, PAGES)
        await collect(client, request("b", [5] * 20, 10))
        await settled(40)
        stats = await client.stats()
        assert stats.finished == {"length": 2}
        assert stats.pages_held == 0

    within(20, main())


def test_a_stopped_engine_is_replaced(client: ProcessClient) -> None:
    """A-093: SIGSTOP; the engine that has stopped is killed for good."""
    requests = some_requests(4, 200)

    async def main() -> int:
        tasks = [asyncio.create_task(collect(client, asked)) for asked in requests]
        await asyncio.sleep(0.3)
        stopped = client.pid
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        await status(client, "restarting")
        assert SILENT_SECONDS - 1.5 < time.monotonic() - began < SILENT_SECONDS + 3
        for asked, said in zip(requests, await asyncio.gather(*tasks), strict=True):
            check(asked, said)
        return stopped

    assert not Path(f"/proc/{within(30, main())}").exists()
    assert client.survival.deaths == {"silent": 1}
    assert client.survival.longest_pause > SILENT_SECONDS - 1.5


@pytest.mark.parametrize(("seed", "reason"), [(POISON, "signal"), (HANG, "hung")])
def test_a_request_that_kills_is_found(client: ProcessClient, seed: int, reason: str) -> None:
    """It ends with an error after three deaths; those that came with it, before it and after it do not."""
    innocent = some_requests(6, 40)

    async def main() -> None:
        first = asyncio.create_task(collect(client, innocent[0]))
        await asyncio.sleep(0.1)
        bad = asyncio.create_task(collect(client, request("bad", [5, 6], 10, seed)))
        others = [asyncio.create_task(collect(client, asked)) for asked in innocent[1:]]
        (last,) = await bad
        assert last.finish_reason == "error"
        assert "died 3 times with this request" in (last.error or "")
        for asked, said in zip(innocent, await asyncio.gather(first, *others), strict=True):
            check(asked, said)

    within(40, main())
    assert client.survival.deaths == {reason: 3}
    assert client.survival.dropped_requests == 1
    assert client.status == "ready"


def test_poison_after_poison(client: ProcessClient) -> None:
    """Each costs three deaths, and the engine goes on however many there are."""

    async def main() -> None:
        for index in range(3):
            (last,) = await collect(client, request(f"bad{index}", [5], 10, POISON))
            assert last.finish_reason == "error"
        asked = request("good", [5, 6], 10)
        check(asked, await collect(client, asked))

    within(60, main())
    assert client.survival.deaths == {"signal": 9}


def test_memory_that_is_exhausted_once(client: ProcessClient, room: Path) -> None:
    """MemoryError in a step is the end of that engine, not of the step's requests."""
    (room / "once").touch()
    asked = request("a", [5, 7], 30, MEMORY)

    async def main() -> None:
        check(asked, await collect(client, asked))

    within(20, main())
    assert client.survival.deaths == {"memory": 1}


def test_a_fault_in_the_loop(client: ProcessClient, room: Path) -> None:
    """A-093: an error outside any step is the end of that engine."""
    (room / "once").touch()
    asked, other = request("a", [5, 7], 30, FAULT), request("b", [5, 8], 60)

    async def main() -> None:
        said, also_said = await asyncio.gather(collect(client, asked), collect(client, other))
        check(asked, said)
        check(other, also_said)

    within(20, main())
    assert client.survival.deaths == {"failed": 1}


def test_aborts_while_there_is_no_engine(client: ProcessClient, room: Path) -> None:
    """They are answered at once, nothing of them comes back, and what is asked meanwhile is served."""
    (room / "broken").touch()

    async def main() -> None:
        kept, closed, aborted = (request(id, [5, index], 300) for index, id in enumerate(("kept", "closed", "aborted")))
        keeping = asyncio.create_task(collect(client, kept))
        closing, aborting = client.submit(closed), client.submit(aborted)
        await anext(closing)
        first = await anext(aborting)
        os.kill(client.pid, signal.SIGKILL)
        await status(client, "restarting")
        with pytest.raises(TricornError, match="restarting"):
            await client.state()
        await closing.aclose()
        client.abort("aborted")
        client.abort("nobody")
        rest = [output async for output in aborting]
        assert rest[-1].finish_reason == "abort"
        assert ids([first, *rest]) == expected(aborted, PAGES * PAGE, EOS).tokens[: len(ids([first, *rest]))]
        late = request("late", [9, 9], 20)
        coming = asyncio.create_task(collect(client, late))
        await asyncio.sleep(0.05)
        (room / "broken").unlink()
        check(kept, await keeping)
        check(late, await coming)
        state = await client.state()
        assert state["requests"]["running"] == state["requests"]["waiting"] == []

    within(30, main())
    assert client.survival.resumed_requests == 1


def test_no_new_engine_is_the_end(client: ProcessClient, room: Path) -> None:
    """A-093: streams end with an error, not a hang, and new ones are refused."""

    async def main() -> None:
        stream = client.submit(request("r", [5], 3000))
        await anext(stream)
        (room / "broken").touch()
        os.kill(client.pid, signal.SIGKILL)
        last = [output async for output in stream][-1]
        assert last.finish_reason == "error"
        assert "3 engines in a row died" in (last.error or "")
        assert "the model is gone" in (last.error or "")
        assert (client.status, client.alive) == ("dead", False)
        with pytest.raises(TricornError, match="3 engines in a row"):
            client.submit(request("s", [5], 1))
        client.abort("r")

    within(30, main())


def test_deaths_of_an_idle_engine(client: ProcessClient) -> None:
    """Killed twice before it does anything, it comes back."""

    async def main() -> None:
        for _ in range(2):
            await status(client, "ready")
            os.kill(client.pid, signal.SIGKILL)
            await status(client, "restarting")
        asked = request("a", [5, 6], 10)
        check(asked, await collect(client, asked))

    within(30, main())


def test_closing_amid_a_restart(room: Path) -> None:
    client = ProcessClient(EngineOptions(path=""))

    async def main() -> None:
        stream = client.submit(request("r", [5], 3000))
        await anext(stream)
        os.kill(client.pid, signal.SIGKILL)
        await status(client, "restarting")
        began = time.monotonic()
        await asyncio.to_thread(client.close)
        assert time.monotonic() - began < 3
        last = [output async for output in stream][-1]
        assert (last.finish_reason, last.error) == ("error", "the engine was closed")

    within(20, main())
    assert not Path(f"/proc/{client.pid}").exists()


def test_the_state_of_an_engine(client: ProcessClient) -> None:
    async def main() -> None:
        stream = client.submit(request("r", [5] * 20, 3000))
        await anext(stream)
        state, again = await asyncio.gather(client.state(), client.state())
        assert [entry["id"] for entry in state["requests"]["running"]] == ["r"]
        assert again["requests"]["running"][0]["prompt_tokens"] == 20
        await asyncio.sleep(0.5)  # both have been answered
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(TricornError, match="does not answer"):
            await client.state()
        os.kill(client.pid, signal.SIGCONT)
        assert (await client.state())["requests"]["running"]
        await stream.aclose()

    within(20, main())


# The engine's part, on the real executor


@pytest.fixture(scope="module")
def small(engine_for: Callable[..., Any]) -> Iterator[InProcessClient]:
    pytest.importorskip("tricorn._native", reason="the native extension is not built: run make setup")
    _, file = engine_for("llama", "Q8_0")
    client = InProcessClient(EngineOptions(path=str(file.path), kv_bytes=4 << 20, threads=1, debug_checks=True))
    yield client
    client.close()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 0},
        {"temperature": 0.8, "logit_bias": {9: 3.0}, "min_tokens": 12, "ignore_eos": False, "logprobs": 1},
    ],
)
def test_resumed_at_any_token(small: InProcessClient, params: dict[str, Any]) -> None:
    """The rest of the ids and logprobs is the same, bit for bit, wherever the engine died."""
    rng = random.Random(2)
    asked = request("whole", [rng.randrange(10, 250) for _ in range(37)], 30, **params)

    async def main() -> None:
        whole = await collect(small, asked)
        tokens = ids(whole)
        scores = [score for output in whole for score in output.logprobs or []]
        assert len(scores) == len(tokens)
        points = range(1, len(tokens))
        resumed = [
            msgspec.structs.replace(
                asked,
                id=f"after-{point}",
                resume=tokens[:point],
                params=msgspec.structs.replace(asked.params, prompt_logprobs=None),
            )
            for point in points
        ]
        for point, said in zip(points, await asyncio.gather(*(collect(small, r) for r in resumed)), strict=True):
            assert ids(said) == tokens[point:]
            assert [score for output in said for score in output.logprobs or []] == scores[point:]
            assert (said[-1].finish_reason, said[-1].stop_token) == (whole[-1].finish_reason, whole[-1].stop_token)

    asyncio.run(main())


def test_a_real_engine_survives(engine_for: Callable[..., Any]) -> None:
    """Sampled and greedy streams of the native executor over kill -9."""
    pytest.importorskip("tricorn._native", reason="the native extension is not built: run make setup")
    _, file = engine_for("llama", "Q8_0")
    options = EngineOptions(path=str(file.path), kv_bytes=4 << 20, threads=1)
    requests = [
        request(f"r{i}", list(range(10 + i, 40 + i)), 900 // (1 + i % 3), temperature=i % 2 * 0.8, logprobs=i % 3)
        for i in range(6)
    ]

    async def run(client: ProcessClient, kills: int) -> list[list[tuple[Any, ...]]]:
        tasks = [asyncio.create_task(collect(client, asked)) for asked in requests]
        for _ in range(kills):
            await status(client, "ready")
            await asyncio.sleep(0.05)
            os.kill(client.pid, signal.SIGKILL)
            await status(client, "restarting")
        answers = await asyncio.gather(*tasks)
        return [[(o.token_ids, o.logprobs, o.finish_reason, o.stop_token) for o in said] for said in answers]

    client = ProcessClient(options)
    try:
        undisturbed = within(30, run(client, 0))
        assert within(60, run(client, 2)) == undisturbed
        assert client.survival.restarts == 2
        assert client.survival.resumed_requests > 0
    finally:
        client.close()


def test_exhausted_memory_in_native_code(engine_for: Callable[..., Any]) -> None:
    """What native code throws then arrives as MemoryError, which ends the engine."""
    native = pytest.importorskip("tricorn._native", reason="the native extension is not built: run make setup")
    _, file = engine_for("llama", "Q8_0")
    tensors = [msgspec.to_builtins(entry) for entry in file.header.tensors]
    plan = msgspec.to_builtins(file.header.plan)
    sizes = {"threads": 1, "pages": 2, "max_tokens": 1 << 30, "max_rows": 1 << 30, "cache": "f16"}
    with pytest.raises(MemoryError):
        native.Executor(file.body, tensors, plan, isa=file.header.isa, **sizes)


def test_a_short_drill() -> None:
    """The whole of it, on a real server and model."""
    pytest.importorskip("tricorn._native", reason="the native extension is not built: run make setup")
    if not is_pulled("smollm2-135m"):
        pytest.skip("the model is not here: run tricorn pull smollm2-135m")
    told: list[str] = []
    report = drill.run(str(ensure("smollm2-135m", False)), streams=4, kills=2, short=True, tell=told.append)
    assert report.ok
    assert (report.streams, report.kills, report.mismatched, report.lost) == (4, 2, 0, 0)
    assert report.disasters.keys() == {"stopped", "memory", "disk full"}
    assert report.disasters["stopped"].deaths == 1
    assert report.disasters["stopped"].longest_pause_s > 2
    assert told[-1].endswith("disk full")


def test_the_drill_sees_what_differs() -> None:
    whole = drill.Transcript(text="ab", token_ids=[1, 2], reasons=["length", None], pause=1.0)
    assert whole.same(msgspec.structs.replace(whole, pause=2.0))
    others = [{"text": "a"}, {"token_ids": [1, 3]}, {"reasons": ["stop", None]}, {"token_logprobs": [0.5]}]
    different = [msgspec.structs.replace(whole, **change) for change in others]
    broken = msgspec.structs.replace(whole, failure="it broke off")
    outcome = drill._compare([whole, *different, broken], [whole] * 6, 0)
    assert (outcome.streams, outcome.mismatched, outcome.lost, outcome.ok) == (6, 4, 1, False)
