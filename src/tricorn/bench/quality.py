"""How near the native executor comes to the float32 reference, on shipped English and code text."""

from __future__ import annotations

import heapq
import inspect
import os
import textwrap
from pydoc_data import topics

import msgspec
import numpy as np
import tokenizers
from numpy.typing import NDArray

from tricorn.compiler import ensure
from tricorn.compiler.engine_file import EngineFile
from tricorn.runtime.native import NativeExecutor
from tricorn.runtime.reference import ReferenceExecutor
from tricorn.runtime.step import PAGE

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

WINDOW = 250
"""Tokens of text in one sequence."""


class Quality(msgspec.Struct, frozen=True):
    """Over `positions` positions: mean KL divergence from the reference in nats, share of equal best tokens,
    perplexities."""

    model: str
    positions: int
    kl: float
    top1: float
    perplexity: float
    reference_perplexity: float


def measure(model: str, positions: int = 2000, kv_type: str = "f16") -> Quality:
    """Runs both executors over the same text, half English, half code. The reference takes seconds to minutes."""
    file = EngineFile.open(ensure(model))
    native = NativeExecutor(file, threads=len(os.sched_getaffinity(0)), pages=-(-WINDOW // PAGE), kv_type=kv_type)
    reference = ReferenceExecutor(file.graph, file.weights(), pages=1)
    sums = np.zeros(4)
    count = 0
    for window in text_windows(file, positions):
        sums += compare(native.forward(window), reference.forward(window), window)
        count += len(window) - 1
    native.close()
    kl, top1, nll, reference_nll = sums / count
    return Quality(model, count, float(kl), float(top1), float(np.exp(nll)), float(np.exp(reference_nll)))


def text_windows(file: EngineFile, positions: int) -> list[list[int]]:
    """Windows of ids of real text: half from Python's own manual, half from its standard library."""
    tokenizer = tokenizers.Tokenizer.from_str(file.tokenizer)
    manual = "\n".join(topics.topics[name] for name in ("objects", "exceptions", "execmodel", "import", "with"))
    sources = "\n".join(inspect.getsource(module) for module in (heapq, textwrap))
    start = [file.bos_id] if file.add_bos and file.bos_id is not None else []
    size = WINDOW - len(start)
    windows = []
    for text in (manual, sources):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        windows += [start + ids[at : at + size] for at in range(0, min(positions // 2, len(ids)), size)]
    return windows


def compare(ours: F32, theirs: F32, ids: list[int]) -> F64:
    """Sums over the positions that predict a token of `ids`: KL(theirs || ours), equal best tokens, -log p of ours
    and of theirs."""
    targets = np.array(ids[1:])
    at = np.arange(len(targets))
    own, reference = _log_softmax(ours[:-1]), _log_softmax(theirs[:-1])
    kl = (np.exp(reference) * (reference - own)).sum(dtype=np.float64)
    best = np.count_nonzero(own.argmax(axis=1) == reference.argmax(axis=1))
    return np.array([kl, best, -own[at, targets].sum(dtype=np.float64), -reference[at, targets].sum(dtype=np.float64)])


def _log_softmax(logits: F32) -> F32:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)), np.float32)
