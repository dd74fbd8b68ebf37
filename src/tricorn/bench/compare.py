"""`tricorn bench compare`: the same work against several servers in turn, each started and stopped by a recipe.

A recipe is a file of TOML: `name`, `command` (its words), `version` (a command whose output names it), and `env`. In
all of them {port}, {gguf}, {bf16} (a folder), {peers}, {threads}, {last_thread}, {context}, {sequences} and {tokens}
(the two multiplied) stand for what they say. Every round runs every server, the first one another time, so that what a
machine does meanwhile meets all alike; ratios are of the same round.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import msgspec
import uvloop

from tricorn import __version__
from tricorn.bench.export import export
from tricorn.bench.load import Client
from tricorn.bench.serve import Spec, measure
from tricorn.bench.server import START_SECONDS, STOP_SECONDS
from tricorn.bench.summary import Summary
from tricorn.request import TricornError
from tricorn.weights.hub import cache_dir

OURS = "Tricorn"

Tell = Callable[[str], None]


class Recipe(msgspec.Struct, frozen=True):
    """How to start a server, and how it tells its version."""

    name: str
    command: tuple[str, ...]
    version: tuple[str, ...] = ()
    env: dict[str, str] = {}

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Raises TricornError."""
        try:
            return msgspec.convert(tomllib.loads(path.read_text()), cls)
        except (OSError, ValueError) as error:
            raise TricornError(f"{path} is no recipe: {error}") from None


def ours(model: str) -> Recipe:
    command = (sys.executable, "-m", "tricorn.cli", "serve", model, "--port", "{port}", "--threads", "{threads}")
    return Recipe(OURS, (*command, "--max-sequences", "{sequences}", "--kv-bytes", "2G"))


class Cell(msgspec.Struct, frozen=True):
    """A workload under a load, of so many requests."""

    workload: str
    concurrency: int
    requests: int


class Measured(msgspec.Struct, frozen=True):
    """One server in one round: seconds from its start to its first token, and a summary for each cell."""

    server: str
    round: int
    start_seconds: float
    summaries: list[Summary]


class Comparison(msgspec.Struct, frozen=True):
    model: str
    threads: int
    versions: dict[str, str]
    cells: list[Cell]
    measured: list[Measured]


@dataclass(frozen=True)
class Place:
    """Where and how large everything is."""

    gguf: Path
    bf16: Path
    threads: int
    context: int
    sequences: int

    def fill(self, words: Sequence[str], port: int) -> list[str]:
        """Raises TricornError for a name that is none."""
        peers = os.environ.get("TRICORN_PEERS") or str(cache_dir().parent / "tricorn-peers")
        known = {
            "port": port, "gguf": self.gguf, "bf16": self.bf16, "peers": peers, "threads": self.threads,
            "last_thread": self.threads - 1, "context": self.context, "sequences": self.sequences,
            "tokens": self.context * self.sequences,
        }  # fmt: skip
        try:
            return [word.format(**known) for word in words]
        except (LookupError, ValueError) as error:
            raise TricornError(f"a recipe names {error}, which is none of {', '.join(known)}") from None


def run(
    model: str, gguf: Path, recipes: Sequence[Recipe], cells: Sequence[Cell], rounds: int, threads: int, tell: Tell
) -> Comparison:
    """Raises TricornError when a server does not start or answer."""
    folder = cache_dir() / "exported" / gguf.stem
    needs_folder = any("{bf16}" in word for recipe in recipes for word in recipe.command)
    place = Place(
        gguf=gguf,
        bf16=export(gguf, folder) if needs_folder else folder,
        threads=threads,
        context=2560,
        sequences=max(cell.concurrency for cell in cells),
    )
    servers = [ours(model), *recipes]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = [
            runner.run(_measure(recipe, place, cells, number, tell)) for number in range(rounds) for recipe in servers
        ]
    versions = {recipe.name: _version(recipe, place) for recipe in servers}
    return Comparison(model, threads, versions, list(cells), measured)


async def _measure(recipe: Recipe, place: Place, cells: Sequence[Cell], number: int, tell: Tell) -> Measured:
    tell(f"round {number + 1}: {recipe.name}")
    async with _started(recipe, place) as (client, seconds):
        summaries = []
        for count, cell in enumerate(cells):
            spec = Spec(workload=cell.workload, requests=cell.requests, concurrency=cell.concurrency)
            run = await measure(client, replace(spec, seed=1000 * number + count))
            summary = run.summary
            tell(f"  {cell.workload}, {summary.load}: {summary.output_tok_s} tok/s, TTFT {summary.ttft.p50:.0f} ms")
            summaries.append(summary)
    return Measured(recipe.name, number, round(seconds, 2), summaries)


