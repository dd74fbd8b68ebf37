"""The native executor: a compiled plan on the CPU's own kernels."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from tricorn import _native
from tricorn.request import TricornError
from tricorn.runtime import step
from tricorn.runtime.sampling import scoring
from tricorn.runtime.step import F32, I32, PAGE, U8, Step, StepResult

if TYPE_CHECKING:
    from tricorn.compiler.engine_file import EngineFile

KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def page_bytes(engine: EngineFile, kv_type: str = "f16") -> int:
    """Bytes of one page of the KV cache, all layers together."""
    return step.page_bytes(engine.graph, KV_BYTES[kv_type])


class NativeHandle:
    """A step under way in the native threads."""

    def __init__(self, native: _native.Executor, ticket: int) -> None:
        self._native, self._ticket = native, ticket
        self._result: StepResult | None = None

    def put_masks(self, index: I32, mask: NDArray[np.uint32]) -> None:
        self._native.put_masks(self._ticket, index, mask)

    def result(self) -> StepResult:
        if self._result is None:
            self._result = StepResult(*self._native.wait(self._ticket))
        return self._result


class NativeExecutor:
    """Runs the plan of an engine file with `threads` threads over a pool of `pages` pages of type `kv_type` (f16,
    bf16, f32).

    A step may hold up to `max_tokens` token rows and `max_rows` sampled rows. Raises TricornError when the file was
    compiled for an
    instruction set that this processor lacks, or memory is short.
    """

    def __init__(
        self,
        engine: EngineFile,
        *,
        threads: int,
        pages: int,
        kv_type: str = "f16",
        max_tokens: int = 512,
        max_rows: int = 64,
    ) -> None:
        header = engine.header
        available = _native.instruction_sets()
        if header.isa not in available:
            raise TricornError(
                f"{engine.path}: compiled for {header.isa}, this processor runs {', '.join(available)}; build it again"
            )
        _require_memory(page_bytes(engine, kv_type) * pages)
        try:
            self._native = _native.Executor(
                engine.body,
                [msgspec.to_builtins(entry) for entry in header.tensors],
                msgspec.to_builtins(header.plan),
                isa=header.isa,
                threads=threads,
                pages=pages,
                max_tokens=max_tokens,
                max_rows=max_rows,
                cache=kv_type,
            )
        except (ValueError, MemoryError) as error:
            raise TricornError(
                f"{engine.path}: {error or 'not enough memory for the KV pool and the buffers'}"
            ) from None
        self.pages, self.vocab = pages, engine.plan.vocab
        self.page_bytes = self._native.page_bytes
        self.max_tokens, self.max_rows = max_tokens, max_rows

    def submit(self, step: Step) -> NativeHandle:
        try:
            return NativeHandle(self._native, self._native.submit(step))
        except ValueError as error:
            raise TricornError(str(error)) from None

    def read_page(self, page: int) -> U8:
        try:
            return self._native.read_page(page)
        except ValueError as error:
            raise TricornError(str(error)) from None

    def write_page(self, page: int, data: U8) -> None:
        try:
            self._native.write_page(page, data)
        except ValueError as error:
            raise TricornError(str(error)) from None

    def forward(self, ids: list[int]) -> F32:
        """The logits of every position of one sequence, float32 [len(ids), vocab]; overwrites the first pages of the
        pool.

        The twin of ReferenceExecutor.forward, for tests and measurements.
        """
        pages = np.arange(-(-len(ids) // PAGE), dtype=np.int32)
        logits = []
        chunk = min(self.max_tokens, self.max_rows)
        for start in range(0, len(ids), chunk):
            positions = np.arange(start, min(start + chunk, len(ids)), dtype=np.int32)
            rows = positions - start
            step = Step(
                token_ids=np.array(ids[start : start + chunk], np.int32),
                positions=positions,
                row_start=np.array([0, len(rows)], np.int32),
                page_start=np.array([0, len(pages)], np.int32),
                pages=pages,
                sampling=scoring(rows),
            )
            self.submit(step).result()
            logits.append(self._native.last_logits())
        return np.concatenate(logits)

    def operation_seconds(self) -> list[float]:
        """Seconds spent so far: in the beginnings of steps, in each operation of the plan, in sampling."""
        return list(self._native.seconds())

    def close(self) -> None:
        """Waits for the step under way and frees the pool."""
        del self._native


def _require_memory(pool: int) -> None:
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if pool > free:
        raise TricornError(
            f"a KV pool of {pool >> 20} MiB does not fit this machine's {free >> 20} MiB; ask for less with --kv-bytes"
        )
