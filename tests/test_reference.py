"""The reference executor against transformers' logits (stored), and its paging against itself."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from checkpoints import graph_weights, make
from parity.cases import CASES, ROWS, SMALL_GOLDENS, TOLERANCE, Case
from tricorn.models import build_graph
from tricorn.request import TricornError
from tricorn.runtime.reference import ReferenceExecutor
from tricorn.runtime.sampling import scoring
from tricorn.runtime.step import PAGE, Step

F32 = NDArray[np.float32]


def executor_of(case: Case, pages: int = 0, **overrides: Any) -> ReferenceExecutor:
    """The case's model; `overrides` change its graph without changing its weights."""
    config, weights = make(case.architecture, case.seed, **case.overrides)
    graph = build_graph({key: value for key, value in {**config, **overrides}.items() if value is not ...})
    return ReferenceExecutor(graph, graph_weights(config, weights), pages=pages)


def error_of(case: Case, golden: F32, **overrides: Any) -> float:
    ours = executor_of(case, **overrides).forward(case.ids())[list(ROWS)]
    return float(np.abs(ours - golden).max() / np.abs(golden).max())


@pytest.fixture(scope="module")
def goldens() -> dict[str, Any]:
    return dict(np.load(SMALL_GOLDENS))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, goldens: dict[str, Any]) -> None:
    case = CASES[name]
    _, weights = make(case.architecture, case.seed, **case.overrides)
    checksum = zlib.crc32(b"".join(tensor.tobytes() for tensor in weights.values()))
    assert checksum == goldens[f"{name}/checksum"], "other weights than the golden's: compare.py --write renews it"
    assert error_of(case, goldens[f"{name}/logits"]) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 21}),
        ("qwen2-windows", {"use_sliding_window": False}),
        ("llama-linear", {"rope_scaling": None}),
        ("llama-llama3", {"rope_scaling": None}),
        ("llama-yarn", {"rope_scaling": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 32}),
        ("gemma3", {"sliding_window_pattern": 2}),
        ("gemma3", {"rope_local_base_freq": 1e6}),
        ("gemma3-linear", {"rope_scaling": None}),
    ],
)
def test_the_goldens_would_notice(name: str, overrides: dict[str, Any], goldens: dict[str, Any]) -> None:
    assert error_of(CASES[name], goldens[f"{name}/logits"], **overrides) > 50 * TOLERANCE


def step_of(rows: list[tuple[list[int], int, list[int]]], copies: list[tuple[int, int]] | None = None) -> Step:
    """One step from (ids, first position, page table) per sequence; every row is sampled, greedily, with 3 logprobs."""
    lengths = [len(ids) for ids, _, _ in rows]
    tables = [len(pages) for _, _, pages in rows]
    return Step(
        token_ids=np.array([i for ids, _, _ in rows for i in ids], np.int32),
        positions=np.concatenate([np.arange(first, first + len(ids), dtype=np.int32) for ids, first, _ in rows]),
        row_start=np.cumsum([0, *lengths]).astype(np.int32),
        page_start=np.cumsum([0, *tables]).astype(np.int32),
        pages=np.array([page for _, _, pages in rows for page in pages], np.int32),
        sampling=scoring(np.arange(sum(lengths)), alternatives=3),
        copies=np.array(copies or [], np.int32).reshape(-1, 2),
    )


def needed(tokens: int) -> int:
    return -(-tokens // PAGE)


@pytest.mark.parametrize("case_name", ["llama-llama3", "gemma2", "gemma3-linear", "qwen3-windows"])
@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 64])
def test_chunks_pages_and_neighbours_change_no_bit(case_name: str, chunk: int) -> None:
    case = CASES[case_name]
    executor = executor_of(case, pages=24)
    ids, neighbour = case.ids(), case.ids()[::-1]
    table = [int(page) for page in np.random.default_rng(3).permutation(24)]
    ours, theirs = table[:5], table[5:10]
    whole = executor.submit(step_of([(ids, 0, table[10:15])])).result()
    np.testing.assert_array_equal(whole.ids, executor.forward(ids).argmax(axis=-1))
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        rows = [(part, start, ours[: needed(start + len(part))])]
        if start // chunk % 2:
            rows.insert(0, (neighbour[:7], 0, theirs[:1]))
        skip = sum(len(r[0]) for r in rows) - len(part)
        result = executor.submit(step_of(rows)).result()
        for name in ("ids", "logprob", "top_ids", "top_logprobs"):
            expected = getattr(whole, name)[start : start + len(part)]
            np.testing.assert_array_equal(getattr(result, name)[skip:], expected, err_msg=name)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 33])
