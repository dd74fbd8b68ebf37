"""Checks that a checkpoint holds exactly what a graph asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from tricorn.models.graph import Graph, Node
from tricorn.request import TricornError


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def weight_shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of the graph, row-major: matrices are (output columns, input columns)."""
    width: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for node in graph.nodes:
        entering = width[node.inputs[0]] if node.inputs else 0
        shapes.update(zip(node.weights, _shapes(node, graph, entering), strict=False))
        width[node.output] = _columns(node, entering)
    return shapes


def check_weights(graph: Graph, tensors: Mapping[str, Shaped]) -> None:
    """Raises TricornError, naming the tensor, when one is missing, has another shape, or is known to no node.

    Two kinds of extra tensors are harmless and pass: rotary frequencies that old checkpoints stored, and a copy of the
    embedding under the head's name where the head is tied.
    """
    shapes = weight_shapes(graph)
    for name, shape in shapes.items():
        if name not in tensors:
            raise TricornError(f"the model lacks the tensor {name!r}; is the download complete?")
        if tuple(tensors[name].shape) != shape:
            found = tuple(tensors[name].shape)
            raise TricornError(f"the tensor {name!r} has the shape {found}, but the model's config asks for {shape}")
    strange = [name for name in _unknown(shapes, tensors) if not _harmless(name)]
    if strange:
        raise TricornError(
            f"the model has the tensor {strange[0]!r} ({len(strange)} such), which its architecture does not know"
        )


def _shapes(node: Node, graph: Graph, entering: int) -> tuple[tuple[int, ...], ...]:
    if node.op == "embed":
        return ((graph.vocab, node.attrs["columns"]),)
    if node.op == "linear":
        return (node.attrs["columns"], entering), (node.attrs["columns"],)
    return ((entering // (node.attrs.get("heads") or 1),),)


def _columns(node: Node, entering: int) -> int:
    if node.op == "attention":
        return int(node.attrs["heads"] * node.attrs["head_dim"])
    return int(node.attrs.get("columns", entering))


def _unknown(shapes: Mapping[str, object], tensors: Iterable[str]) -> list[str]:
    return [name for name in tensors if name not in shapes]


def _harmless(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"
