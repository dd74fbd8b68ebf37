"""Where prompts become ids, off the event loop: in threads of this process, or in processes of their own, which the
kernel ends when a prompt takes too long (see `worker`).
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, Protocol

import msgspec

from tricorn.frontend.errors import BadRequest
from tricorn.frontend.template import ChatTemplate
from tricorn.frontend.tokenizer import Tokenizer

PARALLEL = 2
"""Prompts that are read at once."""

SECONDS = 10.0
"""Computing time of one prompt. The longest that the largest context lets in takes about half of it."""

MEMORY = 1 << 30
"""Bytes by which a process may grow while it reads a prompt."""


class Job(msgspec.Struct, frozen=True):
    """A call of `Tokenizer.encode` ("plain") or `ChatTemplate.encode` ("chat") with these arguments."""

    kind: Literal["plain", "chat"]
    arguments: dict[str, Any]


def encode(tokenizer: Tokenizer, template: ChatTemplate | None, job: Job) -> list[int]:
    """Does the job. Raises BadRequest."""
    if job.kind == "plain":
        return tokenizer.encode(**job.arguments)
    assert template is not None
    return template.encode(**job.arguments)


class Workers(Protocol):
    """Both kinds."""

    async def encode(self, job: Job) -> list[int]:
        """The ids. Raises BadRequest."""
        ...

    def close(self) -> None: ...


class Threads:
    """In this process: for models that are trusted, and prompts of their own."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._work: Callable[[Job], list[int]] = lambda job: encode(tokenizer, template, job)
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="tokenize")

    async def encode(self, job: Job) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._work, job)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Processes:
    """In processes, of which `PARALLEL` run at once; they start when first needed, the nursery at once."""

    def __init__(self, path: str, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self._arguments = (path, str(seconds), str(memory))
        self._seconds = seconds
        self._turns = asyncio.Semaphore(PARALLEL)
        self._idle: list[_Process] = []
        self._start()

    async def encode(self, job: Job) -> list[int]:
        body = msgspec.json.encode(job)
        async with self._turns:
            for _ in range(2):  # an idle one may have died with its nursery
                process = self._idle.pop() if self._idle else await self._fork()
                try:
                    answer = await process.ask(body)
                except BaseException:  # that its client has gone ends the work, too
                    process.close()
                    raise
                if answer is not None:
                    self._idle.append(process)
                    return _ids(answer)
                process.close()
                if self._nursery.poll() is None:
                    break
        raise BadRequest(f"the prompt takes more than {self._seconds:g} seconds to tokenize", "prompt", "too_costly")

    @property
    def nursery(self) -> int:
        """Its process."""
        return self._nursery.pid

    async def _fork(self) -> _Process:
        mine, theirs = socket.socketpair()
        with theirs:
            if self._nursery.poll() is not None:
                self._control.close()
                self._start()
            socket.send_fds(self._control, [b"f"], [theirs.fileno()])
        reader, writer = await asyncio.open_connection(sock=mine)
        return _Process(reader, writer)

    def _start(self) -> None:
        """Starts the nursery."""
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tricorn.frontend.worker", str(theirs.fileno()), *self._arguments]
            self._nursery = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def close(self) -> None:
        for process in self._idle:
            process.close()
        self._idle.clear()
        self._control.close()
        self._nursery.kill()
        self._nursery.wait()


class _Process:
    """One forked process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, body: bytes) -> bytes | None:
        """Its answer; None when it has died."""
        try:
            self._writer.write(len(body).to_bytes(4, "little") + body)
            await self._writer.drain()
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            return await self._reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError):
            return None

    def close(self) -> None:
        """Ends it, whatever it is doing."""
        with suppress(OSError, RuntimeError):
            self._writer.transport.abort()


def _ids(answer: bytes) -> list[int]:
    """Raises BadRequest."""
    if answer[:1] == b"\1":
        raise BadRequest(*msgspec.json.decode(answer[1:]))
    ids = array("i")
    ids.frombytes(answer[1:])
    return ids.tolist()
