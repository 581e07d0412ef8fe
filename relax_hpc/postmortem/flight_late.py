"""Who came too late to a collective that all ranks launched in the end.

Clocks of nodes differ; what counts is how much later than usual a rank came, usual being its
distance to the others in the collectives before.
"""

import statistics

import msgspec

from relax_hpc.postmortem.flight import Entry
from relax_hpc.postmortem.flight_groups import GroupView, Table

_BEFORE = 8
_MIN_LATE_S = 1.0
_MIN_SHARE = 0.5
"""Of the time-out: less than half of it does not explain one."""
_DEFAULT_TIMEOUT_S = 600.0


class Late(msgspec.Struct):
    """A rank that came late, the operation, and what it did before."""

    rank: int
    group: GroupView
    entry: Entry
    late_s: float
    previous: Entry | None


def find_late(table: Table) -> Late | None:
    """Find the first straggler among the newest collectives of all groups, or None."""
    found = [late for view in table.groups if (late := _late_in(table, view)) is not None]
    return min(found, key=lambda late: late.entry.created_ns - late.late_s * 1e9, default=None)


def _late_in(table: Table, view: GroupView) -> Late | None:
    ranks = [rank for rank in view.members if view.ops.get(rank)]
    if len(ranks) < 2 or len(ranks) < len(view.members):
        return None
    seq = min(view.last(rank) for rank in ranks)
    entries = {rank: view.ops[rank][seq] for rank in ranks if seq in view.ops[rank]}
    if len(entries) < len(ranks) or all(entry.is_complete() for entry in entries.values()):
        return None
    offsets = {rank: _usual_offset(view, rank, seq) for rank in ranks}
    times = {rank: entries[rank].created_ns / 1e9 - offsets[rank] for rank in ranks}
    rank = max(times, key=lambda r: times[r])
    late_s = times[rank] - sorted(times.values())[-2]
    timeout_s = entries[rank].timeout_ms / 1e3
    needed = _MIN_SHARE * (timeout_s if timeout_s > 0 else _DEFAULT_TIMEOUT_S)
    if late_s < max(_MIN_LATE_S, needed):
        return None
    return Late(rank, view, entries[rank], late_s, _previous(table, rank, entries[rank]))


def _usual_offset(view: GroupView, rank: int, seq: int) -> float:
    """Return how much later than the median of all this rank used to launch, in s."""
    offsets = []
    for number in range(seq - _BEFORE, seq):
        times = {r: ops[number].created_ns / 1e9 for r, ops in view.ops.items() if number in ops}
        if rank in times and len(times) > 1:
            offsets.append(times[rank] - statistics.median(times.values()))
    return statistics.median(offsets) if offsets else 0.0


def _previous(table: Table, rank: int, entry: Entry) -> Entry | None:
    before = [e for e in table.dumps[rank].entries if e.record_id < entry.record_id]
    return before[-1] if before else None
