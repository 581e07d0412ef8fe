"""One file of the trajectory archive: HDF5 that is read while it grows, and after a kill.

    /                     attributes: format, version, run, role, index, attempt, incarnation, step
    /num_groups      [1]  groups that are complete; written and flushed after everything else
    /groups          [G]  table: uid, prompt_index, epoch, deadline_version, oldest_version,
                          newest_version, first_sample, num_samples, finished_s (Unix time)
    /samples         [N]  table: num_prompt_tokens, finish_reason
    /fields/NAME/values   all values of a field end to end (attribute kind: array, bytes, str)
    /fields/NAME/spans    [N, 2] begin and end of each sample in `values`; -1 -1: it has none
    /fields/NAME/shapes   [N, D] shape of each sample's value, only where D > 1

Single writer, multiple readers (SWMR): HDF5 orders its own writes so that a reader finds a
consistent file at any moment, also when the writer was killed: `h5py.File(path, "r", swmr=True)`.
What lies beyond `num_groups` is a torn tail. Plain opens (h5dump) work as well, since the writer
takes off HDF5's mark "open for writing" after each batch (archive_mark.py); a kill inside a batch
may leave it, until the engine's next start rewrites the file as a closed one (`mend`).

h5py is imported where it is used: commands of a login node never load it. A failing write (disk
full) leaves the HDF5 library in a state in which it may crash: only the archive's own process
(archive_process.py) writes.
"""

import dataclasses
import os
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.errors import TransferError
from relax_hpc.records import FinishReason, PromptSlot, Sample
from relax_hpc.transfer.archive_mark import clear_mark

