"""What is compared with the oracle: small random checkpoints, and the four real models with a text each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS = Path(__file__).parent.parent / "goldens"
SMALL_GOLDENS = GOLDENS / "small.npz"
TOLERANCE = 1e-4
"""The largest max|a - b| / max|a| that passes, a being the oracle's logits; rounding alone gives 1e-6 to 1e-5."""

TOKENS = 80
"""Ids in a small case: four times the window, and more than an original context of 32."""
ROWS = (0, 33, 79)
"""The positions whose logits a small golden keeps."""


@dataclass(frozen=True)
class Case:
    architecture: str
    overrides: dict[str, Any]
    seed: int

    def ids(self) -> list[int]:
        return [int(i) for i in np.random.default_rng(self.seed + 1000).integers(0, 320, TOKENS)]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ALTERNATING = ["full_attention", "sliding_attention", "full_attention"]
NO_ROPE_KEYS: dict[str, Any] = {"rope_theta": ..., "rope_local_base_freq": ...}

_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-no-head-dim": ("llama", {"head_dim": ..., "num_key_value_heads": ..., "hidden_size": 128}),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "llama-yarn-mscale": ("llama", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3, "beta_fast": 8}}),
    "llama-yarn-smooth": ("llama", {"rope_scaling": {**YARN, "truncate": False, "attention_factor": 0.8}}),
    "llama-newer": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}, **NO_ROPE_KEYS}),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2-layer-types": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "layer_types": ALTERNATING}),
    "qwen2-yarn": ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-biases": ("gemma2", {"attention_bias": True, "num_hidden_layers": 4}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-linear": ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma3-untied": ("gemma3_text", {"tie_word_embeddings": False, "final_logit_softcapping": 5.0}),
    "gemma3-newer": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window_pattern": ...,
            **NO_ROPE_KEYS,
        },
    ),
}

CASES = {
    name: Case(architecture, overrides, seed)
    for seed, (name, (architecture, overrides)) in enumerate(_CASES.items(), start=1)
}

ENGLISH = (
    "The old harbour was quiet in the morning. Fishing boats came back one by one, and the women of the town "
    "stood on the wall to count them, as their mothers had done. When the last sail rounded the point, someone "
    "laughed, and the bells of the chapel began to ring over the water as if nothing in the world had ever gone "
    "wrong."
)
CODE = (
    "def binary_search(values: list[int], target: int) -> int:\n"
    '    """Gives the index of target in sorted values, or -1."""\n'
    "    low, high = 0, len(values) - 1\n"
    "    while low <= high:\n"
    "        middle = (low + high) // 2\n"
    "        if values[middle] == target:\n"
    "            return middle\n"
    "        if values[middle] < target:\n"
    "            low = middle + 1\n"
    "        else:\n"
    "            high = middle - 1\n"
    "    return -1\n"
)

REAL_TOKENS = 64
REAL_ROWS = (1, 20, 41, 63)
"""The positions whose best logits a real model's golden keeps."""
REAL_BEST = 16

REAL_TEXTS = {"smollm2-135m": ENGLISH, "gemma3-270m": ENGLISH, "qwen2.5-coder-0.5b": CODE, "qwen2.5-coder-1.5b": CODE}

_QWEN = {"model_type": "qwen2", "vocab_size": 151936, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
REAL_CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "gemma3-270m": {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
    },
    "qwen2.5-coder-0.5b": {
        **_QWEN,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "qwen2.5-coder-1.5b": {
        **_QWEN,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
}
"""As their makers publish them, so that the oracle does not depend on how a GGUF file's metadata is read. The Qwen
files carry a head of their own (quantized apart from the embedding), which is why they are untied here."""


def real_golden(name: str) -> Path:
    return GOLDENS / f"{name}.npz"
