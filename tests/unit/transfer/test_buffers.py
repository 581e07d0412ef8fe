"""Receive buffers: recycled when the last view dies, bounded, never given out twice."""

import gc
import mmap
import threading

import numpy as np
import pytest

from relax_hpc.transfer.buffers import BufferPool, size_class


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def test_a_buffer_comes_back_when_its_last_view_dies() -> None:
    pool = BufferPool()
    buffer = pool.take(100_000)
    first = _address(buffer)
    row = np.frombuffer(buffer[64:4064], np.float32).reshape(10, 100)[3:, ::2]
    row[...] = 7.0
    del buffer
    gc.collect()
    other = pool.take(100_000)
    assert _address(other) != first, "a view of it lives"
    other[:] = bytes(100_000)
    assert (row == 7.0).all()
    del row
    again = pool.take(99_000)
    assert _address(again) == first, "the memory is used again"
    assert len(again) == 99_000
    assert pool.stats().num_recycled == 1 and pool.stats().num_made == 2


def test_idle_memory_is_bounded_and_the_rest_is_dropped() -> None:
    dropped: list[mmap.mmap] = []
    pool = BufferPool(max_idle_bytes=1 << 20, on_drop=dropped.append)
    views = [pool.take(512 << 10) for _ in range(5)]
    assert pool.stats().used_bytes == 5 * (512 << 10) and pool.stats().idle_bytes == 0
    views.clear()
    gc.collect()
    stats = pool.stats()
    assert (stats.used_bytes, stats.idle_bytes) == (0, 1 << 20)
    assert stats.high_water_bytes == 5 * (512 << 10)
    assert [len(memory) for memory in dropped] == [512 << 10] * 3


@pytest.mark.parametrize("nbytes", [0, 1, 65536, 65537, 3 << 20, (3 << 20) + 1, 100_000_000])
def test_size_classes_waste_at_most_a_quarter(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size % mmap.PAGESIZE == 0 and nbytes <= size <= max(65536, nbytes * 5 // 4 + 1)
    assert size_class(size) == size
    if nbytes <= 3 << 20:
        assert len(BufferPool().take(nbytes)) == nbytes


def test_no_memory_has_two_users_under_threads() -> None:
    pool = BufferPool()
    errors: list[str] = []

    def use(mark: int) -> None:
        for i in range(300):
            view = np.frombuffer(pool.take(70_000), np.uint8)
            view[::1000] = (mark + i) % 256
            if not (view[::1000] == (mark + i) % 256).all():
                errors.append(f"{mark}.{i}")
            del view

    threads = [threading.Thread(target=use, args=(mark,)) for mark in (0, 50, 100, 150)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    gc.collect()
    assert pool.stats().used_bytes == 0 and pool.stats().num_made <= 4
