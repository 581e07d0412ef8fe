"""One fsync for all records that came meanwhile, without blocking the loop that appends them.

append --> pending --commit--> written + fsync'ed --> whoever waited for these records goes on
             ^                   (a thread, or at once where the disk answers in no time)
             +---- records that come during the write wait for the next one
"""

import asyncio
import collections
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from relax_hpc.control.journal import GenerationalJournal, encode_line
from relax_hpc.errors import ControlError

_FAST_S = 400e-6
"""A write that takes less is done in the loop. On a busy machine a thread and the way back cost as
much, and most of what came meanwhile would have to wait for this write or the next one anyway."""
_SLOW_S = 1e-3
"""Writes that take longer send the next ones to the thread again. One among many fast ones does
not: on a busy machine it says nothing of the disk."""
_FAST_WRITES = 8
"""So many more fast writes than slow ones make the next one a write in the loop."""

Done = Callable[[ControlError | None], None]


class GroupCommit:
    """Appends from one asyncio loop.

    `append` orders the record, `flushed` and `when_durable` wait until all records appended so far
    are on disk. A reply must not leave before: what was acknowledged survives a kill.
    """

    def __init__(self, journal: GenerationalJournal) -> None:
        self._journal = journal
        self._pending: list[bytes] = []
        self._num_appended = 0
        self._num_durable = 0
        self._waiting: collections.deque[tuple[int, Done]] = collections.deque()
        self._snapshot: Callable[[], Any] | None = None
        self._is_writing = False
        self._num_fast = 0
        self._failure: ControlError | None = None
        self._executor = ThreadPoolExecutor(1, "journal")

    @property
    def num_appended(self) -> int:
        """Records appended since this object was made."""
        return self._num_appended

    @property
    def is_durable(self) -> bool:
        """Everything appended so far is on disk."""
        return self._failure is None and self._num_durable >= self._num_appended

    def append(self, record: Any) -> None:
        """Queue a record, in order; rendered now, it may change afterwards."""
        self.append_line(encode_line(record))

    def append_line(self, line: bytes) -> None:
        """Like append, for what `encode_line` rendered."""
        self._pending.append(line)
        self._num_appended += 1

    def when_durable(self, done: Done) -> None:
        """Call `done` in the loop when everything appended so far is on disk; at once if it is.

        `done` gets the error when the journal cannot be written: the service must end, what is in
        memory is ahead of the journal. Nothing is written before `commit`.
        """
        if self._failure is not None:  # records are lost: later ones must not follow them
            done(self._failure)
        elif self._num_durable >= self._num_appended:
            done(None)
        else:
            self._waiting.append((self._num_appended, done))

    def commit(self) -> None:
        """Begin to write what was appended; what comes meanwhile goes with the next write."""
        if self._is_writing or self._failure is not None:
            return
        if self._snapshot is not None:
            self._start_file()
        elif self._pending:
            self._write()

    async def flushed(self) -> None:
        """Wait until everything appended before this call is on disk.

        Raises:
            ControlError: the journal cannot be written; the service must end.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: ControlError | None) -> None:
            if future.done():  # its task was cancelled
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self.when_durable(done)
        self.commit()
        await future

    async def rotate(self, snapshot: Callable[[], Any]) -> None:
        """Start a new journal file from a snapshot that holds everything appended so far."""
        self.rotate_soon(snapshot)
        await self.flushed()

    def rotate_soon(self, snapshot: Callable[[], Any]) -> None:
        """Start a new journal file with the next commit; `snapshot` is called then."""
        self._snapshot = snapshot
        self.commit()

    def close(self) -> None:
        """Wait for a write that is under way; nothing is written afterwards."""
        self._executor.shutdown(wait=True)

    def _write(self) -> None:
        batch, self._pending = self._pending, []
        if self._num_fast >= _FAST_WRITES:
            self._end(len(batch), *self._timed(batch))
            return
        self._is_writing = True
        loop = asyncio.get_running_loop()

        def written(future: Future[tuple[float, ControlError | None]]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end, len(batch), *future.result())

        self._executor.submit(self._timed, batch).add_done_callback(written)

    def _timed(self, batch: list[bytes]) -> tuple[float, ControlError | None]:
        begin = time.perf_counter()
        try:
            self._journal.append_lines(batch)
        except ControlError as err:
            return 0.0, err
        return time.perf_counter() - begin, None

    def _end(self, num_lines: int, took_s: float, failure: ControlError | None) -> None:
        self._is_writing = False
        self._failure = failure
        if failure is None:
            self._num_durable += num_lines
        if took_s < _FAST_S:
            self._num_fast = min(self._num_fast + 1, 2 * _FAST_WRITES)
        elif took_s > _SLOW_S:
            self._num_fast = max(self._num_fast - _FAST_WRITES, 0)
        self._release()
        self.commit()

    def _start_file(self) -> None:
        """The snapshot holds what is pending: nothing of it needs to be written again."""
        assert self._snapshot is not None
        snapshot, self._snapshot, self._pending = self._snapshot(), None, []
        try:
            self._journal.start(snapshot)
            self._num_durable = self._num_appended
        except OSError as err:
            self._failure = ControlError(f"cannot start a new journal file: {err}")
        self._release()

    def _release(self) -> None:
        waiting = self._waiting
        while waiting and (self._failure is not None or waiting[0][0] <= self._num_durable):
            waiting.popleft()[1](self._failure)
