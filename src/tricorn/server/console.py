"""The console at /console: a page for people, and the few files that it is made of.

The files hold no data and are open to anybody; what they show they fetch from the guarded routes, with the keys that
whoever looks at them gives. The policy lets the page load nothing and call nobody but this server.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tricorn.server.errors import HttpError, printable
from tricorn.server.exchange import Exchange
from tricorn.server.routes import Operation, Routes

FOLDER = Path(__file__).parent / "web"
PAGE = "index.html"

KINDS = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}

POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    b" form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)

HEADERS = (
    (b"content-security-policy", POLICY),
    (b"cache-control", b"no-cache"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


@dataclass(frozen=True)
class File:
    """A file as it is served. `etag` goes by the content alone."""

    body: bytes
    kind: bytes
    etag: bytes


class Console:
    """The handlers. The files are read once, when the server starts."""

    def __init__(self) -> None:
        self._files = {path.name: _read(path) for path in FOLDER.iterdir() if path.suffix in KINDS}

    @property
    def routes(self) -> Routes:
        return (
            Operation("GET", "/console", self.page, "open", "The console, for people", gives="text/html"),
            Operation("GET", "/console/{file}", self.file, "open", "What it is made of", gives="text/javascript"),
        )

    async def page(self, exchange: Exchange) -> None:
        await self._give(exchange, self._files[PAGE])

    async def file(self, exchange: Exchange) -> None:
        name = exchange.path_parameter("file") or ""
        if name not in self._files:
            raise HttpError(404, f"the console has no file {printable(name, 80)!r}", code="not_found")
        await self._give(exchange, self._files[name])

    async def _give(self, exchange: Exchange, file: File) -> None:
        """The file, or 304 to who has it. A cache must ask each time, so a new version is seen at once."""
        headers = (*HEADERS, (b"etag", file.etag))
        known = (exchange.header(b"if-none-match") or b"").replace(b"W/", b"").split(b",")
        if file.etag in (tag.strip() for tag in known):
            await exchange.answer(304, b"", file.kind, headers)
        else:
            await exchange.answer(200, file.body, file.kind, headers)


def _read(path: Path) -> File:
    body = path.read_bytes()
    return File(body, KINDS[path.suffix], b'"%s"' % hashlib.sha256(body).hexdigest()[:32].encode())
