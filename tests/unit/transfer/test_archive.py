"""The trajectory archive: round trips, live readers, kills, full disks, bounds."""

import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from relax_hpc.control.identity import Identity
from relax_hpc.errors import TransferError
from relax_hpc.records import FinishReason, Sample
from relax_hpc.runfolder import RunFolder
from relax_hpc.transfer.archive import (
    GroupArchive,
    TrainedLog,
    _Process,
    archive_files,
    list_groups,
    read_archive,
    read_groups,
    read_trained,
)
from relax_hpc.transfer.archive_file import FinishedGroup, StepReader, mend
from relax_hpc.transfer.archive_mark import is_marked_open
from relax_hpc.transfer.archive_process import Settings, encode_batch
from tests.stopping import stop

from .archive_process import is_equal, make_samples, make_slot

WAIT_S = 60.0


def archive(folder: Path, incarnation: int = 1, **limits: int) -> GroupArchive:
    who = Identity(run=RunFolder(folder), role="rollout", node="n1", incarnation=incarnation)
    return GroupArchive(folder / "trajectories", who, **{"min_free_bytes": 0, **limits})


def child_of(made: GroupArchive) -> "subprocess.Popen[bytes]":
    """The process that writes; started by the first group."""
    deadline = time.monotonic() + WAIT_S
    while (child := made._process._child) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return child


def check(folder: Path, numbers: list[int], version: int = 0) -> None:
    found = {slot.prompt_index: (slot, samples) for slot, samples in read_archive(folder)}
    assert sorted(found) == sorted(numbers)
    for k, (slot, samples) in found.items():
        assert slot == make_slot(k)
        assert is_equal(samples, make_samples(k, version))


# -- files ----------------------------------------------------------------------------------------


def test_groups_come_back_bit_for_bit(tmp_path: Path) -> None:
    made = archive(tmp_path)
    for k in range(40):
        assert made.offer(make_slot(k), make_samples(k))
    assert made.flush(WAIT_S)
    check(tmp_path / "trajectories", list(range(40)))  # while it is open
    made.close()
    stats = made.stats()
    assert (stats.num_offered, stats.num_written, stats.pending_bytes) == (40, 40, 0)
    assert not stats.dropped and stats.written_bytes > 0
    check(tmp_path / "trajectories", list(range(40)))
    assert [
        p.relative_to(tmp_path / "trajectories") for p in archive_files(made_folder(tmp_path))
    ] == [Path("step_000000/rollout-0-1.1.h5")]


def made_folder(tmp_path: Path) -> Path:
    return tmp_path / "trajectories"


def test_any_h5_tool_reads_a_closed_file(tmp_path: Path) -> None:
    made = archive(tmp_path)
    made.offer(make_slot(7), make_samples(7, version=3))
    made.close()
    with h5py.File(made_folder(tmp_path) / "step_000003/rollout-0-1.1.h5") as file:
        assert file.attrs["format"] == "relax_hpc trajectories" and file.attrs["step"] == 3
        assert file["num_groups"][0] == 1
        row = file["groups"][0]
        assert row["uid"] == b"0.7.0" and (row["oldest_version"], row["newest_version"]) == (3, 3)
        begin, end = file["fields/tokens/spans"][2]
        expected = make_samples(7)[2].fields["tokens"]
        assert np.array_equal(file["fields/tokens/values"][begin:end], expected)
        assert file["samples"]["finish_reason"][0] == b"length"


def _odd_sample(shared: np.ndarray, *, has_image: bool) -> Sample:
    fields: dict[str, object] = {
        "tokens": np.arange(5, dtype=np.int32),
        "token_versions": np.zeros(2, np.int32),
        "half": np.asarray([1.5, np.nan], np.float16),
        "flags": np.asarray([True, False]),
        "scalar": np.asarray(2.5, np.float64),
        "empty": np.empty((0, 3), np.int64),
        "cube": np.arange(24, dtype=np.uint8).reshape(2, 3, 4)[:, ::-1],
        "text": "gr\u00fc\u00df \0 dich",
        "raw": b"\0\1\2",
        "nothing": {},
        "shared": shared,
    }
    if has_image:
        fields["image"] = {"pixel.values": np.ones((2, 2), np.float32), "meta": {"name": "a/b"}}
    return Sample(num_prompt_tokens=3, finish_reason=FinishReason.STOP, fields=fields)  # type: ignore[arg-type]


