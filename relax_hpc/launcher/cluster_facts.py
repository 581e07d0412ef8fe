"""What Slurm says about itself before anything is queued: settings, partitions, nodes, QOS.

The parsers take text, so that recorded output of any version is as good as a live cluster;
`gather` asks. Five questions in all, whatever the size of the cluster.
"""

import contextlib
import dataclasses
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping

from relax_hpc import slurm
from relax_hpc.errors import RelaxError, SlurmError
from relax_hpc.topology.node_facts import user_name

_TEST_ONLY_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNode:
    """One node of `scontrol show node`."""

    name: str
    host: str
    states: frozenset[str]
    """`IDLE`, `DRAIN`, `NOT_RESPONDING` ...: Slurm's words, flags of the short form spelled out."""
    reason: str
    cpus: int
    memory_mb: int
    load: float
    gres: Mapping[str, int]
    """`gpu` and `gpu:h800` -> count: with and without the type."""
    partitions: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """One partition of `scontrol show partition`."""

    name: str
    is_default: bool
    state: str
    max_time_min: float | None
    """None: no limit."""
    max_nodes: float | None
    allow_qos: frozenset[str]
    """{"ALL"}: every one."""
    deny_qos: frozenset[str]
    allow_accounts: frozenset[str]
    deny_accounts: frozenset[str]
    qos: str
    """Of the partition itself; its limits hold too."""
    preempt_mode: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Qos:
    """One row of `sacctmgr show qos`."""

    name: str
    max_wall_min: float | None
    max_submit: int | None
    """Jobs per user."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """A cluster as it is now."""

    version: tuple[int, int]
    settings: Mapping[str, str]
    """`scontrol show config`, names in lower case."""
    partitions: Mapping[str, Partition]
    nodes: tuple[ClusterNode, ...]
    qos: Mapping[str, Qos] | None
    """None without accounting."""
    num_jobs: int = 0
    """In the queue, of all users; components and array tasks count."""
    num_own_jobs: int = 0
    start_estimate: str = ""
    """Of `sbatch --test-only`; empty: not asked."""
    start_refused: str = ""

    def nodes_of(self, partition: str) -> list[ClusterNode]:
        """Nodes of a partition."""
        return [node for node in self.nodes if partition in node.partitions]

    @property
    def default_partition(self) -> str:
        """Its name; empty if there is none."""
        return next((p.name for p in self.partitions.values() if p.is_default), "")


def gather(script: str = "") -> ClusterFacts:
    """Ask Slurm.

    Args:
        script: batch script to ask a start estimate for; empty = none.

    Raises:
        ConfigError: there is no Slurm here.
        SlurmError: slurmctld does not answer.
    """
    ask = slurm.run_command
    settings = parse_settings(ask(["scontrol", "show", "config"]))
    jobs = ask(["squeue", "--noheader", "--array", "--format=%u"]).split()
    estimate, refused = start_estimate(script) if script else ("", "")
    return ClusterFacts(
        version=parse_version(ask(["scontrol", "--version"])),
        settings=settings,
        partitions=parse_partitions(ask(["scontrol", "-a", "-o", "show", "partition"])),
        nodes=parse_nodes(ask(["scontrol", "-a", "-o", "show", "node"])),
        qos=_ask_qos() if "slurmdbd" in settings.get("accountingstoragetype", "") else None,
        num_jobs=len(jobs),
        num_own_jobs=jobs.count(user_name(os.getuid())),
        start_estimate=estimate,
        start_refused=refused,
    )


def _ask_qos() -> dict[str, Qos] | None:
    command = ["sacctmgr", "--noheader", "--parsable2", "show", "qos"]
    with contextlib.suppress(RelaxError):  # slurmdbd is down: limits are checked by slurmctld
        return parse_qos(slurm.run_command([*command, "format=Name,MaxWall,MaxSubmitJobsPerUser"]))
    return None


def parse_version(text: str) -> tuple[int, int]:
    """Read `slurm-wlm 22.05.8` or `slurm 24.11.0-1`.

    Raises:
        SlurmError: no version in it.
    """
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise SlurmError(f"scontrol --version says {text.strip()!r}: no version")
    return int(match[1]), int(match[2])


def parse_settings(text: str) -> dict[str, str]:
    """Read `scontrol show config`."""
    pairs = re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, re.MULTILINE)
    return {key.lower(): "" if value == "(null)" else value for key, value in pairs}


def parse_minutes(text: str) -> float | None:
    """Read a time limit of Slurm (`1-00:00:00`, `30:00`, `UNLIMITED`); None: there is no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        return None
    days, first, second, third = match.groups()
    if days is not None:  # D-HH[:MM[:SS]]
        hours, minutes, seconds = first, second or 0, third or 0
    elif third is not None:
        hours, minutes, seconds = first, second, third
    else:  # minutes[:seconds]
        hours, minutes, seconds = 0, first, second or 0
    return int(days or 0) * 1440 + int(hours) * 60 + int(minutes) + int(seconds) / 60


