"""The compiler: packing without loss, plans that share memory safely, engine files that are whole or refused."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tricorn._native", reason="the native extension is not built: run make setup")

import checkpoints
from engines import ARCHITECTURES, TYPES, checkpoint, compiled, for_isa, random_tensor
from tricorn import compiler
from tricorn.compiler import EngineFile, build
from tricorn.compiler.engine_file import PREAMBLE
from tricorn.compiler.pack import kind_of, pack_matrix, pack_vector, unpack_matrix
from tricorn.compiler.passes import compile_graph
from tricorn.compiler.plan import Plan
from tricorn.compiler.report import describe
from tricorn.models import build_graph, weight_shapes
from tricorn.request import TricornError
from tricorn.runtime.native import NativeExecutor
from tricorn.weights.checkpoint import Checkpoint
from tricorn.weights.tensor import BLOCK, Tensor, from_float32

EngineFor = Callable[..., tuple[Checkpoint, EngineFile]]


# Packing


def assert_lossless(tensor: Tensor) -> int:
    """Gives the packed size in bytes."""
    packed = pack_matrix("w", tensor)
    with np.errstate(all="ignore"):
        got, want = unpack_matrix(packed), tensor.dequantize()
    assert got.shape == want.shape
    np.testing.assert_array_equal(got, want)  # NaN equals NaN here, and -0 equals 0
    differing = got.view(np.uint32) != want.view(np.uint32)
    assert np.all((want[differing] == 0) | np.isnan(want[differing])), "more than the sign of a zero differs"
    return packed.data.nbytes


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 64, 307])
@pytest.mark.parametrize("kind", TYPES)
def test_packing_loses_nothing(kind: str, rows: int) -> None:
    random = np.random.default_rng(rows)
    tensor = random_tensor(random, kind, rows, 512, 0.1)
    padded = tensor.data.nbytes // rows * (-(-rows // 16) * 16)
    assert assert_lossless(tensor) <= 1.06 * padded


@settings(max_examples=60, derandomize=True, deadline=None)
@given(kind=st.sampled_from(TYPES), rows=st.integers(1, 40), blocks=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_packing_loses_nothing_of_any_bytes(kind: str, rows: int, blocks: int, seed: int) -> None:
    """Random bytes: scales that are infinite, subnormal or no number go through as they are."""
    values, size = BLOCK[kind]
    repeat = blocks * (1 if values >= 32 else 32)
    data = np.random.default_rng(seed).integers(0, 256, (rows, repeat * size), np.uint8)
    assert_lossless(Tensor(kind, (rows, repeat * values), data))


def test_vectors_become_float32() -> None:
    values = np.random.default_rng(0).normal(0, 1, 100).astype(np.float32)
    packed = pack_vector(from_float32(values))
    assert packed.data.nbytes % 128 == 0
    floats = packed.data.reshape(-1).view(np.float32)
    np.testing.assert_array_equal(floats[:100], values)
    assert not floats[100:].any()


@pytest.mark.parametrize("kind", TYPES)
def test_the_file_holds_the_weights_of_the_source(engine_for: EngineFor, kind: str) -> None:
    source, engine = engine_for("qwen2", kind)
    weights = engine.weights()
    for name, tensor in source.tensors.items():
        np.testing.assert_array_equal(weights[name], tensor.dequantize(), err_msg=name)
    assert (engine.name, engine.tokenizer, engine.eos_ids) == (source.name, source.tokenizer, source.eos_ids)
    assert (engine.chat_template, engine.bos_id, engine.add_bos) == (source.chat_template, source.bos_id, False)
    assert engine.graph == build_graph(source.config)


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b"])
def test_a_real_file_is_hardly_larger_than_its_source(
    real_model: Callable[[str], Path], real_engine: Callable[[str], Path], name: str
) -> None:
    source, engine = real_model(name), real_engine(name)
    assert engine.stat().st_size <= 1.06 * source.stat().st_size
    assert list(engine.parent.glob(".*")) == []


def test_building_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    source = checkpoint("gemma3_text", ("Q4_K", "Q6_K"))
    paths = [tmp_path / "a.tricorn", tmp_path / "b.tricorn"]
    told: list[tuple[str, int, int]] = []
    for path in paths:
        summary = build(source, path, lambda *report: told.append(report))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert summary.engine_bytes == paths[0].stat().st_size
    assert summary.plan_operations < summary.graph_operations
    assert told[-1][1] == told[-1][2] == summary.source_bytes


# Plans


def plan_of(architecture: str, kinds: tuple[str, ...], **overrides: Any) -> Plan:
    config, _ = checkpoints.make(architecture, **{"hidden_size": 64, "intermediate_size": 64, **overrides})
    graph = build_graph(config)
    matrices = [name for name, shape in weight_shapes(graph).items() if len(shape) == 2]
    types = {name: kinds[i % len(kinds)] for i, name in enumerate(matrices) if "up_proj" not in name}
    types |= {name: types[name.replace("up_proj", "gate_proj")] for name in matrices if "up_proj" in name}
    return compile_graph(graph, types)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    architecture=st.sampled_from(ARCHITECTURES),
    kinds=st.lists(st.sampled_from(TYPES), min_size=1, max_size=6),
    layers=st.integers(1, 6),
    tied=st.booleans(),
)
def test_buffers_of_one_slot_are_never_alive_together(
    architecture: str, kinds: list[str], layers: int, tied: bool
) -> None:
    """Runs the plan symbolically: what an operation reads must be what was written for it, not what moved in since."""
    plan = plan_of(architecture, tuple(kinds), num_hidden_layers=layers, tie_word_embeddings=tied)
    assert all(buffer.slot >= 0 for buffer in plan.buffers)
    holds: dict[int, int] = {plan.buffers[plan.residual].slot: plan.residual}
    for op in plan.ops:
        assert holds.get(plan.buffers[op.input].slot) == op.input, f"{op.op} reads a buffer that is gone"
        if op.input != op.out:
            assert plan.buffers[op.out].slot != plan.buffers[op.input].slot
        if op.add:
            assert holds.get(plan.buffers[op.out].slot) == op.out, f"{op.op} adds to a buffer that is gone"
        holds[plan.buffers[op.out].slot] = op.out
    assert plan.ops[-1].out == plan.logits
    assert len({buffer.slot for buffer in plan.buffers}) <= 8, "memory grows with the layers"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_operations_are_fused(architecture: str) -> None:
    """Each layer is a handful of operations; kinds of buffers are those that the weights' products want."""
    plan = plan_of(architecture, ("Q8_0",), num_hidden_layers=2)
    names = [op.op for op in plan.ops]
    extra = 2 if architecture.startswith("gemma") else 0  # its norms after attention and feed-forward
    assert len(names) == 2 * (8 + extra) + 2
    assert names[:4] == ["norm", "linear", "rope_store", "attention"]
    assert len(plan.ops[1].segments) == 3
    for op in plan.ops:
        if op.segments:
            assert plan.buffers[op.input].kind == kind_of("Q8_0")
    config, _ = checkpoints.make(architecture, num_hidden_layers=2)
    assert sum(op.fused for op in plan.ops) + 1 == len(build_graph(config).nodes)  # and the embedding


