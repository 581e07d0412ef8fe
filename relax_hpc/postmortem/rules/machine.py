"""Hardware, kernels, memory and storage: evidence that stands on its own."""

from collections import Counter
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.facts import Facts, is_fatal_fault
from relax_hpc.postmortem.rules.proposal import (
    ESTABLISHED,
    LIKELY,
    UNDETERMINED,
    Proposal,
    name_ranks,
    propose,
)

_FAULTS = {
    "ecc": ("gpu-ecc", "an uncorrectable GPU memory error"),
    "lost": ("gpu-pcie-lost", "a GPU that fell off the bus"),
    "nvlink": ("gpu-nvlink", "an NVLink/NVSwitch error"),
    "fabric": ("fabric-manager", "Fabric Manager or NVSwitch in a bad state"),
    "host-memory": ("host-memory-error", "an uncorrectable error of host memory"),
    "aer-fatal": ("gpu-pcie-lost", "an uncorrectable PCIe error"),
    "xid": ("gpu-xid", "a fatal GPU fault"),
}
_STORM = 20
"""Corrected PCIe errors from which on a link is called bad without other evidence."""


def _ranks(facts: Facts, events: Sequence[Event]) -> list[int]:
    return sorted({rank for event in events if (rank := facts.rank(event)) is not None})


def _nodes(facts: Facts, events: Sequence[Event]) -> list[str]:
    names = [event.node for event in events if event.node]
    return list(dict.fromkeys(names + facts.nodes(_ranks(facts, events))))


def gpu_faults(facts: Facts) -> Iterator[Proposal]:
    """Xid, ECC, lost GPU, NVLink, fabric manager, PCIe storms, host memory."""
    faults = [e for e in facts.of(EventKind.GPU_FAULT) if is_fatal_fault(e)]
    if not faults:
        yield from _noisy_link(facts)
        return
    first = faults[0]
    kinds = [str(e.attrs.get("what")) for e in faults]
    # A lost GPU or an ECC error explains link and driver errors that come with it.
    what = next(
        (kind for kind in ("ecc", "lost", "nvlink", "host-memory") if kind in kinds), kinds[0]
    )
    name, words = _FAULTS.get(what, _FAULTS["xid"])
    mine = [e for e in faults if e.attrs.get("what") == what] or [first]
    nodes, ranks = _nodes(facts, mine), _ranks(facts, mine)
    many = len(nodes) > 2
    gpus = list(dict.fromkeys(str(e.attrs["gpu"]) for e in mine if e.attrs.get("gpu")))
    xids = list(dict.fromkeys(str(e.attrs["xid"]) for e in mine if "xid" in e.attrs))
    where = f" on {', '.join(nodes[:4])}" if nodes else ""
    where += f" (GPU {', '.join(gpus[:4])})" if gpus else ""
    where += f", Xid {', '.join(xids)}" if xids else ""
    where += f", {name_ranks(ranks)}" if ranks else ""
    yield propose(
        10,
        name,
        LIKELY if many or what == "xid" or _is_vague(mine) else ESTABLISHED,
        f"{words[0].upper()}{words[1:]}{where}; what follows are consequences.",
        events=mine + [e for e in facts.of(EventKind.GPU_FAULT) if e.attrs.get("what") != what][:3],
        ranks=ranks,
        nodes=nodes,
        alternatives=[("fabric-manager", "several nodes at once: a common cause is possible")]
        if many
        else [],
    )


def _is_vague(faults: Sequence[Event]) -> bool:
    """Words that reports about healthy machines use, too."""
    return all("anager" in str(e.attrs.get("words", "")) for e in faults) and not any(
        "error in the Fabric" in str(e.attrs.get("words", "")) for e in faults
    )


