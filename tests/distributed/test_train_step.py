"""Whole runs of real steps: dcs, rollout (embedded engine), train, ref and logprob, with kills."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.recovery.checkpoint import read_manifest
from relax_hpc.transfer.archive import read_archive, read_trained
from tests.distributed.real_steps import StepRun, make_addition_model

pytestmark = pytest.mark.distributed
STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_addition_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_run(tmp_path: Path, model: Path) -> Iterator[Callable[..., StepRun]]:
    runs: list[StepRun] = []

    def make(**sections: dict[str, Any]) -> StepRun:
        tree: dict[str, dict[str, Any]] = {
            "run": {"name": "run", "train_steps": STEPS, "mode": "async"},
            "model": {"path": str(model)},
            "data": {"train": str(model / "train.jsonl")},
            "reward": {"kind": "tests.distributed.rollout_reward.even"},
            "rollout": {
                "groups_per_step": 4,
                "group_size": 4,
                "max_response_tokens": 6,
                "eval_interval": 0,
            },
            "train": {"chunks_per_step": 2, "lr": 1e-4, "save_interval": 2},
            "transfer": {"extent_mb": 2, "arena_mb": 32},
            "recovery": {"progress_timeout_s": 120.0},
        }
        for name, values in sections.items():
            tree.setdefault(name, {}).update(values)
        runs.append(StepRun(tmp_path, tree))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


def test_a_run_with_all_roles(make_run: Callable[..., StepRun]) -> None:
    run = make_run(
        resources={"ref": {"ranks": 1}, "logprob": {"ranks": 1}}, algorithm={"kl_coef": 0.01}
    )
    run.start("dcs")
    rollout, train = run.start("rollout"), run.start("train")
    forward = run.start("ref") + run.start("logprob")
    assert run.wait_exit(train) == [0], run.logs()
    assert run.wait_exit(rollout + forward) == [0, 0, 0], run.logs()
    losses = run.metric("train/loss")
    assert sorted(losses) == list(range(STEPS))
    assert max(run.metric("train/staleness_max").values()) <= 1
    # Engine and trainer compute the same log-probs of the same weights; later samples are stale.
    assert run.metric("train/logprob_diff_mean")[0] < 1e-5
    assert run.metric("train/kl")[0] < 1e-9 < run.metric("train/kl")[STEPS - 1]
    assert "first chunk taken, training starts step=0" in run.log("train")
    folder = run.folder.checkpoints / f"step_{STEPS}"
    assert (folder / "manifest.json").exists()
    assert (folder / "hf" / "tokenizer.json").exists()
    assert "ledger.bin" in read_manifest(folder).files
    trained = read_trained(run.folder.trajectories)
    archived = {slot.uid: samples for slot, samples in read_archive(run.folder.trajectories)}
    assert [len(uids) for uids in trained.values()] == [4] * STEPS
    assert {uid for uids in trained.values() for uid in uids} <= set(archived)
    assert all(len(samples) == 4 for samples in archived.values())


def test_killed_train_rank_resumes_from_the_checkpoint(make_run: Callable[..., StepRun]) -> None:
    run = make_run(run={"train_steps": 6}, train={"tp": 2}, resources={"train": {"ranks": 2}})
    run.start("dcs")
    rollout, train = run.start("rollout"), run.start("train", world=2)
    saved = run.folder.checkpoints / "step_2" / "manifest.json"
    run.wait_until(saved.exists, "checkpoint of step 2")
    train[1].send_signal(signal.SIGKILL)
    # Its peer notices the lost connection; nobody has to wait for a time-out.
    assert run.wait_exit(train, 60) == [1, -signal.SIGKILL]
    train = run.start("train", world=2, incarnation=2)
    assert run.wait_exit(train) == [0, 0], run.logs()
    assert run.wait_exit(rollout) == [0], run.logs()
    assert sorted(run.metric("train/loss")) == list(range(6))
    assert "resumed step=" in run.log("train", 2)


def test_rank_killed_before_its_announcement_is_noticed_by_its_peer(
    make_run: Callable[..., StepRun],
) -> None:
    run = make_run(train={"tp": 2}, resources={"train": {"ranks": 2}})
    run.start("dcs")
    run.start("rollout")
    train = run.start("train", world=2, module="tests.distributed.dying_train_step")
    run.wait_until(lambda: train[1].poll() is not None, "death of rank 1")
    # The version can never be whole: the peer must not wait for it until the time-out.
    assert run.wait_exit(train, 60) == [1, -signal.SIGKILL]


def test_sigterm_saves_the_last_step(make_run: Callable[..., StepRun]) -> None:
    run = make_run(run={"train_steps": 1000}, train={"save_interval": 0})
    run.start("dcs")
    rollout, train = run.start("rollout"), run.start("train")
    run.wait_until(lambda: len(run.metric("train/loss")) >= 2, "two steps")
    rollout[0].kill()  # the train step now waits for rows
    train[0].terminate()
    assert run.wait_exit(train, 60) == [128 + signal.SIGTERM], run.logs()
    done = len(run.metric("train/loss"))
    assert (run.folder.checkpoints / f"step_{done}" / "manifest.json").exists()
