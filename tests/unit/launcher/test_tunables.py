"""Rollout tasks copy past the cache, and a user's own tunables stay."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_hpc.launcher import session
from relax_hpc.launcher.tunables import copy_environment
from relax_hpc.transfer import block

STREAMING = "glibc.cpu.x86_non_temporal_threshold=1048576"
OTHER = "glibc.malloc.arena_max=2"
OWN = "glibc.cpu.x86_non_temporal_threshold=0x2000000"


@pytest.mark.parametrize(
    ("site", "user", "expected"),
    [
        (None, None, STREAMING),
        (None, "", STREAMING),
        (None, OTHER, f"{OTHER}:{STREAMING}"),
        (None, OWN, None),
        (None, f"{OTHER}:{OWN}", None),
        ("glibc.tune.x86_non_temporal_threshold=7", None, None),
        (OTHER, "glibc.malloc.check=1", f"{OTHER}:{STREAMING}"),
        (OTHER, OWN, f"{OTHER}:{STREAMING}"),
    ],
)
def test_what_is_set_stays_and_the_threshold_is_added(
    site: str | None, user: str | None, expected: str | None
) -> None:
    """The site's variable replaces the user's as a whole, as all of its variables do."""
    known = [{} if text is None else {"GLIBC_TUNABLES": text} for text in (site, user)]
    assert copy_environment(*known) == ({} if expected is None else {"GLIBC_TUNABLES": expected})


def test_writers_of_blocks_see_that_they_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in copy_environment({"GLIBC_TUNABLES": OTHER}).items():
        monkeypatch.setenv(name, value)
    assert block._streams()


def test_processes_start_with_it() -> None:
    environment = {**os.environ, **copy_environment()}
    command = [sys.executable, "-c", "import os; print(os.environ['GLIBC_TUNABLES'])"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.stdout.strip(), ended.stderr) == (STREAMING, "")


@pytest.mark.parametrize("role", ["rollout", "train", "dcs"])
def test_tasks_of_the_rollout_role_get_it(role: str, tmp_path: Path) -> None:
    launch = _launch(role, tmp_path, site={"A": "b"}, user={"GLIBC_TUNABLES": OTHER})
    expected = f"{OTHER}:{STREAMING}" if role == "rollout" else None
    assert launch.extra_environment.get("GLIBC_TUNABLES") == expected
    assert launch.extra_environment["A"] == "b"


def test_a_site_that_chose_a_threshold_keeps_it(tmp_path: Path) -> None:
    launch = _launch("rollout", tmp_path, site={"GLIBC_TUNABLES": OWN}, user={})
    assert launch.extra_environment["GLIBC_TUNABLES"] == OWN


def _launch(role: str, folder: Path, site: dict[str, str], user: dict[str, str]):
    plan = SimpleNamespace(role=role, index=0, cpus_per_task=1)
    of = SimpleNamespace(
        site=SimpleNamespace(environment=site, address_prefix=""),
        folder=SimpleNamespace(logs=lambda attempt, role: folder),
        state=SimpleNamespace(attempt=1),
    )
    slot = SimpleNamespace(plan=plan, nodes=(("n1",),))
    return session._launch(of, SimpleNamespace(step_program=None), slot, 1, user)
