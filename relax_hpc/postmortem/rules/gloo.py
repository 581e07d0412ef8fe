"""Gloo from text alone: every rank complains but the one that did not come.

    rank 0  Timed out waiting 4000ms for recv operation         waited until the time-out
    rank 1  (nothing)                                           <- silent: dead, stopped or busy
    rank 2  Connection closed by peer [10.0.0.7]:54695          lost a peer that ended before

A rank that came after the time-out of the others finds their connections closed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.facts import Facts, phase_words
from relax_hpc.postmortem.rules.process import is_echo
from relax_hpc.postmortem.rules.proposal import (
    LIKELY,
    UNDETERMINED,
    Proposal,
    name_ranks,
    propose,
)

_ORDER = 70


def _by_rank(facts: Facts, kind: EventKind, **attrs: object) -> dict[int, Event]:
    """First event of each rank."""
    found: dict[int, Event] = {}
    for event in facts.of(kind, by="gloo", **attrs):
        rank = facts.rank(event)
        if rank is not None:
            found.setdefault(rank, event)
    return found


def waits(facts: Facts) -> Iterator[Proposal]:
    """Time-outs and lost peers: who is silent, late, or called something else."""
    timed_out = _by_rank(facts, EventKind.COLLECTIVE_TIMEOUT)
    lost = _by_rank(facts, EventKind.PEER_LOST)
    sizes = _by_rank(facts, EventKind.COLLECTIVE_MISMATCH)
    if sizes:
        return
    if not timed_out and not lost:
        yield from _nameless(facts)
        return
    raised = facts.of(EventKind.EXCEPTION)
    if any(not is_echo(e) and facts.rank(e) not in {*timed_out, *lost, None} for e in raised):
        return  # that rank has its own story, and the others waited for it
    told = {facts.rank(event) for event in raised} | {*timed_out, *lost}
    silent = sorted((_ranks(facts) | _gaps(told)) - told)
    events = [*timed_out.values(), *lost.values()]
    if broken := [rank for rank, event in lost.items() if event.attrs.get("where") == "listener"]:
        yield _broken(broken, events)
    elif silent:
        yield _silent(facts, silent, timed_out, lost)
    elif odd := _odd_operation(timed_out | lost):
        yield _other(facts, odd, timed_out | lost)
    elif timed_out and lost:
        yield _late(facts, timed_out, lost)
    else:
        yield propose(
            78,
            "all-ranks" if timed_out else "network-lost",
            UNDETERMINED,
            f"{name_ranks([*timed_out, *lost]).capitalize()} failed in gloo and no rank that is"
            " known was silent; the text does not tell who came first.",
            events=events,
        )


def _nameless(facts: Facts) -> Iterator[Proposal]:
    """A time-out without any rank: somebody waited, nobody knows who or for whom."""
    found = facts.of(EventKind.COLLECTIVE_TIMEOUT, by="gloo")
    if found:
        yield propose(
            78,
            "missing-rank",
            UNDETERMINED,
            "A process waited in gloo until the time-out; the text names neither it nor its peer"
            f"{phase_words(facts)}.",
            events=found,
            alternatives=[("straggler", "a long phase on the host of the peer")],
        )


def _ranks(facts: Facts) -> set[int]:
    """Ranks that must have existed: of files named after ranks, and by the world size."""
    return set(facts.rank_files) | set(range(facts.world or 0))


def _gaps(told: set[int | None]) -> set[int]:
    ranks = {rank for rank in told if rank is not None}
    return set(range(max(ranks, default=-1))) - ranks if len(ranks) > 1 else set()


def _broken(ranks: Sequence[int], events: Sequence[Event]) -> Proposal:
    return propose(
        _ORDER,
        "network-lost",
        LIKELY,
        f"The sockets of {name_ranks(ranks)} itself broke (accept failed); the others lost it.",
        events=events,
        ranks=ranks,
        alternatives=[("remote-crash", "its process ended for another reason")],
    )


def _silent(
    facts: Facts, silent: Sequence[int], timed_out: dict[int, Event], lost: dict[int, Event]
) -> Proposal:
    """Time-outs first: it hangs. Only closed connections: it died."""
    hangs = bool(timed_out)
    few = len(silent) <= max(1, (len(timed_out) + len(lost)) // 2)
    first = next(iter((timed_out or lost).values()))
    where = f" in {first.op}" if first.op else ""
    ending = "it hangs, was stopped, or died" if hangs else "it ended first"
    return propose(
        # That it ended is more than a dump that is not there can tell.
        _ORDER if hangs or len(silent) > 1 else _ORDER - 2,
        "missing-rank" if hangs else "rank-died",
        LIKELY if few else UNDETERMINED,
        f"{name_ranks(silent).capitalize()} said nothing while {name_ranks([*timed_out, *lost])}"
        f" {'waited' if hangs else 'lost a peer'}{where}: {ending}.",
        events=[*timed_out.values(), *lost.values()],
        ranks=silent if few else [],
        nodes=facts.nodes(silent) if few else [],
        alternatives=[("rank-died", "a process that was killed says nothing, too")]
        if hangs
        else [("network-lost", "the path to it broke while the process lived")],
    )


def _odd_operation(events: dict[int, Event]) -> list[int]:
    """Return the only ranks that failed in another collective, if they are few."""
    ops = {rank: event.op for rank, event in events.items() if event.op}
    count = Counter(ops.values())
    if len(count) != 2 or len(ops) < 2:
        return []
    (_, many), (odd, few) = count.most_common()
    if many == few:
        return sorted(ops) if few == 1 else []
    return sorted(rank for rank, op in ops.items() if op == odd) if few == 1 else []


def _other(facts: Facts, odd: Sequence[int], events: dict[int, Event]) -> Proposal:
    calls = ", ".join(f"rank {rank}: {events[rank].op}" for rank in sorted(events)[:8])
    return propose(
        _ORDER,
        "op-mismatch",
        LIKELY,
        f"Ranks failed in different collectives ({calls}); {name_ranks(odd)} called another one.",
        events=[*[events[rank] for rank in odd], *events.values()],
        ranks=odd,
        nodes=facts.nodes(odd),
        alternatives=[("missing-rank", "the collectives belong to different groups")],
    )


def _late(facts: Facts, timed_out: dict[int, Event], lost: dict[int, Event]) -> Proposal:
    """Who finds connections closed after others timed out came late (or waited for those)."""
    few = len(lost) <= 2
    timeout = next(iter(timed_out.values())).timeout_s
    limit = f" of {timeout:g} s" if timeout else ""
    return propose(
        _ORDER,
        "straggler",
        LIKELY if few else UNDETERMINED,
        f"{name_ranks([*lost]).capitalize()} came after the time-out{limit} of"
        f" {name_ranks([*timed_out])} and found their connections closed.",
        events=[*lost.values(), *timed_out.values()],
        ranks=sorted(lost) if few else [],
        nodes=facts.nodes(lost) if few else [],
        alternatives=[("missing-rank", "it waited itself, with a longer time-out")],
    )


def sizes(facts: Facts) -> Iterator[Proposal]:
    """Received more than expected: the receiver or its neighbour in the ring has the odd size.

    In gloo's ring a rank receives from the next one. A rank with more than the others makes its
    receiver fail; a rank with less fails itself.
    """
    found = _by_rank(facts, EventKind.COLLECTIVE_MISMATCH)
    if not found:
        return
    receiver, event = next(iter(found.items()))
    ranks = sorted(_ranks(facts) | {r for e in facts.events if (r := facts.rank(e)) is not None})
    after = ranks[(ranks.index(receiver) + 1) % len(ranks)]
    lost = _by_rank(facts, EventKind.PEER_LOST)
    resets = [rank for rank, other in lost.items() if "reset" in str(other.attrs.get("reason"))]
    senders = [after] if after in resets or not resets else resets
    senders = _elsewhere(lost, senders) or senders
    named = sorted({receiver, *senders})
    yield propose(
        _ORDER,
        "size-mismatch",
        LIKELY if len(named) <= 3 else UNDETERMINED,
        f"Rank {receiver} received {event.attrs.get('got')} bytes where it expected"
        f" {event.attrs.get('want')}: it or the sender ({name_ranks(senders)}) has another size,"
        " type or number of collectives than the other ranks.",
        events=[event, *facts.of(EventKind.PEER_LOST, by="gloo")],
        ranks=named if len(named) <= 3 else [],
        alternatives=[
            ("dtype-mismatch", "another type has another number of bytes"),
            ("op-mismatch", "a rank that skipped a collective is in the next one"),
        ],
    )


def _elsewhere(lost: dict[int, Event], senders: Sequence[int]) -> list[int]:
    """Return the only sender that failed in another line of the program than most ranks."""
    sites = {rank: str(event.attrs.get("site")) for rank, event in lost.items()}
    (usual, number), *_ = Counter(sites.values()).most_common(1) or [("", 0)]
    odd = [rank for rank in senders if number > 1 and sites.get(rank, usual) != usual]
    return odd if len(odd) == 1 else []


RULES = (sizes, waits)
