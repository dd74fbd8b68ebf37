"""A language for programs that call a model many times: turns, calls, choices, forks.

from tricorn.lang import assistant, function, gen, user

@function
def ask(s, question):
    s += user(question)
    s += assistant(gen("answer", max_tokens=64))

state = ask.run("What is the capital of France?", backend="http://127.0.0.1:8000")
print(state["answer"])
"""

from __future__ import annotations

from tricorn.lang.backend import Backend, Meta
from tricorn.lang.parts import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    select,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from tricorn.lang.program import Function, function, set_default_backend
from tricorn.lang.remote import Server
from tricorn.lang.state import Forks, State

__all__ = [
    "Backend",
    "Forks",
    "Function",
    "Meta",
    "Server",
    "State",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "function",
    "gen",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
]
