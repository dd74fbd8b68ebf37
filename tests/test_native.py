"""The native executor against the reference: every weight type, architecture, instruction set, shape of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("tricorn._native", reason="the native extension is not built: run make setup")

from engines import ARCHITECTURES, FLOATS, INTEGERS, TYPES, checkpoint, compiled, for_isa, reference, rounded_bf16
from tricorn import _native
from tricorn.compiler import EngineFile
from tricorn.request import TricornError
from tricorn.runtime import reference as oracle
from tricorn.runtime.native import NativeExecutor, page_bytes
from tricorn.runtime.sampling import scoring
from tricorn.runtime.step import PAGE, Step

F32 = NDArray[np.float32]
EngineFor = Callable[..., tuple[Any, EngineFile]]
ISAS: list[str] = _native.instruction_sets()


def ids_of(count: int, seed: int = 0, vocab: int = 320) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, vocab, count).tolist()
    return ids


def native(engine: EngineFile, **options: Any) -> NativeExecutor:
    return NativeExecutor(engine, **{"threads": 2, "pages": 8, "kv_type": "f32", **options})


def forward(engine: EngineFile, ids: list[int], **options: Any) -> F32:
    executor = native(engine, **{"pages": -(-len(ids) // PAGE), **options})
    logits = executor.forward(ids)
    executor.close()
    return logits


def error(got: F32, want: F32) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


# Weights of every type, in every architecture


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["F32", "F16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float_weights(engine_for: EngineFor, architecture: str, kind: str, isa: str) -> None:
    source, engine = engine_for(architecture, kind)
    assert error(forward(for_isa(engine, isa), ids_of(70)), reference(source).forward(ids_of(70))) < 2e-5


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rounded_activations_stay_near(engine_for: EngineFor, architecture: str, isa: str) -> None:
    """Integer weights meet 8-bit activations, BF16 weights BF16 ones: a few percent on a random model."""
    for kinds, limit in ((("Q4_K", "Q8_0", "Q6_K", "Q5_0"), 0.1), ("BF16", 0.03)):
        source, engine = engine_for(architecture, kinds)
        assert error(forward(for_isa(engine, isa), ids_of(40)), reference(source).forward(ids_of(40))) < limit


def rounded_q8(x: F32) -> F32:
    """To integers with one scale per 32 values, and back. The second largest magnitude is 127 steps, or less when the
    largest would then exceed five times that."""
    groups = x.reshape(len(x), -1, 32)
    magnitudes = np.sort(np.abs(groups), axis=-1)
    scale = np.maximum(magnitudes[..., -2:-1] / np.float32(127), magnitudes[..., -1:] / np.float32(635))
    inverse = np.float32(1) / np.maximum(scale, np.float32(1e-30))
    return (np.rint(groups * inverse) * scale).reshape(x.shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [*INTEGERS, "BF16"])
def test_the_only_loss_is_the_rounding_of_activations(
    engine_for: EngineFor, monkeypatch: pytest.MonkeyPatch, kind: str, isa: str
) -> None:
    """With its activations rounded likewise, the reference gives the same logits to float accuracy, save in rows where
    a value lies so near the middle of two integers that it falls to the other side."""
    source, engine = engine_for("llama", kind, seed=1, num_hidden_layers=1)
    rounded = rounded_bf16 if kind == "BF16" else rounded_q8
    plain = oracle.OPERATIONS["linear"]
    monkeypatch.setitem(oracle.OPERATIONS, "linear", lambda call, x: plain(call, rounded(x)))
    executor, expected = native(for_isa(engine, isa)), reference(source)
    errors = []
    for first in range(0, 320, 20):
        ids = [first, (first * 7 + 3) % 320]
        errors += [error(*pair) for pair in zip(executor.forward(ids), expected.forward(ids), strict=True)]
    assert np.median(errors) < 1e-5, "more than the rounding differs"
    assert max(errors) < 0.05
    executor.close()


@pytest.mark.parametrize("isa", ISAS)
def test_a_model_of_many_types(engine_for: EngineFor, isa: str) -> None:
    """Products side by side whose weights want different activations."""
    source, engine = engine_for("qwen2", ("Q8_0", "F16", "BF16", "Q5_1", "F32"), num_hidden_layers=4)
    kinds = {buffer.kind for buffer in engine.plan.buffers}
    assert kinds == {"rows", "q8", "bf16", "f32"}
    assert error(forward(for_isa(engine, isa), ids_of(40)), reference(source).forward(ids_of(40))) < 0.1


@pytest.mark.parametrize("kind", TYPES)
def test_a_vocabulary_that_fills_no_block(engine_for: EngineFor, kind: str) -> None:
    """Rows beyond the last id are padding: never read, never chosen."""
    source, engine = engine_for("llama", kind, vocab_size=307, num_hidden_layers=1, tie_word_embeddings=True)
    logits = forward(engine, [306, 5, 306])
    assert logits.shape == (3, 307)
    assert error(logits, reference(source).forward([306, 5, 306])) < (1e-5 if kind in FLOATS[:2] else 0.05)


# Attention


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_widths_of_heads(engine_for: EngineFor, architecture: str, head_dim: int, isa: str) -> None:
    source, engine = engine_for(architecture, "F32", head_dim=head_dim, num_hidden_layers=2)
    assert error(forward(for_isa(engine, isa), ids_of(45)), reference(source).forward(ids_of(45))) < 2e-5


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [
        (1, 1),
        (3, 3),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 1),
        (6, 1),
        (7, 1),
        (8, 1),
        (14, 2),
        (9, 1),
        (12, 1),
        (17, 1),
        (20, 2),
    ],
)
def test_groups_of_query_heads(engine_for: EngineFor, heads: int, kv_heads: int) -> None:
    """One to eight query heads to a key head are worked on side by side; more take several turns."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": 2}
    source, engine = engine_for("qwen2", "F32", **shape)
    for count in (1, 7, 37):
        want = reference(source).forward(ids_of(count))
        for isa in ISAS:
            assert error(forward(for_isa(engine, isa), ids_of(count)), want) < 2e-5


