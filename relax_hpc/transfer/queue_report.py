"""What the queue tells about itself: its status, and the summary of a completed step."""

import collections
import dataclasses

from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer import wire
from relax_hpc.transfer.queue_histograms import histogram_of, response_tokens
from relax_hpc.transfer.queue_state import QueueState


@dataclasses.dataclass(frozen=True, slots=True)
class StuckLimit:
    """When a waiting row is worth a look."""

    now: float
    """Seconds since 1970."""
    after_s: float

    def status(self, waiting: int, leased: int, oldest_at: float) -> wire.TaskStatus:
        """Describe rows of one task, the oldest put at `oldest_at` (0: none)."""
        oldest_s = max(self.now - oldest_at, 0.0) if oldest_at else 0.0
        is_stuck = oldest_s > self.after_s
        return wire.TaskStatus(waiting=waiting, leased=leased, oldest_s=oldest_s, is_stuck=is_stuck)


def report(
    state: QueueState,
    *,
    capacity: int,
    train_steps: int,
    is_done: bool,
    evals_pending: list[int],
    limit: StuckLimit,
) -> wire.QueueStatus:
    """Count everything."""
    data, ledger = state.data, state.ledger
    phases = collections.Counter(group.phase for group in data.groups.values())
    return wire.QueueStatus(
        version=data.version,
        train_steps=train_steps,
        done=is_done,
        capacity=capacity,
        in_flight=len(data.groups),
        generating=phases[q.Phase.GENERATING],
        waiting=phases[q.Phase.WAITING],
        ready=phases[q.Phase.READY],
        assigned=phases[q.Phase.ASSIGNED],
        trained_groups=ledger.trained_groups,
        dropped=dict(data.ledger.dropped),
        redispatched=dict(data.ledger.redispatched),
        to_dispatch=len(data.ledger.again),
        epoch=ledger.epoch,
        evals_pending=evals_pending,
        evals_finished=sorted(data.evals_finished),
        histograms=data.histograms,
        tasks=_tasks(state, limit),
        num_free=sum(len(blocks) for blocks in data.free.values()),
    )


def _tasks(state: QueueState, limit: StuckLimit) -> dict[str, wire.TaskStatus]:
    groups = state.data.groups.values()
    found = {}
    for task in state.task_fields:
        of_task = [group for group in groups if group.missing.get(task)]
        missing = sum(len(group.missing[task]) for group in of_task)
        waiting = sum(len(samples) for samples in state.pending[task].values())
        oldest = min((group.put_at for group in of_task), default=0.0)
        found[task] = limit.status(waiting, missing - waiting, oldest)
    ready = [group for group in groups if group.phase is q.Phase.READY]
    waiting = sum(len(group.rows) for group in ready if group.rows is not None)
    oldest = min((group.put_at for group in ready), default=0.0)
    found["train"] = limit.status(waiting, 0, oldest)
    return found


def summarize(data: q.QueueData, step: int) -> wire.StepSummary:
    """Describe the groups of the current chunks."""
    uids = [uid for chunk in data.chunks for uid in chunk.picked]
    groups = [data.groups[uid] for uid in uids]
    ages = [
        step - (g.oldest_version if g.oldest_version >= 0 else g.engine_version) for g in groups
    ]
    staleness: wire.Histogram = {}
    lengths: list[int] = []
    for group, age in zip(groups, ages, strict=True):
        assert group.rows is not None, f"group {group.ticket.uid} is in a chunk, but not put"
        staleness[age] = staleness.get(age, 0) + len(group.rows)
        lengths += response_tokens(group.rows)
    return wire.StepSummary(
        step=step,
        num_groups=len(groups),
        num_samples=len(lengths),
        num_tokens=sum(group.num_tokens for group in groups),
        staleness_mean=sum(ages) / len(ages),
        staleness_max=max(ages),
        response_lengths=histogram_of(lengths),
        staleness=staleness,
        uids=uids,
    )
