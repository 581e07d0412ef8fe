"""From a command line to a supervised run: read the configuration, check it, open the run folder.

new run, Slurm   PARENT/NAME-JOBID; a requeue finds it there and goes on with RUN/config.json
new run, local   PARENT/NAME-K
--resume RUN     RUN itself, next attempt
"""

import dataclasses
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from relax_hpc import slurm
from relax_hpc.config import (
    Config,
    LauncherKind,
    config_from_json,
    config_of_task,
    config_to_json,
    load_recipe,
)
from relax_hpc.control.rpc import create_keys
from relax_hpc.errors import ConfigError, RelaxError, SlurmError
from relax_hpc.launcher import preflight, preflight_step
from relax_hpc.launcher.allocation import (
    Allocation,
    array_task,
    check_allocation,
    local_allocation,
    slurm_allocation,
)
from relax_hpc.launcher.deadline import job_deadline
from relax_hpc.launcher.handover import hand_over, may_go_on
from relax_hpc.launcher.local_steps import LocalBackend
from relax_hpc.launcher.members import MemberWatch
from relax_hpc.launcher.plan import Plan, build_plan
from relax_hpc.launcher.policy import RestartBudget
from relax_hpc.launcher.preflight_target import Target, test_nodes
from relax_hpc.launcher.recorder import TRACE_NAME, recorder_environment
from relax_hpc.launcher.site import Site, find_recipe, load_site
from relax_hpc.launcher.slot import Slot
from relax_hpc.launcher.slurm_steps import SlurmBackend
from relax_hpc.launcher.steps import StepBackend, StepLaunch
from relax_hpc.launcher.summary import summarise
from relax_hpc.launcher.supervisor import Supervisor
from relax_hpc.launcher.tunables import copy_environment
from relax_hpc.log import kv
from relax_hpc.recipe_keys import flat
from relax_hpc.recovery import checkpoint
from relax_hpc.recovery.lifecycle import RunState, RunStatus, StepState, read_state, write_state
from relax_hpc.recovery.liveness import Liveness, find_liveness, is_supervisor_alive
from relax_hpc.runfolder import (
    RunFolder,
    create_run_folder,
    locked,
    open_run_folder,
    refuse_unwritable,
    write_atomic,
)

_LOG = logging.getLogger(__name__)

_FOREIGN = re.compile(
    r"RELAX_(?!LOG_LEVEL)|TORCHELASTIC_|"
    r"(MASTER_ADDR|MASTER_PORT|(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|ROLE_)?WORLD_SIZE)$"
)
"""Variables of other runs and of torchrun, which steps must not inherit."""
_MODULES = {"ref": "forward", "logprob": "forward"}
"""Roles whose step module has another name."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What `relax-hpc supervise` and `submit` were asked for. One of the first three is set."""

    recipe: str = ""
    config_file: str = ""
    """Resolved configuration, written by `submit`."""
    resume: str = ""
    """Run folder to go on with."""
    overrides: Sequence[str] = ()
    steps: int = 0
    """New number of train steps of a resumed run; 0 = as before."""
    step_program: str = ""
    """A program that plays all roles instead of relax_hpc.steps (tests)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A run that is ready to be supervised."""

    folder: RunFolder
    config: Config
    site: Site
    plan: Plan
    allocation: Allocation
    state: RunState
    step_program: str = ""
    """Of the request."""


def read_config(request: Request) -> Config:
    """Read the configuration that a request names, with its overrides.

    Raises:
        ConfigError: it cannot be read or is impossible.
    """
    if request.resume:
        folder = RunFolder(Path(request.resume))
        config = _read_json(folder.config, "is not a run folder")
        if request.overrides:
            raise ConfigError("--resume goes on with RUN/config.json: --set cannot change it")
        if request.steps:
            run = dataclasses.replace(config.run, train_steps=request.steps)
            config = dataclasses.replace(config, run=run)
        _check_steps(config, folder)
        return config
    if request.steps:
        raise ConfigError("--steps belongs to --resume; a new run takes --set run.train_steps=N")
    if request.config_file:
        return _read_json(Path(request.config_file), "was removed after the submission")
    return load_recipe(find_recipe(request.recipe), request.overrides)


def _check_steps(config: Config, folder: RunFolder) -> None:
    """Refuse to end before the newest checkpoint: its step cannot be undone."""
    newest = newest_checkpoint(folder)
    if newest > config.run.train_steps:
        raise ConfigError(
            f"--steps {config.run.train_steps}: {folder.path} has a checkpoint of train step "
            f"{newest} already; give {newest} or more, or start a new run with "
            f"--set run.init_from={folder.path}@STEP"
        )


def _read_json(path: Path, otherwise: str) -> Config:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"{path.parent} {otherwise}: {path.name}: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise ConfigError(f"{path}: not UTF-8 text ({err.reason})") from err
    return config_from_json(text, str(path))


