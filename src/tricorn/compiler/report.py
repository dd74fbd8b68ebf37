"""What a build shows a person: a progress bar while it runs, a summary at its end."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from tricorn import compiler
from tricorn.weights.checkpoint import Checkpoint


def build_with_progress(checkpoint: Checkpoint, path: Path, quiet: bool = False) -> compiler.Summary:
    """Builds an engine file, showing on stderr how far it is and what it made."""
    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("compiling {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    begin = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(checkpoint.name, total=None)
        summary = compiler.build(checkpoint, path, lambda _, done, total: bar.update(task, completed=done, total=total))
    seconds = time.perf_counter() - begin
    console.print(
        f"compiled {checkpoint.name} in {seconds:.1f} s: {summary.engine_bytes / 1e6:.1f} MB"
        f" ({summary.engine_bytes / summary.source_bytes - 1:+.1%} against the weights' source),"
        f" {summary.graph_operations} operations fused into {summary.plan_operations},"
        f" buffers at most {summary.peak_buffers / 1e6:.1f} MB"
    )
    return summary
