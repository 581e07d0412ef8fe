"""What travels between RPC client and server, and the file that tells a service's address.

request: [NUMBER HEADER, body]     NUMBER: 8 bytes, of one request of its client
reply:   [NUMBER STATUS, body]     as few frames as possible: each costs both ends 5 us

A reply may be announced: [NUMBER EARLY, body] says what it will be, [NUMBER SAME, digest of body]
that it is that. Between the two the caller may prepare for it, but must not act on it. The digest
tells which one is confirmed when a request was sent twice.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash
import zmq

from relax_hpc import errors
from relax_hpc.errors import ControlError, RelaxError

PING = "ping"
"""Method that every server answers: its loop turns."""
OK, ERROR, EARLY, SAME = b"ok", b"error", b"early", b"same"
"""Status of a reply."""
NUMBER_BYTES = 8
_SNDMORE, _RCVMORE = int(zmq.SNDMORE), int(zmq.RCVMORE)
"""Plain integers: arithmetic on flags of an enum costs more than to send a frame."""


class LinkLostError(ConnectionError):
    """A connection ended; its calls go on over another one."""


class Peer(Protocol):
    """Where replies go."""

    def answer(self, head: bytes, body: bytes) -> None:
        """Send a reply, in the loop; never waits and never fails."""


class Link(Protocol):
    """A client's connection to a service, of either kind."""

    def send(self, frames: list[bytes]) -> None:
        """Send a request. Raises LinkLostError."""

    def receive(self, wait_ms: int) -> list[bytes] | None:
        """Wait for a message; None when none came in time. Raises LinkLostError."""

    def close(self) -> None:
        """Close it."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who sent a request; filled by the client from its Identity."""

    role: str
    index: int
    rank: int
    incarnation: int
    attempt: int


class Empty(msgspec.Struct, frozen=True):
    """A request or reply without content."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Content of RUN/control/SERVICE.addr."""

    address: str
    """tcp://IP:PORT"""
    pid: int
    node: str
    attempt: int
    incarnation: int
    nonce: str = ""
    """Differs between two starts, so that a restart on the same port is seen."""


class Header(msgspec.Struct, frozen=True):
    """Method and caller of a request: the same bytes in each of a client's calls of a method."""

    method: str
    caller: Caller


class ErrorReply(msgspec.Struct, frozen=True):
    """Body of a reply with status ERROR."""

    kind: str
    message: str


def send_frames(socket: "zmq.Socket[bytes]", frames: Sequence[bytes], flags: int = 0) -> None:
    """Do what `Socket.send_multipart` does, in a third of its time."""
    for frame in frames[:-1]:
        socket.send(frame, flags | _SNDMORE)
    socket.send(frames[-1], flags)


def receive_frames(socket: "zmq.Socket[bytes]", flags: int = 0) -> list[bytes]:
    """Do what `Socket.recv_multipart` does."""
    frames = [socket.recv(flags)]
    while socket.getsockopt(_RCVMORE):
        frames.append(socket.recv(flags))
    return frames


def digest_of(body: bytes) -> bytes:
    """Digest by which an early reply is confirmed."""
    return xxhash.xxh3_128_digest(body)


def encode_error(err: Exception, service: str) -> bytes:
    """Encode what a caller must get in any case: names of files may be no valid Unicode."""
    kind, message = type(err).__name__, str(err)
    if not isinstance(err, RelaxError):
        kind, message = "ControlError", f"service {service}: internal error {err!r}, see its log"
    text = message.encode(errors="backslashreplace").decode()
    return msgspec.msgpack.encode(ErrorReply(kind, text))


def typed_error(reply: ErrorReply) -> RelaxError:
    """Return the error that a handler raised, by class name; unknown ones become ControlErrors."""
    kind = getattr(errors, reply.kind, None)
    if isinstance(kind, type) and issubclass(kind, RelaxError):
        return kind(reply.message)
    return ControlError(f"{reply.kind}: {reply.message}")


def read_address(path: Path) -> Address | None:
    """Read a service's address file; None when there is none.

    Raises:
        ControlError: it cannot be read or decoded.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Address)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as err:
        raise ControlError(f"cannot read service address {path}: {err}") from err
