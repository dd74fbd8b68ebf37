"""The disk tier: whatever happens to its file, a key gives the bytes that were saved under it, or nothing."""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tricorn.cache.disk import DiskTier, Fetch, open_tier
from tricorn.cache.keys import engine_id, next_key, root_key
from tricorn.cache.pool import PagePool
from tricorn.cache.radix import RadixTree
from tricorn.cache.records import HEADER, FileStore, Records
from tricorn.request import Namespace, TricornError

U8 = NDArray[np.uint8]
PAGE = 16
PAGE_BYTES = 300
SLOT = 4096
FIXED = settings(derandomize=True, deadline=None, max_examples=60)


@dataclass
class MemoryStore:
    """A store in memory. Writes stop at `room` bytes, half done; with `broken`, every call fails."""

    data: bytearray = field(default_factory=bytearray)
    room: int = 1 << 30
    broken: bool = False

    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, buffer: U8) -> int:
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")
        piece = self.data[offset : offset + len(buffer)]
        buffer[: len(piece)] = np.frombuffer(piece, np.uint8)
        return len(piece)

    def write(self, offset: int, data: U8) -> None:
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")
        fits = max(min(len(data), self.room - offset), 0)
        self.data.extend(bytes(max(offset + fits - len(self.data), 0)))
        self.data[offset : offset + fits] = data[:fits].tobytes()
        if fits < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")

    def truncate(self, size: int) -> None:
        del self.data[size:]

    def close(self) -> None:
        pass


class Memory(dict[int, bytes]):
    """Pages of memory by id."""

    def write_page(self, page: int, data: U8) -> None:
        self[page] = data.tobytes()


def key_of(name: int) -> bytes:
    return name.to_bytes(32, "little")


def page_of(name: int) -> U8:
    return np.random.default_rng(name).integers(0, 256, PAGE_BYTES, np.uint8)


def tier_on(store: MemoryStore, slots: int = 8, **options: object) -> DiskTier:
    return DiskTier(store, PAGE_BYTES, slots * SLOT, threaded=False, **options)  # type: ignore[arg-type]


def drain(tier: DiskTier) -> None:
    """Lets a tier do its work; one with a thread does it by itself."""
    if tier._thread:
        time.sleep(0.01)
        return
    while tier.work():
        pass


def read_back(tier: DiskTier, names: list[int]) -> list[bytes]:
    """The pages of the leading names that the tier has."""
    memory = Memory()
    fetch = tier.fetch([key_of(name) for name in names], range(len(names)), memory.write_page)
    drain(tier)
    assert fetch.wait(30)
    assert fetch.done
    assert sorted(memory) == list(range(fetch.good))
    return list(memory.values())


def has(tier: DiskTier, name: int) -> bool:
    return tier.known([key_of(name)]) == 1


# What is saved comes back


@pytest.mark.parametrize("threaded", [False, True])
def test_pages_come_back_after_a_restart(tmp_path: Path, threaded: bool) -> None:
    for opened in range(3):
        tier = DiskTier(FileStore(tmp_path / "file"), PAGE_BYTES, 100 * SLOT, threaded=threaded)
        if opened:
            while not has(tier, 0):  # until the headers are read
                drain(tier)
        for name in range(opened * 10, opened * 10 + 10):
            assert tier.save(key_of(name), page_of(name))
        assert read_back(tier, [*range(opened * 10 + 10), 77, 0]) == [
            page_of(name).tobytes() for name in range(opened * 10 + 10)
        ]
        assert tier.flush(30)
        stats = tier.stats()
        assert (stats.pages, stats.pages_most, stats.written_pages) == (opened * 10 + 10, 100, 10)
        assert (stats.read_pages, stats.corrupt_pages, stats.dropped_pages) == (opened * 10 + 10, 0, 0)
        tier.close()
        assert not tier.enabled
        assert not tier.save(key_of(1000), page_of(1000))
        assert tier.fetch([key_of(0)], [0], Memory().write_page).done
        tier.close()


def test_a_page_is_there_before_it_is_written() -> None:
    tier = tier_on(MemoryStore())
    tier.save(key_of(1), page_of(1))
    assert tier.known([key_of(1), key_of(2)]) == 1
    assert read_back(tier, [1]) == [page_of(1).tobytes()]


