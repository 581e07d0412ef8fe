"""The faults that `relax-hpc doctor` and `relax-hpc preflight` know, each with its remedy.

The table in docs/preflight.md is this list. A check is a small function from facts to findings; it
takes the words of its remedy from here.
"""

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any


class Severity(enum.StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """The run would fail, or never start."""
    WARNING = "warning"
    """It may fail, or be slow."""
    INFO = "info"


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault."""

    name: str
    finds: str
    remedy: str
    seen_by: str = "doctor"
    """doctor, preflight, or both."""


_NODE = "doctor, preflight"
_FAULTS = (
    # ---- the machine, or each node
    Fault("shm-size", "/dev/shm smaller than the sample queue and the weights need",
          "remount it larger (mount -o remount,size=N /dev/shm), ask for more memory "
          "(resources.mem_per_node_gb) or lower transfer.arena_mb", _NODE),
    Fault("shm-full", "/dev/shm has room in all, but too little of it is free",
          "see whose it is: `relax-hpc doctor --clean` removes what dead runs left", _NODE),
    Fault("memlock", "limit of locked memory too small for RDMA (NCCL, UCX and NIXL pin memory)",
          "`ulimit -l unlimited` before sbatch (Slurm hands limits on), or "
          "LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept=MEMLOCK", _NODE),
    Fault("open-files", "limit of open files below 4096: a rank has a socket to most others",
          "`ulimit -n 65536` before sbatch, or LimitNOFILE for slurmd", _NODE),
    Fault("remove-ipc", "logind removes shared memory of live runs when a session ends",
          "`loginctl enable-linger`, or ask for RemoveIPC=no in logind.conf or for Slurm's "
          "job_container/tmpfs", _NODE),
    Fault("ephemeral-ports", "the ports that the kernel gives out are nearly used up",
          "end what holds them (`ss -tn`), or widen net.ipv4.ip_local_port_range", _NODE),
    Fault("fixed-port", "a port that is set in the recipe or the site profile is in use, or the "
          "kernel may give it away",
          "leave it out (ports are bound with 0 and published), or take one outside of "
          "net.ipv4.ip_local_port_range that is free", _NODE),
    Fault("clock-skew", "clocks differ: munge refuses messages, file times and logs mislead",
          "start chrony or ntpd on the node (`chronyc tracking`); leave it out until then", _NODE),
    Fault("rdma-port", "an RDMA port that is not active: its GPUs go another, slower way",
          "check cable and subnet manager (`ibstat`); leave the node out until then", _NODE),
    # ---- nodes of an allocation
    Fault("silent-node", "a node that did not report, with the last words of its task",
          "leave it out; look at it with `scontrol show node` and its slurmd log", "preflight"),
    Fault("unreachable-node", "a node that no partner could talk to",
          "leave it out; check address_prefix in the site profile, cables and firewall",
          "preflight"),
    Fault("slow-node", "latency, bandwidth or GPU speed far from the median of the nodes",
          "leave it out and tell the site; see docs/preflight.md for the rule", _NODE),
    Fault("slow-way", "one pair is slow although both its nodes are fine with others",
          "tell the site: a cable or a switch between the two", "preflight"),
    Fault("odd-node", "other GPUs or RDMA ports than most nodes: NCCL would hang or go slow",
          "leave it out, or ask for one kind of node with --constraint in the site's directives",
          "preflight"),
    Fault("gpu", "fewer GPUs than the recipe wants, or one that fails",
          "leave the node out; see `nvidia-smi` and the kernel's Xid lines there", "preflight"),
    Fault("mpi", "MPI did not start or gave wrong results (ways were tested over TCP)",
          "see `srun --mpi=list`; or go without: `relax-hpc preflight --mpi none`", "preflight"),
    # ---- folders
    Fault("run-folder", "the run folder cannot be written, or a node sees another content",
          "set run.folder to a folder on a shared file system that you may write to; check the "
          "mount on the node, and your quota", _NODE),
    Fault("shared-folder", "the run folder lies on a file system of this machine alone",
          "set run.folder to a folder that all nodes mount (Lustre, GPFS, NFS ...)"),
    Fault("disk-space", "too little room, or too few files left, for the checkpoints kept",
          "free some, lower train.keep_checkpoints, or choose another run.folder; quotas: "
          "`lfs quota`, `quota -s`"),
    Fault("job-memory", "a memory limit of the job below what it may keep in /dev/shm",
          "raise resources.mem_per_node_gb, or lower transfer.arena_mb (node_shm_mb)"),
    Fault("model-folder", "a model that is missing, damaged or not readable, here or on a node",
          "correct model.path and its permissions (`chmod -R a+rX`)", _NODE),
    Fault("inputs", "data, reward or replay folder that is missing or wrong",
          "correct the named key of the recipe"),
    # ---- Slurm
    Fault("no-slurm", "Slurm is not here, or does not answer",
          "go to a login node, set SLURM_CONF, or use resources.launcher=local"),
    Fault("slurm-version", "a Slurm that this was not tested with (22.05 to 25.11)",
          "below 22.05: ask for an upgrade; above: try the tests in tests/slurm first"),
    Fault("partition", "a partition that does not exist or takes no jobs",
          "see `sinfo`; set resources.partition or resources.ROLE.partition"),
    Fault("time-limit", "more time than the partition allows",
          "lower resources.time_min (a run is requeued and goes on), or take another partition"),
    Fault("qos", "a QOS that does not exist, that the partition refuses, or with less time",
          "see `sacctmgr show qos` and `scontrol show partition`; set resources.qos"),
    Fault("account", "an account that the partition refuses",
          "see `sacctmgr show assoc user=$USER`; set resources.account"),
    Fault("down-node", "a node of the run's partitions that is down or does not answer",
          "nothing, if enough others are left; else wait or tell the site"),
    Fault("drained-node", "a node of the run's partitions that is drained or reserved",
          "nothing, if enough others are left; else wait or tell the site"),
    Fault("too-few-nodes", "fewer nodes that fit and work than the run asks for",
          "ask for fewer nodes, CPUs, GPUs or less memory, or take another partition"),
    Fault("busy-node", "a node without a job but with load: something was left there",
          "ask the site to end the stray processes, or leave it out (--exclude)"),
    Fault("gres", "the GPUs' name or type is not what the nodes have, or too few of them",
          "see `sinfo -o '%P %G'`; set gres in the site profile (gpu, gpu:h800)"),
    Fault("gpus-per-task", "GPUs per task: each task sees its own GPU only, CUDA IPC breaks",
          "remove it from directives, srun_options and SBATCH_*/SLURM_* variables; GPUs are "
          "asked for per node (gpu_option)"),
    Fault("requeue", "the run wants to be requeued, but something forbids it",
          "remove --no-requeue and SBATCH_NO_REQUEUE, or set requeue = false in the site "
          "profile and go on with `relax-hpc submit --resume`"),
    Fault("het-jobs", "heterogeneous jobs, or steps over their components, do not work here",
          "resources.layout=single, or cross_component_steps = false in the site profile"),
    Fault("job-container", "each job has a /tmp and /dev/shm of its own: components of a het job "
          "on one node do not share memory",
          "resources.layout=single, or directives = [\"--exclusive\"]"),
    Fault("max-jobs", "the cluster or your QOS takes few more jobs",
          "wait, or cancel jobs that you do not need (`squeue --me`)"),
    Fault("start-estimate", "what `sbatch --test-only` says: when it would start, or why never",
          "read Slurm's words; see `sinfo` and the other findings"),
    # ---- memory of the GPUs
    Fault("train-memory", "weights, gradients, optimizer and activations do not fit a GPU",
          "raise train.tp, train.pp or ranks, set train.recompute, lower "
          "train.micro_batch_tokens"),
    Fault("kv-memory", "weights and the KV cache of one long sample do not fit an engine",
          "raise rollout.engine_tp or mem-fraction-static, lower rollout.max_response_tokens"),
)  # fmt: skip

FAULTS = {fault.name: fault for fault in _FAULTS}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault that was found. Made by `found`."""

    check: str
    severity: Severity
    what: str
    remedy: str
    node: str = ""
    """Of a preflight: the node that it is about; empty = all, or none in particular."""

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        place = f"{self.node}: " if self.node else ""
        return f"{self.severity:7}  {self.check}: {place}{self.what}  -> {self.remedy}"


def found(name: str, severity: Severity, what: str, node: str = "") -> Finding:
    """Make a finding of a fault that is in the list."""
    return Finding(check=name, severity=severity, what=what, remedy=FAULTS[name].remedy, node=node)


_ORDER = tuple(Severity)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Sort, worst first, else in the order found."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def would_fail(findings: Iterable[Finding]) -> bool:
    """Tell whether any finding is an error."""
    return any(finding.severity is Severity.ERROR for finding in findings)


def softened(findings: Iterable[Finding]) -> list[Finding]:
    """Turn errors into warnings: seen on a machine on which the run will not be."""
    return [
        dataclasses.replace(finding, severity=Severity.WARNING)
        if finding.severity is Severity.ERROR
        else finding
        for finding in findings
    ]


def merged(findings: Sequence[Finding], num_nodes: int) -> list[Finding]:
    """Make one finding of what at least half of the nodes have: no reason to leave them out."""
    groups: dict[tuple[str, Severity], list[Finding]] = {}
    for finding in findings:
        if finding.node:
            groups.setdefault((finding.check, finding.severity), []).append(finding)
    result = [finding for finding in findings if not finding.node]
    for group in groups.values():
        if num_nodes >= 2 and 2 * len(group) >= num_nodes and len(group) > 1:
            first = group[0]
            what = f"{len(group)} of {num_nodes} nodes, e.g. {first.node}: {first.what}"
            result.append(dataclasses.replace(first, what=what, node=""))
        else:
            result += group
    return result