def _noisy_link(facts: Facts) -> Iterator[Proposal]:
    corrected = facts.of(EventKind.GPU_FAULT, what="aer-corrected")
    soft = [
        e
        for e in facts.of(EventKind.GPU_FAULT)
        if not is_fatal_fault(e) and e.attrs.get("what") != "aer-corrected"
    ]
    if len(corrected) >= _STORM:
        device, _ = Counter(str(e.attrs.get("gpu")) for e in corrected).most_common(1)[0]
        yield propose(
            12,
            "gpu-pcie-lost",
            LIKELY,
            f"A storm of corrected PCIe errors at {device}: a bad link.",
            events=corrected,
            nodes=_nodes(facts, corrected),
        )
    own = [e for e in soft if e.attrs.get("xid") in (13, 31)]
    if own:
        yield propose(
            22,
            "cuda-kernel-fault",
            LIKELY,
            "The driver reports a fault of the program's own kernel (Xid 13/31).",
            events=own,
            ranks=_ranks(facts, own),
            alternatives=[("gpu-xid", "repeats on one GPU with other programs: hardware")],
        )


def kernel_faults(facts: Facts) -> Iterator[Proposal]:
    """Sticky CUDA errors: the watchdog only reports them first."""
    errors = facts.of(EventKind.CUDA_ERROR)
    hard = [e for e in errors if _is_sticky(str(e.attrs.get("what", "")))]
    if not hard:
        return
    ranks = _ranks(facts, hard)
    what = str(hard[0].attrs.get("what"))
    yield propose(
        20,
        "cuda-kernel-fault",
        # A wild address may also be the driver's or NCCL's; a misaligned one or an assert is not.
        ESTABLISHED if ranks and _is_own(what) else LIKELY,
        f"{name_ranks(ranks).capitalize() if ranks else 'A process'} hit '{what}' in a "
        f"kernel of the program; "
        "NCCL only reports it.",
        events=hard,
        ranks=ranks,
        nodes=[],
        alternatives=[("gpu-xid", "the same GPU fails with other programs too")],
    )


def _is_own(what: str) -> bool:
    return "misaligned" in what or "assert" in what


def _is_sticky(what: str) -> bool:
    words = (
        "illegal",
        "misaligned",
        "assert",
        "launch failure",
        "program counter",
        "invalidpc",
        "invalid pc",
        "address space",
        "launchfailure",
        "illegalinstruction",
        "stack overflow",
        "cublas_status_execution",
        "cublas_status_internal",
        "cudnn_status_execution",
    )
    return any(word in what for word in words)


def out_of_memory(facts: Facts) -> Iterator[Proposal]:
    """Host (cgroup, kernel, Ray) and GPU memory."""
    host = facts.of(EventKind.OUT_OF_MEMORY, where="host")
    if host:
        named = [e for e in host if e.node or "tasks" in e.attrs or e.rank is not None]
        bus = [
            e
            for e in facts.of(EventKind.PROCESS_EXIT)
            if "bus error" in str(e.attrs.get("end")).lower()
        ]
        nodes, ranks = _victims(facts, named + bus)
        where = f": {name_ranks(ranks)}" if ranks else ""
        where += f" on {', '.join(nodes[:4])}" if nodes else ""
        yield propose(
            30,
            "host-oom",
            ESTABLISHED if any(_is_killed(e) for e in host) else LIKELY,
            f"Out of host memory{where}; steps cancelled afterwards are consequences.",
            events=host + bus,
            ranks=ranks,
            nodes=nodes,
        )
    cuda = facts.of(EventKind.OUT_OF_MEMORY, where="cuda")
    if cuda:
        ranks = _ranks(facts, cuda)
        yield propose(
            21,
            "cuda-oom",
            ESTABLISHED,
            f"Out of GPU memory{' on ' + name_ranks(ranks) if ranks else ''}; the "
            f"other ranks waited for it.",
            events=cuda,
            ranks=ranks,
            nodes=[],
        )


