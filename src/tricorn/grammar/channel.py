"""Messages over a socket between the pool and its processes: a length in four bytes, then MessagePack."""

from __future__ import annotations

import socket
from typing import Any

import msgspec

CHUNK = 1 << 16


class Channel:
    """One end. `send` never blocks on a non-blocking socket: what does not go out waits for `flush`."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.out = bytearray()
        self.into = bytearray()

    def send(self, message: Any) -> None:
        body = msgspec.msgpack.encode(message)
        self.out += len(body).to_bytes(4, "little") + body
        self.flush()

    def flush(self) -> None:
        """Raises OSError when the other end is gone."""
        try:
            while self.out:
                del self.out[: self.socket.send(self.out)]
        except BlockingIOError:
            pass

    def receive(self) -> list[Any] | None:
        """What has come, None when the other end is gone. Waits for the first byte if the socket blocks."""
        try:
            data = self.socket.recv(CHUNK)
            if not data:
                return None
            self.into += data
        except BlockingIOError:
            pass
        except OSError:
            return None
        messages = []
        while len(self.into) >= 4 and len(self.into) >= (end := 4 + int.from_bytes(self.into[:4], "little")):
            messages.append(msgspec.msgpack.decode(self.into[4:end]))
            del self.into[:end]
        return messages
