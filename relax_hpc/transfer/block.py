"""Blocks: the fields of one put, self-describing, in one piece of memory that is written once.

prefix   magic 8 | epoch 8 | nbytes 8 | header nbytes 4 | columns 4
header   msgpack (rows, columns), then the xxh3-64 of every column
payload  columns, each at a multiple of 64 bytes; a column is one field of all rows, end to end
commit   the epoch is zero while the block is written and becomes its number at the very end

The values of one field that have the same dtype and rank are one column, so that a group is copied
by one `np.concatenate` per field, hashed piece by piece while the piece is still in the cache, and
handed out as slices of one array. Nothing in a block needs to be unpickled.

    plan = plan_block([Entry("0.7.0", 0, "tokens", tokens), Entry("0.7.0", 0, "reward", reward)])
    memory = memoryview(bytearray(plan.nbytes))
    digest = write_block(plan, memory, epoch=1)
    ref = BlockRef(node="n1", extent="x", offset=0, nbytes=plan.nbytes, epoch=1, digest=digest)
    rows = open_block(memory, ref, verify=True, where="a test")
    rows["0.7.0", 0]["tokens"]          # a read-only view into `memory`
"""

import bisect
import os
import re
import struct
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from relax_hpc.errors import StaleEpochError, TransferError
from relax_hpc.records import Fields, FieldValue
from relax_hpc.transfer.column import (
    KINDS,
    BlockHeader,
    Column,
    ColumnHeader,
    MixedColumn,
    RowKeys,
    number_rows,
    rows_of,
    values_of,
)
from relax_hpc.transfer.wire import BlockRef

MAGIC = b"RLXBLK1\n"
PREFIX_BYTES = 32
ALIGN = 64
NOT_COMMITTED = 0
"""Epoch of a block that is being written, was given up or is free."""

_PREFIX = struct.Struct("<8sQQII")
_EPOCH = struct.Struct("<Q")
_EPOCH_AT = 8
_CHUNK_BYTES = 1 << 20
"""Copy, check and hash go in pieces that stay in a core's cache. Smaller ones cost more calls than
they save misses; of this size memcpy may write them past the cache (`_streams`)."""
_xxh3: Callable[[Any], int] = xxhash.xxh3_64_intdigest
"""Typed for arrays, which are buffers too."""
_NOTHING = _xxh3(b"")

Check = Callable[[np.ndarray], int]
"""Looks at a piece of a column: index of the first element that it refuses, -1 to accept all."""


class Rows(Mapping[tuple[str, int], Fields]):
    """Rows of a block: (uid, sample index) -> field name -> value."""

    __slots__ = ("_bounds", "_fields", "_header", "_index")

    def __init__(self, header: BlockHeader, fields: Sequence[Fields]) -> None:
        self._header, self._fields = header, fields
        self._bounds = _bounds(header)
        self._index: dict[tuple[str, int], Fields] | None = None
        if not self._bounds:
            self._by_key()

    def pick(self, uid: str, samples: list[int]) -> list[Fields]:
        """Return the fields of samples of one group; {} for those that are not here."""
        begin, end = self._bounds.get(uid, (0, 0))
        if self._header.samples[begin:end] == samples:  # whole, in order: the usual case
            return list(self._fields[begin:end])
        index = self._by_key()
        return [index.get((uid, sample), {}) for sample in samples]

    def __getitem__(self, key: tuple[str, int]) -> Fields:
        return self._by_key()[key]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(_keys(self._header))

    def __len__(self) -> int:
        return len(self._header.samples)

    def _by_key(self) -> dict[tuple[str, int], Fields]:
        if self._index is None:
            self._index = dict(zip(_keys(self._header), self._fields, strict=True))
        return self._index


def _bounds(header: BlockHeader) -> dict[str, tuple[int, int]]:
    """Where the rows of each group begin and end; {} if they do not lie together.

    Raises:
        ValueError: a row has no group.
    """
    if len(header.uids) == 1:
        return {header.uids[0]: (0, len(header.samples))}
    of_rows, begin = header.uid_of_row, 0
    if len(of_rows) != len(header.samples) or not set(of_rows) <= set(range(len(header.uids))):
        raise ValueError(f"{len(header.samples)} rows of groups {of_rows}: {len(header.uids)} uids")
    if of_rows != sorted(of_rows):
        return {}
    bounds = {}
    for number, uid in enumerate(header.uids):
        end = bisect.bisect_right(of_rows, number, begin)
        bounds[uid] = (begin, end)
        begin = end
    return bounds


