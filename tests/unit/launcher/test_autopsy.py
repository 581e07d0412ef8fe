"""Real processes that play `relax-hpc postmortem`: answers, rubbish, crashes, hangs."""

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from relax_hpc.launcher.autopsy import Autopsy
from relax_hpc.recovery.lifecycle import ExitRecord
from relax_hpc.runfolder import RunFolder, open_run_folder

SAYS = (
    "import json, sys\n"
    "print(json.dumps({'schema': 1, 'verdict': {'class': 'host-oom', 'confidence': 'established',"
    " 'sentence': 'rank 1 on n07: ' + chr(27) + str(len(sys.argv)), 'new': 1}, 'findings': []}))\n"
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = open_run_folder(tmp_path / "run-1")
    logs = folder.logs(1, "train")
    logs.mkdir(parents=True)
    for name in ("0-i1-rank0.log", "0-i1-rank1.log", "0-i2-rank0.log", "0-i1-nccl_trace_rank_1"):
        (logs / name).write_text("x\n")
    return folder


def record(incarnation: int = 1) -> ExitRecord:
    return ExitRecord(
        time=0.0,
        role="train",
        index=0,
        attempt=1,
        incarnation=incarnation,
        exit_code=1,
        cause="rank 1 ended",
        log="logs/attempt_1/train/0-i1-rank1.log",
    )


def finish(autopsy: Autopsy, *, clock: float = 0.0) -> bool:
    """Poll until it is idle; whether any verdict came."""
    end, came = time.monotonic() + 30, False
    while autopsy.is_busy and time.monotonic() < end:
        came |= autopsy.poll(clock)
        time.sleep(0.02)
    assert not autopsy.is_busy
    return came


def test_the_verdict_is_written_into_the_record(run: RunFolder) -> None:
    autopsy, one = Autopsy(run, program=(sys.executable, "-c", SAYS)), record()
    autopsy.begin(one)
    assert finish(autopsy)
    # -c, --json, --html PAGE, --, and the three files of this start
    assert one.verdict == "rank 1 on n07: \\x1b8 (established: host-oom)"


@pytest.mark.parametrize(
    "code",
    [
        "print('rubbish')",
        "import os; os.abort()",
        SAYS + "sys.exit(70)",
        "import json; print(json.dumps({'verdict': {}}))",
    ],
)
def test_what_fails_leaves_the_record_alone(run: RunFolder, code: str) -> None:
    autopsy, one = Autopsy(run, program=(sys.executable, "-c", code)), record()
    autopsy.begin(one)
    assert not finish(autopsy)
    assert one.verdict == ""


def test_one_that_hangs_is_killed_with_its_children_at_the_deadline(run: RunFolder) -> None:
    code = (
        "import subprocess, time\n"
        f"p = subprocess.Popen(['sleep', '99']); open({str(run.path)!r} + '/pid', 'w')"
        ".write(str(p.pid) + '.'); time.sleep(99)"
    )
    autopsy = Autopsy(run, deadline_s=5.0, program=(sys.executable, "-c", code))
    autopsy.begin(record())
    autopsy.poll(100.0)
    note = run.path / "pid"
    end = time.monotonic() + 30
    while not (note.exists() and note.read_text().endswith(".")) and time.monotonic() < end:
        time.sleep(0.02)
    assert not autopsy.poll(104.9)
    assert autopsy.is_busy
    assert not finish(autopsy, clock=105.1)
    _wait_gone(int(note.read_text()[:-1]))


def _wait_gone(pid: int) -> None:
    try:
        psutil.Process(pid).wait(timeout=10)
    except psutil.NoSuchProcess:
        return


def test_many_deaths_at_once_are_echoes(run: RunFolder) -> None:
    autopsy = Autopsy(run, program=(sys.executable, "-c", SAYS))
    records = [record() for _ in range(9)]
    for one in records:
        autopsy.begin(one)
    finish(autopsy)
    assert [bool(one.verdict) for one in records] == [True] * 4 + [False] * 5


def test_a_start_without_logs_and_a_program_that_is_not_there(run: RunFolder) -> None:
    autopsy = Autopsy(run, program=("/nowhere/relax-hpc",))
    autopsy.begin(record(incarnation=7))
    assert not autopsy.is_busy
    autopsy.begin(record())
    assert not finish(autopsy)


def test_close_ends_everything(run: RunFolder) -> None:
    autopsy = Autopsy(run, program=(sys.executable, "-c", "import time; time.sleep(99)"))
    autopsy.begin(record())
    autopsy.begin(record())
    autopsy.poll(0.0)
    autopsy.close()
    assert not autopsy.is_busy


def test_the_record_is_read_back_and_old_states_too() -> None:
    import msgspec

    text = msgspec.json.encode(record())
    assert msgspec.json.decode(text, type=ExitRecord).verdict == ""
    old = {key: value for key, value in json.loads(text).items() if key != "verdict"}
    assert msgspec.json.decode(json.dumps(old), type=ExitRecord).verdict == ""
