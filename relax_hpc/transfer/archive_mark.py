"""The mark "open for writing" of an HDF5 file: consistency flags in its superblock.

HDF5 sets it while a file is open for writing, and without it removed (h5clear, or an orderly close)
no plain open works any more: after a kill of the writer (h5py issue 1807), and for tools without an
SWMR mode, h5dump among them, also before. A file that is written in SWMR mode is consistent at any
moment, so its writer takes the mark off after each flush, exactly as `h5clear -s` would.

Layout and checksum: HDF5 File Format Specification, II.A, superblock version 3.
"""

import os
import struct
from pathlib import Path

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_VERSION = 3
_VERSION_AT, _FLAGS_AT = 8, 11
_BODY_BYTES = 44
"""With 8-byte addresses, which h5py always writes; then 4 bytes of checksum."""
_MASK = 0xFFFFFFFF


def is_marked_open(path: Path) -> bool:
    """Whether plain opens fail because a writer has the file open, or was killed."""
    with path.open("rb") as file:
        return _flags(file.read(_BODY_BYTES + 4)) > 0


def clear_mark(descriptor: int) -> bool:
    """Take the mark off; False: there is none, or the file is of another layout."""
    block = os.pread(descriptor, _BODY_BYTES + 4, 0)
    if _flags(block) <= 0:
        return False
    body = block[:_FLAGS_AT] + b"\0" + block[_FLAGS_AT + 1 : _BODY_BYTES]
    os.pwrite(descriptor, body + struct.pack("<I", _lookup3(body)), 0)
    return True


def _flags(block: bytes) -> int:
    """Consistency flags; -1 if it is no intact superblock that we know."""
    if len(block) < _BODY_BYTES + 4 or not block.startswith(_SIGNATURE):
        return -1
    body = block[:_BODY_BYTES]
    checksum = int.from_bytes(block[_BODY_BYTES : _BODY_BYTES + 4], "little")
    if body[_VERSION_AT] != _VERSION or checksum != _lookup3(body):
        return -1
    return body[_FLAGS_AT]


def _lookup3(data: bytes) -> int:
    """Bob Jenkins' hash of 44 bytes, the checksum of all HDF5 metadata."""
    a = b = c = (0xDEADBEEF + len(data)) & _MASK
    *words, last = _triples(data)
    for word in words:
        a, b, c = (a + word[0]) & _MASK, (b + word[1]) & _MASK, (c + word[2]) & _MASK
        for turn in ((4, 6), (8, 16), (19, 4)):
            a, b, c = _mix(a, b, c, turn[0])
            a, b, c = _mix(a, b, c, turn[1])
    a, b, c = (a + last[0]) & _MASK, (b + last[1]) & _MASK, (c + last[2]) & _MASK
    for turns in (14, 11, 25, 16, 4, 14, 24):
        # c ^= b; c -= rot(b, n), and the three change places.
        c = ((c ^ b) - _rotate(b, turns)) & _MASK
        a, b, c = b, c, a
    return b


def _triples(data: bytes) -> list[tuple[int, int, int]]:
    return list(struct.iter_unpack("<3I", data.ljust(48, b"\0")))


def _mix(a: int, b: int, c: int, turns: int) -> tuple[int, int, int]:
    """a -= c; a ^= rot(c, n); c += b; then the three change places."""
    a = ((a - c) & _MASK) ^ _rotate(c, turns)
    c = (c + b) & _MASK
    return b, c, a


def _rotate(value: int, turns: int) -> int:
    return ((value << turns) | (value >> (32 - turns))) & _MASK
