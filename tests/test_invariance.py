"""The tokens and logprobs of a request are a function of the engine file and the request alone, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("tricorn._native", reason="the native extension is not built: run make setup")

from engines import checkpoint, compiled
from tricorn.compiler import EngineFile
from tricorn.engine.engine import Engine
from tricorn.request import Output, Request, SamplingParams
from tricorn.runtime.native import NativeExecutor
from tricorn.runtime.step import PAGE
from tricorn.scheduler.limits import Limits
from tricorn.scheduler.options import SchedulerOptions

GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01}
PENALIZED = {**SEEDED, "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}
BIASED = {**GREEDY, "logit_bias": {5: 4.0, 9: -100.0}, "min_tokens": 3}


@dataclass(frozen=True)
class Answer:
    """What a client sees, its floats as bits."""

    token_ids: tuple[int, ...]
    bits: bytes
    ranks: tuple[int, ...]
    reason: str | None


@dataclass
class Model:
    """An engine file and the executors opened on it, their pools dirty from whatever ran before."""

    file: EngineFile
    context: int
    vocab: int
    executors: dict[tuple[int, int], NativeExecutor] = field(default_factory=dict)
    known: dict[tuple[object, ...], Answer] = field(default_factory=dict)

    def executor(self, threads: int, pages: int) -> NativeExecutor:
        key = threads, pages
        if key not in self.executors:
            self.executors[key] = NativeExecutor(self.file, threads=threads, pages=pages, max_tokens=512, max_rows=64)
        return self.executors[key]

    def engine(self, *, threads: int = 2, pages: int = 0, budget: int = 512, overlap: bool = True) -> Engine:
        pages = pages or 4 * self.context // PAGE
        limits = Limits(
            context=min(self.context, pages * PAGE),
            vocab=self.vocab,
            max_sequences=64,
            max_tokens=budget,
            max_rows=64,
            eos_ids=self.file.eos_ids,
        )
        options = SchedulerOptions(admission="none")  # with preemptions, and without the caution of the first minutes
        return Engine(self.executor(threads, pages), limits, options, overlap=overlap, debug=True)

    def alone(self, request: Request) -> Answer:
        """The answer of an empty engine with one thread, remembered."""
        key = (tuple(request.prompt), repr(request.params), request.seed)
        if key not in self.known:
            self.known[key] = run(self.engine(threads=1), [request])[request.id]
        return self.known[key]

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        ids: list[int] = np.random.default_rng(seed).integers(10, min(self.vocab, 250), length).tolist()
        return ids

    def close(self) -> None:
        for executor in self.executors.values():
            executor.close()


@pytest.fixture(scope="module", params=["llama", "gemma3", "smollm2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A small Llama in three integer types, a small Gemma 3 whose window bites, and the real SmolLM2."""
    if request.param == "smollm2":
        file = EngineFile.open(request.getfixturevalue("real_engine")("smollm2-135m"))
        made = Model(file, 1200, file.graph.vocab)
    else:
        made = small(request.param, tmp_path_factory.mktemp("engine"))
    yield made
    made.close()


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def small_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    made = small(request.param, tmp_path_factory.mktemp("engine"))
    yield made
    made.close()


def small(name: str, folder: Path) -> Model:
    common: dict[str, Any] = {"max_position_embeddings": 1200, "num_hidden_layers": 2}
    if name == "llama":
        source = checkpoint("llama", ("Q4_K", "Q8_0", "Q6_K"), **common)
    else:
        common |= {"sliding_window": 32, "sliding_window_pattern": 2, "tie_word_embeddings": False}
        source = checkpoint("gemma3_text", ("Q8_0", "Q5_0", "Q4_1"), **common)
    return Model(compiled(source, folder), 1200, 320)


