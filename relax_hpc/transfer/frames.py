"""Frames of the data plane: both ends prove the run's key, then each message carries a MAC.

client                                   server
  MAGIC, nonce_c          ----------->
                          <-----------     nonce_s, HMAC(key, "server" nonce_c nonce_s)
  HMAC(key, "client" ..)  ----------->
  frame: Request          ----------->
                          <-----------     frame: Reply, payload bytes, frame: Trailer
  frame: Ask              ----------->
                          <-----------     frame: Told, payload bytes

A frame is length (4 bytes), MAC (32), body (msgpack). Its MAC covers direction and number, so that
nothing can be replayed or reordered. Payload itself is sent from the page cache and carries no
MAC: its checksums are in the block's header, whose digest came over the encrypted control plane,
or in the frame Told.
"""

import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from relax_hpc.errors import TransferError
from relax_hpc.runfolder import RunFolder

MAGIC = b"RLXDATA2"
PAD = 64
"""Ranges are asked for in multiples of this, so that all blocks of a read stay aligned. The last
one of a file may end less than this behind it: zeros are sent."""
MAX_REQUEST_BYTES = 1 << 20
MAX_REPLY_BYTES = 1 << 20
MAX_TOLD_BYTES = 16 << 20
"""Payload of one answer of a service: it lies in the server's memory while it is sent."""
MAX_RANGES = 20_000
"""Ranges and checks of one request; as msgpack they stay below MAX_REQUEST_BYTES."""
_NONCE_BYTES = 32
_MAC_BYTES = 32
_HEAD = struct.Struct("<I")
_KEY_CONTEXT = b"relax_hpc data plane, version 1"


class FrameError(TransferError):
    """The peer does not speak this protocol; `reason` is a word to count it by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class WrongKeyError(FrameError):
    """The peer does not know this run's key."""


class PeerClosedError(ConnectionError):
    """The peer ended the connection; `seen` bytes of the present message had come."""

    def __init__(self, what: str, seen: int) -> None:
        super().__init__(f"the peer closed the connection ({what}, {seen} bytes of it came)")
        self.seen = seen


