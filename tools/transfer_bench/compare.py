"""Rounds of both queues in turns, so that what disturbs the machine disturbs both."""

import contextlib
import dataclasses
import statistics

from transfer_bench.floors import Floors
from transfer_bench.queues import OurQueue, Queue
from transfer_bench.side import Answer, SideError
from transfer_bench.work import Work, checksum, make_work
from transfer_bench.workplace import Workplace


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How often a work is done."""

    turns: int
    burst: int
    """Rounds of one queue before it is the other's turn."""


PLANS = {"text": Plan(9, 3), "tensors": Plan(9, 1), "latency": Plan(9, 5)}
QUICK_PLANS = {"text": Plan(3, 3), "tensors": Plan(3, 1), "latency": Plan(3, 5)}


OURS, OURS_IN_MEMORY, THEIRS = "ours", "ours_journal_in_memory", "transferqueue"


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Answers of the queues to one work, round by round."""

    work: Work
    answers: dict[str, list[Answer]]
    """By queue. In `ours_journal_in_memory` the journal's fsync costs nothing: what is lost then is
    what a crash of the whole node loses; TransferQueue writes none."""
    copy: list[float]
    """GB/s of a plain copy into shared memory just before each round."""

    def ratio(self, *keys: str, ours: str = OURS) -> float:
        """How many times faster we are: median of theirs : median of ours, summed over `keys`."""
        return self.seconds(THEIRS, *keys) / self.seconds(ours, *keys)

    def seconds(self, queue: str, *keys: str) -> float:
        """Median over rounds of the sum of `keys`."""
        return median_s(self.answers[queue], *keys)

    @property
    def put_vs_copy(self) -> float:
        """Speed of our put, checksums included, to that of a plain copy."""
        gb = self.work.nbytes / 1e9
        pairs = zip(self.answers[OURS], self.copy, strict=True)
        return statistics.median(gb / answer["put_s"] / copy for answer, copy in pairs)


def compare(name: str, plan: Plan, theirs: Queue, floors: Floors, place: Workplace) -> Comparison:
    """Run one work on the queues in turns. The first round of each does not count.

    Raises:
        SideError: a queue failed, or delivered something else than what was put.
    """
    work = make_work(name)
    wanted = checksum(work.samples)
    result = Comparison(work, {OURS: [], OURS_IN_MEMORY: [], THEIRS: []}, [])
    with (
        contextlib.closing(OurQueue(name, place)) as ours,
        contextlib.closing(OurQueue(name, place, is_in_memory=True)) as in_memory,
    ):
        queues: dict[str, Queue] = {OURS: ours, OURS_IN_MEMORY: in_memory, THEIRS: theirs}
        for queue in queues.values():
            _ask(queue, name, wanted)
        for _ in range(plan.turns):
            result.copy.extend([floors.measure()] * plan.burst)
            for kind, queue in queues.items():
                result.answers[kind] += [_ask(queue, name, wanted) for _ in range(plan.burst)]
    return result


ONLY_THEIRS = ("nest_s", "unbind_s")
"""Steps from and to arrays that TransferQueue has and ours has not; not part of put and get."""


def median_s(answers: list[Answer], *keys: str) -> float:
    """Median over rounds of the sum of `keys`, seconds."""
    return statistics.median(sum(_seconds(answer, key) for key in keys) for answer in answers)


def _seconds(answer: Answer, key: str) -> float:
    return float(answer.get(key, 0.0) if key in ONLY_THEIRS else answer[key])


def _ask(queue: Queue, work: str, wanted: int) -> Answer:
    answer = queue.latency(work) if work == "latency" else queue.round(work)
    if answer["checksum"] != wanted:
        what = type(queue).__name__
        raise SideError(f"{what}: {work} arrived changed: {answer['checksum']}, put {wanted}")
    return answer
