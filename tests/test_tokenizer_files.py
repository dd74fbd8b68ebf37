"""Tokenizers out of GGUF files: the ids of the originals (field fault A-041), in time linear in the text (A-030).

The goldens in goldens/tokenizer_ids.json are the ids that the published tokenizer.json of each model gives. What has no
goldens is compared with the slow, plain implementations of both algorithms below.
"""

from __future__ import annotations

import json
import random
import time
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer

from tricorn.weights import hub
from tricorn.weights.checkpoint import Checkpoint, load
from weights_support import (
    ARRAY,
    BOOL,
    I32,
    STRING,
    U32,
    byte_alphabet,
    byte_tokenizer,
    byte_vocabulary,
    gguf,
    layer_tensors,
    model_keys,
    piece_tokenizer,
    piece_vocabulary,
    write,
)

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "tokenizer_ids.json").read_text("utf-8"))
STRINGS: list[str] = GOLDENS["strings"]


@cache
def real(name: str) -> Checkpoint:
    if not hub.is_pulled(name):
        pytest.skip(f"{name} is not in the cache (tricorn pull {name})")
    return load(hub.model_path(name))


@cache
def real_tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_str(real(name).tokenizer)


def small(tmp_path: Path, keys: list[Any]) -> tuple[Tokenizer, Checkpoint]:
    model = load(write(tmp_path / "m.gguf", gguf(model_keys() + keys, layer_tensors())))
    return Tokenizer.from_str(model.tokenizer), model


def ids(tokenizer: Tokenizer, text: str, *, parse: bool = True, add: bool = False) -> list[int]:
    tokenizer.encode_special_tokens = not parse
    found: list[int] = tokenizer.encode(text, add_special_tokens=add).ids
    return found


# Byte-level BPE, plainly

WHITE = set("\t\n\v\f\r \x85\u00a0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}


def kind(char: str) -> str:
    if char in WHITE:
        return "white"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(char)[0], "other")


def gpt2_words(text: str) -> list[str]:
    words, at = [], 0
    while at < len(text):
        size = next((len(end) for end in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(end, at)), 0)
        if not size:
            start = at + (text[at] == " " and at + 1 < len(text) and kind(text[at + 1]) != "white")
            stop = start + 1
            while stop < len(text) and kind(text[stop]) == kind(text[start]):
                stop += 1
            if kind(text[start]) == "white" and stop < len(text) and stop - start > 1:
                stop -= 1  # the last space belongs to the next word
            size = stop - at
        words.append(text[at : at + size])
        at += size
    return words


def smollm_words(text: str) -> list[str]:
    words, rest = [], ""
    for char in text:
        if kind(char) == "number":
            words += [*gpt2_words(rest), char]
            rest = ""
        else:
            rest += char
    return words + gpt2_words(rest)


def joined(symbols: list[str], rank: dict[tuple[str, str], float]) -> list[str]:
    """Joins the best-ranked neighbours, leftmost first, until none can be."""
    while len(symbols) > 1:
        best = min(range(len(symbols) - 1), key=lambda i: rank.get((symbols[i], symbols[i + 1]), float("inf")))
        if (symbols[best], symbols[best + 1]) not in rank:
            break
        symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
    return symbols


BYTES = dict(
    zip(
        [*range(33, 127), *range(161, 173), *range(174, 256), *range(33), *range(127, 161), 173],
        byte_alphabet(),
        strict=True,
    )
)


def ranked(merges: list[Any]) -> dict[tuple[str, str], float]:
    return {(left, right): float(i) for i, (left, right) in enumerate(merges)}


def plain_byte_bpe(text: str, vocab: dict[str, int], rank: dict[tuple[str, str], float]) -> list[int]:
    return [vocab[token] for word in smollm_words(text) for token in joined([BYTES[b] for b in word.encode()], rank)]


# SentencePiece BPE, plainly


def plain_pieces(text: str, vocab: dict[str, int], scores: dict[str, float]) -> list[int]:
    symbols = list(text.replace(" ", "▁"))
    while len(symbols) > 1:
        pairs = [symbols[i] + symbols[i + 1] for i in range(len(symbols) - 1)]
        best = max(range(len(pairs)), key=lambda i: scores.get(pairs[i], float("-inf")))
        if pairs[best] not in scores:
            break
        symbols[best : best + 2] = [pairs[best]]
    return [
        i
        for symbol in symbols
        for i in ([vocab[symbol]] if symbol in vocab else [vocab[f"<0x{b:02X}>"] for b in symbol.encode()])
    ]


ALPHABETS = [
    "helowrd ",
    "abc  \n\t'",
    "0123 .,",
    "äöüßé ",
    "漢字かな한글 ",
    "🙂👍🏽‍ ",
    "\r\n \t",
    "<>|_/\\{}",
    "नमस्ते ",
    "العربية ",
]


