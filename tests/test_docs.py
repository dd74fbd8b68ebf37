"""The documents are true: their code runs, and the paths, commands, fields and metrics that they name exist.

A block marked `python` runs, with the others of its document, in a process of its own and with tests/ on the path. A
document whose code names a built-in model that is not pulled is skipped.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tricorn.cli import app
from tricorn.engine.messages import EngineInfo, EngineStats, Survival, TierStats
from tricorn.scheduler.limits import Limits
from tricorn.server import embeddings, responses, schema
from tricorn.server.errors import HttpError
from tricorn.server.metrics import Metrics
from tricorn.weights.hub import BUILTIN, is_pulled

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
RUNNABLE = [path for path in DOCUMENTS if "```python\n" in path.read_text()]
REFERENCE = (ROOT / "docs/api.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=named)


def spans(text: str) -> list[str]:
    """The code inside lines."""
    return SPAN.findall(FENCE.sub("", text))


def code(text: str) -> list[str]:
    """All code that is not Python: spans, and the lines of blocks, fenced or indented. Several spaces part two columns
    of a block; a line that ends with a backslash goes on in the next."""
    blocks = [block for kind, block in FENCE.findall(text) if kind != "python"]
    blocks += re.findall(r"(?:^ {4}.*\n)+", FENCE.sub("", text), re.MULTILINE)
    lines = [line.strip() for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return spans(text) + [part for line in lines for part in re.split(r" {2,}", line)]


def sections(text: str) -> set[str]:
    """The anchors of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(title: str, of: str = REFERENCE) -> str:
    return of.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """The code in the first cell of each line of the tables."""
    return [span for line in text.splitlines() if line.startswith("| `") for span in SPAN.findall(line.split(" | ")[0])]


# --- code


@pytest.mark.parametrize("document", RUNNABLE, ids=named)
def test_python_runs(document: Path, tmp_path: Path) -> None:
    text = document.read_text()
    program = [""] * text.count("\n")  # lines keep their numbers, so that a traceback points into the document
    for block in FENCE.finditer(text):
        if block[1] == "python":
            first = text.count("\n", 0, block.start(2))
            program[first : first + block[2].count("\n")] = block[2].splitlines()
    source = "\n".join("" if line.startswith("from __future__") else line for line in program)
    for name in BUILTIN:
        if name in source and not is_pulled(name):
            pytest.skip(f"{named(document)} uses {name}, which is not here: run tricorn pull {name}")
    script = tmp_path / f"{document.stem}.py"
    script.write_text(source)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


# --- paths and links


@every_document
def test_paths_exist(document: Path) -> None:
    """A span that begins with a folder of the repository, or of the package, is a path."""
    homes = (ROOT, ROOT / "src/tricorn")
    folders = {path.name for home in homes for path in home.iterdir() if path.is_dir()} - {".venv", "build"}
    pattern = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
    for span in spans(document.read_text()):
        if pattern.fullmatch(span) and "/" in span and span.split("/")[0] in folders:
            assert any((home / span).exists() for home in homes), span


@every_document
def test_links_lead_somewhere(document: Path) -> None:
    for link in LINK.findall(document.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not anchor or anchor in sections(target.read_text()), link


# --- commands


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each `tricorn ...` that a document names."""
    for line in code(text):
        found = re.match(r"(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?tricorn( .*|)$", line)
        if found:
            arguments = re.sub(r"[\[\]]|\.\.\.", "", re.split(r" [|>#]|&&", found[1])[0])
            yield shlex.split(arguments)


def check_command(arguments: list[str]) -> None:
    """Raises the command line's own error for a subcommand or an option that there is not."""
    command: Any = typer.main.get_command(app)
    while arguments and hasattr(command, "commands"):
        name, *arguments = arguments
        if name == "--help":
            return
        assert name in command.commands, f"tricorn has no command {name!r}"
        command = command.commands[name]
    context = command.context_class(command, info_name=command.name, ignore_unknown_options=False)
    command.make_parser(context).parse_args(list(arguments))


@every_document
def test_commands_exist(document: Path) -> None:
    for arguments in commands(document.read_text()):
        check_command(arguments)


@every_document
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code(document.read_text()):
        found = re.match(r"(?:\$ )?make ([a-z][\w-]*)", line)
        assert not found or found[1] in targets, line


@pytest.mark.parametrize("wrong", ["tricorn sreve", "tricorn serve --prot 1", "tricorn bench engines"])
def test_a_wrong_command_is_noticed(wrong: str) -> None:
    (arguments,) = commands(f"Run `{wrong}` now.")
    with pytest.raises(Exception, match=r"no command|No such option|prot"):
        check_command(arguments)


# --- the API's reference


@pytest.mark.parametrize(
    ("title", "body"),
    [
        ("Fields that both routes honour", schema.Sampling),
        ("Chat only", schema.Chat),
        ("Completions only", schema.Completion),
        ("Responses", responses.Ask),
        ("Embeddings", embeddings.Ask),
    ],
)
def test_every_field_is_described(title: str, body: Any) -> None:
    assert sorted(first_cells(section(title))) == sorted(body.__struct_fields__)


def test_every_refused_field_is_named() -> None:
    text = section("Fields that are refused")
    always, table = text.split("These pass with")
    assert sorted(SPAN.findall(always)) == sorted(
        [name for name, neutral in schema.REFUSED.items() if not neutral] + ["unsupported_parameter"]
    )
    assert sorted(first_cells(table)) == sorted(name for name, neutral in schema.REFUSED.items() if neutral)


def test_every_header_is_named() -> None:
    source = (ROOT / "src/tricorn/server/app.py").read_text() + (ROOT / "src/tricorn/server/exchange.py").read_text()
    read = set(re.findall(r'header\(b"([\w-]+)"\)|key == b"([\w-]+)"', source))
    known = {"content-type", "content-length", "authorization"}
    assert {name for pair in read for name in pair if name} - known == {
        name.lower() for name in first_cells(section("Headers"))
    }


def test_every_metric_is_named() -> None:
    info = EngineInfo(
        model="m",
        limits=Limits(context=16, vocab=2, max_sequences=1, max_tokens=1, max_rows=1),
        pages=1,
        page_size=16,
        page_bytes=1,
        executor="native",
        threads=1,
    )
    metrics = Metrics("model", info)
    metrics.error(HttpError(400, "x"))
    text = metrics.exposition(EngineStats(disk=TierStats()), Survival(), os.getpid()).decode()
    types = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    lines = re.findall(r"^\| `(\S+)` \| (\w+) \|", section("Metrics", OPERATIONS), re.MULTILINE)
    assert sorted(lines) == sorted(types)


def test_every_option_of_the_server_has_a_place() -> None:
    """Whatever the options of the server and of the drill are called on the command line, they exist."""
    commands: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    parameters = [*commands["serve"].params, *commands["drill"].params]
    options = {option for parameter in parameters for option in parameter.opts}
    for option in re.findall(r"--[a-z][a-z-]+", OPERATIONS):
        assert option in options | {"--help"}, option
