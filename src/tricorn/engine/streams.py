"""The client's end of many requests: outputs come from the engine's thread, and go to whoever awaits them in an event
loop."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock
from typing import Any

from tricorn.request import Output, TricornError

ANSWER_SECONDS = 2.0

Queue = asyncio.Queue[Output]


class Streams:
    """The requests that have not ended. Each belongs to the event loop in which it was opened."""

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._open: dict[str, tuple[asyncio.AbstractEventLoop, Queue]] = {}
        self._lock = Lock()
        self.failure: str | None = None
        """Why no output will come any more."""

    def open(self, id: str) -> AsyncGenerator[Output, None]:
        """The outputs of a request, up to its last. A generator that is closed before aborts the request.

        Raises TricornError when the engine is gone or the id is in use.
        """
        queue = Queue()
        with self._lock:
            if self.failure is not None:
                raise TricornError(self.failure)
            if id in self._open:
                raise TricornError(f"the request id {id} is in use; ids must be unique")
            self._open[id] = asyncio.get_running_loop(), queue
        return self._listen(id, queue)

    def discard(self, id: str) -> bool:
        """Forgets a request; tells whether it was open."""
        with self._lock:
            return self._open.pop(id, None) is not None

    def deliver(self, outputs: list[Output]) -> None:
        """Passes outputs on. Safe in any thread; each event loop is woken once."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Queue, Output]]] = defaultdict(list)
        with self._lock:
            for output in outputs:
                if output.id in self._open:
                    loop, queue = self._open[output.id]
                    batches[loop].append((queue, output))
                    if output.finish_reason is not None:
                        del self._open[output.id]
        for loop, batch in batches.items():
            with suppress(RuntimeError):  # its event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_put, batch)

    def fail(self, message: str) -> None:
        """Ends every open request with an error, and refuses new ones."""
        with self._lock:
            self.failure = message
            ids = list(self._open)
        self.deliver([Output(id=id, token_ids=[], finish_reason="error", error=message) for id in ids])

    async def _listen(self, id: str, queue: Queue) -> AsyncGenerator[Output, None]:
        try:
            while True:
                output = await queue.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if self.discard(id):
                self._abort(id)


class Questions:
    """Those who wait to hear of the engine's state."""

    def __init__(self) -> None:
        self._waiting: dict[bool, deque[Future[dict[str, Any]]]] = {False: deque(), True: deque()}

    async def ask(self, send: Callable[[], None], tree: bool) -> dict[str, Any]:
        """The next answer, with `tree` the next that has one; `send` puts the question. Raises TricornError when none
        comes in time."""
        future: Future[dict[str, Any]] = Future()
        self._waiting[tree].append(future)
        send()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_SECONDS)
        except TimeoutError:
            raise TricornError("the engine does not answer, it may be about to be restarted: ask again later") from None

    def answer(self, state: dict[str, Any]) -> None:
        """Answers all whom this satisfies. Safe in any thread."""
        waiting = self._waiting["tree" in state]
        while waiting:
            future = waiting.popleft()
            if future.set_running_or_notify_cancel():
                with suppress(RuntimeError):  # its event loop is closed: nobody waits any more
                    future.set_result(state)


def _put(batch: list[tuple[Queue, Output]]) -> None:
    for queue, output in batch:
        queue.put_nowait(output)
