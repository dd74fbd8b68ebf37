"""How a scheduler decides. Nothing here changes a bit of any answer."""

from __future__ import annotations

from typing import Literal

import msgspec

PolicyName = Literal["fcfs", "lpm", "dfs-weight", "priority", "fair"]
Admission = Literal["guaranteed", "expected", "none"]


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`policy` orders the waiting requests (see policies/). `admission` bounds the pages that running requests may come
    to need (see admission.py). `target_itl` is how many seconds a step with decoding sequences should take at most:
    prompts are cut to fit; 0 is no bound."""

    policy: PolicyName = "fcfs"
    admission: Admission = "expected"
    target_itl: float = 0.2
