"""Payload over TCP: the server of a node sends ranges of its files from the page cache.

reader (any thread)                        DataServer (in the node agent; one thread a connection)
  DataClient.read_blocks(refs)
    plan: neighbours become one range,
    ranges become one buffer
    stream 0..n-1: connect, handshake  -->   handshake within a deadline, else closed
    Request (ranges, epochs)           -->   sizes and epochs checked
    recv_into(recycled buffer)         <--   Reply, sendfile(2) of each range
      as bytes come: progress(...)           epochs checked again
                                       <--   Trailer
    or Ask (service, body)             -->   what the registered service says, in this thread
                                       <--   Told, its payload
A watchdog thread of the server ends connections that stand still longer than they may. A client's
stream that breaks connects again (to the agent's new address, if it was restarted) and goes on
where it was; all waits end at the caller's deadline.
"""

import collections
import contextlib
import dataclasses
import ipaddress
import logging
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import xxhash

from relax_hpc.errors import RelaxError, TransferError
from relax_hpc.log import kv
from relax_hpc.transfer.frames import (
    MAX_RANGES,
    MAX_TOLD_BYTES,
    PAD,
    Ask,
    Channel,
    FrameError,
    PeerClosedError,
    Reply,
    Request,
    Told,
    Trailer,
    welcome,
)

logger = logging.getLogger(__name__)

Service = Callable[[bytes], memoryview]
"""Answers a question: body -> payload, flat bytes, at most MAX_TOLD_BYTES. Called by several
threads at once. A RelaxError is told to the client as a refusal; a FrameError ends the connection.
"""

_MAX_REFUSAL = 2000  # characters: a sentence or two
_SLICE_BYTES = 1 << 20
"""One sendfile(2): long against a system call, short against the send deadline."""
_TICK_S = 0.1
_EPOCH_AT, _EPOCH_BYTES = 8, 8
"""Where a block's commit word is: behind its magic."""
_COPY_BELOW = 4096
"""Shorter ranges are cheaper to read and send than to splice."""


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


class _Connection:
    """One client. `wait` says until when what may take; the watchdog closes it then."""

    def __init__(self, sock: socket.socket, peer: str, limit_s: float) -> None:
        self.socket, self.peer = sock, peer
        self.is_trusted = False
        self.ended = ""
        self.wait("slow_handshake", limit_s)

    def wait(self, what: str, limit_s: float) -> None:
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


