"""What a mirror has received of a version that is not whole: a log of chunks that survives it.

    header: length, which offer (msgpack), xxh3       record: MAGIC, number, nbytes, xxh3, bytes

Records are appended whole. A log that was torn, cut or damaged anywhere loses the records from
there on and no more: each is hashed when the log is opened, and again when it is read.
"""

import fcntl
import os
import struct
import threading
from pathlib import Path

import msgspec
import xxhash

from relax_hpc.dcs.delta import HEAD_BYTES
from relax_hpc.dcs.store import VersionId
from relax_hpc.errors import WeightSyncError

_RECORD = struct.Struct("<4sIQQ")
_MAGIC = b"CHNK"
_HEADER = struct.Struct("<8sIQ")
_FILE_MAGIC = b"RLXSPL01"
_MAX_HEADER_BYTES = 4096


class SpoolKey(msgspec.Struct, frozen=True, array_like=True):
    """The offer that chunks belong to: those of another one are of no use."""

    version: VersionId
    digest: int
    base: VersionId | None
    base_digest: int
    chunk_bytes: int
    num_chunks: int


class Spool:
    """Chunks of one offer. `add` may be called by several threads.

    Args:
        folder: for the log and its lock; it exists.

    Raises:
        WeightSyncError: another process has this spool.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "chunks"
        self._lock_file = _lock(folder)
        self._lock = threading.Lock()
        self._file = -1
        self._end = 0
        self._records: dict[int, tuple[int, int, int]] = {}
        self.key: SpoolKey | None = None
        self.nbytes = 0
        """Encoded bytes that it holds."""

    def load(self) -> SpoolKey | None:
        """Read what an earlier mirror left; returns the offer that it belongs to."""
        self.close()
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        size = os.fstat(self._file).st_size
        self.key = self._read_header()
        if self.key is None:
            return None
        while self._end + _RECORD.size <= size and self._load_record(self.key, size):
            pass
        os.ftruncate(self._file, self._end)
        return self.key

    def begin(self, key: SpoolKey) -> None:
        """Start anew for an offer."""
        self.close()
        body = msgspec.msgpack.encode(key)
        data = _HEADER.pack(_FILE_MAGIC, len(body), xxhash.xxh3_64_intdigest(body)) + body
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._file = os.open(self._path, flags, 0o600)
        except OSError as err:
            raise WeightSyncError(f"cannot write {self._path}: {err.strerror}") from err
        self._write(data)
        self.key = key

    def add(self, number: int, checksum: int, data: bytes | bytearray) -> None:
        """Append a chunk; one that is there already is ignored.

        Raises:
            WeightSyncError: the disk is full; nothing of the chunk stays.
        """
        head = _RECORD.pack(_MAGIC, number, len(data), checksum)
        with self._lock:
            if number in self._records:
                return
            at = self._end + len(head)
            self._write(head, data)
            self._records[number] = at, len(data), checksum
            self.nbytes += len(data)

    def missing(self) -> list[int]:
        """Chunks of the offer that have not come."""
        count = 0 if self.key is None else self.key.num_chunks
        with self._lock:
            return [number for number in range(count) if number not in self._records]

    def read(self, number: int) -> bytes:
        """Return a chunk.

        Raises:
            WeightSyncError: it is not what was added.
        """
        at, nbytes, checksum = self._records[number]
        data = os.pread(self._file, nbytes, at)
        if len(data) != nbytes or xxhash.xxh3_64_intdigest(data) != checksum:
            raise WeightSyncError(
                f"weight chunk {number} in {self._path} is damaged ({len(data)} of {nbytes} bytes "
                "read): the disk changed it; it is fetched again"
            )
        return data

    def discard(self) -> None:
        """Remove the log."""
        self.close()
        self._path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Close the log and let another process have it."""
        self.close()
        if self._lock_file >= 0:
            os.close(self._lock_file)
        self._lock_file = -1

    def close(self) -> None:
        """Close the log; what it holds stays."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._end, self.nbytes = -1, 0, 0
        self._records.clear()
        self.key = None

    def _write(self, *parts: bytes | bytearray) -> None:
        """Append at the end, whole or not at all."""
        at = self._end
        try:
            for part in parts:
                view = memoryview(part)
                while len(view):
                    count = os.pwrite(self._file, view, at)
                    view, at = view[count:], at + count
        except OSError as err:
            os.ftruncate(self._file, self._end)
            raise WeightSyncError(
                f"{self._path}: {err.strerror}, {self.nbytes} bytes of chunks are in it; choose a "
                "spool folder with room for a whole model"
            ) from err
        self._end = at

    def _read_header(self) -> SpoolKey | None:
        head = os.pread(self._file, _HEADER.size, 0)
        if len(head) < _HEADER.size:
            return None
        magic, nbytes, checksum = _HEADER.unpack(head)
        if magic != _FILE_MAGIC or nbytes > _MAX_HEADER_BYTES:
            return None
        body = os.pread(self._file, nbytes, _HEADER.size)
        if len(body) != nbytes or xxhash.xxh3_64_intdigest(body) != checksum:
            return None
        self._end = _HEADER.size + nbytes
        try:
            return msgspec.msgpack.decode(body, type=SpoolKey)
        except msgspec.DecodeError:
            return None

    def _load_record(self, key: SpoolKey, size: int) -> bool:
        """Take the record at the end of what is good; False: there is no further one."""
        head = os.pread(self._file, _RECORD.size, self._end)
        magic, number, nbytes, checksum = _RECORD.unpack(head)
        at = self._end + _RECORD.size
        # The longest chunk is one of 1-byte tensors, each with a head of its own.
        is_possible = nbytes <= min(size - at, (HEAD_BYTES + 1) * key.chunk_bytes)
        if magic != _MAGIC or number >= key.num_chunks or not is_possible:
            return False
        data = os.pread(self._file, nbytes, at)
        if len(data) != nbytes or xxhash.xxh3_64_intdigest(data) != checksum:
            return False
        if number not in self._records:
            self._records[number] = at, nbytes, checksum
            self.nbytes += nbytes
        self._end = at + nbytes
        return True


def _lock(folder: Path) -> int:
    """Hold the folder (flock) until the process ends, however it does."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise WeightSyncError(
            f"{folder} is in use by another mirror: end it, or choose another spool folder"
        ) from None
    return descriptor
