"""A real model behind a real server for every client, and a folder that tells them its tokenizer.

These run in an environment of their own, where tricorn is not installed: TRICORN_PYTHON names the Python that has it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from served import PYTHON, Served, served

MODEL = "smollm2-135m"

for name in ("OPENAI_API_KEY", "LITELLM_LOG"):
    os.environ.pop(name, None)
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    with served(MODEL) as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer as transformers reads it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    program = f"""
from pathlib import Path
from tricorn.bench.export import export_tokenizer
from tricorn.weights.checkpoint import load
from tricorn.weights.hub import model_path
export_tokenizer(load(model_path({MODEL!r})), Path({str(folder)!r}))
"""
    subprocess.run([PYTHON, "-c", program], check=True)
    return folder
