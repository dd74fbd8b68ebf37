"""Maps the tensors of a Hugging Face folder: one safetensors file, or shards with an index.

Format: `README.md` of safetensors: 8 bytes of header length, a JSON header, then the data without holes.
Pickled weights and remote code are never read.
"""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tricorn.request import TricornError
from tricorn.weights.files import parse_json, read_json
from tricorn.weights.tensor import Tensor, bytes_of, from_float32
from tricorn.weights.translate import LazyTensors

log = logging.getLogger(__name__)

MAX_HEADER = 100 << 20  # the format's own limit
TYPES = ("F32", "F16", "BF16")
INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, its text part alone for a model that has others too."""
    path = folder / "config.json"
    if not path.exists():
        raise TricornError(f"{folder} has no config.json, so it is not a Hugging Face model folder")
    config = read_json(path)
    if "auto_map" in config:
        log.warning("%s: custom code (auto_map) is ignored", path)
        del config["auto_map"]
    if "quantization_config" in config:
        raise TricornError(f"{path}: quantized safetensors are not supported; take the model unquantized or as GGUF")
    text = config.get("text_config")
    if config.get("model_type") == "gemma3" and isinstance(text, dict):
        config = text | {"model_type": "gemma3_text", "eos_token_id": config.get("eos_token_id")}
    return config


def read(folder: Path, config: dict[str, Any]) -> tuple[list[Path], Mapping[str, Tensor]]:
    """The files and their tensors, named as in a text-only model; norm weights of Gemma as multipliers, w + 1."""
    expected = _files(folder)
    found: dict[str, Tensor] = {}
    for path, names in expected.items():
        tensors = _read_file(path)
        missing = names - tensors.keys()
        if missing:
            raise TricornError(f"{path} lacks the tensor {min(missing)!r} that the index places there")
        twice = tensors.keys() & found.keys()
        if twice:
            raise TricornError(f"{path}: tensor {min(twice)!r} is also in another shard")
        found |= tensors
    plus_one = str(config.get("model_type", "")).startswith("gemma")
    makers: dict[str, Callable[[], Tensor]] = {}
    for name, tensor in found.items():
        new = _text_name(name)
        if new is not None:
            norm = plus_one and new.endswith("norm.weight")
            makers[new] = partial(_norm_multiplier if norm else _same, tensor)
    return list(expected), LazyTensors(makers)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _norm_multiplier(tensor: Tensor) -> Tensor:
    return from_float32(tensor.dequantize() + np.float32(1))


def _text_name(name: str) -> str | None:
    """The name in a text-only model; None for a part of a multimodal model that text does not need."""
    if name.startswith(
        ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
    ):
        return None
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def _files(folder: Path) -> dict[Path, set[str]]:
    """Each file to read, with the names that the index (if any) places in it."""
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        files = _indexed(folder)
    elif "model.safetensors" in present:
        files = {folder / "model.safetensors": set[str]()}
    elif len(present) == 1 and not _one_of_several(present[0]):
        files = {folder / present[0]: set[str]()}
    elif present:
        raise TricornError(f"{folder} has {len(present)} safetensors shards but no {INDEX}; fetch the index too")
    elif _pickled(folder):
        raise TricornError(
            f"{folder} has pickled weights only, which can run code and are refused; convert to safetensors"
        )
    else:
        raise TricornError(f"{folder} has no safetensors weights")
    for name in set(present) - {path.name for path in files}:
        log.warning("%s is not part of the model and is ignored", folder / name)
    return files


def _one_of_several(name: str) -> bool:
    shard = re.search(r"-\d+-of-(\d+)\.", name)
    return shard is not None and int(shard[1]) != 1


def _pickled(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl"))


def _indexed(folder: Path) -> dict[Path, set[str]]:
    index = folder / INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise TricornError(f"{index}: has no 'weight_map' of tensor names to files")
    files: dict[Path, set[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise TricornError(
                f"{index}: tensor {name!r} lies in {file!r}, which is not a safetensors file of this folder"
            )
        files.setdefault(folder / file, set()).add(name)
    for path, names in files.items():
        if not path.is_file():
            raise TricornError(
                f"{path} is missing, with tensor {min(names)!r} and {len(names) - 1} more; fetch it again"
            )
    return files


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise TricornError(f"{path}: the file is empty; fetch it again") from None
    except OSError as error:
        raise TricornError(f"{path}: cannot be read: {error.strerror}") from None
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER, len(data) - 8):
        raise TricornError(f"{path}: header of {length} bytes does not fit the file; it is damaged, fetch it again")
    header = parse_json(data[8 : 8 + length], f"{path}: header")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, entry in sorted(header.items(), key=_begin):
        kind, shape, (first, last) = _entry(path, name, entry)
        if first != end or last - first != bytes_of(kind, shape):
            raise TricornError(f"{path}: tensor {name!r} of {kind} {list(shape)} cannot lie at bytes {first} to {last}")
        end = last
        if start + end > len(data):
            raise TricornError(
                f"{path}: tensor {name!r} reaches past the end of the file; it is incomplete, fetch it again"
            )
        raw = np.frombuffer(data, np.uint8, last - first, start + first)
        columns = bytes_of(kind, shape[-1:])
        tensors[name] = Tensor(kind, shape, raw if len(shape) < 2 else raw.reshape(-1, columns))
    if start + end != len(data):
        raise TricornError(f"{path}: {len(data) - start - end} bytes belong to no tensor; the file is damaged")
    return tensors


def _begin(item: tuple[str, Any]) -> int:
    try:
        return int(item[1]["data_offsets"][0])
    except (KeyError, IndexError, TypeError, ValueError):
        return 0  # _entry will say what is wrong


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Type, shape and byte range of one tensor, each checked."""
    kind = entry.get("dtype") if isinstance(entry, dict) else None
    if kind not in TYPES:
        raise TricornError(f"{path}: tensor {name!r} has type {kind!r}; supported are {', '.join(TYPES)}")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _counts(shape) or not 1 <= len(shape) <= 8 or 0 in shape:
        raise TricornError(f"{path}: tensor {name!r} has the unusable shape {str(shape)[:80]}")
    if not _counts(offsets) or len(offsets) != 2:
        raise TricornError(f"{path}: tensor {name!r} has the unusable data_offsets {str(offsets)[:80]}")
    return kind, tuple(shape), (offsets[0], offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
