"""The next attempt: requeue, a job that comes after, or the end of the chain."""

from pathlib import Path
from typing import Any

import pytest

from relax_hpc import slurm
from relax_hpc.errors import SlurmError
from relax_hpc.launcher.handover import hand_over, may_go_on
from relax_hpc.launcher.plan import build_plan
from relax_hpc.launcher.site import Site
from relax_hpc.recovery.lifecycle import RunState, RunStatus, read_state
from relax_hpc.runfolder import RunFolder, open_run_folder
from tests.launcher_samples import HEADLINE, config_of

CONFIG = config_of(HEADLINE)
DISABLED = (
    "scontrol failed (exit code 1): Requested operation is presently disabled for job 42 -> the "
    "job was submitted with --no-requeue, or the site forbids requeue"
)


class Cluster:
    """Slurm that notes what it is asked and refuses what it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requeued: list[str] = []
        self.submitted: list[tuple[str, list[str]]] = []
        self.refusal = ""
        self.no_submit = ""
        monkeypatch.setattr(slurm, "requeue", self.requeue)
        monkeypatch.setattr(slurm, "submit", self.submit)

    def requeue(self, job_id: str) -> None:
        if self.refusal:
            raise SlurmError(self.refusal)
        self.requeued.append(job_id)

    def submit(self, script: Path, options: list[str], **_: Any) -> str:
        if self.no_submit:
            raise SlurmError(self.no_submit)
        self.submitted.append((script.read_text(), options))
        return "77"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return open_run_folder(tmp_path / "it's a-42")


def ending(folder: RunFolder, job_id: str = "42", **changes: Any) -> RunState:
    return RunState(
        name="a", run=str(folder.path), launcher="slurm", job_id=job_id, cause="the limit is near",
        status=RunStatus.REQUEUED, **changes,
    )  # fmt: skip


def hand(state: RunState, folder: RunFolder, site: Site) -> int:
    return hand_over(state, folder, CONFIG, build_plan(CONFIG, site), site, "")


def test_a_requeue_and_nothing_else(cluster: Cluster, folder: RunFolder) -> None:
    assert hand(ending(folder, "48_2"), folder, Site(name="x")) == 75
    assert (cluster.requeued, cluster.submitted) == (["48_2"], [])


@pytest.mark.parametrize(
    ("refusal", "site"),
    [
        (DISABLED, Site(name="x")),
        ("scontrol failed: Access/permission denied", Site(name="x")),
        ("", Site(name="x", requeue=False, resubmit=True)),
    ],
)
def test_where_requeue_is_forbidden_a_job_comes_after(
    cluster: Cluster, folder: RunFolder, refusal: str, site: Site
) -> None:
    cluster.refusal = refusal
    assert hand(ending(folder), folder, site) == 75
    ((script, options),) = cluster.submitted
    assert options == ["--dependency=afterany:42"]
    assert "supervise --resume " in script and "--array" not in script
    left = read_state(folder)
    assert left is not None
    assert (left.status, left.job_id, left.former_jobs) == (RunStatus.REQUEUED, "77", ["42"])


def test_another_refusal_is_no_reason_for_a_second_job(cluster: Cluster, folder: RunFolder) -> None:
    cluster.refusal = "scontrol: no answer in 60 s; is slurmctld up?"
    assert hand(ending(folder), folder, Site(name="x")) == 75
    left = read_state(folder)
    assert left is not None and cluster.submitted == []
    assert left.status is RunStatus.CANCELLED
    assert "is slurmctld up?" in left.cause and "--resume" in left.cause


def test_a_refused_submission_is_told(cluster: Cluster, folder: RunFolder) -> None:
    cluster.refusal, cluster.no_submit = DISABLED, "sbatch failed: QOSMaxSubmitJobPerUserLimit"
    hand(ending(folder), folder, Site(name="x"))
    left = read_state(folder)
    assert left is not None and left.status is RunStatus.CANCELLED
    assert "QOSMaxSubmitJobPerUserLimit" in left.cause


@pytest.mark.parametrize(
    ("site", "changes", "newest", "status", "says"),
    [
        (Site(name="x"), {"attempt": 3, "resumable_step": 10}, 11, RunStatus.REQUEUED, ""),
        (Site(name="x"), {"resumable_step": 10}, 10, RunStatus.FAILED, "no new checkpoint"),
        (Site(name="x"), {"resumable_step": -1}, -1, RunStatus.FAILED, "no new checkpoint"),
        (Site(name="x", max_attempts=3), {"attempt": 3}, 5, RunStatus.FAILED, "site's last"),
        (Site(name="x", requeue=False), {}, 5, RunStatus.CANCELLED, "does not requeue"),
        (Site(name="x", requeue=False, resubmit=True), {}, 5, RunStatus.REQUEUED, ""),
        (Site(name="x"), {"job_id": ""}, 5, RunStatus.CANCELLED, "does not requeue"),
    ],
)
def test_the_chain_ends(
    folder: RunFolder,
    site: Site,
    changes: dict[str, Any],
    newest: int,
    status: RunStatus,
    says: str,
) -> None:
    state = ending(folder, **{"job_id": "42", **changes})
    found, cause = may_go_on(state, site, newest, "the limit is near")
    assert found is status and says in cause