def test_fields_of_any_kind_come_back(tmp_path: Path) -> None:
    shared = np.random.default_rng(0).standard_normal(5000)
    samples = [_odd_sample(shared, has_image=k == 1) for k in range(3)]
    made = archive(tmp_path)
    made.offer(make_slot(1), samples)
    made.close()
    assert not made.stats().dropped
    [(_, back)] = read_archive(made_folder(tmp_path))
    for old, new in zip(samples, back, strict=True):
        _check_equal(old.fields, new.fields)
    [path] = archive_files(made_folder(tmp_path))
    with h5py.File(path) as file:
        assert file["fields/shared/values"].shape == (5000,), "one array of three samples, once"


def _check_equal(old: object, new: object) -> None:
    if isinstance(old, dict):
        assert isinstance(new, dict) and old.keys() == new.keys()
        for name in old:
            _check_equal(old[name], new[name])
    elif isinstance(old, np.ndarray):
        assert isinstance(new, np.ndarray)
        assert (old.dtype, old.shape, old.tobytes()) == (new.dtype, new.shape, new.tobytes())
    else:
        assert old == new


def test_new_fields_begin_a_new_file_and_odd_ones_are_counted(tmp_path: Path) -> None:
    made = archive(tmp_path)
    made.offer(make_slot(0), make_samples(0))
    made.flush(WAIT_S)
    more = make_samples(1)
    for sample in more:
        sample.fields["routed_experts"] = np.zeros((4, 2), np.int32)
    made.offer(make_slot(1), more)
    made.offer(make_slot(2), make_samples(2))
    made.flush(WAIT_S)
    other = make_samples(3)
    other[0].fields["reward"] = np.asarray(1.0, np.float64)
    made.offer(make_slot(3), other)
    made.flush(WAIT_S)
    unknown = make_samples(4)
    unknown[0].fields["reward"] = np.asarray([object()])
    made.offer(make_slot(4), unknown)
    made.close()
    names = [path.name for path in archive_files(made_folder(tmp_path))]
    assert names == ["rollout-0-1.1-2.h5", "rollout-0-1.1.h5"]
    assert [s.uid for s, _ in read_archive(made_folder(tmp_path))] == ["0.0.0", "0.1.0", "0.2.0"]
    assert made.stats().dropped == {"bad_fields": 2}


def test_files_are_one_per_step_and_start_and_old_ones_close(tmp_path: Path) -> None:
    first, second = archive(tmp_path), archive(tmp_path, incarnation=2)
    for k, version in enumerate((0, 1, 0, 2, 3, 4)):
        first.offer(make_slot(k), make_samples(k, version))
        first.flush(WAIT_S)
    second.offer(make_slot(9), make_samples(9, 4))
    second.flush(WAIT_S)
    files = archive_files(made_folder(tmp_path))
    names = [str(path.relative_to(made_folder(tmp_path))) for path in files]
    assert names == [f"step_00000{v}/rollout-0-1.1.h5" for v in range(5)] + [
        "step_000004/rollout-0-1.2.h5"
    ]
    opened = [p.resolve().name for p in Path(f"/proc/{child_of(first).pid}/fd").iterdir()]
    assert len({name for name in opened if name.endswith(".h5")}) <= 1, "one name, three steps"
    assert sum(name.endswith(".h5") for name in opened) == 2 * 3, "HDF5's and ours of three files"
    first.close()
    second.close()
    assert [g.slot.prompt_index for g in list_groups(made_folder(tmp_path))] == [
        0,
        1,
        2,
        3,
        4,
        5,
        9,
    ]


def test_the_last_of_two_groups_with_one_uid_counts(tmp_path: Path) -> None:
    for incarnation in (1, 2):
        made = archive(tmp_path, incarnation)
        made.offer(make_slot(5), make_samples(5 * incarnation))
        made.close()
    [(_, samples)] = read_archive(made_folder(tmp_path))
    assert is_equal(samples, make_samples(10))


