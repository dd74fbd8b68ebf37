"""`tricorn bench serve`: what it asks, what it makes of the answers, and the command against a served engine."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from served import Served, served
from tricorn.bench import report
from tricorn.bench.load import Client, Result, Usage
from tricorn.bench.serve import Spec, measure_all
from tricorn.bench.summary import Overhead, Run, Slo, Summary, flat, spread, summarize
from tricorn.bench.workloads import WORKLOADS, Session, sessions
from tricorn.request import TricornError

VOCABULARY = list(range(100, 400))
CLIENT = Overhead(0.1, 1.0, 2.0, 3.0)


@pytest.fixture(scope="module")
def server(engine_for: Callable[..., Any]) -> Iterator[Served]:
    with served(engine_for("llama")[1].path) as running:
        yield running


def lengths(asked: list[Session]) -> set[tuple[int, int]]:
    return {(len(turn.new), turn.output) for session in asked for turn in session.turns}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_for_a_seed(name: str) -> None:
    assert sessions(name, VOCABULARY, 20, 3) == sessions(name, VOCABULARY, 20, 3)
    assert sessions(name, VOCABULARY, 20, 3) != sessions(name, VOCABULARY, 20, 4)
    assert len(sessions(name, VOCABULARY, 20, 3)) == 20


def test_sizes() -> None:
    made = {name: sessions(name, VOCABULARY, 40, 0) for name in WORKLOADS}
    assert lengths(made["alpha"]) == {(2048, 256)}
    assert lengths(made["beta"]) == {(512, 512)}
    assert lengths(made["plain"]) == {(512, 128)}
    assert lengths(made["rag"]) == {(4 * 384 + 48, 96)}
    stems = [session.turns[0].new[:1331] for session in made["alpha"]]
    assert stems[0] == stems[4] != stems[1]
    assert len({tuple(stem) for stem in stems}) == 4
    assert {len(session.turns) for session in made["chat"]} == {5}
    assert {session.turns[0].new[:256] == made["chat"][0].turns[0].new[:256] for session in made["chat"]} == {True}
    assert [session.at for session in made["burst"][14:18]] == [0.0, 0.0, 8.0, 8.0]
    assert {(512 in size) for size in lengths(made["mixed"])} == {True, False}


def test_a_trace_shares_the_blocks_that_it_says(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 1500, "input_length": 1030, "output_length": 6, "hash_ids": [1, 2, 9]},
        {"prompt": [7, 8], "max_tokens": 2},
        {"prompt": "hello", "max_tokens": 2},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    one, two, ids, text = sessions(str(path), VOCABULARY, 10, 0)
    assert (one.at, two.at, ids.at) == (0.0, 1.5, None)
    assert (len(one.turns[0].new), len(two.turns[0].new)) == (1100, 1030)
    assert one.turns[0].new[:1024] == two.turns[0].new[:1024]
    assert one.turns[0].new[1024:1030] != two.turns[0].new[1024:]
    assert (ids.turns[0].new, text.turns[0].new) == ([7, 8], "hello")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "trace.jsonl:1:"),
        ('{"prompt": "x"}', "trace.jsonl:1: give prompt"),
        ('{"prompt": "x", "input_length": 4, "max_tokens": 1}', "trace.jsonl:1: give prompt"),
        ('{"input_length": "4", "max_tokens": 1}', "trace.jsonl:1: Expected"),
        ("", "holds no request"),
    ],
)
def test_a_bad_file_is_told_by_its_line(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "trace.jsonl").write_text(line + "\n")
    with pytest.raises(TricornError, match=words):
        sessions(str(tmp_path / "trace.jsonl"), VOCABULARY, 10, 0)


def test_a_wrong_name_is_told() -> None:
    with pytest.raises(TricornError, match="no workload 'gamma': use alpha, beta"):
        sessions("gamma", VOCABULARY, 1, 0)
    with pytest.raises(TricornError, match="No such file"):
        sessions("gamma.jsonl", VOCABULARY, 1, 0)


def result(sent: float, times: tuple[float, ...], **more: Any) -> Result:
    fields: dict[str, Any] = {"status": 200, "finish_reason": "length", "ended": times[-1] if times else sent + 1}
    fields |= {"counts": (1,) * len(times), "usage": Usage(10, len(times))}
    return Result(sent=sent, times=times, **{**fields, **more})


RESULTS = [
    result(0.0, (0.1, 0.2, 0.4)),
    result(1.0, (1.3, 1.35)),
    result(1.0, (), status=429, finish_reason=None, usage=None, error="no room"),
    result(1.0, (1.2,), finish_reason=None, error="the answer broke off"),
]


def summary(slo: Slo | None = None) -> Summary:
    more: dict[str, Any] = {"workload": "beta", "load": "2 at a time", "server": {}, "peak_rss_mib": None}
    return summarize(RESULTS, seconds=2.0, slo=slo, client=CLIENT, **more)


def test_a_summary() -> None:
    found = summary(Slo(ttft=200, tpot=151))
    assert (found.requests, found.completed) == (4, 2)
    assert found.errors == {"status 429": 1, "the answer broke off": 1}
    assert (found.prompt_tokens, found.output_tokens) == (20, 5)
    assert (found.requests_s, found.output_tok_s, found.total_tok_s) == (1.0, 2.5, 12.5)
    assert found.ttft.mean == pytest.approx(200)
    assert found.ttft.max == pytest.approx(300)
    assert found.tpot.max == pytest.approx(150)
    assert found.itl.max == pytest.approx(200)
    assert found.e2e.p50 == pytest.approx(375)
    assert (found.goodput_requests_s, found.goodput_share) == (0.5, 0.25)
    assert summary().goodput_share is None
    row = flat(found)
    assert row["errors"] == 2
    assert row["ttft.max"] == pytest.approx(300)


def test_nothing_is_no_fault() -> None:
    assert spread([]).max == 0


def test_a_service_level() -> None:
    assert Slo.parse("ttft=1000, tpot=50") == Slo(ttft=1000.0, tpot=50.0)
    for wrong in ("ttft", "ttft=x", "itl=3", "?"):
        with pytest.raises(TricornError, match="no service level"):
            Slo.parse(wrong)


def test_a_report_is_well_formed() -> None:
    page = report.page("beta <on> x", [Run(summary(), RESULTS, 0.0)])
    assert "beta &lt;on&gt; x" in page
    assert "<script" not in page
    assert "http" not in page
    for figure in page.split("<figure>")[1:]:
        drawn = figure[figure.index("<svg") : figure.index("</svg>") + 6]
        drawn = re.sub(r"([\w-]+)=([^'\s>/]+)(?=[\s>/])", r"\1='\2'", drawn)
        ElementTree.fromstring(drawn)
    assert page.count("<figure>") == 6


def test_turns_go_on_from_what_was_said(server: Served, tmp_path: Path) -> None:
    """The second turn's prompt is found in the cache but for what is new."""
    from tricorn.bench import workloads

    made = Session((workloads.Turn(VOCABULARY[:100], 20), workloads.Turn(VOCABULARY[:40], 20)))

    def two(random: Any, text: Any, count: int) -> list[Session]:
        return [made] * count

    (tmp_path / "one.jsonl").write_text('{"input_length": 40, "max_tokens": 4}\n' * 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "WORKLOADS", {**WORKLOADS, "two": two, "plain": lambda *_: []})
        (run,) = measure_all(server.url, "", [Spec(workload="two", requests=1, concurrency=1)])
    assert run.summary.completed == 2
    assert run.summary.prompt_tokens == 100 + 160
    assert run.summary.output_tokens == 40
    assert run.summary.cached_tokens == run.summary.server["prefix_cache_hits"] > 100
    assert run.summary.peak_rss_mib
    assert run.summary.peak_rss_mib > 20


