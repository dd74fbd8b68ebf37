"""What the tests of constrained output share: tokenizers, and matchers without processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from tricorn.compiler.engine_file import EngineFile
from tricorn.grammar.markers import hidden
from tricorn.grammar.worker import compile_constraint
from tricorn.request import Constraint

END = 2
"""The id that ends a sequence in `byte_tokenizer`."""

WORDS = (
    "ab", "abc", "yes", "yesterday", "no", '{"', '":', '", "', '"}', "true", "false", "null", "12", "-1", "0.5", "é",
    "\\n", '\\"', "  ", "\n  ", "begin", "end", "<f>", "</f>", "name", "a1", "}}", "],", "[[", " a",
)  # fmt: skip


def byte_tokenizer() -> str:
    """The JSON of a tokenizer with a token for each byte and some longer ones, and three markers in front."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocab = {"<s>": 0, "<pad>": 1, "</s>": END}
    vocab |= {letters[byte]: 3 + byte for byte in range(256)}
    merges = []
    for word in WORDS:
        spelled = [letters[byte] for byte in word.encode()]
        for length in range(2, len(spelled) + 1):
            piece = "".join(spelled[:length])
            if piece not in vocab:
                vocab[piece] = len(vocab)
                merges.append(["".join(spelled[: length - 1]), spelled[length - 1]])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": id, "content": text, **flags} for text, id in list(vocab.items())[:3]]
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": False, "fuse_unk": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    parts = {"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": level, "decoder": level}
    return json.dumps({**parts, "post_processor": None, "model": model})


def byte_matchers() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(hidden(byte_tokenizer()), eos_token=[END])


def engine_matchers(path: Path) -> tuple[EngineFile, llguidance.LLTokenizer]:
    file = EngineFile.open(path, check_body=False)
    return file, llguidance.LLTokenizer(hidden(file.tokenizer), n_vocab=file.graph.vocab, eos_token=list(file.eos_ids))


def matcher(tokenizer: llguidance.LLTokenizer, kind: Any, source: Any) -> Any:
    text = source if isinstance(source, str) and kind in ("regex", "lark", "gbnf") else json.dumps(source)
    return compile_constraint(Constraint(kind, text), tokenizer)


def accepts(tokenizer: llguidance.LLTokenizer, root: Any, text: str | bytes) -> bool:
    """Whether a whole text is a sentence."""
    ids = tokenizer.tokenize_bytes(text.encode() if isinstance(text, str) else text)
    one = root.deep_copy()
    return bool(one.try_consume_tokens(ids) == len(ids) and one.is_accepting())


def bits(row: NDArray[Any] | bytes) -> list[int]:
    """The ids whose bits are set."""
    data = np.frombuffer(row, np.uint8) if isinstance(row, bytes) else row.view(np.uint8)
    return np.nonzero(np.unpackbits(data, bitorder="little"))[0].tolist()  # type: ignore[no-any-return]
