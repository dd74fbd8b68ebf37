"""Programs: functions whose first argument is a state."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import update_wrapper
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tricorn.lang.backend import Backend, resolve
from tricorn.lang.parts import SAMPLING, stops
from tricorn.lang.state import Run, State
from tricorn.request import TricornError

THREADS = 32
"""Programs of a batch that run at once, when nothing else is said."""

_default: list[Backend] = []


def set_default_backend(backend: Any) -> None:
    """What programs run on when their call names nothing: an `LLM`, the URL of a server, or a backend."""
    _default[:] = [resolve(backend)]


class Function:
    """A program. `function` makes one; calling it with a state runs it as a part of another program."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body
        self._signature = inspect.signature(body)
        update_wrapper(self, body)

    def __call__(self, state: State, *args: Any, **kwargs: Any) -> Any:
        return self._body(state, *args, **kwargs)

    def run(self, *args: Any, backend: Any = None, stream: bool = False, **kwargs: Any) -> State:
        """Runs the program to its end, or with `stream` gives its state at once, to be watched with `text_iter`.

        Keywords that the program does not take and that are fields of `SamplingParams` are the defaults of its calls
        of the model. Raises what the program raises; with `stream`, reading the state does.
        """
        defaults = {name: kwargs.pop(name) for name in self._sampling(kwargs)}
        run = _begin(_backend(backend), defaults)
        (state,) = run.states
        self._signature.bind(state, *args, **kwargs)
        if stream:
            work = (run, args, kwargs)
            run.thread = threading.Thread(target=self._execute, args=work, name="tricorn-program", daemon=True)
            run.thread.start()
            return state
        self._execute(run, args, kwargs)
        return state.join()

    def run_batch(
        self,
        batch: Sequence[Mapping[str, Any]],
        *,
        backend: Any = None,
        num_threads: int = THREADS,
        progress_bar: bool = False,
        **defaults: Any,
    ) -> list[State]:
        """Runs the program once for each set of arguments, `num_threads` at a time. States come in the order of the
        batch; one that failed has its `error`, and the others go on. `defaults` are fields of `SamplingParams`.
        """
        if unknown := defaults.keys() - self._sampling(defaults):
            raise TypeError(f"run_batch() takes no {', '.join(sorted(unknown))}: arguments go into the batch")
        if num_threads < 1:
            raise TricornError(f"num_threads must be at least 1, not {num_threads}")
        where = _backend(backend)
        runs = [_begin(where, defaults) for _ in batch]
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tricorn-program")
        try:
            running = [
                pool.submit(self._execute, run, (), dict(arguments)) for run, arguments in zip(runs, batch, strict=True)
            ]
            with _bar(progress_bar) as bar:
                for future in bar.track(as_completed(running), total=len(running), description="running"):
                    future.result()
        except BaseException:
            for run in runs:
                run.cancelled = True
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return [run.states[0] for run in runs]

    def _sampling(self, given: Mapping[str, Any]) -> set[str]:
        return {name for name in given if name in SAMPLING and name not in self._signature.parameters}

    def _execute(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs the program's code and waits for all that it began. Its errors stay with the state."""
        run.thread = threading.current_thread()
        state = run.states[0]
        try:
            state.ret_value = self._body(state, *args, **kwargs)
        except BaseException as error:
            state.fail(error)
            run.cancelled = True
            if not isinstance(error, Exception):
                raise
        finally:
            run.finish()


def function(body: Callable[..., Any]) -> Function:
    """Makes a program of a function whose first argument is the state."""
    return Function(body)


def _backend(given: Any) -> Backend:
    if given is not None:
        return resolve(given)
    if not _default:
        raise TricornError("there is nothing to run the program on: give a backend, or call set_default_backend")
    return _default[0]


def _begin(backend: Backend, defaults: Mapping[str, Any]) -> Run:
    """A run with its first state, in which nothing has happened yet."""
    own = {name: value for name, value in defaults.items() if value is not None}
    if "stop" in own:
        own["stop"] = stops(own["stop"])
    seed = own.pop("seed", None)
    run = Run(backend, own)
    State(run, seed=seed)
    return run


def _bar(shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        transient=True,
        disable=not shown,
    )
