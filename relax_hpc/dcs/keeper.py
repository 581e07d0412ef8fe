"""The weight service's hands on each node: serves shards to other nodes, deletes what retired."""

import logging
import threading

from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcClient
from relax_hpc.dcs import cuts
from relax_hpc.dcs.coordinator import SERVICE, Garbage, Sweep
from relax_hpc.dcs.store import WeightStore
from relax_hpc.errors import ControlError
from relax_hpc.log import kv
from relax_hpc.transfer.tcp_server import DataServer

_log = logging.getLogger(__name__)

_SWEEP_S = 20.0
"""Length of one long-poll; also how often the node's folder is listed anew."""


class WeightKeeper:
    """Adds weights to a node agent: `register` its service, `start` the sweeping thread."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._store = WeightStore(identity.run, identity.node)
        self._cuts = cuts.CutServer(self._store)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sweep_forever, name="weights", daemon=True)

    def register(self, server: DataServer) -> None:
        """Serve boxes of this node's shards on the agent's data server (before it starts)."""
        server.register(cuts.SERVICE, self._cuts.answer)

    def start(self) -> None:
        """Begin to delete retired versions of this node."""
        self._thread.start()

    def stop(self) -> None:
        """Delete nothing more; the thread ends with its present long-poll."""
        self._stopping.set()

    def _sweep_forever(self) -> None:
        rpc = RpcClient(self._identity.run, SERVICE, self._identity)
        seen = -1
        while not self._stopping.is_set():
            present = self._store.versions()
            # A mapping would keep the memory of what was removed.
            self._cuts.keep_only(present)
            request = Sweep(
                node=self._identity.node, present=present, seen=seen, timeout_s=_SWEEP_S
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
