"""What constrained output accepts and costs, on JSON schemas with instances that are known to be valid or invalid."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import numpy as np

from tricorn.compiler import ensure
from tricorn.compiler.engine_file import EngineFile
from tricorn.grammar.constraint import ConstraintError
from tricorn.grammar.markers import hidden
from tricorn.grammar.worker import compile_constraint
from tricorn.request import Constraint, TricornError

MOST_SECONDS = 2.0
"""A schema that takes longer to compile counts as refused, as it would be."""

MOST_TRIES = 4000
"""Steps of the search for an order of members."""


class Times(msgspec.Struct, frozen=True):
    p50: float
    p99: float
    max: float


class Report(msgspec.Struct, frozen=True):
    """An instance is accepted when some text of it is: as written, or with the members of its objects in another
    order, since ours is that of the schema, or with 2 for 2.0."""

    schemas: int
    compiled: int
    valid_total: int
    valid_accepted: int
    invalid_total: int
    invalid_accepted: int
    compile_ms: Times
    mask_us: Times


def read(path: Path) -> list[dict[str, Any]]:
    """Lines of JSON, each a schema with its tests. Raises TricornError."""
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
        return [msgspec.json.decode(line) for line in lines]
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
        raise TricornError(f"{path}: cannot be read as JSON lines: {error}") from None


def measure(
    model: str, cases: list[dict[str, Any]], show: Callable[[int], None], refusals: list[str] | None = None
) -> Report:
    """Compiles each schema and judges its instances with the tokenizer of `model`. `show` hears of each schema done;
    `refusals` takes a line for each that was refused, and for each instance that was judged wrongly."""
    file = EngineFile.open(ensure(model), check_body=False)
    tokenizer = llguidance.LLTokenizer(hidden(file.tokenizer), n_vocab=file.graph.vocab, eos_token=list(file.eos_ids))
    lines: list[str] = refusals if refusals is not None else []
    compile_ms: list[float] = []
    mask_us: list[float] = []
    counts = {(valid, accepted): 0 for valid in (True, False) for accepted in (True, False)}
    compiled = 0
    for index, case in enumerate(cases):
        name, schema = case.get("id") or case.get("description", str(index)), case["schema"]
        began = time.perf_counter()
        try:
            matcher = compile_constraint(Constraint("json_schema", json.dumps(schema)), tokenizer)
        except ConstraintError as error:
            lines.append(f"{name}: {error}")
            show(index)
            continue
        took = time.perf_counter() - began
        compile_ms.append(took * 1e3)
        if took > MOST_SECONDS:
            lines.append(f"{name}: takes {took:.1f} s to compile")
            show(index)
            continue
        compiled += 1
        speller = _Speller(tokenizer, schema)
        for test in case["tests"]:
            text = speller.spell(matcher, test["data"])
            accepted = text is not None and _walk(matcher, tokenizer.tokenize_str(text), mask_us)
            counts[bool(test["valid"]), accepted] += 1
            if accepted != test["valid"]:
                lines.append(f"{name}: {'valid refused' if test['valid'] else 'INVALID ACCEPTED'}: {test['data']}")
        show(index)
    return Report(
        len(cases),
        compiled,
        counts[True, True] + counts[True, False],
        counts[True, True],
        counts[False, True] + counts[False, False],
        counts[False, True],
        _times(compile_ms),
        _times(mask_us),
    )


def _times(values: list[float]) -> Times:
    if not values:
        return Times(0.0, 0.0, 0.0)
    p50, p99, top = np.percentile(values, [50, 99, 100])
    return Times(round(float(p50), 3), round(float(p99), 3), round(float(top), 3))


def _walk(root: Any, ids: list[int], mask_us: list[float]) -> bool:
    """Follows the ids by the masks alone, as a sampler would; notes what each mask cost."""
    matcher = root.deep_copy()
    for id in ids:
        began = time.perf_counter()
        mask = matcher.compute_bitmask()
        mask_us.append((time.perf_counter() - began) * 1e6)
        if not mask[id >> 3] >> (id & 7) & 1 or not matcher.consume_token(id):
            return False
    return bool(matcher.is_accepting())


class _Speller:
    """Finds a text of a JSON value that a matcher accepts."""

    def __init__(self, tokenizer: Any, schema: Any) -> None:
        self.tokenizer = tokenizer
        self.rank: dict[str, int] = {}
        self.rank_names(schema)
        self.tries = 0

    def rank_names(self, schema: Any) -> None:
        """Numbers the names of properties as the schema lists them: a good order to try."""
        if isinstance(schema, dict):
            listed = schema.get("properties")
            for name in listed if isinstance(listed, dict) else ():
                self.rank.setdefault(name, len(self.rank))
            for part in schema.values():
                self.rank_names(part)
        elif isinstance(schema, list):
            for part in schema:
                self.rank_names(part)

    def spell(self, matcher: Any, value: Any) -> str | None:
        text = json.dumps(value, ensure_ascii=False)
        written = self.feed(matcher, text)
        if written is not None and written.is_accepting():
            return text
        self.tries = 0
        return next((text for end, text in self.texts(matcher, value) if end.is_accepting()), None)

    def feed(self, matcher: Any, text: str) -> Any:
        """The matcher after more text, None where it refuses it."""
        self.tries += 1
        ids = self.tokenizer.tokenize_str(text)
        following = matcher.deep_copy()
        return following if following.try_consume_tokens(ids) == len(ids) else None

    def texts(self, matcher: Any, value: Any) -> Iterator[tuple[Any, str]]:
        if isinstance(value, dict):
            opened = self.feed(matcher, "{")
            names = sorted(value, key=lambda name: self.rank.get(name, len(self.rank)))
            if opened is not None:
                for end, text in self.members(opened, value, names, ""):
                    yield end, "{" + text
        elif isinstance(value, list):
            opened = self.feed(matcher, "[")
            if opened is not None:
                for end, text in self.items(opened, value, 0):
                    yield end, "[" + text
        else:
            whole = isinstance(value, float) and value.is_integer()
            for text in [json.dumps(value, ensure_ascii=False), *([str(int(value))] if whole else [])]:
                end = self.feed(matcher, text)
                if end is not None:
                    yield end, text

    def members(self, matcher: Any, value: dict[str, Any], names: list[str], comma: str) -> Iterator[tuple[Any, str]]:
        if not names:
            end = self.feed(matcher, "}")
            if end is not None:
                yield end, "}"
            return
        for name in names:
            if self.tries > MOST_TRIES:
                return
            lead = f"{comma}{json.dumps(name, ensure_ascii=False)}: "
            named = self.feed(matcher, lead)
            for end, text in self.texts(named, value[name]) if named is not None else ():
                for last, rest in self.members(end, value, [other for other in names if other != name], ", "):
                    yield last, lead + text + rest

    def items(self, matcher: Any, value: list[Any], index: int) -> Iterator[tuple[Any, str]]:
        if index == len(value):
            end = self.feed(matcher, "]")
            if end is not None:
                yield end, "]"
            return
        separated = self.feed(matcher, ", ") if index else matcher
        for end, text in self.texts(separated, value[index]) if separated is not None else ():
            for last, rest in self.items(end, value, index + 1):
                yield last, (", " if index else "") + text + rest
