"""Who is behind in which collective of which group; never across groups, never the reporters.

Inside one group every rank's oldest unfinished operation is compared:
    one rank alone, the others idle one behind   -> it started an extra operation
    same number, other operation/size            -> mismatch; odd one out by majority
    other numbers                                -> the minority behind (or ahead with another op)
    same number, some members silent             -> the silent ones are missing
    same number everywhere                       -> undetermined: network, GPU, or someone absent
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.facts import Facts, GroupState, Waiter, phase_words
from relax_hpc.postmortem.rules.proposal import (
    LIKELY,
    UNDETERMINED,
    Proposal,
    name_ranks,
    propose,
)

_UNEVEN = frozenset(
    {"alltoall", "alltoall_base", "gather", "scatter", "send", "recv", "allgather", "unknown", ""}
)
"""Operations whose sizes may differ between ranks."""

_ROOTED = frozenset({"broadcast", "gather", "scatter", "reduce"})
_POINT = frozenset({"coalesced", "send", "recv"})


def odd_ones(values: Mapping[int, object]) -> list[int]:
    """Ranks whose value differs from the majority's; all of them if there is no majority."""
    count = Counter(values.values())
    (best, number), *rest = count.most_common()
    if not rest:
        return []
    if rest[0][1] == number:
        return sorted(values)
    return sorted(rank for rank, value in values.items() if value != best)


def waits_nowhere(facts: Facts) -> Iterator[Proposal]:
    """The sink of the wait-for graph: all wait in some group but the one they wait for."""
    stuck = [state for state in facts.groups.values() if state.waiters and state.is_known]
    waiting = {rank for state in stuck for rank in state.waiters}
    if len(stuck) < 2 or len(waiting) < 3 or facts.notes("cut-off"):
        return
    known = set(range(max(waiting) + 1)) | set(range(facts.world or 0)) | set(facts.rank_files)
    known |= {event.rank for event in facts.events if event.rank is not None}
    free = sorted(known - waiting)
    if not free or len(free) * 3 > len(waiting):
        return
    yield propose(
        69,
        "missing-rank",
        LIKELY,
        f"{name_ranks(free).capitalize()} waits in no group, all others do "
        f"({len(stuck)} groups): they wait for it, directly or through each other.",
        events=[event for state in stuck for event in _events(state)[:2]],
        ranks=free,
        nodes=facts.nodes(free) if len(free) <= 2 else [],
        alternatives=[("rank-died", "its process ended, or its log is missing")],
    )


def groups(facts: Facts) -> Iterator[Proposal]:
    """Compare the ranks of each group; the wait-for graph orders the groups."""
    roots = _roots(facts)
    for state in facts.groups.values():
        found = next(_of_group(facts, state), None)
        if found is not None:
            if state.uid not in roots:
                found.order += 5
            yield found


def _of_group(facts: Facts, state: GroupState) -> Iterator[Proposal]:
    if not state.waiters:
        return
    for rule in (_extra_op, _mismatch, _behind, _first_point_to_point, _missing, _same_place):
        yield from rule(facts, state)


def _roots(facts: Facts) -> set[str]:
    """Groups whose missing member does not wait in another group: the roots of the cascade."""
    waiting = {rank: state.uid for state in facts.groups.values() for rank in state.waiters}
    roots = set()
    for state in facts.groups.values():
        silent = set(state.observers) | set(state.idle)
        if not state.waiters:
            continue
        elsewhere = [rank for rank in silent if waiting.get(rank, state.uid) != state.uid]
        if not elsewhere or len(elsewhere) < len(silent):
            roots.add(state.uid)
    return roots or {state.uid for state in facts.groups.values()}


def _events(state: GroupState, ranks: Sequence[int] | None = None) -> list[Event]:
    chosen = (
        state.waiters
        if ranks is None
        else {r: state.waiters[r] for r in ranks if r in state.waiters}
    )
    return [event for waiter in chosen.values() for event in waiter.events[:3]]


