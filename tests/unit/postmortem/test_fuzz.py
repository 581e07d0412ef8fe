"""Whatever is in the files: no crash, no code run, output that terminals and browsers survive.

Seeded mutations of the public excerpts and of dumps; a sample, 100,000 with `tools/test --long`.
A failure names its case: `python tests/unit/postmortem/test_fuzz.py CASE` repeats it alone.
"""

import io
import json
import os
import pickle
import random
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.postmortem.command import exit_code, host_list, report_json
from relax_hpc.postmortem.diagnose import analyse
from relax_hpc.postmortem.page import render_html
from relax_hpc.postmortem.terminal import print_report
from relax_hpc.postmortem.verdict import Confidence

EXCERPTS = sorted((Path(__file__).parents[2] / "data" / "nccl_logs").glob("*.log"))
CHUNKS, CHUNK = 20, 5_000
SAMPLE = 400
SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None

Mutation = Callable[[random.Random, bytes], bytes]


def _flip(chooser: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chooser.randint(1, 30)):
        if changed:
            changed[chooser.randrange(len(changed))] = chooser.randrange(256)
    return bytes(changed)


def _cut(chooser: random.Random, data: bytes) -> bytes:
    first, last = sorted(chooser.randint(0, len(data)) for _ in range(2))
    return data[first:last]


def _insert(chooser: random.Random, data: bytes) -> bytes:
    place = chooser.randint(0, len(data))
    return data[:place] + chooser.choice(RUBBISH) + data[place:]


