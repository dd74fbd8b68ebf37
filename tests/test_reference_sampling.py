"""The NumPy sampler against the words of its contract, one rule a test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tricorn.runtime.random import uniform
from tricorn.runtime.sampling import sample, scoring
from tricorn.runtime.step import Sampling, StepResult

F32 = NDArray[np.float32]
V = 50
AGREED = [0.2817612886428833, 0.584164023399353, 0.8436434864997864]


def logits_of(seed: int = 0, vocab: int = V) -> F32:
    return np.random.default_rng(seed).normal(0, 2, vocab).astype(np.float32)


def one_row(**fields: Any) -> Sampling:
    sampling = scoring(np.arange(1), alternatives=0)
    for name, value in fields.items():
        old = getattr(sampling, name)
        setattr(sampling, name, np.array(value if isinstance(value, list) else [value], old.dtype))
    return sampling


def with_bias(sampling: Sampling, bias: dict[int, float]) -> Sampling:
    sampling.bias_start = np.array([0, len(bias)], np.int32)
    sampling.bias_ids = np.array(list(bias), np.int32)
    sampling.bias_values = np.array(list(bias.values()), np.float32)
    return sampling


def with_history(sampling: Sampling, prompt: list[int], output: list[int]) -> Sampling:
    sampling.history_start = np.array([0, len(prompt) + len(output)], np.int32)
    sampling.history_ids = np.array(prompt + output, np.int32)
    sampling.history_prompt = np.array([len(prompt)], np.int32)
    return sampling


def run(logits: F32, sampling: Sampling) -> StepResult:
    return sample(logits[None], sampling, sampling.history_ids)


def chosen(logits: F32, sampling: Sampling) -> int:
    return int(run(logits, sampling).ids[0])


def draws(logits: F32, count: int = 400, **fields: Any) -> list[int]:
    return [chosen(logits, one_row(seed=7, position=i, **fields)) for i in range(count)]


def test_random_numbers_are_the_agreed_ones() -> None:
    """Fixed values, so that both generators and every version agree; and they fill [0, 1) evenly."""
    assert [uniform(0, 0), uniform(1, 0), uniform(2**64 - 1, 2**31 - 1)] == AGREED
    numbers = np.array([uniform(12345, position) for position in range(4000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.all(np.histogram(numbers, 10, (0, 1))[0] > 320)
    assert np.all(numbers.astype(np.float32) == numbers)


def test_greedy_takes_the_lowest_id_of_the_best() -> None:
    logits = logits_of()
    logits[[9, 30]] = 20
    for fields in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}, {"temperature": 9e-6}):
        assert chosen(logits, one_row(**fields)) == 9


def test_logprobs_and_ranks_are_of_the_raw_distribution() -> None:
    logits = np.array([1, 3, 3, 2], np.float32)
    sampling = with_bias(one_row(temperature=0.0, logprobs=3), {1: -100.0})
    result = run(logits, sampling)
    logprobs = logits - np.log(np.exp(logits).sum())
    assert result.ids[0] == 2
    assert result.rank[0] == 2  # id 1 ties with it and is lower
    assert result.logprob[0] == pytest.approx(logprobs[2], abs=1e-6)
    assert result.top_ids[0].tolist() == [1, 2, 3]
    np.testing.assert_allclose(result.top_logprobs[0], logprobs[[1, 2, 3]], atol=1e-6)


def test_a_scored_row_reports_its_target() -> None:
    logits = logits_of()
    result = run(logits, one_row(target=17, logprobs=0))
    assert result.ids[0] == 17
    assert result.rank[0] == 1 + np.count_nonzero(logits > logits[17])
    assert result.top_ids.shape == (1, 0)


def test_rows_that_ask_for_fewer_alternatives_are_padded() -> None:
    sampling = scoring(np.arange(3), alternatives=0)
    sampling.logprobs = np.array([-1, 2, 5], np.int32)
    result = sample(np.stack([logits_of(i) for i in range(3)]), sampling, sampling.history_ids)
    assert result.top_ids.shape == (3, 5)
    assert (result.rank[0], result.logprob[0]) == (0, 0)
    assert np.all(result.top_ids[0] == -1)
    assert np.all(result.top_ids[1, 2:] == -1)
    assert np.all(result.top_logprobs[1, 2:] == -np.inf)
    assert np.all(result.top_ids[2] >= 0)


def test_penalties_come_before_bias() -> None:
    logits = np.array([4, 3, -1, 0, 0], np.float32)
    history = with_history(one_row(temperature=0.0, repetition=2.0, presence=0.5, frequency=0.25), [0, 2], [1, 1])
    bias = {0: 0.0, 1: 2.01, 2: 4.0}
    # 0: 4/2 = 2. 1: 3/2 - 2*0.25 - 0.5 = 0.5, then 2.51. 2: -1*2 = -2, then 2. 3 and 4 as they were.
    assert chosen(logits, history) == 0
    assert chosen(logits, with_bias(history, bias)) == 1
    assert chosen(logits, with_bias(history, bias | {1: 1.4})) == 0
    assert chosen(logits, with_bias(history, bias | {1: 1.4, 2: 4.01})) == 2


def test_presence_and_frequency_do_not_look_at_the_prompt() -> None:
    logits = np.array([2.0, 1.9], np.float32)
    assert chosen(logits, with_history(one_row(temperature=0.0, presence=1.0, frequency=1.0), [0, 0, 0], [])) == 0
    assert chosen(logits, with_history(one_row(temperature=0.0, presence=0.2), [], [0])) == 1


def test_masks_and_bans_leave_nothing_else() -> None:
    logits = logits_of(vocab=70)
    allowed = [3, 33, 69]
    words = np.zeros((2, 3), np.uint32)
    for token in allowed:
        words[1, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    seen = set()
    for position in range(100):
        sampling = one_row(temperature=3.0, seed=1, position=position, mask_index=1)
        sampling.mask = words
        seen.add(chosen(logits, sampling))
    assert seen == set(allowed)
    sampling = with_bias(one_row(mask_index=1), dict.fromkeys(allowed, -np.inf))
    sampling.mask = words
    assert run(logits, sampling).ids[0] == -1


def test_temperature_draws_from_the_softmax() -> None:
    logits = logits_of(vocab=6)
    counts = np.bincount(draws(logits, 4000, temperature=1.5), minlength=6)
    expected = np.exp(logits / 1.5) / np.exp(logits / 1.5).sum() * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # chi-square, 5 degrees of freedom: p = 0.001


def test_small_temperatures_do_not_overflow() -> None:
    logits = (logits_of() * 1e4).astype(np.float32)
    with np.errstate(over="raise", invalid="raise"):
        assert set(draws(logits, 20, temperature=1e-4)) == {int(logits.argmax())}


def test_top_k_keeps_the_k_best_with_ties_to_the_lower_id() -> None:
    logits = np.zeros(V, np.float32)
    logits[40] = 1
    assert set(draws(logits, temperature=1.0, top_k=4)) == {40, 0, 1, 2}


def test_top_p_keeps_the_smallest_prefix_that_reaches_it() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))
    assert set(draws(logits, temperature=1.0, top_p=0.65)) == {1, 2}
    assert set(draws(logits, temperature=1.0, top_p=0.75)) == {1, 2, 3}
    assert set(draws(logits, temperature=1.0, top_p=0.01)) == {1}
    assert set(draws(logits, temperature=1.0, top_k=2, top_p=0.56)) == {1}  # 0.4 of the 0.7 kept is 0.571


def test_min_p_is_measured_from_the_best() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))
    assert set(draws(logits, temperature=1.0, min_p=0.51)) == {1, 2}
    assert set(draws(logits, temperature=1.0, min_p=0.3, top_k=3)) == {1, 2, 3}
    assert set(draws(logits, temperature=1.0, min_p=1.0)) == {1}


def test_the_order_of_the_draw() -> None:
    """By id without filters, by rank with them: the number decides between them."""
    logits = np.log(np.array([0.2, 0.5, 0.3], np.float32))
    for position in range(50):
        u = uniform(3, position)
        by_id = [0, 1, 2][int(np.searchsorted(np.cumsum([0.2, 0.5, 0.3]), u, side="right"))]
        by_rank = [1, 2, 0][int(np.searchsorted(np.cumsum([0.5, 0.3, 0.2]), u, side="right"))]
        assert chosen(logits, one_row(temperature=1.0, seed=3, position=position)) == by_id
        assert chosen(logits, one_row(temperature=1.0, seed=3, position=position, top_p=0.999)) == by_rank


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0, 5),
    top_k=st.integers(0, V + 5),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_a_row_depends_on_itself_alone(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": [seed], "position": 9}
    alone = run(logits_of(1), one_row(**fields))
    both = scoring(np.arange(2), alternatives=0)
    for name, value in fields.items():
        array = np.zeros(2, getattr(both, name).dtype)
        array[1] = np.array(value if isinstance(value, list) else [value], array.dtype)[0]
        setattr(both, name, array)
    together = sample(np.stack([logits_of(2), logits_of(1)]), both, both.history_ids)
    assert together.ids[1] == alone.ids[0] >= 0
    assert together.logprob[1] == alone.logprob[0]
