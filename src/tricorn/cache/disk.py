"""The disk tier: pages that memory had no room for, in a file of fixed records, one file per engine.

A record that is not what was written (see cache/records.py) is dropped and counted when it is read; it never reaches
memory. Where records lie is known from an index in memory, made at the start by reading all headers. When the file is
full, the record that was written or read longest ago is overwritten.

All reading and writing is done by one thread, so no record changes while it is read. The file is locked: a second
engine that opens it goes without. When a write fails, for want of space or anything else, the tier stops writing, says
so once, and goes on reading.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Condition, Event, Thread

import msgspec
import numpy as np
from numpy.typing import NDArray

from tricorn.cache.records import FileStore, Records, Scan, Store
from tricorn.request import TricornError

U8 = NDArray[np.uint8]

QUEUE_BYTES = 64 << 20
"""What may wait to be written."""
EWMA = 0.2

log = logging.getLogger("tricorn.cache")


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """The disk tier: what it holds now, and totals. `writing` is False once it has stopped taking pages in."""

    pages: int = 0
    pages_most: int = 0
    writing: bool = False
    written_pages: int = 0
    read_pages: int = 0
    corrupt_pages: int = 0
    dropped_pages: int = 0
    """Not written because the queue of the writer was full."""
    read_seconds: float = 0.0


class Fetch:
    """Pages on their way from disk to memory."""

    def __init__(self, keys: Sequence[bytes], pages: Sequence[int], write_page: Callable[[int, U8], None]) -> None:
        self.keys = keys
        self.pages = pages
        self.write_page = write_page
        self.good = 0
        """How many of the leading pages are there; final when it is done. What the others hold is undefined."""
        self.ended = Event()

    @property
    def done(self) -> bool:
        """Nothing touches the pages any more."""
        return self.ended.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until it is done; False when it was not in that time."""
        return self.ended.wait(seconds)


