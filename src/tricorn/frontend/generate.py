"""From a prompt and its sampling parameters to a stream of text.

One prompt with `n` choices becomes n sequences of the engine; each sequence has an `Assembler` that turns sampled ids
into text and ends it at a stop string. What is returned and what is counted:

- `text` ends before the stop string (after it with `include_stop_str_in_output`) and never shows a special token.
- `token_ids` and `logprobs` go with the text: the token in which a stop string begins is kept when some of its text
  is, tokens wholly behind the cut are not, and the end-of-sequence or stop token that ended a sequence is not.
- `completion_tokens` counts every sampled token, the ending one included.
- `min_tokens` also keeps stop strings from ending a sequence; only one that completes later does.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from tricorn.engine.messages import EngineInfo, EngineStats, Status
from tricorn.frontend.errors import BadRequest, EngineFailure
from tricorn.frontend.parsers import plain
from tricorn.frontend.stop import StopMatcher
from tricorn.frontend.template import ChatTemplate, Message, check_text, normalize
from tricorn.frontend.tokenizer import Detokenizer, Tokenizer
from tricorn.frontend.tools import Tools, check
from tricorn.frontend.turn import Manner, Turn
from tricorn.frontend.workers import Job, Threads, Workers
from tricorn.request import (
    MAX_BAD_WORDS,
    Constraint,
    FinishReason,
    Output,
    Request,
    SamplingParams,
    Service,
    Timings,
    TokenLogprobs,
    TricornError,
)
from tricorn.scheduler.limits import check_request

if TYPE_CHECKING:
    from tricorn.compiler.engine_file import EngineFile

T = TypeVar("T")

CHARACTERS_PER_TOKEN = 16
"""A prompt with more characters than this for each token of the context is refused unread."""

MASK64 = 2**64 - 1


class Delta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is new in one choice.

    `offsets` are the characters of the choice's text before each token of `token_ids`. The fields from
    `finish_reason` on tell how it stands: `stop_reason` is the stop string or stop token id that ended it (None for
    the model's own end). `prompt_logprobs` comes with the first delta only, `timings` with the last, and so does the
    `embedding` of a prompt that is pooled: float32 of the model's width.
    """

    index: int
    text: str
    token_ids: list[int]
    offsets: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    completion_tokens: int
    cached_tokens: int
    prompt_logprobs: list[TokenLogprobs | None] | None
    timings: Timings | None = None
    embedding: bytes | None = None


def join(deltas: list[Delta]) -> Delta:
    """All deltas of one choice as a single one."""
    last = deltas[-1]
    return Delta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[id for delta in deltas for id in delta.token_ids],
        offsets=[offset for delta in deltas for offset in delta.offsets],
        logprobs=None if last.logprobs is None else [entry for delta in deltas for entry in delta.logprobs or ()],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        completion_tokens=last.completion_tokens,
        cached_tokens=max(delta.cached_tokens for delta in deltas),
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
        timings=last.timings,
        embedding=last.embedding,
    )


class EngineClient(Protocol):
    """The way to an engine, in this process or another."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def status(self) -> Status: ...

    @property
    def alive(self) -> bool:
        """Not dead."""
        ...

    def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """Runs the request; the last output has a finish_reason. Closing the generator before it aborts the request.
        Raises TricornError."""
        ...

    async def stats(self) -> EngineStats: ...

    async def state(self, *, tree: bool = False) -> dict[str, Any]:
        """What is going on, for people; with `tree`, the cached prefixes too. Raises TricornError."""
        ...

    def close(self) -> None: ...


def load_text(file: EngineFile) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer and the chat template of an engine file."""
    tokenizer = Tokenizer(file.tokenizer, bos_id=file.bos_id, add_bos=file.add_bos)
    if file.chat_template is None:
        return tokenizer, None
    return tokenizer, ChatTemplate(file.chat_template, tokenizer, eos_id=file.eos_ids[0] if file.eos_ids else None)


