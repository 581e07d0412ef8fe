"""Spill: blocks that found no room in shared memory, in append-only segment files.

    FOLDER/ARENA.sK          stamp (4096 bytes, who writes it), then blocks at multiples of 64 bytes
    FOLDER/ARENA.sK.index    one line per block: `CHECKSUM JSON`, as in control/journal.py

A block is appended, synced, then named in the index, synced again, and only then its reference is
handed out: after a kill the index names exactly what can be read, and what follows the last named
block is a torn tail that is cut. Blocks are never overwritten, so a reference cannot be taken for
another one; a segment is removed as a whole when all its blocks were freed.

One writer (the producer); readers use `pread` on a shared file system, or ask the node agent.
"""

import contextlib
import dataclasses
import errno
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import xxhash

from relax_hpc.control.journal import encode_line, raw_lines
from relax_hpc.errors import ArenaFullError, ControlError, StaleEpochError, TransferError
from relax_hpc.log import kv
from relax_hpc.transfer.block import ALIGN, PREFIX_BYTES, check_commit
from relax_hpc.transfer.wire import BlockRef

logger = logging.getLogger(__name__)

STAMP_BYTES = 4096
TIER = "spill"
_INDEX = ".index"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

Image: TypeAlias = "bytes | bytearray | memoryview"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpillLimits:
    """How much of the disk a producer may take."""

    max_bytes: int
    """Size of all segments together: freed blocks count until their segment is removed."""
    segment_bytes: int = 256 << 20
    """Start a new segment beyond this, or beyond a quarter of max_bytes if that is less."""
    min_free_bytes: int = 64 << 20
    """Left free on the file system for journals, logs and checkpoints."""


class _IndexLine(msgspec.Struct, frozen=True, array_like=True):
    offset: int
    nbytes: int
    epoch: int
    digest: int
    """Of the block's header, as in BlockRef."""
    image_digest: int
    """xxh3-64 of the whole block, to tell a torn one when the segment is recovered."""


@dataclasses.dataclass(slots=True)
class _Segment:
    name: str
    data: int = -1
    """Descriptors; -1 when nothing is appended any more."""
    index: int = -1
    end: int = STAMP_BYTES
    index_end: int = 0
    live: dict[int, int] = dataclasses.field(default_factory=dict)
    """Epoch by offset."""

    def close(self) -> None:
        for descriptor in (self.data, self.index):
            if descriptor >= 0:
                os.close(descriptor)
        self.data = self.index = -1


