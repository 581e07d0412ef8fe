"""What flight-recorder dumps tell: who is behind, odd, late or silent in which process group.

Order of the rules: ranks that disagree about a collective; the root of all waits (behind, silent,
extra operation, circle); a straggler; everybody joined, so that dumps cannot tell.
"""

from collections.abc import Sequence

from relax_hpc.postmortem.evidence import Source
from relax_hpc.postmortem.flight import Dump, Entry
from relax_hpc.postmortem.flight_groups import (
    GroupView,
    Mismatch,
    RankBreak,
    Table,
    expected_signature,
    first_mismatch,
    make_table,
    own_break,
    signature,
    tells_state,
)
from relax_hpc.postmortem.flight_late import Late, find_late
from relax_hpc.postmortem.flight_waits import RankWait, Roots, find_roots, find_waits
from relax_hpc.postmortem.verdict import Confidence, Finding, Wait

CLASSES = (
    "op-mismatch",
    "size-mismatch",
    "dtype-mismatch",
    "extra-op",
    "missing-rank",
    "straggler",
    "all-launched-none-completed",
)
"""Every class that a finding of this module can have."""
_NAMED = 16
"""More ranks than this are counted, not named."""
_MAX_BREAKS = 128


def flight_findings(dumps: Sequence[Dump], world_size: int | None = None) -> list[Finding]:
    """Explain a failure from the dumps of one attempt, best explanation first; [] if all is well.

    Args:
        dumps: of `read_dumps`; unreadable ones and missing ranks are evidence, too.
        world_size: number of ranks if something else (a log) tells it.
    """
    table = make_table(dumps, world_size)
    if not table.dumps:
        return []
    waits = find_waits(table)
    roots = find_roots(table, waits)
    mismatches = _mismatches(table)
    found = [_mismatch_finding(table, mismatch) for mismatch in mismatches]
    late = None if found else find_late(table)
    if late is not None and (late.rank in roots.behind or not roots.behind):
        found.append(_straggler(table, late))
    involved = {rank for mismatch in mismatches for rank in mismatch.odd + mismatch.others}
    involved |= {late.rank} if late is not None else set()
    if not involved & set(roots.behind + roots.circle):
        found += _root_findings(table, waits, roots, is_explained=bool(found))
    if not found:
        found += _undetermined(table, roots)
    for finding in found:
        finding.nodes = sorted({table.dumps[r].host for r in finding.ranks if r in table.dumps})
        finding.nodes = [node for node in finding.nodes if node]
    return found


def flight_waits(dumps: Sequence[Dump]) -> list[Wait]:
    """Return who waited for whom, for the picture."""
    table = make_table(dumps)
    return [
        Wait(rank=wait.rank, on=rank, why=wait.what())
        for wait in find_waits(table)
        for rank in wait.missing
    ]


# --------------------------------------------------------------------------------------------
# Disagreement
# --------------------------------------------------------------------------------------------


def _mismatches(table: Table) -> list[Mismatch]:
    found = [m for view in table.groups if (m := first_mismatch(view)) is not None]
    return sorted(found, key=_start_ns)[:4]


def _start_ns(mismatch: Mismatch) -> int:
    view, seq = mismatch.group, mismatch.seq
    return min(view.ops[rank][seq].created_ns for rank in mismatch.odd + mismatch.others)


_DOES = {
    "op": "calls {odd} as collective {seq} of {group} where {others} called {right}",
    "size": "brings {odd} to collective {seq} of {group}, {others} brought {right}",
    "dtype": "brings {odd} to collective {seq} of {group}, {others} brought {right}",
    "extra": "calls {odd} once more than {others}, as collective {seq} of {group} ({right} there)",
    "skipped": "skips collective {seq} of {group}, {right}, which {others} called",
}
_CLASS_OF = {
    "op": "op-mismatch",
    "size": "size-mismatch",
    "dtype": "dtype-mismatch",
    "extra": "extra-op",
    "skipped": "missing-rank",
}


