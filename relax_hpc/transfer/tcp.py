"""Payload over TCP: the client that reads blocks and files of another node's data server.

    read_blocks(refs)            plan: neighbours become one range, ranges become one buffer
      stream 0 .. n-1            each: connect or reuse, handshake, request its stripes, receive
                                 into a recycled buffer; waits for the server until the deadline
      caller                     called back as bytes come, in order (checksums while they are hot)

A stream that breaks connects again, to the agent's new address when it was restarted, and goes on
where it was: blocks never change while their epoch holds, and every reply says whether it did.
"""

import threading
from collections.abc import Callable, Sequence

from relax_hpc.errors import RelaxError, StaleEpochError, TransferError
from relax_hpc.transfer.buffers import BufferPool
from relax_hpc.transfer.frames import Reply
from relax_hpc.transfer.read_plan import ReadPlan
from relax_hpc.transfer.tcp_questions import Place, Question, Questions
from relax_hpc.transfer.tcp_stream import (
    Access,
    Advance,
    Links,
    Read,
    Refused,
    Stream,
    run_together,
)
from relax_hpc.transfer.wire import BlockRef

Progress = Callable[[int, memoryview, int], None]
"""(index of the reference, its block, bytes of it that have come): called in the caller's thread,
for one block after the other, more than once for a block that is longer than a piece."""

_MAX_BATCH_BLOCKS = 4096
_MAX_BATCH_BYTES = 256 << 20
"""One buffer: it is used again only when the last view of any of its blocks is gone."""


class DataClient:
    """Reads of one process from the data servers of other nodes. Thread-safe.

    Args:
        key: `frames.data_key` of the run.
        access: tells where a node's data server is.
        pool: where received bytes lie.
        streams: connections over which a large read is spread.
    """

    name = "tcp"

    def __init__(self, key: bytes, access: Access, pool: BufferPool, *, streams: int = 4) -> None:
        self._pool, self._streams = pool, streams
        self._links = Links(key, access, streams)

    def read_blocks(
        self,
        node: str,
        refs: Sequence[BlockRef],
        deadline: float,
        progress: Progress | None = None,
    ) -> list[memoryview | RelaxError]:
        """Read blocks of one node, in one round for up to 256 MiB of them.

        Args:
            node: where they lie.
            refs: the blocks; epochs are checked, payload is not.
            deadline: `time.monotonic()` at which the whole read ends.
            progress: told about bytes as they come.

        Returns:
            For each reference its bytes (64-byte aligned, in a private buffer), a StaleEpochError,
            or a TransferError when it does not lie in its file.

        Raises:
            DeadlineError: the node did not answer, or not fast enough; names it and what came.
            TransferError: whoever answers there does not know this run's key.
        """
        results: dict[int, memoryview | RelaxError] = {}
        for batch in _batches(refs):
            results.update(self._read_batch(node, refs, batch, deadline, progress))
        return [results[i] for i in range(len(refs))]

    def read_block(self, ref: BlockRef, deadline: float) -> memoryview:
        """Read one block; raises what `read_blocks` returns."""
        (result,) = self.read_blocks(ref.node, [ref], deadline)
        if isinstance(result, RelaxError):
            raise result
        return result

    def read_file(self, node: str, area: str, name: str, deadline: float) -> memoryview:
        """Read a whole file of a node's shared memory that no longer changes.

        Raises:
            TransferError: it is not there, or became shorter.
            DeadlineError: the node did not answer in time.
        """
        what = f"file {area}/{name} of node {node}"
        asked = Read(node, what, ReadPlan([(area, name)], [], []), memoryview(b""), deadline)
        size = self._ask(asked).sizes[0]
        if size < 0:
            raise TransferError(f"{what} does not exist (removed, or the node was cleaned)")
        plan = ReadPlan.of_file(area, name, size)
        buffer = self._pool.take(plan.nbytes)
        if size:
            read = Read(node, what, plan, buffer, deadline)
            if self._receive(read, lambda _: None) is None:
                raise TransferError(f"{what} changed while it was read: it had {size} bytes")
        return buffer[:size]

    def ask(
        self,
        node: str,
        what: str,
        questions: Sequence[Question],
        place: Place,
        *,
        stall_s: float,
        cancelled: threading.Event,
    ) -> int:
        """Ask a service of a node many questions; see `tcp_questions.Questions`.

        Returns:
            Bytes of payload that came; more than was asked for when some were hurt on the way.
        """
        asked = Questions(self._links, node, what, questions, stall_s=stall_s, cancelled=cancelled)
        asked.ask_all(place, self._streams)
        return asked.payload_bytes

    def close(self) -> None:
        """Close idle connections; reads of other threads end by themselves."""
        self._links.close()

    # -- one read -----------------------------------------------------------------------------

    def _read_batch(
        self,
        node: str,
        refs: Sequence[BlockRef],
        batch: list[int],
        deadline: float,
        progress: Progress | None,
    ) -> dict[int, memoryview | RelaxError]:
        """Read until all that is left of the batch is good."""
        results: dict[int, memoryview | RelaxError] = {}
        # A wrong length must not cost memory: what is huge is asked for before it is read.
        is_plausible = sum(refs[i].nbytes for i in batch) <= _MAX_BATCH_BYTES
        while batch:
            plan = ReadPlan.of_blocks([refs[i] for i in batch])
            what = _describe(refs, batch)
            if is_plausible:
                buffer = self._pool.take(plan.nbytes)
                stale = self._receive(
                    Read(node, what, plan, buffer, deadline),
                    _Tracker(plan, buffer, progress, batch).advance,
                )
                if stale is not None:
                    return results | _results(refs, batch, plan, buffer, stale)
            reply = self._ask(Read(node, what, plan, memoryview(b""), deadline))
            bad = _problems(refs, batch, plan, reply)
            results.update(bad)
            batch = [i for i in batch if i not in bad]
            is_plausible = True
        return results

    def _ask(self, read: Read) -> Reply:
        """Ask for sizes and epochs only."""
        blocks = read.plan.touched([(0, read.plan.nbytes)])
        reply, _ = Stream(self._links, read, [], blocks).run(lambda _: None)
        return reply

    def _receive(self, read: Read, advance: Advance) -> set[int] | None:
        """Fill the buffer; returns the blocks that became stale, None if one was bad before."""
        shares = read.plan.shares(self._streams)
        streams = [Stream(self._links, read, share, read.plan.touched(share)) for share in shares]
        try:
            if len(streams) == 1:
                answers = [streams[0].run(advance)]
            else:
                answers = run_together(read, streams, advance)
        except Refused:
            return None
        return {block for _, stale in answers for block in stale}


