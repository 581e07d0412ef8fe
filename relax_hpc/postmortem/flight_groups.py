"""Lay the dumps of all ranks side by side, process group by process group.

group 0   seq  1 2 3 4 5          A dump is a window into each rank's history: its ring buffer
rank 0         . . A A B          has dropped the oldest entries. Columns are sequence numbers
rank 1         . A A A B          of the group, which all members count alike; record numbers
rank 2         A A A A            (per process) and clocks (per node) are not comparable.
rank 3         (no dump)
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from relax_hpc.postmortem.flight import Dump, Entry
from relax_hpc.postmortem.flight_history import MAX_PERIOD, find_break, predict

Signature = tuple[str, int, str]
"""Operation, number of elements (-1: may differ between ranks), element type."""


class GroupView(msgspec.Struct):
    """One process group, its members and what each of them launched in it."""

    name: str
    desc: str
    members: tuple[int, ...]
    is_known: bool
    """Whether a dump lists the members; else they are who used the group."""
    ops: dict[int, dict[int, Entry]]
    """Rank -> number -> collective; a coalesced one stands for its parts."""

    def title(self) -> str:
        """Name for people."""
        return f"group {self.name}" + (f" ({self.desc})" if self.desc else "")

    def last(self, rank: int) -> int:
        """Number of the newest collective that a rank launched, 0 if none."""
        return max(self.ops.get(rank, {}), default=0)

    def global_rank(self, group_rank: int) -> int | None:
        """Rank of the job, or None if unknown."""
        return self.members[group_rank] if 0 <= group_rank < len(self.members) else None


class Table(msgspec.Struct):
    """All groups, and which ranks left something that can be read."""

    dumps: dict[int, Dump]
    """Whole, readable dumps by rank."""
    silent: dict[int, str]
    """Ranks without one, and what is wrong."""
    groups: list[GroupView]
    pending: dict[int, list[Entry]]
    """Operations that a rank's recorder did not see end, oldest first, parts left out."""
    parts: dict[tuple[int, int], list[Entry]]
    """(rank, record number) of a coalesced operation -> its parts."""


def make_table(dumps: Sequence[Dump], world_size: int | None = None) -> Table:
    """Lay out the dumps. World size: the largest that dumps or the caller name."""
    whole = {
        dump.rank: dump
        for dump in dumps
        if dump.rank is not None and dump.is_readable() and not dump.problem
    }
    parts: dict[tuple[int, int], list[Entry]] = {}
    logical = {rank: _without_parts(dump, parts) for rank, dump in whole.items()}
    world = _world(dumps, world_size)
    groups = list(_groups(whole, logical, world))
    problems = {dump.rank: dump for dump in dumps if dump.rank is not None and dump.problem}
    silent = {}
    for rank in sorted(world - whole.keys()):
        dump = problems.get(rank)
        silent[rank] = f"{Path(dump.file).name}: {dump.problem}" if dump else "left no dump"
    pending = {
        rank: [entry for entry in entries if tells_state(entry) and not entry.is_complete()]
        for rank, entries in logical.items()
    }
    return Table(dumps=whole, silent=silent, groups=groups, pending=pending, parts=parts)


def tells_state(entry: Entry) -> bool:
    """Whether the recorder follows this operation; gloo's stay `scheduled` for ever."""
    return entry.backend != "gloo" or entry.state != "scheduled"


def _world(dumps: Sequence[Dump], world_size: int | None) -> set[int]:
    ranks = {dump.rank for dump in dumps if dump.rank is not None}
    for dump in dumps:
        for members in dump.groups.values():
            ranks |= set(members)
    gathered = [_shares(e) for d in dumps for e in d.entries if "all" in e.op and "gather" in e.op]
    size = max(world_size or 0, max(ranks, default=-1) + 1, *gathered, 0)
    return set(range(size)) if size <= 1 << 20 else ranks


