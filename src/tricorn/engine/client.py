"""Two ways to an engine with one interface: in a thread of this process, and in a process of its own, which is
supervised: when it dies another takes its place, and every live request goes on where it was."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from tricorn.engine.factory import Opened, open_engine
from tricorn.engine.ledger import Ledger
from tricorn.engine.loop import run
from tricorn.engine.messages import (
    Close,
    DeathReason,
    EngineState,
    EngineStats,
    FromEngine,
    Inspect,
    Outputs,
    Status,
    Survival,
    ToEngine,
    carry,
)
from tricorn.engine.options import EngineOptions
from tricorn.engine.process import Dead, EngineProcess
from tricorn.engine.streams import Questions, Streams
from tricorn.request import Abort, Output, Request, TricornError
from tricorn.scheduler.limits import check_request

BACKOFF_SECONDS = (0.1, 0.5, 2.0)
"""Before the first, second and third engine in a row that brings nothing about; after the third it is over."""

STEADY_SECONDS = 10.0
"""An engine that dies after so long was not bound to die at once."""

log = logging.getLogger("tricorn.engine")


class InProcessClient:
    """An engine in a thread of this process. `opened` replaces what `options` would open. Raises TricornError when it
    cannot start."""

    def __init__(self, options: EngineOptions, opened: Opened | None = None) -> None:
        self._engine, self.info = open_engine(options, opened)
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._streams = Streams(self.abort)
        self._questions = Questions()
        self._stats = EngineStats()
        self._thread = threading.Thread(target=self._run, name="tricorn-engine", daemon=True)
        self._thread.start()

    @property
    def status(self) -> Status:
        return "ready" if self._streams.failure is None else "dead"

    @property
    def alive(self) -> bool:
        return self.status != "dead"

    def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """Runs a request; its last output has a finish reason. To be called in a running event loop. Closing the
        generator early aborts the request. Raises TricornError at once when it can never be served or the engine is
        gone."""
        check_request(request, self.info.limits)
        stream = self._streams.open(request.id)
        self._inbox.put(request)
        return stream

    def abort(self, id: str) -> None:
        """Ends a request, whose last output says so; unknown ids are ignored."""
        self._inbox.put(Abort(id))

    async def stats(self) -> EngineStats:
        """The latest snapshot, at most some 100 ms old while the engine is busy."""
        return self._stats

    async def state(self, *, tree: bool = False) -> dict[str, Any]:
        """What is going on, for people: see Engine.state. Raises TricornError when the engine does not say."""
        return await self._questions.ask(lambda: self._inbox.put(Inspect(tree)), tree)

    def close(self) -> None:
        """Stops the engine; open requests end with an error."""
        self._inbox.put(Close())
        self._thread.join()
        self._engine.close()

    def receive(self, wait: bool) -> list[ToEngine]:
        """For the engine's thread: see loop.Mailbox."""
        messages = [self._inbox.get()] if wait else []
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def send(self, message: FromEngine) -> None:
        """For the engine's thread: see loop.Mailbox."""
        if isinstance(message, Outputs):
            self._streams.deliver(message.outputs)
        elif isinstance(message, EngineStats):
            self._stats = message
        elif isinstance(message, EngineState):
            self._questions.answer(message.state)

    def _run(self) -> None:
        try:
            run(self._engine, self)
            self._streams.fail("the engine was closed")
        except BaseException as error:
            self._streams.fail(f"the engine failed: {type(error).__name__}: {error}")
            raise


