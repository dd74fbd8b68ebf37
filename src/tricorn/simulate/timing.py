"""How long a step takes, by a cost model."""

from __future__ import annotations

import numpy as np

from tricorn.runtime.step import Step
from tricorn.scheduler.cost import Cost, Work


def work_of(step: Step) -> Work:
    """What a step has to do. A sequence with one row counts as decoding."""
    count = step.row_start[1:] - step.row_start[:-1]
    decodes = int(np.count_nonzero(count == 1))
    last = step.positions[step.row_start[1:] - 1]
    if decodes == len(count):
        return Work(decode_rows=decodes, decode_pairs=int(last.sum()))
    pairs = count * (last - (count - 1) / 2)
    single = count == 1
    return Work(
        prefill_tokens=len(step.positions) - decodes,
        prefill_pairs=float(pairs[~single].sum()),
        decode_rows=decodes,
        decode_pairs=int(last[single].sum()),
    )


def seconds_of(step: Step, cost: Cost) -> float:
    work = work_of(step)
    return (
        cost.step
        + cost.prefill_token * work.prefill_tokens
        + cost.prefill_pair * work.prefill_pairs
        + cost.decode_row * work.decode_rows
        + cost.decode_pair * work.decode_pairs
    )
