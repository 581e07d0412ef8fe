"""The checkpoint keeper on one rank: what it skips, what it keeps, what it says."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_hpc.errors import CheckpointError
from relax_hpc.recovery import checkpoint
from relax_hpc.trainer.megatron_compat import import_megatron

import_megatron()

from relax_hpc.trainer.backend import ReplicaPlace  # noqa: E402
from relax_hpc.trainer.checkpointing import CheckpointKeeper  # noqa: E402


class Backend:
    """A model of one number."""

    place = ReplicaPlace(
        global_rank=0,
        world_size=1,
        dp_rank=0,
        dp_size=1,
        leader=0,
        stats_rank=0,
        shard_rank=0,
        shards_per_replica=1,
    )
    weight = 0

    def sum_over_ranks(self, values: np.ndarray) -> np.ndarray:
        return values

    def save(self, folder: Path) -> None:
        (folder / "weight").write_text(str(self.weight))

    def load(self, folder: Path) -> None:
        self.weight = int((folder / "weight").read_text())

    def export_hf(self, folder: Path, source: Path) -> None:
        (folder / "config.json").write_text("{}")


def make_keeper(folder: Path, keep: int = 2) -> tuple[CheckpointKeeper, Backend]:
    backend: Any = Backend()
    return CheckpointKeeper(folder, keep, backend, folder / "model"), backend


def damage(folder: Path) -> None:
    os.truncate(folder / "state" / "weight", 0)


def test_all_checkpoints_damaged_is_an_error_and_the_new_ones_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper, backend = make_keeper(tmp_path)
    for step in (8, 10):
        damage(keeper.save(step, with_hf=False))
    keeper, backend = make_keeper(tmp_path)
    assert keeper.resume() == 0
    assert keeper.damaged == (10, 8)
    (error,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "every checkpoint is damaged" in error.getMessage()
    backend.weight = 77
    keeper.save(2, with_hf=False)
    keeper, backend = make_keeper(tmp_path)
    assert (keeper.resume(), backend.weight) == (2, 77)
    assert keeper.damaged == (10, 8)


def test_no_checkpoint_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper, _ = make_keeper(tmp_path)
    assert keeper.resume() == 0
    assert (keeper.damaged, caplog.text) == ((), "")


def test_the_model_folder_is_added_to_the_checkpoint_that_is_there(tmp_path: Path) -> None:
    keeper, backend = make_keeper(tmp_path)
    backend.weight = 5
    folder = keeper.save(4, with_hf=False)
    assert not keeper.has_hf(4)
    inode = (folder / "state" / "weight").stat().st_ino
    keeper, backend = make_keeper(tmp_path)
    assert keeper.resume() == 4
    keeper.save(4, with_hf=True)
    assert keeper.has_hf(4)
    assert (folder / "state" / "weight").stat().st_ino == inode
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert "hf/config.json" in files
    checkpoint.verify(folder)
    assert not list(tmp_path.glob(".step*"))


def test_the_ledger_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    keeper, _ = make_keeper(tmp_path)
    keeper.save(2, with_hf=False)
    folder = keeper.save(4, with_hf=False, ledger=b"ledger of 4")
    assert keeper.ledger is None, "only what was resumed from"
    assert "ledger.bin" in checkpoint.read_manifest(folder).files
    keeper, _ = make_keeper(tmp_path)
    assert (keeper.resume(), keeper.ledger) == (4, b"ledger of 4")
    (folder / "ledger.bin").write_bytes(b"ledger of 5")
    keeper, _ = make_keeper(tmp_path)
    assert (keeper.resume(), keeper.ledger) == (2, None), "no weights without their ledger"


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    keeper, _ = make_keeper(tmp_path / "file" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"step 3 cannot .* \(Not a directory\)"):
        keeper.save(3, with_hf=False)
