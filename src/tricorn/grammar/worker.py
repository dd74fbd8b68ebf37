"""The processes in which grammars live: `python -m tricorn.grammar.worker CONTROL`.

The first, the nursery, loads the grammar engine and the tokenizer, and then only forks: one process for each grammar,
which compiles it and computes the masks of the sequences that follow it. Whatever a grammar does, it does to its own
process: the kernel ends it when it takes more time or memory than allowed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
from typing import Any

import llguidance
import msgspec
import numpy as np
from numpy.typing import NDArray

from tricorn.grammar.channel import Channel
from tricorn.grammar.config import Config
from tricorn.grammar.constraint import ConstraintError
from tricorn.grammar.lark import decode_json
from tricorn.grammar.markers import hidden
from tricorn.grammar.schema import locate
from tricorn.grammar.translate import OPTIONS, to_grammar
from tricorn.request import Constraint

PR_SET_PDEATHSIG = 1
COMPILER_NICENESS = 10
PARALLEL = 8
"""Masks from which on several threads compute them."""

THREADS = 2
SLACK = 4
"""Seconds on the clock for each second of computing: the machine may be busy."""

LIMITS = llguidance.LLParserLimits(verbose_errors=False, max_items_in_row=20_000)
"""A place in a schema costs a few items for each member that may come there: thousands of optional ones."""

U32 = NDArray[np.uint32]


def main(control: int) -> None:
    """The nursery: reads its configuration, then forks for each socket that it is handed, until the pool is gone."""
    connection = socket.socket(fileno=control)
    _, (config_fd, masks_fd), _, _ = socket.recv_fds(connection, 1, 2)
    with open(config_fd, "rb") as file:
        config = msgspec.msgpack.decode(file.read(), type=Config)
    words = -(-config.vocab // 32)
    masks = np.frombuffer(mmap.mmap(masks_fd, 4 * words * config.rows), np.uint32).reshape(config.rows, words)
    tokenizer = llguidance.LLTokenizer(
        hidden(config.tokenizer), n_vocab=config.vocab, eos_token=list(config.eos_ids) or None
    )
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    nursery = os.getpid()
    while True:
        message, handed, _, _ = socket.recv_fds(connection, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            connection.close()
            try:
                _die_with(nursery)
                _Grammar(Channel(socket.socket(fileno=handed[0])), config, tokenizer, masks).serve()
            except BaseException as error:  # nothing of the nursery's may run in here
                print(f"grammar: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(0)
        os.close(handed[0])


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _limit_memory(more: int) -> None:
    """Lets this process grow by so many bytes."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * mmap.PAGESIZE + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _allow(seconds: float) -> None:
    """Sets the time until the kernel ends this process, computing and on the clock; 0 takes it back."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * SLACK)


def compile_constraint(constraint: Constraint, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """The matcher at its beginning. Raises ConstraintError when the constraint cannot be enforced."""
    grammar = to_grammar(constraint)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise _refusal(constraint, matcher.get_error())
    if warnings := matcher.get_grammar_warnings():
        raise ConstraintError(_line(warnings[0]))
    mask = matcher.compute_bitmask()
    if "NoExtension" in matcher.get_error() or not (any(mask) or matcher.is_accepting()):
        raise ConstraintError("nothing satisfies it", "#" if constraint.kind == "json_schema" else "", constraint.kind)
    if matcher.is_error():
        raise ConstraintError(f"too complex: {_line(matcher.get_error())}", "", constraint.kind)
    return matcher


class _Slot:
    """A sequence under the grammar. `ends` are the ids that end it."""

    __slots__ = ("ends", "matcher", "row", "serial")

    def __init__(self, matcher: llguidance.LLMatcher, row: int, serial: int, ends: frozenset[int]) -> None:
        self.matcher, self.row, self.serial, self.ends = matcher, row, serial, ends


class _Grammar:
    """One grammar and the sequences that follow it."""

    def __init__(self, channel: Channel, config: Config, tokenizer: llguidance.LLTokenizer, masks: U32) -> None:
        self.channel, self.config, self.tokenizer, self.masks = channel, config, tokenizer, masks
        self.slots: dict[int, _Slot] = {}
        self.root: Any = None
        self.executor: Any = None
        self.never = np.zeros(masks.shape[1], np.uint32)
        _set_bits(self.never, [*config.undecodable, *range(config.vocab, 32 * masks.shape[1])])

    def serve(self) -> None:
        _limit_memory(self.config.memory)
        while (messages := self.channel.receive()) is not None:
            due: list[_Slot] = []
            for kind, *fields in messages:
                if kind == "compile":
                    self.compile(Constraint(*fields))
                    if self.root is None:
                        return
                elif kind == "open":
                    due.append(self.open(*fields))
                elif kind == "advance":
                    due += [self.advance(*step) for step in fields[0] if step[0] in self.slots]
                elif kind == "close":
                    self.slots.pop(fields[0], None)
            self.fill([slot for slot in due if self.slots.get(slot.row) is slot])

    def compile(self, constraint: Constraint) -> None:
        """Compiles in a thread of lower priority, so that a grammar does not slow down who is computing tokens."""
        fault: list[tuple[str, str, str]] = []
        began = time.perf_counter()

        def work() -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILER_NICENESS)
            try:
                self.root = compile_constraint(constraint, self.tokenizer)
            except ConstraintError as error:
                fault.append((error.message, error.path, error.keyword))
            except (MemoryError, RecursionError):
                fault.append(("it is too large", "", ""))

        _allow(self.config.compile_seconds)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        _allow(0)
        self.channel.send(("compiled", (time.perf_counter() - began) * 1e3, fault[0] if fault else None))

    def open(self, row: int, serial: int, stop_ids: list[int], tokens: list[int]) -> _Slot:
        slot = _Slot(self.root.deep_copy(), row, serial, frozenset((*self.config.eos_ids, *stop_ids)))
        self.slots[row] = slot
        self.consume(slot, tokens)
        return slot

    def advance(self, row: int, serial: int, tokens: list[int]) -> _Slot:
        slot = self.slots[row]
        slot.serial = serial
        self.consume(slot, tokens)
        return slot

    def consume(self, slot: _Slot, tokens: list[int]) -> None:
        """Follows the ids; one that ends the sequence, where it may end, changes nothing."""
        _allow(self.config.mask_seconds + len(tokens) * 1e-3)
        while tokens and tokens[-1] in slot.ends and slot.matcher.validate_tokens(tokens) < len(tokens):
            tokens = tokens[:-1]
        if tokens and tokens[-1] in self.config.eos_ids:
            tokens = tokens[:-1]
        if tokens:
            slot.matcher.consume_tokens(tokens)
        _allow(0)

    def fill(self, due: list[_Slot]) -> None:
        """Computes the masks of these slots and tells the pool."""
        if not due:
            return
        if len(due) >= PARALLEL:
            if self.executor is None:
                self.executor = llguidance.LLExecutor(THREADS)
            _allow(self.config.mask_seconds * len(due))
            began = time.perf_counter()
            matchers = [(slot.matcher, slot.row) for slot in due if not slot.matcher.is_error()]
            self.executor.unsafe_compute_mask_ptr(
                matchers, self.masks.ctypes.data, self.masks.strides[0], len(self.masks)
            )
            _allow(0)
            each = (time.perf_counter() - began) / len(due)
            self.channel.send(("masks", [self.answer(slot, each) for slot in due]))
            return
        said = []
        for slot in due:
            _allow(self.config.mask_seconds)
            began = time.perf_counter()
            if not slot.matcher.is_error():
                slot.matcher.unsafe_compute_mask_ptr(self.masks[slot.row].ctypes.data, self.masks.strides[0])
            said.append(self.answer(slot, time.perf_counter() - began))
            _allow(0)
        self.channel.send(("masks", said))

    def answer(self, slot: _Slot, seconds: float) -> tuple[Any, ...]:
        """What the pool is told of a slot whose mask is computed; its row is made final."""
        row, matcher = self.masks[slot.row], slot.matcher
        if matcher.is_error():
            return slot.row, slot.serial, [], False, False, _line(matcher.get_error()), 0.0
        may_end = matcher.is_accepting()
        np.bitwise_and(row, ~self.never, out=row)
        for end in slot.ends:
            row[end >> 5] &= ~np.uint32(1 << (end & 31))
        must_end = may_end and not row.any()
        forced = [] if must_end else matcher.compute_ff_tokens()
        if may_end:
            _set_bits(row, slot.ends)
        error = None if may_end or row.any() else "no token of the model continues the text"
        return slot.row, slot.serial, forced, may_end, must_end, error, seconds


def _set_bits(row: U32, ids: Any) -> None:
    at = np.fromiter(ids, np.int64)
    np.bitwise_or.at(row, at >> 5, np.uint32(1) << (at & 31).astype(np.uint32))


def _line(text: str) -> str:
    """The first line of an error, without the place in the grammar that we wrote ourselves."""
    line = text.split("\n", 1)[0].strip()
    for lead in ("failed to compile JSON schema: ", "(in regex): "):
        line = line.rpartition(lead)[2]
    return line[:300]


KEYWORDS = (
    ("patternProperty", "patternProperties"),
    ("regex", "pattern"),
    ("Regex", "pattern"),
    ("oneOf", "oneOf"),
    ("minimum", "minimum"),
    ("minLength", "minLength"),
    ("minItems", "minItems"),
    ("required", "required"),
    ("incompatible", "allOf"),
    ("min/maxProperties", "minProperties"),
    ("minProperties", "minProperties"),
    ("circular", "$ref"),
)


def _refusal(constraint: Constraint, error: str) -> ConstraintError:
    """The engine's error, with the place in the client's schema where it arises."""
    message = " ".join(error.split("\n")[:3]) if "regex parse error" in error else _line(error)
    path: str = ""
    schema: dict[str, Any] = {}
    if constraint.kind == "json_schema":
        deadline = time.monotonic() + 0.5
        options: Any = OPTIONS

        def fails(schema: Any) -> str:
            if time.monotonic() > deadline:
                return ""
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
            return llguidance.LLMatcher.validate_grammar(grammar)

        path, schema, fault = locate(decode_json(constraint.source), fails)
        message = _line(fault) if fault and not fault.startswith("WARNING") else message
    keyword = next((name for sign, name in KEYWORDS if sign in message), "") if path else constraint.kind
    if keyword == "pattern" and path and "format" in schema and "pattern" not in schema:
        keyword = "format"  # which has become a pattern
    return ConstraintError(message[:300], path, keyword)


if __name__ == "__main__":
    main(int(sys.argv[1]))
