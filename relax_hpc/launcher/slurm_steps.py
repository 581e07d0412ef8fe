"""Steps as `srun` job steps of the allocation that the supervisor runs in.

The step's name (`rollout-3-i2`) is unique within the attempt, so its ids are looked up by name when
a step must be ended or must be proven gone; nothing parses srun's progress messages. A het step has
one id per component (`17.4`, `18.4`).

A step is gone when srun has ended and, unless srun ended well, `squeue --steps` no longer lists the
name: the death of srun alone leaves the tasks running (radical.pilot#3267).
"""

import dataclasses
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from relax_hpc import slurm
from relax_hpc.errors import SlurmError
from relax_hpc.launcher import child
from relax_hpc.launcher.allocation import Allocation
from relax_hpc.launcher.container import container_program, srun_container_options
from relax_hpc.launcher.plan import Plan, StepPart
from relax_hpc.launcher.site import GpuOption, Site
from relax_hpc.launcher.steps import StepExit, StepHandle, StepLaunch, describe_end, tail

_LOOKUP_INTERVAL_S = 2.0
"""Between two questions to slurmctld about the same ended step."""

_TASK_END = re.compile(
    r"^srun: error: (?P<node>\S+): tasks? (?P<tasks>[0-9,-]+): (?P<how>.+)$", re.MULTILINE
)
"""srun(1) prints the first failure before it ends the others: everything after it is a victim."""

_TASK_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Hangup": signal.SIGHUP,
    "Interrupt": signal.SIGINT,
    "User defined signal 1": signal.SIGUSR1,
    "User defined signal 2": signal.SIGUSR2,
}
"""strsignal(3) texts of srun's messages."""


def srun_command(
    launch: StepLaunch,
    plan: Plan,
    site: Site,
    allocation: Allocation,
    folders: Sequence[Path] = (),
) -> list[str]:
    """Build the argument list of a step: one srun, with one section per het component.

    `folders` are what a container of the site must show, the working folder first.

    Source: srun(1). Choices:
    - `--overlap`: steps share the nodes, and a restarted step must not wait for the memory of its
      predecessor; `-c` is the node's CPUs divided by the step's tasks and `--cpu-bind=none`, so
      that overlapping steps are not all bound to the first cores.
    - `--kill-on-bad-exit=1 --wait=0`: a failed task ends the step, a task that ends well does not.
    - GPUs per node and `--gpu-bind=none`: per-task binding hides peers and breaks CUDA IPC.
    - everything explicit: no node or task count is inherited from the batch script's environment.
    """
    container_options = srun_container_options(site.container, folders)
    has_gpus = bool(launch.plan.gpus)
    program = container_program(site.container, launch.program, folders, has_gpus)
    command = ["srun"]
    for number, (part, nodes) in enumerate(zip(launch.plan.parts, launch.nodes, strict=True)):
        if number:
            command.append(":")
        command += _part_options(launch, part, nodes, plan, site, allocation)
        command += container_options
        command += program
    return command


def _part_options(
    launch: StepLaunch,
    part: StepPart,
    nodes: tuple[str, ...],
    plan: Plan,
    site: Site,
    allocation: Allocation,
) -> list[str]:
    options = [f"--het-group={part.component}"] if allocation.is_het else []
    cpus = max(1, allocation.groups[part.component].cpus_per_node // part.tasks_per_node)
    options += [
        f"--job-name={launch.step_name}",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes) * part.tasks_per_node}",
        f"--ntasks-per-node={part.tasks_per_node}",
        f"--cpus-per-task={cpus}",
        f"--nodelist={','.join(nodes)}",
        "--distribution=block",
        "--overlap",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--mpi=none",
        "--export=ALL",
        "--input=none",
        "--open-mode=append",
        f"--output={_log_pattern(launch, part)}",
    ]
    gpus = plan.components[part.component].gpus_per_node
    if gpus and not launch.plan.gpus:
        options.append("--gres=none")
    elif gpus:
        options += [gpu_request(site, gpus), "--gpu-bind=none"]
    return [*options, *site.srun_options]


def _log_pattern(launch: StepLaunch, part: StepPart) -> str:
    """Return srun's file name pattern of a part's tasks.

    In a step over het components `%t` counts the component's first rank twice (seen with 22.05), so
    there the name is made of the component and `%n`, the node's number in it.
    """
    place, mark = ("rank", "%t") if len(launch.plan.parts) == 1 else (_group_place(part), "%n")
    return str(launch.log(place)).replace("%", "%%").removesuffix(".log") + f"{mark}.log"


def _group_place(part: StepPart) -> str:
    return f"group{part.component}-node"


def gpu_request(site: Site, gpus_per_node: int) -> str:
    """Return the site's option that asks for GPUs; the same word for sbatch and srun."""
    if site.gpu_option is GpuOption.GPUS_PER_NODE:
        kind = site.gres.partition(":")[2]
        return f"--gpus-per-node={f'{kind}:' if kind else ''}{gpus_per_node}"
    return f"--gres={site.gres}:{gpus_per_node}"


