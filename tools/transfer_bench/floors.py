"""What this machine can do at best, with one thread, in this very run.

copy          numpy copy of 256 MiB into shared memory that was touched before
copy_tensors  the tensors work, 64 arrays one by one, into such memory
copy_text     the text work, eight samples of a field at a time (numpy.concatenate): nothing packs
              it faster
xxh3          hash of 256 MiB
"""

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from transfer_bench.work import GROUP_SIZE, Work

NBYTES = 256 << 20
_MARGIN = 1 << 20
_ALIGN = 64
_PREFIX = "relax-bench-"


def shared_memory(nbytes: int) -> mmap.mmap:
    """Return warm shared memory: allocated, mapped, every page touched. No name is left."""
    descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir="/dev/shm")
    try:
        Path(name).unlink()
        os.posix_fallocate(descriptor, 0, nbytes)
        memory = mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
    return memory


class Floors:
    """Buffers made once, so that every round finds them warm."""

    def __init__(self, text: Work, tensors: Work) -> None:
        self._tensors = _columns(tensors, 1)
        self._text = _columns(text, GROUP_SIZE)
        self._nbytes = {"copy_text": text.nbytes, "copy_tensors": tensors.nbytes}
        self._source = np.random.default_rng(1).integers(0, 255, NBYTES, np.uint8)
        self._memory = shared_memory(NBYTES + _MARGIN)
        self._target = np.frombuffer(self._memory, np.uint8)
        self.measured: dict[str, list[float]] = {}
        """GB/s by name, round by round."""

    def measure(self) -> float:
        """Do one round of each floor; returns the plain copy's GB/s."""
        self._note("copy", self._copy)
        self._note("copy_tensors", lambda: self._pack(self._tensors))
        self._note("copy_text", lambda: self._pack(self._text))
        self._note("xxh3", lambda: xxhash.xxh3_64_intdigest(self._source))
        return self.measured["copy"][-1]

    def medians(self) -> dict[str, float]:
        """GB/s."""
        return {name: statistics.median(values) for name, values in self.measured.items()}

    def _note(self, name: str, function: Callable[[], object]) -> None:
        begun = time.perf_counter()
        function()
        seconds = time.perf_counter() - begun
        nbytes = self._nbytes.get(name, NBYTES)
        self.measured.setdefault(name, []).append(nbytes / seconds / 1e9)

    def _copy(self) -> None:
        self._target[:NBYTES] = self._source

    def _pack(self, columns: list[list[np.ndarray]]) -> None:
        offset = 0
        for column in columns:
            nbytes = sum([array.nbytes for array in column])
            target = self._target[offset : offset + nbytes].view(column[0].dtype)
            np.concatenate(column, out=target)
            offset += -(-nbytes // _ALIGN) * _ALIGN


def _columns(work: Work, group_size: int) -> list[list[np.ndarray]]:
    return [
        [sample[name] for sample in work.samples[begin : begin + group_size]]
        for begin in range(0, len(work.samples), group_size)
        for name in work.fields
    ]
