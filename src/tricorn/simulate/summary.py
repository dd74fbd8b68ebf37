"""What many runs came to, and how to see a failure again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from tricorn.simulate.config import Config
from tricorn.simulate.world import Report


class Failure(msgspec.Struct, frozen=True):
    """An invariant that did not hold, and the command that shows it again."""

    seed: int
    step: int
    violation: str
    replay: str
    config: Config


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over all seeds. The worst shares are of what the bounds allow."""

    seeds: int
    steps: int
    seconds: float
    virtual_seconds: float
    requests: int
    refused: int
    endings: dict[str, int]
    preemptions: int
    deaths: int
    disk_hit_tokens: int
    disk_faults: int
    worst_wait: float
    worst_lead: float
    failures: list[Failure]


def failure(report: Report, steps: int) -> Failure:
    seed = report.config.seed
    replay = f"tricorn bench simulate --first-seed {seed} --seeds 1 --steps {steps} --trace"
    return Failure(seed, report.steps, report.violation or "", replay, report.config)


def summarize(reports: Iterable[Report], steps: int, seconds: float) -> Summary:
    """`steps` is what each run was asked for, `seconds` what all took together."""
    reports = sorted(reports, key=lambda report: report.config.seed)
    endings: Counter[str] = Counter()
    for report in reports:
        endings.update(report.endings)
    return Summary(
        seeds=len(reports),
        steps=sum(report.steps for report in reports),
        seconds=round(seconds, 1),
        virtual_seconds=round(sum(report.virtual_seconds for report in reports), 1),
        requests=sum(report.requests for report in reports),
        refused=sum(report.refused for report in reports),
        endings=dict(endings),
        preemptions=sum(report.preemptions for report in reports),
        deaths=sum(report.deaths for report in reports),
        disk_hit_tokens=sum(report.disk_hit_tokens for report in reports),
        disk_faults=sum(report.disk_faults for report in reports),
        worst_wait=max((report.worst_wait for report in reports), default=0.0),
        worst_lead=max((report.worst_lead for report in reports), default=0.0),
        failures=[failure(report, steps) for report in reports if report.violation],
    )