def request(id: str, prompt: list[int], max_tokens: int = 12, seed: int = 1, **params: Any) -> Request:
    chosen = {"max_tokens": max_tokens, "logprobs": 3, "ignore_eos": True, **params}
    return Request(id=id, prompt=prompt, params=SamplingParams(**chosen), seed=seed)


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, Answer]:
    """Runs all requests, added at once, to their ends."""
    said: dict[str, list[Output]] = {}
    for asked in requests:
        engine.add(asked)
        said[asked.id] = []
    while not engine.idle:
        collect(engine, said)
    return {id: answer(outputs) for id, outputs in said.items()}


def collect(engine: Engine, said: dict[str, list[Output]]) -> None:
    """One step, whose outputs go to the requests; the books of the cache are checked after it."""
    for output in engine.step():
        assert output.error is None
        said[output.id].append(output)
    stats = engine.stats()
    assert stats.pages_free + stats.pages_held + stats.pages_cached == stats.pages_total


def answer(outputs: list[Output]) -> Answer:
    logprobs = [entry for output in outputs for entry in output.logprobs or []]
    floats = [value for entry in logprobs for value in (entry.logprob, *entry.top_logprobs)]
    ranks = [number for entry in logprobs for number in (entry.rank, *entry.top_ids)]
    tokens = [token for output in outputs for token in output.token_ids]
    for output in outputs:
        for entry in output.prompt_logprobs or []:
            if entry:
                floats += [entry.logprob, *entry.top_logprobs]
                ranks += [entry.rank, *entry.top_ids]
    return Answer(
        tuple(tokens), np.array(floats).tobytes(), tuple(ranks), outputs[-1].finish_reason if outputs else None
    )


def assert_as_alone(model: Model, requests: list[Request], answers: dict[str, Answer]) -> None:
    for asked in requests:
        want = model.alone(asked)
        assert want.reason in ("length", "stop")
        assert answers[asked.id] == want, f"{asked.id} differs from what it is alone"


KINDS = [GREEDY, SEEDED, PENALIZED, BIASED]


def crowd(model: Model, count: int, tokens: int = 8) -> list[Request]:
    """Requests of many lengths and kinds."""
    return [
        request(f"r{i}", model.prompt(3 + (i * 37) % 90, i), tokens + i % 5, seed=i, **KINDS[i % 4])
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [2, 7, 33])
def test_alone_or_in_a_batch(model: Model, count: int) -> None:
    requests = crowd(model, count)
    assert_as_alone(model, requests, run(model.engine(), requests))


@pytest.mark.parametrize("budget", [1, 15, 16, 17, 64, 512])
def test_chunks_of_any_size(model: Model, budget: int) -> None:
    length = 60 if model.vocab > 320 else 150
    requests = [request(f"r{i}", model.prompt(length + i, i), 6, **KINDS[i]) for i in range(3)]
    assert_as_alone(model, requests, run(model.engine(budget=budget), requests))


@pytest.mark.parametrize("budget", [17, 64, 512])
def test_prompts_that_cross_a_chunk_of_attention(model: Model, budget: int) -> None:
    """512 positions are a chunk of attention's sums: before it, on it, beyond it and beyond two."""
    lengths = [530] if model.vocab > 320 else [505, 511, 512, 513, 600, 1040]
    requests = [request(f"r{n}", model.prompt(n, n), 10, **KINDS[n % 4]) for n in lengths]
    assert_as_alone(model, requests, run(model.engine(budget=budget), requests))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_one_thread_or_two(model: Model, threads: int, overlap: bool) -> None:
    requests = crowd(model, 5)
    assert_as_alone(model, requests, run(model.engine(threads=threads, overlap=overlap), requests))


