"""`tricorn run-batch`: a file of requests answered without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import uvloop

from tricorn.engine.options import EngineOptions
from tricorn.request import TricornError
from tricorn.server.app import Api, ServerOptions, create_app
from tricorn.server.batches import Inside, Line, answers, read_answered, read_lines, said
from tricorn.server.serve import load

Tell = Callable[[int, int], None]
"""Hears how many requests are answered, and of how many."""


def run(engine: EngineOptions, name: str, source: Path, target: Path, tell: Tell) -> int:
    """Answers the requests of `source`, for the model `name`, into `target`, in the form of a batch's output file;
    gives how many were refused. What an interrupted run has answered (in `target` with .part) counts. Raises
    TricornError.
    """
    try:
        lines, faults = read_lines(source.read_bytes())
    except OSError as error:
        raise TricornError(f"{source} cannot be read: {error.strerror}") from None
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise TricornError(f"{source}, line {faults[0]['line']}: {faults[0]['message']}{more}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(engine, name, lines, target, tell))


async def _run(engine: EngineOptions, name: str, lines: list[Line], target: Path, tell: Tell) -> int:
    part = target.with_name(target.name + ".part")
    statuses = read_answered(part)
    left = [line for line in lines if line.custom_id not in statuses]
    frontend = await load(engine)
    try:
        api: Api = create_app(frontend, ServerOptions(name=name, max_wait=0.0)).state.api
        slots = frontend.client.info.max_sequences

        def room() -> bool:
            if api.work.status == "dead":
                raise TricornError(f"the engine died; run it again to go on with what is in {part}")
            return api.work.gate.sequences < slots

        tell(len(statuses), len(lines))
        with part.open("ab") as file:
            async for line, answer in answers(Inside(api.inside.endpoints, room), left):
                file.write(said(line, answer))
                file.flush()
                statuses[line.custom_id] = answer.status
                tell(len(statuses), len(lines))
        part.replace(target)
    finally:
        frontend.close()
        await asyncio.to_thread(frontend.client.close)
    return sum(status != 200 for status in statuses.values())
