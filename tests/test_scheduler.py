"""The scheduler, the page pool and the tree together, through the engine's public doors, against an executor that
notices every mistake."""

from __future__ import annotations

import time
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_executor import VOCAB, expected
from scheduling import Bench, ids
from tricorn.request import Request, SamplingParams, TricornError
from tricorn.runtime.step import PAGE, StepResult
from tricorn.scheduler.options import SchedulerOptions

FIXED = settings(derandomize=True, deadline=None, max_examples=60)


def some_params(random: Random) -> dict[str, object]:
    """Sampling parameters of every kind."""
    params: dict[str, object] = {
        "max_tokens": random.choice([1, 2, 3, 8, 17, 30, 150]),
        "temperature": random.choice([0.0, 0.5, 1.0]),
    }
    if random.random() < 0.3:
        params |= {"top_k": random.randrange(5), "top_p": random.random(), "min_p": random.random()}
    if random.random() < 0.3:
        params |= {"repetition_penalty": 1.1, "presence_penalty": random.choice([0.0, 0.5]), "frequency_penalty": 0.25}
    if random.random() < 0.2:
        params |= {"logit_bias": {5: 1.5, 9: -2.0}}
    if random.random() < 0.3:
        params |= {"stop_token_ids": tuple(ids(random, 3)), "ignore_eos": random.random() < 0.5}
    if random.random() < 0.3:
        params |= {"min_tokens": random.randrange(12)}
    if random.random() < 0.3:
        params |= {"logprobs": random.randrange(4)}
    if random.random() < 0.15:
        params |= {"prompt_logprobs": random.randrange(3), "max_tokens": random.choice([0, 1, 5])}
    elif random.random() < 0.15:
        params |= {"pooling": random.choice(["mean", "last"]), "max_tokens": 0}
    return params


def random_run(bench: Bench, random: Random, count: int, longest: int, abort_share: float) -> set[str]:
    """Adds `count` requests with a few common beginnings at random moments, aborting some; gives the ids of those."""
    stems = [ids(random, random.randrange(1, max(longest - 8, 2))) for _ in range(5)]
    aborted: set[str] = set()
    while len(bench.requests) < count or not bench.engine.idle:
        if len(bench.requests) < count and random.random() < 0.4:
            for _ in range(random.choice([1, 1, 1, 4])):
                stem = random.choice(stems)
                prompt = (stem[: random.randrange(len(stem) + 1)] + ids(random, random.randrange(1, 9)))[:longest]
                bench.add(
                    prompt, seed=random.choice([1, 2**64 - 1]), salt=random.choice(["", "", "s"]), **some_params(random)
                )
        if random.random() < abort_share:
            live = [id for id in bench.requests if not (bench.said[id] and bench.said[id][-1].finish_reason)]
            if live:
                victim = random.choice(live)
                aborted.add(victim)
                bench.abort(victim)
        bench.step()
    bench.run()
    for id in bench.requests:
        bench.verify(id, complete=id not in aborted)
    return aborted


@given(
    seed=st.integers(0, 2**32),
    pages=st.integers(2, 24),
    budget=st.integers(1, 64),
    sequences=st.integers(1, 8),
    overlap=st.booleans(),
    rows=st.integers(1, 64),
)
@settings(FIXED, max_examples=120)
def test_any_schedule_gives_the_same_answers(
    seed: int, pages: int, budget: int, sequences: int, overlap: bool, rows: int
) -> None:
    """A-070, A-072, A-073, A-077, A-079: random adds, aborts, shared beginnings, tiny pools and budgets."""
    bench = Bench(pages, budget, sequences, overlap, rows)
    random_run(bench, Random(seed), count=14, longest=min(60, pages * PAGE - 2), abort_share=0.05)


