"""Small text and JSON files of a model folder, read with a bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tricorn.request import TricornError

MAX_BYTES = 1 << 28
"""The largest tokenizer.json in use is under 40 MB."""


def read_text(path: Path) -> str:
    """UTF-8 text of at most MAX_BYTES."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TricornError(f"{path} is larger than {MAX_BYTES >> 20} MB, which no model needs")
        return path.read_text("utf-8")
    except OSError as error:
        raise TricornError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TricornError(f"{path} is not UTF-8 text") from None


def parse_json(text: str | bytes, source: str) -> dict[str, Any]:
    """A JSON object without repeated keys. `source` names it in the error."""
    try:
        value = json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise TricornError(f"{source}: broken JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise TricornError(f"{source}: must hold a JSON object")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key comes twice in one object")
    return value


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object, or `default` when the file does not exist and a default is given."""
    if default is not None and not path.exists():
        return default
    return parse_json(read_text(path), str(path))