class DiskTier:
    """Pages of `page_bytes` by key, in up to `size` bytes of `store`; without a store it holds nothing and takes
    nothing. All methods may be called from any thread, and none but `save` with `wait`, `flush` and `close` waits for
    the disk.

    Without `threaded`, nothing happens until the owner calls `work`. `clock` measures reading.
    """

    def __init__(
        self,
        store: Store | None,
        page_bytes: int,
        size: int,
        *,
        queue_bytes: int = QUEUE_BYTES,
        threaded: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._page_bytes = page_bytes
        self._queue_most = max(queue_bytes // page_bytes, 1)
        self._clock = clock
        self._records = Records(store, page_bytes, size) if store else None
        self._most = self._records.most if self._records else 0
        self._changed = Condition()  # its lock guards what follows
        self._index: OrderedDict[bytes, int] = OrderedDict()  # slots by key, least recently used first
        self._queue: OrderedDict[bytes, U8] = OrderedDict()  # to be written, first come first
        self._fetches: deque[Fetch] = deque()
        self._open = self._writing = self._most > 0
        self._closing = False
        self._written = self._read = self._corrupt = self._dropped = 0
        self._read_seconds = self._seconds_per_page = 0.0
        # Only `work` looks at the rest
        self._scan = Scan(self._records) if self._records and self._open else None
        self._free: list[int] = []  # slots below _next that hold nothing good
        self._next = 0  # slots from here on have never been used
        self._serial = 0
        self._thread = Thread(target=self._run, name="disk-tier", daemon=True) if threaded and self._open else None
        if self._thread:
            self._thread.start()

    @property
    def enabled(self) -> bool:
        return self._open

    @property
    def writing(self) -> bool:
        """Whether it takes pages in."""
        return self._writing

    @property
    def read_seconds_per_page(self) -> float:
        """What reading a page into memory takes of late; 0 until it has been measured."""
        return self._seconds_per_page

    def known(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys it has a page for."""
        with self._changed:
            for count, key in enumerate(keys):
                if key not in self._index and key not in self._queue:
                    return count
        return len(keys)

    def save(self, key: bytes, data: U8, wait: float = 0.0) -> bool:
        """Queues a page to be written; `data` must not change afterwards. A page that it has is not written again. When
        the queue is full, waits up to so many seconds, then drops the page. False when it was not taken."""
        if len(data) != self._page_bytes:
            raise TricornError(f"a page is {self._page_bytes} bytes, not {len(data)}")
        with self._changed:
            if key in self._queue:
                return True
            if key in self._index:
                self._index.move_to_end(key)
                return True
            if wait:
                self._until(lambda: not self._writing or len(self._queue) < self._queue_most, wait)
            if not self._writing:
                return False
            if len(self._queue) >= self._queue_most:
                self._dropped += 1
                return False
            self._queue[key] = data
            self._changed.notify_all()
        return True

    def fetch(self, keys: Sequence[bytes], pages: Sequence[int], write_page: Callable[[int, U8], None]) -> Fetch:
        """Begins to read the pages of these keys into pages of memory, one by one, until one cannot be had; that one is
        known no longer. `write_page(page, data)` is called by the tier's thread; `data` is valid during the call
        only."""
        fetch = Fetch(keys, pages, write_page)
        with self._changed:
            if keys and self._open:
                self._fetches.append(fetch)
                self._changed.notify_all()
            else:
                fetch.ended.set()
        return fetch

    def stats(self) -> TierStats:
        with self._changed:
            return TierStats(
                pages=len(self._index),
                pages_most=self._most,
                writing=self._writing,
                written_pages=self._written,
                read_pages=self._read,
                corrupt_pages=self._corrupt,
                dropped_pages=self._dropped,
                read_seconds=self._read_seconds,
            )

    def flush(self, seconds: float | None = None) -> bool:
        """Waits until all that was saved is written; False when it was not in that time."""
        with self._changed:
            return self._until(lambda: not self._queue, seconds)

    def close(self, seconds: float = 30.0) -> None:
        """Writes what is queued, for so long at most, and lets go of the store."""
        self.flush(seconds)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join(5.0)  # longer only if the disk hangs; the thread then closes the store when it can
        elif self._open:
            self._shut()

    def work(self) -> bool:
        """Does a piece of what is to be done: reads one page for a fetch, or some headers, or writes one page. False
        when there is nothing to do."""
        with self._changed:
            fetch = self._fetches[0] if self._fetches else None
            queued = next(iter(self._queue.items()), None)
        if fetch:
            self._fetch_page(fetch)
        elif self._scan:
            self._scan_some(self._scan)
        elif queued:
            self._write_page(*queued)
        else:
            return False
        return True

    def _until(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        """Waits for a condition, with the lock held. Without a thread, does the work meanwhile."""
        if self._thread:
            return self._changed.wait_for(condition, seconds)
        while not condition():
            if not self.work():
                return False
        return True

    # The thread

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._wanted)
                    if self._closing:
                        break
                self.work()
        except Exception:
            log.exception("the disk tier failed; serving goes on without it")
        self._shut()

    def _wanted(self) -> bool:
        return bool(self._closing or self._fetches or self._scan or self._queue)

    def _shut(self) -> None:
        """The end: nobody waits any longer, nothing is known."""
        with self._changed:
            self._open = self._writing = False
            self._index.clear()
            self._queue.clear()
            for fetch in self._fetches:
                fetch.ended.set()
            self._fetches.clear()
            self._changed.notify_all()
        assert self._records
        try:
            self._records.store.close()
        except OSError as error:
            log.warning("the disk tier's file could not be closed: %s", error)

    def _scan_some(self, scan: Scan) -> None:
        if scan.step():
            return
        with self._changed:
            self._index.update(scan.slots())
            self._corrupt += scan.corrupt
        self._free = scan.free()
        self._next = scan.count
        self._serial = scan.next_serial
        self._scan = None

    def _fetch_page(self, fetch: Fetch) -> None:
        """Reads the next page of a fetch, and ends it when that was the last or is not to be had."""
        began = self._clock()
        key = fetch.keys[fetch.good]
        with self._changed:
            data, slot = self._queue.get(key), self._index.get(key)
        if data is None and slot is not None:
            data = self._read_page(key, slot)
        if data is not None and self._deliver(fetch, data):
            seconds = self._clock() - began
            with self._changed:
                fetch.good += 1
                self._read += 1
                self._read_seconds += seconds
                past = self._seconds_per_page
                self._seconds_per_page = past + EWMA * (seconds - past) if past else seconds
            if fetch.good < len(fetch.keys):
                return
        with self._changed:
            for key in reversed(fetch.keys[: fetch.good]):  # the first page is of most use: it goes last
                if key in self._index:
                    self._index.move_to_end(key)
            self._fetches.popleft()
        fetch.ended.set()

    def _deliver(self, fetch: Fetch, data: U8) -> bool:
        try:
            fetch.write_page(fetch.pages[fetch.good], data)
        except Exception:  # whatever it is, it must not happen again and again
            log.exception("a page read from disk could not be put into memory")
            self._forget(fetch.keys[fetch.good])
            return False
        return True

    def _read_page(self, key: bytes, slot: int) -> U8 | None:
        """The page of a record; None, and the record is forgotten, when it is not what was written."""
        assert self._records
        page = self._records.read(slot, key)
        if page is None:
            self._forget(key)
            with self._changed:
                self._corrupt += 1
        return page

    def _forget(self, key: bytes) -> None:
        with self._changed:
            self._queue.pop(key, None)
            slot = self._index.pop(key, None)
            self._changed.notify_all()
        if slot is not None:
            self._free.append(slot)

    def _write_page(self, key: bytes, data: U8) -> None:
        assert self._records
        with self._changed:
            new = key not in self._index
            slot = self._take_slot() if new else -1
        if new:
            try:
                self._records.write(slot, self._serial, key, data)
            except OSError as error:
                self._stop_writing(error)
                return
            self._serial += 1
        with self._changed:
            if new:
                self._index[key] = slot
                self._written += 1
            self._queue.pop(key, None)
            self._changed.notify_all()

    def _take_slot(self) -> int:
        """A slot to write to: what it held is forgotten from here on."""
        if self._free:
            return self._free.pop()
        if self._next < self._most:
            self._next += 1
            return self._next - 1
        return self._index.popitem(last=False)[1]

    def _stop_writing(self, error: OSError) -> None:
        pages = len(self._index)
        log.error("the disk tier stops writing (%s); the %d pages it has can still be read", error, pages)
        with self._changed:
            self._writing = False
            self._queue.clear()
            self._changed.notify_all()


def open_tier(folder: Path, engine_id: bytes, page_bytes: int, size: int) -> DiskTier:
    """The tier of an engine in its file in `folder`, of up to `size` bytes. When the file cannot be had, says so in the
    log and gives a tier without a store: serving does not depend on it."""
    path = folder / f"{engine_id.hex()}.kv"
    store: Store | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        store = FileStore(path)
    except BlockingIOError:
        log.warning("%s is in use by another engine; this one runs without a disk tier", path)
    except OSError as error:
        log.warning("no disk tier: %s", error)
    tier = DiskTier(store, page_bytes, size)
    if store and not tier.enabled:
        store.close()
        log.warning("no disk tier: %d bytes are less than a page of %d needs", size, page_bytes)
    return tier
