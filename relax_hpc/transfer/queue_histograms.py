"""Histograms of samples: what was generated, trained and lost, by response length.

Training on what finishes first favours short answers; these counts show whether that happens.
"""

import collections
import itertools
from collections.abc import Iterable, Sequence
from operator import sub

from relax_hpc.transfer.wire import Histogram, Histograms, Rows, StepSummary


def response_tokens(rows: Rows) -> list[int]:
    """Length of each row's response."""
    return list(map(sub, rows.num_tokens, rows.num_prompt_tokens))


def histogram_of(lengths: Iterable[int]) -> Histogram:
    """Count lengths by `length_bucket`."""
    return dict(collections.Counter(map(int.bit_length, lengths)))


def count_generated(histograms: Histograms, groups: Sequence[Rows]) -> None:
    """Groups were put."""
    num_tokens = itertools.chain.from_iterable([rows.num_tokens for rows in groups])
    num_prompt_tokens = itertools.chain.from_iterable([rows.num_prompt_tokens for rows in groups])
    _add(histograms.generated, histogram_of(map(sub, num_tokens, num_prompt_tokens)))


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
