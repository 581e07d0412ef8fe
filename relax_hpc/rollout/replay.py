"""Replay: archived groups go into the queue instead of generated ones. Trains without engines.

    replay     consumes            produces   waits for               woken by
    feeder     archived groups,    puts, in   a slot of the group's   a train step
               slots               order      train step

For bit-equal training the queue must make the same chunks again. The archive knows which groups
each train step took, in which order (trained.jsonl). The feeder puts them one by one in that order,
each into a slot whose deadline is the step that is to train it: earliest deadline first, then first
come, is then the recorded order. The slot is a permission only; its own prompt does not matter
(the queue grants prompts in the order of the data set, not of training, so to insist on it would
mean to hold slots until their groups are due, and to fill the window with them).

A restart of the rollout step, of the dcs or of the job changes nothing. When the train step alone
goes back to a checkpoint, the queue may hand it groups that wait for later steps first: then every
group is still trained once, but in another order, and with max_staleness > 0 a group may become too
old for that, which ends the replay unless rollout.stale_policy=correct.
"""

import bisect
import collections
import dataclasses
import heapq
import logging
import sys
import time
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

from relax_hpc.config import Config, RolloutConfig, StalePolicy
from relax_hpc.errors import StaleIncarnationError, TransferError
from relax_hpc.log import kv
from relax_hpc.records import PromptSlot, Sample
from relax_hpc.rollout.loop import Metrics, Progress
from relax_hpc.transfer.archive import list_groups, read_trained
from relax_hpc.transfer.archive_file import ArchivedGroup, StepReader
from relax_hpc.transfer.ledger import ticket_of

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Length of one long-poll for slots."""
TICK_S = 0.05
"""Between two looks at the version: a group whose newest token is of a version that the train step
has not made yet is refused, and nothing wakes who waits for a version only."""
NOT_YET = "replay_not_yet"
"""Reason of a slot that was given back: no group that is left may be trained so early."""
_MAX_OPEN_FILES = 8
NOT_ARCHIVED = "not_archived"
"""Reason of a slot for which no group is left, as the queue counts it."""


class Admission(typing.Protocol):
    """Answer of `admit`."""

    @property
    def slots(self) -> Sequence[PromptSlot]:
        """Granted slots."""
        ...

    @property
    def done(self) -> bool:
        """All train steps are complete."""
        ...


class Status(typing.Protocol):
    """What the feeder looks at of `transfer.wire.QueueStatus`. Counts are groups."""

    @property
    def version(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def done(self) -> bool:
        """All of them are."""
        ...

    @property
    def waiting(self) -> int:
        """Put, but a field of ref or logprob is missing."""
        ...

    @property
    def ready(self) -> int:
        """Can be trained."""
        ...

    @property
    def assigned(self) -> int:
        """In chunks of the current step."""
        ...


class Queue(typing.Protocol):
    """What the feeder uses of `transfer.TransferQueue`."""

    def admit(self, engine_version: int, max_groups: int, timeout_s: float) -> Admission:
        """Ask for slots."""
        ...

    def put_group(self, slot: PromptSlot, samples: list[Sample]) -> bool:
        """Hand in a group; False: the queue dispatches its slot again."""
        ...

    def drop_group(self, slot: PromptSlot, reason: str) -> None:
        """Free the slot; the prompt is used up."""
        ...

    def return_group(self, slot: PromptSlot, reason: str) -> None:
        """Free the slot; the prompt is dispatched again."""
        ...

    def status(self) -> Status:
        """Return counts and versions."""
        ...

    def claim_eval(self, version: int) -> bool:
        """Ask to be the one that runs an evaluation."""
        ...

    def finish_eval(self, version: int) -> None:
        """Tell that it is done."""
        ...

    def evals_pending(self) -> list[int]:
        """Versions whose evaluation is not finished."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplayParts:
    """Everything that a replay talks to."""

    queue: Queue
    progress: Progress
    metrics: Metrics
    index: int = 0
    """Number of this rollout step: 0 feeds, the others wait for the end of the run."""


# ---------------------------------------------------------------------------------------------
# What is fed, in which order
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPlan:
    """Groups in the order of training, groups_per_step for each train step."""

    groups: list[ArchivedGroup]
    is_exact: bool
    """All groups of all train steps are there, in steps of the same size."""
    num_replaced: int = 0
    """Trained groups that the archive does not hold; others stand in for them."""


