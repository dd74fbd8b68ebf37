"""GGUF files through load(): what they say, and what is refused (field faults A-085, A-086)."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tricorn.request import TricornError
from tricorn.weights.checkpoint import Checkpoint, load
from weights_support import (
    ARRAY,
    BOOL,
    F32,
    HEADS,
    HIDDEN,
    I32,
    I64,
    KV_HEADS,
    STRING,
    U8,
    U32,
    U64,
    VOCAB,
    byte_tokenizer,
    entry,
    f32,
    gguf,
    layer_tensors,
    model_keys,
    piece_tokenizer,
    text,
    write,
)

KEYS = model_keys() + byte_tokenizer()


def loaded(tmp_path: Path, keys: list[Any] = KEYS, tensors: list[Any] | None = None, **how: Any) -> Checkpoint:
    return load(write(tmp_path / "m.gguf", gguf(keys, layer_tensors() if tensors is None else tensors, **how)))


def refused(path: Path, says: str = "") -> str:
    with pytest.raises(TricornError) as error:
        load(path)
    message = str(error.value)
    assert "\n" not in message
    assert str(path) in message
    assert says in message, message
    return message


def refused_file(tmp_path: Path, data: bytes, says: str = "") -> str:
    return refused(write(tmp_path / "bad.gguf", data), says)


def test_llama(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    assert model.name == "m"
    expected = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    assert expected.items() <= model.config.items()
    assert model.config["rms_norm_eps"] == pytest.approx(1e-5)
    assert (model.bos_id, model.eos_ids, model.add_bos) == (1, (2, 0), False)
    assert set(model.tensors) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(
            f"model.layers.0.{name}.weight"
            for name in (
                "input_layernorm",
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "post_attention_layernorm",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
            )
        ),
    }
    up = model.tensors["model.layers.0.mlp.up_proj.weight"]
    assert up.shape == (64, HIDDEN)
    assert up.data.shape == (64, HIDDEN * 4)
    assert np.array_equal(up.dequantize(), f32((64, HIDDEN), 9))


def converted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows that llama.cpp's converter writes for q and k: the halves of each head interleaved."""
    out = np.empty_like(weight)
    half = len(weight) // heads // 2
    for head in range(heads):
        for i in range(half):
            out[(head * half + i) * 2] = weight[head * 2 * half + i]
            out[(head * half + i) * 2 + 1] = weight[head * 2 * half + half + i]
    return out


@pytest.mark.parametrize(("arch", "moved"), [("llama", True), ("qwen2", False)])
def test_rows_of_q_and_k_are_put_back_for_llama_alone(tmp_path: Path, arch: str, moved: bool) -> None:
    q, k, bias = f32((HIDDEN, HIDDEN), 1), f32((HIDDEN // 2, HIDDEN), 2), f32((HIDDEN,), 3)
    change = converted if moved else lambda weight, heads: weight
    replaced = {
        "blk.0.attn_q.weight": change(q, HEADS).tobytes(),
        "blk.0.attn_k.weight": change(k, KV_HEADS).tobytes(),
    }
    tensors = [(name, dims, kind, replaced.get(name, raw)) for name, dims, kind, raw in layer_tensors()]
    tensors.append(("blk.0.attn_q.bias", (HIDDEN,), 0, change(bias, HEADS).tobytes()))
    model = loaded(tmp_path, model_keys(arch) + byte_tokenizer(), tensors)
    layer = "model.layers.0.self_attn."
    assert np.array_equal(model.tensors[layer + "q_proj.weight"].dequantize(), q)
    assert np.array_equal(model.tensors[layer + "k_proj.weight"].dequantize(), k)
    assert np.array_equal(model.tensors[layer + "q_proj.bias"].dequantize(), bias)
    assert model.config["attention_bias"]


def test_quantized_rows_are_put_back_as_they_are(tmp_path: Path) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (HIDDEN, 18), dtype=np.uint8)
    tensors = [
        (name, dims, 2, converted(raw, HEADS).tobytes()) if name == "blk.0.attn_q.weight" else (name, dims, kind, data)
        for name, dims, kind, data in layer_tensors()
    ]
    q = loaded(tmp_path, tensors=tensors).tensors["model.layers.0.self_attn.q_proj.weight"]
    assert q.type == "Q4_0"
    assert np.array_equal(q.data, raw)


def test_untied_head_and_unknown_tensors_keep_their_say(tmp_path: Path) -> None:
    more = [("output.weight", (HIDDEN, VOCAB), 0, f32((VOCAB, HIDDEN)).tobytes()), ("strange", (1,), 0, b"\0" * 4)]
    model = loaded(tmp_path, tensors=layer_tensors() + more)
    assert not model.config["tie_word_embeddings"]
    assert {"lm_head.weight", "strange"} <= set(model.tensors)


SCALING = "rope.scaling"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({f"{SCALING}.type": (STRING, "none"), f"{SCALING}.factor": (F32, 4.0)}, None),
        ({f"{SCALING}.type": (STRING, "linear"), f"{SCALING}.factor": (F32, 4.0)}, ("linear", 4.0)),
        ({"rope.scale_linear": (F32, 2.0)}, ("linear", 2.0)),
        ({f"{SCALING}.type": (STRING, "yarn"), f"{SCALING}.factor": (F32, 4.0)}, ("yarn", 4.0)),
    ],
)
def test_rope_scaling(tmp_path: Path, keys: dict[str, Any], expected: tuple[str, float] | None) -> None:
    scaling = loaded(tmp_path, model_keys(**keys) + byte_tokenizer()).config["rope_scaling"]
    assert (scaling and (scaling["rope_type"], scaling["factor"])) == expected


