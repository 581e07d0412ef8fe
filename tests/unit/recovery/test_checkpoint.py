"""Manifest, verification and retention: damage of every kind, kills in the middle of a save."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relax_hpc.errors import CheckpointError
from relax_hpc.recovery import checkpoint


def save(checkpoints: Path, step: int, ranks: int = 3) -> Path:
    folder = checkpoint.begin(checkpoints, step)
    (folder / "state").mkdir()
    for rank in range(ranks):
        (folder / "state" / f"shard-{rank}").write_bytes(os.urandom(1000 + rank))
    (folder / "empty").touch()
    for rank in range(ranks):
        checkpoint.digest_share(folder, rank, ranks)
    return checkpoint.commit(checkpoints, step, {"world_size": str(ranks)})


def test_a_saved_checkpoint_verifies(tmp_path: Path) -> None:
    folder = save(tmp_path, 7)
    assert folder == tmp_path / "step_7"
    manifest = checkpoint.verify(folder)
    assert manifest.step == 7
    assert manifest.info == {"world_size": "3"}
    assert set(manifest.files) == {"empty", *(f"state/shard-{r}" for r in range(3))}
    assert not list(folder.glob(".*"))  # no digests of ranks are left
    assert checkpoint.newest_complete(tmp_path) == folder


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped bit": lambda folder: _flip(folder / "state" / "shard-1"),
    "torn file": lambda folder: os.truncate(folder / "state" / "shard-1", 500),
    "longer file": lambda folder: os.truncate(folder / "state" / "shard-1", 5000),
    "missing file": lambda folder: (folder / "state" / "shard-2").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "torn manifest": lambda folder: os.truncate(folder / "manifest.json", 40),
    "empty manifest": lambda folder: os.truncate(folder / "manifest.json", 0),
    "other json": lambda folder: (folder / "manifest.json").write_text('{"step": "x"}'),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_newest_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    old, new = save(tmp_path, 2), save(tmp_path, 10)
    DAMAGE[kind](new)
    with pytest.raises(CheckpointError, match="step_10"):
        checkpoint.verify(new)
    assert checkpoint.newest_complete(tmp_path) == old
    assert "step_10" in caplog.text


def test_damage_is_found_by_the_rank_that_checks_the_file(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    _flip(folder / "state" / "shard-1")
    verdicts = [checkpoint.is_whole_alone(folder, index, 4) for index in range(4)]
    assert sorted(verdicts) == [False, True, True, True]


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoint.newest_complete(tmp_path / "absent") is None
    assert checkpoint.steps(tmp_path) == []
    (tmp_path / "step_x").mkdir()
    (tmp_path / "step_3").write_text("a file")
    assert checkpoint.newest_complete(tmp_path) is None
    assert checkpoint.retain(tmp_path, 1) == []


def test_commit_refuses_files_without_digest(tmp_path: Path) -> None:
    folder = checkpoint.begin(tmp_path, 1)
    (folder / "a").write_text("a")
    with pytest.raises(CheckpointError, match="no digest"):
        checkpoint.commit(tmp_path, 1, {})
    checkpoint.digest_share(folder, 0, 2)
    (folder / "b").write_text("b")
    with pytest.raises(CheckpointError, match="'b'"):
        checkpoint.commit(tmp_path, 1, {})
    assert checkpoint.newest_complete(tmp_path) is None


def test_a_damaged_step_is_replaced_when_it_is_saved_again(tmp_path: Path) -> None:
    DAMAGE["torn file"](save(tmp_path, 4))
    assert checkpoint.verify(save(tmp_path, 4)).step == 4


def test_a_whole_checkpoint_of_the_same_step_is_completed_and_never_moved(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    old = {path: path.read_bytes() for path in (folder / "state").iterdir()}
    (folder / "hf").mkdir()  # what a kill before the new manifest left
    (folder / "hf" / "torn").touch()
    inode = folder.stat().st_ino
    new = checkpoint.begin(tmp_path, 4)
    for name in ("state/shard-0", "hf/config.json", "rng-7.bin"):
        (new / name).parent.mkdir(exist_ok=True)
        (new / name).write_text("new")
    checkpoint.digest_share(new, 0, 1)
    checkpoint.commit(tmp_path, 4, {"world_size": "1"})
    manifest = checkpoint.verify(folder)
    assert {"hf/config.json", "rng-7.bin", "state/shard-2"} <= set(manifest.files)
    assert manifest.info == {"world_size": "3"}
    assert {path: path.read_bytes() for path in (folder / "state").iterdir()} == old
    assert [p.name for p in (folder / "hf").iterdir()] == ["config.json"]
    assert folder.stat().st_ino == inode
    assert [p.name for p in tmp_path.iterdir()] == ["step_4"]


def test_damaged_ones_do_not_push_out_what_was_saved_after_them(tmp_path: Path) -> None:
    for step in (8, 10):
        DAMAGE["flipped bit"](save(tmp_path, step))
    save(tmp_path, 2)
    assert checkpoint.retain(tmp_path, 2, saved=2) == []
    save(tmp_path, 4)
    save(tmp_path, 6)
    assert checkpoint.retain(tmp_path, 2, saved=6) == [2]
    newest = checkpoint.newest_complete(tmp_path)
    assert newest is not None and newest.name == "step_6"


def test_retention(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step)
    checkpoint.begin(tmp_path, 11)  # a save that was killed
    (tmp_path / "step_2" / "manifest.json").unlink()  # incomplete: not counted as one to keep
    assert checkpoint.retain(tmp_path, 2) == [2, 1]
    assert checkpoint.steps(tmp_path) == [10, 3]
    assert not list(tmp_path.glob(".step_*"))
    assert checkpoint.retain(tmp_path, 0) == [3]  # never the newest


def test_killed_saves_never_leave_a_half_checkpoint(tmp_path: Path) -> None:
    """kill -9 at many moments: what `newest_complete` finds always verifies."""
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.unit.recovery.test_checkpoint import save\n"
        "for step in range(1, 10_000): save(Path(sys.argv[1]), step)"
    )
    first = 0
    for round_ in range(4):
        root = Path(__file__).parents[3]
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=root)
        deadline = time.monotonic() + 60
        while not checkpoint.steps(tmp_path)[:1] > [first]:
            assert time.monotonic() < deadline
            time.sleep(0.005 * (round_ + 1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        for step in checkpoint.steps(tmp_path):
            assert checkpoint.verify(checkpoint.path_of(tmp_path, step)).step == step
        first = checkpoint.steps(tmp_path)[0]
        checkpoint.retain(tmp_path, 1)
        first = 0 if not checkpoint.steps(tmp_path) else first
