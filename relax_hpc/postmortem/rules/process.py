"""Exceptions, exits and stacks of single processes."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.facts import Facts
from relax_hpc.postmortem.rules.proposal import (
    ESTABLISHED,
    LIKELY,
    UNDETERMINED,
    Proposal,
    name_ranks,
    propose,
)

_ECHO_TYPES = frozenset(
    (
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "ChildFailedError",
        "ConnectionResetError",
        "BrokenPipeError",
        "ConnectionRefusedError",
        "ConnectionAbortedError",
        "EOFError",
        "KeyboardInterrupt",
        "SystemExit",
        "RayActorError",
        "ActorDiedError",
        "ProcessExitedException",
        "WorkerCrashedError",
        "SignalException",
        "ncclUnhandledCudaError",
        "ncclSystemError",
        "ncclRemoteError",
        "ncclInternalError",
        "ncclInvalidUsage",
        "RayTaskError",
        "RendezvousTimeoutError",
        "RendezvousConnectionError",
        "UncompletedJobError",
        "FailedJobError",
        "CalledProcessError",
        "EngineDeadError",
        "GeneratorExit",
        "StopIteration",
        "CancelledError",
    )
)
_ECHO_WORDS = re.compile(
    r"NCCL|ProcessGroup|Watchdog|[Gg]loo|Connection (?:closed|reset|refused)|"
    r"Socket Timeout|Broken (?:pipe|promise)|"
    r"TCPStore|collective|CUDA error|CUDA out of memory|process group|"
    r"store based barrier|device-side|"
    r"terminated with|died|EngineCore|unhandled cuda error|clients joined|"
    r"Timed out waiting|monitoredBarrier"
)


def is_echo(event: Event) -> bool:
    """Whether an exception only says that somebody else failed (or another rule knows better)."""
    kind, message = str(event.attrs.get("type", "")), str(event.attrs.get("message", ""))
    return kind in _ECHO_TYPES or kind.endswith("Warning") or bool(_ECHO_WORDS.search(message))


def exceptions(facts: Facts) -> Iterator[Proposal]:
    """The first exception that is not an echo, of a rank that does not wait itself."""
    waiting = {rank for group in facts.groups.values() for rank in group.waiters}
    own = [e for e in facts.of(EventKind.EXCEPTION) if not is_echo(e)]
    roots = [e for e in own if facts.rank(e) not in waiting or facts.rank(e) is None]
    if not roots:
        return
    solid = [e for e in roots if e.attrs.get("traceback")] or roots
    first = solid[0]
    same = [e for e in solid if e.attrs.get("type") == first.attrs.get("type")]
    ranks = sorted({r for e in same if (r := facts.rank(e)) is not None})
    everywhere = len(ranks) > 1
    words = f"{first.attrs.get('type')}: {first.attrs.get('message')}".rstrip(": ")
    cause = not facts.hung() or (first.attrs.get("traceback") and not facts.after_hang(first))
    sure = (
        cause and first.attrs.get("traceback") and len(ranks) == 1 and _is_last_word(facts, first)
    )
    yield propose(
        45 if cause else 74,
        "python-exception",
        ESTABLISHED if sure else LIKELY,
        f"{name_ranks(ranks).capitalize() if ranks else 'A process'} raised {words[:160]}"
        + ("; the others waited for it." if facts.hung() and not everywhere else "."),
        events=same,
        ranks=ranks,
    )


def _is_last_word(facts: Facts, event: Event) -> bool:
    """Whether that rank says nothing after it but that it ends: nobody caught the exception."""
    rank, after = facts.rank(event), False
    for other in facts.events:
        if other is event:
            after = True
        elif after and facts.rank(other) == rank and other.kind not in _ENDINGS:
            return False
    return True


_ENDINGS = frozenset(
    {EventKind.EXCEPTION, EventKind.PROCESS_EXIT, EventKind.CONFIG_NOTE, EventKind.SCHEDULER}
)

_CRASH = re.compile(
    r"segmentation|segv|sigabrt|aborted|signal (?:6|11)\b|illegal instruction|sigill|"
    r"fatal python|sigfpe|floating",
    re.I,
)
_BUS = re.compile(r"bus error|sigbus|signal 7\b", re.I)
_VICTIM = re.compile(
    r"terminated|sigterm|interrupt|hangup|signal (?:15|2|1)\b|exit code (?:-15|143)|user defined",
    re.I,
)
_KILLED = re.compile(r"\bkilled|sigkill|signal 9\b|exit code (?:-9|137)", re.I)


def exits(facts: Facts) -> Iterator[Proposal]:
    """Who ended first. torchrun's `Root Cause` is only the first exit it saw."""
    found = [e for e in facts.of(EventKind.PROCESS_EXIT) if not _VICTIM.search(_end(e))]
    if not found:
        return
    late = facts.hung()
    crashed = [
        e
        for e in found
        if _CRASH.search(_end(e)) or e.attrs.get("exit_code") in (-11, -6, -4, -8, 139, 134, 132)
    ]
    bus = [e for e in found if _BUS.search(_end(e)) or e.attrs.get("exit_code") in (-7, 135)]
    if bus:
        ranks, nodes = _who(facts, bus)
        yield propose(
            34 if not late else 61,
            "bus-error",
            LIKELY,
            f"SIGBUS{_at(ranks, nodes)}: shared memory or a mapped file had no page behind it.",
            events=bus,
            ranks=ranks,
            nodes=nodes,
            alternatives=[
                ("shm-full", "/dev/shm full"),
                ("host-oom", "memory of the cgroup exhausted"),
            ],
        )
    if crashed:
        ranks, nodes = _who(facts, crashed[:1])
        # An abort after a time-out is the watchdog's own end of the process.
        aborted = late and all(
            "abort" in _end(e).lower()
            or e.attrs.get("exit_code") in (-6, 134)
            or facts.after_hang(e)
            for e in crashed
        )
        yield propose(
            90 if aborted else 60,
            "rank-died",
            LIKELY,
            f"A process crashed ({_end(crashed[0])}){_at(ranks, nodes)}.",
            events=crashed,
            ranks=ranks,
            nodes=nodes,
        )
    known = {id(e) for e in crashed + bus}
    rest = [e for e in found if id(e) not in known]
    if rest:
        yield _plain_exit(facts, rest, late)


