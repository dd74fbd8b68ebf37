"""Policies, admission, deadlines and the target time of a step, through the engine's public doors."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling import Bench, ids
from tricorn.request import Namespace, Service, TricornError
from tricorn.scheduler.admission import Outlook
from tricorn.scheduler.cost import Cost, CostModel, Work
from tricorn.scheduler.options import Admission, PolicyName, SchedulerOptions

FIXED = settings(derandomize=True, deadline=None, max_examples=60)
POLICIES: list[PolicyName] = ["fcfs", "lpm", "dfs-weight", "priority", "fair"]


def service(priority: int = 0, tenant: str = "", deadline: float | None = None) -> Service:
    return Service(namespace=Namespace(tenant=tenant), priority=priority, deadline=deadline)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("admission", ["guaranteed", "expected", "none"])
def test_no_policy_changes_an_answer(policy: PolicyName, admission: Admission) -> None:
    random = Random(5)
    bench = Bench(pages=40, budget=48, options=SchedulerOptions(policy=policy, admission=admission))
    stems = [ids(random, 50) for _ in range(3)]
    for turn in range(40):
        prompt = random.choice(stems)[: random.randrange(1, 50)] + ids(random, random.randrange(1, 40))
        wanted = service(random.randrange(-9, 9), random.choice("abc"))
        bench.add(prompt, service=wanted, max_tokens=random.randrange(1, 90), ignore_eos=random.random() < 0.8)
        for _ in range(random.randrange(6)):
            bench.step()
        if turn % 9 == 8:
            bench.abort(f"r{turn - 4}")
    bench.run()
    for id, said in bench.said.items():
        bench.verify(id, complete=said[-1].finish_reason != "abort")
    assert len(bench.ended) == 40
    if admission == "guaranteed":
        assert bench.scheduler.counts["preemptions"] == 0


def test_higher_priorities_first_and_nothing_starves() -> None:
    bench = Bench(sequences=1, options=SchedulerOptions(policy="priority"))
    bench.add([2], max_tokens=5, ignore_eos=True)
    bench.step()
    for priority in (0, 5, -5, 5):
        bench.add([3], service=service(priority), max_tokens=5, ignore_eos=True)
    bench.run()
    assert bench.ended == ["r0", "r2", "r4", "r1", "r3"]

    bench = Bench(sequences=1, options=SchedulerOptions(policy="priority"))
    bench.add([2], max_tokens=2, ignore_eos=True)
    bench.step()
    low = bench.add([3], service=service(-20), max_tokens=2)
    while low not in bench.ended:  # a flood of better ones
        while len(bench.scheduler.waiting) < 3:
            bench.add([4], service=service(0), max_tokens=2, ignore_eos=True)
        bench.step()
        assert bench.now < 30, "twenty points below are worth twenty seconds"
    assert bench.now > 20


def test_the_lowest_priority_is_preempted() -> None:
    bench = Bench(pages=8, options=SchedulerOptions(policy="priority", admission="none"))
    bench.add([2] * 16, service=service(0), max_tokens=100, ignore_eos=True)
    bench.step()
    bench.add([3] * 16, service=service(9), max_tokens=100, ignore_eos=True)
    bench.run()
    assert bench.scheduler.counts["preemptions"] > 0
    assert bench.ended == ["r1", "r0"]


def test_longest_cached_prefix_first() -> None:
    random = Random(3)
    bench = Bench(sequences=1, options=SchedulerOptions(policy="lpm"))
    known = ids(random, 100)
    bench.add(known, max_tokens=1, ignore_eos=True)
    bench.run()
    bench.add(ids(random, 20), max_tokens=9, ignore_eos=True)
    bench.step()
    bench.add(ids(random, 90), max_tokens=3)
    bench.add(known[:40] + ids(random, 40), max_tokens=3)
    bench.add(known[:90] + ids(random, 40), max_tokens=3)
    bench.run()
    assert bench.ended == ["r0", "r1", "r4", "r3", "r2"]


def test_branches_run_together() -> None:
    """Two branches of the tree, their requests arriving by turns: one branch is served before the other, the heavier
    first."""
    random = Random(4)
    bench = Bench(sequences=1, options=SchedulerOptions(policy="dfs-weight"))
    stems = [ids(random, 48), ids(random, 48)]
    for stem in stems:
        bench.add(stem, max_tokens=1)
    bench.run()
    bench.add(ids(random, 20), max_tokens=9, ignore_eos=True)
    bench.step()
    branch = {bench.add(stems[which] + ids(random, 5), max_tokens=2): which for which in (0, 1, 1, 0, 1)}
    bench.run()
    assert [branch[id] for id in bench.ended[3:]] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_a_stranger_to_the_tree_does_not_starve(policy: PolicyName) -> None:
    random = Random(6)
    bench = Bench(sequences=1, options=SchedulerOptions(policy=policy))
    known = ids(random, 60)
    bench.add(known, max_tokens=1)
    bench.run()
    bench.add(known, max_tokens=2)
    stranger = bench.add(ids(random, 40), max_tokens=2)
    while stranger not in bench.ended:
        while len(bench.scheduler.waiting) < 3:
            bench.add(known + ids(random, 3), max_tokens=2, ignore_eos=True)
        bench.step()
        assert bench.now < 11
    assert bench.now > 9


def test_tenants_share_the_work() -> None:
    """One tenant sends ten requests for each of the other's, and longer ones. Their work stays equal while both want
    more."""
    random = Random(7)
    bench = Bench(pages=200, sequences=4, options=SchedulerOptions(policy="fair"))
    work = {"greedy": 0, "modest": 0}
    largest = 0

    def fill() -> None:
        for tenant, count, length in (("greedy", 10, 60), ("modest", 1, 12)):
            mine = [s for s in bench.scheduler.waiting if s.namespace.tenant == tenant]
            for _ in range(count if not mine else 0):
                bench.add(ids(random, length), service=service(tenant=tenant), max_tokens=30, ignore_eos=True)

    charge = bench.scheduler._policy.charge

    def watch(sequence, tokens):  # type: ignore[no-untyped-def]
        work[sequence.namespace.tenant] += tokens
        charge(sequence, tokens)

    bench.scheduler._policy.charge = watch  # type: ignore[method-assign]
    for _ in range(3000):
        fill()
        bench.step()
        largest = max(largest, abs(work["greedy"] - work["modest"]))
    assert min(work.values()) > 5 * 1024
    assert largest <= 1024 + 4 * 90


def test_a_late_tenant_waits_for_nobodys_backlog() -> None:
    bench = Bench(sequences=2, options=SchedulerOptions(policy="fair"))
    for _ in range(50):
        bench.add([2] * 40, service=service(tenant="many"), max_tokens=40, ignore_eos=True)
    for _ in range(100):
        bench.step()
    late = bench.add([3], service=service(tenant="one"), max_tokens=1)
    bench.run()
    assert bench.ended.index(late) < 10


# --- deadlines


def test_deadlines_end_requests_wherever_they_are() -> None:
    bench = Bench(sequences=1)
    running = bench.add([2], service=service(deadline=0.5), max_tokens=900, ignore_eos=True)
    queued = bench.add([3], service=service(deadline=0.3), max_tokens=5, ignore_eos=True)
    patient = bench.add([4], service=service(deadline=50.0), max_tokens=5, ignore_eos=True)
    bench.run()
    assert [bench.said[id][-1].finish_reason for id in (running, queued, patient)] == ["timeout", "timeout", "length"]
    assert bench.tokens(queued) == []
    assert 30 < len(bench.tokens(running)) < 60
    bench.verify(running, complete=False)
    bench.verify(patient)
    queue, prefill, decode = (getattr(bench.said[queued][-1].timings, name) for name in ("queued", "prefill", "decode"))
    assert queue == pytest.approx(0.3, abs=0.02)
    assert prefill == decode == 0
    assert bench.engine.stats().finished == {"timeout": 2, "length": 1}


def test_impossible_service_is_refused() -> None:
    bench = Bench()
    for wrong, word in (
        (Service(priority=101), "priority"),
        (Service(retention=-1), "retention"),
        (Service(pin_seconds=-1.0), "pin_seconds"),
        (Service(deadline=float("nan")), "deadline"),
        (Service(namespace=Namespace(tenant="x" * 300)), "tenant"),
        (Service(namespace=Namespace(adapter="\n")), "adapter"),
    ):
        with pytest.raises(TricornError, match=word):
            bench.add([2], service=wrong)
    assert bench.engine.idle


def test_namespaces_are_compared_field_by_field() -> None:
    """A-068: no salt can pass for a tenant or an adapter, or run over into another field."""
    bench = Bench(pages=200)
    names = ["", "x", "y", "xy"]
    spaces = [Namespace(a, b, c) for a in names for b in names for c in names]
    for space in spaces:
        bench.add([5] * 40, service=Service(namespace=space), max_tokens=1)
    bench.run()
    assert all(said[-1].cached_tokens == 0 for said in bench.said.values())


# --- admission


@given(seed=st.integers(0, 2**32))
@FIXED
def test_guaranteed_admission_never_preempts(seed: int) -> None:
    random = Random(seed)
    pages = random.randrange(2, 40)
    bench = Bench(pages=pages, budget=random.choice([8, 64]), options=SchedulerOptions(admission="guaranteed"))
    stem = ids(random, 60)
    for _ in range(20):
        most = bench.scheduler.limits.context - 2
        prompt = (stem[: random.randrange(60)] + ids(random, random.randrange(1, 30)))[:most]
        bench.add(prompt, max_tokens=random.randrange(1, 60), ignore_eos=True)
        for _ in range(random.randrange(5)):
            bench.step()
    bench.run()
    bench.verify_all()
    assert bench.scheduler.counts["preemptions"] == 0


def test_expected_admission_learns_the_lengths() -> None:
    """Clients ask for far more than they take: the guaranteed engine runs them one by one, the expected one side by
    side, with next to no preemption."""
    steps: dict[str, int] = {}
    for admission in ("guaranteed", "expected"):
        random = Random(8)
        bench = Bench(pages=60, context=900, options=SchedulerOptions(admission=admission))  # type: ignore[arg-type]
        for _ in range(150):
            bench.add(ids(random, 30), max_tokens=800)  # two ids in 97 end it
        bench.run()
        bench.verify_all()
        steps[admission] = bench.executor.steps
        assert bench.scheduler.counts["recomputed_tokens"] <= 0.02 * bench.executor.tokens_run
    assert steps["expected"] < 0.5 * steps["guaranteed"]


@given(seed=st.integers(0, 2**32))
@FIXED
def test_the_outlook_agrees_with_a_simulation(seed: int) -> None:
    """The peak is what a plain simulation, token by token, finds."""
    random = Random(seed)
    count = random.randrange(1, 9)
    outlook = Outlook("expected")
    lengths = [random.randrange(1, 60) for _ in range(600)]
    for length in lengths:
        outlook.ended(length)
    outputs = [random.randrange(0, 50) for _ in range(count)]
    length = [random.randrange(1, 100) + done for done in outputs]
    most = [known + random.randrange(0, 60) for known in length]
    pages = [-(-known // 16) + random.randrange(2) for known in length]
    own = [random.randrange(held + 1) for held in pages]
    held = sum(own) + random.randrange(50)

    kept = sorted(lengths[-512:])
    left = []
    for done, limit, known in zip(outputs, most, length, strict=True):
        longer = [x for x in kept if x > done]
        expected = -(-(sum(longer) - done * len(longer)) // len(longer)) if longer else max(done, 1)
        left.append(min(limit - known, expected))
    peak = held
    for time in range(max(left) + 1):
        now = held
        for known, remaining, have, mine in zip(length, left, pages, own, strict=True):
            now += max(-(-(known + time) // 16) - have, 0) if remaining >= time else -mine
        peak = max(peak, now)
    columns = [np.array(column, np.int32) for column in (length, most, outputs, pages, own)]
    assert outlook.peak(held, *columns) == peak


# --- the time of a step


def test_the_cost_model_finds_the_truth_in_noise() -> None:
    random = Random(9)
    truth = Cost(0.004, 0.0008, 2e-7, 0.0007, 4e-7)
    model = CostModel()
    for _ in range(400):
        prefill = random.choice([0, 0, 16, 100, 512])
        rows = random.randrange(0, 32) if prefill else random.randrange(1, 32)
        work = Work(prefill, prefill * random.randrange(4000), rows, rows * random.randrange(10, 4000))
        noise = random.choice([1.0] * 9 + [6.0]) * random.uniform(0.9, 1.1)
        model.observe(work, truth.seconds(work) * noise)
    assert model.cost is not None
    for work in (Work(512, 512 * 256, 0, 0), Work(0, 0, 16, 16 * 512), Work(100, 100 * 2000, 8, 8 * 1000)):
        assert model.cost.seconds(work) == pytest.approx(truth.seconds(work), rel=0.15)
    most = truth.prefill_within(1000, 0.1)
    assert truth.prefill_seconds(1000, most) <= 0.1 < truth.prefill_seconds(1000, most + 1)


@given(seed=st.integers(0, 2**32))
@FIXED
def test_costs_are_never_negative(seed: int) -> None:
    random = Random(seed)
    model = CostModel()
    model.observe(Work(prefill_tokens=200), 0.1)
    for _ in range(random.randrange(8, 80)):
        work = Work(*(random.choice([0, random.randrange(1000)]) for _ in range(4)))
        model.observe(work, random.random() * random.choice([0, 1e-3, 1]))
    assert model.cost is not None
    assert all(getattr(model.cost, name) >= 0 for name in model.cost.__struct_fields__)
    assert model.cost.prefill_within(random.randrange(1000), random.random()) >= 0


def test_prompts_fit_the_target_time() -> None:
    """Steps with decoding sequences take the target at most, as soon as the cost is known; without, they are full."""
    truth = Cost(0.005, 0.001, 1e-7, 0.001, 0.0)
    bench = Bench(pages=400, budget=256, rows=256, context=4000, options=SchedulerOptions(target_itl=0.08))
    seconds: list[float] = []
    commit = bench.scheduler.commit

    def timed(batch, result, _):  # type: ignore[no-untyped-def]
        if batch.decodes and batch.work.prefill_tokens:
            seconds.append(truth.seconds(batch.work))
        return commit(batch, result, truth.seconds(batch.work))

    bench.scheduler.commit = timed  # type: ignore[method-assign]
    random = Random(10)
    for _ in range(4):
        bench.add(ids(random, 20), max_tokens=900, ignore_eos=True)
    for _ in range(40):
        bench.step()
    for _ in range(6):
        bench.add(ids(random, 300), max_tokens=1)
    bench.run()
    bench.verify_all()
    late = seconds[len(seconds) // 2 :]
    assert len(late) > 5
    assert max(late) < 0.09
    assert np.median(late) > 0.06


def test_the_state_shows_requests_pages_and_tree() -> None:
    random = Random(11)
    bench = Bench(pages=30, sequences=2)
    stem = ids(random, 40)
    bench.add(stem, service=service(tenant="t"), max_tokens=1)
    bench.run()
    for _ in range(4):
        bench.add(stem + ids(random, 3), service=service(3, "t", 99.0), max_tokens=90, ignore_eos=True)
    for _ in range(5):
        bench.step()
    state = bench.engine.state(tree=True).state
    assert [len(state["requests"][name]) for name in ("running", "waiting")] == [2, 2]
    first = state["requests"]["running"][0]
    assert (first["prompt_tokens"], first["cached_tokens"], first["tenant"], first["phase"]) == (43, 40, "t", "decode")
    pages = state["pages"]
    assert pages["free"] + pages["held"] + pages["cached"] == pages["total"] == len(pages["map"]) == 30
    counts = [pages["map"].count(kind) for kind in ".chs"]
    assert counts == [pages["free"], pages["cached"], pages["held"] - 2, 2]
    runs = state["tree"]["runs"]
    assert all(run["parent"] < index for index, run in enumerate(runs))
    assert sum(run["tokens"] for run in runs) >= 40
    assert "tree" not in bench.engine.state().state
    assert bench.engine.state().state["cost"] is None or bench.engine.state().state["cost"].step >= 0