def test_heads_too_wide_for_the_kernels_are_refused(tmp_path: Any) -> None:
    with pytest.raises(TricornError, match=r"head_dim.*512"):
        compiled(checkpoint("llama", head_dim=544, num_attention_heads=1, num_key_value_heads=1), tmp_path)


LONG = 1100


@pytest.mark.parametrize(("kv_type", "limit"), [("f32", 3e-5), ("f16", 1e-2), ("bf16", 8e-2)])
@pytest.mark.parametrize("isa", ISAS)
def test_long_contexts(engine_for: EngineFor, isa: str, kv_type: str, limit: float) -> None:
    """Keys are summed in chunks of 512; 1,100 positions cross two seams."""
    source, engine = engine_for("llama", "F32", num_hidden_layers=2, max_position_embeddings=2048)
    got = forward(for_isa(engine, isa), ids_of(LONG), kv_type=kv_type)
    assert error(got, long_reference(source)) < limit


_long: dict[str, F32] = {}


def long_reference(source: Any) -> F32:
    key = repr(source.config)
    if key not in _long:
        _long[key] = reference(source).forward(ids_of(LONG))
    return _long[key]


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 100, 511, 512, 513, 600])
def test_windows(engine_for: EngineFor, window: int) -> None:
    """A window may begin in an earlier chunk, in the middle of a page, or be a single token."""
    source, engine = engine_for(
        "mistral", "F32", num_hidden_layers=1, max_position_embeddings=2048, sliding_window=window
    )
    assert error(forward(engine, ids_of(LONG), max_rows=512), long_reference(source)) < 3e-5


def test_soft_caps_over_a_long_context(engine_for: EngineFor) -> None:
    source, engine = engine_for("gemma2", "F32", num_hidden_layers=2, max_position_embeddings=2048, sliding_window=300)
    assert error(forward(engine, ids_of(LONG)), long_reference(source)) < 3e-5


def test_the_cache_takes_what_it_says(engine_for: EngineFor) -> None:
    _, engine = engine_for("llama")
    assert page_bytes(engine, "f32") == 2 * page_bytes(engine, "f16") == 2 * page_bytes(engine, "bf16")
    executor = native(engine, kv_type="f16")
    assert executor._native.page_bytes == page_bytes(engine, "f16")
    executor.close()


