"""The keys of pages outside memory: 256-bit digests (BLAKE2b), chained over engine, namespace and token ids.

Two pages have the same key only if the same engine computed them for the same namespace after the same text. Every
field goes in with its name and its length, so that none can pass for another.
"""

from __future__ import annotations

from hashlib import blake2b

from tricorn.request import Namespace

KEY_BYTES = 32


def engine_id(**fields: str | int) -> bytes:
    """Tells apart what must not share pages: name here all that the bytes of a page depend on, beside the text."""
    return _digest(b"tricorn engine", {name: str(value).encode() for name, value in fields.items()})


def root_key(engine: bytes, namespace: Namespace) -> bytes:
    """Stands before the first page of any text of this namespace."""
    fields = {name: value.encode() for name, value in namespace._asdict().items()}
    return _digest(b"tricorn root", {"engine": engine, **fields})


def next_key(before: bytes, ids: bytes) -> bytes:
    """The key of the page with these ids (big-endian, 4 bytes each) that follows the page of key `before`."""
    return blake2b(before + ids, digest_size=KEY_BYTES, person=b"tricorn page").digest()


def _digest(purpose: bytes, fields: dict[str, bytes]) -> bytes:
    digest = blake2b(digest_size=KEY_BYTES, person=purpose)
    for name, value in fields.items():
        for part in (name.encode(), value):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
