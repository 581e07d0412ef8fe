"""The train loop: chunks of rows in, optimizer steps and weight versions out.

    transfer queue                     train step (all ranks)                     weight service
    --------------                     ----------------------                     --------------
    begin_train(N,    <--- rank 0 ---- resume from checkpoint N (0: the HF model)
      ledger of N)
                                       publish version N  ----------------------> engines start
    take_chunk(N, i)  ---- rows -----> for chunk i of step N:
      waits until the chunk's groups     share rows in the replica, advantages,
      are complete; unblocked by the     micro-batches, forward/backward (sums)
      rollout steps' put_group         after the last chunk:
    complete_step(N)  <--- rank 0 ----   divide by the true count, update
      frees slots: unblocks admission    publish version N+1 -------------------> engines update
      of later prompts
    cut_ledger(N+1)   ---- rank 0 ---> checkpoint, now and then, with the ledger

Waits of this loop: `take_chunk` (leaders; for rollout), the broadcast inside a replica (other
ranks; for their leader), reductions over all ranks (for the slowest). In `publish`, too, a rank
that waits for another waits in a collective, which fails at once when that rank dies. Collectives
time out later than `take_chunk`, so the first error is the one with the cause. Nobody knows how
many micro-batches a chunk has before it arrives: replicas align their counts by a maximum and fill
up with micro-batches of weight zero.
"""

import dataclasses
import logging
import time
import typing
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from relax_hpc.algorithms.advantages import group_advantages
from relax_hpc.config import Config, TrainConfig
from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.errors import DeadlineError, RelaxError
from relax_hpc.log import kv
from relax_hpc.records import Chunk, Row
from relax_hpc.trainer.backend import Backend
from relax_hpc.trainer.micro_batch import MicroBatch, build_micro_batch, cut_rows
from relax_hpc.trainer.objective import Objective
from relax_hpc.trainer.step_stats import StepStats

_log = logging.getLogger(__name__)

_SHOWN = (
    "loss",
    "reward_mean",
    "accuracy_mean",
    "grad_norm",
    "logprob_diff_mean",
    "staleness_max",
    "tokens_per_s",
    "step_s",
    "wait_s",
)
"""Metrics of the line that the log gets per step; all are in RUN/metrics."""
_CUT_S = 20.0
"""For the queue's ledger at a checkpoint: less than what remains after a signal of Slurm."""
_LOOK_S = 5.0
"""While it waits for rows, the leader looks this often whether it was asked to stop."""


class QueueState(typing.Protocol):
    """What the loop logs of the queue's status."""

    @property
    def generating(self) -> int:
        """Groups that engines work on."""
        ...

    @property
    def ready(self) -> int:
        """Groups that are complete and not yet part of a chunk."""
        ...

    @property
    def assigned(self) -> int:
        """Groups in chunks of the current step."""
        ...


class Completed(typing.Protocol):
    """What the loop uses of the answer to `complete_step`."""

    @property
    def uids(self) -> Sequence[str]:
        """Groups of the step, in the order in which they were picked."""
        ...


class TrainQueue(typing.Protocol):
    """The transfer queue as the train step uses it (relax_hpc.transfer)."""

    def begin_train(self, step: int, cut: bytes | None = None) -> object:
        """Say that training (re)starts at this step; later results are taken back."""
        ...

    def cut_ledger(self, step: int, timeout_s: float) -> bytes:
        """Return the ledger as of a version, to be saved with its weights."""
        ...

    def take_chunk(
        self, step: int, index: int, dp_rank: int, dp_size: int, timeout_s: float
    ) -> Chunk:
        """Wait for this replica's share of a chunk."""
        ...

    def complete_step(self, step: int) -> Completed:
        """Acknowledge all rows of the step after the optimizer step."""
        ...

    def status(self) -> QueueState:
        """Describe the queue now."""
        ...


class Publisher(typing.Protocol):
    """The weight service as the train step uses it (relax_hpc.dcs)."""

    def publish(
        self,
        version: int,
        pieces: Iterable[tuple[Box, str, np.ndarray]],
        specs: Sequence[TensorSpec],
        num_shards: int,
        shard_rank: int,
        meet: typing.Callable[[], object],
    ) -> object:
        """Publish this rank's shard of a version; `meet` returns when all ranks called it."""
        ...


class Record(typing.Protocol):
    """Which groups were trained when; see transfer.archive.TrainedLog."""

    def append(self, step: int, uids: Sequence[str]) -> object:
        """Note a step; never fails."""
        ...


