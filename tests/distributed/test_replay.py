"""Record a run of real steps, train again from its archive: every loss has the same bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.real_steps import StepRun, make_addition_model

pytestmark = pytest.mark.distributed
STEPS = 6
METRICS = ("train/loss", "train/grad_norm", "train/reward_mean", "train/staleness_max")


@pytest.fixture
def runs() -> Iterator[list[StepRun]]:
    started: list[StepRun] = []
    yield started
    for run in started:
        run.end()


def _train(runs: list[StepRun], parent: Path, model: Path, replay: str) -> StepRun:
    tree: dict[str, Any] = {
        "run": {"name": "run", "train_steps": STEPS, "mode": "async"},
        "model": {"path": str(model)},
        "data": {"train": str(model / "train.jsonl")},
        "reward": {"kind": "tests.distributed.rollout_reward.even"},
        "rollout": {
            "groups_per_step": 4,
            "group_size": 4,
            "max_response_tokens": 6,
            "max_staleness": 2,
            "eval_interval": 0,
            "replay": replay,
        },
        "train": {"chunks_per_step": 2, "lr": 1e-3, "save_interval": 0},
        "transfer": {"extent_mb": 2, "arena_mb": 32},
        "recovery": {"progress_timeout_s": 120.0},
    }
    run = StepRun(parent, tree)
    runs.append(run)
    run.start("dcs")
    rollout, train = run.start("rollout"), run.start("train")
    assert run.wait_exit(train) == [0], run.logs()
    assert run.wait_exit(rollout) == [0], run.logs()
    run.end()
    return run


def _bits(run: StepRun) -> dict[str, dict[int, str]]:
    return {name: {k: v.hex() for k, v in run.metric(name).items()} for name in METRICS}


def test_a_replay_has_the_losses_of_the_recorded_run(runs: list[StepRun], tmp_path: Path) -> None:
    model = make_addition_model(tmp_path / "model")
    recorded = _train(runs, tmp_path, model, "")
    folder = recorded.folder.trajectories
    replayed = _train(runs, tmp_path, model, str(folder))
    assert sorted(recorded.metric("train/loss")) == list(range(STEPS))
    assert _bits(replayed) == _bits(recorded)
    assert len(set(_bits(recorded)["train/loss"].values())) == STEPS
    log = replayed.log("rollout")
    assert "exact=True" in log and "weights loaded" not in log, log