# -- a live file ----------------------------------------------------------------------------------


def test_a_reader_follows_a_live_file_with_plain_h5py(tmp_path: Path) -> None:
    made = archive(tmp_path)
    made.offer(make_slot(0), make_samples(0))
    made.flush(WAIT_S)
    [path] = archive_files(made_folder(tmp_path))
    with h5py.File(path, "r", swmr=True) as file:
        count, values, spans = (
            file[name] for name in ("num_groups", "fields/tokens/values", "fields/tokens/spans")
        )
        for k in range(1, 20):
            made.offer(make_slot(k), make_samples(k))
            made.flush(WAIT_S)
            for dataset in (count, values, spans):
                dataset.refresh()
            assert count[0] == k + 1
            begin, end = spans[4 * k]
            assert np.array_equal(values[begin:end], make_samples(k)[0].fields["tokens"])
    made.close()


def test_plain_opens_work_while_it_is_written(tmp_path: Path) -> None:
    """As h5dump does it, which knows no SWMR."""
    made = archive(tmp_path)
    for k in range(10):
        made.offer(make_slot(k), make_samples(k))
        made.flush(WAIT_S)
        [path] = archive_files(made_folder(tmp_path))
        assert not is_marked_open(path)
        with h5py.File(path) as file:
            begin, end = file["fields/tokens/spans"][4 * k]
            assert file["num_groups"][0] == k + 1
            expected = make_samples(k)[0].fields["tokens"]
            assert np.array_equal(file["fields/tokens/values"][begin:end], expected)
    made.close()


def test_a_reader_beside_a_fast_writer_never_sees_half_a_group(tmp_path: Path) -> None:
    made = archive(tmp_path)
    made.offer(make_slot(0), make_samples(0))
    made.flush(WAIT_S)
    done = threading.Event()

    def produce() -> None:
        for k in range(1, 150):
            made.offer(make_slot(k), make_samples(k))
            if k % 7 == 0:
                made.flush(WAIT_S)
        made.flush(WAIT_S)
        done.set()

    thread = threading.Thread(target=produce)
    thread.start()
    seen = []
    while not done.is_set():
        groups = list_groups(made_folder(tmp_path))
        seen.append(len(groups))
        for group, samples in read_groups(groups[-10:]):
            assert is_equal(samples, make_samples(group.slot.prompt_index))
    thread.join()
    made.close()
    assert seen == sorted(seen) and seen[-1] > seen[0]
    check(made_folder(tmp_path), list(range(150)))


# -- kills ----------------------------------------------------------------------------------------


def settings(folder: Path, incarnation: int = 1) -> Settings:
    return Settings(
        folder=str(folder), run_id="r", role="rollout", index=0, attempt=1,
        incarnation=incarnation, min_free_bytes=0,
    )  # fmt: skip


@functools.cache
def _batches() -> list[tuple[int, list[bytes | bytearray]]]:
    """Rendered beforehand, so that the process is always writing: (groups so far, parts)."""
    batches, k = [], 0
    for number in range(40):
        size = 1 + 7 * (number % 3)
        groups = [
            FinishedGroup(slot=make_slot(i), samples=make_samples(i, 0, 3000), finished_s=i)
            for i in range(k, k + size)
        ]
        k += size
        batches.append((k, encode_batch(groups)))
    return batches


def _kill_in_mid_write(folder: Path, seed: int) -> int:
    """Kill the process that writes; returns how many groups it had acknowledged."""
    process = _Process(settings(folder))
    num_acknowledged = 0

    def write() -> None:
        nonlocal num_acknowledged
        for k, parts in _batches():
            if process.write(parts) is None:
                return
            num_acknowledged = k

    _batches()
    thread = threading.Thread(target=write)
    thread.start()
    deadline = time.monotonic() + WAIT_S
    while not num_acknowledged and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(random.Random(seed).random() * 0.12)
    process._is_over = True
    assert process._child is not None
    process._child.kill()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    process.finish()
    return num_acknowledged


