"""`relax-hpc doctor`: dead runs are shown and removed, everything else is left alone."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_hpc import cli
from relax_hpc.launcher import doctor
from relax_hpc.topology import node_facts
from relax_hpc.transfer import leftovers
from relax_hpc.transfer.extent import ReserveExtent, make_extent
from relax_hpc.transfer.owner import Owner, process_start

DEAD = {"pid": 2**22 + 1, "start": 12345}


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Instead of the machine's /dev/shm."""
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setattr(leftovers, "SHM", root)
    return root


def _folder(root: Path, name: str, *, age_s: float = 7200, **owner: object) -> Path:
    folder = root / f"relax-{os.getuid()}-{name}-n1"
    (folder / "arenas").mkdir(parents=True)
    (folder / "weights").mkdir()
    (folder / "weights" / "shard").write_bytes(bytes(100_000))
    values = {
        "run": f"/runs/{name}", "node": "n1", "attempt": 2, **DEAD, "slurm_job": "77",
        "host": socket.gethostname(), "pid_namespace": leftovers._pid_namespace(), **owner,
    }  # fmt: skip
    (folder / "owner.json").write_text(json.dumps(values), encoding="utf-8")
    _set_age(folder, age_s)
    return folder


def _set_age(folder: Path, age_s: float) -> None:
    when = time.time() - age_s
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (when, when))


def _doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """Run the command; returns the state of each folder by the run's name."""
    assert cli.main(["doctor", "--json", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    return {
        Path(found["path"]).name.split("-")[2]: "removed" if found["removed"] else found["state"]
        for found in report["folders"]
    }


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    """A task of the run `engine` that wrote nothing into the folder."""
    environment = {**os.environ, "RELAX_RUN": "/runs/engine"}
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_only_the_dead_go(shm: Path, capsys: pytest.CaptureFixture[str], sleeper) -> None:
    me = {"pid": os.getpid(), "start": process_start(os.getpid())}
    _folder(shm, "dead")
    _folder(shm, "live", **me)
    _folder(shm, "recent", age_s=60)
    _folder(shm, "engine")
    _folder(shm, "other", host="another-host")
    _folder(shm, "container", pid_namespace=1)
    (_folder(shm, "nobody") / "owner.json").unlink()
    (_folder(shm, "broken") / "owner.json").write_text("{")
    writer = _folder(shm, "writer")
    owner = Owner("run", 1, me["pid"], me["start"], "rollout")
    make_extent(writer / "arenas", ReserveExtent("rollout0.0-1.1-0000000a.1", owner, 1 << 20))
    _set_age(writer, 7200)
    _set_age(shm / f"relax-{os.getuid()}-broken-n1", 7200)
    others = [shm / "psm_123", shm / f"relax-{os.getuid() + 1}-dead-n1", shm / "sem.x"]
    for path in others:
        path.mkdir()
    (shm / f"relax-{os.getuid()}-link-n1").symlink_to(writer)
    expected = {
        "dead": "dead", "live": "live", "recent": "recent", "engine": "live", "writer": "live",
        "other": "foreign", "container": "foreign", "nobody": "foreign", "broken": "foreign",
    }  # fmt: skip
    before = set(shm.iterdir())
    assert _doctor(capsys) == expected
    assert set(shm.iterdir()) == before, "without --clean it only looks"
    assert _doctor(capsys, "--clean") == {**expected, "dead": "removed"}
    assert before - set(shm.iterdir()) == {shm / f"relax-{os.getuid()}-dead-n1"}
    sleeper.kill()
    sleeper.wait()
    assert _doctor(capsys, "--clean")["engine"] == "removed"


def test_a_young_folder_goes_when_asked_for(shm: Path, capsys) -> None:
    _folder(shm, "recent", age_s=600)
    assert _doctor(capsys, "--clean") == {"recent": "recent"}
    assert _doctor(capsys, "--clean", "--min-age", "5") == {"recent": "removed"}


def test_spill_folders_are_looked_at_when_named(shm: Path, tmp_path: Path, capsys) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "precious").write_bytes(b"x")
    _folder(disk, "spilled")
    assert _doctor(capsys, "--clean") == {}
    assert _doctor(capsys, "--clean", "--folder", str(disk)) == {"spilled": "removed"}
    assert [path.name for path in disk.iterdir()] == ["precious"]


def test_segments_of_a_dead_engine_go_with_their_record(shm: Path, capsys, monkeypatch) -> None:
    folder = _folder(shm, "dead")
    segment = Path("/dev/shm") / f"sglang_loads_test{os.getpid()}.shm"
    segment.write_bytes(b"x")
    try:
        record = folder / "sglang-0" / "shared-memory"
        record.parent.mkdir()
        record.write_text(f"{segment}\n/etc/passwd\n", encoding="ascii")
        _set_age(folder, 7200)
        assert _doctor(capsys, "--clean") == {"dead": "removed"}
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)


def test_the_text_says_what_and_what_to_do(shm: Path, capsys) -> None:
    assert cli.main(["doctor"]) == 0
    assert "nothing is left of dead runs" in capsys.readouterr().out
    folder = _folder(shm, "dead")
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"dead     {folder}" in text and "run /runs/dead attempt 2 node n1 job 77" in text
    assert "MB belong to dead runs: `relax-hpc doctor --clean` removes them" in text
    assert cli.main(["doctor", "--clean"]) == 0
    text = capsys.readouterr().out
    assert f"removed  {folder}" in text and "MB of dead runs removed" in text


@pytest.mark.parametrize(
    ("main", "drop_in", "uid", "lingers", "warns"),
    [
        (None, None, 1000, False, True),
        ("#RemoveIPC=no\n", None, 1000, False, True),
        ("RemoveIPC=no\n", None, 1000, False, False),
        ("RemoveIPC=no\n", "[Login]\nRemoveIPC=yes\n", 1000, False, True),
        ("RemoveIPC=yes\n", "[Login]\nRemoveIPC=no\n", 1000, False, False),
        (None, None, 0, False, False),
        (None, None, 1000, True, False),
    ],
)
def test_remove_ipc_is_told(
    tmp_path: Path, main: str, drop_in: str, uid: int, lingers: bool, warns: bool
) -> None:
    etc, run, var = tmp_path / "etc", tmp_path / "run", tmp_path / "var"
    (etc / "systemd" / "logind.conf.d").mkdir(parents=True)
    (run / "systemd" / "system").mkdir(parents=True)
    (var / "lib/systemd/linger").mkdir(parents=True)
    if main is not None:
        (etc / "systemd/logind.conf").write_text(main)
    if drop_in is not None:
        (etc / "systemd/logind.conf.d/50-site.conf").write_text(drop_in)
    if lingers:
        (var / "lib/systemd/linger" / node_facts.user_name(uid)).touch()
    assert bool(doctor.hints(etc, run, var, uid)) is warns
    shutil.rmtree(run)
    assert doctor.hints(etc, run, var, uid) == [], "no logind here"
