"""The simulation: a short run of it, its determinism, and that it finds what it is there to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from tricorn import cli
from tricorn.cache.pool import PagePool
from tricorn.cache.radix import Match, RadixTree
from tricorn.engine.engine import Engine
from tricorn.request import Namespace, Output
from tricorn.scheduler.batch import Batch
from tricorn.scheduler.options import SchedulerOptions
from tricorn.scheduler.policies.fcfs import Fcfs
from tricorn.scheduler.scheduler import Scheduler
from tricorn.simulate.config import Config, draw
from tricorn.simulate.run import run_seed, run_seeds
from tricorn.simulate.world import World

CALM = {"abort_share": 0.0, "deadline_share": 0.0, "failure_rate": 0.0, "death_rate": 0.0, "plain": True}


def config(policy: str = "fcfs", admission: str = "expected", **changes: Any) -> Config:
    """A busy engine of middling size in an even world, with `changes`."""
    base = draw(5)
    limits = msgspec.structs.replace(base.limits, context=256, max_sequences=8, max_tokens=64, max_rows=16)
    even = {
        "options": SchedulerOptions(policy=policy, admission=admission, target_itl=0.0),  # type: ignore[arg-type]
        "limits": limits,
        "pages": 48,
        "longest_prompt": 100,
        "longest_output": 64,
        "load": 3.0,
        "burst": 1,
        "max_waiting": 16,
        "max_wait": 0.0,
        "tenants": 2,
        "greedy": 0.5,
        "salts": 1,
        "stems": 4,
        "priorities": 0,
        **CALM,
    }
    return msgspec.structs.replace(base, **(even | changes))


def test_a_short_run_keeps_every_invariant() -> None:
    """Thirty seeds: all policies and admissions, with aborts, deadlines, failed steps and deaths of the engine."""
    reports = list(run_seeds(0, 30, 500))
    for report in reports:
        assert report.violation is None, (report.config.seed, report.violation)
        assert report.steps >= 500
    assert {report.config.options.policy for report in reports} == {"fcfs", "lpm", "dfs-weight", "priority", "fair"}
    assert {report.config.options.admission for report in reports} == {"guaranteed", "expected", "none"}
    endings = {reason for report in reports for reason in report.endings}
    assert endings == {"stop", "length", "abort", "timeout", "error"}
    assert sum(report.preemptions for report in reports) > 0
    assert sum(report.hit_share > 0.1 for report in reports) > 5


def test_the_same_seed_is_the_same_run() -> None:
    """Every output at the same virtual moment; here and in another process."""
    here = [run_seed(seed, 200) for seed in (40, 41)]
    assert [run_seed(seed, 200) for seed in (40, 41)] == here
    there = sorted(run_seeds(40, 2, 200, workers=2), key=lambda report: report.config.seed)
    assert there == here
    assert here[0].trace != here[1].trace


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints totals, and of a failure the seed, the step, and the command that shows it again; then it exits with
    1."""
    runner = CliRunner()
    run = ["bench", "simulate", "--seeds", "1", "--steps", "100", "--first-seed", "7", "--json"]
    result = runner.invoke(cli.app, run)
    assert result.exit_code == 0, result.output
    summary = msgspec.json.decode(result.stdout)
    assert (summary["seeds"], summary["failures"]) == (1, [])
    assert summary["requests"] == sum(summary["endings"].values()) > 0
    monkeypatch.setattr(Scheduler, "commit", dropping(Scheduler.commit))
    result = runner.invoke(cli.app, run[:-1])
    assert result.exit_code == 1
    assert "seed 7, step" in result.stdout
    replay = "tricorn bench simulate --first-seed 7 --seeds 1 --steps 100 --trace"
    assert replay in result.stdout
    again = runner.invoke(cli.app, replay.split()[1:])
    assert again.exit_code == 1
    assert "add r1 " in again.stdout


# Faults, each of which must be found


def found(case: Config, words: str, steps: int = 1500, make: Callable[..., Engine] = Engine) -> None:
    """The simulation ends with a violation that says so."""
    report = World(case, make).run(steps)
    assert report.violation is not None, "the fault was not found"
    assert words in report.violation


def now_and_then(every: int) -> Callable[[], bool]:
    """True at each so many calls."""
    calls = 0

    def call() -> bool:
        nonlocal calls
        calls += 1
        return calls % every == 0

    return call


def dropping(commit: Callable[..., list[Output]]) -> Callable[..., list[Output]]:
    due = now_and_then(20)

    def broken(self: Scheduler, *args: Any) -> list[Output]:
        outputs = commit(self, *args)
        return outputs[1:] if due() else outputs

    return broken


def test_the_even_world_is_calm() -> None:
    """Without a fault the same worlds pass; otherwise what follows would say nothing."""
    for policy in ("fcfs", "fair", "priority", "lpm"):
        for admission in ("guaranteed", "expected"):
            assert World(config(policy, admission)).run(600).violation is None
    assert World(config(deadline_share=0.5, failure_rate=0.05, abort_share=0.3)).run(600).violation is None


