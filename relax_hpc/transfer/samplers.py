"""Which groups may be admitted and trained (strict staleness), and how a chunk is divided.

Symbols: v current policy version, B groups per step, S max_staleness, a groups already assigned in
step v. Each in-flight group has a deadline: the last train version that may consume it, engine
version at admission + S. N(k) = groups in flight, not assigned, with deadline <= k.

The window is *feasible* iff for every k >= v:  N(k) <= (k - v + 1) * B - a
i.e. all groups can still be trained in time, B per step. Admission and assignment keep it so; a
step's end keeps it by itself (a = B then, and v grows by one). So no sample is ever trained more
than S versions after its oldest token, and none has to be thrown away for its age.
"""

from collections.abc import Sequence


class Window:
    """Groups in flight by deadline, ready ones in order of completion. Costs O(S) per question."""

    def __init__(self, groups_per_step: int) -> None:
        self._per_step = groups_per_step
        self._counts: dict[int, int] = {}
        self._ready: dict[int, dict[str, None]] = {}

    def __len__(self) -> int:
        return sum(self._counts.values())

    def add(self, deadline: int) -> None:
        """A group was admitted (or returned from a chunk)."""
        self._counts[deadline] = self._counts.get(deadline, 0) + 1

    def remove(self, uid: str, deadline: int) -> None:
        """A group was assigned, dropped or dispatched again."""
        self._counts[deadline] -= 1
        if not self._counts[deadline]:
            del self._counts[deadline]
        self._ready.get(deadline, {}).pop(uid, None)

    def set_ready(self, uid: str, deadline: int) -> None:
        """All fields of the group are there."""
        self._ready.setdefault(deadline, {})[uid] = None

    def reset_ready(self) -> None:
        """Forget the order of ready groups; the caller sets them ready again in a new order."""
        self._ready = {}

    def room(self, version: int, assigned: int, deadline: int) -> int:
        """How many groups with this deadline can be admitted now."""
        last = max([deadline, *self._counts])
        return min(
            self._slack(version, assigned, k, self._counts) for k in range(deadline, last + 1)
        )

    def is_feasible(self, version: int, assigned: int) -> bool:
        """The invariant; for tests and assertions."""
        last = max(self._counts, default=version)
        return min(self._counts, default=version) >= version and all(
            self._slack(version, assigned, k, self._counts) >= 0 for k in range(version, last + 1)
        )

    def pick(self, num_groups: int, version: int, assigned: int) -> list[str]:
        """Choose groups to assign: earliest deadline first, then first come; [] if not enough.

        A group may be taken only if those with earlier deadlines that are still being generated
        keep their places in this and later steps.
        """
        counts = dict(self._counts)
        picked: list[str] = []
        for deadline in sorted(self._ready):
            for uid in self._ready[deadline]:
                if len(picked) == num_groups:
                    return picked
                ahead = assigned + len(picked) + 1
                earlier = range(version, deadline)
                if any(self._slack(version, ahead, k, counts) < 0 for k in earlier):
                    return []
                counts[deadline] -= 1
                picked.append(uid)
        return picked if len(picked) == num_groups else []

    def _slack(self, version: int, assigned: int, k: int, counts: dict[int, int]) -> int:
        in_flight = sum(count for deadline, count in counts.items() if deadline <= k)
        return (k - version + 1) * self._per_step - assigned - in_flight


def balance(num_tokens: Sequence[int], num_parts: int) -> list[list[int]]:
    """Divide groups over data parallel ranks: longest first to the lightest rank (LPT).

    Args:
        num_tokens: tokens of each group; at least `num_parts` groups.
        num_parts: data parallel size.

    Returns:
        Indices into `num_tokens` per rank, each rank at least one, in the order given.
    """
    assert len(num_tokens) >= num_parts > 0, (len(num_tokens), num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0, 0)] * num_parts  # (tokens, groups): an empty rank is always the lightest
    for index in sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i)):
        part = min(range(num_parts), key=lambda p: (bool(parts[p]), loads[p], p))
        parts[part].append(index)
        loads[part] = (loads[part][0] + num_tokens[index], loads[part][1] + 1)
    return [sorted(part) for part in parts]
