"""Files and batches, with OpenAI's own client against a served engine, and offline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from served import Served, served
from test_frontend_text import CHATML
from test_server_api import BPE, ScriptedEngine, drive
from tricorn import cli
from tricorn.engine.options import EngineOptions
from tricorn.frontend.generate import Frontend
from tricorn.frontend.template import ChatTemplate
from tricorn.request import TricornError
from tricorn.server import files, run_batch
from tricorn.server.batches import read_lines
from tricorn.server.errors import HttpError
from tricorn.server.files import Folder, parse_form

PLAIN = "/v1/completions"
KEYS = ("sk-first", "sk-second")


def line(index: int, url: str = PLAIN, **body: Any) -> dict[str, Any]:
    whole = {"model": "small", "prompt": f"number {index}", "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": f"r{index}", "method": "POST", "url": url, "body": whole}


def lines(requests: list[Any]) -> bytes:
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


@pytest.fixture(scope="module")
def engine(engine_for: Callable[..., Any]) -> Path:
    path: Path = engine_for("llama")[1].path
    return path


@pytest.fixture(scope="module")
def server(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("state")
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    with served(engine, "--state-dir", str(folder), *keys) as running:
        yield running


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0)


def ended(client: openai.OpenAI, id: str, seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while True:
        batch = client.batches.retrieve(id)
        if batch.status in ("completed", "failed", "cancelled", "expired"):
            return batch
        assert time.monotonic() < end, batch
        time.sleep(0.05)


def test_files_come_and_go(client: openai.OpenAI, server: Served) -> None:
    content = bytes(range(256)) * 40 + b"\r\n--x\r\n" + "ö".encode()
    file = client.files.create(file=("größer.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.object) == (len(content), "größer.jsonl", "batch", "file")
    assert client.files.content(file.id).content == content
    assert client.files.retrieve(file.id) == file
    assert file in client.files.list().data
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[1], max_retries=0)
    assert other.files.list().data == []
    for act in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            act(file.id)
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=file.id, endpoint=PLAIN, completion_window="24h")
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"x", purpose="fine-tune")


def test_a_batch_is_answered(client: openai.OpenAI) -> None:
    """Each line as the same request over HTTP would be; refused lines are in a file of their own."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "prompt": None}
    good = [line(index) for index in range(20)]
    file = client.files.create(file=lines([*good, line(20, n=0), line(21, model="other")]), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=PLAIN, completion_window="24h", metadata={"whose": "ours"}
    )
    batch = ended(client, batch.id)
    assert (batch.status, batch.metadata) == ("completed", {"whose": "ours"})
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (22, 20, 2)
    answers = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == {request["custom_id"] for request in good}
    for answer in answers[:5]:
        request = next(request for request in good if request["custom_id"] == answer["custom_id"])
        direct = client.completions.create(**request["body"])
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["choices"][0]["text"] == direct.choices[0].text
    refused = [json.loads(text) for text in client.files.content(batch.error_file_id).text.splitlines()]
    assert {answer["custom_id"]: answer["response"]["status_code"] for answer in refused} == {"r20": 400, "r21": 404}
    file = client.files.create(file=lines([line(1, "/v1/chat/completions", **chat)]), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert ended(client, batch.id).request_counts.completed == 1


def test_bad_files_fail_with_their_lines(client: openai.OpenAI) -> None:
    wrong = [line(1), line(1), line(2, "/v1/other"), {**line(3), "method": "GET"}, line(4, stream=True), 5]
    file = client.files.create(file=lines(wrong) + b"{", purpose="batch")
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=PLAIN, completion_window="24h").id)
    assert batch.status == "failed"
    assert [error.line for error in batch.errors.data] == [2, 3, 4, 5, 6, 7]
    for change in ({"endpoint": "/v1/nothing"}, {"completion_window": "1h"}):
        asked: Any = {"input_file_id": file.id, "endpoint": PLAIN, "completion_window": "24h", **change}
        with pytest.raises(openai.BadRequestError):
            client.batches.create(**asked)


def test_a_batch_may_be_cancelled(client: openai.OpenAI) -> None:
    file = client.files.create(
        file=lines([line(i, max_tokens=60, ignore_eos=True) for i in range(3000)]), purpose="batch"
    )
    batch = client.batches.create(input_file_id=file.id, endpoint=PLAIN, completion_window="24h")
    while client.batches.retrieve(batch.id).request_counts.completed == 0:
        time.sleep(0.02)
    started = time.monotonic()
    assert client.completions.create(model="small", prompt="x", max_tokens=1).usage is not None
    assert time.monotonic() - started < 10  # who asks now comes before a batch
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    count = len(client.files.content(batch.output_file_id).text.splitlines())
    assert 0 < count == batch.request_counts.completed < 3000


