import math
import os
import pty
from pathlib import Path

import pytest

from relax_hpc import slurm
from relax_hpc.errors import ConfigError, SlurmError
from relax_hpc.metrics.writers import MetricWriter
from relax_hpc.recovery.lifecycle import (
    RunState,
    RunStatus,
    StepState,
    StepStatus,
    read_state,
    write_state,
)
from relax_hpc.report.curve import draw_curves
from relax_hpc.report.read import find_logs, find_run, read_run
from relax_hpc.report.status import print_status, status_text
from relax_hpc.runfolder import RunFolder, open_run_folder
from relax_hpc.slurm import Fate, JobState


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of 20 steps with metrics, logs of two attempts and a state."""
    monkeypatch.chdir(tmp_path)
    run = open_run_folder(tmp_path / "runs" / "tiny-42")
    run.config.write_text("{}")
    step = StepState(
        role="rollout", index=1, partitions=["rollout"], nodes=["n02", "n03"], tasks=1, gpus=0
    )
    state = RunState(
        name="tiny",
        run=str(run.path),
        launcher="slurm",
        job_id="42",
        status=RunStatus.FAILED,
        cause="train-0 failed 4 times",
        train_steps=20,
        train_step=7,
        steps=[step],
    )
    write_state(run, state)
    with MetricWriter(run, "train") as writer:
        for number in range(20):
            writer.log(number, {"train/reward_mean": number / 20})
    with MetricWriter(run, "rollout") as writer:
        writer.log(0, {"eval/accuracy": 0.5})
        writer.log(20, {"eval/accuracy": 0.9})
    for attempt in (1, 2):
        for role in ("train", "dcs"):
            run.logs(attempt, role).mkdir(parents=True)
            (run.logs(attempt, role) / "0-i1-rank0.log").write_text("hello\n")
    (run.path / "logs" / "latest").symlink_to("attempt_2")
    return run


@pytest.mark.parametrize("text", ["runs/tiny-42", "tiny-42", "42"])
def test_a_run_is_found_by_path_name_and_job(folder: RunFolder, text: str) -> None:
    assert find_run(text).path == folder.path


def test_unknown_and_ambiguous_runs(folder: RunFolder) -> None:
    with pytest.raises(ConfigError, match="runs here: tiny-42"):
        find_run("43")
    other = open_run_folder(folder.path.with_name("other-42"))
    other.config.write_text("{}")
    with pytest.raises(ConfigError, match="several runs"):
        find_run("42")


def test_status_shows_cause_steps_and_curve(folder: RunFolder) -> None:
    text = status_text(read_run(folder))
    assert "failed  train step 7 of 20  attempt 1  Slurm job 42" in text
    assert "cause: train-0 failed 4 times" in text
    assert "n[02-03]" in text
    assert "o eval/accuracy 0.9" in text
    assert text.isascii()


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (Fate.RUNNING, "running"),
        (Fate.WAITING, "requeued"),
        (Fate.FAILED, "lost (resume: relax-hpc submit --resume {run})"),
        (Fate.RESUMABLE, "lost (resume: relax-hpc submit --resume {run})"),
        (SlurmError("no answer"), "running (Slurm does not answer)"),
    ],
)
def test_status_of_a_run_asks_slurm_too(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, answer: Fate | SlurmError, shown: str
) -> None:
    state = read_state(folder)
    assert state is not None
    state.status = RunStatus.RUNNING
    write_state(folder, state)

    def job_state(job_id: str) -> JobState:
        if isinstance(answer, SlurmError):
            raise answer
        return JobState(job_id=job_id, name="X", fate=answer)

    monkeypatch.setattr(slurm, "job_state", job_state)
    line = status_text(read_run(folder)).splitlines()[1]
    assert line.startswith(shown.format(run=folder.path) + "  train step 7 of 20")


def test_a_last_word_that_came_meanwhile_counts(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = read_state(folder)
    assert state is not None
    state.status = RunStatus.RUNNING
    write_state(folder, state)

    def job_state(job_id: str) -> JobState:
        state.status = RunStatus.DONE
        write_state(folder, state)
        return JobState(job_id=job_id, name="COMPLETED", fate=Fate.DONE)

    monkeypatch.setattr(slurm, "job_state", job_state)
    assert read_run(folder).status == "done"


def test_an_ended_step_shows_no_stale_progress(folder: RunFolder) -> None:
    state = read_state(folder)
    assert state is not None
    for status, is_shown in ((StepStatus.RUNNING, True), (StepStatus.ENDED, False)):
        state.steps[0].status, state.steps[0].progress = status, {"step": 19}
        write_state(folder, state)
        assert ("step=19" in status_text(read_run(folder))) is is_shown


def test_status_on_a_terminal(folder: RunFolder) -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        print_status(read_run(folder), terminal)
        terminal.flush()
        seen = ""
        while "20 train steps" not in seen:  # a terminal hands out what it has so far
            seen += os.read(leader, 65536).decode()
    os.close(leader)
    assert "rollout-1" in seen


def test_status_as_data(folder: RunFolder) -> None:
    told = read_run(folder).to_dict()
    assert told["status"] == "failed"
    assert told["curves"]["eval/accuracy"] == [(0, 0.5), (20, 0.9)]
    assert told["last_metrics"]["train/reward_mean"] == 0.95


def test_a_run_that_has_not_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="supervisor has not started"):
        read_run(open_run_folder(tmp_path / "x-1"))


def test_logs_of_an_attempt_and_a_role(folder: RunFolder) -> None:
    assert len(find_logs(folder, None, "")) == 2
    (path,) = find_logs(folder, 1, "train")
    assert path.parts[-3:] == ("attempt_1", "train", "0-i1-rank0.log")
    with pytest.raises(ConfigError, match="there are: dcs, train"):
        find_logs(folder, None, "rollout")
    with pytest.raises(ConfigError, match="there are: attempt_1, attempt_2"):
        find_logs(folder, 3, "")


def test_curve_puts_points_where_they_belong() -> None:
    lines = draw_curves({"a": [(0, 0.0), (50, 0.5), (100, 1.0)]}, width=60, height=11)
    assert lines[0] == "o a 1"
    assert lines[1] == "       1 |" + " " * 49 + "o"
    assert lines[11] == "       0 |o"
    assert lines[6].index("o") == 10 + 24
    assert lines[12].split() == ["0", "100", "train", "steps"]


@pytest.mark.parametrize(
    "points",
    [
        [(0, 5.0)],
        [(0, 1.0), (1, 1.0)],
        [(3, -2.0), (3, 7.0)],
        [(0, math.nan), (1, 1e300), (2, -1e300)],
        [(0, math.inf), (1, 0.0)],
    ],
)
def test_curves_of_any_shape(points: list[tuple[int, float]]) -> None:
    lines = draw_curves({"a": points}, width=1, height=1)
    assert any("o" in line for line in lines[1:])
    assert all(len(line) <= 30 for line in lines[1:])


def test_nothing_to_draw() -> None:
    assert draw_curves({}) == []
    assert draw_curves({"a": [(0, math.nan)]}) == []
