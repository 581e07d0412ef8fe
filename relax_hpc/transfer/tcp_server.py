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
The server ends connections that stand still longer than they may (connections.py). A client's
stream that breaks connects again (to the agent's new address, if it was restarted) and goes on
where it was; all waits end at the caller's deadline.
"""

import contextlib
import logging
import os
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import xxhash

from relax_hpc.errors import RelaxError, TransferError
from relax_hpc.log import kv
from relax_hpc.transfer.connections import Connection, ConnectionServer, ServerLimits
from relax_hpc.transfer.frames import (
    MAX_RANGES,
    MAX_TOLD_BYTES,
    PAD,
    Ask,
    Channel,
    FrameError,
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
_EPOCH_AT, _EPOCH_BYTES = 8, 8
"""Where a block's commit word is: behind its magic."""
_COPY_BELOW = 4096
"""Shorter ranges are cheaper to read and send than to splice."""


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
        self._areas, self._key = dict(areas), key
        self._services: dict[str, Service] = {}
        self._limits = limits or ServerLimits()
        self._server = ConnectionServer("data", (ip, 0), self._limits, self._converse)

    @property
    def address(self) -> tuple[str, int]:
        """(ip, port), once started."""
        return self._server.address

    def register(self, name: str, service: Service) -> None:
        """Let clients ask a service; before `start`."""
        self._services[name] = service

    def start(self) -> tuple[str, int]:
        """Bind to a free port, serve in daemon threads, return (ip, port).

        Raises:
            TransferError: the address cannot be bound.
        """
        try:
            ip, port = self._server.start()
        except TransferError as err:
            raise TransferError(f"{err}; correct the fabric prefix of the site profile") from err
        logger.info("serving payload %s", kv(ip=ip, port=port))
        return ip, port

    def stop(self, timeout_s: float = 5.0) -> None:
        """End all connections and threads."""
        self._server.stop(timeout_s)

    def stats(self) -> dict[str, int]:
        """Count requests, sent_bytes, open connections, and ended ones by reason (`end_REASON`)."""
        return self._server.stats()

    # -- requests -----------------------------------------------------------------------------

    def _converse(self, connection: Connection) -> None:
        limits = self._limits
        channel = welcome(connection.socket, connection.receive, self._key)
        connection.is_trusted = True
        while not self._server.stopping.is_set():
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

    def _tell(self, connection: Connection, channel: Channel, ask: Ask) -> None:
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
        self._server.count("requests")  # before the client can have all of it
        self._server.count("sent_bytes", payload.nbytes)
        connection.wait("slow_reader", self._limits.send_s)
        channel.send(Told(refusal, payload.nbytes, xxhash.xxh3_64_intdigest(payload)))
        for start in range(0, payload.nbytes, _SLICE_BYTES):
            connection.wait("slow_reader", self._limits.send_s)
            connection.socket.sendall(payload[start : start + _SLICE_BYTES])

    def _answer(self, connection: Connection, channel: Channel, files: "_Files") -> None:
        reply = files.check()
        sock = connection.socket
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        channel.send(reply)
        self._server.count("requests")
        if reply.is_good and files.request.ranges:
            for index, offset, nbytes in files.request.ranges:
                self._send_range(connection, files.descriptors[index], offset, nbytes)
            self._server.count("sent_bytes", sum(r[2] for r in files.request.ranges))
            channel.send(Trailer(files.stale()))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)

    def _send_range(self, connection: Connection, file: int, offset: int, nbytes: int) -> None:
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
