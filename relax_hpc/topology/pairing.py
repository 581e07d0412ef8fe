"""Who tests the way to whom: a constant number of rounds, whatever the number of nodes.

    round 0   0-1  2-3  4-5  6-7      the ring's edges in two rounds, three if the number is odd
    round 1   1-2  3-4  5-6  7-0
    round 3   0-4  1-5  2-6  3-7      across: neighbours share a leaf, these cross the spine

All pairs of a round work at once. A node has up to three partners, so one slow node shows in all of
its pairs and each of its partners has another pair without it: a node counts by its best pair.
Nodes that still look slow are tested once more with a node of their own that is fine
(`retest_pairs`), as both neighbours of one may be slow themselves.
"""

from collections.abc import Sequence

ROUNDS = 4
"""Of `partner`; one more for those that look slow."""


def partner(position: int, size: int, round_number: int) -> int | None:
    """Return the partner of the node at `position` of `size` in a round; None: it rests."""
    if size < 2:
        return None
    if round_number == 3:
        return _across(position, size)
    if round_number == 2:
        ends = {0: size - 1, size - 1: 0} if size % 2 and size > 2 else {}
        return ends.get(position)
    if round_number == 1 and size == 2:
        return None  # again the pair of round 0
    other = position ^ 1 if round_number == 0 else ((position - 1) ^ 1) + 1
    if size % 2 == 0:
        return other % size
    return other if 0 <= other < size and not (round_number == 1 and position == 0) else None


def _across(position: int, size: int) -> int | None:
    half = size // 2
    if half < 2:
        return None
    if position < half:
        return position + half
    return position - half if position < 2 * half else None


def retest_pairs(suspects: Sequence[int], fine: Sequence[int]) -> dict[int, int]:
    """Give each suspect a partner of its own among `fine` (best first); both directions.

    With fewer fine nodes than suspects the last ones get none: then nobody can say who is slow.
    """
    pairs = dict(zip(suspects, fine, strict=False))
    return pairs | {good: bad for bad, good in pairs.items()}
