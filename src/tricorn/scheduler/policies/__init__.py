"""Policies: who comes first. One small file each; `make` finds them by name.

A policy says in which order waiting requests are admitted and prompts share a step, and whom to preempt when pages run
out. It changes when a request runs, never what it answers. None lets a request starve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tricorn.cache.radix import RadixTree
from tricorn.scheduler.options import PolicyName
from tricorn.scheduler.policies.dfs_weight import DfsWeight
from tricorn.scheduler.policies.fair import Fair
from tricorn.scheduler.policies.fcfs import Fcfs
from tricorn.scheduler.policies.lpm import Lpm
from tricorn.scheduler.policies.priority import Priority
from tricorn.scheduler.sequence import Sequence


class Policy(Protocol):
    express: bool
    """Whether a part of each step goes to the shortest prompt, whatever the order."""

    def rank(self, sequence: Sequence) -> float:
        """A number that never changes while the sequence lives: of the running ones, the highest is preempted
        first."""
        ...

    def order(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        """Who should be admitted and prefilled in this step, in turn, of sequences in order of arrival."""
        ...

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Hears of the work that a step does for a sequence."""
        ...


def make(name: PolicyName, tree: RadixTree) -> Policy:
    makers: dict[PolicyName, Callable[[], Policy]] = {
        "fcfs": Fcfs,
        "lpm": lambda: Lpm(tree),
        "dfs-weight": lambda: DfsWeight(tree),
        "priority": Priority,
        "fair": Fair,
    }
    return makers[name]()
