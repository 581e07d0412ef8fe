"""The train loop on a fake backend: order of calls, streaming, stop, learning rate, failures."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_hpc.config import TrainConfig
from relax_hpc.errors import DeadlineError, RelaxError
from relax_hpc.records import Row
from relax_hpc.trainer.megatron_compat import import_megatron

import_megatron()

from relax_hpc.trainer.backend import ReplicaPlace  # noqa: E402
from relax_hpc.trainer.loop import TrainLoop, TrainServices, learning_rate  # noqa: E402
from relax_hpc.trainer.objective import STATS  # noqa: E402
from tests.distributed.fakes import (  # noqa: E402
    FakeKeeper,
    FakePublisher,
    FakeQueue,
    FakeReporter,
)
from tests.distributed.tiny_models import make_config, make_rows  # noqa: E402


@dataclasses.dataclass
class FakeBackend:
    """Counts micro-batches; one rank."""

    log: list[Any]
    grad_norm: float = 1.0
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    align: int = 1
    place: ReplicaPlace = dataclasses.field(
        default_factory=lambda: ReplicaPlace(
            global_rank=0,
            world_size=1,
            dp_rank=0,
            dp_size=1,
            leader=0,
            stats_rank=0,
            shard_rank=0,
            shards_per_replica=1,
        )
    )

    def share_rows(self, rows: list[Row] | None) -> list[Row]:
        assert rows is not None
        return rows

    def sum_over_ranks(self, values: np.ndarray) -> np.ndarray:
        return values

    max_over_ranks = sum_over_ranks

    def forward_backward(self, batches: list[Any], objective: Any) -> np.ndarray:
        self.log.append(("forward_backward", sum(len(batch.spans) for batch in batches)))
        return np.ones(len(STATS))

    def optimizer_step(self, count: float, lr: float) -> float:
        self.log.append(("optimizer", count))
        return self.grad_norm

    def pieces(self) -> Any:
        self.log.append("pieces")
        return iter(())

    def specs(self) -> list[Any]:
        return []


def make_loop(chunks: int = 2, **changes: Any) -> tuple[TrainLoop, list[Any], dict[str, Any]]:
    log: list[Any] = []
    rows = make_rows(0, groups=4)
    parts: dict[str, Any] = {
        "queue": FakeQueue(lambda step: rows, chunks, calls=log),
        "publisher": FakePublisher(),
        "keeper": FakeKeeper(),
        "reporter": FakeReporter(),
    }
    known = ("queue", "keeper", "record", "wants_stop")
    parts |= {k: v for k, v in changes.items() if k in known}
    train = {"chunks_per_step": chunks, "save_interval": 2} | changes.get("train", {})
    config = make_config(Path("m"), run={"train_steps": 5}, train=train)
    backend = FakeBackend(log, grad_norm=changes.get("grad_norm", 1.0))
    return TrainLoop(config, backend, TrainServices(**parts)), log, parts  # type: ignore[arg-type]


def test_order_within_a_step() -> None:
    loop, log, parts = make_loop()
    assert loop.run()
    assert log[:2] == [("begin", 0), "pieces"]
    count = sum(int(row.fields["loss_mask"].sum()) for row in make_rows(0, groups=4))
    one_step = [
        ("forward_backward", 8),  # the first chunk is trained before the second is asked for
        ("forward_backward", 8),
        ("optimizer", count),
    ]
    assert log[2:7] == [*one_step, ("complete", 0), "pieces"]
    assert parts["keeper"].saved == [(2, False), (4, False), (5, True)]
    assert parts["publisher"].version == 5
    metrics = parts["reporter"].metrics
    assert sorted(metrics) == list(range(5))
    assert metrics[0]["train/samples_sum"] == 16
    assert {"step": 0, "chunk": 1} in parts["reporter"].said


def test_resume_begins_at_the_checkpoint_with_its_ledger() -> None:
    loop, log, parts = make_loop(keeper=FakeKeeper(start=3, ledger=b"of 3"))
    assert loop.run()
    assert log[0] == ("begin", 3)
    assert parts["queue"].cuts == [b"of 3"]
    assert sorted(parts["reporter"].metrics) == [3, 4]


def test_the_ledger_of_the_same_step_is_saved() -> None:
    loop, _, parts = make_loop()
    assert loop.run()
    assert parts["queue"].cuts == [None]
    assert parts["keeper"].ledgers == {step: f"ledger of {step}".encode() for step in (2, 4, 5)}


def test_trained_groups_are_recorded_before_the_next_weights() -> None:
    class Record:
        def append(self, step: int, uids: list[str]) -> None:
            log.append((step, *uids))

    loop, log, _ = make_loop(record=Record())
    assert loop.run()
    at = log.index(("complete", 0))
    assert log[at + 1 : at + 3] == [(0, "group of 0"), "pieces"]


def test_a_queue_that_is_gone_does_not_cost_the_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Gone(FakeQueue):
        def cut_ledger(self, step: int, timeout_s: float) -> bytes:
            raise DeadlineError("no reply of service transfer")

    rows = make_rows(0, groups=4)
    loop, _, parts = make_loop(queue=Gone(lambda step: rows, 2))
    assert loop.run()
    assert parts["keeper"].ledgers == {2: None, 4: None, 5: None}
    assert "checkpoint without a ledger step=5" in caplog.text


def test_resume_of_a_complete_run_publishes_and_ends() -> None:
    loop, log, parts = make_loop(keeper=FakeKeeper(start=5))
    assert loop.run()
    assert log == [("begin", 5), "pieces"]
    assert parts["publisher"].version == 5


@pytest.mark.parametrize("has_hf", [False, True])
def test_a_checkpoint_that_was_resumed_from_is_written_again_for_its_hf_folder_only(
    has_hf: bool,
) -> None:
    loop, _, parts = make_loop(keeper=FakeKeeper(start=5, start_has_hf=has_hf))
    assert loop.run()
    assert parts["keeper"].saved == ([] if has_hf else [(5, True)])
    loop, _, parts = make_loop(keeper=FakeKeeper(start=3), wants_stop=lambda: True)
    assert not loop.run()
    assert parts["keeper"].saved == []


def test_a_restart_because_all_checkpoints_are_damaged_is_reported() -> None:
    loop, _, parts = make_loop(keeper=FakeKeeper(damaged=(4, 2)))
    assert loop.run()
    expected = "restarted from step 0: all checkpoints are damaged (4, 2)"
    assert {"warning": expected} in parts["reporter"].said


def test_stop_saves_the_last_optimizer_step() -> None:
    answers = iter([False] * 7 + [True] * 100)  # in the second step
    loop, log, parts = make_loop(wants_stop=lambda: next(answers))
    assert not loop.run()
    done = [entry[1] for entry in log if entry[0] == "complete"]
    assert done == [0]
    assert parts["keeper"].saved == [(1, False)]


def test_stop_while_waiting_for_rows() -> None:
    answers = iter([False, True, True, True])

    class Empty(FakeQueue):
        def take_chunk(self, *args: Any, **kwargs: Any) -> Any:
            raise DeadlineError("not ready")

    loop, _, parts = make_loop(queue=Empty(lambda step: []), wants_stop=lambda: next(answers))
    assert not loop.run()
    assert parts["keeper"].saved == [(0, False)]


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_spoiled_weights_are_never_published_or_saved(norm: float) -> None:
    loop, _, parts = make_loop(grad_norm=norm)
    with pytest.raises(RelaxError, match="train step 0"):
        loop.run()
    assert parts["publisher"].version == 0
    assert parts["keeper"].saved == []


def test_learning_rate() -> None:
    constant = TrainConfig(lr=1e-3)
    assert [learning_rate(constant, s, 10) for s in (0, 9)] == [1e-3, 1e-3]
    decay = TrainConfig(lr=0.5, min_lr=0.05, lr_warmup_steps=2)
    rates = [learning_rate(decay, s, 12) for s in range(12)]
    assert rates[:3] == [0.25, 0.5, 0.5]
    assert rates[-1] == pytest.approx(0.05)
    assert all(a >= b for a, b in itertools.pairwise(rates[1:]))
    assert learning_rate(TrainConfig(lr=0.5, min_lr=0.25), 0, 1) == 0.25