def test_the_page_used_longest_ago_is_overwritten() -> None:
    store = MemoryStore()
    tier = tier_on(store, slots=4)
    for name in range(4):
        tier.save(key_of(name), page_of(name))
    drain(tier)
    assert len(read_back(tier, [0, 1])) == 2  # a use; of a run, the last page was used first
    tier.save(key_of(2), page_of(2))  # known already, but a use too
    for name, gone in ((10, 3), (11, 1), (12, 0)):
        tier.save(key_of(name), page_of(name))
        drain(tier)
        assert not has(tier, gone)
        assert has(tier, name)
    assert read_back(tier, [2, 10, 11, 12]) == [page_of(name).tobytes() for name in (2, 10, 11, 12)]
    assert tier.stats().pages == tier.stats().pages_most == 4
    assert tier.stats().written_pages == 7
    assert len(store.data) <= 4 * SLOT
    again = tier_on(store, slots=4)
    drain(again)
    again.save(key_of(13), page_of(13))
    drain(again)
    assert [name for name in (2, 10, 11, 12, 13) if has(again, name)] == [10, 11, 12, 13]  # as they were written
    again = tier_on(store, slots=4)
    drain(again)
    again.save(key_of(14), page_of(14))
    drain(again)
    assert [name for name in (2, 10, 11, 12, 13, 14) if has(again, name)] == [11, 12, 13, 14]


def test_a_smaller_size_cuts_the_file(tmp_path: Path) -> None:
    for slots in (6, 3, 4):
        tier = DiskTier(FileStore(tmp_path / "file"), PAGE_BYTES, slots * SLOT, threaded=False)
        drain(tier)
        assert (tmp_path / "file").stat().st_size <= slots * SLOT
        for name in range(6):
            tier.save(key_of(name), page_of(name))
        drain(tier)
        assert tier.stats().pages == slots
        assert all(read_back(tier, [name]) in ([], [page_of(name).tobytes()]) for name in range(6))
        tier.close()


def test_a_full_queue_drops_pages_or_waits() -> None:
    tier = tier_on(MemoryStore(), queue_bytes=2 * PAGE_BYTES)
    assert [tier.save(key_of(name), page_of(name)) for name in (1, 2, 3, 1)] == [True, True, False, True]
    assert tier.stats().dropped_pages == 1
    assert tier.save(key_of(4), page_of(4), wait=30)
    assert tier.flush()
    assert [name for name in range(5) if has(tier, name)] == [1, 2, 4]
    with pytest.raises(TricornError, match=f"a page is {PAGE_BYTES} bytes, not 3"):
        tier.save(key_of(5), page_of(5)[:3])


def test_the_time_of_reading_is_measured() -> None:
    ticks = iter([0.0, 4.0, 10.0, 10.5])
    tier = tier_on(MemoryStore(), clock=ticks.__next__)
    tier.save(key_of(1), page_of(1))
    tier.flush()
    assert tier.read_seconds_per_page == 0
    assert len(read_back(tier, [1])) == 1
    assert tier.read_seconds_per_page == 4
    assert len(read_back(tier, [1])) == 1
    assert tier.read_seconds_per_page == pytest.approx(4 - 0.2 * 3.5)
    assert tier.stats().read_seconds == 4.5


# What goes wrong


@pytest.mark.parametrize("where", ["magic", "length", "serial", "key", "checksum", "header sum", "data", "end"])
def test_a_flipped_bit_is_found(where: str) -> None:
    """It ends the run of good pages; the page is computed and saved anew."""
    at = {"magic": 3, "length": 8, "serial": 17, "key": 30, "checksum": 60, "header sum": 75, "data": HEADER.size}
    store = MemoryStore()
    tier = tier_on(store)
    for name in range(3):
        tier.save(key_of(name), page_of(name))
    drain(tier)
    store.data[SLOT + at.get(where, HEADER.size + PAGE_BYTES - 1)] ^= 4
    for opened in (tier, tier_on(store)):
        drain(opened)
        assert read_back(opened, [0, 1, 2]) == [page_of(0).tobytes()]
        assert opened.stats().corrupt_pages == 1
        assert not has(opened, 1)
        assert read_back(opened, [2]) == [page_of(2).tobytes()]
    opened.save(key_of(1), page_of(1))
    drain(opened)
    assert read_back(opened, [0, 1, 2]) == [page_of(name).tobytes() for name in range(3)]
    assert len(store.data) == 2 * SLOT + HEADER.size + PAGE_BYTES


