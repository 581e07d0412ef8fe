"""The node agent: owns what this run keeps in the shared memory of one node.

It serves `agent-NODE` (reads of segments and weight shards for other nodes), removes files that
the controllers declared garbage and what dead writers left, and the whole folder at the end of the
run. Payload outlives its producer and a crash of the agent itself: a restarted agent adopts the
folder. Folders of dead runs are recognised by their owner file and removed; others never are.
"""

import asyncio
import functools
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import Caller, RpcClient, RpcServer
from relax_hpc.errors import RelaxError, StaleIncarnationError, TransferError
from relax_hpc.log import kv
from relax_hpc.runfolder import write_atomic
from relax_hpc.transfer import wire
from relax_hpc.transfer.shm import (
    is_alive,
    open_shm_folder,
    process_start,
    read_owner,
    temporary_owners,
)

logger = logging.getLogger(__name__)

AREAS = ("segments", "weights")
_LONG_POLL_S = 10.0
_RETRY_S = 2.0
_SWEEP_S = 30.0
_MAX_PART_BYTES = 64 << 20
_OWNER_FILE = "owner.json"
REAP_AFTER_S = 1800.0
"""A folder without a live agent is kept this long: its run may be restarting its dcs step."""


class FolderOwner(msgspec.Struct, frozen=True):
    """Whose a shared-memory folder is: owner.json inside it."""

    run: str
    node: str
    attempt: int
    pid: int
    start: int
    slurm_job: str
    """For people who look at a full /dev/shm; empty without Slurm."""


