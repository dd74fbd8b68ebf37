"""What a benchmark asks: sessions of one turn or several, made of ids that the served tokenizer knows as whole words.

Sizes are in tokens and exact on /v1/completions, which takes ids. The names are those that comparisons of servers use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from tricorn.bench.load import draw
from tricorn.request import TricornError

MAX_LINES = 1_000_000

BLOCK = 512
"""Tokens that a hash of a trace stands for, as Mooncake's traces have it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: what is new in its prompt, behind all that was said before, and how many tokens are
    asked for. `fields` go into the body as they are; an answer under a constraint ends when it is complete."""

    new: list[int] | str
    output: int
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Session:
    """Turns, one after the other's answer. `at` is when it begins, in seconds, where the workload itself says so."""

    turns: tuple[Turn, ...]
    at: float | None = None


Draw = Callable[[int], list[int]]
Maker = Callable[[Random, Draw, int], list[Session]]
"""Makes so many sessions."""


def _single(prompt: list[int], output: int, **fields: Any) -> Session:
    return Session((Turn(prompt, output, fields),))


def alpha(random: Random, text: Draw, count: int) -> list[Session]:
    """2,048 tokens in, the first 65 % of them one of four beginnings; 256 out."""
    stems = [text(1331) for _ in range(4)]
    return [_single(stems[number % 4] + text(717), 256) for number in range(count)]


def beta(random: Random, text: Draw, count: int) -> list[Session]:
    """512 tokens in, nothing shared; 512 out."""
    return [_single(text(512), 512) for _ in range(count)]


def plain(random: Random, text: Draw, count: int) -> list[Session]:
    """512 tokens in, nothing shared; 128 out."""
    return [_single(text(512), 128) for _ in range(count)]


def chat(random: Random, text: Draw, count: int) -> list[Session]:
    """A system prompt of 256 tokens that all share, then 5 turns of 32 to 128 in and 64 to 160 out, with their whole
    history."""
    system = text(256)
    sessions = []
    for _ in range(count):
        questions = [text(random.randint(32, 128)) for _ in range(5)]
        questions[0] = system + questions[0]
        sessions.append(Session(tuple(Turn(question, random.randint(64, 160)) for question in questions)))
    return sessions


CALL = {
    "type": "object",
    "properties": {
        "tool_name": {"enum": ["search_documents", "read_document", "answer_the_question"]},
        "arguments": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "maxLength": 60},
                "maximum_number_of_results": {"type": "integer", "minimum": 1, "maximum": 20},
            },
            "required": ["query", "maximum_number_of_results"],
            "additionalProperties": False,
        },
    },
    "required": ["tool_name", "arguments"],
    "additionalProperties": False,
}


def agent(random: Random, text: Draw, count: int) -> list[Session]:
    """A system prompt of 1,024 tokens that all share, then 4 calls of a tool under a JSON schema, each with what the
    last one brought, 96 tokens."""
    system = text(1024)
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "call", "schema": CALL}}}
    sessions = []
    for _ in range(count):
        found = [text(96) for _ in range(4)]
        found[0] = system + found[0]
        sessions.append(Session(tuple(Turn(new, 96, form) for new in found)))
    return sessions


def rag(random: Random, text: Draw, count: int) -> list[Session]:
    """4 of 32 documents of 384 tokens in any order, and a question of 48; 96 out."""
    documents = [text(384) for _ in range(32)]
    chosen = ([*random.sample(documents, 4), text(48)] for _ in range(count))
    return [_single([id for part in parts for id in part], 96) for parts in chosen]


def burst(random: Random, text: Draw, count: int) -> list[Session]:
    """16 requests at once every 8 seconds, each with 256 in and 64 out."""
    return [Session((Turn(text(256), 64),), at=8.0 * (number // 16)) for number in range(count)]


def mixed(random: Random, text: Draw, count: int) -> list[Session]:
    """7 of 10 short questions (128 in, 64 out), 2 long prompts (1,536 in, 64 out), 1 long answer (64 in, 512 out)."""
    shapes = [(128, 64)] * 7 + [(1536, 64)] * 2 + [(64, 512)]
    return [_single(text(tokens), output) for tokens, output in random.choices(shapes, k=count)]


def _sized(text: Draw, count: int, prompt: int, output: int, shared: int) -> list[Session]:
    if not (prompt and output) or shared >= prompt:
        raise TricornError(f"{prompt}/{output}/{shared}: a prompt and an output, and less of it shared than it has")
    stem = text(shared)
    return [_single(stem + text(prompt - shared), output) for _ in range(count)]


WORKLOADS: Mapping[str, Maker] = {
    maker.__name__: maker for maker in (alpha, beta, plain, chat, agent, rag, burst, mixed)
}


class Line(msgspec.Struct, frozen=True):
    """A request of a file of JSON lines: its prompt as text, as ids, or, in a trace, as `input_length` alone, of which
    each of the `hash_ids` stands for 512 tokens; `timestamp` in milliseconds."""

    prompt: str | list[int] | None = None
    input_length: int | None = None
    output_length: int | None = None
    max_tokens: int | None = None
    hash_ids: list[int] = []
    timestamp: float | None = None


_line = msgspec.json.Decoder(Line)


def read(path: Path, text: Draw) -> list[Session]:
    """The requests of a file. Raises TricornError, naming the line."""
    sessions: list[Session] = []
    blocks: dict[int, list[int]] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TricornError(f"{path}: {error.strerror}: give a workload by name, or a file of JSON lines") from None
    for number, source in enumerate(lines[:MAX_LINES], 1):
        if not source.strip():
            continue
        try:
            line = _line.decode(source)
        except msgspec.DecodeError as error:
            raise TricornError(f"{path}:{number}: {error}") from None
        output = line.output_length if line.max_tokens is None else line.max_tokens
        if output is None or output < 1 or (line.prompt is None) == (line.input_length is None):
            raise TricornError(f"{path}:{number}: give prompt or input_length, and max_tokens or output_length")
        new: list[int] | str = line.prompt or []
        if line.input_length is not None:
            shared = [id for hash in line.hash_ids for id in blocks.setdefault(hash, text(BLOCK))][: line.input_length]
            new = shared + text(line.input_length - len(shared))
        sessions.append(Session((Turn(new, output),), None if line.timestamp is None else line.timestamp / 1000))
    if not sessions:
        raise TricornError(f"{path} holds no request")
    return sessions


def sessions(name: str, vocabulary: Sequence[int], count: int, seed: int) -> list[Session]:
    """So many sessions of a workload, by its name, by its sizes (512/128, or 512/128/256 where so many of the first
    tokens are the same for all), or those of a file of JSON lines. Raises TricornError."""
    random = Random(seed)

    def text(tokens: int) -> list[int]:
        return draw(random, vocabulary, tokens)

    if name in WORKLOADS:
        return WORKLOADS[name](random, text, count)
    if sizes := re.fullmatch(r"(\d{1,7})/(\d{1,7})(?:/(\d{1,7}))?", name):
        return _sized(text, count, *(int(size or 0) for size in sizes.groups()))
    if "." not in name and "/" not in name:
        known = ", ".join(WORKLOADS)
        raise TricornError(f"there is no workload {name!r}: use {known}, PROMPT/OUTPUT/SHARED or a file of JSON lines")
    return read(Path(name), text)[:count]
