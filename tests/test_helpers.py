"""Tokens of texts and conversations, and back; and whether the server really works."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from test_server_api import BPE, CHAT, CONTEXT, EOS, HI, SPM, VOCAB, ScriptedEngine, drive, post, refused, strict
from tricorn import __version__
from tricorn.engine.messages import EngineStats
from tricorn.request import Output, Request
from tricorn.server import helpers

COUNT = "/v1/chat/completions/input_tokens"
TEXTS = ["one two", " the  quick\n\n", "漢 🦜", "a<|im_end|>b", ""]


def ask(path: str, body: dict[str, Any], engine: ScriptedEngine | None = None, **options: Any) -> Any:
    response = post(engine or ScriptedEngine([5]), path, body, **options)
    assert response.status_code == 200, response.text
    return strict(response.text)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back(text: str) -> None:
    answer = ask("/tokenize", {"prompt": text, "return_token_strs": True, "model": "m"})
    ids = answer["tokens"]
    assert ids == BPE.encode(text)
    assert answer == {
        "count": len(ids),
        "max_model_len": CONTEXT,
        "tokens": ids,
        "token_strs": [BPE.token_text(id) for id in ids],
    }
    assert ask("/detokenize", {"tokens": ids}) == {"prompt": text}
    assert ask("/tokenize", {"prompt": text})["token_strs"] is None


def test_start_tokens_and_markers() -> None:
    for special, expected in ((None, [2]), (True, [2]), (False, [])):
        body = {"prompt": "the", "add_special_tokens": special}
        assert ask("/tokenize", body, tokenizer=SPM)["tokens"] == [*expected, *SPM.encode("the")]
    assert EOS in ask("/tokenize", {"prompt": "<|im_end|>"})["tokens"]
    plain = ask("/tokenize", {"prompt": "<|im_end|>", "parse_special": False})["tokens"]
    assert EOS not in plain
    assert ask("/detokenize", {"tokens": plain}) == {"prompt": "<|im_end|>"}


CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": HI},
    {"messages": [{"role": "system", "content": "be <|im_end|> brief"}, *HI], "max_tokens": 5},
    {"messages": [*HI, {"role": "assistant", "content": "well, "}], "continue_final_message": True},
    {"messages": [{"role": "user", "content": "the quick brown fox"}], "truncate_prompt_tokens": 7},
]


@pytest.mark.parametrize("body", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_conversations_are_those_of_chats(body: dict[str, Any]) -> None:
    """All routes tell of the very ids that a chat completion has."""
    engine = ScriptedEngine([5])
    ask(CHAT, body, engine)
    ids = engine.requests[-1].prompt
    assert ask("/tokenize", body)["tokens"] == ids
    assert ask(COUNT, body) == {"object": "response.input_tokens", "input_tokens": len(ids)}
    assert ask("/apply-template", body) == {"prompt": BPE.decode(ids, skip_special=False)}


def test_bad_input() -> None:
    for body in ({}, {"prompt": None}, {"prompt": "x", "messages": HI}):
        assert refused(body, path="/tokenize")["param"] == "prompt"
    assert refused({"prompt": ["x"]}, path="/tokenize")["param"] == "prompt"
    assert refused({"messages": []}, path="/tokenize")["param"] == "messages"
    for field in ("add_special_tokens", "parse_special"):
        assert refused({"messages": HI, field: True}, path="/tokenize")["param"] == field
    for tokens in ([VOCAB], [-1], [5, VOCAB], "x", ["a"], [1.5], [True], [2**70], None, [5] * (CONTEXT + 1)):
        assert refused({"tokens": tokens}, path="/detokenize")["param"] == "tokens"
    assert f"tokens[1] is {VOCAB}" in refused({"tokens": [5, VOCAB]}, path="/detokenize")["message"]
    assert ask("/detokenize", {"tokens": [VOCAB - 1, 5]})["prompt"] == BPE.token_text(5)
    for path in ("/tokenize", "/apply-template", COUNT):
        for wrong in ({"messages": [{"role": "alien"}]}, {"messages": HI, "chat_template": "x"}):
            refused(wrong, path=path)
    refused({"prompt": "x" * 16 * (CONTEXT + 1)}, path="/tokenize")
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]}), (COUNT, {"messages": HI})):
        refused({**body, "model": "other"}, 404, path)
        refused(b"[" * 100, path=path)


def test_the_version() -> None:
    assert drive(lambda http: http.get("/version"), ScriptedEngine()).json() == {"version": __version__}


# --- health_generate


class Slow(ScriptedEngine):
    """Says nothing to anybody; `others` tells how many tokens it has brought to others so far."""

    others = 0
    open = 0

    async def answer(self, request: Request) -> AsyncGenerator[Output, None]:
        self.open += 1
        try:
            await asyncio.sleep(60)
        finally:
            self.open -= 1
        yield Output(id=request.id, token_ids=[])

    async def stats(self) -> EngineStats:
        self.others += self.delay > 0
        return EngineStats(generated_tokens=self.others)


def healthy(engine: ScriptedEngine) -> httpx.Response:
    response: httpx.Response = drive(lambda http: http.get("/health_generate"), engine)
    return response


def test_a_token_is_really_generated() -> None:
    engine = ScriptedEngine([5])
    assert healthy(engine).status_code == 200
    assert engine.requests[0].params.max_tokens == 1
    for broken in (ScriptedEngine([5], fail_after=0), ScriptedEngine([5], alive=False)):
        answer = healthy(broken)
        assert answer.status_code == 503
        assert "retry-after" in answer.headers


def test_a_hung_engine_is_ill_and_a_busy_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "PROBE_SECONDS", 0.2)
    for delay, status in ((0.0, 503), (1.0, 200)):
        engine = Slow(delay=delay)
        started = time.perf_counter()
        assert healthy(engine).status_code == status
        assert time.perf_counter() - started < 2
        assert engine.open == 0, "the probe goes on"


def test_probes_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask at once, one token is generated."""
    engine = ScriptedEngine([5], delay=0.1)

    async def work(http: httpx.AsyncClient) -> list[int]:
        answers = await asyncio.gather(*(http.get("/health_generate") for _ in range(20)))
        return [answer.status_code for answer in answers]

    assert drive(work, engine) == [200] * 20
    assert len(engine.requests) == 1