def test_yarn_details(tmp_path: Path) -> None:
    keys = {
        f"{SCALING}.type": (STRING, "yarn"),
        f"{SCALING}.factor": (F32, 4.0),
        f"{SCALING}.original_context_length": (U32, 32),
        f"{SCALING}.yarn_beta_fast": (F32, 16.0),
    }
    scaling = loaded(tmp_path, model_keys(**keys) + byte_tokenizer()).config["rope_scaling"]
    assert scaling["original_max_position_embeddings"] == 32
    assert (scaling["beta_fast"], scaling["beta_slow"]) == (16.0, 1.0)


def test_llama3_rope_factors_become_config(tmp_path: Path) -> None:
    factors = np.array([1, 2, 4, 8], np.float32)
    model = loaded(tmp_path, tensors=[*layer_tensors(), ("rope_freqs.weight", (4,), 0, factors.tobytes())])
    assert model.config["rope_freq_factors"] == [1, 2, 4, 8]
    assert "rope_freqs.weight" not in model.tensors


def gemma_tensors(arch: str) -> list[Any]:
    norms = ["post_attention_norm", "post_ffw_norm"]
    more = [(f"blk.0.{norm}.weight", (HIDDEN,), 0, f32((HIDDEN,), 7).tobytes()) for norm in norms]
    if arch == "gemma3":
        more += [(f"blk.0.attn_{n}_norm.weight", (HIDDEN // HEADS,), 0, f32((8,), 8).tobytes()) for n in "qk"]
    return layer_tensors() + more


def test_gemma2(tmp_path: Path) -> None:
    keys = model_keys("gemma2", block_count=(U32, 4), **{"attention.sliding_window": (U32, 16)})
    model = loaded(tmp_path, keys + piece_tokenizer(), gemma_tensors("gemma2"))
    config = model.config
    assert config["model_type"] == "gemma2"
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (16, 8)
    names = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
    assert {f"model.layers.0.{name}_layernorm.weight" for name in names} <= set(model.tensors)
    # GGUF holds the multiplier already
    norm = model.tensors["model.layers.0.post_feedforward_layernorm.weight"].dequantize()
    assert np.array_equal(norm, f32((HIDDEN,), 7))


def test_gemma3(tmp_path: Path) -> None:
    keys = {
        "block_count": (U32, 7),
        "attention.key_length": (U32, 8),
        "attention.value_length": (U32, 8),
        "attention.sliding_window": (U32, 16),
        "rope.freq_base": (F32, 1e6),
    }
    model = loaded(tmp_path, model_keys("gemma3", **keys) + piece_tokenizer(), gemma_tensors("gemma3"))
    config = model.config
    assert config["model_type"] == "gemma3_text"
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 10000.0)
    assert "model.layers.0.self_attn.q_norm.weight" in model.tensors
    assert model.eos_ids == (2, 4)
    assert model.add_bos


def test_sliding_window_makes_a_mistral(tmp_path: Path) -> None:
    config = loaded(tmp_path, model_keys(**{"attention.sliding_window": (U32, 64)}) + byte_tokenizer()).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (model_keys("mamba") + byte_tokenizer(), "architecture 'mamba' is not supported"),
        (model_keys(expert_count=(U32, 8)) + byte_tokenizer(), "mixtures of experts"),
        (model_keys(**{"rope.dimension_count": (U32, 4)}) + byte_tokenizer(), "rope.dimension_count"),
        (model_keys(block_count=(U32, 0)) + byte_tokenizer(), "block_count"),
        (model_keys(block_count=(STRING, "1")) + byte_tokenizer(), "must be an integer"),
        (model_keys(block_count=(BOOL, True)) + byte_tokenizer(), "must be an integer"),
        (model_keys(feed_forward_length=(ARRAY, (U32, [64, 32]))) + byte_tokenizer(), "differs between layers"),
        (model_keys()[:-1] + byte_tokenizer(), "lack 'llama.attention.layer_norm_rms_epsilon'"),
        (model_keys(**{"rope.freq_base": (F32, float("nan"))}) + byte_tokenizer(), "not finite"),
        (
            model_keys(**{f"{SCALING}.type": (STRING, "longrope"), f"{SCALING}.factor": (F32, 2.0)}) + byte_tokenizer(),
            "",
        ),
        (model_keys() + byte_tokenizer(model=(STRING, "bert")), "tokenizer 'bert' is not supported"),
        (model_keys() + byte_tokenizer(pre="klingon"), "pre-tokenizer 'klingon' is not supported"),
        (model_keys() + byte_tokenizer(eos_token_id=(U32, 5000)), "eos token id 5000"),
        (model_keys() + byte_tokenizer(merges=(ARRAY, (STRING, ["h zzz"]))), "the merge 'h zzz'"),
        (model_keys() + byte_tokenizer(merges=(ARRAY, (STRING, ["h"]))), "the merge 'h'"),
        (model_keys() + byte_tokenizer(tokens=(ARRAY, (STRING, ["a"] * 267))), "comes twice"),
        (model_keys() + byte_tokenizer(tokens=(ARRAY, (STRING, ["a"] * (VOCAB + 1)))), "embedding of 320 rows"),
        (model_keys() + byte_tokenizer(tokens=(ARRAY, (U32, [1]))), "array of strings"),
        (model_keys() + byte_tokenizer(token_type=(ARRAY, (I32, [9] * 267))), "unknown token types [9]"),
        (model_keys() + byte_tokenizer(token_type=(ARRAY, (U8, [1] * 267))), "token_type"),
        (model_keys() + piece_tokenizer(scores=(ARRAY, (U8, [0] * 293))), "scores"),
        (model_keys() + piece_tokenizer(scores=(ARRAY, (F32, [0.0]))), "scores"),
    ],
)
def test_metadata_that_make_no_model_are_refused(tmp_path: Path, keys: list[Any], says: str) -> None:
    refused_file(tmp_path, gguf(keys, layer_tensors()), says)


