"""Which ranges of which files one read fetches, and where they land: one buffer, no gaps.

Blocks that lie near each other in a file become one range. Several streams share a read in stripes
(stream k takes stripe k, k + n, ...), so that all of them advance through the buffer together and
its checksums can be computed right behind them.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from relax_hpc.transfer.frames import PAD, padded
from relax_hpc.transfer.wire import BlockRef

STRIPE_BYTES = 1 << 20
_GAP_BYTES = 16 << 10
"""Bytes between two blocks that are cheaper to send than a second range is to ask for."""

Interval = tuple[int, int]
"""(start, end) in the buffer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Where one block is."""

    file: int
    offset: int
    nbytes: int
    start: int
    """In the buffer."""
    epoch: int
    """0: a whole file, which has none."""


@dataclasses.dataclass(slots=True)
class _Run:
    """A range of a file without its place in the buffer."""

    file: int
    offset: int
    end: int


class ReadPlan:
    """The plan of one read. Build it with `of_blocks` or `of_file`."""

    def __init__(
        self, files: list[tuple[str, str]], runs: list[_Run], spans: list[tuple[int, int, int, int]]
    ) -> None:
        self.files = files
        self._runs = runs
        sizes = [run.end - run.offset for run in runs]
        self._starts = [0, *itertools.accumulate(sizes)]
        self.nbytes = self._starts[-1]
        """Of the buffer."""
        self.spans = [self._place(*span) for span in spans]
        """One for each block, in the order of the references."""

    @classmethod
    def of_blocks(cls, refs: Sequence[BlockRef]) -> "ReadPlan":
        """Plan the read of blocks of one node, each to be checked for its epoch."""
        numbers: dict[tuple[str, str], int] = {}
        spans = [
            (numbers.setdefault(_file(ref), len(numbers)), ref.offset, ref.nbytes, ref.epoch)
            for ref in refs
        ]
        runs: list[_Run] = []
        for file, offset, nbytes, _ in sorted(spans):
            end = offset + padded(nbytes)
            last = runs[-1] if runs else None
            if last is not None and last.file == file and offset - last.end <= _GAP_BYTES:
                last.end = max(last.end, end)
            else:
                runs.append(_Run(file, offset, end))
        return cls(list(numbers), runs, spans)

    @classmethod
    def of_file(cls, area: str, name: str, nbytes: int) -> "ReadPlan":
        """Plan the read of a whole file."""
        return cls([(area, name)], [_Run(0, 0, padded(nbytes))], [(0, 0, nbytes, 0)])

    def shares(self, num_streams: int) -> list[list[Interval]]:
        """Cut the buffer into what each stream fetches; fewer streams when it is small."""
        stripes = [
            (start, min(start + STRIPE_BYTES, self.nbytes))
            for start in range(0, self.nbytes, STRIPE_BYTES)
        ]
        count = max(1, min(num_streams, len(stripes) // 2))
        if count == 1:
            return [[(0, self.nbytes)]]
        return [stripes[k::count] for k in range(count)]

    def ranges(self, intervals: Sequence[Interval]) -> list[tuple[int, int, int]]:
        """Return (file, offset, nbytes) of what fills parts of the buffer."""
        return [part for start, end in intervals for part in self._ranges(start, end)]

    def touched(self, intervals: Sequence[Interval]) -> list[int]:
        """Blocks that lie in parts of the buffer (sorted) and have an epoch."""
        return [i for i, span in enumerate(self.spans) if span.epoch and _touches(span, intervals)]

    def checks(self, blocks: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (file, offset, epoch) of blocks."""
        return [(s.file, s.offset, s.epoch) for s in (self.spans[i] for i in blocks)]

    def _place(self, file: int, offset: int, nbytes: int, epoch: int) -> Span:
        key = (file, offset)
        index = bisect.bisect_right(self._runs, key, key=lambda run: (run.file, run.offset)) - 1
        run = self._runs[index]
        return Span(file, offset, nbytes, self._starts[index] + offset - run.offset, epoch)

    def _ranges(self, start: int, end: int) -> list[tuple[int, int, int]]:
        index = bisect.bisect_right(self._starts, start) - 1
        found = []
        while start < end:
            run, at = self._runs[index], self._starts[index]
            stop = min(end, self._starts[index + 1])
            found.append((run.file, run.offset + start - at, stop - start))
            start, index = stop, index + 1
        return found


def _file(ref: BlockRef) -> tuple[str, str]:
    return ("spill" if ref.tier == "spill" else "arenas", ref.extent)


def _touches(span: Span, intervals: Sequence[Interval]) -> bool:
    """Whether a block lies in one of the (sorted) intervals, at least in part."""
    index = bisect.bisect_left(intervals, span.start, key=lambda interval: interval[1] - 1)
    return index < len(intervals) and intervals[index][0] < span.start + max(span.nbytes, 1)


assert STRIPE_BYTES % PAD == 0
