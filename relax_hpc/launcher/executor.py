"""Submit runs the submitit way: an Executor whose jobs are whole runs, Jobs that know their run.

submitit pickles a function, runs it in one srun and reads a pickled result; its states come from
sacct. A run is a configuration, a heterogeneous job and a run folder, on clusters with or without
accounting. So these are own Executor and Job classes on top of submitit's core: `submit`, `batch`,
`job_id`, `state`, `done`, `wait`, `result`, `stdout`, `cancel`, `awaitable` keep their meaning.

    job = RelaxExecutor(folder="runs").submit(load_recipe(Path("recipes/tiny_dapo.toml")))
    job.result()      {"run": ..., "train_steps": ..., "metrics": {...}}
"""

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from submitit.core import core, utils

from relax_hpc import slurm
from relax_hpc.config import Config, LauncherKind, config_of_task, config_to_json
from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.launcher import preflight
from relax_hpc.launcher.plan import Plan, build_plan
from relax_hpc.launcher.render import render_script
from relax_hpc.launcher.session import (
    Request,
    check_not_running,
    read_config,
)
from relax_hpc.launcher.site import load_site
from relax_hpc.recovery.lifecycle import RunState, RunStatus, read_state
from relax_hpc.recovery.liveness import is_supervisor_alive
from relax_hpc.runfolder import RunFolder, create_run_folder, refuse_unwritable, write_atomic

_LOCAL_PREFIX = "local-"
"""Job ids of launcher = local: `local-RUNFOLDERNAME`."""


RETURN_TIMEOUT_S = 60.0
"""How long a preempted job, or one whose node failed, may take to be requeued by Slurm."""
_START_TIMEOUT_S = 120.0
"""For a local supervisor to write its first state; later the job's state says how it fares."""


class RunWatcher(core.InfoWatcher):
    """States of runs. Slurm's are asked one job at a time, at submitit's pace (2 s to 60 s)."""

    def __init__(self, delay_s: int = 60) -> None:
        super().__init__(delay_s)
        self._local: dict[str, Callable[[], str]] = {}
        self._gone: dict[str, float] = {}
        """When a job was first seen in a state that Slurm may requeue it from."""

    def register_local(self, job_id: str, ask: Callable[[], str]) -> None:
        """Ask a function for the state of a local run, which Slurm does not know."""
        self._local[job_id] = ask
        self._finished.discard(job_id)  # a resumed run has the id of its first start

    def update(self) -> None:
        """Ask for all registered jobs that are not over."""
        self._num_calls += 1
        for job_id in self._registered - self._finished:
            self._info_dict[job_id] = {"JobID": job_id, "State": self._ask(job_id)}
            if self.is_done(job_id, mode="cache"):
                self._finished.add(job_id)
        self._last_status_check = time.time()

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return Slurm's word for the job's state; the same words for local runs."""
        return self.get_info(job_id, mode=mode).get("State", "UNKNOWN")

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Say whether the job is over: it holds no nodes and will not come back by itself."""
        name, fate = slurm.parse_state(self.get_state(job_id, mode=mode))
        if name not in slurm.MAY_RETURN:
            self._gone.pop(job_id, None)
            return fate not in (slurm.Fate.WAITING, slurm.Fate.RUNNING)
        now = time.monotonic()
        return now - self._gone.setdefault(job_id, now) >= RETURN_TIMEOUT_S

    def _ask(self, job_id: str) -> str:
        ask = self._local.get(job_id)
        return slurm.job_state(job_id).name if ask is None else ask()


_LOCAL_STATES = {
    RunStatus.DONE: "COMPLETED",
    RunStatus.FAILED: "FAILED",
    RunStatus.CANCELLED: "CANCELLED",
}


