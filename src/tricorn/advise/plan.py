"""`tricorn plan`: what a model takes of memory, for as many sequences of a length, here or on machines not at hand."""

from __future__ import annotations

import difflib
import json
from importlib.resources import files
from pathlib import Path

import msgspec

from tricorn.compiler.engine_file import SUFFIX, EngineFile
from tricorn.models import build_graph
from tricorn.models.graph import Graph
from tricorn.request import TricornError
from tricorn.runtime.step import PAGE, kv_token_bytes
from tricorn.weights.checkpoint import load
from tricorn.weights.hub import BUILTIN, is_pulled, model_path

VALUE_BYTES = {"f16": 2, "bf16": 2, "f32": 4}


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What counts of a model. `weight_bytes` is as it lies on disk, or 2 for each of its parameters; None where only a
    configuration is known."""

    layers: int
    kv_heads: int
    head_dim: int
    context: int
    weight_bytes: int | None = None


class _Known(msgspec.Struct, frozen=True):
    layers: int
    kv_heads: int
    head_dim: int
    context: int
    parameters: int


KNOWN: dict[str, _Known] = msgspec.json.decode(
    files("tricorn.advise").joinpath("shapes.json").read_bytes(), type=dict[str, _Known]
)
"""Models that are planned for more often than run here, from their published configurations."""


def shape_of(model: str) -> Shape:
    """Of a name in `KNOWN`, a built-in model that is pulled, an engine file, a .gguf file, a folder, or a config.json.
    Raises TricornError."""
    name = model.lower().rpartition("/")[2].removesuffix("-instruct")
    if name in KNOWN:
        known = KNOWN[name]
        return Shape(
            layers=known.layers,
            kv_heads=known.kv_heads,
            head_dim=known.head_dim,
            context=known.context,
            weight_bytes=2 * known.parameters,
        )
    path = model_path(model) if model in BUILTIN else Path(model)
    if model in BUILTIN and not is_pulled(model):
        raise TricornError(f"{model} is not here: run `tricorn pull {model}`")
    if path.suffix == SUFFIX:
        return _from(EngineFile.open(path, check_body=False).graph, path.stat().st_size)
    if path.suffix == ".json" and path.is_file():
        try:
            return _from(build_graph(json.loads(path.read_bytes())), None)
        except ValueError as error:
            raise TricornError(f"{path} is no config.json: {error}") from None
    if path.exists():
        checkpoint = load(path)
        return _from(build_graph(checkpoint.config), sum(tensor.data.nbytes for tensor in checkpoint.tensors.values()))
    names = [*BUILTIN, *KNOWN]
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}, files, and any config.json"
    raise TricornError(f"there is no model {model!r}: {hint}")


def _from(graph: Graph, weight_bytes: int | None) -> Shape:
    return Shape(
        layers=graph.layers,
        kv_heads=graph.kv_heads,
        head_dim=graph.head_dim,
        context=graph.context,
        weight_bytes=weight_bytes,
    )


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, all of them. `sequence_bytes` is one sequence of `context` tokens, in whole pages; `fits` is how many of
    those the memory holds beside the weights, None without a memory."""

    model: str
    kv_type: str
    context: int
    concurrency: int
    kv_token_bytes: int
    page_bytes: int
    pages: int
    sequence_bytes: int
    kv_bytes: int
    weight_bytes: int | None
    total_bytes: int | None
    memory_bytes: int | None
    fits: int | None


def plan(model: str, context: int | None, concurrency: int, kv_type: str, memory: int | None) -> Plan:
    """For `concurrency` sequences of `context` tokens (None: as many as the model was made for), in a memory of so
    many bytes in all. Raises TricornError."""
    shape = shape_of(model)
    tokens = shape.context if context is None else context
    if tokens > shape.context:
        raise TricornError(f"{model} was made for {shape.context} tokens, {tokens} are more")
    token = kv_token_bytes(shape, VALUE_BYTES[kv_type])
    pages = -(-tokens // PAGE)
    sequence = pages * PAGE * token
    weights = shape.weight_bytes
    return Plan(
        model=model,
        kv_type=kv_type,
        context=tokens,
        concurrency=concurrency,
        kv_token_bytes=token,
        page_bytes=PAGE * token,
        pages=concurrency * pages,
        sequence_bytes=sequence,
        kv_bytes=concurrency * sequence,
        weight_bytes=weights,
        total_bytes=None if weights is None else weights + concurrency * sequence,
        memory_bytes=memory,
        fits=None if memory is None else max(0, (memory - (weights or 0)) // sequence),
    )


def told(plan: Plan) -> str:
    """For people: both units, so that none is taken for the other."""
    sequences = f"{plan.concurrency} sequences" if plan.concurrency > 1 else "1 sequence"
    lines = [
        ("KV cache of a token", f"{plan.kv_token_bytes:,} bytes ({plan.kv_type})"),
        (f"of {plan.context:,} tokens", units(plan.sequence_bytes)),
        (f"of {sequences}", f"{units(plan.kv_bytes)}, {plan.pages:,} pages of {PAGE} tokens"),
    ]
    if plan.weight_bytes is not None:
        lines.append(("weights", units(plan.weight_bytes)))
        lines.append(("together", units(plan.weight_bytes + plan.kv_bytes)))
    if plan.memory_bytes is not None and plan.fits is not None:
        enough = "enough" if plan.fits >= plan.concurrency else f"not enough for {plan.concurrency}"
        beside = "" if plan.weight_bytes is None else " beside the weights"
        lines.append(("memory", units(plan.memory_bytes)))
        lines.append(("sequences that fit", f"{plan.fits}{beside}: {enough}"))
    return "\n".join(f"{label:24} {value}" for label, value in lines)


def units(count: int) -> str:
    """Powers of ten, and powers of two."""
    for power, decimal, binary in ((3, "GB", "GiB"), (2, "MB", "MiB")):
        if count >= 10 ** (3 * power):
            return f"{count / 10 ** (3 * power):.2f} {decimal} = {count / 2 ** (10 * power):.2f} {binary}"
    return f"{count / 1000:.1f} kB = {count / 1024:.1f} KiB"
