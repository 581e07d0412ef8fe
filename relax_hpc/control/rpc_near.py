"""RPC between processes of one node: the messages of rpc_message over a UNIX socket.

client                                  server
  connect @NAME   -------------------->   accept: a process of this user, or nothing
  lengths, head, body  --------------->   read in the server's loop
  lengths, head, body  <---------------   written there; what does not fit waits for the client

One wake-up each way: a call takes 110 us, where TCP, CURVE and libzmq take 340. The name is
an HMAC of the run's client key and the server's nonce, so that only who has the keys finds it, and
both ends ask the kernel which user the other one is. Abstract names belong to a network namespace
and vanish with their process: what cannot be connected, or breaks, goes on by TCP.
"""

import asyncio
import hmac
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable

from relax_hpc.control.keys import Keys
from relax_hpc.control.rpc_message import LinkLostError
from relax_hpc.log import kv

logger = logging.getLogger(__name__)

_LENGTHS = struct.Struct("<II")
_CREDENTIALS = struct.Struct("iII")
"""pid, uid, gid: unix(7), SO_PEERCRED."""
_TIMEVAL = struct.Struct("@ll")
_READ_BYTES = 256 << 10
_MAX_UNREAD_BYTES = 64 << 20
"""Replies that a client did not read; beyond it the connection ends, and it asks again."""
_BACKLOG = 128
_ACCEPT_AGAIN_S = 1.0


def near_name(keys: Keys, nonce: str) -> bytes:
    """Return the abstract name of a server's socket; `nonce` is of its address."""
    digest = hmac.digest(keys.client_secret.encode(), nonce.encode(), "sha256")
    return b"\0relax-rpc-" + digest.hex()[:40].encode()