def open_session(request: Request, environ: Mapping[str, str]) -> Session:
    """Check everything, then make or adopt the run folder.

    Raises:
        ConfigError: bad input; nothing was started.
    """
    config = read_config(request)
    overrides: dict[str, Any] = {}
    if not request.resume:
        config, overrides = choose_task(config, array_task(environ))
    site = load_site(config.resources.site)
    plan = build_plan(config, site)
    is_local = config.resources.launcher is LauncherKind.LOCAL
    if is_local and site.container is not None:
        raise ConfigError(
            f"resources.launcher=local starts no containers and site {site.name!r} has one: choose "
            "another site, e.g. --set resources.site=local"
        )
    allocation = local_allocation(plan) if is_local else slurm_allocation(environ)
    adopted = _adopted_folder(request, config, allocation)
    if adopted is not None:
        config = _adopt_config(adopted, request)
        plan = build_plan(config, site)
    else:
        config = preflight.resolve_inputs(config)
    if not is_local:
        check_allocation(plan, allocation)
    preflight.check_inputs(config)
    folder = adopted if adopted is not None else _create_folder(config, allocation)
    with refuse_unwritable(folder.path), locked(folder):
        old = read_state(folder)
        if old is not None:
            check_not_running(old, allocation.job_id)
        write_atomic(folder.config, config_to_json(config))
        write_atomic(folder.plan, plan.to_json())
        create_keys(folder)
        state = _next_state(folder, config, plan, allocation, old)
        state.overrides = overrides if old is None else old.overrides
        state.former_jobs = [] if old is None else old.former_jobs
        write_state(folder, state)
    return Session(
        folder=folder,
        config=config,
        site=site,
        plan=plan,
        allocation=allocation,
        state=state,
        step_program=request.step_program,
    )


def choose_task(config: Config, task: int | None) -> tuple[Config, dict[str, Any]]:
    """Return the run of a job array's task, and the keys that its sweep entry sets.

    Args:
        config: of the whole array, or of a single run.
        task: number in the array; None outside of arrays.

    Raises:
        ConfigError: the sweep has no such task, or this is no array.
    """
    if task is None:
        if config.sweep.runs:
            raise ConfigError(
                f"{config.run.name} is a sweep of {len(config.sweep.runs)} runs and this job is no "
                "array: start it with sbatch recipes/NAME.sh (or --array=0-1 recipes/NAME.sh) or "
                "with relax-hpc submit"
            )
        return config, {}
    chosen = config_of_task(config, task)
    return chosen, flat(config.sweep.runs[task]) if config.sweep.runs else {}


def _adopted_folder(request: Request, config: Config, allocation: Allocation) -> RunFolder | None:
    """Return the run folder that this attempt goes on with; None for a new run."""
    if request.resume:
        return RunFolder(Path(request.resume).resolve())
    if not allocation.job_id:
        return None
    path = Path(config.run.folder) / f"{config.run.name}-{allocation.job_id}"
    folder = RunFolder(path.absolute())
    return folder if folder.config.exists() else None


def _adopt_config(folder: RunFolder, request: Request) -> Config:
    """Read the run's own configuration: a recipe that was edited meanwhile does not count."""
    return read_config(Request(resume=str(folder.path), steps=request.steps))


def _create_folder(config: Config, allocation: Allocation) -> RunFolder:
    parent = Path(config.run.folder)
    if allocation.job_id:
        return open_run_folder(parent / f"{config.run.name}-{allocation.job_id}")
    return create_run_folder(parent, config.run.name)


def check_not_running(old: RunState, own_job: str) -> None:
    """Refuse to go on with a run whose last supervisor still works.

    Raises:
        ConfigError: it is running.
    """
    if old.status in (RunStatus.DONE, RunStatus.FAILED):
        return
    if old.job_id:
        running = old.job_id != own_job and not slurm.job_state(old.job_id).is_over
        who = f"Slurm job {old.job_id}"
    else:
        running = is_supervisor_alive(old)
        who = f"process {old.pid} on {old.host}"
    if running:
        raise ConfigError(
            f"{old.run} is still {old.status} ({who}): end it first, relax-hpc cancel"
        )


def _next_state(
    folder: RunFolder,
    config: Config,
    plan: Plan,
    allocation: Allocation,
    old: RunState | None,
) -> RunState:
    now = time.time()
    return RunState(
        name=config.run.name,
        run=str(folder.path),
        launcher=config.resources.launcher.value,
        job_id=allocation.job_id,
        attempt=1 if old is None else old.attempt + 1,
        submit_folder=str(Path.cwd()),
        host=socket.gethostname(),
        pid=os.getpid(),
        pid_started=psutil.Process().create_time(),
        started=now if old is None else old.started,
        attempt_started=now,
        train_steps=config.run.train_steps,
        train_step=0 if old is None else old.train_step,
        resumable_step=newest_checkpoint(folder),
        steps=[_step_state(plan, allocation, number) for number in range(len(plan.steps))],
        incarnations={} if old is None else old.incarnations,
        history=[] if old is None else old.history,
    )


