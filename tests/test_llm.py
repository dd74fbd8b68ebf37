"""The LLM class over the real engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tricorn.request import SamplingParams, TricornError
from tricorn.weights import hub

pytest.importorskip("tricorn._native", reason="the native extension is not built: run make setup")

from tricorn.llm import LLM, RequestOutput

PROMPTS = ["The sky is", "Snow is", "2 + 2 ="]
GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=2)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    if not hub.is_pulled("smollm2-135m"):
        pytest.skip("the model is not here: run tricorn pull smollm2-135m")
    with LLM("smollm2-135m", progress=False, kv_bytes=16 << 20, debug_checks=True) as llm:
        yield llm


def exact(answer: RequestOutput) -> object:
    return [(choice.token_ids, choice.logprobs, choice.text) for choice in answer.outputs]


def test_answers_come_in_order_and_equal_one_by_one(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY, progress=False)
    assert [answer.prompt for answer in together] == PROMPTS
    for prompt, answer in zip(PROMPTS, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY, progress=False)
        assert exact(alone) == exact(answer)
        assert alone.prompt_token_ids == llm.tokenizer.encode(prompt)
        assert alone.cached_tokens == len(alone.prompt_token_ids) - 1
        (choice,) = alone.outputs
        assert choice.text == llm.tokenizer.decode(choice.token_ids)
        assert len(choice.token_ids) == len(choice.logprobs or []) == 12
        assert choice.finish_reason == "length"


def test_ids_choices_and_parameters_for_each(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    each = [SamplingParams(max_tokens=4, n=3, seed=1), SamplingParams(max_tokens=4, n=1, seed=1)]
    several, single = llm.generate([ids, ids], each, progress=False)
    assert several.prompt is None
    assert [choice.index for choice in several.outputs] == [0, 1, 2]
    assert several.outputs[0] == single.outputs[0]
    with pytest.raises(TricornError, match="one for each"):
        llm.generate(PROMPTS, each, progress=False)


def test_nothing_gives_nothing(llm: LLM) -> None:
    assert llm.generate([], progress=False) == []
    with pytest.raises(TricornError, match="at least one"):
        llm.chat([], progress=False)


def test_scoring(llm: LLM) -> None:
    (answer,) = llm.generate("Your answer: Yes", SamplingParams(max_tokens=0, prompt_logprobs=1), progress=False)
    assert answer.outputs[0].token_ids == []
    assert answer.prompt_logprobs
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)
    assert answer.prompt_logprobs[0] is None
    assert None not in answer.prompt_logprobs[1:]


def test_chat_and_its_stream_agree(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Count from one to ten in words."}]
    params = SamplingParams(max_tokens=20, temperature=0)
    (answer,) = llm.chat(messages, params, progress=False)
    first, second = llm.chat([messages, messages], params, progress=False)
    assert exact(first) == exact(second) == exact(answer)
    assert "".join(delta.text for delta in llm.stream_chat(messages, params)) == answer.outputs[0].text
    stream = llm.stream_chat(messages, SamplingParams(max_tokens=4000, ignore_eos=True))
    next(stream)
    stream.close()  # aborts; the next answer does not wait for 4,000 tokens
    assert exact(llm.chat(messages, params, progress=False)[0]) == exact(answer)


def test_stops(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], GREEDY, progress=False)
    text = whole.outputs[0].text
    stop = text[5:8]
    params = SamplingParams(max_tokens=12, temperature=0, stop=(stop,))
    (choice,) = llm.generate(PROMPTS[0], params, progress=False)[0].outputs
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_the_context_is_what_memory_holds(llm: LLM) -> None:
    context = llm._frontend.context
    assert context < 2048  # 16 MB of pages
    for length, wanted, got in ((context - 1, 1, 1), (context - 2, 99, 2)):
        params = SamplingParams(max_tokens=wanted, ignore_eos=True)
        (answer,) = llm.generate([5] * length, params, progress=False)
        assert (len(answer.outputs[0].token_ids), answer.outputs[0].finish_reason) == (got, "length")
    for length in (context, context + 1, 10 * context):
        with pytest.raises(TricornError, match=f"{length} tokens"):
            llm.generate([5] * length, progress=False)
    assert llm.generate("ok", GREEDY, progress=False)


def test_one_bad_prompt_stops_all_before_they_run(llm: LLM) -> None:
    for prompts in (["ok", ""], ["ok", [10**6]], "\ud800"):
        with pytest.raises(TricornError):
            llm.generate(prompts, GREEDY, progress=False)
    for params in (
        SamplingParams(stop=("",)),
        SamplingParams(min_tokens=99),
        SamplingParams(temperature=float("nan")),
        SamplingParams(top_p=2.0),
        SamplingParams(logit_bias={-1: 1.0}),
    ):
        with pytest.raises(TricornError):
            llm.generate("ok", params, progress=False)
    assert llm.generate("ok", GREEDY, progress=False)


def test_it_works_inside_a_running_loop(llm: LLM) -> None:
    async def work() -> str:
        return llm.generate("The sky is", GREEDY, progress=False)[0].outputs[0].text

    assert asyncio.run(work()) == llm.generate("The sky is", GREEDY, progress=False)[0].outputs[0].text


def test_options_are_checked() -> None:
    for options, match in (({"nonsense": 1}, "nonsense"), ({"threads": "two"}, "threads"), ({"threads": 0}, "threads")):
        with pytest.raises(TricornError, match=match):
            LLM("smollm2-135m" if hub.is_pulled("smollm2-135m") else pytest.skip("no model"), progress=False, **options)
    with pytest.raises(TricornError, match="no model"):
        LLM("no-such-model", progress=False)


def test_the_bar_shows_and_goes(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate("x", GREEDY)
    assert "Traceback" not in capsys.readouterr().out
