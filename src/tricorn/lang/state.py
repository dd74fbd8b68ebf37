"""The interpreter: one state of a program, what was added to it, and the variables that came of it.

Adding to a state returns at once. A thread of the state's own works through what was added, in order, and ends when
there is no more; whoever reads a variable waits for it. So states that a program has forked run side by side, and
their calls of the model meet in the engine's batch.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tricorn.frontend.generate import MASK64, derive_seed
from tricorn.frontend.template import Message
from tricorn.lang.backend import Backend, Meta
from tricorn.lang.constraint import Constraint
from tricorn.lang.parts import Begin, End, Expression, Gen, Part, Role, Select, expression
from tricorn.lang.transcript import Prompt, Transcript
from tricorn.request import SamplingParams, TricornError


@dataclass(frozen=True)
class Variable:
    """What a call of the model wrote."""

    text: str
    meta: Meta
    constraint: Constraint | None = None


@dataclass
class Run:
    """What all the states of one run of a program share; it began with the first of them. `defaults` are fields of
    `SamplingParams`."""

    backend: Backend
    defaults: dict[str, Any] = field(default_factory=dict)
    thread: threading.Thread | None = None
    """Runs the program's own code, as long as it does."""
    cancelled: bool = False
    states: list[State] = field(default_factory=list)

    def finish(self) -> None:
        """After the program's own code: waits for all states. An error in a fork that nobody has heard of becomes the
        program's."""
        for state in self.states:
            state.settle()
        for state in self.states:
            if (error := state.unheard) is not None:
                self.states[0].fail(error)
        self.thread = None
        self.states[0].wake()


class Cancelled(TricornError):
    """The run was given up."""

    def __init__(self) -> None:
        super().__init__("the program was cancelled")


