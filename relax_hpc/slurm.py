"""Slurm's words and commands: job states, sbatch, scontrol, scancel, partitions, environments.

Nothing here keeps state; every function may be called from any thread. Commands that only ask are
repeated for a while when slurmctld does not answer (it may be restarted at any time); commands that
change something run once.
"""

import contextlib
import dataclasses
import enum
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from relax_hpc.errors import ConfigError, SlurmError
from relax_hpc.slurm_notation import JobId as JobId
from relax_hpc.slurm_notation import compress_hostlist as compress_hostlist
from relax_hpc.slurm_notation import expand_hostlist as expand_hostlist
from relax_hpc.slurm_notation import parse_job_id as parse_job_id

_log = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------
# Job states
# ---------------------------------------------------------------------------------------------


class Fate(enum.StrEnum):
    """What a Slurm job state means for a run."""

    WAITING = "waiting"
    """Will run, or run again under the same id, by itself or when released."""
    RUNNING = "running"
    """Holds nodes, or its end is not finished yet."""
    DONE = "done"
    FAILED = "failed"
    """Its own fault: the same again would fail again."""
    RESUMABLE = "resumable"
    """Ended by no fault of its own: continue from the last checkpoint. Slurm may requeue it too."""
    CANCELLED = "cancelled"
    """Ended on purpose: never resume by itself."""


STATES: dict[str, Fate] = {
    "PENDING": Fate.WAITING,
    "REQUEUED": Fate.WAITING,
    "REQUEUE_FED": Fate.WAITING,
    "REQUEUE_HOLD": Fate.WAITING,
    "RESV_DEL_HOLD": Fate.WAITING,
    "SPECIAL_EXIT": Fate.WAITING,
    "EXPEDITING": Fate.WAITING,
    "RUNNING": Fate.RUNNING,
    "CONFIGURING": Fate.RUNNING,
    "COMPLETING": Fate.RUNNING,
    "SUSPENDED": Fate.RUNNING,
    "STOPPED": Fate.RUNNING,
    "RESIZING": Fate.RUNNING,
    "SIGNALING": Fate.RUNNING,
    "STAGE_OUT": Fate.RUNNING,
    "POWER_UP_NODE": Fate.RUNNING,
    "COMPLETED": Fate.DONE,
    "FAILED": Fate.FAILED,
    "OUT_OF_MEMORY": Fate.FAILED,
    "TIMEOUT": Fate.RESUMABLE,
    "PREEMPTED": Fate.RESUMABLE,
    "NODE_FAIL": Fate.RESUMABLE,
    "BOOT_FAIL": Fate.RESUMABLE,
    "LAUNCH_FAILED": Fate.RESUMABLE,
    "RECONFIG_FAIL": Fate.RESUMABLE,
    "CANCELLED": Fate.CANCELLED,
    "DEADLINE": Fate.CANCELLED,
    "REVOKED": Fate.CANCELLED,
}
"""Every state and flag of squeue(1) and sacct(1), JOB STATE CODES, up to Slurm 25.11."""

MAY_RETURN = frozenset(("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL"))
"""States after which Slurm itself may requeue the job under the same id, a moment later."""

_STATE_OF_CODE: dict[str, str] = dict(
    re.findall(
        r"(\w+)=(\w+)",
        "BF=BOOT_FAIL CA=CANCELLED CD=COMPLETED CF=CONFIGURING CG=COMPLETING DL=DEADLINE F=FAILED "
        "LF=LAUNCH_FAILED NF=NODE_FAIL OOM=OUT_OF_MEMORY PD=PENDING PR=PREEMPTED R=RUNNING "
        "RD=RESV_DEL_HOLD RF=REQUEUE_FED RH=REQUEUE_HOLD RQ=REQUEUED RS=RESIZING RV=REVOKED "
        "SI=SIGNALING SE=SPECIAL_EXIT SO=STAGE_OUT ST=STOPPED S=SUSPENDED TO=TIMEOUT",
    )
)