@pytest.mark.parametrize("overlap", [True, False])
def test_two_thousand_requests(overlap: bool) -> None:
    """A-073: a long random run with a small pool. Every page is accounted for after every step, and at the end nothing
    is held."""
    bench = Bench(pages=26, budget=48, sequences=12, overlap=overlap)
    aborted = random_run(bench, Random(11), count=2000, longest=120, abort_share=0.08)
    assert len(aborted) > 100
    assert bench.scheduler.counts["preemptions"] > 0
    assert bench.scheduler.counts["prefix_hit_tokens"] > 1000
    bench.scheduler.tree.clear()
    assert bench.pool.free == bench.pool.total


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE - 1, 1])
def test_a_wholly_cached_prompt_computes_its_last_token(length: int) -> None:
    """A-065: the same prompt three times, and then all lengths together; reuse is exact to the token and never the
    whole prompt."""
    bench = Bench()
    prompt = ids(Random(3), length)
    for turn in range(3):
        id = bench.add(prompt, max_tokens=16, logprobs=1)
        bench.run()
        assert bench.said[id][0].cached_tokens == (length - 1 if turn else 0)
    for cut in range(1, length + 1):
        bench.add(prompt[:cut], max_tokens=3, logprobs=1)
    bench.run()
    bench.verify_all()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_sharing_part_of_a_cached_text(order: tuple[int, ...]) -> None:
    """A-066: a shorter, a diverging and a changed prompt after a longer one, in both orders."""
    random = Random(4)
    shared = ids(random, 100)
    first = shared + ids(random, 60)
    changed = [*first[:50], (first[50] + 1) % VOCAB, *first[51:]]
    prompts = [first, shared + ids(random, 5), first[:37], changed]
    bench = Bench()
    for index in order:
        bench.add(prompts[index], max_tokens=20)
        bench.run()
    bench.verify_all()
    assert bench.scheduler.counts["prefix_hit_tokens"] > 0


def test_prompt_logprobs_do_not_depend_on_the_cache() -> None:
    """A-067: cold, warm, after another request, two at once, and with fewer rows in a step than the prompt has
    tokens."""
    prompt = ids(Random(5), 3 * PAGE + 5)
    for rows in (64, 5):
        bench = Bench(rows=rows)
        for _ in range(2):
            bench.add(prompt, max_tokens=1, logprobs=1, prompt_logprobs=1)
            bench.run()
        bench.add(ids(Random(6), 70), max_tokens=4)
        bench.run()
        for _ in range(2):
            bench.add(prompt, max_tokens=0, prompt_logprobs=2)
        bench.add(prompt, max_tokens=0)
        bench.add(prompt[:1], max_tokens=0, prompt_logprobs=2)
        bench.run()
        bench.verify_all()


def test_namespaces_share_nothing() -> None:
    bench = Bench()
    prompt = ids(Random(8), 50)
    for salt, cached in (("a", 0), ("b", 0), ("a", 49), ("", 0)):
        id = bench.add(prompt, salt=salt, max_tokens=2)
        bench.run()
        assert bench.said[id][0].cached_tokens == cached
    bench.verify_all()


def test_identical_prompts_at_once_under_pressure() -> None:
    """A-070: eight identical prompts computed side by side while others churn the pool."""
    random = Random(9)
    bench = Bench(pages=64, budget=64, sequences=16)
    prompt = ids(random, 300)
    for _ in range(8):
        bench.add(prompt, max_tokens=40, ignore_eos=True)
    for _ in range(20):
        bench.add(ids(random, random.randrange(1, 120)), max_tokens=20)
        bench.step()
    bench.run()
    bench.verify_all()


def test_twins_in_one_step_end_up_on_the_same_pages() -> None:
    """Two sequences that computed the same pages at the same time keep one copy."""
    bench = Bench(pages=64, budget=64)
    prompt = ids(Random(10), 4 * PAGE)
    for _ in range(2):
        bench.add(prompt[: PAGE * 2], max_tokens=100, ignore_eos=True)
    for _ in range(4):
        bench.step()
    assert bench.pool.held == 2 + 2  # two shared pages of prompt, one page of output each
    bench.run()
    bench.verify_all()


