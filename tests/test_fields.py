"""Fields of requests that other servers have: what they bring to the engine, and what they get back, from the scripted
engine and from a real one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from served import served
from test_server_api import BPE, CHAT, CONTEXT, EOS, HI, SPM, VOCAB, ScriptedEngine, complete, post, refused, stream
from tricorn.server import schema

PLAIN = "/v1/completions"
ENGINE = ScriptedEngine(BPE.encode("one two"))
START = next(id for id, text in BPE.special.items() if text == "<|im_start|>")


def chat(engine: ScriptedEngine, options: dict[str, Any] | None = None, **body: Any) -> Any:
    response = post(engine, CHAT, {"messages": HI, **body}, **(options or {}))
    assert response.status_code == 200, response.text
    return response.json()


# --- bans


def test_bad_words_are_spelled_with_and_without_a_space() -> None:
    complete(ENGINE, bad_words=["fox", " dog"])
    banned = ENGINE.requests[-1].banned
    for text in ("fox", " fox", "dog", " dog"):
        assert BPE.encode(text) in banned
    assert len(banned) == 4


def test_odd_bad_words() -> None:
    for word in (" ", "\t", "\n", "\u0007", "  ", "漢", "🦜"):
        complete(ENGINE, bad_words=[word])
        assert BPE.encode(word) in ENGINE.requests[-1].banned
    for words in (
        [""],
        [[]],
        [None],
        "word",
        [f"w{place}" for place in range(5000)],
        ["a" * 65],
        ["a" * 64] * 65,
        {"a": 1},
        [5],
    ):
        for path, body in ((PLAIN, {"prompt": "x"}), (CHAT, {"messages": HI})):
            assert refused({**body, "bad_words": words}, path=path)["param"] == "bad_words"
    for nothing in ([], None):
        complete(ENGINE, bad_words=nothing)
        assert ENGINE.requests[-1].banned == []


def test_allowed_ids() -> None:
    for ids in ([], [VOCAB], [-1], ["a"], [1.5], [True], 5, list(range(5000)), [2**70]):
        for path, body in ((PLAIN, {"prompt": "x"}), (CHAT, {"messages": HI})):
            assert refused({**body, "allowed_token_ids": ids}, path=path)["param"] == "allowed_token_ids"
    assert f"allowed_token_ids[1] is {VOCAB}" in refused({"prompt": "x", "allowed_token_ids": [5, VOCAB]})["message"]
    complete(ENGINE, allowed_token_ids=[5, VOCAB - 1])
    assert ENGINE.requests[-1].params.allowed_token_ids == (5, VOCAB - 1)
    (only,) = BPE.encode("x")
    message = refused({"prompt": "x", "allowed_token_ids": [only], "bad_words": ["x"]})["message"]
    assert "leave no token" in message


# --- prompts


def test_prompts_are_cut_from_the_front() -> None:
    ids = list(range(3, 200))
    for wanted, kept in ((1, 1), (50, 50), (197, 197), (2**31 - 1, 197)):
        answer = complete(ENGINE, prompt=ids, truncate_prompt_tokens=wanted)
        assert ENGINE.requests[-1].prompt == ids[-kept:]
        assert answer["usage"]["prompt_tokens"] == kept
    long = [5, 6] * CONTEXT
    assert refused({"prompt": long})["code"] == "context_length_exceeded"
    for most, kept in ((16, CONTEXT - 16), (None, CONTEXT - 16), (10 * CONTEXT, CONTEXT - 1), (1, CONTEXT - 1)):
        complete(ENGINE, prompt=long, truncate_prompt_tokens=-1, max_tokens=most)
        assert ENGINE.requests[-1].prompt == long[-kept:]
    complete(ENGINE, prompt=ids, truncate_prompt_tokens=-1)
    assert ENGINE.requests[-1].prompt == ids
    for wrong in (0, -2, 1.5, "5", True):
        assert refused({"prompt": "x", "truncate_prompt_tokens": wrong})["param"] == "truncate_prompt_tokens"


def test_conversations_are_cut_from_the_front() -> None:
    messages = [{"role": "user", "content": "the quick brown fox " * 20}]
    chat(ENGINE, messages=messages)
    whole = ENGINE.requests[-1].prompt
    chat(ENGINE, messages=messages, truncate_prompt_tokens=10)
    assert ENGINE.requests[-1].prompt == whole[-10:]
    chat(ENGINE, messages=messages * 9, truncate_prompt_tokens=-1, max_tokens=6)
    assert ENGINE.requests[-1].prompt[-10:] == whole[-10:]
    assert len(ENGINE.requests[-1].prompt) == CONTEXT - 6


DOCUMENTS = "{% for d in documents %}[{{ d.title }}: {{ d.text }}]{% endfor %}{{ messages[0].content }}"


def test_documents_go_to_the_template() -> None:
    documents = [{"title": "one", "text": "first"}, {"title": "two", "text": "<|im_end|>"}]
    chat(ENGINE, {"template": DOCUMENTS}, documents=documents)
    prompt = ENGINE.requests[-1].prompt
    assert BPE.decode(prompt, skip_special=False) == "[one: first][two: <|im_end|>]hi"
    assert EOS not in prompt, "the text of a document became a marker"
    error = refused({"messages": HI, "documents": documents}, path=CHAT)
    assert error["param"] == "documents"
    for wrong in ([1], [{"a": [1]}], "x", [{}] * 257, {"a": "b"}):
        assert refused({"messages": HI, "documents": wrong}, path=CHAT, template=DOCUMENTS)["param"] == "documents"
    for nothing in ([], None):
        chat(ENGINE, documents=nothing)


# --- logprobs


def test_logprobs_of_prompts() -> None:
    ids = BPE.encode("one two")
    entries = complete(ENGINE, prompt=ids, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(ids)
    for id, entry in zip(ids[1:], entries[1:], strict=True):
        assert entry == {str(id): {"logprob": -0.5, "rank": 1, "decoded_token": BPE.token_text(id)}}
    answer = chat(ENGINE, prompt_logprobs=0, n=2)
    for choice in answer["choices"]:
        assert len(choice["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in complete(ENGINE)["choices"][0]


def test_logprobs_of_prompts_stream_once() -> None:
    for path in (PLAIN, CHAT):
        chunks = stream(ENGINE, path, prompt_logprobs=0)
        found = [choice for chunk in chunks for choice in chunk["choices"] if "prompt_logprobs" in choice]
        assert len(found) == 1


def test_logprobs_of_prompts_are_bounded() -> None:
    for wrong in (-1, 21, VOCAB, 10**6, "1", 1.0, True):
        for path, body in ((PLAIN, {"prompt": "x"}), (CHAT, {"messages": HI})):
            assert refused({**body, "prompt_logprobs": wrong}, path=path)["param"] == "prompt_logprobs"
    body = {"prompt": "x", "echo": True, "logprobs": 1}
    assert refused({**body, "prompt_logprobs": 2})["param"] == "prompt_logprobs"
    choice = complete(ENGINE, **body, prompt_logprobs=1)["choices"][0]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["prompt_logprobs"] == [None]


def test_tokens_by_their_ids() -> None:
    ids = BPE.encode("one two")
    named = [f"token_id:{id}" for id in ids]
    choice = complete(ENGINE, logprobs=1, return_tokens_as_token_ids=True)["choices"][0]
    assert choice["text"] == "one two"
    assert choice["logprobs"]["tokens"] == named
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[name] for name in named]
    body = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    content = chat(ENGINE, **body)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == named
    assert bytes(content[0]["bytes"]).decode() == named[0]
    assert content[0]["top_logprobs"][0]["token"] == named[0]


# --- text


def test_special_tokens_show_when_asked_for() -> None:
    engine = ScriptedEngine([*BPE.encode("one"), START, *BPE.encode("two")])
    assert complete(engine)["choices"][0]["text"] == "onetwo"
    assert complete(engine, skip_special_tokens=True)["choices"][0]["text"] == "onetwo"
    choice = complete(engine, skip_special_tokens=False)["choices"][0]
    assert choice["text"] == "one<|im_start|>two"
    assert choice["finish_reason"] == "stop"
    choice = complete(engine, skip_special_tokens=False, stop="start|>")["choices"][0]
    assert choice["text"] == "one<|im_"


# --- what an answer tells of itself

TIMINGS = {
    "queue_ms",
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_second",
}


def test_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path in (PLAIN, CHAT):
        chunks = stream(ENGINE, path, stream_options=options, n=2)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 2 * (len(ENGINE.script) + 1) > counts[0] > 0
        assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
        assert chunks[-1]["choices"] == []
    for options in ({"continuous_usage_stats": True}, {"continuous_usage_stats": True, "include_usage": False}):
        assert refused({"prompt": "x", "stream": True, "stream_options": options})["param"] == "stream_options"
    chunks = stream(ENGINE, stream_options={"continuous_usage_stats": False})
    assert not any("usage" in chunk for chunk in chunks)


def test_timings_come_once() -> None:
    for path in (PLAIN, CHAT):
        for options in (None, {"include_usage": True}):
            chunks = stream(ENGINE, path, stream_options=options, n=2)
            assert [chunk["timings"].keys() for chunk in chunks if "timings" in chunk] == [TIMINGS]
            assert "timings" in chunks[-1]
    for answer in (complete(ENGINE, n=2), chat(ENGINE, n=2)):
        timings = answer["timings"]
        assert timings.keys() == TIMINGS
        usage = answer["usage"]
        assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"] == 3
        assert timings["prompt_n"] == usage["prompt_tokens"] - 3
        assert timings["predicted_n"] == usage["completion_tokens"]
    assert complete(ENGINE, max_tokens=0)["timings"]["predicted_n"] == 0


# --- fields that go with one route, or mean nothing


def test_fields_of_the_other_route() -> None:
    for name in ("echo", "add_special_tokens", "parse_special"):
        assert refused({"messages": HI, name: True}, path=CHAT)["param"] == name
    chat(ENGINE, echo=False, add_special_tokens=False, parse_special=None)
    for name in ("max_completion_tokens", "top_logprobs"):
        assert refused({"prompt": "x", name: 3})["param"] == name


def test_start_tokens_may_be_left_out() -> None:
    for special, expected in ((None, [2]), (True, [2]), (False, [])):
        complete(ENGINE, {"tokenizer": SPM}, prompt="the", add_special_tokens=special)
        assert ENGINE.requests[-1].prompt == [*expected, *SPM.encode("the")]


def test_fields_that_are_ignored() -> None:
    """Those that the reference names."""
    reference = (Path(__file__).parent.parent / "docs/api.md").read_text()
    table = reference.split("## Fields that are ignored")[1].split("\n## ")[0]
    names = [
        name for line in table.splitlines() if line.startswith("| `") for name in line.split(" | ")[0].split("`")[1::2]
    ]
    assert len(names) > 30
    assert not schema.KNOWN & set(names)
    plain = complete(ENGINE, seed=1)["choices"]
    assert complete(ENGINE, seed=1, **dict.fromkeys(names, "x"))["choices"] == plain
    assert chat(ENGINE, **dict.fromkeys(names, 5))["choices"]


# --- a real engine


@pytest.fixture(scope="module")
def http(engine_for: Callable[..., Any]) -> Iterator[httpx.Client]:
    """A small random model."""
    pytest.importorskip("tricorn._native", reason="the native extension is not built: run make setup")
    _, engine = engine_for("llama", "F32")
    with served(engine.path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


def ask(http: httpx.Client, path: str = PLAIN, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_prompt_logprobs_do_not_depend_on_the_cache(http: httpx.Client) -> None:
    """The same, bit for bit: with and without the cache, echoed or not, and from any place on."""
    prompt = [5 + place * 7 % 90 for place in range(70)]
    first = ask(http, prompt=prompt, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert len(first) == 70
    assert first[0] is None
    for id, entry in zip(prompt[1:], first[1:], strict=True):
        assert len(entry) in (2, 3)
        ranks = {value["rank"]: value["logprob"] for value in entry.values()}
        assert {1, 2} <= ranks.keys()
        assert sorted(ranks.values(), reverse=True) == [ranks[rank] for rank in sorted(ranks)]
        assert str(id) in entry
    ask(http, prompt=prompt, max_tokens=4)
    assert ask(http, prompt=prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
    for start in (0, 1, 2, 17, 33, 69, 70, 500):
        again = ask(http, prompt=prompt, max_tokens=1, prompt_logprobs=2, prompt_logprobs_start=start)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert again["choices"][0]["prompt_logprobs"] == [None] * min(start, 70) + first[max(start, 0) :]
        assert cached >= min(start, 70) - 2
        assert cached <= max(start - 1, 0)
    echoed = ask(http, prompt=prompt, max_tokens=0, echo=True, logprobs=2)["choices"][0]["logprobs"]
    own = [None if entry is None else entry[str(id)]["logprob"] for id, entry in zip(prompt, first, strict=True)]
    assert echoed["token_logprobs"] == own


def test_prompt_logprobs_of_several_choices_and_of_chats(http: httpx.Client) -> None:
    answer = ask(http, CHAT, messages=HI, max_tokens=2, prompt_logprobs=0, n=2, return_token_ids=True)
    one, two = answer["choices"]
    assert one["prompt_logprobs"] == two["prompt_logprobs"]
    ids = one["prompt_token_ids"]
    assert [list(entry) for entry in one["prompt_logprobs"][1:]] == [[str(id)] for id in ids[1:]]
    plain = ask(http, prompt=ids, max_tokens=1, prompt_logprobs=0)["choices"][0]
    assert plain["prompt_logprobs"] == one["prompt_logprobs"]


def test_bans_of_a_real_engine(http: httpx.Client) -> None:
    """Of choices, with a seed, under penalties: nothing else than what is allowed; the logprobs stay the raw ones."""
    allowed = [11, 12, 13, 14]
    body = {"prompt": [5, 6, 7], "max_tokens": 20, "allowed_token_ids": allowed, "return_token_ids": True, "seed": 3}
    answer = ask(http, **body, n=3, presence_penalty=1.0, logprobs=1)
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == 20
        assert set(choice["token_ids"]) <= set(allowed)
        assert min(choice["logprobs"]["token_logprobs"]) < -1.5, "four ids alone would have higher logprobs"
    assert ask(http, **body)["choices"][0] == ask(http, **body)["choices"][0]


def test_timings_of_a_real_engine(http: httpx.Client) -> None:
    body = {"prompt": [9, 8, 7] * 9, "max_tokens": 30, "ignore_eos": True, "temperature": 0}
    answer = ask(http, **body)
    timings = answer["timings"]
    assert (timings["predicted_n"], timings["prompt_n"] + timings["cache_n"]) == (30, 27)
    assert timings["queue_ms"] >= 0
    assert timings["prompt_ms"] > 0
    assert timings["predicted_per_second"] == pytest.approx(29e3 / timings["predicted_ms"], rel=0.01)
    assert timings["prompt_per_second"] == pytest.approx(1e3 * timings["prompt_n"] / timings["prompt_ms"], rel=0.01)
    text = answer["choices"][0]["text"]
    stopped = ask(http, **body, stop=text[len(text) // 2 :][:8])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["timings"]["predicted_ms"] > 0, "a stop string ended it"


@pytest.mark.parametrize("model", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_a_banned_word_is_not_written(real_engine: Callable[[str], Path], model: str) -> None:
    """In either form, and what begins like it still is."""
    with (
        served(real_engine(model), "--kv-bytes", "64M") as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        body = {"prompt": "The opposite of hot is", "max_tokens": 24, "temperature": 0}
        text = ask(http, **body)["choices"][0]["text"]
        words = re.findall(r"[A-Za-z]{3,}", text)
        assert words
        for word in dict.fromkeys(words[:3]):
            assert word not in re.findall(r"\w+", ask(http, **body, bad_words=[word])["choices"][0]["text"])
        pair = " ".join(re.findall(r"\b[a-z]+ [a-z]+\b", text)[0].split())
        for bad in (pair, " " + pair):
            other = ask(http, **body, bad_words=[bad])["choices"][0]["text"]
            assert pair not in other
        unlike = ask(http, **body, bad_words=[words[0] + " zebra"])["choices"][0]["text"]
        assert unlike == text, "only the whole is banned"
