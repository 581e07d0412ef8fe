"""Which groups may be admitted and trained (strict staleness), and how a chunk is divided.

Symbols: v current policy version, B groups per step, S max_staleness, a groups already assigned in
step v. Each in-flight group has a deadline: the last train version that may consume it, engine
version at admission + S. N(k) = groups in flight, not assigned, with deadline <= k.

The window is *feasible* iff for every k >= v:  N(k) <= (k - v + 1) * B - a
i.e. all groups can still be trained in time, B per step. Admission and assignment keep it so; a
step's end keeps it by itself (a = B then, and v grows by one). So no sample is ever trained more
than S versions after its oldest token, and none has to be thrown away for its age.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence

from relax_hpc.config import Sampler


class Window:
    """Groups in flight by deadline, ready ones in order of completion. Costs O(S) per question."""

    def __init__(self, groups_per_step: int) -> None:
        self._per_step = groups_per_step
        self._counts: dict[int, int] = {}
        self._ready: dict[int, OrderedDict[str, None]] = {}
        self._num_ready = 0

    def __len__(self) -> int:
        return sum(self._counts.values())

    @property
    def num_ready(self) -> int:
        """Ready groups that no chunk took."""
        return self._num_ready

    def add(self, deadline: int) -> None:
        """A group was admitted (or returned from a chunk)."""
        self._counts[deadline] = self._counts.get(deadline, 0) + 1

    def remove(self, uid: str, deadline: int) -> None:
        """A group was assigned, dropped or dispatched again."""
        self._counts[deadline] -= 1
        if not self._counts[deadline]:
            del self._counts[deadline]
        ready = self._ready.get(deadline)
        if ready is not None and uid in ready:
            del ready[uid]
            self._num_ready -= 1
            if not ready:
                del self._ready[deadline]

    def set_ready(self, uid: str, deadline: int) -> None:
        """All fields of the group are there."""
        ready = self._ready.get(deadline)
        if ready is None:
            ready = self._ready[deadline] = OrderedDict()
        self._num_ready += uid not in ready
        ready[uid] = None

    def reset_ready(self) -> None:
        """Forget the order of ready groups; the caller sets them ready again in a new order."""
        self._ready, self._num_ready = {}, 0

    def room(self, version: int, assigned: int, deadline: int) -> int:
        """How many groups with this deadline can be admitted now."""
        last = max([deadline, *self._counts])
        return min(self._slack(version, assigned, k) for k in range(deadline, last + 1))

    def can_lower(
        self, version: int, assigned: int, low: int, high: int, others: Sequence[int]
    ) -> bool:
        """Whether one of several groups that fit with deadline `high` also fits with `low`.

        Args:
            version: current policy version.
            assigned: groups assigned in this step.
            low: the smaller deadline.
            high: the deadline that `room` was asked for.
            others: deadlines of those that were lowered before.
        """
        return low >= version and all(
            self._slack(version, assigned, k) - sum(other <= k for other in others) > 0
            for k in range(low, high)
        )

    def is_feasible(self, version: int, assigned: int) -> bool:
        """The invariant; for tests and assertions."""
        last = max(self._counts, default=version)
        return min(self._counts, default=version) >= version and all(
            self._slack(version, assigned, k) >= 0 for k in range(version, last + 1)
        )

    def pick(self, num_groups: int, version: int, assigned: int) -> list[str]:
        """Choose groups to assign: earliest deadline first, then first come; [] if not enough.

        A group may be taken only if those with earlier deadlines that are still being generated
        keep their places in this and later steps.
        """
        if self._num_ready < num_groups:
            return []
        picked: list[str] = []
        for deadline in sorted(self._ready):
            # What is picked with an earlier deadline takes a place and needs none any more: the
            # slack of its own and later versions stays, that of earlier ones shrinks.
            limit = num_groups
            for k in range(version, deadline):
                before = sum(len(ready) for d, ready in self._ready.items() if d <= k)
                limit = min(limit, before + self._slack(version, assigned, k))
            ready = self._ready[deadline]
            picked += itertools.islice(ready, max(0, min(limit, num_groups) - len(picked)))
            if len(picked) == num_groups:
                return picked
            if limit - len(picked) <= 0:
                return []
        return []

    def _slack(self, version: int, assigned: int, k: int) -> int:
        in_flight = 0
        for deadline, count in self._counts.items():
            if deadline <= k:
                in_flight += count
        return (k - version + 1) * self._per_step - assigned - in_flight


_MAX_DIFFERENCING = 20_000
"""Groups x ranks up to which the second heuristic is tried: 5 ms of the controller's time."""