# ---------------------------------------------------------------------------------------------
# Blocks
# ---------------------------------------------------------------------------------------------


class _Tracker:
    """Turns "the buffer is filled up to here" into calls for one block after the other."""

    def __init__(
        self, plan: ReadPlan, buffer: memoryview, progress: Progress | None, indices: Sequence[int]
    ) -> None:
        self._spans, self._buffer, self._progress = plan.spans, buffer, progress
        self._indices = indices
        self._order = sorted(range(len(plan.spans)), key=lambda i: plan.spans[i].start)
        self._at = 0

    def advance(self, end: int) -> None:
        """Tell about all bytes before `end`."""
        while self._progress is not None and self._at < len(self._order):
            i = self._order[self._at]
            span = self._spans[i]
            ready = min(end - span.start, span.nbytes)
            if ready <= 0:
                return
            block = self._buffer[span.start : span.start + span.nbytes]
            self._progress(self._indices[i], block, ready)
            if ready < span.nbytes:
                return
            self._at += 1


def _batches(refs: Sequence[BlockRef]) -> list[list[int]]:
    """Cut references into reads of one buffer each."""
    batches: list[list[int]] = []
    nbytes = 0
    for i, ref in enumerate(refs):
        is_full = nbytes + ref.nbytes > _MAX_BATCH_BYTES
        if not batches or is_full or len(batches[-1]) >= _MAX_BATCH_BLOCKS:
            batches.append([])
            nbytes = 0
        batches[-1].append(i)
        nbytes += ref.nbytes
    return batches


def _results(
    refs: Sequence[BlockRef],
    batch: Sequence[int],
    plan: ReadPlan,
    buffer: memoryview,
    stale: set[int],
) -> dict[int, memoryview | RelaxError]:
    """Return the blocks of a buffer, by index of their reference."""
    return {
        i: _stale(refs[i]) if k in stale else buffer[span.start : span.start + span.nbytes]
        for k, (i, span) in enumerate(zip(batch, plan.spans, strict=True))
    }


def _problems(
    refs: Sequence[BlockRef], batch: Sequence[int], plan: ReadPlan, reply: Reply
) -> dict[int, RelaxError]:
    """Return what is wrong with blocks before anything was sent."""
    stale, bad = set(reply.stale), dict[int, RelaxError]()
    for k, (i, span) in enumerate(zip(batch, plan.spans, strict=True)):
        size = reply.sizes[span.file]
        if size < 0:
            bad[i] = StaleEpochError(
                f"{_name(refs[i])} is gone: its file does not exist there any more (its producer "
                "is dead and nothing referenced it, or the node was cleaned)"
            )
        elif span.offset + span.nbytes > size:
            bad[i] = TransferError(
                f"{_name(refs[i])}: {span.nbytes} bytes do not lie in its file of {size} bytes"
            )
        elif k in stale:
            bad[i] = _stale(refs[i])
    return bad


def _stale(ref: BlockRef) -> StaleEpochError:
    return StaleEpochError(
        f"{_name(ref)} is gone: its epoch is no longer {ref.epoch}; its memory was freed or "
        "recycled"
    )


def _name(ref: BlockRef) -> str:
    return f"block {ref.extent}+{ref.offset} of node {ref.node}"


def _describe(refs: Sequence[BlockRef], batch: Sequence[int]) -> str:
    nbytes = sum(refs[i].nbytes for i in batch)
    first = _name(refs[batch[0]])
    return first if len(batch) == 1 else f"{len(batch)} blocks ({nbytes} bytes), first {first}"
