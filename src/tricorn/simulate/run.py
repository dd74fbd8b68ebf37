"""Many seeds at once, one process per processor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from tricorn.simulate.config import draw
from tricorn.simulate.world import Report, World


def run_seed(seed: int, steps: int, told: Callable[[str], None] | None = None) -> Report:
    """One seed: its own configuration, its own world. The same every time."""
    logging.getLogger("tricorn.cache").setLevel(logging.CRITICAL)  # the disk's faults are ours
    return World(draw(seed), told=told).run(steps)


def run_seeds(first: int, count: int, steps: int, workers: int | None = None) -> Iterator[Report]:
    """Reports as they come, in any order. `workers` None is the processors that may be used; 1 stays in this
    process."""
    workers = min(workers or len(os.sched_getaffinity(0)), count)
    if workers == 1:
        yield from (run_seed(seed, steps) for seed in range(first, first + count))
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run_seed, seed, steps) for seed in range(first, first + count)]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)