def test_a_batch_survives_a_restart(engine: Path, tmp_path: Path) -> None:
    requests = [line(index, max_tokens=30, ignore_eos=True) for index in range(300)]
    flags = ("--state-dir", str(tmp_path))
    with served(engine, *flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        file = client.files.create(file=lines(requests), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=PLAIN, completion_window="24h")
        while (count := client.batches.retrieve(batch.id).request_counts.completed) < 5:
            time.sleep(0.02)
        assert count < 300
    (part,) = tmp_path.glob("*.out")
    with part.open("ab") as broken:
        broken.write(b'{"id": "cut in the mid')
    with served(engine, *flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        batch = ended(client, batch.id)
        assert batch.status == "completed"
        answers = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(request["custom_id"] for request in requests)
    assert all(answer["response"]["body"]["usage"]["completion_tokens"] == 30 for answer in answers)


def test_offline(engine: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines([line(index) for index in range(12)]))
    command = ["run-batch", str(source), str(target), "--model", str(engine), "--name", "small", "--kv-bytes", "16M"]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output + str(result.exception)
    first = [json.loads(text) for text in target.read_text().splitlines()]
    assert len(first) == 12
    part = tmp_path / "out.jsonl.part"
    part.write_bytes(b"".join(target.read_bytes().splitlines(keepends=True)[:7]) + b'{"half')
    source.write_bytes(lines([*(line(index) for index in range(12)), line(12, n=0)]))
    assert CliRunner().invoke(cli.app, command).exit_code == 1
    second = [json.loads(text) for text in target.read_text().splitlines()]
    assert second[:7] == first[:7]
    assert not part.exists()

    def texts(answers: list[Any]) -> dict[str, str]:
        return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers}

    refused = [each for each in second if each["response"]["status_code"] != 200]
    assert [each["custom_id"] for each in refused] == ["r12"]
    assert texts([each for each in second if each not in refused]) == texts(first)
    source.write_text("{")
    assert "line 1" in str(CliRunner().invoke(cli.app, command).exception)


# --- without an engine


def test_one_folder_has_one_server(tmp_path: Path) -> None:
    first = Folder(tmp_path)
    with pytest.raises(TricornError, match="--state-dir"):
        Folder(tmp_path)
    first.close()
    Folder(tmp_path).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(TricornError, match="no files can be kept"):
        Folder(tmp_path / "file")


def test_without_a_folder_nothing_is_kept() -> None:
    async def work(http: httpx.AsyncClient) -> None:
        for answer in (
            await http.get("/v1/files"),
            await http.get("/v1/batches"),
            await http.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"}),
        ):
            assert answer.status_code == 503
            assert "--state-dir" in answer.json()["error"]["message"]

    drive(work, ScriptedEngine([5]))


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILE", 1000)
    monkeypatch.setattr(files, "MAX_FILES", 2)

    async def work(http: httpx.AsyncClient) -> None:
        def send(content: bytes) -> Any:
            return http.post("/v1/files", files={"file": content}, data={"purpose": "batch"})

        assert [(await send(b"x" * size)).status_code for size in (1000, 1001, 100_000, 10, 10)] == [
            200,
            413,
            413,
            200,
            413,
        ]
        assert (await http.post("/v1/files", content=b"x")).status_code == 415
        head = {"content-type": "multipart/form-data; boundary=b"}
        for broken in (b"", b"--b", b"--b\r\n\r\n\r\n--b--", b"x"):
            assert (await http.post("/v1/files", content=broken, headers=head)).status_code == 400

    drive(work, ScriptedEngine([5]), state_dir=tmp_path)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_form_and_no_file_breaks_its_reader(body: bytes) -> None:
    for reader in (lambda: parse_form(body, b"b"), lambda: parse_form(b"--b\r\n" + body + b"\r\n--b--", b"b")):
        try:
            fields = reader()
        except HttpError as error:
            assert error.status == 400  # noqa: PT017
        else:
            assert all(isinstance(content, bytes) for _, content in fields.values())
    found, faults = read_lines(body)
    assert found == [] or not faults or len(found) + len(faults) > 1


def test_offline_without_an_engine_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that dies for good ends the run, with what was answered kept."""
    engine = ScriptedEngine([5])
    engine.say = lambda request: [5] if len(engine.requests) < 4 else _die(engine)

    async def load(_: Any) -> Frontend:
        return Frontend(BPE, ChatTemplate(CHATML, BPE), engine)

    monkeypatch.setattr(run_batch, "load", load)
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(lines([line(index) for index in range(40)]))
    with pytest.raises(TricornError, match="the engine died"):
        run_batch.run(EngineOptions(path=""), "small", source, target, lambda done, total: None)
    assert not target.exists()
    assert (tmp_path / "out.part").read_bytes()


def _die(engine: ScriptedEngine) -> list[int]:
    engine.alive, engine.fail_after = False, 0
    return [5]