_PRECEDENCE = (Fate.WAITING, Fate.RUNNING, Fate.RESUMABLE, Fate.CANCELLED, Fate.FAILED, Fate.DONE)


def parse_state(text: str) -> tuple[str, Fate]:
    """Read a state as sacct, squeue or scontrol print it: `CANCELLED by 1000`, `CG`, `CANCELLED+`.

    Of several (`FAILED,REQUEUED`) the one that leaves the job alive wins. A state that this table
    does not know counts as resumable, with a warning: a new Slurm may have new ones.
    """
    found = [_known_state(word) for word in re.split(r"[,|]", text.strip()) if word.strip()]
    known = [(name, STATES[name]) for name in found if name in STATES]
    if known:
        return min(known, key=lambda pair: _PRECEDENCE.index(pair[1]))
    _log.warning("unknown Slurm job state state=%r: treated as resumable", text)
    return (found[0] if found else "UNKNOWN"), Fate.RESUMABLE


def _known_state(word: str) -> str:
    name = word.split()[0].upper()
    if name.endswith("+"):  # a column that was too narrow
        full = [state for state in STATES if state.startswith(name[:-1])]
        name = full[0] if len(full) == 1 else name
    return _STATE_OF_CODE.get(name, name)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """State of a job as one of Slurm's sources says it. For a het job: of its leader."""

    job_id: str
    name: str
    """Slurm's word, e.g. TIMEOUT; UNKNOWN if no source knows the job."""
    fate: Fate
    exit_code: int = 0
    """Of the batch script."""
    signal: int = 0
    """That ended the batch script; 0 = none."""
    derived_exit_code: int = 0
    """Highest of its steps: a batch script that ends with 0 hides failed steps."""
    reason: str = ""
    nodes: str = ""
    """Host list; empty while it waits."""
    restarts: int = 0
    source: str = ""
    """sacct, scontrol, squeue or jobcomp."""
    components: tuple[tuple[str, str], ...] = ()
    """Het job: (job id, state name) of each component, in order."""

    @property
    def is_over(self) -> bool:
        """True when it holds no nodes and Slurm will not run it again under this id by itself."""
        return self.fate not in (Fate.WAITING, Fate.RUNNING)


def job_state(job_id: str) -> JobState:
    """Ask sacct; without accounting scontrol, then squeue, then the job completion log.

    Right on a cluster without accounting: slurmctld forgets an ended job after MinJobAge (300 s),
    JobCompType=jobcomp/filetxt remembers it. Called by the submitting side; one command per source.

    Raises:
        ConfigError: no Slurm here, or not a job id.
        SlurmError: slurmctld does not answer.
    """
    wanted = parse_job_id(job_id)
    for source in (
        _state_from_sacct,
        _state_from_scontrol,
        _state_from_squeue,
        _state_from_jobcomp,
    ):
        state = source(wanted)
        if state is not None:
            return state
    _log.warning("no source of Slurm knows the job job_id=%s", job_id)
    return JobState(job_id=job_id, name="UNKNOWN", fate=Fate.RESUMABLE)


_SACCT_FIELDS = ("JobID", "JobIDRaw", "State", "ExitCode", "DerivedExitCode", "NodeList")
_SACCT_NAMES = ("id", "raw", "state", "exit", "derived", "nodes")


def _state_from_sacct(wanted: JobId) -> JobState | None:
    command = ["sacct", "--noheader", "--parsable2", "--allocations", "--whole-hetjob=yes"]
    command += [f"--format={','.join(_SACCT_FIELDS)}", f"--jobs={wanted.request}"]
    text = _ask_or_none(command, r"accounting storage is disabled|slurmdbd|Connection refused")
    rows = [line.split("|") for line in (text or "").splitlines()]
    size = len(_SACCT_NAMES)
    jobs = [dict(zip(_SACCT_NAMES, row, strict=True)) for row in rows if len(row) == size]
    return _choose(wanted, jobs, "sacct")


