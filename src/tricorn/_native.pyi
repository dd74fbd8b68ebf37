"""The native extension (see native/module.cpp)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tricorn.runtime.step import F32, I32, Step

def instruction_sets() -> list[str]: ...
def measure_machine(isa: str, threads: int) -> list[float]: ...

class Executor:
    def __init__(
        self,
        file: NDArray[np.uint8],
        tensors: Sequence[dict[str, Any]],
        plan: dict[str, Any],
        *,
        isa: str,
        threads: int,
        pages: int,
        max_tokens: int,
        max_rows: int,
        cache: str,
    ) -> None: ...
    def submit(self, step: Step) -> int: ...
    def wait(self, ticket: int) -> tuple[I32, F32, I32, I32, F32]: ...
    def seconds(self) -> list[float]: ...
    def last_logits(self) -> F32: ...
    def read_page(self, page: int) -> NDArray[np.uint8]: ...
    def write_page(self, page: int, data: NDArray[np.uint8]) -> None: ...
    @property
    def page_bytes(self) -> int: ...
