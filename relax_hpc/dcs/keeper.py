"""The weight service's hands on each node: serves shards to other nodes, deletes what retired."""

import asyncio
import logging
import threading

from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import Caller, RpcClient, RpcServer
from relax_hpc.dcs.client import RANGE_BYTES, ReadShard, ShardBytes
from relax_hpc.dcs.coordinator import SERVICE, Garbage, Sweep
from relax_hpc.dcs.store import WeightStore
from relax_hpc.errors import ControlError, WeightSyncError
from relax_hpc.log import kv

_log = logging.getLogger(__name__)

_SWEEP_S = 20.0
"""Length of one long-poll; also how often the node's folder is listed anew."""


class WeightKeeper:
    """Adds weights to a node agent: `register` its handler, `start` the sweeping thread."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._store = WeightStore(identity.run, identity.node)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sweep_forever, name="weights", daemon=True)

    def register(self, server: RpcServer) -> None:
        """Serve `read_weights` on the agent's server (before it starts)."""
        server.register("read_weights", ReadShard, self._read)

    def start(self) -> None:
        """Begin to delete retired versions of this node."""
        self._thread.start()

    def stop(self) -> None:
        """Delete nothing more; the thread ends with its present long-poll."""
        self._stopping.set()

    async def _read(self, _: Caller, request: ReadShard) -> ShardBytes:
        nbytes = min(request.nbytes, RANGE_BYTES)  # bounds this process's memory
        try:
            data = await asyncio.to_thread(
                self._store.read_range, request.version, request.rank, request.offset, nbytes
            )
        except WeightSyncError as err:
            _log.info("weights asked for that are gone %s", kv(reason=err))
            return ShardBytes(data=None)
        return ShardBytes(data=data)

    def _sweep_forever(self) -> None:
        rpc = RpcClient(self._identity.run, SERVICE, self._identity)
        seen = -1
        while not self._stopping.is_set():
            request = Sweep(
                node=self._identity.node,
                present=self._store.versions(),
                seen=seen,
                timeout_s=_SWEEP_S,
            )
            try:
                garbage = rpc.call(
                    "sweep", request, Garbage, timeout_s=_SWEEP_S + 60, why="retired weights"
                )
            except ControlError as err:  # the coordinator restarts, or a newer agent replaced us
                _log.warning("no word of retired weights %s", kv(reason=err))
                self._stopping.wait(5.0)
                continue
            seen = garbage.num_retirements
            for version in garbage.versions:
                if not self._stopping.is_set():
                    self._store.remove(version)
        rpc.close()
