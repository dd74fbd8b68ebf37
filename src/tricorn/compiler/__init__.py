"""The compiler: a checkpoint becomes an engine file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tricorn.compiler import engine_file
from tricorn.compiler.engine_file import SUFFIX, VERSION, EngineFile, Header, TensorEntry
from tricorn.compiler.pack import Packed, pack_matrix, pack_vector
from tricorn.compiler.passes import compile_graph
from tricorn.compiler.plan import Plan
from tricorn.models import build_graph, check_weights
from tricorn.request import TricornError
from tricorn.weights import hub
from tricorn.weights.checkpoint import Checkpoint, load
from tricorn.weights.tensor import Tensor, from_float32

Progress = Callable[[str, int, int], None]
"""Told after each tensor: its name, bytes done, bytes in all."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a build made: sizes in bytes, operations of the graph and of the plan, and the peak of buffers for 512
    tokens and 64 rows."""

    path: Path
    source_bytes: int
    engine_bytes: int
    graph_operations: int
    plan_operations: int
    peak_buffers: int


def instruction_set() -> str:
    """The best instruction set of this processor, or the one that TRICORN_ISA names. Raises TricornError when it
    cannot run here."""
    from tricorn import _native

    available: list[str] = _native.instruction_sets()
    wanted = os.environ.get("TRICORN_ISA", available[0])
    if wanted not in available:
        raise TricornError(f"TRICORN_ISA={wanted}: this processor runs {', '.join(available)}")
    return wanted


def build(checkpoint: Checkpoint, path: Path, progress: Progress | None = None) -> Summary:
    """Compiles a checkpoint into an engine file. Raises TricornError, leaving nothing behind, when it cannot."""
    graph = build_graph(checkpoint.config)
    check_weights(graph, checkpoint.tensors)
    used = {weight for node in graph.nodes for weight in node.weights}
    types = {name: checkpoint.tensors[name].type for name in used}
    plan = compile_graph(graph, types)

    sources = _sources(plan, checkpoint)
    sizes = [tensor.data.nbytes for _, tensor in sources]
    total = sum(sizes)

    def packed() -> Iterator[tuple[str, Packed]]:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            done = 0
            for (name, _), size, result in zip(sources, sizes, threads.map(lambda s: _pack(*s), sources), strict=True):
                done += size
                if progress:
                    progress(name, done, total)
                yield name, result

    tensors = list(packed())
    header = Header(
        name=checkpoint.name,
        digest=checkpoint.digest,
        isa=instruction_set(),
        architecture=str(checkpoint.config["model_type"]),
        source_bytes=total,
        tokenizer=checkpoint.tokenizer,
        chat_template=checkpoint.chat_template,
        bos_id=checkpoint.bos_id,
        eos_ids=checkpoint.eos_ids,
        add_bos=checkpoint.add_bos,
        graph=graph,
        plan=plan,
        tensors=tuple(engine_file.layout(tensors)),
    )
    size = engine_file.write(path, header, (p for _, p in tensors))
    return Summary(path, total, size, len(graph.nodes), len(plan.ops) + 1, peak_buffers(plan))


def _sources(plan: Plan, checkpoint: Checkpoint) -> list[tuple[str, Tensor]]:
    """The tensors of the plan, in the order in which a step reads them."""
    names: dict[str, Tensor] = {plan.embedding: checkpoint.tensors[plan.embedding]}
    for op in plan.ops:
        for name in (*(s.weight for s in op.segments), op.weight, op.bias, op.q_norm, op.k_norm):
            if name is not None and name not in names:
                names[name] = (
                    checkpoint.tensors[name] if name in checkpoint.tensors else _joined(name, plan, checkpoint)
                )
    return list(names.items())


def _joined(name: str, plan: Plan, checkpoint: Checkpoint) -> Tensor:
    """The bias of a merged product: those of its parts, zeros where a part has none."""
    parts = [(segment.column, segment.weight) for op in plan.ops if op.bias == name for segment in op.segments]
    values = []
    for _, weight in sorted(parts):
        rows = checkpoint.tensors[weight].shape[0]
        bias = weight.removesuffix(".weight") + ".bias"
        values.append(
            checkpoint.tensors[bias].dequantize() if bias in checkpoint.tensors else np.zeros(rows, np.float32)
        )
    return from_float32(np.concatenate(values))


def _pack(name: str, tensor: Tensor) -> Packed:
    return pack_vector(tensor) if len(tensor.shape) == 1 else pack_matrix(name, tensor)


def peak_buffers(plan: Plan, tokens: int = 512, rows: int = 64) -> int:
    """Bytes of all buffers of a plan for steps of so many tokens and sampled rows."""
    slots: dict[int, int] = {}
    for buffer in plan.buffers:
        per_value = {"rows": 4.0, "f32": 4.0, "bf16": 2.0, "q8": 2.0}[buffer.kind]
        size = int(buffer.columns * per_value) * (rows if buffer.sampled else tokens)
        slots[buffer.slot] = max(slots.get(buffer.slot, 0), size)
    return sum(slots.values())


def engine_path(model: str, checkpoint: Checkpoint) -> Path:
    """Where the cache keeps the engine file of a model for this machine."""
    name = model if model in hub.BUILTIN else checkpoint.name
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    return hub.cache_dir() / "engines" / f"{safe}-{checkpoint.digest[:12]}-{instruction_set()}-{VERSION}{SUFFIX}"


def ensure(model: str, progress: bool = True) -> Path:
    """The engine file of a model: an alias, hub id, folder, .gguf file, or an engine file itself. Builds it into the
    cache when missing."""
    from tricorn.compiler.report import build_with_progress

    source = hub.resolve(model, progress)
    if source.suffix == SUFFIX:
        return source
    checkpoint = load(source)
    path = engine_path(model, checkpoint)
    if not engine_file.is_whole(path):
        build_with_progress(checkpoint, path, quiet=not progress)
    return path


__all__ = [
    "EngineFile",
    "Header",
    "Summary",
    "TensorEntry",
    "build",
    "engine_path",
    "ensure",
    "instruction_set",
    "peak_buffers",
]
