"""What an engine can take, and the check that every request passes before it is queued."""

from __future__ import annotations

import math

import msgspec

from tricorn.request import (
    MAX_ALLOWED,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    Request,
    SamplingParams,
    Service,
    TricornError,
)

MAX_NAME = 256
MAX_PRIORITY = 100
MAX_PIN_SECONDS = 86_400
SPELLINGS = 3
"""Sequences of ids for one bad word, at most."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`context` bounds prompt and output of a sequence together, in tokens; the page pool can hold as many."""

    context: int
    vocab: int
    max_sequences: int
    """Sequences that run at the same time."""
    max_tokens: int
    """Token rows in a step."""
    max_rows: int
    """Sampled or scored rows in a step."""
    eos_ids: tuple[int, ...] = ()
    undecodable: tuple[int, ...] = ()
    """Ids that the tokenizer has no token for: padding of the model's logits, never sampled."""

    @property
    def max_running(self) -> int:
        """Every running sequence can have a token and a sampled row in every step."""
        return min(self.max_sequences, self.max_tokens, self.max_rows)


def check_request(request: Request, limits: Limits) -> None:
    """Raises TricornError, in one line with the numbers, when the engine could never serve this request."""
    prompt, params = request.prompt, request.params
    if not prompt:
        raise TricornError("the prompt has no tokens; give at least one")
    if len(prompt) + (params.max_tokens > 0) > limits.context:
        raise TricornError(
            f"the prompt has {len(prompt)} tokens, but prompt and output together are limited to {limits.context};"
            " shorten the prompt"
        )
    _check_service(request.service)
    if request.resume and len(request.resume) >= min(params.max_tokens, limits.context - len(prompt)):
        raise TricornError(f"a request cannot resume after {len(request.resume)} tokens: it ended there")
    _check_ids("the prompt", prompt, limits.vocab)
    _check_ids("resume", request.resume, limits.vocab)
    _check_ids("stop_token_ids", params.stop_token_ids, limits.vocab)
    _check_ids("logit_bias", list(params.logit_bias), limits.vocab)
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise TricornError(f"logit_bias has {len(params.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed")
    if not 0 <= request.seed < 2**64:
        raise TricornError(f"seed {request.seed} is not an unsigned 64-bit number")
    _check_numbers(params)
    if params.pooling is not None and (params.max_tokens or params.prompt_logprobs is not None):
        raise TricornError("a prompt that is pooled is neither continued nor scored: max_tokens must be 0")
    if params.allowed_token_ids or request.banned:
        _check_bans(request, limits)


def _check_bans(request: Request, limits: Limits) -> None:
    """Raises TricornError when, whatever has been said, nothing may follow, or a constrained answer could not end."""
    params = request.params
    if len(params.allowed_token_ids) > MAX_ALLOWED:
        raise TricornError(f"allowed_token_ids has {len(params.allowed_token_ids)} ids, at most {MAX_ALLOWED} may be")
    if len(request.banned) > SPELLINGS * MAX_BAD_WORDS or not all(request.banned):
        raise TricornError(f"bad_words must be at most {MAX_BAD_WORDS} words with at least one token each")
    _check_ids("allowed_token_ids", params.allowed_token_ids, limits.vocab)
    for word in request.banned:
        _check_ids("bad_words", word, limits.vocab)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else limits.eos_ids)}
    never = {word[0] for word in request.banned if len(word) == 1} | set(limits.undecodable)
    if params.allowed_token_ids:
        never |= stops.difference(params.allowed_token_ids)
    if params.constraint is not None and stops and stops <= never:
        raise TricornError(
            "allowed_token_ids and bad_words must leave a token that ends the answer, for a constrained one ends by it:"
            " allow one of " + ", ".join(map(str, sorted(stops)[:8]))
        )
    if params.min_tokens:
        never |= stops
    if all(id in never for id in params.allowed_token_ids or range(limits.vocab)):
        raise TricornError("allowed_token_ids, bad_words and min_tokens leave no token to say: allow more")


def _check_service(service: Service) -> None:
    for field, name in service.namespace._asdict().items():
        if len(name) > MAX_NAME or not name.isprintable():
            raise TricornError(f"the {field} must be at most {MAX_NAME} printable characters")
    if not -MAX_PRIORITY <= service.priority <= MAX_PRIORITY:
        raise TricornError(f"priority is {service.priority}; it must be from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    if not 0 <= service.retention <= 100:
        raise TricornError(f"retention is {service.retention}; it must be from 0 to 100")
    if not 0 <= service.pin_seconds <= MAX_PIN_SECONDS:
        raise TricornError(f"pin_seconds is {service.pin_seconds}; it must be from 0 to {MAX_PIN_SECONDS}")
    if service.deadline is not None and math.isnan(service.deadline):
        raise TricornError("the deadline is not a number")


def _check_ids(name: str, ids: list[int] | tuple[int, ...], vocab: int) -> None:
    if set(map(type, ids)) - {int}:
        raise TricornError(f"{name} has a token id that is not an integer")
    for token in (min(ids), max(ids)) if ids else ():
        if not 0 <= token < vocab:
            raise TricornError(f"{name} has token id {token}; the ids of this model are 0 to {vocab - 1}")


_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (0, 2**31),
    "min_tokens": (0, 2**31),
    "temperature": (0, math.inf),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, math.inf),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs_start": (0, 2**31),
}

_INTEGERS = {"max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs", "prompt_logprobs_start"}


def _check_numbers(params: SamplingParams) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(params, name)
        if name in _INTEGERS and value is not None and type(value) is not int:
            raise TricornError(f"{name} is {value!r}; it must be an integer")
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise TricornError(f"{name} is {value}; it must be a finite number from {low} to {high}")
    if params.repetition_penalty == 0:
        raise TricornError("repetition_penalty is 0; it must be greater")
    for token, value in params.logit_bias.items():
        if math.isnan(value) or value == math.inf:
            raise TricornError(f"the logit_bias of token {token} is {value}; it must be a finite number")