def _step_state(plan: Plan, allocation: Allocation, number: int) -> StepState:
    step = plan.steps[number]
    parts = step.parts
    return StepState(
        role=step.role,
        index=step.index,
        partitions=[allocation.groups[part.component].partition for part in parts],
        nodes=[node for part in allocation.node_names(step) for node in part],
        tasks=step.num_tasks,
        gpus=sum(map(len, step.gpus)) * sum(len(part.nodes) for part in parts),
    )


def newest_checkpoint(folder: RunFolder) -> int:
    """Return the step of the newest complete checkpoint; -1 if there is none."""
    return max(checkpoint.steps(folder.checkpoints), default=-1)


def supervise(session: Session, request: Request, environ: Mapping[str, str]) -> int:
    """Run one attempt to its end; returns the exit code."""
    folder, state = session.folder, session.state
    _LOG.info(
        "run %s",
        kv(run=folder.path, attempt=state.attempt, job=state.job_id or "local", pid=state.pid),
    )
    _link_latest(folder, state.attempt)
    watch = MemberWatch(folder, state.attempt, socket.gethostname())
    supervisor = Supervisor(
        folder=folder,
        config=session.config,
        state=state,
        slots=_slots(session),
        backend=_backend(session, environ),
        members=watch,
        make_launch=lambda slot, incarnation: _launch(session, request, slot, incarnation, environ),
        newest_checkpoint=lambda: newest_checkpoint(folder),
        deadline=job_deadline(environ, state.job_id, folder),
    )
    return finish(session, supervisor, environ)


def finish(session: Session, supervisor: Supervisor, environ: Mapping[str, str]) -> int:
    """Test the nodes if the recipe wants it, run the supervisor, and write how it ended."""
    state = session.state
    try:
        _preflight(session, environ)
        code = supervisor.run()
        outcome = supervisor.outcome
        assert outcome is not None
        status, cause = outcome.status, outcome.cause
    except RelaxError as err:
        status, cause, code = RunStatus.FAILED, str(err), err.exit_code
    except Exception as err:  # noqa: BLE001 - the process boundary: the run must not look alive
        _LOG.exception("supervisor failed")
        status, cause, code = RunStatus.FAILED, f"the supervisor failed: {err!r}", 1
    if status is RunStatus.REQUEUED:
        newest = newest_checkpoint(session.folder)
        status, cause = may_go_on(state, session.site, newest, cause)
    state.status, state.cause = status, cause
    if status is RunStatus.DONE:
        state.result = summarise(session.folder, state)
    state.exit_code = code
    write_state(session.folder, state)
    if status is RunStatus.REQUEUED:
        code = hand_over(
            state,
            session.folder,
            session.config,
            session.plan,
            session.site,
            session.step_program,
        )
    if state.verdict:
        sys.stderr.write(f"post-mortem: {state.verdict}\n")
    if cause:  # the last line: one sentence that names the cause
        sys.stderr.write(f"relax-hpc: {state.name} {state.status}: {state.cause}\n")
    return code


def _preflight(session: Session, environ: Mapping[str, str]) -> None:
    """Test the nodes before the expensive part.

    Raises:
        SlurmError: names those to leave out.
    """
    resources = session.config.resources
    if not resources.preflight or resources.launcher is LauncherKind.LOCAL:
        return
    target = Target(config=session.config, plan=session.plan, site=session.site)
    outcome = test_nodes(target, environ)
    for line in preflight_step.lines(outcome):
        _LOG.info("preflight %s", line)
    if not outcome.is_good:
        worst = outcome.findings[0]
        more = f"; sbatch --exclude={','.join(outcome.exclude)}" if outcome.exclude else ""
        raise SlurmError(f"preflight found {worst.check}: {worst.node} {worst.what}{more}")


def _link_latest(folder: RunFolder, attempt: int) -> None:
    logs = folder.path / "logs"
    (logs / f"attempt_{attempt}").mkdir(parents=True, exist_ok=True)
    temporary = logs / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(f"attempt_{attempt}")
    temporary.replace(logs / "latest")


def _slots(session: Session) -> list[Slot]:
    recovery = session.config.recovery
    return [
        Slot(
            plan=step,
            nodes=session.allocation.node_names(step),
            state=state,
            budget=RestartBudget(
                recovery.max_train_restarts if step.role == "train" else recovery.max_role_restarts,
                progress=session.state.resumable_step,
            ),
        )
        for step, state in zip(session.plan.steps, session.state.steps, strict=True)
    ]


