"""Programs on an engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from tricorn.lang.backend import Meta, Piece, Pieces, first_scored, mean
from tricorn.lang.constraint import Constraint, for_engine
from tricorn.lang.transcript import Prompt
from tricorn.llm import LLM
from tricorn.request import SamplingParams


class Local:
    """A backend over an `LLM`, which stays the caller's to close."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def generate(self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None) -> Pieces:
        ids = self._encode(prompt)
        cached = 0
        with closing(self._llm.stream(ids, for_engine(params, constraint))) as deltas:
            for delta in deltas:
                cached = max(cached, delta.cached_tokens)
                meta = None
                if delta.finish_reason is not None:
                    count, reason = delta.completion_tokens, delta.finish_reason
                    meta = Meta(len(ids), cached, count, reason, delta.stop_reason)
                yield Piece(delta.text, meta)

    def score(self, prompt: Prompt, choices: Sequence[str]) -> Meta:
        continued = [self._encode(Prompt(prompt.text + choice, prompt.messages)) for choice in choices]
        first = first_scored(self._encode(prompt), continued)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=first)
        answers = self._llm.generate(continued, params, progress=False)
        scores = tuple(
            mean([entry.logprob for entry in (answer.prompt_logprobs or [])[first:] if entry is not None])
            for answer in answers
        )
        cached = sum(answer.cached_tokens for answer in answers)
        return Meta(sum(map(len, continued)), cached, scores=scores)

    def _encode(self, prompt: Prompt) -> list[int]:
        if prompt.messages is None:
            return self._llm.encode(prompt.text)
        return self._llm.encode_chat(prompt.conversation, continuation=prompt.text)
