"""Policies: the order in which sequences are admitted, and how a step's prefill budget is shared."""

from __future__ import annotations

from tricorn.scheduler.sequence import Sequence

EXPRESS_SHARE = 4
"""One part in this many of a step's prefill budget is offered to the shortest prompt first."""


def first_come(sequence: Sequence) -> int:
    """The sort key of the waiting queue. A preempted sequence keeps the place of its first arrival."""
    return sequence.arrival


def prefill_order(candidates: list[Sequence], remaining: list[int], budget: int) -> list[tuple[Sequence, int]]:
    """Who prefills, in turn, and at most how many tokens each; one may be named twice.

    The budget goes first come, first served, but a part of it goes to the shortest prompt, so that a short request
    never waits for a long one to end.
    """
    turns = [(sequence, budget) for sequence in candidates]
    if len(candidates) > 1 and budget >= EXPRESS_SHARE:
        shortest = min(range(len(candidates)), key=remaining.__getitem__)
        if shortest:
            turns.insert(0, (candidates[shortest], budget // EXPRESS_SHARE))
    return turns