class Entry(NamedTuple):
    """One field of one row, to be written."""

    uid: str
    sample_index: int
    name: str
    value: FieldValue


class Columns(NamedTuple):
    """Fields of many rows, to be written: cheaper than an Entry for each."""

    rows: RowKeys
    """(uid, sample index), each once."""
    values: "Mapping[str, Sequence[FieldValue | None]]"
    """By field name one value for each row; None: the row does not have the field."""
    lengths: Mapping[str, list[int]] = types.MappingProxyType({})
    """Of fields that were looked at already: one-dimensional arrays of one dtype, this long."""


class Span(NamedTuple):
    """Where a column lies in a block, for those who hash it while it arrives."""

    start: int
    """From the start of the block, in bytes."""
    end: int
    digest: int
    name: str
    uids: tuple[str, ...]


# ---------------------------------------------------------------------------------------------
# Planning
# ---------------------------------------------------------------------------------------------


class BlockPlan:
    """What a block will hold, and its exact size. Keeps the values alive until it is written."""

    __slots__ = ("columns", "header", "keys", "nbytes", "payload_start", "source")

    def __init__(self, source: Columns, columns: list[Column]) -> None:
        self.source = source
        self.keys = source.rows
        self.columns = columns
        offset = 0
        for column in columns:
            column.offset = offset
            offset += _aligned(column.nbytes)
        self.header = _HEADER_ENCODER.encode(_header(self.keys, columns))
        header_end = PREFIX_BYTES + len(self.header) + _EPOCH.size * len(columns)
        self.payload_start = _aligned(header_end)
        self.nbytes = self.payload_start + offset
        """Size of the block in bytes."""


def plan_block(source: Columns | Sequence[Entry]) -> BlockPlan:
    """Lay out a block. Copies nothing (except values that are not contiguous).

    Raises:
        TransferError: a value is not numeric, or a field is given twice; names uid and field.
    """
    if not isinstance(source, Columns):
        source = _columns_of(source)
    num_rows = len(source.rows)
    planner = _Planner(source.rows)
    for name, values in source.values.items():
        if len(values) != num_rows:
            raise TransferError(f"field {name}: {len(values)} values for {num_rows} rows")
        planner.add_values((name,), values, source.lengths.get(name))
    return BlockPlan(source, list(planner.columns.values()))


def _columns_of(entries: Sequence[Entry]) -> Columns:
    rows: dict[tuple[str, int], int] = {}
    for uid, sample_index, _, _ in entries:
        rows.setdefault((uid, sample_index), len(rows))
    values: dict[str, list[FieldValue | None]] = {}
    for uid, sample_index, name, value in entries:
        column = values.setdefault(name, [None] * len(rows))
        row = rows[uid, sample_index]
        if value is None or column[row] is not None:
            fault = "is None" if value is None else "is given twice"
            raise TransferError(f"group {uid} sample {sample_index}: field {name} {fault}")
        column[row] = value
    return Columns(list(rows), values)


