"""A generation asked for in named tensors, with the names of the TensorRT-LLM backend for Triton.

Two forms, told apart by what they hold: text (`text_input` to `text_output`) and ids (`input_ids` to `output_ids`). A
request is one sequence; more at a time are more requests, which run together. `end_id` takes the place of the model's
own end of sequence, -1 of any.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tricorn.engine.gate import Ticket
from tricorn.frontend.generate import Delta, join
from tricorn.request import Constraint, SamplingParams, Service
from tricorn.server import schema
from tricorn.server.bodies import Refusals, check_refused, convert
from tricorn.server.constraints import grammar_kind
from tricorn.server.errors import HttpError, printable, too_late
from tricorn.server.exchange import Exchange
from tricorn.server.generation import Generations, service_of, unserved
from tricorn.server.headers import MAX_TIMEOUT
from tricorn.server.tensors import FLOATS, INTEGERS, Tensor, fault

VERSION = "1"
NAMES = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")
"""What models are called there; each is the one that is served."""

Words = str | Annotated[list[str], Meta(max_length=schema.MAX_STOPS)]
Ids = schema.Id | list[schema.Id]
GuideType = Literal["json", "json_schema", "regex", "ebnf_grammar", "structural_tag"]


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The inputs that both forms share."""

    end_id: schema.Id | None = None
    pad_id: schema.Id | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: schema.Penalty | None = None
    frequency_penalty: schema.Penalty | None = None
    min_length: schema.Count | None = None
    random_seed: int | None = None
    return_log_probs: bool | None = None
    exclude_input_in_output: bool | None = None


