"""The grammar processes: masks, limits, deaths, replays and caches. Every test ends with no process left."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from grammar_support import END, bits, byte_matchers, byte_tokenizer, matcher
from tricorn.grammar.constraint import ConstraintError
from tricorn.grammar.workers import Mask, Workers
from tricorn.request import Constraint, TricornError

SOURCE = byte_tokenizer()
TOKENIZER = byte_matchers()
WIDTH = TOKENIZER.vocab_size + 45
"""The logits are wider than the tokenizer."""

SCHEMA = {
    "type": "object",
    "properties": {"a_rather_long_name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["a_rather_long_name", "n"],
}
LONG = 60.0


def schema(source: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(source))


@pytest.fixture
def pool() -> Iterator[Workers]:
    workers = Workers(SOURCE, WIDTH, [END], slots=24)
    yield workers
    before = descendants()
    workers.shutdown()
    wait(lambda: not descendants() & before)


def descendants() -> set[int]:
    """Processes below this one that are alive."""
    found, parents = {os.getpid()}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry)] = int(fields[1])
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def grammars(pool: Workers) -> set[int]:
    """The processes of grammars: all but the nursery."""
    assert pool._nursery is not None
    return descendants() - {pool._nursery.pid}


def signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def wait(done: Any) -> None:
    end = time.monotonic() + LONG
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def masks_of(pool: Workers, rows: list[int]) -> list[Mask]:
    end, found = time.monotonic() + LONG, dict[int, Mask]()
    while not found.keys() >= set(rows):
        assert time.monotonic() < end
        found |= pool.collect(time.monotonic() + 0.02)
    return [found[row] for row in rows]


def mask_of(pool: Workers, row: int) -> Mask:
    return masks_of(pool, [row])[0]


def fields(mask: Mask) -> tuple[Any, ...]:
    return bits(mask.row.copy()), mask.forced, mask.may_end, mask.must_end


def test_nothing_starts_before_the_first_constraint(pool: Workers) -> None:
    assert pool.collect(time.monotonic()) == {}
    assert not descendants()
    code = "import sys, tricorn.grammar.workers; assert 'llguidance' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_masks_end_as_the_grammar_does(pool: Workers) -> None:
    stop = 3 + ord("s")
    row = pool.open(Constraint("choice", '["yes", "yesyes"]'), stop_ids=[stop])
    mask = mask_of(pool, row)
    assert END not in bits(mask.row)
    assert not mask.may_end
    assert all(TOKENIZER.decode_bytes([id])[:1] == b"y" for id in bits(mask.row))
    pool.advance([(row, TOKENIZER.tokenize_str("yes"))])
    mask = mask_of(pool, row)
    assert mask.may_end
    assert not mask.must_end
    assert END in bits(mask.row)
    assert stop in bits(mask.row)  # an id that stops the sequence counts as an end, once it may end
    pool.advance([(row, [3 + ord("y")])])
    assert stop not in bits(mask_of(pool, row).row)
    pool.advance([(row, [3 + ord("e"), 3 + ord("s")])])
    mask = mask_of(pool, row)
    assert mask.must_end
    assert bits(mask.row) == sorted([END, stop])
    pool.close(row)


def test_ids_without_a_token_are_never_allowed(pool: Workers) -> None:
    row = pool.open(schema({"type": "string"}))
    allowed = bits(mask_of(pool, row).row)
    pool.advance([(row, TOKENIZER.tokenize_str('"x'))])
    allowed += bits(mask_of(pool, row).row)
    assert max(allowed) < TOKENIZER.vocab_size
    assert not {0, 1, END} & set(allowed)
    assert 3 + 0xFF not in allowed  # no UTF-8 has it
    pool.close(row)


def test_forced_ids_are_the_tokenizers_own(pool: Workers) -> None:
    row = pool.open(schema(SCHEMA), tokens=TOKENIZER.tokenize_str('{"a'))
    mask = mask_of(pool, row)
    assert TOKENIZER.decode_bytes(mask.forced).startswith(b"_rather_long_")
    assert bits(mask.row) == mask.forced[:1]
    whole = TOKENIZER.tokenize_str('{"a_rather_long_name": "')
    joined = [*TOKENIZER.tokenize_str('{"a'), *mask.forced]
    assert joined == whole[: len(joined)]
    pool.advance([(row, mask.forced)])
    assert mask_of(pool, row).error is None
    pool.close(row)


def test_masks_of_many_sequences_are_those_of_each(pool: Workers) -> None:
    """Twelve under one grammar, in parallel, and some under others: as the matcher alone says."""
    kinds = [schema(SCHEMA)] * 12 + [Constraint("regex", "(a|b)*abb"), Constraint("json_object")]
    rows = {pool.open(kind): kind for kind in kinds}
    alone = {
        row: matcher(
            TOKENIZER, kind.kind, json.loads(kind.source or '""') if kind.kind != "regex" else kind.source
        ).deep_copy()
        for row, kind in rows.items()
    }
    picker = random.Random(0)
    for _ in range(6):
        found = dict(zip(rows, masks_of(pool, list(rows)), strict=True))
        step = []
        for row, mask in found.items():
            expected = [id for id in bits(alone[row].compute_bitmask()) if id != END]
            assert [id for id in bits(mask.row) if id != END] == expected
            assert mask.may_end == alone[row].is_accepting()
            ids = mask.forced or [picker.choice(expected)]
            assert alone[row].consume_tokens(ids)
            step.append((row, ids))
        pool.advance(step)
    assert pool.stats().compiled == 3
    assert pool.stats().hits == 11
    for row in rows:
        pool.close(row)


def test_a_repeated_constraint_is_quick(pool: Workers) -> None:
    pool.check(schema(SCHEMA))
    times = []
    for _ in range(20):
        began = time.perf_counter()
        pool.check(schema(SCHEMA))
        times.append(time.perf_counter() - began)
    assert sorted(times)[5] < 0.02  # a millisecond on a machine that does nothing else
    assert pool.stats().compiled == 1


def test_refusals_are_told_and_remembered(pool: Workers) -> None:
    for _ in range(3):
        with pytest.raises(ConstraintError, match="#/properties/a 'uniqueItems'"):
            pool.check(schema({"properties": {"a": {"uniqueItems": True}}}))
    assert pool.stats().refused == 1
    row = pool.open(schema({"uniqueItems": True}))
    assert mask_of(pool, row).error is not None
    pool.close(row)
    with pytest.raises(ConstraintError):
        pool.check(Constraint("json_schema", "{"))
    with pytest.raises(ConstraintError, match="larger"):
        pool.check(Constraint("regex", "a" * (2 << 20)))


def test_compilation_stops_at_its_time() -> None:
    """The process is gone when the time is over, and the client is told."""
    workers = Workers(SOURCE, WIDTH, [END], compile_seconds=0.2)
    workers.check(Constraint("choice", '["a"]'))
    hostile = schema({"oneOf": [{"properties": {f"p{i}": {"const": j} for j in range(40)}} for i in range(40)]})
    before = len(descendants())
    with pytest.raises(ConstraintError, match=r"takes more than 0\.2 s"):
        workers.check(hostile)
    wait(lambda: len(descendants()) == before)
    began = time.monotonic()
    with pytest.raises(ConstraintError, match="takes more than"):
        workers.check(hostile)
    assert time.monotonic() - began < 0.1  # it is remembered
    workers.check(Constraint("choice", '["b"]'))
    workers.shutdown()


def test_compilation_stops_at_its_memory() -> None:
    workers = Workers(SOURCE, WIDTH, [END], memory=4 << 20, compile_seconds=20)
    hostile = schema({"enum": [{f"name{i}": f"value {i} {j}" for j in range(30)} for i in range(3000)]})
    with pytest.raises(ConstraintError, match=r"MiB|too large"):
        workers.check(hostile)
    workers.shutdown()


def test_the_compiling_do_not_hold_up_the_others(pool: Workers) -> None:
    row = pool.open(Constraint("regex", "[ab]*"))
    assert mask_of(pool, row).error is None
    hostile = [
        schema({"oneOf": [{"properties": {f"p{i}{n}": {"const": j} for j in range(40)}} for i in range(40)]})
        for n in range(4)
    ]
    slow = [pool.open(one) for one in hostile]
    for _ in range(10):
        pool.advance([(row, [3 + ord("a")])])
        assert mask_of(pool, row).error is None  # comes while those compile
    assert pool.stats().compiled == 1
    for one in slow:  # they leave before it is decided
        pool.close(one)
    pool.close(row)


def test_a_dead_process_is_replaced_and_its_sequences_go_on(pool: Workers) -> None:
    """Kill whatever computes: the masks afterwards are as if nothing had been."""
    rows = [pool.open(schema(SCHEMA)) for _ in range(3)]
    texts = ['{"a_', '{"a_rather_long_name": "x', '{"a_rather_long_name": "x", "n": 1']
    masks_of(pool, rows)
    pool.advance(list(zip(rows, map(TOKENIZER.tokenize_str, texts), strict=True)))
    expected = [fields(mask) for mask in masks_of(pool, rows)]
    for victims in (grammars, lambda pool: descendants() - grammars(pool)):  # the nursery takes the others along
        signal_all(victims(pool), 9)
        pool.advance([(row, []) for row in rows])
        assert [fields(mask) for mask in masks_of(pool, rows)] == expected
    for row in rows:
        pool.close(row)


def test_the_sequence_whose_mask_ends_processes_ends(pool: Workers) -> None:
    """One try in its company, one alone; its company goes on."""
    culprit, other = pool.open(schema(SCHEMA)), pool.open(schema(SCHEMA))
    masks_of(pool, [culprit, other])
    for _ in range(2):
        signal_all(grammars(pool), 19)  # its mask is under way, and no other
        pool.advance([(culprit, TOKENIZER.tokenize_str("{"))])
        signal_all(grammars(pool), 9)
        mask = mask_of(pool, culprit)
    assert mask.error is not None
    pool.advance([(other, TOKENIZER.tokenize_str('{"a_'))])
    mask = mask_of(pool, other)
    assert mask.error is None
    assert mask.forced
    pool.close(culprit)
    pool.close(other)


def test_a_sequence_goes_on_elsewhere(pool: Workers) -> None:
    """Opened with the ids that it has accepted, it is where it was."""
    ids = TOKENIZER.tokenize_str('{"a_rather_long_name": "so \\" it')
    row = pool.open(schema(SCHEMA))
    mask_of(pool, row)
    for id in ids:
        pool.advance([(row, [id])])
        last = fields(mask_of(pool, row))
    again = pool.open(schema(SCHEMA), tokens=ids)
    assert fields(mask_of(pool, again)) == last
    pool.close(row)
    pool.close(again)


def test_a_late_mask_holds_up_nobody(pool: Workers) -> None:
    quick = pool.open(Constraint("regex", "a*"))
    mask_of(pool, quick)
    before = grammars(pool)
    late = pool.open(schema(SCHEMA))
    mask_of(pool, late)
    stopped = grammars(pool) - before
    signal_all(stopped, 19)
    pool.advance([(late, [3 + ord("{")]), (quick, [3 + ord("a")])])
    found = pool.collect(time.monotonic() + 0.5)
    assert late not in found
    assert quick in found
    signal_all(stopped, 18)
    assert mask_of(pool, late).error is None
    pool.close(quick)
    pool.close(late)


def test_an_id_that_was_not_allowed_ends_the_sequence(pool: Workers) -> None:
    row = pool.open(Constraint("choice", '["yes"]'))
    mask_of(pool, row)
    pool.advance([(row, [3 + ord("n")])])
    assert mask_of(pool, row).error is not None
    pool.close(row)


def test_the_cache_is_bounded() -> None:
    workers = Workers(SOURCE, WIDTH, [END], cached=3)
    for number in range(8):
        workers.check(Constraint("choice", json.dumps([str(number)])))
    assert workers.stats().processes <= 4
    wait(lambda: len(descendants()) <= 5)
    workers.shutdown()
    wait(lambda: not descendants())


def test_slots_are_bounded_and_come_back() -> None:
    workers = Workers(SOURCE, WIDTH, [END], slots=2)
    rows = [workers.open(Constraint("regex", "a")) for _ in range(2)]
    with pytest.raises(TricornError, match="slots"):
        workers.open(Constraint("regex", "a"))
    workers.close(rows[0])
    assert workers.open(Constraint("regex", "b")) == rows[0]
    workers.shutdown()


def test_processes_end_with_the_one_that_uses_them() -> None:
    code = (
        "import os, sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_grammar_workers import *\n"
        "pool = Workers(SOURCE, WIDTH, [END]); pool.check(Constraint('regex', 'a'))\n"
        "print(*descendants(), flush=True); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, os.path.dirname(__file__)], capture_output=True, text=True, check=False
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    wait(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