class _Planner:
    """Sorts values into columns."""

    def __init__(self, keys: RowKeys) -> None:
        self._keys = keys
        self.columns: dict[tuple[object, ...], Column] = {}
        self._mixed: dict[tuple[object, ...], MixedColumn] = {}

    def add_values(
        self,
        path: tuple[str, ...],
        values: "Sequence[FieldValue | None]",
        lengths: list[int] | None,
    ) -> None:
        """Add a field: one value for each row, None where it is missing."""
        column = Column.of_all_rows(path, values, lengths)
        if column is not None:
            self.columns[path] = column
            return
        for row, value in enumerate(values):
            if value is not None:
                self._add(row, path, value)

    def _add(self, row: int, path: tuple[str, ...], value: object) -> None:
        if isinstance(value, dict):
            self._add_dict(row, path, value)
            return
        if isinstance(value, bytes | str):
            kind = "bytes" if isinstance(value, bytes) else "str"
            data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
            array = np.frombuffer(data, np.uint8)
        else:
            kind, array = "array", np.asarray(value)
        if array.dtype.kind not in KINDS:
            raise TransferError(
                f"{self._where(row, path)} has dtype {array.dtype}; put numeric arrays, bytes, "
                "texts or dicts of them"
            )
        flat = np.ascontiguousarray(array).reshape(-1)
        self._column(path, kind, array.dtype, array.ndim).add(row, value, flat, array.shape)

    def _add_dict(self, row: int, path: tuple[str, ...], value: dict[Any, Any]) -> None:
        column = self._column(path, "dict", np.dtype(np.uint8), 0)
        column.rows.append(row)
        column.items.append(0)
        for key, inner in value.items():
            if not isinstance(key, str) or inner is None:
                raise TransferError(
                    f"{self._where(row, path)}: {key!r} is {type(inner).__name__}; keys must be "
                    "texts, values arrays, bytes, texts or dicts"
                )
            self._add(row, (*path, key), inner)

    def _column(
        self, path: tuple[str, ...], kind: str, dtype: "np.dtype[Any]", ndim: int
    ) -> MixedColumn:
        key = (path, kind, dtype.num, dtype.byteorder, ndim)
        column = self._mixed.get(key)
        if column is None:
            column = self._mixed[key] = self.columns[key] = MixedColumn(path, kind, dtype, ndim)
        return column

    def _where(self, row: int, path: tuple[str, ...]) -> str:
        uid, sample_index = self._keys[row]
        return f"group {uid} sample {sample_index}: field {'.'.join(path)}"


def _header(keys: RowKeys, columns: list[Column]) -> BlockHeader:
    try:
        uids, uid_of_row, samples = number_rows(keys)
    except ValueError as err:
        raise TransferError(str(err)) from None
    return BlockHeader(
        uids=uids,
        uid_of_row=uid_of_row if len(uids) > 1 else [],
        samples=samples,
        columns=[column.header(len(keys)) for column in columns],
    )


_HEADER_ENCODER = msgspec.msgpack.Encoder()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def write_block(
    plan: BlockPlan, view: memoryview, epoch: int, checks: Mapping[str, Check] | None = None
) -> int:
    """Copy a planned block into memory and commit it.

    Args:
        plan: from `plan_block`.
        view: at least `plan.nbytes` writable bytes that start at a multiple of 64.
        epoch: number of the block, > 0; stored last.
        checks: by field name, who looks at the values of arrays while they are in the cache, for
            example `{"rollout_logprobs": first_not_finite}`.

    Returns:
        The digest for the BlockRef.

    Raises:
        TransferError: a check refused a value (names uid, field and value); the block is not
            committed and its memory may be used again.
    """
    _PREFIX.pack_into(
        view, 0, MAGIC, NOT_COMMITTED, plan.nbytes,
        len(plan.header) + _EPOCH.size * len(plan.columns), len(plan.columns),
    )  # fmt: skip
    digests = []
    for column in plan.columns:
        check = checks.get(column.path[0]) if checks and column.kind == "array" else None
        size, begin = column.nbytes // column.dtype.itemsize, plan.payload_start + column.offset
        target = np.frombuffer(view, column.dtype, size, begin) if size else None
        digests.append(_NOTHING if target is None else _write_column(plan, column, target, check))
    header = plan.header + struct.pack(f"<{len(digests)}Q", *digests)
    view[PREFIX_BYTES : PREFIX_BYTES + len(header)] = header
    _EPOCH.pack_into(view, _EPOCH_AT, epoch)
    return xxhash.xxh3_64_intdigest(header)


def _write_column(plan: BlockPlan, column: Column, target: np.ndarray, check: Check | None) -> int:
    """Copy, hash and check one column; returns its digest."""
    if column.nbytes <= _CHUNK_BYTES:
        _copy(plan, column, column.flats, target, 0, check)
        return _xxh3(target)
    digest = xxhash.xxh3_64()
    begin = 0
    for batch, end in _batches(column):
        first = batch[0]
        piece = target[begin:end]
        # Streamed, the target is not in the cache afterwards, but the source is before.
        is_streamed = _STREAMS and first.nbytes >= _CHUNK_BYTES
        if is_streamed:
            digest.update(first.data)
        _copy(plan, column, batch, piece, begin, check)
        if not is_streamed:
            digest.update(piece.data)
        begin = end
    return digest.intdigest()


