"""The ledger: in whatever order things happen, each request ends once, with the tokens of an undisturbed engine."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tricorn.cache.disk import TierStats
from tricorn.engine.ledger import MOST_DEATHS, Ledger
from tricorn.engine.messages import EngineStats, carry
from tricorn.request import Abort, Output, Request, SamplingParams, Timings, TokenLogprobs

SCORE = TokenLogprobs(-1.0, 1, [], [])


def request(id: str, tokens: int = 5, prompt_logprobs: int | None = None) -> Request:
    params = SamplingParams(max_tokens=tokens, prompt_logprobs=prompt_logprobs)
    return Request(id=id, prompt=[1, 2, 3], params=params, seed=0)


def token(id: str, *ids: int, cached: int = 0) -> Output:
    return Output(id=id, token_ids=list(ids), cached_tokens=cached)


def sent(ledger: Ledger, *ids: str) -> None:
    """The ledger wants just these sent now."""
    assert [request.id for request in ledger.due()] == list(ids)


def fallen(ledger: Ledger, times: int) -> list[Output]:
    """So many engines die without a word."""
    ended = []
    for _ in range(times):
        ended += ledger.died()
        ledger.due()
    return ended


class Scripted:
    """An engine that gives token i of a request as `i`, caches `life` tokens of each prompt, and forgets all when
    it dies."""

    def __init__(self, life: int) -> None:
        self.life = life
        self.live: dict[str, tuple[Request, int]] = {}

    def add(self, request: Request) -> None:
        assert request.id not in self.live
        assert len(request.resume) < request.params.max_tokens
        assert request.resume == list(range(len(request.resume)))
        assert (request.params.prompt_logprobs is None) == (bool(request.resume) or request.id[-1] in "02468")
        self.live[request.id] = request, len(request.resume)

    def step(self, id: str) -> Output:
        request, count = self.live[id]
        ends = count + 1 == request.params.max_tokens
        self.live[id] = request, count + 1
        if ends:
            del self.live[id]
        scored = request.params.prompt_logprobs is not None and count == 0
        return Output(
            id=id,
            token_ids=[count],
            cached_tokens=self.life,
            finish_reason="length" if ends else None,
            prompt_logprobs=[None, SCORE, SCORE] if scored else None,
            timings=Timings(1.0, 1.0, 1.0) if ends else None,
        )


WORDS = st.lists(
    st.tuples(st.sampled_from(["open", "step", "step", "step", "abort", "die", "down"]), st.integers(0, 10**6)),
    max_size=120,
)


@settings(max_examples=400, deadline=None)
@given(WORDS)
def test_every_request_ends_once(words: list[tuple[str, int]]) -> None:
    """Outputs, aborts, deaths and times without an engine in any order, then peace."""
    ledger, engine = Ledger(), None
    lives, opened = 0, 0
    heard: dict[str, list[Output]] = {}
    aborted: set[str] = set()

    def hear(outputs: list[Output]) -> None:
        for output in outputs:
            said = heard[output.id]
            assert not said or said[-1].finish_reason is None, "a word after the last"
            said.append(output)

    def send() -> None:
        if engine is not None:
            for due in ledger.due():
                engine.add(due)

    def start() -> Scripted:
        nonlocal lives
        lives += 1
        return Scripted(lives)

    engine = start()
    for word, number in words:
        live = [id for id, said in heard.items() if not said or said[-1].finish_reason is None]
        if word == "open":
            tokens = 1 + number % 9
            asked = request(f"r{opened}", tokens, None if opened % 2 == 0 else 1)
            opened += 1
            heard[asked.id] = []
            ledger.open(asked)
        elif word == "step" and engine is not None and engine.live:
            hear(ledger.note([engine.step(list(engine.live)[number % len(engine.live)])]))
        elif word == "abort" and live:
            id = live[number % len(live)]
            aborted.add(id)
            output = ledger.abort(id)
            if output is not None:
                assert engine is None or id not in engine.live
                hear([output])
            elif engine is not None and number % 2:  # else the engine dies before it has heard
                engine.live.pop(id)
                hear(ledger.note([Output(id=id, token_ids=[], finish_reason="abort")]))
        elif word == "die" and engine is not None:
            hear(ledger.died())
            engine = start()
        elif word == "down":
            if engine is None:
                engine = start()
            else:
                hear(ledger.died())
                engine = None
        send()
    if engine is None:
        engine = start()
        send()
    while engine.live:
        hear(ledger.note([engine.step(next(iter(engine.live)))]))
        send()
    assert len(ledger) == 0
    for id, said in heard.items():
        tokens = [token for output in said for token in output.token_ids]
        reasons = [output.finish_reason for output in said]
        assert reasons.count(None) == len(reasons) - 1
        assert tokens == list(range(len(tokens)))
        if reasons[-1] == "abort":
            assert id in aborted
        elif reasons[-1] == "error":
            assert "died 3 times" in (said[-1].error or "")
        assert len({output.cached_tokens for output in said if output.finish_reason != "abort"}) <= 1
        assert sum(output.prompt_logprobs is not None for output in said) == (int(id[1:]) % 2 and bool(tokens))


def test_what_the_first_engine_said_stays() -> None:
    ledger = Ledger()
    ledger.open(request("a", prompt_logprobs=2))
    sent(ledger, "a")
    first = Output(id="a", token_ids=[7], cached_tokens=2, prompt_logprobs=[None, SCORE, SCORE])
    assert ledger.note([first, token("a", 8)]) == [first, token("a", 8)]
    assert ledger.died() == []
    (again,) = ledger.due()
    assert (again.resume, again.params.prompt_logprobs, again.prompt) == ([7, 8], None, [1, 2, 3])
    last = Output(id="a", token_ids=[9], cached_tokens=5, finish_reason="stop", stop_token=9, timings=Timings(0, 0, 1))
    (told,) = ledger.note([last])
    assert told == msgspec.structs.replace(last, cached_tokens=2, timings=None)
    assert ledger.resumed == 1
    assert ledger.note([token("a", 1)]) == []


def test_prompt_logprobs_that_were_not_delivered_are_asked_for_again() -> None:
    ledger = Ledger()
    ledger.open(request("a", prompt_logprobs=2))
    ledger.due()
    ledger.died()
    (again,) = ledger.due()
    assert again == request("a", prompt_logprobs=2)


def test_three_deaths() -> None:
    """Alone, a request that kills is ended at the third death, with what the client was told before."""
    ledger = Ledger()
    ledger.open(request("a"))
    ledger.due()
    ledger.note([token("a", 0, cached=2)])
    assert ledger.died() == []  # it had brought a token: this does not count
    ledger.due()
    assert fallen(ledger, MOST_DEATHS - 1) == []
    (last,) = ledger.died()
    assert (last.finish_reason, last.cached_tokens) == ("error", 2)
    assert "died 3 times with this request" in (last.error or "")
    assert (len(ledger), ledger.dropped, ledger.due()) == (0, 1, [])


def test_a_token_proves_innocence() -> None:
    ledger = Ledger()
    ledger.open(request("a", 1000))
    ledger.due()
    for index in range(50):
        assert fallen(ledger, MOST_DEATHS - 1) == []
        ledger.note([token("a", index)])
    assert fallen(ledger, MOST_DEATHS + 1) != []


def test_suspects_are_tried_alone() -> None:
    """The one that kills is found in three deaths, and nobody else is harmed."""
    ledger = Ledger()
    for id in "abcde":
        ledger.open(request(id, 100))
    sent(ledger, *"abcde")
    ledger.note([token("a", 0), token("d", 0)])
    assert ledger.died(present="abc") == []  # it was b or c
    sent(ledger, *"adbce")
    ledger.note([token("d", 1)])
    assert ledger.died(present="bca") == []
    sent(ledger, "b")  # alone
    ledger.open(request("new"))
    sent(ledger)
    ledger.note([token("b", 0)])
    sent(ledger, "c")
    (ended,) = ledger.died(present="c")
    assert (ended.id, ended.finish_reason) == ("c", "error")
    sent(ledger, "a", "d", "b", "e", "new")


def test_waiting_is_no_crime() -> None:
    """Requests that are in no step when the engine dies are not accused, however often that is."""
    ledger = Ledger()
    for id in "abc":
        ledger.open(request(id, 1000))
    for _ in range(20):
        ledger.due()
        assert ledger.died(present=()) == []
    assert len(ledger) == 3


def test_who_was_silent_longest_comes_first() -> None:
    """An engine with one slot that is killed again and again: all get their turn."""
    ledger = Ledger()
    for id in "abc":
        ledger.open(request(id, 1000))
        ledger.due()
        ledger.note([token(id, 0)])
    turns = []
    for life in range(9):
        assert ledger.died(present=()) == []
        first, *_ = ledger.due()
        turns.append(first.id)
        ledger.note([token(first.id, 1 + life // 3)])
    assert "".join(turns) == "abcabcabc"


def test_the_end_of_one_on_trial_lets_the_next_come() -> None:
    ledger = Ledger()
    for id in "abc":
        ledger.open(request(id))
    ledger.due()
    assert fallen(ledger, MOST_DEATHS - 2) == ledger.died() == []
    sent(ledger, "a")
    assert ledger.abort("a") is None  # the engine is to be told
    ledger.note([Output(id="a", token_ids=[], finish_reason="abort")])
    sent(ledger, "b")
    ledger.note([Output(id="b", token_ids=[], finish_reason="timeout")])
    sent(ledger, "c")


@pytest.mark.parametrize("when", ["down", "held", "before it was heard"])
def test_an_abort_is_never_sent_again(when: str) -> None:
    ledger = Ledger()
    ledger.open(request("a"))
    ledger.open(request("b"))
    ledger.due()
    if when == "before it was heard":
        assert ledger.abort("b") is None
        (output,) = ledger.died()
    else:
        assert fallen(ledger, MOST_DEATHS - 2) == ledger.died() == []
        if when == "held":
            sent(ledger, "a")
        output = ledger.abort("b")  # type: ignore[assignment]
    assert (output.id, output.finish_reason) == ("b", "abort")
    assert ledger.abort("b") is None
    assert "b" not in [due.id for due in ledger.due()]
    ledger.note([token("a", 1)])
    assert ledger.due() == []


def test_requests_that_no_engine_had_are_not_accused() -> None:
    ledger = Ledger()
    ledger.open(request("a"))
    for _ in range(10):
        assert ledger.died() == []
    sent(ledger, "a")


def test_counters_go_on_and_gauges_do_not() -> None:
    dead = EngineStats(
        running=5,
        generated_tokens=100,
        finished={"stop": 2},
        step_seconds={"decode": 1.5},
        disk=TierStats(pages=7, writing=True, written_pages=3),
    )
    new = EngineStats(running=1, generated_tokens=10, finished={"stop": 1, "length": 1}, disk=TierStats(pages=8))
    both = carry(dead, new)
    assert (both.running, both.generated_tokens) == (1, 110)
    assert both.finished == {"stop": 3, "length": 1}
    assert both.step_seconds == {"decode": 1.5}
    assert both.disk == TierStats(pages=8, written_pages=3)
    assert carry(both, EngineStats()).disk == TierStats(written_pages=3)
    assert carry(EngineStats(), new) == new


def test_unknown_ids_are_ignored() -> None:
    ledger = Ledger()
    assert ledger.abort(Abort("x").id) is None
    assert ledger.note([token("x", 1)]) == []
    assert ledger.died() == []
