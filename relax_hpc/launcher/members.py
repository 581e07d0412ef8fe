"""Watch the control service's member list from a thread: who is there, who is silent, how far."""

import dataclasses
import logging
import threading
import time
import typing

from relax_hpc.control.identity import supervisor_identity
from relax_hpc.control.registry import SERVICE, MemberInfo, members
from relax_hpc.control.rpc import RpcClient
from relax_hpc.errors import RelaxError
from relax_hpc.log import kv
from relax_hpc.runfolder import RunFolder

_LOG = logging.getLogger(__name__)

_INTERVAL_S = 2.0
"""As often as members send heartbeats."""
_CALL_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """One answer of the control service."""

    time: float
    """time.monotonic() when the request was sent: what it says is at least as new."""
    members: tuple[MemberInfo, ...]


class MemberSource(typing.Protocol):
    """Where the supervisor sees members; the control service, or a list in tests."""

    def latest(self) -> Snapshot | None:
        """Return the newest answer; None before the first."""

    def close(self) -> None:
        """Stop watching."""


class MemberWatch:
    """Asks the control service for its members, again and again, in a daemon thread.

    The thread owns the client. A control service that is down or stopped shows as a snapshot that
    grows old, which the supervisor judges; nothing is raised here.
    """

    def __init__(self, folder: RunFolder, attempt: int, node: str) -> None:
        self._folder = folder
        self._identity = supervisor_identity(folder, attempt, node)
        self._latest: Snapshot | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="member-watch", daemon=True)
        self._thread.start()

    def latest(self) -> Snapshot | None:
        """Return the newest answer; None before the first."""
        return self._latest

    def close(self) -> None:
        """Stop the thread after the call in flight; returns at once."""
        self._stop.set()

    def _run(self) -> None:
        client = RpcClient(self._folder, SERVICE, self._identity)
        try:
            while not self._stop.is_set():
                self._ask(client)
                self._stop.wait(_INTERVAL_S)
        finally:
            client.close()

    def _ask(self, client: RpcClient) -> None:
        asked = time.monotonic()
        try:
            found = members(client, timeout_s=_CALL_TIMEOUT_S)
        except RelaxError as err:
            _LOG.debug("control does not answer %s", kv(error=err))
            return
        self._latest = Snapshot(asked, tuple(found))
