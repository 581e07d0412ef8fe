"""What would keep a run out of the queue or on it for ever, from Slurm's own words. Pure functions.

Each check gets the cluster and the run; where it needs no run, `run` may be None (`relax-hpc
doctor` without a recipe).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from relax_hpc.config import Config, Layout
from relax_hpc.launcher.check_list import Finding, Severity, found
from relax_hpc.launcher.cluster_facts import ClusterFacts, ClusterNode
from relax_hpc.launcher.plan import Component, Plan
from relax_hpc.launcher.site import Site
from relax_hpc.slurm import compress_hostlist

OLDEST, NEWEST = (22, 5), (25, 11)
"""Versions of Slurm that this was written for."""
_DEAD = frozenset({"DOWN", "ERROR", "FAIL", "NOT_RESPONDING", "UNKNOWN", "INVAL", "INVALID_REG"})
_CLOSED = frozenset({"DRAIN", "DRAINED", "DRAINING", "MAINT", "RESERVED", "BLOCKED"})
_BUSY_SHARE = 0.5
"""Load of an idle node over its CPUs: one forgotten rank of eight is less, a forgotten run more."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunAsk:
    """What a run asks Slurm for."""

    config: Config
    site: Site
    plan: Plan
    environ: Mapping[str, str]
    """Of the shell that would submit."""

    def partition(self, component: Component, facts: ClusterFacts) -> str:
        """Name of a component's partition, the default one filled in."""
        return component.partition or facts.default_partition


def _partitions(facts: ClusterFacts, run: RunAsk | None) -> list[str]:
    """Names of the run's partitions that exist (all without a run), each once."""
    if run is None:
        return list(facts.partitions)
    names = [
        name for c in run.plan.components for name in run.partition(c, facts).split(",") if name
    ]
    return [name for name in dict.fromkeys(names) if name in facts.partitions]


