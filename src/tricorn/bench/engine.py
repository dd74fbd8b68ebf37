"""The engine alone: scheduler, cache and executor in this process, without server or text."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from tricorn.bench.machine import Machine
from tricorn.compiler.engine_file import EngineFile
from tricorn.compiler.pack import kind_of
from tricorn.engine.engine import Engine
from tricorn.engine.factory import open_executor
from tricorn.engine.options import EngineOptions
from tricorn.request import Request, SamplingParams
from tricorn.runtime.native import NativeExecutor


class Row(msgspec.Struct, frozen=True):
    """One run: `batch` prompts of `prompt` tokens, each with `output` tokens, all at once. Rates are tokens per
    second of all sequences
    together; the shares are of what the machine's limits, measured in the same run, would allow."""

    batch: int
    prompt: int
    output: int
    prefill_tok_s: float
    decode_tok_s: float
    prefill_limit_share: float
    decode_limit_share: float
    host_share: float
    """Python's part of the time (scheduling, submitting, committing), most of it hidden behind the steps."""


def measure(
    file: EngineFile,
    options: EngineOptions,
    machine: Machine,
    batches: list[int],
    prompt: int,
    output: int,
    told: Callable[[Row], None] = lambda row: None,
    profile: dict[str, float] | None = None,
) -> list[Row]:
    """Runs each batch size once after a warm-up. Prompts are random ids, different in each run, so that nothing is
    cached. `profile` collects the seconds spent in each kind of operation."""
    executor, info, _ = open_executor(options)
    random = np.random.default_rng(0)
    limits = _Limits(file, machine, options.kv_type)
    rows = []
    engine = Engine(executor, info.limits)
    _run(engine, random, info.vocab, 1, min(64, prompt), 8)
    for batch in batches:
        before = engine.stats()
        prefill, decode = _run(engine, random, info.vocab, batch, prompt, output)
        after = engine.stats()
        host = (sum(after.host_seconds.values()) - sum(before.host_seconds.values())) / (prefill + decode)
        row = Row(
            batch=batch,
            prompt=prompt,
            output=output,
            prefill_tok_s=round(batch * prompt / prefill, 1),
            decode_tok_s=round(batch * (output - 1) / decode, 1) if output > 1 else 0.0,
            prefill_limit_share=round(limits.prefill_seconds(batch, prompt) / prefill, 3),
            decode_limit_share=round(limits.decode_seconds(batch, prompt, output) / decode, 3) if output > 1 else 0.0,
            host_share=round(host, 4),
        )
        rows.append(row)
        told(row)
    if profile is not None and isinstance(executor, NativeExecutor):
        profile.update(_profile(file, executor))
    executor.close()
    return rows


def _profile(file: EngineFile, executor: NativeExecutor) -> dict[str, float]:
    begin, *operations, sampling = executor.operation_seconds()
    seconds = {"embed": begin, "sample": sampling}
    for op, spent in zip(file.plan.ops, operations, strict=True):
        parts = [segment.weight.split(".")[-2] for segment in op.segments]
        name = " ".join([op.op, *parts])
        seconds[name] = seconds.get(name, 0.0) + spent
    return seconds


def _run(
    engine: Engine, random: np.random.Generator, vocab: int, batch: int, prompt: int, output: int
) -> tuple[float, float]:
    """Seconds until every sequence has its first token, and from then to the last token of all."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    for i in range(batch):
        ids = random.integers(0, vocab, prompt).tolist()
        engine.add(Request(id=str(i), prompt=ids, params=params, seed=0))
    begin = time.perf_counter()
    first = 0.0
    waiting = {str(i) for i in range(batch)}
    while not engine.idle:
        for out in engine.step():
            waiting.discard(out.id)
        if not waiting and not first:
            first = time.perf_counter()
    end = time.perf_counter()
    return first - begin, max(end - first, 1e-9)


class _Limits:
    """The least seconds that the machine's measured rates allow."""

    def __init__(self, file: EngineFile, machine: Machine, kv_type: str) -> None:
        plan = file.plan
        rate = {"q8": machine.int8_gop_s, "bf16": machine.bf16_gflop_s, "f32": machine.fp32_gflop_s}
        entries = {entry.name: entry for entry in file.header.tensors}
        body, head, self.bytes = 0.0, 0.0, 0
        for op in plan.ops:
            for segment in op.segments:
                entry = entries[segment.weight]
                seconds = 2 * entry.rows * entry.columns / (rate[kind_of(entry.type)] * 1e9)
                self.bytes += entry.blocks * entry.block_bytes
                if op.out == plan.logits:
                    head += seconds
                else:
                    body += seconds
        self.token_seconds, self.head_seconds = body, head
        self.kv_bytes = plan.layers * 2 * plan.kv_heads * plan.head_dim * (4 if kv_type == "f32" else 2)
        self.read = machine.read_gb_s * 1e9

    def prefill_seconds(self, batch: int, prompt: int) -> float:
        return batch * (prompt * self.token_seconds + self.head_seconds)

    def decode_seconds(self, batch: int, prompt: int, output: int) -> float:
        """Each step reads every weight and every cached token once, and multiplies `batch` rows: the slower of the
        two binds."""
        steps = output - 1
        context = prompt + output / 2
        reading = (self.bytes + batch * context * self.kv_bytes) / self.read
        return steps * max(reading, batch * (self.token_seconds + self.head_seconds))
