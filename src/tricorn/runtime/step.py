"""The step: one batch for an executor, as flat arrays, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]
U8 = NDArray[np.uint8]

PAGE = 16
"""Tokens in a page of the KV cache."""


class KvShape(Protocol):
    """What the size of a KV cache depends on: a graph has it, and so does what is known of a model elsewhere."""

    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def kv_token_bytes(shape: KvShape, value_bytes: int) -> int:
    """What a token takes: its keys and values of all layers."""
    return shape.layers * 2 * shape.kv_heads * shape.head_dim * value_bytes


def page_bytes(shape: KvShape, value_bytes: int) -> int:
    """What a page takes."""
    return kv_token_bytes(shape, value_bytes) * PAGE


def _i32(*shape: int) -> I32:
    return np.zeros(shape, np.int32)


@dataclass(slots=True)
class Sampling:
    """How each of the R sampled rows chooses its token. All arrays have length R unless said otherwise.

    `target` >= 0 reports the logprob of that given id instead of sampling (scoring a prompt). The random number of a
    row depends on
    (`seed`, `position`) alone, `position` being the position the new token will take. `bias_*` adds to logits (-inf
    bans), in CSR form:
    the entries of row r are bias_start[r]:bias_start[r+1]. `history_*`, likewise, lists the ids that penalties look
    at: the first
    `history_prompt[r]` of a row's are prompt, the rest output; rows without penalties have none. A negative id -1-j in
    the history means "the id sampled by row j of the previous step". `mask` holds allowed ids as bits (uint32 words,
    [M, ceil(V/32)]),
    `mask_index[r]` is the row's line in it or -1.
    """

    rows: I32
    target: I32
    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    repetition: F32
    presence: F32
    frequency: F32
    seed: U64
    position: I32
    logprobs: I32
    """How many alternatives to report; -1: no logprob at all."""
    bias_start: I32
    bias_ids: I32
    bias_values: F32
    history_start: I32
    history_ids: I32
    history_prompt: I32
    mask_index: I32
    mask: NDArray[np.uint32]
    masks_follow: bool = False
    """The masks are not known yet: `Handle.put_masks` brings them while the step runs."""


@dataclass(slots=True)
class Step:
    """One batch: S sequences, T token rows. The rows of a sequence are contiguous and in order of position.

    token_ids  [T]  the ids to run; -1-j stands for "the id sampled by row j of the previous step" (not known yet in
    Python)
    positions  [T]  their positions
    row_start  [S+1] rows of sequence s: row_start[s]:row_start[s+1]
    page_start [S+1] its page table: pages[page_start[s]:page_start[s+1]], covering positions 0 .. last
    pages      [P]  page ids
    copies     [C, 2] whole pages to copy (from, to) before anything else runs
    hidden     [H]  token rows whose last hidden state is wanted, after the model's last norm, in any order
    `sampling.rows` [R] names the rows whose logits are wanted, in ascending order.
    """

    token_ids: I32
    positions: I32
    row_start: I32
    page_start: I32
    pages: I32
    sampling: Sampling
    copies: I32 = field(default_factory=lambda: _i32(0, 2))
    hidden: I32 = field(default_factory=lambda: _i32(0))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, per sampled row: `ids` [R] (the target itself for scored rows), `logprob` [R], `rank` [R]
    (1 = best),
    and the `top_ids`, `top_logprobs` [R, N], N the most that any row asked for (unused places: -1 and -inf). `hidden`
    [H, width] are the hidden states."""

    ids: I32
    logprob: F32
    rank: I32
    top_ids: I32
    top_logprobs: F32
    hidden: F32 = field(default_factory=lambda: np.zeros((0, 0), np.float32))


class Handle(Protocol):
    """A step under way."""

    def put_masks(self, index: I32, mask: NDArray[np.uint32]) -> None:
        """Hands over `mask_index` and `mask` of a step that was submitted with `masks_follow`, once: without them it
        never ends."""
        ...

    def result(self) -> StepResult:
        """Waits for the step to end. Raises TricornError when it failed."""
        ...


class Executor(Protocol):
    """Runs steps in the order they are submitted; `submit` returns at once. `pages` is the size of its KV pool.

    Pages may be read and written while steps run, from any thread: read if no step under way writes them, written if
    none names them.
    """

    pages: int
    page_bytes: int
    vocab: int
    max_tokens: int
    """The most token rows in a step."""
    max_rows: int
    """The most sampled rows in a step."""

    def submit(self, step: Step) -> Handle: ...

    def read_page(self, page: int) -> U8:
        """A copy of all that a page holds [page_bytes], for `write_page` of the same kind of executor."""
        ...

    def write_page(self, page: int, data: U8) -> None:
        """Puts back what `read_page` gave, into any page. Raises TricornError when it has another length."""
        ...

    def close(self) -> None: ...
