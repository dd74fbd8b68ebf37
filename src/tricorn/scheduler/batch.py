"""Building a step: which rows of which sequences run, gathered from the slots into flat arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tricorn.runtime.step import PAGE, Sampling, Step
from tricorn.scheduler.cost import Work
from tricorn.scheduler.sequence import EVERY_ROW, LAST_ROW, Sequence, Slots

I32 = NDArray[np.int32]


@dataclass(slots=True)
class Batch:
    """A step and what the scheduler needs to read its result.

    `ends[i]` is how many tokens of `sequences[i]` are computed once the step is done. `sampled` [R] tells the rows of
    `sampling` that bring a new token from those that score a prompt. `releases` are pages to let go of when the step is
    done.
    """

    step: Step
    sequences: list[Sequence]
    ends: list[int]
    decodes: int
    """The first so many of `sequences` are decoding; the others prefill."""
    row_sequence: I32
    """[R] the index in `sequences` of each row of `sampling`."""
    sampled: NDArray[np.bool_]
    hidden_sequence: I32
    """[H] likewise, of each row of `step.hidden`."""
    work: Work
    releases: list[I32] = field(default_factory=list)


def build(
    slots: Slots,
    decodes: list[Sequence],
    prefills: list[tuple[Sequence, int]],
    copies: list[tuple[int, int]],
) -> Batch:
    """Makes the step of what is to be computed of each of `decodes` (their last token, and what a grammar has forced
    before it) and so many tokens of each of `prefills`, which is then in flight."""
    sequences = decodes + [sequence for sequence, _ in prefills]
    slot = np.array([sequence.slot for sequence in sequences], np.int32)
    start = slots.computed[slot]
    count = np.minimum(slots.length[slot], slots.goal[slot]) - start
    count[len(decodes) :] = [tokens for _, tokens in prefills]
    end = start + count
    row_start = _starts(count)
    owner = np.repeat(np.arange(len(sequences), dtype=np.int32), count)
    positions = np.arange(row_start[-1], dtype=np.int32) - (row_start[:-1] - start)[owner]
    token_ids = slots.tokens[slot[owner], positions]
    page_count = (end + PAGE - 1) // PAGE
    pages = [slots.pages[line, :size] for line, size in zip(slot.tolist(), page_count.tolist(), strict=True)]

    wanted = np.zeros(len(positions), np.bool_)
    samples = (end == slots.length[slot]) & (end < slots.total[slot])
    wanted[row_start[1:] - 1] = samples
    scored = slots.scoring[slot]
    if scored.any():
        first, end_of_prompt = slots.score_start[slot][owner], slots.prompt[slot][owner]
        wanted |= scored[owner] & (positions + 1 >= first) & (positions + 1 < end_of_prompt)
    rows = np.flatnonzero(wanted).astype(np.int32)
    hidden = _pooled(slots, slot, owner, row_start, end)
    row_sequence = owner[rows]
    sampling = _sampling(slots, rows, slot[row_sequence], positions[rows] + 1)

    sampled = sampling.target < 0
    new = np.flatnonzero(sampled).astype(np.int32)
    line = slot[row_sequence[new]]
    sampling.masks_follow = bool(slots.masked[line].any())
    slots.tokens[line, slots.length[line]] = -1 - new
    slots.length[line] += 1
    slots.computed[slot] = end
    for sequence in sequences:
        sequence.in_flight += 1
    step = Step(
        token_ids=token_ids,
        positions=positions,
        row_start=row_start,
        page_start=_starts(page_count),
        pages=np.concatenate(pages),
        sampling=sampling,
        copies=np.array(copies, np.int32).reshape(-1, 2),
        hidden=hidden,
    )
    work = _work(start, count, len(decodes))
    return Batch(step, sequences, end.tolist(), len(decodes), row_sequence, sampled, owner[hidden], work)


def _pooled(slots: Slots, slot: I32, owner: I32, row_start: I32, end: I32) -> I32:
    """The rows whose hidden states are pooled, of sequences in `slot` [S] that are computed to their `end` [S]."""
    kind = slots.pooling[slot]
    if not kind.any():
        return np.zeros(0, np.int32)
    wanted = (kind == EVERY_ROW)[owner]
    wanted[row_start[1:] - 1] |= (kind == LAST_ROW) & (end == slots.goal[slot])
    return np.flatnonzero(wanted).astype(np.int32)


def _work(start: I32, count: I32, decodes: int) -> Work:
    """Of sequences that compute `count` tokens after `start` others; the first so many of them decode."""
    tokens = count[decodes:]
    pairs = tokens * (start[decodes:] + tokens / 2)
    return Work(int(tokens.sum()), float(pairs.sum()), int(count[:decodes].sum()), int(start[:decodes].sum()))


def _sampling(slots: Slots, rows: I32, slot: I32, position: I32) -> Sampling:
    """The sampling columns of rows whose sequences are in `slot` [R] and whose next token takes `position` [R]."""
    score = slots.scoring[slot] & (position < slots.prompt[slot])
    target = np.full(len(rows), -1, np.int32)
    logprobs = slots.logprobs[slot]
    if score.any():
        target[score] = slots.tokens[slot[score], position[score]]
        logprobs[score] = slots.prompt_logprobs[slot[score]]
    temperature, top_p, min_p, repetition, presence, frequency = slots.floats.take(slot, axis=1)
    bias_start, bias_ids, bias_values = _biases(slots, slot, position, score)
    history_start, history_ids, history_prompt = _histories(slots, slot, score)
    return Sampling(
        rows=rows,
        target=target,
        temperature=temperature,
        top_k=slots.top_k[slot],
        top_p=top_p,
        min_p=min_p,
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        seed=slots.seed[slot],
        position=position,
        logprobs=logprobs,
        bias_start=bias_start,
        bias_ids=bias_ids,
        bias_values=bias_values,
        history_start=history_start,
        history_ids=history_ids,
        history_prompt=history_prompt,
        mask_index=np.full(len(rows), len(slots.mask) - 1, np.int32),
        mask=slots.mask,
    )


def _biases(slots: Slots, slot: I32, position: I32, score: NDArray[np.bool_]) -> tuple[I32, I32, NDArray[np.float32]]:
    outputs = position - slots.prompt[slot]
    rows = np.flatnonzero((slots.biased[slot] | (outputs < slots.min_tokens[slot])) & ~score)
    count = np.zeros(len(slot), np.int32)
    if not len(rows):
        return _starts(count), np.zeros(0, np.int32), np.zeros(0, np.float32)
    ids, values = [], []
    for row in rows.tolist():
        sequence = slots.sequences[slot[row]]
        assert sequence is not None
        row_ids, row_values = sequence.bias_at(int(outputs[row]))
        count[row] = len(row_ids)
        ids.append(row_ids)
        values.append(row_values)
    return _starts(count), np.concatenate(ids), np.concatenate(values)


def _histories(slots: Slots, slot: I32, score: NDArray[np.bool_]) -> tuple[I32, I32, I32]:
    penalized = slots.penalized[slot] & ~score
    count = np.where(penalized, slots.length[slot], 0)
    prompt = np.where(penalized, slots.prompt[slot], 0)
    lines = slot[penalized].tolist()
    ids = [slots.tokens[line, : slots.length[line]] for line in lines]
    return _starts(count), np.concatenate(ids) if ids else np.zeros(0, np.int32), prompt


def _starts(count: NDArray[Any]) -> I32:
    """Where each of consecutive runs of these lengths starts, and where the last one ends."""
    starts = np.zeros(len(count) + 1, np.int32)
    np.cumsum(count, out=starts[1:])
    return starts
