"""Metric records: names, reductions, and reading back what all roles wrote.

Names are `area/name` (train/loss, eval/accuracy, rollout/response_tokens_mean ...). The end of the
name says how values of one step from several writers become one: `_max`, `_min`, `_sum`; else mean.
"""

import enum
import math
import re
import typing
from collections.abc import Iterable

import msgspec

from relax_hpc.errors import RelaxError

if typing.TYPE_CHECKING:
    from relax_hpc.runfolder import RunFolder

_NAME = re.compile(r"[A-Za-z0-9_.@-]+(/[A-Za-z0-9_.@-]+)*")


class Reduction(enum.StrEnum):
    """How the values of one step from several writers become one."""

    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    SUM = "sum"


class MetricRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `RUN/metrics/ROLE-INDEX.jsonl`. JSON knows no NaN: null stands for not finite."""

    time: float
    """Unix time in seconds."""
    step: int
    role: str
    index: int
    metrics: dict[str, float | None]


SAVE_SPAN = "save"
"""Span of the train step around a checkpoint."""


class SpanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `RUN/metrics/ROLE-INDEX.spans.jsonl`: a phase and when it ran (Unix seconds)."""

    name: str
    step: int
    start: float
    end: float


def check_name(name: str) -> str:
    """Return the name, or raise RelaxError when it is not `area/name` of plain characters."""
    if not _NAME.fullmatch(name):
        raise RelaxError(f"metric name {name!r}: use letters, digits, '_', '.', '@', '-' and '/'")
    return name


def reduction_of(name: str) -> Reduction:
    """Say how values of this name combine over writers, from the end of the name."""
    for kind in (Reduction.MAX, Reduction.MIN, Reduction.SUM):
        if name.endswith((f"_{kind}", f"/{kind}")):
            return kind
    return Reduction.MEAN


def reduce_values(name: str, values: Iterable[float]) -> float:
    """Combine one step's values of several writers; NaN in, NaN out."""
    numbers = list(values)
    if any(math.isnan(v) for v in numbers):
        return math.nan
    kind = reduction_of(name)
    if kind is Reduction.MAX:
        return max(numbers)
    if kind is Reduction.MIN:
        return min(numbers)
    return math.fsum(numbers) / (len(numbers) if kind is Reduction.MEAN else 1)


def read_metrics(folder: "RunFolder") -> list[MetricRecord]:
    """Read the records of all roles, by time. Lines torn by a crash are left out."""
    records: list[MetricRecord] = []
    for path in sorted(folder.metrics.glob("*.jsonl")):
        if not path.name.endswith(".spans.jsonl"):
            records += _read_lines(path.read_bytes(), MetricRecord)
    return sorted(records, key=lambda record: record.time)


def read_spans(folder: "RunFolder") -> dict[str, list[SpanRecord]]:
    """Read the spans of all roles: {"ROLE-INDEX": spans by start}."""
    found: dict[str, list[SpanRecord]] = {}
    for path in sorted(folder.metrics.glob("*.spans.jsonl")):
        spans = _read_lines(path.read_bytes(), SpanRecord)
        found[path.name.removesuffix(".spans.jsonl")] = sorted(spans, key=lambda s: s.start)
    return found


def series(records: Iterable[MetricRecord], name: str) -> list[tuple[int, float]]:
    """Return (step, value) of one metric by step, for curves.

    A step that was redone after a restart counts once: a writer's latest line wins.
    """
    latest: dict[int, dict[tuple[str, int], float]] = {}
    for record in records:
        if name in record.metrics:
            value = record.metrics[name]
            by_writer = latest.setdefault(record.step, {})
            by_writer[record.role, record.index] = math.nan if value is None else value
    return [(step, reduce_values(name, by.values())) for step, by in sorted(latest.items())]


_Record = typing.TypeVar("_Record", bound=msgspec.Struct)


def _read_lines(data: bytes, kind: type[_Record]) -> list[_Record]:
    decoder = msgspec.json.Decoder(kind)
    records = []
    for line in data.splitlines():
        try:
            records.append(decoder.decode(line))
        except msgspec.DecodeError:  # includes ValidationError: a line torn by a crash
            continue
    return records
