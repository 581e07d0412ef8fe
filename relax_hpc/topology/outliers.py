"""Which nodes are not like most others: one rule for every number that is measured per node.

A node is slow when its value is worse than the median of all nodes
  by more than a factor, and                (2: half the speed, twice the time)
  by more than a slack in absolute terms, and   (what the measurement itself may be wrong by)
  by more than 6 robust standard deviations  (6 x 1.4826 x the median distance to the median).
The median does not move while less than half of the nodes are slow; the last condition keeps a
fleet whose values are spread anyway from naming many. Below three nodes there is no majority.
"""

import statistics
from collections.abc import Mapping

FACTOR = 2.0
DEVIATIONS = 6.0
_MAD_TO_SIGMA = 1.4826
"""Median absolute deviation of a normal distribution to its standard deviation."""
MIN_NODES = 3


def slow_ones(
    values: Mapping[str, float], *, more_is_worse: bool, factor: float = FACTOR, slack: float = 0.0
) -> dict[str, float]:
    """Name the outliers on the bad side.

    Args:
        values: by node, all of one unit, >= 0.
        more_is_worse: a time; else a rate.
        factor: see above, > 1.
        slack: in the unit of the values.

    Returns:
        node -> the median that it was compared with; empty below three nodes.
    """
    if len(values) < MIN_NODES:
        return {}
    median = statistics.median(values.values())
    spread = statistics.median(abs(value - median) for value in values.values())
    limit = DEVIATIONS * _MAD_TO_SIGMA * spread
    slow = {}
    for node, value in values.items():
        worse_by = value - median if more_is_worse else median - value
        is_beyond = value > factor * median if more_is_worse else factor * value < median
        if is_beyond and worse_by > slack and worse_by > limit:
            slow[node] = median
    return slow