def test_a_row_has_the_same_bits_in_every_batch(rows: int) -> None:
    case = CASES["qwen2"]
    executor = executor_of(case, pages=40)
    alone = executor.submit(step_of([([5, 6, 7], 0, [0])])).result()
    crowd = [([i, 9, 8], 0, [i]) for i in range(1, rows)]
    crowd.insert(rows // 2, ([5, 6, 7], 0, [0]))
    together = executor.submit(step_of(crowd)).result()
    at = slice(3 * (rows // 2), 3 * (rows // 2) + 3)
    np.testing.assert_array_equal(together.logprob[at], alone.logprob)
    np.testing.assert_array_equal(together.top_logprobs[at], alone.top_logprobs)


def test_copied_pages_continue_as_their_source() -> None:
    case = CASES["gemma3"]
    ids = case.ids()
    executor = executor_of(case, pages=8)
    executor.submit(step_of([(ids[:40], 0, [4, 2, 0])])).result()
    expected = executor.submit(step_of([(ids[40:44], 40, [4, 2, 0])])).result()
    copied = executor.submit(step_of([(ids[40:44], 40, [4, 2, 7])], copies=[(0, 7)])).result()
    np.testing.assert_array_equal(copied.logprob, expected.logprob)
    np.testing.assert_array_equal(copied.ids, expected.ids)


def test_ids_of_the_step_before_can_be_named() -> None:
    executor = executor_of(CASES["llama"], pages=8)
    first = executor.submit(step_of([([1, 2, 3], 0, [0]), ([4], 0, [1])])).result()
    named = executor.submit(step_of([([-1 - 2], 3, [0]), ([-1 - 3], 1, [1])])).result()
    again = executor_of(CASES["llama"], pages=8)
    again.submit(step_of([([1, 2, 3], 0, [0]), ([4], 0, [1])])).result()
    spelled = again.submit(step_of([([int(first.ids[2])], 3, [0]), ([int(first.ids[3])], 1, [1])])).result()
    np.testing.assert_array_equal(named.ids, spelled.ids)
    np.testing.assert_array_equal(named.logprob, spelled.logprob)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([([320], 0, [0])], "token"),
        ([([-1], 0, [0])], "row 0"),
        ([([1], 0, [8])], "page"),
        ([([1], 0, [-1])], "page"),
        ([([1] * 513, 0, list(range(8)) * 5)], "limits"),
    ],
)
def test_a_bad_step_fails_alone(rows: list[tuple[list[int], int, list[int]]], named: str) -> None:
    executor = executor_of(CASES["llama"], pages=8)
    handle = executor.submit(step_of(rows))
    with pytest.raises(TricornError, match=named):
        handle.result()
    assert len(executor.submit(step_of([([1, 2], 0, [0])])).result().ids) == 2


def test_pages_written_back_continue_bit_for_bit() -> None:
    """What is read of an executor's pages takes their place in another, at other places."""
    ids = list(range(3, 43))
    one, other = (executor_of(CASES["gemma2"], pages=8) for _ in range(2))
    prefill(one, ids, [6, 1, 4])
    for page, target in zip([6, 1, 4], [2, 7, 0], strict=True):
        data = one.read_page(page)
        assert data.dtype == np.uint8
        assert data.shape == (one.page_bytes,)
        other.write_page(target, data)
        np.testing.assert_array_equal(other.read_page(target), data)
    want, got = continued(one, len(ids), [6, 1, 4]), continued(other, len(ids), [2, 7, 0])
    np.testing.assert_array_equal(want, got)
    assert not np.array_equal(want, continued(other, len(ids), [7, 2, 0]))
    with pytest.raises(TricornError, match=f"a page is {len(data)} bytes, not 3"):
        other.write_page(0, data[:3])
    with pytest.raises(TricornError, match=r"a page outside 0 \.\. 7"):
        other.read_page(8)


def prefill(executor: ReferenceExecutor, ids: list[int], pages: list[int]) -> None:
    executor.submit(one_sequence(ids, 0, pages)).result()


def continued(executor: ReferenceExecutor, position: int, pages: list[int]) -> F32:
    """Logprobs of what follows one more token."""
    return executor.submit(one_sequence([5], position, pages)).result().top_logprobs


def one_sequence(ids: list[int], position: int, pages: list[int]) -> Step:
    return Step(
        token_ids=np.array(ids, np.int32),
        positions=np.arange(position, position + len(ids), dtype=np.int32),
        row_start=np.array([0, len(ids)], np.int32),
        page_start=np.array([0, len(pages)], np.int32),
        pages=np.array(pages, np.int32),
        sampling=scoring(np.array([len(ids) - 1]), alternatives=5),
    )
