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

import functools
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from relax_hpc.errors import StaleEpochError, TransferError
from relax_hpc.records import Fields, FieldValue
from relax_hpc.transfer.wire import BlockRef

MAGIC = b"RLXBLK1\n"
PREFIX_BYTES = 32
ALIGN = 64
NOT_COMMITTED = 0
"""Epoch of a block that is being written, was given up or is free."""

_PREFIX = struct.Struct("<8sQQII")
_EPOCH = struct.Struct("<Q")
_EPOCH_AT = 8
_CHUNK_BYTES = 256 << 10
"""Copy and hash go in pieces that stay in a core's cache: 86 % of a plain copy's speed, 47 % when
everything is copied first and hashed afterwards."""
_DEDUP_BYTES = 64 << 10
_SAMPLE_BYTES = 4 << 10
_KINDS = "biufc"
"""Numeric dtypes only: nothing that needs unpickling."""

Rows = dict[tuple[str, int], Fields]
"""(uid, sample index) -> field name -> value."""


class Entry(NamedTuple):
    """One field of one row, to be written."""

    uid: str
    sample_index: int
    name: str
    value: FieldValue


class Columns(NamedTuple):
    """Fields of many rows, to be written: cheaper than an Entry for each."""

    rows: Sequence[tuple[str, int]]
    """(uid, sample index), each once."""
    values: "Mapping[str, Sequence[FieldValue | None]]"
    """By field name one value for each row; None: the row does not have the field."""


class Span(NamedTuple):
    """Where a column lies in a block, for those who hash it while it arrives."""

    start: int
    """From the start of the block, in bytes."""
    end: int
    digest: int
    name: str
    uids: tuple[str, ...]


class _ColumnHeader(msgspec.Struct, frozen=True, array_like=True):
    path: tuple[str, ...]
    """Name of the field, and the keys below it when the value is a dict."""
    kind: str
    """array, bytes, str or dict (an empty one)."""
    dtype: str
    ndim: int
    offset: int
    """In the payload."""
    nbytes: int
    shapes: list[int]
    """`ndim` numbers an item; length in bytes of bytes and str."""
    rows: list[int]
    """Row of each value; empty: one value for each row, in order."""
    items: list[int]
    """Item of each value; empty: each has its own. Equal values are stored once."""


class _Header(msgspec.Struct, frozen=True, array_like=True):
    uids: list[str]
    uid_of_row: list[int]
    """Empty when there is only one uid."""
    samples: list[int]
    columns: list[_ColumnHeader]


# ---------------------------------------------------------------------------------------------
# Planning
# ---------------------------------------------------------------------------------------------