def test_values_beyond_float16_stay_finite(engine_for: EngineFor, tmp_path: Any) -> None:
    """Keys and values too large for float16 are cut to its largest."""
    source = checkpoint("llama", "F32", num_hidden_layers=1)
    loud = scaled(source, "model.layers.0.self_attn.v_proj.weight", 1e6)
    executor = native(compiled(loud, tmp_path), kv_type="f16")
    assert np.isfinite(executor.forward(ids_of(20))).all()
    executor.close()


def scaled(source: Any, name: str, factor: float, rows: slice = slice(None)) -> Any:
    """The checkpoint with some rows of an F32 tensor multiplied."""
    values = source.tensors[name].dequantize()
    values[rows] *= np.float32(factor)
    return replace(source, tensors={**source.tensors, name: replace(source.tensors[name], data=values.view(np.uint8))})


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16"])
def test_numbers_that_break_harm_nobody_else(tmp_path: Any, kv_type: str) -> None:
    """A token whose embedding is infinite leaves pages full of what is no number; their next owner is safe."""
    broken = scaled(checkpoint("llama", "F32"), "model.embed_tokens.weight", np.inf, slice(7, 8))
    for isa in ISAS:
        executor = native(for_isa(compiled(broken, tmp_path), isa), kv_type=kv_type)
        clean = executor.forward([1, 2, 3])
        assert not np.isfinite(executor.forward([7] * 100)).any()
        np.testing.assert_array_equal(executor.forward([1, 2, 3]), clean)
        executor.close()


# Steps: page tables, copies, ids not known yet


def two_sequences(seed: int = 3) -> list[Step]:
    """Three steps of two sequences over scattered pages. The second step continues each with the id the first sampled;
    the third begins another sequence on a copy of a page, as a match that ends inside a page does."""
    a, b = ids_of(21, seed), ids_of(33, seed + 1)
    first = Step(
        token_ids=np.array(a + b, np.int32),
        positions=np.array([*range(21), *range(33)], np.int32),
        row_start=np.array([0, 21, 54], np.int32),
        page_start=np.array([0, 2, 5], np.int32),
        pages=np.array([6, 1, 4, 0, 7], np.int32),
        sampling=scoring(np.array([20, 53]), alternatives=5),
    )
    second = Step(
        token_ids=np.array([-2, -1], np.int32),
        positions=np.array([33, 21], np.int32),
        row_start=np.array([0, 1, 2], np.int32),
        page_start=np.array([0, 3, 5], np.int32),
        pages=np.array([4, 0, 7, 6, 1], np.int32),
        sampling=scoring(np.array([0, 1]), alternatives=5),
    )
    third = Step(
        token_ids=np.array([*a[19:21], 9, -1], np.int32),
        positions=np.array([19, 20, 21, 34], np.int32),
        row_start=np.array([0, 3, 4], np.int32),
        page_start=np.array([0, 2, 5], np.int32),
        pages=np.array([6, 3, 4, 0, 7], np.int32),
        copies=np.array([[1, 3]], np.int32),
        sampling=scoring(np.array([0, 1, 2, 3]), alternatives=5),
    )
    return [first, second, third]


@pytest.mark.parametrize("isa", ISAS)
def test_steps_equal_those_of_the_reference(engine_for: EngineFor, isa: str) -> None:
    source, engine = engine_for("gemma3_text", "F32")
    executor, expected = native(for_isa(engine, isa)), reference(source, pages=8)
    handles = [executor.submit(step) for step in two_sequences()]  # all queued before the first is done
    for step, handle in zip(two_sequences(), handles, strict=True):
        got, want = handle.result(), expected.submit(step).result()
        np.testing.assert_array_equal(got.ids, want.ids)
        np.testing.assert_array_equal(got.rank, want.rank)
        np.testing.assert_array_equal(got.top_ids, want.top_ids)
        np.testing.assert_allclose(got.logprob, want.logprob, atol=1e-4)
        np.testing.assert_allclose(got.top_logprobs, want.top_logprobs, atol=1e-4)
    executor.close()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_hidden_states_equal_those_of_the_reference(engine_for: EngineFor, isa: str, model: str) -> None:
    """Of any rows, in any order, whether they are sampled or not; and they change nothing else."""
    source, engine = engine_for(model, "F32")
    executor, expected = native(for_isa(engine, isa)), reference(source, pages=8)
    (step,) = two_sequences()[:1]
    plain = executor.submit(step).result()
    asked = replace(step, hidden=np.array([53, 0, 20, *range(30, 40)], np.int32))
    got, want = executor.submit(asked).result(), expected.submit(asked).result()
    np.testing.assert_array_equal(got.logprob, plain.logprob)
    assert plain.hidden.shape == (0, source.config["hidden_size"])
    assert got.hidden.shape == want.hidden.shape == (13, source.config["hidden_size"])
    np.testing.assert_allclose(got.hidden, want.hidden, atol=2e-3)
    unsampled = executor.submit(replace(asked, sampling=scoring(np.zeros(0, np.int32)))).result()
    np.testing.assert_array_equal(unsampled.hidden, got.hidden)
    executor.close()