def _is_killed(event: Event) -> bool:
    """Slurm or the kernel says it; an allocation that failed may have other reasons (ulimit)."""
    words = str(event.attrs.get("words", ""))
    return "end" in event.attrs or any(word in words for word in ("oom", "OOM", "Kill", "OUT_OF"))


def _victims(facts: Facts, events: Sequence[Event]) -> tuple[list[str], list[int]]:
    nodes: list[str] = []
    ranks: set[int] = set()
    for event in events:
        names = [name for name in str(event.attrs.get("nodes", "")).split(",") if name]
        nodes += [event.node] if event.node else names
        tasks = event.attrs.get("tasks", ())
        ranks.update(tasks if isinstance(tasks, tuple) else ())
        if (rank := facts.rank(event)) is not None:
            ranks.add(rank)
    return list(dict.fromkeys(nodes)), sorted(ranks)


def storage(facts: Facts) -> Iterator[Proposal]:
    """Stalled, full or broken file systems."""
    events = facts.of(EventKind.STORAGE)
    for what, name, order, words in (
        ("shm-full", "shm-full", 31, "/dev/shm was full or too small"),
        ("full", "storage-full", 32, "A file system or quota was full"),
    ):
        found = [e for e in events if e.attrs.get("what") == what]
        if found:
            ranks = _ranks(facts, found)
            yield propose(
                order,
                name,
                ESTABLISHED if what == "full" and _is_raised(facts, found) else LIKELY,
                f"{words}.",
                events=found,
                ranks=ranks,
                nodes=_nodes(facts, found),
            )
    yield from _stall(facts, [e for e in events if e.attrs.get("what") == "stall"])
    broken = [e for e in events if e.attrs.get("what") == "error"]
    if broken:
        yield propose(
            46,
            "storage-error",
            LIKELY,
            f"A file could not be used: {broken[0].attrs.get('words')}.",
            events=broken,
            ranks=_ranks(facts, broken),
            nodes=_nodes(facts, broken),
        )


def _is_raised(facts: Facts, found: Sequence[Event]) -> bool:
    """Whether it ended a process, and was not only a warning about a cache."""
    raised = {e.source for e in facts.of(EventKind.EXCEPTION)}
    return any(event.source in raised for event in found)


def _unused(facts: Facts) -> list[Event]:
    counted = facts.of(EventKind.WORK_STATUS) + facts.of(EventKind.DUMP_SIGNAL)
    counted = [e for e in counted if e.enqueued is not None]
    return counted if counted and all(e.enqueued == -1 for e in counted) else []


def _stall(facts: Facts, stalls: list[Event]) -> Iterator[Proposal]:
    unused = _unused(facts)
    frozen = facts.of(EventKind.HEARTBEAT)
    if stalls and (unused or (frozen and not facts.of(EventKind.COLLECTIVE_TIMEOUT))):
        yield propose(
            33,
            "storage-stall",
            LIKELY if not unused else ESTABLISHED,
            "Storage stood still and no collective was in flight: the watchdogs were "
            "frozen with the "
            "processes; no rank is at fault.",
            events=stalls + unused + frozen,
            alternatives=[("heartbeat", "another reason froze the processes")],
        )
    elif stalls:
        yield propose(
            85,
            "storage-stall",
            UNDETERMINED if facts.hung() else LIKELY,
            f"The file system stalled ({stalls[0].attrs.get('words')}).",
            events=stalls,
            nodes=_nodes(facts, stalls),
        )
    elif unused and len({e.rank for e in unused}) > 1:
        yield propose(
            71,
            "storage-stall",
            UNDETERMINED,
            "No collective was ever in flight on any rank that reports (-1): the hosts "
            "stood still, as in "
            "a storage stall; no rank is at fault.",
            events=unused,
            alternatives=[
                ("heartbeat", "a CUDA call or the GIL blocked before the first collective")
            ],
        )


RULES = (gpu_faults, kernel_faults, out_of_memory, storage)
