"""Who a process of a run is: role, rank, node, attempt and incarnation, from its environment.

The only module that reads or writes `RELAX_*` variables of tasks. The supervisor builds them with
`task_environment`; every task reads them once with `Identity.from_env`.
"""

import dataclasses
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from relax_hpc.errors import ConfigError
from relax_hpc.runfolder import RunFolder

ROLES = ("dcs", "train", "ref", "logprob", "rollout")
"""Roles that the supervisor starts as job steps."""

SUPERVISOR = "supervisor"
OBSERVER = "observer"
"""A command on a login node: it may look at any attempt and is never refused as stale."""

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalPlace:
    """Place of a task that no srun started (launcher = "local")."""

    rank: int
    world: int
    local_rank: int
    node: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """One task of a run. `(role, index)` is the fault domain, `rank` counts inside it."""

    run: RunFolder
    role: str
    index: int = 0
    """Engine number for role rollout, else 0."""
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    node: str
    """Slurm node name; several nodes may share one host, so never the host name under Slurm."""
    attempt: int = 1
    """n-th run of the whole job, from 1."""
    incarnation: int = 1
    """n-th start of (role, index) in the run, from 1, counted over attempts."""
    address_prefix: str = ""
    """Start of the IP address to bind to, e.g. "10.1."; empty = first that is not loopback."""
    gpus: tuple[int, ...] = ()
    """GPU ids of this task; empty = CPU."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Identity":
        """Read what `task_environment` (and srun) set.

        Raises:
            ConfigError: a variable is missing or not a number; names it and its value.
        """
        run = environ.get("RELAX_RUN", "")
        if not run:
            raise ConfigError(
                "RELAX_RUN is not set: steps are started by the supervisor, not by hand"
            )
        local_rank = _number(environ, ("RELAX_LOCAL_RANK", "SLURM_LOCALID"), 0)
        return cls(
            run=RunFolder(Path(run)),
            role=_text(environ, ("RELAX_ROLE",)),
            index=_number(environ, ("RELAX_INDEX",), 0),
            rank=_number(environ, ("RELAX_RANK", "SLURM_PROCID"), 0),
            world=_number(environ, ("RELAX_WORLD", "SLURM_NTASKS"), 1),
            local_rank=local_rank,
            node=_text(environ, ("RELAX_NODE", "SLURMD_NODENAME"), socket.gethostname()),
            attempt=_number(environ, ("RELAX_ATTEMPT",), 1),
            incarnation=_number(environ, ("RELAX_INCARNATION",), 1),
            address_prefix=environ.get("RELAX_ADDRESS", ""),
            gpus=_gpus(environ.get("RELAX_GPUS", ""), local_rank),
        )

    def bind_address(self) -> str:
        """Return the IPv4 address that services of this task bind to and publish.

        Raises:
            ConfigError: no interface has an address with the prefix; lists those there are.
        """
        addresses = _host_addresses()
        if self.address_prefix:
            for address in addresses:
                if address.startswith(self.address_prefix):
                    return address
            raise ConfigError(
                f"no address of node {self.node} starts with {self.address_prefix!r} "
                f"(it has {', '.join(addresses)}): correct the fabric prefix of the site profile"
            )
        outward = (a for a in addresses if not ipaddress.ip_address(a).is_loopback)
        return next(outward, "127.0.0.1")


def observer_identity(run: RunFolder) -> Identity:
    """Return the identity of a command that looks at a run from outside (status, logs)."""
    return Identity(run=run, role=OBSERVER, node=socket.gethostname())


def supervisor_identity(run: RunFolder, attempt: int, node: str) -> Identity:
    """Return the identity of the supervisor: it starts once in each attempt."""
    return Identity(run=run, role=SUPERVISOR, node=node, attempt=attempt, incarnation=attempt)


def task_environment(
    *,
    run: RunFolder,
    role: str,
    index: int = 0,
    attempt: int,
    incarnation: int,
    address_prefix: str = "",
    gpus: Sequence[Sequence[int]] = (),
    local: LocalPlace | None = None,
) -> dict[str, str]:
    """Build the `RELAX_*` variables of a task (of all tasks of a step when srun places them).

    Args:
        run: the run folder; its absolute path is passed on.
        role: dcs, train, ref, logprob or rollout.
        index: engine number of a rollout step, else 0.
        attempt: n-th run of the job.
        incarnation: n-th start of (role, index) in the run.
        address_prefix: IP prefix of the fabric.
        gpus: GPU ids by local rank; empty = CPU.
        local: the task's place when it is not started by srun.
    """
    if role not in ROLES:
        raise ConfigError(f"role {role!r}: valid are {', '.join(ROLES)}")
    variables = {
        "RELAX_RUN": str(run.path.resolve()),
        "RELAX_ROLE": role,
        "RELAX_INDEX": str(index),
        "RELAX_ATTEMPT": str(attempt),
        "RELAX_INCARNATION": str(incarnation),
        "RELAX_ADDRESS": address_prefix,
        "RELAX_GPUS": ";".join(",".join(str(gpu) for gpu in ids) for ids in gpus),
    }
    if local is not None:
        variables["RELAX_RANK"] = str(local.rank)
        variables["RELAX_WORLD"] = str(local.world)
        variables["RELAX_LOCAL_RANK"] = str(local.local_rank)
        variables["RELAX_NODE"] = local.node
    return variables


def _text(environ: Mapping[str, str], names: tuple[str, ...], default: str = "") -> str:
    for name in names:
        if environ.get(name):
            return environ[name]
    if default:
        return default
    raise ConfigError(f"{names[0]} is not set: steps are started by the supervisor, not by hand")


def _number(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        if name in environ:
            try:
                value = int(environ[name])
            except ValueError as err:
                raise ConfigError(f"{name}={environ[name]!r}: must be a whole number") from err
            if value < 0:
                raise ConfigError(f"{name}={value}: must be >= 0")
            return value
    return default


def _gpus(text: str, local_rank: int) -> tuple[int, ...]:
    if not text:
        return ()
    ranks = text.split(";")
    if local_rank >= len(ranks):
        raise ConfigError(f"RELAX_GPUS={text!r}: has no entry for local rank {local_rank}")
    try:
        return tuple(int(gpu) for gpu in ranks[local_rank].split(",") if gpu)
    except ValueError as err:
        raise ConfigError(f"RELAX_GPUS={text!r}: write ids like 0,1;2,3") from err


def _host_addresses() -> list[str]:
    found = []
    for entries in psutil.net_if_addrs().values():
        found += [entry.address for entry in entries if entry.family == socket.AF_INET]
    return found


def visible_gpus(places: Sequence[int], visible: str | None) -> list[str]:
    """Return what CUDAVISIBLE_GPUS_DEVICES must say for the GPUs of this task.

    A node that is shared with other jobs shows this job `4,5,6,7`, or UUIDs: places count in that
    list. Where a site binds each task to one GPU, that one is the task's, whatever its place.

    Args:
        places: of the task's GPUs, among those that the step sees on the node.
        visible: CUDAVISIBLE_GPUS_DEVICES as Slurm set it; None = all GPUs of the node.

    Raises:
        ConfigError: the task sees fewer GPUs than it owns.
    """
    seen = [name.strip() for name in visible.split(",") if name.strip()] if visible else []
    if not seen:
        return [str(place) for place in places]
    if len(seen) == 1 and len(places) == 1:
        return seen
    if any(place >= len(seen) for place in places):
        raise ConfigError(
            f"{VISIBLE_GPUS}={visible} shows this task {len(seen)} GPUs and it owns number "
            f"{', '.join(map(str, places))} of its node: tasks must see all GPUs of the step; ask "
            "for GPUs per node and leave --gpus-per-task and --gpu-bind out of the site profile"
        )
    return [seen[place] for place in places]