def test_only_computed_tokens_are_reused() -> None:
    """A-072: requests that ended by a stop id, an abort, their length or a failed step, then others that go on from
    their answers."""
    random = Random(12)
    bench = Bench(pages=100)
    bench.executor.fail_at = {9}
    starts: list[list[int]] = []
    for turn in range(10):
        prompt = ids(random, 40)
        stop = expected(Request(id="x", prompt=prompt, params=SamplingParams(max_tokens=20), seed=7), 1000, ()).tokens[
            5
        ]
        id = bench.add(prompt, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,) if turn % 2 else ())
        if turn % 3 == 2:
            for _ in range(5):
                bench.step()
            bench.abort(id)
        bench.run()
        starts.append(prompt + bench.tokens(id))
    failed = [id for id in bench.requests if bench.said[id][-1].finish_reason == "error"]
    assert len(failed) == 1
    for start in starts:
        for extra in ([], [3], ids(random, 20)):
            bench.add(start + extra, max_tokens=12)
    bench.run()
    for id, said in bench.said.items():
        bench.verify(id, complete=said[-1].finish_reason not in ("abort", "error"))
    assert bench.scheduler.counts["prefix_hit_tokens"] > 10 * 40


@pytest.mark.parametrize("budget", [1, 2, 15, 16, 17, 64, 256, 257])
@pytest.mark.parametrize("overlap", [True, False])
def test_chunk_borders_do_not_matter(budget: int, overlap: bool) -> None:
    """A-074: a prompt of 257 ids in chunks of any size, cold and warm, with short requests decoding beside it."""
    random = Random(13)
    bench = Bench(pages=80, budget=budget, overlap=overlap)
    prompt = ids(random, 257)
    for _ in range(3):
        bench.add(ids(random, 3), max_tokens=24)
    for _ in range(2):
        bench.add(prompt, max_tokens=24, logprobs=1)
        bench.run()
    bench.verify_all()


def test_no_output_before_the_prefill_ends() -> None:
    """A-075: a prompt of 2,000 ids in chunks of 64 gives exactly three outputs."""
    bench = Bench(pages=200, budget=64)
    id = bench.add(ids(Random(14), 2000), max_tokens=3, ignore_eos=True)
    bench.run()
    assert [len(output.token_ids) for output in bench.said[id]] == [1, 1, 1]
    bench.verify(id)


def test_running_streams_get_a_token_in_every_step() -> None:
    """A-076: long prompts arriving steadily never keep a running stream from its next token."""
    random = Random(15)
    bench = Bench(pages=600, budget=64, sequences=16)
    streams = [bench.add(ids(random, 4), max_tokens=200, ignore_eos=True) for _ in range(4)]
    while any(not bench.said[id] for id in streams):
        bench.step()
    for turn in range(100):
        if turn % 20 == 0:
            bench.add(ids(random, 1500), max_tokens=2)
        before = [len(bench.said[id]) for id in streams]
        bench.step()
        assert [len(bench.said[id]) for id in streams] == [count + 1 for count in before]
    bench.run()
    bench.verify_all()


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """A-076: ten tokens behind six thousand are answered within a few steps."""
    random = Random(16)
    bench = Bench(pages=400, budget=64)
    long = bench.add(ids(random, 6000), max_tokens=2)
    for _ in range(5):
        bench.step()
    short = bench.add(ids(random, 10), max_tokens=2, ignore_eos=True)
    for _ in range(4):
        bench.step()
    assert bench.said[short][-1].finish_reason == "length"
    assert not bench.said[long]
    bench.run()
    bench.verify_all()


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_sequences_lose_and_repeat_nothing(overlap: bool) -> None:
    """A-077: six requests that outgrow the pool together."""
    random = Random(17)
    bench = Bench(pages=48, budget=64, overlap=overlap, options=SchedulerOptions(admission="none"))
    shared = ids(random, 40)
    for turn in range(6):
        params = {"repetition_penalty": 1.2} if turn % 2 else {"temperature": 0.0}
        bench.add(shared + ids(random, 60), max_tokens=120, ignore_eos=True, logprobs=0, **params)
    bench.run()
    assert bench.scheduler.counts["preemptions"] > 0
    bench.verify_all()
    assert all(len(bench.tokens(id)) == 120 for id in bench.requests)


def test_preemption_does_not_thrash() -> None:
    """A-078: twenty requests, room for one and a half. All end, and little is computed twice."""
    random = Random(18)
    bench = Bench(pages=21, budget=64, sequences=16)
    for _ in range(20):
        bench.add(ids(random, 100), max_tokens=120, ignore_eos=True)
    bench.run()
    bench.verify_all()
    assert bench.executor.tokens_run < 1.5 * 20 * 219
    assert bench.scheduler.counts["preemptions"] <= 25
    assert bench.ended == list(bench.requests), "an older request was preempted for a younger one"


