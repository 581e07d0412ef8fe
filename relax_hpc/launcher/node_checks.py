"""What is wrong with one machine, from its facts and the needs of a run. Pure functions."""

import dataclasses
from collections.abc import Callable, Iterator

from relax_hpc.launcher.check_list import Finding, Severity, found
from relax_hpc.topology.node_facts import UNLIMITED, NodeFacts

_GB = 2**30
_MIN_MEMLOCK = 4 * _GB
"""NCCL alone pins some 100 MB per GPU; a KV cache or an arena that is registered pins GBs."""
_MIN_OPEN_FILES = 4096
_MUNGE_TTL_S = 300.0
"""munge's default: older messages are refused, and with them every job step."""
_MAX_SKEW_S = 60.0
_ODD_SKEW_S = 2.0
_FEW_PORTS = 0.5
_NO_PORTS = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NodeNeeds:
    """What a run needs of each of its nodes; the default needs nothing."""

    shm_least_bytes: int = 0
    """Below this the run cannot work."""
    shm_wanted_bytes: int = 0
    """Below this producers wait for readers."""
    gpus: int = 0
    forces_rdma: bool = False
    ports: tuple[tuple[str, int], ...] = ()
    """Fixed ports by the key that sets them."""


def shm_size(facts: NodeFacts, needs: NodeNeeds) -> Iterator[Finding]:
    """Compare the size of /dev/shm, then what is free of it."""
    for name, size in (("shm-size", facts.shm_bytes), ("shm-full", facts.shm_free_bytes)):
        what = f"/dev/shm has {size / _GB:.2f} GiB" + (" free" if name == "shm-full" else "")
        if size < needs.shm_least_bytes:
            least = f"{what}, the run needs {needs.shm_least_bytes / _GB:.2f} at least"
            yield found(name, Severity.ERROR, least, facts.node)
            return
        if size < needs.shm_wanted_bytes:
            wanted = f"{what}, the run would use up to {needs.shm_wanted_bytes / _GB:.2f}"
            yield found(name, Severity.WARNING, wanted, facts.node)
            return


def memlock(facts: NodeFacts, needs: NodeNeeds) -> Iterator[Finding]:
    """Judge the limit of locked memory where something will pin."""
    if facts.memlock_bytes == UNLIMITED or facts.memlock_bytes >= _MIN_MEMLOCK:
        return
    what = f"max locked memory is {facts.memlock_bytes // 1024} KiB"
    if facts.rdma_active or needs.forces_rdma:
        yield found("memlock", Severity.ERROR, f"{what}, with RDMA devices", facts.node)
    elif needs.gpus:
        yield found("memlock", Severity.WARNING, f"{what}, for pinned host memory", facts.node)


def open_files(facts: NodeFacts, needs: NodeNeeds) -> Iterator[Finding]:
    """Judge the limit of open files."""
    del needs
    if facts.max_open_files != UNLIMITED and facts.max_open_files < _MIN_OPEN_FILES:
        what = f"max open files is {facts.max_open_files}"
        yield found("open-files", Severity.WARNING, what, facts.node)


def remove_ipc(facts: NodeFacts, needs: NodeNeeds) -> Iterator[Finding]:
    """Warn of logind."""
    del needs
    if facts.removes_ipc:
        what = "logind has RemoveIPC=yes and you do not linger"
        yield found("remove-ipc", Severity.WARNING, what, facts.node)


def ephemeral_ports(facts: NodeFacts, needs: NodeNeeds) -> Iterator[Finding]:
    """Judge how many ports are left."""
    del needs
    low, high = facts.ephemeral
    size = high - low + 1
    used = facts.ephemeral_used / size
    if used >= _FEW_PORTS or size < 1000:
        severity = Severity.ERROR if used >= _NO_PORTS else Severity.WARNING
        what = f"{facts.ephemeral_used} of the {size} ports {low}-{high} are in use"
        yield found("ephemeral-ports", severity, what, facts.node)


def fixed_ports(facts: NodeFacts, needs: NodeNeeds) -> Iterator[Finding]:
    """Judge ports that somebody set."""
    low, high = facts.ephemeral
    for key, port in needs.ports:
        if port in facts.listening:
            what = f"{key}={port}: something listens there"
            yield found("fixed-port", Severity.ERROR, what, facts.node)
        elif low <= port <= high:
            what = f"{key}={port}: lies in the ephemeral range {low}-{high}"
            yield found("fixed-port", Severity.WARNING, what, facts.node)


def clock_skew(facts: NodeFacts, needs: NodeNeeds) -> Iterator[Finding]:
    """Judge the clock."""
    del needs
    skew = abs(facts.clock_offset_s)
    if skew >= _ODD_SKEW_S:
        severity = Severity.ERROR if skew >= _MAX_SKEW_S else Severity.WARNING
        way = "ahead" if facts.clock_offset_s > 0 else "behind"
        what = f"the clock is {skew:.1f} s {way} (munge refuses at {_MUNGE_TTL_S:.0f} s)"
        yield found("clock-skew", severity, what, facts.node)


def rdma_port(facts: NodeFacts, needs: NodeNeeds) -> Iterator[Finding]:
    """Name ports that are down; an error only where nothing is left and RDMA is a must."""
    if needs.forces_rdma and not facts.rdma_active:
        what = "no active RDMA port, and transfer.rdma=force"
        yield found("rdma-port", Severity.ERROR, what, facts.node)
    elif facts.rdma_down and facts.rdma_active:  # all down: an Ethernet site with idle cards
        what = f"{', '.join(facts.rdma_down)} not active, {len(facts.rdma_active)} others are"
        yield found("rdma-port", Severity.WARNING, what, facts.node)


def folders(facts: NodeFacts, needs: NodeNeeds) -> Iterator[Finding]:
    """Pass on what a node could not read or write."""
    del needs
    if facts.folder_fault:
        yield found("run-folder", Severity.ERROR, facts.folder_fault, facts.node)
    if facts.model_fault:
        yield found("model-folder", Severity.ERROR, facts.model_fault, facts.node)


def gpus(facts: NodeFacts, needs: NodeNeeds) -> Iterator[Finding]:
    """Count the GPUs that a task sees."""
    if needs.gpus and len(facts.gpus) < needs.gpus:
        what = f"nvidia-smi lists {len(facts.gpus)} GPUs, the recipe wants {needs.gpus}"
        yield found("gpu", Severity.ERROR, what, facts.node)


NodeCheck = Callable[[NodeFacts, NodeNeeds], Iterator[Finding]]

MACHINE_CHECKS: tuple[NodeCheck, ...] = (
    shm_size,
    memlock,
    open_files,
    remove_ipc,
    ephemeral_ports,
    fixed_ports,
    clock_skew,
    rdma_port,
)
"""What `doctor` asks of the machine it runs on."""
NODE_CHECKS: tuple[NodeCheck, ...] = (*MACHINE_CHECKS, folders, gpus)
"""What `preflight` asks of each node."""


def check_node(
    facts: NodeFacts, needs: NodeNeeds, checks: tuple[NodeCheck, ...] = NODE_CHECKS
) -> list[Finding]:
    """Run the checks over one node's facts."""
    return [finding for check in checks for finding in check(facts, needs)]
