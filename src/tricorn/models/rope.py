"""Rotary positions: from the rope entries of a config.json to the frequency of each pair.

The formulas: RoFormer (arXiv 2104.09864); linear position interpolation (arXiv 2306.15595); YaRN (arXiv 2309.00071);
"llama3" as Meta released it with Llama 3.1. The keys are those of Hugging Face's configs, of which there are two forms:
`rope_theta` beside `rope_scaling`, and the newer `rope_parameters`, which holds both and may differ per layer type.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tricorn.models.config import MOST_TOKENS, Config, integer, number
from tricorn.models.graph import Rope
from tricorn.request import TricornError

F64 = NDArray[np.float64]


def rope_entries(config: Config, layer_type: str | None = None, theta: float = 10000.0) -> dict[str, Any]:
    """The rope entries of either form as one dict that has `rope_theta` (`theta` where the config is silent)."""
    newer = config.get("rope_parameters")
    entries = newer if newer is not None else config.get("rope_scaling")
    if isinstance(newer, dict) and layer_type in newer:
        entries = newer[layer_type]
    entries = {} if entries is None else entries
    if not isinstance(entries, dict):
        raise TricornError(f"the model's config has rope entries {entries!r}; they must be an object")
    return {**entries, "rope_theta": number(entries, "rope_theta", number(config, "rope_theta", theta))}


def make_rope(config: Config, head_dim: int, entries: dict[str, Any]) -> Rope:
    """The angles for heads of `head_dim` columns. Raises TricornError on an unknown rope type or impossible numbers."""
    if number({**config, **entries}, "partial_rotary_factor", 1.0) != 1.0:
        raise TricornError("the model rotates only a part of each head (partial_rotary_factor), which is not supported")
    kind = entries.get("rope_type") or entries.get("type") or "default"
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise TricornError(f"the model's rope type {kind!r} is not supported; known are {', '.join(SCALINGS)}")
    original = {"original_max_position_embeddings": config.get("max_position_embeddings")}
    frequencies = number(entries, "rope_theta") ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    frequencies, factor = SCALINGS[kind](frequencies, original | entries)
    frequencies = frequencies / _frequency_factors(config, head_dim // 2)
    if not frequencies.max() < 1e30:
        raise TricornError("the model's rope entries give frequencies beyond what float32 can hold")
    return Rope(inv_freq=tuple(float(f) for f in frequencies.astype(np.float32)), factor=factor)


def stretched_context(context: int, entries: dict[str, Any]) -> int:
    """Configs give the context after scaling, save those with YaRN, where it may be the one before."""
    if (entries.get("rope_type") or entries.get("type")) != "yarn":
        return context
    original = integer(entries, "original_max_position_embeddings", MOST_TOKENS, context)
    return max(context, int(min(MOST_TOKENS, original * number(entries, "factor"))))


def _frequency_factors(config: Config, pairs: int) -> F64:
    """`rope_freq_factors`: divisors that a GGUF file carries, one for each pair, in place of a rope type."""
    factors = config.get("rope_freq_factors")
    if factors is None:
        return np.ones(pairs)
    if not isinstance(factors, list) or len(factors) != pairs:
        raise TricornError(f"the model's rope_freq_factors must be {pairs} positive numbers")
    return np.array([number({"rope_freq_factors": factor}, "rope_freq_factors") for factor in factors])


def _default(frequencies: F64, entries: dict[str, Any]) -> tuple[F64, float]:
    return frequencies, 1.0


def _linear(frequencies: F64, entries: dict[str, Any]) -> tuple[F64, float]:
    return frequencies / number(entries, "factor"), 1.0


def _llama3(frequencies: F64, entries: dict[str, Any]) -> tuple[F64, float]:
    """Short waves stay, long waves are stretched by the factor, those between go smoothly from one to the other."""
    factor = number(entries, "factor")
    low, high = number(entries, "low_freq_factor"), number(entries, "high_freq_factor")
    if high <= low:
        raise TricornError("the model's config has rope high_freq_factor at or below low_freq_factor")
    turns = number(entries, "original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / factor), 1.0


def _yarn(frequencies: F64, entries: dict[str, Any]) -> tuple[F64, float]:
    """Pairs up to `low` keep their frequency, those from `high` on are interpolated, with a ramp between."""
    original, theta = number(entries, "original_max_position_embeddings"), number(entries, "rope_theta")
    factor, pairs = number(entries, "factor"), len(frequencies)
    if theta <= 1:
        raise TricornError(f"the model's config has rope_theta = {theta!r}; YaRN needs more than 1")

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(original / (times * 2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(number(entries, "beta_fast", 32.0)), pair_that_turns(number(entries, "beta_slow", 1.0))
    if entries.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = np.clip((np.arange(pairs) - low) / (high - low or 0.001), 0, 1)
    return frequencies * (1 - ramp + ramp / factor), _yarn_attention_factor(factor, entries)


def _yarn_attention_factor(factor: float, entries: dict[str, Any]) -> float:
    if entries.get("attention_factor") is not None:
        return number(entries, "attention_factor")

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if entries.get("mscale") and entries.get("mscale_all_dim"):
        return magnitude(number(entries, "mscale")) / magnitude(number(entries, "mscale_all_dim"))
    return magnitude(1.0)


SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