def _what(state: GroupState, waiter: Waiter) -> str:
    number = f" #{waiter.seq}" if waiter.seq is not None else ""
    return f"{waiter.op or 'operation'}{number} of {state.label()}"


def _extra_op(facts: Facts, state: GroupState) -> Iterator[Proposal]:
    if len(state.waiters) != 1 or not state.idle:
        return
    (waiter,) = state.waiters.values()
    idle = [e.enqueued for e in state.idle.values()]
    if waiter.enqueued is None or any(number != waiter.enqueued - 1 for number in idle):
        return
    if len(idle) < 2 and (facts.world or 2) > 2:
        return
    yield propose(
        70,
        "extra-op",
        LIKELY,
        f"Rank {waiter.rank} alone started {_what(state, waiter)}; "
        f"{name_ranks(sorted(state.idle))} finished the one before "
        "and know no more.",
        events=_events(state) + list(state.idle.values()),
        ranks=[waiter.rank],
        nodes=facts.nodes([waiter.rank]),
        alternatives=[("missing-rank", "if the others stopped early instead")],
    )


def _mismatch(facts: Facts, state: GroupState) -> Iterator[Proposal]:
    places: dict[int | None, list[Waiter]] = defaultdict(list)
    for waiter in state.waiters.values():
        places[waiter.seq].append(waiter)
    for seq, waiters in places.items():
        if (
            seq is None
            or len(waiters) < 2
            or not (state.is_known or len(places) == 1)
            or _is_mixed(state, waiters)
        ):
            continue
        ops: dict[int, object] = {w.rank: w.op for w in waiters if w.op}
        if len(set(ops.values())) > 1 and state.is_known:
            odd = odd_ones(ops)
            words = ", ".join(f"rank {rank}: {ops[rank]}" for rank in sorted(ops)[:6])
            yield propose(
                70,
                "op-mismatch",
                LIKELY,
                f"Different operations at #{seq} of {state.label()} ({words}).",
                events=_events(state, sorted(ops)),
                ranks=odd,
                nodes=facts.nodes(odd) if len(odd) == 1 else [],
                alternatives=[("missing-rank", "one side may have skipped an operation before")],
            )
            return
        sizes: dict[int, object] = {
            w.rank: (w.num_in, w.num_out)
            for w in waiters
            if w.num_in is not None and w.num_out is not None
        }
        if (
            len(set(sizes.values())) > 1
            and waiters[0].op not in _UNEVEN
            and len(set(ops.values())) == 1
        ):
            odd = odd_ones(sizes)
            words = ", ".join(f"rank {rank}: {_size(sizes[rank])}" for rank in sorted(sizes)[:6])
            yield propose(
                70,
                "size-mismatch",
                LIKELY,
                f"Different sizes in {waiters[0].op} #{seq} of {state.label()} ({words}).",
                events=_events(state, sorted(sizes)),
                ranks=odd,
                alternatives=[("op-mismatch", "one side may have skipped an operation before")],
            )
            return


def _size(pair: object) -> str:
    return f"{pair[0]} -> {pair[1]} elements" if isinstance(pair, tuple) else str(pair)


def _is_mixed(state: GroupState, waiters: Sequence[Waiter]) -> bool:
    """Old texts number groups per process: one id may stand for several groups."""
    places = [w.group_rank for w in waiters if w.group_rank is not None]
    return len(places) > len(set(places))


