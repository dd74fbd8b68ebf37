"""Embeddings: prompts in, one vector each out, as OpenAI tells them.

POST /v1/embeddings

The vectors are the hidden states of the served model behind its last norm, pooled over the prompt. Of a prompt that is
truncated the beginning stays.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from tricorn.engine.gate import Ticket
from tricorn.frontend.embedding import vector
from tricorn.frontend.generate import Delta
from tricorn.request import Pooling, SamplingParams, Service
from tricorn.server import answers, schema
from tricorn.server.answers import Prompt
from tricorn.server.bodies import Refusals, check_form, decode
from tricorn.server.errors import too_late
from tricorn.server.exchange import Exchange
from tricorn.server.generation import Generations, service_of, unserved
from tricorn.server.routes import Operation, Routes

F32 = NDArray[np.float32]

Dimensions = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Ask(msgspec.Struct, frozen=True):
    """Prompts, as texts or as ids, and how their vectors are to look: `pooling` is "mean" unless given, and they have
    length 1 unless `normalize` is false.
    """

    input: schema.Prompts
    model: Annotated[str, Meta(max_length=512)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=schema.MAX_TOKENS)] | None = None
    priority: schema.Priority | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None


REFUSED: Refusals = {
    **dict.fromkeys(schema.KNOWN - set(Ask.__struct_fields__), ()),
    **schema.REFUSED,
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "mm_processor_kwargs": (),
    "truncation_side": ("right",),
    "use_activation": (True,),
}

_ask = msgspec.json.Decoder(Ask)


@dataclass(frozen=True)
class Work:
    """What is to be embedded and how. `longest` cuts prompts to so many tokens, -1 to what the context holds."""

    prompts: Sequence[str | list[int]]
    pooling: Pooling = "mean"
    normalize: bool = True
    dimensions: int | None = None
    longest: int | None = None
    special: bool = True


@dataclass(frozen=True)
class Embedded:
    """A vector for each prompt, and what became of it."""

    vectors: list[F32]
    prompts: list[Prompt]
    deltas: list[Delta]

    @property
    def cached(self) -> int:
        return sum(delta.cached_tokens for delta in self.deltas)


class Embedder:
    """Embeds for whatever protocol asks. Prompts beyond the slots of the engine wait in the request itself."""

    def __init__(self, work: Generations) -> None:
        self._work = work
        self._frontend = work.frontend

    async def admit(self, model: str | None, prompts: int) -> Ticket:
        """Raises HttpError or Refused."""
        return await self._work.admit(model, min(prompts, self._frontend.client.info.max_sequences))

    async def embed(self, exchange: Exchange, ticket: Ticket, work: Work, service: Service, id: str) -> Embedded:
        """Raises HttpError 408, BadRequest and EngineFailure."""
        params = SamplingParams(max_tokens=0, pooling=work.pooling)
        prompts = [await self._ids(prompt, work) for prompt in work.prompts]
        deltas: dict[int, Delta] = {}
        async with self._work.run(exchange, ticket, prompts, params, service, id) as embedded:
            async for delta in embedded:
                deltas[delta.index] = delta
        ordered = [deltas[index] for index in range(len(prompts))]
        if any(map(unserved, ordered)):
            raise too_late()
        vectors = [
            vector(delta.embedding or b"", normalize=work.normalize, dimensions=work.dimensions) for delta in ordered
        ]
        return Embedded(vectors, list(map(Prompt, prompts)), ordered)

    async def _ids(self, prompt: str | list[int], work: Work) -> list[int]:
        ids = prompt
        if isinstance(ids, str):
            ids = await self._frontend.encode(ids, add_special=work.special)
        return ids[: self._frontend.context if work.longest == -1 else work.longest]


class Embeddings:
    """The handlers."""

    def __init__(self, work: Generations) -> None:
        self._work = work
        self._embedder = Embedder(work)

    @property
    def routes(self) -> Routes:
        return (Operation("POST", "/v1/embeddings", self.embed, "key", "Vectors of texts", (Ask,)),)

    async def embed(self, exchange: Exchange) -> None:
        body = await exchange.body()
        self._work.open()
        check_form(body, REFUSED)
        ask = decode(_ask, body)
        work = Work(
            prompts=schema.prompts(ask.input, "input"),
            pooling=ask.pooling or "mean",
            normalize=ask.normalize is not False,
            dimensions=ask.dimensions,
            longest=schema.checked_truncation(ask.truncate_prompt_tokens),
            special=ask.add_special_tokens is not False,
        )
        service = msgspec.structs.replace(service_of(exchange), priority=ask.priority or 0)
        with await self._embedder.admit(ask.model, len(work.prompts)) as ticket:
            task = self._embed(exchange, ticket, work, service, base64=ask.encoding_format == "base64")
            await self._work.perform(exchange, task, service.deadline)

    async def _embed(self, exchange: Exchange, ticket: Ticket, work: Work, service: Service, *, base64: bool) -> None:
        head = answers.header("list", "embd", self._work.name)
        embedded = await self._embedder.embed(exchange, ticket, work, service, head["id"])
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(vector) if base64 else vector.tolist()}
            for index, vector in enumerate(embedded.vectors)
        ]
        totals = {
            "usage": answers.usage(embedded.prompts, 0, embedded.cached),
            "timings": answers.timings(embedded.prompts, embedded.deltas, embedded.cached),
        }
        await exchange.answer_json({**head, "data": data, **totals})


def _base64(vector: F32) -> str:
    return b64encode(vector.astype("<f4").tobytes()).decode()
