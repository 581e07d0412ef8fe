"""Whole runs on a real Slurm cluster: het jobs, srun steps, kills, requeue, cancel; stub roles."""

import copy
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_hpc import slurm
from relax_hpc.config import Config
from relax_hpc.launcher.executor import RelaxExecutor, RelaxJob
from relax_hpc.launcher.slurm_steps import find_steps
from relax_hpc.recovery.lifecycle import RunState, read_state
from relax_hpc.runfolder import RunFolder
from tests.launcher_samples import (
    ROOT,
    SMALL,
    STUB,
    config_of,
    relax,
    wait_for,
    write_inputs,
    write_recipe,
)
from tests.slurm.conftest import Cluster

HET: dict[str, Any] = copy.deepcopy(SMALL)
HET["resources"] = {
    "launcher": "slurm",
    "train": {"ranks": 2, "partition": "train"},
    "rollout": {"ranks": 2, "nodes": 2, "partition": "rollout"},
    "dcs": {"partition": "dcs"},
}
HET["recovery"]["heartbeat_timeout_s"] = 10.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A submit folder with inputs; its name has a blank, as users' folders do."""
    folder = tmp_path / "submit here"
    folder.mkdir()
    write_inputs(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RELAX_PYTHON", sys.executable)
    return folder


def submit(config: Config, hold: bool = False) -> RelaxJob:
    """Submit with stub roles; `hold` keeps train waiting until `release`."""
    job = RelaxExecutor("runs", str(STUB)).submit(config)
    if hold:
        job.run_folder.path.mkdir(exist_ok=True)
        (job.run_folder.path / "hold").touch()
    return job


def release(folder: RunFolder) -> None:
    (folder.path / "hold").unlink()


def state_of(folder: RunFolder) -> RunState:
    state = read_state(folder)
    assert state is not None
    return state


def seen(folder: RunFolder, name: str) -> Any:
    """What a stub noted at its start: `train-0-1-i1`."""
    path = folder.path / "seen" / f"{name}.json"
    return json.loads(wait_for(lambda: path.exists() and path.read_text(), f"{name} starts"))


def wait_running(folder: RunFolder) -> RunState:
    wait_for(
        lambda: (s := read_state(folder)) is not None and s.status == "running", "all registered"
    )
    return state_of(folder)


def failures(folder: RunFolder) -> set[tuple[str, int, int]]:
    return {(h.role, h.index, h.exit_code) for h in state_of(folder).history if h.exit_code}


def test_sbatch_starts_each_role_on_its_nodes(slurm_cluster: Cluster, place: Path) -> None:
    """The plain way, with options after the script's name."""
    recipe = write_recipe_here(place)
    script = place / "recipe.sh"
    script.write_text(relax("render", recipe.name, cwd=place).stdout)
    text = slurm_cluster.run(
        *("sbatch", "--parsable", f"--chdir={place}", str(script)),
        *("--set", "run.train_steps=3", "--step-program", str(STUB)),
    )
    job_id = text.strip()
    folder = RunFolder(place / "runs" / f"stub-{job_id}")
    wait_for(folder.config.exists, "the run folder")
    final = slurm_cluster.wait_for(job_id, lambda s: s.is_over)
    assert (final.name, final.exit_code) == ("COMPLETED", 0)
    state = state_of(folder)
    assert (state.status, state.train_step, state.job_id) == ("done", 3, job_id)
    assert [(s.role, s.nodes) for s in state.steps] == [
        ("dcs", ["n04", "n01", "n02", "n03"]),
        ("train", ["n01"]),
        ("rollout", ["n02"]),
        ("rollout", ["n03"]),
    ]
    leader = seen(folder, "dcs-0-0-i1")
    assert (leader["node"], leader["world"], state.host) == ("n04", 4, os.uname().nodename)
    assert seen(folder, "train-0-1-i1")["leak"] in ([], ["SLURM_CPU_BIND"])
    assert seen(folder, "train-0-1-i1")["rank"] == 1
    assert (folder.path / "logs/attempt_1/train/0-i1-rank1.log").exists()
    assert (place / f"stub-{job_id}.out").exists()


def write_recipe_here(place: Path) -> Path:
    """Write the het recipe beside the inputs that are there."""
    scratch = place / "scratch"
    scratch.mkdir()
    recipe = write_recipe(scratch, HET)
    return recipe.rename(place / "recipe.toml")


def test_submitit_way_and_kills(slurm_cluster: Cluster, place: Path) -> None:
    """kill -9 of an engine, the dcs leader, a train rank and an srun: the run has all its steps."""
    job = submit(config_of(HET), hold=True)
    folder = job.run_folder
    wait_running(folder)
    assert job.state == "RUNNING"
    names = slurm_cluster.run("squeue", "--steps", "--noheader", "--format=%j %N")
    assert "rollout-1-i1 n03" in names
    os.kill(seen(folder, "rollout-0-0-i1")["pid"], signal.SIGKILL)
    seen(folder, "rollout-0-0-i2")
    os.kill(seen(folder, "dcs-0-0-i1")["pid"], signal.SIGKILL)
    seen(folder, "dcs-0-3-i2")
    os.kill(seen(folder, "train-0-1-i1")["pid"], signal.SIGKILL)
    seen(folder, "train-0-1-i2")
    release(folder)
    result = job.result()
    assert result["train_steps"] == 6
    assert result["run"] == str(folder.path)
    assert failures(folder) == {("rollout", 0, 137), ("dcs", 0, 137), ("train", 0, 137)}
    causes = [h.cause for h in state_of(folder).history if h.exit_code]
    assert "rank 0 on n02 ended by SIGKILL" in causes
    assert "rank 1 on n01 ended by SIGKILL" in causes
    assert job.done()
    wait_for(lambda: job.state == "COMPLETED", "Slurm has seen the end, too")
    assert not list(Path("/dev/shm").glob(folder.shm("n0").name + "*"))


def test_a_stopped_engine_and_a_killed_srun(slurm_cluster: Cluster, place: Path) -> None:
    """A step is gone before its successor starts: also when only its srun died."""
    job = submit(config_of(HET), hold=True)
    folder = job.run_folder
    state = wait_running(folder)
    os.kill(seen(folder, "rollout-0-0-i1")["pid"], signal.SIGSTOP)
    engine = seen(folder, "rollout-1-0-i1")["pid"]
    os.kill(srun_of(state.pid, "rollout-1-i1"), signal.SIGKILL)
    seen(folder, "rollout-1-0-i2")
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)
    seen(folder, "rollout-0-0-i2")
    assert find_steps(job_ids(job), "rollout-0-i1") == []
    release(folder)
    assert job.result()["train_steps"] == 6
    assert failures(folder) == {("rollout", 0, 137), ("rollout", 1, 137)}