@pytest.mark.parametrize("kind", [GREEDY, PENALIZED])
def test_cold_cached_and_partly_cached(model: Model, kind: dict[str, Any]) -> None:
    """The match is nothing, part of a page, some pages and a part, all but the last token; also of an answer."""
    engine = model.engine()
    first = request("first", model.prompt(50), 30, **kind)
    told = run(engine, [first])["first"]
    assert told == model.alone(first)
    text = first.prompt + list(told.token_ids)
    for length in (1, 2, 5, 15, 16, 17, 31, 32, 33, 40, 47, 48, 49, 50, 51, 63, 64, 65, 79):
        for tail in ([], [251], [251, 252, 253]):
            asked = request(f"{length}+{len(tail)}", text[:length] + tail, 4, seed=3, **kind)
            before = engine.stats().prefix_hit_tokens
            assert run(engine, [asked])[asked.id] == model.alone(asked)
            hit = engine.stats().prefix_hit_tokens - before
            assert hit >= min(length, len(asked.prompt) - 1, len(text) - 1)
    again = request("again", first.prompt, 30, **kind)
    assert run(engine, [again])["again"] == told


def test_cached_pages_are_not_written(model: Model) -> None:
    """Many continuations of one cached text, at once: each copies the page it ends in, none writes it."""
    engine = model.engine()
    root = model.prompt(40)
    run(engine, [request("root", root, 1)])
    requests = [request(f"r{i}", root[: 20 + i] + [11 + i] * (i % 4), 6, seed=i, **KINDS[i % 4]) for i in range(20)]
    assert_as_alone(model, requests, run(engine, requests))
    assert_as_alone(model, requests, run(engine, [request("x", root, 1), *requests]))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [16, 64])
def test_preempted_and_resumed(model: Model, budget: int, overlap: bool) -> None:
    """A pool of nine pages for six sequences of up to five."""
    engine = model.engine(pages=9, budget=budget, overlap=overlap)
    requests = [request(f"r{i}", model.prompt(12 + i, i), 50, seed=i, **KINDS[i % 4]) for i in range(6)]
    assert_as_alone(model, requests, run(engine, requests))
    assert engine.stats().preemptions > 0


def test_scored_prompts(model: Model) -> None:
    """The logprobs of a prompt's tokens, whatever scores or decodes beside them."""
    requests = [request(f"s{i}", model.prompt(30 + 7 * i, i), 4, prompt_logprobs=2, **KINDS[i]) for i in range(3)]
    requests += [request("only", model.prompt(70, 2), 0, prompt_logprobs=1, **GREEDY)]
    for budget in (16, 512):
        mixed = [*requests, *crowd(model, 3)]
        assert_as_alone(model, mixed, run(model.engine(budget=budget), mixed))


def test_neighbours_that_join_leave_and_abort(model: Model) -> None:
    engine = model.engine(budget=64, pages=80)
    asked = request("me", model.prompt(40, 77), 40, seed=4, **SEEDED)
    said: dict[str, list[Output]] = {"me": []}
    engine.add(asked)
    for turn in range(400):
        if engine.idle:
            break
        if turn % 2 == 0 and turn < 40:
            id = f"n{turn}"
            said[id] = []
            engine.add(
                request(id, asked.prompt[: turn + 1] + model.prompt(turn, turn), 2 + turn % 9, **KINDS[turn % 4])
            )
        if turn % 5 == 4:
            for output in engine.abort(f"n{turn - 4 - turn % 2}"):
                said[output.id].append(output)
        collect(engine, said)
    assert answer(said["me"]) == model.alone(asked)
    assert {answer(outputs).reason for outputs in said.values()} == {"length", "abort"}


@dataclass(frozen=True)
class Event:
    """One turn of a schedule: what comes, what is dropped, and how many steps are made then."""

    family: int
    length: int
    tail: int
    kind: int
    max_tokens: int
    abort: int
    steps: int


