"""The engine's loop: take in messages, step, say what came of it."""

from __future__ import annotations

import time
from typing import Protocol

from tricorn.engine.engine import Engine
from tricorn.engine.messages import Close, FromEngine, Inspect, Outputs, ToEngine
from tricorn.request import Abort, Output, Request, TricornError

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
        for message in mailbox.receive(wait=engine.idle and not engine.tidy()):
            match message:
                case Close():
                    return
                case Inspect(tree):
                    mailbox.send(engine.state(tree))
                case Abort(id):
                    outputs += engine.abort(id)
                case Request():
                    outputs += _add(engine, message)
        if not engine.idle:
            outputs += engine.step()
        if outputs:
            mailbox.send(Outputs(outputs))


def _add(engine: Engine, request: Request) -> list[Output]:
    try:
        engine.add(request)
    except TricornError as error:
        return [Output(id=request.id, token_ids=[], finish_reason="error", error=str(error))]
    return []
