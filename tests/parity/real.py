"""The real models as the reference executor wants them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from parity.cases import REAL_TEXTS, REAL_TOKENS
from tricorn.weights.checkpoint import Checkpoint, load
from tricorn.weights.hub import cache_dir


class LazyWeights(Mapping[str, NDArray[np.float32]]):
    """A checkpoint's tensors as float32, made at each use: a whole model would take several times its file."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        result: NDArray[np.float32] = self.tensors[name].dequantize()
        return result

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def load_real(name: str) -> tuple[Checkpoint, list[int]]:
    """The checkpoint and the ids of its text. Raises FileNotFoundError when the model is not in the cache."""
    path = cache_dir() / "models" / f"{name}.gguf"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; `tricorn pull {name}` fetches it")
    checkpoint = load(path)
    ids = Tokenizer.from_str(checkpoint.tokenizer).encode(REAL_TEXTS[name], add_special_tokens=False).ids
    bos = [checkpoint.bos_id] if checkpoint.add_bos and checkpoint.bos_id is not None else []
    return checkpoint, (bos + ids)[:REAL_TOKENS]
