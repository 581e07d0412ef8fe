"""Spans: named phases of a role with start and end, for time lines and waiting shares."""

import contextlib
import time
from collections.abc import Callable, Iterator

from relax_hpc.metrics.metric import SpanRecord, check_name


@contextlib.contextmanager
def record_span(write: Callable[[SpanRecord], None], name: str, step: int) -> Iterator[None]:
    """Time the body and write one SpanRecord, also when the body raises.

    Start is wall-clock time, so that spans of several nodes line up; the length is measured by
    the monotonic clock, so that a clock step cannot make it negative.
    """
    check_name(name)
    start, started = time.time(), time.monotonic()
    try:
        yield
    finally:
        length = time.monotonic() - started
        write(SpanRecord(name=name, step=step, start=start, end=start + length))
