"""Which nodes a preflight tests: those of the job that it runs in, of a recipe, or a list."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from relax_hpc import slurm
from relax_hpc.config import Config, LauncherKind
from relax_hpc.errors import ConfigError
from relax_hpc.launcher import preflight_step, run_checks
from relax_hpc.launcher.allocation import Allocation, slurm_allocation
from relax_hpc.launcher.node_checks import NodeNeeds
from relax_hpc.launcher.plan import Plan
from relax_hpc.launcher.preflight_step import NodeGroup, Outcome, PreflightPlan
from relax_hpc.launcher.site import Site

_STEP_MIN = 3
"""Time limit of a job that a preflight makes for itself, in minutes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What the command line names. A recipe, or nodes, or nothing (inside of a job)."""

    config: Config | None
    """Resolved."""
    plan: Plan | None
    site: Site
    nodes: str = ""
    """Host list of Slurm."""
    partition: str = ""


def test_nodes(
    target: Target,
    environ: Mapping[str, str],
    *,
    mpi: str = "auto",
    queue_s: float = 120.0,
    step_program: str = "",
) -> Outcome:
    """Test the nodes of this job, or those that a target names.

    Raises:
        ConfigError: nothing names nodes, a wrong host list, a run without Slurm.
        SlurmError: the step could not be started.
    """
    if target.config and target.config.resources.launcher is LauncherKind.LOCAL:
        raise ConfigError("resources.launcher=local: there are no nodes to test; relax-hpc doctor")
    slurm.require_slurm()
    is_inside = "SLURM_JOB_ID" in environ and not target.nodes
    groups = _of_job(target, environ) if is_inside else _by_hand(target)
    config, needs = target.config, NodeNeeds()
    if config is not None and target.plan is not None:
        shape = run_checks.shape_of(config)
        needs = run_checks.node_needs(config, target.site, target.plan, shape)
    plan = PreflightPlan(
        groups=groups,
        site=target.site,
        needs=needs,
        folder=Path(config.run.folder if config else "runs").absolute(),
        model=config.model.path if config else "",
        mpi=mpi,
        queue_s=0.0 if is_inside else queue_s,
        step_program=step_program,
    )
    clean = slurm.step_environment if is_inside else slurm.submission_environment
    return preflight_step.run(plan, clean(environ))


def _of_job(target: Target, environ: Mapping[str, str]) -> tuple[NodeGroup, ...]:
    return groups_of(slurm_allocation(environ), target.plan, environ)


def groups_of(
    allocation: Allocation, plan: Plan | None, environ: Mapping[str, str]
) -> tuple[NodeGroup, ...]:
    """Return the nodes of an allocation, by component."""
    found = []
    for number, group in enumerate(allocation.groups):
        text = environ.get("SLURM_GPUS_ON_NODE", "0")
        gpus = int(text) if text.isdigit() else 0
        if plan is not None and number < len(plan.components):
            gpus = plan.components[number].gpus_per_node
        het = (f"--het-group={number}",) if allocation.is_het else ()
        found.append(
            NodeGroup(
                options=(*het, f"--nodelist={','.join(group.nodes)}", "--overlap"),
                num_nodes=len(group.nodes),
                nodes=group.nodes,
                gpus=gpus,
                cpus=group.cpus_per_node,
            )
        )
    return tuple(found)


def _by_hand(target: Target) -> tuple[NodeGroup, ...]:
    common = [f"--time={_STEP_MIN}"]
    if target.config is not None:
        resources = target.config.resources
        common += [f"--account={resources.account}"] if resources.account else []
        common += [f"--qos={resources.qos}"] if resources.qos else []
    if target.nodes:
        names = tuple(slurm.expand_hostlist(target.nodes))
        if not names:
            raise ConfigError(f"--nodes {target.nodes!r}: names no node")
        options = [*common, f"--nodelist={','.join(names)}"]
        options += [f"--partition={target.partition}"] if target.partition else []
        return (NodeGroup(options=tuple(options), num_nodes=len(names), nodes=names),)
    if target.plan is None:
        raise ConfigError(
            "not inside a Slurm job: give a recipe, or nodes (--nodes 'n[01-04]' --partition P)"
        )
    return tuple(
        NodeGroup(
            options=(
                *common,
                *((f"--partition={part.partition}",) if part.partition else ()),
            ),
            num_nodes=part.nodes,
            gpus=part.gpus_per_node,
        )
        for part in target.plan.components
    )
