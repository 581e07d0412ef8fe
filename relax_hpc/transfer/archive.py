"""The trajectory archive: every group that is put also goes to RUN/trajectories, as HDF5.

    RUN/trajectories/step_NNNNNN/ROLE-INDEX-ATTEMPT.INCARNATION.h5   one per rollout step (engine
                                    version at the end of the group) and start of an engine
    RUN/trajectories/trained.jsonl  which groups each train step consumed, in order

    rollout loop --offer--> bounded list --thread--> pipe --> archive_process.py --> HDF5 (SWMR)

It may never hurt the run: `offer` does not wait, what finds no room is dropped and counted, and
HDF5 lives in a child process, since it may crash or hang when a disk is full. The files are read
with h5py or h5dump while the run lives and after a kill (archive_file.py says how), and are put
instead of generated groups by `rollout.replay`.
"""

import collections
import contextlib
import dataclasses
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from relax_hpc.control.identity import Identity
from relax_hpc.control.journal import Journal
from relax_hpc.errors import ControlError, TransferError
from relax_hpc.log import kv
from relax_hpc.records import PromptSlot, Sample
from relax_hpc.transfer.archive_file import SUFFIX, ArchivedGroup, FinishedGroup, StepReader
from relax_hpc.transfer.archive_process import BAD_FIELDS, Answer, Settings, encode_batch, num_bytes

logger = logging.getLogger(__name__)

QUEUE_FULL = "queue_full"
WRITER_DIED = "writer_died"
CLOSED = "closed"
_MAX_BATCH_BYTES = 32 << 20
_TELL_S = 30.0
"""Between two lines about drops."""
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 1.0, 60.0
_TRAINED = "trained.jsonl"


@dataclasses.dataclass(frozen=True, slots=True)
class ArchiveStats:
    """Counts of one archive object."""

    num_offered: int
    num_written: int
    written_bytes: int
    pending_bytes: int
    dropped: dict[str, int]
    """Groups by reason."""


