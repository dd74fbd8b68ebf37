"""What clients ask beside generations: how text becomes ids and back, and whether the server really works.

POST /tokenize                              ids of a text or a conversation, as vLLM tells them
POST /detokenize                            and back
POST /apply-template                        the text that the model would see of a conversation, as llama.cpp tells it
POST /v1/chat/completions/input_tokens      how many ids that would be
GET  /version
GET  /health_generate                       whether a token can be generated, by generating one
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tricorn import __version__
from tricorn.frontend.tokenizer import Detokenizer
from tricorn.request import Namespace, SamplingParams, Service, TricornError
from tricorn.scheduler.limits import MAX_PRIORITY
from tricorn.server import schema
from tricorn.server.bodies import check_form, decode
from tricorn.server.errors import HttpError
from tricorn.server.exchange import Exchange
from tricorn.server.generation import Generations
from tricorn.server.routes import Operation, Routes

PROBE_SECONDS = 10.0
"""How long a token may take before the server counts as ill, unless others get theirs."""

PIECE = 4096
"""Ids that become text at a time, so that many hold up nobody."""


class Tokenize(msgspec.Struct, frozen=True):
    """A text to make ids of, or a conversation, which then may have all fields that a chat completion has."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=schema.MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None


class Detokenize(msgspec.Struct, frozen=True):
    """Ids to make text of."""

    tokens: list[schema.Id]
    model: Annotated[str, Meta(max_length=512)] | None = None


_tokenize = msgspec.json.Decoder(Tokenize)
_detokenize = msgspec.json.Decoder(Detokenize)


class Helpers:
    """The handlers."""

    def __init__(self, work: Generations) -> None:
        self._work = work
        self._frontend = work.frontend
        self._probe: asyncio.Task[bool] | None = None

    @property
    def routes(self) -> Routes:
        chat = (schema.Sampling, schema.Chat)
        count = "/v1/chat/completions/input_tokens"
        return (
            Operation("POST", "/tokenize", self.tokenize, "key", "The ids of a text or a conversation", (Tokenize,)),
            Operation("POST", "/detokenize", self.detokenize, "key", "The text of ids", (Detokenize,)),
            Operation("POST", "/apply-template", self.apply, "key", "The text that the model would see", chat),
            Operation("POST", count, self.count, "key", "Count the tokens of a conversation", chat),
            Operation("GET", "/version", self.version, "open", "The version of the server"),
            Operation("GET", "/health_generate", self.generate, "key", "Whether a token can be generated"),
        )

    async def tokenize(self, exchange: Exchange) -> None:
        body = await exchange.body()
        self._work.open()
        check_form(body, {})
        ask = decode(_tokenize, body)
        self._work.check_model(ask.model)
        await self._work.perform(exchange, self._tokenize(exchange, body, ask), None)

    async def _tokenize(self, exchange: Exchange, body: bytes, ask: Tokenize) -> None:
        ids = await self._ids(body, ask)
        text = self._frontend.tokenizer.token_text
        await exchange.answer_json(
            {
                "count": len(ids),
                "max_model_len": self._frontend.context,
                "tokens": ids,
                "token_strs": [text(id) for id in ids] if ask.return_token_strs else None,
            }
        )

    async def _ids(self, body: bytes, ask: Tokenize) -> list[int]:
        if (ask.prompt is None) == (ask.messages is None):
            raise HttpError(400, "give either prompt or messages", "prompt", "invalid_value")
        if ask.prompt is not None:
            special = ask.add_special_tokens is not False
            parse = ask.parse_special is not False
            return await self._frontend.encode(ask.prompt, add_special=special, parse_special=parse)
        if ask.add_special_tokens or ask.parse_special is not None:
            name = "add_special_tokens" if ask.add_special_tokens else "parse_special"
            raise HttpError(400, f"{name} does not go with messages: the template writes the markers", name)
        return await self._conversation(body)

    async def _conversation(self, body: bytes) -> list[int]:
        """The ids that a chat completion with this body would have."""
        sampling, chat, params = schema.read_chat(body)
        self._work.check_model(sampling.model)
        messages, begun = chat.conversation
        variables = schema.variables(chat, self._frontend.template)
        ids = await self._frontend.encode_chat(messages, variables, tools=chat.offered, continuation=begun)
        return schema.truncated(ids, sampling, params.max_tokens, self._frontend.context)

    async def detokenize(self, exchange: Exchange) -> None:
        body = await exchange.body()
        check_form(body, {})
        ask = decode(_detokenize, body)
        self._work.check_model(ask.model)
        count, most = len(ask.tokens), self._frontend.context
        if count > most:
            message = f"there are {count} tokens, more than the {most} of this model's context"
            raise HttpError(400, message, "tokens", "context_length_exceeded")
        self._frontend.check_ids(ask.tokens, "tokens")
        await exchange.answer_json({"prompt": await self._text(ask.tokens)})

    async def _text(self, ids: list[int]) -> str:
        detokenizer = Detokenizer(self._frontend.tokenizer, skip_special=False)
        text = ""
        for start in range(0, len(ids), PIECE):
            text += "".join(map(detokenizer.push, ids[start : start + PIECE]))
            await asyncio.sleep(0)
        return text + detokenizer.finish()

    async def apply(self, exchange: Exchange) -> None:
        body = await exchange.body()
        self._work.open()
        await self._work.perform(exchange, self._apply(exchange, body), None)

    async def _apply(self, exchange: Exchange, body: bytes) -> None:
        await exchange.answer_json({"prompt": await self._text(await self._conversation(body))})

    async def count(self, exchange: Exchange) -> None:
        body = await exchange.body()
        self._work.open()
        await self._work.perform(exchange, self._count(exchange, body), None)

    async def _count(self, exchange: Exchange, body: bytes) -> None:
        ids = await self._conversation(body)
        await exchange.answer_json({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def version(self, exchange: Exchange) -> None:
        await exchange.answer_json({"version": __version__})

    async def generate(self, exchange: Exchange) -> None:
        """Whoever asks while a probe is under way hears of that one: probes cost one token at a time."""
        self._work.open()
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._generates())
        if not await asyncio.shield(self._probe):
            raise HttpError(503, "the engine does not generate", code="engine_unavailable", retry_after=PROBE_SECONDS)
        await exchange.answer_json({"status": "ok"})

    async def _generates(self) -> bool:
        """A full server may not come to the probe in time; then it is enough that it generates for others."""
        client = self._frontend.client
        before = (await client.stats()).generated_tokens
        service = Service(priority=MAX_PRIORITY, namespace=Namespace(salt="health"), retention=0)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        prompt = [self._frontend.tokenizer.bos_id or 0]
        try:
            async with (
                asyncio.timeout(PROBE_SECONDS),
                aclosing(self._frontend.generate([prompt], params, service=service)) as deltas,
            ):
                return [delta.finish_reason async for delta in deltas][-1] in ("stop", "length")
        except TimeoutError:
            return (await client.stats()).generated_tokens != before
        except TricornError:
            return False
