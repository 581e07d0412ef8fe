"""Reading dumps: every version, whole or not, and none that would run code."""

import contextlib
import gzip
import json
import os
import pickle
import random
from pathlib import Path

import pytest

from relax_hpc.postmortem.flight import assign_ranks, is_dump, read_dump, read_dumps
from relax_hpc.postmortem.plain_pickle import (
    BrokenPickleError,
    UnsafePickleError,
    interpret,
    read_pickle,
)
from tests.unit.postmortem.flight_samples import Job, steps

PLAIN = {
    "text": "a\u00e4\u4e2d",
    "numbers": [0, 1, 255, 256, 65536, -1, 1 << 40, -(1 << 70), 1.5],
    "nested": {"a": (1, (2, 3), (4, 5, 6), (7, 8, 9, 10)), "e": ((), [], {})},
    "none": [None, True, False],
    "bytes": [b"", b"abc", b"x" * 300],
    "long": ["y" * 70000, ["same"] * 3],
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_both_readers_agree_with_pickle(protocol: int) -> None:
    value = {key: item for key, item in PLAIN.items() if key != "bytes" or protocol > 2}
    data = pickle.dumps(value, protocol)
    assert read_pickle(data) == (value, True)
    assert interpret(data) == (value, True)


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_runs_code_does_not(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "made"
    data = pickle.dumps({"version": "2.10", "entries": [_Evil(target)]}, protocol)
    for reader in (read_pickle, interpret):
        with pytest.raises(UnsafePickleError, match="mkdir"):
            reader(data)
    dump = read_dump(data, "trace_rank_0")
    assert "nothing was executed" in dump.problem
    assert not target.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02Nr\xff\xff\xff\xff.",  # a memo of 4 billion places
        b"\x80\x02Nr\x00\x00\x00\x40.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
        b"\x80\x02X\xff\xff\xff\xffabc.",
        b"(" * 100_000,
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"I" + b"9" * 5000 + b"\n.",
    ],
)
def test_a_small_file_cannot_ask_for_much(data: bytes) -> None:
    with contextlib.suppress(BrokenPickleError):
        read_pickle(data)


