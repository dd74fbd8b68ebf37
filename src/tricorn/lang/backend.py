"""What a program needs of whatever runs the model."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tricorn.lang.constraint import Constraint
from tricorn.lang.transcript import Prompt
from tricorn.request import SamplingParams, TricornError


@dataclass(frozen=True)
class Meta:
    """How a variable came about. `cached_tokens` of its `prompt_tokens` were known from earlier calls; for a `select`
    both count all choices together, and `scores` has the mean log-likelihood of each choice."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    scores: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Piece:
    """Some more text; the last piece has `meta`."""

    text: str
    meta: Meta | None = None


Pieces = Generator[Piece, None, None]


class Backend(Protocol):
    """Runs the model for many programs at once, each in a thread of its own."""

    def generate(self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None) -> Pieces:
        """Writes on. Closing the generator aborts the call. Raises TricornError, for a constraint that
        cannot be kept too."""
        ...

    def score(self, prompt: Prompt, choices: Sequence[str]) -> Meta:
        """The mean log-likelihood of each choice after the prompt. Raises TricornError."""
        ...


def resolve(backend: Any) -> Backend:
    """A backend from itself, from an `LLM`, or from the URL of a server. Raises TypeError."""
    if isinstance(backend, str):
        from tricorn.lang.remote import Server

        return Server(backend)
    if hasattr(backend, "generate") and hasattr(backend, "score"):
        found: Backend = backend
        return found
    if hasattr(backend, "encode_chat"):
        from tricorn.lang.local import Local

        return Local(backend)
    raise TypeError(f"a program runs on an LLM, the URL of a server or a backend, not on {type(backend).__name__}")


def first_scored(prompt: list[int], continued: Sequence[list[int]]) -> int:
    """Where scoring begins: the first token in which a choice differs from the prompt alone. The last tokens of a
    prompt may merge with the first of a choice; then all choices are scored from there, so that all are scored over
    the same text. Raises TricornError when there is nothing before it to predict it from."""
    first = min(_common(prompt, ids) for ids in continued)
    if first == 0:
        raise TricornError("select needs some text, or a turn, before it")
    return first


def _common(left: list[int], right: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
