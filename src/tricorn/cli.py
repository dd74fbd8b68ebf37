"""The command line. Heavy imports wait inside the commands, so that `--help` and the start of a server are quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from tricorn.advise.commands import advise, plan
from tricorn.arguments import (
    DEFAULT_MODEL,
    Json,
    KvBytes,
    KvType,
    Model,
    ModelOption,
    Threads,
    byte_count,
    engine_options,
    short_name,
)
from tricorn.bench.commands import bench
from tricorn.request import TricornError

app = typer.Typer(
    name="tricorn",
    help="A serving engine for large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench, name="bench")
app.command()(plan)
app.command()(advise)


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
        name=name or short_name(model),
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
        state_dir=state_dir or cache_dir() / "state" / (name or short_name(model)).replace("/", "--"),
        tls_cert=tls_cert,
        tls_key=tls_key,
        log_level=log_level,
        log_format=log_format,
    )
    engine = engine_options(
        path,
        threads,
        kv_type,
        kv_bytes,
        max_sequences=max_sequences,
        max_batched_tokens=max_batched_tokens,
        scheduler={"policy": policy, "admission": admission, "target_itl": target_itl},
        kv_disk=None if kv_disk is None else str(kv_disk),
        kv_disk_bytes=byte_count(kv_disk_size, "--kv-disk-size"),
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

    options = engine_options(ensure(model), threads, kv_type, kv_bytes)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("answering", total=None)
        refused = run(
            options,
            name or short_name(model),
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