def show_job(job_id: str) -> list[dict[str, str]]:
    """Fields of `scontrol --oneliner show job`, one dictionary per job or component; [] if unknown.

    The live node list is in `NodeList` (the environment of a job keeps lost nodes).
    """
    command = ["scontrol", "--oneliner", "--details", "show", "job", parse_job_id(job_id).request]
    text = _ask_or_none(command, r"Invalid job id")
    return [_oneliner(line) for line in (text or "").splitlines() if line.startswith("JobId=")]


def _oneliner(line: str) -> dict[str, str]:
    # A job's name may hold blanks and `=`.
    line = re.sub(r" JobName=.*? (?=(?:HetJobIdSet|UserId)=)", " ", line, count=1)
    fields: dict[str, str] = {}
    for key, value in re.findall(r"(?:^| )([A-Za-z][\w:/]*)=(\S*)", line):
        fields.setdefault(key, "" if value == "(null)" else value)
    return fields


def _state_from_scontrol(wanted: JobId) -> JobState | None:
    jobs = []
    for fields in show_job(wanted.request):
        shown = fields["JobId"]
        if "HetJobId" in fields:
            shown = f"{fields['HetJobId']}+{fields['HetJobOffset']}"
        elif "ArrayJobId" in fields:
            shown = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}"
        jobs.append(
            {
                "id": shown,
                "raw": fields["JobId"],
                "state": fields["JobState"],
                "exit": fields.get("ExitCode", ""),
                "derived": fields.get("DerivedExitCode", ""),
                "nodes": fields.get("NodeList", ""),
                "reason": fields.get("Reason", ""),
                "restarts": fields.get("Restarts", "0"),
            }
        )
    return _choose(wanted, jobs, "scontrol")


def _state_from_squeue(wanted: JobId) -> JobState | None:
    command = ["squeue", "--noheader", "--states=all", f"--jobs={wanted.request}"]
    text = _ask_or_none([*command, "--format=%i|%A|%T|%N|%r"], r"Invalid job id")
    names = ("id", "raw", "state", "nodes", "reason")
    rows = [line.split("|", 4) for line in (text or "").splitlines()]
    jobs = [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]
    return _choose(wanted, jobs, "squeue")


def _state_from_jobcomp(wanted: JobId) -> JobState | None:
    """Last record of the job in the file of jobcomp/filetxt. Array tasks have raw ids there."""
    path = _jobcomp_path()
    if path is None or wanted.array is not None:
        return None
    number = wanted.job + (wanted.het_offset or 0)
    jobs = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(f"JobId={number} "):
                fields = _oneliner(line.replace(" Name=", " JobName=", 1))
                jobs = [
                    {
                        "id": str(wanted),
                        "state": re.findall(r" JobState=(\S+) Partition=", line)[-1],
                        "exit": fields.get("ExitCode", ""),
                        "derived": fields.get("DerivedExitCode", ""),
                        "nodes": fields.get("NodeList", ""),
                    }
                ]
    return _choose(wanted, jobs, "jobcomp")


def _jobcomp_path() -> Path | None:
    text = _ask_or_none(["scontrol", "show", "config"], r"^$") or ""
    fields = dict(re.findall(r"^(JobComp\w+)\s*=\s*(\S+)", text, re.MULTILINE))
    path = Path(fields.get("JobCompLoc", ""))
    usable = fields.get("JobCompType") == "jobcomp/filetxt" and os.access(path, os.R_OK)
    return path if usable and path.is_file() else None


