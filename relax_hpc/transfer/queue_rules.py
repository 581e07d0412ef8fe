"""Decisions of the queue: who gets which prompt, row or group. Returns events, changes nothing.

Every method looks at the state and returns what should happen as events (possibly none); the
controller applies and journals them. Refusals are TransferErrors, "not yet" is None.
"""

import dataclasses
import itertools

from relax_hpc.config import Config
from relax_hpc.control.rpc import Caller
from relax_hpc.errors import TransferError
from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer import wire
from relax_hpc.transfer.queue_state import QueueState, RowKey
from relax_hpc.transfer.samplers import balance


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueueRulesConfig:
    """What the queue needs to know of a run."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    chunks_per_step: int
    train_steps: int
    eval_interval: int = 0
    """0 = never."""
    task_fields: dict[str, str] = dataclasses.field(default_factory=dict)
    """Field that each forward-only task adds before a group can be trained."""
    seed: int = 0
    is_shuffled: bool = True

    @classmethod
    def from_config(cls, config: Config) -> "QueueRulesConfig":
        """Take the queue's part out of the run's configuration."""
        tasks = {}
        if config.resources.ref is not None:
            tasks["ref"] = "ref_logprobs"
        if config.resources.logprob is not None:
            tasks["logprob"] = "train_logprobs"
        return cls(
            groups_per_step=config.rollout.groups_per_step,
            group_size=config.rollout.group_size,
            max_staleness=config.rollout.max_staleness,
            chunks_per_step=config.train.chunks_per_step,
            train_steps=config.run.train_steps,
            eval_interval=config.rollout.eval_interval if config.data.eval else 0,
            task_fields=tasks,
            seed=config.run.seed,
            is_shuffled=config.data.shuffle,
        )

    @property
    def groups_per_chunk(self) -> int:
        """Groups in each chunk of a step."""
        return self.groups_per_step // self.chunks_per_step

    def new_state(self, data: q.QueueData) -> QueueState:
        """Build the state machine for a snapshot (or an empty QueueData)."""
        return QueueState(
            data,
            groups_per_step=self.groups_per_step,
            task_fields=self.task_fields,
            seed=self.seed,
            is_shuffled=self.is_shuffled,
        )


def client_of(caller: Caller) -> str:
    """Key of a client: leases, grants and claims belong to it."""
    return f"{caller.role}/{caller.index}/{caller.rank}"


class QueueRules:
    """Decisions over one state."""

    def __init__(self, config: QueueRulesConfig, state: QueueState) -> None:
        self.config = config
        self.state = state

    @property
    def is_done(self) -> bool:
        """All train steps are complete, and no train step is known to be lost since.

        A train step that died between its last update and its last checkpoint comes back with an
        older version: engines that wait for it must not end.
        """
        data = self.state.data
        return data.version >= self.config.train_steps and data.train_incarnation > 0

    # -- rollout ------------------------------------------------------------------------------

    def open_dataset(self, request: wire.OpenDataset) -> list[q.Event]:
        """Accept the first data set, and the same one again."""
        known = self.state.data.ledger
        if request.num_prompts <= 0:
            raise TransferError(f"data set has {request.num_prompts} prompts: must be > 0")
        if known.num_prompts == 0:
            return [q.DatasetOpened(request.num_prompts, request.fingerprint)]
        if (known.num_prompts, known.fingerprint) != (request.num_prompts, request.fingerprint):
            raise TransferError(
                f"this run began with a data set of {known.num_prompts} prompts, fingerprint "
                f"{known.fingerprint}; now it has {request.num_prompts} prompts, fingerprint "
                f"{request.fingerprint}: restore data.train (and the tokenizer), or start a new "
                "run with run.init_from"
            )
        return []

    def admit(self, caller: Caller, request: wire.Admit) -> q.Admitted | None:
        """Grant slots, as many as stay feasible; None: none now."""
        data, config = self.state.data, self.config
        if data.ledger.num_prompts == 0:
            raise TransferError("admit before open_dataset: the data set is unknown")
        # An engine ahead of the train step serves weights of a branch that was rolled back.
        if self.is_done or request.engine_version > data.version:
            return None
        deadline = min(request.engine_version + config.max_staleness, config.train_steps - 1)
        room = self.state.window.room(data.version, data.num_assigned, deadline)
        num_groups = min(room, request.max_groups)
        if num_groups <= 0:
            return None
        tickets, num_again = self.state.ledger.peek(num_groups)
        return q.Admitted(
            client=client_of(caller),
            key=request.key,
            role=caller.role,
            index=caller.index,
            incarnation=caller.incarnation,
            engine_version=request.engine_version,
            deadline=deadline,
            tickets=tickets,
            num_again=num_again,
        )

    def put_group(self, request: wire.PutGroup) -> tuple[wire.Stored, list[q.Event]]:
        """Accept a group once; refuse what nobody waits for."""
        group = self.state.data.groups.get(request.uid)
        if group is None:
            return wire.Stored(is_kept=False, is_wanted=False), []
        if group.phase is not q.Phase.GENERATING:
            return wire.Stored(is_kept=request.segment in group.segments, is_wanted=True), []
        if len(request.rows) != self.config.group_size:
            raise TransferError(
                f"group {request.uid} has {len(request.rows)} samples, "
                f"rollout.group_size is {self.config.group_size}"
            )
        oldest = request.oldest_version
        if 0 <= oldest < group.deadline - self.config.max_staleness:
            return wire.Stored(is_kept=False, is_wanted=False), [
                q.DispatchedAgain([request.uid], "older_than_admitted")
            ]
        event = q.GroupPut(request.uid, request.segment, request.rows, oldest)
        return wire.Stored(is_kept=True, is_wanted=True), [event]

    def drop_group(self, request: wire.EndGroup) -> list[q.Event]:
        """The prompt is used up."""
        if self._can_end(request.uid):
            return [q.GroupDropped(request.uid, request.reason)]
        return []

    def return_group(self, request: wire.EndGroup) -> list[q.Event]:
        """The prompt is dispatched again."""
        if self._can_end(request.uid):
            return [q.DispatchedAgain([request.uid], request.reason)]
        return []

    def reject_group(self, request: wire.EndGroup) -> list[q.Event]:
        """A reader found the payload lost or corrupt, in any phase."""
        if request.uid in self.state.data.groups:
            return [q.DispatchedAgain([request.uid], "unreadable")]
        return []

    def _can_end(self, uid: str) -> bool:
        group = self.state.data.groups.get(uid)
        if group is not None and group.phase is not q.Phase.GENERATING:
            raise TransferError(f"group {uid} was put already: it cannot be dropped or returned")
        return group is not None

    # -- ref, logprob -------------------------------------------------------------------------

    def take_rows(self, caller: Caller, request: wire.TakeRows) -> q.RowsTaken | None:
        """Lease the oldest rows that lack the task's field."""
        pending = self.state.pending.get(request.task)
        if pending is None:
            known = ", ".join(self.state.pending) if self.state.pending else "none"
            raise TransferError(f"task {request.task!r} is not part of this run (tasks: {known})")
        rows = list(itertools.islice(pending, max(request.max_rows, 0)))
        return q.RowsTaken(request.task, client_of(caller), request.key, rows) if rows else None

    def put_fields(self, request: wire.PutFields) -> tuple[wire.Stored, list[q.Event]]:
        """Accept a field for those rows that still lack it."""
        if request.name not in self.config.task_fields.values():
            raise TransferError(f"field {request.name!r}: no task of this run adds it")
        if self.state.has_segment(request.segment.name):
            return wire.Stored(is_kept=True, is_wanted=True), []
        groups = self.state.data.groups
        known = [(uid, sample) for uid, sample in request.rows if uid in groups]
        rows = [(u, s) for u, s in known if s in groups[u].missing.get(request.name, ())]
        if not rows:
            return wire.Stored(is_kept=False, is_wanted=bool(known)), []
        event = q.FieldsPut(request.name, rows, request.segment)
        return wire.Stored(is_kept=True, is_wanted=True), [event]

    def rows_reply(self, rows: list[RowKey]) -> wire.TakenRows:
        """Describe leased rows; those whose group is gone are left out."""
        by_group: dict[str, list[int]] = {}
        for uid, sample in rows:
            if uid in self.state.data.groups:
                by_group.setdefault(uid, []).append(sample)
        return wire.TakenRows([self._rows_of(uid, set(s)) for uid, s in by_group.items()])

    def _rows_of(self, uid: str, samples: set[int] | None) -> wire.GroupRows:
        group = self.state.data.groups[uid]
        rows = [r for r in group.rows if samples is None or r.sample_index in samples]
        return wire.GroupRows(uid, self.config.group_size, rows, list(group.segments))

    # -- train --------------------------------------------------------------------------------

    def begin_train(self, caller: Caller, request: wire.BeginTrain) -> list[q.Event]:
        """(Re)start the train step; the same message twice counts once."""
        if not 0 <= request.step <= self.config.train_steps:
            raise TransferError(
                f"begin_train({request.step}): must be in 0 .. {self.config.train_steps}"
            )
        if request.key == self.state.data.train_key:
            return []
        return [q.TrainBegun(request.key, caller.incarnation, request.step)]

    def decide_chunk(self, caller: Caller, request: wire.TakeChunk) -> list[q.Event]:
        """Fill holes and decide the next chunk if it is asked for and can be filled."""
        self._check_chunk(request)
        data = self.state.data
        is_current = caller.incarnation == data.train_incarnation and request.step == data.version
        if not is_current:
            return []
        for number, chunk in enumerate(data.chunks):
            for dp_rank in chunk.holes:
                picked = self._pick(1)
                return [q.HoleFilled(number, dp_rank, picked[0])] if picked else []
        if request.index != len(data.chunks):
            return []
        picked = self._pick(self.config.groups_per_chunk)
        if not picked:
            return []
        parts = balance([data.groups[uid].num_tokens for uid in picked], request.dp_size)
        return [q.ChunkDecided([[picked[i] for i in part] for part in parts])]

    def chunk_reply(self, caller: Caller, request: wire.TakeChunk) -> wire.TakenChunk | None:
        """The share of a decided chunk; None: not decided, or a group of it is being replaced."""
        data = self.state.data
        is_current = caller.incarnation == data.train_incarnation and request.step == data.version
        if not is_current or request.index >= len(data.chunks):
            return None
        chunk = data.chunks[request.index]
        if request.dp_rank in chunk.holes:
            return None
        return wire.TakenChunk([self._rows_of(uid, None) for uid in chunk.shares[request.dp_rank]])

    def complete_step(self, caller: Caller, request: wire.CompleteStep) -> list[q.Event]:
        """Acknowledge the current step; the step before again is harmless."""
        data, step = self.state.data, request.step
        if caller.incarnation != data.train_incarnation:
            raise TransferError(f"complete_step({step}) before begin_train of this incarnation")
        if data.last_summary is not None and data.last_summary.step == step:
            return []
        num_chunks, holes = len(data.chunks), sum(len(c.holes) for c in data.chunks)
        if step != data.version or num_chunks != self.config.chunks_per_step or holes:
            raise TransferError(
                f"complete_step({step}): the queue is at step {data.version} with {num_chunks} of "
                f"{self.config.chunks_per_step} chunks taken and {holes} groups missing"
            )
        return [q.StepCompleted(step, self._summary(step))]

    def _pick(self, num_groups: int) -> list[str]:
        data = self.state.data
        return self.state.window.pick(num_groups, data.version, data.num_assigned)

    def _check_chunk(self, request: wire.TakeChunk) -> None:
        data, what = self.state.data, f"chunk {request.index} of step {request.step}"
        if request.step < data.version:
            raise TransferError(
                f"{what}: that step is complete, the queue is at step {data.version}; call "
                "begin_train after loading a checkpoint"
            )
        if not 0 <= request.index < self.config.chunks_per_step:
            raise TransferError(f"{what}: train.chunks_per_step is {self.config.chunks_per_step}")
        if not 0 <= request.dp_rank < request.dp_size <= self.config.groups_per_chunk:
            raise TransferError(
                f"{what}: dp rank {request.dp_rank} of {request.dp_size}, but a chunk has "
                f"{self.config.groups_per_chunk} groups"
            )
        if request.step == data.version and data.chunks:
            dp_size = len(data.chunks[0].shares)
            if request.dp_size != dp_size or request.index > len(data.chunks):
                raise TransferError(
                    f"{what} for dp size {request.dp_size}: {len(data.chunks)} chunks are decided "
                    f"for dp size {dp_size}; take chunks in order, all with one dp size"
                )

    def _summary(self, step: int) -> wire.StepSummary:
        data = self.state.data
        uids = [uid for chunk in data.chunks for share in chunk.shares for uid in share]
        groups = [data.groups[uid] for uid in uids]
        ages = [
            step - (g.oldest_version if g.oldest_version >= 0 else g.engine_version) for g in groups
        ]
        return wire.StepSummary(
            step=step,
            num_groups=len(groups),
            num_samples=sum(len(group.rows) for group in groups),
            num_tokens=sum(group.num_tokens for group in groups),
            staleness_mean=sum(ages) / len(ages),
            staleness_max=max(ages),
        )

    # -- evaluation and state -----------------------------------------------------------------

    def evals_pending(self) -> list[int]:
        """Versions due and not finished: every eval_interval, and after the last step."""
        if not self.config.eval_interval:
            return []
        data, last = self.state.data, self.config.train_steps
        due = set(range(0, min(data.version, last) + 1, self.config.eval_interval))
        if data.version >= last:
            due.add(last)
        return sorted(due - set(data.evals_finished))

    def claim_eval(self, caller: Caller, version: int) -> tuple[bool, list[q.Event]]:
        """The first engine wins; asked again it gets the same answer."""
        holder = self.state.data.eval_claims.get(version)
        if holder is not None or version not in self.evals_pending():
            return holder == client_of(caller), []
        return True, [q.EvalClaimed(version, client_of(caller))]

    def status(self) -> wire.QueueStatus:
        """Count everything."""
        data, ledger = self.state.data, self.state.ledger
        phases = [group.phase for group in data.groups.values()]
        last = min(data.version + self.config.max_staleness, self.config.train_steps - 1)
        return wire.QueueStatus(
            version=data.version,
            train_steps=self.config.train_steps,
            done=self.is_done,
            capacity=max(0, last - data.version + 1) * self.config.groups_per_step,
            in_flight=len(phases),
            generating=phases.count(q.Phase.GENERATING),
            waiting=phases.count(q.Phase.WAITING),
            ready=phases.count(q.Phase.READY),
            assigned=phases.count(q.Phase.ASSIGNED),
            trained_groups=ledger.trained_groups,
            dropped=dict(data.ledger.dropped),
            redispatched=dict(data.ledger.redispatched),
            to_dispatch=len(data.ledger.again),
            epoch=ledger.epoch,
            evals_pending=self.evals_pending(),
            evals_finished=sorted(data.evals_finished),
        )
