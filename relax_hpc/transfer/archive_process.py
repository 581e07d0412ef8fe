"""The process that writes a producer's trajectory archive, a child of it: see archive.py.

It gets batches of groups on its standard input and answers each on its standard output. It is a
process of its own since a write that fails (disk full, quota, a dead file server) may crash or
hang inside the HDF5 library, and that must not cost the run an engine. It ends when its input
does: also after a kill -9 of the producer it writes what it got and closes its files.

    frame    length of the head (4 bytes) | head (msgpack) | one block per group, end to end
    answer   one JSON line
"""

import itertools
import logging
import os
import signal
import sys
import time
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from relax_hpc.errors import TransferError
from relax_hpc.log import kv, setup_logging
from relax_hpc.records import FinishReason, PromptSlot, Sample
from relax_hpc.transfer.archive_file import (
    SUFFIX,
    FinishedGroup,
    StepFile,
    mend,
    schema_of,
    versions_of,
)
from relax_hpc.transfer.archive_mark import is_marked_open
from relax_hpc.transfer.block import Entry, open_block, plan_block, write_block
from relax_hpc.transfer.wire import BlockRef

logger = logging.getLogger(__name__)

_MAX_OPEN_FILES = 3
"""Groups of older engine versions end late; files of older steps are closed."""
_LENGTH_BYTES = 4
_EPOCH = 1

DISK_FULL = "disk_full"
BAD_FIELDS = "bad_fields"
WRITE_FAILED = "write_failed"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The only argument of the process, as JSON."""

    folder: str
    run_id: str
    role: str
    index: int
    attempt: int
    incarnation: int
    min_free_bytes: int

    @property
    def producer(self) -> str:
        """First part of the names of all files of this engine."""
        return f"{self.role}-{self.index}-"

    @property
    def start(self) -> str:
        """First part of the names of the files of this start of it."""
        return f"{self.producer}{self.attempt}.{self.incarnation}"


class _GroupHead(msgspec.Struct, frozen=True, array_like=True):
    slot: tuple[str, int, int, int]
    samples: list[tuple[int, str]]
    finished_s: float
    nbytes: int
    digest: int


class _Head(msgspec.Struct, frozen=True, array_like=True):
    groups: list[_GroupHead]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a batch."""

    num_written: int = 0
    num_bytes: int = 0
    """Size of the batch."""
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    """Groups by reason."""
    error: str = ""
    is_broken: bool = False
    """HDF5 failed in the middle: this process ends, its file holds what was counted before."""


# ---------------------------------------------------------------------------------------------
# Frames
# ---------------------------------------------------------------------------------------------


def encode_batch(groups: Sequence[FinishedGroup]) -> list[bytes | bytearray]:
    """Render a batch: a head and one block per group.

    Raises:
        TransferError: a field is nothing that a block can hold.
    """
    heads, parts = [], []
    for group in groups:
        slot = group.slot
        plan = plan_block(
            [
                Entry(slot.uid, index, name, value)
                for index, sample in enumerate(group.samples)
                for name, value in sample.fields.items()
            ]
        )
        image = bytearray(plan.nbytes)
        digest = write_block(plan, memoryview(image), _EPOCH)
        heads.append(
            _GroupHead(
                (slot.uid, slot.prompt_index, slot.epoch, slot.deadline_version),
                [(s.num_prompt_tokens, str(s.finish_reason)) for s in group.samples],
                group.finished_s,
                plan.nbytes,
                digest,
            )
        )
        parts.append(image)
    head = msgspec.msgpack.encode(_Head(heads))
    return [len(head).to_bytes(_LENGTH_BYTES, "little") + head, *parts]


def read_batches(file: BinaryIO) -> Iterator[list[FinishedGroup]]:
    """Yield batches until the input ends; a torn last one is left out."""
    while length := file.read(_LENGTH_BYTES):
        size = int.from_bytes(length, "little")
        text = file.read(size)
        if len(text) < size:
            return
        groups = []
        for head in msgspec.msgpack.decode(text, type=_Head).groups:
            image = file.read(head.nbytes)
            if len(image) < head.nbytes:
                return
            groups.append(_decode(head, image))
        yield groups


def _decode(head: _GroupHead, image: bytes) -> FinishedGroup:
    uid, prompt_index, epoch, deadline_version = head.slot
    ref = BlockRef("", uid, 0, head.nbytes, _EPOCH, head.digest)
    rows = open_block(memoryview(image), ref, verify=False, where="archive")
    return FinishedGroup(
        slot=PromptSlot(
            uid=uid, prompt_index=prompt_index, epoch=epoch, deadline_version=deadline_version
        ),
        samples=[
            Sample(
                num_prompt_tokens=num_prompt_tokens,
                finish_reason=FinishReason(reason),
                fields=rows[uid, index],
            )
            for index, (num_prompt_tokens, reason) in enumerate(head.samples)
        ],
        finished_s=head.finished_s,
    )


# ---------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------


