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
    ESTABLISHED,
    LIKELY,
    UNDETERMINED,
    Proposal,
    name_ranks,
    propose,
)

_FROZEN = 2.0
"""`ran for` this many times the time-out: the watchdog itself did not run."""

_UNEVEN = frozenset(
    {"alltoall", "alltoall_base", "gather", "scatter", "send", "recv", "allgather", "unknown", ""}
)
"""Operations whose sizes may differ between ranks."""

_ROOTED = frozenset({"broadcast", "gather", "scatter", "reduce"})
_POINT = frozenset({"coalesced", "send", "recv"})


def fingerprints(facts: Facts) -> Iterator[Proposal]:
    """DETAIL fingerprints and NCCL's own size check."""
    prints = facts.of(EventKind.COLLECTIVE_MISMATCH, by="fingerprint")
    by_rank: dict[int, Event] = {}
    for event in prints:
        if event.rank is not None:
            by_rank.setdefault(event.rank, event)
    if len(by_rank) >= 2:
        for part, name in (
            ("op", "op-mismatch"),
            ("dtype", "dtype-mismatch"),
            ("shape", "size-mismatch"),
        ):
            values = {
                rank: e.op if part == "op" else str(e.attrs.get(part))
                for rank, e in by_rank.items()
            }
            if len(set(values.values())) > 1:
                odd = odd_ones(values)
                words = ", ".join(f"rank {rank}: {values[rank]}" for rank in sorted(values)[:6])
                yield propose(
                    27,
                    name,
                    ESTABLISHED,
                    f"Ranks disagree about the {part} "
                    f"of {next(iter(by_rank.values())).op} ({words}).",
                    events=list(by_rank.values()),
                    ranks=odd,
                )
                return
    if prints:
        yield propose(
            28,
            "size-mismatch" if not by_rank else "op-mismatch",
            UNDETERMINED,
            "A mismatch between ranks was detected; the other side is not in the log.",
            events=prints,
        )
    truncated = facts.of(EventKind.COLLECTIVE_MISMATCH, by="nccl")
    if truncated:
        yield propose(
            29,
            "size-mismatch",
            LIKELY,
            f"NCCL found different sizes: {truncated[0].attrs.get('what')}.",
            events=truncated,
        )


def odd_ones(values: Mapping[int, object]) -> list[int]:
    """Ranks whose value differs from the majority's; all of them if there is no majority."""
    count = Counter(values.values())
    (best, number), *rest = count.most_common()
    if not rest:
        return []
    if rest[0][1] == number:
        return sorted(values)
    return sorted(rank for rank, value in values.items() if value != best)


def reports(facts: Facts) -> Iterator[Proposal]:
    """PyTorch's desync report, monitored barriers: they name who did not come."""
    for reason, words in (
        ("desync-suspect", "PyTorch's desync report"),
        ("monitored-barrier", "A monitored barrier"),
    ):
        found = facts.of(EventKind.RANK_ABSENT, reason=reason)
        blamed = [e for e in found if "joined but" not in str(e.attrs.get("verb", ""))] or found
        joined = facts.of(EventKind.RANK_ABSENT, reason="desync-joined")
        ranks = sorted({r for e in blamed for r in _tuple(e)})
        if not ranks:
            continue
        waiting = {w for g in facts.groups.values() for w in g.waiters}
        ranks = [r for r in ranks if r not in waiting] or ranks
        yield propose(
            64,
            "missing-rank",
            LIKELY,
            f"{words} names {name_ranks(ranks)}: not in the collective in which the others wait.",
            events=found + joined,
            ranks=ranks,
            nodes=facts.nodes(ranks) if len(ranks) <= 2 else [],
            alternatives=[("op-mismatch", "they may be in another collective")],
        )
        return


def _tuple(event: Event) -> tuple[int, ...]:
    value = event.attrs.get("ranks", ())
    return value if isinstance(value, tuple) else ()


