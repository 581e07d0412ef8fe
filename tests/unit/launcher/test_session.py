"""Going on with a run, and ending it from outside."""

from pathlib import Path

import pytest

from relax_hpc import slurm
from relax_hpc.errors import ConfigError
from relax_hpc.launcher.session import cancel_run
from relax_hpc.recovery.lifecycle import RunState, RunStatus, read_state, write_state
from relax_hpc.runfolder import RunFolder, open_run_folder
from relax_hpc.slurm import Fate, JobState


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return open_run_folder(tmp_path / "x-42")


class Cluster:
    """Slurm with one job, which scancel ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fate: Fate) -> None:
        self.fate = fate
        self.cancelled: list[str] = []
        monkeypatch.setattr(slurm, "job_state", self.job_state)
        monkeypatch.setattr(slurm, "cancel", self.cancel)

    def job_state(self, job_id: str) -> JobState:
        return JobState(job_id=job_id, name="X", fate=self.fate)

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)
        self.fate = Fate.CANCELLED


@pytest.mark.parametrize(
    ("fate", "status", "told"),
    [
        (Fate.WAITING, RunStatus.REQUEUED, "Slurm job 42"),
        (Fate.FAILED, RunStatus.RUNNING, "Slurm job 42 (it was lost)"),
    ],
)
def test_cancel_writes_what_no_supervisor_will(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fate: Fate, status: RunStatus, told: str
) -> None:
    cluster = Cluster(monkeypatch, fate)
    state = RunState(name="x", run=str(folder.path), launcher="slurm", job_id="42", status=status)
    write_state(folder, state)
    assert cancel_run(folder, timeout_s=5) == told
    assert cluster.cancelled == ["42"]
    left = read_state(folder)
    assert left is not None
    assert (left.status, left.exit_code) == (RunStatus.CANCELLED, 1)
    with pytest.raises(ConfigError, match="is cancelled already"):
        cancel_run(folder, timeout_s=5)


def test_cancel_of_a_run_on_another_host_is_refused(folder: RunFolder) -> None:
    state = RunState(
        name="x", run=str(folder.path), launcher="local", host="elsewhere", pid=1,
        status=RunStatus.RUNNING,
    )  # fmt: skip
    write_state(folder, state)
    with pytest.raises(ConfigError, match="on elsewhere: cancel it there"):
        cancel_run(folder, timeout_s=5)
