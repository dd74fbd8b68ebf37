"""What commands have in common: their arguments, and how their texts are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tricorn.request import TricornError

Model = Annotated[
    str,
    typer.Argument(help="A built-in name (see `tricorn models`), hub id, folder, .gguf file, or engine file."),
]
ModelOption = Annotated[str, typer.Option("--model", help="What `tricorn serve` takes as a model.")]
Threads = Annotated[int | None, typer.Option(help="Threads of the engine. [default: the processors it may use]")]
KvType = Annotated[Literal["f16", "bf16", "f32"], typer.Option(help="Type of the KV cache.")]
KvBytes = Annotated[
    str | None,
    typer.Option(help="Size of the KV pool, such as 512M or 2G. [default: a quarter of free memory, at most 4G]"),
]
Short = Annotated[bool, typer.Option("--short", help="A small form that takes some seconds.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

DEFAULT_MODEL = "smollm2-135m"


def engine_options(path: Path, threads: int | None, kv_type: str, kv_bytes: str | None, **others: object):  # type: ignore[no-untyped-def]
    import msgspec

    from tricorn.engine.options import EngineOptions

    fields = {"path": str(path), "threads": threads, "kv_type": kv_type, "kv_bytes": byte_count(kv_bytes), **others}
    return msgspec.convert(fields, EngineOptions)


def byte_count(text: str | None, option: str = "--kv-bytes") -> int | None:
    """ "512M" -> 536870912."""
    if text is None:
        return None
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in units else (text, "")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 15:
        raise TricornError(f"{option} {text}: give a whole number, with K, M or G for binary units, such as 512M")
    return int(digits) << units.get(unit, 0)


def numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > 4096:
        raise TricornError(f"{option} {text}: give whole numbers from 1 to 4096, separated by commas")
    return found


def short_name(model: str) -> str:
    return (
        Path(model).stem if model.endswith((".gguf", ".tricorn")) else Path(model).name if "/" not in model else model
    )
