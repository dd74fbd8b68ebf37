"""What a nursery of grammar processes is told at its start."""

from __future__ import annotations

import msgspec


class Config(msgspec.Struct, frozen=True):
    """What the nursery needs to know. Bytes and seconds; `undecodable` ids stand for no text."""

    tokenizer: str
    vocab: int
    rows: int
    eos_ids: tuple[int, ...]
    undecodable: tuple[int, ...]
    compile_seconds: float
    mask_seconds: float
    memory: int
