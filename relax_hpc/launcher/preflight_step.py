"""`relax-hpc preflight`: one srun step, one task per node; slow and broken nodes are named.

This process serves the tasks (node_survey.py) and judges; the tasks are relax_hpc.steps.preflight.
The number of rounds does not grow with the number of nodes, and every wait ends by the clock:
from the first report on, the whole takes less than a minute.
"""

import contextlib
import dataclasses
import logging
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_hpc import slurm
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcServer, create_keys
from relax_hpc.errors import ConfigError, SlurmError
from relax_hpc.launcher import child, node_scores
from relax_hpc.launcher.check_list import Finding, Severity, by_severity, found, merged, would_fail
from relax_hpc.launcher.diagnosis import LAST_PREFLIGHT, FoundNode, LastPreflight
from relax_hpc.launcher.node_checks import NodeNeeds, check_node
from relax_hpc.launcher.node_scores import Tolerance
from relax_hpc.launcher.node_survey import Limits, NodeSurvey
from relax_hpc.launcher.site import Site
from relax_hpc.launcher.slurm_steps import gpu_request
from relax_hpc.launcher.steps import describe_end
from relax_hpc.log import kv
from relax_hpc.runfolder import RunFolder, open_run_folder, refuse_unwritable, write_atomic
from relax_hpc.topology.node_report import SERVICE, Orders

_LOG = logging.getLogger(__name__)

