"""Reads numbers out of a model's config.json, whose keys are those of Hugging Face's, and refuses what cannot be.

A file is a stranger's: each number is bounded, so that nothing later divides by zero or allocates without end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tricorn.request import TricornError

Config = Mapping[str, Any]

MOST_LAYERS = 1024
MOST_COLUMNS = 1 << 20
MOST_TOKENS = 1 << 24


def integer(config: Config, key: str, most: int, default: int | None = None) -> int:
    """The whole number from 1 to `most` under `key`; null counts as absent. Raises TricornError."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise TricornError(f"the model's config has no {key!r}; is config.json complete?")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise TricornError(f"the model's config has {key} = {value!r}; it must be a whole number from 1 to {most}")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """The positive number under `key`, of a size that float32 can hold; null counts as absent. Raises TricornError."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise TricornError(f"the model's config has no {key!r}; is config.json complete?")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 < value < 1e30:
        raise TricornError(f"the model's config has {key} = {value!r}; it must be a positive number")
    return float(value)


def flag(config: Config, key: str, default: bool = False) -> bool:
    """The truth value under `key`; null counts as absent. Raises TricornError."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise TricornError(f"the model's config has {key} = {value!r}; it must be true or false")
    return value


def softcap(config: Config, key: str, default: float = 0.0) -> float:
    """The cap under `key`; here null is a value of its own and means no cap (0)."""
    if key not in config:
        return default
    return 0.0 if config[key] is None else number(config, key)


def require(config: Config, key: str, *known: str) -> None:
    """Refuses a config whose `key` is none of the `known` (the first is the default)."""
    value = config.get(key)
    if value is not None and value not in known:
        raise TricornError(f"the model's config has {key} = {value!r}; this architecture goes with {known[0]!r} only")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes every decoder has: `hidden` and `intermediate` in columns, `context` in tokens; `eps` is the norms'."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float
    tied: bool


def read_shape(config: Config, *, tied: bool = False, head_dim: int | None = None) -> Shape:
    """Reads the shape; `tied` and `head_dim` are the family's own where the config is silent. Raises TricornError."""
    hidden = integer(config, "hidden_size", MOST_COLUMNS)
    heads = integer(config, "num_attention_heads", 1024)
    kv_heads = integer(config, "num_key_value_heads", 1024, heads)
    head_dim = integer(config, "head_dim", 1024, head_dim or max(1, hidden // heads))
    if heads % kv_heads:
        raise TricornError(
            f"the model's config has {heads} attention heads over {kv_heads} key/value heads: no multiple"
        )
    if head_dim % 2:
        raise TricornError(f"the model's config has head_dim = {head_dim}; rotary positions need an even number")
    return Shape(
        layers=integer(config, "num_hidden_layers", MOST_LAYERS),
        hidden=hidden,
        intermediate=integer(config, "intermediate_size", MOST_COLUMNS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=integer(config, "vocab_size", MOST_TOKENS),
        context=integer(config, "max_position_embeddings", MOST_TOKENS),
        eps=number(config, "rms_norm_eps", 1e-6),
        tied=flag(config, "tie_word_embeddings", tied),
    )


def sliding_layers(config: Config, layers: int, default: list[bool]) -> list[bool]:
    """Which layers see a sliding window: as `layer_types` says, else `default`. Raises TricornError."""
    types = config.get("layer_types")
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != layers:
        raise TricornError(f"the model's config has layer_types that do not name each of its {layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise TricornError(f"the model's config has a layer of the unknown type {kind!r}")
    return [kind == "sliding_attention" for kind in types]