def _mismatch_finding(table: Table, mismatch: Mismatch) -> Finding:
    view, seq = mismatch.group, mismatch.seq
    odd, others = mismatch.odd, mismatch.others
    pair = [view.ops[odd[0]][seq], view.ops[others[0]][seq]]
    sentence = _DOES[mismatch.kind].format(
        odd=_brief(pair[0]),
        right=_brief(pair[1]),
        seq=seq,
        group=view.title(),
        others=name_ranks(others),
    )
    is_sure = mismatch.is_clear and len(odd) == 1 and len(others) >= 2
    ranks = odd if mismatch.is_clear else tuple(sorted(odd + others))
    if not mismatch.is_clear:
        sentence += "; which of them is wrong, the dumps do not tell"
    return Finding(
        class_=_CLASS_OF[mismatch.kind],
        confidence=Confidence.ESTABLISHED if is_sure else Confidence.LIKELY,
        sentence=f"{name_ranks(odd).capitalize()} {sentence}",
        ranks=sorted(ranks)[:_NAMED],
        evidence=[_source(table, rank, view.ops[rank][seq]) for rank in (*odd[:3], *others[:2])],
        time=_seconds(pair[0]),
    )


def _brief(entry: Entry) -> str:
    sizes = " ".join(str(list(size)) for size in entry.input_sizes[:4])
    return " ".join(filter(None, (entry.op, sizes, " ".join(entry.input_dtypes[:1]))))


# --------------------------------------------------------------------------------------------
# Roots of the waits
# --------------------------------------------------------------------------------------------


def _root_findings(
    table: Table, waits: list[RankWait], roots: Roots, *, is_explained: bool
) -> list[Finding]:
    found = []
    if roots.behind:
        found.append(_behind(table, waits, roots))
    if roots.silent:
        broke = None if roots.behind or is_explained else _one_break(table, waits)
        if broke is not None:
            found.append(_break_finding(table, broke))
        found.append(_silent(table, waits, roots))
    if roots.circle:
        breaks = _breaks(table, roots.circle)
        if len(breaks) == 1:
            found.append(_break_finding(table, breaks[0]))
        found.append(_circle(table, waits, roots))
    return found


def _breaks(table: Table, ranks: Sequence[int]) -> list[RankBreak]:
    """Search for ranks that left their rhythm, if they are few: it takes 30 ms for each."""
    if len(ranks) > _MAX_BREAKS:
        return []
    return [broke for rank in ranks if (broke := own_break(table.dumps[rank])) is not None]


def _one_break(table: Table, waits: list[RankWait]) -> RankBreak | None:
    """Find the one rank that left its rhythm, where a victim may have left no dump.

    Gloo ends the process that receives too much: the rank with the wrong size survives it. Nothing
    of the kind is known of other backends, and a new kind of operation may be a new phase.
    """
    waiting = [wait.rank for wait in waits if not tells_state(wait.entry)]
    breaks = _breaks(table, waiting)
    if len(breaks) == 1 and breaks[0].kind != "op":
        return breaks[0]
    return None


def _break_finding(table: Table, broke: RankBreak) -> Finding:
    does = "skipped it" if broke.kind == "skipped" else "did not"
    return Finding(
        class_=_CLASS_OF[broke.kind],
        confidence=Confidence.LIKELY,
        sentence=(
            f"Rank {broke.rank} called {_brief(broke.entry)} as collective {broke.entry.seq} of"
            f" group {broke.entry.group} ({broke.entry.desc}); by all its steps before,"
            f" {_brief(broke.expected)} of group {broke.expected.group} was due and it {does}"
        ),
        ranks=[broke.rank],
        evidence=[
            _source(table, broke.rank, broke.entry),
            _source(table, broke.rank, broke.expected),
        ],
        time=_seconds(broke.entry),
    )


def _behind(table: Table, waits: list[RankWait], roots: Roots) -> Finding:
    direct = [wait for wait in waits if set(wait.missing) & set(roots.behind)]
    ahead = tuple(sorted({wait.rank for wait in direct}))
    if _is_extra(direct, roots, ahead):
        return _extra(table, direct[0], ahead, roots.behind)
    wait = max(direct, key=lambda w: (len(set(w.missing) & set(roots.behind)), -w.entry.created_ns))
    behind = tuple(rank for rank in roots.behind if rank in wait.missing)
    sentence = (
        f"{name_ranks(behind).capitalize()} did not come to {wait.what()}"
        f" ({_brief(wait.entry)}) and waits in no other collective; {_num_waiting(waits)} for it"
    )
    is_sure = len(behind) == 1 and not roots.silent and tells_state(wait.entry)
    return Finding(
        class_="missing-rank",
        confidence=Confidence.ESTABLISHED if is_sure else Confidence.LIKELY,
        sentence=sentence,
        ranks=list(behind[:_NAMED]),
        evidence=[
            *(_last_source(table, rank) for rank in behind[:3]),
            *(_source(table, w.rank, w.entry) for w in direct[:2]),
        ],
        time=_seconds(wait.entry),
    )


