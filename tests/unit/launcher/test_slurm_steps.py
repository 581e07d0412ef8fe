import os
from pathlib import Path

import pytest

from relax_hpc.launcher.allocation import Allocation, Group
from relax_hpc.launcher.plan import build_plan
from relax_hpc.launcher.site import Site
from relax_hpc.launcher.slurm_steps import read_exit, srun_command
from relax_hpc.launcher.steps import StepLaunch
from relax_hpc.runfolder import RunFolder
from tests.launcher_samples import HEADLINE, config_of

SITE = Site(name="test", srun_options=("--network=x",))
PLAN = build_plan(config_of(HEADLINE, resources__dcs={"partition": "cpu"}), SITE)
ALLOCATION = Allocation(
    job_id="42",
    is_het=True,
    groups=(
        Group(job_id="42", partition="cpu", nodes=("n04",), cpus_per_node=2),
        Group(job_id="43", partition="train", nodes=("n01",), cpus_per_node=64),
        Group(job_id="44", partition="rollout", nodes=("n02",), cpus_per_node=16),
    ),
)


def launch(tmp_path: Path, name: str) -> StepLaunch:
    step = next(s for s in PLAN.steps if s.name == name)
    run = tmp_path / "50% run"
    (run / "logs" / "attempt_1" / step.role).mkdir(parents=True)
    return StepLaunch(
        plan=step,
        nodes=ALLOCATION.node_names(step),
        run=RunFolder(run),
        attempt=1,
        incarnation=3,
        address_prefix="10.",
        extra_environment={"SECRET": "s3cret"},
        program=("python", "-m", "x"),
    )


def sections(command: list[str]) -> list[list[str]]:
    assert command[0] == "srun"
    parts: list[list[str]] = [[]]
    for word in command[1:]:
        if word == ":":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def test_train_step_is_explicit_about_everything(tmp_path: Path) -> None:
    (options,) = sections(srun_command(launch(tmp_path, "train-0"), PLAN, SITE, ALLOCATION))
    for option in (
        "--het-group=1",
        "--job-name=train-0-i3",
        "--nodes=1",
        "--ntasks=8",
        "--ntasks-per-node=8",
        "--cpus-per-task=8",
        "--nodelist=n01",
        "--overlap",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--mpi=none",
        "--export=ALL",
        "--gres=gpu:8",
        "--gpu-bind=none",
        "--network=x",
    ):
        assert option in options
    (output,) = [o for o in options if o.startswith("--output")]
    assert output.endswith("50%% run/logs/attempt_1/train/0-i3-rank%t.log")
    assert options[-3:] == ["python", "-m", "x"]


def test_dcs_step_spans_all_components_without_gpus(tmp_path: Path) -> None:
    parts = sections(srun_command(launch(tmp_path, "dcs-0"), PLAN, SITE, ALLOCATION))
    assert [part[0] for part in parts] == ["--het-group=0", "--het-group=1", "--het-group=2"]
    assert all("--ntasks=1" in part for part in parts)
    assert ["--gres=none" in part for part in parts] == [False, True, True]


def test_no_secret_reaches_an_argument_list(tmp_path: Path) -> None:
    one = launch(tmp_path, "rollout-1")
    assert "s3cret" not in " ".join(srun_command(one, PLAN, SITE, ALLOCATION))
    assert one.environment()["RELAX_GPUS"] == "2,3"


# Recorded from srun 22.05 and from issues (submitit, radical.saga).
@pytest.mark.parametrize(
    ("step", "text", "code", "cause", "log"),
    [
        (
            "train-0",
            "srun: error: n01: task 1: Exited with exit code 7\n"
            "srun: launch/slurm: _step_signal: Terminating StepId=43.0\n"
            "srun: error: n01: tasks 0,2-7: Terminated\n",
            7,
            "rank 1 on n01 ended with exit code 7",
            "0-i3-rank1.log",
        ),
        (
            "train-0",
            "srun: error: n01: tasks 3-7: Killed\nsrun: Force Terminated StepId=43.0\n",
            137,
            "rank 3 on n01 ended by SIGKILL",
            "0-i3-rank3.log",
        ),
        (
            "train-0",
            "srun: error: n01: task 2: Segmentation fault (core dumped)\n",
            139,
            "rank 2 on n01 ended by SIGSEGV",
            "0-i3-rank2.log",
        ),
        (
            "train-0",
            "srun: error: n01: task 5: Out Of Memory\n",
            137,
            "rank 5 on n01 ended by SIGKILL",
            "0-i3-rank5.log",
        ),
        (
            "dcs-0",
            "srun: error: n02: task 0: Killed\n",
            137,
            "the task on n02 ended by SIGKILL",
            "0-i3-group2-node0.log",
        ),
        (
            "train-0",
            "srun: error: Unable to create step for job 43: Requested nodes are busy\n",
            143,
            "srun ended by SIGTERM: srun: error: Unable to create step for job 43: "
            "Requested nodes are busy",
            "0-i3-srun.log",
        ),
        ("train-0", "", 1, "srun ended with exit code 1", "0-i3-srun.log"),
    ],
)
def test_the_first_task_that_failed_is_named(
    tmp_path: Path, step: str, text: str, code: int, cause: str, log: str
) -> None:
    one = launch(tmp_path, step)
    one.log("srun").write_text(text)
    ended = read_exit(one, 143)
    if not text:
        ended = read_exit(one, 1)
    assert (ended.exit_code, ended.cause, ended.log.name) == (code, cause, log)


def test_the_cause_that_a_task_told_is_quoted(tmp_path: Path) -> None:
    one = launch(tmp_path, "train-0")
    one.log("srun").write_text("srun: error: n01: tasks 1-2: Exited with exit code 2\n")
    one.log("rank0").with_suffix(".cause").write_text("lost rank 1")
    assert read_exit(one, 143).cause == "rank 1 on n01 ended with exit code 2"
    one.log("rank1").with_suffix(".cause").write_bytes(b"no tokenizer in \xff/m " + b"x" * 9999)
    cause = read_exit(one, 143).cause
    assert cause.startswith("rank 1 on n01 ended with exit code 2: no tokenizer in \ufffd/m xxx")
    assert len(cause) < 700


def test_a_het_step_quotes_who_told_first(tmp_path: Path) -> None:
    """srun does not say the rank there."""
    one = launch(tmp_path, "dcs-0")
    one.log("srun").write_text("srun: error: n02: task 0: Exited with exit code 1\n")
    for rank, age_s in ((1, 5), (2, 9)):
        path = one.log(f"rank{rank}").with_suffix(".cause")
        path.write_text(f"cause {rank}")
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
    assert read_exit(one, 1).cause == "the task on n02 ended with exit code 1: cause 2"


def test_a_good_end_needs_no_messages(tmp_path: Path) -> None:
    assert read_exit(launch(tmp_path, "rollout-0"), 0).cause == ""


def test_a_log_of_garbage_is_read(tmp_path: Path) -> None:
    one = launch(tmp_path, "train-0")
    one.log("srun").write_bytes(b"\xff\x00" * 700_000 + b"\nsrun: error: n01: task 4: Aborted\n")
    assert read_exit(one, 134).cause == "rank 4 on n01 ended by SIGABRT"