def version(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Compare the version of Slurm."""
    del run
    shown = f"Slurm is {facts.version[0]}.{facts.version[1]:02d}"
    if facts.version < OLDEST:
        yield found("slurm-version", Severity.ERROR, f"{shown}, older than 22.05")
    elif facts.version > NEWEST:
        yield found("slurm-version", Severity.WARNING, f"{shown}, newer than 25.11")


def partition(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Look for the run's partitions."""
    for component in run.plan.components if run else ():
        assert run is not None
        wanted = run.partition(component, facts)
        roles = ", ".join(component.roles)
        if not wanted:
            what = f"{roles}: names no partition, and the cluster has no default one"
            yield found("partition", Severity.ERROR, what)
        for name in wanted.split(",") if wanted else ():
            there = facts.partitions.get(name)
            if there is None:
                what = f"{roles}: {name!r} does not exist; there are {', '.join(facts.partitions)}"
                yield found("partition", Severity.ERROR, what)
            elif there.state in ("DOWN", "INACTIVE"):
                yield found("partition", Severity.ERROR, f"{roles}: {name!r} is {there.state}")
            elif there.state == "DRAIN":
                what = f"{roles}: {name!r} is {there.state}: it takes no new jobs"
                yield found("partition", Severity.ERROR, what)


def time_limit(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Compare the time asked for with each partition's limit."""
    for name in _partitions(facts, run) if run else ():
        assert run is not None
        limit, asked = facts.partitions[name].max_time_min, run.config.resources.time_min
        if limit is not None and asked > limit:
            what = f"resources.time_min={asked}, partition {name!r} allows {limit:g}"
            yield found("time-limit", Severity.ERROR, what)


def qos(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Compare the QOS of the run, and those of its partitions, with what they allow."""
    if run is None:
        return
    wanted, asked = run.config.resources.qos, run.config.resources.time_min
    if wanted and facts.qos is not None and wanted not in facts.qos:
        what = f"resources.qos={wanted!r} does not exist; there are {', '.join(facts.qos)}"
        yield found("qos", Severity.ERROR, what)
    names = _partitions(facts, run)
    for name in names if wanted else ():
        allowed, denied = facts.partitions[name].allow_qos, facts.partitions[name].deny_qos
        if wanted in denied or not allowed & {wanted, "ALL"}:
            yield found("qos", Severity.ERROR, f"partition {name!r} refuses QOS {wanted!r}")
    for name in dict.fromkeys((wanted, *(facts.partitions[n].qos for n in names))):
        limit = facts.qos[name].max_wall_min if facts.qos and name in facts.qos else None
        if limit is not None and asked > limit:
            what = f"resources.time_min={asked}, QOS {name!r} allows {limit:g}"
            yield found("qos", Severity.ERROR, what)


def account(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Compare the account with what the partitions allow."""
    wanted = run.config.resources.account if run else ""
    for name in _partitions(facts, run) if wanted else ():
        allowed, denied = (
            facts.partitions[name].allow_accounts,
            facts.partitions[name].deny_accounts,
        )
        if wanted in denied or not allowed & {wanted, "ALL"}:
            yield found("account", Severity.ERROR, f"partition {name!r} refuses {wanted!r}")


def _grouped(nodes: list[ClusterNode]) -> Iterator[tuple[str, list[ClusterNode]]]:
    """Yield (reason, nodes with it): one finding for a rack that is down."""
    reasons: dict[str, list[ClusterNode]] = {}
    for node in nodes:
        states = "+".join(sorted(node.states - {"IDLE"}))
        reasons.setdefault(f"{states} ({node.reason})" if node.reason else states, []).append(node)
    yield from reasons.items()


def _in_reach(facts: ClusterFacts, run: RunAsk | None) -> list[ClusterNode]:
    names = set(_partitions(facts, run))
    return [node for node in facts.nodes if names & set(node.partitions)]


def down_nodes(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Name dead nodes."""
    dead = [node for node in _in_reach(facts, run) if node.states & _DEAD]
    for why, nodes in _grouped(dead):
        what = f"{compress_hostlist([node.name for node in nodes])} {why}"
        yield found("down-node", Severity.WARNING, what)


def drained_nodes(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Name closed nodes."""
    closed = [n for n in _in_reach(facts, run) if n.states & _CLOSED and not n.states & _DEAD]
    for why, nodes in _grouped(closed):
        what = f"{compress_hostlist([node.name for node in nodes])} {why}"
        yield found("drained-node", Severity.WARNING, what)


def busy_nodes(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Name idle nodes with load. Nodes that share a host share its load: nothing is said."""
    hosts = [node.host for node in facts.nodes]
    for node in _in_reach(facts, run):
        is_alone = hosts.count(node.host) == 1
        if is_alone and node.states == {"IDLE"} and node.load > _BUSY_SHARE * max(1, node.cpus):
            what = f"{node.name} is idle for Slurm with a load of {node.load:g}"
            yield found("busy-node", Severity.WARNING, what)


def _lacks(node: ClusterNode, component: Component, run: RunAsk) -> str:
    """Return the first thing that a node has too little of."""
    if node.cpus < component.cpus_per_node:
        return f"{node.cpus} CPUs of {component.cpus_per_node}"
    memory = run.config.resources.mem_per_node_gb
    if node.memory_mb < 1024 * memory:
        return f"{node.memory_mb / 1024:.0f} GB of {memory}"
    if node.gres.get(run.site.gres, 0) < component.gpus_per_node:
        return f"{node.gres.get(run.site.gres, 0)} {run.site.gres} of {component.gpus_per_node}"
    return ""


def enough_nodes(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Count the nodes that fit and work; components in one partition take from the same ones."""
    asked: dict[str, int] = {}
    for component in run.plan.components if run else ():
        assert run is not None
        for name in run.partition(component, facts).split(","):
            if name not in facts.partitions:
                continue
            asked[name] = asked.get(name, 0) + component.nodes
            nodes = facts.nodes_of(name)
            fit = [node for node in nodes if not _lacks(node, component, run)]
            good = [node for node in fit if not node.states & (_DEAD | _CLOSED)]
            most = facts.partitions[name].max_nodes
            if most is not None and component.nodes > most:
                what = f"partition {name!r} allows {most:g} nodes a job, {component.nodes} asked"
                yield found("too-few-nodes", Severity.ERROR, what)
            if asked[name] > len(good):
                lacks = {why for node in nodes if (why := _lacks(node, component, run))}
                more = f"; others have {', '.join(sorted(lacks)[:3])}" if lacks else ""
                what = f"{len(fit)} nodes of {name!r} fit, {len(good)} work, {asked[name]} needed"
                # Nodes that are down come back; nodes that do not fit never do.
                severity = Severity.ERROR if asked[name] > len(fit) else Severity.WARNING
                yield found("too-few-nodes", severity, what + more)


def gres(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Compare the site's GRES with what nodes have."""
    for component in run.plan.components if run else ():
        assert run is not None
        wanted, count = run.site.gres, component.gpus_per_node
        name = run.partition(component, facts)
        if not count or name not in facts.partitions:
            continue
        nodes = facts.nodes_of(name)
        most = max((node.gres.get(wanted, 0) for node in nodes), default=0)
        if most < count:
            kinds = sorted({key for node in nodes for key in node.gres})
            there = f"its nodes have {', '.join(kinds)}" if kinds else "its nodes have none"
            what = f"{wanted}:{count} in partition {name!r}: {there}, at most {most} of {wanted}"
            yield found("gres", Severity.ERROR, what)


def gpus_per_task(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Look for options and variables that give each task its own GPU."""
    del facts
    if run is None:
        return
    for key, options in (
        ("directives", run.site.directives),
        ("srun_options", run.site.srun_options),
    ):
        for option in options:
            if option.startswith(("--gpus-per-task", "--ntasks-per-gpu", "--gpu-bind=single")):
                yield found(
                    "gpus-per-task", Severity.ERROR, f"site {run.site.name}: {key} {option}"
                )
    for name in ("SBATCH_GPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU"):
        if run.environ.get(name):
            what = f"the environment has {name}={run.environ[name]}"
            yield found("gpus-per-task", Severity.ERROR, what)


def requeue(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Look for what keeps a run from being requeued."""
    if run is None:
        return
    wants = run.site.requeue
    if wants and any(option.startswith("--no-requeue") for option in run.site.directives):
        what = f"site {run.site.name}: requeue = true, but directives have --no-requeue"
        yield found("requeue", Severity.ERROR, what)
    if wants and run.environ.get("SBATCH_NO_REQUEUE"):
        yield found("requeue", Severity.WARNING, "the environment has SBATCH_NO_REQUEUE")
    for name in _partitions(facts, run):
        mode = facts.partitions[name].preempt_mode
        if wants and mode.startswith("CANCEL"):
            what = f"partition {name!r} has PreemptMode={mode}: a preempted run ends"
            yield found("requeue", Severity.WARNING, what)
    if not wants:
        what = f"site {run.site.name}: requeue = false: the run ends at its time limit"
        yield found("requeue", Severity.INFO, what)


def het_jobs(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Look at what het jobs and steps over components need."""
    if run is None or len(run.plan.components) < 2:
        return
    scheduler = facts.settings.get("schedulertype", "")
    if scheduler and scheduler != "sched/backfill":
        what = f"SchedulerType={scheduler}: only sched/backfill starts heterogeneous jobs"
        yield found("het-jobs", Severity.ERROR, what)
    words = facts.settings.get("schedulerparameters", "").split(",")
    if "disable_hetjob_steps" in words and run.site.cross_component_steps:
        what = "SchedulerParameters has disable_hetjob_steps, the dcs step spans all components"
        yield found("het-jobs", Severity.ERROR, what)


def job_container(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Warn of private /dev/shm where components may share a node."""
    if run is None or "tmpfs" not in facts.settings.get("jobcontainertype", ""):
        return
    is_exclusive = any(option.startswith("--exclusive") for option in run.site.directives)
    names = [run.partition(component, facts) for component in run.plan.components]
    if run.config.resources.layout is Layout.HET and not is_exclusive and len(names) > 1:
        pools = [{node.name for node in facts.nodes_of(name)} for name in names]
        shared = any(a & b for i, a in enumerate(pools) for b in pools[:i])
        if shared:
            what = "JobContainerType=job_container/tmpfs, and components may share a node"
            yield found("job-container", Severity.WARNING, what)


def max_jobs(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Compare the queue with MaxJobCount, and one's own jobs with the QOS."""
    needed = len(run.plan.components) if run else 1
    limit = facts.settings.get("maxjobcount", "")
    if limit.isdigit():
        left = int(limit) - facts.num_jobs
        what = f"MaxJobCount={limit}, {facts.num_jobs} jobs are in the queue"
        if left < needed:
            yield found("max-jobs", Severity.ERROR, what)
        elif left < 0.05 * int(limit):
            yield found("max-jobs", Severity.WARNING, what)
    own = facts.qos.get(run.config.resources.qos) if facts.qos and run else None
    if own and own.max_submit is not None and facts.num_own_jobs + needed > own.max_submit:
        what = f"QOS {own.name!r} allows {own.max_submit} jobs, you have {facts.num_own_jobs}"
        yield found("max-jobs", Severity.ERROR, what)


def start(facts: ClusterFacts, run: RunAsk | None) -> Iterator[Finding]:
    """Pass on what `sbatch --test-only` said."""
    del run
    if facts.start_refused:
        yield found("start-estimate", Severity.ERROR, facts.start_refused)
    elif facts.start_estimate:
        yield found("start-estimate", Severity.INFO, facts.start_estimate)


ClusterCheck = Callable[[ClusterFacts, RunAsk | None], Iterator[Finding]]

CLUSTER_CHECKS: tuple[ClusterCheck, ...] = (
    version, partition, time_limit, qos, account, down_nodes, drained_nodes, busy_nodes,
    enough_nodes, gres, gpus_per_task, requeue, het_jobs, job_container, max_jobs, start,
)  # fmt: skip


def check_cluster(facts: ClusterFacts, run: RunAsk | None) -> list[Finding]:
    """Run all checks of the cluster."""
    return [finding for check in CLUSTER_CHECKS for finding in check(facts, run)]