def _plain_exit(facts: Facts, rest: Sequence[Event], late: bool) -> Proposal:
    roots = [e for e in rest if e.attrs.get("root")]
    first = (roots or _before_terminating(facts, rest) or list(rest))[0]
    ranks, nodes = _who(facts, [first])
    killed = bool(_KILLED.search(_end(first))) or first.attrs.get("exit_code") in (-9, 137)
    few = len(ranks) <= 1
    return propose(
        90 if late else 63,
        "rank-died",
        LIKELY if few and (killed or ranks) else UNDETERMINED,
        f"The first end that is logged: {_end(first)}{_at(ranks, nodes)}; its own log tells why.",
        events=[first, *[e for e in rest if e is not first][:4]],
        ranks=ranks if few else [],
        nodes=nodes if killed and len(nodes) == 1 else [],
        alternatives=[("host-oom", "SIGKILL without another sender is often the OOM killer")]
        if killed
        else [("python-exception", "its traceback is not in these logs")],
    )


def _before_terminating(facts: Facts, exits_: Sequence[Event]) -> list[Event]:
    ends = facts.of(EventKind.SCHEDULER, reason="terminating")
    if not ends:
        return list(exits_)
    position = {id(event): index for index, event in enumerate(facts.events)}
    stop = position[id(ends[0])]
    return [e for e in exits_ if position[id(e)] < stop]


def _end(event: Event) -> str:
    return str(event.attrs.get("end", "")).strip()


def _who(facts: Facts, events: Sequence[Event]) -> tuple[list[int], list[str]]:
    ranks: set[int] = set()
    nodes: list[str] = []
    for event in events:
        tasks = event.attrs.get("tasks", ())
        ranks.update(tasks if isinstance(tasks, tuple) else ())
        if (rank := facts.rank(event)) is not None:
            ranks.add(rank)
        nodes += [n for n in str(event.attrs.get("nodes", "")).split(",") if n] or (
            [event.node] if event.node else []
        )
    return sorted(ranks), list(dict.fromkeys(nodes)) or facts.nodes(sorted(ranks))


