"""The pool of grammar processes, as the engine loop sees it: open, advance, collect, close.

Nothing here waits but `collect` and `check`, and they no longer than they are told. A process belongs to one grammar
and serves every sequence under it; what one grammar costs, no other pays (docs/decisions/0007-grammars-in-workers.md).
"""

from __future__ import annotations

import mmap
import os
import selectors
import socket
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tricorn.grammar.channel import Channel
from tricorn.grammar.config import Config
from tricorn.grammar.constraint import ConstraintError, content_key
from tricorn.request import Constraint, TricornError
from tricorn.weights.tokenizer import undecodable_ids

U32 = NDArray[np.uint32]

MOST_FAULTS = 256
"""Refusals that are remembered."""

COMPILING = 2
"""Grammars that compile at once; others wait."""

TIMES = 4096


class Mask(NamedTuple):
    """What may follow. `row` has one bit for each id (bit i % 32 of word i / 32) and is valid until the slot advances.
    `forced` are the ids that have to come next, as the tokenizer itself would cut the text. `may_end`: the text is a
    sentence already; ids that end it are allowed. `must_end`: nothing else is. With `error` the request is over."""

    row: U32
    forced: list[int]
    may_end: bool
    must_end: bool
    error: ConstraintError | None = None


class Stats(NamedTuple):
    """Counts since the start; times of the last masks (microseconds) and compilations (milliseconds)."""

    processes: int
    compiled: int
    hits: int
    refused: int
    killed: int
    mask_us: Sequence[float]
    compile_ms: Sequence[float]


class _Process:
    """The pool's view of one grammar's process."""

    def __init__(self, constraint: Constraint, key: str) -> None:
        self.constraint, self.key = constraint, key
        self.state: Literal["queued", "compiling", "ready"] = "queued"
        self.channel: Channel | None = None
        self.nursery: object = None
        """Which one forked it: when that one dies, so does this, and it is nobody's fault."""
        self.slots: dict[int, _Slot] = {}
        self.waiting: list[Any] = []
        """Messages for when it has started."""


class _Slot:
    """A sequence: the ids that it has accepted are kept, so that it can be opened again."""

    def __init__(self, row: int, constraint: Constraint, stop_ids: tuple[int, ...], tokens: list[int]) -> None:
        self.row, self.constraint, self.stop_ids, self.tokens = row, constraint, stop_ids, tokens
        self.process: _Process | None = None
        self.serial = 0
        self.pending = True
        self.deaths = 0


