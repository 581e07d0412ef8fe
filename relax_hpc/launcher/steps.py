"""Job steps as the supervisor sees them: what to launch, a handle to it, how it ended."""

import dataclasses
import math
import signal
import typing
from pathlib import Path

from relax_hpc.control.identity import LocalPlace, task_environment
from relax_hpc.launcher.plan import StepPlan
from relax_hpc.runfolder import RunFolder


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepLaunch:
    """One start of one step."""

    plan: StepPlan
    nodes: tuple[tuple[str, ...], ...]
    """Node names for each part of the plan's step."""
    run: RunFolder
    attempt: int
    incarnation: int
    address_prefix: str
    extra_environment: dict[str, str]
    """Of the site; OMP_NUM_THREADS."""
    program: tuple[str, ...]
    """Argument list of a task. Never holds a secret: argument lists are public on a node."""

    @property
    def step_name(self) -> str:
        """Unique within the attempt: `ROLE-INDEX-iINCARNATION`, seen in `squeue --steps`."""
        return f"{self.plan.name}-i{self.incarnation}"

    def environment(self, local: LocalPlace | None = None) -> dict[str, str]:
        """Build the variables of all tasks, or of one that no srun places."""
        return {
            **self.extra_environment,
            **task_environment(
                run=self.run,
                role=self.plan.role,
                index=self.plan.index,
                attempt=self.attempt,
                incarnation=self.incarnation,
                address_prefix=self.address_prefix,
                gpus=self.plan.gpus,
                local=local,
            ),
        }

    def log(self, place: str) -> Path:
        """Return a log file of this start; `place` is `rank3`, `group1-node0` or `srun`."""
        folder = self.run.logs(self.attempt, self.plan.role)
        return folder / f"{self.plan.index}-i{self.incarnation}-{place}.log"

    def told_cause(self, rank: int | None) -> str:
        """Return `: SENTENCE` as a task told why it ended, from its `.cause` file; "" if none did.

        Args:
            rank: the task that failed first: no other one is quoted (the others are victims and
                tell of the first one's death). None: unknown, then whoever told first.
        """
        if rank is not None:
            return _read_sentence(self.log(f"rank{rank}").with_suffix(".cause"))
        stem = self.log("rank").with_suffix("")
        found = sorted(stem.parent.glob(f"{stem.name}*.cause"), key=_changed)
        return next(filter(None, map(_read_sentence, found)), "")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepExit:
    """How a step ended. All of its processes are gone."""

    exit_code: int
    """Of the task that failed first; 128 + n for signal n, as in a shell."""
    cause: str
    """One phrase: `rank 3 on n07 ended by SIGKILL`, with the task's own sentence if it told one;
    empty for a clean end."""
    log: Path
    """The log that most likely says why."""


class StepHandle(typing.Protocol):
    """A started step. Used by one thread."""

    def poll(self) -> StepExit | None:
        """Return how the step ended; None while any of its processes may still run."""

    def terminate(self) -> None:
        """Ask all tasks to end in order (SIGTERM)."""

    def kill(self) -> None:
        """End all tasks now (SIGKILL), stopped ones too. May be called again."""


class StepBackend(typing.Protocol):
    """Starts steps: srun steps of an allocation, or child processes of this machine."""

    def start(self, launch: StepLaunch) -> StepHandle:
        """Start a step; returns at once."""


def describe_end(exit_code: int) -> str:
    """Say how a process ended: `exit code 3`, or the signal for 128 + n."""
    try:
        name = signal.Signals(exit_code - 128).name if exit_code > 128 else ""
    except ValueError:
        name = ""
    return f"ended by {name}" if name else f"ended with exit code {exit_code}"


_MAX_SENTENCE = 600
"""Characters of a quoted cause: it becomes part of one line."""


def _read_sentence(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(4 * _MAX_SENTENCE).decode(errors="replace")
    except OSError:
        return ""
    words = " ".join(text.split())
    return f": {words[:_MAX_SENTENCE]}" if words else ""


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return math.inf


def tail(path: Path, lines: int = 15, limit_bytes: int = 16384) -> list[str]:
    """Return the last lines of a log that may be missing, huge or cut inside a character."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - limit_bytes))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
