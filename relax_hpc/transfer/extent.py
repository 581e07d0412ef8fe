"""Extents: files in a node's shared memory that an arena cuts its blocks from.

A file is reserved with posix_fallocate before anybody writes (a full tmpfs is an error here, not a
SIGBUS at a random store), stamped with its owner, and only then gets its name:

stamp    magic 8 | version 4 | nbytes of the owner 4 | xxh3 of the owner 8 | owner (msgpack)
blocks   from byte 4096 on
name     ARENA.K, with ARENA = {role}{index}.{rank}-{attempt}.{incarnation}-{nonce}
"""

import contextlib
import ctypes
import errno
import mmap
import os
import re
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from relax_hpc.errors import ArenaFullError, StaleEpochError, TransferError
from relax_hpc.runfolder import RunFolder
from relax_hpc.transfer.block import check_commit
from relax_hpc.transfer.owner import Owner, process_start, temporary_name
from relax_hpc.transfer.wire import BlockRef

STAMP_BYTES = 4096
"""Blocks begin here: one page."""

_MAGIC = b"RLXEXT1\n"
_VERSION = 1
_STAMP = struct.Struct("<8sIIQ")
_NAME = re.compile(r"[a-z_]+\d+\.\d+-\d+\.\d+-[0-9a-f]+\.\d+")
_SEGMENT = re.compile(r"[a-z_]+\d+\.\d+-\d+\.\d+-[0-9a-f]+\.s\d+")
_RESERVE_SLICE = 64 << 20
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class ReserveExtent(msgspec.Struct, frozen=True):
    """Ask a node's agent for an extent. Asking twice for one name is harmless."""

    name: str
    owner: Owner
    nbytes: int


def arena_name(owner: Owner) -> str:
    """Return a new name: unique in the run, for the one arena of a process."""
    nonce = os.urandom(4).hex()
    who = f"{owner.role}{owner.index}.{owner.rank}"
    return f"{who}-{owner.attempt}.{owner.incarnation}-{nonce}"


def is_extent_name(name: str) -> bool:
    """True for names that an arena gives; everything else is refused by agents and readers."""
    return _NAME.fullmatch(name) is not None


# ---------------------------------------------------------------------------------------------
# Making
# ---------------------------------------------------------------------------------------------


def make_extent(folder: Path, request: ReserveExtent) -> Path:
    """Reserve memory for an extent, stamp it and give it its name; an equal one is accepted.

    Raises:
        ArenaFullError: no room; nothing is left behind.
        TransferError: the name is not an extent's, or it is taken by something else.
    """
    name, nbytes = request.name, request.nbytes
    if not is_extent_name(name) or nbytes <= STAMP_BYTES:
        raise TransferError(f"cannot reserve extent {name!r} of {nbytes} bytes in {folder}")
    path = folder / name
    if path.exists():
        if read_owner(path) == request.owner and path.stat().st_size == nbytes:
            return path
        raise TransferError(f"extent {path} is there and belongs to another process")
    if nbytes > (free := free_bytes(folder)):  # else it would fill the node before it fails
        raise _no_room(folder, request, f"only {free} bytes")
    pid = os.getpid()
    temporary = folder / temporary_name(pid, process_start(pid), name)
    try:
        _reserve(temporary, nbytes, stamp_of(request.owner))
        temporary.rename(path)
    except OSError as err:
        temporary.unlink(missing_ok=True)
        if err.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
            raise TransferError(f"cannot make extent {path}: {err.strerror}") from err
        raise _no_room(folder, request, f"{err.strerror}; {free_bytes(folder)} bytes") from err
    return path


def _no_room(folder: Path, request: ReserveExtent, seen: str) -> ArenaFullError:
    return ArenaFullError(
        f"shared memory is full: extent {request.name} needs {request.nbytes} bytes ({seen} are "
        f"free in {folder}); lower rollout.groups_per_step, max_staleness or transfer.arena_mb, "
        "or give the node more memory (resources.mem_per_node_gb) or a larger /dev/shm"
    )


def _reserve(path: Path, nbytes: int, stamp: bytes) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for begin in range(0, nbytes, _RESERVE_SLICE):  # allocates and clears the pages
            os.posix_fallocate(descriptor, begin, min(_RESERVE_SLICE, nbytes - begin))
        os.pwrite(descriptor, stamp, 0)
    finally:
        os.close(descriptor)


