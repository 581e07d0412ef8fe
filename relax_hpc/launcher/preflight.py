"""Checks of all that a run needs, before anything is submitted or started. A sentence per fault."""

import dataclasses
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from relax_hpc import slurm
from relax_hpc.config import Config, LauncherKind
from relax_hpc.data.prompts import check_source
from relax_hpc.data.sources import REASONING_GYM
from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.launcher.model_folder import check_model_folder
from relax_hpc.launcher.plan import Plan
from relax_hpc.rewards.reward import KINDS
from relax_hpc.runfolder import RunFolder


def resolve_inputs(config: Config) -> Config:
    """Return the configuration as the run folder keeps it: absolute paths, `init_from` followed.

    A run is resumed from other folders than it was submitted from, so relative paths are resolved
    once, here, against the current folder.

    Raises:
        ConfigError: `init_from` names no exported checkpoint.
    """
    path = _weights_of(config.run.init_from) if config.run.init_from else Path(config.model.path)
    data = dataclasses.replace(
        config.data, train=_absolute(config.data.train), eval=_absolute(config.data.eval)
    )
    run = dataclasses.replace(config.run, folder=str(Path(config.run.folder).absolute()))
    model = dataclasses.replace(config.model, path=str(path.absolute()))
    rollout = dataclasses.replace(config.rollout, replay=_absolute(config.rollout.replay))
    spill_folder = _absolute(config.transfer.spill_folder)
    transfer = dataclasses.replace(config.transfer, spill_folder=spill_folder)
    return dataclasses.replace(
        config, run=run, model=model, data=data, rollout=rollout, transfer=transfer
    )


def _absolute(source: str) -> str:
    is_file = bool(source) and not source.startswith(REASONING_GYM)
    return str(Path(source).absolute()) if is_file else source


def _weights_of(init_from: str) -> Path:
    run, _, step = init_from.rpartition("@")
    checkpoints = RunFolder(Path(run)).checkpoints
    path = checkpoints / f"step_{int(step)}" / "hf"
    if (path / "config.json").is_file():
        return path
    exported = sorted(p.parent.name.removeprefix("step_") for p in checkpoints.glob("step_*/hf"))
    has = f"exported weights exist for step {', '.join(exported)}" if exported else "it has none"
    raise ConfigError(f"run.init_from={init_from!r}: no exported weights in {path}; {has}")


def missing_inputs(config: Config) -> list[str]:
    """Return what is wrong with model, data and reward, a sentence each; [] when all is there."""
    faults = []
    for check in _CHECKS:
        try:
            check(config)
        except RelaxError as err:
            faults.append(str(err))
    return faults


def check_inputs(config: Config) -> None:
    """Raise the first fault of model, data and reward as a ConfigError."""
    for check in _CHECKS:
        check(config)


def check_model(config: Config) -> None:
    """Check that the model folder is one, in Hugging Face format, that can be trained.

    Raises:
        ConfigError: with the remedy.
    """
    check_model_folder(Path(config.model.path))


def check_data(config: Config) -> None:
    """Check that the data sources exist, parse and are not empty.

    Raises:
        ConfigError: with the remedy.
    """
    check_source(config.data)


def check_replay(config: Config) -> None:
    """Check that `rollout.replay` names a folder of archived groups.

    Raises:
        ConfigError: with the remedy.
    """
    folder = config.rollout.replay
    if folder and next(Path(folder).glob("step_*"), None) is None:
        raise ConfigError(
            f"rollout.replay={folder!r}: holds no archived groups (step_*); name the trajectories "
            "folder of a run that had rollout.archive"
        )


def check_reward(config: Config) -> None:
    """Check that the reward's name is known, or the path of a function in a package that exists.

    A function of one's own is not imported here: that runs its code, and may take long.

    Raises:
        ConfigError: unknown kind, no such package, a kind that does not fit the data.
    """
    kind = config.reward.kind
    if kind == "reasoning_gym" and not config.data.train.startswith(REASONING_GYM):
        raise ConfigError(
            f"reward.kind={kind!r}: data.train={config.data.train!r} must be "
            f"{REASONING_GYM}TASK; use math or exact for files"
        )
    if kind in KINDS:
        return
    parts = kind.replace(":", ".").split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"reward.kind={kind!r}: valid are {', '.join(KINDS)}, or package.module.function"
        )
    # Steps run with `python -m`, which looks into the submit folder first.
    folders = ["", *sys.path]
    if parts[0] not in sys.builtin_module_names and not PathFinder.find_spec(parts[0], folders):
        raise ConfigError(
            f"reward.kind={kind!r}: there is no package or module {parts[0]!r} in {Path.cwd()} "
            "or among the installed ones"
        )


_CHECKS = (check_model, check_data, check_replay, check_reward)


def partition_faults(config: Config, plan: Plan, faults: list[str]) -> str:
    """Add what is wrong with the partitions to `faults`; return why they could not be checked.

    A dry run is also for a machine without Slurm: that alone is no fault of the recipe.
    """
    if config.resources.launcher is LauncherKind.LOCAL:
        return ""
    try:
        slurm.require_slurm()
        slurm.list_partitions()
    except RelaxError as err:
        return str(err)
    try:
        check_slurm(config, plan)
    except RelaxError as err:
        faults.append(str(err))
    return ""


def check_slurm(config: Config, plan: Plan) -> None:
    """Check that Slurm is here, where it is needed, and has the partitions.

    Raises:
        ConfigError: no Slurm, unknown partition.
    """
    if config.resources.launcher is LauncherKind.LOCAL:
        return
    slurm.require_partitions([component.partition for component in plan.components])