class Text(Asked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of text."""

    text_input: str
    max_tokens: schema.Count = 16
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    stop_words: Words | None = None
    stream: bool | None = None
    guided_decoding_guide_type: GuideType | None = None
    guided_decoding_guide: str | None = None

    @property
    def constraint(self) -> Constraint | None:
        """What the answer must be. Raises HttpError 400."""
        kind, guide = self.guided_decoding_guide_type, self.guided_decoding_guide
        if kind == "json":
            return Constraint("json_object")
        if kind is None or not guide:
            if kind is None and not guide:
                return None
            raise fault("guided_decoding_guide", "needs guided_decoding_guide_type, and the other way round")
        return Constraint(grammar_kind(guide) if kind == "ebnf_grammar" else kind, guide)


class Numbers(Asked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of ids. `input_lengths` is how many of `input_ids` count."""

    input_ids: Ids
    request_output_len: schema.Count
    input_lengths: schema.Count | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = msgspec.field(name="runtime_top_k", default=None)
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = msgspec.field(name="runtime_top_p", default=None)
    stop_words_list: Ids | None = None
    stream: bool | None = msgspec.field(name="streaming", default=None)


# fmt: off
_NEVER = (
    "bad_words", "bad_words_list", "cross_attention_mask", "decoder_input_ids", "decoder_text_input",
    "draft_input_ids", "draft_logits", "embedding_bias", "embedding_bias_weights", "embedding_bias_words",
    "image_input", "lora_config", "lora_task_id", "lora_weights", "prompt_embedding_table", "prompt_table_extra_id",
    "prompt_table_extra_ids", "prompt_vocab_size", "retention_token_range_ends", "retention_token_range_priorities",
    "retention_token_range_starts", "top_p_decay", "top_p_min", "top_p_reset_ids", "runtime_top_p_decay",
    "runtime_top_p_min", "runtime_top_p_reset_ids",
)
# fmt: on

REFUSED: Refusals = {
    **dict.fromkeys(_NEVER, ("", [], [""])),
    "beam_search_diversity_rate": (0,),
    "beam_width": (1,),
    "early_stopping": (0, 1),
    "len_penalty": (0, 1),
    "length_penalty": (0, 1),
    "no_repeat_ngram_size": (0,),
    "num_draft_tokens": (0,),
    "num_return_sequences": (1,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
    "stop": (False,),
    "use_draft_logits": (False,),
}


@dataclass(frozen=True)
class Port:
    """An input or an output, for metadata. `size` is that of one row; -1 is any."""

    name: str
    datatype: str
    size: int = 1
    optional: bool = True


_SHARED = (
    Port("end_id", "INT32"),
    Port("pad_id", "INT32"),
    Port("temperature", "FP32"),
    Port("min_p", "FP32"),
    Port("repetition_penalty", "FP32"),
    Port("presence_penalty", "FP32"),
    Port("frequency_penalty", "FP32"),
    Port("min_length", "INT32"),
    Port("random_seed", "UINT64"),
    Port("return_log_probs", "BOOL"),
    Port("exclude_input_in_output", "BOOL"),
)
_LOGPROBS = (Port("cum_log_probs", "FP32"), Port("output_log_probs", "FP32", -1))

TEXT_INPUTS = (
    Port("text_input", "BYTES", optional=False),
    Port("max_tokens", "INT32"),
    Port("top_k", "INT32"),
    Port("top_p", "FP32"),
    Port("stop_words", "BYTES", -1),
    Port("guided_decoding_guide_type", "BYTES"),
    Port("guided_decoding_guide", "BYTES"),
    Port("stream", "BOOL"),
    *_SHARED,
)
TEXT_OUTPUTS = (Port("text_output", "BYTES"), *_LOGPROBS)
ID_INPUTS = (
    Port("input_ids", "INT32", -1, optional=False),
    Port("request_output_len", "INT32", optional=False),
    Port("input_lengths", "INT32"),
    Port("runtime_top_k", "INT32"),
    Port("runtime_top_p", "FP32"),
    Port("stop_words_list", "INT32", -1),
    Port("streaming", "BOOL"),
    *_SHARED,
)
ID_OUTPUTS = (Port("output_ids", "INT32", -1), Port("sequence_length", "INT32"), *_LOGPROBS)

_PORTS = {port.name: port for port in (*TEXT_INPUTS, *ID_INPUTS)}


def values_of(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The inputs by name: lists, or the one element that there is."""
    values: dict[str, Any] = {}
    for tensor in tensors:
        if tensor.name in values:
            raise fault(tensor.name, "given twice")
        port = _PORTS.get(tensor.name)
        if port is not None and not _fits(tensor.datatype, port.datatype):
            raise fault(tensor.name, f"expected {port.datatype}, got {tensor.datatype}")
        elements = [_text(tensor.name, value) if isinstance(value, bytes) else value for value in tensor.values]
        if port is not None and port.size == 1 and len(elements) != 1:
            raise fault(tensor.name, f"{len(elements)} elements; send one request for each sequence: they run together")
        values[tensor.name] = elements[0] if len(elements) == 1 else elements
    return values


def _fits(given: str, wanted: str) -> bool:
    """Any width of the same kind will do, and integers for numbers."""
    if wanted in INTEGERS:
        return given in INTEGERS
    return given == wanted or (wanted in FLOATS and given in FLOATS | INTEGERS)


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise fault(name, "not UTF-8") from None


def read(values: Mapping[str, Any]) -> Text | Numbers:
    """The request that the inputs make."""
    check_refused({name: msgspec.Raw(msgspec.json.encode(values[name])) for name in values.keys() & REFUSED}, REFUSED)
    given = {name: value for name, value in values.items() if name not in REFUSED and value is not None}
    return convert(given, Numbers) if "input_ids" in given else convert(given, Text)


def timeout_of(parameters: Mapping[str, Any]) -> float | None:
    """Seconds that a request may take, from its parameter `timeout` in microseconds; 0 is any."""
    given = parameters.get("timeout") or 0
    if not isinstance(given, int | str) or not str(given).isdigit():
        raise fault("timeout", "expected microseconds, a whole number from 0 on")
    if parameters.get("sequence_id"):
        raise fault("sequence_id", "requests have no state here: leave it out")
    return min(int(given) / 1e6, MAX_TIMEOUT) or None


def params_of(asked: Text | Numbers, own_ends: Sequence[int]) -> SamplingParams:
    """`own_ends` are the model's own ends of sequence."""
    if asked.random_seed is not None and not -(2**63) <= asked.random_seed < 2**64:
        raise fault("random_seed", "must be from -2^63 to 2^64 - 1")
    ends = _stop_ids(asked.stop_words_list) if isinstance(asked, Numbers) else ()
    ours = asked.end_id is None or asked.end_id in own_ends
    if asked.end_id is not None and not ours and asked.end_id >= 0:
        ends += (asked.end_id,)
    return SamplingParams(
        max_tokens=asked.max_tokens if isinstance(asked, Text) else asked.request_output_len,
        min_tokens=asked.min_length or 0,
        temperature=_temperature(asked),
        top_k=asked.top_k or 0,
        top_p=asked.top_p or 1.0,  # 0 is off there
        min_p=asked.min_p or 0.0,
        repetition_penalty=asked.repetition_penalty or 1.0,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        seed=asked.random_seed,
        stop=_words(asked.stop_words) if isinstance(asked, Text) else (),
        stop_token_ids=ends,
        ignore_eos=not ours,
        constraint=asked.constraint if isinstance(asked, Text) else None,
        logprobs=0 if asked.return_log_probs else None,
    )


def _temperature(asked: Text | Numbers) -> float:
    """What does not speak of sampling is greedy there."""
    if asked.temperature is not None:
        return asked.temperature
    return 1.0 if asked.top_k or asked.top_p or asked.min_p else 0.0


def _words(given: Words | None) -> tuple[str, ...]:
    """Without the empty ones, which there mean none."""
    words = (given,) if isinstance(given, str) else tuple(given or ())
    if any(len(word) > schema.MAX_STOP_CHARACTERS for word in words):
        raise fault("stop_words", f"a word has more than {schema.MAX_STOP_CHARACTERS} characters")
    return tuple(filter(None, words))


def _stop_ids(given: Ids | None) -> tuple[int, ...]:
    """From the ids of all words, one after the other, and as many places where they end, filled up with -1."""
    if given is None:
        return ()
    flat = given if isinstance(given, list) else [given]
    half = len(flat) // 2
    ends = [end for end in flat[half:] if end >= 0]
    if len(flat) % 2 or ends != list(range(1, len(ends) + 1)) or len(ends) > half:
        raise fault("stop_words_list", "words of one id each are supported: [[ids], [1, 2, ..., -1]]")
    return tuple(flat[: len(ends)])


# --- running them

Respond = Callable[[list[Tensor], bool], Awaitable[None]]
"""Takes the tensors of one response, and whether it is the last."""


class Inference:
    """Runs requests of this form for whatever carries them."""

    def __init__(self, work: Generations) -> None:
        self.work = work
        self._frontend = work.frontend

    def check_model(self, name: str, version: str = "") -> None:
        """Raises HttpError 404."""
        if name != self.work.name and name not in NAMES:
            raise HttpError(404, f"the model {printable(name, 80)!r} is not served here: use {self.work.name!r}")
        if version not in ("", VERSION):
            raise HttpError(404, f"the model has no version {printable(version, 80)!r}: use {VERSION!r}")

    async def infer(
        self, exchange: Exchange, asked: Text | Numbers, timeout: float | None, respond: Respond, *, stream: bool
    ) -> None:
        """Runs a request to its end. `stream` says whether there may be several responses."""
        if asked.stream and not stream:
            name = "stream" if isinstance(asked, Text) else "streaming"
            raise fault(name, "this route gives one response: use generate_stream, or ModelStreamInfer")
        params = params_of(asked, self._frontend.client.info.eos_ids)
        service = service_of(exchange, timeout)
        with await self.work.admit(None) as ticket:
            work = self._run(exchange, ticket, asked, params, service, respond)
            await self.work.perform(exchange, work, service.deadline)

    async def _run(
        self,
        exchange: Exchange,
        ticket: Ticket,
        asked: Text | Numbers,
        params: SamplingParams,
        service: Service,
        respond: Respond,
    ) -> None:
        ids = await self._prompt(asked)
        answer = Answer(asked, ids)
        async with self.work.run(exchange, ticket, [ids], params, service, "") as deltas:
            if not asked.stream:
                delta = join([delta async for delta in deltas])
                if unserved(delta):
                    raise too_late()
                await respond(answer.tensors(delta), True)
                return
            async for delta in deltas:
                if unserved(delta):
                    raise too_late()
                await respond(answer.tensors(delta), delta.finish_reason is not None)

    async def _prompt(self, asked: Text | Numbers) -> list[int]:
        if isinstance(asked, Text):
            return await self._frontend.encode(asked.text_input)
        ids = asked.input_ids if isinstance(asked.input_ids, list) else [asked.input_ids]
        if asked.input_lengths is not None and asked.input_lengths > len(ids):
            raise fault("input_lengths", f"above the {len(ids)} ids of input_ids")
        return ids[: asked.input_lengths]


class Answer:
    """One answer as it grows. It holds the output alone unless its input was asked for too."""

    def __init__(self, asked: Text | Numbers, prompt: list[int]) -> None:
        self._asked = asked
        echo = asked.exclude_input_in_output is False
        self._text = asked.text_input if echo and isinstance(asked, Text) else ""
        self._ids = prompt if echo else []
        self._length = 0
        self._sum = 0.0

    def tensors(self, delta: Delta) -> list[Tensor]:
        """What this delta adds."""
        if isinstance(self._asked, Text):
            outputs = [Tensor("text_output", "BYTES", (1, 1), [self._text + delta.text])]
        else:
            ids = [*self._ids, *delta.token_ids]
            self._length += len(ids)
            outputs = [
                Tensor("output_ids", "INT32", (1, 1, len(ids)), ids),
                Tensor("sequence_length", "INT32", (1, 1), [self._length]),
            ]
        self._text, self._ids = "", []
        if delta.logprobs is None:
            return outputs
        values = [entry.logprob for entry in delta.logprobs]
        self._sum += sum(values)
        return [
            *outputs,
            Tensor("cum_log_probs", "FP32", (1, 1), [self._sum]),
            Tensor("output_log_probs", "FP32", (1, 1, len(values)), values),
        ]
