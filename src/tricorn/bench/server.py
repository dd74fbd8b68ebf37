"""A server of one's own to measure: started on a free port, watched through /proc, and gone without a trace."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tricorn.bench.load import Client
from tricorn.request import TricornError

START_SECONDS = 600.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.02


class ServerProcess:
    """`tricorn serve` with these arguments, as an async context manager. Raises TricornError when it does not start."""

    def __init__(self, model: str, *options: str) -> None:
        self._command = [sys.executable, "-m", "tricorn.cli", "serve", model, "--port", "0", "--log-level", "warning"]
        self._command += options
        self._process: asyncio.subprocess.Process | None = None
        self._engines: set[int] = set()
        self.port = 0
        self.last_words = ""
        """What `said` gave at its end."""

    async def __aenter__(self) -> ServerProcess:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=asyncio.subprocess.PIPE, stderr=self._log
            )
            assert self._process.stdout is not None
            # it greets when it is ready
            line = (await asyncio.wait_for(self._process.stdout.readline(), START_SECONDS)).decode()
            if not (found := re.search(r":(\d+)/v1", line)):
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
                raise TricornError(f"the server did not start: {self.said()}")
            self.port = int(found[1])
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    @property
    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}")

    @property
    def pid(self) -> int:
        """Of the server."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return None if self._process is None else self._process.returncode

    def engine(self) -> int:
        """The engine process, a child of the server; 0 while there is none."""
        with suppress(OSError):
            for thread in Path(f"/proc/{self.pid}/task").iterdir():
                for child in (thread / "children").read_text().split():
                    if b"tricorn.engine" in Path(f"/proc/{child}/cmdline").read_bytes():
                        self._engines.add(int(child))
                        return int(child)
        return 0

    def said(self) -> str:
        """The end of what it wrote to standard error."""
        self._log.seek(0)
        return " ".join(self._log.read().decode(errors="replace")[-500:].split())

    async def _stop(self) -> None:
        """In order, by force when that takes too long."""
        process = self._process
        if process is not None:
            self.engine()
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()
            for engine in self._engines:
                await _gone(engine)
        self.last_words = self.said()
        self._log.close()


async def _gone(engine: int) -> None:
    """An engine without its server ends by itself; one that hangs is ended."""
    for _ in range(round(STOP_SECONDS / POLL_SECONDS)):
        if not _is_engine(engine):
            return
        await asyncio.sleep(POLL_SECONDS)
    with suppress(ProcessLookupError):
        os.kill(engine, signal.SIGKILL)


def _is_engine(pid: int) -> bool:
    """Whether it lives, and is not another process of the same number."""
    with suppress(OSError):
        return b"tricorn.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def memory(pid: int) -> int:
    """Bytes that are this process's own, in memory and in swap; files that it maps do not count. 0 when it is gone."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return sum(int(size) << 10 for size in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", status, re.MULTILINE))
    return 0


def open_files(pid: int) -> int:
    """How many files and sockets a process has open; 0 when it is gone."""
    with suppress(OSError):
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return 0


def listening(port: int) -> list[int]:
    """The process that listens on this port of this machine, and its descendants; none when it cannot be told."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{rest[5]}]")
    parents: dict[int, int] = {}
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if sockets and any(os.readlink(fd) in sockets for fd in (path / "fd").iterdir()):
                found.append(int(path.name))
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid and child not in found]
    return found


def peak_memory(pids: Iterable[int]) -> int:
    """The most bytes that these processes have had in memory, each at its own peak; what they share counts for each."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            total += int(found[1]) << 10 if found else 0
    return total
