"""The executor of the simulation, under its old name: its cache holds fingerprints, so any paging mistake shows."""

from tricorn.simulate.executor import VOCAB, Expected, FakeExecutor, expected

__all__ = ["VOCAB", "Expected", "FakeExecutor", "expected"]
