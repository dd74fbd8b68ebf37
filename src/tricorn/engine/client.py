"""Two ways to an engine with one interface: in a thread of this process, and in a process of its own.

The engine process is a child joined by two ZeroMQ sockets in a private folder, one for each direction, with messages in
MessagePack. Two pipes tell each side of the other's death: the child's standard input, on which nothing is ever
written, and its standard output, on which a thread of the child beats time: a child that has stopped is as good as
dead.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from tricorn.engine.factory import engine_of, open_executor
from tricorn.engine.loop import run
from tricorn.engine.messages import Close, EngineInfo, EngineStats, Failed, FromEngine, Outputs, ToEngine
from tricorn.engine.options import EngineOptions
from tricorn.engine.streams import Streams
from tricorn.request import Abort, Output, Request, TricornError
from tricorn.runtime.step import Executor
from tricorn.scheduler.limits import check_request

BEAT_SECONDS = 0.5
"""How often an engine process shows that it lives."""

SILENT_SECONDS = 4
"""After so many seconds, one by one, without a sign of life an engine process counts as dead."""

CLOSE_SECONDS = 2.0
"""How long an engine process may take to go once its standard input has ended."""


class InProcessClient:
    """An engine in a thread of this process. `opened` replaces what `options` would open. Raises TricornError when it
    cannot start."""

    def __init__(self, options: EngineOptions, opened: tuple[Executor, EngineInfo] | None = None) -> None:
        executor, self.info = opened or open_executor(options)
        self._engine = engine_of(executor, self.info, options)
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._streams = Streams(self.abort)
        self._stats = EngineStats()
        self._thread = threading.Thread(target=self._run, name="tricorn-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._streams.failure is None

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

    def _run(self) -> None:
        try:
            run(self._engine, self)
            self._streams.fail("the engine was closed")
        except BaseException as error:
            self._streams.fail(f"the engine failed: {type(error).__name__}: {error}")
            raise


class ProcessClient:
    """An engine in a process of its own. Raises TricornError when it cannot start. Safe to use from one event loop at a
    time."""

    def __init__(self, options: EngineOptions) -> None:
        self._streams = Streams(self.abort)
        self._stats = EngineStats()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._sending = threading.Lock()
        self._folder = private_folder()
        self._zmq = zmq.Context()
        self._requests = self._bind(zmq.PUSH, "requests")
        self._outputs = self._bind(zmq.PULL, "outputs")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tricorn.engine", str(self._folder), msgspec.json.encode(options).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._reader = threading.Thread(target=self._read, name="tricorn-engine-reader", daemon=True)
        try:
            self.info = self._wait_ready()
        except BaseException:
            self._stop()
            raise
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self._streams.failure is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """Runs a request; its last output has a finish reason. To be called in a running event loop. Closing the
        generator early aborts the request. Raises TricornError at once when it can never be served or the engine is
        gone."""
        check_request(request, self.info.limits)
        message = self._encoder.encode(request)
        stream = self._streams.open(request.id)
        self._send(message)
        return stream

    def abort(self, id: str) -> None:
        """Ends a request, whose last output says so; unknown ids are ignored."""
        self._send(self._encoder.encode(Abort(id)))

    async def stats(self) -> EngineStats:
        """The latest snapshot, at most some 100 ms old while the engine is busy."""
        return self._stats

    def close(self) -> None:
        """Stops the engine at once; open requests end with an error."""
        self._streams.fail("the engine was closed")
        self._stop()

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._zmq.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(endpoint(self._folder, name))
        return socket

    def _send(self, message: bytes) -> None:
        with self._sending, suppress(zmq.Again):  # nobody is at the other end: the reader is about to notice
            if not self._requests.closed:
                self._requests.send(message, zmq.DONTWAIT)

    def _wait_ready(self) -> EngineInfo:
        while True:
            for message in self._receive()[0]:
                if isinstance(message, EngineInfo):
                    self._requests.poll(flags=zmq.POLLOUT)  # the other socket may still be joining
                    return message
                if isinstance(message, Failed):
                    raise TricornError(message.message)

    def _read(self) -> None:
        silent = 0  # counted in polls, so that this process may be stopped, or the machine sleep, for any time
        try:
            while silent < SILENT_SECONDS:
                messages, heard = self._receive()
                silent = 0 if heard else silent + 1
                for message in messages:
                    if isinstance(message, Outputs):
                        self._streams.deliver(message.outputs)
                    elif isinstance(message, EngineStats):
                        self._stats = message
                    elif isinstance(message, Failed):
                        self._streams.fail(message.message)
            raise TricornError(f"the engine process has shown no life for {SILENT_SECONDS} s")
        except Exception as error:
            if self.alive:
                self._streams.fail(str(error))
            self._stats = EngineStats(pages_total=self.info.pages)

    def _receive(self) -> tuple[list[FromEngine], bool]:
        """Waits up to a second for messages; also tells whether there was any sign of life. Raises TricornError when
        the engine process has ended and there are none left."""
        pipe = self._process.stdout
        assert pipe is not None
        poller = zmq.Poller()
        poller.register(self._outputs, zmq.POLLIN)
        poller.register(pipe, zmq.POLLIN)
        ready = dict(poller.poll(1000))
        messages: list[FromEngine] = []
        while self._outputs.poll(0):
            messages.append(self._decoder.decode(self._outputs.recv()))
        if not messages and pipe.fileno() in ready and not os.read(pipe.fileno(), 4096):
            raise TricornError(f"the engine process ended {_how(self._process.wait())}")
        return messages, bool(ready)

    def _stop(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.close()
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader.ident is not None:
            self._reader.join()
        with self._sending:
            self._requests.close()
        self._outputs.close()
        self._zmq.term()
        shutil.rmtree(self._folder, ignore_errors=True)


def private_folder() -> Path:
    """A new folder that only this user can enter, with a path short enough for a socket (some 100 bytes)."""
    folder = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="tricorn-", dir=folder if len(folder.encode()) < 70 else "/tmp"))


def endpoint(folder: Path, name: str) -> str:
    return f"ipc://{folder}/{name}"


def _how(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"
