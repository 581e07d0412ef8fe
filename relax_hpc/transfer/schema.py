"""What every row must carry: names, dtypes and lengths of fields, checked once per column.

A schema is an argument of `TransferQueue`: rows of another kind use the same queue. What is not in
the schema travels too, unchecked except that it must be a `FieldValue`. Values of float columns
must be finite; that is looked at while the column is copied.
"""

import contextlib
import dataclasses
import enum
import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from relax_hpc.errors import TransferError
from relax_hpc.records import Fields, FieldValue, Row, Sample
from relax_hpc.transfer import wire
from relax_hpc.transfer.block import Check, Columns, first_not_finite
from relax_hpc.transfer.column import WholeGroups

_PACK_BYTES = 16 << 20
"""Groups of one put share a block of about this size: each block costs 20 us on either side. They
are also freed together, and a reader of another node gets all of them."""

Group = tuple[str, Sequence[Sample]]
"""Group uid and its samples, in the order of their sample indices."""


class Length(enum.Enum):
    """Shape of a column's values."""

    TOKENS = "tokens"
    """[L] prompt and response."""
    RESPONSE = "response"
    """[R] response only: L less `num_prompt_tokens`."""
    SCALAR = "scalar"
    """[]"""
    ANY = "any"


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """A field that every row has."""

    dtype: np.dtype
    length: Length


@dataclasses.dataclass(frozen=True)
class RowSchema:
    """Required columns of one kind of rows."""

    columns: Mapping[str, Column]
    tokens: str = ""
    """The 1-d column whose length is the row's size in tokens; empty: every row counts as 1."""
    versions: str = ""
    """Integer column of policy versions; empty: rows have no age."""

    def describe(self, groups: Sequence[Group]) -> "Description":
        """Check all columns of all groups at once, and say which groups share a block.

        Raises:
            TransferError: names group, sample, field, what it is and what it must be.
        """
        samples = list(itertools.chain.from_iterable([group for _, group in groups]))
        prompts = [sample.num_prompt_tokens for sample in samples]
        fields = [sample.fields for sample in samples]
        try:
            checked = self._check(fields, prompts)
        except _RefusedError as err:
            uid, index = _place(groups, err.index)
            raise TransferError(f"group {uid} sample {index}: {err}") from None
        columns = _with_more(checked.values, fields)
        per_token = self._bytes_per_token if len(columns) == len(self.columns) else None
        result = Description([], self._spans(checked.values, groups), [], [])
        reasons: list[str] = [sample.finish_reason for sample in samples]
        packed: list[Group] = []
        begin, first, nbytes = 0, 0, 0
        for one in groups:
            uid, group = one
            if not group:
                raise TransferError(f"group {uid}: has no samples")
            end = begin + len(group)
            sizes = checked.sizes[begin:end]
            result.rows.append(wire.Rows(prompts[begin:end], sizes, reasons[begin:end]))
            size = _PACK_BYTES if per_token is None else sum(sizes) * per_token
            if packed and nbytes + size > _PACK_BYTES:
                result.add_block(packed, columns, checked.lengths, first)
                packed, first, nbytes = [], begin, 0
            packed.append(one)
            result.block_of.append(len(result.blocks))
            nbytes += size
            begin = end
        result.add_block(packed, columns, checked.lengths, first)
        return result

    @functools.cached_property
    def _bytes_per_token(self) -> int | None:
        """Size of a row's payload by its tokens; None: it has other columns that may be large."""
        lengths = {column.length for column in self.columns.values()}
        if not self.tokens or Length.ANY in lengths:
            return None
        sized = (c for c in self.columns.values() if c.length is not Length.SCALAR)
        return sum(column.dtype.itemsize for column in sized)

    def _spans(
        self, columns: Mapping[str, Sequence[np.ndarray]], groups: Sequence[Group]
    ) -> list[tuple[int, int]]:
        if not self.versions:
            return [(-1, -1)] * len(groups)
        return version_spans(columns[self.versions], [len(group) for _, group in groups])

    def _check(self, fields: Sequence[Fields], prompts: Sequence[int]) -> "_Checked":
        values = {name: _column(fields, name) for name in self.columns}
        for name, column in self.columns.items():
            _check_dtype(name, values[name], column.dtype)
        sizes = [1] * len(fields)
        if self.tokens:
            sizes = _sizes(self.tokens, values[self.tokens], prompts)
        responses = list(map(operator.sub, sizes, prompts))
        lengths = {}
        for name, column in self.columns.items():
            if column.length is Length.SCALAR:
                _check_scalars(name, values[name])
            elif column.length is not Length.ANY:
                lengths[name] = sizes if column.length is Length.TOKENS else responses
                if name != self.tokens:
                    _check_sizes(name, values[name], lengths[name])
        return _Checked(sizes, values, lengths)

    @functools.cached_property
    def checks(self) -> dict[str, Check]:
        """What looks at the columns of a block while they are copied."""
        floats = (n for n, column in self.columns.items() if column.dtype.kind == "f")
        return dict.fromkeys(floats, first_not_finite)