class NearLink:
    """A client's connection. Used by one thread at a time."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._unsent = bytearray()
        self._received = bytearray()
        self._wait_ms = -1

    @classmethod
    def connect(cls, name: bytes) -> "NearLink | None":
        """Connect; None: nobody (or another user) listens here."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connected.setblocking(False)  # a full backlog is no reason to wait: TCP is there
            connected.connect(name)
            connected.setblocking(True)
            if _is_mine(connected):
                return cls(connected)
        except OSError as err:
            logger.debug("no near connection %s", kv(note=err))
        connected.close()
        return None

    def send(self, frames: list[bytes]) -> None:
        """Send a message without waiting; the rest goes out in `receive`.

        Raises:
            LinkLostError: the server is gone.
        """
        head, body = frames
        self._unsent += _LENGTHS.pack(len(head), len(body)) + head + body
        self._push()

    def receive(self, wait_ms: int) -> list[bytes] | None:
        """Wait for a message; None when none came in time.

        Raises:
            LinkLostError: the server is gone.
        """
        deadline = time.monotonic() + wait_ms / 1000
        while self._unsent:
            left_ms = int(1000 * (deadline - time.monotonic()))
            if left_ms <= 0 or not _can_write(self._socket, left_ms):
                return None
            self._push()
        self._set_wait(wait_ms)
        while (message := _cut(self._received)) is None:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:  # SO_RCVTIMEO
                return None
            except OSError as err:
                raise LinkLostError(str(err)) from err
            if not data:
                raise LinkLostError("the server closed the connection")
            self._received += data
        return message

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _push(self) -> None:
        try:
            sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError as err:
            raise LinkLostError(str(err)) from err
        del self._unsent[:sent]

    def _set_wait(self, wait_ms: int) -> None:
        if wait_ms != self._wait_ms:
            value = _TIMEVAL.pack(wait_ms // 1000, wait_ms % 1000 * 1000)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._wait_ms = wait_ms


class NearPeer:
    """A server's end of a connection. Everything in the server's loop."""

    def __init__(self, server: "NearServer", connected: socket.socket) -> None:
        self._server = server
        self._socket = connected
        self._received = bytearray()
        self._unsent = bytearray()

    def answer(self, head: bytes, body: bytes) -> None:
        """Send a message; to a client that is gone, or that reads nothing, it is lost."""
        data = _LENGTHS.pack(len(head), len(body)) + head + body
        if self._unsent:
            if len(self._unsent) > _MAX_UNREAD_BYTES:
                logger.warning("client reads nothing %s", kv(unsent_bytes=len(self._unsent)))
                self.close()
                return
            self._unsent += data
            return
        sent = self._send(data)
        if 0 <= sent < len(data):
            self._unsent += data[sent:]
            self._server.loop.add_writer(self._socket, self._write)

    def read(self) -> None:
        """Take what has come and hand out the messages that are whole."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._received += data
        while _size(self._received) <= self._server.max_bytes:
            message = _cut(self._received)
            if message is None:
                return
            self._server.on_message(self, *message)
        logger.warning("request refused %s", kv(bytes=_size(self._received)))
        self.close()

    def close(self) -> None:
        """End the connection; again: nothing."""
        if self._socket.fileno() >= 0:
            self._server.forget(self)
            self._server.loop.remove_reader(self._socket)
            self._server.loop.remove_writer(self._socket)
            self._socket.close()

    def _send(self, data: bytes | bytearray) -> int:
        """Return how much the kernel took; -1: the client is gone."""
        try:
            return self._socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            self.close()
            return -1

    def _write(self) -> None:
        sent = self._send(self._unsent)
        if sent > 0:
            del self._unsent[:sent]
            if not self._unsent:
                self._server.loop.remove_writer(self._socket)


class NearServer:
    """Accepts connections of this node.

    Args:
        loop: the server's; everything happens there.
        name: from `near_name`.
        on_message: is given (peer, head, body) of each request.
        max_bytes: a larger request ends its connection before memory is taken for it.

    Raises:
        OSError: the name cannot be bound.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: bytes,
        on_message: Callable[[NearPeer, bytes, bytes], None],
        max_bytes: int,
    ) -> None:
        self.loop, self.on_message, self.max_bytes = loop, on_message, max_bytes
        self._peers: set[NearPeer] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.setblocking(False)
            self._socket.bind(name)
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self._listen()

    def forget(self, peer: NearPeer) -> None:
        """The peer's connection ends."""
        self._peers.discard(peer)

    def close(self) -> None:
        """End all connections: their clients look for the next start."""
        self.loop.remove_reader(self._socket)
        self._socket.close()
        for peer in list(self._peers):
            peer.close()

    def _listen(self) -> None:
        if self._socket.fileno() >= 0:
            self.loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            connected, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as err:  # no descriptors: it would be reported in each turn
            logger.warning("no near connections for a while %s", kv(reason=err))
            self.loop.remove_reader(self._socket)
            self.loop.call_later(_ACCEPT_AGAIN_S, self._listen)
            return
        connected.setblocking(False)
        if not _is_mine(connected):
            logger.warning("another user's process was refused")
            connected.close()
            return
        peer = NearPeer(self, connected)
        self._peers.add(peer)
        self.loop.add_reader(connected, peer.read)


def _is_mine(connected: socket.socket) -> bool:
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.geteuid())


def _can_write(connected: socket.socket, wait_ms: int) -> bool:
    poll = select.poll()
    poll.register(connected, select.POLLOUT)
    return bool(poll.poll(wait_ms))


def _size(received: bytearray) -> int:
    """Size of the first message; 0 as long as it is not known."""
    if len(received) < _LENGTHS.size:
        return 0
    return sum(_LENGTHS.unpack_from(received))


def _cut(received: bytearray) -> list[bytes] | None:
    """Take the first message out of what has come: [head, body]; None: it is not whole."""
    if len(received) < _LENGTHS.size:
        return None
    head_bytes, body_bytes = _LENGTHS.unpack_from(received)
    begin = _LENGTHS.size + head_bytes
    end = begin + body_bytes
    if len(received) < end:
        return None
    message = [bytes(received[_LENGTHS.size : begin]), bytes(received[begin:end])]
    del received[:end]
    return message
