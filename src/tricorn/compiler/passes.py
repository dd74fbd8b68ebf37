"""The passes: from the graph as the paper has it to the plan as the machine runs it.

Each pass takes a list of nodes and returns one, with the vocabulary of `models.graph` widened by a few fused nodes:

    projections (x)      weights q, k, v; biases: names or None; columns     several products side by side, one output
    rope_store  (qkv)    weights q_norm, k_norm or none                      norms, rotation and cache write, in place
    attend      (qkv)    attention over the pages
    gated       (x)      weights gate, up
    accumulate  (a, ...) a linear or rms_norm whose result is added to `a` in place

`lower` then gives every value a buffer of the kind its reader wants, and plans the memory by liveness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tricorn.compiler.pack import GROUP, ROWS, kind_of
from tricorn.compiler.plan import Buffer, BufferKind, Op, Plan, RopeTable, Segment
from tricorn.models.graph import Graph, Node
from tricorn.request import TricornError

Nodes = list[Node]

MOST_HEAD_DIM = 512
"""What the attention kernels have room for (`max_head_dim` in native/attention.hpp)."""


def compile_graph(graph: Graph, types: Mapping[str, str]) -> Plan:
    """The plan of a graph whose weights have the given types. Raises TricornError for what the native executor cannot
    run."""
    nodes: Nodes = list(graph.nodes)
    passes: list[Callable[[Nodes], Nodes]] = [
        merge_projections,
        fuse_gates,
        gather_sampled,
        fold_softcap,
        fold_residuals,
    ]
    for a_pass in passes:
        nodes = a_pass(nodes)
    return _Lowering(graph, nodes, types).plan()


def _producers(nodes: Nodes) -> dict[str, Node]:
    return {node.output: node for node in nodes}


def _readers(nodes: Nodes, value: str) -> Nodes:
    return [node for node in nodes if value in node.inputs]


def _without(nodes: Nodes, gone: set[str]) -> Nodes:
    return [node for node in nodes if node.output not in gone]


def _substitute(nodes: Nodes, changes: Mapping[str, Node]) -> Nodes:
    """Replaces the node that makes each named value."""
    return [changes.get(node.output, node) for node in nodes]


def _count(*nodes: Node) -> int:
    return sum(node.attrs.get("fused", 1) for node in nodes)


def merge_projections(nodes: Nodes) -> Nodes:
    """q, k and v become one product; their norms, rotations and the write into the cache one operation."""
    made = _producers(nodes)
    changes: dict[str, Node] = {}
    gone: set[str] = set()
    for node in nodes:
        if node.op != "attention":
            continue
        chains = [_chain(made, value) for value in node.inputs]
        products = [chain[-1] for chain in chains]
        name = f"{node.output}.qkv"
        attrs = {
            "columns": [p.attrs["columns"] for p in products],
            "biases": [p.weights[1] if len(p.weights) > 1 else None for p in products],
            "fused": 3,
        }
        last = products[-1]
        changes[last.output] = Node("projections", name, last.inputs, tuple(p.weights[0] for p in products), attrs)
        norms = [step for chain in chains for step in chain if step.op == "rms_norm"]
        rope = _one_rope(node, chains)
        store = {**node.attrs, "rope": rope.attrs["rope"], "eps": norms[0].attrs["eps"] if norms else 0.0}
        store["fused"] = sum(len(chain) - 1 for chain in chains)
        stored = Node("rope_store", f"{name}.stored", (name,), tuple(n.weights[0] for n in norms), store)
        attend = Node("attend", node.output, (stored.output,), (), node.attrs)
        changes[node.output] = attend
        # The store goes right before its attention: put both in the attention's place.
        changes[f"{node.output}/store"] = stored
        gone |= {step.output for chain in chains for step in chain} - {last.output}
    merged: Nodes = []
    for node in _without(nodes, gone):
        if f"{node.output}/store" in changes:
            merged.append(changes[f"{node.output}/store"])
        merged.append(changes.get(node.output, node))
    return merged


def _one_rope(node: Node, chains: list[list[Node]]) -> Node:
    """The rotation of q and k. The fused store knows one shape only: the same rope on both, after norms by head."""
    shapes = [[(step.op, step.attrs.get("rope")) for step in chain[:-1]] for chain in chains]
    norms = [step for chain in chains for step in chain if step.op == "rms_norm"]
    plain = shapes[0] == shapes[1] and len(shapes[0]) in (1, 2) and shapes[0][0][0] == "rope" and not shapes[2]
    if not plain or any(not norm.attrs["heads"] for norm in norms):
        raise TricornError(
            f"cannot compile: {node.output!r} needs q and k with the same rotation, and norms of each head or none"
        )
    return chains[0][0]


def _chain(made: Mapping[str, Node], value: str) -> list[Node]:
    """The nodes from a value back to the product it comes from."""
    chain = [made[value]]
    while chain[-1].op in ("rope", "rms_norm"):
        chain.append(made[chain[-1].inputs[0]])
    if chain[-1].op != "linear":
        raise TricornError(f"cannot compile: {value!r} enters attention from {chain[-1].op!r}")
    return chain


def fuse_gates(nodes: Nodes) -> Nodes:
    """gate and up become one operation that ends with the activation."""
    made = _producers(nodes)
    changes: dict[str, Node] = {}
    gone: set[str] = set()
    for node in nodes:
        if node.op != "act_mul":
            continue
        gate, up = (made[value] for value in node.inputs)
        if len(gate.weights) > 1 or len(up.weights) > 1:
            raise TricornError("cannot compile: biases in the gated layer are known to the reference executor only")
        attrs = {"act": node.attrs["act"], "columns": gate.attrs["columns"], "fused": 3}
        changes[node.output] = Node("gated", node.output, gate.inputs, (gate.weights[0], up.weights[0]), attrs)
        gone |= {gate.output, up.output}
    return _substitute(_without(nodes, gone), changes)


def gather_sampled(nodes: Nodes) -> Nodes:
    """The last norm reads the sampled rows only."""
    made = _producers(nodes)
    changes: dict[str, Node] = {}
    gone: set[str] = set()
    for node in nodes:
        source = made.get(node.inputs[0]) if node.inputs else None
        if node.op == "rms_norm" and source and source.op == "sampled":
            changes[node.output] = replace(node, inputs=source.inputs, attrs={**node.attrs, "gather": True, "fused": 2})
            gone.add(source.output)
    return _substitute(_without(nodes, gone), changes)


def fold_softcap(nodes: Nodes) -> Nodes:
    """A soft cap becomes the end of its product."""
    made = _producers(nodes)
    changes: dict[str, Node] = {}
    gone: set[str] = set()
    for node in nodes:
        if node.op == "softcap":
            product = made[node.inputs[0]]
            attrs = {**product.attrs, "softcap": node.attrs["cap"], "fused": _count(product, node)}
            changes[node.output] = replace(product, output=node.output, attrs=attrs)
            gone.add(product.output)
    return _substitute(_without(nodes, gone), changes)


def fold_residuals(nodes: Nodes) -> Nodes:
    """x + f(...) becomes the end of f, in place on x: nobody reads the old x afterwards."""
    made = _producers(nodes)
    alias: dict[str, str] = {}
    folded: Nodes = []
    for index, node in enumerate(nodes):
        inputs = tuple(alias.get(value, value) for value in node.inputs)
        if node.op != "add":
            folded.append(replace(node, inputs=inputs))
            continue
        stream, part = node.inputs
        producer = made[part]
        later = [n for n in nodes[index + 1 :] if stream in n.inputs]
        if producer.op not in ("linear", "rms_norm") or len(_readers(nodes, part)) != 1 or later:
            raise TricornError(f"cannot compile: {node.output!r} adds something that is not the end of a layer's part")
        target = alias.get(stream, stream)
        position = next(i for i, n in enumerate(folded) if n.output == part)
        attrs = {**producer.attrs, "add_to": target, "fused": _count(producer, node)}
        folded[position] = replace(folded[position], attrs=attrs)
        alias[node.output] = target
    return folded


class _Lowering:
    """Nodes to operations on buffers."""

    def __init__(self, graph: Graph, nodes: Nodes, types: Mapping[str, str]) -> None:
        self.graph, self.nodes, self.types = graph, nodes, types
        self.buffers: list[Buffer] = []
        self.index: dict[tuple[str, str], int] = {}
        self.ops: list[Op] = []

    def plan(self) -> Plan:
        embed = self.nodes[0]
        residual = self.buffer(embed.output, "rows", embed.attrs["columns"])
        for node in self.nodes[1:]:
            getattr(self, f"_{node.op}")(node)
        logits = self.index[self.nodes[-1].output, "rows"]
        attention = next(node for node in self.nodes if node.op == "attend")
        return Plan(
            embedding=embed.weights[0],
            embedding_scale=float(embed.attrs["scale"]),
            residual=residual,
            logits=logits,
            buffers=plan_memory(self.buffers, self.ops, (residual, logits)),
            ops=tuple(self.ops),
            ropes=tuple(RopeTable(rope.inv_freq, rope.factor) for rope in self.graph.ropes),
            layers=self.graph.layers,
            heads=attention.attrs["heads"],
            kv_heads=self.graph.kv_heads,
            head_dim=self.graph.head_dim,
            vocab=self.graph.vocab,
        )

    def buffer(self, value: str, kind: BufferKind, columns: int, sampled: bool = False) -> int:
        if kind != "rows" and columns % GROUP:
            raise TricornError(f"cannot compile: {value!r} has {columns} columns, not a multiple of {GROUP}")
        padded = -(-columns // GROUP) * GROUP
        self.index[value, kind] = len(self.buffers)
        self.buffers.append(Buffer(value, kind, padded, sampled))
        return len(self.buffers) - 1

    def wanted(self, value: str) -> list[BufferKind]:
        """The kinds of activations in which the value's readers want it."""
        weights = [w for node in _readers(self.nodes, value) for w in node.weights]
        kinds: dict[BufferKind, None] = {}
        for weight in weights:
            kinds[kind_of(self.types[weight])] = None  # type: ignore[index]
        return list(kinds)

    def columns(self, value: str) -> int:
        return self.buffers[self.index[value, "rows"]].columns

    def emit(self, op: str, node: Node, input: int, out: int, **fields: Any) -> None:
        fields.setdefault("fused", _count(node))
        self.ops.append(Op(op, input, out, **fields))  # type: ignore[arg-type]

    def _rms_norm(self, node: Node) -> None:
        source = self.index[node.inputs[0], "rows"]
        fields = {"weight": node.weights[0], "epsilon": node.attrs["eps"], "gather": node.attrs.get("gather", False)}
        if "add_to" in node.attrs:
            self.emit("norm", node, source, self.index[node.attrs["add_to"], "rows"], add=True, **fields)
            return
        for kind in self.wanted(node.output):
            out = self.buffer(node.output, kind, self.columns(node.inputs[0]), bool(fields["gather"]))
            self.emit("norm", node, source, out, **fields)

    def _projections(self, node: Node) -> None:
        columns = node.attrs["columns"]
        if any(n % ROWS for n in columns):
            raise TricornError(f"cannot compile: heads of {node.output!r} are not a multiple of {ROWS} wide")
        out = self.buffer(node.output, "rows", sum(columns))
        starts = [sum(columns[:i]) for i in range(len(columns))]
        groups: dict[str, list[Segment]] = {}
        for weight, column in zip(node.weights, starts, strict=True):
            groups.setdefault(kind_of(self.types[weight]), []).append(Segment(weight, column))
        bias = f"{node.output}.bias" if any(node.attrs["biases"]) else None
        for kind, segments in groups.items():
            source = self.index[node.inputs[0], kind]
            self.emit("linear", node, source, out, segments=tuple(segments), bias=bias, fused=len(segments))

    def _linear(self, node: Node) -> None:
        weight = node.weights[0]
        source = self.index[node.inputs[0], kind_of(self.types[weight])]
        fields = {
            "segments": (Segment(weight),),
            "bias": node.weights[1] if len(node.weights) > 1 else None,
            "softcap": node.attrs.get("softcap", 0.0),
        }
        if "add_to" in node.attrs:
            self.emit("linear", node, source, self.index[node.attrs["add_to"], "rows"], add=True, **fields)
        else:
            out = self.buffer(node.output, "rows", node.attrs["columns"], self.buffers[source].sampled)
            self.emit("linear", node, source, out, **fields)

    def _gated(self, node: Node) -> None:
        kinds = {kind_of(self.types[w]) for w in node.weights}
        if len(kinds) > 1:
            raise TricornError(
                f"cannot compile: {node.weights[0]!r} and {node.weights[1]!r} have types of different kinds"
            )
        source = self.index[node.inputs[0], kinds.pop()]
        (kind,) = self.wanted(node.output)
        out = self.buffer(node.output, kind, node.attrs["columns"])
        segments = tuple(Segment(weight) for weight in node.weights)
        self.emit("gated", node, source, out, segments=segments, gate=node.attrs["act"])

    def _rope_store(self, node: Node) -> None:
        qkv = self.index[node.inputs[0], "rows"]
        self.index[node.output, "rows"] = qkv
        q_norm, k_norm = node.weights or (None, None)
        a = node.attrs
        fields = {"layer": a["layer"], "heads": a["heads"], "rope": a["rope"], "epsilon": a["eps"]}
        self.emit("rope_store", node, qkv, qkv, q_norm=q_norm, k_norm=k_norm, **fields)

    def _attend(self, node: Node) -> None:
        a = node.attrs
        (kind,) = self.wanted(node.output)
        out = self.buffer(node.output, kind, a["heads"] * a["head_dim"])
        fields = {key: a[key] for key in ("layer", "heads", "window", "scale", "softcap")}
        if a["head_dim"] % GROUP or a["head_dim"] > MOST_HEAD_DIM:
            raise TricornError(
                f"cannot compile: head_dim {a['head_dim']} is not a multiple of {GROUP} up to {MOST_HEAD_DIM}"
            )
        self.emit("attention", node, self.index[node.inputs[0], "rows"], out, **fields)


def plan_memory(buffers: list[Buffer], ops: list[Op], always: tuple[int, ...]) -> tuple[Buffer, ...]:
    """Gives buffers that are never alive together the same slot: first fit, in order of first use."""
    first = dict.fromkeys(always, 0)
    last = {b: len(ops) for b in always}
    for i, op in enumerate(ops):
        for b in (op.input, op.out):
            first.setdefault(b, i)
            last[b] = max(last.get(b, 0), i)
    free_at: list[int] = []  # per slot: the operation after which it is free
    placed = list(buffers)
    for b in sorted(first, key=lambda b: first[b]):
        slot = next((s for s, end in enumerate(free_at) if end < first[b]), len(free_at))
        free_at[slot : slot + 1] = [last[b]]
        placed[b] = Buffer(buffers[b].name, buffers[b].kind, buffers[b].columns, buffers[b].sampled, slot)
    return tuple(placed)
