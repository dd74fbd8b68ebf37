"""`tricorn serve`: an engine in its own process, and uvicorn in this one."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import uvicorn
import uvloop

from tricorn.compiler.engine_file import EngineFile
from tricorn.engine.client import ProcessClient
from tricorn.engine.options import EngineOptions
from tricorn.frontend.generate import EngineClient, Frontend, load_text
from tricorn.request import TricornError
from tricorn.server.app import ServerOptions, create_app
from tricorn.server.protocol import BoundedHttp

WATCH_SECONDS = 0.1
"""How often the server looks whether the engine still lives."""


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us: a second one must end the process at once, and a clean stop must exit with 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises TricornError when the port is taken or the address is not this machine's."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise TricornError(
                f"port {port} on {host} is in use: stop the other server or choose another --port"
            ) from None
        if error.errno == errno.EACCES:
            raise TricornError(f"port {port} needs more rights than this user has: choose one above 1023") from None
        raise TricornError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def serve(options: ServerOptions, engine: EngineOptions) -> int:
    """Serves the engine file of `engine` until a signal; gives the exit code. Raises TricornError when it cannot."""
    listener = listen(options.host, options.port)
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(ProcessClient, engine)
        tokenizer, template = load_text(EngineFile.open(Path(engine.path), check_body=False))  # the engine checks it
        client = starting.result()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run(Frontend(tokenizer, template, client), options, listener))
    finally:
        client.close()


async def run(frontend: Frontend, options: ServerOptions, listener: socket.socket) -> int:
    """Serves until a signal or the engine's death; gives the exit code. The caller closes the engine's client."""
    config = uvicorn.Config(
        create_app(frontend, options),
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(options.drain_seconds)),
    )
    server = _Uvicorn(config)
    forced = asyncio.Event()

    def stop() -> None:
        if server.should_exit:
            forced.set()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    watching = asyncio.create_task(_watch(frontend.client, server, options, listener))
    await asyncio.wait((serving, asyncio.create_task(forced.wait())), return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    watching.cancel()
    await asyncio.gather(serving, watching, return_exceptions=True)
    frontend.close()
    if not frontend.client.alive:
        print("tricorn: the engine died; the server stops", file=sys.stderr, flush=True)
        return 1
    return 0


async def _watch(client: EngineClient, server: uvicorn.Server, options: ServerOptions, listener: socket.socket) -> None:
    """Says when the server is ready, then stops it when the engine dies."""
    while not server.started:
        await asyncio.sleep(0.005)
    print(_greeting(options, listener.getsockname()[1]), flush=True)
    while client.alive:
        await asyncio.sleep(WATCH_SECONDS)
    server.should_exit = True


def _greeting(options: ServerOptions, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(options.host, options.host)
    body = {"model": options.name, "messages": [{"role": "user", "content": "Hello!"}]}
    return (
        f"Serving {options.name} on http://{host}:{port}/v1\n\n"
        f"  curl http://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(body)}'\n"
    )
