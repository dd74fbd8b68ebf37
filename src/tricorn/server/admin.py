"""Who may look inside: the holder of the admin key, or, without one, who is on the same machine."""

from __future__ import annotations

import hmac
import ipaddress
from pathlib import Path

from tricorn.request import TricornError
from tricorn.server.errors import HttpError


def read_key(text: str | None) -> str | None:
    """A key as given on the command line or in the environment; `@FILE` names a file that holds it. Raises
    TricornError.
    """
    if text is None or text == "":
        return None
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TricornError(f"the admin key cannot be read from {text[1:]}: {error}") from None
    return check_key(text, "admin key")


def check_key(text: str, what: str) -> str:
    """The key itself. Raises TricornError when no header could carry it."""
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise TricornError(f"the {what} must be printable ASCII characters without spaces")
    return text


def check_admin(authorization: bytes | None, key: str | None, host: str) -> None:
    """Raises HttpError 401 or 403. `host` is the address that the server is bound to."""
    if key is None:
        if not is_loopback(host):
            raise HttpError(
                403,
                "this server can be reached from other machines: start it with --admin-key to open this route",
                code="no_admin_key",
            )
        return
    scheme, _, given = (authorization or b"").partition(b" ")
    if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), key.encode()):
        error = HttpError(401, "this route needs the admin key: Authorization: Bearer KEY", code="invalid_admin_key")
        error.headers += ((b"www-authenticate", b"Bearer"),)
        raise error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