class RelaxJob(core.Job[dict[str, Any]]):
    """A submitted run. `.run_folder` exists once its supervisor has started."""

    watcher = RunWatcher()
    _cancel_command = "scancel"

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self.run_folder = RunFolder(Path(folder).absolute())
        self._first_attempt = 1
        self._child: subprocess.Popen[bytes] | None = None

    @classmethod
    def of_run(
        cls,
        folder: Path,
        job_id: str,
        run: Path,
        first_attempt: int = 1,
        child: subprocess.Popen[bytes] | None = None,
    ) -> "RelaxJob":
        """Make the job of a run folder.

        Args:
            folder: of submitit's files.
            job_id: Slurm's, or `local-RUN`.
            run: the run folder.
            first_attempt: of this job; older ones in state.json belong to jobs before it.
            child: the supervisor, if it is our child.
        """
        job = cls(folder, job_id)
        job.run_folder = RunFolder(run)
        job._first_attempt = first_attempt
        job._child = child
        return job

    def _register_in_watcher(self) -> None:
        super()._register_in_watcher()
        if self._is_local:
            self.watcher.register_local(self.job_id, self._ask_local)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_child": None}  # a process handle cannot be pickled

    @property
    def _is_local(self) -> bool:
        return self.job_id.startswith(_LOCAL_PREFIX)

    def _ask_local(self) -> str:
        has_ended = self._child is not None and self._child.poll() is not None  # before the read
        state = self._own_state()
        if state is not None and state.status.is_final:
            return _LOCAL_STATES[state.status]
        if self._child is None and state is not None:
            has_ended = not is_supervisor_alive(state)
        return "FAILED" if has_ended else "PENDING" if state is None else "RUNNING"

    def done(self, force_check: bool = False) -> bool:
        """Say whether the run is over; the run folder is asked before Slurm."""
        state = self._own_state()
        if state is not None and state.status.is_final:
            return True
        job_id = self._current_job()
        return self.watcher.is_done(job_id, mode="force" if force_check else "standard")

    @property
    def state(self) -> str:
        """Slurm's word for the job's state; asked anew once the run folder says it is over."""
        own = self._own_state()
        is_cheap = self._is_local or (own is not None and own.status.is_final)
        job_id = self._current_job()
        return self.watcher.get_state(job_id, mode="force" if is_cheap else "standard")

    def cancel(self, check: bool = True) -> None:
        """End the run: all components of its job, or its local supervisor."""
        if not self._is_local:
            slurm.cancel(self._current_job())
            return
        state = read_state(self.run_folder)
        if state is not None and is_supervisor_alive(state):
            os.kill(state.pid, signal.SIGTERM)

    def submission(self) -> utils.DelayedSubmission:
        """Refuse: a run is a configuration (`run_folder.config`), not a pickled function."""
        raise RelaxError(f"a run has no submitted function; see {self.run_folder.config}")

    def _own_state(self) -> RunState | None:
        """Return state.json if it is of this job: a resumed run has an older one first."""
        state = read_state(self.run_folder)
        if state is None or state.attempt < self._first_attempt:
            return None
        is_mine = self._is_local or self.job_id in (state.job_id, *state.former_jobs)
        return state if is_mine else None

    def _current_job(self) -> str:
        """The job that runs the run now: another one after a hand-over."""
        state = None if self._is_local else self._own_state()
        return self.job_id if state is None else state.job_id

    def failure(self) -> tuple[int, str]:
        """Return exit code and sentence of a run that is over and has no result."""
        state = self._own_state()
        if state is not None and state.status.is_final:
            return max(1, state.exit_code), f"{state.name} {state.status}: {state.cause}"
        log = self.paths.stdout
        if state is not None:
            text = f"{state.name} was lost while {state.status}: its supervisor is gone"
            return 1, f"{text}, see {log}; relax-hpc submit --resume {state.run}"
        refusal = _refusal(log, 0)
        code: int | None = self._child.returncode if self._child is not None else None
        if code is None and not self._is_local:
            code = slurm.job_state(self.job_id).exit_code
        said = refusal or f"job {self.job_id} is {self.state} and its supervisor never started"
        return code if code is not None and code > 0 else 1, f"{said}; see {log}"

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        """Return ("success", summary) or ("error", cause); submitit raises FailedJobError then."""
        deadline = time.monotonic() + self._results_timeout_s
        while True:  # over NFS the last write is seen a moment after the end
            state = self._own_state()
            if state is not None and state.status.is_final:
                break
            if time.monotonic() > deadline:
                seen = "no state.json" if state is None else f"status {state.status}"
                raise utils.UncompletedJobError(
                    f"job {self.job_id} is {self.state} but its run {self.run_folder.path} has "
                    f"{seen}; see {self.paths.stdout}"
                )
            time.sleep(0.5)
        if state.status is RunStatus.DONE:
            return "success", state.result
        return "error", f"{state.name} {state.status}: {state.cause}"


