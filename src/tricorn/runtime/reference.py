"""The reference executor: interprets a graph as it stands, in float32 NumPy. Slow, and obviously right.

It is the oracle for the native executor, and keeps the same promise of invariance: matrix products run over blocks of a
fixed number of rows and attention runs row by row, so that a row's bits never depend on the rows it shares a step with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tricorn.models.graph import Graph
from tricorn.request import TricornError
from tricorn.runtime.sampling import sample, scoring
from tricorn.runtime.step import F32, I32, PAGE, U8, Step, StepResult, page_bytes

BLOCK = 16
"""Rows in one matrix product."""


class ReferenceHandle:
    """The handle of a step. It runs at once, or when its masks have come."""

    def __init__(self, run: Callable[[Step], StepResult], step: Step) -> None:
        self._run = run
        self._step = step
        self._outcome: StepResult | TricornError | None = None
        if not step.sampling.masks_follow:
            self._finish()

    def put_masks(self, index: I32, mask: NDArray[np.uint32]) -> None:
        self._step.sampling.mask_index, self._step.sampling.mask = index, mask
        self._finish()

    def result(self) -> StepResult:
        if self._outcome is None:
            raise TricornError("the masks of a step have not come")
        if isinstance(self._outcome, TricornError):
            raise self._outcome
        return self._outcome

    def _finish(self) -> None:
        try:
            self._outcome = self._run(self._step)
        except TricornError as error:
            self._outcome = error


class ReferenceExecutor:
    """Runs steps (see runtime.step.Executor) over a float32 KV cache of [layers, pages, PAGE, kv_heads, head_dim].

    `weights` maps the graph's names to float32 arrays; it is asked anew at each use, so it may dequantize on demand.
    """

    def __init__(
        self, graph: Graph, weights: Mapping[str, F32], *, pages: int, max_tokens: int = 512, max_rows: int = 512
    ) -> None:
        self.graph, self.weights = graph, weights
        self.pages, self.page_bytes, self.vocab = pages, page_bytes(graph, 4), graph.vocab
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self.keys = np.zeros((graph.layers, pages, PAGE, graph.kv_heads, graph.head_dim), np.float32)
        self.values = np.zeros_like(self.keys)
        self.sampled = np.zeros(0, np.int32)

    def submit(self, step: Step) -> ReferenceHandle:
        """Runs the step; what goes wrong is raised by the handle."""
        return ReferenceHandle(self._run, step)

    def read_page(self, page: int) -> U8:
        _check_range("page", np.array([page]), self.pages)
        return np.stack([self.keys[:, page], self.values[:, page]]).view(np.uint8).reshape(-1)

    def write_page(self, page: int, data: U8) -> None:
        _check_range("page", np.array([page]), self.pages)
        if len(data) != self.page_bytes:
            raise TricornError(f"a page is {self.page_bytes} bytes, not {len(data)}")
        both = np.ascontiguousarray(data).view(np.float32).reshape(2, *self.keys[:, page].shape)
        self.keys[:, page], self.values[:, page] = both

    def close(self) -> None:
        """There is nothing to stop."""

    def forward(self, ids: list[int]) -> F32:
        """The logits of every position of one sequence, float32 [len(ids), vocab]. Leaves the KV pages alone."""
        pages = -(-len(ids) // PAGE)
        alone = ReferenceExecutor(self.graph, self.weights, pages=pages, max_tokens=len(ids), max_rows=len(ids))
        every = np.arange(len(ids), dtype=np.int32)
        step = Step(
            token_ids=np.array(ids, np.int32),
            positions=every,
            row_start=np.array([0, len(ids)], np.int32),
            page_start=np.array([0, pages], np.int32),
            pages=np.arange(pages, dtype=np.int32),
            sampling=scoring(every),
        )
        alone._check(step)
        return alone._outcome(step)[0]

    def _run(self, step: Step) -> StepResult:
        history = self._known(step.sampling.history_ids)
        step = replace(step, token_ids=self._known(step.token_ids))
        self.sampled = np.zeros(0, np.int32)  # should it fail
        self._check(step)
        sources, targets = step.copies.reshape(-1, 2).T
        self.keys[:, targets] = self.keys[:, sources]
        self.values[:, targets] = self.values[:, sources]
        logits, hidden = self._outcome(step)
        result = sample(logits, step.sampling, history)
        self.sampled = result.ids
        return replace(result, hidden=hidden)

    def _known(self, ids: I32) -> I32:
        """Puts the ids that the previous step sampled in the place of the references -1-j."""
        known = ids.copy()
        unknown = ids < 0
        rows = -1 - ids[unknown]
        if rows.size and rows.max() >= len(self.sampled):
            raise TricornError(f"a step refers to row {rows.max()} of a step that sampled {len(self.sampled)}")
        known[unknown] = self.sampled[rows]
        return known

    def _check(self, step: Step) -> None:
        ids, rows = step.token_ids, step.sampling.rows
        if len(ids) > self.max_tokens or len(rows) > self.max_rows:
            raise TricornError(
                f"a step of {len(ids)} tokens, {len(rows)} of them sampled, exceeds the executor's limits"
            )
        _check_range("token", ids, self.vocab)
        _check_range("page", step.pages, self.pages)
        _check_range("page", step.copies, self.pages)
        _check_range("row", rows, len(ids))
        _check_range("row", step.hidden, len(ids))

    def _outcome(self, step: Step) -> tuple[F32, F32]:
        """Runs every node in order; gives the last value, [sampled rows, vocab], and the hidden states that are wanted,
        [H, width]: what the norm behind the choice of sampled rows makes of theirs."""
        values: dict[str, F32] = {}
        hidden = np.zeros((0, 0), np.float32)
        chosen = output = ""
        for node in self.graph.nodes:
            call = Call(self, step, node.attrs, [self.weights[name] for name in node.weights])
            operation = OPERATIONS[node.op]
            values[node.output] = operation(call, *(values[name] for name in node.inputs))
            if node.op == "sampled":
                chosen, hidden = node.output, values[node.inputs[0]][step.hidden]
            elif chosen in node.inputs:
                hidden = operation(call, hidden)
            output = node.output
        return values[output], hidden


def _check_range(name: str, values: I32, end: int) -> None:
    if values.size and not 0 <= values.min() <= values.max() < end:
        raise TricornError(f"a step names a {name} outside 0 .. {end - 1}")


@dataclass(frozen=True, slots=True)
class Call:
    """What an operation may look at beside its inputs."""

    executor: ReferenceExecutor
    step: Step
    attrs: dict[str, Any]
    weights: list[F32]


def _embed(call: Call) -> F32:
    rows: F32 = call.weights[0][call.step.token_ids]
    return rows * np.float32(call.attrs["scale"])


def _rms_norm(call: Call, x: F32) -> F32:
    heads = x.reshape(len(x), call.attrs["heads"] or 1, x.shape[1] // (call.attrs["heads"] or 1))
    mean_square = np.mean(heads * heads, axis=-1, keepdims=True)
    normed: F32 = heads / np.sqrt(mean_square + np.float32(call.attrs["eps"])) * call.weights[0]
    return normed.reshape(x.shape)


def _linear(call: Call, x: F32) -> F32:
    rows, weight = len(x), call.weights[0]
    padded = np.zeros((-(-rows // BLOCK) * BLOCK, x.shape[1]), np.float32)
    padded[:rows] = x
    product = np.empty((len(padded), len(weight)), np.float32)
    for start in range(0, rows, BLOCK):
        np.matmul(padded[start : start + BLOCK], weight.T, out=product[start : start + BLOCK])
    return product[:rows] + call.weights[1] if len(call.weights) > 1 else product[:rows]


def _rope(call: Call, x: F32) -> F32:
    rope = call.executor.graph.ropes[call.attrs["rope"]]
    angles = call.step.positions[:, None].astype(np.float32) * np.array(rope.inv_freq, np.float32)
    cos, sin = np.cos(angles)[:, None] * np.float32(rope.factor), np.sin(angles)[:, None] * np.float32(rope.factor)
    heads = x.reshape(len(x), call.attrs["heads"], x.shape[1] // call.attrs["heads"])
    first, second = np.split(heads, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)


def _attention(call: Call, q: F32, k: F32, v: F32) -> F32:
    step, layer, kv_heads, head_dim = call.step, call.attrs["layer"], call.attrs["kv_heads"], call.attrs["head_dim"]
    keys, values = call.executor.keys[layer], call.executor.values[layer]
    output = np.empty_like(q)
    for sequence in range(len(step.row_start) - 1):
        rows = slice(step.row_start[sequence], step.row_start[sequence + 1])
        table = step.pages[step.page_start[sequence] : step.page_start[sequence + 1]]
        positions = step.positions[rows]
        keys[table[positions // PAGE], positions % PAGE] = k[rows].reshape(-1, kv_heads, head_dim)
        values[table[positions // PAGE], positions % PAGE] = v[rows].reshape(-1, kv_heads, head_dim)
        all_keys = keys[table].reshape(-1, kv_heads, head_dim)
        all_values = values[table].reshape(-1, kv_heads, head_dim)
        for row in range(rows.start, rows.stop):
            end = step.positions[row] + 1
            start = max(0, end - call.attrs["window"]) if call.attrs["window"] else 0
            heads = q[row].reshape(kv_heads, -1, head_dim)
            output[row] = _attend(heads, all_keys[start:end], all_values[start:end], call.attrs).reshape(-1)
    return output


def _attend(q: F32, k: F32, v: F32, attrs: dict[str, Any]) -> F32:
    """One row: q [kv_heads, group, head_dim] over k, v [visible, kv_heads, head_dim]."""
    scores = q @ k.transpose(1, 2, 0) * np.float32(attrs["scale"])
    if attrs["softcap"]:
        scores = _capped(scores, attrs["softcap"])
    chances = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: F32 = chances / chances.sum(axis=-1, keepdims=True)
    return shares @ v.transpose(1, 0, 2)


def _act_mul(call: Call, gate: F32, up: F32) -> F32:
    return ACTIVATIONS[call.attrs["act"]](gate) * up


def _silu(x: F32) -> F32:
    return _half_gate(x, x * np.float32(0.5))


def _gelu_tanh(x: F32) -> F32:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return _half_gate(x, inner)


def _half_gate(x: F32, inner: F32) -> F32:
    """x * sigmoid(2 * inner), in the form that cannot overflow."""
    gated: F32 = x * (np.float32(0.5) * (np.float32(1) + np.tanh(inner)))
    return gated


def _capped(x: F32, cap: float) -> F32:
    capped: F32 = np.tanh(x / np.float32(cap)) * np.float32(cap)
    return capped


def _add(call: Call, a: F32, b: F32) -> F32:
    return a + b


def _softcap(call: Call, x: F32) -> F32:
    return _capped(x, call.attrs["cap"])


def _sampled(call: Call, x: F32) -> F32:
    return x[call.step.sampling.rows]


ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh}
OPERATIONS: dict[str, Callable[..., F32]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "linear": _linear,
    "rope": _rope,
    "attention": _attention,
    "act_mul": _act_mul,
    "add": _add,
    "softcap": _softcap,
    "sampled": _sampled,
}
