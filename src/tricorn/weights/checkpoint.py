"""A model as its makers published it, in whichever form: config, tensors and tokenizer in Hugging Face's terms."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tricorn.request import TricornError
from tricorn.weights import gguf, hub, safetensors, tokenizer, translate
from tricorn.weights.tensor import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """`config` is in the form of config.json; `tensors` bear the names of Hugging Face, and are mapped, not read.

    Llama's q and k rows are in the rotate-half order, Gemma's norm weights are the multipliers themselves. `tokenizer`
    is a tokenizer.json. `eos_ids` all end the output; `add_bos` says whether a raw prompt begins with `bos_id`.
    `digest` (hex) tells contents apart without reading them: the sha256 of a built-in model, otherwise one over
    header, names, sizes and times.
    """

    name: str
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: str
    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    digest: str


def load(path: Path) -> Checkpoint:
    """Opens a .gguf file or a folder with safetensors. Raises TricornError for anything unsound or unsupported."""
    path = Path(path)
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_gguf(path)
    raise TricornError(f"{path}: no such model file or folder")


def _from_gguf(path: Path) -> Checkpoint:
    file = gguf.read(path)
    config = translate.config(file)
    files = tokenizer.from_gguf(file.metadata, config["vocab_size"])
    tensors = translate.tensors(file, config)
    digest = hub.known_digest(path) or _digest([path], bytes(file.header))
    return _join(path.stem, config, tensors, files, digest)


def _from_folder(folder: Path) -> Checkpoint:
    config = safetensors.read_config(folder)
    paths, tensors = safetensors.read(folder, config)
    files = tokenizer.from_folder(folder, config)
    digest = _digest(paths, repr((sorted(config.items()), files)).encode())
    return _join(folder.resolve().name, config, tensors, files, digest)


def _join(
    name: str,
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    files: tokenizer.TokenizerFiles,
    digest: str,
) -> Checkpoint:
    return Checkpoint(
        name=name,
        config=config,
        tensors=tensors,
        tokenizer=files.json,
        chat_template=files.chat_template,
        bos_id=files.bos_id,
        eos_ids=files.eos_ids,
        add_bos=files.add_bos,
        digest=digest,
    )


def _digest(paths: list[Path], description: bytes) -> str:
    digest = hashlib.sha256(description)
    for path in paths:
        stat = path.stat()
        digest.update(f"\0{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()