_REFUSAL = "relax-hpc supervise: "
"""How `relax_hpc.cli.main` begins the line that says why a supervisor did not start."""


def _refusal(log: Path, offset: int) -> str:
    """Return why a supervisor did not start, from its log after `offset` bytes; "" if unsaid."""
    try:
        with log.open("rb") as file:
            file.seek(offset)
            lines = file.read(1 << 20).decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line.removeprefix(_REFUSAL) for line in lines if line.startswith(_REFUSAL)]
    return said[-1] if said else ""


class RelaxExecutor(core.Executor):
    """Submits runs; each gets a run folder `FOLDER/NAME-JOBID`.

    Args:
        folder: parent of the run folders, on the shared file system.
        step_program: a program that plays all roles (tests).
    """

    job_class = RelaxJob

    def __init__(self, folder: Path | str, step_program: str = "") -> None:
        super().__init__(folder)
        self._extra = ["--step-program", step_program] if step_program else []

    def submit(self, config: Config) -> RelaxJob:  # type: ignore[override]  # a run, not a function
        """Check a run and submit it as one job.

        Raises:
            ConfigError: bad input; nothing was submitted.
            SlurmError: Slurm refused it.
        """
        if not isinstance(config, Config):
            raise ConfigError(f"submit takes a Config (load_recipe), not {type(config).__name__}")
        if config.sweep.runs:
            raise ConfigError(f"{config.run.name} is a sweep of several runs: use submit_sweep")
        # submitit only carries the argument; inside `with executor.batch()` the job comes later
        job: Any = super().submit(config)  # type: ignore[arg-type]
        return cast("RelaxJob", job)

    def submit_sweep(self, config: Config) -> list[RelaxJob]:
        """Check the runs of a sweep and submit them as one job array; a job per run.

        Raises:
            ConfigError: bad input of any of them; nothing was submitted.
            SlurmError: Slurm refused it.
        """
        if config.resources.launcher is LauncherKind.LOCAL or not config.sweep.runs:
            raise ConfigError(
                f"{config.run.name}: submit_sweep wants a recipe with a sweep and launcher=slurm; "
                "without Slurm start one run for each entry, with its keys as --set"
            )
        run = dataclasses.replace(config.run, folder=str(self.folder))
        resolved = preflight.resolve_inputs(dataclasses.replace(config, run=run))
        prepared = prepare(resolved, self._extra)
        for inputs in sweep_inputs(config):
            preflight.check_inputs(preflight.resolve_inputs(inputs))
        preflight.check_slurm(resolved, prepared.plan)
        array = self._sbatch(self._write(prepared, resolved), "%A_%a")
        job_ids = [f"{array}_{task}" for task in range(len(config.sweep.runs))]
        return [
            RelaxJob.of_run(self.folder, job_id, self.folder / f"{config.run.name}-{job_id}")
            for job_id in job_ids
        ]

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        return [self._submit_config(delayed.function) for delayed in delayed_submissions]

    def _submit_config(self, config: Any) -> RelaxJob:
        run = dataclasses.replace(config.run, folder=str(self.folder))
        resolved = preflight.resolve_inputs(dataclasses.replace(config, run=run))
        prepared = prepare(resolved, self._extra)
        preflight.check_inputs(resolved)
        preflight.check_slurm(resolved, prepared.plan)
        if resolved.resources.launcher is LauncherKind.LOCAL:
            return self._start_local(resolved)
        job_id = self._sbatch(self._write(prepared, resolved))
        run_path = self.folder / f"{resolved.run.name}-{job_id}"
        return RelaxJob.of_run(self.folder, job_id, run_path)

    def _write(self, prepared: "Prepared", resolved: Config) -> Path:
        """Write configuration and script; returns the script."""
        with refuse_unwritable(self.folder):
            prepared.config_file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(prepared.config_file, config_to_json(resolved))
            write_atomic(prepared.script_file, prepared.script)
        return prepared.script_file

    def resume(self, run: Path, steps: int = 0) -> RelaxJob:
        """Go on with a run, in the same run folder.

        Args:
            run: its folder.
            steps: new total number of train steps; 0 = as before.
        """
        folder = RunFolder(run.resolve())
        config = read_config(Request(resume=str(folder.path), steps=steps))
        state = read_state(folder)
        first_attempt = 1 if state is None else state.attempt + 1
        if state is not None:
            check_not_running(state, "")
        preflight.check_inputs(config)
        arguments = ["--resume", str(folder.path), *self._extra]
        if steps:
            arguments += ["--steps", str(steps)]
        if config.resources.launcher is LauncherKind.LOCAL:
            return self._spawn(folder, arguments, first_attempt)
        site = load_site(config.resources.site)
        plan = build_plan(config, site)
        preflight.check_slurm(config, plan)
        script = folder.path / "resume.sh"
        with refuse_unwritable(folder.path):
            write_atomic(script, render_script(config, plan, site, arguments, config.run.name))
        return RelaxJob.of_run(self.folder, self._sbatch(script), folder.path, first_attempt)

    def _sbatch(self, script: Path, job: str = "%j") -> str:
        environment = {**slurm.submission_environment(), "RELAX_PYTHON": sys.executable}
        # submitit's name, so that job.stdout() and job.paths mean what they mean there
        options = [f"--output={str(self.folder).replace('%', '%%')}/{job}_0_log.out"]
        return slurm.submit(script, options, env=environment)

    def _start_local(self, config: Config) -> RelaxJob:
        folder = create_run_folder(self.folder, config.run.name)
        write_atomic(folder.config, config_to_json(config))
        return self._spawn(folder, ["--resume", str(folder.path), *self._extra], 1)

    def _spawn(self, folder: RunFolder, arguments: list[str], first_attempt: int) -> RelaxJob:
        """Start a supervisor on this machine; it lives on when this process ends."""
        job_id = f"{_LOCAL_PREFIX}{folder.run_id}"
        log_file = utils.JobPaths(self.folder, job_id=job_id).stdout
        with refuse_unwritable(self.folder), log_file.open("ab") as log:
            offset = log.seek(0, os.SEEK_END)
            child = subprocess.Popen(
                [sys.executable, "-m", "relax_hpc.cli", "supervise", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _await_first_state(folder, child, log_file, offset)
        return RelaxJob.of_run(self.folder, job_id, folder.path, first_attempt, child)


def sweep_inputs(config: Config) -> list[Config]:
    """Return the runs of a recipe that differ in model, data or reward; one without a sweep.

    Reading a data set takes seconds: it is not read for each task.
    """
    if not config.sweep.runs:
        return [config]
    found: dict[str, Config] = {}
    for task in range(len(config.sweep.runs)):
        run = config_of_task(config, task)
        read = (run.run.init_from, run.model.path, run.data, run.reward, run.rollout.replay)
        found.setdefault(repr(read), run)
    return list(found.values())


def _await_first_state(
    folder: RunFolder, child: subprocess.Popen[bytes], log: Path, offset: int
) -> None:
    """Wait until a supervisor that was started here owns its run, or hand on why it refused.

    Raises:
        ConfigError: it refused its input, or another supervisor was first.
        RelaxError: it ended otherwise.
    """
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        code = child.poll()  # before the read: a short run may have ended since
        state = read_state(folder)
        if state is not None and state.pid == child.pid:
            return
        if code is not None:
            said = _refusal(log, offset) or f"the supervisor ended with exit code {code}, see {log}"
            raise (ConfigError if code == ConfigError.exit_code else RelaxError)(said)
        time.sleep(0.1)


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A run that could be submitted: nothing was written yet."""

    plan: Plan
    script: str
    script_file: Path
    config_file: Path


def prepare(config: Config, extra: Sequence[str] = ()) -> Prepared:
    """Plan and render a resolved configuration; the same configuration gives the same files.

    Job steps read the configuration that was submitted, so it is written beside the script, under
    a name made of its content: a recipe edited while the job waits changes nothing.
    """
    site = load_site(config.resources.site)
    plan = build_plan(config, site)
    text = config_to_json(config)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    stem = Path(config.run.folder) / "submitted" / f"{config.run.name}-{digest}"
    config_file, script_file = (
        stem.with_name(stem.name + ".json"),
        stem.with_name(stem.name + ".sh"),
    )
    if config.resources.launcher is LauncherKind.LOCAL:
        return Prepared(plan, "", script_file, config_file)
    arguments = ["--config", str(config_file), *extra]
    script = render_script(config, plan, site, arguments, str(stem))
    return Prepared(plan, script, script_file, config_file)
