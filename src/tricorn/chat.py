"""`tricorn chat`: a conversation in the terminal."""

from __future__ import annotations

import readline  # noqa: F401  (gives input() its line editing)

from rich.console import Console

from tricorn.frontend.template import Message
from tricorn.llm import LLM
from tricorn.request import SamplingParams, TricornError


def converse(model: str, system: str | None, temperature: float, max_tokens: int, threads: int | None) -> None:
    """Reads questions from standard input and streams the answers until the input ends. Raises TricornError when the
    model cannot start."""
    console = Console(highlight=False)
    beginning: list[Message] = [{"role": "system", "content": system}] if system else []
    with LLM(model, threads=threads) as llm:
        console.print(f"[dim]{model}. /reset begins anew, /quit leaves, Ctrl-C stops an answer.[/dim]")
        history = list(beginning)
        while (line := _read()) is not None:
            if line == "/reset":
                history = list(beginning)
                console.print("[dim]a new conversation[/dim]")
            elif line.startswith("/"):
                console.print(f"[dim]no such command: {line}; there are /reset and /quit[/dim]", markup=True)
            elif line:
                question: Message = {"role": "user", "content": line}
                params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
                answer = _answer(llm, [*history, question], params, console)
                if answer is not None:
                    history += [question, {"role": "assistant", "content": answer}]


def _read() -> str | None:
    """A line, or None at the end."""
    try:
        line = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if line in ("/quit", "/exit") else line


def _answer(llm: LLM, messages: list[Message], params: SamplingParams, console: Console) -> str | None:
    """Streams one answer; what came of it until Ctrl-C, or None when the conversation cannot go on."""
    text = ""
    try:
        for delta in llm.stream_chat(messages, params):
            text += delta.text
            console.print(delta.text, end="", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        pass
    except TricornError as error:
        console.print(f"[red]{error}[/red] [dim](/reset begins anew)[/dim]")
        return None
    console.print()
    return text
