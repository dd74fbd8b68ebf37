"""The language for programs: over a scripted backend, over small random engines and a real one, in this process and
behind a server, which must agree.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Literal

import httpx
import pydantic
import pytest
import uvicorn

pytest.importorskip("tricorn._native", reason="the native extension is not built: run make setup")

from tricorn.engine.client import InProcessClient
from tricorn.engine.options import EngineOptions
from tricorn.frontend.generate import Frontend, load_text
from tricorn.lang import (
    Meta,
    Server,
    State,
    assistant,
    assistant_begin,
    assistant_end,
    function,
    gen,
    select,
    set_default_backend,
    system,
    user,
    user_begin,
    user_end,
)
from tricorn.lang.backend import Piece, Pieces
from tricorn.lang.constraint import Constraint, constrain, for_server
from tricorn.lang.transcript import Prompt
from tricorn.llm import LLM
from tricorn.request import SamplingParams, TricornError
from tricorn.server.app import ServerOptions, create_app
from tricorn.server.serve import listen

# --- backends


class Scripted:
    """A backend that answers as `say` tells, in two pieces, and notes what it was asked."""

    def __init__(self, say: Callable[[Prompt], str] = lambda prompt: "ok", reason: str = "stop") -> None:
        self.say = say
        self.reason = reason
        self.asked: list[tuple[Prompt, SamplingParams, Constraint | None]] = []

    def generate(self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None) -> Pieces:
        if params.max_tokens > 1:  # not only to compute a prompt
            self.asked.append((prompt, params, constraint))
            text = self.say(prompt)
            yield Piece(text[:1])
            yield Piece(text[1:])
        yield Piece("", Meta(len(prompt.text), 0, 2, self.reason))

    def score(self, prompt: Prompt, choices: Sequence[str]) -> Meta:
        return Meta(len(prompt.text), 0, scores=tuple(-float(len(choice)) for choice in choices))


@contextmanager
def served(path: str, **options: Any) -> Iterator[str]:
    """The URL of a server over an engine of its own."""
    from tricorn.compiler import EngineFile

    client = InProcessClient(EngineOptions(path=path, **options))
    frontend = Frontend(*load_text(EngineFile.open(path)), client)  # type: ignore[arg-type]
    listener = listen("127.0.0.1", 0)
    app = create_app(frontend, ServerOptions(name="m"))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        client.close()
        frontend.close()


@pytest.fixture(scope="module")
def path(engine_for: Callable[..., Any]) -> str:
    return str(engine_for("llama", max_position_embeddings=2048)[1].path)


@pytest.fixture(scope="module")
def llm(path: str) -> Iterator[LLM]:
    with LLM(path, progress=False, kv_bytes=16 << 20, debug_checks=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def url(path: str) -> Iterator[str]:
    with served(path, kv_bytes=16 << 20, debug_checks=True) as url:
        yield url


@pytest.fixture(params=["llm", "url"])
def backend(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


# --- programs


@function
def questions(s: State, first: str, second: str) -> None:
    s += system("You are brief.")
    s += user(first)
    s += assistant(gen("one", max_tokens=12))
    s += user(second)
    s += assistant("Well, " + gen("two", max_tokens=20, stop=["e", "\n"]) + ".")


@function
def tree_of_thought(s: State, question: str, branches: int) -> str:
    s += user(question)
    proposals = s.fork(branches)
    proposals += assistant("Idea: " + gen("idea", max_tokens=10))
    best = []
    for proposal in proposals:
        proposal += user("Is it any good?")
        proposal += assistant(select("verdict", ["yes", "no", "perhaps"]))
        best.append(proposal["verdict"])
    proposals.join()
    s += assistant(" / ".join(proposals["idea"]) + gen("answer", max_tokens=10))
    return " ".join(best)


@function
def raw(s: State, topic: str) -> None:
    s += f"Tips about {topic}:\n"
    for number, fork in enumerate(forks := s.fork(2)):
        fork += f"{number}. " + gen("tip", max_tokens=8, temperature=0.9)
    for fork in forks:
        s += fork["tip"] + "\n"
    s += "The best is " + select("best", ["the first", "the second"])
    s += " because" + gen("why", max_tokens=8)


def outcome(state: State) -> Any:
    """All that must not depend on what runs the program, or on what ran before."""
    metas = [
        (v.meta.finish_reason, v.meta.stop_reason, v.meta.prompt_tokens, v.meta.completion_tokens, v.meta.scores)
        for v in state._variables.values()
        if not isinstance(v, list)
    ]
    return state.text(), state.messages(), {name: state[name] for name in state._variables}, metas, state.ret_value


PROGRAMS = [
    (questions, {"first": "Why is snow white?", "second": "And <|im_end|> rain?"}),
    (tree_of_thought, {"question": "How to fold a map?", "branches": 3}),
    (raw, {"topic": "tea"}),
]


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0, "seed": 3}, {"seed": 7}, {"seed": -1, "temperature": 0.7, "top_p": 0.9}]
)
@pytest.mark.parametrize(("program", "arguments"), PROGRAMS, ids=["questions", "tree", "raw"])
def test_both_backends_agree(llm: LLM, url: str, program: Any, arguments: Any, sampling: Any) -> None:
    here = outcome(program.run(**arguments, **sampling, backend=llm))
    assert outcome(program.run(**arguments, **sampling, backend=url)) == here
    assert outcome(program.run(**arguments, **sampling, backend=llm)) == here
    assert here[0]


def test_turns_are_rendered_as_the_chat_does(llm: LLM) -> None:
    state = questions.run("A", "B", backend=llm, temperature=0)
    messages = state.messages()
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[2]["content"] == state["one"]
    assert messages[4]["content"] == f"Well, {state['two']}."
    (answer,) = llm.chat(messages[:2], SamplingParams(max_tokens=12, temperature=0), progress=False)
    assert answer.outputs[0].text == state["one"]
    assert state.meta("one").prompt_tokens == len(answer.prompt_token_ids)
    begun = llm.encode_chat(messages[:4], "Well, ")
    assert begun == llm.encode_chat(messages[:4]) + llm.encode("Well, ")
    assert state.meta("two").prompt_tokens == len(begun)
    assert len(llm.encode_chat(messages[:1], "<|im_end|>")) == len(llm.encode_chat(messages[:1])) + len("<|im_end|>")


def test_forks_share_their_prefix(backend: Any) -> None:
    @function
    def program(s: State, name: str) -> Any:
        s += system(f"You are {name}, and this is a prompt that nobody has sent before {name}.")
        s += user("Tell me something.")
        forks = s.fork(4)
        for place, fork in enumerate(forks):
            fork += assistant(f"{place} " + gen("text", max_tokens=4))
        return forks

    forks = program.run(f"number {id(backend)}", backend=backend, temperature=0).ret_value
    for fork in forks:
        meta = fork.meta("text")
        assert meta.prompt_tokens > 100
        assert meta.cached_tokens >= meta.prompt_tokens - 2 - 1  # its own digit and space, and the token to go on from


def test_select_is_the_mean_log_likelihood(llm: LLM, backend: Any) -> None:
    choices = ["yes", "no, never", "perhaps so"]

    @function
    def program(s: State) -> None:
        s += "A question that is long enough to fill some pages of the cache. Answer: " + select("it", choices)

    state = program.run(backend=backend)
    text = state.text().removesuffix(state["it"])
    first = len(llm.encode(text))
    expected = []
    for choice in choices:
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        (answer,) = llm.generate(text + choice, params, progress=False)
        values = [entry.logprob for entry in (answer.prompt_logprobs or [])[first:] if entry]
        expected.append(sum(values) / len(choice))  # a token is a byte here
    meta = state.meta("it")
    assert meta.scores == pytest.approx(expected)
    assert state["it"] == choices[expected.index(max(expected))]
    assert meta.prompt_tokens == sum(first + len(choice) for choice in choices)
    assert meta.cached_tokens >= 3 * (first - 1)


def test_scores_from_a_place_on(llm: LLM) -> None:
    """The same bits as when all of the prompt is scored, and what comes before is reused."""
    prompt = llm.encode("The quick brown fox jumps over the lazy dog, twice a day.")

    def scored(start: int, tokens: int) -> Any:
        params = SamplingParams(max_tokens=tokens, temperature=0, prompt_logprobs=2, prompt_logprobs_start=start)
        return llm.generate(prompt, params, progress=False)[0]

    whole = scored(0, 3)
    assert whole.cached_tokens == 0
    for start in (1, 2, 16, 17, 40, len(prompt) - 1, len(prompt), len(prompt) + 9):
        for tokens in (0, 3):
            part = scored(start, tokens)
            known = min(start, len(prompt))
            assert part.prompt_logprobs[:known] == [None] * known
            assert part.prompt_logprobs[known:] == whole.prompt_logprobs[known:]
            assert part.outputs[0].token_ids == whole.outputs[0].token_ids[:tokens]
            assert part.cached_tokens >= min(start, len(prompt) - 1) - 1
    with pytest.raises(TricornError, match="prompt_logprobs_start"):
        scored(-1, 0)


def test_an_answer_that_the_client_begins(url: str) -> None:
    def ask(**fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
        body = {"messages": messages, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **fields}
        return httpx.post(f"{url}/v1/chat/completions", json=body)

    (begun,) = ask(continue_final_message=True, add_generation_prompt=False).json()["choices"]
    (new,) = ask(add_generation_prompt=True).json()["choices"]
    assert begun["prompt_token_ids"] == new["prompt_token_ids"][: len(begun["prompt_token_ids"])]
    assert bytes(begun["prompt_token_ids"][-4:]) == b"Well"
    for wrong, field in (
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "messages": [{"role": "user", "content": "Hi"}]}, "continue_final_message"),
        (
            {"continue_final_message": True, "messages": [{"role": "assistant", "content": "Hi"}]},
            "continue_final_message",
        ),
    ):
        answer = ask(**wrong)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field


# --- running


def test_forks_run_side_by_side() -> None:
    together = threading.Barrier(3, timeout=20)

    def say(prompt: Prompt) -> str:
        together.wait()
        return f"<{prompt.text}>"

    @function
    def program(s: State) -> list[str]:
        forks = s.fork(3)
        for place, fork in enumerate(forks):
            fork += f"{place}" + gen("x")
        forks.join()
        return s["x"]

    assert program.run(backend=Scripted(say)).ret_value == ["<0>", "<1>", "<2>"]


def test_a_batch_is_bounded_ordered_and_survives_errors(capsys: pytest.CaptureFixture[str]) -> None:
    lock, running, most = threading.Lock(), 0, 0
    filled = threading.Barrier(3, timeout=20)

    def say(prompt: Prompt) -> str:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        filled.wait()  # nine programs pass three at a time, so fewer at once would hang
        with lock:
            running -= 1
        if prompt.text == "4":
            raise TricornError("four fails")
        return prompt.text

    @function
    def program(s: State, x: int) -> None:
        s += str(x) + gen("y")
        if s["y"] == "7":
            raise ValueError("seven is refused")

    batch: list[dict[str, Any]] = [{"x": x} for x in range(9)]
    backend = Scripted(say)
    states = program.run_batch([*batch, {"z": 1}], backend=backend, num_threads=3, progress_bar=True)
    assert most == 3
    assert [type(state.error) for state in states[4:5] + states[7:8] + states[9:]] == [
        TricornError,
        ValueError,
        TypeError,
    ]
    assert [state["y"] for place, state in enumerate(states[:9]) if place != 4] == [*"0123", *"5678"]
    with pytest.raises(TricornError, match="four fails"):
        states[4]["y"]
    with pytest.raises(ValueError, match="seven"):
        states[7].text()
    assert "Traceback" not in capsys.readouterr().out
    assert program.run_batch([], backend=backend) == []
    with pytest.raises(TypeError, match="nonsense"):
        program.run_batch(batch, backend=backend, nonsense=1)
    with pytest.raises(TricornError, match="num_threads"):
        program.run_batch(batch, backend=backend, num_threads=0)


def test_a_batch_equals_its_programs_alone(backend: Any) -> None:
    batch = [{"first": f"Question {n}?", "second": "Why?"} for n in range(6)]
    together = questions.run_batch(batch, backend=backend, seed=5)
    for arguments, state in zip(batch, together, strict=True):
        assert outcome(state) == outcome(questions.run(**arguments, backend=backend, seed=5))


def test_streams_come_by_variable(backend: Any) -> None:
    state = questions.run("A", "B", backend=backend, temperature=0, stream=True)
    pieces = list(state.text_iter("two"))
    assert len(pieces) > 1
    assert "".join(pieces) == state["two"]
    assert "".join(state.text_iter("one")) == state["one"]
    whole = "".join(state.text_iter())
    assert whole == "".join(message["content"] for message in state.messages())
    with pytest.raises(KeyError):
        list(state.text_iter("three"))


def test_a_stream_shows_text_before_its_end_and_can_be_cancelled(llm: LLM) -> None:
    @function
    def endless(s: State) -> None:
        s += "x" + gen("y", max_tokens=1900, ignore_eos=True, temperature=0)
        s += gen("z", max_tokens=4)

    state = endless.run(backend=llm, stream=True)
    next(state.text_iter("y"))
    state.cancel()
    with pytest.raises(TricornError, match="cancelled"):
        state["z"]
    with pytest.raises(TricornError, match="cancelled"):
        list(state.text_iter())


def test_a_failing_stream_tells_its_reader() -> None:
    def say(prompt: Prompt) -> str:
        raise TricornError("the engine is gone")

    state = questions.run("A", "B", backend=Scripted(say), stream=True)
    with pytest.raises(TricornError, match="gone"):
        list(state.text_iter("two"))
    with pytest.raises(TricornError, match="gone"):
        state["one"]
    assert isinstance(state.error, TricornError)


def test_seeds_of_forks(llm: LLM) -> None:
    @function
    def program(s: State) -> list[str]:
        s += "Once"
        forks = s.fork(3)
        forks += gen("x", max_tokens=12)
        return forks["x"]

    first = program.run(backend=llm, seed=1).ret_value
    assert len(set(first)) == 3
    assert program.run(backend=llm, seed=1).ret_value == first
    assert program.run(backend=llm, seed=2).ret_value != first


def test_defaults_of_a_run_and_what_a_call_says() -> None:
    @function
    def program(s: State, temperature: float) -> None:
        s += "a" + gen("x") + gen("y", max_tokens=5, stop="!", seed=3, top_k=2)

    backend = Scripted()
    state = program.run(temperature=99.0, backend=backend, max_tokens=7, stop=["?", "."], seed=1)
    (_, x, _), (_, y, _) = backend.asked
    assert (x.max_tokens, x.stop, x.seed, x.temperature) == (7, ("?", "."), 1, 1.0)
    assert (y.max_tokens, y.stop, y.seed, y.top_k) == (5, ("!",), 3, 2)
    assert state.text() == "aokok"
    program.run(1.0, backend=backend)
    assert backend.asked[-2][1].max_tokens == 128


def test_the_default_backend() -> None:
    @function
    def program(s: State) -> None:
        s += "a" + gen("x")

    from tricorn.lang import program as module

    module._default.clear()
    with pytest.raises(TricornError, match="set_default_backend"):
        program.run()
    try:
        set_default_backend(Scripted())
        assert program.run()["x"] == "ok"
    finally:
        module._default.clear()
    with pytest.raises(TypeError, match="int"):
        program.run(backend=5)
    with pytest.raises(TricornError, match="http"):
        program.run(backend="smollm2")


# --- states


def test_turns_in_every_spelling() -> None:
    @function
    def program(s: State) -> None:
        s += user_begin() + "a"
        s += "b" + user_end()
        s += assistant_begin() + gen("x") + assistant_end()
        with s.user():
            s += "c"
        with s.assistant():
            s += gen("y")
        part(s, "d")

    @function
    def part(s: State, text: str) -> None:
        s += user(text) + assistant(gen("z") + "!")

    backend = Scripted()
    state = program.run(backend=backend)
    contents = ["ab", "ok", "c", "ok", "d", "ok!"]
    assert state.messages() == [
        {"role": role, "content": content} for role, content in zip(["user", "assistant"] * 3, contents, strict=True)
    ]
    assert state.text() == "\n".join(contents)
    assert [len(prompt.messages or ()) for prompt, _, _ in backend.asked] == [1, 3, 5]


@pytest.mark.parametrize(
    ("added", "match"),
    [
        (user("a" + gen("x")), "turn of user"),
        (user("a") + gen("x"), "outside of a turn"),
        (user("a") + "text", "outside of a turn"),
        ("text" + user("a"), "after text outside"),
        (user_begin() + assistant_begin(), "inside of that of user"),
        (user_end(), "not begun"),
        (user_begin() + assistant_end(), "not begun"),
        ("a" + gen("x", temperature="hot"), "temperature"),
        (user("a") + select("x", ["b"]), "outside of a turn"),
    ],
)
def test_what_makes_no_sense_is_refused(added: Any, match: str) -> None:
    @function
    def program(s: State) -> None:
        s += added
        s.join()

    with pytest.raises(TricornError, match=match):
        program.run(backend=Scripted())


def test_bad_arguments_are_refused_at_once() -> None:
    for bad in ({"nonsense": 1}, {"n": 2}, {"logprobs": 1}):
        with pytest.raises(TypeError, match=next(iter(bad))):
            gen("x", **bad)
    for choices in ([], [""], "ab", [1]):
        with pytest.raises(TricornError, match="choices"):
            select("x", choices)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int"):
        "a" + gen("x") + 3  # type: ignore[operator]

    @function
    def program(s: State, a: int) -> None:
        s += a  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="int"):
        program.run(1, backend=Scripted())
    with pytest.raises(TypeError, match="missing"):
        program.run(backend=Scripted())
    with pytest.raises(TricornError, match="at least one"):
        State.fork(program.run(a="", backend=Scripted()), 0)  # type: ignore[arg-type]


def test_reading_variables() -> None:
    answers = iter(["first", "second"])

    @function
    def program(s: State) -> None:
        assert "x" not in s
        with pytest.raises(KeyError):
            s["x"]
        s += "a" + gen("x")
        assert s["x"] == "first"
        s += "b" + gen("x") + gen() + "c"
        assert s["x"] == "second"
        s += "d" + gen("x")
        with pytest.raises(TricornError, match="no more"):
            s["x"]  # the value before must not pass for this one
        raise LookupError("seen")

    def say(prompt: Prompt) -> str:
        if prompt.text.endswith("d"):
            raise TricornError("no more")
        return next(answers) if prompt.text[-1] in "ab" else "!"

    with pytest.raises(TricornError, match="no more"):
        program.run(backend=Scripted(say))


def test_an_error_in_a_fork_that_nobody_reads_is_not_lost() -> None:
    def say(prompt: Prompt) -> str:
        if prompt.text == "bad":
            raise TricornError("a fork fails")
        return "ok"

    @function
    def program(s: State, care: bool) -> str:
        bad, good = s.fork(2)
        bad += "bad" + gen("x")
        good += "good" + gen("x")
        if care:
            assert isinstance(bad.error, TricornError)
        return str(good["x"])

    assert program.run(True, backend=Scripted(say)).ret_value == "ok"
    with pytest.raises(TricornError, match="a fork fails"):
        program.run(False, backend=Scripted(say))


def test_no_thread_stays() -> None:
    questions.run_batch([{"first": "a", "second": "b"}] * 4, backend=Scripted())
    until = time.monotonic() + 10
    while any(t.name.startswith(("tricorn-lang", "tricorn-program")) for t in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


# --- constraints


class Finding(pydantic.BaseModel):
    line: int
    severity: Literal["low", "high"]


class Review(pydantic.BaseModel):
    summary: str
    findings: list[Finding]


@function
def review(s: State, code: str) -> None:
    s += system("You review code.") + user(code)
    s += assistant(gen("review", schema=Review, max_tokens=200))


ANSWER = '{"summary": "fine", "findings": [{"line": 3, "severity": "low"}]}'


def test_a_review_into_a_pydantic_model() -> None:
    backend = Scripted(lambda prompt: ANSWER)
    state = review.run("x = 1", backend=backend)
    assert state["review"] == ANSWER
    assert state.parsed("review") == Review(summary="fine", findings=[Finding(line=3, severity="low")])
    constraint = backend.asked[0][2]
    assert constraint is not None
    assert (constraint.kind, json.loads(constraint.source)) == ("json_schema", Review.model_json_schema())


@pytest.mark.parametrize("schema", [{"type": "object"}, '{"type": "object"}', True])
def test_schemas_that_are_json(schema: Any) -> None:
    @function
    def program(s: State) -> None:
        s += "a" + gen("x", schema=schema) + gen("y")

    state = program.run(backend=Scripted(lambda prompt: '{"b": [1]}'))
    assert state.parsed("x") == {"b": [1]}
    with pytest.raises(TricornError, match="without a schema"):
        state.parsed("y")


def test_a_text_that_was_cut_off_is_not_parsed() -> None:
    state = review.run("x", backend=Scripted(lambda prompt: ANSWER[:20], reason="length"))
    assert state["review"] == ANSWER[:20]
    with pytest.raises(TricornError, match="ended by length"):
        state.parsed("review")


def test_a_server_that_ignores_a_constraint_is_noticed() -> None:
    for options in ({"schema": Review}, {"choices": ["a", "b"]}):

        @function
        def program(s: State, options: Any) -> None:
            s += "a" + gen("x", **options)

        with pytest.raises(TricornError, match="did not keep to"):
            program.run(options, backend=Scripted(lambda prompt: "nonsense"))


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "[0-9]{3}"},
        {"schema": Finding},
        {"choices": ["a", "bc"]},
        {"grammar": 'start: "a" "b"+'},
    ],
    ids=lambda options: next(iter(options)),
)
def test_both_backends_keep_to_constraints(backend: Any, options: Any) -> None:
    @function
    def program(s: State) -> None:
        s += user("Hi") + assistant(gen("x", max_tokens=60, temperature=1.0, seed=3, **options))

    state = program.run(backend=backend)
    ended = state.meta("x").finish_reason == "stop"
    match options:
        case {"regex": pattern}:
            assert re.fullmatch(pattern, state["x"])
        case {"choices": choices}:
            assert state["x"] in choices
        case {"grammar": _}:
            assert re.fullmatch("ab+" if ended else "ab*|", state["x"])
        case {"schema": _} if ended:
            assert isinstance(state.parsed("x"), Finding)


def test_an_impossible_constraint_is_an_error(backend: Any) -> None:
    @function
    def program(s: State) -> None:
        s += user("Hi") + assistant(gen("x", regex="(("))

    with pytest.raises(TricornError, match="regex"):
        program.run(backend=backend)


def test_how_servers_are_told() -> None:
    def fields(**options: Any) -> Any:
        return for_server(constrain(**{"regex": None, "schema": None, "choices": None, "grammar": None, **options}))

    assert fields() == {}
    assert fields(regex="a+") == {"structured_outputs": {"regex": "a+"}}
    assert fields(choices=["a", "b"]) == {"structured_outputs": {"choice": ["a", "b"]}}
    assert fields(grammar="start: X") == {"structured_outputs": {"grammar": "start: X"}}
    told = fields(schema=Review)["response_format"]
    assert told["type"] == "json_schema"
    assert told["json_schema"]["schema"] == Review.model_json_schema()
    with pytest.raises(TricornError, match="regex and choices"):
        fields(regex="a", choices=["b"])
    for bad in ({"schema": 5}, {"schema": "{"}, {"choices": []}, {"choices": "ab"}):
        with pytest.raises(TricornError, match=next(iter(bad))):
            fields(**bad)


# --- other servers


class Foreign(BaseHTTPRequestHandler):
    """A server that tells no ids; it is busy at first, and fails for a question of "die" in its stream."""

    bodies: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    busy = 0

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "foreign"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Foreign.bodies.append((self.path, body))
        if body["max_tokens"] == 0:
            self._answer(200, {"choices": [{"index": 0, "text": ""}], "usage": {"prompt_tokens": 1}})
        elif Foreign.busy:
            Foreign.busy -= 1
            self._answer(429, {"error": {"message": "busy"}}, ("retry-after", "0"))
        elif "stop" in body:
            self._answer(400, {"error": {"message": "no stop strings here"}})
        else:
            self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        said = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        chunks: list[Any] = [{"choices": [{"index": 0, "delta": {"content": "Hel"}}]}]
        if said != "die":
            chunks.append({"choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": "stop"}]})
            chunks.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})
        self.send_response(200)
        self.end_headers()
        for chunk in chunks:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _answer(self, status: int, body: Any, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def foreign() -> Iterator[str]:
    Foreign.bodies.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_that_tells_no_ids(foreign: str) -> None:
    @function
    def program(s: State, question: str, **options: Any) -> None:
        s += user(question) + assistant("Say: " + gen("x", **options) + gen("y"))

    Foreign.busy = 2
    backend = Server(foreign)
    state = program.run("Hi", backend=backend)
    assert state.text() == "Hi\nSay: HelloHello"
    assert state.meta("x") == Meta(5, 0, 2, "stop")
    path, body = Foreign.bodies[-1]
    assert (path, body["model"]) == ("/v1/chat/completions", "foreign")
    assert body["messages"][-1] == {"role": "assistant", "content": "Say: Hello"}
    assert body["continue_final_message"] is True
    with pytest.raises(TricornError, match="400: no stop strings"):
        program.run("Hi", backend=backend, stop="a")

    @function
    def choose(s: State) -> None:
        s += user("Hi") + assistant(select("x", ["a", "b"]))

    with pytest.raises(TricornError, match="select needs"):
        choose.run(backend=backend)

    @function
    def broken(s: State) -> None:
        s += "die" + gen("x")

    with pytest.raises(TricornError, match="without its usage"):
        broken.run(backend=backend)


def test_a_server_that_is_not_there(foreign: str) -> None:
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    (state,) = questions.run_batch([{"first": "a", "second": "b"}], backend=url)
    assert "cannot be asked" in str(state.error)


# --- a real model


def test_programs_on_a_real_model(smollm2_engine: Any) -> None:
    options: dict[str, Any] = {"kv_bytes": 24 << 20}
    with LLM(str(smollm2_engine), progress=False, **options) as llm, served(str(smollm2_engine), **options) as url:
        for sampling in ({"temperature": 0, "seed": 3}, {"seed": 11}):
            for program, arguments in PROGRAMS:
                here = program.run(**arguments, **sampling, backend=llm)
                there = program.run(**arguments, **sampling, backend=url)
                assert outcome(here) == outcome(there)

        @function
        def capital(s: State) -> None:
            s += user("What is the capital of France?")
            s += assistant("The capital of France is" + select("city", [" Paris", " Berlin", " Madrid"]))

        state = capital.run(backend=llm)
        assert state["city"] == " Paris"
        assert state.meta("city").cached_tokens >= state.meta("city").prompt_tokens - 3 * 2
