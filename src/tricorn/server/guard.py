"""Who may use which route, on whose account, and how much of it.

Every route is registered with a rule of access: "open" to anybody, to holders of a "key", or of the "admin" key.
Without API keys, "key" is open too. Whoever has given a key is known by its digest from then on: the key itself is
held by nothing but this module, and no message says anything of it.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tricorn.request import TricornError
from tricorn.server.admin import check_admin, check_key, is_loopback
from tricorn.server.errors import HttpError
from tricorn.server.exchange import Exchange
from tricorn.server.rates import RateOptions, Rates

Access = Literal["open", "key", "admin"]

CALLER_CHARACTERS = 32
"""Of the digest of a key, where it stands for its holder."""


@dataclass(frozen=True)
class GuardOptions:
    """`api_keys`, of which any opens the routes of access "key", and `admin_key`, which opens all; `host` is the
    address that the server is bound to.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)
    host: str = "127.0.0.1"
    rates: RateOptions = field(default_factory=RateOptions)


class Guard:
    """Lets requests in, and counts them. `rates` has what their generations may use."""

    def __init__(self, options: GuardOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._admin_key = options.admin_key
        self._host = options.host
        admin = () if options.admin_key is None else (options.admin_key,)
        self._digests = [_digest(key.encode()) for key in (*options.api_keys, *admin)] if options.api_keys else []
        self.rates = Rates(options.rates, clock)

    def admit(self, exchange: Exchange, access: Access, *, counted: bool = True) -> None:
        """Lets the sender in, and tells the exchange who it is. `counted`: the request counts against its rate. Raises
        HttpError 401, 403 or 429.
        """
        if access == "admin":
            check_admin(exchange.header(b"authorization"), self._admin_key, self._host)
        elif access == "key":
            exchange.caller = self._caller(exchange)
            try:
                if counted:
                    self.rates.request(exchange.caller)
            finally:
                exchange.extra = self.rates.headers(exchange.caller)

    def _caller(self, exchange: Exchange) -> str:
        if not self._digests:
            return ""
        found = ""
        for given in _given(exchange):
            digest = _digest(given)
            for known in self._digests:  # all of them: time must not tell which
                if hmac.compare_digest(digest, known):
                    found = known.hex()[:CALLER_CHARACTERS]
        if not found:
            error = HttpError(401, "this server needs a key: Authorization: Bearer KEY", code="invalid_api_key")
            error.headers += ((b"www-authenticate", b"Bearer"),)
            raise error
        return found


def _given(exchange: Exchange) -> list[bytes]:
    """The keys that a request shows: OpenAI's clients use one header, Anthropic's another."""
    scheme, _, bearer = (exchange.header(b"authorization") or b"").partition(b" ")
    other = exchange.header(b"x-api-key")
    return [*([bearer.strip()] if scheme.lower() == b"bearer" else []), *([] if other is None else [other])]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"tricorn api key\0" + key).digest()


def read_keys(texts: Iterable[str]) -> tuple[str, ...]:
    """Keys as given on the command line or in the environment; `@FILE` names a file with one in a line, where lines
    that begin with # are comments. Raises TricornError.
    """
    keys: list[str] = []
    for text in texts:
        if not text.startswith("@"):
            keys.append(check_key(text, "API key"))
            continue
        try:
            lines = [line.strip() for line in Path(text[1:]).read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise TricornError(f"the API keys cannot be read from {text[1:]}: {error}") from None
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise TricornError(f"{text[1:]} holds no API key: write one in each line")
        keys += [check_key(line, "API key") for line in found]
    return tuple(dict.fromkeys(keys))


def unguarded(options: GuardOptions) -> str | None:
    """What to warn of when anybody on the network may use the server."""
    if options.api_keys or is_loopback(options.host):
        return None
    return f"anybody who can reach {options.host} may use this server: set --api-key, or --host 127.0.0.1"