class _Checked(NamedTuple):
    """Rows that are right."""

    sizes: list[int]
    """Tokens of each."""
    values: dict[str, list[np.ndarray]]
    """Required fields by column."""
    lengths: dict[str, list[int]]
    """See `Columns`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """Groups that are to be put: one entry for each in `rows`, `spans` and `block_of`."""

    rows: list[wire.Rows]
    """What the controller wants to know."""
    spans: list[tuple[int, int]]
    """Smallest and largest policy version; -1 when there is none."""
    block_of: list[int]
    blocks: list[Columns]
    """Each holds the fields of one or of several groups."""

    def add_block(
        self,
        groups: Sequence[Group],
        columns: "Mapping[str, Sequence[FieldValue | None]]",
        lengths: Mapping[str, list[int]],
        first: int,
    ) -> None:
        """Add a block of groups whose rows are `first` and following."""
        keys = WholeGroups([uid for uid, _ in groups], [len(group) for _, group in groups])
        end = first + len(keys)
        values = {name: column[first:end] for name, column in columns.items()}
        cut = {name: column[first:end] for name, column in lengths.items()}
        self.blocks.append(Columns(keys, values, cut))


def version_span(values: Sequence[np.ndarray]) -> tuple[int, int]:
    """Return the smallest and the largest policy version; -1 when there is none."""
    versions = np.concatenate(values) if len(values) != 1 else values[0]
    return (int(versions.min()), int(versions.max())) if versions.size else (-1, -1)


def version_spans(values: Sequence[np.ndarray], counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the span of each of several groups: `counts` values of each, one after the other."""
    ends = list(itertools.accumulate(counts, initial=0))
    places = list(itertools.accumulate(map(len, values), initial=0))
    bounds = [places[end] for end in ends]
    if any(map(operator.ge, bounds, bounds[1:])):  # reduceat knows no empty parts
        return [
            version_span(values[a:b]) if a < b else (-1, -1) for a, b in itertools.pairwise(ends)
        ]
    versions = np.concatenate(values)
    smallest = np.minimum.reduceat(versions, bounds[:-1]).tolist()
    return list(zip(smallest, np.maximum.reduceat(versions, bounds[:-1]).tolist(), strict=True))


def check_responses(rows: Sequence[Row], name: str, arrays: Sequence[np.ndarray]) -> None:
    """Check one more field of rows: float32, one value per response token.

    Raises:
        TransferError: names group, sample and field.
    """
    try:
        _check_dtype(name, arrays, np.dtype(np.float32))
        sizes = [row.num_tokens - row.num_prompt_tokens for row in rows]
        _check_sizes(name, arrays, sizes)
    except _RefusedError as err:
        row = rows[err.index]
        raise TransferError(f"group {row.uid} sample {row.sample_index}: {err}") from None