def random_strings(count: int, alphabets: list[str]) -> list[str]:
    rng = random.Random(4)
    return ["".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 40))) for _ in range(count)]


# The originals' ids


@pytest.mark.parametrize("name", [name for name in GOLDENS if name != "strings"])
@pytest.mark.parametrize("parse", [True, False])
def test_ids_equal_the_original(name: str, parse: bool) -> None:
    expected = GOLDENS[name]["parsed" if parse else "plain"]
    tokenizer = real_tokenizer(name)
    for text, golden in zip(STRINGS, expected, strict=True):
        assert ids(tokenizer, text, parse=parse) == golden, text


def test_smollm_ids_equal_the_plain_algorithm() -> None:
    tokenizer = real_tokenizer("smollm2-135m")
    model = json.loads(real("smollm2-135m").tokenizer)["model"]
    rank = ranked(model["merges"])
    for text in STRINGS + random_strings(200, ALPHABETS):
        assert ids(tokenizer, text, parse=False) == plain_byte_bpe(text, model["vocab"], rank), text


def test_byte_level_ids_equal_the_plain_algorithm(tmp_path: Path) -> None:
    tokenizer, model = small(tmp_path, byte_tokenizer())
    tokens, _, merges = byte_vocabulary()
    vocab = {token: i for i, token in enumerate(tokens)}
    rank = ranked([merge.split(" ") for merge in merges])
    for text in STRINGS + random_strings(500, ALPHABETS):
        found = ids(tokenizer, text, parse=False)
        assert found == plain_byte_bpe(text, vocab, rank), text
        assert tokenizer.decode(found) == text
    assert not model.add_bos


@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece_ids_equal_the_plain_algorithm(tmp_path: Path, prefix: bool) -> None:
    tokenizer, model = small(tmp_path, piece_tokenizer(add_space_prefix=(BOOL, prefix)))
    tokens, types, scores = piece_vocabulary()
    tokens = [token.replace(" ", "▁") for token in tokens]
    vocab = {token: i for i, token in enumerate(tokens)}
    known = {token: scores[i] if types[i] == 1 else 0.0 for token, i in vocab.items() if types[i] in (1, 4)}
    alphabets = ["helowrd ", "abcxyz,.! ", " ", "漢ß🙂"]
    for text in ["hello world", "  lead", "x   y", *random_strings(500, alphabets)]:
        found = ids(tokenizer, text, parse=False)
        assert found == plain_pieces(" " + text if prefix else text, vocab, known), text
        assert tokenizer.decode(found) == text
    assert model.add_bos
    assert ids(tokenizer, "x", add=True)[0] == model.bos_id
    assert model.eos_ids == (2, 4)


