"""What a request says beside its body. Each raises HttpError 400 naming the header."""

from __future__ import annotations

import re

from tricorn.server.errors import HttpError

MAX_TIMEOUT = 86_400.0
"""Seconds that a request may take, at most."""

MAX_TENANT = 64
"""Characters in a tenant's name."""


def timeout(value: bytes | None) -> float | None:
    """`X-Request-Timeout`: seconds from the arrival of the request to its deadline."""
    if value is None:
        return None
    seconds = float(value) if re.fullmatch(rb"[0-9]{1,9}(\.[0-9]{1,9})?", value) else 0.0
    if not 0 < seconds <= MAX_TIMEOUT:
        message = f"x-request-timeout must be a number of seconds above 0, at most {MAX_TIMEOUT:.0f}"
        raise HttpError(400, message, "x-request-timeout", "invalid_value")
    return seconds


def tenant(value: bytes | None) -> str:
    """`X-Tenant`: on whose account a request counts. Tenants share no cached pages."""
    if value is None:
        return ""
    if not 0 < len(value) <= MAX_TENANT or not all(0x20 < byte < 0x7F for byte in value):
        message = f"x-tenant must be 1 to {MAX_TENANT} printable ASCII characters without spaces"
        raise HttpError(400, message, "x-tenant", "invalid_value")
    return value.decode()
