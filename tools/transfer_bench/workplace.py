"""Folders and processes of one benchmark run: all of them go with it, also when it is ended early.

What a run that was killed outright could not remove, the next one does: names carry the process id.
"""

import contextlib
import dataclasses
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from transfer_bench.environment import ROOT, variables
from transfer_bench.side import end_leftovers

_PREFIX = "relax-bench-"
_END_S = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class Workplace:
    """Where a run may put what."""

    mark: str
    """Every process carries it in its environment."""
    disk: Path
    """Run folders and logs."""
    memory: Path
    """Run folders whose journal costs no disk access."""
    short: Path
    """For Ray: sockets lie in it, whose paths must be short."""

    def variables(self, **more: str) -> Mapping[str, str]:
        """Return the environment of a process."""
        return variables(self.mark, **more)


@contextlib.contextmanager
def workplace() -> Iterator[Workplace]:
    """Make the folders; at the end remove them, and end what still runs."""
    disk = ROOT / ".cache"
    disk.mkdir(exist_ok=True)
    parents = (disk, Path("/dev/shm"), Path(tempfile.gettempdir()))
    for parent in parents:
        _remove_stale(parent)
    prefix = f"{_PREFIX}{os.getpid()}-"
    folders = [Path(tempfile.mkdtemp(prefix=prefix, dir=parent)) for parent in parents]
    mark = secrets.token_hex(8)
    try:
        yield Workplace(mark, *folders)
    finally:
        _end_all(mark)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _end_all(mark: str) -> None:
    """End processes that carry the mark, until there are none: they may start others meanwhile."""
    deadline = time.monotonic() + _END_S
    while (found := end_leftovers(mark)) and time.monotonic() < deadline:
        for leftover in found:
            print(f"bench_transfer: had to end {leftover}", file=sys.stderr)
        time.sleep(0.5)


def _remove_stale(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}[0-9]*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists() and path.stat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)