def job_ids(job: RelaxJob) -> tuple[str, ...]:
    return tuple(f["JobId"] for f in slurm.show_job(job.job_id))


def srun_of(supervisor: int, step: str) -> int:
    import psutil

    for child in psutil.Process(supervisor).children():
        if f"--job-name={step}" in child.cmdline():
            return child.pid
    raise AssertionError(f"no srun of {step}")


def test_requeue_goes_on_in_the_same_folder(slurm_cluster: Cluster, place: Path) -> None:
    job = submit(config_of(HET), hold=True)
    folder = job.run_folder
    wait_running(folder)
    slurm.requeue(job.job_id)
    assert seen(folder, "train-0-0-i2")["attempt"] == 2
    release(folder)
    assert job.result()["attempts"] == 2
    state = state_of(folder)
    assert (state.status, state.attempt, state.incarnations["dcs-0"]) == ("done", 2, 2)
    assert (folder.path / "logs" / "latest").resolve().name == "attempt_2"


def test_near_the_time_limit_the_job_requeues_itself(slurm_cluster: Cluster, place: Path) -> None:
    job = submit(config_of(HET, train__save_interval=1), hold=True)
    folder = job.run_folder
    wait_running(folder)
    (folder.checkpoints / "step_1").mkdir()  # a new checkpoint: going on is worth it
    slurm_cluster.run("scancel", "--batch", "--signal=USR2", job.job_id)
    wait_for(lambda: state_of(folder).status == "requeued", "the stop", 60)
    found = slurm_cluster.wait_for(job.job_id, lambda s: s.fate is slurm.Fate.WAITING)
    assert found.restarts == 1
    slurm_cluster.run("scancel", job.job_id)


def test_cancel_stops_in_order(slurm_cluster: Cluster, place: Path) -> None:
    job = submit(config_of(HET), hold=True)
    folder = job.run_folder
    wait_running(folder)
    done = relax("cancel", str(folder.path), cwd=place)
    assert done.returncode == 0, done.stderr
    final = slurm_cluster.wait_for(job.job_id, lambda s: s.is_over)
    assert final.name == "CANCELLED"
    wait_for(lambda: state_of(folder).status == "cancelled", "the last word", 30)
    assert "SIGTERM" in state_of(folder).cause
    with pytest.raises(Exception, match="cancelled"):
        job.result()