def _check_killed(folder: Path, num_acknowledged: int) -> None:
    """With h5py alone, then with ours, then mended and with a plain open."""
    [path] = archive_files(folder)
    if is_marked_open(path):  # killed inside a batch
        with pytest.raises(OSError, match="file is already open for write"):
            h5py.File(path, "r")
    with h5py.File(path, "r", swmr=True) as file:
        num_groups = int(file["num_groups"][0])
        assert num_groups >= num_acknowledged > 0
        spans, values = file["fields/tokens/spans"], file["fields/tokens/values"]
        for k in range(num_groups):
            begin, end = spans[4 * k + 1]
            expected = make_samples(k, 0, 3000)[1].fields["tokens"]
            assert np.array_equal(values[begin:end], expected)
    groups = list(read_archive(folder))
    assert [slot.prompt_index for slot, _ in groups] == list(range(num_groups))
    assert all(is_equal(s, make_samples(slot.prompt_index, 0, 3000)) for slot, s in groups)
    assert mend(path) == num_groups and not is_marked_open(path)
    with h5py.File(path) as file:
        assert file["num_groups"][0] == num_groups and file.attrs["index"] == 0
    for (_, one), (_, other) in zip(groups, read_archive(folder), strict=True):
        assert is_equal(one, other)


@pytest.mark.parametrize("seed", [1, 2])
def test_what_was_counted_survives_a_kill(tmp_path: Path, seed: int) -> None:
    _check_killed(tmp_path, _kill_in_mid_write(tmp_path, seed))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_was_counted_survives_twenty_kills(tmp_path: Path) -> None:
    for seed in range(100, 120):
        folder = tmp_path / str(seed)
        folder.mkdir()
        _check_killed(folder, _kill_in_mid_write(folder, seed))


