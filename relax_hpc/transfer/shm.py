"""Segments: payload of rows in files of a node's shared memory, written once, mapped read-only.

layout   magic 8 | header length 4 | header (JSON) | fields, each at a multiple of 64 bytes
header   run id, attempt, owner pid and start time, and for each field its row, name, dtype,
         shape, offset, nbytes and xxh3-64
commit   space is reserved first (posix_fallocate: a full tmpfs is an error here, not a SIGBUS
         at a random store), everything is written to a temporary name, then renamed

A reader checks sizes, the header's checksum and every field's checksum before it hands out a
view. Unlinking a mapped segment is safe: the memory is freed with the last mapping.
"""

import dataclasses
import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from relax_hpc.errors import TransferError
from relax_hpc.records import Fields
from relax_hpc.transfer.owner import (
    Owner,
    is_alive,
    open_shm_folder,
    process_start,
    temporary_name,
    temporary_owners,
)
from relax_hpc.transfer.wire import Segment, SegmentPlace

__all__ = [
    "Entry",
    "Owner",
    "is_alive",
    "map_segment",
    "open_shm_folder",
    "parse_segment",
    "process_start",
    "read_owner",
    "temporary_owners",
    "write_segment",
]

MAGIC = b"RLXSEG1\n"
_HEADER_START = len(MAGIC) + 4
_ALIGN = 64
_KINDS = "biuf"
"""Numeric dtypes only: nothing that needs unpickling."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One field of one row, to be written."""

    uid: str
    sample_index: int
    name: str
    array: np.ndarray


class _Field(msgspec.Struct, frozen=True):
    uid: str
    sample_index: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    xxh3: str


class _SegmentHeader(msgspec.Struct, frozen=True):
    owner: Owner
    fields: list[_Field]


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def write_segment(
    folder: Path, name: str, node: str, owner: Owner, entries: Sequence[Entry]
) -> Segment:
    """Write fields as one segment and commit it.

    Args:
        folder: the segments folder of this node.
        name: file name, unique in the run.
        node: this node's name.
        owner: run, attempt and process that writes.
        entries: fields; numeric arrays of any shape.

    Raises:
        TransferError: shared memory is full, or an array is not numeric. Nothing is left behind.
    """
    arrays = [_plain(entry) for entry in entries]
    fields, payload_start, total = _layout(entries, arrays, owner)
    header = msgspec.json.encode(_SegmentHeader(owner, fields))
    temporary = folder / temporary_name(owner.pid, owner.start, name)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, total)
            _write_at(descriptor, 0, MAGIC + len(header).to_bytes(4, "little") + header)
            for field, array in zip(fields, arrays, strict=True):
                _write_at(descriptor, payload_start + field.offset, _bytes(array))
        finally:
            os.close(descriptor)
        temporary.rename(folder / name)
    except OSError as err:
        temporary.unlink(missing_ok=True)
        raise _write_error(err, folder, name, total) from err
    return Segment(node, name, total, xxhash.xxh3_64_hexdigest(header))


def _plain(entry: Entry) -> np.ndarray:
    array = np.asarray(entry.array)
    if array.dtype.kind not in _KINDS:
        raise TransferError(
            f"group {entry.uid} sample {entry.sample_index}: field {entry.name} has dtype "
            f"{array.dtype}; put numeric arrays"
        )
    return np.asarray(array, order="C")


