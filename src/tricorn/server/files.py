"""Files of the OpenAI API: what batches read and write. Each belongs to the key that brought it, and lies in one
folder, with what is known of it beside it.

POST /v1/files (multipart), GET /v1/files, GET and DELETE /v1/files/{id}, GET /v1/files/{id}/content
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tricorn.request import TricornError
from tricorn.server.errors import HttpError, printable
from tricorn.server.exchange import Exchange
from tricorn.server.routes import Operation, Routes

Fields = dict[str, Any]

MAX_FILE = 64 * 2**20
"""Bytes of a file."""

MAX_FILES = 1000
MAX_TOTAL = 2 * 2**30
"""Bytes of all files."""

UPLOADS = 4
"""Files that may arrive at once: each takes memory."""

FORM = 2**16
"""Bytes that a form may add to its file."""

log = logging.getLogger("tricorn.server")


class File(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a file. `caller` is whose it is."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    caller: str = ""

    @property
    def fields(self) -> Fields:
        """As the OpenAI API writes it."""
        known = msgspec.to_builtins(self)
        del known["caller"]
        return {**known, "object": "file", "status": "processed"}


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


class Folder:
    """Records and contents by id, in a folder that one server has to itself. Raises TricornError when it cannot."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise TricornError(f"another server keeps its files in {path}: choose another --state-dir") from None
        except OSError as error:
            raise TricornError(f"no files can be kept in {path}: {error.strerror}") from None

    def content(self, id: str) -> Path:
        return self.path / id

    def write(self, id: str, record: Any) -> None:
        """Whole or not at all."""
        part = self.path / f"{id}.part"
        part.write_bytes(msgspec.json.encode(record))
        part.replace(self.path / f"{id}.json")

    def read(self, kind: str, of: type[msgspec.Struct]) -> Iterator[Any]:
        """All records whose id begins with `kind`."""
        for path in sorted(self.path.glob(f"{kind}-*.json")):
            with suppress(OSError, msgspec.DecodeError):
                yield msgspec.json.decode(path.read_bytes(), type=of)

    def remove(self, id: str) -> None:
        for path in (self.path / f"{id}.json", self.path / id):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)


def open_folder(path: Path | None) -> tuple[Folder | None, str]:
    """The folder, or None and why there is none."""
    if path is None:
        return None, "this server keeps no files: start it with --state-dir"
    try:
        return Folder(path), ""
    except TricornError as error:
        log.warning(str(error))
        return None, str(error)


class Files:
    """The files, and their handlers. Without a folder every request is refused."""

    def __init__(self, folder: Folder | None, why: str) -> None:
        self.folder = folder
        self._why = why
        self._files: dict[str, File] = {}
        if folder is not None:
            self._files = {file.id: file for file in folder.read("file", File)}
        self._uploading = asyncio.Semaphore(UPLOADS)

    @property
    def routes(self) -> Routes:
        return (
            Operation("POST", "/v1/files", self.upload, "key", "Keep a file: a form with `file`, `purpose`"),
            Operation("GET", "/v1/files", self.index, "key", "The files of this key"),
            Operation("GET", "/v1/files/{id}", self.show, "key", "What is known of a file"),
            Operation("DELETE", "/v1/files/{id}", self.delete, "key", "Forget a file"),
            Operation(
                "GET", "/v1/files/{id}/content", self.read, "key", "A file's bytes", gives="application/octet-stream"
            ),
        )

    def open(self) -> Folder:
        """Raises HttpError 503."""
        if self.folder is None:
            raise HttpError(503, self._why, code="no_files")
        return self.folder

    def find(self, exchange: Exchange, id: str | None) -> File:
        """A file of this caller. Raises HttpError 404."""
        self.open()
        file = self._files.get(id or "")
        if file is None or file.caller != exchange.caller:
            raise HttpError(404, f"no file {printable(id or '', 80)!r}", "file_id", "not_found")
        return file

    def add(self, caller: str, filename: str, purpose: str, content: bytes | Path) -> File:
        """Keeps bytes, or a file that is moved here. Raises HttpError 413."""
        folder = self.open()
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        total = sum(file.bytes for file in self._files.values())
        if isinstance(content, bytes) and (len(self._files) >= MAX_FILES or total + size > MAX_TOTAL):
            raise HttpError(413, "no room for more files: delete some", "file", "too_many_files")
        file = File(
            id=new_id("file"),
            bytes=size,
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
            caller=caller,
        )
        if isinstance(content, bytes):
            folder.content(file.id).write_bytes(content)
        else:
            content.replace(folder.content(file.id))
        folder.write(file.id, file)
        self._files[file.id] = file
        return file

    # --- handlers

    async def upload(self, exchange: Exchange) -> None:
        async with self._uploading:
            boundary = _boundary(exchange.header(b"content-type"))
            body = await exchange.read(MAX_FILE + FORM)
            self.open()
            form = parse_form(body, boundary)
            if "file" not in form or "purpose" not in form:
                missing = "purpose" if "file" in form else "file"
                raise HttpError(400, f"the form has no field {missing}", missing, "invalid_value")
            filename, content = form["file"]
            purpose = form["purpose"][1]
            if purpose != b"batch":
                raise HttpError(400, "purpose must be batch", "purpose", "invalid_value")
            if len(content) > MAX_FILE:
                raise HttpError(413, f"the file holds more than {MAX_FILE} bytes", "file", "file_too_large")
            file = self.add(exchange.caller, printable(filename, 200), "batch", content)
        await exchange.answer_json(file.fields)

    async def index(self, exchange: Exchange) -> None:
        self.open()
        mine = [file.fields for file in reversed(self._files.values()) if file.caller == exchange.caller]
        await exchange.answer_json({"object": "list", "data": mine, "has_more": False})

    async def show(self, exchange: Exchange) -> None:
        await exchange.answer_json(self.find(exchange, exchange.path_parameter("id")).fields)

    async def delete(self, exchange: Exchange) -> None:
        file = self.find(exchange, exchange.path_parameter("id"))
        self.open().remove(file.id)
        del self._files[file.id]
        await exchange.answer_json({"id": file.id, "object": "file", "deleted": True})

    async def read(self, exchange: Exchange) -> None:
        file = self.find(exchange, exchange.path_parameter("id"))
        content = await asyncio.to_thread(self.open().content(file.id).read_bytes)
        await exchange.answer(200, content, b"application/octet-stream")


# --- forms


def _boundary(kind: bytes | None) -> bytes:
    """Raises HttpError 415."""
    found = re.fullmatch(rb'multipart/form-data\s*;.*\bboundary=(?:"([^"]{1,70})"|([^\s;]{1,70})).*', kind or b"", re.I)
    if found is None:
        raise HttpError(415, "the content type must be multipart/form-data", code="unsupported_media_type")
    return found[1] or found[2]


def parse_form(body: bytes, boundary: bytes) -> dict[str, tuple[str, bytes]]:
    """Fields by name: a file's name ("" for none) and its content. Raises HttpError 400."""
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise HttpError(400, "the form does not end as it begins", code="invalid_form")
    fields: dict[str, tuple[str, bytes]] = {}
    for part in parts[1:-1]:
        head, separator, content = part.partition(b"\r\n\r\n")
        names = dict(re.findall(r';\s*(name|filename)="([^"]*)"', head.decode("utf-8", "replace")))
        if not separator or "name" not in names or len(fields) > 16:
            raise HttpError(400, "a part of the form has no name", code="invalid_form")
        fields[names["name"]] = (names.get("filename", ""), content)
    return fields