class Keeper(typing.Protocol):
    """Checkpoints; see checkpointing.CheckpointKeeper."""

    def save(self, step: int, with_hf: bool, ledger: bytes | None = None) -> object:
        """Write a checkpoint."""
        ...

    def resume(self) -> int:
        """Load the newest whole checkpoint; return its step or 0."""
        ...

    def has_hf(self, step: int) -> bool:
        """Whether the checkpoint of a step holds the model in Hugging Face format."""
        ...

    @property
    def damaged(self) -> tuple[int, ...]:
        """Steps of the checkpoints that `resume` skipped."""
        ...

    @property
    def ledger(self) -> bytes | None:
        """Ledger of the checkpoint that `resume` loaded; rank 0 only."""
        ...


class Reporter(typing.Protocol):
    """Where rank 0 tells how far it is."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics of a step."""
        ...

    def progress(self, **values: int | float | str) -> None:
        """Report progress to the control plane."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainServices:
    """What the loop talks to. `queue` is used on leaders only, `reporter` on rank 0 only."""

    record: Record | None = None
    """On rank 0, where trajectories are archived."""
    queue: TrainQueue
    publisher: Publisher
    keeper: Keeper
    reporter: Reporter
    wants_stop: typing.Callable[[], bool] = lambda: False
    """True = give the step up, save what the last one left, return (a signal arrived)."""


class TrainLoop:
    """Runs the train step of a run to its last optimizer step. One object per rank."""

    def __init__(self, config: Config, backend: Backend, services: TrainServices) -> None:
        self._config, self._backend, self._services = config, backend, services
        self._objective = Objective.from_config(config)
        self._place = backend.place
        self._saved_at = -1

    def run(self) -> bool:
        """Train until `run.train_steps`. Collective over the role's ranks.

        Returns:
            True: the run is complete. False: asked to stop; a checkpoint was saved.
        """
        step = self._resume()
        total = self._config.run.train_steps
        if self._place.global_rank == 0:
            self._services.queue.begin_train(step, self._services.keeper.ledger)
        # Nobody takes a chunk, or serves weights, before the queue knows where training restarts.
        self._meet()
        self._publish(step)
        while step < total:
            if not self._train_step(step):
                self._save(step, with_hf=False)
                return False
            step += 1
        self._save(step, with_hf=True)
        return True

    def _resume(self) -> int:
        keeper = self._services.keeper
        step = keeper.resume()
        if step > 0:
            self._saved_at = step
        elif keeper.damaged:  # for state.json: nobody should find out by the curve
            steps = ", ".join(str(s) for s in keeper.damaged)
            self._report(warning=f"restarted from step 0: all checkpoints are damaged ({steps})")
        return step

    def _train_step(self, step: int) -> bool:
        """Do one optimizer step; False: asked to stop, the weights are those of `step`."""
        started = time.monotonic()
        stats = StepStats(step)
        for index in range(self._config.train.chunks_per_step):
            rows = self._take_rows(step, index, stats)
            batches = self._micro_batches(rows)
            if batches is None:
                return False
            stats.add_sums(self._backend.forward_backward(batches, self._objective))
            if self._place.is_leader:
                stats.add_rows(rows, self._config.algorithm.loss_aggregation)
            self._report(step=step, chunk=index + 1)
        stats.set_totals(self._backend.sum_over_ranks(stats.sums()))
        stats.set_maxima(self._backend.max_over_ranks(stats.maxima()))
        lr = learning_rate(self._config.train, step, self._config.run.train_steps)
        grad_norm = self._backend.optimizer_step(max(1.0, stats.count), lr)
        _check_finite(step, stats.loss, grad_norm)
        self._complete(step, stats, {"train/grad_norm": grad_norm, "train/lr": lr}, started)
        return True

    def _take_rows(self, step: int, index: int, stats: StepStats) -> list[Row]:
        started = time.monotonic()
        rows = self._wait_for_chunk(step, index) if self._place.is_leader else None
        shared = self._backend.share_rows(rows)
        stats.wait_s += time.monotonic() - started
        if index == 0 and shared and self._place.global_rank == 0:
            self._log_first_chunk(step, len(shared))
        return shared

    def _wait_for_chunk(self, step: int, index: int) -> list[Row]:
        """Wait for this replica's rows; [] when asked to stop meanwhile."""
        deadline = time.monotonic() + self._config.recovery.progress_timeout_s
        place, queue = self._place, self._services.queue
        while not self._services.wants_stop():
            wait_s = min(_LOOK_S, deadline - time.monotonic())
            try:
                return queue.take_chunk(step, index, place.dp_rank, place.dp_size, wait_s).rows
            except DeadlineError:
                if time.monotonic() >= deadline:
                    raise
        return []

    def _log_first_chunk(self, step: int, num_rows: int) -> None:
        status = self._services.queue.status()
        needed = self._config.rollout.groups_per_step
        complete = status.assigned + status.ready
        _log.info(
            "first chunk taken, training starts %s",
            kv(
                step=step,
                rows=num_rows,
                groups_of_step=needed,
                groups_complete=complete,
                groups_of_step_missing=max(0, needed - complete),
                groups_generating=status.generating,
            ),
        )

    def _micro_batches(self, rows: Sequence[Row]) -> list[MicroBatch] | None:
        """Cut rows; all replicas get equally many. None on all ranks: one was asked to stop."""
        rewards = np.array([float(row.fields["reward"]) for row in rows])
        advantages = group_advantages(
            rewards, [row.uid for row in rows], self._config.algorithm.normalise_by_std
        )
        cut = cut_rows([row.num_tokens for row in rows], self._config.train.micro_batch_tokens)
        wants_stop = self._services.wants_stop() or not rows
        most, should_stop = self._backend.max_over_ranks(
            np.array([float(len(cut)), float(wants_stop)])
        )
        if should_stop:
            return None
        cut += [[] for _ in range(int(most) - len(cut))]
        return [
            build_micro_batch(
                rows,
                indices,
                {"advantages": advantages},
                self._objective.fields,
                self._backend.align,
                self._backend.device,
            )
            for indices in cut
        ]

    def _complete(
        self, step: int, stats: StepStats, more: dict[str, float], started: float
    ) -> None:
        if self._place.global_rank == 0:
            completed = self._services.queue.complete_step(step)
            if self._services.record is not None:
                self._services.record.append(step, completed.uids)
        self._publish(step + 1)
        if self._place.global_rank == 0:
            # Before the checkpoint: a rank that dies in between redoes the step or has its record.
            metrics = stats.metrics(time.monotonic() - started) | more
            self._services.reporter.log(step, metrics)
            self._report(step=step + 1, chunk=0)
            shown = {name: metrics[f"train/{name}"] for name in _SHOWN}
            _log.info("train step done %s", kv(step=step, **shown))
        interval = self._config.train.save_interval
        is_last = step + 1 == self._config.run.train_steps
        if interval and (step + 1) % interval == 0 and not is_last:
            self._save(step + 1, with_hf=False)

    def _publish(self, version: int) -> None:
        self._services.publisher.publish(
            version,
            self._backend.pieces(),
            self._backend.specs(),
            self._place.num_weight_shards,
            self._place.weight_shard,
            self._meet,
        )

    def _meet(self) -> None:
        self._backend.sum_over_ranks(np.zeros(1))

    def _save(self, step: int, with_hf: bool) -> None:
        keeper = self._services.keeper
        if self._saved_at != step or (with_hf and not keeper.has_hf(step)):
            ledger = self._cut_ledger(step) if self._place.global_rank == 0 else None
            keeper.save(step, with_hf, ledger)
            self._saved_at = step

    def _cut_ledger(self, step: int) -> bytes | None:
        """Return the ledger of the version to be saved; None when the queue does not answer.

        At the end of a job the dcs step gets its signal when this one does, and may be gone first:
        the weights are saved all the same. The queue's journal then tells what was trained.
        """
        try:
            return self._services.queue.cut_ledger(step, _CUT_S)
        except RelaxError as err:
            _log.warning("checkpoint without a ledger %s", kv(step=step, reason=err))
            return None

    def _report(self, **values: int | float | str) -> None:
        if self._place.global_rank == 0:
            self._services.reporter.progress(**values)


def learning_rate(train: TrainConfig, step: int, total_steps: int) -> float:
    """Learning rate of a step: linear warm-up, then constant or linear decay to `min_lr`.

    A function of the step alone, so that a resumed run goes on with the same rates.
    """
    if step < train.lr_warmup_steps:
        return train.lr * (step + 1) / train.lr_warmup_steps
    if train.min_lr < 0:
        return train.lr
    length = total_steps - 1 - train.lr_warmup_steps
    share = 1.0 if length <= 0 else (step - train.lr_warmup_steps) / length
    return train.lr + (train.min_lr - train.lr) * min(1.0, share)


def _check_finite(step: int, loss: float, grad_norm: float) -> None:
    if not (np.isfinite(loss) and np.isfinite(grad_norm)):
        raise RelaxError(
            f"train step {step}: loss {loss}, gradient norm {grad_norm} are not finite; the "
            "weights are spoiled, training restarts from the last checkpoint. If it comes back at "
            "the same step: lower train.lr, or look at the samples of this step"
        )