def divide(
    sampler: Sampler, num_tokens: Sequence[int], num_parts: int, loads: Sequence[int]
) -> list[list[int]]:
    """Divide groups over data parallel ranks; the same arguments give the same parts.

    Args:
        sampler: how.
        num_tokens: tokens of each group; at least `num_parts` groups.
        num_parts: data parallel size.
        loads: tokens that each rank got in earlier chunks of the step.

    Returns:
        Indices into `num_tokens` per rank, each rank at least one, in the order given.
    """
    if num_parts == 1:
        return [list(range(len(num_tokens)))]
    if sampler is Sampler.FIFO:
        bounds = [part * len(num_tokens) // num_parts for part in range(num_parts + 1)]
        sizes = sorted((b - a for a, b in itertools.pairwise(bounds)), reverse=True)
        places = iter(range(len(num_tokens)))
        return [list(itertools.islice(places, size)) for size in sizes]
    return balance(num_tokens, num_parts, loads)


def balance(
    num_tokens: Sequence[int], num_parts: int, loads: Sequence[int] = ()
) -> list[list[int]]:
    """Divide groups so that the largest total of a rank is small; arguments as in `divide`.

    The better of two heuristics: longest first to the lightest rank (LPT), and largest
    differencing (Karmarkar and Karp 1982). Seen with 4 to 8 groups of log-normal length a rank:
    LPT ends 1 to 3 % above the mean, the better one 0.2 to 2 %.
    """
    assert len(num_tokens) >= num_parts > 0, (len(num_tokens), num_parts)
    before = list(loads) if loads else [0] * num_parts
    candidates = [_longest_first(num_tokens, before)]
    if len(num_tokens) * num_parts <= _MAX_DIFFERENCING:
        candidates.append(_largest_differencing(num_tokens, before))
    best = min(
        (parts for parts in candidates if all(parts)),
        key=lambda parts: max(
            load + sum(num_tokens[i] for i in part)
            for load, part in zip(before, parts, strict=True)
        ),
    )
    return [sorted(part) for part in best]


def _longest_first(num_tokens: Sequence[int], before: list[int]) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in before]
    # (is in use, tokens, groups, part): an empty rank is always the lightest.
    loads = [(False, load, 0, part) for part, load in enumerate(before)]
    heapq.heapify(loads)
    for index in sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i)):
        _, tokens, groups, part = loads[0]
        parts[part].append(index)
        heapq.heapreplace(loads, (True, tokens + num_tokens[index], groups + 1, part))
    return parts


def _largest_differencing(num_tokens: Sequence[int], before: list[int]) -> list[list[int]]:
    """Join the two most uneven partial divisions, heaviest part with lightest, until one is left.

    Its parts go to the ranks, heaviest part to the rank that had least.
    """
    empty: list[tuple[int, list[int]]] = [(0, []) for _ in before[1:]]
    # (-difference, number, parts from the lightest to the heaviest: (tokens, indices))
    heap = [(-n, i, [*empty, (n, [i])]) for i, n in enumerate(num_tokens)]
    heapq.heapify(heap)
    for number in itertools.count(len(heap)):
        _, _, first = heapq.heappop(heap)
        if not heap:
            break
        _, _, second = heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        joined.sort()
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], number, joined))
    ranks = sorted(range(len(before)), key=lambda rank: (-before[rank], rank))
    parts: list[list[int]] = [[] for _ in before]
    for rank, (_, indices) in zip(ranks, first, strict=True):
        parts[rank] = indices
    return parts
