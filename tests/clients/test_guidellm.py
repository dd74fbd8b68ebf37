"""guidellm: a benchmark of somebody else's against the server, over completions and chat."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from served import Served


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_run(server: Served, tokenizer: Path, tmp_path: Path, path: str) -> None:
    report = tmp_path / "report.json"
    ended = subprocess.run(
        [
            str(Path(sys.executable).parent / "guidellm"), "run", "--disable-progress",
            "--backend", f"kind=openai_http,target={server.url},model=small,request_format={path}",
            "--profile", "kind=concurrent,streams=4",
            "--constraint", "kind=max_requests,count=12",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
            "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
            "--output", f"kind=json,path={report}",
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] >= 12
    assert totals["errored"] == 0
