"""Set-up and scheduler: nothing ran, or somebody ended it."""

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


def _errors(facts: Facts, reason: str) -> list[Event]:
    return facts.of(EventKind.LAUNCHER_ERROR, reason=reason)


def rendezvous(facts: Facts) -> Iterator[Proposal]:
    """Store barriers: too many workers, or too few."""
    for event in facts.of(EventKind.RANK_ABSENT, reason="store-barrier"):
        world, count = int(str(event.attrs["world"])), int(str(event.attrs["count"]))
        if count > world:
            yield propose(
                13,
                "stale-rendezvous",
                LIKELY,
                f"{count} workers met in a store for {world}: two generations of the job share one "
                "rendezvous key or file.",
                events=[event, *facts.of(EventKind.SCHEDULER)],
                alternatives=[
                    ("preemption", "it explains the restart, not the surplus of workers")
                ],
            )
            return
        yield propose(
            43,
            "rendezvous-timeout",
            UNDETERMINED,
            f"Only {count} of {world} workers came to the store barrier; which ones is "
            f"not in this line.",
            events=[event],
            alternatives=[("rank-died", "the missing workers ended before")],
        )
        return
    found = _errors(facts, "rendezvous")
    if found:
        yield propose(
            66,
            "rendezvous-timeout",
            UNDETERMINED,
            f"The rendezvous failed: {found[0].attrs.get('words')}.",
            events=found,
            alternatives=[("store-host-died", "rank 0 ended before the others came")],
        )


def devices(facts: Facts) -> Iterator[Proposal]:
    """Duplicate or invisible GPUs, ports in use, missing variables."""
    found = _errors(facts, "duplicate-gpu")
    if found:
        ranks = [rank for event in found for rank in _tuple(event, "ranks")]
        yield propose(
            35,
            "duplicate-gpu",
            ESTABLISHED,
            f"{name_ranks(ranks).capitalize()} use the same GPU (bus {found[0].attrs.get('bus')}).",
            events=found,
            ranks=ranks,
        )
    for reason, name, order, words in (
        ("port", "port-collision", 41, "The rendezvous port was in use"),
        ("device", "device-ordinal", 36, "A rank cannot see the GPU it asked for"),
        ("environment", "launch-failure", 42, "The launcher did not set a variable"),
    ):
        found = _errors(facts, reason)
        if found:
            ranks = [r for e in found if (r := facts.rank(e)) is not None]
            # Who ran collectives had met; and some programs warn of a port, then take another.
            started = reason == "port" and facts.hung()
            yield propose(
                order + 40 if started else order,
                name,
                ESTABLISHED if reason == "port" and _is_final(facts, found) else LIKELY,
                f"{words}: {found[0].attrs.get('words')}.",
                events=found,
                ranks=ranks,
            )


def _is_final(facts: Facts, found: Sequence[Event]) -> bool:
    """Whether an exception says it, too."""
    raised = " ".join(str(e.attrs.get("message")) for e in facts.of(EventKind.EXCEPTION)).lower()
    words = ("address already in use", "eaddrinuse", "failed to listen", "failed to bind")
    return any(word in raised for word in words)


def _tuple(event: Event, name: str) -> tuple[int, ...]:
    value = event.attrs.get(name, ())
    return value if isinstance(value, tuple) else ()


def leaks(facts: Facts) -> Iterator[Proposal]:
    """Environments inherited from another job or step."""
    bound = _errors(facts, "cpu-bind")
    if bound:
        yield propose(
            37,
            "cpu-bind-env-leak",
            ESTABLISHED,
            "A step inherited the CPU mask of another node or step; the nodes are healthy.",
            events=bound,
        )
    jobs = {str(e.attrs["job"]) for e in facts.of(EventKind.SCHEDULER) if e.attrs.get("job")}
    jobs |= {
        str(e.attrs["step"]).split(".")[0]
        for e in facts.of(EventKind.SCHEDULER)
        if e.attrs.get("step")
    }
    foreign = [e for e in facts.notes("path-job-id") if jobs and e.attrs["job"] not in jobs]
    alike = [e for e in foreign if any(len(str(e.attrs["job"])) == len(job) for job in jobs)]
    if alike:
        yield propose(
            38,
            "env-leak",
            LIKELY,
            f"Job {', '.join(sorted(jobs)[:3])} used a path of "
            f"job {alike[0].attrs['job']}: its environment was "
            "inherited; no node is at fault.",
            events=alike + facts.of(EventKind.PROCESS_EXIT),
            alternatives=[
                ("storage-error", "permissions of that path are wrong for another reason")
            ],
        )


def steps(facts: Facts) -> Iterator[Proposal]:
    """Steps that could not be created or started."""
    created = _errors(facts, "step-create")
    if created:
        yield propose(
            39,
            "step-create-failure",
            ESTABLISHED,
            f"Slurm could not create a step: {created[0].attrs.get('words')}.",
            events=created,
        )
    failed = _errors(facts, "exec")
    if failed:
        nodes = [e.node for e in failed if e.node]
        yield propose(
            44,
            "launch-failure",
            LIKELY,
            f"A task could not be started: {failed[0].attrs.get('words')}.",
            events=failed,
            nodes=nodes,
        )
    busy = _errors(facts, "step-busy")
    if busy and not created and not failed and not facts.hung():
        yield propose(
            86,
            "step-create-failure",
            UNDETERMINED,
            "A step waits for resources that another step holds.",
            events=busy,
        )


