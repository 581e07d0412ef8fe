"""slurm.conf and the other files that the daemons read."""

import contextlib
import dataclasses
import os
import pwd
import random
import re
import secrets
import shutil
import socket
import time
from pathlib import Path

from local_slurm.process import ClusterError
from local_slurm.state import Shape, State

PORTS = range(20000, 32000)
"""Below Linux' ephemeral ports (32768-60999), so that no outgoing connection takes one."""
FIRST_DAY = 1767225600  # 2026-01-01 UTC


def partition_lines(shape: Shape) -> list[str]:
    """PartitionName lines of `--partitions`, or of the default set.

    Default: train first node, dcs last node, rollout between; all; low (preemptible) and high.
    """
    names = shape.node_names
    middle = names[1:-1] or names[-1:]
    default = (
        f"all=ALL:Default=YES train={names[0]} rollout={','.join(middle)} dcs={names[-1]} "
        "low=ALL:PriorityTier=1:PreemptMode=REQUEUE high=ALL:PriorityTier=10"
    )
    lines: list[str] = []
    for part in re.split(r"[;\s]+", (shape.partitions or default).strip()):
        match = re.fullmatch(r"([\w-]+)=([^:]+)((?::\w+=[^:]+)*)", part)
        if match is None:
            raise ClusterError(
                f"--partitions: {part!r} is not NAME=NODES[:KEY=VALUE...], e.g. "
                "'train=n01 rollout=n[02-03] low=ALL:PriorityTier=1:PreemptMode=REQUEUE'"
            )
        # A job of a higher PriorityTier preempts those of a lower tier whose mode allows it.
        own = match[3].replace(":", " ").strip()
        tier = "" if "PriorityTier=" in own else " PriorityTier=5"
        mode = "" if "PreemptMode=" in own else " PreemptMode=OFF"
        lines.append(f"PartitionName={match[1]} Nodes={match[2]} State=UP{tier}{mode} {own}")
    if not any(" Default=" in line for line in lines):
        lines[0] += " Default=YES"
    return lines


def topology_lines(shape: Shape) -> list[str]:
    """A switch tree; `--tree 2,3`: 2 nodes per leaf, 3 leaves per spine; one core if needed."""
    try:
        sizes = [int(size) for size in shape.tree.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ClusterError(f"--tree {shape.tree!r}: give sizes like 2 or 2,2 (nodes per leaf, ...)")
    level, lines, kind = shape.node_names, [], "Nodes"
    names = ("leaf", "spine", *(f"level{k}_" for k in range(2, 9)))
    for depth, size in enumerate([*sizes, shape.nodes]):
        if depth and len(level) == 1:
            break
        groups = [level[i : i + size] for i in range(0, len(level), size)]
        label = "core" if depth == len(sizes) else names[depth]
        lines += [
            f"SwitchName={label}{k} {kind}={','.join(group)}" for k, group in enumerate(groups, 1)
        ]
        level, kind = [f"{label}{k}" for k in range(1, len(groups) + 1)], "Switches"
    return lines


def slurm_conf(state: State, shape: Shape, ports: dict[str, int], user: str) -> str:
    """The text of slurm.conf. Why the odd settings: slurm.conf(5) and the notes beside them."""
    host = socket.gethostname().split(".")[0]
    gres = f" Gres=gpu:{shape.gpus_per_node}" if shape.gpus_per_node else ""
    lines = [
        "ClusterName=relax",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports['slurmctld']}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={state.socket}",
        # Listen on 127.0.0.1 only: a laptop must not offer Slurm to its network.
        "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
        f"StateSaveLocation={state.path}/ctld",
        f"SlurmdSpoolDir={state.run}/spool/%n",
        f"SlurmctldPidFile={state.path}/run/slurmctld.pid",
        f"SlurmdPidFile={state.path}/run/slurmd.%n.pid",
        f"SlurmctldLogFile={state.log}/slurmctld.log",
        f"SlurmdLogFile={state.log}/slurmd.%n.log",
        # More CPUs and memory than the machine has.
        "SlurmdParameters=config_overrides",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "MpiDefault=none",
        "PropagateResourceLimits=NONE",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU_Memory",
        f"DefMemPerCPU={max(1, shape.memory_mb // shape.cpus_per_node)}",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=2,bf_interval=2,bf_continue,bf_hetjob_immediate",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        # An impossible request is refused by sbatch instead of waiting for ever.
        "EnforcePartLimits=ALL",
        "JobRequeue=1",
        "JobCompType=jobcomp/filetxt",
        f"JobCompLoc={state.log}/jobcomp.log",
        # Job ids grow over clusters too: run folders are named after them.
        f"FirstJobId={int(time.time() - FIRST_DAY) // 10}",
        "MailProg=/bin/true",
        "ReturnToService=2",
        "SlurmdTimeout=30",
        "MessageTimeout=30",
        "KillWait=5",
        "MinJobAge=3600",
        "InactiveLimit=0",
    ]
    lines += accounting_lines(state, shape, ports)
    if shape.tree:
        lines.append("TopologyPlugin=topology/tree")
    if shape.gpus_per_node:
        lines.append("GresTypes=gpu")
    overridden = {setting.split("=")[0].lower() for setting in shape.settings}
    lines = [line for line in lines if line.split("=")[0].lower() not in overridden]
    lines += shape.settings
    lines += [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[name]} "
        f"CPUs={shape.cpus_per_node} RealMemory={shape.memory_mb}{gres} State=UNKNOWN"
        for name in shape.node_names
    ]
    return "\n".join([*lines, *partition_lines(shape)]) + "\n"