class SpillWriter:
    """The segments of one arena. Thread-safe; a call that returned survives a kill."""

    def __init__(
        self, folder: Path, node: str, arena: str, limits: SpillLimits, stamp: bytes = b""
    ) -> None:
        """Adopt what an earlier writer of the same arena left.

        Args:
            folder: of this node, mode 0700; made if it is missing.
            node: name of the node, for references.
            arena: name of the producer's arena, unique in the run.
            limits: budget.
            stamp: says who writes, at most STAMP_BYTES: the agent reads it to find orphans.
        """
        assert len(stamp) <= STAMP_BYTES, len(stamp)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._node, self._arena = folder, node, arena
        self._limits, self._stamp = limits, stamp
        self._segment_bytes = min(limits.segment_bytes, max(limits.max_bytes // 4, STAMP_BYTES))
        self._lock = threading.Lock()
        self._segments: dict[str, _Segment] = {}
        self._current: _Segment | None = None
        self._num_segments = 0
        for name, refs in recover_segments(folder, node, arena).items():
            self._adopt(name, refs)

    @property
    def used_bytes(self) -> int:
        """Size of all segments."""
        with self._lock:
            return self._used()

    @property
    def num_blocks(self) -> int:
        """Blocks that were appended and not freed."""
        with self._lock:
            return sum(len(segment.live) for segment in self._segments.values())

    def append(self, image: Image, *, epoch: int, digest: int) -> BlockRef:
        """Append one block and wait until it is on disk; see `append_many`."""
        return self.append_many([(image, epoch, digest)])[0]

    def append_many(self, blocks: Sequence[tuple[Image, int, int]]) -> list[BlockRef]:
        """Append blocks with one sync for all.

        Args:
            blocks: (image as `write_block` left it, its epoch, its digest).

        Raises:
            ArenaFullError: over the budget, or the disk is full; nothing was left behind.
            TransferError: the disk failed; nothing was left behind.
        """
        with self._lock:
            nbytes = sum(_aligned(len(image)) for image, _, _ in blocks)
            self._check_room(nbytes)
            segment = self._segment_for(nbytes)
            try:
                return self._append(segment, blocks)
            except OSError as err:
                self._undo(segment)
                raise self._failed(err, nbytes) from err

    def free(self, blocks: Sequence[tuple[str, int, int]]) -> int:
        """Give blocks back: (extent, offset, epoch); unknown ones are ignored.

        Returns:
            Bytes of the segments that were removed.
        """
        with self._lock:
            before = self._used()
            touched = set()
            for name, offset, epoch in blocks:
                segment = self._segments.get(name)
                if segment is not None and segment.live.get(offset) == epoch:
                    del segment.live[offset]
                    touched.add(name)
            for name in touched:
                if not self._segments[name].live:
                    self._remove(name)
            return before - self._used()

    def close(self) -> None:
        """Close files; the segments stay, readers may still need them."""
        with self._lock:
            for segment in self._segments.values():
                segment.close()
            self._current = None

    # -- inside -------------------------------------------------------------------------------

    def _adopt(self, name: str, refs: list[BlockRef]) -> None:
        self._num_segments = max(self._num_segments, _number(name))
        if not refs:
            remove_segment(self._folder, name)
            return
        end = (self._folder / name).stat().st_size
        self._segments[name] = _Segment(
            name=name, end=end, live={ref.offset: ref.epoch for ref in refs}
        )

    def _used(self) -> int:
        return sum(segment.end for segment in self._segments.values())

    def _check_room(self, nbytes: int) -> None:
        used, limits = self._used(), self._limits
        if used + nbytes + STAMP_BYTES > limits.max_bytes:
            raise ArenaFullError(
                f"spill of {self._arena} on {self._node} is full: {nbytes} bytes needed, {used} of "
                f"{limits.max_bytes} used in {self._folder}; raise transfer.spill_mb or lower "
                "rollout.groups_per_step or max_staleness"
            )
        usage = os.statvfs(self._folder)
        if usage.f_bavail * usage.f_frsize - nbytes < limits.min_free_bytes:
            raise self._disk_full(nbytes)

    def _disk_full(self, nbytes: int) -> ArenaFullError:
        usage = os.statvfs(self._folder)
        return ArenaFullError(
            f"spill of {self._arena} on {self._node}: {nbytes} bytes needed, "
            f"{usage.f_bavail * usage.f_frsize} are free in {self._folder}, of which "
            f"{self._limits.min_free_bytes} stay free: free space or set transfer.spill_folder"
        )

    def _segment_for(self, nbytes: int) -> _Segment:
        current = self._current
        if current is not None and current.end + nbytes <= self._segment_bytes:
            return current
        if current is not None:
            current.close()
            self._current = None
        try:
            self._current = self._start_segment()
        except OSError as err:
            remove_segment(self._folder, self._segment_name())
            raise self._failed(err, nbytes) from err
        self._segments[self._current.name] = self._current
        return self._current

    def _segment_name(self) -> str:
        return f"{self._arena}.s{self._num_segments}"

    def _start_segment(self) -> _Segment:
        self._num_segments += 1
        segment = _Segment(self._segment_name())
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            segment.data = os.open(self._folder / segment.name, flags, 0o600)
            segment.index = os.open(self._folder / (segment.name + _INDEX), flags, 0o600)
            _write_at(segment.data, self._stamp.ljust(STAMP_BYTES, b"\0"), 0)
            _sync_folder(self._folder)
        except OSError:
            segment.close()
            raise
        return segment

    def _append(
        self, segment: _Segment, blocks: Sequence[tuple[Image, int, int]]
    ) -> list[BlockRef]:
        refs, lines, end = [], [], segment.end
        for image, epoch, digest in blocks:
            # Room first: pwrite into a full disk may leave half a block, fallocate takes nothing.
            os.posix_fallocate(segment.data, end, _aligned(len(image)))
            _write_at(segment.data, image, end)
            check = xxhash.xxh3_64_intdigest(image)
            lines.append(encode_line(_IndexLine(end, len(image), epoch, digest, check)))
            refs.append(
                BlockRef(self._node, segment.name, end, len(image), epoch, digest, tier=TIER)
            )
            end += _aligned(len(image))
        os.fdatasync(segment.data)
        index = b"".join(lines)
        _write_at(segment.index, index, segment.index_end)
        os.fdatasync(segment.index)
        segment.end, segment.index_end = end, segment.index_end + len(index)
        segment.live.update((ref.offset, ref.epoch) for ref in refs)
        return refs

    def _undo(self, segment: _Segment) -> None:
        """Cut off what a failed append left; if that fails too, write there no more."""
        try:
            os.ftruncate(segment.index, segment.index_end)
            os.ftruncate(segment.data, segment.end)
        except OSError as err:
            logger.warning("segment given up %s", kv(segment=segment.name, note=str(err)))
            segment.close()
            self._current = None
        if not segment.live:
            self._remove(segment.name)

    def _failed(self, err: OSError, nbytes: int) -> TransferError:
        if err.errno in _NO_ROOM:
            return self._disk_full(nbytes)
        return TransferError(
            f"cannot spill {nbytes} bytes of {self._arena} to {self._folder}: {err.strerror}; look "
            "at that file system, or set transfer.spill_folder or transfer.spill_mb = 0"
        )

    def _remove(self, name: str) -> None:
        segment = self._segments.pop(name)
        segment.close()
        if segment is self._current:
            self._current = None
        remove_segment(self._folder, name)


# ---------------------------------------------------------------------------------------------
# Reading and recovery
# ---------------------------------------------------------------------------------------------


def read_spilled(folder: Path, ref: BlockRef, into: memoryview | None = None) -> memoryview:
    """Read one block; the caller opens it with `open_block(..., verify=True)`.

    Args:
        folder: spill folder of the reference's node, on a file system that this node sees.
        ref: tier spill.
        into: at least `ref.nbytes` writable bytes; None: new memory.

    Raises:
        StaleEpochError: the block was freed and its segment removed.
        TransferError: the segment is shorter than the index said, or cannot be read.
    """
    where = f"spill in {folder}"
    if "/" in ref.extent or ref.extent.startswith("."):
        raise TransferError(f"block {ref.extent!r}+{ref.offset} ({where}): no such name")
    view = memoryview(bytearray(ref.nbytes)) if into is None else into[: ref.nbytes]
    try:
        descriptor = os.open(folder / ref.extent, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as err:
        raise StaleEpochError(
            f"block {ref.extent}+{ref.offset} of node {ref.node} ({where}) is gone: its segment "
            "was removed after all its blocks were freed"
        ) from err
    except OSError as err:
        raise TransferError(f"{folder / ref.extent} cannot be opened: {err.strerror}") from err
    try:
        num_read = _read_at(descriptor, view, ref.offset)
    except OSError as err:
        raise TransferError(f"{folder / ref.extent} cannot be read: {err.strerror}") from err
    finally:
        os.close(descriptor)
    check_commit(view[:num_read], ref, where)
    return view


def recover_segments(folder: Path, node: str, arena: str = "") -> dict[str, list[BlockRef]]:
    """Cut the torn tails of segments whose writer is dead, and tell what they hold.

    Args:
        folder: spill folder of one node.
        node: name of that node.
        arena: only this one; empty: all.

    Returns:
        References by segment name, in the order of appending: all that was acknowledged. A block
        that is named in the index but damaged on disk is left out and logged.
    """
    found = {}
    pattern = f"{arena}.s*{_INDEX}" if arena else f"*.s*{_INDEX}"
    for path in sorted(folder.glob(pattern)):
        name = path.name.removesuffix(_INDEX)
        if _number(name) >= 0:
            found[name] = _recover(folder, node, name)
    return found


def remove_segment(folder: Path, name: str) -> None:
    """Remove a segment and its index; missing files are fine. The index goes last."""
    (folder / name).unlink(missing_ok=True)
    (folder / (name + _INDEX)).unlink(missing_ok=True)


def _recover(folder: Path, node: str, name: str) -> list[BlockRef]:
    path, index = folder / name, folder / (name + _INDEX)
    if not path.exists():
        index.unlink()
        return []
    lines, is_damaged = _read_index(index)
    refs, end = [], STAMP_BYTES
    with path.open("r+b") as file:
        for line in lines:
            ref = BlockRef(node, name, line.offset, line.nbytes, line.epoch, line.digest, tier=TIER)
            end = max(end, line.offset + _aligned(line.nbytes))
            if _is_intact(file.fileno(), line):
                refs.append(ref)
            else:
                logger.error("spilled block is damaged %s", kv(segment=path, offset=line.offset))
        size = os.fstat(file.fileno()).st_size
        if size > end and not is_damaged:
            logger.warning("torn tail cut %s", kv(segment=path, bytes=size - end))
            os.ftruncate(file.fileno(), end)
    return refs


def _read_index(path: Path) -> tuple[list[_IndexLine], bool]:
    """Return the intact lines and cut a torn last one; True: damaged before that, nothing cut."""
    lines, good = [], 0
    try:
        for text in raw_lines(path):
            line = msgspec.json.decode(text, type=_IndexLine)
            lines.append(line)
            good += len(encode_line(line))
    except (ControlError, msgspec.DecodeError) as err:
        logger.error("spill index is damaged %s", kv(index=path, note=str(err)))
        return lines, True
    if path.stat().st_size > good:
        os.truncate(path, good)
    return lines, False


def _is_intact(descriptor: int, line: _IndexLine) -> bool:
    data = bytearray(line.nbytes)
    num_read = _read_at(descriptor, memoryview(data), line.offset)
    is_whole = num_read == line.nbytes >= PREFIX_BYTES
    return is_whole and xxhash.xxh3_64_intdigest(data) == line.image_digest


def _number(name: str) -> int:
    """K of ARENA.sK; -1 for other names."""
    digits = name.rpartition(".s")[2]
    return int(digits) if digits.isdigit() else -1


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _write_at(descriptor: int, data: Image, offset: int) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill `view`; returns fewer bytes than that only at the end of the file."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot, and need not
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
