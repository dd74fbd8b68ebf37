"""Folders with safetensors through load(): sound ones, and field faults A-084 and A-088."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tricorn.request import TricornError
from tricorn.weights.checkpoint import load
from weights_support import HIDDEN, VOCAB, byte_tokenizer, f32, gguf, layer_tensors, model_keys, safetensors, write

CONFIG = {"model_type": "llama", "hidden_size": HIDDEN, "rope_parameters": {"rope_theta": 5.0}, "eos_token_id": 2}
EMBED = f32((VOCAB, HIDDEN), 1)
NORM = f32((HIDDEN,), 2)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write(tmp_path_factory.mktemp("t") / "m.gguf", gguf(model_keys() + byte_tokenizer(), layer_tensors()))
    return load(path).tokenizer


@pytest.fixture
def folder(tmp_path: Path, tokenizer: str) -> Path:
    """A model folder without weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": "T1"})
    )
    return folder


EMBED_ENTRY = ("F32", (VOCAB, HIDDEN), EMBED.tobytes())
NORM_ENTRY = ("F32", (HIDDEN,), NORM.tobytes())


@pytest.fixture
def shards(folder: Path) -> Path:
    """The model in two shards with an index."""
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    write(folder / names[0], safetensors({"model.embed_tokens.weight": EMBED_ENTRY}))
    write(folder / names[1], safetensors({"model.norm.weight": NORM_ENTRY}))
    places = {"model.embed_tokens.weight": names[0], "model.norm.weight": names[1]}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def refused(folder: Path, *says: str) -> None:
    with pytest.raises(TricornError) as error:
        load(folder)
    message = str(error.value)
    assert "\n" not in message
    for part in says:
        assert part in message, message