def test_a_cut_off_dump_keeps_its_first_entries(tmp_path: Path) -> None:
    data = steps(2, 20).dump(0)
    counts = [
        len(read_dump(data[:size], "trace_rank_0").entries) for size in range(0, len(data), 97)
    ]
    assert counts == sorted(counts)
    assert counts[-1] >= 15
    dump = read_dump(data[: len(data) // 2], "trace_rank_0")
    assert "cut off" in dump.problem
    assert dump.entries[0].seq == 1


def test_a_cut_off_json_dump_keeps_its_first_entries() -> None:
    data = steps(2, 20).dump(0, as_json=True)
    dump = read_dump(data[: len(data) // 2], "trace_rank_0.json")
    assert "cut off" in dump.problem
    assert 5 <= len(dump.entries) < 20


def test_json_and_pickle_say_the_same() -> None:
    job = steps(2, 3)
    one, two = read_dump(job.dump(1), "rank_1"), read_dump(job.dump(1, as_json=True), "rank_1.json")
    assert [e.describe().partition(" at ")[0] for e in one.entries] == [
        e.describe() for e in two.entries
    ]
    assert one.groups == two.groups == {"0": (0, 1)}


def test_the_caller_outside_of_torch_is_named() -> None:
    assert read_dump(steps(1).dump(0), "rank_0").entries[0].site == "/home/me/train.py:11 step"


def test_numbers_as_text_and_version_one() -> None:
    """JSON writes some numbers as text; version 1 was a list with `seq_id`."""
    entries = [{"id": "3", "pg_id": 0, "seq_id": "7", "profiling_name": "nccl:all_reduce"}]
    for value in (entries, {"version": "2.0", "entries": entries}):
        dump = read_dump(json.dumps(value).encode(), "rank_0")
        if isinstance(value, dict):
            assert (dump.entries[0].record_id, dump.entries[0].seq) == (3, 7)
            assert (dump.entries[0].group, dump.entries[0].op) == ("0", "all_reduce")


@pytest.mark.parametrize(
    ("names", "ranks", "hosts"),
    [
        (["nccl_trace_rank_0", "nccl_trace_rank_1"], [0, 1], ["", ""]),
        (["trace_rank_node02_5", "trace_rank_node02_6"], [5, 6], ["node02", "node02"]),
        (["trace_rank_10-0-0-7_5", "trace_rank_10-0-0-7_6"], [5, 6], ["10-0-0-7"] * 2),
        (["rank_3.json", "rank_12.pickle.gz"], [3, 12], ["", ""]),
        (["job17_rank4_attempt2.pkl", "job17_rank5_attempt2.pkl"], [4, 5], ["", ""]),
        (["fr.7", "fr.8"], [7, 8], ["", ""]),
    ],
)
def test_ranks_and_hosts_of_file_names(
    names: list[str], ranks: list[int], hosts: list[str]
) -> None:
    data = steps(1).dump(0)
    dumps = assign_ranks(read_dump(data, f"/somewhere9/{name}") for name in names)
    assert [dump.rank for dump in dumps] == ranks
    assert [dump.host for dump in dumps] == hosts


def test_of_two_attempts_the_newest_dump_counts(tmp_path: Path) -> None:
    job = steps(1, 2)
    for number in (2, 1):
        (tmp_path / f"attempt_{number}").mkdir()
    old = tmp_path / "attempt_1" / "trace_rank_0"
    new = tmp_path / "attempt_2" / "trace_rank_0"
    old.write_bytes(job.dump(0))
    new.write_bytes(job.launch([0]).dump(0))
    for files in ([old, new], [new, old]):
        dumps = read_dumps([str(file) for file in files])
        assert [len(dump.entries) for dump in dumps] == [3]


def test_an_old_attempt_does_not_stand_in_for_a_missing_dump(tmp_path: Path) -> None:
    job = steps(3, 2)
    for number, without in ((1, ()), (2, (1,))):
        (tmp_path / f"attempt_{number}").mkdir()
        job.launch(range(3)).write(tmp_path / f"attempt_{number}", without=without)
    dumps = read_dumps([str(file) for file in tmp_path.glob("*/*")])
    assert [dump.rank for dump in dumps] == [0, 2]


def test_folders_of_nodes_belong_together(tmp_path: Path) -> None:
    job = steps(4, 2)
    for node in range(2):
        (tmp_path / f"node{node}").mkdir()
        job.write(tmp_path / f"node{node}", without=(0, 1) if node else (2, 3))
    dumps = read_dumps([str(file) for file in tmp_path.glob("*/*")])
    assert [dump.rank for dump in dumps] == [0, 1, 2, 3]


def test_packed_and_missing_files(tmp_path: Path) -> None:
    packed = tmp_path / "trace_rank_0.gz"
    packed.write_bytes(gzip.compress(steps(1).dump(0)))
    dumps = read_dumps([str(packed), str(tmp_path / "trace_rank_1")])
    assert [len(dump.entries) for dump in dumps] == [4, 0]
    assert "not readable" in dumps[1].problem


def test_what_is_a_dump() -> None:
    job = steps(1)
    assert is_dump(job.dump(0)[:4096], "anything")
    assert is_dump(gzip.compress(job.dump(0))[:4096], "anything.gz")
    assert is_dump(job.dump(0, as_json=True)[:4096], "anything.json")
    assert is_dump(b"", "nccl_trace_rank_3")
    assert not is_dump(b"", "stderr.log")
    assert not is_dump(b'{"time": 1, "metrics": {}}', "metrics.jsonl")
    assert not is_dump(pickle.dumps({"weights": 1}), "model.pkl")


def test_damaged_dumps_never_raise() -> None:
    chance = random.Random(7)
    whole = [Job(2).launch(range(2)).dump(0), steps(1, 2).dump(0, as_json=True)]
    for _ in range(3000):
        data = bytearray(chance.choice(whole))
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        read_dump(bytes(data), "trace_rank_0")