class _Column:
    """Values of one field with the same kind, dtype and rank."""

    __slots__ = (
        "by_id", "by_sample", "dtype", "flats", "items", "kind", "nbytes", "ndim", "offset",
        "path", "rows", "shapes",
    )  # fmt: skip

    def __init__(self, path: tuple[str, ...], kind: str, dtype: np.dtype[Any], ndim: int) -> None:
        self.path = path
        self.kind = kind
        self.dtype = dtype
        self.ndim = ndim
        self.flats: list[np.ndarray] = []
        self.shapes: list[int] = []
        self.rows: list[int] = []
        self.items: list[int] = []
        self.nbytes = 0
        self.offset = 0
        self.by_id: dict[int, int] = {}
        self.by_sample: dict[tuple[object, ...], list[int]] = {}

    def add(self, row: int, source: object, flat: np.ndarray, shape: tuple[int, ...]) -> None:
        self.rows.append(row)
        known = self.by_id.get(id(source))
        if known is None and flat.nbytes >= _DEDUP_BYTES:
            known = self._find_equal(flat, shape)
        if known is None:
            known = len(self.flats)
            self.flats.append(flat)
            self.shapes.extend(shape)
            self.nbytes += flat.nbytes
        self.by_id[id(source)] = known
        self.items.append(known)

    def _find_equal(self, flat: np.ndarray, shape: tuple[int, ...]) -> int | None:
        """Item with the same bytes; registers the value when there is none."""
        data = flat.view(np.uint8)
        middle = data.size // 2
        places = (0, middle, data.size - _SAMPLE_BYTES)
        key = (
            shape,
            *(xxhash.xxh3_64_intdigest(data[at : at + _SAMPLE_BYTES].data) for at in places),
        )
        candidates = self.by_sample.setdefault(key, [])
        for item in candidates:
            if _is_same(self.flats[item], flat):
                return item
        candidates.append(len(self.flats))
        return None

    def header(self, num_rows: int) -> _ColumnHeader:
        return _ColumnHeader(
            path=self.path,
            kind=self.kind,
            dtype=self.dtype.str,
            ndim=self.ndim,
            offset=self.offset,
            nbytes=self.nbytes,
            shapes=self.shapes,
            rows=[] if self.rows == list(range(num_rows)) else self.rows,
            items=[] if len(self.flats) == len(self.items) else self.items,
        )


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal bytes; NaNs and the two zeros are told apart."""
    return bool(xxhash.xxh3_128_digest(one.data) == xxhash.xxh3_128_digest(other.data))


class BlockPlan:
    """What a block will hold, and its exact size. Keeps the values alive until it is written."""

    __slots__ = ("columns", "header", "keys", "nbytes", "payload_start", "source")

    def __init__(self, source: Columns, columns: list[_Column]) -> None:
        self.source = source
        self.keys = source.rows
        self.columns = columns
        offset = 0
        for column in columns:
            column.offset = offset
            offset += _aligned(column.nbytes)
        self.header = msgspec.msgpack.encode(_header(self.keys, columns))
        header_end = PREFIX_BYTES + len(self.header) + _EPOCH.size * len(columns)
        self.payload_start = _aligned(header_end)
        self.nbytes = self.payload_start + offset
        """Size of the block in bytes."""

    def place(self, column: _Column, element: int) -> tuple[str, int]:
        """Return (uid, sample index) of the first row that an element of a column belongs to."""
        end = 0
        for item, flat in enumerate(column.flats):
            end += flat.size
            if element < end:
                return self.keys[column.rows[column.items.index(item)]]
        raise AssertionError(f"element {element} of {end}")


def plan_block(source: Columns | Sequence[Entry]) -> BlockPlan:
    """Lay out a block. Copies nothing (except values that are not contiguous).

    Raises:
        TransferError: a value is not numeric, or a field is given twice; names uid and field.
    """
    if not isinstance(source, Columns):
        source = _columns_of(source)
    num_rows = len(source.rows)
    if len(set(source.rows)) != num_rows:
        raise TransferError(f"rows are given twice: {source.rows}")
    planner = _Planner(source.rows)
    for name, values in source.values.items():
        if len(values) != num_rows:
            raise TransferError(f"field {name}: {len(values)} values for {num_rows} rows")
        planner.add_values((name,), values)
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

    def __init__(self, keys: Sequence[tuple[str, int]]) -> None:
        self._keys = keys
        self.columns: dict[tuple[object, ...], _Column] = {}

    def add_values(self, path: tuple[str, ...], values: "Sequence[FieldValue | None]") -> None:
        column: _Column | None = None
        for row, value in enumerate(values):
            if type(value) is not np.ndarray:
                if value is not None:
                    self._add(row, path, value)
            elif column is not None and value.dtype is column.dtype and value.ndim == column.ndim:
                column.add(row, value, value.reshape(-1), value.shape)
            else:
                column = self._add(row, path, value)

    def _add(self, row: int, path: tuple[str, ...], value: object) -> _Column:
        if isinstance(value, dict):
            return self._add_dict(row, path, value)
        if isinstance(value, bytes | str):
            kind = "bytes" if isinstance(value, bytes) else "str"
            data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
            array = np.frombuffer(data, np.uint8)
        else:
            kind, array = "array", np.asarray(value)
        if array.dtype.kind not in _KINDS:
            raise TransferError(
                f"{self._where(row, path)} has dtype {array.dtype}; put numeric arrays, bytes, "
                "texts or dicts of them"
            )
        column = self._column(path, kind, array.dtype, array.ndim)
        column.add(row, value, array.reshape(-1), array.shape)
        return column

    def _add_dict(self, row: int, path: tuple[str, ...], value: dict[Any, Any]) -> _Column:
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
        return column

    def _column(
        self, path: tuple[str, ...], kind: str, dtype: "np.dtype[Any]", ndim: int
    ) -> _Column:
        key = (path, kind, dtype.num, dtype.byteorder, ndim)
        column = self.columns.get(key)
        if column is None:
            column = self.columns[key] = _Column(path, kind, dtype, ndim)
        return column

    def _where(self, row: int, path: tuple[str, ...]) -> str:
        uid, sample_index = self._keys[row]
        return f"group {uid} sample {sample_index}: field {'.'.join(path)}"


def _header(keys: Sequence[tuple[str, int]], columns: list[_Column]) -> _Header:
    numbers: dict[str, int] = {}
    uid_of_row = [numbers.setdefault(uid, len(numbers)) for uid, _ in keys]
    return _Header(
        uids=list(numbers),
        uid_of_row=uid_of_row if len(numbers) > 1 else [],
        samples=[sample for _, sample in keys],
        columns=[column.header(len(keys)) for column in columns],
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def write_block(
    plan: BlockPlan, view: memoryview, epoch: int, check_finite: Collection[str] = ()
) -> int:
    """Copy a planned block into memory and commit it.

    Args:
        plan: from `plan_block`.
        view: at least `plan.nbytes` writable bytes that start at a multiple of 64.
        epoch: number of the block, > 0; stored last.
        check_finite: fields that must not hold NaN or infinity; looked at once a column, while
            the piece is in the cache.

    Returns:
        The digest for the BlockRef.

    Raises:
        TransferError: a value is not finite (names uid, field and value); the block is not
            committed and its memory may be used again.
    """
    _PREFIX.pack_into(
        view, 0, MAGIC, NOT_COMMITTED, plan.nbytes,
        len(plan.header) + _EPOCH.size * len(plan.columns), len(plan.columns),
    )  # fmt: skip
    payload = np.frombuffer(view, np.uint8)[plan.payload_start : plan.nbytes]
    digests = []
    for column in plan.columns:
        is_checked = column.path[0] in check_finite and column.kind == "array"
        target = payload[column.offset : column.offset + column.nbytes].view(column.dtype)
        digests.append(_write_column(plan, column, target, is_checked))
    header = plan.header + struct.pack(f"<{len(digests)}Q", *digests)
    view[PREFIX_BYTES : PREFIX_BYTES + len(header)] = header
    _EPOCH.pack_into(view, _EPOCH_AT, epoch)
    return xxhash.xxh3_64_intdigest(header)


def _write_column(plan: BlockPlan, column: _Column, target: np.ndarray, is_checked: bool) -> int:
    """Copy, hash and check one column; returns its digest."""
    digest = xxhash.xxh3_64()
    begin = 0
    for batch in _batches(column.flats):
        end = begin + sum([flat.size for flat in batch])
        piece = target[begin:end]
        if len(batch) > 1:
            np.concatenate(batch, out=piece)
        else:
            piece[...] = batch[0]
        digest.update(piece.data)
        if is_checked and (bad := _first_not_finite(piece)) >= 0:
            raise _refused(plan, column, begin + bad, piece[bad])
        begin = end
    return digest.intdigest()


def _batches(flats: Sequence[np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
    """Cut a column's values into pieces that fit into the cache."""
    batch: list[np.ndarray] = []
    nbytes = 0
    for flat in flats:
        if batch and nbytes + flat.nbytes > _CHUNK_BYTES:
            yield batch
            batch, nbytes = [], 0
        if flat.nbytes <= _CHUNK_BYTES:
            batch.append(flat)
            nbytes += flat.nbytes
            continue
        step = _CHUNK_BYTES // flat.itemsize
        for begin in range(0, flat.size, step):
            yield (flat[begin : begin + step],)
    if batch:
        yield batch


