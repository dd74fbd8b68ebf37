"""A real server of a real engine file, as a process of its own, for the clients of each protocol."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 60

PYTHON = os.environ.get("TRICORN_PYTHON", sys.executable)
"""Has tricorn: another one where clients have an environment of their own."""


@dataclass(frozen=True)
class Served:
    """Where it listens, and the model's name. `grpc` is 0 without `--grpc-port`."""

    pid: int
    port: int
    grpc: int = 0
    model: str = "small"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_pid(self) -> int:
        """The process of the engine."""
        children = (path.read_text().split() for path in Path(f"/proc/{self.pid}/task").glob("*/children"))
        pids = [pid for pids in children for pid in pids]
        (engine,) = (pid for pid in pids if b"tricorn.engine" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return int(engine)


@contextmanager
def served(engine: Path | str, *flags: str) -> Iterator[Served]:
    """`tricorn serve` on a free port, of an engine file or a built-in model; it must end well."""
    command = [PYTHON, "-m", "tricorn.cli", "serve", str(engine), "--port", "0", "--name", Served.model]
    limits = ["--threads", "1", "--kv-bytes", "16M", "--log-level", "warning"]
    with tempfile.TemporaryDirectory() as state:
        process = subprocess.Popen([*command, *limits, "--state-dir", state, *flags], stdout=subprocess.PIPE)
        try:
            yield _ready(process)
        finally:
            process.terminate()
            code = process.wait(60)
            assert process.stdout is not None
            process.stdout.close()
    assert code == 0


def _ready(process: subprocess.Popen[bytes]) -> Served:
    """Where it says that it listens, once it is ready."""
    assert process.stdout is not None
    end = time.monotonic() + START_SECONDS
    output = b""
    while not (found := re.search(rb"https?://127\.0\.0\.1:(\d+)/.*\n", output)):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"the server does not start: {output!r}"
        part = process.stdout.read1(4096)  # type: ignore[attr-defined]
        assert part, f"the server ended with {process.wait()}"
        output += part
    grpc = re.search(rb"gRPC on 127\.0\.0\.1:(\d+)", output)
    return Served(process.pid, int(found[1]), int(grpc[1]) if grpc else 0)
