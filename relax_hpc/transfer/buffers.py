"""Private receive buffers: pre-faulted, recycled, and back in the pool when their last view dies.

A fresh page costs more than the copy into it, so what comes from the network or a disk lands in
memory that was used before. Who takes a buffer gets a memoryview; numpy views of it may be handed
out without any book-keeping: the memory is used again only when none of them is left.
"""

import collections
import contextlib
import dataclasses
import mmap
import threading
import weakref
from collections.abc import Callable

import numpy as np

DEFAULT_IDLE_BYTES = 512 << 20
_SMALLEST = 64 << 10
_HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14; Python 3.11 does not name it


@dataclasses.dataclass(frozen=True, slots=True)
class BufferStats:
    """What a pool holds."""

    used_bytes: int
    """In buffers that somebody still has views of."""
    idle_bytes: int
    high_water_bytes: int
    """Largest sum of used and idle bytes so far."""
    num_made: int
    num_recycled: int


class BufferPool:
    """Recycled buffers of one process. Thread-safe.

    Args:
        max_idle_bytes: unused memory that is kept for later; more than that goes back to the
            system. What is in use is bounded by the readers (rows in flight).
        on_drop: is given memory that would go back to the system, and may keep it (registered
            memory must not be unmapped). Called under a lock: it must not wait.
    """

    def __init__(
        self,
        max_idle_bytes: int = DEFAULT_IDLE_BYTES,
        on_drop: Callable[[mmap.mmap], None] | None = None,
    ) -> None:
        self._max_idle, self._on_drop = max_idle_bytes, on_drop
        self._lock = threading.Lock()
        self._idle: dict[int, list[mmap.mmap]] = collections.defaultdict(list)
        # A finalizer may run inside any allocation, also while this thread holds the lock.
        self._returned: collections.deque[mmap.mmap] = collections.deque()
        self._used = self._idle_bytes = self._high_water = 0
        self._num_made = self._num_recycled = 0

    def take(self, nbytes: int) -> memoryview:
        """Return a writable buffer of exactly `nbytes`, page aligned, with arbitrary content.

        It is used again when the returned memoryview and everything made from it (slices, numpy
        arrays) are gone.
        """
        size = size_class(nbytes)
        with self._lock:
            self._collect()
            memory = self._idle[size].pop() if self._idle[size] else None
            self._used += size
            if memory is not None:
                self._idle_bytes -= size
                self._num_recycled += 1
            else:
                self._num_made += 1
            self._high_water = max(self._high_water, self._used + self._idle_bytes)
        if memory is None:
            memory = self._make(size)
        root = np.frombuffer(memory, np.uint8)
        weakref.finalize(root, self._give_back, memory).atexit = False
        return root.data[:nbytes]

    def stats(self) -> BufferStats:
        """Count used and idle memory."""
        with self._lock:
            self._collect()
            return BufferStats(
                self._used, self._idle_bytes, self._high_water, self._num_made, self._num_recycled
            )

    def _make(self, size: int) -> mmap.mmap:
        try:
            return _prefaulted(size)
        except BaseException:
            with self._lock:
                self._used -= size
            raise

    def _give_back(self, memory: mmap.mmap) -> None:
        self._returned.append(memory)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        """Sort what came back; the lock is held."""
        while self._returned:
            memory = self._returned.popleft()
            size = len(memory)
            self._used -= size
            if self._idle_bytes + size <= self._max_idle:
                self._idle[size].append(memory)
                self._idle_bytes += size
            elif self._on_drop is not None:
                self._on_drop(memory)


def size_class(nbytes: int) -> int:
    """Round up to one of four sizes an octave, so that at most a quarter is wasted."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


def _prefaulted(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE:
        with contextlib.suppress(OSError):  # only a hint: a kernel may be built without
            memory.madvise(mmap.MADV_HUGEPAGE)
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError:  # older kernel
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 0
    return memory