def _behind(facts: Facts, state: GroupState) -> Iterator[Proposal]:
    """Ranks wait at different numbers of one group."""
    if not state.is_known or _is_mixed(state, list(state.waiters.values())):
        return
    by_seq: dict[int, list[Waiter]] = defaultdict(list)
    for waiter in state.waiters.values():
        if waiter.seq is not None:
            by_seq[waiter.seq].append(waiter)
    if len(by_seq) < 2:
        return
    numbers = sorted(by_seq)
    low, high = by_seq[numbers[0]], [w for n in numbers[1:] for w in by_seq[n]]
    if len(low) < len(high):
        chosen, name, words = (
            low,
            "missing-rank",
            "behind: it has not come to what the others wait in",
        )
    elif len(high) < len(low) and {w.op for w in high} != {w.op for w in low}:
        chosen, name, words = (
            high,
            "op-mismatch",
            "ahead with another operation: its control flow forked there",
        )
    elif len(high) < len(low):
        chosen, name, words = [], "missing-rank", "the majority is behind: it waits elsewhere"
    else:
        chosen, name, words = (
            low + high,
            "op-mismatch",
            "at different operations, without a majority",
        )
    ranks = [w.rank for w in chosen]
    places = ", ".join(
        f"{name_ranks([w.rank for w in by_seq[n]])} at #{n} {by_seq[n][0].op}" for n in numbers[:5]
    )
    yield propose(
        70,
        name,
        LIKELY if chosen and len(chosen) < len(state.waiters) else UNDETERMINED,
        f"{name_ranks(ranks).capitalize() if ranks else 'Nobody is clearly guilty'}: {words} "
        f"({state.label()}: {places}).",
        events=_events(state),
        ranks=ranks,
        nodes=facts.nodes(ranks) if len(ranks) <= 2 else [],
        alternatives=[("straggler", "the rank behind may only be slow")],
    )


def _first_point_to_point(facts: Facts, state: GroupState) -> Iterator[Proposal]:
    waiters = list(state.waiters.values())
    if state.is_default or any(w.op not in _POINT or w.seq not in (0, 1) for w in waiters):
        return
    if any(w.num_in for w in waiters):  # a coalesced collective with data is no send/recv
        return
    origin = sorted(
        {
            int(str(e.attrs["from_rank"]))
            for e in facts.of(EventKind.DUMP_SIGNAL)
            if "from_rank" in e.attrs
        }
    )
    reporters = [w.rank for w in waiters]
    yield propose(
        70,
        "p2p-first-use",
        UNDETERMINED,
        f"The first send/receive of {state.label()} never paired "
        f"on {name_ranks(reporters)}; look at its pipeline peer"
        + (f" and at {name_ranks(origin)}, who signalled first." if origin else "."),
        events=_events(state) + facts.of(EventKind.DUMP_SIGNAL)[:4],
        alternatives=[
            ("missing-rank", "the peer stage is busy elsewhere"),
            ("network-config", "the new connection cannot be made"),
        ],
    )


def _missing(facts: Facts, state: GroupState) -> Iterator[Proposal]:
    """The members that do not report: observers, idle ones, gaps in the numbering."""
    seqs = {w.seq for w in state.waiters.values() if w.seq is not None}
    if len(seqs) > 1 and not state.is_known:
        return
    if all(w.seq is None for w in state.waiters.values()):
        return
    waiter = next(iter(state.waiters.values()))
    behind = [
        r
        for r, e in state.idle.items()
        if e.enqueued is not None and e.enqueued < (waiter.seq or 0)
    ]
    silent = sorted(set(behind) | set(state.observers))
    if silent and len(silent) <= max(len(state.waiters), 1):
        yield propose(
            70,
            "missing-rank",
            LIKELY,
            f"{name_ranks(silent).capitalize()} never came to {_what(state, waiter)}, "
            f"in which {name_ranks(sorted(state.waiters))} wait.",
            events=_events(state)
            + [e for r, e in (state.idle | state.observers).items() if r in silent],
            ranks=silent,
            nodes=facts.nodes(silent) if len(silent) <= 2 else [],
            alternatives=[
                ("straggler", "a long phase on that rank"),
                ("rank-died", "its own log is missing"),
            ],
        )
        return
    yield from _gaps(facts, state, waiter)


