"""TCP connections of a server: a thread each, ended when they stand still; strangers harm nobody.

    watchdog thread    accepts, and ends a connection whose present wait took longer than it may
    connection thread  converse(connection): handshake, then requests, until the peer closes

What ended a connection is counted by a word and logged at 1, 2, 4, 8 .. of it.
"""

import collections
import contextlib
import dataclasses
import ipaddress
import logging
import select
import socket
import threading
import time
from collections.abc import Callable

from relax_hpc.errors import TransferError
from relax_hpc.log import kv
from relax_hpc.transfer.frames import FrameError, PeerClosedError

logger = logging.getLogger(__name__)

_TICK_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """What one client can use up."""

    max_connections: int = 1024
    """Beyond: the oldest one that has not proved the key goes, else the new one is refused."""
    handshake_s: float = 10.0
    request_s: float = 10.0
    """From a request's first byte to its last."""
    send_s: float = 60.0
    """For each MiB of an answer: longer than a link is cut, shorter than a reader may sleep."""
    idle_s: float = 900.0
    """Between requests."""


class Connection:
    """One client. `wait` says until when what may take; the watchdog closes it then."""

    def __init__(self, sock: socket.socket, peer: str, limit_s: float) -> None:
        self.socket, self.peer = sock, peer
        self.is_trusted = False
        """Set once the peer has proved the key."""
        self.ended = ""
        self.wait("slow_handshake", limit_s)

    def wait(self, what: str, limit_s: float) -> None:
        """Begin to wait for something of the peer."""
        self.deadline, self.waits_for = time.monotonic() + limit_s, what

    def end(self, reason: str) -> None:
        """Wake its thread; it closes the socket."""
        self.ended = self.ended or reason
        with contextlib.suppress(OSError):  # the peer was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def receive(self, nbytes: int, what: str) -> bytes:
        """Receive exactly nbytes."""
        parts, missing = [], nbytes
        while missing:
            part = self.socket.recv(missing)
            if not part:
                raise PeerClosedError(what, nbytes - missing)
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


class ConnectionServer:
    """Accepts connections and gives each a thread.

    Args:
        name: what is served, for names of threads and log lines.
        address: (ip, port) to bind to, IPv4 or IPv6; port 0: a free one.
        limits: what one client can use up.
        converse: talks with one client until it has closed. FrameError, PeerClosedError and
            OSError end that connection only; anything else too, and is logged as a bug.
    """

    def __init__(
        self,
        name: str,
        address: tuple[str, int],
        limits: ServerLimits,
        converse: Callable[[Connection], None],
    ) -> None:
        self._name, self._limits, self._converse = name, limits, converse
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._connections: set[Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._watchdog: threading.Thread | None = None
        self.stopping = threading.Event()
        self.address = address
        """(ip, port); the port is known once started."""

    def start(self) -> tuple[str, int]:
        """Bind, serve in daemon threads, return (ip, port).

        Raises:
            TransferError: the address cannot be bound.
        """
        ip, port = self.address
        family = socket.AF_INET6 if ipaddress.ip_address(ip).version == 6 else socket.AF_INET
        try:
            listener = socket.create_server((ip, port), family=family, backlog=256)
        except OSError as err:
            place = f"{ip} port {port}" if port else ip
            raise TransferError(
                f"{self._name} server: cannot bind {place}: {err.strerror}"
            ) from err
        listener.setblocking(False)  # a client may be gone between poll and accept
        self._watchdog = threading.Thread(
            target=self._watch, args=(listener,), name=f"{self._name}-watch", daemon=True
        )
        self._watchdog.start()
        self.address = (ip, int(listener.getsockname()[1]))
        return self.address

    def stop(self, timeout_s: float = 5.0) -> None:
        """End all connections and threads."""
        self.stopping.set()
        deadline = time.monotonic() + timeout_s
        if self._watchdog is not None:
            self._watchdog.join(timeout_s)
        with self._lock:
            connections, threads = list(self._connections), list(self._threads)
        for connection in connections:
            connection.end("stopped")
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def count(self, what: str, number: int = 1) -> None:
        """Add to a number that `stats` tells."""
        with self._lock:
            self._counts[what] += number

    def stats(self) -> dict[str, int]:
        """Tell the counted numbers, open connections, and ended ones by reason (`end_REASON`)."""
        with self._lock:
            return {**self._counts, "connections": len(self._connections)}

    def _watch(self, listener: socket.socket) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        with listener:
            while not self.stopping.is_set():
                if poll.poll(int(1000 * _TICK_S)):
                    self._accept(listener)
                now = time.monotonic()
                with self._lock:
                    late = [c for c in self._connections if c.deadline < now]
                for connection in late:
                    connection.end(connection.waits_for)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except OSError as err:  # gone again, or out of descriptors: the next tick tries anew
            self._count_end("not_accepted", str(err))
            self.stopping.wait(_TICK_S)
            return
        sock.setblocking(True)
        connection = Connection(sock, f"{address[0]}:{address[1]}", self._limits.handshake_s)
        if not self._make_room():
            sock.close()
            self._count_end("too_many", connection.peer)
            return
        thread = threading.Thread(
            target=self._serve, args=(connection,), name=f"{self._name}-connection", daemon=True
        )
        with self._lock:
            self._connections.add(connection)
            self._threads.add(thread)
        thread.start()

    def _make_room(self) -> bool:
        with self._lock:
            if len(self._connections) < self._limits.max_connections:
                return True
            strangers = [c for c in self._connections if not c.is_trusted and not c.ended]
        if not strangers:
            return False
        min(strangers, key=lambda c: c.deadline).end("crowded_out")
        return True

    def _serve(self, connection: Connection) -> None:
        reason, note = "closed", ""
        try:
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._converse(connection)
        except FrameError as err:
            reason, note = err.reason, str(err)
        except PeerClosedError as err:
            if err.seen or not connection.is_trusted:
                reason, note = "truncated", str(err)
        except OSError as err:
            reason, note = "broken", str(err)
        except Exception as err:  # the border of this thread: one client must not end the server
            reason, note = "internal", repr(err)
            logger.exception("connection failed %s", kv(server=self._name, peer=connection.peer))
        finally:
            connection.socket.close()
            with self._lock:
                self._connections.discard(connection)
                self._threads.discard(threading.current_thread())
            self._count_end(connection.ended or reason, f"{connection.peer} {note}")

    def _count_end(self, reason: str, note: str) -> None:
        with self._lock:
            self._counts[f"end_{reason}"] += 1
            count = self._counts[f"end_{reason}"]
        is_usual = reason in ("closed", "stopped", "idle")
        if not is_usual and count & (count - 1) == 0:  # 1, 2, 4, 8 ...: nobody can flood the log
            logger.warning(
                "%s connection ended %s", self._name, kv(reason=reason, count=count, note=note)
            )