class ArchiveWriter:
    """Files by rollout step (engine version at the end of a group)."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._files: dict[int, StepFile] = {}

    def write(self, groups: Sequence[FinishedGroup]) -> Answer:
        """Write a batch; each step's part of it counts as a whole or not at all."""
        nbytes = sum(_num_bytes(group) for group in groups)
        if not self._has_room(nbytes):
            return Answer(dropped={DISK_FULL: len(groups)}, error=self._describe_disk(nbytes))
        by_step: dict[int, list[FinishedGroup]] = {}
        for group in groups:
            step = max(versions_of(group.samples)[1], 0)
            by_step.setdefault(step, []).append(group)
        num_written, dropped, error = 0, 0, ""
        for step, part in by_step.items():
            try:
                self._file(step, part).append(part)
                num_written += len(part)
            except TransferError as err:
                dropped, error = dropped + len(part), str(err)
            except (OSError, RuntimeError) as err:
                _give_up(num_written, len(groups) - num_written - dropped, dropped, str(err))
        self._close_old()
        reasons = {BAD_FIELDS: dropped} if dropped else {}
        return Answer(num_written=num_written, num_bytes=nbytes, dropped=reasons, error=error)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def mend_old(self) -> None:
        """Rewrite what earlier, killed starts of this engine left open, where there is room."""
        for path in sorted(self._folder.glob(f"step_*/.tmp-*-{self._settings.producer}*{SUFFIX}")):
            path.unlink(missing_ok=True)
        for path in sorted(self._folder.glob(f"step_*/{self._settings.producer}*{SUFFIX}")):
            if not is_marked_open(path) or not self._has_room(2 * path.stat().st_size):
                continue
            try:
                logger.info("archive mended %s", kv(file=path, groups=mend(path)))
            except TransferError as err:
                logger.error("archive not mended %s", kv(note=str(err)))

    def _file(self, step: int, groups: Sequence[FinishedGroup]) -> StepFile:
        """The step's file; a new one when groups have fields that the old one lacks."""
        file = self._files.get(step)
        if file is None:
            self._files[step] = file = self._create(step, groups, None)
            return file
        schema = schema_of(groups, file.schema)
        if schema != file.schema:
            self._files.pop(step).close()
            self._files[step] = file = self._create(step, groups, file)
        return file

    def _create(self, step: int, groups: Sequence[FinishedGroup], old: StepFile | None) -> StepFile:
        settings = self._settings
        schema = schema_of(groups, old.schema if old else None)
        folder = self._folder / f"step_{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        names = (f"{settings.start}{'' if k == 1 else f'-{k}'}" for k in itertools.count(1))
        path = next(p for name in names if not (p := folder / f"{name}{SUFFIX}").exists())
        attributes = {
            "run": settings.run_id,
            "role": settings.role,
            "index": settings.index,
            "attempt": settings.attempt,
            "incarnation": settings.incarnation,
            "step": step,
        }
        return StepFile(path, schema, attributes)

    def _close_old(self) -> None:
        while len(self._files) > _MAX_OPEN_FILES:
            self._files.pop(min(self._files)).close()

    def _has_room(self, nbytes: int) -> bool:
        # Twice: chunks are allocated whole, and each data set may begin a new one.
        return _free_bytes(self._folder) - 2 * nbytes >= self._settings.min_free_bytes

    def _describe_disk(self, nbytes: int) -> str:
        return (
            f"{nbytes} bytes to write, {_free_bytes(self._folder)} free in {self._folder}, of "
            f"which {self._settings.min_free_bytes} stay free"
        )


def _give_up(num_written: int, num_failed: int, num_bad: int, error: str) -> typing.NoReturn:
    """End after a failed write, inside its `except`.

    Whatever is freed of it (data sets in the frames of the traceback, the file at exit) writes
    once more, fails, and ends in a segmentation fault (seen with HDF5 2.0 on a full disk).
    """
    dropped = {WRITE_FAILED: num_failed, BAD_FIELDS: num_bad}
    dropped = {reason: count for reason, count in dropped.items() if count}
    _tell(Answer(num_written=num_written, dropped=dropped, error=error, is_broken=True))
    os._exit(1)


def _num_bytes(group: FinishedGroup) -> int:
    return sum(num_bytes(sample.fields) for sample in group.samples)


def num_bytes(value: object) -> int:
    """Size of a field's value, or of a dictionary of fields."""
    if isinstance(value, dict):
        return sum(num_bytes(inner) for inner in value.values())
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, bytes | str) else 8


def _free_bytes(folder: Path) -> int:
    usage = os.statvfs(folder)
    return usage.f_bavail * usage.f_frsize


def main() -> int:
    """Write what comes; returns the exit code."""
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    setup_logging(f"archive-{settings.index}", 0, 0)
    # Slurm sends it to all processes of a step: the producer ends in order, then our input does.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(settings.folder).mkdir(parents=True, exist_ok=True)
    writer = ArchiveWriter(settings)
    writer.mend_old()
    for groups in read_batches(sys.stdin.buffer):
        _tell(writer.write(groups))
    writer.close()
    return 0


def _tell(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    try:
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # the producer was killed: go on to the end of the input
        logger.warning("producer is gone %s", kv(time=time.time()))


if __name__ == "__main__":
    sys.exit(main())