def test_a_leaked_page_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release, due = PagePool.release, now_and_then(30)
    monkeypatch.setattr(
        PagePool, "release", lambda self, pages: release(self, pages[1:] if due() and len(pages) > 1 else pages)
    )
    found(config(), "held")


def test_a_page_given_back_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release, due = PagePool.release, now_and_then(30)

    def twice(self: PagePool, pages: np.ndarray) -> None:
        release(self, pages)
        if due():
            shared = pages[self.holders[pages] > 0]
            release(self, shared[:1])

    monkeypatch.setattr(PagePool, "release", twice)
    found(config(), "page")


def test_a_lost_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "commit", dropping(Scheduler.commit))
    found(config(), "it should be")


def test_an_output_said_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    commit, due = Scheduler.commit, now_and_then(20)

    def twice(self: Scheduler, *args: Any) -> list[Output]:
        outputs = commit(self, *args)
        return outputs + outputs[:1] if due() else outputs

    monkeypatch.setattr(Scheduler, "commit", twice)
    found(config(), "")


def test_a_second_ending_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Scheduler.commit

    def twice(self: Scheduler, *args: Any) -> list[Output]:
        outputs = commit(self, *args)
        return outputs + [output for output in outputs if output.finish_reason]

    monkeypatch.setattr(Scheduler, "commit", twice)
    found(config(), "after its end")


def test_a_wrong_ending_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Scheduler.commit

    def wrong(self: Scheduler, *args: Any) -> list[Output]:
        return [
            msgspec.structs.replace(output, finish_reason="length") if output.finish_reason == "stop" else output
            for output in commit(self, *args)
        ]

    monkeypatch.setattr(Scheduler, "commit", wrong)
    found(config(), "ends with length")


def test_a_forgotten_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler.schedule

    def forgetful(self: Scheduler) -> Batch | None:
        batch = schedule(self)
        if batch is not None:
            batch.step.copies = batch.step.copies[:0]
        return batch

    monkeypatch.setattr(Scheduler, "schedule", forgetful)
    found(config(), "it should be")


def test_pages_out_of_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    match = RadixTree.match

    def swapped(self: RadixTree, *args: Any) -> Match:
        found = match(self, *args)
        return msgspec_replace(found, pages=found.pages[::-1].copy())

    monkeypatch.setattr(RadixTree, "match", swapped)
    found(config(), "")


def msgspec_replace(match: Match, pages: np.ndarray) -> Match:
    return Match(pages, match.tail_page, match.tail_tokens, match.tokens)


def test_a_namespace_that_is_overlooked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    match, insert = RadixTree.match, RadixTree.insert
    monkeypatch.setattr(RadixTree, "match", lambda self, _, tokens: match(self, Namespace(), tokens))
    monkeypatch.setattr(RadixTree, "insert", lambda self, _, *args: insert(self, Namespace(), *args))
    found(config(tenants=4, salts=2, stems=16), "another namespace")


def test_pages_of_a_failed_step_that_are_kept_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Scheduler.fail

    def trusting(self: Scheduler, batch: Batch, message: str) -> list[Output]:
        end = self._end

        def publish(sequence: Any, *args: Any) -> Output:
            sequence.publish = True
            return end(sequence, *args)

        self._end = publish  # type: ignore[method-assign]
        try:
            return fail(self, batch, message)
        finally:
            self._end = end  # type: ignore[method-assign]

    monkeypatch.setattr(Scheduler, "fail", trusting)
    found(config(failure_rate=0.05, stems=1, tenants=1), "it should be", steps=4000)


def test_a_starved_tenant_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Fcfs, "order", lambda self, sequences, now: [s for s in sequences if s.namespace.tenant != "t1"]
    )
    found(config(), "starves", steps=20_000)


def test_an_engine_that_stands_still_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "schedule", lambda self: None)
    found(config(), "starves", steps=1_000_000)


def test_an_unfair_policy_is_found() -> None:
    def unfair(executor: Any, limits: Any, options: SchedulerOptions, **others: Any) -> Engine:
        return Engine(executor, limits, msgspec.structs.replace(options, policy="fcfs"), **others)

    found(config("fair", greedy=0.8, max_waiting=64), "both waited", steps=20_000, make=unfair)


def test_a_preemption_after_a_guarantee_is_found() -> None:
    def careless(executor: Any, limits: Any, options: SchedulerOptions, **others: Any) -> Engine:
        return Engine(executor, limits, msgspec.structs.replace(options, admission="none"), **others)

    found(config("fcfs", "guaranteed", pages=24, longest_output=200), "guaranteed", make=careless)


def test_a_deadline_that_is_overlooked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "expire", lambda self: [])
    found(config(deadline_share=0.5, longest_deadline=0.5), "after its deadline")


def test_a_deadline_that_comes_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add

    def hasty(self: Scheduler, request: Any) -> None:
        deadline = request.service.deadline
        service = msgspec.structs.replace(request.service, deadline=deadline and deadline - 0.2)
        add(self, msgspec.structs.replace(request, service=service))

    monkeypatch.setattr(Scheduler, "add", hasty)
    found(config(deadline_share=0.5, longest_deadline=0.5), "before its deadline")
