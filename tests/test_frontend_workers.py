"""Prompts read in processes: the same ids as here, and an end to whatever takes too long or too much."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines import compiled
from tricorn.frontend.errors import BadRequest
from tricorn.frontend.generate import load_text
from tricorn.frontend.workers import Job, Processes, encode

HOSTILE = """{% set word = messages[0].content %}
{%- if word == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif word == 'double' %}{% set ns = namespace(text='ab') %}{% for i in range(60) %}
{%- set ns.text = ns.text ~ ns.text %}{% endfor %}{{ ns.text | length }}
{%- elif word == 'multiply' %}{{ 'ab' * 10**12 }}
{%- elif word == 'power' %}{{ (word | length) ** (9 ** 9) }}
{%- elif word == 'escape' %}{{ ''.__class__.__mro__[1].__subclasses__() }}
{%- elif word == 'refuse' %}{{ raise_exception('not this') }}
{%- else %}{{ word }}{% endif %}"""


@pytest.fixture
def path(engine_for: Callable[..., Any], tmp_path: Path) -> str:
    source = engine_for("llama")[0]
    return str(compiled(replace(source, chat_template=HOSTILE), tmp_path).path)


def chat(word: str) -> Job:
    return Job("chat", {"messages": [{"role": "user", "content": word}], "options": None, "limit": 10_000})


def run(path: str, work: Callable[[Processes], Any], **limits: Any) -> None:
    async def whole() -> None:
        processes = Processes(path, **limits)
        try:
            await work(processes)
        finally:
            processes.close()

    asyncio.run(whole())


def test_the_same_ids(engine_for: Callable[..., Any]) -> None:
    file = engine_for("llama")[1]
    tokenizer, template = load_text(file)
    marker = next(iter(tokenizer.special.values()))
    words = ("", "plain", f"a {marker} b", "größer 😀 \U000f0000", "x" * 9_000)
    jobs = [chat(word) for word in words if word]
    jobs += [Job("plain", {"text": text, "parse_special": parse}) for text in words for parse in (True, False)]
    jobs += [Job("chat", {**jobs[0].arguments, "options": {"big": 2**80}, "continuation": "So"})]

    async def work(processes: Processes) -> None:
        assert await asyncio.gather(*map(processes.encode, jobs)) == [encode(tokenizer, template, job) for job in jobs]

    run(str(file.path), work)


def test_refusals_come_through(path: str) -> None:
    async def work(processes: Processes) -> None:
        for job, message, code in (
            (chat("refuse"), "refuses these messages: not this", "invalid_value"),
            (chat("escape"), "unsafe", "invalid_value"),
            (chat("x" * 10_001), "more than the 10000", "context_length_exceeded"),
        ):
            with pytest.raises(BadRequest, match=message) as refused:
                await processes.encode(job)
            assert refused.value.code == code

    run(path, work)


@pytest.mark.parametrize("word", ["loop", "double", "multiply", "power"])
def test_hostile_templates_end(path: str, word: str) -> None:
    """Those who wait behind them are served, and nothing goes on in the dark."""

    async def work(processes: Processes) -> None:
        expected = await processes.encode(chat("hello"))
        started = time.monotonic()
        jobs = [processes.encode(chat(text)) for text in (word, word, word, "hello", "hello")]
        *ended, first, second = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(error, BadRequest) for error in ended), ended
        assert first == second == expected
        assert time.monotonic() - started < 20
        await nothing_runs(processes)

    run(path, work, seconds=0.5, memory=256 << 20)


def test_who_leaves_ends_the_work(path: str) -> None:
    async def work(processes: Processes) -> None:
        expected = await processes.encode(chat("hello"))
        tasks = [asyncio.create_task(processes.encode(chat("loop"))) for _ in range(2)]
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        started = time.monotonic()
        assert await processes.encode(chat("hello")) == expected
        assert time.monotonic() - started < 5
        await nothing_runs(processes)

    run(path, work, seconds=60)


async def nothing_runs(processes: Processes) -> None:
    """No process of the nursery computes."""
    for _ in range(100):
        pids = Path(f"/proc/{processes.nursery}/task/{processes.nursery}/children").read_text().split()
        before = [seconds(pid) for pid in pids]
        await asyncio.sleep(0.1)
        if [seconds(pid) for pid in pids] == before:
            return
    raise AssertionError("a process goes on")


def seconds(pid: str) -> int:
    try:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    except OSError:
        return -1


def test_a_nursery_that_dies_is_replaced(path: str) -> None:
    async def work(processes: Processes) -> None:
        expected = await processes.encode(chat("hello"))
        os.kill(processes.nursery, signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert await processes.encode(chat("hello")) == expected

    run(path, work)
