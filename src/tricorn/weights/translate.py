"""Says in Hugging Face's words what a GGUF file says in llama.cpp's: the config and the names of the tensors.

The keys and conventions are those of llama.cpp's `convert_hf_to_gguf.py` and `llama-model.cpp`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from tricorn.request import TricornError
from tricorn.weights.gguf import GGUFFile, Metadata
from tricorn.weights.tensor import Tensor

MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
"""GGUF architecture -> model_type. Mistral's files say "llama"."""

GEMMA3_LOCAL_THETA = 10000.0  # fixed in llama.cpp; files older than the key for it lack it

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = _LAYER | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each made when it is asked for, so that opening a model reads none of them."""

    def __init__(self, makers: dict[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def architecture(metadata: Metadata) -> str:
    name: str = metadata.text("general.architecture")
    if name not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise TricornError(f"{metadata.path}: architecture {name!r} is not supported; known in GGUF files are {known}")
    return name


def config(file: GGUFFile) -> dict[str, Any]:
    """The config.json that the model would have had. Raises TricornError for what this engine cannot run."""
    meta = file.metadata
    arch = architecture(meta)
    if meta.integer(f"{arch}.expert_count", 0):
        meta.fail("mixtures of experts are not supported")
    hidden = meta.positive(f"{arch}.embedding_length")
    heads = meta.positive(f"{arch}.attention.head_count")
    head_dim = meta.positive(f"{arch}.attention.key_length", hidden // heads)
    result: dict[str, Any] = {
        "model_type": MODEL_TYPES[arch],
        "hidden_size": hidden,
        "num_hidden_layers": meta.positive(f"{arch}.block_count"),
        "intermediate_size": meta.positive(f"{arch}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.positive(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": _vocabulary(file),
        "max_position_embeddings": meta.positive(f"{arch}.context_length"),
        "rms_norm_eps": float(meta.number(f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(meta.number(f"{arch}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(meta, arch),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "hidden_act": "silu",
    }
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.positive(f"{arch}.{key}", head_dim) != head_dim:
            meta.fail(f"GGUF key '{arch}.{key}' differs from the head size {head_dim}, which is not supported")
    if "rope_freqs.weight" in file.tensors:
        result["rope_freq_factors"] = file.tensors["rope_freqs.weight"].dequantize().ravel().tolist()
    return result | _FAMILY[arch](meta, result)


def _vocabulary(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        file.metadata.fail("the tensor 'token_embd.weight' is missing or not a matrix")
    return embedding.shape[0]


def _rope_scaling(meta: Metadata, arch: str) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling"
    factor = float(meta.number(f"{prefix}.factor", meta.number(f"{arch}.rope.scale_linear", 1.0)))
    kind = meta.text(f"{prefix}.type", "linear" if factor != 1.0 else "none")
    if kind == "none" or factor == 1.0:
        return None
    if factor <= 0:
        meta.fail(f"rope scaling factor {factor} is not positive")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        meta.fail(f"rope scaling {kind!r} is not supported; known are linear and yarn")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": float(meta.number(f"{prefix}.yarn_beta_fast", 32.0)),
        "beta_slow": float(meta.number(f"{prefix}.yarn_beta_slow", 1.0)),
    }
    original = meta.positive(f"{prefix}.original_context_length", None)
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    attention = float(meta.number(f"{prefix}.yarn_attn_factor", meta.number(f"{prefix}.attn_factor", 1.0)))
    if attention != 1.0:  # llama.cpp multiplies it with yarn's own magnitude, Hugging Face replaces that
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama(meta: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    window = meta.positive("llama.attention.sliding_window", None)
    return {} if window is None else {"model_type": "mistral", "sliding_window": window}


def _qwen(_: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _gemma(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 2 and 3 share. The largest of each scales by hidden size / heads, as llama.cpp knows by its depth."""
    arch = architecture(meta)
    largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[arch]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if largest else config["head_dim"],
        "sliding_window": meta.positive(f"{arch}.attention.sliding_window", 4096),
    }


def _gemma2(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    return _gemma(meta, config) | {
        "attn_logit_softcapping": float(meta.number("gemma2.attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(meta.number("gemma2.final_logit_softcapping", 30.0)),
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in layers],
    }


def _gemma3(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    period = meta.positive("gemma3.attention.sliding_window_pattern", 6)
    layers = range(config["num_hidden_layers"])
    cap = meta.number("gemma3.final_logit_softcapping", None)
    return _gemma(meta, config) | {
        "rope_local_base_freq": float(meta.number("gemma3.rope.freq_base_swa", GEMMA3_LOCAL_THETA)),
        "final_logit_softcapping": cap,
        "layer_types": ["sliding_attention" if (i + 1) % period else "full_attention" for i in layers],
    }


_FAMILY = {"llama": _llama, "qwen2": _qwen, "qwen3": _qwen, "gemma2": _gemma2, "gemma3": _gemma3}


def tensors(file: GGUFFile, config: dict[str, Any]) -> Mapping[str, Tensor]:
    """The tensors under Hugging Face names; one that has no such name keeps its own, for the model to refuse."""
    arch = architecture(file.metadata)
    layer_names = _GEMMA_LAYER if arch.startswith("gemma") else _LAYER
    heads = (
        {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if arch == "llama" else {}
    )
    makers: dict[str, Callable[[], Tensor]] = {}
    for name, tensor in file.tensors.items():
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        top = re.fullmatch(r"(\w+)\.(weight|bias)", name)
        if name == "rope_freqs.weight":
            continue
        if block and block[2] in layer_names:
            new = f"model.layers.{int(block[1])}.{layer_names[block[2]]}.{block[3]}"
        elif top and top[1] in _TOP:
            new = f"{_TOP[top[1]]}.{top[2]}"
        else:
            new = name
        make = partial(_unpermute, tensor, heads[block[2]]) if block and block[2] in heads else partial(_same, tensor)
        if makers.setdefault(new, make) is not make:
            file.metadata.fail(f"tensors {name!r} and another both mean {new!r}")
    return LazyTensors(makers)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _unpermute(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp interleaves the two halves of each head's rows of q and k in Llama models; this puts them back."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        return tensor  # a wrong shape, which the check of shapes will name
    order = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).ravel()
    return tensor.take_rows(order)
