"""The plan: from a configuration to het components and job steps, without knowing node names.

Component order is a decision: the batch script (and the supervisor in it) runs on the first node
of component 0, and task 0 of a step over all components is there too. So the dcs component comes
first: supervisor, registry, queue and weight coordinator share one node, off the GPU nodes where
the recipe says so. Without a dcs partition they live on the first train node.

Placement in one allocation (layout single) is first fit, in the order train, ref, logprob, engines;
a role larger than a node takes whole nodes, so that every node of a step sees the same GPU list
(`RELAX_GPUS` is one value per step).
"""

import dataclasses
import json

from relax_hpc.config import Config, LauncherKind, Layout, RoleResources
from relax_hpc.errors import TopologyError
from relax_hpc.launcher.site import Site

Gpus = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One homogeneous part of the allocation; het group number = place in the plan."""

    roles: tuple[str, ...]
    partition: str
    """Empty: the cluster's default partition."""
    nodes: int
    cpus_per_node: int
    gpus_per_node: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """The tasks of a step in one component."""

    component: int
    nodes: tuple[int, ...]
    """Places in the component's node list."""
    tasks_per_node: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One job step: a fault domain, started and restarted as a whole."""

    role: str
    index: int
    """Engine number of a rollout step; 0 else."""
    parts: tuple[StepPart, ...]
    cpus_per_task: int
    """CPUs that one task may count on (OMP_NUM_THREADS)."""
    gpus: Gpus = ()
    """GPU places per local rank, within what the step sees of a node; empty: CPU."""

    @property
    def name(self) -> str:
        """`ROLE-INDEX`: the step's name in `squeue --steps`, logs and state.json."""
        return f"{self.role}-{self.index}"

    @property
    def num_tasks(self) -> int:
        """Tasks over all components."""
        return sum(len(part.nodes) * part.tasks_per_node for part in self.parts)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to ask Slurm for and what to start in it."""

    layout: Layout
    components: tuple[Component, ...]
    steps: tuple[StepPlan, ...]
    """In start order; the dcs first."""

    def to_json(self) -> str:
        """Render for `RUN/plan.json` and `relax-hpc plan --json`."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def build_plan(config: Config, site: Site) -> Plan:
    """Lay out components and steps of a run.

    Raises:
        TopologyError: ranks or engines cannot be placed on the nodes as asked.
    """
    resources = config.resources
    if resources.launcher is LauncherKind.LOCAL:  # this machine is the one node, for every layout
        resources = dataclasses.replace(resources, nodes=1)
        return _single_plan(dataclasses.replace(config, resources=resources), site)
    if resources.layout is Layout.HET:
        return _het_plan(config, site)
    return _single_plan(config, site)


def _roles(config: Config) -> dict[str, RoleResources]:
    """Return the roles that are placed one after the other (not the dcs)."""
    resources = config.resources
    found = {"train": resources.train, "ref": resources.ref, "logprob": resources.logprob}
    return {
        **{name: role for name, role in found.items() if role is not None},
        "rollout": resources.rollout,
    }


