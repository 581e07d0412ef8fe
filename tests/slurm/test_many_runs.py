"""Several runs on a real cluster: job arrays, runs side by side, runs that follow each other."""

import copy
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from relax_hpc import slurm
from relax_hpc.config import config_from_json
from relax_hpc.launcher.executor import RelaxExecutor
from relax_hpc.recovery.lifecycle import read_state
from relax_hpc.runfolder import RunFolder
from tests.launcher_samples import SMALL, STUB, config_of, relax, wait_for, write_recipe
from tests.slurm.conftest import Cluster
from tests.slurm.test_launcher import failures, place, release, seen, state_of, submit, wait_running

__all__ = ["place"]

SWEEP: dict[str, Any] = copy.deepcopy(SMALL)
SWEEP["run"] |= {"seed": 20}
SWEEP["train"] |= {"save_interval": 1}
SWEEP["rollout"]["num_engines"] = 1
SWEEP["resources"] = {"layout": "single", "partition": "all", "train": {"ranks": 2}}
SWEEP["recovery"]["heartbeat_timeout_s"] = 10.0
RUNS = """
[sweep]
runs = [{ train.lr = 1e-4 }, { train.lr = 2e-4, run.seed = 5 }, { algorithm.name = "grpo" }]
"""


def write_sweep(place: Path) -> Path:
    scratch = place / "scratch"
    scratch.mkdir()
    recipe = write_recipe(scratch, SWEEP).rename(place / "recipe.toml")
    recipe.write_text(recipe.read_text() + RUNS)
    return recipe


