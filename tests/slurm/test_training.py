"""Whole runs on a real Slurm cluster with every real part: Megatron, engines, queue, dcs, kills."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_hpc import slurm
from relax_hpc.metrics.metric import read_metrics, series
from relax_hpc.recovery.lifecycle import RunState, RunStatus, read_state
from relax_hpc.runfolder import RunFolder
from tests.launcher_samples import ROOT, wait_for
from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.timeout(900)

Submit = Callable[..., RunFolder]


def made_by_tool(tool: str, folder: Path) -> None:
    """Make a model once in the project's folder, as the recipes expect it."""
    if not (folder / "config.json").exists():
        command = [sys.executable, str(ROOT / "tools" / tool), str(folder)]
        subprocess.run(command, check=True, timeout=600)


@pytest.fixture
def submit(
    slurm_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Submit]:
    """Submit a recipe of the project as a user does; run folders go to a temporary folder.

    With plain sbatch, unless the allocation itself changes: then the script must be rendered anew.
    """
    made_by_tool("make_tiny_model", ROOT / "models" / "tiny")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RELAX_PYTHON", sys.executable)

    def start(recipe: str, *sets: str) -> RunFolder:
        options = [f"--set={text}" for text in (f"run.folder={tmp_path / 'runs'}", *sets)]
        if any(text.startswith("resources.") for text in sets):
            answer = relax(slurm_cluster, "submit", f"recipes/{recipe}.toml", *options)
            return RunFolder(tmp_path / "runs" / f"{recipe}-{answer['job_id']}")
        output = f"--output={tmp_path}/%j.out"
        job = slurm_cluster.run("sbatch", "--parsable", output, f"recipes/{recipe}.sh", *options)
        return RunFolder(tmp_path / "runs" / f"{recipe}-{job.strip()}")

    yield start
    print(*(path.read_text()[-4000:] for path in tmp_path.glob("*.out")), sep="\n")


def state_of(folder: RunFolder) -> RunState:
    state = read_state(folder)
    assert state is not None
    return state


def wait_done(folder: RunFolder, timeout_s: float = 600) -> RunState:
    def ended() -> bool:
        state = read_state(folder)
        job = folder.run_id.rpartition("-")[2]
        if state is None and job.isdigit() and job != "1" and slurm.job_state(job).is_over:
            pytest.fail(f"job {job} ended before its supervisor wrote anything")
        return state is not None and state.status.is_final

    wait_for(ended, f"{folder.run_id} ends", timeout_s)
    state = state_of(folder)
    assert state.status is RunStatus.DONE, state.cause
    return state


def wait_step(folder: RunFolder, step: int) -> None:
    def reached() -> bool:
        state = read_state(folder)
        if state is not None and state.status.is_final:
            pytest.fail(f"ended before step {step}: {state.status} {state.cause}")
        return state is not None and state.train_step >= step

    wait_for(reached, f"train step {step}", 400)


def log_of(folder: RunFolder, role: str) -> str:
    paths = sorted(folder.logs(1, role).glob("*.log"))
    return "\n".join(path.read_text(errors="replace") for path in paths)


def trained(folder: RunFolder, name: str = "train/loss") -> list[tuple[int, float]]:
    return series(read_metrics(folder), name)


