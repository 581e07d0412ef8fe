"""Journals: torn tails, damage, generations, kill -9 while appending, group commit."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from relax_hpc.control import group_commit
from relax_hpc.control.group_commit import GroupCommit
from relax_hpc.control.journal import GenerationalJournal, Journal
from relax_hpc.errors import ControlError


def test_replay_returns_what_was_appended(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    assert list(journal.replay()) == []
    records = [{"a": 1}, [1, 2, "x\ny"], "z", None]
    for record in records:
        journal.append(record)
    assert list(Journal(tmp_path / "j").replay()) == records


def test_every_torn_tail_is_ignored_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal(path).append_many(["first", "second"])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        assert list(Journal(path).replay()) == ["first"]
        Journal(path).append("third")
        assert list(Journal(path).replay()) == ["first", "third"]


def test_damage_before_the_tail_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal(path).append_many(["first", "second", "third"])
    data = bytearray(path.read_bytes())
    data[data.index(b"second")] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ControlError, match="line 2 is damaged"):
        list(Journal(path).replay())


_WRITER = """
import sys
from pathlib import Path
from relax_hpc.control.journal import Journal
journal = Journal(Path(sys.argv[1]))
for number in range(100000):
    journal.append({"number": number, "filler": "x" * 500})
    print(number, flush=True)
"""


def test_kill_9_keeps_everything_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "j"
    command = [sys.executable, "-c", _WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        while int(writer.stdout.readline()) < 20:
            pass
        time.sleep(0.01)
        os.kill(writer.pid, signal.SIGKILL)
        rest = [int(line) for line in writer.stdout.read().split()]
    numbers = [record["number"] for record in Journal(path).replay()]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > max([20, *rest])


def test_a_new_generation_starts_from_its_snapshot(tmp_path: Path) -> None:
    first = GenerationalJournal(tmp_path, "q", 1, 1)
    assert list(first.read()) == []
    first.start({"state": 0})
    first.append_many(["e1", "e2"])
    second = GenerationalJournal(tmp_path, "q", 1, 2)
    assert list(second.read()) == [b'{"state":0}', b'"e1"', b'"e2"']
    second.start({"state": 2})
    first.append_many(["late"])  # a replaced service that still runs
    third = GenerationalJournal(tmp_path, "q", 2, 3)
    assert list(third.read()) == [b'{"state":2}']
    third.start({"state": 2})
    third.start({"state": 3})
    with pytest.raises(ControlError, match="replaced this process"):
        list(second.read())
    assert len(list(tmp_path.iterdir())) == 2


def test_group_commit_is_durable_before_it_returns(tmp_path: Path) -> None:
    journal = GenerationalJournal(tmp_path, "q", 1, 1)
    journal.start("snapshot")

    async def add(commit: GroupCommit, number: int) -> bool:
        commit.append(number)
        await commit.flushed()
        return str(number).encode() in list(journal.read())

    async def main() -> None:
        commit = GroupCommit(journal)
        assert all(await asyncio.gather(*(add(commit, n) for n in range(200))))

    asyncio.run(main())
    assert list(journal.read())[1:] == [str(n).encode() for n in range(200)]


def test_a_full_disk_is_a_typed_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal._file = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(ControlError, match="No space left"):
        journal.append("x")
    journal.close()


def test_after_a_failed_write_nothing_is_acknowledged_any_more(tmp_path: Path) -> None:
    journal = GenerationalJournal(tmp_path, "q", 1, 1)
    journal.start("snapshot")

    async def main() -> None:
        commit = GroupCommit(journal)
        assert journal._journal is not None
        journal._journal._file = os.open("/dev/full", os.O_WRONLY)
        for number in range(3):
            commit.append(number)
            if number == 1:
                journal._journal.close()  # there is space again: too late, record 0 is lost
            with pytest.raises(ControlError, match="No space left"):
                await commit.flushed()

    asyncio.run(main())
    assert list(journal.read()) == [b'"snapshot"']


@pytest.mark.parametrize("fast_s", [0.0, 10.0])
def test_a_new_file_holds_what_was_appended_and_nothing_waits_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_s: float
) -> None:
    """Writes in the thread and in the loop; new files begin in the middle of both."""
    monkeypatch.setattr(group_commit, "_FAST_S", fast_s)
    journal = GenerationalJournal(tmp_path, "q", 1, 1)
    journal.start([])
    state: list[int] = []
    done: list[int] = []

    async def main() -> None:
        commit = GroupCommit(journal)
        for number in range(60):
            state.append(number)
            commit.append(number)

            def durable(failure: ControlError | None, number: int = number) -> None:
                assert failure is None
                on_disk = list(journal.read())
                known = msgspec.json.decode(on_disk[0]) + [int(line) for line in on_disk[1:]]
                assert known[: number + 1] == list(range(number + 1)), "acknowledged too early"
                done.append(number)

            commit.when_durable(durable)
            if number % 7 == 3:
                commit.rotate_soon(lambda: state)
            elif number % 2:
                commit.commit()
            if number % 11 == 0:
                await asyncio.sleep(0.002)
        await commit.flushed()
        commit.close()

    asyncio.run(main())
    assert done == list(range(60)), "in order, each once"


def test_only_a_disk_that_is_fast_is_written_to_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = GenerationalJournal(tmp_path, "q", 1, 1)
    journal.start("snapshot")
    commit = GroupCommit(journal)

    async def is_written_at_once(took_s: float) -> bool:
        """Write; the clock says it took so long."""

        def timed(batch: list[bytes]) -> tuple[float, None]:
            journal.append_lines(batch)
            return took_s, None

        monkeypatch.setattr(commit, "_timed", timed)
        done: list[ControlError | None] = []
        commit.append("x")
        commit.when_durable(done.append)
        commit.commit()
        is_done = bool(done)
        await commit.flushed()
        return is_done

    async def main() -> None:
        fast = [await is_written_at_once(1e-5) for _ in range(3 * group_commit._FAST_WRITES)]
        assert fast == [number >= group_commit._FAST_WRITES for number in range(len(fast))]
        slow = [await is_written_at_once(took_s) for took_s in (0.1, 0.1, 1e-5)]
        assert slow == [True, True, False], "one slow write is forgiven, the second is not"
        commit.close()

    asyncio.run(main())