_END_S = 5.0
"""For srun to end after its tasks were told to."""
_POLL_S = 0.05
_TASK_END = re.compile(r"^srun: error: (\S+): tasks? [0-9,-]+: ", re.MULTILINE)
_LAST_WORDS = re.compile(r"^preflight (\S+): (.+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Nodes that one section of srun starts tasks on."""

    options: tuple[str, ...]
    """Which nodes: `--het-group=1 --nodelist=...`, or `--partition=...` outside of a job."""
    num_nodes: int
    nodes: tuple[str, ...] = ()
    """Their names, where they are known before the step runs."""
    gpus: int = 0
    cpus: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PreflightPlan:
    """What to test, and how."""

    groups: tuple[NodeGroup, ...]
    site: Site
    needs: NodeNeeds
    folder: Path
    """Shared: the folder of the runs."""
    model: str = ""
    mpi: str = "auto"
    """Of srun: pmi2, pmix, none; auto: pmi2 where srun has it."""
    queue_s: float = 0.0
    """Outside of a job: how long the step may wait for nodes."""
    limits: Limits = dataclasses.field(default_factory=Limits)
    allow: Tolerance = dataclasses.field(default_factory=Tolerance)
    step_program: str = ""
    """A program in place of relax_hpc.steps.preflight (tests)."""

    @property
    def num_nodes(self) -> int:
        """Of all groups."""
        return sum(group.num_nodes for group in self.groups)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a preflight found."""

    nodes: tuple[str, ...]
    """That reported, in rank order."""
    findings: tuple[Finding, ...]
    took_s: float
    """From the first report to the end."""
    mpi: str
    """How MPI went: `pmi2`, or why it was left out."""
    latency_us: float | None
    """Median over the nodes, TCP."""
    gbytes_per_s: float | None
    allreduce_ms: float | None
    """MPI, 1 MiB over all nodes; the slowest rank."""

    @property
    def exclude(self) -> tuple[str, ...]:
        """Nodes that have an error of their own."""
        named = {f.node for f in self.findings if f.node and f.severity is Severity.ERROR}
        return tuple(sorted(named))

    @property
    def is_good(self) -> bool:
        """No finding is an error."""
        return not would_fail(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        tree = dataclasses.asdict(self)
        exclude = slurm.compress_hostlist(list(self.exclude)) if self.exclude else ""
        return {**tree, "exclude": exclude, "ok": self.is_good}


def run(plan: PreflightPlan, environ: Mapping[str, str]) -> Outcome:
    """Run the step and judge what it told.

    Raises:
        ConfigError: the shared folder cannot be written here.
        SlurmError: no task was started: the queue took too long, or srun failed.
    """
    mpi = _mpi_type(plan.mpi)
    with _own_folder(plan.folder) as folder:
        canary = secrets.token_hex(16)
        write_atomic(folder.path / "canary", canary)
        host = socket.gethostname()
        server_identity = Identity(
            run=folder, role="supervisor", node=host, address_prefix=plan.site.address_prefix
        )
        server = RpcServer(folder, SERVICE, server_identity)
        survey = NodeSurvey(plan.num_nodes, plan.limits, plan.allow, use_mpi=mpi != "none")
        survey.register(server)
        server.start_thread()
        try:
            orders = Orders(
                folder=str(folder.path),
                canary=canary,
                model=plan.model,
                address_prefix=plan.site.address_prefix,
                ends_at_s=plan.limits.total_s,
                may_use_mpi=mpi != "none",
                gpus=max(group.gpus for group in plan.groups),
            )
            said = _run_step(plan, mpi, orders, survey, folder, environ)
        finally:
            server.stop()
    outcome = _judge(plan, survey, said, mpi)
    _remember(plan.folder, outcome)
    return outcome


@contextlib.contextmanager
def _own_folder(parent: Path) -> Iterator[RunFolder]:
    """Make a folder with keys of its own; removed at the end."""
    with refuse_unwritable(parent):
        parent.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=".preflight-", dir=parent))
    try:
        folder = open_run_folder(path)
        create_keys(folder)
        yield folder
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _mpi_type(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    # 22.05 lists on stderr, newer ones on stdout.
    done = subprocess.run(
        ["srun", "--mpi=list"], capture_output=True, text=True, timeout=30, check=False
    )
    return "pmi2" if re.search(r"\bpmi2\b", done.stdout + done.stderr) else "none"


def srun_command(plan: PreflightPlan, mpi: str) -> list[str]:
    """Build the step: one task per node, all CPUs and GPUs of it, a section per group."""
    program = plan.step_program or "-m"
    command = ["srun"]
    for number, group in enumerate(plan.groups):
        if number:
            command.append(":")
        command += [
            *group.options,
            f"--nodes={group.num_nodes}",
            f"--ntasks={group.num_nodes}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={group.cpus}",
            "--job-name=preflight",
            "--distribution=block",
            "--cpu-bind=none",
            "--kill-on-bad-exit=0",  # one bad node must not end the test of the others
            "--wait=0",
            f"--mpi={mpi}",
            "--export=ALL",
            "--input=none",
        ]
        if group.gpus:
            command += [gpu_request(plan.site, group.gpus), "--gpu-bind=none"]
        command += [*plan.site.srun_options, sys.executable, program]
        command += [] if plan.step_program else ["relax_hpc.steps.preflight"]
    return command


def _run_step(
    plan: PreflightPlan,
    mpi: str,
    orders: Orders,
    survey: NodeSurvey,
    folder: RunFolder,
    environ: Mapping[str, str],
) -> str:
    """Start srun and wait for its end, or for a deadline; returns what it wrote."""
    keep = {k: v for k, v in environ.items() if not k.startswith("RELAX_")}
    environment = {
        **keep,
        "OMP_NUM_THREADS": "1",
        **plan.site.environment,
        "RELAX_PREFLIGHT": msgspec.json.encode(orders).decode(),
    }
    log = folder.path / "srun.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            child.command(srun_command(plan, mpi), signal.SIGTERM),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _await(process, plan, survey, log)
    said = log.read_text(encoding="utf-8", errors="replace")
    if not survey.reports and not _LAST_WORDS.search(said):
        why = " | ".join(said.strip().splitlines()[-3:]) or "srun said nothing"
        raise SlurmError(
            f"preflight: no task reported (srun {describe_end(_shell_code(process))}): {why}; if "
            "it waited for nodes, see `squeue --me` and give it more time with --wait"
        )
    return said


def _shell_code(process: subprocess.Popen[bytes]) -> int:
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def lost_nodes(said: str) -> set[str]:
    """Return the nodes whose task ended badly, from srun's messages."""
    found: set[str] = set()
    for hosts in _TASK_END.findall(said):
        with contextlib.suppress(ConfigError):  # a message that is not all there yet
            found.update(slurm.expand_hostlist(hosts))
    return found


def _await(
    process: subprocess.Popen[bytes], plan: PreflightPlan, survey: NodeSurvey, log: Path
) -> None:
    limits = plan.limits
    started, seen = time.monotonic(), 0
    while process.poll() is None:
        now, first = time.monotonic(), survey.first_s
        end = started + plan.queue_s + limits.total_s if first is None else first + limits.total_s
        if now > end:
            _end(process)
            return
        size = log.stat().st_size
        if size != seen:
            seen = size
            survey.lost(lost_nodes(log.read_text(encoding="utf-8", errors="replace")))
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End srun; it passes SIGTERM on, and SIGKILL to srun leaves tasks to their own SIGALRM."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_S)
            return
    process.wait(timeout=_END_S)


def _judge(plan: PreflightPlan, survey: NodeSurvey, said: str, mpi: str) -> Outcome:
    names = survey.names
    facts = [survey.reports[rank].facts for rank in names]
    findings: list[Finding] = []
    for fact in facts:
        findings += check_node(fact, plan.needs)
    measured = list(survey.measured.values())
    findings += node_scores.judge_kinds(facts)
    findings += node_scores.judge_ways(names, measured, plan.allow)
    findings += node_scores.judge_mpi(names, survey.mpi, plan.allow)
    findings += node_scores.judge_gpus(names, survey.gpu, plan.allow)
    findings = merged(findings, plan.num_nodes)
    findings += _silent(plan, names, said)
    findings += _unfinished(survey, names, with_gpus=any(group.gpus for group in plan.groups))
    scores = [score for score in node_scores.best(measured).values() if score]
    reduces = [one.allreduce_ms for one in survey.mpi.values() if one.allreduce_ms]
    return Outcome(
        nodes=tuple(names.values()),
        findings=tuple(by_severity(findings)),
        took_s=round(time.monotonic() - (survey.first_s or time.monotonic()), 2),
        mpi=_mpi_word(survey, mpi),
        latency_us=_median([score.latency_us for score in scores]),
        gbytes_per_s=_median([score.gbytes_per_s for score in scores]),
        allreduce_ms=max(reduces, default=None),
    )


def _median(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _mpi_word(survey: NodeSurvey, mpi: str) -> str:
    if survey.mpi_asked:
        return mpi
    if mpi == "none":
        return "not used (--mpi none, or srun has no pmi2)"
    lacking = sorted(r.facts.node for r in survey.reports.values() if not r.has_mpi)
    if lacking:
        return f"not used: no mpi4py or MPI library on {slurm.compress_hostlist(lacking)}"
    return "not used: a node is missing"


def _silent(plan: PreflightPlan, names: Mapping[int, str], said: str) -> Iterator[Finding]:
    """Name the nodes that did not report: by their last words, or as what is left over."""
    words = dict(_LAST_WORDS.findall(said))
    here = set(names.values())
    for node, why in words.items():
        if node not in here:
            yield found("silent-node", Severity.ERROR, why, node)
    known = [node for group in plan.groups for node in group.nodes]
    for node in known:
        if node not in here and node not in words:
            yield found("silent-node", Severity.ERROR, "its task did not report", node)
    missing = plan.num_nodes - len(here | set(words))
    if not known and missing > 0:
        tail = " | ".join(said.strip().splitlines()[-2:])
        yield found("silent-node", Severity.ERROR, f"{missing} nodes did not report: {tail}")


def _unfinished(
    survey: NodeSurvey, names: Mapping[int, str], *, with_gpus: bool
) -> Iterator[Finding]:
    """Name the ranks that began the later tests and did not tell the result."""
    for check, is_asked, told in (
        ("mpi", survey.mpi_asked, set(survey.mpi)),
        ("gpu", with_gpus, set(survey.gpu)),
    ):
        silent = [node for rank, node in names.items() if rank not in told]
        if is_asked and silent:
            what = f"no result of {slurm.compress_hostlist(silent)} in time"
            yield found(check, Severity.WARNING, what)


def _remember(folder: Path, outcome: Outcome) -> None:
    """Leave the named nodes for `relax-hpc doctor`."""
    named: dict[str, list[str]] = {}
    for finding in outcome.findings:
        if finding.node in outcome.exclude and finding.severity is Severity.ERROR:
            named.setdefault(finding.node, []).append(f"{finding.check}: {finding.what}")
    last = LastPreflight(
        time=time.time(),
        nodes=tuple(FoundNode(node=node, what="; ".join(what)) for node, what in named.items()),
    )
    try:
        write_atomic(folder / LAST_PREFLIGHT, msgspec.json.encode(last).decode())
    except OSError as err:
        _LOG.warning("preflight not remembered %s", kv(folder=folder, reason=err))


def lines(outcome: Outcome) -> Iterator[str]:
    """Yield the lines of the command."""
    yield from map(str, outcome.findings)
    parts = [f"{len(outcome.nodes)} nodes in {outcome.took_s:.1f} s"]
    if outcome.latency_us is not None and outcome.gbytes_per_s is not None:
        parts.append(f"TCP {outcome.latency_us:.0f} us, {outcome.gbytes_per_s:.2f} GB/s (medians)")
    parts.append(f"MPI {outcome.mpi}")
    if outcome.allreduce_ms is not None:
        parts.append(f"all-reduce of 1 MiB {outcome.allreduce_ms:.2f} ms")
    yield "; ".join(parts)
    if outcome.exclude:
        yield f"exclude: {slurm.compress_hostlist(list(outcome.exclude))}"
