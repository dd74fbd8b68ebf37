"""The command line as a person types it: what it prints, and that an error is one line and exit code 1."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import write_folder


def tricorn(*arguments: object, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    import os

    environment = dict(os.environ) | ({"TRICORN_CACHE": str(cache)} if cache else {})
    command = [sys.executable, "-m", "tricorn.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with a small random Llama."""
    write_folder(tmp_path / "small", "llama", 0, 1)
    return tmp_path / "small"


def test_help_lists_every_command() -> None:
    shown = tricorn("--help").stdout
    for command in ("serve", "chat", "pull", "models", "build", "inspect", "bench"):
        assert f"  {command} " in shown


def test_models(tmp_path: Path) -> None:
    entries = json.loads(tricorn("models", "--json", cache=tmp_path).stdout)
    assert next(entry["name"] for entry in entries) == "smollm2-135m"
    assert not any(entry["pulled"] for entry in entries)


def test_build_and_inspect(small: Path, tmp_path: Path) -> None:
    engine = tmp_path / "x.tricorn"
    built = tricorn("build", small, "-o", engine)
    assert built.returncode == 0, built.stderr
    assert built.stdout.strip() == str(engine)
    assert "operations fused into" in built.stderr
    shown = tricorn("inspect", engine, "--tensors").stdout
    for part in ("rope_store", "attention", "gated", "layers like this one", "model.norm.weight"):
        assert part in shown


def test_a_model_is_built_into_the_cache_once(small: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert tricorn("inspect", small, cache=tmp_path / "cache").returncode == 0
    (engine,) = (tmp_path / "cache" / "engines").iterdir()
    engine.write_bytes(engine.read_bytes()[:-1])  # as an interrupted copy leaves it: built anew, without a word
    assert tricorn("inspect", small, cache=tmp_path / "cache").returncode == 0


def test_bench_machine() -> None:
    machine = json.loads(tricorn("bench", "machine", "--threads", 1, "--json").stdout)
    assert set(machine) == {"threads", "read_gb_s", "int8_gop_s", "bf16_gflop_s", "fp32_gflop_s"}
    assert all(value > 0 for value in machine.values())


def test_bench_engine(small: Path, tmp_path: Path) -> None:
    run = tricorn(
        *("bench", "engine", "--model", small, "--prompt", 20, "--output", 4, "--batch", "1,3", "--json"),
        cache=tmp_path / "cache",
    )
    result = json.loads(run.stdout)
    assert [row["batch"] for row in result["rows"]] == [1, 3]
    needed = {"prompt", "output", "prefill_tok_s", "decode_tok_s", "prefill_limit_share", "decode_limit_share"}
    assert all(needed <= set(row) and row["decode_tok_s"] > 0 for row in result["rows"])


REFUSED: list[tuple[Callable[[Path], list[Any]], str]] = [
    (lambda small: ["serve", "smolm2-135m"], "did you mean smollm2-135m"),
    (lambda small: ["serve", small, "--kv-bytes", "much"], "--kv-bytes much"),
    (lambda small: ["serve", small, "--kv-bytes", "1K"], "needs at least 2"),
    (lambda small: ["bench", "engine", "--model", small, "--batch", "0"], "--batch 0"),
    (lambda small: ["pull", "nothing"], "no built-in model 'nothing'"),
    (lambda small: ["inspect", small / "config.json"], "not an engine file"),
    (lambda small: ["build", small / "missing.gguf"], "missing.gguf"),
]


@pytest.mark.parametrize(("arguments", "told"), REFUSED)
def test_errors_are_one_line(small: Path, tmp_path: Path, arguments: Callable[[Path], list[Any]], told: str) -> None:
    run = tricorn(*arguments(small), cache=tmp_path / "cache")
    assert run.returncode == 1
    lines = [line for line in run.stderr.splitlines() if line and not line.startswith(("compiled", "operations"))]
    assert told in lines[-1]
    assert lines[-1].startswith("tricorn: ")
    assert "Traceback" not in run.stderr


def test_a_busy_port(small: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = tricorn("serve", small, "--port", taken.getsockname()[1], cache=tmp_path / "cache")
    assert run.returncode == 1
    assert "is in use" in run.stderr.splitlines()[-1]
