"""Opens blocks that arrive piece by piece: checksums are computed right behind the bytes.

Hashing a long block after it came would read it from memory once more.
"""

import struct
from collections.abc import Sequence

import xxhash

from relax_hpc.errors import RelaxError
from relax_hpc.transfer.block import PREFIX_BYTES, Rows, Span, column_spans, open_block
from relax_hpc.transfer.wire import BlockRef

_HEADER_NBYTES, _HEADER_NBYTES_AT = struct.Struct("<I"), 24
"""In a block's prefix."""


class BlockOpener:
    """Opens and verifies blocks as they arrive, while their bytes are in the cache."""

    def __init__(self, refs: Sequence[BlockRef], where: str) -> None:
        self._refs, self._where = refs, where
        self._hashing: dict[int, _Hashing] = {}
        self._opened: dict[int, Rows | RelaxError] = {}

    def progress(self, index: int, block: memoryview, num_ready: int) -> None:
        """Take note of more bytes of a block."""
        hashing = self._hashing.get(index)
        if num_ready == len(block):
            is_good = hashing is not None and hashing.follow(num_ready) and hashing.is_good()
            self._opened[index] = self._open(index, block, verify=not is_good)
            return
        if hashing is None:
            hashing = self._hashing[index] = _Hashing(block, self._refs[index], self._where)
        hashing.follow(num_ready)

    def result(self, index: int, image: memoryview | RelaxError) -> Rows | RelaxError:
        """Return the rows of a block whose transfer has ended."""
        if isinstance(image, RelaxError):
            return image
        if index not in self._opened:
            self._opened[index] = self._open(index, image, verify=True)
        return self._opened[index]

    def is_hurt(self, index: int) -> bool:
        """Whether another read may help: the server had the block, but other bytes arrived."""
        return isinstance(self._opened.get(index), RelaxError)

    def _open(self, index: int, block: memoryview, *, verify: bool) -> Rows | RelaxError:
        try:
            return open_block(
                block.toreadonly(), self._refs[index], verify=verify, where=self._where
            )
        except RelaxError as err:
            return err


class _Hashing:
    """Checksums of a long block, computed behind the bytes that come."""

    def __init__(self, block: memoryview, ref: BlockRef, where: str) -> None:
        self._block, self._ref, self._where = block, ref, where
        self._spans: list[Span] | None = None
        self._at = 0  # column
        self._hash = xxhash.xxh3_64()
        self._done = 0  # bytes of the block that are hashed, or in no column
        self._is_good = True

    def follow(self, num_ready: int) -> bool:
        """Hash what came; False: leave the whole block to `open_block`."""
        if self._spans is None and self._is_good and num_ready >= PREFIX_BYTES:
            self._read_header(num_ready)
        if self._spans is None or not self._is_good:
            return False
        while self._at < len(self._spans):
            span = self._spans[self._at]
            start, end = max(self._done, span.start), min(span.end, num_ready)
            if start < end:
                self._hash.update(self._block[start:end])
                self._done = end
            if end < span.end:
                return True
            self._is_good = self._is_good and self._hash.intdigest() == span.digest
            self._hash.reset()
            self._at += 1
        return True

    def is_good(self) -> bool:
        """All columns were hashed and are what the writer committed."""
        return self._is_good and self._spans is not None and self._at == len(self._spans)

    def _read_header(self, num_ready: int) -> None:
        (nbytes,) = _HEADER_NBYTES.unpack_from(self._block, _HEADER_NBYTES_AT)
        if num_ready < PREFIX_BYTES + nbytes:
            return
        try:
            self._spans = column_spans(self._block, self._ref, self._where)
        except RelaxError:
            self._is_good = False  # open_block says it again, and its error is the result
