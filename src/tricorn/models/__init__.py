"""Architectures: from a model's config.json to its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tricorn.models.gemma import gemma2, gemma3, gemma3_multimodal
from tricorn.models.graph import Graph, Node, Rope
from tricorn.models.llama import llama, mistral
from tricorn.models.qwen import qwen2, qwen3
from tricorn.models.weights import check_weights, weight_shapes
from tricorn.request import TricornError

__all__ = ["ARCHITECTURES", "Graph", "Node", "Rope", "build_graph", "check_weights", "weight_shapes"]

ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], Graph]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma3": gemma3_multimodal,
}


def build_graph(config: Mapping[str, Any]) -> Graph:
    """Writes down the model that a Hugging Face config.json describes. Raises TricornError on what cannot be built."""
    model_type = config.get("model_type")
    build = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if build is None:
        known = ", ".join(ARCHITECTURES)
        raise TricornError(f"the model's architecture {model_type!r} is not supported; known are {known}")
    return build(config)