class Assembler:
    """Turns the outputs of one sequence into deltas. Pure: the same outputs give the same text, however they are cut
    up. Tokens that are `visible` show, though markers.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, index: int = 0, visible: frozenset[int] = frozenset()
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=params.skip_special_tokens, visible=visible)
        self._stops = StopMatcher(params.stop) if params.stop else None
        self._params = params
        self._index = index
        self._text = ""  # decoded but not released yet
        self._released = 0  # characters given out
        self._count = 0
        self._ids: list[int] = []  # tokens not released yet, with their offsets and logprobs
        self._offsets: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._timings: Timings | None = None

    def push(self, output: Output) -> Delta | None:
        """The delta that `output` brings, None when there is nothing to show yet. Raises EngineFailure."""
        if output.finish_reason == "error" and output.refused:
            raise BadRequest(output.error or "the constraint cannot be enforced", code="invalid_constraint")
        if output.finish_reason == "error":
            raise EngineFailure(output.error or "the engine failed")
        if output.timings is not None:
            ended = output.finish_reason is not None
            self._timings = output.timings if ended else msgspec.structs.replace(output.timings, decode=0.0)
        logprobs = output.logprobs
        for place, id in enumerate(output.token_ids):
            self._count += 1
            if output.stop_token is not None and place == len(output.token_ids) - 1:
                break
            self._ids.append(id)
            self._offsets.append(self._released + len(self._text))
            if logprobs is not None:
                self._logprobs.append(logprobs[place])
            if stop := self._read(self._detokenizer.push(id)):
                return self._end(output, "stop", stop, cut=True)
        if output.finish_reason is None:
            return self._release(output)
        if stop := self._read(self._detokenizer.finish()):
            return self._end(output, "stop", stop, cut=True)
        return self._end(output, output.finish_reason, self._stop_id(output), cut=False)

    def _read(self, piece: str) -> str | None:
        """Takes in new text. When it completes a stop string the text is cut there and the stop returned."""
        stop = self._stops.push(piece, armed=self._count > self._params.min_tokens) if self._stops else None
        if stop is None:
            self._text += piece
            return None
        read, string = stop
        self._text += piece[:read]
        if not self._params.include_stop_str_in_output:
            self._text = self._text[: -len(string)]
        return string

    def _stop_id(self, output: Output) -> int | None:
        return output.stop_token if output.stop_token in self._params.stop_token_ids else None

    def _release(self, output: Output) -> Delta | None:
        """Gives out what can no longer be part of a stop string."""
        sure = len(self._text) - (self._stops.held if self._stops else 0)
        text, self._text = self._text[:sure], self._text[sure:]
        self._released += sure
        tokens = bisect_left(self._offsets, self._released)
        if not text and not tokens and output.prompt_logprobs is None:
            return None
        return self._delta(output, text, tokens, None, None)

    def _end(self, output: Output, reason: FinishReason, stop: str | int | None, *, cut: bool) -> Delta:
        self._released += len(self._text)
        tokens = bisect_left(self._offsets, self._released) if cut else len(self._ids)
        return self._delta(output, self._text, tokens, reason, stop)

    def _delta(
        self, output: Output, text: str, tokens: int, reason: FinishReason | None, stop: str | int | None
    ) -> Delta:
        ids, self._ids = self._ids[:tokens], self._ids[tokens:]
        offsets, self._offsets = self._offsets[:tokens], self._offsets[tokens:]
        logprobs, self._logprobs = self._logprobs[:tokens], self._logprobs[tokens:]
        return Delta(
            index=self._index,
            text=text,
            token_ids=ids,
            offsets=offsets,
            logprobs=logprobs if self._params.logprobs is not None else None,
            finish_reason=reason,
            stop_reason=stop,
            completion_tokens=self._count,
            cached_tokens=output.cached_tokens,
            prompt_logprobs=output.prompt_logprobs,
            timings=None if reason is None else self._timings,
            embedding=output.embedding,
        )


class Frontend:
    """Text in, text out, over an engine client. `template` is None for a model that has no chat template; `workers`
    read prompts, by default in threads.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        client: EngineClient,
        workers: Workers | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.client = client
        self.context = client.info.context
        self.vocab = client.info.vocab
        self._workers = workers or Threads(tokenizer, template)
        self._spell = lru_cache(1024)(tokenizer.spellings)
        self._manner = None if template is None else Manner(template.source, tokenizer)

    # --- prompts

    async def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of a raw prompt, with BOS in front where the model wants one. Raises BadRequest."""

        check_text(text, CHARACTERS_PER_TOKEN * self.context)
        arguments = {"text": text, "add_special": add_special, "parse_special": parse_special}
        return await self._workers.encode(Job("plain", arguments))

    async def encode_chat(
        self,
        messages: list[Message],
        options: dict[str, Any] | None = None,
        *,
        tools: Tools | None = None,
        continuation: str = "",
    ) -> list[int]:
        """The ids of a conversation with the assistant's turn opened, and begun with `continuation`. `options` are
        further template variables. Raises BadRequest."""
        if self.template is None or self._manner is None:
            raise BadRequest("this model has no chat template: use /v1/completions", "messages", "no_chat_template")
        messages = normalize(messages)
        shown = None if tools is None else [tool.shown for tool in check(tools).offered]
        if not self._manner.form.taught:
            messages, shown = plain.explained(messages, tools), None
        arguments = {
            "messages": messages,
            "options": options,
            "tools": shown,
            "limit": CHARACTERS_PER_TOKEN * self.context,
            "continuation": continuation,
        }
        return await self._workers.encode(Job("chat", arguments))

    async def begin(
        self,
        messages: list[Message],
        options: dict[str, Any] | None = None,
        *,
        tools: Tools | None = None,
        constraint: Constraint | None = None,
        continuation: str = "",
    ) -> tuple[list[int], Turn]:
        """The same ids, and the turn that follows: what binds it, and how to read it. Raises BadRequest."""
        ids = await self.encode_chat(messages, options, tools=tools, continuation=continuation)
        assert self._manner is not None
        return ids, self._manner.turn(ids, tools, constraint, continuation)

    # --- generation

    def check(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        """`params` as the engine is to run them for this prompt: `max_tokens` cut to what the context leaves.

        Raises BadRequest for ids outside the vocabulary, a prompt that leaves no room, and parameters that contradict
        each other.
        """
        if not prompt:
            raise BadRequest("the prompt is empty and this model has no start token: send at least one token", "prompt")
        self.check_ids(prompt, "prompt")
        self.check_ids(params.stop_token_ids, "stop_token_ids")
        self.check_ids(params.logit_bias, "logit_bias")
        self.check_ids(params.allowed_token_ids, "allowed_token_ids")
        if isinstance(params.stop, str) or not all(params.stop):
            raise BadRequest("stop must be a tuple of strings, none of them empty", "stop")
        if params.min_tokens > params.max_tokens:
            raise BadRequest(
                f"min_tokens ({params.min_tokens}) must not be above max_tokens ({params.max_tokens})", "min_tokens"
            )
        if params.constraint is not None:
            for name in ("ignore_eos", "min_tokens", "stop"):
                if getattr(params, name):
                    raise BadRequest(f"{name} does not go with a constraint, which says itself where answers end", name)
        room = self.context - len(prompt)
        if room < (params.max_tokens > 0):
            raise BadRequest(
                f"the prompt has {len(prompt)} tokens; this model's context is {self.context} tokens, output included",
                "prompt",
                "context_length_exceeded",
            )
        checked = msgspec.structs.replace(
            params, max_tokens=min(params.max_tokens, room), min_tokens=min(params.min_tokens, room)
        )
        try:
            banned = self._banned(params.bad_words)
            check_request(Request(id="", prompt=prompt, params=checked, seed=0, banned=banned), self.client.info.limits)
        except TricornError as error:
            raise BadRequest(str(error)) from None
        return checked

    def _banned(self, words: tuple[str, ...]) -> list[list[int]]:
        """The ids that spell these words. Raises BadRequest."""
        if isinstance(words, str) or len(words) > MAX_BAD_WORDS:
            raise BadRequest(f"bad_words must be a tuple of at most {MAX_BAD_WORDS} strings", "bad_words")
        found = [self._spell(word) for word in words]
        if not all(found):
            raise BadRequest(f"bad_words[{found.index([])}] is no text that this model could write", "bad_words")
        return [ids for spellings in found for ids in spellings]

    def check_ids(self, ids: Collection[int], name: str) -> None:
        """Raises BadRequest for an id outside the vocabulary."""
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab:
            place, id = next((place, id) for place, id in enumerate(ids) if not 0 <= id < self.vocab)
            raise BadRequest(f"{name}[{place}] is {id}, outside this model's ids 0 to {self.vocab - 1}", name)

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        service: Service = Service(),
        visible: frozenset[int] = frozenset(),
        together: int | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Runs every prompt `params.n` times, so many sequences `together` at most; choice i of prompt p has index
        p * n + i.

        Choice 0 uses the seed as it is, the others seeds derived from it, so that choice i does not depend on n. When
        the consumer closes the generator early, or a stop string completes, the engine's sequences are aborted.
        Raises BadRequest at once; the generator raises EngineFailure.
        """
        checked = [self.check(prompt, params) for prompt in prompts]
        seed = secrets.randbits(64) if params.seed is None else params.seed & MASK64
        streams = [
            self._sequence(prompt, own, derive_seed(seed, choice), place * params.n + choice, service, visible)
            for place, (prompt, own) in enumerate(zip(prompts, checked, strict=True))
            for choice in range(params.n)
        ]
        return streams[0] if len(streams) == 1 else _merge(streams, together or len(streams))

    async def _sequence(
        self,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        index: int,
        service: Service,
        visible: frozenset[int],
    ) -> AsyncGenerator[Delta, None]:
        assembler = Assembler(self.tokenizer, params, index, visible)
        if params.max_tokens == 0 and params.prompt_logprobs is None and params.pooling is None:
            yield assembler.push(Output(id="", token_ids=[], finish_reason="length"))  # type: ignore[misc]
            return
        request = Request(
            id=secrets.token_hex(12),
            prompt=prompt,
            params=params,
            seed=seed,
            service=service,
            banned=self._banned(params.bad_words),
        )
        began = 0.0
        async with aclosing(self._submit(request)) as outputs:  # leaving before the last output aborts the request
            async for output in outputs:
                began = began or (time.monotonic() if output.token_ids else 0.0)
                delta = assembler.push(output)
                if delta is not None:
                    yield _timed(delta, began)
                    if delta.finish_reason is not None:
                        return

    def _submit(self, request: Request) -> AsyncGenerator[Output, None]:
        try:
            return self.client.submit(request)
        except TricornError as error:
            raise BadRequest(str(error)) if self.client.alive else EngineFailure(str(error)) from error

    def close(self) -> None:
        self._workers.close()


def _timed(delta: Delta, began: float) -> Delta:
    """With the decode phase as seen from here, where the engine did not see its end."""
    if delta.timings is None or delta.timings.decode or not began:
        return delta
    return msgspec.structs.replace(
        delta, timings=msgspec.structs.replace(delta.timings, decode=time.monotonic() - began)
    )


def derive_seed(seed: int, choice: int) -> int:
    """The seed of one choice: an unsigned 64-bit number, `seed` itself for choice 0 (splitmix64's finalizer for the
    others).
    """
    if choice == 0:
        return seed
    z = (seed + 0x9E3779B97F4A7C15 * choice) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


async def _merge(streams: list[AsyncGenerator[Delta, None]], together: int) -> AsyncGenerator[Delta, None]:
    """All deltas as they come, of so many streams at a time. The first failure ends everything."""
    turn = asyncio.Semaphore(together)
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Delta, None]) -> None:
        try:
            async with turn, aclosing(stream):
                async for delta in stream:
                    queue.put_nowait(delta)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