def _is_extra(direct: list[RankWait], roots: Roots, ahead: tuple[int, ...]) -> bool:
    """Whether the ranks that are ahead did something that the others never will."""
    if len({(wait.group.name, wait.entry.seq) for wait in direct}) > 1 or roots.silent:
        return False
    wait = direct[0]
    if len(ahead) != len(roots.behind):
        return len(ahead) < len(roots.behind)
    # One against one: what all did before tells whether this operation was due.
    expected = expected_signature(wait.group, wait.entry.seq)
    return expected is not None and expected != signature(wait.entry)


def _extra(
    table: Table, wait: RankWait, ahead: tuple[int, ...], others: tuple[int, ...]
) -> Finding:
    return Finding(
        class_="extra-op",
        confidence=Confidence.LIKELY,
        sentence=(
            f"{name_ranks(ahead).capitalize()} called {wait.what()} ({_brief(wait.entry)}), which"
            f" {name_ranks(others)} did not; they completed all of theirs and wait for nothing"
        ),
        ranks=list(ahead[:_NAMED]),
        evidence=[
            *(_source(table, rank, wait.entry) for rank in ahead[:1]),
            *(_last_source(table, rank) for rank in others[:2]),
        ],
        time=_seconds(wait.entry),
    )


def _silent(table: Table, waits: list[RankWait], roots: Roots) -> Finding:
    direct = [wait for wait in waits if set(wait.missing) & set(roots.silent)]
    wait = min(direct, key=lambda w: w.entry.created_ns)
    silent = roots.silent
    few = len(silent) == 1 or len(silent) <= len(table.dumps) // 2
    why = table.silent[silent[0]]
    return Finding(
        class_="missing-rank",
        confidence=Confidence.LIKELY if few else Confidence.UNDETERMINED,
        sentence=(
            f"{name_ranks(silent).capitalize()} {'has' if len(silent) == 1 else 'have'} no usable"
            f" dump ({why}), as a dead or stopped process; {_num_waiting(waits)},"
            f" first in {wait.what()}"
        ),
        ranks=list(silent[:_NAMED]),
        evidence=[
            *(_silent_source(table, rank) for rank in silent[:3]),
            *(_source(table, w.rank, w.entry) for w in direct[:2]),
        ],
        time=_seconds(wait.entry),
    )


def _circle(table: Table, waits: list[RankWait], roots: Roots) -> Finding:
    inside = [w for w in waits if w.rank in roots.circle and set(w.missing) & set(roots.circle)]
    where: dict[tuple[str, int], list[RankWait]] = {}
    for wait in inside:
        where.setdefault((wait.group.name, wait.entry.seq), []).append(wait)
    sides = sorted(where.values(), key=len)
    is_clear = len(sides) > 1 and len(sides[0]) < len(sides[-1])
    odd = tuple(wait.rank for wait in sides[0]) if is_clear else roots.circle
    what = "; ".join(f"{name_ranks([w.rank for w in s])} in {s[0].what()}" for s in sides[:4])
    return Finding(
        class_="op-mismatch",
        confidence=Confidence.LIKELY,
        sentence=f"Ranks wait for each other in different collectives: {what}",
        ranks=sorted(odd)[:_NAMED],
        evidence=[_source(table, w.rank, w.entry) for side in sides[:4] for w in side[:2]],
        time=_seconds(sides[0][0].entry),
    )


def _num_waiting(waits: list[RankWait]) -> str:
    ranks = {wait.rank for wait in waits if wait.missing}
    groups = {wait.group.name for wait in waits if wait.missing}
    told = "1 rank waits" if len(ranks) == 1 else f"{len(ranks)} ranks wait"
    return told if len(groups) < 2 else f"{told} in {len(groups)} groups"