def pids(folder: RunFolder, role: str, in_command: str = "relax_hpc.steps") -> list[int]:
    """Processes of this run and role, outermost python first; srun and Slurm's own excluded."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if in_command not in command or "srun" in command.split(" ", 1)[0]:
            continue
        try:
            environ = process.environ()
        except psutil.Error:
            continue
        is_ours = environ.get("RELAX_RUN") == str(folder.path) and "SLURM_PROCID" in environ
        if is_ours and environ.get("RELAX_ROLE") == role:
            found.append(process.pid)
    return found


def test_killed_engine_dcs_and_train_rank(submit: Submit) -> None:
    """kill -9 of each; the run ends with its full number of steps, none trained twice or left."""
    folder = submit(
        "tiny_dapo", "run.train_steps=30", "train.save_interval=5", "rollout.eval_interval=10"
    )
    for step, role in ((4, "rollout"), (9, "dcs"), (15, "train")):
        wait_step(folder, step)
        victims = pids(folder, role)
        assert victims, f"no process of {role}"
        os.kill(victims[0], signal.SIGKILL)
    state = wait_done(folder)
    assert state.train_step == 30
    failed = {record.role for record in state.history if record.exit_code}
    assert failed == {"rollout", "dcs", "train"}
    assert [step for step, _ in trained(folder)] == list(range(30))
    evaluations = series(read_metrics(folder), "eval/accuracy")
    assert evaluations[0][0] == 0 and evaluations[-1][0] == 30
    assert max(value for _, value in trained(folder, "train/staleness_max")) <= 1
    assert not list(Path("/dev/shm").glob(f"{folder.shm('n01').name.removesuffix('n01')}*"))


@pytest.mark.parametrize(("mode", "staleness"), [("async", 1), ("async_on_policy", 0)])
def test_micro_batches_stream(submit: Submit, mode: str, staleness: int) -> None:
    """The log says that training started while groups of that very step were being generated."""
    folder = submit(
        "tiny_dapo",
        f"run.mode={mode}",
        f"rollout.max_staleness={staleness}",
        "run.train_steps=6",
        "rollout.eval_interval=0",
    )
    wait_done(folder)
    lines = re.findall(
        r"first chunk taken.* step=(\d+) .*groups_of_step_missing=(\d+)", log_of(folder, "train")
    )
    assert [int(step) for step, _ in lines] == list(range(6))
    assert any(int(missing) > 0 for _, missing in lines), lines
    assert max(value for _, value in trained(folder, "train/staleness_max")) <= staleness


def test_tensor_and_pipeline_parallel_with_forward_only_roles(submit: Submit) -> None:
    """TP 2 x PP 2 with ref and logprob steps of their own, all in one partition."""
    folder = submit(
        "tiny_dapo",
        "run.train_steps=3",
        "train.tp=2",
        "train.pp=2",
        "resources.train.ranks=4",
        "resources.ref.partition=train",
        "resources.logprob.partition=train",
        "algorithm.kl_coef=0.01",
        "rollout.eval_interval=0",
        "resources.layout=single",
        "resources.partition=all",
        "resources.nodes=2",
    )
    state = wait_done(folder)
    assert {step.role for step in state.steps} == {"dcs", "train", "ref", "logprob", "rollout"}
    assert [step for step, _ in trained(folder)] == [0, 1, 2]
    first_kl = trained(folder, "train/kl")[0][1]
    assert first_kl == pytest.approx(0.0, abs=1e-6)


def test_resume_and_init_from(submit: Submit, slurm_cluster: Cluster) -> None:
    """A finished run goes on with more steps; another run starts from its weights."""
    folder = submit("tiny_dapo", "run.train_steps=4", "rollout.eval_interval=4")
    wait_done(folder)
    accuracy = series(read_metrics(folder), "eval/accuracy")[-1][1]
    relax(slurm_cluster, "submit", "--resume", str(folder.path), "--steps", "6")
    wait_for(lambda: state_of(folder).train_steps == 6, "the second job starts", 120)
    state = wait_done(folder)
    assert state.train_step == 6
    assert [step for step, _ in trained(folder)] == list(range(6))
    other = submit(
        "tiny_dapo",
        "run.train_steps=1",
        f"run.init_from={folder.path}@4",
        "rollout.eval_interval=1",
    )
    wait_done(other)
    assert series(read_metrics(other), "eval/accuracy")[0] == (0, pytest.approx(accuracy))


def test_without_slurm(submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """launcher = local: the same steps as child processes, no Slurm command in reach."""
    monkeypatch.delenv("SLURM_CONF")
    options = [
        f"--set={text}"
        for text in (
            "resources.launcher=local",
            f"run.folder={tmp_path / 'local'}",
            "run.train_steps=3",
            "rollout.eval_interval=0",
        )
    ]
    done = subprocess.run(
        [sys.executable, "-m", "relax_hpc.cli", "submit", "recipes/tiny_dapo.toml", *options],
        env={**os.environ, "PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(tmp_path / "local" / "tiny_dapo-1")
    assert wait_done(folder).train_step == 3


def relax(cluster: Cluster, *arguments: str) -> dict[str, Any]:
    out = cluster.run(sys.executable, "-m", "relax_hpc.cli", *arguments, "--json")
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.mark.sglang
def test_sglang_servers_train_too(submit: Submit) -> None:
    """tiny_dapo_sglang, small: real SGLang servers on two nodes, real weight updates.

    On policy the servers' logprobs are the trainer's at every step, so that every update must
    have reached them; with stale samples the difference would also be what was learnt between.
    """
    folder = submit(
        "tiny_dapo_sglang",
        "run.mode=async_on_policy",
        "rollout.max_staleness=0",
        "run.train_steps=5",
        "rollout.eval_interval=5",
    )
    wait_done(folder)
    assert [step for step, _ in trained(folder)] == list(range(5))
    differences = [value for _, value in trained(folder, "train/logprob_diff_mean")]
    assert max(differences) < 1e-3, differences
    assert [step for step, _ in series(read_metrics(folder), "eval/accuracy")] == [0, 5]


def test_a_real_pretrained_model(submit: Submit) -> None:
    """SmolLM2-135M-Instruct on a reasoning-gym task for three train steps."""
    made_by_tool("make_smollm2", ROOT / "models" / "smollm2-135m")
    folder = submit("smollm2_135m_grpo")
    wait_done(folder)
    assert [step for step, _ in trained(folder)] == [0, 1, 2]
    assert max(value for _, value in trained(folder, "train/grad_norm")) > 0
    assert trained(folder, "train/logprob_diff_mean")[0][1] < 1e-3
