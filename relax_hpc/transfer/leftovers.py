"""Folders that runs keep on a node (shared memory, spill): whose they are and which are dead.

ROOT/relax-UID-DIGEST-NODE/owner.json    run, node, attempt and agent process of the folder
"""

import contextlib
import dataclasses
import enum
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from relax_hpc.control.identity import Identity
from relax_hpc.log import kv
from relax_hpc.runfolder import write_atomic
from relax_hpc.transfer.extent import read_owner
from relax_hpc.transfer.owner import is_alive, process_start, temporary_owners

logger = logging.getLogger(__name__)

SHM = Path("/dev/shm")
REAP_AFTER_S = 1800.0
"""A folder without a live agent is kept this long: its run may be restarting its dcs step."""

_OWNER_FILE = "owner.json"


class FolderOwner(msgspec.Struct, frozen=True):
    """Whose a folder is: owner.json inside it."""

    run: str
    node: str
    attempt: int
    pid: int
    start: int
    slurm_job: str
    """For people who look at a full /dev/shm; empty without Slurm."""
    host: str = ""
    """A spill folder may be shared by hosts: only this one can tell whether the pid lives."""
    pid_namespace: int = 0
    """Inode of /proc/self/ns/pid: from another one its pids cannot be looked up."""


class FolderState(enum.StrEnum):
    """What may be done with a folder."""

    DEAD = "dead"
    """Its agent and all writers are dead: may be removed."""
    RECENT = "recent"
    """Dead, but for so short a time that the run may be restarting."""
    LIVE = "live"
    FOREIGN = "foreign"
    """Not made by us, of another user or host: never touched."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunFolderLeft:
    """One folder in a root."""

    path: Path
    state: FolderState
    owner: FolderOwner | None
    nbytes: int
    num_files: int
    age_s: float
    """Since the last change."""


def write_owner(folder: Path, identity: Identity) -> None:
    """Say whose a folder is: this process's run, with this process as its agent."""
    pid = os.getpid()
    mine = FolderOwner(
        run=str(identity.run.path),
        node=identity.node,
        attempt=identity.attempt,
        pid=pid,
        start=process_start(pid),
        slurm_job=os.environ.get("SLURM_JOB_ID", ""),
        host=socket.gethostname(),
        pid_namespace=_pid_namespace(),
    )
    write_atomic(folder / _OWNER_FILE, json.dumps(msgspec.to_builtins(mine)), mode=0o600)


def read_folder_owner(folder: Path) -> FolderOwner | None:
    """Return whose a folder is; None if it does not say so."""
    try:
        return msgspec.json.decode((folder / _OWNER_FILE).read_bytes(), type=FolderOwner)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as err:
        logger.warning("unreadable owner %s", kv(folder=folder, note=str(err)))
        return None


def scan(root: Path = SHM, *, min_age_s: float = REAP_AFTER_S) -> Iterator[RunFolderLeft]:
    """Yield this user's folders in a root. Looks only, removes nothing.

    A folder is dead iff it carries our owner file, the agent that wrote it is dead, no process
    that wrote into it lives, and nothing in it changed for `min_age_s` seconds.
    """
    for folder in sorted(root.glob(f"relax-{os.getuid()}-*")):
        if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
            continue
        owner = read_folder_owner(folder)
        files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        infos = [info for path in files if (info := _stat(path)) is not None]
        changes = [info.st_mtime for info in (*infos, folder.stat())]
        age_s = time.time() - max(changes)
        yield RunFolderLeft(
            path=folder,
            state=_state(folder, owner, age_s, min_age_s),
            owner=owner,
            nbytes=sum(info.st_blocks * 512 for info in infos),
            num_files=len(infos),
            age_s=age_s,
        )


def reap_dead_runs(root: Path = SHM, *, min_age_s: float = REAP_AFTER_S) -> list[Path]:
    """Remove this user's dead folders of a root (see `scan`); returns them."""
    removed = []
    for left in scan(root, min_age_s=min_age_s):
        if left.state is FolderState.DEAD and left.owner is not None:
            shutil.rmtree(left.path, ignore_errors=True)
            removed.append(left.path)
            owner = left.owner
            logger.warning("reaped %s", kv(folder=left.path, run=owner.run, job=owner.slurm_job))
    return removed


def _state(folder: Path, owner: FolderOwner | None, age_s: float, min_age_s: float) -> FolderState:
    if owner is None:
        return FolderState.FOREIGN
    is_here = owner.host in ("", socket.gethostname())
    if not is_here or owner.pid_namespace not in (0, _pid_namespace()):
        return FolderState.FOREIGN
    if process_start(owner.pid) == owner.start or _has_live_writer(folder):
        return FolderState.LIVE
    if age_s >= min_age_s and _has_live_task(owner.run):
        return FolderState.LIVE
    return FolderState.RECENT if age_s < min_age_s else FolderState.DEAD


def _has_live_writer(folder: Path) -> bool:
    for place in (folder, folder / "arenas"):
        if any(is_alive(owner) for _, owner in temporary_owners(place)):
            return True
        owners = [read_owner(path) for path in place.glob("[!.]*") if path.is_file()]
        if any(owner is not None and is_alive(owner) for owner in owners):
            return True
    return False


def _has_live_task(run: str) -> bool:
    """True if a process of this user has the run in its environment: engines write no extents."""
    mark = f"RELAX_RUN={run}\0".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # of another user, or ended while we looked
                environment = (entry / "environ").read_bytes()
                if environment.startswith(mark) or b"\0" + mark in environment:
                    return True
    return False


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # removed meanwhile
        return None


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
