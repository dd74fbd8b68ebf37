"""What a client may demand of an answer's text, and how a demand that cannot be kept is refused."""

from __future__ import annotations

import hashlib
from contextlib import suppress

import msgspec

from tricorn.request import Constraint, TricornError


class ConstraintError(TricornError):
    """A constraint that cannot be enforced. `path` points into its source (`#/properties/a`), `keyword` names what is
    at fault there; either may be empty."""

    def __init__(self, message: str, path: str = "", keyword: str = "") -> None:
        where = " ".join(part for part in (path, keyword and f"{keyword!r}") if part)
        super().__init__(f"{where}: {message}" if where else message)
        self.message, self.path, self.keyword = message, path, keyword


def content_key(constraint: Constraint) -> str:
    """What equal constraints have in common: a digest of the content, spelling of JSON left aside. The order of keys
    counts, since answers follow it."""
    source = constraint.source
    if constraint.kind in ("json_schema", "choice", "structural_tag"):
        with suppress(msgspec.MsgspecError, RecursionError):  # not JSON: refused when it is compiled
            source = msgspec.json.encode(msgspec.json.decode(source)).decode()
    head = f"{constraint.kind}\0{constraint.thought}"
    return hashlib.blake2b(f"{head}\0{source}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