def test_nobody_is_admitted_into_pages_needed_at_once() -> None:
    """A-078: a sequence is let in only if the running ones can still grow, not to be preempted right away."""
    random = Random(25)
    bench = Bench(pages=4)
    bench.add(ids(random, 16), max_tokens=40, ignore_eos=True)
    for _ in range(4):
        bench.step()
    bench.add(ids(random, 30), max_tokens=20, ignore_eos=True)
    bench.run()
    assert bench.scheduler.counts["preemptions"] == 0
    bench.verify_all()


def test_no_more_are_preempted_than_needed() -> None:
    """A-078: two sequences that need a page in the same step are both served by one that leaves."""
    random = Random(26)
    bench = Bench(pages=11)
    for length in (8, 8, 40, 40):
        bench.add(ids(random, length), max_tokens=60, ignore_eos=True)
    bench.run()
    assert bench.scheduler.counts["preemptions"] <= 3
    bench.verify_all()


def test_a_big_request_is_not_overtaken_for_ever() -> None:
    """A-078: a steady stream of short requests does not starve one that needs most of the pool."""
    random = Random(19)
    bench = Bench(pages=20, budget=64, sequences=8)
    for _ in range(4):
        bench.add(ids(random, 20), max_tokens=30)
    bench.step()
    big = bench.add(ids(random, 280), max_tokens=4)
    for _ in range(300):
        bench.add(ids(random, 5), max_tokens=20)
        bench.step()
        if bench.said[big]:
            break
    assert bench.said[big]
    bench.run()
    bench.verify_all()


@pytest.mark.parametrize("chunks", [1, 3, 7])
def test_aborts_amid_prefill_leave_nothing_false(chunks: int) -> None:
    """A-079: a long prompt aborted between chunks, others over its pages, then the same prompt again; thirty times."""
    random = Random(20)
    bench = Bench(pages=80, budget=64)
    prompt = ids(random, 900)
    aborted = set()
    for _ in range(30):
        victim = bench.add(prompt, max_tokens=4)
        for _ in range(chunks):
            bench.step()
        bench.abort(victim)
        aborted.add(victim)
        for _ in range(10):
            bench.add(ids(random, 60), max_tokens=2)
        bench.run()
        bench.add(prompt, max_tokens=4)
        bench.run()
        prompt[0] = (prompt[0] + 1) % VOCAB
    for id in bench.requests:
        bench.verify(id, complete=id not in aborted)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_a_failed_step_fails_its_own_requests_alone(overlap: bool, step: int) -> None:
    """A-072: a step fails half done; what it may not have computed is not reused by those that go on from there."""
    random = Random(21)
    bench = Bench(overlap=overlap, sequences=4)
    bench.executor.fail_at = {step, step + 7}
    prompts = [ids(random, 30) for _ in range(12)]
    for prompt in prompts:
        bench.add(prompt, max_tokens=8, ignore_eos=True)
    bench.run()
    errors = [id for id, said in bench.said.items() if said[-1].finish_reason == "error"]
    assert 0 < len(errors) <= 8
    assert all("told to fail" in (bench.said[id][-1].error or "") for id in errors)
    for prompt in prompts:
        asked = Request(id="", prompt=prompt, params=SamplingParams(max_tokens=8, ignore_eos=True), seed=7)
        bench.add(prompt + expected(asked, 1000, ()).tokens, max_tokens=8)
        bench.add(prompt, max_tokens=8)
    bench.run()
    for id in bench.requests:
        bench.verify(id, complete=id not in errors)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prompt_preempted_while_it_is_scored_is_scored_anew(overlap: bool) -> None:
    """A-067, A-077: an older request takes the pages of a long prompt whose logprobs are half collected."""
    random = Random(24)
    bench = Bench(pages=20, budget=64, rows=4, overlap=overlap)
    bench.add(ids(random, 30), max_tokens=250, ignore_eos=True)
    for _ in range(3):
        bench.step()
    bench.add(ids(random, 230), max_tokens=4, prompt_logprobs=2)
    bench.run()
    assert bench.scheduler.counts["preemptions"] > 0
    bench.verify_all()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_pooled_prompt_depends_on_nothing_but_itself(pooling: str) -> None:
    """Cut into chunks, beside others, from the cache, and preempted half way."""
    random = Random(25)
    prompt = ids(random, 230)
    bench = Bench(pages=20, budget=4, rows=4)
    bench.add(ids(random, 30), max_tokens=250, ignore_eos=True)
    for _ in range(3):
        bench.step()
    for _ in range(3):
        bench.add(prompt, max_tokens=0, pooling=pooling)
    bench.run()
    assert bench.scheduler.counts["preemptions"] > 0
    again = bench.add(prompt, max_tokens=0, pooling=pooling)
    bench.run()
    bench.verify_all()
    assert len({bench.said[id][-1].embedding for id in list(bench.requests)[1:]}) == 1
    assert (bench.said[again][-1].cached_tokens > 0) == (pooling == "last")


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "no tokens"),
        ([1] * 64, {}, "64 tokens.*limited to 64"),
        ([1] * 65, {"max_tokens": 0}, "65 tokens.*limited to 64"),
        ([1, VOCAB], {}, f"token id {VOCAB}.*0 to {VOCAB - 1}"),
        ([-1], {}, "token id -1"),
        ([1], {"stop_token_ids": (2**40,)}, "stop_token_ids"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([1], {"logit_bias": {1: float("nan")}}, "logit_bias of token 1"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"temperature": float("inf")}, "temperature is inf"),
        ([1], {"top_p": 1.5}, "top_p is 1.5"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ([1], {"max_tokens": -1}, "max_tokens is -1"),
        ([1], {"logprobs": 21}, "logprobs is 21"),
    ],
)
def test_refused_before_it_is_queued(prompt: list[int], params: dict[str, object], words: str) -> None:
    """A-015, A-018, A-022, A-078: what could never be served is refused with its numbers, and nothing is left
    behind."""
    bench = Bench(pages=4)
    with pytest.raises(TricornError, match=words):
        bench.add(prompt, **params)
    assert bench.engine.idle


