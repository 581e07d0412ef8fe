"""The next attempt of a run whose job is about to end: a requeue, or a job that comes after it.

the time limit is near     may_go_on: the attempt made a checkpoint, attempts are left
-> requeue                 same job id; Slurm ends this process, so state.json comes first
-> refused, or the site    resubmit: sbatch --dependency=afterany:JOB of a script that says
   says so                 `--resume RUN`; state.json names the new job before this one ends
"""

import logging
import os
import re
import sys
from pathlib import Path

from relax_hpc import slurm
from relax_hpc.config import Config
from relax_hpc.errors import RelaxError, SlurmError
from relax_hpc.launcher.plan import Plan
from relax_hpc.launcher.render import render_script
from relax_hpc.launcher.site import Site
from relax_hpc.log import kv
from relax_hpc.recovery.lifecycle import RunState, RunStatus, write_state
from relax_hpc.runfolder import RunFolder, write_atomic

_LOG = logging.getLogger(__name__)

_REFUSED = re.compile(r"presently disabled|[Aa]ccess.*denied|not permitted", re.IGNORECASE)
"""What `scontrol requeue` says to --no-requeue, JobRequeue=0 and forbidding sites (22.05-25.11)."""


def may_go_on(state: RunState, site: Site, newest: int, cause: str) -> tuple[RunStatus, str]:
    """Decide whether the run goes on: no endless chain of attempts that get nowhere.

    Args:
        state: of the attempt that ends.
        site: its policy.
        newest: step of the newest checkpoint; -1 = none.
        cause: why the attempt ends.

    Returns:
        REQUEUED, or how the run ends instead; with the sentence for state.json.
    """
    resume = f"go on with relax-hpc submit --resume {state.run}"
    if not (site.requeue or site.resubmit) or not state.job_id:
        return RunStatus.CANCELLED, f"{cause} and this site does not requeue; {resume}"
    if newest <= state.resumable_step:
        return (
            RunStatus.FAILED,
            f"{cause} and attempt {state.attempt} made no new checkpoint: give it more time "
            f"(resources.time_min) or a smaller train.save_interval; {resume}",
        )
    if state.attempt >= site.max_attempts:
        return RunStatus.FAILED, f"{cause} and attempt {state.attempt} is the site's last; {resume}"
    return RunStatus.REQUEUED, cause


def hand_over(
    state: RunState, folder: RunFolder, config: Config, plan: Plan, site: Site, step_program: str
) -> int:
    """Ask Slurm for the next attempt; returns the exit code of this one.

    Args:
        state: of the attempt that ends, status REQUEUED; changed when Slurm refuses.
        folder: the run.
        config: the run's.
        plan: its components.
        site: its policy.
        step_program: of `relax-hpc supervise` (tests).
    """
    try:
        if site.resubmit or not _requeue(state.job_id):
            _resubmit(state, folder, config, plan, site, step_program)
    except RelaxError as err:
        state.status = RunStatus.CANCELLED
        state.cause += f", and Slurm refused the next attempt ({err})"
        state.cause += f"; relax-hpc submit --resume {state.run}"
        write_state(folder, state)
    return os.EX_TEMPFAIL


def _requeue(job_id: str) -> bool:
    """Requeue this job, which ends this process; False when it may not be requeued."""
    try:
        slurm.requeue(job_id)
    except SlurmError as err:
        if not _REFUSED.search(str(err)):
            raise
        _LOG.warning("requeue refused: submitting a job that goes on %s", kv(error=err))
        return False
    return True


def _resubmit(
    state: RunState, folder: RunFolder, config: Config, plan: Plan, site: Site, step_program: str
) -> None:
    """Submit a job that starts when this one has ended; it owns the run from now on."""
    arguments = ["--resume", str(folder.path)]
    if step_program:
        arguments += ["--step-program", step_program]
    script = folder.path / "resume.sh"
    write_atomic(script, render_script(config, plan, site, arguments, config.run.name))
    job_id = slurm.submit(
        script,
        [f"--dependency=afterany:{state.job_id}"],
        env={**slurm.submission_environment(), "RELAX_PYTHON": sys.executable},
        cwd=Path.cwd(),
    )
    _LOG.info("submitted the next attempt %s", kv(job=job_id, after=state.job_id))
    state.former_jobs = [*state.former_jobs, state.job_id]
    state.job_id = job_id
    write_state(folder, state)
