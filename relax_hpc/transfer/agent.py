"""The node agent: owns what this run keeps in the shared memory of one node.

who                 asks the agent for           waits for
producer            reserve_extent               posix_fallocate; refused when the node has no room
reader, other node  data_access, then TCP/RDMA   nothing: bytes go out without the agent's Python
sweep (a thread)    nothing                      30 s, or a refused reservation

It removes extents and spill segments of dead producers once nobody references them, and the whole
folder at the end of the run. Payload outlives its producer and a crash of the agent: a restarted
agent adopts the folder as it is.
"""

import asyncio
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from relax_hpc.config import RdmaUse, TransferConfig
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import Caller, Empty, RpcClient, RpcServer
from relax_hpc.errors import ArenaFullError, RelaxError, StaleIncarnationError, TransferError
from relax_hpc.log import kv
from relax_hpc.transfer import frames, rdma, wire
from relax_hpc.transfer.extent import (
    ReserveExtent,
    extents,
    make_extent,
    read_owner,
    segments,
    spill_folder,
)
from relax_hpc.transfer.leftovers import read_folder_owner, write_owner
from relax_hpc.transfer.node_memory import room
from relax_hpc.transfer.owner import is_alive, open_shm_folder, temporary_owners
from relax_hpc.transfer.rdma_server import NixlServer
from relax_hpc.transfer.spill import remove_segment
from relax_hpc.transfer.tcp_server import DataServer

logger = logging.getLogger(__name__)

AREAS = ("arenas", "weights")
_SWEEP_S = 30.0
_MIN_SWEEP_S = 2.0
_NODE_FRACTION = 0.8
"""Of the shared memory that is free at the start: for all arenas of the node."""


