"""Tokenizers of checkpoints as `tokenizers` JSON, with what goes along: chat template, BOS and end-of-sequence ids.

A GGUF file holds a vocabulary in llama.cpp's form (`docs/gguf.md` of ggml); here it becomes the tokenizer.json that the
model came with: byte-level BPE, or SentencePiece BPE with byte fallback, whose merges are rebuilt from scores.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from tricorn.request import TricornError
from tricorn.weights.files import read_json, read_text
from tricorn.weights.gguf import Metadata


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """`json` is a tokenizer.json; `eos_ids` all end a turn or a text, the model's own first."""

    json: str
    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool


_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
_KINDS = (_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE)

_END_NAMES = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end a turn or a text in any family that has them."""

# The patterns by which byte-level tokenizers cut text into words. GPT2 stands for the one built into `tokenizers`.
_GPT2 = "gpt2"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|", 1)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Words:
    """How one value of tokenizer.ggml.pre normalizes and cuts text."""

    pattern: str
    digits: bool = False  # each digit stands alone
    nfc: bool = False
    whole_words: bool = False  # a word that is itself in the vocabulary skips the merges
    add_bos: bool = False  # when the file does not say


_PRE = {
    "default": _Words(_GPT2),
    "gpt-2": _Words(_GPT2),
    "smollm": _Words(_GPT2, digits=True),
    "starcoder": _Words(_GPT2, digits=True),
    "qwen2": _Words(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Words(_QWEN2, nfc=True, add_bos=True),
    "llama-bpe": _Words(_LLAMA3, whole_words=True, add_bos=True),
    "llama3": _Words(_LLAMA3, whole_words=True, add_bos=True),
    "tekken": _Words(_TEKKEN, whole_words=True, add_bos=True),
}


def from_gguf(meta: Metadata, vocabulary: int) -> TokenizerFiles:
    """The tokenizer in a GGUF file whose embedding has `vocabulary` rows."""
    tokens = meta.texts("tokenizer.ggml.tokens")
    if len(tokens) > vocabulary:
        meta.fail(f"{len(tokens)} tokens but an embedding of {vocabulary} rows")
    kinds: list[int] = meta.array("tokenizer.ggml.token_type", "iu", len(tokens)).tolist()
    if not set(kinds) <= set(_KINDS):
        meta.fail(f"unknown token types {sorted(set(kinds) - set(_KINDS))}")
    bos = _token_id(meta, "bos", len(tokens))
    model = meta.text("tokenizer.ggml.model")
    if model == "gpt2":
        spec, add_bos = _byte_level(meta, tokens, kinds)
    elif model == "llama":
        spec, add_bos = _sentencepiece(meta, tokens, kinds)
    else:
        meta.fail(f"tokenizer {model!r} is not supported; known are 'gpt2' (byte-level) and 'llama' (SentencePiece)")
    add_bos = meta.flag("tokenizer.ggml.add_bos_token", add_bos) and bos is not None
    special = [i for i, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL, _USER)]
    spec["added_tokens"] = [_added(i, tokens[i], kinds[i] != _USER) for i in special]
    spec["post_processor"] = _begin_with(tokens[bos], bos) if add_bos and bos is not None else None
    template = meta.text("tokenizer.chat_template", None)
    if template is None and {"<start_of_turn>", "<end_of_turn>"} <= {tokens[i] for i in special}:
        template = GEMMA_TEMPLATE
    return TokenizerFiles(
        json.dumps({"version": "1.0", "truncation": None, "padding": None} | spec, ensure_ascii=False),
        template,
        bos,
        _eos_ids(meta, tokens, kinds),
        add_bos,
    )


def _token_id(meta: Metadata, name: str, count: int) -> int | None:
    value: int | None = meta.integer(f"tokenizer.ggml.{name}_token_id", None)
    if value is not None and not 0 <= value < count:
        meta.fail(f"the {name} token id {value} is outside the vocabulary of {count}")
    return value


def _eos_ids(meta: Metadata, tokens: list[str], kinds: list[int]) -> tuple[int, ...]:
    named = [_token_id(meta, name, len(tokens)) for name in ("eos", "eot", "eom")]
    ends = [i for i, kind in enumerate(kinds) if kind == _CONTROL and tokens[i] in _END_NAMES]
    return tuple(dict.fromkeys(i for i in (*named, *ends) if i is not None))


def _vocabulary(meta: Metadata, tokens: list[str], kinds: list[int]) -> dict[str, int]:
    vocab = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    if len(vocab) != len(tokens) - kinds.count(_UNUSED):
        twice = next(token for i, token in enumerate(tokens) if vocab.get(token, i) != i and kinds[i] != _UNUSED)
        meta.fail(f"the token {twice[:64]!r} comes twice in the vocabulary")
    return vocab


def _added(index: int, content: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, **flags, "special": special}


def _begin_with(token: str, index: int) -> dict[str, Any]:
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    names = {token: {"id": token, "ids": [index], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": [first, a], "pair": [first, a, b], "special_tokens": names}


def _byte_level(meta: Metadata, tokens: list[str], kinds: list[int]) -> tuple[dict[str, Any], bool]:
    """Byte-level BPE: the parts of a tokenizer.json, and whether this family begins with BOS by default."""
    pre = meta.text("tokenizer.ggml.pre", "default")
    if pre not in _PRE:
        meta.fail(f"pre-tokenizer {pre!r} is not supported; known are {', '.join(_PRE)}")
    words = _PRE[pre]
    vocab = _vocabulary(meta, tokens, kinds)
    merges = [merge.split(" ", 1) for merge in meta.texts("tokenizer.ggml.merges")]
    for merge in merges:
        if len(merge) != 2 or merge[0] not in vocab or merge[1] not in vocab or "".join(merge) not in vocab:
            meta.fail(f"the merge {' '.join(merge)[:64]!r} does not join two tokens into a third")
    return {
        "normalizer": {"type": "NFC"} if words.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _cut(words)},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": merges,
            "ignore_merges": words.whole_words,
        },
        "decoder": _BYTES | {"use_regex": True},
    }, words.add_bos


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _cut(words: _Words) -> list[dict[str, Any]]:
    digits = [{"type": "Digits", "individual_digits": True}] if words.digits else []
    if words.pattern == _GPT2:
        return [*digits, _BYTES | {"use_regex": True}]
    split = {"type": "Split", "pattern": {"Regex": words.pattern}, "behavior": "Isolated", "invert": False}
    return [*digits, split, _BYTES | {"use_regex": False}]


def _sentencepiece(meta: Metadata, tokens: list[str], kinds: list[int]) -> tuple[dict[str, Any], bool]:
    """SentencePiece BPE with byte fallback, in the form Hugging Face gives to Llama 2 and Gemma."""
    for i, kind in enumerate(kinds):
        if kind == _USER:  # llama.cpp's converter unescaped these alone
            tokens[i] = tokens[i].replace(" ", "▁")
    scores: list[float] = meta.array("tokenizer.ggml.scores", "f", len(tokens)).tolist()
    vocab = _vocabulary(meta, tokens, kinds)
    unknown = _token_id(meta, "unknown", len(tokens))
    prefix = meta.flag("tokenizer.ggml.add_space_prefix", True)
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    unescape = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, escape]},
        "pre_tokenizer": None,
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": _merges(vocab, scores, kinds),
        },
        "decoder": {"type": "Sequence", "decoders": [unescape, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
    }, True


def _merges(vocab: dict[str, int], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece: the best result first and, for one result, the longest left part first.

    SentencePiece joins the neighbours whose result scores best. Pieces that are not normal score 0, before all that
    are: so SentencePiece's own models have it, where GGUF files may write -1000.
    """
    ranked = []
    for piece, index in vocab.items():
        score = scores[index] if kinds[index] == _NORMAL else 0.0
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, -cut, cut - len(piece), left, right))
    ranked.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in ranked]


