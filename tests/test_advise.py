"""`tricorn plan` and `tricorn advise`: sizes that can be checked by hand, and predictions that follow from costs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tricorn.advise.plan import KNOWN, plan, shape_of, told, units
from tricorn.advise.predict import Figures, Point, _pages, _verified, advise
from tricorn.bench.summary import Slo
from tricorn.engine.factory import open_executor
from tricorn.engine.options import EngineOptions
from tricorn.request import TricornError
from tricorn.scheduler.cost import Cost
from tricorn.simulate.machine import Machine
from tricorn.weights.hub import is_pulled

COST = Cost(step=0.002, prefill_token=0.001, prefill_pair=0.0, decode_row=0.0005, decode_pair=0.0)
MACHINE = Machine(model="m", pages=4096, context=8192, max_sequences=16, max_tokens=512, cost=COST)


def test_a_large_model_on_cards() -> None:
    """Llama 3.3 70B: 80 layers, 8 heads of 128, keys and values, 2 bytes each."""
    found = plan("Llama-3.3-70B-Instruct", 8192, 32, "f16", 4 * 80 * 10**9)
    assert found.kv_token_bytes == 80 * 2 * 8 * 128 * 2 == 327_680
    assert found.sequence_bytes == 2_684_354_560
    assert units(found.sequence_bytes) == "2.68 GB = 2.50 GiB"
    assert found.kv_bytes == 85_899_345_920
    assert found.fits == (320 * 10**9 - 2 * KNOWN["llama-3.3-70b"].parameters) // 2_684_354_560
    text = told(found)
    assert "327,680 bytes (f16)" in text
    assert "85.90 GB = 80.00 GiB" in text
    assert "enough" in text
    assert "not enough for 32" in told(plan("llama-3.3-70b", 8192, 32, "f16", 160 * 10**9))


def test_the_same_as_the_engine_takes(engine_for: Callable[..., Any]) -> None:
    """The code is the same, the numbers are too."""
    path = engine_for("llama")[1].path
    executor, info, _ = open_executor(EngineOptions(path=str(path), threads=1, kv_bytes=2**24))
    executor.close()
    found = plan(str(path), None, 2, "f16", None)
    assert found.page_bytes == info.page_bytes
    assert found.context == info.context == 512
    assert found.pages == 2 * 512 // info.page_size
    assert found.fits is None


def test_a_configuration_is_enough(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = plan(str(tmp_path / "config.json"), 100, 1, "f32", 2**20)
    assert found.kv_token_bytes == 4 * 2 * 2 * 32 * 4
    assert found.sequence_bytes == 112 * found.kv_token_bytes
    assert found.weight_bytes is None
    assert "weights" not in told(found).replace("beside the weights", "")


@pytest.mark.parametrize(
    ("model", "context", "words"),
    [
        ("llama-3.3-7b", None, "did you mean llama-3.3-70b"),
        ("nothing-like-it", None, "known are"),
        ("llama-3.3-70b", 200_000, "made for 131072 tokens"),
    ],
)
def test_what_cannot_be_planned(model: str, context: int | None, words: str) -> None:
    with pytest.raises(TricornError, match=words):
        plan(model, context, 1, "f16", None)


def test_known_models_are_as_published() -> None:
    for name, known in KNOWN.items():
        assert known.layers * known.kv_heads * known.head_dim % 1024 == 0, name
        assert shape_of(name.upper()).weight_bytes == 2 * known.parameters


def test_one_client_by_hand() -> None:
    """512 tokens of 1 ms and a step; then a step and a row for each token."""
    found = advise(MACHINE, Point(512, 33, 1), 1 << 20, None)
    assert found.predicted.ttft_ms == pytest.approx(514, rel=0.1)
    assert found.predicted.token_ms == pytest.approx(2.5, rel=0.1)
    assert found.predicted.output_tok_s == pytest.approx(33 / (0.514 + 32 * 0.0025), rel=0.1)
    assert found.pages == 35
    assert found.kv_mib == 35
    assert found.slo_kept is None


def test_more_clients_wait_longer_and_get_more() -> None:
    one, eight = (advise(MACHINE, Point(256, 64, count), 1 << 20, Slo(ttft=300.0)) for count in (1, 8))
    assert eight.predicted.ttft_ms > one.predicted.ttft_ms
    assert eight.predicted.output_tok_s > one.predicted.output_tok_s
    assert one.slo_kept
    assert not eight.slo_kept


def test_what_is_shared_saves_time_and_pages() -> None:
    alone, shared = (advise(MACHINE, Point(512, 16, 4, common), 1 << 20, None) for common in (0, 480))
    assert shared.predicted.ttft_ms < 0.5 * alone.predicted.ttft_ms
    assert _pages(Point(512, 16, 4, 480)) == 30 + 4 * 3
    assert shared.pages < alone.pages


def test_a_verification_judges_the_worst_figure() -> None:
    point = advise(MACHINE, Point(512, 33, 1), 1 << 20, None)
    predicted = point.predicted
    near = _verified(point, 1.2 * predicted.ttft_ms, predicted.token_ms, predicted.output_tok_s)
    assert near.holds
    assert near.measured == Figures(round(1.2 * predicted.ttft_ms, 1), predicted.token_ms, predicted.output_tok_s)
    far = _verified(point, predicted.ttft_ms, 0.7 * predicted.token_ms, predicted.output_tok_s)
    assert not far.holds
    assert far.off == pytest.approx(0.3, abs=0.01)


@pytest.mark.skipif(not is_pulled("smollm2-135m"), reason="smollm2-135m is not here: run tricorn pull smollm2-135m")
def test_the_commands(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tricorn.cli", *words], capture_output=True, text=True, timeout=300
        )

    ended = run("plan", "smollm2-135m", "--context", "1024", "--concurrency", "4", "--memory", "1G")
    assert ended.returncode == 0, ended.stderr
    assert "23,040 bytes (f16)" in ended.stdout
    assert run("plan", "smollm2-135m", "--memory", "x").returncode != 0
    cost = tmp_path / "cost.json"
    import msgspec

    cost.write_bytes(msgspec.json.encode(MACHINE))
    ended = run(
        "advise", "--cost", str(cost), "--prompt", "64", "--output", "8", "--concurrency", "1,2", "--verify", "--json"
    )
    first, second = json.loads(ended.stdout)["advice"]
    assert first["measured"]["output_tok_s"] > 0
    assert second["point"]["concurrency"] == 2
    assert ended.returncode == (0 if first["holds"] and second["holds"] else 1)
    ended = run("advise", "--cost", str(cost), "--prompt", "64", "--shared", "64")
    assert "one at least must be its own" in ended.stderr
