"""Spill: budget, removal, torn tails, damage, a full disk, and a writer that is killed."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from relax_hpc.errors import ArenaFullError, StaleEpochError, TransferError
from relax_hpc.transfer.block import open_block
from relax_hpc.transfer.spill import (
    STAMP_BYTES,
    SpillLimits,
    SpillWriter,
    read_spilled,
    recover_segments,
)
from relax_hpc.transfer.wire import BlockRef

from .spill_process import make_image

ARENA = "rollout0.0-1.1-abc"


def writer(folder: Path, max_bytes: int = 1 << 24, segment_bytes: int = 1 << 22) -> SpillWriter:
    limits = SpillLimits(max_bytes=max_bytes, segment_bytes=segment_bytes, min_free_bytes=0)
    return SpillWriter(folder, "n1", ARENA, limits, b"stamp")


def append(spill: SpillWriter, epoch: int, num_values: int = 1000) -> BlockRef:
    image, digest = make_image(f"0.{epoch}.0", epoch, num_values)
    return spill.append(image, epoch=epoch, digest=digest)


def check(folder: Path, ref: BlockRef) -> None:
    rows = open_block(read_spilled(folder, ref), ref, verify=True, where="test")
    tokens = rows[f"0.{ref.epoch}.0", 0]["tokens"]
    assert tokens[0] == ref.epoch and np.array_equal(np.diff(tokens), np.ones(tokens.size - 1))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_blocks_come_back_from_several_segments(tmp_path: Path) -> None:
    spill = writer(tmp_path, segment_bytes=20_000)
    refs = [append(spill, epoch) for epoch in range(1, 12)]
    spill.close()
    assert len({ref.extent for ref in refs}) == 4
    assert all(ref.tier == "spill" and ref.offset % 64 == 0 for ref in refs)
    for ref in refs:
        check(tmp_path, ref)
    first = tmp_path / refs[0].extent
    assert first.read_bytes()[:STAMP_BYTES] == b"stamp".ljust(STAMP_BYTES, b"\0")
    assert first.stat().st_mode & 0o777 == 0o600
    into = memoryview(bytearray(1 << 16))
    assert len(read_spilled(tmp_path, refs[3], into)) == refs[3].nbytes


def test_a_segment_goes_with_its_last_block(tmp_path: Path) -> None:
    spill = writer(tmp_path, segment_bytes=20_000)
    refs = [append(spill, epoch) for epoch in range(1, 9)]
    old = [ref for ref in refs if ref.extent == refs[0].extent]
    assert spill.free([(ref.extent, ref.offset, ref.epoch + 1) for ref in old]) == 0, "wrong epoch"
    assert spill.free([("other", 4096, 1)]) == 0
    assert spill.free([(ref.extent, ref.offset, ref.epoch) for ref in old[:-1]]) == 0
    check(tmp_path, old[0])  # freed, but its segment is still needed
    assert spill.free([(old[-1].extent, old[-1].offset, old[-1].epoch)]) > 0
    assert not any(name.startswith(f"{old[0].extent}.") for name in files(tmp_path))
    with pytest.raises(StaleEpochError, match="its segment was removed"):
        read_spilled(tmp_path, old[0])
    spill.free([(ref.extent, ref.offset, ref.epoch) for ref in refs])
    assert files(tmp_path) == [] and spill.used_bytes == spill.num_blocks == 0
    check(tmp_path, append(spill, 20))  # and goes on in a new one


def test_over_the_budget_nothing_is_left_behind(tmp_path: Path) -> None:
    spill = writer(tmp_path, max_bytes=40_000)
    refs = []
    with pytest.raises(ArenaFullError, match=r"is full: .* of 40000 used .*transfer\.spill_mb"):
        for epoch in range(1, 100):
            refs.append(append(spill, epoch))
    on_disk = sum(p.stat().st_size for p in tmp_path.iterdir() if p.suffix != ".index")
    assert on_disk == spill.used_bytes <= 40_000
    spill.free([(ref.extent, ref.offset, ref.epoch) for ref in refs[:5]])
    check(tmp_path, append(spill, 200))


def test_a_batch_is_one_sync_and_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = writer(tmp_path)
    append(spill, 1)
    syncs: list[int] = []
    monkeypatch.setattr(os, "fdatasync", syncs.append)
    spill.append_many([(*_swapped(epoch),) for epoch in range(2, 30)])
    assert len(syncs) == 2, "one for the data, one for the index"
    before = (spill.used_bytes, spill.num_blocks)

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(TransferError, match=r"cannot spill .*Input/output error.*spill_folder"):
        append(spill, 40)
    assert (spill.used_bytes, spill.num_blocks) == before
    monkeypatch.undo()
    check(tmp_path, append(spill, 41))
    spill.close()
    assert len(recover_segments(tmp_path, "n1")[f"{ARENA}.s1"]) == before[1] + 1


def _swapped(epoch: int) -> tuple[bytearray, int, int]:
    image, digest = make_image(f"0.{epoch}.0", epoch, 1000)
    return image, epoch, digest


def test_torn_tails_are_cut_and_damage_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spill = writer(tmp_path)
    refs = [append(spill, epoch) for epoch in range(1, 5)]
    spill.close()
    path, index = tmp_path / refs[0].extent, tmp_path / f"{refs[0].extent}.index"
    size, lines = path.stat().st_size, index.read_bytes()
    with path.open("ab") as file:
        file.write(b"half a block")
    with index.open("ab") as file:
        file.write(lines[:30])
    assert recover_segments(tmp_path, "n1") == {path.name: refs}
    assert (path.stat().st_size, index.read_bytes()) == (size, lines)
    with path.open("r+b") as file:  # one flipped bit
        file.seek(refs[1].offset + refs[1].nbytes // 2)
        file.write(b"\x01")
    assert recover_segments(tmp_path, "n1") == {path.name: [refs[0], *refs[2:]]}
    assert "spilled block is damaged" in caplog.text
    with pytest.raises(TransferError, match=r"tokens of group 0.2.0 .* is corrupt"):
        open_block(read_spilled(tmp_path, refs[1]), refs[1], verify=True, where="test")
    index.write_bytes(lines[:5] + b"x" + lines[6:])  # damage in the middle: nothing may be cut
    recover_segments(tmp_path, "n1")
    assert path.stat().st_size == size and "spill index is damaged" in caplog.text


def test_the_writer_adopts_what_was_there(tmp_path: Path) -> None:
    spill = writer(tmp_path)
    refs = [append(spill, epoch) for epoch in (1, 2)]
    spill.close()
    again = writer(tmp_path)
    assert again.num_blocks == 2 and again.used_bytes > 0
    assert append(again, 3).extent == f"{ARENA}.s2"
    again.free([(ref.extent, ref.offset, ref.epoch) for ref in refs])
    assert files(tmp_path) == [f"{ARENA}.s2", f"{ARENA}.s2.index"]


def test_what_is_no_segment_is_not_read(tmp_path: Path) -> None:
    ref = append(writer(tmp_path), 1)
    for name in ("../x", ".hidden"):
        with pytest.raises(TransferError, match="no such name"):
            read_spilled(tmp_path, msgspec.structs.replace(ref, extent=name))
    (tmp_path / ref.extent).write_bytes(b"short")
    with pytest.raises(TransferError, match="0 bytes, expected"):
        read_spilled(tmp_path, ref)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_leaves_nothing_behind(small_disk: Path) -> None:
    spill = writer(small_disk)
    refs = []
    with pytest.raises(ArenaFullError, match=r"bytes needed, .* are free in .*spill_folder"):
        for epoch in range(1, 100):
            refs.append(append(spill, epoch, 30_000))
    assert len(refs) > 10
    used = spill.used_bytes
    with pytest.raises(ArenaFullError):
        append(spill, 100, 1_000_000)
    assert spill.used_bytes == used
    for ref in refs:
        check(small_disk, ref)
    spill.free([(ref.extent, ref.offset, ref.epoch) for ref in refs])
    assert files(small_disk) == []
    check(small_disk, append(spill, 101, 30_000))
    spill.close()


def test_the_reserve_stays_free(small_disk: Path) -> None:
    limits = SpillLimits(max_bytes=1 << 30, min_free_bytes=1 << 20)
    spill = SpillWriter(small_disk, "n1", ARENA, limits)
    with pytest.raises(ArenaFullError, match="of which 1048576 stay free"):
        for epoch in range(1, 100):
            append(spill, epoch, 30_000)
    usage = os.statvfs(small_disk)
    assert usage.f_bavail * usage.f_frsize >= 1 << 20
    spill.close()


def _kill_in_mid_append(folder: Path, seed: int) -> tuple[int, int]:
    """Returns how many blocks were acknowledged, and by how much the files went beyond them."""
    script = Path(__file__).with_name("spill_process.py")
    with (folder / "acknowledged").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), str(folder), str(seed)], stdout=log
        )
        deadline = time.monotonic() + 60
        while not os.fstat(log.fileno()).st_size and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(random.Random(seed).random() * 0.15)
        process.kill()
        process.wait()
        lines = Path(log.name).read_bytes().split(b"\n")[:-1]
    acknowledged = [msgspec.json.decode(line, type=BlockRef) for line in lines]
    before = _num_bytes(folder)
    recovered = recover_segments(folder, "n1")
    known = {(ref.extent, ref.offset): ref for refs in recovered.values() for ref in refs}
    for ref in acknowledged:
        assert known[ref.extent, ref.offset] == ref
    for ref in known.values():
        check(folder, ref)
    assert acknowledged and len(known) - len(acknowledged) <= 3, "more than one batch ahead"
    return len(acknowledged), before - _num_bytes(folder)


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("seed", [1, 2])
def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path, seed: int) -> None:
    _kill_in_mid_append(tmp_path, seed)


@pytest.mark.long
def test_twenty_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    torn = 0
    for seed in range(100, 120):
        folder = tmp_path / str(seed)
        folder.mkdir()
        torn += _kill_in_mid_append(folder, seed)[1] > 0
    assert torn > 3, "the kills hit the middle of an append"
