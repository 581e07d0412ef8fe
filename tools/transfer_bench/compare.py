"""Rounds of both queues in turns, so that what disturbs the machine disturbs both."""

import dataclasses
import statistics
from pathlib import Path

from transfer_bench.floors import Floors
from transfer_bench.queues import OurQueue, Queue
from transfer_bench.side import Answer, SideError
from transfer_bench.work import Work, checksum, make_work


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How often a work is done."""

    turns: int
    burst: int
    """Rounds of one queue before it is the other's turn."""


PLANS = {"text": Plan(9, 3), "tensors": Plan(9, 1), "latency": Plan(9, 5)}
QUICK_PLANS = {"text": Plan(3, 3), "tensors": Plan(3, 1), "latency": Plan(3, 5)}


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Answers of both queues to one work, round by round."""

    work: Work
    ours: list[Answer]
    theirs: list[Answer]
    copy: list[float]
    """GB/s of a plain copy into shared memory just before each of our rounds."""

    def ratio(self, *keys: str) -> float:
        """How many times faster ours is: median of theirs : median of ours, summed over `keys`."""
        return median_s(self.theirs, *keys) / median_s(self.ours, *keys)

    @property
    def put_vs_copy(self) -> float:
        """Speed of our put, checksums included, to that of a plain copy."""
        gb = self.work.nbytes / 1e9
        pairs = zip(self.ours, self.copy, strict=True)
        return statistics.median(gb / answer["put_s"] / copy for answer, copy in pairs)


def compare(
    name: str, plan: Plan, theirs: Queue, floors: Floors, mark: str, folder: Path
) -> Comparison:
    """Run one work on both queues. The first round of each does not count.

    Raises:
        SideError: a queue failed, or delivered something else than what was put.
    """
    result = Comparison(make_work(name), [], [], [])
    wanted = checksum(result.work.samples)
    ours = OurQueue(name, mark, folder)
    try:
        for queue in (ours, theirs):
            _ask(queue, name, wanted)
        for _ in range(plan.turns):
            copy = floors.measure()
            for queue, answers in ((ours, result.ours), (theirs, result.theirs)):
                answers += [_ask(queue, name, wanted) for _ in range(plan.burst)]
            result.copy.extend([copy] * plan.burst)
    finally:
        ours.close()
    return result


def median_s(answers: list[Answer], *keys: str) -> float:
    """Median over rounds of the sum of `keys`, seconds."""
    return statistics.median(sum(answer[key] for key in keys) for answer in answers)


def _ask(queue: Queue, work: str, wanted: int) -> Answer:
    answer = queue.latency(work) if work == "latency" else queue.round(work)
    if answer["checksum"] != wanted:
        what = type(queue).__name__
        raise SideError(f"{what}: {work} arrived changed: {answer['checksum']}, put {wanted}")
    return answer
