"""Tricorn: a serving engine for large language models.

    from tricorn import LLM, Constraint, SamplingParams

All are imported when first used, so that `import tricorn` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tricorn.llm import LLM
    from tricorn.request import Constraint, SamplingParams, TricornError

__version__ = "0.1.0"
__all__ = ["LLM", "Constraint", "SamplingParams", "TricornError"]

_HOMES = {"LLM": "tricorn.llm", **dict.fromkeys(("Constraint", "SamplingParams", "TricornError"), "tricorn.request")}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tricorn' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
