"""`tricorn bench`: a command for each thing that is measured. Heavy imports wait inside the commands."""

from __future__ import annotations

import sys
from csv import DictWriter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from tricorn.arguments import (
    DEFAULT_MODEL,
    Json,
    KvBytes,
    KvType,
    ModelOption,
    Short,
    Threads,
    engine_options,
    numbers,
    short_name,
)

bench = typer.Typer(help="Measure the machine and the engine.", no_args_is_help=True, rich_markup_mode=None)


@bench.command("machine")
def bench_machine(threads: Threads = None, json: Json = False) -> None:
    """Measure memory bandwidth and the int8, bf16 and fp32 rates of this machine."""
    import msgspec

    from tricorn.bench.machine import measure

    machine = measure(threads)
    if json:
        print(msgspec.json.encode(machine).decode())
        return
    for label, value in (
        ("threads", str(machine.threads)),
        ("read from memory", f"{machine.read_gb_s} GB/s"),
        ("int8 dot products", f"{machine.int8_gop_s} Gop/s"),
        ("bf16 dot products", f"{machine.bf16_gflop_s} Gflop/s"),
        ("fp32 multiply-adds", f"{machine.fp32_gflop_s} Gflop/s"),
    ):
        print(f"{label:20} {value:>16}")


@bench.command("engine")
def bench_engine(
    model: ModelOption = DEFAULT_MODEL,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 512,
    output: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 128,
    batch: Annotated[str, typer.Option(help="How many sequences at once, several after commas.")] = "1,8,16,32",
    threads: Threads = None,
    kv_type: KvType = "f16",
    kv_bytes: KvBytes = None,
    profile: Annotated[bool, typer.Option(help="Tell how the time divides between operations.")] = False,
    json: Json = False,
) -> None:
    """Measure the engine alone, beside the limits that the machine sets (measured in the same run)."""
    import msgspec

    from tricorn.bench import engine, machine
    from tricorn.compiler import ensure
    from tricorn.compiler.engine_file import EngineFile

    batches = numbers("--batch", batch)
    file = EngineFile.open(ensure(model))
    limits = machine.measure(threads, file.header.isa)
    options = engine_options(file.path, threads, kv_type, kv_bytes, max_sequences=max(64, *batches))
    heading = f"{'batch':>5} {'prefill':>15} {'of limit':>9} {'decode':>15} {'of limit':>9} {'host':>6}"
    if not json:
        print(f"{file.name}, {prompt} tokens in, {output} out, {limits.threads} threads, KV in {kv_type}\n{heading}")

    def show(row: engine.Row) -> None:
        if not json:
            print(
                f"{row.batch:>5} {row.prefill_tok_s:>9.1f} tok/s {row.prefill_limit_share:>9.1%}"
                f" {row.decode_tok_s:>9.1f} tok/s {row.decode_limit_share:>9.1%} {row.host_share:>6.1%}",
                flush=True,
            )

    seconds: dict[str, float] = {}
    rows = engine.measure(file, options, limits, batches, prompt, output, show, seconds)
    for operation, spent in sorted(seconds.items(), key=lambda item: -item[1]) if profile and not json else ():
        print(f"{spent / sum(seconds.values()):>6.1%}  {operation}")
    if json:
        print(msgspec.json.encode({"model": short_name(model), "rows": rows}).decode())


@bench.command("quality")
def bench_quality(
    model: Annotated[str, typer.Option("--model", help="Built-in names after commas. [default: all]")] = "",
    positions: Annotated[int, typer.Option(help="Positions of English and code text.", min=16)] = 2000,
    kv_type: KvType = "f16",
    json: Json = False,
) -> None:
    """Compare the native executor with the float32 reference: KL, top-1 agreement, perplexity."""
    import msgspec

    from tricorn.bench import quality
    from tricorn.weights import hub

    rows = []
    for name in model.split(",") if model else list(hub.BUILTIN):
        row = quality.measure(name, positions, kv_type)
        rows.append(row)
        if not json:
            print(
                f"{row.model:20} KL {row.kl:.2e} nat  top-1 {row.top1:.2%}"
                f"  perplexity {row.perplexity:.3f} against {row.reference_perplexity:.3f}"
                f" ({row.perplexity / row.reference_perplexity - 1:+.2%})",
                flush=True,
            )
    if json:
        print(msgspec.json.encode({"rows": rows}).decode())