def _shares(entry: Entry) -> int:
    """Return how many ranks took part in an all-gather, from its sizes; 0 if they do not tell."""
    given, got = _elements(entry.input_sizes), _elements(entry.output_sizes)
    return got // given if given > 0 and got % given == 0 and got // given <= 1 << 20 else 0


def _without_parts(dump: Dump, parts: dict[tuple[int, int], list[Entry]]) -> list[Entry]:
    """Move operations inside a coalesced one to `parts`: they have no state of their own."""
    kept: list[Entry] = []
    closed: dict[tuple[str, bool, int], list[Entry]] = {}
    for entry in reversed(dump.entries):
        key = (entry.group, entry.is_p2p, entry.seq)
        if entry.op == "coalesced":
            closed[key] = parts.setdefault((dump.rank or 0, entry.record_id), [])
        elif key in closed:
            closed[key].append(entry)
            continue
        kept.append(entry)
    kept.reverse()
    return kept


def _groups(
    dumps: dict[int, Dump], logical: dict[int, list[Entry]], world: set[int]
) -> Iterator[GroupView]:
    views: dict[tuple[str, tuple[int, ...]], GroupView] = {}
    listed = _listed_members(dumps)
    for rank in sorted(logical):
        for entry in logical[rank]:
            members = _members(dumps[rank], entry.group, rank, listed)
            key = (entry.group, members)
            if key not in views:
                views[key] = GroupView(entry.group, entry.desc, members, bool(members), {})
            if not entry.is_p2p:
                views[key].ops.setdefault(rank, {})[entry.seq] = entry
            else:
                views[key].ops.setdefault(rank, {})
    for view in views.values():
        if not view.is_known:
            is_all = view.desc == "default_pg" or view.name == "0"
            view.members = tuple(sorted(world if is_all else view.ops))
        yield view


def _listed_members(dumps: dict[int, Dump]) -> dict[str, set[tuple[int, ...]]]:
    listed: dict[str, set[tuple[int, ...]]] = {}
    for dump in dumps.values():
        for name, members in dump.groups.items():
            listed.setdefault(name, set()).add(members)
    return listed


def _members(
    dump: Dump, name: str, rank: int, listed: dict[str, set[tuple[int, ...]]]
) -> tuple[int, ...]:
    """Return the members of a group: of this dump, else of the only other one that has the rank.

    Two groups may share a name (split_group counts alike on all ranks), not their members.
    """
    own = dump.groups.get(name)
    if own and rank in own:
        return own
    others = [members for members in listed.get(name, ()) if rank in members]
    return others[0] if len(others) == 1 else ()


# --------------------------------------------------------------------------------------------
# Do two ranks mean the same operation?
# --------------------------------------------------------------------------------------------