class NodeAgent:
    """Start it in every task of the dcs step; close it at an orderly end."""

    def __init__(self, identity: Identity, config: TransferConfig | None = None) -> None:
        self._identity = identity
        self._config = TransferConfig() if config is None else config
        self._folder = identity.run.shm(identity.node)
        self._arenas = self._folder / "arenas"
        self._spill = spill_folder(identity.run, identity.node, self._config.spill_folder)
        self._max_bytes = 0
        self._reserving = threading.Lock()
        self._stop = threading.Event()
        self._sweep_now = threading.Event()
        self._threads: list[threading.Thread] = []
        self.data = DataServer(
            {"arenas": self._arenas, "weights": self._folder / "weights", "spill": self._spill},
            key=frames.data_key(identity.run),
            ip=identity.bind_address(),
        )
        """Services may be registered before `start`."""
        self._access = wire.DataAccess("", 0)
        self._nixl: NixlServer | None = None
        self.server = RpcServer(identity.run, wire.agent_service(identity.node), identity)
        """More handlers may be registered before `start`."""
        self.server.register("reserve_extent", ReserveExtent, self._reserve_extent)
        self.server.register("data_access", Empty, self._data_access)

    def start(self) -> None:
        """Take the folder over, serve, sweep in the background.

        Raises:
            TransferError: the folder belongs to somebody else.
            StaleIncarnationError: a newer attempt or incarnation of this agent was started.
        """
        self._take_over()
        self._max_bytes = self._limit()
        host, port = self.data.start()
        self._access = wire.DataAccess(host, port)
        self._start_rdma()
        self.server.start_thread()
        self._spawn("sweep", self._sweep_loop)

    def close(self, *, remove: bool) -> None:
        """Stop. `remove=True` only at the end of the run: the payload goes with the folder."""
        self._stop.set()
        self._sweep_now.set()
        self.server.stop()
        self.data.stop()
        if self._nixl is not None:
            self._nixl.close()
        for thread in self._threads:
            thread.join(timeout=0.1)  # daemons: a long-poll may go on
        if remove:
            shutil.rmtree(self._folder, ignore_errors=True)
            logger.info("removed %s", kv(folder=self._folder))
            shutil.rmtree(self._spill, ignore_errors=True)

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    # -- folder -------------------------------------------------------------------------------

    def _take_over(self) -> None:
        me = self._identity
        open_shm_folder(self._folder)
        owner = read_folder_owner(self._folder)
        if owner is not None and owner.attempt > me.attempt:
            raise StaleIncarnationError(
                f"{self._folder} belongs to attempt {owner.attempt} of this run; this agent is of "
                f"attempt {me.attempt} and must end"
            )
        if owner is not None and owner.attempt < me.attempt:
            for area in AREAS:
                shutil.rmtree(self._folder / area, ignore_errors=True)
            # A new attempt generates again what was in flight: nobody will read it.
            shutil.rmtree(self._spill, ignore_errors=True)
        for area in AREAS:
            open_shm_folder(self._folder / area)
        write_owner(self._folder, me)
        if self._spill.exists() or self._config.spill_mb > 0:
            write_owner(open_shm_folder(self._spill), me)

    # -- memory -------------------------------------------------------------------------------

    def _limit(self) -> int:
        """Bytes for all arenas of this node; what an earlier agent reserved is part of it."""
        if self._config.node_shm_mb > 0:
            return self._config.node_shm_mb << 20
        free = room(self._arenas)
        limit = int((free.nbytes + self._reserved()) * _NODE_FRACTION)
        logger.info("shared memory %s", kv(arenas_bytes=limit, bound=free.bound))
        return limit

    def _reserved(self) -> int:
        total = 0
        for path in (*extents(self._arenas), *(p for p, _ in temporary_owners(self._arenas))):
            try:
                total += path.stat().st_size
            except FileNotFoundError:  # removed meanwhile
                continue
        return total

    async def _reserve_extent(self, caller: Caller, request: ReserveExtent) -> None:
        await asyncio.to_thread(self._reserve, request)

    def _reserve(self, request: ReserveExtent) -> None:
        """Make one extent; one at a time, so that the room that was seen is still there."""
        if not is_alive(request.owner):
            raise TransferError(
                f"agent of {self._identity.node}: process {request.owner.pid} that asks for extent "
                f"{request.name} does not live here: run agent and producers in one PID namespace"
            )
        with self._reserving:
            path = self._arenas / request.name
            if not path.exists():  # else it was made and the reply got lost
                self._check_room(request)
            make_extent(self._arenas, request)
        logger.info("reserved %s", kv(extent=request.name, nbytes=request.nbytes))

    def _check_room(self, request: ReserveExtent) -> None:
        free, reserved = room(self._arenas), self._reserved()
        left = min(free.nbytes, self._max_bytes - reserved)
        if request.nbytes <= left:
            return
        self._sweep_now.set()  # a dead producer's memory may be what is missing
        raise ArenaFullError(
            f"node {self._identity.node} has no room for extent {request.name} of {request.nbytes} "
            f"bytes: its arenas hold {reserved} of {self._max_bytes} bytes (transfer.node_shm_mb; "
            f"0 = {_NODE_FRACTION:.0%} of what was free), {free.bound}. Lower transfer.arena_mb, "
            "rollout.groups_per_step or max_staleness, or give the node more memory "
            "(resources.mem_per_node_gb) or a larger /dev/shm; `relax-hpc doctor` shows what dead "
            "runs left there"
        )

    # -- reads --------------------------------------------------------------------------------

    def _start_rdma(self) -> None:
        """Serve RDMA reads where the hardware is; TCP is always there.

        Raises:
            TransferError: it does not start, and is forced.
        """
        wanted, why = rdma.is_asked_for(self._config.rdma)
        if not wanted:
            logger.info("no rdma %s", kv(node=self._identity.node, reason=why))
            return
        server = NixlServer(self._arenas, self._identity.node)
        try:
            server.start()
        except TransferError as err:
            if self._config.rdma is RdmaUse.FORCE:
                raise
            logger.warning("no rdma %s", kv(node=self._identity.node, reason=str(err)))
            return
        self._nixl = server

    async def _data_access(self, caller: Caller, request: Empty) -> wire.DataAccess:
        if self._nixl is None:
            return self._access
        name, metadata = await asyncio.to_thread(self._nixl.access)
        return wire.DataAccess(self._access.host, self._access.port, name, metadata)

    # -- leftovers ------------------------------------------------------------------------------

    def _sweep_loop(self) -> None:
        client = RpcClient(self._identity.run, wire.SERVICE, self._identity)
        while not self._stop.is_set():
            self._sweep_now.clear()
            try:
                self.sweep(client)
            except RelaxError as err:
                logger.warning("sweep failed %s", kv(note=str(err)))
            self._stop.wait(_MIN_SWEEP_S)  # also a limit on how often producers can ask for it
            self._sweep_now.wait(_SWEEP_S - _MIN_SWEEP_S)
        client.close()

    def sweep(self, client: RpcClient) -> int:
        """Remove what the dead left: half-made files, and whole ones that nobody references.

        Args:
            client: of the queue controller, which knows the references.

        Returns:
            Number of files removed.
        """
        removed = 0
        for path, owner in temporary_owners(self._arenas):
            if not is_alive(owner):
                path.unlink(missing_ok=True)
                removed += 1
        dead = {path.name for path in extents(self._arenas) if _is_of_the_dead(path)}
        spilled = {path.name for path in segments(self._spill) if _is_of_the_dead(path)}
        if not dead and not spilled:
            return removed
        request = wire.FindOrphans(self._identity.node, sorted(dead | spilled))
        reply = client.call(
            "find_orphans", request, wire.Orphans, timeout_s=60, why="extents of dead producers"
        )
        for name in reply.names:
            if name in dead:
                (self._arenas / name).unlink(missing_ok=True)
            elif name in spilled:
                remove_segment(self._spill, name)
        removed += len(reply.names)
        if reply.names:
            logger.info("swept %s", kv(node=self._identity.node, files=len(reply.names)))
        return removed


def _is_of_the_dead(path: Path) -> bool:
    owner = read_owner(path)
    return path.exists() and (owner is None or not is_alive(owner))
