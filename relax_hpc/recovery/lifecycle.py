"""`RUN/state.json`: the run's life cycle as the supervisor sees it. Written whole at every change.

Readers: `relax-hpc status`, RelaxJob, the next attempt's supervisor. One writer: the supervisor of
the newest attempt; an older one (a requeued job whose processes outlived their node's failure)
finds a higher attempt in the file and ends instead of writing.
"""

import enum
import time
from typing import Any

import msgspec

from relax_hpc.errors import RelaxError, StaleIncarnationError
from relax_hpc.runfolder import RunFolder, write_atomic


class RunStatus(enum.StrEnum):
    """Life cycle of a run."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    REQUEUED = "requeued"
    """The job goes on as the next attempt."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether no attempt is running or to come."""
        return self in (RunStatus.DONE, RunStatus.FAILED, RunStatus.CANCELLED)


class StepStatus(enum.StrEnum):
    """Life cycle of one step."""

    WAITING = "waiting"
    STARTING = "starting"
    """The processes run, not all of its members have registered."""
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class StepState(msgspec.Struct, kw_only=True):
    """One step in state.json."""

    role: str
    index: int
    partitions: list[str]
    nodes: list[str]
    tasks: int
    gpus: int
    status: StepStatus = StepStatus.WAITING
    incarnation: int = 0
    restarts: int = 0
    """Restarts after a failure in this attempt."""
    started: float = 0.0
    """Unix time."""
    progress: dict[str, int | float | str] = {}
    """What rank 0 reported last."""


class ExitRecord(msgspec.Struct, kw_only=True):
    """One end of a step."""

    time: float
    role: str
    index: int
    attempt: int
    incarnation: int
    exit_code: int
    cause: str
    """One phrase: rank, node, code or signal, reason."""
    log: str
    """Where to look, relative to the run folder."""
    verdict: str = ""
    """What the post-mortem says about a failure: one sentence, its confidence and class."""


class RunState(msgspec.Struct, kw_only=True):
    """All of state.json."""

    name: str
    run: str
    launcher: str
    job_id: str = ""
    """Slurm job id (leader of a het job, `ARRAYID_TASK`); empty for launcher = local."""
    former_jobs: list[str] = []
    """Jobs that handed the run over to the next one, because they could not be requeued."""
    status: RunStatus = RunStatus.STARTING
    attempt: int = 1
    cause: str = ""
    """Why the run failed or stopped: one sentence."""
    exit_code: int = 0
    """Of the supervisor, once the status is final."""
    submit_folder: str = ""
    overrides: dict[str, Any] = {}
    """Task of a job array: the keys of its sweep entry, `{"train.lr": 1e-6}`."""
    host: str = ""
    pid: int = 0
    pid_started: float = 0.0
    """Start time of the supervisor: with the pid it names one process for `cancel`."""
    started: float = 0.0
    updated: float = 0.0
    attempt_started: float = 0.0
    train_steps: int = 0
    """Optimizer steps asked for."""
    train_step: int = 0
    """Optimizer steps done, as the train step reported."""
    resumable_step: int = -1
    """Newest complete checkpoint at the start of this attempt; -1 = none."""
    steps: list[StepState] = []
    incarnations: dict[str, int] = {}
    """Newest incarnation of each `ROLE-INDEX`, counted over attempts."""
    history: list[ExitRecord] = []
    result: dict[str, Any] = {}
    """Summary of a finished run: run, train_steps, metrics, minutes."""

    @property
    def verdict(self) -> str:
        """The post-mortem's last word about a failure in this attempt; "" if there is none."""
        mine = [record for record in self.history if record.attempt == self.attempt]
        return next((record.verdict for record in reversed(mine) if record.verdict), "")


def read_state(folder: RunFolder) -> RunState | None:
    """Read state.json; None before the supervisor's first write.

    Raises:
        RelaxError: the file is not what a supervisor writes.
    """
    try:
        return msgspec.json.decode(folder.state.read_bytes(), type=RunState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as err:
        raise RelaxError(f"{folder.state} cannot be read: {err}") from err


def write_state(folder: RunFolder, state: RunState) -> None:
    """Write state.json.

    Raises:
        StaleIncarnationError: a newer attempt owns the run.
    """
    newest = read_state(folder)
    if newest is not None and newest.attempt > state.attempt:
        raise StaleIncarnationError(
            f"attempt {newest.attempt} of {state.run} is running on {newest.host}; "
            f"this supervisor belongs to attempt {state.attempt} and ends"
        )
    state.updated = time.time()
    text = msgspec.json.format(msgspec.json.encode(state), indent=2)
    write_atomic(folder.state, text + b"\n")