def frozen_watchdog(facts: Facts) -> Iterator[Proposal]:
    """`ran for` far beyond the time-out: the host stood still; numbers prove nothing."""
    late = [
        event
        for event in facts.of(EventKind.COLLECTIVE_TIMEOUT)
        if event.duration_s
        and event.timeout_s
        and event.duration_s > _FROZEN * event.timeout_s + 60
    ]
    if late:
        yield propose(
            65,
            "watchdog-stall",
            UNDETERMINED,
            f"Operations 'ran for' {late[0].duration_s:.0f} s with a time-out "
            f"of {late[0].timeout_s:.0f} s: the watchdog itself "
            "was frozen (job suspended or host stalled).",
            events=late,
            alternatives=[
                ("storage-stall", "storage froze the host"),
                ("job-suspended", "the scheduler suspended the job"),
            ],
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


def signals(facts: Facts) -> Iterator[Proposal]:
    """Only idle groups and dump signals: the stuck group is not in the log."""
    found = facts.of(EventKind.DUMP_SIGNAL)
    origins = sorted({int(str(e.attrs["from_rank"])) for e in found if "from_rank" in e.attrs})
    if not origins or any(state.waiters for state in facts.groups.values()):
        return
    shown = {e.rank for e in found if e.attrs.get("local")} & {
        r for s in facts.groups.values() for r in s.idle
    }
    if shown & set(origins):
        yield propose(
            75,
            "other-pg-decoy",
            UNDETERMINED,
            f"The groups shown are idle (last enqueued = last "
            f"completed); {name_ranks(origins)} signalled first, in a group "
            "that is not in the log.",
            events=found,
            ranks=origins,
            alternatives=[("missing-rank", "in another group of that rank")],
        )
        return
    yield propose(
        75,
        "dump-signal-origin",
        LIKELY if len(origins) == 1 else UNDETERMINED,
        f"{name_ranks(origins).capitalize()} timed out first and asked the others to "
        f"dump; start with its log. "
        "The first process that torchrun saw exit is a consequence.",
        events=found + facts.of(EventKind.PROCESS_EXIT)[:3],
        ranks=origins,
        alternatives=[
            ("missing-rank", "the rank it waited for"),
            ("rank-died", "torchrun's first exit"),
        ],
    )


def heartbeats(facts: Facts) -> Iterator[Proposal]:
    """The watchdog thread stood still."""
    found = facts.of(EventKind.HEARTBEAT)
    if not found or any(state.waiters for state in facts.groups.values()):
        return
    pending = {
        e.rank: int(str(e.attrs["pending"]))
        for e in found
        if "pending" in e.attrs and e.rank is not None
    }
    least = min(pending.values(), default=0)
    behind = sorted(rank for rank, count in pending.items() if count == least)
    if len(set(pending.values())) > 1 and len(behind) * 2 < len(pending):
        yield propose(
            74,
            "missing-rank",
            LIKELY,
            f"{name_ranks(behind).capitalize()} enqueued fewer operations ({least}) "
            f"than the others "
            f"({max(pending.values())}) before all watchdogs stood still.",
            events=found,
            ranks=behind,
            nodes=facts.nodes(behind) if len(behind) <= 2 else [],
            alternatives=[("heartbeat", "a CUDA call or the GIL blocked the watchdogs")],
        )
        return
    yield from _teardown(facts, found)
    yield propose(
        78,
        "heartbeat",
        UNDETERMINED,
        f"The watchdog thread of {name_ranks([e.rank for e in found if e.rank is not None])} "
        "stood still: a CUDA/NCCL "
        "call or the GIL blocked it; the reporter need not be the culprit.",
        events=found,
        alternatives=[
            ("storage-stall", "storage froze the processes"),
            ("missing-rank", "another rank did not come"),
        ],
    )


def _teardown(facts: Facts, found: Sequence[Event]) -> Iterator[Proposal]:
    finished = [e for e in facts.phases if e.attrs.get("phase") == "finished"]
    uids = {e.group.uid for e in found if e.group is not None}
    sub = all(e.group is not None and e.group.name and e.group.name != "default_pg" for e in found)
    if finished:
        yield propose(
            71,
            "teardown-after-success",
            LIKELY,
            "The work was finished; the watchdogs hang while resources are released.",
            events=finished[-1:] + list(found),
            alternatives=[("heartbeat", "a hang in the work itself")],
        )
    elif sub and len(uids) > 1 and not facts.of(EventKind.COLLECTIVE_TIMEOUT):
        yield propose(
            71,
            "teardown-after-success",
            UNDETERMINED,
            "Watchdogs of several sub-groups stood still at once without any "
            "collective that timed out: this fits groups being "
            "destroyed after the work was done. Check whether the results are there.",
            events=found,
            alternatives=[
                ("heartbeat", "a hang in the work itself"),
                ("storage-stall", "the processes were frozen"),
            ],
        )


def ras(facts: Facts) -> Iterator[Proposal]:
    """NCCL RAS: processes it lost, ranks that launched fewer operations."""
    lost = [
        e
        for e in facts.of(EventKind.RAS)
        if e.attrs.get("what") in ("incomplete", "dead") and e.node
    ]
    if lost:
        ranks = [e.rank for e in lost if e.rank is not None]
        nodes = list(dict.fromkeys(e.node for e in lost))
        garbage = facts.of(EventKind.RAS, what="garbage")
        yield propose(
            56,
            "ras-incomplete",
            LIKELY,
            f"RAS has no data of process {lost[0].pid} on {', '.join(nodes[:4])}"
            f"{' (' + name_ranks(ranks) + ')' if ranks else ''}: gone or unreachable"
            + ("; the group without nodes is garbage of RAS itself." if garbage else "."),
            events=lost + garbage,
            ranks=ranks,
            nodes=nodes,
            alternatives=[("network-lost", "only the RAS connection broke")],
        )
    launched = facts.of(EventKind.RAS, what="launched")
    listed = [e for e in facts.of(EventKind.RAS, what="mismatch") if e.rank is not None]
    if len(launched) >= 2 and listed:
        operations = sorted({int(str(e.attrs["operation"])) for e in launched})
        behind = sorted(
            {
                e.rank
                for e in listed
                if e.attrs.get("operation") == operations[0] and e.rank is not None
            }
        )
        ahead = sorted(
            {
                e.rank
                for e in listed
                if e.attrs.get("operation") == operations[-1] and e.rank is not None
            }
        )
        yield propose(
            62 if behind else 73,
            "ras-mismatch",
            LIKELY if behind else UNDETERMINED,
            f"RAS: {name_ranks(behind)} launched up to operation {operations[0]}, the "
            f"others up to {operations[-1]}."
            if behind
            else f"RAS lists the minority ahead ({name_ranks(ahead)}); the majority waits "
            f"elsewhere, so they are not the culprit.",
            events=launched + listed,
            ranks=behind,
            nodes=[e.node for e in listed if e.rank in behind],
            alternatives=[
                ("nccl-version-bug", "a lag of one rank with clean hardware"),
                ("missing-rank", "the rank behind is busy elsewhere"),
            ],
        )


RULES = (fingerprints, reports, frozen_watchdog, groups, signals, heartbeats, ras)
