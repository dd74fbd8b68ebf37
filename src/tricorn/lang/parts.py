"""What a program adds to its state: text, roles, and calls of the model, joined with `+`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tricorn.lang.constraint import Constraint, constrain
from tricorn.request import SamplingParams, TricornError

Role = Literal["system", "user", "assistant"]

MAX_TOKENS = 128
"""Of a `gen` that says nothing else."""

SAMPLING = frozenset(SamplingParams.__struct_fields__) - {"n", "logprobs", "prompt_logprobs", "constraint"}
"""The fields of `SamplingParams` that `gen` and `run` take."""


@dataclass(frozen=True)
class Gen:
    """The model writes on. `options` are fields of `SamplingParams`, those that were given; `parse` is what a schema
    makes of the text."""

    name: str | None
    options: dict[str, Any]
    constraint: Constraint | None = None

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Raises TricornError for a value of the wrong type."""
        try:
            return msgspec.convert({"max_tokens": MAX_TOKENS, **defaults, **self.options}, SamplingParams)
        except msgspec.ValidationError as error:
            raise TricornError(f"gen({self.name!r}): {error}") from None


@dataclass(frozen=True)
class Select:
    """The one of `choices` that the model finds likeliest, by the mean log-likelihood of its tokens."""

    name: str | None
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Begin:
    role: Role


@dataclass(frozen=True)
class End:
    role: Role


Part = str | Gen | Select | Begin | End


@dataclass(frozen=True)
class Expression:
    """Parts in a row."""

    parts: tuple[Part, ...] = field(default=())

    def __add__(self, other: str | Expression) -> Expression:
        return Expression(self.parts + expression(other).parts)

    def __radd__(self, other: str | Expression) -> Expression:
        return Expression(expression(other).parts + self.parts)


def expression(value: str | Expression | None) -> Expression:
    """`value` as an expression; None is an empty one. Raises TypeError."""
    if isinstance(value, Expression):
        return value
    if value is None:
        return Expression()
    if isinstance(value, str):
        return Expression((value,))
    raise TypeError(f"a program adds text, gen, select and roles to its state, not {type(value).__name__}")


def gen(
    name: str | None = None,
    *,
    regex: str | None = None,
    schema: Any = None,
    choices: Sequence[str] | None = None,
    grammar: str | None = None,
    stop: str | Sequence[str] | None = None,
    **options: Any,
) -> Expression:
    """The model writes on, and what it writes is the variable `name`.

    `options` are the fields of `SamplingParams` (`max_tokens`, 128 when nothing says otherwise, `temperature`, `seed`,
    `top_p`, ...). At most one of `regex`, `schema` (a JSON schema, or a pydantic model), `choices` and `grammar` (Lark)
    constrains the text. Raises TypeError for other options, TricornError for several constraints.
    """
    if unknown := options.keys() - SAMPLING:
        raise TypeError(f"gen() takes no {', '.join(sorted(unknown))}")
    given = {option: value for option, value in options.items() if value is not None}
    if stop is not None:
        given["stop"] = stops(stop)
    return Expression((Gen(name, given, constrain(regex=regex, schema=schema, choices=choices, grammar=grammar)),))


def select(name: str | None = None, choices: Sequence[str] = ()) -> Expression:
    """The likeliest of `choices` is added, and is the variable `name`. Raises TricornError when there is none, or an
    empty one."""
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise TricornError(f"select({name!r}) needs a list of choices, none of them empty")
    return Expression((Select(name, tuple(choices)),))


def stops(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def system(content: str | Expression | None = None) -> Expression:
    """A turn that instructs the model."""
    return _turn("system", content)


def user(content: str | Expression | None = None) -> Expression:
    """A turn of the user."""
    return _turn("user", content)


def assistant(content: str | Expression | None = None) -> Expression:
    """A turn of the model: the only one in which it may write or select."""
    return _turn("assistant", content)


def system_begin() -> Expression:
    return Expression((Begin("system"),))


def system_end() -> Expression:
    return Expression((End("system"),))


def user_begin() -> Expression:
    return Expression((Begin("user"),))


def user_end() -> Expression:
    return Expression((End("user"),))


def assistant_begin() -> Expression:
    return Expression((Begin("assistant"),))


def assistant_end() -> Expression:
    return Expression((End("assistant"),))


def _turn(role: Role, content: str | Expression | None) -> Expression:
    return Expression((Begin(role), *expression(content).parts, End(role)))
