"""What a build shows a person: a progress bar while it runs, a summary at its end."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from tricorn import compiler
from tricorn.compiler.engine_file import EngineFile
from tricorn.compiler.plan import Op, Plan
from tricorn.weights.checkpoint import Checkpoint


def build_with_progress(checkpoint: Checkpoint, path: Path, quiet: bool = False) -> compiler.Summary:
    """Builds an engine file, showing on stderr how far it is and what it made."""
    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("compiling {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    begin = time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
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


def describe(file: EngineFile, tensors: bool = False) -> str:
    """The plan as text: a head with the facts, then a line for each operation, equal layers folded into one."""
    header, plan = file.header, file.plan
    lines = [
        f"{file.path}: {header.name} ({header.architecture}), compiled for {header.isa}",
        f"  {plan.layers} layers, {plan.heads} heads on {plan.kv_heads} of {plan.head_dim}, vocabulary {plan.vocab},"
        f" context {file.graph.context}",
        f"  {len(file.mapped) / 1e6:.1f} MB: {len(header.tensors)} tensors {_types(file)};"
        f" source digest {header.digest[:12]}",
        f"  {len(file.graph.nodes)} operations of the graph in {len(plan.ops) + 1};"
        f" buffers in {len({b.slot for b in plan.buffers})} slots,"
        f" {compiler.peak_buffers(plan) / 1e6:.1f} MB for 512 tokens",
        "",
        f"  {'embed':12} -> {plan.buffers[plan.residual].name}  [{plan.embedding}, x {plan.embedding_scale:g}]",
    ]
    layers = _layers(plan)
    for ops, repeat in layers:
        if repeat > 1:
            lines.append(f"  {repeat} layers like this one:")
        lines += [("    " if repeat > 1 else "  ") + _describe_op(op, plan) for op in ops]
    lines.append(f"  {'sample':12} {plan.buffers[plan.logits].name}")
    if tensors:
        lines += ["", *(f"  {t.offset:>12} {t.type:5} {t.rows:>7} x {t.columns:<6} {t.name}" for t in header.tensors)]
    return "\n".join(lines)


def _types(file: EngineFile) -> str:
    sizes: dict[str, int] = {}
    for entry in file.header.tensors:
        sizes[entry.type] = sizes.get(entry.type, 0) + entry.blocks * entry.block_bytes
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return "(" + ", ".join(f"{size / 1e6:.1f} MB {name}" for name, size in ordered) + ")"


def _layers(plan: Plan) -> list[tuple[list[Op], int]]:
    """Runs of consecutive layers whose operations look the same, with how many there are; the first stands for all."""
    groups: list[list[Op]] = []
    for op in plan.ops:
        starts = op.op == "norm" and not op.add and not op.gather and ".attention_in" in plan.buffers[op.out].name
        if starts or op.gather or not groups:
            groups.append([])
        groups[-1].append(op)
    folded: list[tuple[list[Op], int]] = []
    for group in groups:
        if folded and _shape(folded[-1][0], plan) == _shape(group, plan):
            folded[-1] = (folded[-1][0], folded[-1][1] + 1)
        else:
            folded.append((group, 1))
    return folded


def _shape(ops: list[Op], plan: Plan) -> list[tuple[object, ...]]:
    return [(op.op, op.window, op.rope, op.add, len(op.segments), plan.buffers[op.out].columns) for op in ops]


def _describe_op(op: Op, plan: Plan) -> str:
    source, out = plan.buffers[op.input], plan.buffers[op.out]
    weights = [segment.weight for segment in op.segments]
    weights += [w for w in (op.weight, op.bias, op.q_norm, op.k_norm) if w]
    facts = {
        "window": op.window,
        "softcap": op.softcap,
        "rope": op.rope,
        "gate": op.gate if op.op == "gated" else "",
        "rows": "sampled" if op.gather else "",
    }
    told = "".join(
        f", {key} {value:g}" if isinstance(value, float) else f", {key} {value}"
        for key, value in facts.items()
        if value
    )
    arrow = "in place" if op.input == op.out else ("+=" if op.add else "->")
    target = "" if op.input == op.out else f" {out.name} ({out.kind} {out.columns})"
    short = ", ".join(name.removeprefix("model.").removesuffix(".weight") for name in weights)
    return f"{op.op:12} {source.name} ({source.kind} {source.columns}) {arrow}{target}  [{short or '-'}{told}]"
