"""The native sampler against its twin in NumPy, on the logits it really had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tricorn._native", reason="the native extension is not built: run make setup")

from engines import checkpoint, compiled, for_isa
from tricorn import _native
from tricorn.runtime.native import NativeExecutor
from tricorn.runtime.random import uniform
from tricorn.runtime.sampling import F64, choose, kept, penalized, sample, scoring
from tricorn.runtime.step import F32, PAGE, Sampling, Step, StepResult

ROWS = 64
VOCAB = 1003
Run = Callable[[Sampling], tuple[StepResult, F32]]


@pytest.fixture(scope="module", params=_native.instruction_sets())
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Samples 64 rows of a model whose ids come in pairs of equal logits here and there; gives the logits too."""
    source = checkpoint("llama", "F32", num_hidden_layers=1, vocab_size=VOCAB)
    head = source.tensors["lm_head.weight"]
    twins = head.data.copy()
    twins[3::9] = twins[2::9][: len(twins[3::9])]
    tensors = {**source.tensors, "lm_head.weight": replace(head, data=twins)}
    engine = compiled(replace(source, tensors=tensors), tmp_path_factory.mktemp("engine"))
    executor = NativeExecutor(for_isa(engine, request.param), threads=2, pages=ROWS // PAGE, kv_type="f32")
    ids = np.random.default_rng(8).integers(0, VOCAB, ROWS)

    def sampled(sampling: Sampling) -> tuple[StepResult, F32]:
        step = Step(
            token_ids=ids.astype(np.int32),
            positions=np.arange(ROWS, dtype=np.int32),
            row_start=np.array([0, ROWS], np.int32),
            page_start=np.array([0, ROWS // PAGE], np.int32),
            pages=np.arange(ROWS // PAGE, dtype=np.int32),
            sampling=sampling,
        )
        handle = executor.submit(step)
        if sampling.masks_follow:
            handle.put_masks(sampling.mask_index, sampling.mask)
        result = handle.result()
        return result, np.asarray(executor._native.last_logits())

    yield sampled
    executor.close()


def settings(**fields: Any) -> Sampling:
    """Sampling of all rows; a field is one value for all or a list of one for each."""
    sampling = scoring(np.arange(ROWS))
    for name, value in fields.items():
        old = getattr(sampling, name)
        setattr(sampling, name, np.broadcast_to(np.array(value, old.dtype), old.shape).copy())
    return sampling


def random_settings(random: np.random.Generator) -> Sampling:
    """Every row its own combination of everything, each part off in about half of the rows."""

    def some(values: Any, off: float) -> Any:
        return np.where(random.random(ROWS) < 0.5, values, off)

    sampling = settings(
        target=some(random.integers(0, VOCAB, ROWS), -1) * (random.random(ROWS) < 0.3),
        temperature=random.choice([0, 1e-6, 1e-4, 0.05, 0.3, 0.7, 1, 1.5, 4, 100], ROWS),
        top_k=some(random.choice([1, 2, 5, 40, 500, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1], ROWS), 0),
        top_p=some(random.choice([0, 1e-9, 0.1, 0.5, 0.9, 0.999], ROWS), 1),
        min_p=some(random.choice([1e-9, 0.01, 0.2, 1], ROWS), 0),
        repetition=some(random.choice([0.5, 1.1, 2, 50], ROWS), 1),
        presence=some(random.uniform(-3, 3, ROWS), 0),
        frequency=some(random.uniform(-3, 3, ROWS), 0),
        seed=random.integers(0, 2**64, ROWS, np.uint64),
        position=random.integers(0, 2**31, ROWS),
        logprobs=random.integers(-1, 21, ROWS),
    )
    sampling.target[sampling.target == 0] = -1
    counts = some(random.integers(1, 300, ROWS), 0).astype(np.int64)
    sampling.history_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    sampling.history_ids = random.integers(0, random.choice([10, 300, VOCAB]), counts.sum()).astype(np.int32)
    sampling.history_prompt = (counts * random.random(ROWS)).astype(np.int32)
    biased = some(random.integers(1, 40, ROWS), 0).astype(np.int64)
    sampling.bias_start = np.concatenate(([0], np.cumsum(biased))).astype(np.int32)
    sampling.bias_ids = random.integers(0, VOCAB, biased.sum()).astype(np.int32)
    sampling.bias_values = random.choice([-100, -1, 0.5, 5, 100, -np.inf], biased.sum()).astype(np.float32)
    sampling.mask_index = some(random.integers(0, 4, ROWS), -1).astype(np.int32)
    words = random.integers(0, 2**32, (4, -(-VOCAB // 32)), np.uint32)
    words[1] &= words[2] & words[3]
    words[2] = 0
    words[2, 7] = 1 << 3  # one id is allowed
    words[3] = 2**32 - 1
    sampling.mask = words
    return sampling


def nearly_chosen(token: int, logits: F32, sampling: Sampling, row: int) -> bool:
    """Whether the twin would have taken this id, had its random number or a bound been moved by 1e-5."""
    work = penalized(logits, sampling, sampling.history_ids, row)
    temperature, top_p, min_p = (float(getattr(sampling, name)[row]) for name in ("temperature", "top_p", "min_p"))
    chances: F64 = np.exp((work - work.max()).astype(np.float64) / temperature)
    near = 1e-5
    for p in (top_p, top_p - near, min(top_p + near, 1) if top_p < 1 else 1):
        for least in (min_p, min_p * (1 - near), min_p * (1 + near)):
            order = kept(work, chances, int(sampling.top_k[row]), p)
            order = order[chances[order] >= least]
            place = np.flatnonzero(order == token)
            if not len(order) or not len(place):
                continue
            cumulative = np.cumsum(chances[order]) / chances[order].sum()
            u = uniform(int(sampling.seed[row]), int(sampling.position[row]))
            end = cumulative[place[0]]
            if end - chances[token] / chances[order].sum() - near <= u <= end + near:
                return True
    return False


def test_many_rows_choose_as_the_twin_does(run: Run) -> None:
    random = np.random.default_rng(0)
    differing = total = 0
    for _ in range(40):
        sampling = random_settings(random)
        got, logits = run(sampling)
        want = sample(logits, sampling, sampling.history_ids)
        for row in np.flatnonzero(got.ids != want.ids).tolist():
            greedy = sampling.temperature[row] < 1e-5 or sampling.top_k[row] == 1
            assert not greedy, f"row {row}: {got.ids[row]} is not {want.ids[row]}, the best"
            assert nearly_chosen(int(got.ids[row]), logits[row], sampling, row), f"row {row} chose {got.ids[row]}"
            differing += 1
        total += ROWS
        same = got.ids == want.ids
        np.testing.assert_array_equal(got.rank[same], want.rank[same])
        np.testing.assert_allclose(got.logprob[same], want.logprob[same], atol=1e-4)
        np.testing.assert_array_equal(got.top_ids[same], want.top_ids[same])
        np.testing.assert_allclose(got.top_logprobs[same], want.top_logprobs[same], atol=1e-4)
    assert differing <= total / 500


def test_frequencies_follow_the_distribution(run: Run) -> None:
    """4,096 draws at temperature 1 of the same row: each of the likelier ids as often as it should come."""
    counts = np.zeros(VOCAB)
    draws = 0
    chances = np.zeros(0)
    for turn in range(64):
        got, logits = run(settings(temperature=2.0, seed=99, position=np.arange(ROWS) + turn * ROWS, rows=17))
        counts += np.bincount(got.ids, minlength=VOCAB)
        draws += ROWS
        chances = np.exp(logits[0].astype(np.float64) / 2)
    chances /= chances.sum()
    deviation = np.sqrt(draws * chances * (1 - chances))
    assert np.all(np.abs(counts - draws * chances) < 5.5 * deviation + 2)


# Cases of past faults of other engines


def greedy(run: Run) -> list[int]:
    ids: list[int] = run(settings(temperature=0))[0].ids.tolist()
    return ids


@pytest.mark.parametrize("temperature", [1e-5, 9e-6, 1e-300, 5e-324, 1e-38, 0.0])
def test_tiny_temperatures_are_greedy(run: Run, temperature: float) -> None:
    with np.errstate(under="ignore"):
        got, _ = run(settings(temperature=temperature, seed=np.arange(ROWS), logprobs=3))
    assert got.ids.tolist() == greedy(run)
    assert np.isfinite(got.logprob).all()
    assert np.isfinite(got.top_logprobs).all()


def test_a_small_temperature_does_not_overflow(run: Run) -> None:
    """At 1e-4 ids whose logits are equal share the draws, all others are as good as banned."""
    got, logits = run(settings(temperature=1e-4, seed=np.arange(ROWS), logprobs=0))
    best = logits.max(axis=1)
    assert np.all(best - logits[np.arange(ROWS), got.ids] < 2e-3)
    assert np.isfinite(got.logprob).all()


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, VOCAB + 1, 9_999_999])
def test_top_k_off_and_beyond_the_vocabulary(run: Run, top_k: int) -> None:
    plain = settings(temperature=1, seed=np.arange(ROWS))
    assert run(replace(plain, top_k=np.full(ROWS, top_k, np.int32)))[0].ids.tolist() == run(plain)[0].ids.tolist()


def test_greedy_by_other_names(run: Run) -> None:
    best = greedy(run)
    seeds = np.arange(ROWS)
    assert run(settings(temperature=5, top_k=1, seed=seeds))[0].ids.tolist() == best
    assert run(settings(temperature=5, top_p=0, seed=seeds))[0].ids.tolist() == best
    assert run(settings(temperature=5, top_p=1e-9, seed=seeds))[0].ids.tolist() == best
    got, logits = run(settings(temperature=5, min_p=1, seed=seeds))
    assert np.all(logits[np.arange(ROWS), got.ids] == logits.max(axis=1))  # ids of equal logits share the draws


def test_rows_of_all_kinds_in_one_step(run: Run) -> None:
    """What a row gets does not depend on what its neighbours asked for, or where it stands."""
    random = np.random.default_rng(5)
    everything = random_settings(random)
    kind = np.arange(ROWS) % 3
    everything.target[:] = -1
    together, _ = run(everything)
    mixed = replace(everything, temperature=np.where(kind == 0, np.float32(0), everything.temperature))
    got, _ = run(mixed)
    assert got.ids[kind != 0].tolist() == together.ids[kind != 0].tolist()
    plain = replace(
        settings(temperature=0),
        history_start=everything.history_start,
        history_ids=everything.history_ids,
        history_prompt=everything.history_prompt,
    )
    half = np.where(kind == 1, np.float32(2), np.float32(1))
    got, _ = run(replace(plain, repetition=half))
    assert got.ids[kind != 1].tolist() == np.array(greedy(run))[kind != 1].tolist()
    alone, _ = run(replace(plain, repetition=np.full(ROWS, 2, np.float32)))
    assert got.ids[kind == 1].tolist() == alone.ids[kind == 1].tolist()


def one_history(prompt: list[int], output: list[int], **fields: Any) -> Sampling:
    """All rows with the same history."""
    count = len(prompt) + len(output)
    return replace(
        settings(temperature=0, **fields),
        history_start=np.arange(ROWS + 1, dtype=np.int32) * count,
        history_ids=np.tile(np.array(prompt + output, np.int32), ROWS),
        history_prompt=np.full(ROWS, len(prompt), np.int32),
    )


def test_which_tokens_penalties_count(run: Run) -> None:
    best = greedy(run)
    favourite = best[0]
    in_prompt = run(one_history([favourite] * 50, [], presence=100, frequency=100))[0].ids.tolist()
    assert in_prompt == best, "presence and frequency looked at the prompt"
    in_output = run(one_history([], [favourite], presence=100))[0].ids.tolist()
    assert favourite not in in_output
    assert favourite not in run(one_history([], [favourite], frequency=100))[0].ids.tolist()
    repeated = run(one_history([favourite] * 50, [], repetition=1e6))[0].ids.tolist()
    assert favourite not in repeated
    assert repeated == run(one_history([favourite], [], repetition=1e6))[0].ids.tolist(), "counted, not merely seen"


def test_when_everything_is_banned(run: Run) -> None:
    banned = settings(temperature=[0, 1] * (ROWS // 2), mask_index=[-1, 0] * (ROWS // 2), logprobs=2)
    banned.mask = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    got, _ = run(banned)
    assert np.all(got.ids[1::2] == -1)
    assert got.ids[::2].tolist() == greedy(run)[::2]


def test_the_twin_agrees_on_the_choice_of_one_row(run: Run) -> None:
    """The same through the smallest door: one row, everything off but the seed."""
    got, logits = run(settings(temperature=1, seed=2**64 - 1, position=np.arange(ROWS)))
    sampling = settings(temperature=1, seed=2**64 - 1, position=np.arange(ROWS))
    want = [choose(logits[row], sampling, sampling.history_ids, row) for row in range(ROWS)]
    assert got.ids.tolist() == want


def test_masks_may_follow(run: Run) -> None:
    """A step whose masks come after it was submitted samples what it would have with them."""
    sampling = random_settings(np.random.default_rng(77))
    at_once, _ = run(sampling)
    later, _ = run(replace(sampling, masks_follow=True))
    assert np.array_equal(at_once.ids, later.ids)
    assert np.array_equal(at_once.logprob, later.logprob)