def test_a_failed_run_has_a_failed_job_and_one_sentence(
    slurm_cluster: Cluster, place: Path
) -> None:
    job = submit(config_of(HET, recovery={"max_train_restarts": 0}), hold=True)
    folder = job.run_folder
    (folder.path / "faults").mkdir()
    (folder.path / "faults" / "train-0-1").write_text("exit 9")
    release(folder)
    with pytest.raises(Exception, match="rank 1 on n01 ended with exit code 9"):
        job.result()
    final = slurm_cluster.wait_for(job.job_id, lambda s: s.is_over)
    assert (final.name, final.exit_code) == ("FAILED", 1)
    assert "relax-hpc: stub failed: train-0 failed 1 times" in str(job.stdout())


def test_bad_input_is_refused_before_submission(slurm_cluster: Cluster, place: Path) -> None:
    recipe = write_recipe_here(place)
    done = relax("submit", recipe.name, "--set", "resources.train.partition=moon", cwd=place)
    assert done.returncode == 2
    assert "partition 'moon' does not exist on this cluster; valid: " in done.stderr
    assert slurm_cluster.run("squeue", "--noheader") == ""


def test_plain_sbatch_with_bad_input_ends_with_2(slurm_cluster: Cluster, place: Path) -> None:
    recipe = write_recipe_here(place)
    script = place / "recipe.sh"
    script.write_text(relax("render", recipe.name, cwd=place).stdout)
    job_id = slurm_cluster.run(
        *("sbatch", "--parsable", f"--chdir={place}", str(script)), "--set", "model.path=gone"
    ).strip()
    final = slurm_cluster.wait_for(job_id, lambda s: s.is_over)
    assert (final.name, final.exit_code) == ("FAILED", 2)
    assert "gone': no such folder; set model.path" in (place / f"stub-{job_id}.out").read_text()
    assert not (place / "runs").exists()


def test_batch_of_runs(slurm_cluster: Cluster, place: Path) -> None:
    """submitit's `with executor.batch()`: one job per run."""
    executor = RelaxExecutor("runs", str(STUB))
    with executor.batch():
        jobs = [
            executor.submit(config_of(HET, run__name=name, run__train_steps=1))
            for name in ("one", "two")
        ]
    assert [job.result()["train_steps"] for job in jobs] == [1, 1]


ONE_PARTITION = (
    "resources.layout=single",
    "resources.partition=all",
    "resources.nodes=2",
    "resources.train.ranks=4",
    "resources.rollout.ranks=12",
    "rollout.num_engines=12",
)


@pytest.mark.parametrize(("num_train", "shape"), [(8, ()), (4, ONE_PARTITION)])
def test_headline_recipe_on_two_nodes_of_eight_gpus(
    cluster: Callable[..., Cluster], place: Path, num_train: int, shape: tuple[str, ...]
) -> None:
    """16 GPUs: two partitions 8 : 8, or one partition 4 : 12 by steps that share a node."""
    size = ("--nodes", "2", "--gpus-per-node", "8", "--cpus-per-node", "128")
    cluster(*size, "--partitions", "train=n01 rollout=n02 all=ALL")
    inputs = ("model.path=model", "data.train=train.jsonl", "data.eval=", "run.train_steps=2")
    sets = [a for item in ("resources.site=local", *inputs, *shape) for a in ("--set", item)]
    recipe = str(ROOT / "recipes" / "qwen3_4b_dapo.toml")
    done = relax("submit", recipe, *sets, "--step-program", str(STUB), "--wait", cwd=place)
    assert done.returncode == 0, done.stderr
    (path,) = (place / "runs").glob("qwen3_4b_dapo-*")
    folder = RunFolder(path)
    state = state_of(folder)
    assert (state.status, state.train_step) == ("done", 2)
    gpus: dict[str, list[int]] = {}
    for seen_by in (folder.path / "seen").glob("[tr]*.json"):
        one = json.loads(seen_by.read_text())
        gpus.setdefault(one["node"], []).extend(one["gpus"])
    assert {node: sorted(ids) for node, ids in gpus.items()} == {
        "n01": list(range(8)),
        "n02": list(range(8)),
    }
    assert {s.role: s.gpus for s in state.steps} == {"dcs": 0, "train": num_train, "rollout": 1}
