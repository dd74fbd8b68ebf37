"""Allowed ids and banned words, on both executors: what is said keeps to them, and is what anything else would give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

pytest.importorskip("tricorn._native", reason="the native extension is not built: run make setup")

from engines import checkpoint, compiled, reference
from grammar_support import END, byte_tokenizer
from tricorn.engine.engine import Engine
from tricorn.grammar.workers import Workers
from tricorn.request import Constraint, Output, Request, SamplingParams, TricornError
from tricorn.runtime.native import NativeExecutor
from tricorn.runtime.sampling import describe
from tricorn.scheduler.limits import Limits

VOCAB = 400
CONTEXT = 200
EOS = 399


class Bench:
    """One small model behind both executors, which say the same when the model's arithmetic is float32."""

    def __init__(self, folder: Path) -> None:
        source = checkpoint("llama", "F32", vocab_size=VOCAB)
        self.native = NativeExecutor(compiled(source, folder), threads=1, pages=300, kv_type="f32", max_tokens=256)
        self.scarce = NativeExecutor(compiled(source, folder), threads=1, pages=13, kv_type="f32", max_tokens=256)
        self.reference = reference(source, pages=300)
        self.workers = Workers(byte_tokenizer(), VOCAB, (END,), slots=8)

    def engine(self, executor: Any, *, overlap: bool = True, eos: int = EOS, budget: int = 64) -> Engine:
        limits = Limits(context=CONTEXT, vocab=VOCAB, max_sequences=32, max_tokens=budget, max_rows=64, eos_ids=(eos,))
        return Engine(executor, limits, overlap=overlap, debug=True, workers=self.workers)

    def close(self) -> None:
        self.workers.shutdown()
        self.native.close()
        self.scarce.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("engine"))
    yield bench
    bench.close()