def plan_replay(config: Config, folder: Path) -> ReplayPlan:
    """Choose the groups of all train steps.

    Args:
        config: of the run that is to be trained now.
        folder: RUN/trajectories of the recorded run; live, closed or killed.

    Raises:
        TransferError: too few groups, or they do not fit this run's shape; says which key.
    """
    archived = list_groups(folder)
    trained = read_trained(folder)
    batch, num_steps = config.rollout.groups_per_step, config.run.train_steps
    needed = batch * num_steps
    order, num_replaced = _in_trained_order(archived, trained, config.rollout, needed)
    if len(order) < needed:
        raise TransferError(
            f"rollout.replay={folder}: holds {len(archived)} groups, of which {len(order)} can be "
            f"trained in order; run.train_steps={num_steps} x rollout.groups_per_step={batch} need "
            f"{needed}: lower run.train_steps to {len(order) // batch}"
        )
    for number, group in enumerate(order):
        _check_fit(group, number // batch, config.rollout, folder)
    is_whole = all(len(trained.get(step, ())) == batch for step in range(num_steps))
    return ReplayPlan(
        groups=order, is_exact=is_whole and not num_replaced, num_replaced=num_replaced
    )


def _in_trained_order(
    archived: list[ArchivedGroup],
    trained: Mapping[int, list[str]],
    rollout: RolloutConfig,
    needed: int,
) -> tuple[list[ArchivedGroup], int]:
    """Return the trained groups, then others; and how many had to be replaced by others."""
    by_uid = {group.slot.uid: group for group in archived}
    uids = [uid for step in sorted(trained) for uid in trained[step]][:needed]
    used = set(uids)
    spares = [group for group in archived if group.slot.uid not in used]
    order: list[ArchivedGroup] = []
    num_replaced = 0
    for uid in uids:
        group = by_uid.get(uid)
        if group is None:
            group = _take_spare(spares, uid, len(order) // rollout.groups_per_step, rollout)
            num_replaced += 1
        if group is not None:
            order.append(group)
    _fill(order, spares, rollout, needed)
    return order, num_replaced


def _take_spare(
    spares: list[ArchivedGroup], uid: str, step: int, rollout: RolloutConfig
) -> ArchivedGroup | None:
    """Another group of the same prompt, else the first one that may be trained in this step."""
    prompt_index = ticket_of(uid).prompt_index
    fitting = [spare for spare in spares if _misfit(spare, step, rollout) == ""]
    same = [spare for spare in fitting if spare.slot.prompt_index == prompt_index]
    chosen = next(iter(same or fitting), None)
    if chosen is not None:
        spares.remove(chosen)
    return chosen


def _fill(
    order: list[ArchivedGroup], spares: list[ArchivedGroup], rollout: RolloutConfig, needed: int
) -> None:
    """Append spares: of those that may be trained in a step, first who may not wait longest."""
    coming = collections.deque(sorted(spares, key=lambda group: group.newest_version))
    heap: list[tuple[int, float, str, ArchivedGroup]] = []
    while len(order) < needed:
        step = len(order) // rollout.groups_per_step
        while coming and coming[0].newest_version <= step:
            spare = coming.popleft()
            heapq.heappush(heap, (spare.oldest_version, spare.finished_s, spare.slot.uid, spare))
        if not heap:
            return
        spare = heapq.heappop(heap)[-1]
        if _misfit(spare, step, rollout) == "":
            order.append(spare)


def _misfit(group: ArchivedGroup, step: int, rollout: RolloutConfig) -> str:
    """Why a group cannot be trained in a step; empty: it can."""
    if group.num_samples != rollout.group_size:
        return f"has {group.num_samples} samples: set rollout.group_size={group.num_samples}"
    if group.newest_version > step:
        return (
            f"has tokens of version {group.newest_version}, which is made by later steps: set "
            "rollout.groups_per_step as it was recorded"
        )
    staleness = step - group.oldest_version
    is_bound = rollout.stale_policy is not StalePolicy.CORRECT and group.oldest_version >= 0
    if is_bound and staleness > rollout.max_staleness:
        return (
            f"has tokens of version {group.oldest_version}: set rollout.max_staleness to at least "
            f"{staleness}, or rollout.stale_policy=correct"
        )
    return ""


def _check_fit(group: ArchivedGroup, step: int, rollout: RolloutConfig, folder: Path) -> None:
    misfit = _misfit(group, step, rollout)
    if misfit:
        raise TransferError(
            f"rollout.replay={folder}: group {group.slot.uid} is to be trained in step {step}, but "
            f"it {misfit}"
        )


# ---------------------------------------------------------------------------------------------
# Feeding
# ---------------------------------------------------------------------------------------------


def replay(config: Config, parts: ReplayParts, folder: Path) -> None:
    """Feed the queue until all train steps are complete. Blocking; called by the rollout step.

    Evaluations need an engine: they are marked as finished without one, and logged.

    Raises:
        TransferError: the archive does not fit this run, or cannot be read.
        ControlError: the dcs step did not come back in time, or this step was replaced.
    """
    if parts.index == 0:
        plan = plan_replay(config, folder)
        tell = log.info if plan.is_exact else log.warning
        tell(
            "replay begins %s",
            kv(folder=folder, groups=len(plan.groups), exact=plan.is_exact,
               replaced=plan.num_replaced),
        )  # fmt: skip
        _Feeder(config, parts, plan.groups).run()
        _skip_evaluations(parts.queue)
        return
    while not parts.queue.status().done:
        _check_place(parts.progress)
        time.sleep(POLL_S)


class _Feeder:
    """Puts group after group. Numbers count groups in the order of training."""

    def __init__(self, config: Config, parts: ReplayParts, groups: list[ArchivedGroup]) -> None:
        self._parts, self._groups = parts, groups
        self._batch = config.rollout.groups_per_step
        self._max_staleness = config.rollout.max_staleness
        self._is_bound = config.rollout.stale_policy is not StalePolicy.CORRECT
        self._next = 0
        """First number that was never put."""
        self._put: dict[str, int] = {}
        """Numbers of groups that were put, by the uid of their slot."""
        self._lost: list[int] = []
        """Numbers that were put and then lost, sorted: the train step was rolled back, or could
        not read them. Known from the uids of their slots, which the queue dispatches again."""
        self._num_refused = 0
        """Polls without a slot while lost groups wait for one."""
        self._readers: dict[Path, StepReader] = {}
        self._told_version = -1

    def run(self) -> None:
        status = self._parts.queue.status()
        # Those before it were put by an earlier start of this step, in order.
        self._next = min(self._num_in_queue(status), len(self._groups))
        while True:
            _check_place(self._parts.progress)
            status = self._parts.queue.status()
            self._report(status)
            if status.done or self._feed_some(status):
                return

    def _feed_some(self, status: Status) -> bool:
        """Ask for the slots that are wanted now and fill them; True at the end of the run."""
        version = status.version
        is_complete = self._next >= len(self._groups)
        num_unknown = self._next - len(self._lost) - self._num_in_queue(status)
        if self._lost or num_unknown > 0:
            admission = self._ask_again(version, num_unknown)
        elif is_complete:
            admission = self._parts.queue.admit(version, 1, POLL_S)  # wait for the end
        elif count := self._count_alike(version):
            engine_version = max(self._next // self._batch - self._max_staleness, 0)
            admission = self._parts.queue.admit(engine_version, count, POLL_S)
        else:
            admission = None
        if admission is None:
            time.sleep(TICK_S)
            return False
        for slot in admission.slots:
            self._feed(slot, version)
        return admission.done

    def _count_alike(self, version: int) -> int:
        """How many of the next groups can go into slots of one deadline now."""
        end = min((self._next // self._batch + 1) * self._batch, len(self._groups))
        numbers = range(self._next, end)
        is_made = (self._groups[number].newest_version <= version for number in numbers)
        return next((k for k, ok in enumerate(is_made) if not ok), len(numbers))

    def _ask_again(self, version: int, num_unknown: int) -> Admission | None:
        """Ask for slots of lost groups: by the known ones, else to learn which they are.

        Their steps may be full of others meanwhile: then for later deadlines, as late as allowed.

        Raises:
            TransferError: a lost group became too old.
        """
        known = [n for n in self._lost if self._groups[n].newest_version <= version]
        if not known and num_unknown <= 0:
            return None
        step = max(known[0] // self._batch, version) if known else version
        earliest = max(step - self._max_staleness, 0)
        latest = min([version, *(self._latest(number) for number in known)])
        num_choices = latest - earliest + 1
        if known and (num_choices <= 0 or self._num_refused >= 3 * num_choices):
            raise TransferError(
                f"replay: the train step was rolled back to step {version} and took groups of "
                f"later steps; now {len(known)} groups, the first of them "
                f"{self._groups[known[0]].slot.uid} (recorded), are too old to be trained: begin a "
                "new run, or set rollout.stale_policy=correct"
            )
        engine_version = earliest + self._num_refused % max(num_choices, 1)
        count = min(len(known) or num_unknown, self._batch)
        admission = self._parts.queue.admit(engine_version, count, POLL_S)
        self._num_refused = 0 if admission.slots else self._num_refused + 1
        return admission

    def _latest(self, number: int) -> int:
        """Newest engine version whose slots a group may fill: else its tokens are too old."""
        oldest = self._groups[number].oldest_version
        return oldest if self._is_bound and oldest >= 0 else sys.maxsize

    def _feed(self, slot: PromptSlot, version: int) -> None:
        self._learn(slot)
        number = self._choose(slot, version)
        if number is None:
            if self._next >= len(self._groups) and not self._lost:
                log.warning("no group left for a slot %s", kv(uid=slot.uid))
                self._parts.queue.drop_group(slot, NOT_ARCHIVED)
            else:
                self._parts.queue.return_group(slot, NOT_YET)
            return
        group = self._groups[number]
        samples = self._reader(group.path).read(group)
        if self._parts.queue.put_group(slot, samples):
            self._put[slot.uid] = number
        else:
            log.warning("replayed group refused %s", kv(uid=slot.uid, recorded=group.slot.uid))
            bisect.insort(self._lost, number)

    def _learn(self, slot: PromptSlot) -> None:
        """A prompt that is dispatched again: the group that went into its slot before is lost."""
        ticket = ticket_of(slot.uid)
        for k in range(ticket.k - 1, -1, -1):
            number = self._put.pop(f"{ticket.epoch}.{ticket.prompt_index}.{k}", None)
            if number is not None:
                bisect.insort(self._lost, number)
                return

    def _choose(self, slot: PromptSlot, version: int) -> int | None:
        """The first lost group that may go into a slot, else the next one; None: not now."""
        for number in self._lost:
            if self._may_fill(slot, number, version):
                self._lost.remove(number)
                return number
        is_left = self._next < len(self._groups) and not self._lost
        if is_left and self._may_fill(slot, self._next, version):
            self._next += 1
            return self._next - 1
        return None

    def _may_fill(self, slot: PromptSlot, number: int, version: int) -> bool:
        is_young = self._latest(number) >= slot.deadline_version - self._max_staleness
        return self._groups[number].newest_version <= version and is_young

    def _reader(self, path: Path) -> StepReader:
        """Files of the last few steps stay open: neighbours in training lie in several."""
        reader = self._readers.pop(path, None) or StepReader(path)
        self._readers[path] = reader
        if len(self._readers) > _MAX_OPEN_FILES:
            self._readers.pop(next(iter(self._readers))).close()
        return reader

    def _num_in_queue(self, status: Status) -> int:
        """Groups that were put and are trained, or will be if nothing happens to them."""
        return status.version * self._batch + status.assigned + status.ready + status.waiting

    def _report(self, status: Status) -> None:
        self._parts.progress.report(version=status.version, groups=self._next, running=0)
        if status.version != self._told_version:
            self._told_version = status.version
            self._parts.metrics.log(status.version, {"rollout/replayed_groups": float(self._next)})


def _skip_evaluations(queue: Queue) -> None:
    for version in queue.evals_pending():
        if queue.claim_eval(version):
            log.warning("evaluation skipped, there is no engine %s", kv(version=version))
            queue.finish_eval(version)


def _check_place(progress: Progress) -> None:
    if progress.is_replaced:
        raise StaleIncarnationError(
            "a newer incarnation of this step runs; this one ends without a word to the queue"
        )
