"""The graph: a model written down as a list of operations, the way its paper would.

Values and weights are named. Every operation takes float32 matrices of one row per token and gives one;
`runtime.reference` interprets the list as it stands, and the compiler turns it into a plan of fused kernels.

The operations, with their inputs, weights and attributes (T rows; D columns):

    embed      ()            weight [V, D]                 scale, columns: D    ids of the step -> [T, D]
    rms_norm   (x)           weight [D] or [head_dim]      eps, heads           heads > 0: each head normalized alone
    linear     (x)           weight [N, K], bias [N]?      columns: N           x @ weight.T + bias
    rope       (x)                                         heads, rope          rotates halves (NeoX); in Graph.ropes
    attention  (q, k, v)                                   layer, heads, kv_heads, head_dim, scale, window, softcap
    act_mul    (gate, up)                                  act                  act(gate) * up; "silu" | "gelu_tanh"
    add        (a, b)
    softcap    (x)                                         cap                  cap * tanh(x / cap)
    sampled    (x)                                                              keeps only the rows that are sampled

`window` 0 means none; a window of w lets position p see positions p - w + 1 .. p. `softcap` 0 means none.
The norm weights are the multipliers themselves (a family that stores w - 1 adds 1 when its weights are read).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: `output` names the value it makes, `inputs` the values it reads, `weights` the tensors it uses."""

    op: str
    output: str
    inputs: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary angles: position p turns pair i by p * inv_freq[i] (float32); sine and cosine are scaled by `factor`."""

    inv_freq: tuple[float, ...]
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Graph:
    """A whole model. The last node's output is the logits, [sampled rows, vocab]."""

    nodes: tuple[Node, ...]
    ropes: tuple[Rope, ...]
    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    """The longest sequence the model was made for, in tokens."""
