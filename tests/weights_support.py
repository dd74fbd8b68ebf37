"""Small model files for tests, written byte by byte so that any number in them can be made wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMAT = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


def text(value: str, length: int | None = None) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def scalar(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack("<" + _FORMAT[kind], value)


def entry(key: str, kind: int, value: Any) -> bytes:
    """A key with a scalar, or with an array when the value is (element type, list)."""
    if kind != ARRAY:
        return text(key) + struct.pack("<I", kind) + scalar(kind, value)
    element, values = value
    body = b"".join(scalar(element, v) for v in values)
    return text(key) + struct.pack("<IIQ", ARRAY, element, len(values)) + body


def gguf(
    keys: list[tuple[str, int, Any]],
    tensors: list[tuple[str, tuple[int, ...], int, bytes]],
    *,
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    offsets: dict[str, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file. A tensor is (name, dims in the order of the file, type id, data)."""
    n_tensors = len(tensors) if tensor_count is None else tensor_count
    n_keys = len(keys) if key_count is None else key_count
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join(entry(*key) for key in keys)
    data = b""
    for name, dims, kind, raw in tensors:
        data += b"\0" * (-len(data) % alignment)
        offset = (offsets or {}).get(name, len(data))
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        data += raw
    return head + b"\0" * (-len(head) % alignment) + data


def byte_alphabet() -> list[str]:
    """The 256 characters by which byte-level BPE writes bytes, in the order of GPT-2's vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(rest))]


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges of a small byte-level tokenizer: 3 control tokens, 256 bytes, some merges."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2"]
    tokens = SPECIAL + byte_alphabet() + [merge.replace(" ", "") for merge in merges]
    return tokens, [3] * 3 + [1] * (len(tokens) - 3), merges


def byte_tokenizer(pre: str = "smollm", **changes: Any) -> list[tuple[str, int, Any]]:
    tokens, types, merges = byte_vocabulary()
    keys = {
        "model": (STRING, "gpt2"),
        "pre": (STRING, pre),
        "tokens": (ARRAY, (STRING, tokens)),
        "token_type": (ARRAY, (I32, types)),
        "merges": (ARRAY, (STRING, merges)),
        "bos_token_id": (U32, 1),
        "eos_token_id": (U32, 2),
    } | changes
    return [(f"tokenizer.ggml.{name}", kind, value) for name, (kind, value) in keys.items()]


def piece_vocabulary() -> tuple[list[str], list[int], list[float]]:
    """Tokens, types and scores of a small SentencePiece vocabulary: 3 special, turns, 256 bytes, pieces by score."""
    special = ["<unk>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "\n\n", "  "]
    types = [2, 3, 3, 3, 3, 4, 4] + [6] * 256
    tokens = special + [f"<0x{b:02X}>" for b in range(256)]
    pieces = ["▁h", "el", "▁hel", "lo", "▁hello", "ell", "▁w", "or", "▁wor", "ld", "▁world"]
    pieces += list("▁helowrdabcxyz,.!\n")
    scores = [-1000.0] * 7 + [0.0] * 256 + [-1.0 - i for i in range(len(pieces))]
    return tokens + pieces, types + [1] * len(pieces), scores


def piece_tokenizer(**changes: Any) -> list[tuple[str, int, Any]]:
    tokens, types, scores = piece_vocabulary()
    keys = {
        "model": (STRING, "llama"),
        "tokens": (ARRAY, (STRING, tokens)),
        "token_type": (ARRAY, (I32, types)),
        "scores": (ARRAY, (F32, scores)),
        "bos_token_id": (U32, 1),
        "eos_token_id": (U32, 2),
        "unknown_token_id": (U32, 0),
        "add_space_prefix": (BOOL, False),
    } | changes
    return [(f"tokenizer.ggml.{name}", kind, value) for name, (kind, value) in keys.items()]


HIDDEN, HEADS, KV_HEADS, VOCAB = 32, 4, 2, 320


def model_keys(arch: str = "llama", **more: tuple[int, Any]) -> list[tuple[str, int, Any]]:
    keys = {
        "block_count": (U32, 1),
        "context_length": (U32, 128),
        "embedding_length": (U32, HIDDEN),
        "feed_forward_length": (U32, 64),
        "attention.head_count": (U32, HEADS),
        "attention.head_count_kv": (U32, KV_HEADS),
        "attention.layer_norm_rms_epsilon": (F32, 1e-5),
    } | more
    return [("general.architecture", STRING, arch)] + [(f"{arch}.{k}", kind, v) for k, (kind, v) in keys.items()]


def f32(shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layer_tensors() -> list[tuple[str, tuple[int, ...], int, bytes]]:
    """The tensors of one Llama layer and what surrounds it, all F32 but the norms' neighbours."""
    shapes = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "blk.0.attn_v.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (64, HIDDEN),
        "blk.0.ffn_up.weight": (64, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, 64),
    }
    return [(name, shape[::-1], 0, f32(shape, i).tobytes()) for i, (name, shape) in enumerate(shapes.items())]


def safetensors(
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]], header: bytes | None = None, length: int | None = None
) -> bytes:
    """A safetensors file; `header` and `length` replace what would be right."""
    entries: dict[str, Any] = {}
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps(entries).encode() if header is None else header
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
