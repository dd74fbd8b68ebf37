"""Config in, graph out: what each architecture reads, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from checkpoints import FAMILIES, make
from tricorn.models import Graph, build_graph, check_weights, weight_shapes
from tricorn.request import TricornError


def graph_of(architecture: str, **overrides: Any) -> Graph:
    return build_graph(make(architecture, **overrides)[0])


def windows(graph: Graph) -> list[int]:
    return [node.attrs["window"] for node in graph.nodes if node.op == "attention"]


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(TricornError) as error:
        build_graph(config)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_graph_is_well_formed(architecture: str) -> None:
    graph = graph_of(architecture)
    made: set[str] = set()
    for node in graph.nodes:
        assert set(node.inputs) <= made, node
        assert node.output not in made, node
        made.add(node.output)
    assert sum(node.op == "attention" for node in graph.nodes) == graph.layers == 3
    assert (graph.kv_heads, graph.head_dim, graph.vocab, graph.context) == (2, 32, 320, 512)
    json.dumps([[node.op, node.output, node.inputs, node.weights, node.attrs] for node in graph.nodes])


def test_windows_follow_each_family() -> None:
    assert windows(graph_of("llama")) == [0, 0, 0]
    assert windows(graph_of("mistral")) == [20, 20, 20]
    assert windows(graph_of("mistral", sliding_window=None)) == [0, 0, 0]
    assert windows(graph_of("mistral", sliding_window=...)) == [4096] * 3
    assert windows(graph_of("qwen2", sliding_window=20, max_window_layers=0)) == [0, 0, 0]
    assert windows(graph_of("qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1)) == [0, 20, 20]
    assert windows(graph_of("qwen3", use_sliding_window=True, sliding_window=20, max_window_layers=0)) == [20, 20, 20]
    assert windows(graph_of("gemma2")) == [20, 0, 20]
    assert windows(graph_of("gemma3_text")) == [20, 20, 0]
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert windows(graph_of("gemma3_text", layer_types=types)) == [0, 20, 0]


def test_gemma3_ropes_differ_by_layer_type_in_both_forms() -> None:
    older = graph_of("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    entries = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    newer = graph_of("gemma3_text", rope_parameters=entries, rope_theta=..., rope_local_base_freq=...)
    assert older.ropes == newer.ropes
    assert older.ropes[0].inv_freq[0] == 1 / 8
    assert older.ropes[1].inv_freq[0] == 1
    assert [node.attrs["rope"] for node in older.nodes if node.op == "rope"] == [1, 1, 1, 1, 0, 0]


def test_the_multimodal_gemma3_config_gives_its_text_part() -> None:
    text = make("gemma3_text")[0]
    assert build_graph({"model_type": "gemma3", "text_config": text}) == build_graph(text)


def test_frequency_factors_of_a_gguf_equal_the_rope_type_they_stand_for() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    scaled, plain = graph_of("llama", rope_scaling=scaling).ropes[0], graph_of("llama").ropes[0]
    factors = (np.array(plain.inv_freq) / np.array(scaled.inv_freq)).tolist()
    assert factors[0] == 1
    assert factors[-1] == pytest.approx(8)
    from_gguf = graph_of("llama", rope_freq_factors=factors).ropes[0]
    np.testing.assert_allclose(from_gguf.inv_freq, scaled.inv_freq, rtol=1e-6)


def test_only_yarn_stretches_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert graph_of("qwen2", rope_scaling=yarn).context == 2048
    assert graph_of("qwen2", rope_scaling=yarn, max_position_embeddings=2048).context == 2048
    assert graph_of("llama", rope_scaling={"type": "linear", "factor": 4.0}).context == 512


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "None"),
        ({"model_type": ["llama"]}, "llama"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": 2**70}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 33}, "head_dim"),
        ({"vocab_size": "320"}, "vocab_size"),
        ({"vocab_size": 320.0}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 1e-29, "rope_scaling": {"type": "linear", "factor": 1e-29}}, "frequencies"),
        ({"rope_scaling": "linear"}, "rope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": ["yarn"]}}, "yarn"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}}, "factor"),
        ({"rope_freq_factors": [1.0] * 15}, "rope_freq_factors"),
        ({"rope_freq_factors": [0.0] * 16}, "rope_freq_factors"),
        ({"rope_freq_factors": ["x"] * 16}, "rope_freq_factors"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_be_is_refused_by_name(entries: dict[str, Any], named: str) -> None:
    assert named in refused({**make("llama")[0], **entries})


@pytest.mark.parametrize(
    ("architecture", "entries", "named"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "both directions"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma3_text", {"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": 3}}, "rope"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("mistral", {"sliding_window": -1}, "sliding_window"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
    ],
)
def test_what_a_family_cannot_be_is_refused_by_name(architecture: str, entries: dict[str, Any], named: str) -> None:
    assert named in refused({**make(architecture)[0], **entries})


def test_the_head_is_the_embedding_where_tied() -> None:
    assert "lm_head.weight" in weight_shapes(graph_of("llama"))
    tied = graph_of("llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in weight_shapes(tied)
    assert "lm_head.weight" in weight_shapes(graph_of("gemma2", tie_word_embeddings=False))
    assert "lm_head.weight" not in weight_shapes(graph_of("gemma2", tie_word_embeddings=...))


def test_weights_are_checked_by_name_and_shape() -> None:
    config, weights = make("qwen3", tie_word_embeddings=True)
    graph = build_graph(config)
    check_weights(graph, weights)
    harmless = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    harmless["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(16, np.float32)
    check_weights(graph, weights | harmless)

    name = "model.layers.1.self_attn.k_norm.weight"
    renamed = {key.replace("k_norm", "key_norm"): tensor for key, tensor in weights.items()}
    with pytest.raises(TricornError, match=r"lacks the tensor 'model\.layers\.0\.self_attn\.k_norm\.weight'"):
        check_weights(graph, renamed)
    with pytest.raises(TricornError, match=re.escape(f"'{name}' has the shape (31,)")):
        check_weights(graph, weights | {name: weights[name][:31]})
    with pytest.raises(TricornError, match=r"'model\.layers\.3\.self_attn\.k_norm\.weight'"):
        check_weights(graph, weights | {"model.layers.3.self_attn.k_norm.weight": weights[name]})
    transposed = "model.layers.2.mlp.down_proj.weight"
    with pytest.raises(TricornError, match="down_proj"):
        check_weights(graph, weights | {transposed: weights[transposed].T})


def test_a_bias_that_the_config_does_not_name_is_refused() -> None:
    config, weights = make("llama", attention_bias=True)
    with pytest.raises(TricornError, match=r"q_proj\.bias"):
        check_weights(build_graph({**config, "attention_bias": False}), weights)