FORMAT = "relax_hpc trajectories"
FORMAT_VERSION = 1
SUFFIX = ".h5"
TEMPORARY = ".tmp-"
# Superblock of HDF5 1.10 on: the oldest that knows SWMR, so that the tools of old sites read it.
_LIBVER = ("v110", "v110")
_UID_BYTES = 64
"""EPOCH.INDEX.K of three 64-bit numbers fits."""
_GROUP = np.dtype(
    [
        ("uid", f"S{_UID_BYTES}"),
        ("prompt_index", "<i8"),
        ("epoch", "<i8"),
        ("deadline_version", "<i8"),
        ("oldest_version", "<i8"),
        ("newest_version", "<i8"),
        ("first_sample", "<i8"),
        ("num_samples", "<i8"),
        ("finished_s", "<f8"),
    ]
)
_SAMPLE = np.dtype([("num_prompt_tokens", "<i8"), ("finish_reason", "S8")])
_ROWS_PER_CHUNK = 512
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 16 << 10, 1 << 20
_KINDS = "biufc"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FinishedGroup:
    """A group as it is archived."""

    slot: PromptSlot
    samples: list[Sample]
    finished_s: float
    """Unix time."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArchivedGroup:
    """Where an archived group lies, and what can be known without reading its samples."""

    slot: PromptSlot
    oldest_version: int
    """Smallest token version; -1 when it has no response token."""
    newest_version: int
    first_sample: int
    num_samples: int
    finished_s: float
    path: Path


@dataclasses.dataclass(frozen=True, slots=True)
class FieldType:
    """What all values of a field in one file have in common."""

    kind: str
    """array, bytes, str, or dict (an empty one)."""
    dtype: str
    ndim: int


Schema = dict[str, FieldType]


def versions_of(samples: Sequence[Sample]) -> tuple[int, int]:
    """Return the smallest and the largest token version; -1, -1 without response tokens."""
    arrays = [s.fields["token_versions"] for s in samples if "token_versions" in s.fields]
    arrays = [array for array in arrays if array.size]
    if not arrays:
        return -1, -1
    return min(int(a.min()) for a in arrays), max(int(a.max()) for a in arrays)


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def schema_of(groups: Sequence[FinishedGroup], known: Schema | None = None) -> Schema:
    """Return the fields of groups on top of those that are known.

    Raises:
        TransferError: a field changes its dtype or rank, or is nothing that HDF5 holds.
    """
    schema = dict(known or {})
    for group in groups:
        for sample in group.samples:
            for name, kind, array, _ in _flatten(sample.fields):
                new = FieldType(kind, array.dtype.str, array.ndim)
                if array.dtype.kind not in _KINDS or schema.setdefault(name, new) != new:
                    raise TransferError(
                        f"archive: field {name} of group {group.slot.uid} is {new}, was "
                        f"{schema.get(name)}"
                    )
    return schema


class StepFile:
    """A file that grows. One thread; after an OSError or RuntimeError it must not be used."""

    def __init__(
        self, path: Path, schema: Schema, attributes: Mapping[str, Any], *, is_live: bool = True
    ) -> None:
        """Create the file under a temporary name.

        It gets its own with the first groups if it `is_live` (readers may follow it from then on),
        else when it is closed.
        """
        import h5py

        self.path, self.schema = path, schema
        self._temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
        # No HDF5 lock: each file has one writer, and not every parallel file system has flock.
        self._file = h5py.File(self._temporary, "w", libver=_LIBVER, locking=False)
        self._file.attrs.update({"format": FORMAT, "version": FORMAT_VERSION, **attributes})
        self._num_groups = self._num_samples = 0
        self._count = self._file.create_dataset("num_groups", (1,), "<u8", maxshape=(1,))
        self._groups = self._table("groups", _GROUP)
        self._samples = self._table("samples", _SAMPLE)
        self._parent = self._file.create_group("fields")
        # Kept open: closing a data set writes, and what fails in a destructor is not seen.
        self._fields: dict[str, dict[str, Any]] = {}
        self._ends: dict[str, int] = {}
        self._is_live = is_live
        self._descriptor = os.open(self._temporary, os.O_RDWR | os.O_CLOEXEC)

    @property
    def num_groups(self) -> int:
        """Groups written so far."""
        return self._num_groups

    def append(self, groups: Sequence[FinishedGroup]) -> None:
        """Append groups; the schema must hold their fields. They count when this returns."""
        columns = {name: _Column(self._ends.get(name, 0)) for name in self.schema}
        for group in groups:
            _add_group(columns, group)
        if not self._fields:
            self._lay_out(columns)
        begin, num_samples = self._num_samples, sum(len(g.samples) for g in groups)
        for name, column in columns.items():
            self._write_column(self._fields[name], column, begin)
        _extend(self._samples, begin, _sample_table(groups))
        _extend(self._groups, self._num_groups, _group_table(groups, begin))
        self._file.flush()
        self._num_groups += len(groups)
        self._num_samples = begin + num_samples
        self._ends.update((name, column.end) for name, column in columns.items())
        self._count[0] = self._num_groups  # only now are they there
        self._file.flush()
        if self._is_live:
            clear_mark(self._descriptor)

    def close(self) -> None:
        """Close and sync: from now on any HDF5 tool opens it."""
        self._file.close()
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        if self._temporary.exists():
            self._temporary.replace(self.path)

    def _lay_out(self, columns: Mapping[str, "_Column"]) -> None:
        """Make all data sets: a live file cannot get new ones."""
        for name, kind in self.schema.items():
            dtype = np.dtype(kind.dtype)
            size = min(max(columns[name].nbytes, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
            group = self._parent.create_group(name)
            group.attrs["kind"] = kind.kind
            group.attrs["ndim"] = kind.ndim
            chunks = (max(size // dtype.itemsize, 1),)
            values = group.create_dataset("values", (0,), dtype, maxshape=(None,), chunks=chunks)
            self._fields[name] = {"values": values, "spans": _rows(group, "spans", 2)}
            if kind.ndim > 1:
                self._fields[name]["shapes"] = _rows(group, "shapes", kind.ndim)
        if self._is_live:
            self._file.swmr_mode = True
            self._temporary.rename(self.path)

    def _table(self, name: str, dtype: "np.dtype[Any]") -> Any:
        chunks = (_ROWS_PER_CHUNK,)
        return self._file.create_dataset(name, (0,), dtype, maxshape=(None,), chunks=chunks)

    def _write_column(self, field: dict[str, Any], column: "_Column", begin: int) -> None:
        if column.values:
            _extend(field["values"], column.begin, np.concatenate(column.values))
        _extend(field["spans"], begin, np.array(column.spans, np.int64).reshape(-1, 2))
        if "shapes" in field:
            ndim = field["shapes"].shape[1]
            shapes = [shape or (0,) * ndim for shape in column.shapes]
            _extend(field["shapes"], begin, np.array(shapes, np.int64).reshape(-1, ndim))


class _Column:
    """What a batch adds to one field."""

    def __init__(self, begin: int) -> None:
        self.begin = self.end = begin
        self.values: list[np.ndarray] = []
        self.nbytes = 0
        self.spans: list[tuple[int, int]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.seen: dict[int, tuple[tuple[int, int], Any]] = {}
        """Span by id of a value (which is kept, so that its id is): one of several samples of a
        group is stored once."""

    def add(self, array: np.ndarray, source: Any) -> None:
        span, _ = self.seen.get(id(source), (None, None))
        if span is None:
            span = (self.end, self.end + array.size)
            self.seen[id(source)] = (span, source)
            self.end = span[1]
            self.values.append(array.reshape(-1))
            self.nbytes += array.nbytes
        self.spans.append(span)
        self.shapes.append(array.shape)


def _add_group(columns: Mapping[str, _Column], group: FinishedGroup) -> None:
    for column in columns.values():
        column.seen.clear()
    for sample in group.samples:
        present = set()
        for name, _, array, source in _flatten(sample.fields):
            columns[name].add(array, source)
            present.add(name)
        for name in columns.keys() - present:
            columns[name].spans.append((-1, -1))
            columns[name].shapes.append(())


def _rows(parent: Any, name: str, width: int) -> Any:
    chunks = (_ROWS_PER_CHUNK, width)
    return parent.create_dataset(name, (0, width), "<i8", maxshape=(None, width), chunks=chunks)


def _extend(dataset: Any, begin: int, values: np.ndarray) -> None:
    end = begin + len(values)
    dataset.resize(end, axis=0)
    dataset[begin:end] = values


def _sample_table(groups: Sequence[FinishedGroup]) -> np.ndarray:
    rows = [(s.num_prompt_tokens, str(s.finish_reason).encode()) for g in groups for s in g.samples]
    return np.array(rows, _SAMPLE)


def _group_table(groups: Sequence[FinishedGroup], first_sample: int) -> np.ndarray:
    rows = []
    for group in groups:
        slot, size = group.slot, len(group.samples)
        uid = slot.uid.encode()
        assert len(uid) <= _UID_BYTES, uid
        place = (uid, slot.prompt_index, slot.epoch, slot.deadline_version)
        rows.append((*place, *versions_of(group.samples), first_sample, size, group.finished_s))
        first_sample += size
    return np.array(rows, _GROUP)


# ---------------------------------------------------------------------------------------------
# Fields of any kind as flat arrays
# ---------------------------------------------------------------------------------------------


def _flatten(
    fields: Mapping[str, Any], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[str, str, np.ndarray, Any]]:
    """Yield (name, kind, array, value); keys of dicts become `field.key`."""
    for key, value in fields.items():
        path = (*prefix, key)
        if isinstance(value, dict) and value:
            yield from _flatten(value, path)
            continue
        name = ".".join(urllib.parse.quote(part, safe=" ").replace(".", "%2E") for part in path)
        if isinstance(value, np.ndarray):
            yield name, "array", value, value
        elif isinstance(value, bytes):
            yield name, "bytes", np.frombuffer(value, np.uint8), value
        elif isinstance(value, str):
            data = value.encode("utf-8", "surrogatepass")
            yield name, "str", np.frombuffer(data, np.uint8), value
        elif isinstance(value, dict):
            yield name, "dict", np.empty(0, np.uint8), value
        else:
            yield name, "array", np.asarray(value), value


def _put(fields: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = [urllib.parse.unquote(part) for part in name.split(".")]
    for key in parents:
        fields = fields.setdefault(key, {})
    fields[last] = value


def _value(kind: str, array: np.ndarray) -> Any:
    if kind == "array":
        return array
    if kind == "dict":
        return {}
    data = array.tobytes()
    return data if kind == "bytes" else data.decode("utf-8", "surrogatepass")


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


class StepReader:
    """The complete groups of one file at the moment of opening: live, closed, or torn."""

    def __init__(self, path: Path) -> None:
        """Open.

        Raises:
            TransferError: it is no file of an archive, or is damaged.
        """
        import h5py

        self.path = path
        try:
            self._file = h5py.File(path, "r", swmr=True, locking=False)
        except OSError as err:
            raise TransferError(f"archive {path} cannot be opened: {err}") from err
        try:
            # First: what is read after it is at least as new.
            self._num_groups = int(self._file["num_groups"][0])
            self.groups = [self._group(row) for row in self._file["groups"][: self._num_groups]]
        except (OSError, KeyError, RuntimeError) as err:
            self._file.close()
            raise TransferError(f"archive {path} is damaged: {err}") from err

    def __enter__(self) -> "StepReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; samples that were read stay."""
        self._file.close()

    def read(self, group: ArchivedGroup) -> list[Sample]:
        """Read the samples of one group of this file.

        Raises:
            TransferError: the file is damaged; names group and field.
        """
        begin, end = group.first_sample, group.first_sample + group.num_samples
        name = "samples"
        try:
            rows = self._file["samples"][begin:end]
            fields: list[dict[str, Any]] = [{} for _ in rows]
            for name, field in self._file["fields"].items():
                _read_field(name, field, begin, fields)
        except (OSError, KeyError, RuntimeError, ValueError) as err:
            raise TransferError(
                f"archive {self.path}: {name} of group {group.slot.uid} cannot be read: {err}"
            ) from err
        return [
            Sample(
                num_prompt_tokens=int(row["num_prompt_tokens"]),
                finish_reason=FinishReason(row["finish_reason"].decode()),
                fields=values,
            )
            for row, values in zip(rows, fields, strict=True)
        ]

    def attributes(self) -> dict[str, Any]:
        """Return who wrote the file."""
        return dict(self._file.attrs)

    def schema(self) -> Schema:
        """Return the fields of the file."""
        return {
            name: FieldType(
                field.attrs["kind"], field["values"].dtype.str, int(field.attrs["ndim"])
            )
            for name, field in self._file["fields"].items()
        }

    def _group(self, row: Any) -> ArchivedGroup:
        return ArchivedGroup(
            slot=PromptSlot(
                uid=row["uid"].decode(),
                prompt_index=int(row["prompt_index"]),
                epoch=int(row["epoch"]),
                deadline_version=int(row["deadline_version"]),
            ),
            oldest_version=int(row["oldest_version"]),
            newest_version=int(row["newest_version"]),
            first_sample=int(row["first_sample"]),
            num_samples=int(row["num_samples"]),
            finished_s=float(row["finished_s"]),
            path=self.path,
        )


