"""The engine process: `python -m tricorn.engine FOLDER OPTIONS`, started by process.EngineProcess.

FOLDER holds the client's sockets, OPTIONS is an EngineOptions in JSON. Says an EngineInfo when it is ready, or Failed.
When standard input ends, the client is gone and so is the engine. It ends itself when a step takes too long or memory
is exhausted, so that another can take its place.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from tricorn.engine.engine import Engine
from tricorn.engine.factory import open_engine
from tricorn.engine.loop import run
from tricorn.engine.messages import Failed, FromEngine, ToEngine
from tricorn.engine.options import EngineOptions
from tricorn.engine.process import BEAT_SECONDS, HUNG, OUT_OF_MEMORY, PRESENT, endpoint
from tricorn.request import TricornError

START_SECONDS = 600.0
"""How long an engine may take to start: a large file has to be read and checked."""


class SocketMailbox:
    """See loop.Mailbox."""

    def __init__(self, folder: Path) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbox, self._outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket, name in ((self._inbox, "requests"), (self._outbox, "outputs")):
            socket.set_hwm(0)
            socket.connect(endpoint(folder, name))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def receive(self, wait: bool) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while self._inbox.poll(None if wait and not messages else 0):
            messages.append(self._decoder.decode(self._inbox.recv()))
        return messages

    def send(self, message: FromEngine) -> None:
        self._outbox.send(self._encoder.encode(message))


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the client decides
    os.set_blocking(sys.stdout.fileno(), False)
    watch = Watch()
    threading.Thread(target=watch.run, name="tricorn-watch", daemon=True).start()
    mailbox = SocketMailbox(Path(sys.argv[1]))
    try:
        options = msgspec.json.decode(sys.argv[2], type=EngineOptions)
        engine, info = open_engine(options)
    except (TricornError, MemoryError, OSError) as error:
        mailbox.send(Failed(str(error) or type(error).__name__))
        return 1
    watch.follow(engine, options.step_timeout)
    engine.on_present = Present(Path(sys.argv[1])).write
    mailbox.send(info)
    try:
        run(engine, mailbox)
    except MemoryError:
        _end(OUT_OF_MEMORY, b"tricorn: the engine is out of memory and ends\n")
    except Exception as error:
        mailbox.send(Failed(f"the engine failed: {type(error).__name__}: {error}"))
        raise
    engine.close()
    return 0


class Present:
    """Writes down which requests a step could die of, where it can be read when it has."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / PRESENT, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.write([])

    def write(self, ids: list[str]) -> None:
        record = msgspec.msgpack.encode(ids)
        with suppress(OSError):  # a full disk: the old record counts, which is longer
            os.pwrite(self._file, record, 0)
            os.ftruncate(self._file, len(record))


class Watch:
    """A thread that ends this process with its client, even in the middle of a step, or when a step takes too long, and
    shows the client that it lives."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._engine: Engine | None = None
        self._most = 0.0

    def follow(self, engine: Engine, most_seconds: float) -> None:
        """The engine is there; a step of it may take so long."""
        self._engine, self._most = engine, most_seconds

    def run(self) -> None:
        while not select.select([sys.stdin], [], [], BEAT_SECONDS)[0]:
            with suppress(BlockingIOError, BrokenPipeError):  # nobody listens yet, or any more
                os.write(sys.stdout.fileno(), b".")
            self._check(time.monotonic())
        os._exit(0)

    def _check(self, now: float) -> None:
        engine = self._engine
        if engine is None:
            if now - self._started > START_SECONDS:
                _end(HUNG, b"tricorn: the engine takes too long to start and ends\n")
        elif (since := engine.waiting_since) is not None and now - since > self._most:
            _end(HUNG, b"tricorn: a step of the engine takes longer than --step-timeout; the engine ends\n")


def _end(code: int, line: bytes) -> None:
    """Needs no memory, and waits for nobody."""
    with suppress(OSError):
        os.write(2, line)
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
