"""Lines on standard error, as text or JSON, one for each record.

Nobody may read standard error: a thread of its own writes, and lines that it has no room for are lost, so that no
request ever waits for a line.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Literal

import msgspec

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

MOST_LINES = 4096
"""Lines that may wait to be written."""

CLOSE_SECONDS = 0.5
"""How long the last lines may take."""

log = logging.getLogger("tricorn")


class Writer(logging.Handler):
    """Writes to a file descriptor from a thread of its own."""

    def __init__(self, formatter: logging.Formatter, descriptor: int) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_LINES)
        self._thread = threading.Thread(target=self._write, name="tricorn-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self._lines.put_nowait(self.format(record))

    def close(self) -> None:
        with suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(CLOSE_SECONDS)
        super().close()

    def _write(self) -> None:
        with suppress(OSError):  # standard error is gone
            while (line := self._lines.get()) is not None:
                data = (line + "\n").encode("utf-8", "replace")
                while data:
                    data = data[os.write(self._descriptor, data) :]


class Text(logging.Formatter):
    """`time LEVEL message name=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        pairs = [f"{name}={_word(value)}" for name, value in _fields(record).items()]
        line = " ".join([_time(record), record.levelname, clean(record.getMessage()), *pairs])
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else []
        return "\n".join([line, *map(clean, trace)])


class Json(logging.Formatter):
    """One object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode({**line, **_fields(record)}).decode()


def configure(level: Level, format: Format) -> Writer:
    """Sends what this package logs to standard error. The caller closes the writer, which ends that."""
    writer = Writer(Json() if format == "json" else Text(), sys.stderr.fileno())
    log.addHandler(writer)
    log.setLevel(level.upper())
    log.propagate = False
    return writer


def clean(text: str) -> str:
    """Without characters that would end a line or command a terminal."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _word(value: Any) -> str:
    text = clean(",".join(value) if isinstance(value, list) else "-" if value is None else str(value))
    return f'"{text}"' if " " in text or not text else text


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
