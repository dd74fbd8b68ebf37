"""The command line. Heavy imports wait inside the commands, so that `--help` and the start of a server are quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from tricorn.request import TricornError

app = typer.Typer(
    name="tricorn",
    help="A serving engine for large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench = typer.Typer(help="Measure the machine and the engine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")

Model = Annotated[
    str,
    typer.Argument(help="A built-in name (see `tricorn models`), hub id, folder, .gguf file, or engine file."),
]
ModelOption = Annotated[str, typer.Option("--model", help="What `tricorn serve` takes as a model.")]
Threads = Annotated[int | None, typer.Option(help="Threads of the engine. [default: the processors it may use]")]
KvType = Annotated[Literal["f16", "bf16", "f32"], typer.Option(help="Type of the KV cache.")]
KvBytes = Annotated[
    str | None,
    typer.Option(help="Size of the KV pool, such as 512M or 2G. [default: a quarter of free memory, at most 4G]"),
]
Short = Annotated[bool, typer.Option("--short", help="A small form that takes some seconds.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

DEFAULT_MODEL = "smollm2-135m"


@app.command()
def serve(
    model: Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(help="Serve KServe's gRPC there too. [default: no gRPC]", min=0, max=65535)
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model's name in the API. [default: MODEL]")] = None,
    threads: Threads = None,
    kv_type: KvType = "f16",
    kv_bytes: KvBytes = None,
    max_sequences: Annotated[int | None, typer.Option(help="Sequences that run at once. [default: 64]")] = None,
    max_batched_tokens: Annotated[int | None, typer.Option(help="Token rows in a step. [default: 512]")] = None,
    max_waiting: Annotated[int, typer.Option(help="Sequences that may wait; more are refused with 429.", min=0)] = 256,
    max_waiting_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens that may wait. [default: 16 contexts]", min=0)
    ] = None,
    max_wait: Annotated[float, typer.Option(help="Seconds that a newcomer may have to wait; 0 is any.", min=0)] = 60.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that streams may go on after SIGTERM.", min=0)] = 10.0,
    admin_key: Annotated[
        str | None,
        typer.Option(
            help="Opens /debug/state; @FILE reads it from there. [default: only this machine may look]",
            envvar="TRICORN_ADMIN_KEY",
            show_envvar=True,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that requests must show; give it several times for several. @FILE reads them from there, one in"
            " a line. Others on this machine can see the command line: prefer a file or the environment."
            " [default: no key is asked for]",
            envvar="TRICORN_API_KEY",
            show_envvar=True,
        ),
    ] = None,
    rate_limit_requests: Annotated[
        int | None, typer.Option(help="Requests that each key may make in a minute. [default: any]", min=1)
    ] = None,
    rate_limit_tokens: Annotated[
        int | None, typer.Option(help="Tokens, in and out, that each key may use in a minute. [default: any]", min=1)
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="Where files and batches are kept. [default: state/NAME in the cache directory]"),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate with its chain, in PEM: serve TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, in PEM.")] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="An origin whose pages may call from a browser, or *; several times for several."),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="info tells of each request that ends.")
    ] = "info",
    log_format: Annotated[Literal["text", "json"], typer.Option(help="Of the lines on standard error.")] = "text",
    policy: Annotated[
        Literal["fcfs", "lpm", "dfs-weight", "priority", "fair"],
        typer.Option(
            help="Who comes first: by arrival, longest cached prefix, shared branches together, the requests' priority,"
            " or tenants in turn."
        ),
    ] = "fcfs",
    admission: Annotated[
        Literal["guaranteed", "expected", "none"],
        typer.Option(
            help="Run only what can end without preemption, what is expected to (by the outputs of late), or all."
        ),
    ] = "expected",
    target_itl: Annotated[
        float,
        typer.Option(help="Seconds between the tokens of a stream that prompts of others may cause; 0: any.", min=0),
    ] = 0.2,
    kv_disk: Annotated[
        Path | None, typer.Option(help="A folder for KV pages that memory has no room for; it survives restarts.")
    ] = None,
    kv_disk_size: Annotated[str, typer.Option(help="What they may take there, such as 512M or 20G.")] = "4G",
    step_timeout: Annotated[
        float, typer.Option(help="Seconds after which an engine that hangs in a step is started anew.", min=1)
    ] = 60.0,
    executor: Annotated[
        Literal["native", "reference"],
        typer.Option(help="The reference one is NumPy in float32: slow, obviously right."),
    ] = "native",
) -> None:
    """Serve a model over an OpenAI-compatible API; fetches and compiles it first when needed."""
    from tricorn.compiler import ensure
    from tricorn.server.admin import read_key
    from tricorn.server.app import ServerOptions
    from tricorn.server.guard import read_keys
    from tricorn.server.serve import serve as run
    from tricorn.weights.hub import cache_dir

    key, api_keys = read_key(admin_key), read_keys(api_key or ())
    path = ensure(model)
    options = ServerOptions(
        name=name or _short(model),
        host=host,
        port=port,
        grpc_port=grpc_port,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        max_wait=max_wait,
        drain_seconds=drain_timeout,
        admin_key=key,
        api_keys=api_keys,
        rate_limit_requests=rate_limit_requests,
        rate_limit_tokens=rate_limit_tokens,
        cors_origins=tuple(cors_origin or ()),
        state_dir=state_dir or cache_dir() / "state" / (name or _short(model)).replace("/", "--"),
        tls_cert=tls_cert,
        tls_key=tls_key,
        log_level=log_level,
        log_format=log_format,
    )
    engine = _engine_options(
        path,
        threads,
        kv_type,
        kv_bytes,
        max_sequences=max_sequences,
        max_batched_tokens=max_batched_tokens,
        scheduler={"policy": policy, "admission": admission, "target_itl": target_itl},
        kv_disk=None if kv_disk is None else str(kv_disk),
        kv_disk_bytes=_bytes(kv_disk_size, "--kv-disk-size"),
        step_timeout=step_timeout,
        executor=executor,
    )
    raise typer.Exit(run(options, engine))


@app.command("run-batch")
def run_batch(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Requests, in lines of JSON, as for /v1/batches.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Their answers; OUT.part while it runs.")],
    model: ModelOption = DEFAULT_MODEL,
    name: Annotated[str | None, typer.Option(help="The model's name in the requests. [default: MODEL]")] = None,
    threads: Threads = None,
    kv_type: KvType = "f16",
    kv_bytes: KvBytes = None,
) -> None:
    """Answer a file of requests without a server; goes on where an interrupted run stopped."""
    from rich.console import Console
    from rich.progress import Progress

    from tricorn.compiler import ensure
    from tricorn.server.run_batch import run

    options = _engine_options(ensure(model), threads, kv_type, kv_bytes)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("answering", total=None)
        refused = run(
            options,
            name or _short(model),
            source,
            target,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    if refused:
        print(f"{refused} requests were refused: their answers in {target} say why", file=sys.stderr)
    raise typer.Exit(1 if refused else 0)


@app.command()
def chat(
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.", min=0)] = 0.7,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of one answer.", min=1)] = 1024,
    threads: Threads = None,
) -> None:
    """Chat in the terminal. /reset begins anew, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer."""
    from tricorn.chat import converse

    converse(model, system, temperature, max_tokens, threads)


@app.command()
def pull(name: Annotated[str, typer.Argument(help="A built-in model; see `tricorn models`.")]) -> None:
    """Fetch a built-in model into the cache; goes on where an interrupted fetch stopped."""
    from tricorn.weights import hub

    print(hub.pull(name))


@app.command()
def models(json: Json = False) -> None:
    """List the built-in models and what the cache holds of them."""
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from tricorn.weights import hub

    rows = [(name, builtin, hub.is_pulled(name)) for name, builtin in hub.BUILTIN.items()]
    if json:
        entries = [{"name": name, **_facts(builtin), "pulled": here} for name, builtin, here in rows]
        print(msgspec.json.encode(entries).decode())
        return
    table = Table("name", "size", "here", "architecture", "weights", "license", box=None)
    for name, builtin, here in rows:
        size = f"{builtin.bytes / 1e6:.0f} MB"
        table.add_row(name, size, "yes" if here else "no", builtin.architecture, builtin.quantization, builtin.license)
    Console().print(table)


@app.command()
def build(
    model: Model,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The engine file to write. [default: the cache directory]")
    ] = None,
) -> None:
    """Compile a model into an engine file and say what was made."""
    from tricorn.compiler import engine_path
    from tricorn.compiler.engine_file import SUFFIX
    from tricorn.compiler.report import build_with_progress
    from tricorn.weights import hub
    from tricorn.weights.checkpoint import load

    source = hub.resolve(model)
    if source.suffix == SUFFIX:
        raise TricornError(f"{source} is an engine file already")
    checkpoint = load(source)
    path = output or engine_path(model, checkpoint)
    build_with_progress(checkpoint, path)
    print(path)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="An engine file, or a model whose engine is in the cache.")],
    tensors: Annotated[bool, typer.Option(help="List the tensors too.")] = False,
) -> None:
    """Print the plan of an engine file so that a person can read it."""
    from tricorn.compiler import ensure
    from tricorn.compiler.engine_file import EngineFile
    from tricorn.compiler.report import describe

    print(describe(EngineFile.open(file if file.is_file() else ensure(str(file))), tensors=tensors))


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

    batches = _numbers("--batch", batch)
    file = EngineFile.open(ensure(model))
    limits = machine.measure(threads, file.header.isa)
    options = _engine_options(file.path, threads, kv_type, kv_bytes, max_sequences=max(64, *batches))
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
        print(msgspec.json.encode({"model": _short(model), "rows": rows}).decode())


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

    options = _engine_options(ensure(model), threads, kv_type, kv_bytes)
    measured = machine.measure(_short(model), options, told=lambda line: print(line, file=sys.stderr))
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


@app.command()
def drill(
    model: ModelOption = DEFAULT_MODEL,
    streams: Annotated[int, typer.Option(help="Clients that stream at once.", min=1)] = 64,
    kills: Annotated[int, typer.Option(help="How often the engine is killed.", min=0)] = 20,
    seed: Annotated[int, typer.Option(help="Of the requests and of the moments.", min=0)] = 0,
    short: Annotated[bool, typer.Option("--short", help="Short answers.")] = False,
    json: Json = False,
) -> None:
    """Kill, stop and starve the engine of a real server, and compare every transcript with the undisturbed one."""
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from tricorn.bench import drill
    from tricorn.compiler import ensure

    path = str(ensure(model))
    console = Console(stderr=True)
    with console.status("a server is started") as status:
        report = drill.run(path, streams, kills, short=short, seed=seed, tell=status.update)
    if json:
        print(msgspec.json.encode(report).decode())
    else:
        table = Table("", "streams", "deaths", "mismatched", "lost", "longest pause", box=None)
        killed = (report.streams, report.kills, report.mismatched, report.lost, f"{report.longest_pause_s:.1f} s")
        table.add_row("killed", *map(str, killed))
        for name, outcome in report.disasters.items():
            counts = (outcome.streams, outcome.deaths, outcome.mismatched, outcome.lost)
            table.add_row(name, *map(str, counts), f"{outcome.longest_pause_s:.1f} s")
        Console().print(table)
        print("passed" if report.ok else "FAILED")
    raise typer.Exit(0 if report.ok else 1)


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

    _report(structured.run(_engine_options(ensure(model), threads, "f16", None), tokens, _tell), json)


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


def _engine_options(path: Path, threads: int | None, kv_type: str, kv_bytes: str | None, **others: object):  # type: ignore[no-untyped-def]
    import msgspec

    from tricorn.engine.options import EngineOptions

    fields = {"path": str(path), "threads": threads, "kv_type": kv_type, "kv_bytes": _bytes(kv_bytes), **others}
    return msgspec.convert(fields, EngineOptions)


def _bytes(text: str | None, option: str = "--kv-bytes") -> int | None:
    """ "512M" -> 536870912."""
    if text is None:
        return None
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in units else (text, "")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 15:
        raise TricornError(f"{option} {text}: give a whole number, with K, M or G for binary units, such as 512M")
    return int(digits) << units.get(unit, 0)


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > 4096:
        raise TricornError(f"{option} {text}: give whole numbers from 1 to 4096, separated by commas")
    return numbers


def _short(model: str) -> str:
    return (
        Path(model).stem if model.endswith((".gguf", ".tricorn")) else Path(model).name if "/" not in model else model
    )


def _facts(builtin: object) -> dict[str, object]:
    return {key: getattr(builtin, key) for key in ("about", "architecture", "quantization", "license", "bytes")}


def main() -> None:
    """Runs the command line; an error of ours is one line on stderr and exit code 1."""
    try:
        app()
    except TricornError as error:
        print(f"tricorn: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