def accounting_lines(state: State, shape: Shape, ports: dict[str, int]) -> list[str]:
    if not shape.accounting:
        return ["AccountingStorageType=accounting_storage/none"]
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePass={state.socket}",
        f"AccountingStoragePort={ports['slurmdbd']}",
        *(["AccountingStorageTRES=gres/gpu"] if shape.gpus_per_node else []),
    ]


def free_ports(names: list[str]) -> dict[str, int]:
    """Ports nobody listens on now; if another process takes one first, `up` tries again."""
    ports: dict[str, int] = {}
    candidates = iter(random.sample(PORTS, len(PORTS)))
    for name in names:
        for port in candidates:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("0.0.0.0", port))
                ports[name] = port
                break
    if len(ports) < len(names):
        raise ClusterError(f"fewer than {len(names)} free ports in {PORTS.start}-{PORTS.stop - 1}")
    return ports


def write_files(state: State, shape: Shape) -> None:
    """Make the state folder new, except its logs."""
    user = user_name()
    names = ["slurmctld", *(["slurmdbd"] if shape.accounting else []), *shape.node_names]
    conf = slurm_conf(state, shape, free_ports(names), user)
    topology = topology_lines(shape) if shape.tree else []
    remove_files(state, keep_logs=True)
    for folder in (state.path, state.log, state.path / "ctld", state.path / "run"):
        folder.mkdir(parents=True, exist_ok=True)
    if state.run != state.path:
        make_private_folder(state.run)
    for name in shape.node_names:
        (state.run / "spool" / name).mkdir(parents=True)
    if shape.gpus_per_node:
        # Stand-ins for /dev/nvidiaN. With plain files the jobs get no CUDA_VISIBLE_DEVICES ("not a
        # valid character or block device"); links to /dev/null count as devices, without mknod.
        (state.path / "gpu").mkdir()
        for number in range(shape.gpus_per_node):
            (state.path / "gpu" / f"gpu{number}").symlink_to("/dev/null")
        files = f"{state.path}/gpu/gpu[0-{shape.gpus_per_node - 1}]"
        (state.path / "gres.conf").write_text(f"Name=gpu File={files}\n")
    if topology:
        (state.path / "topology.conf").write_text("\n".join(topology) + "\n")
    key = os.open(state.path / "munge.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    with os.fdopen(key, "wb") as file:
        file.write(secrets.token_bytes(1024))
    state.write("shape.json", dataclasses.asdict(shape))
    state.conf.write_text(conf)


def make_private_folder(path: Path) -> None:
    """In /tmp a name may be taken by somebody else: use it only if it is ours."""
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise ClusterError(f"{path} belongs to somebody else; choose a shorter --state folder")


def remove_files(state: State, keep_logs: bool) -> None:
    if state.run != state.path:
        shutil.rmtree(state.run, ignore_errors=True)
    if not state.path.exists():
        return
    for entry in state.path.iterdir():
        if keep_logs and entry == state.log:
            continue
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    if not keep_logs:
        state.path.rmdir()


def user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError as err:
        raise ClusterError(
            f"uid {os.getuid()} has no name in /etc/passwd; Slurm needs one"
        ) from err