ROUND = [text for text in STRINGS if "▁" not in text]  # SentencePiece writes the space as ▁, so that one is lost


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b"])
@pytest.mark.parametrize("parse", [True, False])
def test_text_survives_the_round_trip(name: str, parse: bool) -> None:
    tokenizer = real_tokenizer(name)
    for text in ROUND:
        expected = unicodedata.normalize("NFC", text) if name.startswith("qwen") else text
        assert tokenizer.decode(ids(tokenizer, text, parse=parse), skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "it's 12 x", ["it", "'s", "Ġ", "1", "2", "Ġx"]),
        ("gpt-2", "it's 12 x", ["it", "'s", "Ġ12", "Ġx"]),
        ("qwen2", "it'S 12 x\n\n", ["it", "'S", "Ġ", "1", "2", "Ġx", "ĊĊ"]),
        ("llama-bpe", "it'S 1234 x", ["it", "'S", "Ġ", "123", "4", "Ġx"]),
        ("tekken", "HTMLPage 12", ["HTMLPage", "Ġ", "1", "2"]),
    ],
)
def test_words_of_each_pre_tokenizer(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    tokenizer, _ = small(tmp_path, byte_tokenizer(pre))
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


def test_whole_words_of_llama3_skip_the_merges(tmp_path: Path) -> None:
    """ "world" is a token that no merges lead to."""
    tokens, types, _ = byte_vocabulary()
    keys = {"tokens": (ARRAY, (STRING, [*tokens, "world"])), "token_type": (ARRAY, (I32, [*types, 1]))}
    tokenizer, model = small(tmp_path, byte_tokenizer("llama-bpe", **keys))
    assert ids(tokenizer, "world") == [len(tokens)]
    assert model.add_bos
    tokenizer, _ = small(tmp_path, byte_tokenizer("gpt-2", **keys))
    assert len(ids(tokenizer, "world")) > 1


# Special tokens


def test_control_tokens_are_parsed_only_on_request(tmp_path: Path) -> None:
    tokenizer, _ = small(tmp_path, byte_tokenizer())
    text = "<|im_start|>hello<|im_end|>"
    assert ids(tokenizer, text) == [1, ids(tokenizer, "hello")[0], 2]
    plain = ids(tokenizer, text, parse=False)
    assert not {0, 1, 2} & set(plain)
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(ids(tokenizer, text)) == "hello"


def test_unused_tokens_are_left_out(tmp_path: Path) -> None:
    tokens, types, _ = byte_vocabulary()
    keys = {"tokens": (ARRAY, (STRING, [*tokens, "[PAD]"])), "token_type": (ARRAY, (I32, [*types, 5]))}
    tokenizer, _ = small(tmp_path, byte_tokenizer(**keys))
    assert tokenizer.token_to_id("[PAD]") is None
    assert tokenizer.decode([len(tokens)]) == ""


def test_user_defined_tokens_are_always_parsed(tmp_path: Path) -> None:
    tokens, types, _ = byte_vocabulary()
    keys = {"tokens": (ARRAY, (STRING, [*tokens, "<tool>"])), "token_type": (ARRAY, (I32, [*types, 4]))}
    tokenizer, _ = small(tmp_path, byte_tokenizer(**keys))
    for parse in (True, False):
        assert ids(tokenizer, "<tool>", parse=parse) == [len(tokens)]
    assert tokenizer.decode([len(tokens)]) == "<tool>"


@pytest.mark.parametrize(
    ("keys", "eos"),
    [
        ({}, (2, 0)),
        ({"eos_token_id": (U32, 0)}, (0, 2)),
        ({"eos_token_id": (U32, 5), "eot_token_id": (U32, 2)}, (5, 2, 0)),
        ({"token_type": (ARRAY, (I32, [1] * 267))}, (2,)),
    ],
)
def test_every_end_of_turn_ends_the_output(tmp_path: Path, keys: dict[str, Any], eos: tuple[int, ...]) -> None:
    assert small(tmp_path, byte_tokenizer(**keys))[1].eos_ids == eos


def test_real_settings() -> None:
    smollm, gemma, qwen = (real(name) for name in ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b"))
    assert (smollm.bos_id, smollm.eos_ids, smollm.add_bos) == (1, (2, 0), False)
    assert (gemma.bos_id, gemma.eos_ids, gemma.add_bos) == (2, (1, 106), True)
    assert (qwen.bos_id, qwen.eos_ids, qwen.add_bos) == (151643, (151645, 151643), False)
    assert "SmolLM" in (smollm.chat_template or "")
    assert "<tool_call>" in (qwen.chat_template or "")
    assert "<start_of_turn>" in (gemma.chat_template or "")


# Gemma's template, which its file lacks


def gemma_prompt(tmp_path: Path, messages: list[dict[str, str]], **how: Any) -> str:
    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    template = small(tmp_path, piece_tokenizer())[1].chat_template
    assert template is not None
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        messages=messages, bos_token="<bos>", raise_exception=fail, add_generation_prompt=True, **how
    )


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_gemma_turns(tmp_path: Path) -> None:
    messages = [turn("user", " Hi \n"), turn("assistant", "Hello\n"), turn("user", "Bye")]
    assert gemma_prompt(tmp_path, messages) == (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )


def test_gemma_system_goes_into_the_first_turn(tmp_path: Path) -> None:
    messages = [turn("system", "Be kind."), turn("user", "Hi")]
    assert gemma_prompt(tmp_path, messages) == (
        "<bos><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize("roles", [["assistant"], ["user", "user"], ["user", "system"], ["user", "tool"]])
def test_gemma_turns_must_alternate(tmp_path: Path, roles: list[str]) -> None:
    with pytest.raises(jinja2.TemplateError, match="alternate"):
        gemma_prompt(tmp_path, [turn(role, "x") for role in roles])


def test_other_files_without_a_template_have_none(tmp_path: Path) -> None:
    assert small(tmp_path, byte_tokenizer())[1].chat_template is None


# Time


@pytest.mark.parametrize("unit", ["a", "_", " ", "\n", "漢", "1", "a ", "\u0301"])
@pytest.mark.parametrize("make", [byte_tokenizer, piece_tokenizer])
def test_long_runs_take_no_quadratic_time(tmp_path: Path, unit: str, make: Any) -> None:
    """16 times the text in less than 60 times the time (a quadratic algorithm takes 256 times), after a warm-up."""
    tokenizer, _ = small(tmp_path, make())
    seconds = []
    for size in (1_000, 10_000, 160_000):
        start = time.perf_counter()
        tokenizer.encode(unit * size, add_special_tokens=False)
        seconds.append(time.perf_counter() - start)
    assert seconds[2] < 60 * max(seconds[1], 0.01)