@bench.command("grammar")
def bench_grammar(
    data: Annotated[Path, typer.Option(help="JSON lines (.gz or not): a schema and tests with `valid` and `data`.")],
    model: ModelOption = DEFAULT_MODEL,
    refusals: Annotated[Path | None, typer.Option(help="Write why schemas and instances were refused here.")] = None,
    json: Json = False,
) -> None:
    """Measure which JSON schemas can be enforced, whether their instances are judged rightly, and what masks cost."""
    import msgspec
    from rich.console import Console
    from rich.progress import Progress

    from tricorn.bench import grammar

    cases, console = grammar.read(data), Console(stderr=True)
    lines: list[str] = []
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=len(cases))
        report = grammar.measure(model, cases, lambda index: progress.update(task, completed=index + 1), lines)
    if refusals is not None:
        refusals.write_text("".join(f"{line}\n" for line in lines))
    if json:
        print(msgspec.json.encode(report).decode())
    else:
        for name, value in msgspec.to_builtins(report).items():
            print(f"{name:16} {value}")


@bench.command("simulate")
def bench_simulate(
    seeds: Annotated[int, typer.Option(help="Seeds, each with a configuration of its own.", min=1)] = 50,
    steps: Annotated[int, typer.Option(help="Engine steps of each.", min=1)] = 20_000,
    first_seed: Annotated[int, typer.Option(help="The first seed; the others follow.", min=0)] = 0,
    trace: Annotated[bool, typer.Option(help="Print everything that happens, one seed after the other.")] = False,
    json: Json = False,
) -> None:
    """Run scheduler, cache, admission and supervision in a simulated world and check every invariant at each step."""
    import time

    import msgspec
    from rich.console import Console
    from rich.progress import track

    from tricorn.simulate.run import run_seed, run_seeds
    from tricorn.simulate.summary import summarize

    began = time.monotonic()
    if trace:
        reports = [run_seed(seed, steps, print) for seed in range(first_seed, first_seed + seeds)]
    else:
        runs, console = run_seeds(first_seed, seeds, steps), Console(stderr=True)
        reports = list(track(runs, "simulating", seeds, console=console, disable=not console.is_terminal))
    summary = summarize(reports, steps, time.monotonic() - began)
    if json:
        print(msgspec.json.encode(summary).decode())
    else:
        for failure in summary.failures:
            print(f"seed {failure.seed}, step {failure.step}: {failure.violation}\n  {failure.config}")
            print(f"  again: {failure.replay}")
        for name, value in msgspec.structs.asdict(summary).items():
            print(f"{name:16} {len(summary.failures) if name == 'failures' else value}")
    raise typer.Exit(1 if summary.failures else 0)


@bench.command("cost")
def bench_cost(
    model: ModelOption = DEFAULT_MODEL,
    threads: Threads = None,
    kv_type: KvType = "f16",
    kv_bytes: KvBytes = None,
) -> None:
    """Measure what the steps of a model cost on this machine; prints the JSON that `bench capacity --cost` reads."""
    import msgspec

    from tricorn.compiler import ensure
    from tricorn.simulate import machine

    options = engine_options(ensure(model), threads, kv_type, kv_bytes)
    measured = machine.measure(short_name(model), options, told=lambda line: print(line, file=sys.stderr))
    print(msgspec.json.encode(measured).decode())


@bench.command("capacity")
def bench_capacity(
    cost: Annotated[Path, typer.Option(help="What `tricorn bench cost` printed on the machine in question.")],
    clients: Annotated[int, typer.Option(help="Clients, each with one request at a time.", min=1)] = 100,
    replicas: Annotated[int, typer.Option(help="Engines, each with a machine of its own.", min=1)] = 4,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt, half more or less.", min=1)] = 512,
    output: Annotated[int, typer.Option(help="Tokens of an answer, half more or less.", min=1)] = 128,
    requests: Annotated[int, typer.Option(help="What each client asks, one after the other.", min=1)] = 3,
    think: Annotated[float, typer.Option(help="Mean seconds between an answer and the next question.", min=0)] = 1.0,
    shared: Annotated[int, typer.Option(help="First tokens of a prompt that are one of 16 texts.", min=0)] = 0,
    router: Annotated[
        Literal["least", "prefix"], typer.Option(help="To the least busy replica, or to one that has the beginning.")
    ] = "least",
    json: Json = False,
) -> None:
    """Simulate many clients over many replicas, on machines measured before."""
    import msgspec
    from rich.console import Console
    from rich.progress import Progress

    from tricorn.simulate.capacity import Fleet, Question
    from tricorn.simulate.machine import read

    question = Question(
        clients=clients,
        replicas=replicas,
        prompt=prompt,
        output=output,
        requests=requests,
        think=think,
        shared=shared,
        router=router,
    )
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("answered")
        answer = Fleet(read(cost), question).run(lambda done, total: progress.update(task, completed=done, total=total))
    if json:
        print(msgspec.json.encode({"question": question, "answer": answer}).decode())
        return
    for name, value in msgspec.structs.asdict(answer).items():
        text = f"p50 {value.p50:.4f} s, p99 {value.p99:.4f} s" if hasattr(value, "p50") else value
        print(f"{name:18} {text}")