@pytest.mark.parametrize("written", [0, 1, 40, HEADER.size, HEADER.size + 1, HEADER.size + PAGE_BYTES - 1])
def test_a_torn_write_is_found(written: int) -> None:
    """The engine is killed in the middle of a write over an older record."""
    store = MemoryStore()
    tier = tier_on(store, slots=1)
    tier.save(key_of(1), page_of(1))
    drain(tier)
    before = bytes(store.data)
    tier.save(key_of(2), page_of(2))
    drain(tier)
    store.data[written:] = before[written:]
    after = tier_on(store, slots=1)
    drain(after)
    assert read_back(after, [2]) == []
    assert read_back(after, [1]) == ([page_of(1).tobytes()] if store.data == before else [])


def test_a_record_from_elsewhere_is_foreign() -> None:
    """A good record under another key, at the place of the one that is wanted."""
    store, other = MemoryStore(), MemoryStore()
    for target, name in ((store, 1), (other, 2)):
        tier = tier_on(target)
        tier.save(key_of(name), page_of(name))
        drain(tier)
        if target is other:
            store.data[:] = other.data
    tier = tier_on(MemoryStore(bytearray(store.data)))
    drain(tier)
    assert (has(tier, 1), has(tier, 2)) == (False, True)
    indexed = tier_on(MemoryStore())
    indexed.save(key_of(1), page_of(1))
    drain(indexed)
    indexed._records.store.data[:] = other.data  # type: ignore[union-attr]
    assert read_back(indexed, [1]) == []
    assert indexed.stats().corrupt_pages == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_full_disk_stops_the_writing_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    store = MemoryStore()
    tier = tier_on(store)
    tier.save(key_of(1), page_of(1))
    drain(tier)

    def refuse(offset: int, data: U8) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(store, "write", refuse)
    assert tier.stats().writing
    for name in (2, 3):
        tier.save(key_of(name), page_of(name))
    drain(tier)
    assert tier.flush()
    assert not tier.save(key_of(4), page_of(4))
    assert tier.enabled
    assert not tier.stats().writing
    assert [name for name in range(5) if has(tier, name)] == [1]
    assert read_back(tier, [1]) == [page_of(1).tobytes()]
    [line] = caplog.messages
    assert (
        line
        == f"the disk tier stops writing ([Errno {code}] {os.strerror(code)}); the 1 pages it has can still be read"
    )


