"""NIXL (RDMA by UCX), loaded only when asked for, and used so that its host process stays unharmed.

What the library would do to a process that merely imports it, and what is done about it here:

signals    UCX takes SIGHUP and turns it into a debugger stop: UCX_DEBUG_SIGNO=0
exit       its InfiniBand modules load a second libibverbs and libnl beside the system's, and one of
           the two crashes in exit(3): only modules of hardware that is there are loaded
logging    it logs to stdout and sets logging.raiseExceptions: both undone
ports      with hardware only its transports are opened, so no TCP port that anybody may talk to

UCX reads its variables when it is loaded. They are set for that moment only, those of the user win.
"""

import contextlib
import enum
import importlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from relax_hpc.errors import TransferError

_log = logging.getLogger(__name__)

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
_DEVICES = Path("/sys/class/infiniband")
_load_lock = threading.Lock()

Piece = tuple[int, int]
"""(address, bytes)."""


def rdma_devices() -> list[str]:
    """Names of the RDMA adapters of this node (InfiniBand, RoCE, EFA), as the kernel lists them."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(entry.name for entry in _DEVICES.iterdir())
    return []


class Outcome(enum.Enum):
    """How a transfer stands, and whether its memory may be touched."""

    UNDER_WAY = "under way"
    DONE = "done"
    PEER_LOST = "peer lost"
    """The endpoint broke and was closed: nothing more arrives."""
    FAILED = "failed"
    """Another error: NIXL does not say whether all parts of the transfer ended."""


class Transfer:
    """One posted read. There is no way to cancel it: see `NixlAgent.post_read`."""

    def __init__(self, agent: "NixlAgent", handle: Any, note: str = "") -> None:
        self._agent, self._handle = agent, handle
        self.note = note
        """What NIXL said, when it failed."""
        self._outcome = _outcome(note) if note else Outcome.UNDER_WAY

    def poll(self) -> Outcome:
        """Ask how it stands."""
        if self._outcome is Outcome.UNDER_WAY:
            state = self._agent.state(self._handle)
            self._outcome = _outcome(state)
            if self._outcome in (Outcome.DONE, Outcome.PEER_LOST):
                self._agent.release(self._handle)
            if self._outcome is not Outcome.DONE:
                self.note = state
        return self._outcome


def _outcome(state: str) -> Outcome:
    if state == "DONE":
        return Outcome.DONE
    if state == "PROC":
        return Outcome.UNDER_WAY
    # NOT_FOUND: another transfer of this peer saw the disconnect first (peers are never removed).
    is_lost = "REMOTE_DISCONNECT" in state or "NOT_FOUND" in state
    return Outcome.PEER_LOST if is_lost else Outcome.FAILED


class NixlAgent:
    """One endpoint of NIXL with the UCX backend and a progress thread. Thread-safe.

    Args:
        name: unique over all processes and restarts of the run.

    Raises:
        TransferError: NIXL is not installed, or UCX cannot start here; says why.
    """

    def __init__(self, name: str) -> None:
        with _load_lock, _settings():
            self._api = _load()
            self._failures = _failures(self._api)
            cannot: tuple[type[Exception], ...] = (RuntimeError, *self._failures)
            try:
                config = self._api.nixl_agent_config(
                    backends=[], sync_mode=self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
                )
                self._agent = self._api.nixl_agent(name, config)
                self._agent.create_backend("UCX", {"engine_config": f"TLS={_transports()}"})
            except cannot as err:
                raise TransferError(
                    f"NIXL agent {name} cannot start with UCX over {_transports()}: {err!r} "
                    "(UCX_LOG_LEVEL=info shows more; transfer.rdma = 'off' does without)"
                ) from err
        self.name = name

    def register(self, address: int, nbytes: int) -> Any:
        """Let the adapter reach memory of this process; returns what `deregister` takes.

        Raises:
            TransferError: refused, as a rule by the limit of locked memory.
        """
        try:
            return self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")
        except self._failures as err:
            raise TransferError(
                f"NIXL agent {self.name} cannot register {nbytes} bytes: {err!r}; with RDMA "
                "hardware the limit of locked memory (ulimit -l) must be unlimited"
            ) from err

    def deregister(self, registration: Any) -> None:
        """End a registration; no transfer of that memory may be under way."""
        try:
            self._agent.deregister_memory(registration)
        except self._failures as err:
            raise TransferError(f"NIXL agent {self.name} keeps memory: {err!r}") from err

    def metadata(self) -> bytes:
        """Return what other agents need to know to read registered memory of this one."""
        return bytes(self._agent.get_agent_metadata())

    def learn(self, metadata: bytes) -> str:
        """Take (new) metadata of another agent; returns that agent's name.

        There is no way to forget: after `remove_remote_agent` the state of a transfer under way
        reads NOT_FOUND while its bytes still arrive (seen with 1.5.1).

        Raises:
            TransferError: it cannot be understood or reached.
        """
        try:
            name = self._agent.add_remote_agent(metadata)
        except self._failures as err:
            raise TransferError(f"NIXL agent {self.name} cannot add a peer: {err!r}") from err
        return name.decode() if isinstance(name, bytes) else str(name)

    def post_read(self, peer: str, local: Sequence[Piece], remote: Sequence[Piece]) -> Transfer:
        """Begin to copy pieces of a peer's memory into registered memory of this process.

        Until `Transfer.poll` says that it ended, this process must leave that memory alone. There
        is no way to cancel: a handle that is released under way reports success and its bytes
        still arrive (seen with 1.5.1), hence `Transfer` does not offer it.

        Raises:
            TransferError: not begun; the peer is gone, or its memory is not registered.
        """
        try:
            handle = self._agent.initialize_xfer(
                "READ", self._pieces(local), self._pieces(remote), peer
            )
        except self._failures as err:
            raise TransferError(f"NIXL agent {peer} is unknown or changed: {err!r}") from err
        try:
            self._agent.transfer(handle)
        except self._failures as err:
            return Transfer(self, handle, str(err))  # perhaps begun in part
        return Transfer(self, handle)

    def state(self, handle: Any) -> str:
        """DONE, PROC (under way), or what went wrong."""
        try:
            return str(self._agent.check_xfer_state(handle))
        except self._failures as err:
            return str(err)

    def release(self, handle: Any) -> None:
        """Free a handle whose transfer ended."""
        try:
            handle.release()
        except self._failures as err:
            _log.warning("a NIXL handle is not released agent=%s note=%r", self.name, err)

    def _pieces(self, pieces: Sequence[Piece]) -> Any:
        return self._agent.get_xfer_descs([(at, nbytes, 0) for at, nbytes in pieces], "DRAM")


def _load() -> ModuleType:
    for package in _PACKAGES:
        try:
            with _logging_unharmed():
                return importlib.import_module(package)
        except ModuleNotFoundError as err:
            if err.name != package:
                raise TransferError(f"package {package} is incomplete: {err}") from err
        except ImportError as err:
            raise TransferError(f"package {package} cannot be loaded: {err}") from err
    raise TransferError(
        "NIXL is not installed: pip install --no-deps nixl-cu12 (its list of requirements would "
        "bring another torch)"
    )


def _failures(api: ModuleType) -> tuple[type[Exception], ...]:
    """All errors of NIXL: they have no base of their own."""
    bindings = importlib.import_module(f"{api.__name__}._bindings")
    kinds = [kind for kind in vars(bindings).values() if isinstance(kind, type)]
    return tuple(kind for kind in kinds if issubclass(kind, Exception))


def _transports() -> str:
    """UCX's word for what is used; UCX_TLS of the user wins over it inside NIXL.

    Shared memory is no choice: it cannot tell that a peer died, and NIXL wants that.
    """
    return "ib" if rdma_devices() else "tcp"


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Set what UCX reads once, when it is loaded; put the environment back behind it."""
    devices = rdma_devices()
    has_efa = any(name.startswith(("efa", "rdmap")) for name in devices)
    modules = "^ib" if not devices else "all" if has_efa else "^efa"
    wanted = {"UCX_MODULES": modules, "UCX_DEBUG_SIGNO": "0"}
    ours = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in ours})
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _logging_unharmed() -> Iterator[None]:
    raises = logging.raiseExceptions
    is_configured = bool(logging.getLogger("nixl").handlers)
    try:
        yield
    finally:
        logging.raiseExceptions = raises
        logger = logging.getLogger("nixl")
        if not is_configured:
            logger.handlers.clear()
            logger.propagate = True
            if "NIXL_LOG_LEVEL" not in os.environ:
                logger.setLevel(logging.WARNING)