@bench.command("storm")
def bench_storm(
    model: ModelOption = DEFAULT_MODEL,
    seconds: Annotated[float | None, typer.Option(help="How long each storm lasts. [default: 120]", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the requests and their arrivals.", min=0)] = 0,
    short: Short = False,
    json: Json = False,
) -> None:
    """Offer a server three times what it can do: what is left of its throughput, with admission control and without."""
    from tricorn.bench import storm

    _report(storm.run(model, seconds, short=short, seed=seed, tell=_tell), json)


@bench.command("stalls")
def bench_stalls(
    model: ModelOption = DEFAULT_MODEL,
    seconds: Annotated[float | None, typer.Option(help="How long prompts arrive. [default: 40]", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts.", min=0)] = 0,
    short: Short = False,
    json: Json = False,
) -> None:
    """Measure the gaps between the tokens of 8 streams while long prompts arrive back to back."""
    from tricorn.bench import stalls

    _report(stalls.run(model, seconds, short=short, seed=seed, tell=_tell), json)


@bench.command("structured")
def bench_structured(
    model: ModelOption = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(help="Tokens of each plain answer.", min=16)] = 128,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure what constraints cost, hostile grammars do to others, and forced ids save."""
    from tricorn.bench import structured
    from tricorn.compiler import ensure

    _report(structured.run(engine_options(ensure(model), threads, "f16", None), tokens, _tell), json)


@bench.command("soak")
def bench_soak(
    model: ModelOption = DEFAULT_MODEL,
    minutes: Annotated[float, typer.Option(help="How long.", min=0.05)] = 10.0,
    seed: Annotated[int, typer.Option(help="Of the traffic.", min=1)] = 1,
    json: Json = False,
) -> None:
    """Send a server random traffic, right and wrong, kill its engine now and then, and check the books each minute."""
    from tricorn.bench import soak

    _report(soak.run(model, minutes, seed, _tell), json)


@bench.command("serve")
def bench_serve(
    url: Annotated[
        str, typer.Option(help="Of the server, such as http://127.0.0.1:8000. [default: one of MODEL]")
    ] = "",
    model: ModelOption = DEFAULT_MODEL,
    workload: Annotated[
        str,
        typer.Option(
            help="alpha, beta, plain, chat, agent, rag, burst, mixed, 512/128/0 (in, out, shared), or a file."
        ),
    ] = "plain",
    requests: Annotated[int, typer.Option(help="Sessions: a request each, or several in chat and agent.", min=1)] = 64,
    concurrency: Annotated[str, typer.Option(help="Closed loop: sessions at once, several after commas.")] = "",
    rate: Annotated[str, typer.Option(help="Open loop: sessions a second, at random, several after commas.")] = "",
    endpoint: Annotated[Literal["completions", "chat"], typer.Option(help="What is asked.")] = "completions",
    slo: Annotated[str, typer.Option(help="What counts as good, in milliseconds, such as ttft=1000,tpot=50.")] = "",
    key: Annotated[str, typer.Option(envvar="TRICORN_BENCH_KEY", help="Shown to the server.")] = "",
    warmup: Annotated[int, typer.Option(help="Requests before it counts.", min=0)] = 2,
    seed: Annotated[int, typer.Option(help="Of prompts and moments.", min=0)] = 0,
    html: Annotated[Path | None, typer.Option(help="Write a report with plots here.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a line for each run here.")] = None,
    json: Json = False,
) -> None:
    """Put load on a server that speaks OpenAI's API, and tell throughput, latencies and goodput."""
    import msgspec

    from tricorn.bench import report
    from tricorn.bench.serve import Spec, measure_all
    from tricorn.bench.summary import ROWS, Slo, flat

    common = Spec(
        workload=workload,
        requests=requests,
        endpoint=endpoint,
        seed=seed,
        warmup=warmup,
        slo=Slo.parse(slo) if slo else None,
        headers={"authorization": f"Bearer {key}"} if key else {},
    )
    loops = [{"concurrency": count} for count in (numbers("--concurrency", concurrency) if concurrency else ())]
    loads = loops + [{"rate": each} for each in _rates(rate)]
    specs = [replace(common, seed=seed + run, **load) for run, load in enumerate(loads or [{}])]
    runs = measure_all(url or None, model, specs)
    if html is not None:
        html.write_text(report.page(f"{workload} on {url or short_name(model)}", runs))
    if csv is not None:
        rows = [flat(run.summary) for run in runs]
        with csv.open("w", newline="") as file:
            writer = DictWriter(file, list(rows[0]), extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    if json:
        print(msgspec.json.encode({"runs": [run.summary for run in runs]}).decode())
        return
    print(f"{'':28}" + "".join(f"{run.summary.load:>24}" for run in runs))
    for label, show in ROWS:
        print(f"{label:28}" + "".join(f"{show(run.summary):>24}" for run in runs))
    for run in runs:
        for kind, count in run.summary.errors.items():
            print(f"failed, {run.summary.load}: {kind}: {count}")


@bench.command("compare")
def bench_compare(
    recipe: Annotated[list[Path], typer.Option(help="How to start another server; several may be given.")],
    model: ModelOption = DEFAULT_MODEL,
    workload: Annotated[str, typer.Option(help="Workloads with their concurrency, after commas.")] = (
        "plain:1,alpha:16,beta:16"
    ),
    requests: Annotated[
        int, typer.Option(help="Requests of each, for each that runs at a time; 4 at least.", min=1)
    ] = 2,
    rounds: Annotated[int, typer.Option(help="How often every server has its turn.", min=1)] = 2,
    threads: Threads = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables here.")] = None,
    json: Json = False,
) -> None:
    """Run the same work against this server and others, in turns, and tell the ratios."""
    import os

    import msgspec

    from tricorn.bench import compare
    from tricorn.compiler import ensure
    from tricorn.weights.hub import model_path

    ensure(model)
    cells = []
    for part in workload.split(","):
        name, _, count = part.partition(":")
        (concurrency,) = numbers("--workload", count or "1")
        cells.append(compare.Cell(name, concurrency, max(4, requests * concurrency)))
    gguf = Path(model) if "/" in model else model_path(model)
    recipes = [compare.Recipe.read(path) for path in recipe]
    count_of_threads = threads or len(os.sched_getaffinity(0))
    found = compare.run(model, gguf, recipes, cells, rounds, count_of_threads, _tell)
    tables = compare.markdown(found)
    if markdown is not None:
        markdown.write_text(tables)
    print(msgspec.json.encode(found).decode() if json else tables)


@bench.command("server")
def bench_server(
    model: ModelOption = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(help="Tokens of each of the 16 streams.", min=16)] = 1024,
    json: Json = False,
) -> None:
    """Measure what the server's own process costs for each token, and what of it is text, JSON and the rest."""
    from tricorn.bench import frontdoor

    _report(frontdoor.run(model, tokens, _tell), json)


@bench.command("claims")
def bench_claims(model: ModelOption = DEFAULT_MODEL, short: Short = False, json: Json = False) -> None:
    """Measure the headline claims of the techniques that engines are known for, with each and without."""
    import msgspec

    from tricorn.bench import claims

    report = claims.run(model, short=short, tell=_tell)
    print(msgspec.json.encode(report).decode() if json else claims.table(report))
    if not report.ok:
        raise typer.Exit(1)


def _rates(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",") if part]
    except ValueError:
        found = [0.0]
    if not all(0 < rate < 1e6 for rate in found):
        raise typer.BadParameter(f"{text!r}: give numbers above 0, such as 0.5,2", param_hint="--rate")
    return found


def _tell(line: str) -> None:
    """Progress, where it is not in the way of the result."""
    print(line, file=sys.stderr, flush=True)


def _report(report: object, json: bool) -> None:
    """Prints a struct with a field `ok`, and ends with code 1 when that is false."""
    import msgspec

    if json:
        print(msgspec.json.encode(report).decode())
    else:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    if not report.ok:  # type: ignore[attr-defined]
        raise typer.Exit(1)