def test_a_device_without_room(caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(FileStore(Path("/dev/full")), PAGE_BYTES, 8 * SLOT)
    tier.save(key_of(1), page_of(1))
    assert tier.flush(30)
    assert not tier.stats().writing
    assert tier.known([key_of(1)]) == 0
    assert [message.split(";")[0] for message in caplog.messages] == [
        "the disk tier stops writing ([Errno 28] No space left on device)"
    ]
    tier.close()


def test_a_disk_that_cannot_be_read_gives_nothing() -> None:
    store = MemoryStore()
    tier = tier_on(store)
    tier.save(key_of(1), page_of(1))
    drain(tier)
    store.broken = True
    assert read_back(tier, [1]) == []
    assert tier.stats().corrupt_pages == 1
    drain(tier_on(store))


def test_a_second_engine_goes_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = open_tier(tmp_path / "new" / "folder", b"\x12\xab", PAGE_BYTES, 10 * SLOT)
    first.save(key_of(1), page_of(1))
    second = open_tier(tmp_path / "new" / "folder", b"\x12\xab", PAGE_BYTES, 10 * SLOT)
    path = tmp_path / "new" / "folder" / "12ab.kv"
    assert caplog.messages == [f"{path} is in use by another engine; this one runs without a disk tier"]
    assert first.enabled
    assert not second.enabled
    assert not second.save(key_of(1), page_of(1))
    assert second.known([key_of(1)]) == 0
    assert second.fetch([key_of(1)], [0], Memory().write_page).done
    assert second.flush()
    assert second.stats().pages_most == 0
    second.close()
    third = open_tier(tmp_path / "new" / "folder", b"\x12\xac", PAGE_BYTES, 10 * SLOT)
    assert third.enabled
    third.close()
    first.close()
    fourth = open_tier(tmp_path / "new" / "folder", b"\x12\xab", PAGE_BYTES, 10 * SLOT)
    assert fourth.enabled
    fourth.close()


def test_a_folder_that_cannot_be_had(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    for folder, size in ((tmp_path / "file", SLOT), (tmp_path / "file" / "folder", SLOT), (tmp_path, 10)):
        tier = open_tier(folder, b"\x01", PAGE_BYTES, size)
        assert not tier.enabled
        tier.close()
    assert [message.startswith("no disk tier: ") for message in caplog.messages] == [True] * 3


def test_memory_that_refuses_a_page_ends_the_fetch(caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(MemoryStore(), PAGE_BYTES, 8 * SLOT)
    tier.save(key_of(1), page_of(1))

    def refuse(page: int, data: U8) -> None:
        raise TricornError("no such page")

    fetch = tier.fetch([key_of(1)], [0], refuse)
    assert fetch.wait(30)
    assert fetch.good == 0
    assert "could not be put into memory" in caplog.text
    assert not has(tier, 1)  # so that nobody asks for it for ever
    tier.save(key_of(1), page_of(1))
    assert read_back(tier, [1]) == [page_of(1).tobytes()]
    tier.close()


def test_a_thread_that_dies_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(MemoryStore(), PAGE_BYTES, 8 * SLOT, queue_bytes=PAGE_BYTES)
    tier.save(key_of(1), page_of(1))
    assert tier.flush(30)

    def fail(self: Records, slot: int, key: bytes) -> None:
        raise AssertionError("a fault of ours")

    monkeypatch.setattr(Records, "read", fail)
    fetches = [tier.fetch([key_of(1)], [0], Memory().write_page) for _ in range(3)]
    assert all(fetch.wait(30) for fetch in fetches)
    assert [fetch.good for fetch in fetches] == [0, 0, 0]
    assert not tier.save(key_of(2), page_of(2), wait=30)
    assert not tier.stats().writing
    assert tier.flush(30)
    tier.close()
    assert not tier.enabled
    assert "the disk tier failed; serving goes on without it" in caplog.text
    assert "a fault of ours" in caplog.text


def test_many_threads_at_once(tmp_path: Path) -> None:
    tier = DiskTier(FileStore(tmp_path / "file"), PAGE_BYTES, 20 * SLOT, queue_bytes=4 * PAGE_BYTES)
    wrong: list[str] = []

    def use(seed: int) -> None:
        random = Random(seed)
        for _ in range(150):
            name = random.randrange(40)
            if random.random() < 0.5:
                tier.save(key_of(name), page_of(name), wait=random.choice([0, 30]))
            else:
                memory, names = Memory(), [name, random.randrange(40)]
                fetch = tier.fetch([key_of(n) for n in names], [0, 1], memory.write_page)
                if not fetch.wait(60):
                    wrong.append("a fetch does not end")
                if any(memory[i] != page_of(names[i]).tobytes() for i in range(fetch.good)):
                    wrong.append("other bytes")

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    stats = tier.stats()
    assert (stats.pages, stats.corrupt_pages) == (20, 0)
    assert stats.writing
    tier.close()


@given(seed=st.integers(0, 2**32), slots=st.integers(1, 6))
@FIXED
def test_never_other_bytes(seed: int, slots: int) -> None:
    """Random saves, reads, flipped bits, cut and swapped records, full disks and restarts."""
    random = Random(seed)
    store = MemoryStore()
    tier = tier_on(store, slots)
    intact = True
    for _ in range(80):
        match random.choice("sssssfffwwwbtxrd"):
            case "s":
                name = random.randrange(12)
                tier.save(key_of(name), page_of(name))
            case "f":
                names = [random.randrange(12) for _ in range(random.randrange(4))]
                scanned, known = tier._scan is None, tier.known([key_of(name) for name in names])
                found = read_back(tier, names)
                assert found == [page_of(name).tobytes() for name in names[: len(found)]]
                assert len(found) >= known or not intact
                assert not scanned or tier.known([key_of(name) for name in names]) <= len(found)
            case "w":
                tier.work()
            case "b" if store.data:
                store.data[random.randrange(len(store.data))] ^= 1 << random.randrange(8)
                intact = False
            case "t":
                del store.data[random.randrange(len(store.data) + 1) :]
                intact = False
            case "x":
                a, b = (random.randrange(slots) * SLOT for _ in range(2))
                size = HEADER.size + PAGE_BYTES
                if max(a, b) + size <= len(store.data):
                    store.data[a : a + size], store.data[b : b + size] = (
                        store.data[b : b + size],
                        store.data[a : a + size],
                    )
                    intact = False
            case "r":  # killed, and started anew, perhaps with another size
                slots = random.randrange(1, 7)
                store = MemoryStore(store.data)
                tier = tier_on(store, slots)
            case "d":
                store.room = random.choice([0, random.randrange(slots * SLOT), 1 << 30])
        assert len(tier._index) <= slots
    drain(tier)
    assert len(store.data) <= slots * SLOT


# Keys


def test_fields_of_a_key_never_run_together() -> None:
    """A-068: a salt never passes for a tenant or an adapter, nor for the beginning of the text."""
    texts = ["", "a", "b", "ab", "ba", "tenant", "\0"]
    spaces = [Namespace(salt, tenant, adapter) for salt in texts for tenant in texts for adapter in texts]
    engines = [engine_id(file="a", kv="f16"), engine_id(file="a", kv="bf16"), engine_id(file="akv", kv=16), b""]
    roots = {root_key(engine, space) for engine in engines for space in spaces}
    assert len(roots) == len(spaces) * len(engines)
    ids = [np.array([n, 1] * 8, ">i4").tobytes() for n in range(3)]
    assert len(roots | {next_key(root, page) for root in roots for page in ids}) == 4 * len(roots)
    assert {len(root) for root in roots} == {32}


def test_a_key_stands_for_all_the_text_before() -> None:
    tree = RadixTree(PagePool(4), engine_id=b"engine")
    text = np.arange(70, dtype=np.int32)
    keys = tree.keys(Namespace("salt"), text)
    assert len(keys) == 4
    assert tree.keys(Namespace("salt"), text[:63]) == keys[:3]
    assert not set(tree.keys(Namespace("other"), text)) & set(keys)
    assert not set(RadixTree(PagePool(4), engine_id=b"other").keys(Namespace("salt"), text)) & set(keys)
    for changed in range(64):
        other = text.copy()
        other[changed] ^= 1 << 20
        same = changed // PAGE
        assert tree.keys(Namespace("salt"), other)[:same] == keys[:same]
        assert not set(tree.keys(Namespace("salt"), other)[same:]) & set(keys)


# With the tree


@dataclass
class Machine:
    """Pages whose content is a function of all the text up to their end, as of KV; with a tree over them, and a tier
    below."""

    pages: int
    store: MemoryStore
    slots: int

    def __post_init__(self) -> None:
        self.now = 0.0
        self.pool = PagePool(self.pages)
        self.content: list[bytes] = [b""] * self.pages
        self.tier = tier_on(self.store, self.slots)
        self.tree = RadixTree(self.pool, clock=lambda: self.now, engine_id=b"engine", on_evict=self.save)
        self.read = 0

    def save(self, key: bytes, page: int) -> None:
        assert self.pool.holders[page] == 0
        self.tier.save(key, np.frombuffer(self.content[page], np.uint8))

    def write(self, page: int, data: U8) -> None:
        assert self.pool.holders[page] == 1
        self.content[page] = data.tobytes()

    def alloc(self, count: int) -> NDArray[np.int32]:
        self.tree.evict(max(count - self.pool.free, 0))
        return self.pool.alloc(count)

    def run(self, space: Namespace, text: NDArray[np.int32], retention: int, pinned_until: float) -> None:
        """As a scheduler does: what the tree has, what the tier has of the rest, then computing what is left."""
        keys = self.tree.keys(space, text)
        have = len(self.tree.peek(space, text)[0])
        known = min(self.tier.known(keys[have:]), self.pool.free + self.pool.cached)
        if known:
            match = self.tree.match(space, text[: have * PAGE])
            known = min(known, self.pool.free + self.pool.cached)
            full = len(match.pages)
            fresh = self.alloc(known)
            fetch = self.tier.fetch(keys[full : full + known], fresh.tolist(), self.write)
            drain(self.tier)
            assert fetch.done
            self.read += fetch.good
            end = full + fetch.good
            self.tree.insert(
                space, text[: end * PAGE], np.concatenate([match.pages, fresh[: fetch.good]]), retention, pinned_until
            )
            self.pool.release(fresh)
            self.release(match)
        match = self.tree.match(space, text)
        for index, page in enumerate(match.pages.tolist()):
            assert self.content[page] == expected(space, text[: (index + 1) * PAGE])
        rest = -(-len(text) // PAGE) - len(match.pages)
        if rest <= self.pool.free + self.pool.cached:
            pages = np.concatenate([match.pages, self.alloc(rest)])
            for index in range(len(match.pages), len(pages)):
                self.content[pages[index]] = expected(space, text[: (index + 1) * PAGE])
            self.tree.insert(space, text, pages, retention, pinned_until)
            self.pool.release(pages[len(match.pages) :])
        self.release(match)

    def release(self, match: object) -> None:
        self.pool.release(match.pages)  # type: ignore[attr-defined]
        if match.tail_page >= 0:  # type: ignore[attr-defined]
            self.pool.release(np.array([match.tail_page], np.int32))  # type: ignore[attr-defined]


def expected(space: Namespace, text: NDArray[np.int32]) -> bytes:
    return np.random.default_rng([*text.tolist(), len(space.salt)]).bytes(PAGE_BYTES)


@given(seed=st.integers(0, 2**32), pages=st.integers(3, 12), slots=st.integers(1, 30))
@settings(FIXED, max_examples=40)
def test_a_tree_over_a_tier_never_serves_other_pages(seed: int, pages: int, slots: int) -> None:
    random = Random(seed)
    machine = Machine(pages, MemoryStore(), slots)
    stems = [np.array([random.randrange(3) for _ in range(PAGE * pages)], np.int32) for _ in range(3)]
    for _ in range(50):
        machine.now += random.random()
        text = random.choice(stems)[: random.randrange(1, PAGE * pages + 1)].copy()
        if random.random() < 0.3:
            text[random.randrange(len(text))] = 7
        until = machine.now + random.choice([0, 0, 2, 100])
        machine.run(Namespace(random.choice(["", "s"])), text, random.choice([0, 50, 50, 100]), until)
        for key, page in machine.tree.unsaved(random.choice([0, 0, 2, 100])):
            machine.tier.save(key, np.frombuffer(machine.content[page], np.uint8))
        machine.pool.check()
        machine.tree.check()
        match random.randrange(12):
            case 0 if machine.store.data:
                machine.store.data[random.randrange(len(machine.store.data))] ^= 1
            case 1:
                machine.store.room = random.choice([0, 1 << 30, random.randrange(slots * SLOT)])
            case 2:
                machine = Machine(pages, machine.store, slots)
            case _:
                machine.tier.work()
    assert machine.pool.held == 0
    machine.tree.clear()
    assert machine.pool.free == pages


def test_after_a_restart_everything_is_read_and_nothing_computed() -> None:
    store = MemoryStore()
    text = np.arange(160, dtype=np.int32)
    before = Machine(12, store, 20)
    before.run(Namespace(), text, 50, 0.0)
    saved = []
    while pages := before.tree.unsaved(3):
        assert len(pages) <= 3
        saved += pages
        for key, page in pages:
            before.tier.save(key, np.frombuffer(before.content[page], np.uint8))
    assert [key for key, _ in reversed(saved)] == before.tree.keys(Namespace(), text)
    before.tier.close()
    after = Machine(12, store, 20)
    drain(after.tier)
    after.run(Namespace("s"), text, 50, 0.0)
    assert after.read == 0
    after.run(Namespace(), text, 50, 0.0)
    assert after.read == 10
    assert after.tier.stats().read_pages == 10


def test_a_fetch_without_pages_is_done() -> None:
    fetch: Fetch = tier_on(MemoryStore()).fetch([], [], Memory().write_page)
    assert fetch.done
    assert fetch.good == 0
