"""What reports say by themselves: fingerprints, desync, dump signals, heartbeats, NCCL RAS."""

from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.facts import Facts
from relax_hpc.postmortem.rules.collective import odd_ones
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


def after_success(facts: Facts) -> Iterator[Proposal]:
    """The program says that it is done, and only then a collective times out."""
    finished = [e for e in facts.phases if e.attrs.get("phase") == "finished"]
    late = facts.of(EventKind.COLLECTIVE_TIMEOUT) + facts.of(EventKind.DUMP_SIGNAL)
    if not finished or not late or facts.after_hang(finished[-1]):
        return
    yield propose(
        67,
        "teardown-after-success",
        LIKELY,
        "The program said it was done before any collective timed out: what hung is the end "
        "(barrier, last evaluation, releasing resources); the work itself is there.",
        events=[finished[-1], *late],
        alternatives=[("missing-rank", "a rank that had not finished yet")],
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


RULES = (fingerprints, reports, frozen_watchdog, after_success, signals, heartbeats, ras)
