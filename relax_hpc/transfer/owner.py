"""Who made a file in shared memory, and whether that process still runs."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from relax_hpc.control.identity import Identity
from relax_hpc.errors import TransferError

_TEMPORARY = ".tmp-"


class Owner(msgspec.Struct, frozen=True):
    """The process that writes a file: it is alive iff pid and start time still match."""

    run_id: str
    attempt: int
    pid: int
    start: int
    """Clock ticks since boot, field 22 of proc(5)."""
    role: str = ""
    index: int = 0
    rank: int = 0
    incarnation: int = 0

    @classmethod
    def of(cls, identity: Identity) -> "Owner":
        """Return this process as an owner."""
        pid = os.getpid()
        return cls(
            run_id=identity.run.run_id,
            attempt=identity.attempt,
            pid=pid,
            start=process_start(pid),
            role=identity.role,
            index=identity.index,
            rank=identity.rank,
            incarnation=identity.incarnation,
        )


def open_shm_folder(path: Path) -> Path:
    """Make a private folder (mode 0700) in shared memory, or accept the one that is there.

    Raises:
        TransferError: something else of that name exists or belongs to another user.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise TransferError(
            f"{path} is not a folder of user {os.getuid()} (owner {info.st_uid}): "
            "somebody else made it; remove it"
        )
    return path


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot, 0 if there is none: tells pids apart."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    after_name = text.rpartition(")")[2].split()
    return 0 if after_name[0] in "ZX" else int(after_name[19])  # field 22 of proc(5)


def is_alive(owner: Owner) -> bool:
    """True while the process that wrote a file runs."""
    return owner.start != 0 and process_start(owner.pid) == owner.start


def temporary_name(pid: int, start: int, name: str) -> str:
    """Name of a file until it is whole; says who makes it."""
    return f"{_TEMPORARY}{pid}-{start}-{name}"


def temporary_owners(folder: Path) -> Iterator[tuple[Path, Owner]]:
    """Yield unfinished files and the process that was writing them."""
    for path in folder.glob(f"{_TEMPORARY}*-*-*"):
        pid, start = path.name.split("-")[1:3]
        if pid.isdigit() and start.isdigit():
            yield path, Owner("", 0, int(pid), int(start))