def test_the_context_limit() -> None:
    """A-022: prompts up to the limit less one are answered, and end at the limit; short ones behind them are not kept
    waiting."""
    for length in (62, 63):
        for most in (1, 64, 10**6):
            bench = Bench(pages=8, context=64)
            id = bench.add(ids(Random(22), length), max_tokens=most, ignore_eos=True)
            bench.add([5], max_tokens=2)
            bench.run()
            assert len(bench.tokens(id)) == min(most, 64 - length)
            bench.verify_all()


def test_ids_are_unique_while_in_use() -> None:
    bench = Bench()
    request = Request(id="same", prompt=[1], params=SamplingParams(max_tokens=2), seed=1)
    bench.engine.add(request)
    with pytest.raises(TricornError, match="in use"):
        bench.engine.add(request)
    bench.run()
    bench.said.clear()
    bench.engine.add(request)
    bench.run()
    assert bench.engine.abort("same") == []
    assert bench.engine.abort("unknown") == []


def test_scheduling_is_cheap() -> None:
    """64 decoding sequences of 500 tokens: schedule and commit together stay far below a step."""
    bench = Bench(pages=64 * 40, budget=512, sequences=64, rows=512)
    random = Random(23)
    scheduler = bench.scheduler
    for _ in range(64):
        bench.engine.add(
            Request(
                id=str(random.random()),
                prompt=ids(random, 500),
                seed=1,
                params=SamplingParams(max_tokens=120, ignore_eos=True),
            )
        )
    rows = np.zeros(512, np.int32) + 5

    def turn() -> float:
        began = time.perf_counter()
        batch = scheduler.schedule()
        assert batch is not None
        count = len(batch.sequences)
        none = np.zeros((count, 0), np.int32)
        scheduler.commit(batch, StepResult(rows[:count], rows[:count], rows[:count], none, none), 0.01)  # type: ignore
        return time.perf_counter() - began

    while len(scheduler.running) < 64 or any(s.outputs == 0 for s in scheduler.running):
        turn()
    times = sorted(turn() for _ in range(60))
    print(f"schedule + commit at 64 sequences: median {times[30] * 1e3:.3f} ms")
    assert times[5] < 2e-3
