"""What a machine can do, measured: the sizes of an engine on it, and what its steps cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from tricorn.engine.engine import Engine
from tricorn.engine.factory import open_executor
from tricorn.engine.options import EngineOptions
from tricorn.request import Request, SamplingParams, TricornError
from tricorn.runtime.step import Executor, Handle, Step
from tricorn.scheduler.cost import Cost, CostModel
from tricorn.scheduler.limits import Limits
from tricorn.scheduler.options import SchedulerOptions
from tricorn.simulate.timing import seconds_of, work_of

SHORT, LONG, OUTPUT = 24, 768, 24
"""Tokens of what is run to measure."""
MOST_LONG = 4
"""Batch sizes of which long prompts are run too."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: an engine with `pages` pages of KV cache whose steps take what `cost` says, in seconds. `error` is
    the median relative error of that over the steps measured."""

    model: str
    pages: int
    context: int
    max_sequences: int
    max_tokens: int
    cost: Cost
    error: float = 0.0

    @property
    def limits(self) -> Limits:
        return Limits(
            context=self.context,
            vocab=97,
            max_sequences=self.max_sequences,
            max_tokens=self.max_tokens,
            max_rows=self.max_sequences,
        )


def read(path: Path) -> Machine:
    """Raises TricornError when the file is not what `tricorn bench cost` prints."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Machine)
    except OSError as error:
        raise TricornError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise TricornError(f"{path} is not what `tricorn bench cost` prints: {error}") from None


def measure(
    model: str,
    options: EngineOptions,
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64),
    told: Callable[[str], None] = lambda line: None,
) -> Machine:
    """Runs an engine in this process, prompts and decoding in batches of many sizes, and fits a cost to the time of
    each step."""
    executor, info, _ = open_executor(options)
    watch = _Stopwatch(executor)
    engine = Engine(watch, info.limits, SchedulerOptions(target_itl=0.0), overlap=False)
    random = np.random.default_rng(0)
    for batch, prompt in [(batch, SHORT) for batch in batches] + [(batch, LONG) for batch in batches[:MOST_LONG]]:
        if batch <= info.max_sequences and prompt + OUTPUT <= info.context:
            told(f"{batch} prompts of {prompt} tokens")
            for place in range(batch):
                params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
                ids = random.integers(0, info.vocab, prompt).tolist()
                engine.add(Request(id=f"{batch} {prompt} {place}", prompt=ids, params=params, seed=0))
            while not engine.idle:
                engine.step()
    executor.close()
    cost = watch.fit()
    error = float(np.median([abs(seconds_of(step, cost) / seconds - 1) for step, seconds in watch.steps]))
    return Machine(
        model=model,
        pages=info.pages,
        context=info.context,
        max_sequences=info.max_sequences,
        max_tokens=info.limits.max_tokens,
        cost=cost,
        error=round(error, 3),
    )


class _Stopwatch:
    """An executor whose steps are timed. They must come one at a time."""

    def __init__(self, executor: Executor) -> None:
        self.pages, self.page_bytes, self.vocab = executor.pages, executor.page_bytes, executor.vocab
        self.max_tokens, self.max_rows = executor.max_tokens, executor.max_rows
        self.read_page, self.write_page, self.close = executor.read_page, executor.write_page, executor.close
        self.steps: list[tuple[Step, float]] = []
        self._executor = executor

    def submit(self, step: Step) -> Handle:
        began = time.perf_counter()
        handle = self._executor.submit(step)
        handle.result()
        self.steps.append((step, time.perf_counter() - began))
        return handle

    def fit(self) -> Cost:
        """Of each kind of step, the model keeps the last ones: told in an order that mixes all sizes."""
        model = CostModel()
        order = np.random.default_rng(0).permutation(len(self.steps))
        for place in order.tolist():
            step, seconds = self.steps[place]
            model.observe(work_of(step), seconds)
        if model.cost is None:
            raise TricornError("too few steps were measured: give the engine a larger KV cache")
        return model.cost
