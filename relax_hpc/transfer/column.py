"""Columns of a block: the values of one field of many rows, end to end."""

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

if TYPE_CHECKING:
    from relax_hpc.records import FieldValue

KINDS = "biufc"
"""Numeric dtypes only: nothing that needs unpickling."""

_DEDUP_BYTES = 64 << 10
"""Larger values are looked for among those of the other rows, and stored once."""
_SAMPLE_BYTES = 4 << 10


class ColumnHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a reader must know of a column."""

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


class BlockHeader(msgspec.Struct, frozen=True, array_like=True):
    """Rows and columns of a block."""

    uids: list[str]
    uid_of_row: list[int]
    """Empty when there is only one uid."""
    samples: list[int]
    columns: list[ColumnHeader]


# ---------------------------------------------------------------------------------------------
# Collecting
# ---------------------------------------------------------------------------------------------


class WholeGroups:
    """Keys of all rows of groups, samples 0, 1, .. of each: nothing is built for each row."""

    __slots__ = ("_ends", "sizes", "uids")

    def __init__(self, uids: Sequence[str], sizes: Sequence[int]) -> None:
        self.uids, self.sizes = uids, sizes
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: int) -> tuple[str, int]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        group = bisect.bisect_right(self._ends, row)
        return self.uids[group], row - self._ends[group] + self.sizes[group]


RowKeys = Sequence[tuple[str, int]] | WholeGroups
"""(uid, sample index) of each row."""


def number_rows(keys: RowKeys) -> tuple[list[str], list[int], list[int]]:
    """Return the uids, and for each row the number of its uid and its sample index.

    Raises:
        ValueError: a row is there twice.
    """
    if isinstance(keys, WholeGroups):
        if len(set(keys.uids)) < len(keys.uids):
            raise ValueError(f"groups are given twice: {keys.uids}")
        of_rows: list[int] = []
        samples: list[int] = []
        for number, size in enumerate(keys.sizes):
            of_rows += [number] * size
            samples += range(size)
        return list(keys.uids), of_rows, samples
    if len(set(keys)) < len(keys):
        raise ValueError(f"rows are given twice: {keys}")
    numbers: dict[str, int] = {}
    of_rows = [numbers.setdefault(uid, len(numbers)) for uid, _ in keys]
    return list(numbers), of_rows, [sample for _, sample in keys]


class Column:
    """Values of one field with the same kind, dtype and rank."""

    __slots__ = (
        "dtype", "flats", "items", "kind", "nbytes", "ndim", "offset", "path", "rows", "shapes",
    )  # fmt: skip

    def __init__(self, path: tuple[str, ...], kind: str, dtype: "np.dtype[Any]", ndim: int) -> None:
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

    @classmethod
    def of_all_rows(
        cls,
        path: tuple[str, ...],
        values: "Sequence[FieldValue | None]",
        lengths: list[int] | None = None,
    ) -> "Column | None":
        """Build the common case quickly: every row has an array of rank 0 or 1, all different.

        Returns None for everything else. `lengths`: see `Columns`.
        """
        count = len(values)
        if list(map(type, values)).count(np.ndarray) < count or count == 0:
            return None
        arrays: list[np.ndarray] = list(values)  # type: ignore[arg-type]
        dtype, ndim = arrays[0].dtype, arrays[0].ndim
        if lengths is None:
            # Built-in dtypes are single objects, which list.count compares by identity first.
            is_alike = [array.dtype for array in arrays].count(dtype) == count
            if not is_alike or [array.ndim for array in arrays].count(ndim) < count:
                return None
        if ndim > 1 or dtype.kind not in KINDS:
            return None
        sizes = lengths or [array.size for array in arrays]
        if max(sizes) * dtype.itemsize >= _DEDUP_BYTES or len(set(map(id, arrays))) < count:
            return None
        column = cls(path, "array", dtype, ndim)
        column.flats = arrays if ndim else [array.reshape(1) for array in arrays]
        column.shapes = sizes if ndim else []
        column.nbytes = sum(sizes) * dtype.itemsize
        return column

    def ends(self) -> list[int]:
        """Where each item ends, in elements."""
        sizes = self.shapes if self.ndim == 1 else [flat.size for flat in self.flats]
        return list(itertools.accumulate(sizes))

    def row_of(self, element: int) -> int:
        """Return the first row that an element of the column belongs to."""
        item = bisect.bisect_right(self.ends(), element)
        value = self.items.index(item) if self.items else item
        return self.rows[value] if self.rows else value

    def header(self, num_rows: int) -> ColumnHeader:
        """Describe the column; lists that say nothing are left out."""
        items = self.items if len(self.flats) < len(self.items) else []
        is_whole = not self.rows or self.rows == list(range(num_rows))
        rows = [] if is_whole else self.rows
        return ColumnHeader(
            self.path, self.kind, self.dtype.str, self.ndim, self.offset, self.nbytes, self.shapes,
            rows, items,
        )  # fmt: skip


class MixedColumn(Column):
    """A column to which values are added one by one: some rows lack it, or values are equal."""

    __slots__ = ("by_id", "by_sample")

    def __init__(self, path: tuple[str, ...], kind: str, dtype: "np.dtype[Any]", ndim: int) -> None:
        super().__init__(path, kind, dtype, ndim)
        self.by_id: dict[int, int] = {}
        self.by_sample: dict[tuple[object, ...], list[int]] = {}

    def add(self, row: int, source: object, flat: np.ndarray, shape: tuple[int, ...]) -> None:
        """Add the value of one row; `source` is what `flat` was made of."""
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
        """Return the item with the same bytes; without one, remember this as the next item."""
        data = flat.view(np.uint8)
        places = (0, data.size // 2, data.size - _SAMPLE_BYTES)
        samples = [data[at : at + _SAMPLE_BYTES].data for at in places]
        key = (shape, *map(xxhash.xxh3_64_intdigest, samples))
        candidates = self.by_sample.setdefault(key, [])
        for item in candidates:
            if _is_same(self.flats[item], flat):
                return item
        candidates.append(len(self.flats))
        return None


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal bytes; NaNs and the two zeros are told apart."""
    return bool(xxhash.xxh3_128_digest(one.data) == xxhash.xxh3_128_digest(other.data))


