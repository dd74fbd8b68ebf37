"""Constrained sequences on the native engine: answers are sentences, and the same bits whatever happens around them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("tricorn._native", reason="the native extension is not built: run make setup")

from tokenizers import Tokenizer

from engines import checkpoint, compiled
from grammar_support import END, byte_tokenizer
from tricorn.compiler.engine_file import EngineFile
from tricorn.engine.engine import Engine
from tricorn.grammar.workers import Workers
from tricorn.request import Constraint, Output, Request, SamplingParams
from tricorn.runtime.native import NativeExecutor
from tricorn.scheduler import guides
from tricorn.scheduler.limits import Limits
from tricorn.scheduler.options import Admission, SchedulerOptions

VOCAB = 400
TEXT = Tokenizer.from_str(byte_tokenizer())

SCHEMA = {
    "type": "object",
    "properties": {
        "a_rather_long_key": {"type": "integer", "minimum": 0, "maximum": 99},
        "another_long_key": {"enum": ["yes", "no"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["a_rather_long_key", "another_long_key", "list"],
    "additionalProperties": False,
}
CONSTRAINTS = [
    Constraint("json_schema", json.dumps(SCHEMA)),
    Constraint("regex", "[ab]{3}-[0-9]{2,6}(end)?"),
    Constraint("choice", '["yes", "yesterday", "no"]'),
    Constraint("gbnf", 'root ::= "begin" item+ "end"\nitem ::= " " [0-9] | "<" item ">"'),
]


def is_sentence(constraint: Constraint, text: str) -> bool:
    match constraint.kind:
        case "regex":
            return re.fullmatch(constraint.source, text) is not None
        case "choice":
            return text in json.loads(constraint.source)
        case "gbnf":
            item = r"(?: [0-9]|<+ [0-9]>+)"
            found = re.fullmatch(rf"begin{item}+end", text)
            return found is not None and text.count("<") == text.count(">")
    value = json.loads(text)
    assert list(value) == SCHEMA["required"]
    assert 0 <= value["a_rather_long_key"] <= 99
    assert value["another_long_key"] in ("yes", "no")
    return len(value["list"]) <= 3 and all(isinstance(item, bool) for item in value["list"])


class Bench:
    def __init__(self, folder: Path) -> None:
        source = replace(checkpoint("llama", "F32", vocab_size=VOCAB), tokenizer=byte_tokenizer(), eos_ids=(END,))
        self.file: EngineFile = compiled(source, folder)
        self.workers = Workers(self.file.tokenizer, VOCAB, (END,), slots=256)
        self.executors: dict[int, NativeExecutor] = {}
        self.known: dict[tuple[int, int, bool], list[Output]] = {}

    def engine(
        self, pages: int = 400, budget: int = 256, overlap: bool = True, admission: Admission = "none"
    ) -> Engine:
        if pages not in self.executors:
            self.executors[pages] = NativeExecutor(self.file, threads=1, pages=pages, max_tokens=512, max_rows=64)
        limits = Limits(
            context=min(pages * 16, 1000),
            vocab=VOCAB,
            max_sequences=64,
            max_tokens=budget,
            max_rows=64,
            eos_ids=(END,),
            undecodable=tuple(range(TEXT.get_vocab_size(), VOCAB)),
        )
        options = SchedulerOptions(admission=admission)
        return Engine(self.executors[pages], limits, options, overlap=overlap, debug=True, workers=self.workers)

    def alone(self, which: int, seed: int, logprobs: bool) -> list[int]:
        key = which, seed, logprobs
        if key not in self.known:
            self.known[key] = run(self.engine(), [ask("alone", which, seed, logprobs)])["alone"]
        return ids(self.known[key])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("engine"))
    yield bench
    bench.workers.shutdown()
    for executor in bench.executors.values():
        executor.close()


def ask(id: str, which: int, seed: int, logprobs: bool = False, resume: list[int] | None = None) -> Request:
    """A request of one of the CONSTRAINTS, or of none."""
    params = SamplingParams(
        max_tokens=120,
        temperature=[0.0, 1.0, 2.0][seed % 3],
        constraint=CONSTRAINTS[which] if which < len(CONSTRAINTS) else None,
        logprobs=2 if logprobs else None,
    )
    prompt = [3 + (7 * seed + place * which) % 200 for place in range(1 + seed * 5 % 60)]
    return Request(id=id, prompt=prompt, params=params, seed=seed, resume=resume or [])


def run(engine: Engine, requests: list[Request]) -> dict[str, list[Output]]:
    said: dict[str, list[Output]] = {asked.id: [] for asked in requests}
    for asked in requests:
        engine.add(asked)
    while not engine.idle:
        for output in engine.step():
            assert output.error is None
            said[output.id].append(output)
    engine.scheduler.check()
    return said


def ids(outputs: list[Output]) -> list[int]:
    return [id for output in outputs for id in output.token_ids]


def crowd(logprobs: bool = False) -> list[tuple[Request, int]]:
    return [(ask(f"r{seed}", seed % 5, seed, logprobs), seed % 5) for seed in range(25)]


@pytest.mark.parametrize("logprobs", [False, True])
def test_every_answer_is_a_sentence(bench: Bench, logprobs: bool) -> None:
    said = run(bench.engine(), [asked for asked, _ in crowd(logprobs)])
    ended = 0
    for asked, which in crowd(logprobs):
        outputs = said[asked.id]
        if which < 4 and outputs[-1].finish_reason == "stop":
            ended += 1
            assert is_sentence(CONSTRAINTS[which], TEXT.decode(ids(outputs)[:-1]))
            assert outputs[-1].stop_token == END
        if logprobs:
            assert sum(len(output.logprobs or ()) for output in outputs) == len(ids(outputs))
    assert ended >= 10


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [64, 65, 256])
@pytest.mark.parametrize("pages", [12, 400])
def test_as_alone(bench: Bench, pages: int, budget: int, overlap: bool) -> None:
    """In any company, in chunks of any size, preempted or not: the bits of the answer alone."""
    engine = bench.engine(pages=pages, budget=budget, overlap=overlap)
    said = run(engine, [asked for asked, _ in crowd()])
    for asked, which in crowd():
        assert ids(said[asked.id]) == bench.alone(which, asked.seed, False)
    if pages == 12:
        assert engine.stats().preemptions > 0


def test_late_masks_change_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step waits for a mask: rows are void again and again, and the answers are the same."""
    monkeypatch.setattr(guides, "MASK_SECONDS", 0.0)
    void = guides.Guides._void
    voided = []
    monkeypatch.setattr(guides.Guides, "_void", lambda *args: (voided.append(1), void(*args)))
    said = run(bench.engine(), [asked for asked, _ in crowd()])
    assert len(voided) > 20
    for asked, which in crowd():
        assert ids(said[asked.id]) == bench.alone(which, asked.seed, False)


