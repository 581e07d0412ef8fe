"""Segments: any numeric array comes back bit-equal; damage, full memory and kills are seen."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from relax_hpc.errors import TransferError
from relax_hpc.transfer.shm import (
    Entry,
    Owner,
    is_alive,
    map_segment,
    open_shm_folder,
    parse_segment,
    process_start,
    read_owner,
    temporary_owners,
    write_segment,
)
from relax_hpc.transfer.wire import Segment, SegmentPlace

OWNER = Owner("run", 1, os.getpid(), process_start(os.getpid()))


@pytest.fixture
def shm() -> Iterator[Path]:
    folder = Path("/dev/shm") / f"relax-test-{os.getpid()}-{time.monotonic_ns()}"
    yield open_shm_folder(folder)
    shutil.rmtree(folder)


def _read(folder: Path, segment: Segment) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    return parse_segment(map_segment(folder / segment.name), SegmentPlace(segment, "n1"))


_ARRAYS = hnp.arrays(
    dtype=st.one_of(
        hnp.integer_dtypes(), hnp.unsigned_integer_dtypes(), hnp.floating_dtypes(),
        hnp.boolean_dtypes(),
    ),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(_ARRAYS, min_size=1, max_size=4))
def test_any_numeric_array_comes_back_bit_equal(arrays: list[np.ndarray]) -> None:
    folder = open_shm_folder(Path("/dev/shm") / f"relax-test-{os.getpid()}-any")
    try:
        entries = [Entry("0.1.0", i, "x", array) for i, array in enumerate(arrays)]
        segment = write_segment(folder, "s", "n1", OWNER, entries)
        rows = _read(folder, segment)
        copied = parse_segment((folder / "s").read_bytes(), SegmentPlace(segment, "n2"))
        for index, array in enumerate(arrays):
            for back in (rows[("0.1.0", index)]["x"], copied[("0.1.0", index)]["x"]):
                assert (back.dtype, back.shape) == (array.dtype, array.shape)
                assert back.tobytes() == array.tobytes() and not back.flags.writeable
    finally:
        shutil.rmtree(folder)


def test_views_of_strided_arrays_and_after_unlink(shm: Path) -> None:
    array = np.arange(40, dtype=np.float32).reshape(5, 8)[::2, ::3]
    segment = write_segment(shm, "s", "n1", OWNER, [Entry("u", 0, "x", array)])
    back = _read(shm, segment)[("u", 0)]["x"]
    (shm / "s").unlink()
    np.testing.assert_array_equal(back, array)


def test_every_flipped_byte_of_header_or_payload_is_detected(shm: Path) -> None:
    entries = [Entry("u", 0, "a", np.arange(5)), Entry("u", 1, "b", np.ones(3, np.uint8))]
    segment = write_segment(shm, "s", "n1", OWNER, entries)
    whole = (shm / "s").read_bytes()
    place = SegmentPlace(segment, "n1")
    expected = parse_segment(whole, place)
    num_padding = 0
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 4
        try:
            rows = parse_segment(bytes(damaged), place)
        except TransferError:
            continue
        num_padding += 1
        for key, fields in expected.items():
            for name, array in fields.items():
                np.testing.assert_array_equal(rows[key][name], array)
    assert num_padding < 3 * 64, "only padding may differ unseen"


@pytest.mark.parametrize("length", [0, 1, 11, 12, 100, -1, 10_000])
def test_torn_segments_are_errors(shm: Path, length: int) -> None:
    segment = write_segment(shm, "s", "n1", OWNER, [Entry("u", 0, "a", np.arange(500))])
    data = (shm / "s").read_bytes()
    (shm / "s").write_bytes(data[:length] if length < 5000 else data + b"x")
    with pytest.raises(TransferError, match=r"cannot map|torn"):
        _read(shm, segment)


def test_a_segment_of_the_same_name_and_size_is_not_taken_for_another(shm: Path) -> None:
    first = write_segment(shm, "s", "n1", OWNER, [Entry("u", 0, "a", np.arange(5))])
    second = write_segment(shm, "s", "n1", OWNER, [Entry("u", 0, "a", np.arange(5) + 1)])
    assert first.nbytes == second.nbytes
    with pytest.raises(TransferError, match="header is corrupt"):
        _read(shm, first)
    assert _read(shm, second)[("u", 0)]["a"][0] == 1


def test_objects_are_never_written(shm: Path) -> None:
    for array in (np.array([{}], object), np.array(["x"]), np.array([b"x"])):
        with pytest.raises(TransferError, match="numeric"):
            write_segment(shm, "s", "n1", OWNER, [Entry("u", 0, "a", array)])
    assert not list(shm.iterdir())


def _mount_small_tmpfs(path: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_full_shared_memory_is_a_typed_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a real tmpfs of 1 MiB where mounting is allowed; else a file size limit says ENOSPC."""
    is_mounted = _mount_small_tmpfs(tmp_path)
    if not is_mounted:
        monkeypatch.setattr(os, "posix_fallocate", _no_space)
    try:
        with pytest.raises(TransferError, match=r"shared memory is full.*needs 2\d{6} bytes"):
            big = Entry("u", 0, "a", np.zeros(2_000_000, np.uint8))
            write_segment(tmp_path, "s", "n1", OWNER, [big])
        assert not list(tmp_path.iterdir())
        if is_mounted:
            write_segment(tmp_path, "t", "n1", OWNER, [Entry("u", 0, "a", np.zeros(9))])
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def _no_space(descriptor: int, offset: int, length: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(TransferError, match="is not a folder of user"):
        open_shm_folder(tmp_path / "link")
    assert (open_shm_folder(tmp_path / "own").stat().st_mode & 0o777) == 0o700


_WRITER = """
import os, sys
from pathlib import Path
import numpy as np
from relax_hpc.transfer.shm import Entry, Owner, process_start, write_segment
owner = Owner("run", 1, os.getpid(), process_start(os.getpid()))
payload = np.arange(400_000)
for number in range(10**6):
    segment = write_segment(Path(sys.argv[1]), f"s{number}", "n1", owner, [
        Entry("u", 0, "a", payload + number)])
    print(segment.nbytes, segment.digest, flush=True)
    if number >= 3:
        (Path(sys.argv[1]) / f"s{number - 3}").unlink()
"""


def test_kill_9_while_writing_leaves_whole_segments_and_recognisable_rests(shm: Path) -> None:
    for kill_number in range(4):
        command = [sys.executable, "-c", _WRITER, str(shm)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.004 * kill_number)
            os.kill(writer.pid, signal.SIGKILL)
            known = [line.split() for line in writer.stdout]
        for path in shm.glob("s*"):
            owner = read_owner(path)
            assert owner is not None and owner.pid == writer.pid and not is_alive(owner)
            number = int(path.name[1:])
            if 1 <= number <= len(known):
                nbytes, digest = known[number - 1]
                segment = Segment("n1", path.name, int(nbytes), digest)
                assert _read(shm, segment)[("u", 0)]["a"][0] == number
            path.unlink()
        for path, owner in temporary_owners(shm):
            assert owner.pid == writer.pid and not is_alive(owner)
            path.unlink()
        assert not list(shm.iterdir())


def test_liveness_tells_pids_apart() -> None:
    assert is_alive(OWNER)
    assert not is_alive(Owner("run", 1, OWNER.pid, OWNER.start + 1))
    assert not is_alive(Owner("run", 1, 2**22 + 1, 5))
    assert not is_alive(Owner("run", 1, 2**22 + 1, 0))
