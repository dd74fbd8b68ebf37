"""What a client may demand of an answer's text, and how a demand that cannot be kept is refused."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Literal

import msgspec

from tricorn.request import TricornError

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf", "structural_tag"]


class ConstraintError(TricornError):
    """A constraint that cannot be enforced. `path` points into its source (`#/properties/a`), `keyword` names what is
    at fault there; either may be empty."""

    def __init__(self, message: str, path: str = "", keyword: str = "") -> None:
        where = " ".join(part for part in (path, keyword and f"{keyword!r}") if part)
        super().__init__(f"{where}: {message}" if where else message)
        self.message, self.path, self.keyword = message, path, keyword


class Constraint(msgspec.Struct, frozen=True):
    """A language that an answer has to be a sentence of.

    `source` is JSON for "json_schema" (the schema), "choice" (a list of strings) and "structural_tag" (the object that
    clients send), empty for "json_object", and text for "regex" (matched as a whole), "lark" and "gbnf".
    """

    kind: Kind
    source: str = ""

    @property
    def key(self) -> str:
        """What equal constraints have in common: a digest of the content, spelling of JSON left aside. The order of
        keys counts, since answers follow it."""
        source = self.source
        if self.kind in ("json_schema", "choice", "structural_tag"):
            with suppress(msgspec.MsgspecError, RecursionError):  # not JSON: refused when it is compiled
                source = msgspec.json.encode(msgspec.json.decode(source)).decode()
        return hashlib.blake2b(f"{self.kind}\0{source}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
