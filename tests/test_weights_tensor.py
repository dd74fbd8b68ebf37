"""Dequantization against the `gguf` package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tricorn.weights.tensor import BLOCK, Tensor, bytes_of, from_float32

BLOCKS = 1000


def random_blocks(kind: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (BLOCKS, BLOCK[kind][1]), dtype=np.uint8)


def halves_at(kind: str) -> list[int]:
    """Where a block keeps its 16-bit scales and minima."""
    return {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q6_K": [208]}.get(kind, [0, 2]) if kind.startswith("Q") else []


def same_bits(kind: str, raw: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(len(raw), -1)
    got = Tensor(kind, expected.shape, raw).dequantize()
    assert got.dtype == np.float32
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    known = ~np.isnan(expected)
    assert np.array_equal(got[known].view(np.uint32), expected[known].view(np.uint32))


@pytest.mark.parametrize("kind", BLOCK)
def test_random_blocks_have_the_reference_bits(kind: str) -> None:
    same_bits(kind, random_blocks(kind, seed=1))


@pytest.mark.parametrize("kind", [kind for kind in BLOCK if kind.startswith("Q")])
@pytest.mark.parametrize("half", [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x3C00, 0xBC00])
def test_extreme_scales_have_the_reference_bits(kind: str, half: int) -> None:
    raw = random_blocks(kind, seed=2)
    for at in halves_at(kind):
        raw[:, at : at + 2] = np.frombuffer(half.to_bytes(2, "little"), np.uint8)
    same_bits(kind, raw)


@pytest.mark.parametrize("kind", BLOCK)
def test_zero_blocks_have_the_reference_bits(kind: str) -> None:
    same_bits(kind, np.zeros((3, BLOCK[kind][1]), np.uint8))


def test_rows_are_taken_whole() -> None:
    tensor = Tensor("Q4_0", (3, 64), np.arange(3 * 36, dtype=np.uint8).reshape(3, 36))
    moved = tensor.take_rows(np.array([2, 0, 1]))
    assert np.array_equal(moved.data, tensor.data[[2, 0, 1]])
    assert moved.shape == tensor.shape
    vector = from_float32(np.array([1, 2, 3], np.float32))
    assert vector.take_rows(np.array([2, 1, 0])).dequantize().tolist() == [3, 2, 1]


def test_bytes_never_wrap() -> None:
    assert bytes_of("F32", (1 << 33, 1 << 31)) == 1 << 66
    assert bytes_of("Q6_K", (2, 512)) == 2 * 2 * 210
