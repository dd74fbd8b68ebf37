"""What tests share: the real models where they are, and small random engines, each built once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tricorn.weights.hub import cache_dir


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """The GGUF file of a built-in model; the test is skipped where it is not in the cache."""

    def find(name: str) -> Path:
        path = cache_dir() / "models" / f"{name}.gguf"
        if not path.is_file():
            pytest.skip(f"the model {name} is not here: run tricorn pull {name}")
        return path

    return find


@pytest.fixture(scope="session")
def real_engine(real_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The engine file of a built-in model, built once into a temporary folder."""
    folder = tmp_path_factory.mktemp("engines")

    @cache
    def built(source: Path) -> Path:
        from tricorn.compiler import build
        from tricorn.weights.checkpoint import load

        path = folder / f"{source.stem}.tricorn"
        build(load(source), path)
        return path

    return lambda name: built(real_model(name))


@pytest.fixture
def smollm2_gguf(real_model: Callable[[str], Path]) -> Path:
    return real_model("smollm2-135m")


@pytest.fixture
def smollm2_engine(real_engine: Callable[[str], Path]) -> Path:
    return real_engine("smollm2-135m")


@pytest.fixture(scope="session")
def engine_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`engine_for(architecture, weight types, **config)`: a small random checkpoint, and its engine file opened."""
    folder = tmp_path_factory.mktemp("small-engines")

    @cache
    def made(architecture: str, kinds: str | tuple[str, ...] = "F32", seed: int = 0, **overrides: Any) -> Any:
        from engines import checkpoint, compiled

        source = checkpoint(architecture, kinds, seed, **overrides)
        return source, compiled(source, folder)

    return made