class Workers:
    """Grammar processes for one model; one thread uses it.

    `tokenizer` is the JSON of the `tokenizers` library, `vocab` the width of the logits. `slots` sequences can be open
    at once. A grammar may take `compile_seconds` of computing to compile and each mask `mask_seconds`, and its process
    may grow by `memory` bytes; `cached` processes are kept for grammars that nobody uses. Nothing starts before the
    first constraint comes.
    """

    def __init__(
        self,
        tokenizer: str,
        vocab: int,
        eos_ids: Iterable[int],
        *,
        slots: int = 64,
        compile_seconds: float = 2.0,
        mask_seconds: float = 1.0,
        memory: int = 512 << 20,
        cached: int = 32,
    ) -> None:
        self._settings = (tokenizer, vocab, tuple(eos_ids), compile_seconds, mask_seconds, memory)
        self._rows, self._cached = slots, cached
        self._nursery: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._masks: U32 | None = None
        self._masks_fd = -1
        self._free = list(range(slots))[::-1]
        self._slots: dict[int, _Slot] = {}
        self._processes: OrderedDict[str, _Process] = OrderedDict()
        self._alone: list[_Process] = []
        """Processes of one slot each, which may have brought down the one it was in."""
        self._faults: OrderedDict[str, tuple[str, str, str]] = OrderedDict()
        self._errors: dict[int, ConstraintError] = {}
        self._selector = selectors.DefaultSelector()
        self._ready: dict[int, Mask] = {}
        self._compiled = self._hits = self._refused = self._killed = 0
        self._serial = 0
        self._mask_us: deque[float] = deque(maxlen=TIMES)
        self._compile_ms: deque[float] = deque(maxlen=TIMES)

    # --- the engine's side

    def open(self, constraint: Constraint, stop_ids: Iterable[int] = (), tokens: Iterable[int] = ()) -> int:
        """A slot for a sequence that has accepted `tokens` already; `collect` brings its first mask, or why there is
        none. Raises TricornError when all slots are taken."""
        if not self._free:
            raise TricornError(f"all {self._rows} slots for constrained sequences are taken; wait for one to end")
        slot = _Slot(self._free.pop(), constraint, tuple(stop_ids), list(tokens))
        self._slots[slot.row] = slot
        self._place(slot)
        return slot.row

    def advance(self, accepted: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Tells which ids sequences have accepted and asks for their next masks."""
        told: dict[int, tuple[_Process, list[tuple[int, int, list[int]]]]] = {}
        for row, tokens in accepted:
            slot = self._slots[row]
            slot.tokens += tokens
            slot.pending = True
            self._ready.pop(row, None)
            if (process := slot.process) is not None:
                self._serial += 1
                slot.serial = self._serial
                told.setdefault(id(process), (process, []))[1].append((row, slot.serial, list(tokens)))
        for process, steps in told.values():
            self._send(process, ("advance", steps))

    def collect(self, deadline: float | None = None) -> dict[int, Mask]:
        """The masks that have come since the last call. Waits until none is due or until `deadline`
        (`time.monotonic()`; None: as long as it takes). A slot that is missing sits out and is asked for again; one
        with an error only waits to be closed."""
        while True:
            self._start_next()
            due = any(slot.pending for slot in self._slots.values())
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in self._selector.select(left if due else 0):
                self._read(key.data)
            if not any(slot.pending for slot in self._slots.values()) or (deadline is not None and not left):
                break
        ready, self._ready = self._ready, {}
        return ready

    def close(self, row: int) -> None:
        """Gives a slot back."""
        slot = self._slots.pop(row)
        self._ready.pop(row, None)
        self._free.append(row)
        process = slot.process
        if process is None:
            return
        del process.slots[row]
        self._send(process, ("close", row))
        if process in self._alone:
            self._drop(process)
        self._evict()

    def check(self, constraint: Constraint, timeout: float | None = None) -> None:
        """Compiles a constraint, if it has not been. Raises ConstraintError when it cannot be enforced, TricornError
        when `timeout` seconds do not suffice to know."""
        deadline = None if timeout is None else time.monotonic() + timeout
        row = self.open(constraint)
        mine: Mask | None = None
        others: dict[int, Mask] = {}
        while mine is None and (deadline is None or time.monotonic() < deadline):
            step = time.monotonic() + 0.01
            others |= self.collect(step if deadline is None else min(step, deadline))
            mine = others.pop(row, None)
        self.close(row)
        self._ready = {**others, **self._ready}
        if mine is None:
            raise TricornError("the constraint waits for others to compile; try again later")
        if mine.error is not None:
            raise mine.error

    def stats(self) -> Stats:
        return Stats(
            len(self._processes) + len(self._alone),
            self._compiled,
            self._hits,
            self._refused,
            self._killed,
            self._mask_us,
            self._compile_ms,
        )

    def shutdown(self) -> None:
        """Ends all processes; open slots are forgotten."""
        for process in [*self._processes.values(), *self._alone]:
            self._drop(process)
        self._slots.clear()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._nursery is not None:
            self._nursery.wait()
            self._nursery = None
        if self._masks_fd >= 0:
            os.close(self._masks_fd)
            self._masks_fd = -1
        self._selector.close()

    # --- processes

    def _place(self, slot: _Slot) -> None:
        """Joins a slot to the process of its grammar, which may have to be made."""
        key = content_key(slot.constraint)
        fault = self._faults.get(key)
        if fault is not None:
            self._faults.move_to_end(key)
            self._fail(slot, ConstraintError(*fault))
            return
        process = self._processes.get(key) if not slot.deaths else None
        if process is None:
            process = _Process(slot.constraint, key)
            if slot.deaths:
                self._alone.append(process)
            else:
                self._processes[key] = process
        else:
            self._hits += 1
            self._processes.move_to_end(key)
        self._serial += 1
        slot.process, slot.serial, slot.pending = process, self._serial, True
        process.slots[slot.row] = slot
        self._send(process, ("open", slot.row, slot.serial, slot.stop_ids, slot.tokens))
        self._start_next()

    def _start_next(self) -> None:
        """Starts the processes that may compile now."""
        every = [*self._processes.values(), *self._alone]
        busy = sum(process.state == "compiling" for process in every)
        for process in every:
            if process.state == "queued" and busy < COMPILING:
                self._start(process)
                busy += 1

    def _start(self, process: _Process) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            for attempt in (0, 1):
                control = self._nurse()
                try:
                    socket.send_fds(control, [b"f"], [theirs.fileno()])
                    break
                except OSError:
                    if attempt:
                        raise
                    self._bury()
        mine.setblocking(False)
        process.channel, process.state, process.nursery = Channel(mine), "compiling", self._nursery
        self._selector.register(mine, selectors.EVENT_READ, process)
        waiting, process.waiting = process.waiting, []
        for message in [("compile", process.constraint.kind, process.constraint.source), *waiting]:
            self._send(process, message)

    def _nurse(self) -> socket.socket:
        """The socket of the nursery, which starts when first needed."""
        if self._control is not None:
            return self._control
        tokenizer, vocab, eos_ids, compile_seconds, mask_seconds, memory = self._settings
        if self._masks_fd < 0:
            self._masks_fd = os.memfd_create("tricorn-masks")
            words = -(-vocab // 32)
            os.ftruncate(self._masks_fd, 4 * words * self._rows)
            self._masks = np.frombuffer(mmap.mmap(self._masks_fd, 0), np.uint32).reshape(self._rows, words)
        config_fd = os.memfd_create("tricorn-grammar")
        never = undecodable_ids(tokenizer, vocab)
        config = Config(tokenizer, vocab, self._rows, eos_ids, never, compile_seconds, mask_seconds, memory)
        os.pwrite(config_fd, msgspec.msgpack.encode(config), 0)
        mine, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tricorn.grammar.worker", str(theirs.fileno())]
            self._nursery = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        socket.send_fds(mine, [b"c"], [config_fd, self._masks_fd])
        os.close(config_fd)
        self._control = mine
        return mine

    def _nursery_lives(self) -> bool:
        """Its socket, on which it never writes, ends before its processes do."""
        try:
            return self._control is not None and self._control.recv(1, socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _bury(self) -> None:
        """Forgets a nursery that died; all its processes died with it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._nursery is not None:
            self._nursery.kill()
            self._nursery.wait()
            self._nursery = None

    def _send(self, process: _Process, message: Any) -> None:
        if process.channel is None:
            process.waiting.append(message)
            return
        try:
            process.channel.send(message)
            if process.channel.out:
                self._watch(process, selectors.EVENT_READ | selectors.EVENT_WRITE)
        except OSError:
            pass  # it is gone: the selector will tell

    def _watch(self, process: _Process, events: int) -> None:
        if process.channel is not None:
            self._selector.modify(process.channel.socket, events, process)

    def _read(self, process: _Process) -> None:
        channel = process.channel
        if channel is None:
            return
        messages = channel.receive()
        if channel.out:
            try:
                channel.flush()
            except OSError:
                messages = None
        if not channel.out:
            self._watch(process, selectors.EVENT_READ)
        if messages is None:
            self._died(process)
            return
        for kind, *fields in messages:
            if kind == "compiled":
                self._has_compiled(process, *fields)
            else:
                for mask in fields[0]:
                    self._has_mask(process, *mask)

    def _has_compiled(self, process: _Process, milliseconds: float, fault: Any) -> None:
        self._compile_ms.append(milliseconds)
        if fault is not None:
            self._refuse(process, tuple(fault))
            return
        process.state = "ready"
        self._compiled += 1
        self._evict()

    def _has_mask(
        self,
        process: _Process,
        row: int,
        serial: int,
        forced: list[int],
        may_end: bool,
        must_end: bool,
        error: str | None,
        seconds: float,
    ) -> None:
        slot = process.slots.get(row)
        if slot is None or slot.serial != serial or self._masks is None:
            return  # it has been closed, or has gone on
        if error is not None:
            self._fail(slot, ConstraintError(error))
            return
        self._mask_us.append(seconds * 1e6)
        slot.pending = False
        self._ready[row] = Mask(self._masks[row], forced, may_end, must_end)

    def _refuse(self, process: _Process, fault: tuple[str, str, str]) -> None:
        """A grammar that cannot be used: its sequences end, and it is remembered."""
        self._refused += 1
        self._faults[process.key] = fault
        while len(self._faults) > MOST_FAULTS:
            self._faults.popitem(last=False)
        slots = list(process.slots.values())
        self._drop(process)
        for slot in slots:
            self._fail(slot, ConstraintError(*fault))

    def _died(self, process: _Process) -> None:
        """A process was ended by the kernel, or by a fault of its own. Sequences whose masks were under way are tried
        once more, each alone; the one that does it again ends. The others are opened anew."""
        slots = list(process.slots.values())
        compiling = process.state == "compiling"
        theirs = process.nursery is self._nursery
        nursery_lives = theirs and self._nursery_lives()
        self._killed += 1
        if compiling and nursery_lives:
            _, _, _, seconds, _, memory = self._settings
            kind = process.constraint.kind
            self._refuse(process, (f"takes more than {seconds:g} s or {memory >> 20} MiB to compile", "", kind))
            return
        if theirs and not nursery_lives:
            self._bury()
        self._drop(process)
        for slot in slots:
            slot.deaths += slot.pending and nursery_lives
            slot.process = None
            if slot.deaths > 1:
                self._fail(slot, ConstraintError("its next token takes too long or too much memory to find"))
            elif slot.pending or not slot.deaths:
                self._place_again(slot)

    def _place_again(self, slot: _Slot) -> None:
        """Opens a slot in a new process. One whose mask is there already stays as it is until it advances."""
        pending = slot.pending
        self._place(slot)
        if not pending:
            slot.pending = True
            self._ready.pop(slot.row, None)

    def _fail(self, slot: _Slot, error: ConstraintError) -> None:
        assert slot.row in self._slots
        empty = np.zeros(-(-self._settings[1] // 32), np.uint32)
        if slot.process is not None:
            slot.process.slots.pop(slot.row, None)
            slot.process = None
        slot.pending = False
        self._ready[slot.row] = Mask(empty, [], False, False, error)

    def _drop(self, process: _Process) -> None:
        """Lets a process go: it ends when its socket closes."""
        if process.channel is not None:
            self._selector.unregister(process.channel.socket)
            process.channel.socket.close()
            process.channel = None
        if process in self._alone:
            self._alone.remove(process)
        elif self._processes.get(process.key) is process:
            del self._processes[process.key]

    def _evict(self) -> None:
        idle = [process for process in self._processes.values() if not process.slots and process.state == "ready"]
        for process in idle[: max(0, len(idle) - self._cached)]:
            self._drop(process)