def _shuffle(chooser: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    chooser.shuffle(lines)
    return chooser.choice((b"\n", b"", b"\r", b"\r\n")).join(lines)


def _numbers(chooser: random.Random, data: bytes) -> bytes:
    """Replace whole numbers, some everywhere where they stand."""
    found = list(re.finditer(rb"\d+", data))
    for match in sorted(chooser.sample(found, min(len(found), 6)), key=re.Match.start)[::-1]:
        number = chooser.choice(NUMBERS)
        if chooser.random() < 0.3:
            data = data[:200_000].replace(match[0], number)
        else:
            data = data[: match.start()] + number + data[match.end() :]
    return data


def _wrap(chooser: random.Random, data: bytes) -> bytes:
    width = chooser.randint(1, 130)
    return b"\n".join(data[i : i + width] for i in range(0, len(data), width))


def _encode(chooser: random.Random, data: bytes) -> bytes:
    text = data.decode("utf-8", "replace")
    return text.encode(chooser.choice(("utf-16", "utf-32-be", "utf-7", "cp1252")), "replace")


def _mix(chooser: random.Random, data: bytes) -> bytes:
    other = chooser.choice(LOGS)
    size = chooser.randint(1, 400)
    pieces = [p[i : i + size] for p in (data, other) for i in range(0, len(p), size)]
    chooser.shuffle(pieces)
    return b"".join(pieces)


def _double(chooser: random.Random, data: bytes) -> bytes:
    return data * chooser.randint(2, 4)


MUTATIONS: tuple[Mutation, ...] = (
    _flip,
    _cut,
    _insert,
    _shuffle,
    _numbers,
    _wrap,
    _encode,
    _mix,
    _double,
)
RUBBISH = (
    b"\x1b[31m\x1b]0;x\x07",
    b"\x00" * 50,
    b"(((((" * 200,
    b"[rank" * 300,
    b" " * 3000,
    b"a" * 20_000,
    "\u202e\U0001f600\u2028".encode(),
    b"\xff\xfe\x80\xed\xa0\x80",
    b"[rank18446744073709551616]:[E ProcessGroupNCCL.cpp:1] [Rank -1] ",
    b"WorkNCCL(SeqNum=, OpType=, Timeout(ms)=",
    b'{"entries": [',
    b'Traceback (most recent call last):\n  File "',
)
NUMBERS = (
    b"",
    b"-1",
    b"0",
    b"1",
    b"7",
    b"4096",
    b"99999999",
    b"18446744073709551615",
    b"9" * 5000,
    b"1e999",
    "\u0663".encode(),  # a digit for str.isdigit
    "\u00b2".encode(),  # a digit for str.isdigit that int() refuses
)


def _windows() -> list[bytes]:
    found = []
    for path in EXCERPTS:
        lines = path.read_bytes().split(b"\n")
        found += [b"\n".join(lines[i : i + 25])[:6000] for i in range(0, min(len(lines), 100), 25)]
    return [window for window in found if window.strip()]


LOGS = _windows()


def _dump(chooser: random.Random) -> dict[str, Any]:
    """A flight-recorder dump with wrong types in some places."""
    odd = (None, -1, 2**70, "x", [], {}, 1.5, b"\xff", True, "[0, 1", float("nan"))

    def some(value: Any) -> Any:
        return chooser.choice(odd) if chooser.random() < 0.05 else value

    entries = [
        {
            "record_id": some(n),
            "pg_id": some(0),
            "process_group": some(("0", "default_pg")),
            "collective_seq_id": some(n),
            "p2p_seq_id": some(0),
            "op_id": some(n),
            "profiling_name": some(chooser.choice(("nccl:all_reduce", "nccl:send 0->1", "gloo:"))),
            "time_created_ns": some(1_700_000_000_000_000_000 + n),
            "input_sizes": some([[some(8)]]),
            "input_dtypes": some(["Float"]),
            "output_sizes": some([[8]]),
            "output_dtypes": some(["Float"]),
            "state": some(chooser.choice(("scheduled", "started", "completed"))),
            "time_discovered_started_ns": some(None),
            "time_discovered_completed_ns": some(None),
            "retired": some(False),
            "timeout_ms": some(600000),
            "is_p2p": some(False),
            "frames": some([{"name": "f", "filename": "x.py", "line": 3}]),
        }
        for n in range(chooser.randint(0, 5))
    ]
    whole = {
        "version": some("2.10"),
        "pg_config": some({"0": some({"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"})}),
        "pg_status": some({"0": some({"last_enqueued_collective": some(4)})}),
        "entries": some([some(entry) for entry in entries]),
    }
    return {key: value for key, value in whole.items() if chooser.random() < 0.97}


def _dump_file(chooser: random.Random) -> bytes:
    value = _dump(chooser)
    if chooser.random() < 0.4:
        data = json.dumps(value, default=repr).encode()
    else:
        data = pickle.dumps(value, protocol=chooser.randint(0, 5))
    if chooser.random() < 0.5:
        data = chooser.choice((_flip, _cut, _insert, _double, _numbers))(chooser, data)
    return data


def make_case(folder: Path, case: int) -> list[Path]:
    """Write the one to three files of a case."""
    chooser = random.Random(case)
    files = []
    for number in range(chooser.randint(1, 3)):
        if chooser.random() < 0.25:
            path, data = folder / f"nccl_trace_rank_{number}", _dump_file(chooser)
        else:
            path, data = folder / f"rank_{number}.log", chooser.choice(LOGS)
            for _ in range(chooser.randint(1, 3)):
                data = chooser.choice(MUTATIONS)(chooser, data)
        path.write_bytes(data[:200_000])
        files.append(path)
    return files


def check_case(case: int) -> None:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        files = make_case(Path(name), case)
        report = analyse([str(path) for path in files])
        assert exit_code(report) in (0, 1)
        json.loads(report_json(report))
        assert render_html(report).isascii()
        out = io.StringIO()
        print_report(report, out)
        assert out.getvalue().replace("\n", "").isprintable()
        host_list(report)


def check_cases(first: int, count: int) -> None:
    for case in range(first, first + count):
        try:
            check_case(case)
        except Exception as err:
            raise AssertionError(f"python {__file__} {case}  repeats it") from err


def test_mutated_logs_and_dumps() -> None:
    check_cases(10_000_000, SAMPLE)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_hundred_thousand_mutations(chunk: int) -> None:
    check_cases(chunk * CHUNK, CHUNK)


def test_random_bytes_prove_nothing(tmp_path: Path) -> None:
    chooser = random.Random(7)
    for number in range(20):
        path = tmp_path / f"{number}.log"
        path.write_bytes(chooser.randbytes(chooser.randint(0, 4000)))
        report = analyse([str(path)])
        assert report.verdict.confidence is Confidence.UNDETERMINED
        assert report.verdict.ranks == []


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_code_does_not(tmp_path: Path, protocol: int) -> None:
    dump = {"version": "2.10", "entries": [], "pg_config": _Bomb(tmp_path / "owned")}
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(dump, protocol=protocol))
    report = analyse([str(path)])
    assert not (tmp_path / "owned").exists()
    assert report.verdict.confidence is not Confidence.ESTABLISHED
    assert report.notes


if __name__ == "__main__":
    check_case(int(sys.argv[1]))