EVENTS = st.lists(
    st.builds(
        Event,
        family=st.integers(0, 3),
        length=st.integers(1, 60),
        tail=st.integers(0, 5),
        kind=st.integers(0, 3),
        max_tokens=st.integers(1, 20),
        abort=st.integers(-8, 8),
        steps=st.integers(0, 4),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    events=EVENTS,
    budget=st.sampled_from([1, 5, 16, 17, 64, 512]),
    pages=st.sampled_from([6, 10, 40]),
    threads=st.integers(1, 2),
    overlap=st.booleans(),
)
def test_any_schedule(
    small_model: Model, events: list[Event], budget: int, pages: int, threads: int, overlap: bool
) -> None:
    """Requests of four families of prefixes come and are dropped at any time; whoever ends says what it says alone."""
    engine = small_model.engine(threads=threads, pages=pages, budget=budget, overlap=overlap)
    families = [small_model.prompt(60, 100 + family) for family in range(4)]
    requests: list[Request] = []
    said: dict[str, list[Output]] = {}
    for event in events:
        prompt = families[event.family][: event.length] + families[event.family - 1][: event.tail]
        asked = request(f"r{len(requests)}", prompt, event.max_tokens, seed=event.kind, **KINDS[event.kind])
        requests.append(asked)
        said[asked.id] = []
        engine.add(asked)
        for _ in range(event.steps):
            collect(engine, said)
        for output in engine.abort(f"r{event.abort}"):
            said[output.id].append(output)
    while not engine.idle:
        collect(engine, said)
    for asked in requests:
        told = answer(said[asked.id])
        if told.reason == "abort":
            whole = small_model.alone(asked)
            assert told.token_ids == whole.token_ids[: len(told.token_ids)]
        else:
            assert told == small_model.alone(asked)
    assert engine.stats().pages_held == 0


def test_two_thousand_requests(small_model: Model) -> None:
    """Shared prefixes, aborts, a small pool. Page books are checked after every step; every answer is the one alone."""
    random = np.random.default_rng(9)
    families = [small_model.prompt(60, 200 + family) for family in range(6)]
    variety = [
        request(
            "",
            families[i % 6][: int(random.integers(1, 60))] + families[(i + 1) % 6][: int(random.integers(0, 4))],
            int(random.integers(1, 40)),
            seed=i,
            **KINDS[int(random.integers(0, 4))],
        )
        for i in range(150)
    ]
    engine = small_model.engine(pages=14, budget=96)
    asked: dict[str, Request] = {}
    said: dict[str, list[Output]] = {}
    while len(asked) < 2000 or not engine.idle:
        for _ in range(int(random.integers(0, 5)) if len(asked) < 2000 and engine.stats().waiting < 30 else 0):
            template = variety[int(random.integers(0, len(variety)))]
            id = f"r{len(asked)}"
            asked[id] = Request(id=id, prompt=template.prompt, params=template.params, seed=template.seed)
            said[id] = []
            engine.add(asked[id])
        if random.random() < 0.08 and asked:
            for output in engine.abort(f"r{len(asked) - int(random.integers(1, 40))}"):
                said[output.id].append(output)
        collect(engine, said)
    reasons = [answer(outputs).reason for outputs in said.values()]
    assert reasons.count("abort") > 50
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens > 0
    for id, template in asked.items():
        told, want = answer(said[id]), small_model.alone(template)
        if told.reason == "abort":
            assert told.token_ids == want.token_ids[: len(told.token_ids)]
        else:
            assert told == want, f"{id} differs from what it is alone"


def test_after_a_restart(small_model: Model, tmp_path: Path) -> None:
    """Another process's worth of state: the file opened anew, fresh memory, the same bits."""
    requests = crowd(small_model, 4)
    again = Model(EngineFile.open(small_model.file.path), small_model.context, small_model.vocab)
    assert_as_alone(small_model, requests, run(again.engine(), requests))
    again.close()


def test_a_difference_would_be_seen(small_model: Model) -> None:
    """The yardstick itself: another seed, token or position gives other bits."""
    asked = request("a", small_model.prompt(20), 8, seed=1, **SEEDED)
    others = [
        request("a", asked.prompt, 8, seed=2, **SEEDED),
        request("a", [*asked.prompt[:-1], 251], 8, seed=1, **SEEDED),
        request("a", [9, *asked.prompt], 8, seed=1, **SEEDED),
    ]
    for other in others:
        assert small_model.alone(other) != small_model.alone(asked)