class ProcessClient:
    """An engine in a process of its own, started anew when it dies: streams pause, then go on. When no new engine comes
    to anything, all streams end with an error. Raises TricornError when the first cannot start. Safe to use from one
    event loop at a time. `engine` is the first one, where it has been started already."""

    def __init__(self, options: EngineOptions, engine: EngineProcess | None = None) -> None:
        self.status: Status = "starting"
        self._options = options
        self._streams = Streams(self.abort)
        self._questions = Questions()
        self._lock = threading.Lock()  # guards the ledger, and the status, by which it is decided what is sent
        self._ledger = Ledger()
        self._past = self._stats = EngineStats()
        self._deaths: Counter[DeathReason] = Counter()
        self._restarts = 0
        self._longest_pause = 0.0
        self._paused_since: float | None = None
        self._closing = threading.Event()
        self._engine = engine or EngineProcess(options)
        try:
            self.info = self._engine.wait_ready()
        except BaseException:
            self._engine.bury()
            raise
        self.status = "ready"
        self._thread = threading.Thread(target=self._supervise, name="tricorn-supervisor", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self.status != "dead"

    @property
    def pid(self) -> int:
        """Of the engine process that lives now, or died last."""
        return self._engine.pid

    @property
    def survival(self) -> Survival:
        return Survival(
            deaths=dict(self._deaths),
            restarts=self._restarts,
            resumed_requests=self._ledger.resumed,
            dropped_requests=self._ledger.dropped,
            longest_pause=self._longest_pause,
        )

    def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """Runs a request; its last output has a finish reason. While the engine is being restarted it waits. To be
        called in a running event loop. Closing the generator early aborts the request. Raises TricornError at once when
        it can never be served or the engine is gone for good."""
        check_request(request, self.info.limits)
        msgspec.msgpack.encode((request.params, request.service))  # what cannot be sent must not be in the ledger
        stream = self._streams.open(request.id)
        with self._lock:
            self._ledger.open(request)
            self._send_due()
        return stream

    def abort(self, id: str) -> None:
        """Ends a request, whose last output says so; unknown ids are ignored."""
        with self._lock:
            output = self._ledger.abort(id)
            if output is None and self.status == "ready":
                self._engine.send(Abort(id))
            self._send_due()
        if output is not None:
            self._streams.deliver([output])

    async def stats(self) -> EngineStats:
        """The latest snapshot, at most some 100 ms old while the engine is busy. Counters go on over deaths."""
        return self._stats

    async def state(self, *, tree: bool = False) -> dict[str, Any]:
        """What is going on, for people: see Engine.state. Raises TricornError when the engine does not say."""
        if self.status != "ready":
            raise TricornError(f"the engine is {self.status}: ask again later")
        return await self._questions.ask(lambda: self._engine.send(Inspect(tree)), tree)

    def close(self) -> None:
        """Stops the engine at once; open requests end with an error."""
        self._closing.set()
        self._end("the engine was closed")
        self._engine.stop()
        self._thread.join()

    def _send_due(self) -> None:
        """Under the lock."""
        if self.status == "ready":
            for request in self._ledger.due():
                self._engine.send(request)

    def _end(self, message: str) -> None:
        with self._lock:
            self.status = "dead"
        self._streams.fail(message)

    # The supervising thread

    def _supervise(self) -> None:
        """One engine after the other, until it is closed or another makes no sense."""
        fruitless = 0  # engines in a row that brought nothing about
        try:
            while True:
                death, useful = self._follow()
                fruitless = 0 if useful else fruitless + 1
                if self._closing.is_set():
                    return
                if fruitless == len(BACKOFF_SECONDS):
                    self._end(f"{fruitless} engines in a row died before they finished a step; the last one: {death}")
                    return
                if self._closing.wait(BACKOFF_SECONDS[fruitless]):
                    return
                self._engine = EngineProcess(self._options)
                if self._closing.is_set():  # before it could be told
                    self._engine.bury()
                    return
        except BaseException as error:
            self._end(f"the engine's supervisor failed: {type(error).__name__}: {error}")
            raise

    def _follow(self) -> tuple[Dead, bool]:
        """Sees one engine through to its death. Also tells whether it was of use: it finished a step, or lived long, or
        died of a request that is ended now."""
        worked, began = False, None
        try:
            if self.status != "ready":
                self._engine.wait_ready()
                self._resume()
            began = time.monotonic()
            while True:
                worked = self._hear(self._engine.receive()) or worked
        except Dead as error:
            death = error
        worked = self._hear(self._engine.bury()) or worked
        steady = began is not None and time.monotonic() - began > STEADY_SECONDS
        return death, self._mourn(death) or worked or steady

    def _hear(self, messages: list[FromEngine]) -> bool:
        """Passes on what an engine says; tells whether a step brought it."""
        worked = False
        for message in messages:
            if isinstance(message, Outputs):
                worked = worked or any(output.token_ids for output in message.outputs)
                with self._lock:
                    outputs = self._ledger.note(message.outputs)
                    self._send_due()
                self._streams.deliver(outputs)
            elif isinstance(message, EngineStats):
                self._stats = carry(self._past, message)
            elif isinstance(message, EngineState):
                self._questions.answer(message.state)
        return worked

    def _mourn(self, death: Dead) -> bool:
        """Enters a death in the books; tells whether a request is ended for it."""
        if self._closing.is_set():
            return False
        log.warning("the engine died: %s", death)
        if self._paused_since is None:
            self._paused_since = self._engine.heard if len(self._ledger) else time.monotonic()
        self._deaths[death.reason] += 1
        self._past = self._stats
        self._stats = carry(self._past, EngineStats(pages_total=self.info.pages))
        with self._lock:
            self.status = "restarting"
            ended = self._ledger.died(self._engine.present)
        self._streams.deliver(ended)
        return any(output.finish_reason == "error" for output in ended)

    def _resume(self) -> None:
        """A new engine is ready: it gets every live request."""
        assert self._paused_since is not None
        pause = time.monotonic() - self._paused_since
        self._paused_since = None
        self._longest_pause = max(self._longest_pause, pause)
        self._restarts += 1
        log.warning("a new engine took over after %.2f s, with %d requests", pause, len(self._ledger))
        with self._lock:
            self.status = "ready"
            self._send_due()
