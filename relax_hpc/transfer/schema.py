"""What every row must carry: names, dtypes and lengths of fields, checked once per column.

A schema is an argument of `TransferQueue`: rows of another kind use the same queue. What is not in
the schema travels too, unchecked except that it must be a `FieldValue`. Values of float columns
must be finite; that is looked at while the column is copied, and so is the span of its versions.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence

import numpy as np

from relax_hpc.errors import TransferError
from relax_hpc.records import Row, Sample
from relax_hpc.transfer import wire
from relax_hpc.transfer.block import Check, first_not_finite

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


@dataclasses.dataclass(frozen=True, slots=True)
class RowSchema:
    """Required columns of one kind of rows."""

    columns: Mapping[str, Column]
    tokens: str = ""
    """The 1-d column whose length is the row's size in tokens; empty: every row counts as 1."""
    versions: str = ""
    """Integer column of policy versions; empty: rows have no age."""

    def describe(self, groups: Sequence[Group]) -> list[wire.Rows]:
        """Check all columns of all groups; return what the controller wants to know of each group.

        Raises:
            TransferError: names group, sample, field, what it is and what it must be.
        """
        samples = [sample for _, group in groups for sample in group]
        try:
            sizes = self._check(samples)
        except _RefusedError as err:
            uid, index = _place(groups, err.index)
            raise TransferError(f"group {uid} sample {index}: {err}") from None
        rows, begin = [], 0
        for uid, group in groups:
            if not group:
                raise TransferError(f"group {uid}: has no samples")
            end = begin + len(group)
            rows.append(
                wire.Rows(
                    [sample.num_prompt_tokens for sample in group],
                    sizes[begin:end],
                    [sample.finish_reason.value for sample in group],
                )
            )
            begin = end
        return rows

    def _check(self, samples: Sequence[Sample]) -> list[int]:
        """Return the size of every sample in tokens."""
        sizes = [1] * len(samples)
        if self.tokens:
            shapes = [value.shape for value in _values(samples, self.tokens, self.columns)]
            for index, (shape, sample) in enumerate(zip(shapes, samples, strict=True)):
                if len(shape) != 1 or not 0 < sample.num_prompt_tokens <= shape[0]:
                    raise _RefusedError(
                        index,
                        f"{self.tokens} has shape {shape}, num_prompt_tokens is "
                        f"{sample.num_prompt_tokens}",
                    )
            sizes = [shape[0] for shape in shapes]
        prompts = [sample.num_prompt_tokens for sample in samples]
        for name, column in self.columns.items():
            if name != self.tokens:
                values = _values(samples, name, self.columns)
                _check_shapes(name, values, _shapes(column.length, sizes, prompts))
        return sizes

    def checks(self) -> "tuple[dict[str, Check], VersionSpan]":
        """Return what looks at the columns of one group while they are copied."""
        span = VersionSpan()
        checks: dict[str, Check] = {
            name: first_not_finite
            for name, column in self.columns.items()
            if column.dtype.kind == "f"
        }
        if self.versions:
            checks[self.versions] = span
        return checks, span


class VersionSpan:
    """A check that accepts all values and notes the smallest and the largest; -1 without any."""

    __slots__ = ("newest", "oldest")

    def __init__(self) -> None:
        self.oldest = -1
        self.newest = -1

    def __call__(self, values: np.ndarray) -> int:
        """Look at a piece of the column."""
        if values.size:
            oldest, newest = int(values.min()), int(values.max())
            self.oldest = oldest if self.newest < 0 else min(self.oldest, oldest)
            self.newest = max(self.newest, newest)
        return -1


def check_responses(rows: Sequence[Row], name: str, arrays: Sequence[np.ndarray]) -> None:
    """Check one more field of rows: float32, one value per response token.

    Raises:
        TransferError: names group, sample and field.
    """
    try:
        _check_dtype(name, arrays, np.dtype(np.float32))
        sizes = [row.num_tokens - row.num_prompt_tokens for row in rows]
        _check_shapes(name, arrays, [(size,) for size in sizes])
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


def _values(
    samples: Sequence[Sample], name: str, columns: Mapping[str, Column]
) -> Sequence[np.ndarray]:
    try:
        values = [sample.fields[name] for sample in samples]
    except KeyError:
        index, sample = next((i, s) for i, s in enumerate(samples) if name not in s.fields)
        has = ", ".join(sample.fields)
        raise _RefusedError(index, f"field {name} is missing; has {has}") from None
    _check_dtype(name, values, columns[name].dtype)
    return values


def _check_dtype(name: str, values: Sequence[np.ndarray], dtype: np.dtype) -> None:
    # Identity first: numpy has one object per built-in dtype, and comparing takes twice as long.
    if all([getattr(value, "dtype", None) is dtype for value in values]):
        return
    for index, value in enumerate(values):
        seen = getattr(value, "dtype", type(value).__name__)
        if seen != dtype:
            raise _RefusedError(index, f"field {name} is {seen}, must be {dtype}")


def _shapes(length: Length, sizes: list[int], prompts: list[int]) -> list[tuple[int, ...]] | None:
    if length is Length.TOKENS:
        return [(size,) for size in sizes]
    if length is Length.RESPONSE:
        return [(size - prompt,) for size, prompt in zip(sizes, prompts, strict=True)]
    return [()] * len(sizes) if length is Length.SCALAR else None


def _check_shapes(
    name: str, values: Sequence[np.ndarray], expected: list[tuple[int, ...]] | None
) -> None:
    shapes = [value.shape for value in values]
    if expected is None or shapes == expected:
        return
    index = next(i for i, shape in enumerate(shapes) if shape != expected[i])
    raise _RefusedError(index, f"{name} has shape {shapes[index]}, must be {expected[index]}")


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
