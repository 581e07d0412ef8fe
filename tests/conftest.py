"""For all tests: one BLAS thread, no model hub, and nothing may be left running at the end."""

import contextlib
import os
import secrets
import time
from pathlib import Path

import pytest

from relax_hpc.runfolder import RunFolder

_TEST_ID = secrets.token_hex(8)
_leftovers: list[str] = []


def pytest_configure() -> None:
    os.environ["RELAX_TEST_ID"] = _TEST_ID  # every child inherits it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes many minutes, unless asked for."""
    if os.environ.get("RELAX_TEST_LONG") == "1":
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Name what the tests left behind. Ends nothing: a leftover is a bug to be seen."""
    factory = getattr(session.config, "_tmp_path_factory", None)  # pytest has no public way here
    if factory is None:
        return
    base: Path = factory.getbasetemp()
    deadline = time.monotonic() + 10  # some children end a moment after their parent
    while (found := _running(base) + _shm_of_runs(base)) and time.monotonic() < deadline:
        time.sleep(0.2)
    _leftovers.extend(found)
    if found and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _leftovers:
        terminalreporter.section("left running or in /dev/shm by the tests", red=True, bold=True)
        for line in _leftovers:
            terminalreporter.write_line(line)
    else:
        terminalreporter.write_line("nothing left running, nothing left in /dev/shm")


def _running(base: Path) -> list[str]:
    """Live processes that tests started: they carry our mark, or belong to a cluster in `base`."""
    marks = (f"RELAX_TEST_ID={_TEST_ID}".encode(), f"{base}/".encode())
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            is_dead = entry.joinpath("stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            command = entry.joinpath("cmdline").read_bytes()
            said = entry.joinpath("environ").read_bytes() + command
            if not is_dead and any(mark in said for mark in marks) and not _is_ours(entry, command):
                text = command.replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(f"pid {entry.name}: {text[:160]}")
    return found


def _is_ours(entry: Path, command: bytes) -> bool:
    """multiprocessing's tracker of this very process: it ends with us."""
    parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
    return parent == os.getpid() and b"multiprocessing.resource_tracker" in command


def _shm_of_runs(base: Path) -> list[str]:
    """Shared-memory folders of runs in `base`; those of other runs on this machine do not count."""
    present = list(Path("/dev/shm").glob(f"relax-{os.getuid()}-*"))
    if not present:
        return []
    folders = [Path(path) for path, _, _ in os.walk(base)]
    prefixes = {RunFolder(folder).shm("").name for folder in folders}
    return [str(path) for path in present if any(path.name.startswith(p) for p in prefixes)]