# ---------------------------------------------------------------------------------------------
# Cutting
# ---------------------------------------------------------------------------------------------


def rows_of(
    columns: Sequence[ColumnHeader], cut: list[list[Any]], num_rows: int
) -> list[dict[str, Any]]:
    """Put the items of all columns into their rows."""
    values: list[dict[str, Any]] = [{} for _ in range(num_rows)]
    for column, items in zip(columns, cut, strict=True):
        name, rows = column.path[-1], values
        if column.rows:
            rows = [values[row] for row in column.rows]
        if len(column.path) > 1:
            rows = [_container(row, column.path) for row in rows]
        if column.kind == "dict":
            for row in rows:
                row.setdefault(name, {})
            continue
        for row, item in zip(rows, items, strict=True):
            row[name] = item
    return values


def _container(row: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    for key in path[:-1]:
        row = row.setdefault(key, {})
    return row


def values_of(column: ColumnHeader, raw: memoryview) -> list[Any]:
    """Cut one column into a value for each of its rows."""
    kind = column.kind
    items: list[Any]
    if kind == "array":
        flat = np.frombuffer(raw, _dtype(column.dtype)) if raw else _empty(column.dtype)
        items = _shaped(flat, column.shapes, column.ndim)
    elif kind == "bytes":
        items = [bytes(raw[end - size : end]) for size, end in _ends(column.shapes)]
    elif kind == "str":
        parts = [bytes(raw[end - size : end]) for size, end in _ends(column.shapes)]
        items = [part.decode("utf-8", "surrogatepass") for part in parts]
    elif kind == "dict":
        return []
    else:
        raise ValueError(f"column {'.'.join(column.path)} is of kind {kind!r}")
    return [items[item] for item in column.items] if column.items else items


def _ends(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(sizes, itertools.accumulate(sizes), strict=True)


def _shaped(flat: np.ndarray, shapes: list[int], ndim: int) -> list[np.ndarray]:
    if ndim == 1:
        ends = itertools.accumulate(shapes, initial=0)
        return [flat[begin:end] for begin, end in itertools.pairwise(ends)]
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
    if dtype.kind not in KINDS:
        raise ValueError(f"dtype {text!r} is not numeric")
    return dtype


def _empty(dtype: str) -> np.ndarray:
    array = np.empty(0, _dtype(dtype))
    array.setflags(write=False)
    return array