def _at(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    text = f" of {name_ranks(ranks)}" if ranks else ""
    return text + (f" on {', '.join(nodes[:4])}" if nodes else "")


# --------------------------------------------------------------------------------------------
# Stacks
# --------------------------------------------------------------------------------------------

_IN_COLLECTIVE = re.compile(
    r"distributed_c10d|distributed/_functional|\b(?:all_reduce|allreduce|broadcast|"
    r"barrier|all_gather|reduce_scatter|recv|send|"
    r"all_to_all|ncclGroupEnd|pncclAllReduce|ncclAllReduce|synchronize|"
    r"cudaStreamSynchronize|cudaDeviceSynchronize|wait_tensor)\b"
)
_LOADER = re.compile(r"torch/utils/data/dataloader|_try_get_data|multiprocessing/queues|_next_data")
_CHECKPOINT = re.compile(r"checkpoint|torch/serialization|save_|distributed/checkpoint", re.I)


def stacks(facts: Facts) -> Iterator[Proposal]:
    """Cluster stacks: the odd one out is the process that is in no collective."""
    seen = [e for e in facts.of(EventKind.PHASE) if e.attrs.get("stack")]
    if len(seen) < 3:
        return
    inside = [
        e for e in seen if _IN_COLLECTIVE.search(" < ".join(str(e.attrs["stack"]).split(" < ")[:4]))
    ]
    known = {id(e) for e in inside}
    outside = [e for e in seen if id(e) not in known]
    if not inside or not outside or len(outside) * 3 > len(seen):
        return
    text = str(outside[0].attrs["stack"])
    loader = all(_LOADER.search(str(e.attrs["stack"])) for e in outside)
    name = (
        "dataloader-deadlock"
        if loader
        else "straggler"
        if _CHECKPOINT.search(text)
        else "host-code-hang"
    )
    who = ", ".join(f"pid {e.pid}" + (f" on node {e.node}" if e.node else "") for e in outside[:4])
    yield propose(
        25,
        name,
        LIKELY if len(outside) > 1 or not loader else ESTABLISHED,
        f"{who}: the only stack outside of a collective ({text.split(' < ')[0]} ...); "
        f"the other {len(inside)} wait for it.",
        events=outside,
        ranks=[r for e in outside if (r := facts.rank(e)) is not None],
        nodes=[e.node for e in outside if e.node],
    )


_PIPELINE = re.compile(
    r"_pp_|pipeline|pp_receive|p2p_communication|recv_forward|recv_backward|"
    r"send_forward|/pipe/|prev_stage|irecv_tensor_dict|recv_tensor_dict",
    re.I,
)


def failed_stack(facts: Facts) -> Iterator[Proposal]:
    """`Stack trace of the failed collective`: what the reporter waits in."""
    found = [e for e in facts.notes("failed-stack") if _PIPELINE.search(str(e.attrs["stack"]))]
    if not found:
        return
    top = str(found[0].attrs["stack"]).split(" < ")
    yield propose(
        72,
        "pp-broadcast-wait",
        UNDETERMINED,
        f"A pipeline stage waits in {top[0].split(' ')[0]} for data of another stage; "
        f"the reporter is not the culprit.",
        events=found,
        alternatives=[
            ("missing-rank", "the source stage did not come"),
            ("rank-died", "the source stage ended"),
        ],
    )


def version_bug(facts: Facts) -> Iterator[Proposal]:
    """A report about a silent wedge of one NCCL version on clean hardware."""
    wedges = facts.notes("wedge")
    versions = facts.notes("nccl-version")
    blamed = Counter(str(e.attrs["version"]) for e in versions if e.attrs.get("blamed"))
    if len(wedges) >= 2 and blamed:
        best = blamed.most_common(1)[0][0]
        yield propose(
            26,
            "nccl-version-bug",
            LIKELY,
            f"NCCL {best} wedges silently while the hardware is clean; a lag of one "
            f"rank in RAS does not make it guilty.",
            events=[*[e for e in versions if e.attrs.get("blamed")], *wedges[:4]],
            alternatives=[("ras-mismatch", "one rank behind: hardware of that rank")],
        )


RULES = (exceptions, exits, stacks, failed_stack, version_bug)