class Request(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Ranges of files, and the epochs that blocks in them must have before and after the read."""

    files: list[tuple[str, str]]
    """(area, name)"""
    ranges: list[tuple[int, int, int]]
    """(index into files, offset, nbytes). None: only sizes and checks are asked for."""
    checks: list[tuple[int, int, int]]
    """(index into files, offset of the block, epoch)"""


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """What comes next: all ranges one after the other and a trailer, or nothing if one is bad."""

    sizes: list[int]
    """Of the files in bytes; -1: not there."""
    stale: list[int]
    """Checks that found another epoch."""
    outside: list[int]
    """Ranges that do not lie in their file."""

    @property
    def is_good(self) -> bool:
        """Payload follows."""
        return not self.stale and not self.outside and min(self.sizes, default=0) >= 0


class Trailer(msgspec.Struct, frozen=True, array_like=True):
    """After the payload: checks that found another epoch now."""

    stale: list[int]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A question to a service that was registered with the data server."""

    service: str
    body: bytes
    """msgpack; what it says is between the service and who asks."""


class Told(msgspec.Struct, frozen=True, array_like=True):
    """The answer of a service; its payload comes next."""

    refusal: str
    """Why there is no payload, for people; empty: there is."""
    nbytes: int
    checksum: int
    """xxh3-64 of the payload."""


Message = TypeVar("Message", bound=msgspec.Struct)
Receive = Callable[[int, str], bytes]
"""(nbytes, what) -> exactly that many bytes of the socket, or an exception."""


def data_key(folder: RunFolder) -> bytes:
    """Derive the data plane's key from the run's secret keys.

    Raises:
        TransferError: they cannot be read, or others can read them.
    """
    path = folder.secret / "curve.json"
    try:
        data, mode = path.read_bytes(), path.stat().st_mode
    except OSError as err:
        raise TransferError(
            f"cannot read the keys of run {folder.run_id} ({path}: {err.strerror}): only the user "
            "who submitted the run can read its payload"
        ) from err
    if mode & 0o077:
        raise TransferError(f"{path} can be read by others (mode {mode & 0o777:o}): chmod 600 it")
    return hmac.digest(_KEY_CONTEXT, data, "sha256")


class Channel:
    """Signed messages of one connection, from its handshake on. Used by one thread at a time."""

    def __init__(self, sock: socket.socket, receive: Receive, session: bytes, role: bytes) -> None:
        self._socket, self._receive, self._session = sock, receive, session
        self._mine, self._theirs = (b"c", b"s") if role == b"client" else (b"s", b"c")
        self._num_sent = self._num_received = 0

    def send(self, message: msgspec.Struct, flags: int = 0) -> None:
        """Send one frame."""
        body = msgspec.msgpack.encode(message)
        mac = self._mac(self._mine, self._num_sent, body)
        self._num_sent += 1
        self._socket.sendall(_HEAD.pack(len(body)) + mac + body, flags)

    def receive(self, kind: type[Message], max_bytes: int) -> Message:
        """Receive one frame.

        Raises:
            FrameError: too long, not signed by the peer, or not of this kind.
        """
        what = kind.__name__.lower()
        found: Message = self._decode(self._receive_body(what, max_bytes), kind, what)
        return found

    def receive_any_request(self) -> Request | Ask:
        """Receive what a client may send; raises as `receive` does."""
        body = self._receive_body("request", MAX_REQUEST_BYTES)
        found: Request | Ask = self._decode(body, Request | Ask, "request")
        return found

    def _receive_body(self, what: str, max_bytes: int) -> bytes:
        head = self._receive(_HEAD.size + _MAC_BYTES, what)
        (size,) = _HEAD.unpack_from(head)
        if size > max_bytes:
            raise FrameError("oversized", f"a {what} of {size} bytes: at most {max_bytes}")
        body = self._receive(size, what)
        expected = self._mac(self._theirs, self._num_received, body)
        self._num_received += 1
        if not hmac.compare_digest(head[_HEAD.size :], expected):
            raise FrameError("bad_mac", f"a {what} whose MAC is wrong: changed on the way")
        return body

    @staticmethod
    def _decode(body: bytes, kind: Any, what: str) -> Any:
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.DecodeError as err:
            raise FrameError("bad_request", f"an unreadable {what}: {err}") from err

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._session, direction + number.to_bytes(8, "little") + body, "sha256")


def greet(sock: socket.socket, receive: Receive, key: bytes) -> Channel:
    """Do the client's half of the handshake.

    Raises:
        WrongKeyError: the server does not know the key (it is of another run).
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(MAGIC + nonce)
    answer = receive(_NONCE_BYTES + _MAC_BYTES, "handshake")
    nonces = nonce + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(key, b"server", nonces)):
        raise WrongKeyError("wrong_key", "the server did not prove this run's key")
    sock.sendall(_proof(key, b"client", nonces))
    return Channel(sock, receive, _proof(key, b"session", nonces), b"client")


def welcome(sock: socket.socket, receive: Receive, key: bytes) -> Channel:
    """Do the server's half of the handshake.

    Raises:
        FrameError: the peer is no client of this protocol.
        WrongKeyError: it does not know the key.
    """
    if receive(len(MAGIC), "handshake") != MAGIC:
        raise FrameError("garbage", "the first bytes are not those of a data client")
    nonces = receive(_NONCE_BYTES, "handshake") + secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(nonces[_NONCE_BYTES:] + _proof(key, b"server", nonces))
    if not hmac.compare_digest(receive(_MAC_BYTES, "handshake"), _proof(key, b"client", nonces)):
        raise WrongKeyError("wrong_key", "the client did not prove this run's key")
    return Channel(sock, receive, _proof(key, b"session", nonces), b"server")


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + nonces, "sha256")


def padded(nbytes: int) -> int:
    """Round up to the bytes that a block takes on the wire and in the receive buffer."""
    return -(-nbytes // PAD) * PAD
