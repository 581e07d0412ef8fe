import io
import json
import math
from pathlib import Path

import msgspec
import pytest

from relax_hpc import slurm
from relax_hpc.cli import main
from relax_hpc.errors import ConfigError, SlurmError
from relax_hpc.metrics.metric import MetricRecord
from relax_hpc.recovery.lifecycle import RunState, RunStatus, read_state, write_state
from relax_hpc.report.compare import RunLine, print_lines, read_array, read_line
from relax_hpc.runfolder import RunFolder, open_run_folder


def make_run(
    parent: Path, task: int, status: RunStatus, step_s: float = 2.0, cause: str = ""
) -> RunFolder:
    """A task of array 42 with four steps, an evaluation and an entry of a sweep."""
    run = open_run_folder(parent / f"sweep-42_{task}")
    run.config.write_text(json.dumps({"run": {"seed": 10 + task}}))
    state = RunState(
        name="sweep",
        run=str(run.path),
        launcher="slurm",
        job_id=f"42_{task}",
        status=status,
        cause=cause,
        train_steps=4,
        train_step=4,
        overrides={"train.lr": 1e-4 * (task + 1)},
    )
    write_state(run, state)
    with (run.metrics / "train-0.jsonl").open("wb") as file:
        for step in range(1, 5):
            values = {"train/reward_mean": 0.1 * step, "train/accuracy_mean": math.nan}
            record = MetricRecord(
                time=1000 + step_s * step, step=step, role="train", index=0, metrics=values
            )
            file.write(msgspec.json.encode(record) + b"\n")
    return run


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run folders of array 42, of array 142 and of a plain job; Slurm knows some of the tasks."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    make_run(runs, 0, RunStatus.DONE)
    make_run(runs, 2, RunStatus.FAILED, 4.0, "train-0 failed 4 times")
    make_run(runs, 10, RunStatus.RUNNING)
    for other in ("sweep-142_0", "sweep-42"):
        open_run_folder(runs / other).config.write_text("{}")

    def show_job(job_id: str) -> list[dict[str, str]]:
        assert job_id == "42"
        return [
            {"JobId": "42", "ArrayJobId": "42", "ArrayTaskId": "11-13:2%4", "JobState": "PENDING"},
            {"JobId": "50", "ArrayJobId": "42", "ArrayTaskId": "10", "JobState": "RUNNING"},
            {"JobId": "44", "ArrayJobId": "42", "ArrayTaskId": "1", "JobState": "FAILED"},
        ]

    monkeypatch.setattr(slurm, "show_job", show_job)
    return runs


def test_all_tasks_are_there_in_their_order(parent: Path) -> None:
    lines = read_array("42")
    assert [(line.task, line.state, line.seed) for line in lines] == [
        (0, "done", 10),
        (1, "failed", None),
        (2, "failed", 12),
        (10, "running", 20),
        (11, "pending", None),
        (13, "pending", None),
    ]
    done = lines[0]
    assert (done.step, done.train_steps, done.seconds_per_step) == (4, 4, 2.0)
    assert done.reward == pytest.approx(0.4) and done.accuracy is None
    assert lines[2].seconds_per_step == 4.0
    assert lines[2].overrides == {"train.lr": pytest.approx(3e-4)}


def test_some_tasks(parent: Path) -> None:
    assert [line.task for line in read_array("42_[0-2]")] == [0, 1, 2]
    assert [line.task for line in read_array("42_10")] == [10]
    assert len(read_array("42_*")) == 6


def test_without_slurm_the_folders_tell(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(job_id: str) -> list[dict[str, str]]:
        raise SlurmError("no answer")

    monkeypatch.setattr(slurm, "show_job", silent)
    monkeypatch.setattr(slurm, "job_state", silent)
    assert [(line.task, line.state) for line in read_array("42")] == [
        (0, "done"),
        (2, "failed"),
        (10, "running"),
    ]


def test_no_such_array(parent: Path) -> None:
    with pytest.raises(ConfigError, match="no runs of array"):
        read_array("42_99")
    with pytest.raises(ConfigError, match="no Slurm job id"):
        read_array("sweep")


def test_the_table_and_why_runs_failed(parent: Path) -> None:
    out = io.StringIO()
    print_lines(read_array("42"), out)
    lines = out.getvalue().splitlines()
    assert lines[0].split() == [
        *("task", "state", "seed", "overrides", "steps", "reward", "accuracy", "s/step")
    ]
    assert lines[1].split() == ["0", "done", "10", "train.lr=0.0001", "4/4", "0.4", "2"]
    assert lines[-1] == "2: train-0 failed 4 times"


def test_a_task_that_another_job_goes_on_with_stays_a_task(parent: Path) -> None:
    folder = make_run(parent, 3, RunStatus.DONE)
    state = read_state(folder)
    assert state is not None
    state.job_id, state.former_jobs = "99", ["42_3"]
    write_state(folder, state)
    (line,) = read_array("42_3")
    assert (line.task, line.job_id) == (3, "99")


def test_a_requeued_task_waits(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(parent / "sweep-42_10")
    assert read_line(folder, {"42_10": "PENDING"}).state == "requeued"


def test_the_command(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--array", "42", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["array"] == "42" and len(told["runs"]) == 6
    assert set(told["runs"][0]) >= {
        *("task", "seed", "overrides", "step", "train_steps", "reward", "accuracy"),
        *("seconds_per_step", "state", "run", "job_id"),
    }
    assert main(["report", "42_0", "sweep-42_2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main(["report", "42_0", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["task"], run["state"]) == (0, "done")
    for wrong in (["report"], ["report", "42_0", "--array", "42"]):
        assert main(wrong) == 2
        assert "one of both" in capsys.readouterr().err


def test_runs_that_are_no_tasks_have_their_names() -> None:
    out = io.StringIO()
    lines = [
        RunLine(job_id="", run="/x/tiny-1", state="done"),
        RunLine(job_id="7_1", run="/x/a-7_1", state="x"),
    ]
    print_lines(lines, out)
    assert out.getvalue().splitlines()[0].startswith("run ")
    assert "tiny-1" in out.getvalue()
