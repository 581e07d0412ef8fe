"""What travels between RPC client and server, and the file that tells a service's address."""

from pathlib import Path

import msgspec

from relax_hpc import errors
from relax_hpc.errors import ControlError, RelaxError

PING = "ping"
"""Method that every server answers: its loop turns."""
OK, ERROR = b"ok", b"error"
"""Status frame of a reply."""


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
    """Second frame of a request."""

    method: str
    caller: Caller


class ErrorReply(msgspec.Struct, frozen=True):
    """Body of a reply with status ERROR."""

    kind: str
    message: str


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
