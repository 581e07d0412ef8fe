"""What travels between the clusters, and the key that both sides share.

mirror                                              source
  handshake of transfer/frames.py, with the mirrors' key, on every connection
  Ask(open=Open(have, ..))        ----------->
                                  <-----------      Offer: a version, and against which base
  Ask(chunk=Wanted(number, ..))   ----------->      as many unanswered ones as the mirror likes
                                  <-----------      Chunk, then its bytes

`have` is the acknowledgement: the whole, verified version that the mirror serves. The source keeps
no state of a mirror. Each frame carries a MAC over its direction and number, and a Chunk the
SHA-256 of its bytes, so that what was changed, dropped, repeated or reordered ends the connection.
Nothing is encrypted.
"""

import hmac
import os
import secrets
import stat
from pathlib import Path

import msgspec

from relax_hpc.dcs.mirror_chunks import Content
from relax_hpc.dcs.store import VersionId
from relax_hpc.errors import ConfigError
from relax_hpc.runfolder import write_secret

MAX_ASK_BYTES = 4096
MAX_OFFER_BYTES = 64 << 20
"""Specs and checksums of 30,000 tensors take 3 MB."""
MAX_CHUNK_HEAD_BYTES = 4096
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 4096, 16 << 20
_KEY_BYTES = 32
_KEY_CONTEXT = b"relax_hpc weights across clusters, version 1"


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A version that is whole and verified at the mirror."""

    version: VersionId
    digest: int
    """Of its `Content`."""


class Open(msgspec.Struct, frozen=True, array_like=True):
    """Ask for a version newer than `newer_than`."""

    have: Held | None
    """What the mirror can use as a base."""
    newer_than: VersionId | None
    want: VersionId | None
    """One of which the mirror has a part already: preferred while the source has it."""
    wait_s: float
    """How long to wait for one."""


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """Ask for a chunk of a version that was offered."""

    number: int
    version: VersionId
    base: VersionId | None


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """One of the two."""

    open: Open | None = None
    chunk: Wanted | None = None


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What the mirror can fetch; no version: there is none yet, ask again."""

    version: VersionId | None = None
    base: VersionId | None = None
    """The mirror's `have`; None: the version comes as a whole."""
    chunk_bytes: int = 0
    content: Content | None = None
    note: str = ""
    """Why there is no version, or no base."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """The head of a chunk; `nbytes` encoded bytes follow."""

    number: int
    nbytes: int
    """-1: the source has that version, or its base, no more; open again."""
    checksum: int = 0
    """xxh3-64 of the bytes: for the mirror's memory and disk."""
    sha256: bytes = b""
    """For the way."""


def create_mirror_key(path: Path) -> None:
    """Write a new key, mode 0600. Copy it to the other cluster by a way that others cannot read."""
    if path.exists():
        raise ConfigError(f"{path} exists: a key is not overwritten")
    write_secret(path, secrets.token_hex(_KEY_BYTES) + "\n")


def load_mirror_key(path: Path) -> bytes:
    """Read a key file and derive the mirrors' key from it.

    Raises:
        ConfigError: it is not there, not a file of this user that only he can read, or too short.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as err:
        raise ConfigError(f"cannot read the mirrors' key {path}: {err.strerror}") from err
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
            raise ConfigError(f"the mirrors' key {path} is not a file of user {os.getuid()}")
        if info.st_mode & 0o077:
            mode = info.st_mode & 0o777
            raise ConfigError(f"{path} can be read by others (mode {mode:o}): chmod 600 it")
        secret = os.read(descriptor, 4096).strip()
    finally:
        os.close(descriptor)
    if len(secret) < _KEY_BYTES:
        raise ConfigError(
            f"the mirrors' key {path} has {len(secret)} bytes: at least {_KEY_BYTES}; make one "
            "with `python -m relax_hpc.steps.mirror key FILE`"
        )
    return hmac.digest(_KEY_CONTEXT, secret, "sha256")
