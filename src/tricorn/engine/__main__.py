"""The engine process: `python -m tricorn.engine FOLDER OPTIONS`, started by client.ProcessClient.

FOLDER holds the client's sockets, OPTIONS is an EngineOptions in JSON. Says an EngineInfo when it is ready, or Failed.
When standard input ends, the client is gone and so is the engine.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from tricorn.engine.client import BEAT_SECONDS, endpoint
from tricorn.engine.factory import open_engine
from tricorn.engine.loop import run
from tricorn.engine.messages import Failed, FromEngine, ToEngine
from tricorn.engine.options import EngineOptions
from tricorn.request import TricornError


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
    threading.Thread(target=_follow_client, name="tricorn-follow-client", daemon=True).start()
    mailbox = SocketMailbox(Path(sys.argv[1]))
    try:
        options = msgspec.json.decode(sys.argv[2], type=EngineOptions)
        engine, info = open_engine(options)
    except (TricornError, MemoryError, OSError) as error:
        mailbox.send(Failed(str(error) or type(error).__name__))
        return 1
    mailbox.send(info)
    try:
        run(engine, mailbox)
    except Exception as error:
        mailbox.send(Failed(f"the engine failed: {type(error).__name__}: {error}"))
        raise
    engine.close()
    return 0


def _follow_client() -> None:
    """Ends this process with its client, even in the middle of a step, and shows the client that it lives."""
    while not select.select([sys.stdin], [], [], BEAT_SECONDS)[0]:
        with suppress(BlockingIOError, BrokenPipeError):  # nobody listens yet, or any more
            os.write(sys.stdout.fileno(), b".")
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
