"""Compares the reference executor with transformers in float32; writes the goldens `make test` checks without PyTorch.

    python tests/parity/compare.py [--write] [NAME ...]

Needs torch and transformers (requirements.txt beside this file). NAMEs choose small cases or real models; all by
default. A real model is skipped, with a line that says so, when its file is not in the model cache. `--write` rewrites
the goldens, which without it are compared with the oracle's fresh logits. Exit code 1 when anything differs by more
than the tolerance.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent.parent))

from checkpoints import make, write_folder
from parity import cases
from parity.cases import CASES, Case
from parity.real import LazyWeights, load_real
from tricorn.models import build_graph
from tricorn.runtime.reference import ReferenceExecutor
from tricorn.weights.checkpoint import load

F32 = NDArray[np.float32]


def relative_error(oracle: F32, ours: F32) -> float:
    """max|a - b| / max|a|; a NaN anywhere is infinite."""
    error = float(np.abs(oracle - ours).max() / np.abs(oracle).max())
    return error if np.isfinite(error) else float("inf")


def oracle_logits(model: Any, ids: list[int]) -> F32:
    with torch.no_grad():
        result: F32 = model(torch.tensor([ids])).logits[0].float().numpy()
    return result


def small_logits(case: Case) -> tuple[F32, F32]:
    """The oracle's logits and ours, each read from the same folder in its own way."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), case.architecture, case.seed, **case.overrides)
        checkpoint = load(Path(folder))
        weights = LazyWeights(checkpoint.tensors)
        ours = ReferenceExecutor(build_graph(checkpoint.config), weights, pages=0).forward(case.ids())
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        return oracle_logits(model.eval(), case.ids()), ours


def checksum(case: Case) -> NDArray[np.uint32]:
    """Of the weights, to tell a changed generator from a changed model."""
    _, weights = make(case.architecture, case.seed, **case.overrides)
    return np.array(zlib.crc32(b"".join(tensor.tobytes() for tensor in weights.values())), np.uint32)


def real_oracle(name: str, weights: Mapping[str, F32], ids: list[int]) -> F32:
    """The published config with the file's weights, dequantized; Gemma's norms back in the form that lacks 1."""
    config = transformers.AutoConfig.for_model(**cases.REAL_CONFIGS[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    gemma = config.model_type.startswith("gemma")
    state = {}
    for key in weights:
        tensor = np.array(weights[key])
        state[key] = torch.from_numpy(tensor - 1 if gemma and key.endswith("norm.weight") else tensor)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    fill_buffers(model, config)
    return oracle_logits(model.eval(), ids)


def fill_buffers(model: Any, config: Any) -> None:
    """Makes the buffers that no checkpoint holds (rotary frequencies, Gemma's embedding scale)."""
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    embedding = model.model.embed_tokens
    if hasattr(embedding, "embed_scale"):
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale)
    empty = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if empty:
        raise RuntimeError(
            f"the oracle's {empty} were never filled; does this version of transformers keep new buffers?"
        )


class Report:
    """Prints a line per comparison and remembers whether all passed."""

    def __init__(self) -> None:
        self.passed = True

    def line(self, name: str, what: str, error: float) -> None:
        good = error <= cases.TOLERANCE
        self.passed &= good
        print(f"{'ok  ' if good else 'FAIL'} {name:22} {what:28} max|a-b|/max|a| = {error:.2e}", flush=True)


def compare_small(names: list[str], write: bool, report: Report) -> None:
    stored = dict(np.load(cases.SMALL_GOLDENS)) if cases.SMALL_GOLDENS.exists() else {}
    for name in names:
        oracle, ours = small_logits(CASES[name])
        report.line(name, "reference and transformers", relative_error(oracle, ours))
        rows = oracle[list(cases.ROWS)]
        if write:
            stored[f"{name}/logits"], stored[f"{name}/checksum"] = rows, checksum(CASES[name])
        golden = stored.get(f"{name}/logits", np.full_like(rows, np.nan))
        report.line(name, "golden and transformers", relative_error(rows, golden))
    if write:
        np.savez_compressed(cases.SMALL_GOLDENS, **stored)


def compare_real(name: str, write: bool, report: Report) -> None:
    checkpoint, ids = load_real(name)
    weights = LazyWeights(checkpoint.tensors)
    ours = ReferenceExecutor(build_graph(checkpoint.config), weights, pages=0).forward(ids)
    oracle = real_oracle(name, weights, ids)
    report.line(name, "reference and transformers", relative_error(oracle, ours))
    shifted = oracle[:-1] - oracle[:-1].max(axis=-1, keepdims=True)
    chosen = shifted[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(shifted).sum(axis=-1))
    print(f"     {name:22} perplexity of the text       {np.exp(-chosen.mean()):.2f}", flush=True)
    rows = oracle[list(cases.REAL_ROWS)]
    best = np.argsort(-rows, axis=-1, kind="stable")[:, : cases.REAL_BEST].astype(np.int32)
    logits = np.take_along_axis(rows, best, axis=-1)
    if write:
        largest = np.abs(rows).max(axis=-1)
        np.savez_compressed(
            cases.real_golden(name), ids=np.array(ids, np.int32), best=best, logits=logits, largest=largest
        )
    golden = dict(np.load(cases.real_golden(name))) if cases.real_golden(name).exists() else {"logits": logits * np.nan}
    report.line(name, "golden and transformers", relative_error(logits, golden["logits"]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares the reference executor with transformers.")
    parser.add_argument("--write", action="store_true", help="rewrite the goldens")
    parser.add_argument("names", nargs="*", metavar="NAME", help="small cases or real models; all by default")
    arguments = parser.parse_args()
    names = arguments.names or [*CASES, *cases.REAL_CONFIGS]
    unknown = [name for name in names if name not in CASES and name not in cases.REAL_CONFIGS]
    if unknown:
        parser.error(f"no case is named {unknown[0]!r}; known are {', '.join([*CASES, *cases.REAL_CONFIGS])}")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    report = Report()
    compare_small([name for name in names if name in CASES], arguments.write, report)
    for name in names:
        if name in cases.REAL_CONFIGS:
            try:
                compare_real(name, arguments.write, report)
            except FileNotFoundError as missing:
                print(f"skip {name:22} {missing}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