class DataServer:
    """Serves ranges of a node's files to who knows the run's key.

    Args:
        areas: name of an area -> its folder. Files are named relative to it, at most one folder
            deep; hidden files (unfinished ones) and links are not there.
        key: `frames.data_key` of the run.
        ip: address to bind to, IPv4 or IPv6.
        limits: what one client can use up.
    """

    def __init__(
        self, areas: Mapping[str, Path], key: bytes, ip: str, limits: ServerLimits | None = None
    ) -> None:
        self._areas, self._key, self._ip = dict(areas), key, ip
        self._services: dict[str, Service] = {}
        self._limits = limits or ServerLimits()
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._connections: set[_Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._stopping = threading.Event()
        self._listener: socket.socket | None = None
        self._watchdog: threading.Thread | None = None
        self.address = (ip, 0)
        """(ip, port), once started."""

    def register(self, name: str, service: Service) -> None:
        """Let clients ask a service; before `start`."""
        self._services[name] = service

    def start(self) -> tuple[str, int]:
        """Bind to a free port, serve in daemon threads, return (ip, port).

        Raises:
            TransferError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ipaddress.ip_address(self._ip).version == 6 else socket.AF_INET
        try:
            self._listener = socket.create_server((self._ip, 0), family=family, backlog=256)
        except OSError as err:
            raise TransferError(
                f"data server: cannot bind {self._ip}: {err.strerror}; correct the fabric prefix "
                "of the site profile"
            ) from err
        self._listener.setblocking(False)  # a client may be gone between poll and accept
        self._watchdog = threading.Thread(target=self._watch, name="data-watch", daemon=True)
        self._watchdog.start()
        self.address = (self._ip, int(self._listener.getsockname()[1]))
        logger.info("serving payload %s", kv(ip=self.address[0], port=self.address[1]))
        return self.address

    def stop(self, timeout_s: float = 5.0) -> None:
        """End all connections and threads."""
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        if self._watchdog is not None:
            self._watchdog.join(timeout_s)
        with self._lock:
            connections, threads = list(self._connections), list(self._threads)
        for connection in connections:
            connection.end("stopped")
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def stats(self) -> dict[str, int]:
        """Count requests, sent_bytes, open connections, and ended ones by reason (`end_REASON`)."""
        with self._lock:
            return {**self._counts, "connections": len(self._connections)}

    # -- connections --------------------------------------------------------------------------

    def _watch(self) -> None:
        assert self._listener is not None
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        with self._listener:
            while not self._stopping.is_set():
                if poll.poll(int(1000 * _TICK_S)):
                    self._accept(self._listener)
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
            self._stopping.wait(_TICK_S)
            return
        sock.setblocking(True)
        connection = _Connection(sock, f"{address[0]}:{address[1]}", self._limits.handshake_s)
        if not self._make_room():
            sock.close()
            self._count_end("too_many", connection.peer)
            return
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="data-connection", daemon=True
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

    def _serve(self, connection: _Connection) -> None:
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
            logger.exception("data connection failed %s", kv(peer=connection.peer))
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
            logger.warning("data connection ended %s", kv(reason=reason, count=count, note=note))

    # -- requests -----------------------------------------------------------------------------

    def _converse(self, connection: _Connection) -> None:
        limits = self._limits
        channel = welcome(connection.socket, connection.receive, self._key)
        connection.is_trusted = True
        while not self._stopping.is_set():
            connection.wait("idle", limits.idle_s)
            connection.socket.recv(1, socket.MSG_PEEK)
            connection.wait("slow_request", limits.request_s)
            request = channel.receive_any_request()
            connection.wait("slow_reader", limits.send_s)
            if isinstance(request, Ask):
                self._tell(connection, channel, request)
                continue
            with contextlib.ExitStack() as stack:
                self._answer(connection, channel, _Files(self._areas, request, stack))

    def _tell(self, connection: _Connection, channel: Channel, ask: Ask) -> None:
        service = self._services.get(ask.service)
        if service is None:
            raise FrameError("bad_request", f"a question to {ask.service!r}, which is not served")
        refusal, payload = "", memoryview(b"")
        try:
            payload = service(ask.body)
        except FrameError:
            raise
        except RelaxError as err:
            refusal = str(err)[:_MAX_REFUSAL]
        assert payload.nbytes <= MAX_TOLD_BYTES
        with self._lock:  # before the client can have all of it
            self._counts["requests"] += 1
            self._counts["sent_bytes"] += payload.nbytes
        connection.wait("slow_reader", self._limits.send_s)
        channel.send(Told(refusal, payload.nbytes, xxhash.xxh3_64_intdigest(payload)))
        for start in range(0, payload.nbytes, _SLICE_BYTES):
            connection.wait("slow_reader", self._limits.send_s)
            connection.socket.sendall(payload[start : start + _SLICE_BYTES])

    def _answer(self, connection: _Connection, channel: Channel, files: "_Files") -> None:
        reply = files.check()
        sock = connection.socket
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        channel.send(reply)
        with self._lock:
            self._counts["requests"] += 1
        if reply.is_good and files.request.ranges:
            for index, offset, nbytes in files.request.ranges:
                self._send_range(connection, files.descriptors[index], offset, nbytes)
            with self._lock:
                self._counts["sent_bytes"] += sum(r[2] for r in files.request.ranges)
            channel.send(Trailer(files.stale()))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)

    def _send_range(self, connection: _Connection, file: int, offset: int, nbytes: int) -> None:
        sock, end = connection.socket, offset + nbytes
        while offset < end:
            connection.wait("slow_reader", self._limits.send_s)
            count = min(end - offset, _SLICE_BYTES)
            if count < _COPY_BELOW:
                data = os.pread(file, count, offset)
                sock.sendall(data)
                sent = len(data)
            else:
                sent = os.sendfile(sock.fileno(), file, offset, count)
            if sent == 0:
                break
            offset += sent
        if end - offset >= PAD:
            raise FrameError("changed", f"a file became shorter at byte {offset} while it was sent")
        sock.sendall(bytes(end - offset))


class _Files:
    """The open files of one request."""

    def __init__(
        self, areas: Mapping[str, Path], request: Request, stack: contextlib.ExitStack
    ) -> None:
        if len(request.ranges) + len(request.checks) + len(request.files) > MAX_RANGES:
            raise FrameError("bad_request", f"more than {MAX_RANGES} ranges, checks and files")
        self.request = request
        self.descriptors = [self._open(areas, area, name, stack) for area, name in request.files]
        count = len(self.descriptors)
        if any(nbytes >= 2**48 for _, _, nbytes in request.ranges):
            raise FrameError("bad_request", "a range of more than 256 TiB")
        for index, offset, number in (*request.ranges, *request.checks):
            if not 0 <= index < count or not 0 <= offset < 2**48 or number < 0:
                raise FrameError("bad_request", f"range or check {(index, offset, number)}")

    def _open(
        self, areas: Mapping[str, Path], area: str, name: str, stack: contextlib.ExitStack
    ) -> int:
        """Return a descriptor, -1 for what is not there."""
        parts = name.split("/")
        is_plain = len(parts) <= 2 and all(p and p[0] != "." and "\0" not in p for p in parts)
        if area not in areas or not is_plain:
            return -1
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(areas[area] / name, flags)
        except OSError:
            return -1  # told to the client as not there; it names the file
        stack.callback(os.close, descriptor)
        return descriptor if stat.S_ISREG(os.fstat(descriptor).st_mode) else -1

    def check(self) -> Reply:
        sizes = [-1 if d < 0 else os.fstat(d).st_size for d in self.descriptors]
        outside = [
            i
            for i, (index, offset, nbytes) in enumerate(self.request.ranges)
            if offset + nbytes >= sizes[index] + PAD
        ]
        return Reply(sizes, self.stale(), outside)

    def stale(self) -> list[int]:
        """Checks whose block has another epoch now."""
        return [
            i
            for i, (index, offset, epoch) in enumerate(self.request.checks)
            if self.descriptors[index] < 0 or self._epoch(index, offset) != epoch
        ]

    def _epoch(self, index: int, offset: int) -> int:
        word = os.pread(self.descriptors[index], _EPOCH_BYTES, offset + _EPOCH_AT)
        return int.from_bytes(word, "little") if len(word) == _EPOCH_BYTES else -1