def _backend(session: Session, environ: Mapping[str, str]) -> StepBackend:
    if session.config.resources.launcher is LauncherKind.LOCAL:
        return LocalBackend(_step_base(environ))
    base = _step_base(slurm.step_environment(environ))
    folders = _folders(session)
    return SlurmBackend(session.plan, session.site, session.allocation, base, folders)


def _step_base(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of steps but for their RELAX_* variables; they run offline and unbuffered.

    Without the places that another launcher gave to whoever submitted: ranks ask the registry.
    """
    keep = {k: v for k, v in environ.items() if not _FOREIGN.match(k)}
    return {**keep, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def _launch(
    session: Session,
    request: Request,
    slot: Slot,
    incarnation: int,
    environ: Mapping[str, str],
) -> StepLaunch:
    module = f"relax_hpc.steps.{_MODULES.get(slot.plan.role, slot.plan.role)}"
    program = (request.step_program,) if request.step_program else ("-m", module)
    site = session.site.environment
    return StepLaunch(
        plan=slot.plan,
        nodes=slot.nodes,
        run=session.folder,
        attempt=session.state.attempt,
        incarnation=incarnation,
        address_prefix=session.site.address_prefix,
        extra_environment={
            "OMP_NUM_THREADS": str(slot.plan.cpus_per_task),
            **recorder_environment(_trace_prefix(session, slot, incarnation), site, environ),
            **site,
            **(copy_environment(site, environ) if slot.plan.role == "rollout" else {}),
        },
        program=(sys.executable, *program),
    )


def _folders(session: Session) -> list[Path]:
    """Folders that steps use, for containers; the one that they start in first."""
    config = session.config
    sources = [s for s in (config.data.train, config.data.eval) if Path(s).is_absolute()]
    others = [f for f in (config.transfer.spill_folder, config.rollout.replay) if f]
    return [
        Path.cwd(),
        session.folder.path,
        Path(config.model.path),
        *(Path(source).parent for source in sources),
        *map(Path, others),
    ]


def _trace_prefix(session: Session, slot: Slot, incarnation: int) -> Path:
    """Name flight-recorder dumps beside the logs of the start that they belong to."""
    folder = session.folder.logs(session.state.attempt, slot.plan.role)
    return folder / f"{slot.plan.index}-i{incarnation}-{TRACE_NAME}"


def cancel_run(folder: RunFolder, timeout_s: float) -> str:
    """End a run from outside, in order; returns whom that was asked of.

    Slurm: scancel of the job (it need not have started, or may wait for its next start). Local:
    SIGTERM to the supervisor. Then wait for its last word; where none comes because no supervisor
    is there any more, the status becomes `cancelled` here.

    Raises:
        ConfigError: the run is over already, or its supervisor is on another host.
        RelaxError: the supervisor did not end in time.
    """
    state = read_state(folder)
    if state is None or state.status.is_final:
        seen = "has not started" if state is None else f"is {state.status.value} already"
        raise ConfigError(f"{folder.path} {seen}: nothing to cancel (a waiting job: scancel JOBID)")
    state, before = find_liveness(folder, state)
    if state.job_id:
        who = f"Slurm job {state.job_id}"
        slurm.cancel(state.job_id)
    else:
        who = f"process {state.pid}"
        if before is Liveness.UNKNOWN:
            raise ConfigError(f"{folder.path} is run by {who} on {state.host}: cancel it there")
        if before is Liveness.ALIVE:
            os.kill(state.pid, signal.SIGTERM)
    _await_end(folder, who, timeout_s)
    was_lost = before is Liveness.LOST
    _mark_cancelled(folder, "its supervisor was lost before" if was_lost else "it was waiting")
    return f"{who} (it was lost)" if was_lost else who


def _await_end(folder: RunFolder, who: str, timeout_s: float) -> None:
    """Wait until nobody supervises the run: no process of ours, or said by state.json or Slurm."""
    deadline = time.monotonic() + timeout_s
    while True:
        state = read_state(folder)
        if state is None or (state.job_id and state.status.is_final):
            return
        is_gone = not is_supervisor_alive(state)
        if state.job_id:
            is_gone = find_liveness(folder, state)[1] is Liveness.LOST
        if is_gone:
            return
        if time.monotonic() > deadline:
            raise RelaxError(f"{who} was told to end and did not in {timeout_s:g} s")
        time.sleep(1.0 if state.job_id else 0.2)  # no child of ours: nothing to wait on


def _mark_cancelled(folder: RunFolder, why: str) -> None:
    state = read_state(folder)
    if state is not None and not state.status.is_final:
        state.status, state.exit_code = RunStatus.CANCELLED, 1
        state.cause = f"relax-hpc cancel ended it ({why})"
        write_state(folder, state)
