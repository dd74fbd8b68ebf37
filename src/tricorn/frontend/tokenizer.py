"""Text to token ids and back.

Wraps a `tokenizers.Tokenizer`. Encoding is its; decoding is our own, because a stream needs it piece by piece: every
token stands for some bytes, and text is what those bytes spell in UTF-8. Invalid bytes become U+FFFD, one for each
maximal invalid part (the practice of the Unicode standard, section 3.9), and so does a character left incomplete at
the end of a generation. Both hold for a stream and for the whole alike: `decode` is the incremental decoder run to
its end.

Markers are the special added tokens (`<|im_end|>`, `<bos>`, ...). Client text that spells one must not become one, so
a second tokenizer, the twin, knows each marker under a secret spelling that no client can guess: a text with its real
markers respelled is encoded by the twin in one pass, with every rule of the original kept, and everything else in it
is plain text.
"""

from __future__ import annotations

import codecs
import re
import secrets
import threading
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any

import msgspec
import tokenizers

from tricorn.request import TricornError

NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Code points that the Unicode standard keeps for private use inside a program, never for interchange."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A model's tokenizer, safe to share between threads.

    `source` is the JSON of the `tokenizers` library. `bos_id` is put in front of plain prompts when `add_bos` says so.
    Raises TricornError when the JSON cannot be read or decodes in a way that is neither byte-level nor SentencePiece's.
    """

    def __init__(self, source: str, *, bos_id: int | None = None, add_bos: bool = False) -> None:
        try:
            self._inner = tokenizers.Tokenizer.from_str(source)
        except Exception as error:  # the library raises bare Exception
            raise TricornError(f"the tokenizer cannot be read: {error}; fetch or convert the model again") from error
        self._source = source
        self._to_bytes = _byte_reader(self._inner)
        self._bytes: dict[int, bytes] = {}
        self._twin_lock = threading.Lock()
        self.bos_id = bos_id
        self.add_bos = add_bos and bos_id is not None
        self.size = self._inner.get_vocab_size(with_added_tokens=True)
        """How many ids the tokenizer knows; the model's logits may be wider."""
        added = self._inner.get_added_tokens_decoder()
        self.special: dict[int, str] = {id: token.content for id, token in added.items() if token.special}
        self._markers = sorted(self.special.values(), key=len, reverse=True)
        self._marker_index = {marker: index for index, marker in enumerate(self._markers)}
        self._marker = re.compile("|".join(map(re.escape, self._markers)) or r"(?!)")

    # --- text to ids

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """The ids of `text`. `add_special` puts BOS in front where the model wants one and the text has none yet;
        `parse_special` makes the text of a marker that marker, otherwise it is plain text."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids if parse_special else self._plain(text)
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def spellings(self, word: str) -> list[list[int]]:
        """The ids of a word as it is, without a space before it, and with one; none for a word without tokens."""
        bare = word.lstrip(" ")
        texts = (word, bare, f" {bare}") if bare else (word,)
        return [list(ids) for ids in dict.fromkeys(tuple(self.encode(text)) for text in texts) if ids]

    def shield(self, text: str) -> str:
        """`text` with each marker in it replaced by a stand-in that `encode_shielded` turns back into plain text."""
        return self._marker.sub(lambda match: self._shield + self._letter(match[0]), text)

    def encode_shielded(self, text: str) -> list[int]:
        """The ids of a text that was built around shielded strings: markers outside of them count, those inside are
        plain.
        """
        if self._shield not in text:
            return self.encode(text)
        respelled = self._marker.sub(lambda match: self._secret + self._letter(match[0]), text)
        return self._plain(self._unshield.sub(lambda match: self._markers[ord(match[1]) - 0xF0000], respelled))

    def _letter(self, marker: str) -> str:
        return chr(0xF0000 + self._marker_index[marker])

    @cached_property
    def _shield(self) -> str:
        return _fresh_secret()

    @cached_property
    def _secret(self) -> str:
        return _fresh_secret()

    @cached_property
    def _unshield(self) -> re.Pattern[str]:
        return re.compile(re.escape(self._shield) + "(.)", re.DOTALL)

    def _plain(self, text: str) -> list[int]:
        with self._twin_lock:
            twin, ids = self._twin
        return [ids.get(id, id) for id in twin.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _twin(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The twin and, where its ids of added tokens differ, the way back to the real ones."""
        parts = msgspec.json.decode(self._source, type=dict[str, msgspec.Raw])
        added: list[dict[str, Any]] = msgspec.json.decode(parts["added_tokens"])
        real: dict[str, int] = {}
        for token in added:
            if token["special"]:
                token["content"] = self._secret + self._letter(token["content"])
            real[token["content"]] = token["id"]
        parts["added_tokens"] = msgspec.Raw(msgspec.json.encode(added))
        twin = tokenizers.Tokenizer.from_str(msgspec.json.encode(parts).decode())
        return twin, {own: id for content, id in real.items() if (own := twin.token_to_id(content)) is not None}

    # --- ids to text

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for; none for an id that the tokenizer does not know."""
        found = self._bytes.get(id)
        if found is None:
            token = self._inner.id_to_token(id)
            found = self._bytes[id] = self._to_bytes(token) if token is not None else b""
        return found

    def token_text(self, id: int) -> str:
        """A token alone as text: its part of a character shows as U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`, equal to what a `Detokenizer` gives for them one by one."""
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return "".join(map(detokenizer.push, ids)) + detokenizer.finish()


class Detokenizer:
    """Turns ids into text one at a time; text comes as soon as its characters are complete. Markers do not show, but
    for those that are `visible`, or all without `skip_special`.
    """

    __slots__ = ("_decode", "_skip", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, visible: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip: Collection[int] = tokenizer.special if skip_special else ()
        if visible:
            self._skip = frozenset(self._skip) - visible
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, id: int) -> str:
        return "" if id in self._skip else self._decode(self._tokenizer.token_bytes(id))

    def finish(self) -> str:
        """What is left at the end: U+FFFD when a character was not completed."""
        return self._decode(b"", True)


def _fresh_secret() -> str:
    return "".join(secrets.choice(NONCHARACTERS) for _ in range(16))


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level BPE writes bytes with: printable Latin-1 stands for itself, the other bytes for
    U+0100
    on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _byte_reader(inner: tokenizers.Tokenizer) -> Any:
    """The function from a token's spelling to its bytes, read off the tokenizer's decoder."""
    state = msgspec.json.decode(inner.decoder.__getstate__()) if inner.decoder is not None else {}
    steps = {step["type"]: step for step in state.get("decoders", [state] if state else [])}
    if "ByteLevel" in steps:
        alphabet = _byte_alphabet()

        def byte_level(token: str) -> bytes:
            try:
                return bytes([alphabet[letter] for letter in token])
            except KeyError:  # an added token is written as it is
                return token.encode()

        return byte_level
    if not steps.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise TricornError(
            f"the tokenizer's decoder ({', '.join(steps)}) is not supported: byte-level or SentencePiece is needed"
        )
    space = steps.get("Metaspace", {}).get("replacement") or steps.get("Replace", {}).get("pattern", {}).get(
        "String", "▁"
    )

    def sentencepiece(token: str) -> bytes:
        byte = BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(space, " ").encode()

    return sentencepiece
