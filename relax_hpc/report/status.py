"""`relax-hpc status`: one run as a table and a curve, plain or with rich on a terminal."""

import datetime
import io
import shutil
from typing import TextIO

from relax_hpc.recovery.lifecycle import StepState, StepStatus
from relax_hpc.recovery.liveness import Liveness
from relax_hpc.report.curve import draw_curves
from relax_hpc.report.read import RunReport
from relax_hpc.report.table import print_table
from relax_hpc.slurm import compress_hostlist

_COLUMNS = (
    "step",
    "status",
    "start",
    "restarts",
    "partition",
    "nodes",
    "tasks",
    "GPUs",
    "progress",
)


def print_status(report: RunReport, out: TextIO) -> None:
    """Print the run's life cycle, its steps, and the curves of reward and accuracy."""
    width = min(100, shutil.get_terminal_size((80, 24)).columns)
    out.write("\n".join(_head(report)) + "\n\n")
    rows = [_row(step) for step in report.state.steps]
    print_table(_COLUMNS, rows, out, wide="progress")
    chart = draw_curves(report.curves, width)
    out.write("\n" + "\n".join(chart or ["no metrics yet"]) + "\n")


def _head(report: RunReport) -> list[str]:
    state = report.state
    where = f"Slurm job {state.job_id}" if state.job_id else "this machine"
    started = datetime.datetime.fromtimestamp(state.attempt_started).strftime("%Y-%m-%d %H:%M:%S")
    lines = [
        f"{state.run}",
        f"{_status(report)}  train step {state.train_step} of {state.train_steps}  "
        f"attempt {state.attempt}  {where}  since {started}",
    ]
    lines += [f"cause: {state.cause}"] if state.cause else []
    return [*lines, f"post-mortem: {state.verdict}"] if state.verdict else lines


def _status(report: RunReport) -> str:
    if report.liveness is Liveness.LOST:
        return f"lost (resume: relax-hpc submit --resume {report.state.run})"
    unsure = report.liveness is Liveness.UNKNOWN
    where = "Slurm does not answer" if report.state.job_id else f"see host {report.state.host}"
    return f"{report.status} ({where})" if unsure else report.status


def _row(step: StepState) -> tuple[str, ...]:
    return (
        f"{step.role}-{step.index}",
        step.status.value,
        str(step.incarnation),
        str(step.restarts),
        ",".join(dict.fromkeys(step.partitions)),
        compress_hostlist(dict.fromkeys(step.nodes)),
        str(step.tasks),
        str(step.gpus) if step.gpus else "",
        _progress(step),
    )


def _progress(step: StepState) -> str:
    """Return what a living step reported; of one that has ended it is from before its end."""
    if step.status in (StepStatus.ENDED, StepStatus.WAITING):
        return ""
    return " ".join(f"{key}={value}" for key, value in step.progress.items())


def status_text(report: RunReport) -> str:
    """Return what `print_status` prints without a terminal."""
    out = io.StringIO()
    print_status(report, out)
    return out.getvalue()