def _refused(plan: BlockPlan, column: _Column, element: int, value: object) -> TransferError:
    uid, sample_index = plan.place(column, element)
    field = ".".join(column.path)
    return TransferError(
        f"group {uid} sample {sample_index}: {field} is not finite: it holds {value}"
    )


def _first_not_finite(values: np.ndarray) -> int:
    """Index of the first NaN or infinity of an array, else -1."""
    if values.dtype.kind not in "fc" or values.size == 0:
        return -1
    # A sum of squares is finite only if every term is; it reads each value once and stores none.
    if values.dtype.char in "fd" and np.isfinite(np.dot(values, values)):
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
    data = np.frombuffer(buffer, np.uint8)
    data.setflags(write=False)
    uids, samples = header.uids, header.samples
    uid_of_row = header.uid_of_row or [0] * len(samples)
    keys = [(uids[uid], sample) for uid, sample in zip(uid_of_row, samples, strict=True)]
    values: list[dict[str, Any]] = [{} for _ in keys]
    try:
        for column, digest in zip(header.columns, digests, strict=True):
            begin = start + column.offset
            raw = data[begin : begin + column.nbytes]
            if verify and xxhash.xxh3_64_intdigest(raw.data) != digest:
                raise _corrupt(column, keys, raw, digest, _name(ref, where))
            _hand_out(column, raw, values)
    except (ValueError, IndexError) as err:
        raise TransferError(f"{_name(ref, where)}: header contradicts itself: {err}") from err
    check_commit(buffer, ref, where)
    return dict(zip(keys, values, strict=True))


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
) -> tuple[_Header, tuple[int, ...], int]:
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


