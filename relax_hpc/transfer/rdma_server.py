"""Let other nodes read this node's extents by RDMA, without any work of this node's processors.

agent's process    NixlServer: starts the helper, asks it for its address, starts it again
  | socketpair       a byte: tell; answer: length, message. End of file: the helper ends
helper process     NixlAgent, a map of every extent, registered; looks for new ones

A process of its own, since UCX ends the process that it runs in when its peer vanishes at the wrong
moment ("Fatal: unexpected error: Endpoint timeout", seen with 1.23 over TCP): the agent with its
TCP server, which is the way out then, must outlive that.

UCX over TCP (no RDMA hardware) reads whatever address a peer names, also after the registration
ended, and checks no key. So memory of a removed extent is replaced by an empty map at the same
place: a late reader finds zeros, which no epoch is, instead of a fault. And so it is for tests and
trusted networks only (transfer.rdma = "force").
"""

import ctypes
import logging
import mmap
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from relax_hpc.errors import ArenaFullError, TransferError
from relax_hpc.log import kv
from relax_hpc.transfer.extent import extents, populate
from relax_hpc.transfer.nixl_agent import NixlAgent

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
"""How long the memory of a removed extent may stay in use by its registration."""
_START_S = 60.0
_FRESH_S = 2.0
"""Who asks for the address of a node waits no longer for a helper that hangs: TCP needs it, too."""
_LOST_S = 30.0
_MESSAGE_S = 10.0
_RESTART_PAUSE_S = 5.0
_LENGTH = struct.Struct("<I")
_MAX_ANSWER = 64 << 20


class NixlAccess(msgspec.Struct, frozen=True, array_like=True):
    """What a reader needs: wire.DataAccess.nixl_metadata, msgpack."""

    metadata: bytes
    """Of NIXL: where the agent is, and keys of its memory."""
    extents: dict[str, tuple[int, int]]
    """Address in the helper and size of each extent."""
    is_complete: bool = True
    """No other extents exist. False: some are not registered, or this is an old answer."""


# ---------------------------------------------------------------------------------------------
# In the agent's process
# ---------------------------------------------------------------------------------------------


class NixlServer:
    """The agent's side. Thread-safe.

    Args:
        folder: SHM/arenas of this node.
        node: for the name, which is new with each start of the helper.
    """

    def __init__(self, folder: Path, node: str) -> None:
        self._folder, self._node = folder, node
        self._lock = threading.Lock()
        self._helper: _Helper | None = None
        self._retry_at = 0.0
        self.num_restarts = 0
        """Times that the helper was started again because it ended or did not answer."""

    def start(self) -> None:
        """Start the helper (about a second).

        Raises:
            TransferError: it did not come up; its stderr is this process's.
        """
        with self._lock:
            if self._helper is None:
                self._helper = _Helper(self._folder, self._node)

    def access(self) -> tuple[str, bytes]:
        """Return nixl_agent and nixl_metadata of DataAccess; ("", b"") while there is no helper.

        Blocks: extents that are there now are registered first; but if that takes longer than two
        seconds, the answer is the last one. Starts a helper again that ended or hangs.
        """
        with self._lock:
            if self._helper is None and not self._start_again():
                return "", b""
            assert self._helper is not None
            try:
                return self._helper.name, self._helper.ask(_FRESH_S)
            except (OSError, TransferError) as err:
                _log.warning("nixl helper is lost %s", kv(agent=self._helper.name, note=str(err)))
                self._helper.close()
                self._helper, self._retry_at = None, time.monotonic() + _RESTART_PAUSE_S
                return "", b""

    def close(self) -> None:
        """End the helper."""
        with self._lock:
            if self._helper is not None:
                self._helper.close()
            self._helper, self._retry_at = None, float("inf")

    def _start_again(self) -> bool:
        if self._retry_at == 0.0 or time.monotonic() < self._retry_at:
            return False  # never started, or a moment ago: readers take TCP meanwhile
        try:
            self._helper = _Helper(self._folder, self._node)
        except TransferError as err:
            _log.warning("nixl helper does not start %s", kv(note=str(err)))
            self._retry_at = time.monotonic() + _RESTART_PAUSE_S
            return False
        self.num_restarts += 1
        return True