def _die_between_calls(folder: Path, num_calls: int) -> tuple[int, bool]:
    """Returns how many groups count, and whether rows beyond them are in the file."""
    script = Path(__file__).with_name("archive_process.py")
    path = folder / "step_000000" / f"rollout-0-1.{num_calls}.h5"
    path.parent.mkdir(exist_ok=True)
    command = [sys.executable, str(script), str(path), str(num_calls), "die"]
    process = subprocess.run(command, capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stdout + process.stderr
    with h5py.File(path, "r", swmr=True) as file:
        num_groups, is_torn = int(file["num_groups"][0]), file["groups"].shape[0] == 10
    groups = list(read_archive(folder))
    assert len(groups) == num_groups
    assert all(is_equal(samples, make_samples(slot.prompt_index)) for slot, samples in groups)
    assert mend(path) == num_groups
    path.unlink()
    return num_groups, is_torn


_CALLS = 6 * 2 * 2 + 2 * 2 + 1 + 1 + 1
"""HDF5 calls that append a batch: six fields and two tables, a flush, the count, a flush."""


@pytest.mark.parametrize(
    ("num_calls", "expected"),
    [(9, (5, False)), (_CALLS - 2, (5, True)), (_CALLS - 1, (5, True)), (_CALLS, None)],
)
def test_a_group_counts_only_when_all_of_it_is_there(
    tmp_path: Path, num_calls: int, expected: tuple[int, bool] | None
) -> None:
    if expected is None:
        with pytest.raises(AssertionError, match="done"):
            _die_between_calls(tmp_path, num_calls)
    else:
        assert _die_between_calls(tmp_path, num_calls) == expected


@pytest.mark.long
def test_a_kill_between_any_two_calls_tears_no_group(tmp_path: Path) -> None:
    for num_calls in range(_CALLS):
        assert _die_between_calls(tmp_path, num_calls)[0] == 5


def test_a_killed_writer_costs_the_producer_nothing(tmp_path: Path) -> None:
    made, chance, k = archive(tmp_path), random.Random(0), 0
    for _ in range(3):
        for _ in range(30):
            made.offer(make_slot(k), make_samples(k))
            k += 1
        child = child_of(made)
        time.sleep(chance.random() * 0.4)
        child.kill()
        child.wait()
        made.offer(make_slot(k), make_samples(k))
        k += 1
        assert made.flush(WAIT_S)
    made.close()
    stats = made.stats()
    assert stats.num_offered == k == stats.num_written + sum(stats.dropped.values())
    found = {slot.prompt_index for slot, _ in read_archive(made_folder(tmp_path))}
    assert len(found) >= stats.num_written and found <= set(range(k))
    # Each start mends what the one before it left: only whole, closed files are there at the end.
    assert not any(is_marked_open(path) for path in archive_files(made_folder(tmp_path))[:-1])


def test_after_a_kill_of_the_producer_its_writer_ends_in_order(tmp_path: Path) -> None:
    script = Path(__file__).with_name("archive_process.py")
    command = [sys.executable, str(script), str(tmp_path), "5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    written = [int(process.stdout.readline()) for _ in range(20)][-1]
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + WAIT_S
    while any(is_marked_open(p) for p in archive_files(made_folder(tmp_path))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    groups = list(read_archive(made_folder(tmp_path)))
    assert len(groups) >= written
    for slot, samples in groups:
        k = slot.prompt_index
        assert is_equal(samples, make_samples(k, k // 40, 3000))


_DIE_MARKED = """
import os, pathlib, signal, sys
sys.path[:0] = [sys.argv[2]]
from relax_hpc.transfer import archive_file
from tests.unit.transfer.archive_process import die
archive_file.clear_mark = lambda descriptor: False
die(pathlib.Path(sys.argv[1]), 20)
"""


def _leave_marked_file(path: Path) -> None:
    """5 groups and the mark, as a kill in the middle of a batch may leave them."""
    path.parent.mkdir(parents=True)
    root = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", _DIE_MARKED, str(path), root], check=False)
    assert done.returncode == -signal.SIGKILL and is_marked_open(path)


def test_the_next_start_mends_what_a_killed_one_left(tmp_path: Path) -> None:
    path = made_folder(tmp_path) / "step_000000" / "rollout-0-1.1.h5"
    _leave_marked_file(path)
    with pytest.raises(OSError, match="file is already open for write"):  # h5py issue 1807
        h5py.File(path)
    with h5py.File(path, "r", swmr=True) as file:
        assert file["num_groups"][0] == 5
    (path.parent / ".tmp-1-rollout-0-1.1-2.h5").write_bytes(b"half")
    (path.parent / "rollout-10-1.1.h5").write_bytes(path.read_bytes())  # another engine's: alive?
    made = archive(tmp_path, incarnation=2)
    made.offer(make_slot(10_000), make_samples(10_000))
    made.close()
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "rollout-0-1.1.h5", "rollout-0-1.2.h5", "rollout-10-1.1.h5",
    ]  # fmt: skip
    with h5py.File(path) as file:
        assert file["num_groups"][0] == 5
    assert is_marked_open(path.with_name("rollout-10-1.1.h5"))
    check(made_folder(tmp_path), [*range(5), 10_000])


# -- bounds and failures ---------------------------------------------------------------------------


def test_offer_never_waits_and_counts_what_it_drops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = archive(tmp_path, max_bytes=40_000)
    made.offer(make_slot(0), make_samples(0))
    assert made.flush(WAIT_S)
    child = child_of(made)
    stop(child.pid)  # hangs as in a dead file system
    try:
        kept = [k for k in range(1, 100) if made.offer(make_slot(k), make_samples(k))]
        assert 0 < len(kept) < 50 and made.stats().pending_bytes <= 40_000
        assert made.stats().dropped == {"queue_full": 99 - len(kept)}
        assert not made.flush(0.05)
    finally:
        child.send_signal(signal.SIGCONT)
    assert made.flush(WAIT_S)
    made.close()
    check(made_folder(tmp_path), [0, *kept])
    assert not made.offer(make_slot(200), make_samples(200))
    assert made.stats().dropped["closed"] == 1
    assert "groups not archived queue_full=1 " in caplog.text
    assert caplog.text.count("groups not archived") == 2, "not one line per group"


def test_close_gives_up_a_writer_that_hangs(tmp_path: Path) -> None:
    made = archive(tmp_path)
    made.offer(make_slot(0), make_samples(0))
    made.flush(WAIT_S)
    child = child_of(made)
    stop(child.pid)
    for k in range(1, 4):
        made.offer(make_slot(k), make_samples(k))
    made.close(timeout_s=0.3)
    assert child.returncode == -signal.SIGKILL
    stats = made.stats()
    assert stats.num_written == 1 and sum(stats.dropped.values()) == 3
    check(made_folder(tmp_path), [0])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_gets_full_is_left_alone(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = archive(small_disk, min_free_bytes=1 << 20)
    for k in range(60):
        made.offer(make_slot(k), make_samples(k, 0, 4000))
        made.flush(WAIT_S)
    stats = made.stats()
    assert stats.dropped.keys() == {"disk_full"}
    assert stats.num_written + stats.dropped["disk_full"] == 60 and stats.num_written > 5
    assert "groups not archived disk_full=1" in caplog.text and "stay free" in caplog.text
    usage = os.statvfs(small_disk)
    assert usage.f_bavail * usage.f_frsize > 1 << 19
    groups = list(read_archive(made_folder(small_disk)))
    assert len(groups) == stats.num_written
    assert child_of(made).poll() is None, "HDF5 did not see the full disk"
    made.close()


def test_a_write_that_fails_costs_groups_and_nothing_else(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = archive(small_disk)
    made.offer(make_slot(0), make_samples(0, 0, 4000))
    assert made.flush(WAIT_S)
    filler = small_disk / "filler"
    child = child_of(made)
    with filler.open("wb") as file:
        file.write(bytes(_free(small_disk) - 60_000))  # enough for the data, not for chunks
    for k in range(1, 8):
        made.offer(make_slot(k), make_samples(k, 0, 300))
        assert made.flush(WAIT_S)
    assert child.poll() is not None, "HDF5 failed in the middle and its process ended"
    filler.unlink()
    deadline = time.monotonic() + WAIT_S
    k = 8
    while made.stats().num_written < 12 and time.monotonic() < deadline:
        made.offer(make_slot(k), make_samples(k, 0, 400))
        made.flush(WAIT_S)
        time.sleep(0.05)
        k += 1
    made.close()
    stats = made.stats()
    assert stats.num_written >= 12 and stats.dropped["write_failed"] >= 1
    assert stats.num_written + sum(stats.dropped.values()) == stats.num_offered == k
    assert "No space left on device" in caplog.text
    assert len(list(read_archive(made_folder(small_disk)))) == stats.num_written


def _free(folder: Path) -> int:
    usage = os.statvfs(folder)
    return usage.f_bavail * usage.f_frsize


def test_what_is_no_archive_is_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = made_folder(tmp_path)
    made = archive(tmp_path)
    made.offer(make_slot(0), make_samples(0))
    made.close()
    (folder / "step_000000" / "text.h5").write_text("no HDF5")
    with h5py.File(folder / "step_000000" / "other.h5", "w", libver="v110") as file:
        file["x"] = 1
    assert [slot.uid for slot, _ in read_archive(folder)] == ["0.0.0"]
    assert caplog.text.count("archive file left out") == 2
    with pytest.raises(TransferError, match=r"text.h5 cannot be opened"):
        StepReader(folder / "step_000000" / "text.h5")


# -- trained log -----------------------------------------------------------------------------------


def test_trained_steps_and_roll_backs(tmp_path: Path) -> None:
    log = TrainedLog(tmp_path / "trajectories")
    for step in range(4):
        log.append(step, [f"0.{step}.0", f"0.{step}.1"])
    log.close()
    again = TrainedLog(tmp_path / "trajectories")
    again.append(2, ["0.9.0"])  # the train step came back from checkpoint 2
    with (tmp_path / "trajectories" / "trained.jsonl").open("ab") as file:
        file.write(b"half a line")
    assert read_trained(tmp_path / "trajectories") == {
        0: ["0.0.0", "0.0.1"], 1: ["0.1.0", "0.1.1"], 2: ["0.9.0"],
    }  # fmt: skip
    assert read_trained(tmp_path / "nowhere") == {}


def test_a_step_that_cannot_be_noted_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    log = TrainedLog(tmp_path / "file" / "trajectories")
    log.append(0, ["0.0.0"])
    assert log.num_failed == 1 and "train step not noted" in caplog.text


def test_commands_of_a_login_node_do_not_load_h5py() -> None:
    code = "import relax_hpc.transfer.archive, sys; assert 'h5py' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