def _choose(wanted: JobId, jobs: list[dict[str, str]], source: str) -> JobState | None:
    """Pick the wanted job among what a source listed: a het job's leader, the liveliest task."""
    parsed = [(i, job) for job in jobs if (i := _parse_or_none(job["id"])) is not None]
    mine = [
        (_PRECEDENCE.index(parse_state(job["state"])[1]), number)
        for number, (listed, job) in enumerate(parsed)
        if _is_it(wanted, listed) or (job.get("raw") == str(wanted))
    ]
    if not mine:
        return None
    job_id, job = parsed[min(mine)[1]]
    name, fate = parse_state(job["state"])
    exit_code, signal_number = _exit_pair(job.get("exit", ""))
    het = [(str(i), parse_state(j["state"])[0]) for i, j in parsed if i.het_offset is not None]
    return JobState(
        job_id=str(wanted),
        name=name,
        fate=fate,
        exit_code=exit_code,
        signal=signal_number,
        derived_exit_code=_exit_pair(job.get("derived", ""))[0],
        reason=re.sub(r"^None$", "", job.get("reason", "")),
        nodes=job.get("nodes", "").replace("None assigned", ""),
        restarts=int(job.get("restarts", "0")),
        source=source,
        components=tuple(sorted(het)) if job_id.het_offset is not None else (),
    )


def _parse_or_none(text: str) -> JobId | None:
    # scontrol writes the waiting rest of an array without brackets: 123_4,6%2
    text = re.sub(r"_(\d+[-,:%].*)$", r"_[\1]", text)
    with contextlib.suppress(ConfigError):
        return parse_job_id(text)
    return None


def _is_it(wanted: JobId, listed: JobId) -> bool:
    if wanted.job != listed.job or listed.step is not None:
        return False
    if wanted.array is None:
        return (listed.het_offset or 0) == (wanted.het_offset or 0)
    if wanted.array == listed.array:
        return True
    tasks = listed.array_tasks
    return wanted.array.isdigit() and tasks is not None and int(wanted.array) in tasks


def _exit_pair(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


# ---------------------------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------------------------

COMMAND_TIMEOUT_S = 60.0
"""One Slurm command; slurmctld's own MessageTimeout is 10 s by default."""
ASK_PATIENCE_S = 30.0
"""How long questions are repeated while slurmctld does not answer."""

_SILENT = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Zero Bytes were trans"
    r"|Transport endpoint is not connected|Resource temporarily unavailable",
    re.IGNORECASE,
)
_REMEDIES = (
    (r"invalid partition", "see `sinfo`; set resources.partition or resources.ROLE.partition"),
    (r"Invalid account", "see `sacctmgr show assoc user=$USER`; set resources.account"),
    (r"Invalid qos", "see `sacctmgr show qos`; set resources.qos"),
    (
        r"node configuration is not available",
        "no node has these CPUs, memory or GPUs; see `sinfo -Nel`",
    ),
    (r"generic resource", "the partition's nodes have no such GPUs (GRES); see `sinfo -o '%P %G'`"),
    (r"time limit is invalid|PartitionTimeLimit", "ask for less time, see `sinfo -o '%P %l'`"),
    (
        r"Node count specification invalid|More processors requested",
        "more nodes or CPUs than the partition has or allows; see `sinfo -o '%P %D %c'`",
    ),
    (r"presently disabled", "the job was submitted with --no-requeue, or the site forbids requeue"),
    (r"Access.* denied|not authorized", "the job belongs to another user"),
    (r"establish a configuration source|ClusterName needs|configuration file", "set SLURM_CONF"),
)


