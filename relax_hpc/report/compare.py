"""`relax-hpc report`: one line per run, to compare the tasks of a job array or any runs."""

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from relax_hpc import slurm
from relax_hpc.errors import ConfigError, SlurmError
from relax_hpc.metrics.metric import MetricRecord, read_metrics, series
from relax_hpc.recovery.lifecycle import RunState, RunStatus, read_state
from relax_hpc.recovery.liveness import Liveness, find_liveness
from relax_hpc.report.table import print_table
from relax_hpc.runfolder import RunFolder

_ACCURACIES = ("eval/accuracy", "train/accuracy_mean")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunLine:
    """What is compared of one run."""

    job_id: str
    task: int | None = None
    """Number in the array; None for a run that is no array task."""
    run: str
    """Run folder; empty while the task waits for its first start, or when it was refused."""
    state: str
    """Of the run, or Slurm's word for a task without a run folder."""
    seed: int | None = None
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of the task's sweep entry."""
    step: int = 0
    """Optimizer steps done."""
    train_steps: int = 0
    reward: float | None = None
    """Last `train/reward_mean`."""
    accuracy: float | None = None
    """Last `eval/accuracy`, of a run without evaluations `train/accuracy_mean`."""
    seconds_per_step: float | None = None
    """Median of the time from one train step to the next, waiting included."""
    attempt: int = 0
    cause: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Render for JSON."""
        return dataclasses.asdict(self)


def read_line(folder: RunFolder, slurm_states: dict[str, str] | None = None) -> RunLine:
    """Read one run.

    Args:
        folder: the run.
        slurm_states: Slurm's words by job id, where they are known already.
    """
    state = read_state(folder)
    if state is None:
        raise ConfigError(f"{folder.path}: no state.json yet, the supervisor has not started")
    records = read_metrics(folder)
    return RunLine(
        job_id=state.job_id,
        task=_task_of((state.former_jobs or [state.job_id])[0]),
        run=str(folder.path),
        state=_status(folder, state, slurm_states or {}),
        seed=_seed(folder),
        overrides=state.overrides,
        step=state.train_step,
        train_steps=state.train_steps,
        reward=_last(records, ("train/reward_mean",)),
        accuracy=_last(records, _ACCURACIES),
        seconds_per_step=_step_time(records),
        attempt=state.attempt,
        cause=state.cause,
    )


def _task_of(job_id: str) -> int | None:
    number = job_id.partition("_")[2]
    return int(number) if number.isdigit() else None


def _status(folder: RunFolder, state: RunState, slurm_states: dict[str, str]) -> str:
    if state.status.is_final:
        return state.status.value
    word = slurm_states.get(state.job_id)
    if word is not None:
        fate = slurm.parse_state(word)[1]
        if fate is slurm.Fate.WAITING:
            return RunStatus.REQUEUED.value
        if fate is slurm.Fate.RUNNING:
            return state.status.value
    state, liveness = find_liveness(folder, state)
    if liveness is Liveness.WAITING:
        return RunStatus.REQUEUED.value
    return "lost" if liveness is Liveness.LOST else state.status.value


def _seed(folder: RunFolder) -> int | None:
    try:
        seed = json.loads(folder.config.read_bytes())["run"]["seed"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return seed if isinstance(seed, int) else None


def _last(records: Sequence[MetricRecord], names: Iterable[str]) -> float | None:
    for name in names:
        values = [value for _, value in series(records, name) if math.isfinite(value)]
        if values:
            return values[-1]
    return None


def _step_time(records: Sequence[MetricRecord]) -> float | None:
    times = {record.step: record.time for record in records if record.role == "train"}
    steps = sorted(times)
    took = [
        (times[b] - times[a]) / (b - a) for a, b in itertools.pairwise(steps) if times[b] > times[a]
    ]
    return round(statistics.median(took), 3) if took else None


def read_array(job_id: str, parent: Path = Path("runs")) -> list[RunLine]:
    """Read the runs of a job array by task; tasks that have no run folder come from Slurm.

    One question to Slurm whatever the number of tasks; without Slurm the folders alone tell.

    Args:
        job_id: `123`; of `123_[0-3]` only these tasks.
        parent: of the run folders.

    Raises:
        ConfigError: no job id, or nobody knows such an array.
    """
    wanted = slurm.parse_job_id(job_id)
    states = _task_states(wanted.job)
    found: dict[int, RunLine] = {}
    for path in parent.glob(f"*-{wanted.job}_*/config.json"):
        number = path.parent.name.rpartition("_")[2]
        folder = RunFolder(path.parent.resolve())
        if number.isdigit() and read_state(folder) is not None:
            found[int(number)] = read_line(folder, states)
    for task_id, word in states.items():
        task, name = _task_of(task_id), slurm.parse_state(word)[0].lower()
        if task is not None and task not in found:
            found[task] = RunLine(job_id=task_id, task=task, run="", state=name)
    chosen = wanted.array_tasks
    lines = [found[n] for n in sorted(found) if chosen is None or n in chosen]
    if not lines:
        raise ConfigError(
            f"no runs of array {job_id} in {parent}/, and Slurm does not list it (any more): give "
            "the id that sbatch printed, and --folder if run.folder is another one"
        )
    return lines


def _task_states(job: int) -> dict[str, str]:
    """Return `{"123_4": "PENDING"}` for the tasks that slurmctld still knows; {} without Slurm."""
    try:
        listed = slurm.show_job(str(job))
    except (SlurmError, ConfigError):
        return {}
    states: dict[str, str] = {}
    for fields in listed:
        tasks = fields.get("ArrayTaskId", "")
        if fields.get("ArrayJobId") != str(job) or not tasks:
            continue
        for number in slurm.parse_job_id(f"{job}_[{tasks}]").array_tasks or []:
            states[f"{job}_{number}"] = fields["JobState"]
    return states


def print_lines(lines: Sequence[RunLine], out: TextIO) -> None:
    """Print the comparison, and below it why runs did not end well."""
    is_array = all(line.task is not None for line in lines)
    columns = ("task" if is_array else "run", "state", "seed", "overrides", "steps", "reward",
               "accuracy", "s/step")  # fmt: skip
    rows = [_row(line, is_array) for line in lines]
    print_table(columns, rows, out, wide="overrides")
    for line in lines:
        if line.cause:
            out.write(f"{_label(line, is_array)}: {line.cause}\n")


def _label(line: RunLine, is_array: bool) -> str:
    return str(line.task) if is_array else Path(line.run).name


def _row(line: RunLine, is_array: bool) -> tuple[str, ...]:
    overrides = " ".join(f"{key}={value}" for key, value in line.overrides.items())
    return (
        _label(line, is_array),
        line.state,
        "" if line.seed is None else str(line.seed),
        overrides,
        f"{line.step}/{line.train_steps}" if line.run else "",
        _number(line.reward),
        _number(line.accuracy),
        _number(line.seconds_per_step),
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