def stamp_of(owner: Owner) -> bytes:
    """Return what files of an owner begin with; shorter than a page."""
    body = msgspec.msgpack.encode(owner)
    return _STAMP.pack(_MAGIC, _VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body


def read_owner(path: Path) -> Owner | None:
    """Return whose an extent is; None if the file is no intact extent."""
    try:
        with path.open("rb") as file:
            page = file.read(STAMP_BYTES)
        magic, version, nbytes, digest = _STAMP.unpack_from(page)
        body = page[_STAMP.size : _STAMP.size + nbytes]
        if (magic, version) != (_MAGIC, _VERSION) or xxhash.xxh3_64_intdigest(body) != digest:
            return None
        return msgspec.msgpack.decode(body, type=Owner)
    except (OSError, struct.error, msgspec.DecodeError):
        return None


def extents(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder that have an extent's name."""
    with contextlib.suppress(FileNotFoundError):
        yield from (path for path in folder.iterdir() if is_extent_name(path.name))


def segments(folder: Path) -> Iterator[Path]:
    """Yield the spill segments in a folder; they carry the same stamp as extents."""
    with contextlib.suppress(FileNotFoundError):
        yield from (path for path in folder.iterdir() if _SEGMENT.fullmatch(path.name))


def spill_folder(run: RunFolder, node: str, configured: str) -> Path:
    """Return where blocks of a node go when its memory is full.

    Args:
        run: the run.
        node: name of the node.
        configured: `transfer.spill_folder`; other runs may use it, too. Empty: in the run folder.
    """
    if not configured:
        return run.path / "spill" / node
    return Path(configured) / run.shm(node).name


def free_bytes(folder: Path) -> int:
    """Free bytes of the file system that holds `folder`."""
    usage = os.statvfs(folder)
    return usage.f_bavail * usage.f_frsize


# ---------------------------------------------------------------------------------------------
# Mapping
# ---------------------------------------------------------------------------------------------


def map_extent(path: Path, *, writable: bool) -> mmap.mmap:
    """Map a whole extent, shared.

    Raises:
        FileNotFoundError: there is none of that name.
    """
    descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(descriptor, 0, mmap.MAP_SHARED, protection)
    finally:
        os.close(descriptor)


def populate(memory: np.ndarray, begin: int, end: int, *, writable: bool) -> None:
    """Fill this process's page table for bytes `begin` .. `end` (multiples of the page size).

    The pages exist since posix_fallocate, but each process pays a fault for each at first touch:
    seven times the cost of the copy. Lets other Python threads run meanwhile.

    Raises:
        ArenaFullError: the pages are not there (somebody cut the file).
    """
    advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    while _libc.madvise(memory.ctypes.data + begin, end - begin, advice) != 0:
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # Linux < 5.14: touch each page, which maps it writable here
            memory[begin : end : mmap.PAGESIZE].max(initial=0)
            return
        if code not in (errno.EINTR, errno.EAGAIN):
            raise ArenaFullError(f"cannot populate {end - begin} bytes: {os.strerror(code)}")


class ExtentMap:
    """Read-only maps of the extents of this node, one for each extent. Thread-safe.

    Views keep their map alive, so a map is dropped here as soon as its file is gone: memory is
    freed when the last view dies.
    """

    def __init__(self, folder: Path) -> None:
        """Args: folder: SHM/arenas of this node."""
        self._folder = folder
        self._maps: dict[str, memoryview] = {}
        self._lock = threading.Lock()

    def view(self, ref: BlockRef, where: str) -> memoryview:
        """Return the bytes of a committed block.

        Args:
            ref: a block of this node.
            where: who reads, for error messages.

        Raises:
            StaleEpochError: the extent was removed, or the block freed or recycled.
            TransferError: the reference leads out of the extent.
        """
        whole = self._map(ref, where)
        if ref.offset < STAMP_BYTES or ref.nbytes < 0 or ref.offset + ref.nbytes > len(whole):
            raise TransferError(
                f"block {ref.extent}+{ref.offset} of node {ref.node} ({where}): {ref.nbytes} bytes "
                f"there are not inside the extent of {len(whole)}"
            )
        view = whole[ref.offset : ref.offset + ref.nbytes]
        check_commit(view, ref, where)
        return view

    def trim(self) -> int:
        """Drop the maps of removed extents; done by itself whenever a new one is mapped."""
        with self._lock:
            gone = [name for name in self._maps if not (self._folder / name).exists()]
            for name in gone:
                del self._maps[name]
        return len(gone)

    def __len__(self) -> int:
        return len(self._maps)

    def _map(self, ref: BlockRef, where: str) -> memoryview:
        whole = self._maps.get(ref.extent)
        if whole is not None:
            return whole
        self.trim()
        if not is_extent_name(ref.extent):
            raise TransferError(f"{ref.extent!r} of node {ref.node} ({where}) is no extent's name")
        try:
            whole = memoryview(map_extent(self._folder / ref.extent, writable=False))
        except FileNotFoundError as err:
            raise StaleEpochError(
                f"extent {ref.extent} of node {ref.node} ({where}) is not in {self._folder}: its "
                "producer is dead and nothing referenced it, or the node was cleaned"
            ) from err
        except (OSError, ValueError) as err:
            raise TransferError(f"cannot map {self._folder / ref.extent} ({where}): {err}") from err
        with self._lock:
            return self._maps.setdefault(ref.extent, whole)
