"""What a program has said so far, as a value: a fork simply keeps its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tricorn.frontend.template import Message
from tricorn.lang.parts import Role
from tricorn.request import TricornError


@dataclass(frozen=True)
class Prompt:
    """What the model reads: a raw text, or `messages` and the `text` of the assistant's turn so far."""

    text: str
    messages: tuple[tuple[Role, str], ...] | None = None

    @property
    def conversation(self) -> list[Message]:
        """The messages that have ended."""
        return [{"role": role, "content": content} for role, content in self.messages or ()]


@dataclass(frozen=True)
class Transcript:
    """`turns` have ended; `text` is what the turn of `role` holds so far, or all of a program without roles."""

    turns: tuple[tuple[Role, str], ...] = ()
    role: Role | None = None
    text: str = ""

    def write(self, text: str) -> Transcript:
        if text and self.role is None and self.turns:
            raise TricornError(f"text outside of a turn in a program with roles: {text[:40]!r}")
        return replace(self, text=self.text + text)

    def begin(self, role: Role) -> Transcript:
        if self.role is not None:
            raise TricornError(f"the turn of {role} begins inside of that of {self.role}")
        if self.text:
            raise TricornError(f"the turn of {role} begins after text outside of any turn: {self.text[:40]!r}")
        return replace(self, role=role)

    def end(self, role: Role) -> Transcript:
        if self.role != role:
            raise TricornError(f"the turn of {role} ends, but it has not begun")
        return Transcript((*self.turns, (role, self.text)))

    def prompt(self) -> Prompt:
        """What a call of the model reads here. Raises TricornError outside of the assistant's turn."""
        if self.role is None and not self.turns:
            return Prompt(self.text)
        if self.role != "assistant":
            where = "outside of a turn" if self.role is None else f"in the turn of {self.role}"
            raise TricornError(f"the model cannot write {where}: put gen or select into assistant(...)")
        return Prompt(self.text, self.turns)

    def prefix(self) -> Prompt | None:
        """What everything that comes after this begins with, as far as the model can read it already."""
        if self.role is None and not self.turns:
            return Prompt(self.text) if self.text else None
        return Prompt(self.text if self.role == "assistant" else "", self.turns) if self.turns else None

    def messages(self) -> list[Message]:
        """The turns, the open one included; none in a program without roles."""
        turns = self.turns if self.role is None else (*self.turns, (self.role, self.text))
        return [{"role": role, "content": content} for role, content in turns]

    def plain(self) -> str:
        """All the text, without the markers of a template; a line break stands between two turns."""
        if self.role is None and not self.turns:
            return self.text
        return "\n".join(message["content"] for message in self.messages())
