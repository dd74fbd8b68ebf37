"""`tricorn serve`: an engine in its own process, and uvicorn in this one."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import uvicorn
import uvloop

from tricorn.compiler.engine_file import EngineFile
from tricorn.engine.client import ProcessClient
from tricorn.engine.options import EngineOptions
from tricorn.engine.process import EngineProcess
from tricorn.frontend.generate import EngineClient, Frontend, load_text
from tricorn.frontend.workers import Processes
from tricorn.request import TricornError
from tricorn.server.app import Api, ServerOptions, create_app
from tricorn.server.generation import Generations
from tricorn.server.guard import unguarded
from tricorn.server.inference import Inference
from tricorn.server.loading import Door
from tricorn.server.logs import configure
from tricorn.server.protocol import BoundedHttp
from tricorn.server.tracing import Tracing, open_tracing

if TYPE_CHECKING:
    from tricorn.server import grpc_server

T = TypeVar("T")

log = logging.getLogger("tricorn.server")

SIGNALS = (signal.SIGINT, signal.SIGTERM)

WATCH_SECONDS = 0.1
"""How often the server looks whether the engine still lives."""

CLOSE_POLL_SECONDS = 0.05
"""How often it looks whether the engine has ended."""

ABORT_SECONDS = 1.0
"""How long the engine may take to end after a second signal, or one while it starts."""

DRAIN_POLL_SECONDS = 0.02
"""How often it looks whether the last requests have ended."""


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
    if options.grpc_port is not None:
        _check_grpc()
    tls = tls_of(options)
    listener = listen(options.host, options.port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(load(engine), options, listener, tls))


def tls_of(options: ServerOptions) -> ssl.SSLContext | None:
    """What the options ask for; None is plain HTTP. Raises TricornError when the files do not serve."""
    if options.tls_cert is None and options.tls_key is None:
        return None
    if options.tls_cert is None or options.tls_key is None:
        raise TricornError("--tls-cert and --tls-key go together: give both")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key, password="")
    except (OSError, ValueError) as error:
        raise TricornError(
            f"{options.tls_cert} and {options.tls_key} are no certificate and its key, unencrypted, in PEM: {error}"
        ) from None
    return context


def _check_grpc() -> None:
    """Raises TricornError when gRPC is not installed."""
    try:
        import tricorn.server.grpc_server  # noqa: F401
    except ImportError as error:
        raise TricornError(f"--grpc-port needs {error.name}: pip install 'tricorn[grpc]'") from None


async def load(engine: EngineOptions) -> Frontend:
    """Starts the engine, and opens the model's text side while it loads. The caller closes the frontend's client."""
    process = EngineProcess(engine)
    starting = _in_thread(lambda: ProcessClient(engine, process))
    workers = Processes(engine.path)
    try:
        file = await asyncio.to_thread(EngineFile.open, Path(engine.path), check_body=False)  # the engine checks it
        tokenizer, template = await asyncio.to_thread(load_text, file)
        return Frontend(tokenizer, template, await asyncio.shield(starting), workers)
    except BaseException:  # a signal, too
        workers.close()
        process.stop()
        await asyncio.wait((starting,), timeout=ABORT_SECONDS)
        if starting.done() and starting.exception() is None:
            starting.result().close()
        raise


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs work that nothing can interrupt in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.done():
            outcome()

    def run() -> None:
        try:
            outcome = partial(future.set_result, work())
        except BaseException as error:
            outcome = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True).start()
    return future


async def run(
    loading: Awaitable[Frontend],
    options: ServerOptions,
    listener: socket.socket,
    tls: ssl.SSLContext | None = None,
) -> int:
    """Listens at once, serves when `loading` is done, and goes on until a signal or the engine's death; gives the exit
    code. Closes the engine's client. Raises TricornError when loading fails.
    """
    writer = configure(options.log_level, options.log_format)
    tracing = open_tracing()
    try:
        return await Serving(options, listener, tracing, tls).run(loading)
    finally:
        if tracing is not None:
            tracing.close()
        logging.getLogger("tricorn").removeHandler(writer)
        writer.close()


class Serving:
    """One server from its start to its end.

    The first signal lets the generations that are under way finish, while new ones are refused; when they have, or
    their time is over, the server ends. A second signal ends it at once.
    """

    def __init__(
        self, options: ServerOptions, listener: socket.socket, tracing: Tracing | None, tls: ssl.SSLContext | None
    ) -> None:
        self._options = options
        self._listener = listener
        self._tracing = tracing
        self._door = Door()
        config = uvicorn.Config(
            self._door,
            http=BoundedHttp,
            ws="none",
            lifespan="off",
            log_config=None,  # uvicorn's own would close the handlers that there are
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,  # what was to be waited for has been waited for
        )
        config.load()
        config.ssl = tls
        self._server = _Uvicorn(config)
        self._signals = 0
        self._signal = asyncio.Event()

    async def run(self, loading: Awaitable[Frontend]) -> int:
        """See `run`."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled)
        opening = asyncio.ensure_future(loading)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        try:
            frontend = await self._opened(opening)
            return 0 if frontend is None else await self._serve(frontend)
        finally:
            self._server.should_exit = True
            if self._signals > 1:
                serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            for number in SIGNALS:  # the process is about to end: one more must not change its exit code
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    def _signalled(self) -> None:
        self._signals += 1
        self._signal.set()

    async def _opened(self, opening: asyncio.Future[Frontend]) -> Frontend | None:
        """What was loaded; None when a signal came first. Raises TricornError."""
        signalled = asyncio.create_task(self._signal.wait())
        await asyncio.wait((opening, signalled), return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if opening.done():
            return opening.result()
        opening.cancel()
        await asyncio.wait((opening,), timeout=2 * ABORT_SECONDS)
        return None

    async def _serve(self, frontend: Frontend) -> int:
        app = create_app(frontend, self._options, self._tracing)
        work: Generations = app.state.api.work
        self._door.app = app
        grpc: grpc_server.Listener | None = None
        try:
            if self._options.grpc_port is not None:
                grpc = await self._listen_grpc(app.state.api, self._options.grpc_port)
            while not self._server.started:
                await asyncio.sleep(0.005)
            port = self._listener.getsockname()[1]
            if (warning := unguarded(self._options.guard)) is not None:
                log.warning(warning)
            print(_greeting(self._options, port, None if grpc is None else grpc.port), flush=True)
            app.state.api.batches.start()
            while not self._signals and work.status != "dead":
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._signal.wait(), WATCH_SECONDS)
            await app.state.api.batches.stop()
            await self._drain(work)
            if work.status == "dead":
                log.error("the engine died; the server stops")
                return 1
            return 0
        finally:
            if grpc is not None:
                await grpc.stop()
            frontend.close()
            await self._close(frontend.client)

    async def _listen_grpc(self, api: Api, port: int) -> grpc_server.Listener:
        """Serves gRPC beside HTTP. Raises TricornError when it cannot."""
        from tricorn.server import grpc_server  # an extra: most servers do without

        service = grpc_server.Service(Inference(api.work), api.journal, api.metrics.error, api.guard)
        options = self._options
        tls = None if options.tls_key is None or options.tls_cert is None else (options.tls_key, options.tls_cert)
        return await grpc_server.listen(service, options.host, port, tls)

    async def _close(self, client: EngineClient) -> None:
        """Ends the engine, which may take its time to save what it has cached. After a second signal it does not: this
        process ends, and the engine with it.
        """
        closing = _in_thread(client.close)
        while not closing.done() and self._signals < 2:
            await asyncio.wait((closing,), timeout=CLOSE_POLL_SECONDS)
        await asyncio.wait((closing,), timeout=ABORT_SECONDS)
        if closing.done():
            closing.result()

    async def _drain(self, work: Generations) -> None:
        """Waits for the generations under way, then ends what is left."""
        work.draining = True
        end = time.monotonic() + self._options.drain_seconds
        while work.busy and self._signals < 2 and time.monotonic() < end:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        work.cut()


def _greeting(options: ServerOptions, port: int, grpc_port: int | None) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(options.host, options.host)
    body = {"model": options.name, "messages": [{"role": "user", "content": "Hello!"}]}
    beside = "" if grpc_port is None else f", gRPC on {host}:{grpc_port}"
    url = f"{'http' if options.tls_cert is None else 'https'}://{host}:{port}"
    key = "-H 'Authorization: Bearer KEY' " if options.api_keys else ""
    return (
        f"Serving {options.name} on {url}/v1{beside}\n\n"
        f"  curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(body)}'\n"
    )
