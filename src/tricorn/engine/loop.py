"""The engine's loop: take in messages, step, say what came of it."""

from __future__ import annotations

import time
from typing import Protocol

from tricorn.engine.engine import Engine
from tricorn.engine.messages import Close, FromEngine, Outputs, ToEngine
from tricorn.request import Output, Request, TricornError

STATS_SECONDS = 0.1
"""How often a busy engine sends its stats; it also does when it falls idle."""


class Mailbox(Protocol):
    """The engine's end of the way to its client."""

    def receive(self, wait: bool) -> list[ToEngine]:
        """What has come; with `wait`, sleeps until something does."""
        ...

    def send(self, message: FromEngine) -> None: ...


def run(engine: Engine, mailbox: Mailbox) -> None:
    """Serves until told to close."""
    due = 0.0
    while True:
        if engine.idle or time.monotonic() >= due:
            mailbox.send(engine.stats())
            due = time.monotonic() + STATS_SECONDS
        outputs: list[Output] = []
        for message in mailbox.receive(wait=engine.idle):
            if isinstance(message, Close):
                return
            outputs += _take(engine, message)
        if not engine.idle:
            outputs += engine.step()
        if outputs:
            mailbox.send(Outputs(outputs))


def _take(engine: Engine, message: ToEngine) -> list[Output]:
    if not isinstance(message, Request):
        return engine.abort(message.id) if not isinstance(message, Close) else []
    try:
        engine.add(message)
    except TricornError as error:
        return [Output(id=message.id, token_ids=[], finish_reason="error", error=str(error))]
    return []
