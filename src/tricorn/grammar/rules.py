"""Context-free rules as a tree: what GBNF becomes and what says whether a grammar has a sentence at all."""

from __future__ import annotations

from dataclasses import dataclass

from tricorn.grammar.constraint import ConstraintError


@dataclass(frozen=True, slots=True)
class Text:
    """Characters as they are."""

    text: str


@dataclass(frozen=True, slots=True)
class Class:
    """One character of a class; `pattern` is a regular expression for it."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


@dataclass(frozen=True, slots=True)
class Seq:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Node
    least: int
    most: int | None


Node = Text | Class | Ref | Seq | Alt | Repeat
Rules = dict[str, Node]


def check(rules: Rules, root: str) -> None:
    """Raises ConstraintError when the root, or a rule that it mentions, is missing, or when no finite sentence can be
    made from the root."""
    if root not in rules:
        raise ConstraintError("there is no such rule", root, "root")
    for name, node in rules.items():
        for other in refs(node):
            if other not in rules:
                raise ConstraintError(f"names a rule that is not there: {other[:64]!r}", name)
    made: set[str] = set()
    while True:
        new = {name for name, node in rules.items() if _ends(node, made)}
        if new == made:
            break
        made = new
    if root not in made:
        raise ConstraintError("no finite text satisfies it, since its rules never end", root)


def _ends(node: Node, made: set[str]) -> bool:
    match node:
        case Ref(name):
            return name in made
        case Seq(parts):
            return all(_ends(part, made) for part in parts)
        case Alt(options):
            return any(_ends(option, made) for option in options)
        case Repeat(part, least, _):
            return least == 0 or _ends(part, made)
    return True


def refs(node: Node) -> set[str]:
    match node:
        case Ref(name):
            return {name}
        case Seq(parts) | Alt(parts):
            return set().union(*map(refs, parts))
        case Repeat(part):
            return refs(part)
    return set()


def is_regular(rules: Rules, root: str) -> bool:
    """Whether no rule below the root leads back to itself, so that one regular expression says it all."""
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> bool:
        if name in above or len(above) > 60:
            return False
        if name not in done:
            if not all(visit(other, (*above, name)) for other in refs(rules[name])):
                return False
            done.add(name)
        return True

    return visit(root, ())