def changed(step: Step, **fields: Any) -> Step:
    made = {name: np.array(value, getattr(step, name).dtype) for name, value in fields.items()}
    return replace(step, **made)


def with_sampling(step: Step, **fields: Any) -> Step:
    made = {name: np.array(value, getattr(step.sampling, name).dtype) for name, value in fields.items()}
    return replace(step, sampling=replace(step.sampling, **made))


FIRST = two_sequences()[0]
BROKEN: dict[str, Step] = {
    "position beyond its page table": changed(FIRST, positions=[*range(20), 32, *range(33)]),
    "negative position": changed(FIRST, positions=[-1, *range(1, 21), *range(33)]),
    "too few positions": changed(FIRST, positions=range(53)),
    "page id too large": changed(FIRST, pages=[6, 1, 4, 0, 8]),
    "negative page id": changed(FIRST, pages=[6, -1, 4, 0, 7]),
    "fewer pages than the table says": changed(FIRST, pages=[6, 1, 4, 0]),
    "page starts that go back": changed(FIRST, page_start=[0, 6, 5]),
    "row starts that go back": changed(FIRST, row_start=[0, 55, 54]),
    "row starts that end early": changed(FIRST, row_start=[0, 21, 53]),
    "an empty sequence": changed(FIRST, row_start=[0, 0, 54]),
    "no tokens": changed(FIRST, token_ids=[], positions=[]),
    "token id too large": changed(FIRST, token_ids=[320, *range(53)]),
    "a reference to no row": changed(FIRST, token_ids=[-1, *range(53)]),
    "copy to a page there is not": changed(FIRST, copies=[[1, 8]]),
    "copy from a negative page": changed(FIRST, copies=[[-1, 3]]),
    "sampled row too large": with_sampling(FIRST, rows=[20, 54]),
    "negative sampled row": with_sampling(FIRST, rows=[-1, 53]),
    "target too large": with_sampling(FIRST, target=[0, 320]),
    "a column of the wrong length": with_sampling(FIRST, temperature=[0]),
    "a seed too few": with_sampling(FIRST, seed=[0]),
    "biased id too large": with_sampling(FIRST, bias_start=[0, 1, 1], bias_ids=[320], bias_values=[1]),
    "negative biased id": with_sampling(FIRST, bias_start=[0, 1, 1], bias_ids=[-1], bias_values=[1]),
    "bias without values": with_sampling(FIRST, bias_start=[0, 1, 1], bias_ids=[1]),
    "bias starts that go back": with_sampling(FIRST, bias_start=[0, 2, 1], bias_ids=[1], bias_values=[1]),
    "id in history too large": with_sampling(FIRST, history_start=[0, 1, 1], history_ids=[320]),
    "history that refers to no row": with_sampling(FIRST, history_start=[0, 1, 1], history_ids=[-1]),
    "more alternatives than ids": with_sampling(FIRST, logprobs=[0, 321]),
    "a mask there is not": with_sampling(FIRST, mask_index=[0, -1]),
    "a mask too narrow": with_sampling(FIRST, mask_index=[0, 0], mask=np.zeros((1, 9))),
    "too many rows": replace(FIRST, sampling=scoring(np.zeros(65, np.int32))),
    "too many tokens": changed(FIRST, token_ids=[0] * 600, positions=[0] * 600, row_start=[0, 300, 600]),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_an_invalid_step_is_refused_and_nothing_runs(engine_for: EngineFor, fault: str) -> None:
    _, engine = engine_for("llama")
    executor = native(engine)
    with pytest.raises(TricornError, match="invalid step"):
        executor.submit(BROKEN[fault])
    assert executor.operation_seconds() == [0.0] * len(executor.operation_seconds())
    assert executor.submit(FIRST).result().ids.shape == (2,)
    executor.close()


def test_a_reference_beyond_the_last_step_is_refused(engine_for: EngineFor) -> None:
    _, engine = engine_for("llama")
    executor = native(engine)
    first, second, _ = two_sequences()
    executor.submit(first).result()
    with pytest.raises(TricornError, match="token id"):
        executor.submit(changed(second, token_ids=[-3, -1]))
    executor.close()


def test_bits_do_not_depend_on_threads_or_company(engine_for: EngineFor) -> None:
    """The same rows in one step and in many, with one thread and three."""
    _, engine = engine_for("gemma3_text", ("Q4_K", "Q8_0", "Q6_K"))
    for isa in ISAS:
        ids = ids_of(100)
        whole = forward(for_isa(engine, isa), ids, threads=1, max_rows=512)
        for chunk, threads in ((1, 2), (7, 3), (16, 1), (33, 2)):
            parts = forward(for_isa(engine, isa), ids, threads=threads, max_rows=chunk)
            np.testing.assert_array_equal(parts.view(np.uint32), whole.view(np.uint32))


def test_memory_there_is_not(engine_for: EngineFor) -> None:
    _, engine = engine_for("llama")
    with pytest.raises(TricornError, match="does not fit"):
        native(engine, pages=2**30)
    with pytest.raises(TricornError, match="avx10"):
        native(for_isa(engine, "avx10"))


# Pages in and out


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16"])
def test_pages_written_back_continue_bit_for_bit(engine_for: EngineFor, kv_type: str) -> None:
    """What is read of some pages of one executor and written to others of another takes their place exactly."""
    _, engine = engine_for("llama", "F32")
    one, other = native(engine, kv_type=kv_type), native(engine, kv_type=kv_type)
    for step in two_sequences()[:2]:
        one.submit(step).result()
    moved = {1: 5, 4: 2, 0: 3, 7: 6, 6: 4, 3: 0}
    for page, target in moved.items():
        data = one.read_page(page)
        assert data.dtype == np.uint8
        assert data.shape == (one.page_bytes,) == (page_bytes(engine, kv_type),)
        assert data.any() == (page != 3)
        other.write_page(target, data)
        np.testing.assert_array_equal(other.read_page(target), data)
    last = two_sequences()[2]
    known = changed(last, token_ids=[*last.token_ids[:3], 5])
    want = one.submit(known).result()
    got = other.submit(
        changed(known, pages=[moved[p] for p in known.pages.tolist()], copies=[[moved[1], moved[3]]])
    ).result()
    for name in ("ids", "logprob", "rank", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    one.close()
    other.close()


def test_pages_that_do_not_exist_are_refused(engine_for: EngineFor) -> None:
    executor = native(engine_for("llama")[1])
    data = executor.read_page(0)
    for page in (-1, 8):
        with pytest.raises(TricornError, match="no such page"):
            executor.read_page(page)
        with pytest.raises(TricornError, match="no such page"):
            executor.write_page(page, data)
    with pytest.raises(TricornError, match=f"a page is {len(data)} bytes, not {len(data) - 1}"):
        executor.write_page(0, data[1:])
    executor.close()


def test_pages_are_copied_while_steps_run(engine_for: EngineFor) -> None:
    executor = native(engine_for("llama")[1])
    random = np.random.default_rng(0)
    kept = {page: random.integers(0, 120, executor.page_bytes, np.uint8) for page in (2, 3, 5)}
    want = executor.submit(FIRST).result().logprob
    for _ in range(20):
        handle = executor.submit(FIRST)
        for page, data in kept.items():
            executor.write_page(page, data)
            np.testing.assert_array_equal(executor.read_page(page), data)
        np.testing.assert_array_equal(handle.result().logprob, want)
    executor.close()
