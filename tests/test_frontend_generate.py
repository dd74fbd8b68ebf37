"""From outputs of an engine to deltas of text, with a scripted engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest

from test_frontend_text import BYTES, LITERAL, PIECES
from tricorn.engine.messages import EngineInfo
from tricorn.frontend.errors import BadRequest, EngineFailure
from tricorn.frontend.generate import Assembler, Delta, Frontend, derive_seed
from tricorn.frontend.tokenizer import Tokenizer
from tricorn.request import Output, Request, SamplingParams, TokenLogprobs
from tricorn.scheduler.limits import Limits

BPE = Tokenizer(BYTES.to_str())
EOS = 0


def info() -> EngineInfo:
    limits = Limits(context=256, vocab=BPE.size, max_sequences=8, max_tokens=512, max_rows=64)
    return EngineInfo(model="m", limits=limits, pages=1, page_size=16, page_bytes=1, executor="scripted", threads=1)


@dataclass
class ScriptedClient:
    """Answers every request with the same ids, one per output; notes those that are closed before their end."""

    script: list[int]
    info: EngineInfo = field(default_factory=info)
    alive: bool = True
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    error: str | None = None

    def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        self.requests.append(request)
        return self.answer(request)

    async def answer(self, request: Request) -> AsyncGenerator[Output, None]:
        ended = False
        try:
            ids = self.script[: request.params.max_tokens]
            for place, id in enumerate(ids):
                await asyncio.sleep(0)
                ended = id == EOS or place == len(ids) - 1
                reason = ("stop" if id == EOS else "length") if ended else None
                stop = EOS if id == EOS else None
                yield Output(id=request.id, token_ids=[id], finish_reason=reason, stop_token=stop)
            if self.error:
                ended = True
                yield Output(id=request.id, token_ids=[], finish_reason="error", error=self.error)
        finally:
            if not ended:
                self.aborted.append(request.id)


def logprob(value: float) -> TokenLogprobs:
    return TokenLogprobs(logprob=value, rank=1, top_ids=[], top_logprobs=[])


def assemble(ids: list[int], params: SamplingParams, sizes: random.Random | None = None) -> list[Delta]:
    """The deltas of `ids` fed in outputs of one token, or of random sizes; the last says "length"."""
    assembler = Assembler(BPE, params)
    deltas: list[Delta] = []
    place = 0
    while place < len(ids):
        end = min(len(ids), place + (sizes.randint(0, 3) if sizes else 1))
        output = Output(
            id="x",
            token_ids=ids[place:end],
            logprobs=[logprob(-index) for index in range(place, end)],
            finish_reason="length" if end == len(ids) else None,
        )
        place = end
        if delta := assembler.push(output):
            deltas.append(delta)
            if delta.finish_reason:
                break
    return deltas


def joined(deltas: list[Delta]) -> tuple[str, list[int], list[int], list[float]]:
    return (
        "".join(delta.text for delta in deltas),
        [id for delta in deltas for id in delta.token_ids],
        [offset for delta in deltas for offset in delta.offsets],
        [entry.logprob for delta in deltas for entry in delta.logprobs or []],
    )


def test_every_length_of_a_literal_is_a_prefix_with_one_replacement_at_most() -> None:
    ids = BPE.encode(LITERAL)
    for length in range(1, len(ids) + 1):
        deltas = assemble(ids[:length], SamplingParams(max_tokens=length, logprobs=0))
        text = joined(deltas)[0]
        assert LITERAL.startswith(text.removesuffix("\ufffd"))
        assert "\ufffd" not in "".join(delta.text for delta in deltas[:-1])
        assert deltas[-1].completion_tokens == length
        assert text == BPE.decode(ids[:length])
        assert len(joined(deltas)[1]) == len(joined(deltas)[3]) == length


def test_a_stop_across_tokens_cuts_text_and_logprobs_together() -> None:
    text = "one two three four"
    ids = [id for letter in text for id in BPE.encode(letter)]
    deltas = assemble(ids, SamplingParams(max_tokens=99, logprobs=0, stop=("o th",)))
    got, tokens, offsets, logprobs = joined(deltas)
    assert got == "one tw"
    assert (tokens, offsets) == (ids[:6], [0, 1, 2, 3, 4, 5])
    assert logprobs == [0, -1, -2, -3, -4, -5]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "o th")
    assert deltas[-1].completion_tokens == 10
    kept = joined(assemble(ids, SamplingParams(max_tokens=99, stop=("o th",), include_stop_str_in_output=True)))[0]
    assert kept == "one two th"


def test_streams_equal_the_whole_however_outputs_are_cut() -> None:
    draw = random.Random(3)
    for _ in range(500):
        ids = [draw.randrange(3, 60) if draw.random() < 0.5 else draw.randrange(3, 400) for _ in range(20)]
        ids = [3 + id % (BPE.size - 3) for id in ids]
        text = BPE.decode(ids)
        stops = tuple(
            text[place : place + draw.randint(1, 3)] for place in (draw.randrange(len(text)) for _ in range(2))
        )
        params = SamplingParams(max_tokens=99, logprobs=0, stop=stops, min_tokens=draw.choice([0, 0, 5]))
        one, other = assemble(ids, params), assemble(ids, params, draw)
        assert joined(one) == joined(other)
        assert one[-1].finish_reason == other[-1].finish_reason
        assert sum(delta.finish_reason is not None for delta in one) == 1
        if params.min_tokens == 0:
            assert not any(stop in joined(one)[0] for stop in stops)
        tokens = "".join(map(BPE.token_text, joined(one)[1]))
        if "\ufffd" not in tokens:
            assert tokens.startswith(joined(one)[0])


def test_min_tokens_holds_off_stop_strings() -> None:
    ids = [id for letter in "see the tree" for id in BPE.encode(letter)]
    assert joined(assemble(ids, SamplingParams(max_tokens=99, stop=("e",), min_tokens=5)))[0] == "see th"
    assert joined(assemble(ids, SamplingParams(max_tokens=99, stop=("e",), min_tokens=7)))[0] == "see the tr"


def run(
    client: ScriptedClient, params: SamplingParams, prompts: list[list[int]] | None = None, limit: int | None = None
) -> list[Delta]:
    async def collect() -> list[Delta]:
        frontend = Frontend(BPE, None, client)
        deltas: list[Delta] = []
        stream = frontend.generate(prompts or [[5, 6]], params)
        async for delta in stream:
            deltas.append(delta)
            if limit and len(deltas) >= limit:
                break
        await stream.aclose()
        frontend.close()
        return deltas

    return asyncio.run(collect())


def test_a_finished_request_is_not_aborted_and_a_dropped_one_is() -> None:
    client = ScriptedClient([*BPE.encode("one two"), EOS])
    deltas = run(client, SamplingParams(max_tokens=50))
    assert joined(deltas)[0] == "one two"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)
    assert EOS not in joined(deltas)[1]
    assert deltas[-1].completion_tokens == len(client.script)
    assert client.aborted == []
    run(client, SamplingParams(max_tokens=50), limit=1)
    assert client.aborted == [client.requests[-1].id]
    run(client, SamplingParams(max_tokens=50, stop=("tw",)))
    assert client.aborted[1:] == [client.requests[-1].id]
    run(client, SamplingParams(max_tokens=50, n=3), limit=2)
    assert len(client.aborted) == 5


def test_choices_do_not_depend_on_how_many_there_are() -> None:
    client = ScriptedClient([5, 6, 7])
    deltas = run(client, SamplingParams(n=4, seed=-1), [[5], [6]])
    assert sorted(delta.index for delta in deltas if delta.finish_reason) == list(range(8))
    seeds = [request.seed for request in client.requests]
    assert seeds[0] == 2**64 - 1
    assert len(set(seeds[:4])) == 4
    assert seeds[:4] == seeds[4:]
    again = ScriptedClient([5])
    run(again, SamplingParams(n=2, seed=-1))
    assert [request.seed for request in again.requests] == seeds[:2]
    assert derive_seed(0, 0) == 0
    unseeded = ScriptedClient([5])
    run(unseeded, SamplingParams(n=2))
    run(unseeded, SamplingParams(n=2))
    assert len({request.seed for request in unseeded.requests}) == 4


def test_the_context_bounds_prompts_and_outputs() -> None:
    client = ScriptedClient([5] * 300)
    for length, wanted, got in ((254, 1, 1), (254, 500, 2), (255, 500, 1), (3, 7, 7)):
        assert run(client, SamplingParams(max_tokens=wanted), [[5] * length])[-1].completion_tokens == got
    for length in (256, 257, 2560):
        with pytest.raises(BadRequest, match=f"{length} tokens.*256") as error:
            run(client, SamplingParams(max_tokens=1), [[5] * length])
        assert error.value.code == "context_length_exceeded"


def test_what_the_engine_must_never_see_is_refused() -> None:
    vocab = BPE.size
    cases = [
        ([[1, vocab]], SamplingParams(), "prompt"),
        ([[-1]], SamplingParams(), "prompt"),
        ([[]], SamplingParams(), "prompt"),
        ([[1], []], SamplingParams(), "prompt"),
        ([[1]], SamplingParams(stop_token_ids=(vocab,)), "stop_token_ids"),
        ([[1]], SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
        ([[1]], SamplingParams(min_tokens=17), "min_tokens"),
    ]
    client = ScriptedClient([5])
    for prompts, params, name in cases:
        with pytest.raises(BadRequest) as error:
            run(client, params, prompts)
        assert error.value.param == name
    assert client.requests == []


def test_nothing_to_generate_needs_no_engine() -> None:
    client = ScriptedClient([5])
    (delta,) = run(client, SamplingParams(max_tokens=0))
    assert (delta.text, delta.finish_reason, delta.completion_tokens, client.requests) == ("", "length", 0, [])


def test_an_engine_s_error_reaches_the_consumer() -> None:
    for n in (1, 3):
        with pytest.raises(EngineFailure, match="the engine died"):
            run(ScriptedClient([], error="the engine died"), SamplingParams(n=n))


def test_prompts_longer_than_any_context_are_refused_unread() -> None:
    async def encode(text: str) -> list[int]:
        return await Frontend(Tokenizer(PIECES.to_str(), bos_id=2, add_bos=True), None, ScriptedClient([])).encode(text)

    with pytest.raises(BadRequest, match="characters"):
        asyncio.run(encode("a" * 5000))
    with pytest.raises(BadRequest, match="surrogate"):
        asyncio.run(encode("\ud800"))
    assert asyncio.run(encode("b"))[0] == 2
