"""Gemma 2 (arXiv 2408.00118) and the text part of Gemma 3 (arXiv 2503.19786).

Both scale the embeddings, norm each part at its entry and at its exit, and let most layers see a sliding window only.
Gemma 2 caps its scores and logits; Gemma 3 norms queries and keys instead, and its window layers have their own rope.
"""

from __future__ import annotations

from typing import Any

from tricorn.models.config import (
    MOST_LAYERS,
    MOST_TOKENS,
    Config,
    flag,
    integer,
    number,
    read_shape,
    require,
    sliding_layers,
    softcap,
)
from tricorn.models.decoder import Writer
from tricorn.models.graph import Graph
from tricorn.models.rope import make_rope, rope_entries
from tricorn.request import TricornError

FULL, SLIDING = "full_attention", "sliding_attention"


def gemma2(config: Config) -> Graph:
    shape = read_shape(config, tied=True, head_dim=256)
    sliding = sliding_layers(config, shape.layers, [layer % 2 == 0 for layer in range(shape.layers)])
    write = Writer(shape, make_rope(config, shape.head_dim, rope_entries(config)))
    cap = softcap(config, "attn_logit_softcapping", 50.0)
    x = _layers(config, write, sliding, softcap=cap)
    return write.finish(x, softcap=softcap(config, "final_logit_softcapping", 30.0))


def gemma3(config: Config) -> Graph:
    """Rope 0 is for the full layers, rope 1 for the window layers, which the older `rope_scaling` does not touch."""
    if flag(config, "use_bidirectional_attention"):
        raise TricornError("the model attends in both directions (for embeddings); only causal models generate text")
    shape = read_shape(config, tied=True, head_dim=256)
    pattern = integer(config, "sliding_window_pattern", MOST_LAYERS, 6)
    sliding = sliding_layers(config, shape.layers, [(layer + 1) % pattern != 0 for layer in range(shape.layers)])
    whole = make_rope(config, shape.head_dim, rope_entries(config, FULL, 1e6))
    local_theta = number(config, "rope_local_base_freq", 1e4)
    local_entries = (config.get("rope_parameters") or {}).get(SLIDING)
    local = make_rope(config, shape.head_dim, rope_entries({"rope_parameters": local_entries}, theta=local_theta))
    write = Writer(shape, whole, local)
    x = _layers(config, write, sliding, head_norms=True)
    return write.finish(x, softcap=softcap(config, "final_logit_softcapping"))


def gemma3_multimodal(config: Config) -> Graph:
    """The text part of a config that also describes a vision part."""
    text = config.get("text_config")
    return gemma3(text if isinstance(text, dict) else config)


def _layers(config: Config, write: Writer, sliding: list[bool], **attention: Any) -> str:
    require(config, "hidden_activation", "gelu_pytorch_tanh")
    bias = flag(config, "attention_bias")
    scale = number(config, "query_pre_attn_scalar", 256.0) ** -0.5
    window = integer(config, "sliding_window", MOST_TOKENS, 4096)
    local_rope = len(write.ropes) - 1
    x = write.embed(scale=write.shape.hidden**0.5)
    for layer, slides in enumerate(sliding):
        at = f"layers.{layer}"
        view: dict[str, Any] = {"window": window, "rope": local_rope} if slides else {"window": 0, "rope": 0}
        h = write.norm(x, f"{at}.attention_in", f"{at}.input_layernorm")
        h = write.attention(h, layer, qkv_bias=bias, output_bias=bias, scale=scale, **view, **attention)
        h = write.norm(h, f"{at}.attention_normed", f"{at}.post_attention_layernorm")
        x = write.add(x, h, f"{at}.attended")
        h = write.norm(x, f"{at}.mlp_in", f"{at}.pre_feedforward_layernorm")
        h = write.mlp(h, layer, "gelu_tanh")
        h = write.norm(h, f"{at}.mlp_normed", f"{at}.post_feedforward_layernorm")
        x = write.add(x, h, f"{at}.out")
    return x