class _Helper:
    """The process; ends with the socket."""

    def __init__(self, folder: Path, node: str) -> None:
        self.name = f"{node}-{os.getpid()}-{secrets.token_hex(4)}"
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_MESSAGE_S)
        self._last = b""
        self._asked_at: float | None = None  # a question without an answer yet
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), self.name, str(folder)]
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        try:
            if not self.ask(_START_S):
                raise TransferError(f"no answer in {_START_S:.0f} s")
        except (OSError, TransferError) as err:
            self.close()
            raise TransferError(
                f"NIXL helper of {folder} did not start (exit code {self.process.returncode}): "
                f"{err}; its reason is in this process's stderr"
            ) from err

    def ask(self, wait_s: float) -> bytes:
        """Return a NixlAccess of this moment, or the last one if there is none in time.

        Raises:
            TransferError: the process ended, or has not answered for half a minute.
        """
        is_new, begin = self._asked_at is None, time.monotonic()
        until = begin + (wait_s if is_new else _FRESH_S / 20)
        while True:
            if self._asked_at is None:
                self._socket.sendall(b"?")
                self._asked_at = time.monotonic()
            left_s = max(0.0, until - time.monotonic())
            if not select.select([self._socket], [], [], left_s)[0]:
                if time.monotonic() - self._asked_at > _LOST_S:
                    raise TransferError(f"no answer of pid {self.process.pid} in {_LOST_S:.0f} s")
                return self._last
            answer, self._asked_at = self._take_answer(), None
            told = msgspec.msgpack.decode(answer, type=NixlAccess)
            old = msgspec.structs.replace(told, is_complete=False)
            self._last = msgspec.msgpack.encode(old)
            if is_new:
                return answer
            is_new = True  # that was the answer to an older question

    def _take_answer(self) -> bytes:
        (nbytes,) = _LENGTH.unpack(self._receive(_LENGTH.size))
        if nbytes > _MAX_ANSWER:
            raise TransferError(f"NIXL helper {self.name} answers with {nbytes} bytes")
        return self._receive(nbytes)

    def close(self) -> None:
        self._socket.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _receive(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            part = self._socket.recv(nbytes - len(data))
            if not part:
                raise TransferError(f"NIXL helper {self.name} (pid {self.process.pid}) ended")
            data += part
        return bytes(data)


# ---------------------------------------------------------------------------------------------
# In the helper
# ---------------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip
_MAP_FIXED = 0x10


class _Registered:
    """Maps and registrations of the extents in a folder."""

    def __init__(self, agent: NixlAgent, folder: Path) -> None:
        self._agent, self._folder = agent, folder
        self._known: dict[str, tuple[int, int, Any]] = {}
        self._is_complete = True

    def look(self) -> None:
        """Register what appeared, and let go of what is no longer there."""
        there = {path.name: path for path in extents(self._folder)}
        for name in self._known.keys() - there.keys():
            address, nbytes, registration = self._known.pop(name)
            self._agent.deregister(registration)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            _map(address, nbytes, mmap.PROT_READ, flags, -1)
        self._is_complete = True
        for name in there.keys() - self._known.keys():
            try:
                self._add(name, there[name])
            except (OSError, TransferError) as err:  # gone again, or the limit of locked memory
                self._is_complete = False
                _log.warning("extent is not registered %s", kv(extent=name, note=str(err)))

    def access(self) -> NixlAccess:
        """Describe what is registered."""
        places = {name: (entry[0], entry[1]) for name, entry in self._known.items()}
        return NixlAccess(self._agent.metadata(), places, self._is_complete)

    def _add(self, name: str, path: Path) -> None:
        # Writable, though nobody here writes: UCX registers for all kinds of access, and an adapter
        # refuses write access to a read-only map.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            nbytes = os.fstat(descriptor).st_size
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            address = _map(0, nbytes, protection, mmap.MAP_SHARED, descriptor)
        finally:
            os.close(descriptor)  # an open file would keep the memory of a removed extent
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        try:
            populate(memory, 0, nbytes, writable=False)
        except ArenaFullError as err:
            raise TransferError(str(err)) from err
        self._known[name] = (address, nbytes, self._agent.register(address, nbytes))


def _map(address: int, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    found: int | None = _libc.mmap(address or None, nbytes, protection, flags, descriptor, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}")
    return found


def serve(connection: socket.socket, name: str, folder: Path) -> None:
    """Serve until the other side closes the connection."""
    registered = _Registered(NixlAgent(name), folder)
    while True:
        is_asked = bool(select.select([connection], [], [], _LOOK_EVERY_S)[0])
        if is_asked and not connection.recv(1):
            return
        registered.look()
        if is_asked:
            answer = msgspec.msgpack.encode(registered.access())
            connection.sendall(_LENGTH.pack(len(answer)) + answer)


def main() -> None:
    """Serve as the helper of the process that started this one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Slurm signals all of a step; the agent decides
    descriptor, name, folder = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as connection:
        try:
            serve(connection, name, Path(folder))
        except TransferError as err:
            sys.stderr.write(f"nixl helper {name}: {err}\n")
            sys.stderr.flush()
            os._exit(1)
    # No exit handlers: libraries of the wheel crash in theirs, and there is nothing to save.
    os._exit(0)


if __name__ == "__main__":
    main()
