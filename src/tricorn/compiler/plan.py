"""The plan: what the native executor runs. Buffers and fused operations, plain enough to be written into the engine
file as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

BufferKind = Literal["rows", "f32", "bf16", "q8"]


class Buffer(msgspec.Struct, frozen=True):
    """A matrix of one row per token (per sampled row where `sampled`). "rows" is plain float32; the other kinds are
    activations that
    meet a matrix: "q8" is 8-bit integers with one scale per 32. Buffers of the same slot share memory and are never
    alive together."""

    name: str
    kind: BufferKind
    columns: int
    sampled: bool
    slot: int = -1


class Segment(msgspec.Struct, frozen=True, omit_defaults=True):
    """One matrix of a merged product; its results begin at `column` of the output."""

    weight: str
    column: int = 0


class Op(msgspec.Struct, frozen=True, omit_defaults=True, rename={"input": "in"}):
    """One fused operation. `input` and `out` index the buffers; the weights are named.

    norm        rms_norm, then quantized for the next product, or added to `out` (`add`); `gather` takes the sampled
    rows
    linear      product with each segment, bias, soft cap, stored or added to `out`
    gated       gate(in . segments[0]) * (in . segments[1]), quantized
    rope_store  norms of q and k heads, rotation, and the write of k and v into the pages, in place on [q | k | v]
    attention   over the pages, quantized
    """

    op: Literal["norm", "linear", "gated", "rope_store", "attention", "quantize"]
    input: int
    out: int
    segments: tuple[Segment, ...] = ()
    weight: str | None = None
    bias: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    epsilon: float = 0.0
    scale: float = 0.0
    softcap: float = 0.0
    add: bool = False
    gather: bool = False
    gate: str = "silu"
    layer: int = 0
    heads: int = 0
    window: int = 0
    rope: int = 0
    fused: int = 1
    """How many operations of the graph this one does."""


class RopeTable(msgspec.Struct, frozen=True):
    inv_freq: tuple[float, ...]
    factor: float


class Plan(msgspec.Struct, frozen=True):
    """`residual` and `logits` index the buffers: the plan begins with the embedding of the ids in the one and ends
    with the other."""

    embedding: str
    embedding_scale: float
    residual: int
    logits: int
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    ropes: tuple[RopeTable, ...]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