def run(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {asked.id: [] for asked in requests}
    for output in outputs(engine, requests):
        assert output.error is None
        said[output.id] += output.token_ids
    return said


def outputs(engine: Engine, requests: list[Request]) -> list[Output]:
    for asked in requests:
        engine.add(asked)
    found = []
    while not engine.idle:
        found += engine.step()
    engine.scheduler.check()
    return found


def ask(seed: int, resume: list[int] | None = None, **params: Any) -> Request:
    """A request with bans of all kinds, of a model that says few different ids: so that they matter."""
    random = Random(seed)
    few = random.sample(range(VOCAB), 6)
    words = [random.choices(few, k=random.randrange(1, 4)) for _ in range(4)]
    allowed = {"allowed_token_ids": tuple(few)} if seed % 3 else {"logit_bias": dict.fromkeys(few, 8.0)}
    penalties = {"presence_penalty": 0.5, "repetition_penalty": 1.2} if seed % 2 else {}
    bans = [word for word in words if len(set(word)) > 1 or seed % 4]
    chosen = {"max_tokens": 40, "temperature": (0.0, 1.0)[seed % 5 > 1], **allowed, **penalties, **params}
    prompt = random.choices(few, k=1 + seed * 7 % 50)
    return Request(
        id=f"r{seed}", prompt=prompt, params=SamplingParams(**chosen), seed=seed, banned=bans[:3], resume=resume or []
    )


def possible(seeds: range) -> list[Request]:
    """Those of the requests whose bans leave something, wherever they are."""
    asked = [ask(seed) for seed in seeds]
    return [
        request
        for request in asked
        if len(set(request.params.allowed_token_ids or range(VOCAB)) - {word[-1] for word in request.banned}) > 0
    ]


def breaks(request: Request, said: list[int]) -> bool:
    """Whether an answer holds what it must not."""
    allowed = request.params.allowed_token_ids
    text = ",".join(["", *map(str, said), ""])
    spelled = [",".join(["", *map(str, word), ""]) for word in request.banned]
    return (bool(allowed) and not set(said) <= set(allowed)) or any(word in text for word in spelled)


def test_answers_keep_to_their_bans(bench: Bench) -> None:
    requests = possible(range(40))
    assert len(requests) > 20
    said = run(bench.engine(bench.native), requests)
    for request in requests:
        assert said[request.id]
        assert not breaks(request, said[request.id])
    free = [Request(id=asked.id, prompt=asked.prompt, params=asked.params, seed=asked.seed) for asked in requests]
    loose = run(bench.engine(bench.native), free)
    assert sum(breaks(asked, loose[asked.id]) for asked in requests) > 10, "the bans would not have mattered"


@pytest.mark.parametrize("overlap", [True, False])
def test_both_executors_agree(bench: Bench, overlap: bool) -> None:
    requests = possible(range(12))
    native = run(bench.engine(bench.native, overlap=overlap), requests)
    assert run(bench.engine(bench.reference, overlap=overlap), requests) == native


def test_as_alone(bench: Bench) -> None:
    """In company, preempted, in pieces of any size: the answer alone."""
    requests = possible(range(30))
    alone = {request.id: run(bench.engine(bench.native), [request])[request.id] for request in requests}
    assert run(bench.engine(bench.native, budget=33, overlap=False), requests) == alone
    scarce = bench.engine(bench.scarce)
    assert run(scarce, requests) == alone
    assert scarce.stats().preemptions > 0


def test_resumed_anywhere(bench: Bench) -> None:
    for seed in (1, 2, 5, 7):
        whole = run(bench.engine(bench.native), [ask(seed)])[f"r{seed}"]
        for seen in range(1, len(whole)):
            rest = run(bench.engine(bench.native), [ask(seed, resume=whole[:seen])])[f"r{seed}"]
            assert whole[:seen] + rest == whole


def test_greedy_takes_the_best_that_is_left(bench: Bench) -> None:
    """Each id is the best of the model's own logits that no ban forbids, and its logprob is the raw one."""
    banned = [[5], [9, 9], [9, 8, 7], [1, 2]]
    params = SamplingParams(max_tokens=30, temperature=0, allowed_token_ids=(1, 2, 5, 7, 8, 9), logprobs=3)
    found = outputs(bench.engine(bench.native), [Request(id="r", prompt=[4, 9], params=params, seed=0, banned=banned)])
    said: list[int] = []
    for output in found:
        (id,) = output.token_ids
        (entry,) = output.logprobs or ()
        logits = bench.reference.forward([4, 9, *said])[-1]
        left = [
            other
            for other in params.allowed_token_ids
            if not any(word[-1] == other and [*said, other][-len(word) :] == word for word in banned)
        ]
        assert id == left[int(np.argmax(logits[left]))]
        raw = describe(logits, id, 3)
        assert entry.logprob == pytest.approx(raw.logprob, abs=1e-4)
        assert entry.rank == raw.rank
        assert entry.top_ids == raw.top_ids.tolist()
        said.append(id)
    assert len(said) == 30


def test_a_word_s_beginning_stays_allowed(bench: Bench) -> None:
    """Of a longer word only the last id is forbidden, and only behind the others; the prompt does not count."""
    params = SamplingParams(max_tokens=4, temperature=0, allowed_token_ids=(10, 11), logit_bias={10: 90.0})
    asked = Request(id="r", prompt=[10], params=params, seed=0, banned=[[10, 10]])
    assert run(bench.engine(bench.native), [asked]) == {"r": [10, 11, 10, 11]}


def test_constraints_and_bans(bench: Bench) -> None:
    """An answer is a sentence of the constraint, and holds none of the words."""
    text = Tokenizer.from_str(byte_tokenizer())
    a, b, c = (text.encode(letter, add_special_tokens=False).ids[0] for letter in "abc")
    params = SamplingParams(max_tokens=60, constraint=Constraint("regex", "[abc]{20}(end)?"), temperature=1.0)
    seen = set()
    for seed in range(6):
        asked = Request(id="r", prompt=[3], params=params, seed=seed, banned=[[a, b], [c], [b, b, b]])
        said = run(bench.engine(bench.native, eos=END), [asked])["r"]
        assert said[-1] == END
        assert re.fullmatch("[abc]{20}(end)?", text.decode(said[:-1]))
        assert not breaks(asked, said)
        seen |= set(said)
    assert {a, b} < seen


@pytest.mark.parametrize(
    ("params", "banned"),
    [
        ({"allowed_token_ids": (5,)}, [[5]]),
        ({"allowed_token_ids": (EOS,), "min_tokens": 1}, []),
        ({"allowed_token_ids": (5, 6), "constraint": Constraint("regex", "a*")}, []),
        ({"constraint": Constraint("regex", "a*")}, [[EOS]]),
        ({"allowed_token_ids": tuple(range(5000))}, []),
        ({"allowed_token_ids": (VOCAB,)}, []),
        ({"allowed_token_ids": (-1,)}, []),
        ({}, [[]]),
        ({}, [[VOCAB]]),
        ({}, [[5, 6]] * 1000),
    ],
)
def test_what_leaves_nothing_is_refused(bench: Bench, params: dict[str, Any], banned: list[list[int]]) -> None:
    engine = bench.engine(bench.native)
    with pytest.raises(TricornError, match=r"allowed_token_ids|bad_words"):
        engine.add(Request(id="r", prompt=[3], params=SamplingParams(**params), seed=0, banned=banned))
    assert engine.idle


def test_a_dead_end_is_the_request_s_own(bench: Bench) -> None:
    """Bans may leave nothing only later: such a request ends with an error, and the one beside it does not."""
    params = SamplingParams(max_tokens=9, allowed_token_ids=(7,))
    bad = Request(id="bad", prompt=[3], params=params, seed=0, banned=[[7, 7]])
    good = ask(1)
    found = outputs(bench.engine(bench.native), [bad, good])
    ends = {output.id: output for output in found if output.finish_reason}
    assert (ends["bad"].finish_reason, ends["bad"].refused) == ("error", True)
    assert ends[good.id].error is None
    alone = run(bench.engine(bench.native), [good])[good.id]
    assert [id for output in found if output.id == good.id for id in output.token_ids] == alone