def _read_field(name: str, field: Any, begin: int, fields: list[dict[str, Any]]) -> None:
    spans = field["spans"][begin : begin + len(fields)]
    is_there = spans[:, 0] >= 0
    if not is_there.any():
        return
    low, high = int(spans[is_there, 0].min()), int(spans[is_there, 1].max())
    values = field["values"][low:high]
    kind, ndim = field.attrs["kind"], int(field.attrs["ndim"])
    shapes = field["shapes"][begin : begin + len(fields)] if ndim > 1 else None
    for index, (first, last) in enumerate(spans):
        if first < 0:
            continue
        array = values[first - low : last - low]
        if len(array) != last - first:
            raise ValueError(f"{len(array)} values instead of {last - first}")
        if ndim == 0:
            array = array.reshape(())
        elif shapes is not None:
            array = array.reshape(shapes[index])
        _put(fields[index], name, _value(kind, array))


# ---------------------------------------------------------------------------------------------
# Files of writers that were killed
# ---------------------------------------------------------------------------------------------


def mend(path: Path) -> int:
    """Rewrite what a killed writer left as a closed file; its writer must be dead.

    Returns:
        Number of groups. A file without one is removed.

    Raises:
        TransferError: it is damaged; it stays as it is.
    """
    with StepReader(path) as reader:
        if reader.groups:
            new = StepFile(path, reader.schema(), reader.attributes(), is_live=False)
            for group in reader.groups:
                samples = reader.read(group)
                new.append(
                    [FinishedGroup(slot=group.slot, samples=samples, finished_s=group.finished_s)]
                )
            new.close()
    if not reader.groups:
        path.unlink()
    return len(reader.groups)
