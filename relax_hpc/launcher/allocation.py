"""The allocation that a supervisor runs in: the node names of each component."""

import dataclasses
import re
from collections.abc import Mapping

from relax_hpc.errors import ConfigError, SlurmError
from relax_hpc.launcher.plan import Plan, StepPlan
from relax_hpc.slurm import expand_hostlist

LOCAL_NODE = "local"
"""Node name of launcher = "local"."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One het group, or the whole of a homogeneous allocation."""

    job_id: str
    partition: str
    nodes: tuple[str, ...]
    cpus_per_node: int
    """Least over the nodes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Where the run's steps can be started."""

    job_id: str
    """Leader of a het job, `ARRAYID_TASK` of an array task; empty for launcher = local. The run
    folder is `NAME-JOBID`."""
    is_het: bool
    groups: tuple[Group, ...]

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Job ids of all components; step ids begin with these."""
        return tuple(group.job_id for group in self.groups)

    def node_names(self, step: StepPlan) -> tuple[tuple[str, ...], ...]:
        """Resolve the places of a step's plan to node names, part by part."""
        return tuple(
            tuple(self.groups[part.component].nodes[node] for node in part.nodes)
            for part in step.parts
        )


def local_allocation(plan: Plan) -> Allocation:
    """Return this machine as the one node of a plan for launcher = local."""
    cpus = plan.components[0].cpus_per_node
    group = Group(job_id="", partition="", nodes=(LOCAL_NODE,), cpus_per_node=cpus)
    return Allocation(job_id="", is_het=False, groups=(group,))


def slurm_allocation(environ: Mapping[str, str]) -> Allocation:
    """Read the allocation of the batch script (or salloc shell) that this process runs in.

    The variables without `_HET_GROUP_n` describe component 0 only (SLURM documentation,
    heterogeneous jobs, "Environment variables").

    Raises:
        ConfigError: not inside a Slurm job.
    """
    if not environ.get("SLURM_JOB_ID", ""):
        raise ConfigError(
            "not inside a Slurm job: start the run with `relax-hpc submit` or "
            "`sbatch recipes/NAME.sh`, or on this machine with --set resources.launcher=local"
        )
    size = environ.get("SLURM_HET_SIZE", "")
    suffixes = [f"_HET_GROUP_{n}" for n in range(int(size))] if size.isdigit() else [""]
    return Allocation(
        job_id=_own_job(environ, ""),
        is_het=bool(size),
        groups=tuple(_group(environ, suffix) for suffix in suffixes),
    )


def array_task(environ: Mapping[str, str]) -> int | None:
    """Return the number of this task of a job array; None if the job is no array."""
    text = environ.get("SLURM_ARRAY_TASK_ID", "")
    return int(text) if text.isdigit() and environ.get("SLURM_ARRAY_JOB_ID") else None


def _own_job(environ: Mapping[str, str], suffix: str) -> str:
    """Return the id that means this job and no other.

    The last task of an array that starts has the array's own number as SLURM_JOB_ID, and squeue,
    scancel and scontrol take that for all tasks.
    """
    task = array_task(environ)
    if task is None:
        return environ.get(f"SLURM_JOB_ID{suffix}", "")
    return f"{environ['SLURM_ARRAY_JOB_ID']}_{task}"


def _group(environ: Mapping[str, str], suffix: str) -> Group:
    def read(name: str) -> str:
        value = environ.get(name + suffix, "")
        if not value:
            raise SlurmError(f"{name + suffix} is not set in job {environ.get('SLURM_JOB_ID')}")
        return value

    # 4(x2),8: CPUs by node, in the order of the node list
    counts = re.findall(r"(\d+)(?:\(x\d+\))?", read("SLURM_JOB_CPUS_PER_NODE"))
    return Group(
        job_id=_own_job(environ, suffix) or read("SLURM_JOB_ID"),
        partition=environ.get("SLURM_JOB_PARTITION" + suffix, ""),
        nodes=tuple(expand_hostlist(read("SLURM_JOB_NODELIST"))),
        cpus_per_node=min(int(count) for count in counts),
    )


def check_allocation(plan: Plan, allocation: Allocation) -> None:
    """Compare what the script asked Slurm for with what the recipe needs now.

    Raises:
        ConfigError: they differ, e.g. after `sbatch recipes/x.sh --set resources.rollout.nodes=4`.
    """
    needed = [component.nodes for component in plan.components]
    given = [len(group.nodes) for group in allocation.groups]
    if needed != given:
        raise ConfigError(
            f"the recipe needs components of {needed} nodes but job {allocation.job_id} has "
            f"{given}: the #SBATCH lines do not follow --set resources.*; use `relax-hpc submit "
            "RECIPE --set ...` or render the script again with `relax-hpc render`"
        )