def _layout(
    entries: Sequence[Entry], arrays: Sequence[np.ndarray], owner: Owner
) -> tuple[list[_Field], int, int]:
    """Return fields (offsets relative to the payload), the payload's start and the file size."""
    fields, offset = [], 0
    for entry, array in zip(entries, arrays, strict=True):
        digest = xxhash.xxh3_64_hexdigest(_bytes(array))
        fields.append(
            _Field(
                entry.uid, entry.sample_index, entry.name, array.dtype.str, array.shape,
                offset, array.nbytes, digest,
            )
        )  # fmt: skip
        offset += -(-array.nbytes // _ALIGN) * _ALIGN
    header_bytes = len(msgspec.json.encode(_SegmentHeader(owner, fields)))
    start = _payload_start(header_bytes)
    return fields, start, start + offset


def _payload_start(header_bytes: int) -> int:
    return -(-(_HEADER_START + header_bytes) // _ALIGN) * _ALIGN


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _write_at(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _write_error(err: OSError, folder: Path, name: str, total: int) -> TransferError:
    if err.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        return TransferError(f"cannot write segment {name} in {folder}: {err.strerror}")
    usage = os.statvfs(folder)
    free = usage.f_bavail * usage.f_frsize
    return TransferError(
        f"shared memory is full: segment {name} needs {total} bytes, {free} are free in {folder}; "
        "lower rollout.groups_per_step or max_staleness, or give the node more memory "
        "(resources.mem_per_node_gb) or a larger /dev/shm"
    )


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def map_segment(path: Path) -> "mmap.mmap":
    """Map a segment read-only.

    Raises:
        TransferError: the file is missing or empty.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as err:
        raise TransferError(f"cannot map segment {path}: {err}") from err


def parse_segment(
    buffer: "mmap.mmap | bytes", place: SegmentPlace
) -> dict[tuple[str, int], Fields]:
    """Verify a segment and return read-only views of its fields by (uid, sample index).

    The same for mapped and for transferred bytes.

    Raises:
        TransferError: size, header or a field's checksum is not what the writer committed; names
            the segment and the field.
    """
    segment = place.segment
    if len(buffer) != segment.nbytes:
        raise TransferError(f"{place}: {len(buffer)} bytes, expected {segment.nbytes}: torn")
    header, start = _read_header(buffer, place)
    view = memoryview(buffer)
    rows: dict[tuple[str, int], Fields] = {}
    for field in header.fields:
        begin = start + field.offset
        data = view[begin : begin + field.nbytes]
        seen = xxhash.xxh3_64_hexdigest(data)
        if seen != field.xxh3:
            raise TransferError(
                f"{place}: field {field.name} of group {field.uid} sample {field.sample_index} is "
                f"corrupt: xxh3 {seen}, expected {field.xxh3}"
            )
        row = rows.setdefault((field.uid, field.sample_index), {})
        row[field.name] = _array(data, field, place)
    return rows


def read_owner(path: Path) -> Owner | None:
    """Return who wrote a segment; None if the file is no intact segment."""
    try:
        with path.open("rb") as file:
            start = file.read(_HEADER_START)
            if start[: len(MAGIC)] != MAGIC:
                return None
            header = file.read(int.from_bytes(start[len(MAGIC) :], "little"))
        return msgspec.json.decode(header, type=_SegmentHeader).owner
    except (OSError, msgspec.DecodeError):
        return None


def _read_header(buffer: "mmap.mmap | bytes", place: SegmentPlace) -> tuple[_SegmentHeader, int]:
    size = int.from_bytes(buffer[len(MAGIC) : _HEADER_START], "little")
    text = bytes(buffer[_HEADER_START : _HEADER_START + size])
    seen = xxhash.xxh3_64_hexdigest(text)
    if buffer[: len(MAGIC)] != MAGIC or seen != place.segment.digest:
        raise TransferError(
            f"{place}: header is corrupt: xxh3 {seen}, expected {place.segment.digest}"
        )
    try:
        return msgspec.json.decode(text, type=_SegmentHeader), _payload_start(size)
    except msgspec.DecodeError as err:
        raise TransferError(f"{place}: header cannot be read: {err}") from err


def _array(data: memoryview, field: _Field, place: SegmentPlace) -> np.ndarray:
    dtype = np.dtype(field.dtype)
    if dtype.kind not in _KINDS:
        raise TransferError(f"{place}: field {field.name} has dtype {field.dtype}")
    if field.nbytes == 0:
        array = np.empty(field.shape, dtype)
        array.setflags(write=False)
        return array
    return np.frombuffer(data, dtype).reshape(field.shape)