_SAME_INPUT = ("all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "allgather")
_SAME_TOTAL = ("reduce_scatter", "_reduce_scatter")


def signature(entry: Entry) -> Signature:
    """Return what all members must agree on: the number of elements, shapes may differ."""
    op = entry.op
    dtypes = entry.input_dtypes or entry.output_dtypes
    dtype = dtypes[0] if dtypes else ""
    if op.startswith(("barrier", "coalesced", "send", "recv")):
        return op, -1, ""
    is_sized = op.lstrip("_").startswith((*_SAME_INPUT, *_SAME_TOTAL))
    if "gather" in op:  # ranks may bring different shares, the sum is known to all
        return op, _elements(entry.output_sizes) if is_sized else -1, dtype
    return op, _elements(entry.input_sizes) if is_sized else -1, dtype


def _elements(sizes: tuple[tuple[int, ...], ...]) -> int:
    return sum(math.prod(size) for size in sizes)


class Mismatch(msgspec.Struct):
    """The first collective of a group about which ranks disagree."""

    group: GroupView
    seq: int
    kind: str
    """op | size | dtype | extra | skipped"""
    odd: tuple[int, ...]
    others: tuple[int, ...]
    is_clear: bool
    """Whether it is known who of them is odd."""


def first_mismatch(view: GroupView) -> Mismatch | None:
    """Find the first collective that is not the same on all ranks and did not complete anyway."""
    numbers = Counter(seq for ops in view.ops.values() for seq in ops)
    for seq in sorted(seq for seq, count in numbers.items() if count > 1):
        entries = {rank: ops[seq] for rank, ops in view.ops.items() if seq in ops}
        if all(entry.is_complete() for entry in entries.values()):
            continue
        signs = {rank: signature(entry) for rank, entry in entries.items()}
        if len(set(signs.values())) > 1:
            return _mismatch(view, seq, signs)
    return None


def _mismatch(view: GroupView, seq: int, signs: dict[int, Signature]) -> Mismatch:
    counts = Counter(signs.values()).most_common()
    right = counts[0][0]
    is_clear = counts[0][1] > counts[1][1]
    if not is_clear:
        expected = expected_signature(view, seq)
        is_clear = expected in {sign for sign, count in counts if count == counts[0][1]}
        right = expected if is_clear and expected is not None else right
    odd = tuple(rank for rank, sign in signs.items() if sign != right)
    others = tuple(rank for rank, sign in signs.items() if sign == right)
    kind = _kind(view, seq, signs, odd[0], others[0])
    return Mismatch(view, seq, kind, odd, others, is_clear)


def _kind(view: GroupView, seq: int, signs: dict[int, Signature], odd: int, other: int) -> str:
    expected = expected_signature(view, seq + 1, {seq: signs[other]})
    if expected == signs[odd] or _is_shifted(view, other, odd, seq):
        return "skipped"
    if _is_shifted(view, odd, other, seq):
        return "extra"
    if signs[odd][0] != signs[other][0]:
        return "op"
    return "size" if signs[odd][1] != signs[other][1] else "dtype"


def _is_shifted(view: GroupView, ahead: int, behind: int, seq: int) -> bool:
    """Whether `ahead` did one thing more at `seq`: later ones agree one number apart, not in place.

    Where the same operation repeats, both fit, and nobody can tell an extra one from a wrong one.
    """
    one, two = view.ops[ahead], view.ops[behind]
    length, is_in_place = 0, True
    while seq + length in two and seq + length + 1 in one:
        if signature(one[seq + length + 1]) != signature(two[seq + length]):
            return False
        length += 1
        if seq + length in two:
            is_in_place &= signature(one[seq + length]) == signature(two[seq + length])
    return length > 0 and not is_in_place


def expected_signature(
    view: GroupView, seq: int, more: dict[int, Signature] | None = None
) -> Signature | None:
    """Predict a collective from the repetition of what all ranks agreed on before it."""
    history: list[Signature] = []
    number = seq - 1
    while len(history) < 3 * MAX_PERIOD:
        found = {signature(ops[number]) for ops in view.ops.values() if number in ops}
        if more and number in more:
            found = {more[number]}
        if len(found) != 1:
            break
        history.append(found.pop())
        number -= 1
    return predict(history[::-1])


class RankBreak(msgspec.Struct):
    """One rank's operation that its own history, over all groups, did not announce."""

    rank: int
    entry: Entry
    expected: Entry
    kind: str
    """skipped | op | size | dtype"""


def own_break(dump: Dump) -> RankBreak | None:
    """Find where a rank left its rhythm shortly before the end."""
    entries = [entry for entry in dump.entries if not entry.is_p2p]
    keys = [(entry.group, signature(entry)) for entry in entries]
    found = find_break(keys)
    if found is None or dump.rank is None:
        return None
    before = (e for e, key in zip(entries, keys, strict=True) if key == found.expected)
    expected = next(before)
    (group, got), (expected_group, wanted) = found.got, found.expected
    if found.is_skip:
        kind = "skipped"
    elif group != expected_group or got[0] != wanted[0]:
        kind = "op"
    else:
        kind = "size" if got[1] != wanted[1] else "dtype"
    return RankBreak(dump.rank, entries[found.index], expected, kind)