def require_slurm() -> None:
    """Refuse to go on without Slurm: commands on PATH and a configuration that exists.

    Raises:
        ConfigError: with the remedy. (Slurm itself waits a minute for a missing SLURM_CONF.)
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "no Slurm on this machine: sbatch not found on PATH; go to a login node, try "
            "tools/slurm_cluster up, or run without Slurm by --set resources.launcher=local"
        )
    conf = os.environ.get("SLURM_CONF", "")
    if conf and not Path(conf).is_file():
        raise ConfigError(
            f"no Slurm here: SLURM_CONF={conf} does not exist; unset it, or start the local "
            'cluster again: eval "$(tools/slurm_cluster up)"'
        )


def run_command(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> str:
    """Run one Slurm command and return its stdout.

    Raises:
        ConfigError: the command or the configuration does not exist.
        SlurmError: it failed or did not end in time; with its message and a remedy if known.
    """
    require_slurm()
    try:
        done = subprocess.run(
            list(command),
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as err:
        raise ConfigError(
            f"{command[0]} not found ({err}); is Slurm's bin folder on PATH?"
        ) from err
    except subprocess.TimeoutExpired as err:
        raise SlurmError(f"{command[0]}: no answer in {timeout_s:g} s; is slurmctld up?") from err
    if done.returncode != 0:
        raise _error(command, done.returncode, done.stderr.strip() or done.stdout.strip())
    return done.stdout


def _error(command: Sequence[str], code: int, text: str) -> SlurmError | ConfigError:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = "; ".join(lines[-3:]) if lines else "no message"
    remedy = next((r for p, r in _REMEDIES if re.search(p, text, re.IGNORECASE)), "")
    message = f"{command[0]} failed (exit code {code}): {said}" + (
        f" -> {remedy}" if remedy else ""
    )
    return ConfigError(message) if remedy == "set SLURM_CONF" else SlurmError(message)


def _ask_or_none(command: Sequence[str], expected: str) -> str | None:
    """Run a command that only asks. None when it fails with a message that matches `expected`."""
    deadline, pause_s = time.monotonic() + ASK_PATIENCE_S, 0.5
    while True:
        try:
            return run_command(command)
        except SlurmError as err:
            if re.search(expected, str(err)):
                return None
            if not _SILENT.search(str(err)) or time.monotonic() + pause_s > deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 8.0)  # slow down: many clients may wait for one slurmctld


def submit(
    script: Path,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Submit a batch script and return the job id (of the leader, for a het job).

    Args:
        script: with its `#SBATCH` lines.
        options: for sbatch, before the script; they overrule the script's lines.
        env: of sbatch; default `submission_environment()`, so that it may be called inside a job.
        cwd: working directory of the job.
    """
    environment = submission_environment() if env is None else env
    text = run_command(["sbatch", "--parsable", *options, str(script)], env=environment, cwd=cwd)
    try:
        return str(parse_job_id(text.strip().splitlines()[-1]))
    except (ConfigError, IndexError) as err:
        raise SlurmError(f"sbatch --parsable answered {text!r} instead of a job id") from err


def cancel(job_id: str) -> None:
    """Cancel a job (all components of a het job); harmless if it is over."""
    with contextlib.suppress(_Over):
        _change(["scancel", parse_job_id(job_id).request])


def requeue(job_id: str, exclude: Sequence[str] = (), end_timeout_s: float = 180.0) -> None:
    """Requeue a job from outside of it and start it at once, without the given nodes.

    A requeued job is not eligible for 121 s, but its owner may set its StartTime, and ExcNodeList
    while it is held (22.05 to 25.11). The call ends the job, so a caller inside is killed by it.

    Args:
        job_id: of a batch job; for a het job any form, all components are requeued.
        exclude: nodes that the next start must not use.
        end_timeout_s: for its processes to end (KillWait of the site, epilog).

    Raises:
        SlurmError: unknown job, requeue forbidden (--no-requeue, JobRequeue=0), it does not end.
    """
    job = parse_job_id(job_id).request
    _change(["scontrol", "requeuehold" if exclude else "requeue", job])
    _wait_until_requeued(job, end_timeout_s)
    if exclude:
        _change(["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(exclude)}"])
        _change(["scontrol", "release", job])
    _change(["scontrol", "update", f"JobId={job}", "StartTime=now"])


def _wait_until_requeued(job: str, timeout_s: float) -> None:
    # When a job has ended Slurm sets its begin time anew: an earlier StartTime=now would be lost.
    deadline = time.monotonic() + timeout_s
    while any(parse_state(part["JobState"])[1] is Fate.RUNNING for part in show_job(job)):
        if time.monotonic() > deadline:
            raise SlurmError(f"requeued job {job} still has processes after {timeout_s:g} s")
        time.sleep(0.5)


