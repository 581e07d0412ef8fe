"""Is the supervisor of a run still there? What state.json cannot say after a kill -9.

The supervisor writes its last word itself; one that was killed, or whose node died, leaves
"running" behind. So whoever shows or ends a run asks the process table or Slurm as well.
"""

import enum
import os
import socket

import psutil

from relax_hpc import slurm
from relax_hpc.errors import ConfigError, SlurmError
from relax_hpc.recovery.lifecycle import RunState, read_state
from relax_hpc.runfolder import RunFolder


class Liveness(enum.StrEnum):
    """What became of the supervisor that wrote state.json."""

    OVER = "over"
    """It wrote a final status."""
    ALIVE = "alive"
    WAITING = "waiting"
    """Its Slurm job waits for its next start."""
    LOST = "lost"
    """It ended without a last word; nobody goes on with the run by itself."""
    UNKNOWN = "unknown"
    """Slurm does not answer, or the process is on another host."""


def is_supervisor_alive(state: RunState) -> bool:
    """Say whether a local run's supervisor lives: this host's process of that pid and start."""
    if state.host != socket.gethostname() or state.pid == os.getpid():
        return False
    try:
        process = psutil.Process(state.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        started: float = process.create_time()
    except psutil.Error:
        return False
    return abs(started - state.pid_started) < 1.0


def find_liveness(folder: RunFolder, state: RunState) -> tuple[RunState, Liveness]:
    """Ask what became of a run's supervisor.

    Args:
        folder: the run.
        state: as read from it.

    Returns:
        The state, read again if the supervisor was gone: its last word may have come meanwhile;
        and what became of the supervisor.
    """
    found = _ask(state)
    if found is not Liveness.LOST:
        return state, found
    newest = read_state(folder)
    if newest is None or newest == state:
        return state, found
    return newest, _ask(newest)


def _ask(state: RunState) -> Liveness:
    if state.status.is_final:
        return Liveness.OVER
    if state.job_id:
        return _ask_slurm(state.job_id)
    if state.host != socket.gethostname():
        return Liveness.UNKNOWN
    return Liveness.ALIVE if is_supervisor_alive(state) else Liveness.LOST


def _ask_slurm(job_id: str) -> Liveness:
    try:
        job = slurm.job_state(job_id)
    except (SlurmError, ConfigError):  # silent, or not the machine that has Slurm
        return Liveness.UNKNOWN
    if job.fate is slurm.Fate.WAITING:
        return Liveness.WAITING
    return Liveness.LOST if job.is_over else Liveness.ALIVE