def _lines(text: str, first: str) -> list[dict[str, str]]:
    rows = []
    for line in text.splitlines():
        if line.startswith(f"{first}="):
            # Reason and OS hold blanks: a value goes on until the next KEY=.
            pairs = re.findall(r"([A-Za-z][\w:/]*)=(.*?)(?=\s+[A-Za-z][\w:/]*=|\s*$)", line)
            rows.append(dict(pairs))
    return rows


def _names(text: str) -> frozenset[str]:
    return frozenset(word for word in text.split(",") if word and word != "(null)")


def _count(text: str) -> float | None:
    return int(text) if text.isdigit() else None


def parse_partitions(text: str) -> dict[str, Partition]:
    """Read `scontrol --oneliner show partition`."""
    found = {}
    for row in _lines(text, "PartitionName"):
        name = row["PartitionName"]
        found[name] = Partition(
            name=name,
            is_default=row.get("Default") == "YES",
            state=row.get("State", "UP"),
            max_time_min=parse_minutes(row.get("MaxTime", "UNLIMITED")),
            max_nodes=_count(row.get("MaxNodes", "")),
            allow_qos=_names(row.get("AllowQos", "ALL")),
            deny_qos=_names(row.get("DenyQos", "")),
            allow_accounts=_names(row.get("AllowAccounts", "ALL")),
            deny_accounts=_names(row.get("DenyAccounts", "")),
            qos=row.get("QoS", "").replace("N/A", ""),
            preempt_mode=row.get("PreemptMode", ""),
        )
    return found


_FLAGS = {
    "*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "%": "POWERING_DOWN",
    "$": "MAINT", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "!": "POWER_DOWN", "-": "PLANNED",
}  # fmt: skip
"""sinfo(1), NODE STATE CODES."""


def parse_states(text: str) -> frozenset[str]:
    """Read `IDLE+DRAIN`, `DOWN*`, `MIXED+CLOUD+NOT_RESPONDING`."""
    states = set()
    for word in text.split("+"):
        states.add(word.rstrip("".join(_FLAGS)))
        states |= {_FLAGS[sign] for sign in word if sign in _FLAGS}
    return frozenset(states)


def parse_gres(text: str) -> dict[str, int]:
    """Read `gpu:h800:8(S:0-1),gpu:a100:2`: counts of `gpu` and of each `gpu:TYPE`."""
    counts: dict[str, int] = {}
    for part in re.split(r",(?![^(]*\))", re.sub(r"\(null\)", "", text)):
        match = re.match(r"(\w+)(?::([^:(]+))??(?::(\d+))?(?:\(|$)", part)
        if match is None:
            continue
        name, kind, count = match[1], match[2], int(match[3] or 1)
        for key in {name, f"{name}:{kind}" if kind else name}:
            counts[key] = counts.get(key, 0) + count
    return counts


def parse_nodes(text: str) -> tuple[ClusterNode, ...]:
    """Read `scontrol --oneliner show node`."""
    nodes = []
    for row in _lines(text, "NodeName"):
        load = row.get("CPULoad", "")
        nodes.append(
            ClusterNode(
                name=row["NodeName"],
                host=row.get("NodeHostName", row["NodeName"]),
                states=parse_states(row.get("State", "UNKNOWN").split()[0]),
                reason=row.get("Reason", ""),
                cpus=int(row.get("CPUEfctv", row.get("CPUTot", "0"))),
                memory_mb=int(row.get("RealMemory", "0")),
                load=float(load) if re.fullmatch(r"[\d.]+", load) else 0.0,
                gres=parse_gres(row.get("Gres", "")),
                partitions=tuple(row.get("Partitions", "").split(",")),
            )
        )
    return tuple(nodes)


def parse_qos(text: str) -> dict[str, Qos]:
    """Read `sacctmgr --parsable2 show qos format=Name,MaxWall,MaxSubmitJobsPerUser`."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    return {
        name: Qos(
            name=name,
            max_wall_min=parse_minutes(wall),
            max_submit=int(submit) if submit.isdigit() else None,
        )
        for name, wall, submit in rows
    }


def start_estimate(script: str) -> tuple[str, str]:
    """Ask `sbatch --test-only` about a script; nothing is queued.

    Returns:
        (what Slurm says about the start, why it would refuse); one of them is empty.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".sh", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        try:
            done = subprocess.run(
                ["sbatch", "--test-only", file.name],
                env=slurm.submission_environment(),
                capture_output=True,
                text=True,
                timeout=_TEST_ONLY_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as err:
            return "", f"sbatch --test-only: {err}"
    said = " ".join((done.stderr or done.stdout).split()).removeprefix("sbatch: ")
    said = re.sub(r"\bJob \d+ to start", "would start", said)
    return ("", said) if done.returncode else (said, "")
