"""Qwen2 and 2.5 (arXiv 2407.10671) put biases on q, k and v; Qwen3 (arXiv 2505.09388) q/k norms in their place."""

from __future__ import annotations

from tricorn.models.config import (
    MOST_LAYERS,
    MOST_TOKENS,
    Config,
    Shape,
    flag,
    integer,
    read_shape,
    require,
    sliding_layers,
)
from tricorn.models.decoder import pre_norm_decoder
from tricorn.models.graph import Graph


def qwen2(config: Config) -> Graph:
    require(config, "hidden_act", "silu", "swish")
    shape = read_shape(config)
    return pre_norm_decoder(config, shape, _windows(config, shape), qkv_bias=True)


def qwen3(config: Config) -> Graph:
    require(config, "hidden_act", "silu", "swish")
    shape = read_shape(config, head_dim=128)
    bias = flag(config, "attention_bias")
    windows = _windows(config, shape)
    return pre_norm_decoder(config, shape, windows, qkv_bias=bias, output_bias=bias, head_norms=True)


def _windows(config: Config, shape: Shape) -> list[int]:
    """If the config asks for windows at all, the first `max_window_layers` layers see everything, the rest a window."""
    if not flag(config, "use_sliding_window"):
        return [0] * shape.layers
    window = integer(config, "sliding_window", MOST_TOKENS, 4096)
    full = config.get("max_window_layers")
    full = full if full == 0 else integer(config, "max_window_layers", MOST_LAYERS, 28)
    sliding = sliding_layers(config, shape.layers, [layer >= full for layer in range(shape.layers)])
    return [window if slides else 0 for slides in sliding]