def _het_plan(config: Config, site: Site) -> Plan:
    resources = config.resources
    components: list[Component] = []
    steps: list[StepPlan] = []
    leader = resources.dcs.partition or site.partitions.get("dcs", "")
    if leader:
        components.append(
            Component(
                roles=("dcs",),
                partition=leader,
                nodes=resources.dcs.nodes,
                cpus_per_node=resources.dcs.cpus_per_rank + 1,
                gpus_per_node=0,
            )
        )
    for name, role in _roles(config).items():
        leads = not components  # the first component also carries the dcs leader
        extra = resources.dcs.cpus_per_rank if leads else 0
        components.append(
            Component(
                roles=("dcs", name) if leads else (name,),
                partition=site.partition_of(name, role.partition or resources.partition),
                nodes=role.nodes,
                cpus_per_node=role.ranks // role.nodes * role.cpus_per_rank + 1 + extra,
                gpus_per_node=min(resources.gpus_per_node, role.ranks // role.nodes),
            )
        )
        steps += _het_steps(config, name, role, len(components) - 1)
    return Plan(
        layout=Layout.HET,
        components=tuple(components),
        steps=(*_dcs_steps(config, site, components), *steps),
    )


def _het_steps(config: Config, name: str, role: RoleResources, component: int) -> list[StepPlan]:
    per_node = role.ranks // role.nodes
    with_gpus = config.resources.gpus_per_node > 0
    if name != "rollout":
        part = StepPart(
            component=component, nodes=tuple(range(role.nodes)), tasks_per_node=per_node
        )
        gpus: Gpus = tuple((gpu,) for gpu in range(per_node)) if with_gpus else ()
        return [
            StepPlan(role=name, index=0, parts=(part,), cpus_per_task=role.cpus_per_rank, gpus=gpus)
        ]
    tp = config.rollout.engine_tp
    if per_node % tp and tp % per_node:
        raise TopologyError(
            f"resources.rollout: {per_node} ranks per node cannot hold engines of engine_tp={tp}; "
            "one must be a multiple of the other"
        )
    engines = []
    for index in range(config.rollout.num_engines):
        first = index * tp
        nodes = tuple(range(first // per_node, (first + tp - 1) // per_node + 1))
        start = first % per_node
        gpus = (tuple(range(start, start + min(tp, per_node))),) if with_gpus else ()
        engines.append(_engine(config, index, component, nodes, gpus))
    return engines


def _engine(
    config: Config, index: int, component: int, nodes: tuple[int, ...], gpus: Gpus
) -> StepPlan:
    """Lay out one engine: one task per node, which owns all GPUs of the engine on that node."""
    role = config.resources.rollout
    ranks_per_node = config.rollout.engine_tp // len(nodes)
    return StepPlan(
        role="rollout",
        index=index,
        parts=(StepPart(component=component, nodes=nodes, tasks_per_node=1),),
        cpus_per_task=role.cpus_per_rank * ranks_per_node,
        gpus=gpus,
    )


def _dcs_steps(config: Config, site: Site, components: list[Component]) -> list[StepPlan]:
    """One task per node of the run: the node agents; task 0 also leads."""
    parts = [
        StepPart(component=number, nodes=tuple(range(component.nodes)), tasks_per_node=1)
        for number, component in enumerate(components)
    ]
    groups = [tuple(parts)] if site.cross_component_steps else [(part,) for part in parts]
    cpus = config.resources.dcs.cpus_per_rank
    return [
        StepPlan(role="dcs", index=index, parts=group, cpus_per_task=cpus)
        for index, group in enumerate(groups)
    ]


def _single_plan(config: Config, site: Site) -> Plan:
    steps = _single_gpu_steps(config) if config.resources.gpus_per_node else _cpu_steps(config)
    busy = [0] * config.resources.nodes
    for step in steps:
        for part in step.parts:
            for node in part.nodes:
                busy[node] += part.tasks_per_node * step.cpus_per_task
    component = Component(
        roles=("dcs", *_roles(config)),
        partition=config.resources.partition or site.partition,
        nodes=config.resources.nodes,
        cpus_per_node=max(busy) + 1 + config.resources.dcs.cpus_per_rank,
        gpus_per_node=config.resources.gpus_per_node,
    )
    return Plan(
        layout=Layout.SINGLE,
        components=(component,),
        steps=(*_dcs_steps(config, site, [component]), *steps),
    )


def _single_gpu_steps(config: Config) -> list[StepPlan]:
    gpus_per_node = config.resources.gpus_per_node
    free = _FreeGpus(config.resources.nodes, gpus_per_node)
    steps = []
    for name, role in _roles(config).items():
        if name == "rollout":
            break
        nodes, gpus = free.take(role.ranks, f"resources.{name}.ranks={role.ranks}")
        part = StepPart(component=0, nodes=nodes, tasks_per_node=len(gpus))
        steps.append(
            StepPlan(
                role=name,
                index=0,
                parts=(part,),
                cpus_per_task=role.cpus_per_rank,
                gpus=tuple((gpu,) for gpu in gpus),
            )
        )
    tp = config.rollout.engine_tp
    for index in range(config.rollout.num_engines):
        nodes, gpus = free.take(tp, f"engine {index} (rollout.engine_tp={tp})")
        steps.append(_engine(config, index, 0, nodes, (gpus,)))
    return steps


class _FreeGpus:
    """First fit of contiguous GPUs over the nodes of one allocation."""

    def __init__(self, nodes: int, gpus_per_node: int) -> None:
        self._size = gpus_per_node
        self._used = [0] * nodes

    def take(self, count: int, what: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (nodes, GPU places on each of them)."""
        if count <= self._size:
            for node, used in enumerate(self._used):
                if self._size - used >= count:
                    self._used[node] = used + count
                    return (node,), tuple(range(used, used + count))
        elif count % self._size == 0:
            whole = count // self._size
            for first in range(len(self._used) - whole + 1):
                span = range(first, first + whole)
                if all(self._used[node] == 0 for node in span):
                    for node in span:
                        self._used[node] = self._size
                    return tuple(span), tuple(range(self._size))
        left = ", ".join(str(self._size - used) for used in self._used)
        raise TopologyError(
            f"{what} does not fit: GPUs left per node are {left}; a role larger than a node needs "
            f"whole nodes (a multiple of {self._size}), a smaller one must fit on one node"
        )


def _cpu_steps(config: Config) -> list[StepPlan]:
    """Spread roles over the nodes in turns: train first, engines over the nodes that are left."""
    count = config.resources.nodes
    steps = []
    cursor = 0
    for name, role in _roles(config).items():
        if name == "rollout":
            break
        width = min(role.nodes, count)
        if role.ranks % width:
            raise TopologyError(
                f"resources.{name}: {role.ranks} ranks do not fit evenly on {width} nodes"
            )
        nodes = tuple(sorted((cursor + i) % count for i in range(width)))
        part = StepPart(component=0, nodes=nodes, tasks_per_node=role.ranks // width)
        steps.append(StepPlan(role=name, index=0, parts=(part,), cpus_per_task=role.cpus_per_rank))
        cursor += width
    spare = list(range(cursor, count)) or list(range(count))
    for index in range(config.rollout.num_engines):
        steps.append(_engine(config, index, 0, (spare[index % len(spare)],), ()))
    return steps
