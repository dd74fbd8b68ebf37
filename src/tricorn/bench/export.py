"""A model as a folder that other engines read: config.json, bfloat16 safetensors, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tricorn.request import TricornError
from tricorn.weights.checkpoint import Checkpoint, load
from tricorn.weights.tensor import F32

PLAIN = ("llama", "mistral", "qwen2")
"""Architectures whose weights stand in a Checkpoint as they stand in a folder."""


def export(model: Path, folder: Path) -> Path:
    """Writes `folder`, unless it is there. Raises TricornError."""
    done = folder / "model.safetensors"
    if done.exists():
        return folder
    checkpoint = load(model)
    if checkpoint.config["model_type"] not in PLAIN:
        kind = checkpoint.config["model_type"]
        raise TricornError(f"{model}: {kind} is not exported: give a model of {', '.join(PLAIN)}")
    folder.mkdir(parents=True, exist_ok=True)
    config = {**checkpoint.config, "torch_dtype": "bfloat16", "eos_token_id": list(checkpoint.eos_ids)}
    (folder / "config.json").write_text(json.dumps(config))
    export_tokenizer(checkpoint, folder)
    entries, offset = {}, 0
    for name, tensor in checkpoint.tensors.items():
        size = 2 * int(np.prod(tensor.shape))
        place = [offset, offset + size]
        entries[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": place}
        offset += size
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    partial = done.with_suffix(".part")
    with partial.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in checkpoint.tensors.values():
            file.write(_bf16(tensor.dequantize()).tobytes())
    partial.rename(done)
    return folder


def export_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """The files from which transformers makes the tokenizer."""
    (folder / "tokenizer.json").write_text(checkpoint.tokenizer)
    tokens = {entry["id"]: entry["content"] for entry in json.loads(checkpoint.tokenizer)["added_tokens"]}
    about: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if checkpoint.chat_template:
        about["chat_template"] = checkpoint.chat_template
    if checkpoint.eos_ids and checkpoint.eos_ids[0] in tokens:
        about["eos_token"] = about["pad_token"] = tokens[checkpoint.eos_ids[0]]
    if checkpoint.bos_id in tokens:
        about["bos_token"] = tokens[checkpoint.bos_id]
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def _bf16(values: F32) -> np.ndarray:
    """Rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
