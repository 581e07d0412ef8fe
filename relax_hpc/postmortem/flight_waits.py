"""Who waits for whom, over all process groups; who is at the end of the chain.

    rank 0 --group 3, all_reduce 7--> rank 4 --group 1, all_gather 9--> rank 6     (the root)

A rank waits in an operation that some members have not launched; it waits for those. One that is
waited for and waits for nobody is a root: its host is elsewhere (a long or endless piece of
Python, an exception, a crash). An operation that all members launched is a root, too, without
anybody behind: the network or a GPU holds it.
"""

from collections.abc import Iterator

import msgspec

from relax_hpc.postmortem.flight import Entry
from relax_hpc.postmortem.flight_groups import GroupView, Table, tells_state


class RankWait(msgspec.Struct):
    """One rank in one unfinished operation."""

    rank: int
    group: GroupView
    entry: Entry
    missing: tuple[int, ...]
    """Who did not launch it; () = all did."""

    def what(self) -> str:
        """Name the operation for people."""
        return f"{self.entry.op} {self.entry.seq} of {self.group.title()}"


def find_waits(table: Table) -> list[RankWait]:
    """Find the oldest unfinished operation of each rank in each group."""
    waits: list[RankWait] = []
    for rank, dump in table.dumps.items():
        waits += _from_state(table, rank)
        if dump.entries and not tells_state(dump.entries[-1]):
            waits += _from_order(table, rank, dump.entries[-1])
    return waits


def _from_state(table: Table, rank: int) -> Iterator[RankWait]:
    seen: set[tuple[str, bool]] = set()
    for entry in table.pending[rank]:
        key = (entry.group, entry.is_p2p)
        view = _view(table, rank, entry.group)
        if key in seen or view is None:
            continue
        seen.add(key)
        absent = missing(table, view, entry.seq)
        if entry.is_p2p:
            absent = _missing_peers(table, view, rank, entry)
        yield RankWait(rank, view, entry, absent)


def _from_order(table: Table, rank: int, newest: Entry) -> Iterator[RankWait]:
    """Without states, the newest operation of a rank is unfinished if somebody did not come."""
    view = _view(table, rank, newest.group)
    if view is None or newest.is_p2p:
        return
    absent = missing(table, view, newest.seq)
    if not view.is_known and len(view.members) == 1:
        absent = tuple(sorted(table.silent))
    if absent:
        yield RankWait(rank, view, newest, absent)


def _view(table: Table, rank: int, name: str) -> GroupView | None:
    for view in table.groups:
        if view.name == name and rank in view.ops:
            return view
    return None


def missing(table: Table, view: GroupView, seq: int) -> tuple[int, ...]:
    """Return the members that did not launch a collective, as far as the dumps tell."""
    return tuple(r for r in view.members if r in table.silent or _is_behind(table, view, r, seq))


def _is_behind(table: Table, view: GroupView, rank: int, seq: int) -> bool:
    if view.ops.get(rank):
        return view.last(rank) < seq
    dump = table.dumps[rank]
    if (told := max((dump.enqueued.get(number, -1) for number in _numbers(view)), default=-1)) > 0:
        return told < seq
    entries = dump.entries
    if not entries or entries[0].record_id <= 0:
        return True
    # Its ring buffer dropped entries; whether this group's were among them, the times tell.
    times = [ops[seq].created_ns for ops in view.ops.values() if seq in ops]
    return bool(times) and min(times) > entries[0].created_ns


def _numbers(view: GroupView) -> set[int]:
    """Return the numbers that processes give this group; they mostly agree."""
    return {entry.pg_id for ops in view.ops.values() for entry in list(ops.values())[:1]}


def _missing_peers(table: Table, view: GroupView, rank: int, entry: Entry) -> tuple[int, ...]:
    """Return the other sides of a send, recv or batch of them that are not in it."""
    absent = set()
    for part in _sides(table, rank, entry):
        peer = None if part.peer is None else view.global_rank(part.peer)
        if peer is not None and not _meets(table, view, peer, rank, part):
            absent.add(peer)
    return tuple(sorted(absent))


def _meets(table: Table, view: GroupView, peer: int, rank: int, part: Entry) -> bool:
    """Whether `peer` is in an unfinished recv of what `rank` sends, or the reverse."""
    for other in table.pending.get(peer, []):
        for side in _sides(table, peer, other) if other.is_p2p else []:
            is_pair = side.group == part.group and side.op != part.op and side.peer is not None
            if is_pair and view.global_rank(side.peer or 0) == rank:
                return True
    return False


def _sides(table: Table, rank: int, entry: Entry) -> list[Entry]:
    return table.parts.get((rank, entry.record_id)) or [entry]


class Roots(msgspec.Struct):
    """Where all chains end."""

    behind: tuple[int, ...]
    """Ranks with a dump that are waited for and wait for nobody."""
    silent: tuple[int, ...]
    """Ranks without a dump that are waited for."""
    joined: list[RankWait]
    """Waits in operations that everybody launched, of ranks that wait in nothing else."""
    circle: tuple[int, ...]
    """Ranks that wait for each other, if no chain ends."""


def find_roots(table: Table, waits: list[RankWait]) -> Roots:
    """Follow every wait to its end."""
    edges: dict[int, set[int]] = {}
    for wait in waits:
        edges.setdefault(wait.rank, set()).update(wait.missing)
    targets = {rank for missing_ranks in edges.values() for rank in missing_ranks}
    silent = tuple(sorted(targets & table.silent.keys()))
    behind = tuple(sorted(rank for rank in targets if rank not in edges and rank in table.dumps))
    joined = [wait for wait in waits if not edges[wait.rank]]
    circle: tuple[int, ...] = ()
    if targets and not silent and not behind and not joined:
        circle = _circle(edges)
    return Roots(behind, silent, joined, circle)


def _circle(edges: dict[int, set[int]]) -> tuple[int, ...]:
    """Return the ranks that can reach themselves: take off, again and again, those nobody needs."""
    ranks = set(edges)
    while True:
        needed = {target for rank in ranks for target in edges[rank]} & ranks
        if needed == ranks:
            return tuple(sorted(ranks))
        ranks = needed
