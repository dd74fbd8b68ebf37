"""The disk tier under a scheduler: what memory had no room for comes back, and never changes an answer."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from engines import checkpoint, compiled
from scheduling import Bench, ids
from test_disk_tier import MemoryStore
from tricorn.cache.disk import DiskTier
from tricorn.request import Namespace, Service
from tricorn.scheduler.cost import Cost
from tricorn.scheduler.options import SchedulerOptions
from tricorn.simulate.executor import FakeExecutor

FIXED = settings(derandomize=True, deadline=None, max_examples=40)


def bench(pages: int, store: MemoryStore, size: int = 1 << 22, **more: object) -> Bench:
    """What a step costs stays unknown, so that pages are read whenever they can be."""
    executor = FakeExecutor(pages, max_tokens=64, max_rows=64)
    tier = DiskTier(store, executor.page_bytes, size, threaded=False)
    machine = Bench(pages=pages, executor=executor, tier=tier, **more)  # type: ignore[arg-type]
    machine.scheduler.costs.observe = lambda work, seconds: None  # type: ignore[method-assign]
    return machine


def test_evicted_pages_come_back() -> None:
    random = Random(1)
    machine = bench(20, MemoryStore())
    prompts = [ids(random, 200) for _ in range(4)]
    for prompt in prompts * 2:
        machine.add(prompt, max_tokens=3)
        machine.run()
    machine.verify_all()
    assert machine.engine.stats().disk_hit_tokens >= 4 * 160
    assert machine.engine.stats().evicted_pages > 20
    cached = [machine.said[f"r{turn}"][-1].cached_tokens for turn in range(8)]
    assert cached[:4] == [0] * 4
    assert all(count == 192 for count in cached[4:])


def test_an_idle_engine_saves_what_it_has_and_the_next_one_finds_it() -> None:
    random = Random(2)
    store = MemoryStore()
    prompt = ids(random, 300)
    for expected in (0, 288):
        machine = bench(40, store)
        while machine.engine.tier and machine.engine.tier.work():
            pass  # reads the headers
        id = machine.add(prompt, max_tokens=20)
        machine.run()
        machine.verify(id)
        assert machine.said[id][-1].cached_tokens == expected
        while machine.engine.tidy():
            pass
        machine.engine.close()


def test_other_namespaces_and_engines_have_other_pages() -> None:
    random = Random(3)
    machine = bench(20, MemoryStore())
    prompt, other = ids(random, 200), ids(random, 250)
    for namespace in (Namespace("x"), Namespace("", "x"), Namespace("", "", "x"), Namespace()):
        machine.add(prompt, service=Service(namespace=namespace), max_tokens=1)
        machine.run()
        machine.add(other, service=Service(namespace=namespace), max_tokens=1)  # drives the first one out
        machine.run()
    machine.verify_all()
    assert machine.engine.stats().disk_hit_tokens == 0


def test_what_is_quicker_to_compute_is_computed() -> None:
    random = Random(4)
    machine = bench(20, MemoryStore())
    assert machine.engine.tier
    prompts = [ids(random, 200) for _ in range(4)]
    for prompt in prompts * 2:
        machine.add(prompt, max_tokens=3)
        machine.run()
    before = machine.engine.stats().disk_hit_tokens
    assert before > 0
    machine.scheduler.costs.cost = Cost(0, 1e-9, 0, 0, 0)
    for prompt in prompts:
        machine.add(prompt, max_tokens=3)
        machine.run()
    machine.verify_all()
    assert machine.engine.stats().disk_hit_tokens == before


def test_pages_are_not_let_go_while_the_disk_writes_into_them() -> None:
    """The request is aborted while its pages are on the way: they are kept until the tier is done with them."""
    random = Random(5)
    machine = bench(20, MemoryStore())
    assert machine.engine.tier
    prompts = [ids(random, 200), ids(random, 250)]
    for prompt in prompts:
        machine.add(prompt, max_tokens=1)
        machine.run()
    while machine.engine.tier.work():
        pass
    id = machine.add(prompts[0], max_tokens=1)
    machine.hear(machine.engine.step())  # without work of the tier
    assert len(machine.scheduler._loading.held) == 1  # type: ignore[union-attr]
    machine.abort(id)
    assert machine.pool.held == 12
    machine.scheduler.check()
    while machine.engine.tier.work():
        pass
    id = machine.add(prompts[0], max_tokens=1)
    machine.run()
    machine.verify(id)
    assert machine.said[id][-1].cached_tokens == 192


@given(seed=st.integers(0, 2**32))
@FIXED
def test_random_traffic_over_a_faulty_disk(seed: int) -> None:
    """Small pools, aborts, flipped bits, a full disk, restarts on the same file: every answer is what its prompt alone
    says."""
    random = Random(seed)
    store = MemoryStore(room=random.choice([1 << 30, 40_000]))
    stems = [ids(random, 100) for _ in range(3)]
    for _ in range(2):
        pages = random.randrange(9, 30)
        options = SchedulerOptions(admission=random.choice(["guaranteed", "expected", "none"]))
        machine = bench(pages, store, random.choice([1 << 16, 1 << 22]), options=options)
        for turn in range(25):
            prompt = random.choice(stems)[: random.randrange(100)] + ids(random, random.randrange(1, 20))
            machine.add(prompt, max_tokens=random.randrange(1, 20), service=Service(retention=random.randrange(100)))
            for _ in range(random.randrange(8)):
                machine.step()
            if random.random() < 0.1:
                machine.abort(f"r{turn}")
            if store.data and random.random() < 0.3:
                store.data[random.randrange(len(store.data))] ^= 1 << random.randrange(8)
            if random.random() < 0.3 and machine.engine.idle:
                machine.engine.tidy()
        machine.run()
        for id, said in machine.said.items():
            machine.verify(id, complete=said[-1].finish_reason != "abort")
        machine.engine.close()


def test_a_restarted_native_engine_reads_its_pages(tmp_path: Path) -> None:
    """Bit for bit, through the front door, and with little computed again."""
    from tricorn.engine.factory import open_engine
    from tricorn.engine.options import EngineOptions
    from tricorn.request import Output, Request, SamplingParams

    path = compiled(checkpoint("llama"), tmp_path).path
    random = Random(6)
    said: list[list[Output]] = []
    prompt = [random.randrange(60) for _ in range(150)]
    for _ in range(2):
        options = EngineOptions(path=str(path), threads=1, kv_bytes=4 << 20, kv_disk=str(tmp_path / "kv"))
        engine, _ = open_engine(options)
        assert engine.tier
        while engine.tier._scan:  # the headers are read by a thread
            time.sleep(0.001)
        engine.add(Request(id="r", prompt=prompt, params=SamplingParams(max_tokens=20, logprobs=5), seed=3))
        outputs: list[Output] = []
        while not engine.idle:
            outputs += engine.step()
        said.append(outputs)
        engine.close()
    assert [[o.token_ids, o.logprobs] for o in said[0]] == [[o.token_ids, o.logprobs] for o in said[1]]
    assert (said[0][-1].cached_tokens, said[1][-1].cached_tokens) == (0, 144)
    assert len(list((tmp_path / "kv").iterdir())) == 1


def test_kinds_of_cache_do_not_share_a_file(tmp_path: Path) -> None:
    from tricorn.engine.factory import open_engine
    from tricorn.engine.options import EngineOptions

    path = compiled(checkpoint("llama"), tmp_path).path
    for kv_type in ("f16", "bf16"):
        options = EngineOptions(
            path=str(path),
            threads=1,
            kv_bytes=4 << 20,
            kv_type=kv_type,  # type: ignore[arg-type]
            kv_disk=str(tmp_path / "kv"),
        )
        engine, _ = open_engine(options)
        engine.close()
    assert len(list((tmp_path / "kv").glob("*.kv"))) == 2