def bench(server: Served, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tricorn.cli", "bench", "serve", "--url", server.url, "--warmup", "0", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command(server: Served, tmp_path: Path) -> None:
    work = tmp_path / "one.jsonl"
    work.write_text('{"input_length": 40, "max_tokens": 4}\n' * 6 + '{"input_length": 2000, "max_tokens": 4}\n')
    files = ["--html", str(tmp_path / "r.html"), "--csv", str(tmp_path / "r.csv")]
    ended = bench(server, "--workload", str(work), "--concurrency", "1,4", "--rate", "50", "--slo", "ttft=1", *files)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("6/7") == 3
    assert "failed, 50 sessions/s: status 400: 1" in ended.stdout
    rows = list(csv.DictReader((tmp_path / "r.csv").open()))
    assert [row["output_tokens"] for row in rows] == ["24"] * 3
    assert (tmp_path / "r.html").read_text().count("<h2>") == 3
    ended = bench(server, "--workload", str(work), "--endpoint", "chat", "--requests", "2", "--json")
    (run,) = json.loads(ended.stdout)["runs"]
    assert run["completed"] == 2
    assert run["output_tokens"] == 8
    assert run["client"]["cpu_share"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workload", "gamma"], "no workload"),
        (["--rate", "0"], "above 0"),
        (["--slo", "x"], "no service level"),
        (["--endpoint", "chat", "--workload", "agent"], "use --endpoint completions"),
        (["--url", "http://127.0.0.1:1"], "GET /v1/models"),
    ],
)
def test_what_is_refused(server: Served, options: list[str], words: str) -> None:
    ended = bench(server, *options)
    assert ended.returncode != 0
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_addresses() -> None:
    with pytest.raises(TricornError, match="no address"):
        Client("localhost")
