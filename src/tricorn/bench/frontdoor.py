"""`tricorn bench server`: what the server's own process costs, beside the engine's, while it streams.

Its processor time is read from /proc while streams run, and scaled to the rate that is promised. What of it is text and
what JSON is measured in this process, over the same tokens; the rest is sockets, the event loop and the way to the
engine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import uvloop

from tricorn.bench.load import Client, Result, draw
from tricorn.bench.server import ServerProcess
from tricorn.compiler import ensure
from tricorn.compiler.engine_file import EngineFile
from tricorn.frontend.generate import Assembler, Delta, load_text
from tricorn.request import Output, SamplingParams, TricornError
from tricorn.server import answers
from tricorn.server.exchange import event

STREAMS = 16
PROMPT = 16
RATE = 1400.0
MOST_SHARE = 0.35
"""Of one core, at RATE tokens a second in all: what must hold."""

Tell = Callable[[str], None]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of the server process for each token, and their parts; `core_share` is of one core at `RATE` tokens
    a second."""

    model: str
    streams: int
    tok_s: float
    server_us: float
    detokenize_us: float
    json_us: float
    sockets_and_rest_us: float
    core_share: float
    ok: bool


def run(model: str, tokens: int, tell: Tell) -> Report:
    """`tokens` for each stream. Raises TricornError when the server does not start or answer."""
    tell(f"{STREAMS} streams of {tokens} tokens")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results, seconds, cpu = runner.run(_streams(model, tokens))
    count = sum(sum(result.counts) for result in results)
    tell("text and JSON alone")
    text, json = _parts(model, [list(result.token_ids) for result in results])
    server = 1e6 * cpu / count
    share = server * RATE / 1e6
    return Report(
        model=model,
        streams=STREAMS,
        tok_s=round(count / seconds, 1),
        server_us=round(server, 1),
        detokenize_us=round(text, 1),
        json_us=round(json, 1),
        sockets_and_rest_us=round(server - text - json, 1),
        core_share=round(share, 3),
        ok=share <= MOST_SHARE,
    )


async def _streams(model: str, tokens: int) -> tuple[list[Result], float, float]:
    """What came, in how many seconds, and processor seconds of the server."""
    async with ServerProcess(model, "--max-sequences", str(STREAMS)) as server:
        client, random = server.client, Random(0)
        vocabulary = await client.vocabulary()
        await asyncio.gather(*(_ask(client, draw(random, vocabulary, PROMPT), 8) for _ in range(STREAMS)))
        before, began = _cpu_seconds(server.pid), time.monotonic()
        results = await asyncio.gather(
            *(_ask(client, draw(random, vocabulary, PROMPT), tokens) for _ in range(STREAMS))
        )
        return list(results), time.monotonic() - began, _cpu_seconds(server.pid) - before


async def _ask(client: Client, prompt: list[int], tokens: int) -> Result:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    result = await client.stream("/v1/completions", {**body, "stream": True, "return_token_ids": True})
    if not result.complete:
        raise TricornError(f"a stream failed: status {result.status} {result.error}")
    return result


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _parts(model: str, streams: list[list[int]]) -> tuple[float, float]:
    """Microseconds for each token: from ids to deltas, and from deltas to the bytes of events."""
    tokenizer, _ = load_text(EngineFile.open(ensure(model), check_body=False))
    params = SamplingParams(max_tokens=1 << 20)
    head = answers.header("chat.completion.chunk", "chatcmpl", model)
    count = sum(map(len, streams))
    began = time.perf_counter()
    deltas: list[Delta] = []
    for ids in streams:
        assembler = Assembler(tokenizer, params)
        found = (assembler.push(Output(id="", token_ids=[id])) for id in ids)
        deltas += [delta for delta in found if delta is not None]
    middle = time.perf_counter()
    for delta in deltas:
        choice = {"index": 0, "delta": {"content": delta.text}, "logprobs": None, "finish_reason": None}
        event({**head, "choices": [choice]})
    ended = time.perf_counter()
    return 1e6 * (middle - began) / count, 1e6 * (ended - middle) / count
