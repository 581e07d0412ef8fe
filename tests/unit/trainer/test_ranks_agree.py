"""Ranks that were told different things do the same: stop flags, listings of a shared folder."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from relax_hpc.recovery import checkpoint
from relax_hpc.trainer.backend import ReplicaPlace
from relax_hpc.trainer.checkpointing import CheckpointKeeper
from relax_hpc.trainer.loop import TrainLoop, TrainServices
from tests.distributed.fakes import (
    FakeKeeper,
    FakePublisher,
    FakeQueue,
    FakeReporter,
)
from tests.distributed.tiny_models import make_config, make_rows
from tests.unit.trainer.test_train_loop import FakeBackend

WORLD = 3


class Meeting:
    """Collectives of a few threads; each call has a deadline, as a hang is what is looked for."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(WORLD, timeout=60)
        self._values: list[Any] = [None] * WORLD

    def reduce(self, rank: int, values: np.ndarray, how: Any) -> np.ndarray:
        self._values[rank] = np.array(values)
        self._barrier.wait()
        result: np.ndarray = how(np.stack(self._values), axis=0)
        self._barrier.wait()
        return result


def place_of(rank: int) -> ReplicaPlace:
    return ReplicaPlace(
        global_rank=rank, world_size=WORLD, dp_rank=rank, dp_size=WORLD, leader=rank,
        stats_rank=0, shard_rank=0, shards_per_replica=1,
    )  # fmt: skip


@dataclasses.dataclass
class RankBackend(FakeBackend):
    """One of several ranks."""

    meeting: Meeting = dataclasses.field(default_factory=Meeting)

    def sum_over_ranks(self, values: np.ndarray) -> np.ndarray:
        return self.meeting.reduce(self.place.global_rank, values, np.sum)

    def max_over_ranks(self, values: np.ndarray) -> np.ndarray:
        return self.meeting.reduce(self.place.global_rank, values, np.max)

    def load(self, folder: Path) -> None:
        self.log.append(folder.parent.name)


def on_all_ranks(work: Callable[[int], Any]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(WORLD) as pool:
        return [one.result(timeout=120) for one in [pool.submit(work, r) for r in range(WORLD)]]


@pytest.mark.parametrize("told", range(WORLD))
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(told: int, after: int) -> None:
    """The flag is reduced at a step's boundary; survivors would wait in a collective for ever."""
    meeting = Meeting()

    def run(rank: int) -> tuple[bool, list[tuple[int, bool]]]:
        asked = iter(range(1_000_000))
        rows = make_rows(0, groups=4)
        keeper = FakeKeeper()
        services = TrainServices(
            queue=FakeQueue(lambda step: rows, 2, calls=[]),
            publisher=FakePublisher(),
            keeper=keeper,
            reporter=FakeReporter(),
            wants_stop=lambda: rank == told and next(asked) >= after,
        )
        config = make_config(
            Path("m"), run={"train_steps": 50}, train={"chunks_per_step": 2, "save_interval": 0}
        )
        backend = RankBackend([], place=place_of(rank), meeting=meeting)
        done = TrainLoop(config, backend, services).run()  # type: ignore[arg-type]
        return done, keeper.saved

    results = on_all_ranks(run)
    assert results[0] == results[1] == results[2]
    is_complete, saved = results[0]
    assert not is_complete and len(saved) == 1 and saved[0][0] < 50


def test_a_checkpoint_that_some_ranks_do_not_see_is_no_deadlock(tmp_path: Path) -> None:
    """exists() differs between nodes for a while: rank 0 names the step, all of them check it."""
    meeting = Meeting()
    folders = []
    for rank, steps in enumerate(((2, 4), (2, 4, 6), (2,))):
        folder = tmp_path / f"view{rank}"
        folder.mkdir()
        for step in steps:
            (folder / f"step_{step}").mkdir()
            (folder / f"step_{step}" / "manifest.json").write_text("{}")
        folders.append(folder)

    def is_whole(folder: Path, rank: int, world: int) -> bool:
        return folder.exists()

    def resume(rank: int) -> tuple[int, tuple[int, ...], list[str]]:
        backend = RankBackend([], place=place_of(rank), meeting=meeting)
        keeper = CheckpointKeeper(folders[rank], 2, backend, tmp_path)  # type: ignore[arg-type]
        return keeper.resume(), keeper.damaged, backend.log

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "is_whole_alone", is_whole)
        assert on_all_ranks(resume) == [(2, (4,), ["step_2"])] * WORLD