# --------------------------------------------------------------------------------------------
# Late, or nothing to tell
# --------------------------------------------------------------------------------------------


def _straggler(table: Table, late: Late) -> Finding:
    before = f"; before it was in {_brief(late.previous)}" if late.previous else ""
    return Finding(
        class_="straggler",
        confidence=Confidence.LIKELY,
        sentence=(
            f"Rank {late.rank} came {late.late_s:.1f} s after all others to {late.entry.op}"
            f" {late.entry.seq} of {late.group.title()} (time-out"
            f" {late.entry.timeout_ms / 1e3:g} s){before}"
        ),
        ranks=[late.rank],
        evidence=[
            _source(table, rank, late.group.ops[rank][late.entry.seq])
            for rank in (late.rank, *[r for r in late.group.members if r != late.rank][:2])
        ],
        time=_seconds(late.entry),
    )


def _undetermined(table: Table, roots: Roots) -> list[Finding]:
    joined = sorted(roots.joined, key=lambda wait: wait.entry.created_ns)
    view, entry = (joined[0].group, joined[0].entry) if joined else _newest_shared(table)
    if view is None or entry is None:
        return []
    at_it = {} if entry.is_p2p else _launched(view, entry.seq)
    ended = [rank for rank, other in at_it.items() if other.is_complete()]
    who = "Both sides" if entry.is_p2p else f"All {len(view.members)} members"
    sentence = (
        f"{who} launched {entry.op} {entry.seq} of {view.title()}"
        + _ending(entry, ended)
        + ": the dumps name no rank; look at network, GPUs and their drivers"
    )
    return [
        Finding(
            class_="all-launched-none-completed",
            confidence=Confidence.UNDETERMINED,
            sentence=sentence,
            evidence=[_source(table, rank, other) for rank, other in list(at_it.items())[:3]],
            time=_seconds(entry),
        )
    ]


def _launched(view: GroupView, seq: int) -> dict[int, Entry]:
    return {rank: ops[seq] for rank, ops in sorted(view.ops.items()) if seq in ops}


def _ending(entry: Entry, ended: Sequence[int]) -> str:
    if not tells_state(entry):
        return ", and this backend does not record who completed it"
    return f", {name_ranks(ended)} completed it" if ended else " and none completed it"


def _newest_shared(table: Table) -> tuple[GroupView | None, Entry | None]:
    """Return the newest last operation of a rank whose recorder does not tell if it is complete."""
    newest: tuple[GroupView | None, Entry | None] = (None, None)
    for view in table.groups:
        for rank, ops in view.ops.items():
            entry = table.dumps[rank].entries[-1]
            if tells_state(entry) or ops.get(entry.seq) != entry:
                continue
            if newest[1] is None or entry.created_ns > newest[1].created_ns:
                newest = (view, entry)
    return newest


# --------------------------------------------------------------------------------------------
# Words
# --------------------------------------------------------------------------------------------


def name_ranks(ranks: Sequence[int]) -> str:
    """Write ranks for people: `rank 3`, `ranks 0-2,5`, `600 ranks (0-3,...)`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in spans]
    if len(texts) <= 6:
        return "ranks " + ",".join(texts)
    return f"{len(ranks)} ranks ({','.join(texts[:4])},...)"


def _source(table: Table, rank: int, entry: Entry) -> Source:
    return Source(table.dumps[rank].file, 0, f"rank {rank}: {entry.describe()}")


def _last_source(table: Table, rank: int) -> Source:
    dump = table.dumps[rank]
    if not dump.entries:
        return Source(dump.file, 0, f"rank {rank}: no operation recorded")
    return Source(dump.file, 0, f"rank {rank}: its last: {dump.entries[-1].describe()}")


def _silent_source(table: Table, rank: int) -> Source:
    neighbour = next(iter(table.dumps.values())).file
    return Source(neighbour, 0, f"rank {rank}: {table.silent[rank]}, {len(table.dumps)} others did")


def _seconds(entry: Entry) -> float | None:
    return entry.created_ns / 1e9 if entry.created_ns > 0 else None
