"""The bodies of requests: every field that counts, its type and its bounds.

A body is read by several readers, each of which takes the fields that it knows and skips the rest, so unknown fields
do no harm. Types are strict: "5" is no number, 1.0 no integer, true no 1, NaN nothing at all. Null means the same as
absent. Known fields of other servers that would change an answer and are not honoured here are refused by name unless
they hold their neutral value.

Where servers differ: `top_k` 0 and -1 are off; `top_p` 0 is refused; `seed` may be from -2^63 to 2^64 - 1 and
negative seeds count modulo 2^64; `temperature` below 1e-5 is greedy; in chat `max_completion_tokens` and `max_tokens`
must agree when both are set.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tricorn.frontend.template import RESERVED, ChatTemplate
from tricorn.frontend.tools import Tools
from tricorn.request import MAX_ALLOWED, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from tricorn.scheduler.limits import MAX_PIN_SECONDS, MAX_PRIORITY
from tricorn.server import constraints
from tricorn.server.bodies import Refusals, check_form, decode
from tricorn.server.errors import HttpError, printable
from tricorn.server.headers import MAX_TIMEOUT
from tricorn.server.tools import Choice, Offers, offered

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_BAD_WORD_CHARACTERS = 64
MAX_BAD_CHARACTERS = 4096
MAX_DOCUMENTS = 256
MAX_TOKENS = 2**31 - 1

Id = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
Prompts = str | list[str | int | list[int]]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Simple = str | int | float | bool | None
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(msgspec.Struct, frozen=True):
    """How a stream reports; `include_usage` adds one chunk with the usage before the end, and with it
    `continuous_usage_stats` the usage so far to every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(msgspec.Struct, frozen=True):
    """The fields that chat and plain completions share."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=MAX_LOGIT_BIAS)] | None
    ) = None
    allowed_token_ids: Annotated[list[Id], Meta(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Id], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Alternatives | None = None
    prompt_logprobs_start: Count | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    timeout: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT)] | None = None
    priority: Priority | None = None
    retention: Annotated[int, Meta(ge=0, le=100)] | None = None
    pin_seconds: Annotated[float, Meta(ge=0.0, le=MAX_PIN_SECONDS)] | None = None


class Chat(msgspec.Struct, frozen=True):
    """The fields of a chat completion alone."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    max_completion_tokens: Count | None = None
    chat_template_kwargs: Annotated[dict[str, Simple], Meta(max_length=32)] | None = None
    documents: Annotated[list[dict[str, Simple]], Meta(max_length=MAX_DOCUMENTS)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Offers | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    include_reasoning: bool | None = None

    @property
    def offered(self) -> Tools | None:
        """Raises HttpError 400."""
        return offered(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def conversation(self) -> tuple[list[dict[str, Any]], str]:
        """The messages before the answer, and the text with which it begins."""
        if not self.continue_final_message:
            return self.messages, ""
        return self.messages[:-1], self.messages[-1]["content"]


class Completion(msgspec.Struct, frozen=True):
    """The fields of a plain completion alone. `parse_special` false makes the text of a control token plain text,
    `add_special_tokens` false puts no start token in front of a text."""

    prompt: Prompts
    logprobs: Alternatives | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None


# fmt: off
_NEVER = (
    "chat_template", "custom_logit_processor", "custom_params", "disaggregated_params", "ec_transfer_params",
    "extra_key", "functions", "grammar_triggers", "guided_whitespace_pattern", "input_ids", "kv_transfer_params",
    "logit_processors", "logits_processors", "logprob_token_ids", "lora", "lora_path", "lora_request", "mirostat",
    "prediction", "prompt_embeds", "repetition_detection", "samplers", "sampling_logprobs_mode", "session_params",
    "stop_regex", "suffix", "t_max_predict_ms", "thinking_token_budget", "top_a", "top_p_min", "vllm_xargs",
    "watermark", "web_search_options", "xtc_probability",
)
# fmt: on

REFUSED: Refusals = {
    **dict.fromkeys(_NEVER, ()),
    "adaptive_target": (-1,),
    "audio": (),
    "best_of": (1,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "grammar_lazy": (False,),
    "length_penalty": (1,),
    "min_keep": (0, 1),
    "modalities": (["text"],),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "post_sampling_probs": (False,),
    "prompt_ignore_length": (0,),
    "repeat_penalty": (1,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_progress": (False,),
    "return_prompt_token_ids": (False,),
    "return_sampling_mask": (False,),
    "return_token_offsets": (False,),
    "return_tokens": (False,),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "timings_per_token": (False,),
    "top_n_sigma": (-1, 0),
    "truncation_side": ("left",),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "watermarking": (False,),
}

REFUSED_IN_CHAT: Refusals = {**REFUSED, "add_special_tokens": (False,), "echo": (False,), "parse_special": ()}
REFUSED_IN_COMPLETIONS: Refusals = {
    **REFUSED,
    "max_completion_tokens": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
}
"""With what the one route honours and the other could not."""

KNOWN = REFUSED.keys() | {
    name for kind in (Sampling, Chat, Completion, constraints.Constrained) for name in kind.__struct_fields__
}
"""Every field that has a meaning here. Other protocols refuse those that have none there."""

_sampling = msgspec.json.Decoder(Sampling)
_chat = msgspec.json.Decoder(Chat)
_completion = msgspec.json.Decoder(Completion)


def read_chat(body: bytes) -> tuple[Sampling, Chat, SamplingParams]:
    """A chat completion's body. Raises HttpError 400 naming the field at fault."""
    check_form(body, REFUSED_IN_CHAT)
    sampling, chat = decode(_sampling, body), decode(_chat, body)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
    if chat.max_completion_tokens is not None and sampling.max_tokens not in (None, chat.max_completion_tokens):
        raise HttpError(400, "max_tokens and max_completion_tokens differ: set one", "max_tokens", "invalid_value")
    for name in (chat.chat_template_kwargs or {}).keys() & RESERVED:
        raise HttpError(400, f"chat_template_kwargs must not set {name}", "chat_template_kwargs", "invalid_value")
    _check_continuation(chat)
    max_tokens = sampling.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    params = _params(sampling, max_tokens, (chat.top_logprobs or 0) if chat.logprobs else None)
    return sampling, chat, msgspec.structs.replace(params, constraint=constraints.read(body))


def _check_continuation(chat: Chat) -> None:
    """An answer either begins a turn of the assistant or goes on with one."""
    name = "continue_final_message"
    if chat.continue_final_message and chat.add_generation_prompt:
        raise HttpError(400, f"{name} and add_generation_prompt contradict each other", name, "invalid_value")
    if chat.add_generation_prompt is False and not chat.continue_final_message:
        message = f"add_generation_prompt may be false only with {name}"
        raise HttpError(400, message, "add_generation_prompt", "unsupported_parameter")
    last = chat.messages[-1]
    if chat.continue_final_message and not (last.get("role") == "assistant" and isinstance(last.get("content"), str)):
        raise HttpError(400, f"{name} needs a last message of the assistant, with text", name, "invalid_value")
    if chat.continue_final_message and len(chat.messages) == 1:
        raise HttpError(400, f"{name} needs a message before the last", name, "invalid_value")


def read_completion(body: bytes) -> tuple[Sampling, Completion, SamplingParams]:
    """A plain completion's body. Raises HttpError 400 naming the field at fault."""
    check_form(body, REFUSED_IN_COMPLETIONS)
    sampling, completion = decode(_sampling, body), decode(_completion, body)
    max_tokens = 16 if sampling.max_tokens is None else sampling.max_tokens
    params = _params(sampling, max_tokens, completion.logprobs)
    params = msgspec.structs.replace(params, constraint=constraints.read(body))
    if completion.echo and completion.logprobs is not None:
        if sampling.prompt_logprobs not in (None, completion.logprobs):
            message = "prompt_logprobs and logprobs must agree with echo, which reports both"
            raise HttpError(400, message, "prompt_logprobs", "invalid_value")
        params = msgspec.structs.replace(params, prompt_logprobs=completion.logprobs)
    return sampling, completion, params


def prompts(prompt: Prompts, name: str = "prompt") -> list[str | list[int]]:
    """The prompts of a field: one string, several, one list of ids, or several."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise HttpError(400, f"{name} is an empty list", name, "invalid_value")
    if all(isinstance(item, int) for item in prompt):
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > MAX_PROMPTS:
        raise HttpError(400, f"{name} holds more than {MAX_PROMPTS} prompts", name, "invalid_value")
    if not (all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt)):
        raise HttpError(400, f"{name} mixes strings, ids and lists of ids", name, "invalid_type")
    return prompt  # type: ignore[return-value]


def truncated(ids: list[int], body: Sampling, max_tokens: int, context: int) -> list[int]:
    """The end of a prompt, as much as the request lets through."""
    most = body.truncate_prompt_tokens
    if most == -1:  # as much as the context leaves
        most = context - (max_tokens if max_tokens < context else 1)
    return ids if most is None else ids[-most:]


def checked_truncation(most: int | None) -> int | None:
    """Raises HttpError 400 for nothing at all."""
    if most == 0:
        message = "truncate_prompt_tokens must be -1, or 1 and more"
        raise HttpError(400, message, "truncate_prompt_tokens", "invalid_value")
    return most


def variables(chat: Chat, template: ChatTemplate | None) -> dict[str, Any]:
    """What the chat template is given beside the messages. Raises HttpError 400 for documents that it has no use
    for.
    """
    given: dict[str, Any] = dict(chat.chat_template_kwargs or {})
    if chat.reasoning_effort == "none":
        given.setdefault("enable_thinking", False)
    elif chat.reasoning_effort is not None:
        given.setdefault("reasoning_effort", chat.reasoning_effort)
    if chat.documents:
        if template is None or not re.search(r"\bdocuments\b", template.source):
            message = "this model's chat template takes no documents: put them into a message"
            raise HttpError(400, message, "documents", "unsupported_parameter")
        given["documents"] = chat.documents
    return given


def reports_continuously(body: Sampling) -> bool:
    """Whether every chunk of a stream has the usage so far."""
    return body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)


def _params(body: Sampling, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """The engine's parameters; no `max_tokens` means as many as the context leaves."""
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options needs stream to be true", "stream_options", "invalid_value")
    if reports_continuously(body) and not body.stream_options.include_usage:  # type: ignore[union-attr]
        raise HttpError(400, "continuous_usage_stats needs include_usage to be true", "stream_options", "invalid_value")
    if sum(map(len, body.bad_words or ())) > MAX_BAD_CHARACTERS:
        raise HttpError(400, f"bad_words has more than {MAX_BAD_CHARACTERS} characters", "bad_words", "invalid_value")
    checked_truncation(body.truncate_prompt_tokens)
    if body.seed is not None and not -(2**63) <= body.seed < 2**64:
        raise HttpError(400, "seed must be from -2^63 to 2^64 - 1", "seed", "invalid_value")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise HttpError(
            400,
            f"min_tokens ({body.min_tokens}) must not be above max_tokens ({max_tokens})",
            "min_tokens",
            "invalid_value",
        )
    return SamplingParams(
        max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=_given(body.temperature, 1.0),
        top_k=max(0, body.top_k or 0),
        top_p=_given(body.top_p, 1.0),
        min_p=body.min_p or 0.0,
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_bias(body.logit_bias or {}),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=tuple(body.bad_words or ()),
        seed=body.seed,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        prompt_logprobs_start=body.prompt_logprobs_start or 0,
        n=body.n or 1,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _bias(entries: dict[str, float]) -> dict[int, float]:
    for key in entries:
        if not re.fullmatch(r"-?[0-9]{1,10}", key):
            raise HttpError(400, f"logit_bias: {printable(key, 40)!r} is not a token id", "logit_bias", "invalid_value")
    return {int(key): value for key, value in entries.items()}
