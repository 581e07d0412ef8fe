"""Metric files of one role: jsonl always, TensorBoard events where it is installed."""

import contextlib
import importlib
import logging
import math
import os
import threading
import time
import types
import typing
from collections.abc import Mapping
from pathlib import Path

import msgspec

from relax_hpc.metrics.metric import MetricRecord, SpanRecord, check_name
from relax_hpc.metrics.spans import record_span
from relax_hpc.runfolder import RunFolder

_log = logging.getLogger(__name__)


class LineFile:
    """Append-only file of JSON lines. Thread-safe; one write per line, so readers may follow."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        size = os.fstat(self._descriptor).st_size
        # A writer killed within a line left no newline: start a new line, keep ours readable.
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def append(self, record: msgspec.Struct) -> None:
        """Write one line; raises OSError (disk full ...)."""
        line = msgspec.json.encode(record) + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._descriptor, line) :]

    def close(self) -> None:
        """Close the file; a second close is harmless."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


class MetricWriter:
    """Writes `RUN/metrics/ROLE-INDEX.jsonl`, its spans and TensorBoard events. Thread-safe.

    One process per (role, index) writes; a restarted role appends. Files appear with the first
    record, so creating a writer costs nothing.
    """

    def __init__(self, folder: RunFolder, role: str, index: int = 0) -> None:
        self._folder, self._role, self._index = folder.metrics, role, index
        self._lock = threading.Lock()
        self._files: dict[str, LineFile] = {}
        self._events: _EventFile | None = None
        self._wants_events = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step (train step = policy version before the update).

        Values become Python floats; not finite ones are written as null and seen as NaN.

        Raises:
            RelaxError: a name holds characters that files and curves cannot show.
            OSError: the file could not be written.
        """
        values = {check_name(name): float(value) for name, value in metrics.items()}
        now = time.time()
        record = MetricRecord(
            time=now,
            step=int(step),
            role=self._role,
            index=self._index,
            metrics={k: v if math.isfinite(v) else None for k, v in values.items()},
        )
        self._file(".jsonl").append(record)
        events = self._event_file()
        if events is not None:
            events.add(now, int(step), values)

    def span(self, name: str, step: int) -> contextlib.AbstractContextManager[None]:
        """Time a phase: `with writer.span("generate", step): ...`."""
        return record_span(self._write_span, name, step)

    def close(self) -> None:
        """Flush and close all files; a later `log` opens them again."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            if self._events is not None:
                self._events.close()
                self._events = None

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()

    def _write_span(self, record: SpanRecord) -> None:
        self._file(".spans.jsonl").append(record)

    def _file(self, suffix: str) -> LineFile:
        with self._lock:
            if suffix not in self._files:
                path = self._folder / f"{self._role}-{self._index}{suffix}"
                self._files[suffix] = LineFile(path)
            return self._files[suffix]

    def _event_file(self) -> "_EventFile | None":
        with self._lock:
            if self._events is None and self._wants_events:
                try:
                    self._events = _EventFile(
                        self._folder / "tensorboard" / f"{self._role}-{self._index}"
                    )
                except ImportError as err:
                    self._wants_events = False
                    _log.info("no TensorBoard events: %s (metrics are in the jsonl files)", err)
            return self._events


class _EventFile:
    """TensorBoard scalars through tensorboard's own writer, which needs no torch or TensorFlow."""

    def __init__(self, folder: Path) -> None:
        # By name, because tensorboard ships no type stubs; lazily, because it is an extra.
        proto = "tensorboard.compat.proto"
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event: typing.Any = importlib.import_module(f"{proto}.event_pb2").Event
        self._summary: typing.Any = importlib.import_module(f"{proto}.summary_pb2").Summary
        self._writer: typing.Any = writer.EventFileWriter(str(folder), flush_secs=5)

    def add(self, now: float, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        summary = self._summary(value=scalars)
        self._writer.add_event(self._event(wall_time=now, step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()