class _RefusedError(Exception):
    """A value of the column: `index` is its row."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


def _place(groups: Sequence[Group], index: int) -> tuple[str, int]:
    for uid, group in groups:
        if index < len(group):
            return uid, index
        index -= len(group)
    raise AssertionError(f"row {index} behind the last group")


def _column(fields: Sequence[Fields], name: str) -> list[np.ndarray]:
    try:
        return [row[name] for row in fields]
    except KeyError:
        index = next(i for i, row in enumerate(fields) if name not in row)
        has = ", ".join(fields[index])
        raise _RefusedError(index, f"field {name} is missing; has {has}") from None


def _with_more(
    required: dict[str, list[np.ndarray]], fields: Sequence[Fields]
) -> "Mapping[str, Sequence[FieldValue | None]]":
    """Add the columns that the schema does not know; None where a row lacks it."""
    if list(map(len, fields)).count(len(required)) == len(fields):
        return required
    columns: dict[str, Sequence[FieldValue | None]] = {**required}
    for name in dict.fromkeys(itertools.chain.from_iterable(fields)):
        if name not in columns:
            columns[name] = [row.get(name) for row in fields]
    return columns


# The usual case of each check is a few loops in C over the whole column (`count` compares
# identities first, and numpy has one object for each built-in dtype); only a refusal looks closer.
def _check_dtype(name: str, values: Sequence[np.ndarray], dtype: np.dtype) -> None:
    with contextlib.suppress(AttributeError):  # no array at all: said below
        if [value.dtype for value in values].count(dtype) == len(values):
            return
    for index, value in enumerate(values):
        seen = getattr(value, "dtype", type(value).__name__)
        if seen != dtype:
            raise _RefusedError(index, f"field {name} is {seen}, must be {dtype}")


def _sizes(name: str, values: Sequence[np.ndarray], prompts: Sequence[int]) -> list[int]:
    """Lengths of 1-d values; each must hold its prompt."""
    if [value.ndim for value in values].count(1) == len(values) and min(prompts) > 0:
        sizes = list(map(len, values))
        if all(map(operator.le, prompts, sizes)):
            return sizes
    for index, (value, prompt) in enumerate(zip(values, prompts, strict=True)):
        if value.ndim != 1 or not 0 < prompt <= len(value):
            raise _RefusedError(
                index, f"{name} has shape {value.shape}, num_prompt_tokens is {prompt}"
            )
    raise AssertionError(f"{name}: refused, but every value is right")


def _check_sizes(name: str, values: Sequence[np.ndarray], sizes: list[int]) -> None:
    is_flat = [value.ndim for value in values].count(1) == len(values)
    if is_flat and list(map(len, values)) == sizes:
        return
    for index, (value, size) in enumerate(zip(values, sizes, strict=True)):
        if value.shape != (size,):
            raise _RefusedError(index, f"{name} has shape {value.shape}, must be ({size},)")


def _check_scalars(name: str, values: Sequence[np.ndarray]) -> None:
    if [value.ndim for value in values].count(0) == len(values):
        return
    index, value = next((i, v) for i, v in enumerate(values) if v.ndim)
    raise _RefusedError(index, f"{name} has shape {value.shape}, must be ()")


def column(dtype: str, length: Length) -> Column:
    """Build a column: `column("float32", Length.RESPONSE)`."""
    return Column(np.dtype(dtype), length)


RL_ROWS = RowSchema(
    columns={
        "tokens": column("int32", Length.TOKENS),
        "rollout_logprobs": column("float32", Length.RESPONSE),
        "token_versions": column("int32", Length.RESPONSE),
        "loss_mask": column("uint8", Length.RESPONSE),
        "reward": column("float32", Length.SCALAR),
        "accuracy": column("float32", Length.SCALAR),
    },
    tokens="tokens",
    versions="token_versions",
)
"""What the rollout step puts and the train step needs; see records.Fields."""
