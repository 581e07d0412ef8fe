"""Clusters for the tests in this folder: started by tools/slurm_cluster, taken down at the end."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_hpc import slurm

TOOL = Path(__file__).parents[2] / "tools" / "slurm_cluster"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder carries the marker, so that `-m 'not slurm'` leaves it out."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A running cluster of ours."""

    state: Path

    @property
    def conf(self) -> Path:
        return self.state / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        clean = slurm.submission_environment(os.environ)
        return {**clean, "SLURM_CONF": str(self.conf)}

    def run(self, *command: str, timeout_s: float = 60) -> str:
        """Run a command against this cluster; its stdout. Fails with its stderr."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def submit(self, text: str, *options: str) -> str:
        """Submit a command line as a batch job; the job id."""
        quiet = () if any(o.startswith("--output") for o in options) else ("--output=/dev/null",)
        out = self.run("sbatch", "--parsable", *quiet, *options, f"--wrap={text}")
        return out.strip()

    def pid(self, daemon: str) -> int:
        """Pid of slurmctld, munged or slurmd.NODE."""
        record = json.loads((self.state / "processes.json").read_text())
        return int(record["daemons"][daemon]["pid"])

    def wait_for(
        self, job_id: str, good: Callable[[slurm.JobState], bool], timeout_s: float = 60
    ) -> slurm.JobState:
        """Wait until the job's state is `good`; needs SLURM_CONF set to this cluster."""
        end = time.monotonic() + timeout_s
        while True:
            state = slurm.job_state(job_id)
            if good(state):
                return state
            assert time.monotonic() < end, f"job {job_id} is still {state}"
            time.sleep(0.3)


def run_tool(*arguments: str, timeout_s: float = 240, **environment: str) -> str:
    """Run tools/slurm_cluster; its stdout."""
    done = subprocess.run(
        [sys.executable, str(TOOL), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"slurm_cluster {arguments}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes in the default partitions and a switch tree, for the whole session."""
    state = tmp_path_factory.mktemp("shared")
    run_tool("up", "--state", str(state), "--tree", "--gpus-per-node", "2")
    yield Cluster(state)
    run_tool("down", "--state", str(state), "--keep-logs")


@pytest.fixture
def slurm_cluster(shared_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The session's cluster, as SLURM_CONF of this test; its jobs are cancelled afterwards."""
    monkeypatch.setenv("SLURM_CONF", str(shared_cluster.conf))
    yield shared_cluster
    # `123+1` is a component: pending het jobs are cancelled by their leader only
    jobs = shared_cluster.run("squeue", "--noheader", "--format=%i").split()
    if jobs:
        shared_cluster.run("scancel", *sorted({job.partition("+")[0] for job in jobs}))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    """Factory of clusters of other shapes: `cluster("--nodes", "2", "--gpus-per-node", "8")`.

    The newest one is SLURM_CONF; all are taken down at the end of the test.
    """
    states: list[Path] = []

    def make(*options: str) -> Cluster:
        state = tmp_path / f"cluster{len(states)}"
        states.append(state)
        run_tool("up", "--state", str(state), *options)
        monkeypatch.setenv("SLURM_CONF", str(state / "slurm.conf"))
        return Cluster(state)

    yield make
    for state in states:
        run_tool("down", "--state", str(state), "--keep-logs")