class NodeAgent:
    """Start it in every task of the dcs step; close it at an orderly end."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._folder = identity.run.shm(identity.node)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.server = RpcServer(identity.run, wire.agent_service(identity.node), identity)
        """More handlers may be registered before `start`."""
        self.server.register("read_part", wire.ReadPart, self._read_part)
        self._collectors: dict[str, str] = {wire.SERVICE: "segments"}

    def add_collector(self, service: str, area: str) -> None:
        """Also remove from `area` what `service` answers to `collect_garbage` (before start)."""
        self._collectors[service] = area

    def start(self) -> None:
        """Take the folder over, serve, collect garbage in the background.

        Raises:
            TransferError: the folder belongs to somebody else.
            StaleIncarnationError: a newer attempt or incarnation of this agent was started.
        """
        self._take_over()
        self.server.start_thread()
        for service, area in self._collectors.items():
            self._spawn(f"garbage-{service}", functools.partial(self._collect, service, area))
        self._spawn("sweep", self._sweep_loop)

    def close(self, *, remove: bool) -> None:
        """Stop. `remove=True` only at the end of the run: the payload goes with the folder."""
        self._stop.set()
        self.server.stop()
        for thread in self._threads:
            thread.join(timeout=0.1)  # daemons: a long-poll may go on
        if remove:
            shutil.rmtree(self._folder, ignore_errors=True)
            logger.info("removed %s", kv(folder=self._folder))

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    # -- folder -------------------------------------------------------------------------------

    def _take_over(self) -> None:
        me = self._identity
        open_shm_folder(self._folder)
        owner = _read_folder_owner(self._folder)
        if owner is not None and owner.attempt > me.attempt:
            raise StaleIncarnationError(
                f"{self._folder} belongs to attempt {owner.attempt} of this run; this agent is of "
                f"attempt {me.attempt} and must end"
            )
        if owner is not None and owner.attempt < me.attempt:
            for area in AREAS:
                shutil.rmtree(self._folder / area, ignore_errors=True)
        for area in AREAS:
            open_shm_folder(self._folder / area)
        mine = FolderOwner(
            run=str(me.run.path),
            node=me.node,
            attempt=me.attempt,
            pid=os.getpid(),
            start=process_start(os.getpid()),
            slurm_job=os.environ.get("SLURM_JOB_ID", ""),
        )
        write_atomic(self._folder / _OWNER_FILE, json.dumps(msgspec.to_builtins(mine)), mode=0o600)

    # -- reads --------------------------------------------------------------------------------

    async def _read_part(self, caller: Caller, request: wire.ReadPart) -> wire.Part:
        if request.area not in AREAS or "/" in request.name or request.name.startswith("."):
            what = f"{request.area}/{request.name}"
            raise TransferError(f"agent of {self._identity.node}: no file {what}")
        if request.offset < 0 or not 0 < request.max_bytes <= _MAX_PART_BYTES:
            raise TransferError(
                f"agent of {self._identity.node}: cannot read {request.max_bytes} bytes at "
                f"{request.offset}: at most {_MAX_PART_BYTES} in one part"
            )
        path = self._folder / request.area / request.name
        return await asyncio.to_thread(_read_file, path, request)

    # -- garbage ------------------------------------------------------------------------------

    def _collect(self, service: str, area: str) -> None:
        """Long-poll one controller for files to remove, until stopped."""
        client = RpcClient(self._identity.run, service, self._identity)
        removed: list[str] = []
        while not self._stop.is_set():
            request = wire.CollectGarbage(self._identity.node, removed, _LONG_POLL_S)
            try:
                reply = client.call(
                    "collect_garbage", request, wire.Garbage,
                    timeout_s=3 * _LONG_POLL_S, why=f"garbage of {self._identity.node}",
                )  # fmt: skip
            except RelaxError as err:
                logger.warning("no garbage list %s", kv(service=service, note=str(err)))
                self._stop.wait(_RETRY_S)
                continue
            removed = reply.names
            for name in removed:
                if "/" not in name:
                    (self._folder / area / name).unlink(missing_ok=True)
        client.close()

    def _sweep_loop(self) -> None:
        client = RpcClient(self._identity.run, wire.SERVICE, self._identity)
        while not self._stop.is_set():
            try:
                self.sweep(client)
            except RelaxError as err:
                logger.warning("sweep failed %s", kv(note=str(err)))
            self._stop.wait(_SWEEP_S)
        client.close()

    def sweep(self, client: RpcClient) -> int:
        """Remove what dead writers left: unfinished segments, and finished ones nobody references.

        Returns:
            Number of files removed.
        """
        folder = self._folder / "segments"
        gone = [path for path, owner in temporary_owners(folder) if not is_alive(owner)]
        orphans = [path.name for path in folder.glob("[!.]*") if _is_orphan(path)]
        if orphans:
            request = wire.FindOrphans(self._identity.node, orphans)
            reply = client.call(
                "find_orphans", request, wire.Garbage, timeout_s=60, why="orphaned segments"
            )
            gone += [folder / name for name in reply.names]
        for path in gone:
            path.unlink(missing_ok=True)
        return len(gone)


def _is_orphan(path: Path) -> bool:
    owner = read_owner(path)
    return owner is None or not is_alive(owner)


def _read_file(path: Path, request: wire.ReadPart) -> wire.Part:
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            file.seek(request.offset)
            return wire.Part(file.read(request.max_bytes), total)
    except FileNotFoundError:
        return wire.Part(b"", -1)
    except OSError as err:
        raise TransferError(f"cannot read {path}: {err.strerror}") from err


# ---------------------------------------------------------------------------------------------
# Folders of dead runs
# ---------------------------------------------------------------------------------------------


def reap_dead_runs(root: Path = Path("/dev/shm"), *, min_age_s: float = REAP_AFTER_S) -> list[Path]:
    """Remove this user's folders of runs whose agent has been dead for a while.

    A folder is removed iff it carries our owner file, the agent that wrote it is dead, no process
    that wrote into it lives, and nothing in it changed for `min_age_s` seconds.

    Returns:
        The removed folders.
    """
    removed = []
    for folder in root.glob(f"relax-{os.getuid()}-*"):
        if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
            continue
        owner = _read_folder_owner(folder)
        if owner is None or process_start(owner.pid) == owner.start:
            continue
        if time.time() - _newest_change(folder) < min_age_s or _has_live_writer(folder):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder)
        logger.warning("reaped %s", kv(folder=folder, run=owner.run, job=owner.slurm_job))
    return removed


def _read_folder_owner(folder: Path) -> FolderOwner | None:
    try:
        return msgspec.json.decode((folder / _OWNER_FILE).read_bytes(), type=FolderOwner)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as err:
        logger.warning("unreadable owner %s", kv(folder=folder, note=str(err)))
        return None


def _newest_change(folder: Path) -> float:
    paths = [folder, folder / _OWNER_FILE, *(folder / area for area in AREAS)]
    return max(path.stat().st_mtime for path in paths if path.exists())


def _has_live_writer(folder: Path) -> bool:
    owners = [read_owner(path) for path in (folder / "segments").glob("[!.]*")]
    return any(owner is not None and is_alive(owner) for owner in owners)