def node_failure(facts: Facts) -> Iterator[Proposal]:
    """Slurm lost a node."""
    found = facts.of(EventKind.SCHEDULER, reason="node-failure")
    if not found:
        return
    nodes = [e.node for e in found if e.node] or [
        e.node for e in facts.of(EventKind.SCHEDULER, reason="not-responding") if e.node
    ]
    yield propose(
        14,
        "node-failure",
        ESTABLISHED,
        "Slurm lost "
        + (
            f"node {', '.join(dict.fromkeys(nodes))}."
            if nodes
            else "a node (the line names only the first node of the job)."
        ),
        events=found,
        nodes=nodes,
    )


_ENDS = (
    (
        "requeue",
        "requeue",
        "The job was requeued; exits after that are consequences, not failures.",
    ),
    (
        "preemption",
        "preemption",
        "The job was preempted; exits after that are consequences, not failures.",
    ),
    ("time-limit", "time-limit", "The job reached its time limit."),
    ("suspended", "job-suspended", "The job was suspended."),
)


def ending(facts: Facts) -> Iterator[Proposal]:
    """Requeue, preemption, time limit, cancel: the cause only if nothing failed before."""
    scheduler = facts.of(EventKind.SCHEDULER)
    for reason, name, sentence in _ENDS:
        found = [e for e in scheduler if e.attrs.get("reason") == reason]
        if found:
            early = not _failed_before(facts, found[0])
            yield propose(
                15 if early else 80,
                name,
                ESTABLISHED if early else LIKELY,
                sentence,
                events=_with_signals(facts, found),
                alternatives=[
                    ("missing-rank", "a hang that nobody reported: see the last progress")
                ]
                if name == "time-limit"
                else [],
            )
            return
    yield from _announced(scheduler)
    cancelled = [e for e in scheduler if e.attrs.get("reason") in ("cancelled", "signal")]
    tasks = [e for e in scheduler if e.attrs.get("reason") == "task-failure"]
    if tasks:
        yield propose(
            83, "rank-died", UNDETERMINED, "A task failed and Slurm ended the step.", events=tasks
        )
    if not cancelled or tasks:
        return
    early = not _failed_before(facts, cancelled[0])
    bypassed = [e for e in scheduler if str(e.attrs.get("reason")).startswith("signal-")]
    yield propose(
        16 if early else 81,
        "orderly-cancel",
        ESTABLISHED if early and bypassed else LIKELY,
        "The step was cancelled from outside while nothing had failed; the signals were announced.",
        events=cancelled + bypassed,
    )


def _announced(scheduler: Sequence[Event]) -> Iterator[Proposal]:
    """Only the process itself says why it got a signal: it guesses from the time that is left."""
    for why, name in (("timed out", "time-limit"), ("preempted", "preemption")):
        found = [e for e in scheduler if e.attrs.get("why") == why]
        if found:
            yield propose(
                82,
                name,
                LIKELY,
                f"The process was told to end and takes it for '{why}'; it only guesses.",
                events=found,
                alternatives=[("orderly-cancel", "somebody sent the signal")],
            )
            return


def unkillable(facts: Facts) -> Iterator[Proposal]:
    """Processes that survive SIGKILL."""
    found = facts.of(EventKind.SCHEDULER, reason="unkillable")
    if found:
        yield propose(
            68,
            "unkillable-step",
            LIKELY,
            "Processes did not end with SIGKILL: they are stuck in the kernel (storage or driver).",
            events=found,
            nodes=[e.node for e in found if e.node],
            alternatives=[("storage-stall", "a file system that does not answer")],
        )


def _with_signals(facts: Facts, found: Sequence[Event]) -> list[Event]:
    signals = [
        e for e in facts.of(EventKind.SCHEDULER) if str(e.attrs.get("reason")).startswith("signal-")
    ]
    return [*found, *signals[:4], *facts.of(EventKind.PROCESS_EXIT)[:2]]


_FAILURES = frozenset(
    {
        EventKind.COLLECTIVE_TIMEOUT,
        EventKind.DUMP_SIGNAL,
        EventKind.HEARTBEAT,
        EventKind.GPU_FAULT,
        EventKind.COLLECTIVE_MISMATCH,
        EventKind.CUDA_ERROR,
        EventKind.OUT_OF_MEMORY,
        EventKind.NET_ERROR,
        EventKind.LINK_EVENT,
        EventKind.PEER_LOST,
        EventKind.EXCEPTION,
        EventKind.LAUNCHER_ERROR,
        EventKind.RANK_ABSENT,
        EventKind.PROCESS_EXIT,
        EventKind.RAS,
    }
)


def _failed_before(facts: Facts, end: Event) -> bool:
    """Whether anything failed before this end. Order in the timeline decides."""
    for event in facts.events:
        if event is end:
            return False
        if event.kind in _FAILURES and not (
            event.kind is EventKind.LINK_EVENT and not event.attrs.get("fatal")
        ):
            return True
    return False


def killed_by_signal(facts: Facts) -> Iterator[Proposal]:
    """A user signal ended a process without a handler."""
    found = [
        e
        for e in facts.of(EventKind.PROCESS_EXIT)
        if "User defined signal" in str(e.attrs.get("end"))
    ]
    found += [
        e
        for e in facts.of(EventKind.SCHEDULER)
        if e.attrs.get("exit_code") in (138, 140) or e.attrs.get("signal_number") in (10, 12)
    ]
    if found:
        yield propose(
            47,
            "signal-kill",
            LIKELY,
            "A user signal (USR1/USR2) reached a process that has no handler for it; "
            "the node is healthy.",
            events=found,
            alternatives=[("requeue", "if the signal was the warning before a planned end")],
        )


RULES = (rendezvous, devices, leaks, steps, node_failure, ending, killed_by_signal, unkillable)