GEMMA_TEMPLATE = """\
{{ bos_token }}
{%- set first = namespace(text='') -%}
{%- set turns = messages -%}
{%- if messages and messages[0].role in ('system', 'developer') -%}
  {%- set first.text = messages[0].content + '\\n\\n' -%}
  {%- set turns = messages[1:] -%}
{%- endif -%}
{%- if not turns -%}
  {{ raise_exception('A system message needs a user turn after it') }}
{%- endif -%}
{%- for message in turns -%}
  {%- set role = 'model' if message.role == 'assistant' else message.role -%}
  {%- if role != ('model' if loop.index0 % 2 else 'user') -%}
    {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {%- endif -%}
  {{ '<start_of_turn>' + role + '\\n' + (first.text if loop.first else '') }}
  {{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""
"""The turns of Gemma 2 and 3 as Google documents them, for files that carry no template."""


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[msgspec.Raw]


class _AddedToken(msgspec.Struct):
    id: int


class _Ids(msgspec.Struct):
    """The parts of a tokenizer's JSON that name ids."""

    model: _Model
    added_tokens: list[_AddedToken] = []


def undecodable_ids(tokenizer: str, vocab: int) -> tuple[int, ...]:
    """The ids below `vocab` that a tokenizer (JSON of the `tokenizers` library) has no token for. Raises TricornError
    when it cannot be read.
    """
    try:
        parts = msgspec.json.decode(tokenizer, type=_Ids)
    except msgspec.MsgspecError as error:
        raise TricornError(f"the tokenizer cannot be read: {error}; fetch or convert the model again") from None
    listed = parts.model.vocab
    known = set(listed.values() if isinstance(listed, dict) else range(len(listed)))
    known.update(token.id for token in parts.added_tokens)
    return tuple(id for id in range(vocab) if id not in known)


def from_folder(folder: Path, config: dict[str, Any]) -> TokenizerFiles:
    """The tokenizer of a Hugging Face folder: tokenizer.json and the settings beside it."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise TricornError(f"{folder} has no tokenizer.json; save the model's fast tokenizer into it")
    text = read_text(path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise TricornError(f"{path}: not a usable tokenizer: {_one_line(error)}") from None
    settings = read_json(folder / "tokenizer_config.json", {})
    generation = read_json(folder / "generation_config.json", {})
    bos = _named_id(tokenizer, settings, "bos", config.get("bos_token_id"))
    eos = [_named_id(tokenizer, settings, "eos", None)]
    eos = [*_ids(generation.get("eos_token_id", config.get("eos_token_id"))), *eos]
    first = tokenizer.encode("").ids[:1]
    return TokenizerFiles(
        text,
        _chat_template(folder, settings),
        bos,
        tuple(dict.fromkeys(i for i in eos if i is not None)),
        bos is not None and first == [bos],
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and not isinstance(i, bool) and i >= 0]


def _named_id(tokenizer: Tokenizer, settings: dict[str, Any], name: str, default: Any) -> int | None:
    token = settings.get(f"{name}_token")
    content = token.get("content") if isinstance(token, dict) else token
    found: int | None = tokenizer.token_to_id(content) if isinstance(content, str) else None
    return found if found is not None else next(iter(_ids(default)), None)


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, or the template in tokenizer_config.json (the one named "default" of several)."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    template = settings.get("chat_template", read_json(folder / "chat_template.json", {}).get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