def test_resumed_anywhere(bench: Bench) -> None:
    """After each output that a client may have seen, an engine that starts anew goes on with the same ids."""
    for which in range(4):
        whole = bench.alone(which, 7, False)
        seen: list[int] = []
        for output in bench.known[which, 7, False][:-1]:
            seen += output.token_ids
            again = run(bench.engine(), [ask("again", which, 7, resume=seen)])["again"]
            assert seen + ids(again) == whole


def test_forced_ids_are_computed_together(bench: Bench) -> None:
    """The long keys of the schema cost few steps, and give the text that single steps give."""
    engine = bench.engine()
    (outputs,) = run(engine, [ask("r", 0, 1)]).values()
    count = len(ids(outputs))
    assert engine.stats().forced_tokens > 0.4 * count
    assert sum(engine.stats().steps.values()) < 0.6 * count
    slow = bench.engine()
    slow.scheduler.fast_forward(False)
    (single,) = run(slow, [ask("r", 0, 1)]).values()
    assert TEXT.decode(ids(single)) == TEXT.decode(ids(outputs))
    assert sum(slow.stats().steps.values()) >= count


def test_limits_cut_forced_ids(bench: Bench) -> None:
    whole = bench.alone(0, 1, False)
    for most in range(1, len(whole)):
        asked = ask("r", 0, 1)
        params = SamplingParams(
            **{**{name: getattr(asked.params, name) for name in asked.params.__struct_fields__}, "max_tokens": most}
        )
        request = Request(id="r", prompt=asked.prompt, params=params, seed=asked.seed)
        (outputs,) = run(bench.engine(), [request]).values()
        assert ids(outputs) == whole[:most]
        assert outputs[-1].finish_reason == "length"


def test_what_cannot_be_enforced_fails_alone(bench: Bench) -> None:
    engine = bench.engine()
    bad = Request(id="bad", prompt=[5], params=SamplingParams(constraint=Constraint("regex", "((")), seed=1)
    engine.add(bad)
    engine.add(ask("good", 1, 1))
    said: dict[str, list[Output]] = {"bad": [], "good": []}
    while not engine.idle:
        for output in engine.step():
            said[output.id].append(output)
    (last,) = said["bad"]
    assert (last.finish_reason, last.refused) == ("error", True)
    assert "regex" in (last.error or "")
    assert ids(said["good"]) == bench.alone(1, 1, False)


def test_aborts_at_any_moment(bench: Bench) -> None:
    random = Random(3)
    engine = bench.engine(pages=30, budget=64)
    requests = [ask(f"r{seed}", seed % 5, seed) for seed in range(60)]
    said: dict[str, list[Output]] = {asked.id: [] for asked in requests}
    for asked in requests:
        engine.add(asked)
        for _ in range(random.randrange(3)):
            for output in engine.step():
                said[output.id].append(output)
        if random.random() < 0.3:
            for output in engine.abort(f"r{random.randrange(asked.seed + 1)}"):
                said[output.id].append(output)
    while not engine.idle:
        for output in engine.step():
            said[output.id].append(output)
    engine.scheduler.check()
    assert not engine.scheduler._guides
    for asked in requests:
        whole = bench.alone(asked.seed % 5, asked.seed, False)
        got = ids(said[asked.id])
        assert got == whole[: len(got)]
        assert said[asked.id][-1].finish_reason == "abort" or got == whole
