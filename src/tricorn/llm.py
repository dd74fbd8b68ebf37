"""Offline use: an engine in this process, prompts in, answers out.

from tricorn import LLM, SamplingParams

llm = LLM("smollm2-135m")
for answer in llm.generate(["The sky is", "Snow is"], SamplingParams(max_tokens=20)):
    print(answer.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tricorn.compiler import ensure
from tricorn.compiler.engine_file import EngineFile
from tricorn.engine.client import InProcessClient
from tricorn.engine.options import EngineOptions
from tricorn.frontend.embedding import vector
from tricorn.frontend.generate import Delta, Frontend, join, load_text
from tricorn.frontend.template import Message
from tricorn.request import FinishReason, Pooling, SamplingParams, TokenLogprobs, TricornError

T = TypeVar("T")

Prompt = str | list[int]


@dataclass(frozen=True)
class CompletionOutput:
    """One choice. `token_ids` and `logprobs` go with `text`; `tricorn.frontend.generate` tells what a stop cuts off."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt: `outputs` holds `n` choices. `prompt` is None for one given as ids or as messages;
    `cached_tokens` is how many of its tokens came from the prefix cache, `embedding` what a pooled prompt is for."""

    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    cached_tokens: int
    embedding: bytes | None = None


class LLM:
    """A model, loaded. `model` is whatever `tricorn serve` takes; `options` are the fields of `EngineOptions`.

    May be used from several threads. `close()`, or leaving a `with` block, frees the engine. Raises TricornError when
    the model cannot be found, built or opened.
    """

    def __init__(self, model: str, *, progress: bool = True, **options: Any) -> None:
        path = ensure(model, progress)
        try:
            engine = msgspec.convert({"path": str(path), **options}, EngineOptions)
        except msgspec.ValidationError as error:
            raise TricornError(f"the options of the engine: {error}") from None
        if unknown := options.keys() - set(EngineOptions.__struct_fields__):
            raise TricornError(f"no such option of the engine: {', '.join(sorted(unknown))}")
        tokenizer, template = load_text(EngineFile.open(Path(path), check_body=False))  # the engine checks it
        self._client = InProcessClient(engine)
        self._frontend = Frontend(tokenizer, template, self._client)
        self._loop = asyncio.new_event_loop()  # of its own, so that this works where a loop already runs
        self._thread = threading.Thread(target=self._loop.run_forever, name="tricorn-llm", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (`tricorn.frontend.tokenizer.Tokenizer`)."""
        return self._frontend.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt, given as text or as token ids; all of them run together. Answers come in the order of
        the prompts.

        `params` is for all of them, or one for each. Raises TricornError, before anything runs, for a prompt or
        parameters that cannot be served.
        """
        several = _several(prompts)
        return self._run(self._answer(several, self._each(params, len(several), SamplingParams()), progress))

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several together. Without `params` an answer may fill the context."""
        several = [messages] if not messages or isinstance(messages[0], dict) else messages
        return self._run(self._answer_chats(several, self._each(params, len(several), self._open_ended()), progress))

    def stream_chat(
        self, messages: list[Message], params: SamplingParams | None = None
    ) -> Generator[Delta, None, None]:
        """The answer to one conversation, piece by piece. Closing the iterator aborts it."""
        return self.stream(self.encode_chat(messages), params or self._open_ended())

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """What continues one prompt, piece by piece. Closing the iterator aborts it."""
        deltas = self._run(self._open(prompt, params or SamplingParams()))
        try:
            while (delta := self._run(_next(deltas))) is not None:
                yield delta
        finally:
            self._run(deltas.aclose())

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        dimensions: int | None = None,
        progress: bool = True,
    ) -> NDArray[np.float32]:
        """A vector for each prompt, [P, D]: the model's last hidden states, pooled, cut to the first `dimensions`, and
        brought to length 1 if they are to be. Raises TricornError.
        """
        several = _several(prompts)
        params = SamplingParams(max_tokens=0, pooling=pooling)
        found = self._run(self._answer(several, [params] * len(several), progress))
        return np.stack(
            [vector(answer.embedding or b"", normalize=normalize, dimensions=dimensions) for answer in found]
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a raw prompt, with BOS in front where the model wants one. Raises TricornError."""
        return self._run(self._frontend.encode(text))

    def encode_chat(self, messages: list[Message], continuation: str = "") -> list[int]:
        """The ids of a conversation with the assistant's turn opened, and begun with `continuation`. Raises
        TricornError."""
        return self._run(self._frontend.encode_chat(messages, continuation=continuation))

    def close(self) -> None:
        """Stops the engine and frees its memory. May be called again."""
        if self._loop.is_running():
            self._client.close()
            self._frontend.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open_ended(self) -> SamplingParams:
        return SamplingParams(max_tokens=self._frontend.context)

    @staticmethod
    def _each(
        params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or default] * count
        if len(params) != count:
            raise TricornError(f"{count} prompts have {len(params)} sampling parameters: give one, or one for each")
        return list(params)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _open(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[Delta, None]:
        ids = await self._frontend.encode(prompt) if isinstance(prompt, str) else prompt
        return self._frontend.generate([ids], params)

    async def _answer_chats(
        self, chats: list[Any], params: list[SamplingParams], progress: bool
    ) -> list[RequestOutput]:
        ids = [await self._frontend.encode_chat(messages) for messages in chats]
        return await self._answer(ids, params, progress)

    async def _answer(
        self, prompts: Sequence[Prompt], params: list[SamplingParams], progress: bool
    ) -> list[RequestOutput]:
        encoded = [await self._frontend.encode(p) if isinstance(p, str) else list(p) for p in prompts]
        # each is checked here, so that a bad one is refused before any runs
        streams = [self._frontend.generate([ids], own) for ids, own in zip(encoded, params, strict=True)]
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        with _Bar(len(prompts), progress) as bar:
            tasks = [
                asyncio.create_task(_collect(text, ids, own.n, stream, bar.token, bar.done))
                for text, ids, own, stream in zip(texts, encoded, params, streams, strict=True)
            ]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:  # one failed, or the caller gave up: the others end too
                    task.cancel()


def _several(prompts: Any) -> Sequence[Prompt]:
    """One prompt, text or ids, is a list of one."""
    single = isinstance(prompts, str) or (len(prompts) > 0 and all(isinstance(item, int) for item in prompts))
    return [prompts] if single else list(prompts)


async def _next(deltas: AsyncGenerator[Delta, None]) -> Delta | None:
    return await anext(deltas, None)


async def _collect(
    prompt: str | None,
    ids: list[int],
    n: int,
    stream: AsyncGenerator[Delta, None],
    token: Callable[[int], None],
    done: Callable[[], None],
) -> RequestOutput:
    choices: list[list[Delta]] = [[] for _ in range(n)]
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            choices[delta.index].append(delta)
            token(len(delta.token_ids))
    done()
    scored = next((delta.prompt_logprobs for delta in choices[0] if delta.prompt_logprobs is not None), None)
    outputs = [_output(deltas) for deltas in choices]
    cached, embedding = max(delta.cached_tokens for delta in choices[0]), choices[0][-1].embedding
    return RequestOutput(prompt, ids, scored, outputs, cached, embedding)


def _output(deltas: list[Delta]) -> CompletionOutput:
    whole = join(deltas)
    return CompletionOutput(
        whole.index, whole.text, whole.token_ids, whole.logprobs, whole.finish_reason, whole.stop_reason
    )


class _Bar:
    """A progress bar over prompts, with the rate of tokens; nothing at all when not `shown`."""

    def __init__(self, total: int, shown: bool) -> None:
        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} tok/s"),
            TimeElapsedColumn(),
            transient=True,
            disable=not shown,
        )
        self._task = self._progress.add_task("", total=total, rate=0.0)
        self._tokens = 0

    def token(self, count: int) -> None:
        self._tokens += count

    def done(self) -> None:
        task = self._progress.tasks[self._task]
        self._progress.update(self._task, advance=1, rate=self._tokens / max(task.elapsed or 0.0, 1e-9))

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
