"""Weight shards of one node in shared memory: written once, committed by rename, then immutable.

    SHM_FOLDER_OF_THE_NODE/weights/i3-v17/rank-0        a committed shard
                                         /.rank-1.PID   being written, or left by a crash

A shard holds the pieces (boxes) of one publishing rank, one after the other. Who reads what is told
by its manifest, which goes to the coordinator; a file without a manifest there is garbage.
"""

import contextlib
import errno
import logging
import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from relax_hpc.dcs.layout import Box, itemsize
from relax_hpc.errors import WeightSyncError
from relax_hpc.log import kv
from relax_hpc.runfolder import RunFolder
from relax_hpc.transfer.owner import open_shm_folder

_log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes: a cache line, and enough for a view with any dtype
_HASH_BYTES = 8 << 20  # at once: other threads of the agent go on between
_FOLDER = re.compile(r"i(\d+)-v(\d+)")


class VersionId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A published version of the weights; ordered by train incarnation, then by version.

    So after a train restart from checkpoint 40, version 40 of incarnation 3 is newer than version
    45 of incarnation 2: the policy was rolled back.
    """

    incarnation: int
    """Incarnation of the train step that published it."""
    version: int
    """Policy version: number of applied optimizer steps."""

    @property
    def folder_name(self) -> str:
        """Name of its folder in the store."""
        return f"i{self.incarnation}-v{self.version}"

    def __str__(self) -> str:
        return f"version {self.version} (train incarnation {self.incarnation})"


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """One box inside a shard file."""

    box: Box
    dtype: str
    offset: int
    """Bytes from the start of the file; a multiple of 64."""
    nbytes: int
    checksum: int
    """xxh3-64 of the bytes."""


class ShardManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What one publishing rank holds of a version, and where."""

    version: VersionId
    rank: int
    """Shard rank, 0 .. num_shards - 1."""
    node: str
    """Node whose shared memory holds the file."""
    nbytes: int
    """Length of the file."""
    pieces: list[Piece]