def test_what_the_library_writes_is_read(folder: Path) -> None:
    tensors = {"model.embed_tokens.weight": EMBED, "model.norm.weight": NORM.astype(np.float16)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(folder)
    assert model.name == "model"
    assert model.config == CONFIG
    assert np.array_equal(model.tensors["model.embed_tokens.weight"].dequantize(), EMBED)
    norm = model.tensors["model.norm.weight"]
    assert (norm.type, norm.shape) == ("F16", (HIDDEN,))
    assert np.array_equal(norm.dequantize(), NORM.astype(np.float16).astype(np.float32))
    assert (model.bos_id, model.eos_ids, model.add_bos, model.chat_template) == (1, (2,), False, "T1")


def test_bf16(folder: Path) -> None:
    raw = (EMBED.view(np.uint32) >> 16).astype(np.uint16)
    write(folder / "model.safetensors", safetensors({"w": ("BF16", EMBED.shape, raw.tobytes())}))
    tensor = load(folder).tensors["w"]
    assert tensor.data.shape == (VOCAB, HIDDEN * 2)
    assert np.array_equal(tensor.dequantize(), (raw.astype(np.uint32) << 16).view(np.float32))


def test_shards(shards: Path) -> None:
    model = load(shards)
    assert np.array_equal(model.tensors["model.embed_tokens.weight"].dequantize(), EMBED)
    assert np.array_equal(model.tensors["model.norm.weight"].dequantize(), NORM)


def gemma(folder: Path, config: dict[str, Any], prefix: str) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    names = ["model.norm.weight", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.input_layernorm.weight"]
    tensors = {f"{prefix}{name.removeprefix('model.')}": NORM_ENTRY for name in names}
    tensors |= {f"{prefix}embed_tokens.weight": EMBED_ENTRY, "vision_tower.w": NORM_ENTRY}
    write(folder / "model.safetensors", safetensors(tensors))
    return folder


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_gemma_norms_are_multipliers(folder: Path, prefix: str) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": HIDDEN}
    config = text if prefix == "model." else {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    model = load(gemma(folder, config, prefix))
    assert model.config["model_type"] == "gemma3_text"
    assert model.config["hidden_size"] == HIDDEN
    assert set(model.tensors) == {
        "model.norm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.embed_tokens.weight",
    }
    for name in model.tensors:
        if "norm" in name:
            assert np.array_equal(model.tensors[name].dequantize(), NORM + 1)
    assert np.array_equal(model.tensors["model.embed_tokens.weight"].dequantize(), EMBED)


def test_generation_settings_and_template_file(shards: Path) -> None:
    (shards / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    (shards / "chat_template.jinja").write_text("T2")
    model = load(shards)
    assert model.eos_ids == (0, 2)
    assert model.chat_template == "T2"


def test_named_templates(shards: Path) -> None:
    templates = [{"name": "tool_use", "template": "A"}, {"name": "default", "template": "B"}]
    (shards / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert load(shards).chat_template == "B"


def test_digest_changes_with_a_shard(shards: Path) -> None:
    before = load(shards).digest
    assert load(shards).digest == before
    shard = shards / "model-00002-of-00002.safetensors"
    write(shard, safetensors({"model.norm.weight": ("F16", (HIDDEN,), NORM.astype(np.float16).tobytes())}))
    assert load(shards).digest != before


# Field fault A-084


def test_cut_shard(shards: Path) -> None:
    path = shards / "model-00001-of-00002.safetensors"
    write(path, path.read_bytes()[:-1024])
    refused(shards, path.name, "'model.embed_tokens.weight'", "past the end")


def test_missing_shard(shards: Path) -> None:
    (shards / "model-00002-of-00002.safetensors").unlink()
    refused(shards, "model-00002-of-00002.safetensors is missing", "'model.norm.weight'")


def test_missing_index(shards: Path) -> None:
    (shards / INDEX).unlink()
    refused(shards, "2 safetensors shards", INDEX)
    (shards / "model-00002-of-00002.safetensors").unlink()
    refused(shards, "1 safetensors shards", INDEX)


def test_tensor_not_where_the_index_says(shards: Path) -> None:
    places = json.loads((shards / INDEX).read_text())["weight_map"]
    places["model.layers.0.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    (shards / INDEX).write_text(json.dumps({"weight_map": places}))
    refused(shards, "model-00001-of-00002.safetensors", "'model.layers.0.mlp.up_proj.weight'")


def test_tensor_in_two_shards(shards: Path) -> None:
    both = {"model.norm.weight": NORM_ENTRY, "model.embed_tokens.weight": EMBED_ENTRY}
    write(shards / "model-00002-of-00002.safetensors", safetensors(both))
    refused(shards, "'model.embed_tokens.weight'", "another shard")


def test_stray_shard_is_ignored_with_a_warning(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(shards / "stray.safetensors", b"not even one")
    with caplog.at_level(logging.WARNING):
        assert len(load(shards).tensors) == 2
    assert "stray.safetensors" in caplog.text


@pytest.mark.parametrize(
    "index", ['{"weight_map": {}}', "{}", "[]", '{"weight_map": {"a": 3}}', "{", '{"a": 1, "a": 2}']
)
def test_broken_index(shards: Path, index: str) -> None:
    (shards / INDEX).write_text(index)
    refused(shards, INDEX)


def offsets(first: int, last: int, kind: str = "F32", shape: Any = (HIDDEN,)) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [first, last]}


SIZE = HIDDEN * 4


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"\1\2\3", "header"),
        (safetensors({"w": NORM_ENTRY}, length=1 << 63), "header of 9223372036854775808 bytes"),
        (safetensors({"w": NORM_ENTRY}, length=1 << 40), "header"),
        (safetensors({"w": NORM_ENTRY}, header=b'{"w": {"dtype"'), "broken JSON"),
        (safetensors({"w": NORM_ENTRY}, header=b"[" * 200_000), "broken JSON"),
        (safetensors({"w": NORM_ENTRY}, header=b"[1]"), "JSON object"),
        (safetensors({"w": NORM_ENTRY}, header=b"\xff\xfe{}"), "broken JSON"),
        (safetensors({"w": NORM_ENTRY}) + b"\0", "belong to no tensor"),
        (safetensors({"w": NORM_ENTRY})[:-1], "past the end"),
        (safetensors({"w": ("F8_E4M3", (HIDDEN,), b"\0" * HIDDEN)}), "'w' has type 'F8_E4M3'"),
        (safetensors({"w": ("I64", (4,), b"\0" * 32)}), "'w' has type 'I64'"),
        (safetensors({"w": ("F32", (HIDDEN, 0), b"")}), "unusable shape"),
    ],
)
def test_broken_file(folder: Path, data: bytes, says: str) -> None:
    write(folder / "model.safetensors", data)
    refused(folder, "model.safetensors", says)


@pytest.mark.parametrize(
    "entries",
    [
        {"a": offsets(0, SIZE), "b": offsets(SIZE // 2, SIZE + SIZE // 2)},  # overlap
        {"a": offsets(0, SIZE), "b": offsets(0, SIZE)},
        {"a": offsets(0, SIZE), "b": offsets(SIZE + 4, 2 * SIZE + 4)},  # a hole
        {"a": offsets(SIZE, 0)},
        {"a": offsets(0, SIZE, shape=(HIDDEN, 2))},  # fewer bytes than the shape takes
        {"a": offsets(0, SIZE, shape=(1 << 40, 1 << 24))},
        {"a": offsets(0, SIZE, shape=(-1, -HIDDEN))},
        {"a": offsets(0, SIZE, shape=[True] * 4)},
        {"a": offsets(0, SIZE, shape="x")},
        {"a": offsets(0, SIZE) | {"data_offsets": [0]}},
        {"a": offsets(0, SIZE) | {"data_offsets": None}},
        {"a": {"dtype": "F32"}},
        {"a": 3},
        {"a": offsets(0, SIZE, kind=["F32"])},
    ],
)
def test_broken_entries(folder: Path, entries: dict[str, Any]) -> None:
    header = json.dumps(entries).encode()
    write(folder / "model.safetensors", safetensors({"w": ("F32", (HIDDEN * 3,), b"\0" * 3 * SIZE)}, header=header))
    refused(folder, "model.safetensors", "'a'" if len(entries) == 1 else "'b'")


# Field fault A-088


class Touch:
    """Unpickling it would make the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_refused_unopened(folder: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    write(folder / name, pickle.dumps(Touch(marker)))
    refused(folder, "pickled weights")
    assert not marker.exists()


def test_custom_code_is_not_run(shards: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (shards / "modeling_x.py").write_text(f"open({str(marker)!r}, 'w')")
    (shards / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoModel": "modeling_x.X"}}))
    assert "auto_map" not in load(shards).config
    assert not marker.exists()


@pytest.mark.parametrize(
    "place", ["../other.safetensors", "/etc/passwd", "a/../../x.safetensors", "..", "sub/x.safetensors"]
)
def test_paths_stay_in_the_folder(shards: Path, place: str) -> None:
    shutil.copy(shards / "model-00002-of-00002.safetensors", shards.parent / "other.safetensors")
    places = {"model.embed_tokens.weight": "model-00001-of-00002.safetensors", "model.norm.weight": place}
    (shards / INDEX).write_text(json.dumps({"weight_map": places}))
    refused(shards, "'model.norm.weight'", place)


# Other things that make no model


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", "{", "broken JSON"),
        (
            "config.json",
            json.dumps(CONFIG | {"quantization_config": {"quant_method": "gptq"}}),
            "quantized safetensors",
        ),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "not a usable tokenizer"),
        ("tokenizer_config.json", "[", "broken JSON"),
        ("generation_config.json", "3", "JSON object"),
    ],
)
def test_incomplete_folder(shards: Path, name: str, content: str | None, says: str) -> None:
    (shards / name).unlink(missing_ok=True)
    if content is not None:
        (shards / name).write_text(content)
    refused(shards, says)


def test_no_weights(folder: Path) -> None:
    refused(folder, "no safetensors weights")