def test_a_plan_can_be_read(engine_for: EngineFor) -> None:
    _, engine = engine_for("gemma3_text", num_hidden_layers=6)
    text = describe(engine, tensors=True)
    assert "6 layers" in text
    assert "vocabulary 320" in text
    assert "layers like this one" in text
    for entry in engine.header.tensors:
        assert entry.name in text
    assert max(len(line) for line in describe(engine).splitlines()) < 250


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hidden_size": 72, "num_attention_heads": 2}, "72"),
        ({"intermediate_size": 40}, "40"),
        ({"head_dim": 24}, "head"),
        ({"head_dim": 544}, "head_dim 544"),
    ],
)
def test_sizes_that_do_not_fill_groups_are_refused(tmp_path: Path, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(TricornError, match=words):
        build(checkpoint("llama", "F32", **overrides), tmp_path / "x.tricorn")
    assert list(tmp_path.iterdir()) == []


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    source = checkpoint("llama", "F32")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = dict(source.tensors)
    whole = tensors.pop(name)
    with pytest.raises(TricornError, match=rf"lacks the tensor '{name}'"):
        build(replace(source, tensors=tensors), tmp_path / "x.tricorn")
    wrong = from_float32(whole.dequantize().T.copy())
    with pytest.raises(TricornError, match=rf"'{name}' has the shape"):
        build(replace(source, tensors={**tensors, name: wrong}), tmp_path / "x.tricorn")
    with pytest.raises(TricornError, match="strange"):
        build(replace(source, tensors={**source.tensors, "model.strange": whole}), tmp_path / "x.tricorn")
    with pytest.raises(TricornError, match="mamba"):
        build(replace(source, config={**source.config, "model_type": "mamba"}), tmp_path / "x.tricorn")
    assert list(tmp_path.iterdir()) == []


# Faults of files


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    source = checkpoint("llama", "F32", num_hidden_layers=1)
    return compiled(source, tmp_path_factory.mktemp("whole")).path.read_bytes()


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(TricornError) as caught:
        EngineFile.open(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def test_truncated_files(tmp_path: Path, whole_file: bytes) -> None:
    random = np.random.default_rng(0)
    lengths = [0, 1, 7, 8, 55, 63, 64, 65, 4095, 4096, len(whole_file) - 1]
    lengths += random.integers(0, len(whole_file), 60).tolist()
    for length in lengths:
        message = refusal(tmp_path / "x.tricorn", whole_file[:length])
        assert ("not an engine file" if length < 64 else "truncated") in message
    assert "bytes" in refusal(tmp_path / "x.tricorn", whole_file + b"\0")


def test_one_flipped_bit_anywhere(tmp_path: Path, whole_file: bytes) -> None:
    """All of the preamble, samples of the header and of the body. (The zeros between the two mean nothing.)"""
    _, _, _, header_bytes, body, *_ = PREAMBLE.unpack(whole_file[:56])
    random = np.random.default_rng(1)
    places = [*range(64), 64, 64 + header_bytes - 1, body, len(whole_file) - 1]
    places += random.integers(64, 64 + header_bytes, 60).tolist()
    places += random.integers(body, len(whole_file), 60).tolist()
    for place in places:
        damaged = bytearray(whole_file)
        damaged[place] ^= 1 << int(random.integers(0, 8))
        message = refusal(tmp_path / "x.tricorn", bytes(damaged))
        assert "corrupt" in message or (place < 8 and "not an engine file" in message)


def sealed(whole_file: bytes, **changes: int) -> bytes:
    """The file with other numbers in its preamble, and a checksum that fits them."""
    names = ["magic", "version", "zero", "header_bytes", "body", "whole", "header_sum", "body_sum"]
    fields = dict(zip(names, PREAMBLE.unpack(whole_file[:56]), strict=True)) | changes
    start = PREAMBLE.pack(*fields.values())
    return start + xxhash.xxh3_64_intdigest(start).to_bytes(8, "little") + whole_file[64:]


def test_other_versions_and_impossible_sizes(tmp_path: Path, whole_file: bytes) -> None:
    path = tmp_path / "x.tricorn"
    assert "version 99" in refusal(path, sealed(whole_file, version=99))
    for changes in ({"header_bytes": 2**63}, {"body": 4097}, {"body": 2**40}, {"body": 0}, {"header_bytes": 2**28 + 1}):
        assert "impossible sizes" in refusal(path, sealed(whole_file, **changes))
    assert "truncated" in refusal(path, sealed(whole_file, whole=2**40))


def test_a_header_that_is_no_header(tmp_path: Path, whole_file: bytes) -> None:
    for raw in (b"{}", b"[1]", b"\xff\xfe", b'{"name": 5}'):
        content = bytearray(whole_file)
        content[64 : 64 + len(raw)] = raw
        changes = {"header_bytes": len(raw), "header_sum": xxhash.xxh3_64_intdigest(raw)}
        assert "unreadable header" in refusal(tmp_path / "x.tricorn", sealed(bytes(content), **changes))


@pytest.mark.parametrize("content", [b"GGUF" + bytes(100), b"\x7fELF" + bytes(100), b"{}", bytes(5000)])
def test_foreign_files(tmp_path: Path, content: bytes) -> None:
    assert "not an engine file" in refusal(tmp_path / "x.tricorn", content)


def test_no_file_or_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.tricorn", tmp_path):
        with pytest.raises(TricornError, match="cannot open"):
            EngineFile.open(path)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    source = checkpoint("llama", "F32", num_hidden_layers=1)
    file = tmp_path / "file"
    file.write_text("in the way")
    places = [file / "x.tricorn", file / "deeper" / "x.tricorn", tmp_path / ("n" * 250 + ".tricorn")]
    for path in (*places, Path("/proc/tricorn/x.tricorn")):
        with pytest.raises(TricornError, match="cannot write the engine file") as caught:
            build(source, path)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_text() == "in the way"


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Forbids this process files above a size: writes then fail as on a full disk, pytest's own to a file too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 100, 5000, 200_000])
def test_a_full_disk(tmp_path: Path, size: int) -> None:
    """What stood there before stands there still."""
    path = tmp_path / "x.tricorn"
    path.write_bytes(b"the old one")
    source = checkpoint("llama", "F32", num_hidden_layers=1)
    with small_files(size), pytest.raises(TricornError, match=r"cannot write the engine file.*free some room"):
        build(source, path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"the old one"


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(checkpoint("llama", "F32", num_hidden_layers=1), tmp_path / "x.tricorn")
    assert list(tmp_path.iterdir()) == []


# Instruction sets


def test_the_instruction_set_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tricorn import _native

    for isa in _native.instruction_sets():
        monkeypatch.setenv("TRICORN_ISA", isa)
        engine = compiled(checkpoint("llama", "F32", num_hidden_layers=1), tmp_path)
        assert engine.header.isa == isa
    monkeypatch.setenv("TRICORN_ISA", "sse9")
    with pytest.raises(TricornError, match=r"TRICORN_ISA=sse9: this processor runs .*portable"):
        compiler.instruction_set()


def test_a_file_for_another_processor(engine_for: EngineFor, monkeypatch: pytest.MonkeyPatch) -> None:
    from tricorn import _native

    _, engine = engine_for("llama")
    best = _native.instruction_sets()[0]
    monkeypatch.setattr(_native, "instruction_sets", lambda: ["portable"])
    if best != "portable":
        with pytest.raises(TricornError, match=rf"compiled for {best}, this processor runs portable; build it again"):
            NativeExecutor(engine, threads=1, pages=2)
    NativeExecutor(for_isa(engine, "portable"), threads=1, pages=2).close()


def test_the_cache_of_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built once; another source under the same name, or another instruction set, is another file."""
    monkeypatch.setenv("TRICORN_CACHE", str(tmp_path / "cache"))
    folder = checkpoints.write_folder(tmp_path / "model", "llama", seed=1)
    first = compiler.ensure(str(folder), progress=False)
    written = first.stat().st_mtime_ns
    assert compiler.ensure(str(folder), progress=False) == first
    assert first.stat().st_mtime_ns == written
    assert compiler.ensure(str(first), progress=False) == first
    checkpoints.write_folder(folder, "llama", seed=2)
    second = compiler.ensure(str(folder), progress=False)
    assert second != first
    monkeypatch.setenv("TRICORN_ISA", "portable")
    assert compiler.ensure(str(folder), progress=False) not in (first, second)
