"""The engine's loop, clients: in a thread over an executor that notices mistakes, in a process over the reference."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from checkpoints import write_folder
from fake_executor import VOCAB, FakeExecutor, expected
from tricorn.engine.client import InProcessClient, ProcessClient
from tricorn.engine.factory import Opened
from tricorn.engine.messages import EngineInfo, EngineStats
from tricorn.engine.options import EngineOptions, derive
from tricorn.request import Output, Request, SamplingParams, TricornError
from tricorn.runtime.step import PAGE, Executor, Step
from tricorn.scheduler.limits import Limits

Client = InProcessClient | ProcessClient
EOS = (0, 1)


def request(id: str, prompt: list[int], **params: object) -> Request:
    return Request(id=id, prompt=prompt, params=SamplingParams(**params), seed=5)  # type: ignore[arg-type]


async def collect(client: Client, request: Request) -> list[Output]:
    return [output async for output in client.submit(request)]


async def until(condition: Callable[[EngineStats], bool], client: Client) -> EngineStats:
    for _ in range(200):
        if condition(stats := await client.stats()):
            return stats
        await asyncio.sleep(0.02)
    raise AssertionError(f"never came: {await client.stats()}")


def in_process(pages: int = 100, executor: Executor | None = None) -> InProcessClient:
    executor = executor or FakeExecutor(pages)
    limits = Limits(context=pages * PAGE, vocab=VOCAB, max_sequences=8, max_tokens=64, max_rows=64, eos_ids=EOS)
    info = EngineInfo(
        model="fake", limits=limits, pages=pages, page_size=PAGE, page_bytes=1, executor="fake", threads=1
    )
    return InProcessClient(EngineOptions(path="", debug_checks=True), opened=Opened(executor, info))


class SlowExecutor(FakeExecutor):
    def _run(self, step: Step) -> object:
        time.sleep(0.005)
        return super()._run(step)


def test_many_requests_at_once() -> None:
    """Every stream ends once, with the answer its prompt alone would get."""
    client = in_process()
    requests = [request(f"r{i}", [i % 7, i % 3, *range(2, 2 + i % 40)], max_tokens=20) for i in range(60)]

    async def main() -> list[list[Output]]:
        return await asyncio.gather(*(collect(client, r) for r in requests))

    for asked, said in zip(requests, asyncio.run(main()), strict=True):
        want = expected(asked, client.info.context, EOS)
        assert [token for output in said for token in output.token_ids] == want.tokens
        assert [output.finish_reason for output in said] == [None] * (len(said) - 1) + [want.reason]
    client.close()


def test_gauges_fall_when_all_streams_are_closed() -> None:
    """A-090, A-092: closing the streams aborts the requests, and the gauges fall to zero without a new request."""
    client = in_process(executor=SlowExecutor(100))

    async def main() -> None:
        streams = [client.submit(request(f"r{i}", [3] * 30, max_tokens=1000, ignore_eos=True)) for i in range(12)]
        for stream in streams[:2]:
            await anext(stream)
        await until(lambda stats: stats.running >= 2 and stats.running + stats.waiting == 12, client)
        for index, stream in enumerate(streams):
            await stream.aclose()
            client.abort(f"r{index}")  # a stream that nobody ever read from has nothing to close
        stats = await until(lambda stats: stats.running == stats.waiting == stats.pages_held == 0, client)
        assert stats.finished == {"abort": 12}
        assert stats.pages_free + stats.pages_cached == stats.pages_total
        assert sum(stats.steps.values()) > 0
        assert sum(stats.step_seconds.values()) > 0

    asyncio.run(main())
    client.close()


def test_an_abort_ends_the_stream() -> None:
    client = in_process(executor=SlowExecutor(100))

    async def main() -> list[Output]:
        stream = client.submit(request("r", [3], max_tokens=1000, ignore_eos=True))
        said = [await anext(stream)]
        client.abort("r")
        client.abort("nobody")
        return said + [output async for output in stream]

    assert asyncio.run(main())[-1].finish_reason == "abort"
    client.close()


def test_refused_at_the_call() -> None:
    """A-022: before anything is queued, with the numbers."""
    client = in_process(pages=4)

    async def main() -> None:
        with pytest.raises(TricornError, match=r"64 tokens.*limited to 64"):
            client.submit(request("r", [1] * 64))
        first = asyncio.create_task(collect(client, request("r", [1], max_tokens=5)))
        await asyncio.sleep(0)
        with pytest.raises(TricornError, match="in use"):
            client.submit(request("r", [1]))
        await first

    asyncio.run(main())
    client.close()


def test_a_failed_step_is_an_error_of_its_requests() -> None:
    executor = FakeExecutor(50, fail_at={2})
    client = in_process(50, executor)

    async def main() -> None:
        said = await collect(client, request("a", [4, 5], max_tokens=50, ignore_eos=True))
        assert said[-1].finish_reason == "error"
        assert said[-1].error == "the step failed: the fake executor was told to fail"
        said = await collect(client, request("b", [4, 5], max_tokens=5, ignore_eos=True))
        assert said[-1].finish_reason == "length"

    asyncio.run(main())
    assert client.alive
    client.close()


def test_nothing_comes_from_a_closed_engine() -> None:
    client = in_process(executor=SlowExecutor(100))

    async def main() -> None:
        stream = client.submit(request("r", [3], max_tokens=1000, ignore_eos=True))
        await anext(stream)
        await asyncio.to_thread(client.close)
        last = [output async for output in stream][-1]
        assert (last.finish_reason, last.error) == ("error", "the engine was closed")
        with pytest.raises(TricornError, match="the engine was closed"):
            client.submit(request("s", [3]))

    asyncio.run(main())
    assert not client.alive


def test_sizes_from_the_machine() -> None:
    sizes = derive(EngineOptions(path=""), page_bytes=360 << 10, model_context=8192)
    assert sizes.pages * (360 << 10) <= 4 << 30
    assert (sizes.max_sequences, sizes.max_tokens, sizes.context) == (64, 512, 8192)
    assert sizes.threads == len(os.sched_getaffinity(0))
    small = derive(EngineOptions(path="", kv_bytes=10_000, max_batched_tokens=16), page_bytes=1000, model_context=8192)
    assert (small.pages, small.max_sequences, small.max_rows, small.context) == (10, 10, 16, 160)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"kv_bytes": 1000}, "1000 bytes holds 1 pages"), ({"threads": 0}, "threads is 0"), ({"max_sequences": -1}, "-1")],
)
def test_sizes_that_cannot_work(options: dict[str, int], words: str) -> None:
    with pytest.raises(TricornError, match=words):
        derive(EngineOptions(path="", **options), page_bytes=1000, model_context=100)  # type: ignore[arg-type]


# The engine in a process of its own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), "llama", seed=3)


def options_for(folder: Path) -> EngineOptions:
    return EngineOptions(path=str(folder), executor="reference", kv_bytes=4 << 20, debug_checks=True)


@pytest.fixture(scope="module")
def shared_client(folder: Path) -> AsyncIterator[ProcessClient]:
    client = ProcessClient(options_for(folder))
    yield client
    client.close()


@pytest.fixture
def own_client(folder: Path) -> AsyncIterator[ProcessClient]:
    client = ProcessClient(options_for(folder))
    yield client
    client.close()


def test_a_process_answers_like_a_thread(folder: Path, shared_client: ProcessClient) -> None:
    requests = [
        request(f"r{i}", list(range(i, 20 + 3 * i)), max_tokens=6, logprobs=2, ignore_eos=True) for i in range(6)
    ]

    async def main(client: Client) -> list[list[Output]]:
        return await asyncio.gather(*(collect(client, r) for r in requests))

    thread = InProcessClient(options_for(folder))
    assert thread.info == shared_client.info
    assert thread.info.vocab == 320
    for a, b in zip(asyncio.run(main(thread)), asyncio.run(main(shared_client)), strict=True):
        assert [output.token_ids for output in a] == [output.token_ids for output in b]
        assert [len(output.token_ids) for output in a] == [1] * 6
        for x, y in zip(a, b, strict=True):
            assert x.logprobs
            assert y.logprobs
            assert np.isclose(x.logprobs[0].logprob, y.logprobs[0].logprob, atol=1e-4)
    thread.close()


def test_the_stats_of_a_process(shared_client: ProcessClient) -> None:
    async def main() -> None:
        await collect(shared_client, request("one", [5] * 40, max_tokens=3))
        stats = await until(lambda stats: stats.running == 0 and stats.generated_tokens > 0, shared_client)
        assert stats.pages_total == shared_client.info.pages
        assert stats.pages_held == 0
        assert stats.pages_cached > 0

    asyncio.run(main())


def test_an_idle_process_sleeps(shared_client: ProcessClient) -> None:
    def ticks() -> int:
        return sum(map(int, Path(f"/proc/{shared_client.pid}/stat").read_text().split()[13:15]))

    time.sleep(0.1)
    before = ticks()
    time.sleep(0.4)
    assert ticks() - before <= 2


def test_a_process_ignores_ctrl_c(shared_client: ProcessClient) -> None:
    os.kill(shared_client.pid, signal.SIGINT)
    said = asyncio.run(collect(shared_client, request("after", [5], max_tokens=2, ignore_eos=True)))
    assert said[-1].finish_reason == "length"


def test_closing_ends_the_process(folder: Path) -> None:
    client = ProcessClient(options_for(folder))
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 3
    assert not Path(f"/proc/{client.pid}").exists()


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(TricornError, match="missing"):
        ProcessClient(EngineOptions(path=str(tmp_path / "missing"), executor="reference"))


def test_the_process_goes_with_its_client(folder: Path) -> None:
    code = (
        "import os\nfrom tricorn.engine.client import ProcessClient\n"
        "from tricorn.engine.options import EngineOptions\n"
        f"client = ProcessClient(EngineOptions(path={str(folder)!r}, executor='reference', kv_bytes=4 << 20))\n"
        "print(client.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=30, check=False)
    pid = int(run.stdout)
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.02)
    raise AssertionError("the engine process outlived its client")
