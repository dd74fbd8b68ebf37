"""Deficit round-robin between tenants, in tokens of work (after Shreedhar and Varghese, 1995).

Each tenant has a balance, from which every computed token is taken. Tenants with a positive balance come first, the
highest before the others; when none that wants work has one, all get so many quanta more that one has. What a request
will cost is not known when it starts, so balances go below zero and are paid back later. While two tenants both want
more than they get, their work differs by no more than a quantum and what their running requests still do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tricorn.scheduler.sequence import Sequence

QUANTUM = 1024

MOST_TENANTS = 4096
"""Whose balances are remembered. Those beyond begin anew when they come back."""


class Fair:
    express = False

    def __init__(self) -> None:
        self._balance: dict[str, int] = {}

    def rank(self, sequence: Sequence) -> float:
        return sequence.arrival

    def order(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        queues: dict[str, deque[Sequence]] = {}
        for sequence in sequences:
            queues.setdefault(sequence.namespace.tenant, deque()).append(sequence)
            self._know(sequence.namespace.tenant)
        _refill(self._balance, queues)
        plan = {tenant: self._balance[tenant] for tenant in sorted(queues, key=self._balance.__getitem__, reverse=True)}
        ordered: list[Sequence] = []
        while plan:
            for tenant in list(plan):
                queue = queues[tenant]
                while queue and plan[tenant] > 0:
                    plan[tenant] -= len(queue[0].tokens)
                    ordered.append(queue.popleft())
                if not queue:
                    del plan[tenant]
            _refill(plan, plan)
        return ordered

    def charge(self, sequence: Sequence, tokens: int) -> None:
        tenant = sequence.namespace.tenant
        self._know(tenant)
        self._balance[tenant] -= tokens

    def _know(self, tenant: str) -> None:
        if tenant not in self._balance:
            if len(self._balance) == MOST_TENANTS:
                del self._balance[next(iter(self._balance))]
            self._balance[tenant] = QUANTUM


def _refill(balance: dict[str, int], wanting: Iterable[str]) -> None:
    """Rounds of a quantum for everybody, at most up to one, until someone who wants work has a positive balance."""
    best = max((balance[tenant] for tenant in wanting), default=1)
    if best <= 0:
        rounds = -best // QUANTUM + 1
        for tenant in balance:
            balance[tenant] = min(balance[tenant] + rounds * QUANTUM, QUANTUM)
