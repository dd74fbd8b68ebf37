"""Programs on a server with an OpenAI-compatible API.

Where the server tells the ids of a prompt (`return_token_ids`), it renders the chat template and everything goes to
/v1/completions as ids, so that what programs share is the same to the token. Of a server that does not, programs with
roles use chat completions, and cannot select.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tricorn.lang.backend import Meta, Piece, Pieces, first_scored, mean
from tricorn.lang.constraint import Constraint, for_server
from tricorn.lang.transcript import Prompt
from tricorn.request import SamplingParams, TricornError

TIMEOUT = 600.0
"""Seconds without a byte from the server."""

PATIENCE = 60.0
"""Seconds for which a call that the server has no room for is tried again."""

Fields = dict[str, Any]


class Server:
    """A backend over HTTP. `url` is the server's, with or without `/v1`; `model` is the first that it serves unless
    given. Every call has a connection of its own."""

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TricornError(f"{url!r} is not the URL of a server: it should look like http://127.0.0.1:8000")
        self._secure, self._host = parts.scheme == "https", parts.netloc
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._given = model

    # --- the backend

    def generate(self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None) -> Pieces:
        body = {**_sampling(params), **for_server(constraint), "stream": True}
        body["stream_options"] = {"include_usage": True}
        if prompt.messages is None:
            return self._stream("/completions", {**body, "prompt": prompt.text})
        ids = self._rendered(prompt)
        if ids is not None:
            return self._stream("/completions", {**body, "prompt": ids})
        return self._stream("/chat/completions", {**body, **_conversation(prompt)})

    def score(self, prompt: Prompt, choices: Sequence[str]) -> Meta:
        prompts = [prompt, *(Prompt(prompt.text + choice, prompt.messages) for choice in choices)]
        encoded = self._encoded(prompts)
        if encoded is None:
            raise TricornError(f"select needs a server that tells the ids of a prompt; {self._host} does not")
        first = first_scored(encoded[0], encoded[1:])
        scoring = {"max_tokens": 0, "echo": True, "logprobs": 0, "prompt_logprobs_start": first}
        answer = self._call("/completions", {"prompt": encoded[1:], **scoring})
        choices_of = sorted(answer["choices"], key=lambda choice: choice["index"])
        scores = tuple(mean(choice["logprobs"]["token_logprobs"][first:]) for choice in choices_of)
        prompt_tokens, cached, _ = _usage(answer["usage"])
        return Meta(prompt_tokens, cached, scores=scores)

    # --- prompts

    def _encoded(self, prompts: list[Prompt]) -> list[list[int]] | None:
        """The ids of each, or None when the server does not tell."""
        if prompts[0].messages is not None:
            rendered = [ids for prompt in prompts if (ids := self._rendered(prompt)) is not None]
            return rendered if len(rendered) == len(prompts) else None
        texts = [prompt.text for prompt in prompts]
        answer = self._call("/completions", {"prompt": texts, "max_tokens": 0, "return_token_ids": True})
        found = {choice["index"]: choice.get("prompt_token_ids") for choice in answer["choices"]}
        return None if None in found.values() else [found[place] for place in range(len(prompts))]

    def _rendered(self, prompt: Prompt) -> list[int] | None:
        """The ids of a conversation, or None when the server does not tell."""
        if not self._renders:
            return None
        body = {**_conversation(prompt), "max_tokens": 0, "return_token_ids": True}
        (choice,) = self._call("/chat/completions", body)["choices"]
        ids: list[int] = choice["prompt_token_ids"]
        return ids

    @cached_property
    def _renders(self) -> bool:
        """Whether the server tells the ids of a conversation, one with a begun answer too."""
        begun = _conversation(Prompt("Yes", (("user", "Yes?"),)))
        try:
            answer = self._call("/chat/completions", {**begun, "max_tokens": 0, "return_token_ids": True})
        except _Refused:
            return False
        return isinstance(answer["choices"][0].get("prompt_token_ids"), list)

    @cached_property
    def _model(self) -> str:
        if self._given is not None:
            return self._given
        with self._open("GET", "/models", None) as response:
            models = _read(response)["data"]
        if not models:
            raise TricornError(f"{self._host} serves no model")
        return str(models[0]["id"])

    # --- HTTP

    def _call(self, path: str, body: Fields) -> Fields:
        with self._open("POST", path, {"model": self._model, **body}) as response:
            return _read(response)

    def _stream(self, path: str, body: Fields) -> Pieces:
        meta: Meta | None = None
        reason: str | None = None
        stopped: str | int | None = None
        with self._open("POST", path, {"model": self._model, **body}) as response, closing(_events(response)) as events:
            for event in events:
                if "error" in event:
                    raise TricornError(f"{self._host}: {event['error'].get('message', 'an error without a message')}")
                for choice in event["choices"]:
                    reason = choice.get("finish_reason") or reason
                    stopped = choice.get("stop_reason", stopped)
                    text = choice["text"] if "text" in choice else choice.get("delta", {}).get("content")
                    if text:
                        yield Piece(text)
                if event.get("usage"):
                    meta = Meta(*_usage(event["usage"]), reason, stopped)
        if meta is None:
            raise TricornError(f"{self._host}: the stream ended without its usage")
        yield Piece("", meta)

    @contextmanager
    def _open(self, method: str, path: str, body: Fields | None) -> Iterator[http.client.HTTPResponse]:
        """Sends a request and gives the answer, which has status 200. Raises TricornError."""
        until = time.monotonic() + PATIENCE
        data = None if body is None else msgspec.json.encode(body)
        while True:
            connect = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            connection = connect(self._host, timeout=TIMEOUT)
            try:
                connection.request(method, self._base + path, data, self._headers)
                response = connection.getresponse()
                if response.status == 200:
                    yield response
                    return
                wait = _retry_after(response)
                message = _message(response.read())
            except (OSError, http.client.HTTPException) as error:
                raise TricornError(f"{self._host} cannot be asked: {error or type(error).__name__}") from error
            finally:
                connection.close()
            if wait is None or time.monotonic() + wait > until:
                refused = 400 <= response.status < 500 and response.status != 429
                raise (_Refused if refused else TricornError)(f"{self._host} answers {response.status}: {message}")
            time.sleep(wait)


class _Refused(TricornError):
    """The server does not take this request."""


def _conversation(prompt: Prompt) -> Fields:
    """The fields of a chat completion that goes on with the assistant's turn."""
    if not prompt.text:
        return {"messages": prompt.conversation}
    begun = {"role": "assistant", "content": prompt.text}
    messages = [*prompt.conversation, begun]
    return {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}


def _sampling(params: SamplingParams) -> Fields:
    """What differs from the defaults that servers share, and what they do not."""
    given: Fields = msgspec.to_builtins(params, str_keys=True)
    return {**given, "max_tokens": params.max_tokens, "temperature": params.temperature}


def _usage(usage: Fields) -> tuple[int, int, int]:
    """Tokens of prompts, those of them that were cached, and those of answers."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return usage["prompt_tokens"], cached, usage.get("completion_tokens", 0)


def _read(response: http.client.HTTPResponse) -> Fields:
    answer: Fields = msgspec.json.decode(response.read())
    return answer


def _events(response: http.client.HTTPResponse) -> Generator[Fields, None, None]:
    """The objects of server-sent events, up to the one that says that it was the last."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield msgspec.json.decode(data)


def _retry_after(response: http.client.HTTPResponse) -> float | None:
    """Seconds to wait before the same request may be sent again, None when it is of no use."""
    if response.status not in (429, 503):
        return None
    try:
        return max(0.05, float(response.headers.get("retry-after", "")))
    except ValueError:
        return None


def _message(body: bytes) -> str:
    """What an answer's error says."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