_HEADER_DECODER = msgspec.msgpack.Decoder(_Header)


def _hand_out(column: _ColumnHeader, raw: np.ndarray, values: list[dict[str, Any]]) -> None:
    """Cut one column into its values and put each into its row."""
    rows = column.rows or range(len(values))
    if column.kind == "dict":
        for row in rows:
            _container(values[row], column.path).setdefault(column.path[-1], {})
        return
    items = _items(column, raw)
    if column.items:
        items = [items[item] for item in column.items]
    name = column.path[-1]
    if len(column.path) == 1:
        for row, item in zip(rows, items, strict=True):
            values[row][name] = item
    else:
        for row, item in zip(rows, items, strict=True):
            _container(values[row], column.path)[name] = item


def _container(row: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    for key in path[:-1]:
        row = row.setdefault(key, {})
    return row


def _items(column: _ColumnHeader, raw: np.ndarray) -> list[Any]:
    shapes = column.shapes
    if column.kind == "array":
        flat = raw.view(_dtype(column.dtype))
        if column.ndim == 1:
            return [flat[end - size : end] for size, end in _ends(shapes)]
        return _shaped(flat, shapes, column.ndim)
    parts = [raw[end - size : end].tobytes() for size, end in _ends(shapes)]
    if column.kind == "bytes":
        return parts
    if column.kind == "str":
        return [part.decode("utf-8", "surrogatepass") for part in parts]
    raise ValueError(f"column {'.'.join(column.path)} is of kind {column.kind!r}")


def _ends(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    end = 0
    for size in sizes:
        end += size
        yield size, end


def _shaped(flat: np.ndarray, shapes: list[int], ndim: int) -> list[np.ndarray]:
    if ndim == 0:
        return [flat[at : at + 1].reshape(()) for at in range(flat.size)]
    items, begin = [], 0
    for at in range(0, len(shapes), ndim):
        shape = shapes[at : at + ndim]
        end = begin + int(np.prod(shape, dtype=np.int64))
        items.append(flat[begin:end].reshape(shape))
        begin = end
    return items


@functools.lru_cache(maxsize=64)
def _dtype(text: str) -> "np.dtype[Any]":
    try:
        dtype = np.dtype(text)
    except TypeError as err:
        raise ValueError(f"dtype {text!r}") from err
    if dtype.kind not in _KINDS:
        raise ValueError(f"dtype {text!r} is not numeric")
    return dtype


def _corrupt(
    column: _ColumnHeader,
    keys: list[tuple[str, int]],
    raw: np.ndarray,
    digest: int,
    name: str,
) -> TransferError:
    rows = column.rows or range(len(keys))
    uids = list(dict.fromkeys(keys[row][0] for row in rows))
    groups = uids[0] if len(uids) == 1 else f"{uids[0]} .. {uids[-1]} ({len(uids)} groups)"
    samples = sorted({keys[row][1] for row in rows})
    seen = xxhash.xxh3_64_intdigest(raw.data)
    return TransferError(
        f"{name}: field {'.'.join(column.path)} of group {groups} samples {samples[0]} .. "
        f"{samples[-1]} is corrupt: xxh3 {seen:016x}, expected {digest:016x}"
    )