@asynccontextmanager
async def _started(recipe: Recipe, place: Place) -> AsyncIterator[tuple[Client, float]]:
    """A client of the server, and how long it took to its first token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = place.fill(recipe.command, port)
    env = os.environ | dict(zip(recipe.env, place.fill(list(recipe.env.values()), port), strict=True))
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        try:
            process = await asyncio.create_subprocess_exec(
                *words, env=env, stdout=log, stderr=log, start_new_session=True
            )
        except OSError as error:
            raise TricornError(f"{recipe.name}: {words[0]}: {error.strerror}: install it first") from None
        try:
            client = Client(f"http://127.0.0.1:{port}")
            await _first_token(client, process, lambda: _end_of(log, recipe.name))
            yield client, time.monotonic() - began
        finally:
            await _stop(process)


def _end_of(log: IO[bytes], name: str) -> str:
    log.seek(0)
    return f"{name} did not start: {' '.join(log.read().decode(errors='replace')[-600:].split())}"


async def _first_token(client: Client, process: asyncio.subprocess.Process, said: Callable[[], str]) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.returncode is not None:
            raise TricornError(said())
        with suppress(TricornError):
            body = {"model": await client.model(), "prompt": "Hello", "max_tokens": 1}
            if (await client.stream("/v1/completions", body)).complete:
                return
        await asyncio.sleep(0.02)
    raise TricornError(said())


async def _stop(process: asyncio.subprocess.Process) -> None:
    """With all that it started."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
            break
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _version(recipe: Recipe, place: Place) -> str:
    if recipe.name == OURS:
        return __version__
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(place.fill(recipe.version, 0), capture_output=True, text=True, timeout=60)
        if found := re.search(r"\d[\w.+-]*", re.sub(r"(?s).*^Version:", "", done.stdout + done.stderr, flags=re.M)):
            return found[0]
    return "unknown"


# What is told of it

FIGURES: tuple[tuple[str, Callable[[Summary], float]], ...] = (
    ("output tok/s", lambda summary: summary.output_tok_s),
    ("TTFT ms, mean", lambda summary: summary.ttft.mean),
    ("TTFT ms, p99", lambda summary: summary.ttft.p99),
    ("ms per token, mean", lambda summary: summary.tpot.mean),
    ("peak RSS MiB", lambda summary: summary.peak_rss_mib or 0.0),
)


def markdown(found: Comparison) -> str:
    """The tables: for each cell the median of each figure, and how many times the throughput of each other server ours
    is, round by round (least to most)."""
    names = list(found.versions)
    rounds = 1 + max(each.round for each in found.measured)
    lines = [
        f"# {found.model}, {found.threads} threads",
        "",
        f"Versions: {', '.join(f'{name} {version}' for name, version in found.versions.items())}. Medians of {rounds}"
        f" rounds, in which the servers take turns. Times {OURS}: throughput of {OURS} over that of the server in the"
        " same round, median (least to most).",
    ]
    for place, cell in enumerate(found.cells):
        lines += ["", f"## {cell.workload}, {cell.concurrency} at a time, {cell.requests} requests", ""]
        heads = ["server", *(label for label, _ in FIGURES), f"times {OURS}"]
        lines += [_row(heads), _row(["---"] * len(heads))]
        for name in names:
            summaries = [each.summaries[place] for each in found.measured if each.server == name]
            figures = [f"{statistics.median(map(figure, summaries)):,.4g}" for _, figure in FIGURES]
            failed = sum(summary.requests - summary.completed for summary in summaries)
            label = f"{name} ({failed} failed)" if failed else name
            lines.append(_row([label, *figures, _ratio(found, name, place)]))
    starts = {name: [each.start_seconds for each in found.measured if each.server == name] for name in names}
    lines += ["", "## Start to first token", "", _row(["server", "seconds"]), _row(["---", "---"])]
    lines += [_row([name, f"{statistics.median(seconds):.1f}"]) for name, seconds in starts.items()]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ratio(found: Comparison, name: str, place: int) -> str:
    if name == OURS:
        return ""
    rates: Mapping[tuple[str, int], float] = {
        (each.server, each.round): each.summaries[place].output_tok_s for each in found.measured
    }
    ratios = sorted(
        rates[OURS, number] / rate for (server, number), rate in rates.items() if server == name and rate > 0
    )
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else ""