class _Over(SlurmError):
    pass


def _change(command: list[str]) -> None:
    try:
        run_command(command)
    except SlurmError as err:
        if re.search(r"already completing or completed|Invalid job id", str(err)):
            raise _Over(str(err)) from err
        raise


def list_partitions() -> dict[str, str]:
    """Partitions of this cluster, hidden ones too: name -> state (UP, DOWN, DRAIN, INACTIVE)."""
    text = _ask_or_none(["scontrol", "--all", "--oneliner", "show", "partition"], r"^$") or ""
    pattern = r"^PartitionName=(\S+).*? State=(\S+)"
    return dict(re.findall(pattern, text, re.MULTILINE))


def require_partitions(names: Sequence[str]) -> None:
    """Check before submission that partitions exist and take jobs. Empty names (default) pass.

    Raises:
        ConfigError: names the valid ones.
    """
    wanted = sorted({part for name in names for part in name.split(",") if part})
    if not wanted:
        require_slurm()
        return
    present = list_partitions()
    for name in wanted:
        if name not in present:
            valid = ", ".join(sorted(present))
            raise ConfigError(f"partition {name!r} does not exist on this cluster; valid: {valid}")
        if present[name] in ("DOWN", "INACTIVE"):
            raise ConfigError(f"partition {name!r} is {present[name]}: it takes no jobs now")


# ---------------------------------------------------------------------------------------------
# Environments
# ---------------------------------------------------------------------------------------------

_KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT"})
_STRANGE = ("PMI_", "PMIX_", "PMI2_", "OMPI_", "MPIR_", "HYDRA_")
_STEP_LEAKS = re.compile(
    r"SLURM_(CPU_BIND|MEM_BIND|GPU_BIND|HOSTFILE$|DISTRIBUTION|NTASKS|NPROCS|CPUS_PER_TASK$"
    r"|CPUS_PER_GPU|TRES_PER_TASK|GPUS$|GPUS_PER|GPU_FREQ|GRES$|NNODES$|JOB_NUM_NODES$|EXPORT_ENV"
    r"|HINT|THREADS_PER_CORE|THREAD_SPEC|CORE_SPEC|EXCLUSIVE|EXACT|OVERLAP|WHOLE|WAIT|KILL_BAD_EXIT"
    r"|NO_KILL|LABELIO|MPI_TYPE|STD(IN|OUT|ERR)MODE|UNBUFFEREDIO|RESV_PORTS|SPREAD_JOB|HET_GROUP"
    r"|STEP_|STEPID|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|SRUN_|LAUNCH_NODE|TOPOLOGY|PRIO_PROCESS)"
)


def submission_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment for sbatch: nothing of the job or step that we may run in, SLURM_CONF kept.

    A nested sbatch reads SLURM_* and SBATCH_* as options (SLURM_HOSTFILE made it arbitrary, CPU
    bindings do not fit the new allocation), and the new job would inherit ranks and PMI sockets.
    """
    source = os.environ if environ is None else environ
    drop = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", *_STRANGE)
    return {k: v for k, v in source.items() if k in _KEPT or not k.startswith(drop)}


def step_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment for srun inside a batch script: the allocation, but no options of another step.

    srun takes defaults from SLURM_* of the batch script or an outer step; the caller passes nodes,
    tasks, CPUs and GPUs explicitly. SLURM_JOB_NUM_NODES goes too: after a node loss under --no-kill
    it contradicts the allocation and srun fails.
    """
    source = os.environ if environ is None else environ
    drop = ("SRUN_", "SLURMD_", *_STRANGE)
    kept = {k: v for k, v in source.items() if not k.startswith(drop)}
    return {k: v for k, v in kept.items() if not _is_leak(k)}


def _is_leak(name: str) -> bool:
    # SLURM_NTASKS_HET_GROUP_1 describes a component; srun does not read it.
    return not re.search(r"_HET_GROUP_\d+$", name) and bool(_STEP_LEAKS.match(name))
