"""One life of an engine process, from its start to its death.

The process is a child joined by two ZeroMQ sockets in a private folder, one for each direction, with messages in
MessagePack. Two pipes tell each side of the other's death: the child's standard input, on which nothing is ever
written, and its standard output, on which a thread of the child beats time: a child that has stopped is as good as
dead.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from tricorn.engine.messages import Close, DeathReason, EngineInfo, Failed, FromEngine, ToEngine
from tricorn.engine.options import EngineOptions
from tricorn.request import TricornError

BEAT_SECONDS = 0.5
"""How often an engine process shows that it lives."""

SILENT_SECONDS = 4
"""After so many seconds, one by one, without a sign of life an engine process counts as dead."""

CLOSE_SECONDS = 2.0
SAVE_SECONDS = 12.0
"""How long an engine process may take to go when it is told to; the second when it has a disk tier to save in."""

HUNG = 80
OUT_OF_MEMORY = 81
"""The exit codes of an engine process that ends itself, because a step takes too long or memory is exhausted."""


PRESENT = "present"
"""The file in the private folder where an engine says which requests its step could die of."""


class Dead(TricornError):
    """The engine process is no more, or as good as that."""

    def __init__(self, reason: DeathReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineProcess:
    """Starts the process. `send` may be called from any thread, the rest from one that owns it, but for `stop`."""

    def __init__(self, options: EngineOptions) -> None:
        self._close_seconds = CLOSE_SECONDS if options.kv_disk is None else SAVE_SECONDS
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._sending = threading.Lock()
        self._folder = _private_folder()
        self._zmq = zmq.Context()
        self._requests = self._bind(zmq.PUSH, "requests")
        self._outputs = self._bind(zmq.PULL, "outputs")
        self._silent = 0  # counted in polls, so that this process may be stopped, or the machine sleep, for any time
        self._failure: str | None = None
        self._ready = self._killed = False
        self._unread: list[FromEngine] = []  # what came together with the word that it is ready
        self.heard = time.monotonic()
        """When the last message came."""
        self.present: set[str] | None = None
        """Once it is buried: the requests that its death may be due to, those in the step that died which had not
        brought a token; None: not known."""
        self._memory_kills = _memory_kills()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tricorn.engine", str(self._folder), msgspec.json.encode(options).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Lost when the process is dead, which `receive` is about to notice."""
        data = self._encoder.encode(message)
        with self._sending, suppress(zmq.Again):
            if not self._requests.closed:
                self._requests.send(data, zmq.DONTWAIT)

    def wait_ready(self) -> EngineInfo:
        """Raises Dead when it cannot start."""
        while True:
            messages = self.receive()
            for index, message in enumerate(messages):
                if isinstance(message, EngineInfo):
                    self._unread = messages[index + 1 :]
                    self._requests.poll(1000, zmq.POLLOUT)  # the other socket may still be joining
                    self._ready = True
                    return message

    def receive(self) -> list[FromEngine]:
        """Waits up to a second for messages. Raises Dead when the process has ended and there are none left, or when it
        shows no life."""
        if self._unread:
            messages, self._unread = self._unread, []
            return messages
        pipe = self._process.stdout
        assert pipe is not None
        poller = zmq.Poller()
        poller.register(self._outputs, zmq.POLLIN)
        poller.register(pipe, zmq.POLLIN)
        ready = dict(poller.poll(1000))
        self._silent = 0 if ready else self._silent + 1
        messages = self._arrived()
        if not messages and pipe.fileno() in ready and not os.read(pipe.fileno(), 4096):
            raise self._death(self._process.wait())
        if not messages and self._silent >= SILENT_SECONDS:
            raise Dead("silent", f"the engine process has shown no life for {SILENT_SECONDS} s")
        return messages

    def stop(self) -> None:
        """Ends the process in order, by force when it takes too long. May be called from any thread, and again."""
        if self._ready:
            self.send(Close())
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._close_seconds)
        self._process.kill()
        self._process.wait()

    def bury(self) -> list[FromEngine]:
        """Ends the process by force if it lives, and frees everything; gives what it had said."""
        self._killed = self._process.poll() == -signal.SIGKILL
        self._process.kill()
        self._process.wait()
        messages = self._arrived()
        with suppress(OSError, msgspec.DecodeError):
            self.present = set(msgspec.msgpack.decode((self._folder / PRESENT).read_bytes(), type=list[str]))
        if self._killed and self._memory_kills is not None and self._memory_kills == _memory_kills():
            self.present = set()  # no request can do that
        with self._sending:
            self._requests.close()
        self._outputs.close()
        self._zmq.term()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return messages

    def _arrived(self) -> list[FromEngine]:
        messages: list[FromEngine] = []
        while self._outputs.poll(0):
            message = self._decoder.decode(self._outputs.recv())
            if isinstance(message, Failed):
                self._failure = message.message
            messages.append(message)
        if messages:
            self.heard = time.monotonic()
        return messages

    def _death(self, code: int) -> Dead:
        if self._failure is not None:
            return Dead("failed", self._failure)
        if code == HUNG:
            return Dead("hung", "a step of the engine took too long")
        if code == OUT_OF_MEMORY:
            return Dead("memory", "the engine ran out of memory")
        if code < 0:
            return Dead("signal", f"the engine process ended by signal {-code}")
        return Dead("exit", f"the engine process ended with exit code {code}")

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._zmq.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(endpoint(self._folder, name))
        return socket


def _memory_kills() -> int | None:
    """How often the kernel has killed a process here for want of memory; None when it does not tell."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def endpoint(folder: Path, name: str) -> str:
    return f"ipc://{folder}/{name}"


def _private_folder() -> Path:
    """A new folder that only this user can enter, with a path short enough for a socket (some 100 bytes)."""
    folder = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="tricorn-", dir=folder if len(folder.encode()) < 70 else "/tmp"))