def with_tensor(dims: tuple[int, ...], kind: int = 0, **how: Any) -> bytes:
    return gguf(KEYS, [*layer_tensors(), ("extra", dims, kind, b"\0" * 256)], **how)


DAMAGE = {
    "dim 0": (with_tensor((0, 4)), "'extra' has the impossible shape"),
    "product that wraps": (with_tensor((1 << 33, 1 << 31)), "'extra' ends at byte"),
    "dim past 2**40": (with_tensor((1 << 63,)), "'extra' has the impossible shape"),
    "no dims": (with_tensor(()), "'extra' has 0 dimensions"),
    "many dims": (with_tensor((1,) * 5), "'extra' has 5 dimensions"),
    "half a block": (with_tensor((16,), kind=2), "not whole blocks of Q4_0"),
    "unknown type": (with_tensor((4,), kind=999), "tensor 'extra' has type 999"),
    "a type we lack": (with_tensor((256,), kind=10), "tensor 'extra' has type Q2_K"),
    "offset past the end": (with_tensor((4,), offsets={"extra": 1 << 40}), "'extra' ends at byte"),
    "offset that wraps": (with_tensor((4,), offsets={"extra": (1 << 64) - 32}), "'extra' ends at byte"),
    "misaligned offset": (with_tensor((4,), offsets={"extra": 33}), "misaligned or overlaps"),
    "overlap": (with_tensor((4,), offsets={"extra": 64}), "misaligned or overlaps"),
    "names twice": (gguf(KEYS, layer_tensors() + layer_tensors()[:1]), "'token_embd.weight' comes twice"),
    "empty name": (gguf(KEYS, [*layer_tensors(), ("", (4,), 0, b"\0" * 16)]), "tensor's name has 0 characters"),
    "many tensors": (gguf(KEYS, layer_tensors(), tensor_count=1 << 60), "number of tensors"),
    "one tensor too many": (gguf(KEYS, layer_tensors(), tensor_count=12), ""),
    "many keys": (gguf(KEYS, layer_tensors(), key_count=1 << 60), "number of keys"),
    "version 0": (gguf(KEYS, layer_tensors(), version=0), "version 0 is not supported"),
    "version 1": (gguf(KEYS, layer_tensors(), version=1), "version 1 is not supported"),
    "version 99": (gguf(KEYS, layer_tensors(), version=99), "version 99 is not supported"),
    "big-endian": (gguf(KEYS, layer_tensors(), version=3 << 24), "big-endian"),
    "alignment 0": (gguf([*KEYS, ("general.alignment", U32, 0)], layer_tensors()), "alignment 0"),
    "alignment 3": (gguf([*KEYS, ("general.alignment", U32, 3)], layer_tensors()), "alignment 3"),
    "alignment int64": (gguf([*KEYS, ("general.alignment", I64, 32)], layer_tensors()), "unsigned 32-bit"),
    "alignment 2**31": (gguf([*KEYS, ("general.alignment", U32, 1 << 31)], layer_tensors()), "alignment"),
    "key twice": (gguf([*KEYS, KEYS[0]], layer_tensors()), "'general.architecture' comes twice"),
    "empty key": (gguf([*KEYS, ("", U32, 0)], layer_tensors()), "a key has 0 characters"),
    "other file": (b"PK\3\4" + b"\0" * 100, "not a GGUF file"),
    "empty": (b"", "empty"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    refused_file(tmp_path, *DAMAGE[damage])


def raw_key(body: bytes) -> bytes:
    whole = gguf(KEYS, layer_tensors(), key_count=len(KEYS) + 1)
    head = 24
    return whole[:head] + body + whole[head:]


@pytest.mark.parametrize(
    "body",
    [
        text("key", 1 << 62) + struct.pack("<I", STRING),
        text("key") + struct.pack("<I", STRING) + text("x", 1 << 62),
        text("key") + struct.pack("<I", STRING) + text("x", (1 << 64) - 1),
        text("key") + struct.pack("<IIQ", ARRAY, STRING, 1 << 61),
        text("key") + struct.pack("<IIQ", ARRAY, U64, 1 << 61),
        text("key") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + struct.pack("<IQ", U8, 1) + b"\0",
        text("key") + struct.pack("<II", 77, 0),
        text("key") + struct.pack("<IIQ", ARRAY, 77, 0),
        struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", U32, 0),
        entry("k" * 2000, U32, 1),
    ],
)
def test_hostile_key_is_refused(tmp_path: Path, body: bytes) -> None:
    refused_file(tmp_path, raw_key(body))


def test_sound_extra_key_is_not(tmp_path: Path) -> None:
    assert loaded(tmp_path, [("key", ARRAY, (U8, [1, 2])), *KEYS]).name == "m"


def test_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = gguf(KEYS, layer_tensors())
    path = tmp_path / "cut.gguf"
    for size in range(0, len(whole), 64):
        path.write_bytes(whole[:size])
        refused(path)
    assert load(write(path, whole)).name == "cut"


def test_a_hostile_file_costs_little_memory(tmp_path: Path) -> None:
    """All the damaged files, in one process that may not grow by 100 MB."""
    for i, (data, _) in enumerate(DAMAGE.values()):
        write(tmp_path / f"{i}.gguf", data)
    code = f"""
import resource, sys
from pathlib import Path
from tricorn.request import TricornError
from tricorn.weights.checkpoint import load
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in Path({str(tmp_path)!r}).iterdir():
    try:
        load(path)
        sys.exit(f"{{path}} was taken")
    except TricornError:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 << 10


def test_missing_file_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "none.gguf", "no such model")


def test_digest_follows_the_contents(tmp_path: Path) -> None:
    first = loaded(tmp_path).digest
    assert loaded(tmp_path, model_keys(context_length=(U32, 64)) + byte_tokenizer()).digest != first