class GroupArchive:
    """Hands a producer's finished groups to its archive process. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        producer: Identity,
        *,
        max_bytes: int = 256 << 20,
        min_free_bytes: int = 256 << 20,
    ) -> None:
        """Start nothing yet: the process begins with the first group.

        Args:
            folder: RUN/trajectories; made if it is missing.
            producer: this task.
            max_bytes: groups that wait to be written; more are dropped.
            min_free_bytes: left free on the file system for checkpoints and logs.
        """
        self._settings = Settings(
            folder=str(folder),
            run_id=producer.run.run_id,
            role=producer.role,
            index=producer.index,
            attempt=producer.attempt,
            incarnation=producer.incarnation,
            min_free_bytes=min_free_bytes,
        )
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[FinishedGroup, int]] = collections.deque()
        self._pending_bytes = 0
        self._num_offered = self._num_written = self._written_bytes = 0
        self._dropped: collections.Counter[str] = collections.Counter()
        self._untold: collections.Counter[str] = collections.Counter()
        self._next_told = 0.0
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._process = _Process(self._settings)

    def offer(self, slot: PromptSlot, samples: list[Sample]) -> bool:
        """Archive a group soon. Never blocks; the arrays are not copied: do not change them.

        Returns:
            False: there is no room; the group is not archived, and counted.
        """
        nbytes = sum(num_bytes(sample.fields) for sample in samples)
        group = FinishedGroup(slot=slot, samples=samples, finished_s=time.time())
        with self._changed:
            self._num_offered += 1
            if self._is_closing or self._pending_bytes + nbytes > self._max_bytes:
                self._drop(CLOSED if self._is_closing else QUEUE_FULL, 1)
                return False
            self._waiting.append((group, nbytes))
            self._pending_bytes += nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="archive", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def stats(self) -> ArchiveStats:
        """Count."""
        with self._changed:
            return ArchiveStats(
                self._num_offered,
                self._num_written,
                self._written_bytes,
                self._pending_bytes,
                dict(self._dropped),
            )

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was offered is written or dropped; False: not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending_bytes, timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what waits, close the files; what is not written in time is dropped and counted."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._process.kill()
                self._thread.join(timeout_s)
        with self._changed:
            self._drop(CLOSED, len(self._waiting))
            self._waiting.clear()
            self._pending_bytes = 0
            self._tell_drops(is_last=True)
            logger.info(
                "archive closed %s",
                kv(folder=self._settings.folder, groups=self._num_written,
                   mb=self._written_bytes / 1e6, dropped=dict(self._dropped)),
            )  # fmt: skip

    # -- thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                self._count(self._deliver([group for group, _ in batch]), batch)
            self._process.finish()
        finally:  # should it fail: nobody waits for it, later groups are dropped and counted
            with self._changed:
                self._is_closing = True
                self._pending_bytes = 0
                self._changed.notify_all()

    def _count(self, answer: Answer, batch: list[tuple[FinishedGroup, int]]) -> None:
        with self._changed:
            self._num_written += answer.num_written
            self._written_bytes += answer.num_bytes if answer.num_written else 0
            for reason, count in answer.dropped.items():
                self._drop(reason, count, answer.error)
            self._pending_bytes -= sum(size for _, size in batch)
            self._changed.notify_all()

    def _next_batch(self) -> list[tuple[FinishedGroup, int]]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            batch: list[tuple[FinishedGroup, int]] = []
            nbytes = 0
            while self._waiting and (not batch or nbytes < _MAX_BATCH_BYTES):
                batch.append(self._waiting.popleft())
                nbytes += batch[-1][1]
            return batch

    def _deliver(self, groups: list[FinishedGroup]) -> Answer:
        """Have a batch written; a second time if the process dies of the first (safe: uids)."""
        try:
            parts = encode_batch(groups)
        except (TransferError, TypeError, ValueError) as err:
            if len(groups) == 1:
                return Answer(dropped={BAD_FIELDS: 1}, error=str(err))
            answers = [self._deliver([group]) for group in groups]
            return _sum(answers)
        for _ in range(2):
            answer = self._process.write(parts)
            if answer is not None:
                return answer
        return Answer(dropped={WRITER_DIED: len(groups)}, error="the archive process died")

    # -- counting (under the lock) -------------------------------------------------------------

    def _drop(self, reason: str, count: int, note: str = "") -> None:
        if count:
            self._dropped[reason] += count
            self._untold[reason] += count
            self._tell_drops(note)

    def _tell_drops(self, note: str = "", *, is_last: bool = False) -> None:
        now = time.monotonic()
        if self._untold and (is_last or now >= self._next_told):
            self._next_told = now + _TELL_S
            logger.warning(
                "groups not archived %s",
                kv(**self._untold, dropped_so_far=self._dropped.total(), note=note or "none"),
            )
            self._untold.clear()


def _sum(answers: Sequence[Answer]) -> Answer:
    dropped: collections.Counter[str] = collections.Counter()
    for answer in answers:
        dropped.update(answer.dropped)
    return Answer(
        num_written=sum(answer.num_written for answer in answers),
        num_bytes=sum(answer.num_bytes for answer in answers),
        dropped=dict(dropped),
        error=next((answer.error for answer in answers if answer.error), ""),
    )


class _Process:
    """The child: started when there is something to write, started again when it died."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._child: subprocess.Popen[bytes] | None = None
        self._not_before = 0.0
        self._backoff_s = 0.0
        self._is_over = False

    def write(self, parts: Sequence[bytes | bytearray]) -> Answer | None:
        """Send a batch and wait for its answer; None: the process died."""
        child = self._child or self._start()
        if child is None:
            return None
        assert child.stdin is not None and child.stdout is not None
        try:
            for part in parts:
                _write_all(child.stdin.fileno(), part)
            line = child.stdout.readline()
            answer = msgspec.json.decode(line, type=Answer) if line else None
        except (OSError, msgspec.DecodeError) as err:
            logger.warning("archive process does not answer %s", kv(pid=child.pid, note=str(err)))
            answer = None
        if answer is None or answer.is_broken:
            self._bury(child)
        else:
            self._backoff_s = 0.0
        return answer

    def finish(self) -> None:
        """End its input and wait: it closes its files."""
        if self._child is not None:
            assert self._child.stdin is not None and self._child.stdout is not None
            self._child.stdin.close()
            self._child.wait()  # the deadline is that of GroupArchive.close, which kills
            self._child.stdout.close()
            self._child = None

    def kill(self) -> None:
        """End it at once: it hangs in a dead file system."""
        self._is_over = True
        if (child := self._child) is not None:
            child.kill()

    def _start(self) -> "subprocess.Popen[bytes] | None":
        if self._is_over or time.monotonic() < self._not_before:
            return None
        command = [sys.executable, "-m", "relax_hpc.transfer.archive_process"]
        try:
            self._child = subprocess.Popen(
                [*command, msgspec.json.encode(self._settings).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                bufsize=0,
            )
        except OSError as err:
            logger.warning("archive process not started %s", kv(note=str(err)))
            self._back_off()
        return self._child

    def _bury(self, child: "subprocess.Popen[bytes]") -> None:
        child.kill()
        code = child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # unsent bytes of a broken pipe
                pipe.close()
        self._child = None
        logger.warning("archive process died %s", kv(pid=child.pid, code=code))
        self._back_off()

    def _back_off(self) -> None:
        """Start again at once after a first death, then ever later."""
        self._not_before = time.monotonic() + self._backoff_s
        self._backoff_s = min(max(2 * self._backoff_s, _MIN_BACKOFF_S), _MAX_BACKOFF_S)


def _write_all(descriptor: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def archive_files(folder: Path) -> list[Path]:
    """Files of an archive by step and producer."""
    return sorted(folder.glob(f"step_*/[!.]*{SUFFIX}"))


def list_groups(folder: Path) -> list[ArchivedGroup]:
    """Complete groups in the order of their ends, without their samples; each uid once.

    Files that cannot be read are logged and left out. Two groups of one uid (a ledger restored
    from a checkpoint dispatches prompts again; a batch was sent twice): the last one counts.
    """
    found: dict[str, ArchivedGroup] = {}
    for path in archive_files(folder):
        try:
            with StepReader(path) as reader:
                groups = reader.groups
        except TransferError as err:
            logger.error("archive file left out %s", kv(note=str(err)))
            continue
        for group in groups:
            known = found.get(group.slot.uid)
            if known is None or known.finished_s <= group.finished_s:
                found[group.slot.uid] = group
    return sorted(found.values(), key=lambda group: (group.finished_s, group.slot.uid))


def read_groups(groups: Sequence[ArchivedGroup]) -> Iterator[tuple[ArchivedGroup, list[Sample]]]:
    """Read samples of groups in the order given; a file is opened once for neighbours.

    Raises:
        TransferError: a file vanished or is damaged; names file and group.
    """
    for path, part in itertools.groupby(groups, key=lambda group: group.path):
        with StepReader(path) as reader:
            for group in part:
                yield group, reader.read(group)


def read_archive(folder: Path) -> Iterator[tuple[PromptSlot, list[Sample]]]:
    """Yield all complete groups in the order of their ends: of a live, a closed or a killed run."""
    for group, samples in read_groups(list_groups(folder)):
        yield group.slot, samples


# ---------------------------------------------------------------------------------------------
# What was trained
# ---------------------------------------------------------------------------------------------


class _TrainedStep(msgspec.Struct, frozen=True):
    step: int
    uids: list[str]


class TrainedLog:
    """Which groups each train step consumed, in the order in which they were picked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._journal = Journal(folder / _TRAINED)
        self.num_failed = 0
        """Steps that could not be noted."""

    def append(self, step: int, uids: Sequence[str]) -> None:
        """Note a completed step, synced. A failure is logged and counted: training goes on."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._journal.append(_TrainedStep(step, list(uids)))
        except (ControlError, OSError) as err:
            self.num_failed += 1
            self._journal.close()  # the next append cuts what this one left
            logger.warning(
                "train step not noted in the archive %s",
                kv(step=step, failed=self.num_failed, note=str(err)),
            )

    def close(self) -> None:
        """Close the file."""
        self._journal.close()


def read_trained(folder: Path) -> dict[int, list[str]]:
    """Uids by train step; steps of a branch that was rolled back are left out.

    Raises:
        TransferError: the file is damaged.
    """
    trained: dict[int, list[str]] = {}
    try:
        for record in Journal(folder / _TRAINED).replay():
            line = msgspec.convert(record, _TrainedStep)
            trained = {step: uids for step, uids in trained.items() if step < line.step}
            trained[line.step] = line.uids
    except (ControlError, msgspec.ValidationError) as err:
        raise TransferError(f"{folder / _TRAINED} cannot be read: {err}") from err
    return trained
