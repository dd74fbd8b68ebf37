"""The values of `format`, which the documentation lists."""

from __future__ import annotations

KNOWN = frozenset({"date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""What the grammar engine knows."""

_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_UNIT = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?]|%[0-9A-Fa-f]{2})"
_NO_COLON = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=@]|%[0-9A-Fa-f]{2})"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"

_I = _UNIT.replace(
    "A-Za-z0-9", "A-Za-z0-9\\x{a0}-\\x{d7ff}\\x{f900}-\\x{fdcf}\\x{fdf0}-\\x{ffef}\\x{10000}-\\x{efffd}", 1
)

PATTERNS = {
    "date": rf"^{_DATE}$",
    "uri-reference": rf"^(?:(?:[A-Za-z][A-Za-z0-9+\-.]*:{_UNIT}*|{_NO_COLON}*(?:[/?]{_UNIT}*)?)(?:#{_UNIT}*)?)$",
    "iri": rf"^[A-Za-z][A-Za-z0-9+\-.]*:{_I}*(?:#{_I}*)?$",
    "json-pointer": rf"^{_POINTER}$",
    "relative-json-pointer": rf"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "byte": r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}
"""What is a pattern: dates know leap years; "byte" is base64."""

FARTHEST = (1 << 63) - 1024
"""The largest integer that is a floating-point number and that the grammar engine can bound by: 64-bit integers end
here, 1,023 short of their end."""

INTEGERS: dict[str, dict[str, int]] = {
    **{f"int{bits}": {"minimum": -(1 << (bits - 1)), "maximum": (1 << (bits - 1)) - 1} for bits in (8, 16, 32)},
    **{f"uint{bits}": {"minimum": 0, "maximum": (1 << bits) - 1} for bits in (8, 16, 32)},
    "int64": {"minimum": -FARTHEST, "maximum": FARTHEST},
}
"""Bounds of numbers, from OpenAPI."""

ALIASES = {"url": "uri", "ip-address": "ipv4", "host-name": "hostname"}
"""Names from older versions, and from habit."""

ANNOTATIONS = frozenset({"password", "binary", "float", "double", "utc-millisec", "html", "commonmark"})
"""Names from OpenAPI and from older versions that restrict no JSON text."""

REFUSED = frozenset(
    {"regex", "idn-email", "idn-hostname", "iri-reference", "uri-template", "color", "style", "phone"}
    | {"http-date", "media-range", "char", "decimal", "decimal128", "uint64", "double-int"}
)
"""Names that have a meaning which is not enforced. A name that no version of JSON Schema or OpenAPI defines has none:
it is an annotation, as the standard says, unless it looks like a known one."""


def looks_like(name: str) -> str | None:
    """The known name that this one is another spelling of, such as "datetime"."""
    plain = _plain(name)
    return next((known for known in sorted({*KNOWN, *PATTERNS, *INTEGERS, *REFUSED}) if _plain(known) == plain), None)


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