class SlurmBackend:
    """Starts srun steps in the current allocation."""

    def __init__(
        self,
        plan: Plan,
        site: Site,
        allocation: Allocation,
        environ: Mapping[str, str],
        folders: Sequence[Path] = (),
    ) -> None:
        self._plan, self._site, self._allocation = plan, site, allocation
        self._folders = folders
        self._environ = dict(environ)

    def start(self, launch: StepLaunch) -> StepHandle:
        """Start one srun."""
        command = srun_command(launch, self._plan, self._site, self._allocation, self._folders)
        with launch.log("srun").open("ab") as log:
            process = subprocess.Popen(
                child.command(command, signal.SIGTERM),
                env={**self._environ, **launch.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return _SlurmHandle(launch, self._allocation, process)


class _SlurmHandle:
    def __init__(
        self, launch: StepLaunch, allocation: Allocation, process: subprocess.Popen[bytes]
    ) -> None:
        self._launch = launch
        self._allocation = allocation
        self._process = process
        self._next_lookup = 0.0
        self._num_kills = 0

    def poll(self) -> StepExit | None:
        code = self._process.poll()
        if code is None or (code != 0 and not self._is_gone()):
            return None
        return read_exit(self._launch, code if code >= 0 else 128 - code)

    def terminate(self) -> None:
        if not self._signal_step("--signal=TERM"):
            self._process.terminate()  # no step yet: srun still waits for its creation

    def kill(self) -> None:
        self._num_kills += 1
        if not self._signal_step("--signal=KILL") or self._num_kills > 1:
            self._process.kill()

    def _is_gone(self) -> bool:
        now = time.monotonic()
        if now < self._next_lookup:
            return False
        self._next_lookup = now + _LOOKUP_INTERVAL_S
        return not self._signal_step("--signal=KILL")

    def _signal_step(self, option: str) -> bool:
        """Signal all tasks; False when Slurm lists no such step. True when slurmctld is silent."""
        try:
            ids = find_steps(self._allocation.job_ids, self._launch.step_name)
            if ids:
                slurm.run_command(["scancel", option, *ids])
        except SlurmError:
            return True  # the caller has a deadline and asks again
        return bool(ids)


def find_steps(job_ids: tuple[str, ...], name: str) -> list[str]:
    """Return the ids of the running steps with this name, e.g. `["17.4", "18.4"]`."""
    text = slurm.run_command(
        ["squeue", "--steps", "--noheader", f"--jobs={','.join(job_ids)}", "--format=%i|%j"]
    )
    found = []
    for line in text.splitlines():
        step_id, _, step_name = line.strip().partition("|")
        if step_name == name:
            found.append(step_id)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _TaskEnd:
    node: str
    rank: str
    exit_code: int


def read_exit(launch: StepLaunch, srun_code: int) -> StepExit:
    """Say how a step ended from srun's exit code and messages.

    srun's own code is often that of a victim (a task that exited with 7 made it 143), so the first
    task message decides.
    """
    if srun_code == 0:
        return StepExit(exit_code=0, cause="", log=_task_log(launch, "", "0"))
    srun_log = launch.log("srun")
    end = _first_task_end("\n".join(tail(srun_log, lines=1000, limit_bytes=1 << 20)))
    if end is not None:
        # srun counts ranks from 0 in each component of a het step, so there only the node is said
        is_rank = len(launch.plan.parts) == 1
        who = f"rank {end.rank}" if is_rank else "the task"
        told = launch.told_cause(int(end.rank) if is_rank else None)
        return StepExit(
            exit_code=end.exit_code,
            cause=f"{who} on {end.node} {describe_end(end.exit_code)}{told}",
            log=_task_log(launch, end.node, end.rank),
        )
    errors = [line for line in tail(srun_log) if line.startswith(("srun: error:", "slurmstepd"))]
    said = launch.told_cause(None) or (f": {errors[-1]}" if errors else "")
    return StepExit(
        exit_code=srun_code, cause=f"srun {describe_end(srun_code)}{said}", log=srun_log
    )


def _task_log(launch: StepLaunch, node: str, rank: str) -> Path:
    if len(launch.plan.parts) == 1:
        return launch.log(f"rank{rank}")
    for part, nodes in zip(launch.plan.parts, launch.nodes, strict=True):
        if node in nodes:
            return launch.log(f"{_group_place(part)}{nodes.index(node)}")
    return launch.log("srun")


def _first_task_end(text: str) -> _TaskEnd | None:
    match = _TASK_END.search(text)
    if match is None:
        return None
    rank = re.split("[,-]", match["tasks"])[0]
    how = match["how"].removesuffix(" (core dumped)")
    if how.startswith("Exited with exit code "):
        code = int(how.rpartition(" ")[2])
    elif how == "Out Of Memory":
        code = 128 + signal.SIGKILL
    else:
        code = 128 + _TASK_SIGNALS.get(how, signal.SIGKILL)
    return _TaskEnd(match["node"], rank, code)