def _gaps(facts: Facts, state: GroupState, waiter: Waiter) -> Iterator[Proposal]:
    """Ranks 0..n without some: fair only if numbers are global and few are missing."""
    reporters = set(state.waiters) | set(state.signalled)
    seen = reporters | set(facts.vague)
    if any(w.group_rank is not None and w.group_rank != w.rank for w in state.waiters.values()):
        return
    whole = facts.world if state.is_default and facts.world else None
    size = max(seen) + 1 if whole is None or whole <= max(seen) else whole
    gap = sorted(set(range(size)) - seen)
    synchronous = all(w.is_synchronous for w in state.waiters.values() if w.enqueued is not None)
    known = any(w.enqueued is not None for w in state.waiters.values())
    small = waiter.num_in is not None and waiter.num_in <= 1
    if not gap or facts.of(EventKind.RAS, what="row", errors="OK"):
        return
    if facts.notes("cut-off") and gap[-1] > min(reporters):
        return  # the others may only have been cut off; ranks before all reporters are no accident
    few = len(gap) * 3 <= len(reporters)
    rooted = waiter.op in _ROOTED and len(gap) == 1
    host_waits = known and synchronous
    if (few and (not known or synchronous or len(gap) == 1)) or (rooted and host_waits):
        sure = LIKELY
    elif host_waits and len(gap) <= len(reporters):
        sure = UNDETERMINED
    elif len(gap) > len(reporters) and len(reporters) == 1 and host_waits:
        gap, sure = [], UNDETERMINED
    else:
        return
    phase = phase_words(facts)
    yield propose(
        70,
        "missing-rank",
        sure,
        (
            f"{name_ranks(gap).capitalize()} {'is' if len(gap) == 1 else 'are'} not "
            f"among those who wait in {_what(state, waiter)} "
            f"({name_ranks(sorted(reporters))} wait)"
            if gap
            else f"{name_ranks(sorted(reporters)).capitalize()} waits "
            f"in {_what(state, waiter)} for ranks that are not in the log"
        )
        + (", a barrier-like operation" if small else "")
        + phase
        + ".",
        events=_events(state),
        ranks=gap,
        nodes=facts.nodes(gap) if len(gap) <= 2 else [],
        alternatives=[
            ("straggler", "a long phase (checkpoint, evaluation, rollout) on the missing ranks"),
            ("all-same-seq", "their reports may be cut off"),
        ],
    )


def _same_place(facts: Facts, state: GroupState) -> Iterator[Proposal]:
    """All that report wait in the same operation: no culprit from logs."""
    waiters = list(state.waiters.values())
    first = waiters[0]
    silent = [r for r in facts.vague if r not in state.waiters]
    fine = facts.of(EventKind.RAS, what="row", errors="OK")
    if fine:
        name, words = (
            "all-launched-none-completed",
            "RAS says every rank launched it; launching is not finishing",
        )
    elif all(w.seq is None for w in waiters):
        name, words = (
            "legacy-no-seq",
            "this text has no sequence numbers, so ranks cannot be compared",
        )
    elif len(silent) >= 2 and len(silent) > len(waiters):
        name, words = "all-ranks", f"{name_ranks(silent)} report too, but not where they stand"
    elif any(w.is_blocking for w in waiters):
        name, words = "blocking-wait-same-seq", "nobody is seen behind"
    elif len(waiters) == 1:
        name, words = "missing-rank", "only this rank reports"
    else:
        name, words = "all-same-seq", "nobody is seen behind"
    if len({w.seq for w in waiters}) > 1 and not state.is_known:
        name, words = (
            "all-ranks",
            "their groups are not in the text, so their numbers cannot be compared",
        )
    yield propose(
        73,
        name,
        UNDETERMINED,
        f"{name_ranks([w.rank for w in waiters]).capitalize()} "
        f"wait{'s' if len(waiters) == 1 else ''} in {_what(state, first)}; {words}.",
        events=_events(state) + fine[:2],
        alternatives=[
            ("missing-rank", "ranks whose logs are absent may not have come"),
            ("network-lost", "all joined and the network or a GPU stands still"),
        ],
    )


RULES = (waits_nowhere, groups)
