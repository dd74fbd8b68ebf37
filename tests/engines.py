"""Small engines for tests: random checkpoints of any architecture, with weights of any type, compiled and opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import checkpoints
from tricorn.compiler import EngineFile, build
from tricorn.models import build_graph
from tricorn.runtime.reference import ReferenceExecutor
from tricorn.weights.checkpoint import Checkpoint
from tricorn.weights.tensor import BLOCK, Tensor, from_float32

ARCHITECTURES = tuple(checkpoints.FAMILIES)
FLOATS = ("F32", "F16", "BF16")
INTEGERS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
TYPES = FLOATS + INTEGERS

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
"""Sizes in whole blocks of 256 columns, as the K-quants want them."""

_SCALE_AT = {"Q6_K": (208,)}
_OFFSET_AT = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def random_tensor(random: np.random.Generator, kind: str, rows: int, columns: int, deviation: float) -> Tensor:
    """A matrix of any type, of mean about 0 and this standard deviation. Integer types get random bits and scales."""
    if kind in FLOATS:
        return cast(random.normal(0, deviation, (rows, columns)).astype(np.float32), kind)
    values, size = BLOCK[kind]
    blocks = random.integers(0, 256, (rows * columns // values, size), np.uint8)
    scale = random.uniform(0.5, 1.5, len(blocks))
    zero = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}.get(kind)

    def with_scale(factor: float) -> Tensor:
        _put_half(blocks, _SCALE_AT.get(kind, (0,))[0], scale * factor)
        if zero is not None:
            _put_half(blocks, 2, scale * factor * zero)
        return Tensor(kind, (rows, columns), blocks.reshape(rows, -1))

    return with_scale(deviation / float(with_scale(2.0**-10).dequantize().std()) * 2.0**-10)


def cast(values: NDArray[np.float32], kind: str) -> Tensor:
    """A float tensor of another type; BF16 rounds to nearest."""
    if kind == "F32":
        return from_float32(values)
    if kind == "F16":
        raw = values.astype(np.float16).view(np.uint8)
    else:
        raw = (rounded_bf16(values).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return Tensor(kind, values.shape, raw)


def rounded_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """To the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: NDArray[np.float32] = ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return rounded


def _put_half(blocks: NDArray[np.uint8], at: int, values: NDArray[np.float64]) -> None:
    blocks[:, at : at + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)


def checkpoint(architecture: str, kinds: str | tuple[str, ...] = "F32", seed: int = 0, **overrides: Any) -> Checkpoint:
    """A random checkpoint whose matrices have the type `kinds`, or several types in turn; vectors are F32."""
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    sizes = WIDE if set(kinds) & set(INTEGERS) else {}
    config, weights = checkpoints.make(architecture, seed, **{**sizes, **overrides})
    random = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for index, (name, values) in enumerate(checkpoints.graph_weights(config, weights).items()):
        if not name.endswith("up_proj.weight"):  # gate and up share a kernel, so they keep to one type
            kind = kinds[index % len(kinds)]
        if values.ndim == 1:
            tensors[name] = from_float32(values)
        elif kind in FLOATS:
            tensors[name] = cast(values, kind)
        else:
            tensors[name] = random_tensor(random, kind, *values.shape, float(values.std()))
    return Checkpoint(
        name=f"{architecture}-{'-'.join(kinds)}",
        config=config,
        tensors=tensors,
        tokenizer=checkpoints.tokenizer().to_str(),
        chat_template=checkpoints.CHAT_TEMPLATE,
        bos_id=checkpoints.BOS_ID,
        eos_ids=(checkpoints.EOS_ID, checkpoints.IM_END_ID),
        add_bos=False,
        digest=f"{seed:064x}",
    )


def compiled(source: Checkpoint, folder: Path) -> EngineFile:
    """The engine file of a checkpoint, built into `folder` and opened."""
    path = folder / f"{source.name}-{len(list(folder.iterdir()))}.tricorn"
    build(source, path)
    return EngineFile.open(path)


def for_isa(engine: EngineFile, isa: str) -> EngineFile:
    """The same file as if compiled for another instruction set; the packing is the same for all."""
    copy = EngineFile.open(engine.path, check_body=False)
    copy.header = msgspec.structs.replace(copy.header, isa=isa)
    return copy


def reference(source: Checkpoint, pages: int = 0) -> ReferenceExecutor:
    weights = {name: tensor.dequantize() for name, tensor in source.tensors.items()}
    return ReferenceExecutor(build_graph(source.config), weights, pages=pages)
