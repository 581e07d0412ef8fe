"""Commands as a user runs them: bad input is one sentence with the remedy and exit code 2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher_samples import HEADLINE, ROOT, SMALL, environment_of, relax, write_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, HEADLINE)


def assert_refused(folder: Path, arguments: list[str], says: str, **environment: str) -> None:
    done = relax(*arguments, cwd=folder, **environment)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not list(folder.glob("runs/*-*"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["validate", "absent.toml"], "recipe absent.toml does not exist"),
        (["validate", "recipe.toml", "--set", "train.lrr=1"], "train.lrr: unknown key; valid here"),
        (["submit", "recipe.toml", "--set", "train.lr"], "write section.key=value"),
        (["submit", "recipe.toml", "--set", "model.path=gone"], "make_tiny_model"),
        (["submit", "recipe.toml", "--set", "data.train=empty.jsonl"], "data.train"),
        (["submit", "recipe.toml", "--set", "data.train=gone.jsonl"], "gone.jsonl"),
        (["submit", "recipe.toml", "--set", "resources.site=moon"], "known: "),
        (["submit", "recipe.toml", "--set", "run.init_from=runs/x@3"], "no exported weights"),
        (["submit", "recipe.toml", "--set", "run.init_from=a@\u00b2"], "write RUN_FOLDER@STEP"),
        (["submit", "recipe.toml", "--set", "data.train=garbage.jsonl"], "not UTF-8 text"),
        (["submit", "recipe.toml", "--dry-run", "--set", "run.init_from=a"], "RUN_FOLDER@STEP"),
        (["submit"], "give a recipe or --resume RUN"),
        (["submit", "recipe.toml", "--steps", "3"], "--steps belongs to --resume"),
        (["submit", "--resume", "runs/none-1"], "there are no runs in runs/"),
        (["status", "77"], "'77' is no run"),
        (["supervise", "recipe.toml"], "not inside a Slurm job"),
        (["supervise"], "give one of"),
        (["validate", "recipe.toml", "--inputs", "--set", "model.path=gone"], "no such folder"),
    ],
)
def test_bad_input(recipe: Path, arguments: list[str], says: str) -> None:
    (recipe.parent / "empty.jsonl").write_text("")
    (recipe.parent / "garbage.jsonl").write_bytes(b"\xff\xfe\x00")
    assert_refused(recipe.parent, arguments, says, PATH="/usr/bin:/bin", SLURM_JOB_ID="")


@pytest.mark.parametrize("parent", ["/proc/1/x", "/dev/null", "/dev/null/x", "recipe.toml", "/sys"])
def test_a_run_folder_that_cannot_be_made(tmp_path: Path, parent: str) -> None:
    write_recipe(tmp_path, SMALL)
    arguments = ["submit", "recipe.toml", "--set", f"run.folder={parent}"]
    assert_refused(tmp_path, arguments, "set run.folder to a folder")


def test_what_the_system_refuses_is_one_sentence(tmp_path: Path) -> None:
    done = relax("status", "x" * 5000, cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "File name too long" in done.stderr


def test_no_slurm_at_all(recipe: Path, tmp_path: Path) -> None:
    """Without sbatch on PATH nothing is submitted and the other ways are named."""
    empty = tmp_path / "bin"
    empty.mkdir()
    assert_refused(recipe.parent, ["submit", "recipe.toml"], "no Slurm", PATH=str(empty))


def test_validate_notes_what_is_not_here_yet(recipe: Path) -> None:
    done = relax(
        "validate", "recipe.toml", "--set", "model.path=later", "--json", cwd=recipe.parent
    )
    told = json.loads(done.stdout)
    assert done.returncode == 0
    assert told["valid"]
    assert "model.path='later'" in told["missing_inputs"][0]


def test_plan_lists_components_and_steps(recipe: Path) -> None:
    text = relax("plan", "recipe.toml", cwd=recipe.parent).stdout
    assert "component 0: dcs, train  partition train  nodes 1" in text
    assert "step rollout-3: 1 tasks  component 1 nodes 0 x 1  GPUs 6,7" in text
    plan = json.loads(relax("plan", "recipe.toml", "--json", cwd=recipe.parent).stdout)
    assert len(plan["steps"]) == 6


def test_dry_run_prints_the_script_and_writes_nothing(recipe: Path) -> None:
    before = sorted(recipe.parent.iterdir())
    one = relax("submit", "recipe.toml", "--dry-run", cwd=recipe.parent)
    two = relax("submit", "recipe.toml", "--dry-run", cwd=recipe.parent)
    assert one.returncode == 0
    assert one.stdout == two.stdout
    assert "#SBATCH hetjob" in one.stdout
    assert "supervise --config" in one.stdout
    assert sorted(recipe.parent.iterdir()) == before


def test_dry_run_says_what_a_submission_would_refuse(recipe: Path) -> None:
    arguments = ["--dry-run", "--set", "data.train=gone.jsonl", "--set", "reward.kind=foo"]
    done = relax("submit", "recipe.toml", *arguments, cwd=recipe.parent, PATH="/nowhere")
    assert done.returncode == 2
    assert "#SBATCH hetjob" in done.stdout
    files, partitions, *faults = done.stderr.splitlines()
    assert re.search(r"headline-\w+\.json and .*headline-\w+\.sh were not written$", files)
    assert "partitions were not checked (no Slurm" in partitions
    assert ["would be refused: data.train=" in line for line in faults] == [True, False]
    assert "would be refused: reward.kind='foo'" in faults[1]
    good = relax("submit", "recipe.toml", "--dry-run", cwd=recipe.parent, PATH="/nowhere")
    assert (good.returncode, len(good.stderr.splitlines())) == (0, 2)


def test_dry_run_asks_for_the_partitions(recipe: Path) -> None:
    folder = recipe.parent / "bin"
    folder.mkdir()
    for name in ("sbatch", "scontrol"):
        (folder / name).write_text("#!/bin/sh\necho PartitionName=train AllocNodes=ALL State=UP\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    arguments = ["submit", "recipe.toml", "--dry-run"]
    done = relax(*arguments, cwd=recipe.parent, PATH=path, SLURM_CONF="")
    assert done.returncode == 2
    assert "would be refused: partition 'rollout' does not exist" in done.stderr


@pytest.mark.parametrize("number", ["-5", "0", "x", "\u00b2"])
def test_logs_refuses_a_strange_number_of_lines(tmp_path: Path, number: str) -> None:
    done = relax("logs", "x", f"--lines={number}", cwd=tmp_path)
    assert done.returncode == 2
    assert "--lines" in done.stderr
    assert "must be a number, 1 or more" in done.stderr


def test_render_keeps_overrides(recipe: Path) -> None:
    done = relax("render", "recipe.toml", "--set", "resources.time_min=7", cwd=recipe.parent)
    assert "#SBATCH --time=7" in done.stdout
    assert "supervise recipe.toml --set resources.time_min=7 " in done.stdout


def test_wrong_usage_is_exit_code_2(tmp_path: Path) -> None:
    assert relax("fly", cwd=tmp_path).returncode == 2


def test_supervisor_checks_first_when_plain_sbatch_started_it(recipe: Path) -> None:
    """The script's process ends with 2 before any step was started."""
    job = {
        "SLURM_JOB_ID": "9",
        "SLURM_HET_SIZE": "",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_CPUS_PER_NODE": "4",
    }
    says = "needs components of [1, 1] nodes but job 9 has [1]"
    assert_refused(recipe.parent, ["supervise", "recipe.toml"], says, **job)


def test_a_pipe_that_closes_is_no_error(recipe: Path) -> None:
    command = f"{sys.executable} -m relax_hpc.cli plan recipe.toml | true"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=recipe.parent,
        env=environment_of(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""


def test_local_run_has_no_script(tmp_path: Path) -> None:
    write_recipe(tmp_path, SMALL)
    done = relax("render", "recipe.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert "relax-hpc submit" in done.stderr
    assert "step train-0" in relax("submit", "recipe.toml", "--dry-run", cwd=tmp_path).stdout


def test_help_needs_no_heavy_module() -> None:
    code = (
        "import sys, relax_hpc.cli as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} "
        "& {'torch', 'numpy', 'submitit', 'rich', 'zmq'}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.strip() == "[]"
    assert "submit" in done.stdout
