"""The counter-based generator that the native sampler and its NumPy twin share.

A number depends on (seed, position) alone, never on how many were drawn before: a preempted or replayed sequence draws
the same ones. The mixing function is the finalizer of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom
Number Generators, 2014).
"""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 24 bits, exact in float32. `seed` has 64 bits; `position` is the new token's."""
    z = _mix(seed + GOLDEN * (position + 1) & MASK)
    z = _mix(z + (seed << 32 & MASK | seed >> 32) & MASK)
    return (z >> 40) * 2.0**-24