class State:
    """One line of a program. Programs add to it with `+=` and read variables by name.

    May be used from several threads. Everything that reads raises the error that stopped the state, if one did.
    """

    def __init__(
        self,
        run: Run,
        transcript: Transcript = Transcript(),
        variables: dict[str, Variable | list[str]] | None = None,
        seed: int | None = None,
    ) -> None:
        self.ret_value: Any = None
        """What the program returned."""
        self._run = run
        self._transcript = transcript
        self._variables = dict(variables or {})
        self._seed = seed
        self._changed = threading.Condition()
        self._queue: deque[Part] = deque()
        self._pending: Counter[str] = Counter()  # how often each variable is still to be written
        self._working = False
        self._error: BaseException | None = None
        self._told = False  # whether somebody was told of the error
        self._log: list[tuple[str | None, str | None]] = []  # texts by variable; None as the text ends one
        run.states.append(self)

    # --- what programs do

    def __iadd__(self, added: str | Expression | None) -> State:
        parts = expression(added).parts
        with self._changed:
            self._check()
            self._queue.extend(parts)
            self._pending.update(part.name for part in parts if isinstance(part, Gen | Select) and part.name)
            if self._working:
                return self
            try:
                while self._queue and not isinstance(self._queue[0], Gen | Select):  # costs nothing: needs no thread
                    self._write(self._queue.popleft())
            except TricornError as error:
                self.fail(error)
                self._check()
            if self._queue:
                self._working = True
                threading.Thread(target=self._work, name="tricorn-lang", daemon=True).start()
        return self

    def __getitem__(self, name: str) -> Any:
        """The text of a variable, or after `join` the list of the forks' texts. Raises KeyError."""
        found = self._await(name)
        return found if isinstance(found, list) else found.text

    def __contains__(self, name: str) -> bool:
        try:
            self._await(name)
        except KeyError:
            return False
        return True

    def parsed(self, name: str) -> Any:
        """What a schema makes of a variable: an object of JSON, or the pydantic model. Raises TricornError when the
        variable had no schema or does not satisfy it."""
        found = self._await(name)
        constraint = None if isinstance(found, list) else found.constraint
        if constraint is None or constraint.parse is None:
            raise TricornError(f"the variable {name!r} was generated without a schema")
        assert isinstance(found, Variable)
        try:
            return constraint.parse(found.text)
        except ValueError as error:
            ended = found.meta.finish_reason
            raise TricornError(f"the variable {name!r}, which ended by {ended}, cannot be read: {error}") from error

    def meta(self, name: str) -> Meta:
        """How a variable came about. Raises KeyError."""
        found = self._await(name)
        if isinstance(found, list):
            raise TricornError(f"the variable {name!r} was joined from forks: ask each of them")
        return found.meta

    def text(self) -> str:
        """All the text, without the markers of a template; a line break stands between two turns."""
        return self._settled().plain()

    def messages(self) -> list[Message]:
        """The turns, the open one included."""
        return self._settled().messages()

    @property
    def error(self) -> BaseException | None:
        """What stopped this state, once it has ended."""
        with self._changed:
            self._changed.wait_for(self._ended)
            self._told = True
            return self._error

    def join(self) -> State:
        """Waits until everything that was added is done."""
        self._settled()
        return self

    @contextmanager
    def system(self) -> Iterator[State]:
        with self._turn("system"):
            yield self

    @contextmanager
    def user(self) -> Iterator[State]:
        with self._turn("user"):
            yield self

    @contextmanager
    def assistant(self) -> Iterator[State]:
        with self._turn("assistant"):
            yield self

    @contextmanager
    def _turn(self, role: Role) -> Iterator[None]:
        self += Expression((Begin(role),))
        yield
        self += Expression((End(role),))

    def fork(self, count: int) -> Forks:
        """So many states that go on from here, side by side. What they have in common is computed once.

        With a seed for the whole run each fork has its own, derived from it; the first keeps it.
        """
        if count < 1:
            raise TricornError(f"a state forks into at least one, not {count}")
        transcript = self._settled()
        if count > 1:
            self._prefill(transcript.prefix())
        seeds = [None if self._seed is None else derive_seed(self._seed & MASK64, place) for place in range(count)]
        return Forks(self, [State(self._run, transcript, self._variables, seed) for seed in seeds])

    # --- what watchers do

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """The text of a variable as it comes, or all text that is added to this state. Raises KeyError at the end when
        there was no such variable."""
        place = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda place=place: len(self._log) > place or self._ended())  # type: ignore[misc]
                new = self._log[place:]
                if not new:
                    self._check()
                    if name is not None:
                        raise KeyError(name)
                    return
            place += len(new)
            for variable, text in new:
                if text is None and variable is not None and variable == name:
                    return
                if text and name in (None, variable):
                    yield text

    def cancel(self) -> None:
        """Gives up the run that this state belongs to, its forks included."""
        self._run.cancelled = True

    # --- the interpreter

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._working = False
                    self._changed.notify_all()
                    return
                part = self._queue.popleft()
            try:
                self._apply(part)
            except Exception as error:
                self.fail(error)

    def _apply(self, part: Part) -> None:
        if self._run.cancelled:
            raise Cancelled
        if isinstance(part, Gen):
            self._generate(part)
        elif isinstance(part, Select):
            self._select(part)
        else:
            with self._changed:
                self._write(part)

    def _write(self, part: Part) -> None:
        if isinstance(part, str):
            self._transcript = self._transcript.write(part)
            self._emit(None, part)
        elif isinstance(part, Begin):
            self._transcript = self._transcript.begin(part.role)
        elif isinstance(part, End):
            self._transcript = self._transcript.end(part.role)

    def _generate(self, part: Gen) -> None:
        seed = {} if self._seed is None else {"seed": self._seed}
        params = part.params({**self._run.defaults, **seed})
        texts: list[str] = []
        meta: Meta | None = None
        with closing(self._run.backend.generate(self._transcript.prompt(), params, part.constraint)) as pieces:
            for piece in pieces:
                if self._run.cancelled:
                    raise Cancelled
                texts.append(piece.text)
                meta = piece.meta or meta
                with self._changed:
                    self._emit(part.name, piece.text)
        assert meta is not None
        text = "".join(texts)
        if part.constraint is not None and meta.finish_reason == "stop":
            part.constraint.check(text)
        with self._changed:
            self._transcript = self._transcript.write(text)
            self._assign(part.name, Variable(text, meta, part.constraint))

    def _select(self, part: Select) -> None:
        prompt = self._transcript.prompt()
        if len(part.choices) > 1:
            self._prefill(prompt)
        meta = self._run.backend.score(prompt, part.choices)
        assert meta.scores is not None
        choice = part.choices[meta.scores.index(max(meta.scores))]
        with self._changed:
            self._transcript = self._transcript.write(choice)
            self._emit(part.name, choice)
            self._assign(part.name, Variable(choice, meta))

    def _prefill(self, prompt: Prompt | None) -> None:
        """Has a prompt computed, so that those that go on from it and come at the same moment find it in the cache."""
        if prompt is not None and (prompt.text or prompt.messages):
            with suppress(TricornError):  # a real fault comes up again where it matters
                for _ in self._run.backend.generate(prompt, SamplingParams(max_tokens=1, temperature=0), None):
                    pass

    def _assign(self, name: str | None, value: Variable) -> None:
        self._emit(name, None)
        if name is not None:
            self._variables[name] = value
            self._pending[name] -= 1

    def _emit(self, name: str | None, text: str | None) -> None:
        self._log.append((name, text))
        self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stops this state; what is still queued is dropped."""
        with self._changed:
            self._error = self._error or error
            self._queue.clear()
            for name in +self._pending:  # an older value must not pass for the one that was asked for
                self._variables.pop(name, None)
            self._pending.clear()
            self._changed.notify_all()

    def _gather(self, forks: list[State]) -> None:
        before = self._variables
        new: dict[str, list[Any]] = {}
        for fork in forks:
            for name, value in fork._variables.items():
                if value is not before.get(name):
                    new.setdefault(name, []).append(value.text if isinstance(value, Variable) else value)
        with self._changed:
            self._variables = {**before, **new}

    # --- waiting

    @property
    def unheard(self) -> BaseException | None:
        """The error that stopped this state, unless somebody was told of it."""
        return None if self._told else self._error

    def settle(self) -> None:
        """Waits until nothing is being done."""
        with self._changed:
            self._changed.wait_for(self._idle)

    def wake(self) -> None:
        """Has everybody who waits look again."""
        with self._changed:
            self._changed.notify_all()

    def _idle(self) -> bool:
        return not self._working

    def _ended(self) -> bool:
        """Nothing is being done; and, in the state that the run began with, nothing more will be added but by the
        thread that asks: whoever watches a program from outside waits for its end."""
        watched = self is self._run.states[0] and self._run.thread not in (None, threading.current_thread())
        return not self._working and not watched

    def _check(self) -> None:
        if self._error is not None:
            self._told = True
            raise self._error

    def _settled(self) -> Transcript:
        with self._changed:
            self._changed.wait_for(self._ended)
            self._check()
            return self._transcript

    def _await(self, name: str) -> Variable | list[str]:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._known(name) or self._ended())
            if name not in self._variables or self._pending[name]:
                self._check()
                raise KeyError(name)
            return self._variables[name]

    def _known(self, name: str) -> bool:
        return name in self._variables and not self._pending[name]


class Forks(Sequence[State]):
    """The states that one was forked into."""

    def __init__(self, parent: State, states: list[State]) -> None:
        self._parent = parent
        self._states = states

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, place: Any) -> Any:
        """A fork by its place, or by name the list of a variable's texts in all of them."""
        if isinstance(place, str):
            return [state[place] for state in self._states]
        return self._states[place]

    def __iadd__(self, added: str | Expression | None) -> Forks:
        for state in self._states:
            state += added
        return self

    def join(self) -> None:
        """Waits for all of them. The variables that they wrote become variables of the state that was forked: each the
        list of its texts in those that have it."""
        for state in self._states:
            state.join()
        self._parent._gather(self._states)
