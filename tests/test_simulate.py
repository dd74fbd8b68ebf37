"""The simulation: a short run of it, its determinism, and that it finds what it is there to find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from tricorn import cli
from tricorn.cache import radix
from tricorn.cache.pool import PagePool
from tricorn.cache.radix import Match, RadixTree
from tricorn.cache.records import Records
from tricorn.engine import ledger
from tricorn.engine.engine import Engine
from tricorn.engine.ledger import Ledger
from tricorn.engine.options import EngineOptions
from tricorn.request import Namespace, Output, Request, TricornError
from tricorn.scheduler.batch import Batch
from tricorn.scheduler.cost import Cost, Work
from tricorn.scheduler.options import SchedulerOptions
from tricorn.scheduler.policies.fcfs import Fcfs
from tricorn.scheduler.scheduler import Scheduler
from tricorn.simulate.capacity import Capacity, Fleet, Question
from tricorn.simulate.config import Config, draw
from tricorn.simulate.machine import Machine, measure
from tricorn.simulate.run import run_seed, run_seeds
from tricorn.simulate.world import World

CALM = {
    "plain": True,
    "abort_share": 0.0,
    "deadline_share": 0.0,
    "failure_rate": 0.0,
    "death_rate": 0.0,
    "poison_share": 0.0,
    "disk_pages": 0,
}
DISK = {"pages": 20, "disk_pages": 256, "disk_read_seconds": 0.0, "disk_fault_rate": 0.0}


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
    """Thirty seeds: all policies and admissions, with aborts, deadlines, failed steps, deaths and disk faults."""
    reports = list(run_seeds(0, 30, 400))
    for report in reports:
        assert report.violation is None, (report.config.seed, report.violation)
        assert report.steps >= 400
    assert {report.config.options.policy for report in reports} == {"fcfs", "lpm", "dfs-weight", "priority", "fair"}
    assert {report.config.options.admission for report in reports} == {"guaranteed", "expected", "none"}
    endings = {reason for report in reports for reason in report.endings}
    assert endings == {"stop", "length", "abort", "timeout", "error"}
    assert sum(report.preemptions for report in reports) > 0
    assert sum(report.deaths for report in reports) > 10
    assert sum(report.disk_faults for report in reports) > 10
    assert sum(report.disk_hit_tokens for report in reports) > 500
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
    for policy, admission in (("fcfs", "guaranteed"), ("fair", "expected"), ("lpm", "none")):
        assert World(config(policy, admission)).run(300).violation is None
    rough = config(deadline_share=0.5, failure_rate=0.05, abort_share=0.3, death_rate=0.01, poison_share=0.01, **DISK)
    report = World(rough).run(600)
    assert report.violation is None
    assert report.deaths > 1
    assert report.disk_hit_tokens > 100


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
        return dataclasses.replace(found, pages=found.pages[::-1].copy())

    monkeypatch.setattr(RadixTree, "match", swapped)
    found(config(), "")


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


def test_a_request_lost_in_a_death_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    died = Ledger.died

    def forgetful(self: Ledger) -> list[Output]:
        ended = died(self)
        if self._unsent:
            del self._unsent[next(iter(self._unsent))]
        return ended

    monkeypatch.setattr(Ledger, "died", forgetful)
    found(config(death_rate=0.01), "kept from an idle engine", steps=300)


def test_tokens_sent_again_after_a_death_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    due = Ledger.due

    def repeating(self: Ledger) -> list[Request]:
        return [msgspec.structs.replace(request, resume=request.resume[:-1]) for request in due(self)]

    monkeypatch.setattr(Ledger, "due", repeating)
    found(config(death_rate=0.01), "it should be")


def test_an_innocent_request_that_is_given_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MOST_DEATHS", 1)
    found(config(death_rate=0.02), "nothing has caused")


def test_a_page_from_disk_that_is_not_checked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def trusting(self: Records, slot: int, key: bytes) -> np.ndarray | None:
        try:
            self.store.read(slot * self.stride, self._buffer)
        except OSError:
            return None
        return self._page

    monkeypatch.setattr(Records, "read", trusting)
    small = {"pages": 16, "stems": 1, "tenants": 4, "longest_output": 8, "disk_fault_rate": 0.05}
    found(config(**DISK | small), "it should be", steps=10_000)


def test_a_key_on_disk_without_its_namespace_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    root = radix.root_key
    monkeypatch.setattr(radix, "root_key", lambda engine, _: root(engine, Namespace()))
    found(config(tenants=4, salts=2, stems=16, **DISK), "another namespace", steps=4000)


# Questions of capacity

MACHINE = Machine(
    model="imagined",
    pages=512,
    context=2048,
    max_sequences=16,
    max_tokens=256,
    cost=Cost(step=0.01, prefill_token=1e-4, prefill_pair=0.0, decode_row=1e-3, decode_pair=0.0),
)


def ask(**changes: Any) -> Capacity:
    base = {"clients": 40, "replicas": 4, "prompt": 60, "output": 20, "requests": 2, "ramp": 0.5, "think": 0.1}
    return Fleet(MACHINE, Question(**(base | changes))).run()


def test_capacity_of_a_fleet() -> None:
    """The same question has the same answer; a client alone waits for its own steps only; with more replicas the wait
    is shorter; a gate that is shut refuses, and everybody is answered in the end."""
    answer = ask()
    assert answer == ask()
    assert answer.requests == 80
    alone = ask(clients=1, replicas=1, requests=1)
    assert 0.010 < alone.ttft.p50 < 0.025
    assert alone.itl.p50 == pytest.approx(0.011, rel=0.05)
    crowded, roomy = ask(replicas=1), ask(replicas=20)
    assert crowded.ttft.p99 > answer.ttft.p99 > roomy.ttft.p99
    assert crowded.busy_share > answer.busy_share > roomy.busy_share
    shut = ask(replicas=1, max_waiting=1)
    assert shut.refused > 0
    assert shut.requests == 80


def test_a_router_that_knows_prefixes() -> None:
    """Prompts that begin alike meet at one replica, and find each other's pages there."""
    question = {"clients": 60, "replicas": 6, "shared": 50, "groups": 6}
    least, prefix = ask(router="least", **question), ask(router="prefix", **question)
    assert prefix.hit_share > least.hit_share
    assert prefix.requests == least.requests == 120


def test_the_capacity_command(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_bytes(msgspec.json.encode(MACHINE))
    run = ["bench", "capacity", "--clients", "4", "--replicas", "2", "--requests", "1", "--output", "4", "--json"]
    result = CliRunner().invoke(cli.app, [*run, "--cost", str(file)])
    assert result.exit_code == 0, result.output
    assert msgspec.json.decode(result.stdout)["answer"]["requests"] == 4
    file.write_text("{}")
    result = CliRunner().invoke(cli.app, [*run, "--cost", str(file)])
    assert isinstance(result.exception, TricornError)
    assert "tricorn bench cost" in str(result.exception)


def test_a_machine_is_measured(smollm2_engine: Path) -> None:
    """The fitted cost is near what the steps took, and every part of it is plausible."""
    machine = measure("smollm2-135m", EngineOptions(path=str(smollm2_engine), kv_bytes=64 << 20), batches=(1, 4))
    cost = machine.cost
    assert 1e-5 < cost.seconds(Work(decode_rows=1)) < 1
    assert 1e-6 < cost.prefill_seconds(0, 100) / 100 < 0.1
    assert machine.context > 100
    assert machine.error < 0.6
