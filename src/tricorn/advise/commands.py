"""`tricorn plan` and `tricorn advise`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tricorn.arguments import DEFAULT_MODEL, Json, KvType, ModelOption, Threads, byte_count, engine_options, numbers
from tricorn.request import TricornError


def plan(
    model: Annotated[
        str, typer.Argument(help="A name (llama-3.3-70b, smollm2-135m), a model's file, or a config.json.")
    ],
    context: Annotated[int | None, typer.Option(help="Tokens of a sequence. [default: the model's]", min=1)] = None,
    concurrency: Annotated[int, typer.Option(help="Sequences at once.", min=1)] = 1,
    kv_type: KvType = "f16",
    memory: Annotated[str | None, typer.Option(help="Of a machine or card, such as 80G (binary) or 80GB.")] = None,
    cards: Annotated[int, typer.Option(help="Machines or cards of that memory together.", min=1)] = 1,
    json: Json = False,
) -> None:
    """Tell what a model takes of memory: a token, a sequence, all of them, and how many fit."""
    import msgspec

    from tricorn.advise import plan as planning

    size = _memory(memory)
    found = planning.plan(model, context, concurrency, kv_type, None if size is None else size * cards)
    print(msgspec.json.encode(found).decode() if json else planning.told(found))


def _memory(text: str | None) -> int | None:
    if text is not None and text.upper().endswith("GB") and text[:-2].isdigit():
        return int(text[:-2]) * 10**9
    return byte_count(text, "--memory")


def advise(
    model: ModelOption = DEFAULT_MODEL,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 512,
    output: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 128,
    concurrency: Annotated[str, typer.Option(help="Clients at once, several after commas.")] = "1,4,16",
    shared: Annotated[int, typer.Option(help="First tokens of the prompt that are the same for all.", min=0)] = 0,
    slo: Annotated[str, typer.Option(help="What should hold, in milliseconds, such as ttft=1000,tpot=50.")] = "",
    threads: Threads = None,
    cost: Annotated[
        Path | None, typer.Option(help="What `tricorn bench cost` printed, to measure nothing now.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Run each point, and compare: 25 % is near enough.")] = False,
    json: Json = False,
) -> None:
    """Predict latencies and throughput of a workload on this machine, and tell the options to serve it with."""
    import msgspec

    from tricorn.advise import predict
    from tricorn.advise.plan import VALUE_BYTES, shape_of
    from tricorn.arguments import short_name
    from tricorn.bench.summary import Slo
    from tricorn.compiler import ensure
    from tricorn.runtime.step import page_bytes
    from tricorn.simulate import machine as machines

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if shared >= prompt:
        raise TricornError(f"--shared {shared}: a prompt has {prompt} tokens, and one at least must be its own")
    path = ensure(model)
    if cost is None:
        tell("measuring what steps cost")
        machine = machines.measure(short_name(model), engine_options(path, threads, "f16", None), told=tell)
    else:
        machine = machines.read(cost)
    page = page_bytes(shape_of(str(path)), VALUE_BYTES["f16"])
    level = Slo.parse(slo) if slo else None
    points = [predict.Point(prompt, output, count, shared) for count in numbers("--concurrency", concurrency)]
    found = [predict.advise(machine, point, page, level) for point in points]
    if verify:
        found = predict.verify(model, found, tell)
    if json:
        print(msgspec.json.encode({"error": machine.error, "advice": found}).decode())
    else:
        print(predict.told(machine, found))
    if not all(each.holds in (None, True) for each in found):
        raise typer.Exit(1)
