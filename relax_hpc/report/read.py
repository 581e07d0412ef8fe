"""Read a run folder: which one is meant, its life cycle, its curves, its logs."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from relax_hpc.errors import ConfigError
from relax_hpc.metrics.metric import read_metrics, series
from relax_hpc.recovery.lifecycle import RunState, RunStatus, read_state
from relax_hpc.recovery.liveness import Liveness, find_liveness
from relax_hpc.runfolder import RunFolder

Series = list[tuple[int, float]]

CURVES = ("eval/accuracy", "train/reward_mean", "train/accuracy_mean")
"""Metrics that `status` draws, in order of interest."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunReport:
    """What a run folder says about its run."""

    folder: RunFolder
    state: RunState
    curves: dict[str, Series]
    """Name -> (train step, value), only those that exist."""
    last: dict[str, float]
    """Last value of each metric."""
    liveness: Liveness = Liveness.OVER
    """Of the supervisor: state.json alone says `running` for ever after a kill -9."""

    @property
    def status(self) -> str:
        """Status as it is now: `lost` when nobody supervises an unfinished run any more."""
        if self.liveness is Liveness.LOST:
            return "lost"
        if self.liveness is Liveness.WAITING:
            return RunStatus.REQUEUED.value  # also by Slurm itself, which the state cannot know
        return self.state.status.value

    def to_dict(self) -> dict[str, Any]:
        """Render for `status --json`."""
        state: dict[str, Any] = msgspec.to_builtins(self.state)
        told = {**state, "status": self.status, "liveness": self.liveness.value}
        return {**told, "curves": self.curves, "last_metrics": self.last}


def find_run(text: str, parent: Path = Path("runs")) -> RunFolder:
    """Return the run folder that a user means: its path, its name in `runs/`, or a job id.

    Raises:
        ConfigError: there is none, or several.
    """
    for path in (Path(text), parent / text):
        if (path / "config.json").is_file():
            return RunFolder(path.resolve())
    found = sorted(path.parent for path in parent.glob(f"*-{text}/config.json"))
    if len(found) == 1:
        return RunFolder(found[0].resolve())
    if found:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"{text!r} is the id of several runs ({names}): give the folder")
    known = sorted(path.parent.name for path in parent.glob("*/config.json"))
    has = f"runs here: {', '.join(known[-8:])}" if known else f"there are no runs in {parent}/"
    raise ConfigError(
        f"{text!r} is no run: give a run folder, its name in {parent}/ or its job id; {has}"
    )


def read_run(folder: RunFolder) -> RunReport:
    """Read everything that `status` shows.

    Raises:
        ConfigError: no supervisor has written to the folder yet.
    """
    state = read_state(folder)
    if state is None:
        raise ConfigError(f"{folder.path}: no state.json yet, the supervisor has not started")
    state, liveness = find_liveness(folder, state)
    records = read_metrics(folder)
    names = sorted({name for record in records for name in record.metrics})
    every = {name: series(records, name) for name in names}
    return RunReport(
        folder=folder,
        state=state,
        curves={name: every[name] for name in CURVES if name in every},
        last={name: points[-1][1] for name, points in every.items() if points},
        liveness=liveness,
    )


def find_logs(folder: RunFolder, attempt: int | None, role: str) -> list[Path]:
    """Return the log files of an attempt (None: the newest), oldest change first.

    Raises:
        ConfigError: no such attempt or role.
    """
    logs = folder.path / "logs"
    base = logs / (f"attempt_{attempt}" if attempt is not None else "latest")
    if not base.is_dir():
        known = ", ".join(sorted(path.name for path in logs.glob("attempt_*"))) or "none"
        raise ConfigError(f"{base}: no such attempt; there are: {known}")
    roles = sorted(path.name for path in base.iterdir() if path.is_dir())
    if role and role not in roles:
        raise ConfigError(f"role {role!r} has no logs in {base}; there are: {', '.join(roles)}")
    files = base.glob(f"{role or '*'}/*.log")
    return sorted(files, key=lambda path: (path.stat().st_mtime, path.name))
