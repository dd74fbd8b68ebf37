"""The shared vocabulary: what a client asks for and what the engine answers.

Everything here is a frozen `msgspec.Struct`, so the same objects travel between the server and the
engine process as MessagePack. This module imports nothing of ours.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

FinishReason = Literal["stop", "length", "timeout", "abort", "error"]
Pooling = Literal["mean", "last"]
"""How the hidden states of a prompt's tokens become one vector: their mean, or that of the last token."""

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED = 4096
MAX_BAD_WORDS = 256


class TricornError(Exception):
    """An error whose message is one line that names the cause and the remedy."""


ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf", "structural_tag"]


class Thought(msgspec.Struct, frozen=True):
    """What a model may say to itself before its answer, between two markers: texts, or ids of tokens that no text
    spells. When the prompt has not opened it, it may be left out.
    """

    begin: str | int
    end: str | int
    open: bool


class Constraint(msgspec.Struct, frozen=True):
    """A language that an answer has to be a sentence of, but for the thought that may come first.

    `source` is JSON for "json_schema" (the schema), "choice" (a list of strings) and "structural_tag" (the object that
    clients send), empty for "json_object", and text for "regex" (matched as a whole), "lark" and "gbnf".
    """

    kind: ConstraintKind
    source: str = ""
    thought: Thought | None = None

    @classmethod
    def schema(cls, schema: Any) -> Constraint:
        """From a JSON schema, as an object or as text, or from a pydantic model."""
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        return cls("json_schema", schema if isinstance(schema, str) else msgspec.json.encode(schema).decode())


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one sequence are chosen.

    `temperature` 0 is greedy. `top_k` 0 is off; `top_p` 1 is off; `min_p` 0 is off. Penalties follow the
    usual convention: repetition counts prompt and output, presence and frequency count output only.
    `logprobs` is None for none, otherwise how many alternatives (0 to 20) to report beside the sampled token;
    they describe the raw distribution of the model, before bias, penalties and temperature.
    `stop` strings belong to the frontend; the engine sees `stop_token_ids` only. `ignore_eos` disables the
    model's own end-of-sequence ids, never `stop_token_ids`. `prompt_logprobs` is the same for the tokens of the prompt,
    from place `prompt_logprobs_start` on; what comes well before may be reused. `allowed_token_ids` are the only ones
    that may be sampled, unless there are none; what spells one of `bad_words`, with a space before it or without, is
    never completed. It is the frontend that spells them, and that shows markers without `skip_special_tokens`.
    With `pooling` nothing is sampled (`max_tokens` must be 0): the prompt's embedding is what is asked for.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    constraint: Constraint | None = None
    pooling: Pooling | None = None
    n: int = 1


class Namespace(NamedTuple):
    """What must agree, beside the token ids, before one request may use what another has computed. Each field is
    compared by itself, so that no salt can pass for a tenant."""

    salt: str = ""
    tenant: str = ""
    adapter: str = ""


class Service(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request is to be served; nothing here changes a bit of its answer.

    `priority` (-100 to 100, higher first) counts under the policy of that name. `deadline` is a `time.monotonic()` of
    this machine. `retention` (0 to 100) says how long the pages that it computes are kept: those of lower value are
    evicted first; for `pin_seconds` from its end they go only when nothing else is left.
    """

    namespace: Namespace = Namespace()
    priority: int = 0
    deadline: float | None = None
    retention: int = 50
    pin_seconds: float = 0.0


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="add", omit_defaults=True):
    """One sequence for the engine. A client's request with `n` > 1 becomes n of these.

    `id` is unique inside the engine. `seed` is always a concrete unsigned 64-bit number here: the frontend draws one
    when the client gave none. `resume` holds the ids that an earlier engine sampled for this request: this one goes on
    after them, bit for bit. `banned` holds the ids of each of the `bad_words`.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    service: Service = Service()
    resume: list[int] = []
    banned: list[list[int]] = []


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Tells the engine to drop the request of this id; unknown ids are ignored."""

    id: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position: of the token itself, its rank (1 is the best), and the best
    alternatives."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """Where the life of a request went, in seconds: until it was admitted, from there to its first token, and from
    there to its end. Phases that it did not reach are 0."""

    queued: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step brought to one request: new token ids and, at the end, why it ended.

    `token_ids` holds every sampled id in order, end-of-sequence and stop tokens included. `logprobs` has one entry per
    id when asked for. `prompt_logprobs` comes once, with the first output: one entry per prompt token, None for the
    first and for those not asked for. `cached_tokens` is how many prompt tokens came from the prefix cache. `error`
    goes with reason "error", `timings` with any, and with the first ids. `embedding` is float32 of the model's width,
    and goes with the end of a request for one. Reason "timeout": its deadline passed, in the queue (no ids were ever
    sent) or while it ran.
    """

    id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    error: str | None = None
    refused: bool = False
    """The error is the request's own fault."""
    timings: Timings | None = None
    embedding: bytes | None = None