class WeightStore:
    """The weight shards of one node of one run.

    Any number of processes of the node may use a store at once: a shard has one writer, and readers
    see whole shards only.
    """

    def __init__(self, folder: RunFolder, node: str) -> None:
        self.node = node
        self.root = folder.shm(node) / "weights"

    def write_shard(
        self, version: VersionId, rank: int, pieces: Iterable[tuple[Box, str, np.ndarray]]
    ) -> ShardManifest:
        """Write one rank's pieces to shared memory and commit them with a rename.

        Args:
            version: The version that these bytes belong to.
            rank: Shard rank of the caller, 0 .. num_shards - 1.
            pieces: (box, dtype name, array) one by one, so that a generator may bring each tensor
                to the host when its turn comes. An array holds exactly the box's elements in C
                order, in any numpy dtype of that size (bfloat16: view it as uint16 or uint8).

        Raises:
            WeightSyncError: wrong size of an array, or /dev/shm is full. Nothing is committed.
            TransferError: somebody else owns the folder in /dev/shm.
        """
        open_shm_folder(self.root.parent)
        open_shm_folder(self.root)
        place = open_shm_folder(self.root / version.folder_name)
        temporary = place / f".rank-{rank}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600)
        try:
            written = [_write_piece(descriptor, offset_box) for offset_box in _with_offsets(pieces)]
            nbytes = os.fstat(descriptor).st_size
            temporary.replace(self.path(version, rank))
        except OSError as err:
            temporary.unlink(missing_ok=True)
            raise _write_error(err, version, rank, self.node, place) from err
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return ShardManifest(
            version=version, rank=rank, node=self.node, nbytes=nbytes, pieces=written
        )

    def path(self, version: VersionId, rank: int) -> Path:
        """Where a committed shard lies."""
        return self.root / version.folder_name / f"rank-{rank}"

    def map_shard(self, manifest: ShardManifest) -> np.ndarray:
        """Map a committed shard of this node read-only, without copying: uint8 [nbytes].

        The mapping stays valid after the file was unlinked. Checksums are the caller's business.

        Raises:
            WeightSyncError: the file is gone, or its length is not the manifest's.
        """
        path = self.path(manifest.version, manifest.rank)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != manifest.nbytes:
                    raise WeightSyncError(
                        f"weight shard {path} of node {self.node} has {size} bytes, its manifest "
                        f"says {manifest.nbytes}; fetch the newest version again"
                    )
                if size == 0:  # a rank without pieces; mmap refuses empty files
                    return np.empty(0, dtype=np.uint8)
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as err:
            raise self._gone(manifest.version, manifest.rank) from err
        return np.frombuffer(mapped, dtype=np.uint8)

    def discard_shard(self, version: VersionId, rank: int) -> None:
        """Unlink a shard of ours that was refused."""
        self.path(version, rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others have shards in it: then it stays
            (self.root / version.folder_name).rmdir()

    def versions(self) -> list[VersionId]:
        """Versions that have a folder here, committed or not, oldest first."""
        if not self.root.is_dir():
            return []
        matches = [_FOLDER.fullmatch(path.name) for path in self.root.iterdir()]
        return sorted(VersionId(int(m[1]), int(m[2])) for m in matches if m is not None)

    def remove(self, version: VersionId) -> None:
        """Unlink all shards of a version here. Readers that mapped one keep their mapping."""
        place = self.root / version.folder_name
        with contextlib.suppress(FileNotFoundError):  # another agent of the node was faster
            for path in place.iterdir():
                path.unlink(missing_ok=True)
            place.rmdir()
        _log.debug("weights removed %s", kv(version=version.folder_name, node=self.node))

    def _gone(self, version: VersionId, rank: int) -> WeightSyncError:
        return WeightSyncError(
            f"weight shard of rank {rank} of {version} is not on node {self.node} (retired, "
            f"or its node was cleaned); fetch the newest version again"
        )


def check_manifest(manifest: ShardManifest) -> None:
    """Refuse a manifest whose pieces do not lie in its file or have the wrong size."""
    for piece in manifest.pieces:
        expected = piece.box.size * itemsize(piece.dtype, piece.box.name)
        inside = piece.offset >= 0 and piece.offset + piece.nbytes <= manifest.nbytes
        if piece.nbytes != expected or not inside:
            raise WeightSyncError(
                f"weight shard of rank {manifest.rank} of {manifest.version}: piece {piece.box} "
                f"({piece.dtype}) has {piece.nbytes} bytes at {piece.offset}, expected {expected} "
                f"within {manifest.nbytes}"
            )


def verify_piece(manifest: ShardManifest, piece: Piece, data: np.ndarray) -> None:
    """Compare one piece's bytes with the checksum of its manifest.

    Args:
        manifest: Of the shard.
        piece: Of the manifest.
        data: All bytes of the shard, uint8 [nbytes].

    Raises:
        WeightSyncError: they differ; names the piece.
    """
    digest, end = xxhash.xxh3_64(), piece.offset + piece.nbytes
    for start in range(piece.offset, end, _HASH_BYTES):
        digest.update(data[start : min(start + _HASH_BYTES, end)].data)
    seen = digest.intdigest()
    if seen != piece.checksum:
        raise WeightSyncError(
            f"weights {piece.box} of {manifest.version} are corrupt: checksum {seen:016x}, "
            f"published {piece.checksum:016x} (shard of rank {manifest.rank}, "
            f"node {manifest.node})"
        )


def _with_offsets(
    pieces: Iterable[tuple[Box, str, np.ndarray]],
) -> Iterable[tuple[int, Box, str, np.ndarray]]:
    offset = 0
    for box, dtype, array in pieces:
        expected = box.size * itemsize(dtype, box.name)
        if array.nbytes != expected:
            raise WeightSyncError(
                f"weights {box} ({dtype}) need {expected} bytes, the array {array.dtype} "
                f"{list(array.shape)} has {array.nbytes}"
            )
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        yield offset, box, dtype, data
        offset += -(-expected // _ALIGNMENT) * _ALIGNMENT


def _write_piece(descriptor: int, item: tuple[int, Box, str, np.ndarray]) -> Piece:
    offset, box, dtype, data = item
    checksum = xxhash.xxh3_64_intdigest(data.data)
    if data.nbytes == 0:
        return Piece(box, dtype, 0, 0, checksum)
    # A full tmpfs must be an error here, not a SIGBUS in some process later.
    os.posix_fallocate(descriptor, offset, data.nbytes)
    view, at = data.data, offset
    while len(view):
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count
    return Piece(box, dtype, offset, data.nbytes, checksum)


def _write_error(
    err: OSError, version: VersionId, rank: int, node: str, place: Path
) -> WeightSyncError:
    free = ""
    if err.errno == errno.ENOSPC:
        stat = os.statvfs(place)
        free = (
            f"; {stat.f_bavail * stat.f_frsize / 1e9:.2f} GB are free in {place.parent}: give the "
            "node more shared memory, or publish a smaller dtype"
        )
    return WeightSyncError(
        f"weight shard of rank {rank} of {version} could not be written on node {node}: {err}{free}"
    )
