"""Histograms of samples: what was generated, trained and lost, by response length.

Training on what finishes first favours short answers; these counts show whether that happens.
"""

from collections.abc import Sequence
from operator import sub

from relax_hpc.transfer.wire import Histogram, Histograms, Rows, StepSummary, length_bucket


def response_tokens(rows: Rows) -> list[int]:
    """Length of each row's response."""
    return list(map(sub, rows.num_tokens, rows.num_prompt_tokens))


def histogram_of(lengths: Sequence[int]) -> Histogram:
    """Count lengths by bucket."""
    counts: Histogram = {}
    for bucket in map(length_bucket, lengths):
        counts[bucket] = counts.get(bucket, 0) + 1
    return counts


def count_generated(histograms: Histograms, rows: Rows) -> None:
    """A group was put."""
    counts = histograms.generated
    for bucket in map(int.bit_length, map(sub, rows.num_tokens, rows.num_prompt_tokens)):
        counts[bucket] = counts.get(bucket, 0) + 1


def count_ended(
    histograms: Histograms, reason: str, rows: Rows | None, lengths: Sequence[int]
) -> None:
    """A group was dropped or dispatched again; `lengths` is what its engine told."""
    found = [*lengths] if rows is None else response_tokens(rows)
    if found:
        _add(histograms.dropped.setdefault(reason, {}), histogram_of(found))


def count_trained(histograms: Histograms, summary: StepSummary) -> None:
    """A step was completed."""
    _add(histograms.trained, summary.response_lengths)
    _add(histograms.staleness, summary.staleness)


def _add(counts: Histogram, more: Histogram) -> None:
    for bucket, count in more.items():
        counts[bucket] = counts.get(bucket, 0) + count