def _streams() -> bool:
    """Whether glibc's memcpy writes pieces of 1 MB past the cache.

    That saves reading the target first: copy and hash reach 92 % of the fastest copy of this
    thread, else 79 % (Zen 5, 64 arrays of 4 MB). By default glibc does it from the size of the last
    level cache on; `GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=1048576` in a process's
    environment asks for it.
    """
    found = _THRESHOLD.search(os.environ.get("GLIBC_TUNABLES", ""))
    return found is not None and int(found[1], 0) <= _CHUNK_BYTES


_THRESHOLD = re.compile(r"x86_non_temporal_threshold=(0x[0-9a-fA-F]+|[1-9][0-9]*)")
_STREAMS = _streams()


def _copy(
    plan: BlockPlan,
    column: Column,
    flats: Sequence[np.ndarray],
    piece: np.ndarray,
    begin: int,
    check: Check | None,
) -> None:
    """Copy values into the piece of a column that starts at element `begin`, and check them."""
    if len(flats) > 1:
        np.concatenate(flats, out=piece)
    else:
        piece[...] = flats[0]
    if check is not None and (bad := check(piece)) >= 0:
        uid, sample_index = plan.keys[column.row_of(begin + bad)]
        value = piece[bad]
        fault = "is refused" if np.isfinite(value) else "is not finite"
        raise TransferError(
            f"group {uid} sample {sample_index}: {'.'.join(column.path)} {fault}: it holds {value}"
        )