def report(place: Path, *options: str) -> list[dict[str, Any]]:
    done = relax("report", *options, "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    runs: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return runs


def test_sbatch_array(slurm_cluster: Cluster, place: Path) -> None:
    """A kill and a requeue in the task that has the array's number as its job id hurt no other."""
    script = place / "recipe.sh"
    script.write_text(relax("render", write_sweep(place).name, cwd=place).stdout)
    array = slurm_cluster.run(
        *("sbatch", "--parsable", f"--chdir={place}", str(script), "--step-program", str(STUB))
    ).strip()
    folders = [RunFolder(place / "runs" / f"stub-{array}_{task}") for task in range(3)]
    for folder in folders:
        folder.path.mkdir(parents=True)
        (folder.path / "hold").touch()
    for folder in folders:
        wait_running(folder)
    raw = {f["ArrayTaskId"]: f["JobId"] for f in slurm.show_job(array)}
    last = next(int(task) for task, job_id in raw.items() if job_id == array)
    first, second = (task for task in range(3) if task != last)

    os.kill(seen(folders[last], "rollout-0-0-i1")["pid"], signal.SIGKILL)
    seen(folders[last], "rollout-0-0-i2")
    (folders[last].checkpoints / "step_1").mkdir()  # going on is worth it
    slurm_cluster.run("scancel", "--batch", "--signal=USR2", f"{array}_{last}")
    waiting = slurm_cluster.wait_for(f"{array}_{last}", lambda s: s.fate is slurm.Fate.WAITING)
    assert waiting.restarts == 1
    states = {line["task"]: line["state"] for line in report(place, "--array", array)}
    assert states == {last: "requeued", first: "running", second: "running"}

    done = relax("cancel", f"{array}_{first}", cwd=place)
    assert done.returncode == 0, done.stderr
    slurm_cluster.run("scontrol", "update", f"JobId={array}_{last}", "StartTime=now")
    seen(folders[last], "train-0-0-i2")
    for folder in (folders[last], folders[second]):
        release(folder)
    for task in (last, second):
        final = slurm_cluster.wait_for(f"{array}_{task}", lambda s: s.is_over)
        assert (final.name, final.exit_code) == ("COMPLETED", 0)
        assert (place / f"stub-{array}_{task}.out").exists()
    assert failures(folders[second]) == set()
    assert state_of(folders[last]).attempt == 2

    lines = report(place, "--array", array)
    assert [line["task"] for line in lines] == [0, 1, 2]
    assert [line["seed"] for line in lines] == [20, 5, 22]
    assert [line["overrides"] for line in lines] == [
        {"train.lr": 1e-4},
        {"train.lr": 2e-4, "run.seed": 5},
        {"algorithm.name": "grpo"},
    ]
    assert {line["task"]: line["state"] for line in lines} == {
        last: "done",
        first: "cancelled",
        second: "done",
    }
    assert lines[second]["step"] == 6 and lines[second]["reward"] == pytest.approx(1.0)
    assert lines[second]["seconds_per_step"] > 0.1
    config = config_from_json(folders[2].config.read_text())
    assert (config.algorithm.name, config.sweep.runs) == ("grpo", ())


def test_submit_a_sweep(slurm_cluster: Cluster, place: Path) -> None:
    """The submitit way, and a task that fails while it starts: the others run."""
    runs = ({"train": {"lr": 1e-4}}, {"train": {"lr": 2e-4}})
    config = config_of(SWEEP, run__train_steps=1, sweep__runs=list(runs))
    jobs = RelaxExecutor("runs", str(STUB)).submit_sweep(config)
    array = jobs[0].job_id.partition("_")[0]
    assert [job.job_id for job in jobs] == [f"{array}_0", f"{array}_1"]
    assert [job.result()["train_steps"] for job in jobs] == [1, 1]
    assert [job.run_folder.path.name for job in jobs] == [f"stub-{array}_{n}" for n in range(2)]
    assert "run ends status=done" in str(jobs[1].stdout())


def test_where_requeue_is_forbidden_another_job_goes_on(
    slurm_cluster: Cluster, place: Path
) -> None:
    job = submit(config_of(SWEEP), hold=True)
    folder = job.run_folder
    wait_running(folder)
    slurm_cluster.run("scontrol", "update", f"JobId={job.job_id}", "Requeue=0")
    (folder.checkpoints / "step_1").mkdir()
    slurm_cluster.run("scancel", "--batch", "--signal=USR2", job.job_id)
    wait_for(lambda: state_of(folder).job_id != job.job_id, "the next job")
    assert seen(folder, "train-0-0-i2")["attempt"] == 2
    release(folder)
    assert job.result()["attempts"] == 2
    state = state_of(folder)
    assert (state.status, state.former_jobs) == ("done", [job.job_id])
    assert slurm.job_state(job.job_id).exit_code == os.EX_TEMPFAIL


def wait_gone(paths: list[Path]) -> None:
    wait_for(lambda: not any(path.exists() for path in paths), "shared memory is given back")


@pytest.mark.timeout(240)
def test_runs_at_once_on_the_same_nodes(slurm_cluster: Cluster, place: Path) -> None:
    """Three times in a row two runs on the same two nodes: ports, folders and shm are their own."""
    config = config_of(
        SWEEP,
        run__train_steps=3,
        resources={
            **SWEEP["resources"],
            "nodes": 2,
            "partition": "rollout",
            "train": {"ranks": 2, "nodes": 2},
        },
    )
    executor = RelaxExecutor("runs", str(STUB))
    for _ in range(3):
        with executor.batch():
            jobs = [executor.submit(config) for _ in range(2)]
        folders = [job.run_folder for job in jobs]
        for folder in folders:
            folder.path.mkdir(parents=True)
            (folder.path / "hold").touch()
        states = [wait_running(folder) for folder in folders]  # both hold all they need now
        nodes = [{node for step in state.steps for node in step.nodes} for state in states]
        assert nodes == [{"n02", "n03"}] * 2
        addresses = [
            {path.read_text() for path in folder.control.glob("*.addr")} for folder in folders
        ]
        assert addresses[0] and not addresses[0] & addresses[1]
        shm = [folder.shm(node) for folder in folders for node in ("n02", "n03")]
        assert len(set(shm)) == 4 and all(path.is_dir() for path in shm)
        for folder in folders:
            release(folder)
        assert [job.result()["train_steps"] for job in jobs] == [3, 3]
        assert [failures(folder) for folder in folders] == [set(), set()]
        wait_gone(shm)
        assert all((s := read_state(f)) is not None and s.attempt == 1 for f in folders)
