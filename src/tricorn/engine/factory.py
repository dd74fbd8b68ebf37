"""From options to an executor that is ready to run, and what there is to know of it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import xxhash

from tricorn.cache.disk import open_tier
from tricorn.cache.keys import engine_id
from tricorn.engine.engine import Engine
from tricorn.engine.messages import EngineInfo
from tricorn.engine.options import EngineOptions, Sizes, derive
from tricorn.grammar.workers import Workers
from tricorn.models.graph import Graph
from tricorn.request import TricornError
from tricorn.runtime.step import PAGE, Executor, page_bytes
from tricorn.scheduler.limits import Limits
from tricorn.weights.tokenizer import undecodable_ids

CONSTRAINED = 1024
"""Requests with a constraint that may wait and run at the same time."""


class Opened(NamedTuple):
    """A model that is open: its executor, what there is to know of it, and its tokenizer's JSON ("": it has none)."""

    executor: Executor
    info: EngineInfo
    tokenizer: str = ""


def open_engine(options: EngineOptions, opened: Opened | None = None) -> tuple[Engine, EngineInfo]:
    """An engine over a model, opened if it is not yet, with the disk tier if there is to be one. Raises TricornError
    like open_executor."""
    executor, info, tokenizer = opened or open_executor(options)
    id = b"" if options.kv_disk is None else _engine_id(options)
    tier = options.kv_disk and open_tier(Path(options.kv_disk), id, executor.page_bytes, options.kv_disk_bytes)
    limits = info.limits
    workers = Workers(tokenizer, limits.vocab, limits.eos_ids, slots=CONSTRAINED) if tokenizer else None
    engine = Engine(
        executor,
        limits,
        options.scheduler,
        debug=options.debug_checks,
        tier=tier or None,
        engine_id=id,
        workers=workers,
    )
    return engine, info


def _engine_id(options: EngineOptions) -> bytes:
    """Names everything that the bytes of a page depend on beside its tokens: the engine file (whose first 64 bytes hold
    the checksums of all of it), the type of the cache, and the code of the kernels."""
    from tricorn import _native

    path = Path(options.path)
    if not path.is_file():
        raise TricornError(f"the disk tier needs an engine file, {path} is none: see `tricorn build`")
    with path.open("rb") as file:
        checksums = file.read(64)
    kernels = xxhash.xxh3_128_hexdigest(Path(_native.__file__).read_bytes())
    return engine_id(file=checksums.hex(), executor=options.executor, kv_type=options.kv_type, kernels=kernels)


def open_executor(options: EngineOptions) -> Opened:
    """Opens the model and makes its executor. Raises TricornError when it cannot be opened, or the options cannot
    work."""
    if options.executor == "reference":
        return _reference(options)
    return _native(options)


def _native(options: EngineOptions) -> Opened:
    from tricorn.compiler.engine_file import EngineFile
    from tricorn.runtime import native

    file = EngineFile.open(Path(options.path))
    size = native.page_bytes(file, options.kv_type)
    sizes = derive(options, size, file.graph.context)
    executor = native.NativeExecutor(
        file,
        threads=sizes.threads,
        pages=sizes.pages,
        kv_type=options.kv_type,
        max_tokens=sizes.max_tokens,
        max_rows=sizes.max_rows,
    )
    info = _info(options, sizes, file.graph, file.name, file.eos_ids, file.tokenizer, size)
    return Opened(executor, info, file.tokenizer)


def _reference(options: EngineOptions) -> Opened:
    """From an engine file, whose packed weights it unpacks, or straight from a model's own file or folder."""
    from tricorn.compiler.engine_file import SUFFIX, EngineFile
    from tricorn.models import build_graph
    from tricorn.runtime.reference import ReferenceExecutor
    from tricorn.weights.checkpoint import load

    if options.path.endswith(SUFFIX):
        file = EngineFile.open(Path(options.path))
        graph, weights, name, eos_ids, tokenizer = file.graph, file.weights(), file.name, file.eos_ids, file.tokenizer
    else:
        checkpoint = load(Path(options.path))
        graph, name, eos_ids = build_graph(checkpoint.config), checkpoint.name, checkpoint.eos_ids
        tokenizer = checkpoint.tokenizer
        weights = {key: tensor.dequantize() for key, tensor in checkpoint.tensors.items()}
    size = page_bytes(graph, 4)
    sizes = derive(options, size, graph.context)
    executor = ReferenceExecutor(
        graph, weights, pages=sizes.pages, max_tokens=sizes.max_tokens, max_rows=sizes.max_rows
    )
    return Opened(executor, _info(options, sizes, graph, name, eos_ids, tokenizer, size), tokenizer)


def _info(
    options: EngineOptions,
    sizes: Sizes,
    graph: Graph,
    name: str,
    eos_ids: tuple[int, ...],
    tokenizer: str,
    page_bytes: int,
) -> EngineInfo:
    limits = Limits(
        context=sizes.context,
        vocab=graph.vocab,
        max_sequences=sizes.max_sequences,
        max_tokens=sizes.max_tokens,
        max_rows=sizes.max_rows,
        eos_ids=eos_ids,
        undecodable=undecodable_ids(tokenizer, graph.vocab),
    )
    return EngineInfo(
        model=name,
        limits=limits,
        pages=sizes.pages,
        page_size=PAGE,
        page_bytes=page_bytes,
        executor=options.executor,
        threads=sizes.threads,
    )
