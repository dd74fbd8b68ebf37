"""Small random checkpoints of every architecture, made from a seed with NumPy alone.

`make("qwen3", seed=1)` gives a config in Hugging Face's form and float32 weights under Hugging Face's names, as that
library would store them (Gemma's norm weights less 1). `write_folder` writes them as a model folder that can be served.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tricorn.models import build_graph, weight_shapes

Weights = dict[str, NDArray[np.float32]]

SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
"""The special tokens, with ids 256, 257, ... after the bytes; the rest of the vocabulary is unused."""

BOS_ID, EOS_ID, IM_END_ID = 256, 257, 259

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

COMMON: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": [EOS_ID, IM_END_ID],
    "torch_dtype": "float32",
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0, "hidden_act": "silu"},
    "mistral": {"architectures": ["MistralForCausalLM"], "rope_theta": 10000.0, "sliding_window": 20},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1000000.0, "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1000000.0, "attention_bias": False},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 20,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 20,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
}


def make(architecture: str, seed: int = 0, **overrides: Any) -> tuple[dict[str, Any], Weights]:
    """A config and its weights; `overrides` replace config entries, and an override of `...` removes one."""
    config = {"model_type": architecture, **COMMON, **FAMILIES[architecture], **overrides}
    config = {key: value for key, value in config.items() if value is not ...}
    random = np.random.default_rng(seed)
    gemma = architecture.startswith("gemma")
    return config, {
        name: _tensor(random, name, shape, gemma) for name, shape in weight_shapes(build_graph(config)).items()
    }


def graph_weights(config: dict[str, Any], weights: Weights) -> Weights:
    """The weights as a graph wants them: Gemma's norms as multipliers."""
    if not config["model_type"].startswith("gemma"):
        return weights
    return {name: tensor + 1 if name.endswith("norm.weight") else tensor for name, tensor in weights.items()}


def _tensor(random: np.random.Generator, name: str, shape: tuple[int, ...], gemma: bool) -> NDArray[np.float32]:
    """Scaled so that every part of the model matters to the logits, and attention is neither flat nor one-hot."""
    if name.endswith("norm.weight"):
        tensor = random.uniform(0.5, 1.5, shape) - gemma
    elif name.endswith("bias"):
        tensor = random.normal(0, 0.3, shape)
    elif "embed_tokens" in name:
        tensor = random.normal(0, 0.1 if gemma else 1, shape)
    else:
        tensor = random.normal(0, 1.5 / shape[1] ** 0.5, shape)
    return tensor.astype(np.float32)


def tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: one token a byte (ids are the bytes), then the specials."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letter_of = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    assert set(letter_of.values()) == set(letters)
    result = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letter_of.items()}, merges=[]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return result


def write_folder(path: Path, architecture: str = "llama", seed: int = 0, shards: int = 1, **overrides: Any) -> Path:
    """Writes a model folder: config, weights (in several shards if asked), tokenizer, chat template. Gives `path`."""
    config, weights = make(architecture, seed, **overrides)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "tokenizer.json").write_text(tokenizer().to_str())
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": SPECIALS[0], "eos_token": SPECIALS[1], "chat_template": CHAT_TEMPLATE})
    )
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return path
    files = [f"model-{shard + 1:05}-of-{shards:05}.safetensors" for shard in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(sorted(weights))}
    for file in files:
        part = {name: weights[name] for name in weights if weight_map[name] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path
