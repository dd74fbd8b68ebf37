"""The processes in which prompts become ids: `python -m tricorn.frontend.worker CONTROL ENGINE_FILE SECONDS MEMORY`.

The first, the nursery, loads the tokenizer and the chat template, and then only forks: one process for each socket
that it is handed. A template is a program out of a model file, and runs on what clients send: in here, the kernel ends
it when it takes more time or memory than allowed, and nothing but its own prompt is lost.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
import signal
import socket
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tricorn.compiler.engine_file import EngineFile
from tricorn.frontend.errors import BadRequest
from tricorn.frontend.generate import load_text
from tricorn.frontend.workers import Job, encode

PR_SET_PDEATHSIG = 1

SLACK = 4
"""Seconds on the clock for each second of computing: the machine may be busy."""

_job = msgspec.json.Decoder(Job)


def main(control: int, path: str, seconds: float, memory: int) -> None:
    """The nursery: forks for each socket, until the server is gone."""
    connection = socket.socket(fileno=control)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which still has prompts to read
    tokenizer, template = load_text(EngineFile.open(Path(path), check_body=False))
    tokenizer.encode_shielded("".join(map(tokenizer.shield, tokenizer.special.values())))  # what it makes when needed

    def work(job: Job) -> list[int]:
        return encode(tokenizer, template, job)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    nursery = os.getpid()
    while True:
        message, handed, _, _ = socket.recv_fds(connection, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            connection.close()
            _live(socket.socket(fileno=handed[0]), nursery, work, seconds, memory)
        os.close(handed[0])


def _live(
    connection: socket.socket, nursery: int, work: Callable[[Job], list[int]], seconds: float, memory: int
) -> NoReturn:
    """The life of a forked process; nothing of the nursery's may run in here."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == nursery:
            _limit_memory(memory)
            _serve(connection, work, seconds)
    except BaseException as error:
        print(f"tokenizing: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(0)


def _limit_memory(more: int) -> None:
    """Lets this process grow by so many bytes."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * mmap.PAGESIZE + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _allow(connection: socket.socket, seconds: float) -> None:
    """Sets the time until the kernel ends this process, computing and on the clock, which it does at once when the
    other side hangs up; 0 takes it back.
    """
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC if seconds else 0)  # SIGIO: nothing else may come now
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * SLACK)


def _serve(connection: socket.socket, work: Callable[[Job], list[int]], seconds: float) -> None:
    """Jobs, one after the other, each a length in four bytes and JSON; answers likewise (see `_answer`)."""
    with connection.makefile("rb") as source:
        while len(head := source.read(4)) == 4:
            body = source.read(int.from_bytes(head, "little"))
            _allow(connection, seconds)
            answer = _answer(work, body)
            _allow(connection, 0)
            connection.sendall(len(answer).to_bytes(4, "little") + answer)


def _answer(work: Callable[[Job], list[int]], body: bytes) -> bytes:
    """A zero and the ids in four bytes each, or a one and, in JSON, what is wrong with the request."""
    try:
        return b"\0" + array("i", work(_job.decode(body))).tobytes()
    except BadRequest as error:
        fault: tuple[Any, ...] = (str(error), error.param, error.code)
    except MemoryError:
        fault = ("the prompt takes too much memory to tokenize", "prompt", "too_costly")
    return b"\1" + msgspec.json.encode(fault)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
