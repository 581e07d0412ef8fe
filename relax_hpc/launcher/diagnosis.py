"""`relax-hpc doctor [RECIPE]`: gather facts, run every check, say what would fail."""

import dataclasses
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from relax_hpc import slurm
from relax_hpc.config import Config, LauncherKind
from relax_hpc.errors import RelaxError
from relax_hpc.launcher import cluster_facts, preflight, run_checks
from relax_hpc.launcher.check_list import Finding, Severity, by_severity, found, softened
from relax_hpc.launcher.cluster_checks import RunAsk, check_cluster
from relax_hpc.launcher.node_checks import MACHINE_CHECKS, NodeNeeds, check_node
from relax_hpc.launcher.plan import Plan
from relax_hpc.launcher.render import render_script
from relax_hpc.launcher.site import Site
from relax_hpc.topology import node_facts
from relax_hpc.topology.node_facts import NodeFacts

LAST_PREFLIGHT = "preflight.json"
"""In the folder of the runs: what the newest preflight found."""
_REMEMBERED_S = 24 * 3600.0


class FoundNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that a preflight named."""

    node: str
    what: str


class LastPreflight(msgspec.Struct, frozen=True, kw_only=True):
    """What `relax-hpc preflight` leaves for `doctor`."""

    time: float
    nodes: tuple[FoundNode, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All that is known. Gathered by `gather`; a test fills it with faults."""

    machine: NodeFacts
    is_node_of_run: bool
    """The run's processes will be on this machine; else its faults are only warnings."""
    run: run_checks.RunFacts | None = None
    cluster: cluster_facts.ClusterFacts | None = None
    slurm_fault: str = ""
    last: LastPreflight | None = None
    now_s: float = 0.0
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)


def gather(
    config: Config | None, site: Site | None, plan: Plan | None, environ: Mapping[str, str]
) -> Facts:
    """Gather facts about this machine, Slurm, and a run if one is given (config, site, plan)."""
    cluster, slurm_fault = None, ""
    is_local = config is not None and config.resources.launcher is LauncherKind.LOCAL
    if config is not None:
        config = preflight.resolve_inputs(config)
    if not is_local:
        try:
            cluster = cluster_facts.gather(_script(config, site, plan))
        except RelaxError as err:
            slurm_fault = str(err)
    host = socket.gethostname().partition(".")[0]
    one_host = cluster is not None and {node.host for node in cluster.nodes} == {host}
    run = None
    if config is not None and site is not None and plan is not None:
        run = run_checks.gather(config, site, plan, one_host=one_host)
    return Facts(
        machine=node_facts.gather(host, with_gpus=False),
        is_node_of_run=is_local or one_host or "SLURM_JOB_ID" in environ,
        run=run,
        cluster=cluster,
        slurm_fault=slurm_fault,
        last=read_last(Path(config.run.folder if config else "runs")),
        now_s=time.time(),
        environ=environ,
    )


def _script(config: Config | None, site: Site | None, plan: Plan | None) -> str:
    if config is None or site is None or plan is None:
        return ""
    return render_script(config, plan, site, ["--config", os.devnull], config.run.name)


def read_last(folder: Path) -> LastPreflight | None:
    """Read what the newest preflight left; None if there is none, or it is of another version."""
    try:
        return msgspec.json.decode((folder / LAST_PREFLIGHT).read_bytes(), type=LastPreflight)
    except (OSError, msgspec.DecodeError):
        return None


def diagnose(facts: Facts) -> list[Finding]:
    """Run all checks; the worst findings first."""
    run = facts.run
    needs = NodeNeeds()
    if run is not None:
        needs = run_checks.node_needs(run.config, run.site, run.plan, run.shape)
    machine = check_node(facts.machine, needs, MACHINE_CHECKS)
    findings = machine if facts.is_node_of_run else softened(machine)
    if run is not None:
        findings += run_checks.check_run(run)
    if facts.slurm_fault:
        severity = Severity.ERROR if run is not None else Severity.WARNING
        findings.append(found("no-slurm", severity, facts.slurm_fault))
    if facts.cluster is not None:
        ask = None
        if run is not None:
            ask = RunAsk(config=run.config, site=run.site, plan=run.plan, environ=facts.environ)
        findings += check_cluster(facts.cluster, ask)
    findings += _remembered(facts)
    return by_severity(findings)


def _remembered(facts: Facts) -> Iterator[Finding]:
    """Name the nodes that a preflight of the last day named."""
    if facts.last is None or facts.now_s - facts.last.time > _REMEMBERED_S:
        return
    hours = (facts.now_s - facts.last.time) / 3600
    for node in facts.last.nodes:
        what = f"{node.what} (preflight {hours:.1f} h ago)"
        yield found("slow-node", Severity.WARNING, what, node.node)


def excluded(last: LastPreflight | None) -> str:
    """Return a host list for `sbatch --exclude`; empty if no node was named."""
    names = sorted({node.node for node in last.nodes}) if last else []
    return slurm.compress_hostlist(names) if names else ""


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the lines of the command: one per finding, then the sum."""
    yield from map(str, findings)
    counts = {severity: sum(f.severity is severity for f in findings) for severity in Severity}
    if not any(counts.values()):
        yield "nothing found"
        return
    told = ", ".join(f"{n} {severity}{'s' if n > 1 else ''}" for severity, n in counts.items() if n)
    yield told
