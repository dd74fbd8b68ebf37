"""The shapes of the OpenAI API's answers, as plain dictionaries: whole ones and the chunks of a stream.

Log probabilities are natural logarithms of the model's raw distribution. JSON knows no infinity, so they end at
-9999. A token's text alone shows a part of a character as U+FFFD; `bytes` are always the true ones.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tricorn.frontend.generate import Delta
from tricorn.frontend.tokenizer import Detokenizer, Tokenizer
from tricorn.request import TokenLogprobs

FLOOR = -9999.0

Fields = dict[str, Any]


class Prompt(msgspec.Struct, frozen=True):
    """A prompt's ids and, when it is to be echoed, its text with the character offset of each token."""

    ids: list[int]
    text: str = ""
    offsets: list[int] = []


def echoed(tokenizer: Tokenizer, ids: list[int]) -> Prompt:
    """The prompt as the model sees it, special tokens written out, without the BOS that was put in front."""
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    pieces = ["" if place == 0 and id == tokenizer.bos_id else detokenizer.push(id) for place, id in enumerate(ids)]
    offsets, length = [], 0
    for piece in pieces:
        offsets.append(length)
        length += len(piece)
    return Prompt(ids, "".join(pieces) + detokenizer.finish(), offsets)


def header(kind: str, prefix: str, model: str) -> Fields:
    """What every answer and every chunk of one request begins with."""
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def usage(prompts: Sequence[Prompt], completion_tokens: int, cached_tokens: int) -> Fields:
    prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def timings(prompts: Sequence[Prompt], last: Sequence[Delta], cached_tokens: int) -> Fields:
    """Where the time went, by the last delta of every choice: `queue_ms`, and the rest as llama.cpp names it. Choices
    run side by side, so the time of a phase is that of the slowest. The first token of a choice belongs to `prompt_ms`,
    so it does not count in `predicted_per_second`.
    """
    known = [delta.timings for delta in last if delta.timings is not None]
    queue, prefill, decode = (
        max((getattr(each, name) for each in known), default=0.0) for name in ("queued", "prefill", "decode")
    )
    prompt_n = sum(len(prompt.ids) for prompt in prompts) - cached_tokens
    predicted_n = sum(delta.completion_tokens for delta in last)
    later_n = sum(max(0, delta.completion_tokens - 1) for delta in last)
    return {
        "queue_ms": round(1000 * queue, 3),
        "cache_n": cached_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": round(1000 * prefill, 3),
        "prompt_per_second": round(prompt_n / prefill, 3) if prefill else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": round(1000 * decode, 3),
        "predicted_per_second": round(later_n / decode, 3) if decode else 0.0,
    }


class Numbers:
    """Stands in for a tokenizer where tokens are to be shown by their ids."""

    def token_text(self, id: int) -> str:
        return f"token_id:{id}"

    def token_bytes(self, id: int) -> bytes:
        return self.token_text(id).encode()


def prompt_logprobs(tokenizer: Tokenizer | Numbers, prompt: Prompt, entries: Sequence[TokenLogprobs | None]) -> Any:
    """As vLLM writes them: for each token of the prompt null, or by id the token itself and the best alternatives."""
    return [
        None if entry is None else _ranked(tokenizer, id, entry) for id, entry in zip(prompt.ids, entries, strict=True)
    ]


def _ranked(tokenizer: Tokenizer | Numbers, own: int, entry: TokenLogprobs) -> Fields:
    ranked = [(own, entry.logprob, entry.rank)]
    ranked += zip(entry.top_ids, entry.top_logprobs, range(1, len(entry.top_ids) + 1), strict=True)
    return {
        str(id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(id)}
        for id, logprob, rank in ranked
    }


def _finite(value: float) -> float:
    return value if value > FLOOR else FLOOR


# --- chat


def chat_logprobs(tokenizer: Tokenizer | Numbers, delta: Delta) -> Fields | None:
    if delta.logprobs is None:
        return None
    return {
        "content": [
            {
                **_chat_token(tokenizer, id, entry.logprob),
                "top_logprobs": [
                    _chat_token(tokenizer, top, value)
                    for top, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
                ],
            }
            for id, entry in zip(delta.token_ids, delta.logprobs, strict=True)
        ],
        "refusal": None,
    }


def _chat_token(tokenizer: Tokenizer | Numbers, id: int, logprob: float) -> Fields:
    data = tokenizer.token_bytes(id)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


# --- plain completions


def completion_logprobs(tokenizer: Tokenizer | Numbers, delta: Delta, prompt: Prompt, *, echo: bool) -> Fields | None:
    """The entries of this delta's tokens, offsets counted from the start of the whole text; with `echo` of the prompt's
    as well.
    """
    if delta.logprobs is None:
        return None
    ids, entries = list(delta.token_ids), list[TokenLogprobs | None](delta.logprobs)
    offsets = [len(prompt.text) + offset for offset in delta.offsets]
    if echo:
        known = delta.prompt_logprobs or [None] * len(prompt.ids)
        ids, entries, offsets = [*prompt.ids, *ids], [*known, *entries], [*prompt.offsets, *offsets]
    return {
        "tokens": [tokenizer.token_text(id) for id in ids],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [_top(tokenizer, id, entry) for id, entry in zip(ids, entries, strict=True)],
        "text_offset": offsets,
    }


def _top(tokenizer: Tokenizer | Numbers, id: int, entry: TokenLogprobs | None) -> dict[str, float] | None:
    """The best alternatives by text, the token itself always among them."""
    if entry is None:
        return None
    pairs = {tokenizer.token_text(id): _finite(entry.logprob)}
    for top, value in zip(entry.top_ids, entry.top_logprobs, strict=True):
        pairs.setdefault(tokenizer.token_text(top), _finite(value))
    return pairs
