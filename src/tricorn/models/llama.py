"""Llama 1 to 3 (arXiv 2302.13971, 2407.21783) and Mistral (arXiv 2310.06825), which adds a sliding window."""

from __future__ import annotations

from tricorn.models.config import MOST_TOKENS, Config, flag, integer, read_shape, require
from tricorn.models.decoder import pre_norm_decoder
from tricorn.models.graph import Graph


def llama(config: Config) -> Graph:
    require(config, "hidden_act", "silu", "swish")
    shape = read_shape(config)
    bias = flag(config, "attention_bias")
    return pre_norm_decoder(config, shape, [0] * shape.layers, qkv_bias=bias, output_bias=bias)


def mistral(config: Config) -> Graph:
    """A config that says null has no window; one that is silent has Mistral's first, of 4096."""
    require(config, "hidden_act", "silu", "swish")
    shape = read_shape(config)
    silent = "sliding_window" not in config
    windowed = silent or config["sliding_window"] is not None
    window = integer(config, "sliding_window", MOST_TOKENS, 4096) if windowed else 0
    return pre_norm_decoder(config, shape, [window] * shape.layers)