def _batches(column: Column) -> Iterator[tuple[Sequence[np.ndarray], int]]:
    """Cut a column's values into pieces that fit into the cache; also says where each ends."""
    flats, ends, itemsize = column.flats, column.ends(), column.dtype.itemsize
    first, begin = 0, 0
    while first < len(flats):
        last = bisect.bisect_right(ends, begin + _CHUNK_BYTES // itemsize, first)
        if last > first:
            begin = ends[last - 1]
            yield flats[first:last], begin
            first = last
            continue
        flat, step = flats[first], _CHUNK_BYTES // itemsize
        for at in range(0, flat.size, step):
            piece = flat[at : at + step]
            begin += piece.size
            yield (piece,), begin
        first += 1


def first_not_finite(values: np.ndarray) -> int:
    """A check: index of the first NaN or infinity of a float column, else -1."""
    if values.dtype.kind not in "fc" or values.size == 0:
        return -1
    # A sum of squares is finite only if every term is; it reads each value once and stores none.
    if values.dtype.char in "fd":
        with np.errstate(over="ignore"):
            if np.isfinite(np.dot(values, values)):
                return -1
    is_finite = np.isfinite(values)
    return -1 if is_finite.all() else int(np.argmin(is_finite))


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def check_commit(buffer: memoryview, ref: BlockRef, where: str) -> None:
    """Look at a block's prefix only: is it still the block that was referenced?

    Raises:
        StaleEpochError: it is free, not committed, or its place was given to another block.
        TransferError: the buffer is too short.
    """
    if len(buffer) < max(ref.nbytes, PREFIX_BYTES):
        raise TransferError(f"{_name(ref, where)}: {len(buffer)} bytes, expected {ref.nbytes}")
    magic, epoch, nbytes, _, _ = _PREFIX.unpack_from(buffer, 0)
    if (magic, epoch, nbytes) != (MAGIC, ref.epoch, ref.nbytes):
        seen = f"epoch {epoch}, {nbytes} bytes" if magic == MAGIC else "no block at all"
        raise StaleEpochError(
            f"{_name(ref, where)} is gone: there is {seen}, expected epoch {ref.epoch}, "
            f"{ref.nbytes} bytes; its memory was freed or recycled"
        )


def mark_free(view: memoryview, offset: int) -> None:
    """Make every reference to the block at `offset` stale."""
    _EPOCH.pack_into(view, offset + _EPOCH_AT, NOT_COMMITTED)


def open_block(buffer: memoryview, ref: BlockRef, *, verify: bool, where: str) -> Rows:
    """Return read-only views of a block's fields by (uid, sample index).

    The same for mapped and for transferred bytes. The views keep `buffer` alive.

    Args:
        buffer: starts with the block.
        ref: which block is expected.
        verify: also check the payload's checksums.
        where: reader and transport, for error messages.

    Raises:
        StaleEpochError: the block was freed, or its place was given to another one.
        TransferError: header or payload is not what the writer committed; names uid and field.
    """
    check_commit(buffer, ref, where)
    header, digests, start = _read_header(buffer, ref, where)
    buffer = buffer.toreadonly()
    try:
        cut = []
        for column, digest in zip(header.columns, digests, strict=True):
            raw = buffer[start + column.offset : start + column.offset + column.nbytes]
            if verify and _xxh3(raw) != digest:
                raise _corrupt(column, _keys(header), raw, digest, _name(ref, where))
            cut.append(values_of(column, raw))
        rows = Rows(header, rows_of(header.columns, cut, len(header.samples)))
    except (ValueError, IndexError) as err:
        raise TransferError(f"{_name(ref, where)}: header contradicts itself: {err}") from err
    if _EPOCH.unpack_from(buffer, _EPOCH_AT)[0] != ref.epoch:  # recycled while we looked
        check_commit(buffer, ref, where)
    return rows


def column_spans(buffer: memoryview, ref: BlockRef, where: str) -> list[Span]:
    """Return where the columns lie, from a block of which only the header has arrived.

    Raises:
        StaleEpochError: it is another block.
        TransferError: the header is corrupt.
    """
    header, digests, start = _read_header(buffer, ref, where)
    spans = []
    for column, digest in zip(header.columns, digests, strict=True):
        begin = start + column.offset
        name = ".".join(column.path)
        spans.append(Span(begin, begin + column.nbytes, digest, name, tuple(header.uids)))
    return spans


def _name(ref: BlockRef, where: str) -> str:
    return f"block {ref.extent}+{ref.offset} of node {ref.node} ({where})"


def _read_header(
    buffer: memoryview, ref: BlockRef, where: str
) -> tuple[BlockHeader, tuple[int, ...], int]:
    """Return the header, the columns' digests and the start of the payload."""
    _, _, _, nbytes, num_columns = _PREFIX.unpack_from(buffer, 0)
    data = bytes(buffer[PREFIX_BYTES : min(PREFIX_BYTES + nbytes, ref.nbytes)])
    seen = xxhash.xxh3_64_intdigest(data)
    if seen != ref.digest:
        check_commit(buffer, ref, where)  # recycled while we read is no corruption
        raise TransferError(
            f"{_name(ref, where)}: header is corrupt: xxh3 {seen:016x}, expected {ref.digest:016x}"
        )
    try:
        end = len(data) - _EPOCH.size * num_columns
        header = _HEADER_DECODER.decode(data[:end])
        digests = struct.unpack_from(f"<{num_columns}Q", data, end)
    except (msgspec.DecodeError, struct.error) as err:
        raise TransferError(f"{_name(ref, where)}: header cannot be read: {err}") from err
    return header, digests, _aligned(PREFIX_BYTES + nbytes)


_HEADER_DECODER = msgspec.msgpack.Decoder(BlockHeader)


def _keys(header: BlockHeader) -> list[tuple[str, int]]:
    if len(header.uids) == 1:
        uid = header.uids[0]
        return [(uid, sample) for sample in header.samples]
    uids = map(header.uids.__getitem__, header.uid_of_row)
    return list(zip(uids, header.samples, strict=True))


def _corrupt(
    column: ColumnHeader,
    keys: list[tuple[str, int]],
    raw: memoryview,
    digest: int,
    name: str,
) -> TransferError:
    rows = column.rows or range(len(keys))
    uids = list(dict.fromkeys(keys[row][0] for row in rows))
    groups = uids[0] if len(uids) == 1 else f"{uids[0]} .. {uids[-1]} ({len(uids)} groups)"
    samples = sorted({keys[row][1] for row in rows})
    seen = _xxh3(raw)
    return TransferError(
        f"{name}: field {'.'.join(column.path)} of group {groups} samples {samples[0]} .. "
        f"{samples[-1]} is corrupt: xxh3 {seen:016x}, expected {digest:016x}"
    )
